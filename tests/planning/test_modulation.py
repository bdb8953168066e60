"""Modulation layers away from the GPU in the plan: what that saves and costs, where it is taken or refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from lora_trainer.common.errors import RequestError, exit_code
from lora_trainer.config.config import AdapterSettings, flatten
from lora_trainer.config.layers import resolve
from lora_trainer.families import MODULES, family, known_base
from lora_trainer.hardware.machine import GIB
from lora_trainer.network.modulation import ModulatedNetwork
from lora_trainer.network.quantize import quantize
from lora_trainer.planning.host_memory import predict_host
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import predict
from lora_trainer.planning.plan import PlanInput, plan
from lora_trainer.planning.step_time import step_work
from lora_trainer.planning.weight_bytes import VECTORS_SHARE, FrozenBase
from tests.fakes.family_bases import CPU, denoiser_of, facts_of
from tests.planning.test_allocation import FLUX, QWEN, SDXL, machine, middle_s, planned, reason
from tests.planning.test_memory import LOAD

SD35 = "stabilityai/stable-diffusion-3.5-large"
NAMES = [name for name in MODULES if family(name).modulation]
KEY = "memory__modulation_cache"


def load(**changes: Any) -> Load:
    fixed: dict[str, Any] = {
        "adapter": AdapterSettings(rank=16, targets="transformer"),
        "bucket_px": (1024, 1024),
        "checkpointing": "full",
        "text_precision": "bf16",
    }
    return replace(LOAD, **{**fixed, **changes})


def costs_of(source: str) -> tuple[Any, RememberedCosts]:
    facts = known_base(source)
    assert facts is not None
    return facts, RememberedCosts(family=family(facts.family))


@pytest.mark.parametrize(
    ("source", "freed_gib", "vectors_mb"), [(FLUX, 6.0, 2.1), (QWEN, 12.7, 4.4), (SD35, 5.0, 2.2)]
)
def test_a_third_of_the_weights_is_away_for_vectors_of_a_few_megabytes_a_sample(
    source: str, freed_gib: float, vectors_mb: float
) -> None:
    facts, costs = costs_of(source)
    base = costs.frozen_base(facts, load(modulation_cache=True))
    assert base.away_bytes / GIB == pytest.approx(freed_gib, rel=0.02)
    assert base.vector_bytes / 1e6 == pytest.approx(vectors_mb, rel=0.03)
    assert base.samples_ahead * base.vector_bytes <= base.away_bytes / VECTORS_SHARE
    whole = costs.frozen_base(facts, load())
    assert whole.bytes == base.bytes and whole.samples_ahead == 0
    assert sum(whole.block_bytes) - sum(base.block_bytes) == base.away_bytes


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["fp32", "int8", "nf4"])
def test_predicted_bytes_are_stored_bytes(name: str, kind: Any) -> None:
    """But for biases, which other weights are counted with, and for where tensors begin."""
    chosen, facts = family(name), facts_of(name)
    network, layers = denoiser_of(name), chosen.modulation_layers(facts)
    base = FrozenBase(
        parameters=facts.parts["denoiser"].parameters,
        shapes=chosen.linear_shapes(facts),
        quantization_skip=chosen.quantization_skip,
        block_pattern=chosen.block_pattern,
        dtype="fp32",
        kept_as=kind,
        away=layers,
    )
    if kind != "fp32":
        quantize(network, kind, device=CPU, skip=chosen.quantization_skip)
    biases = sum(network.get_submodule(layer).bias.nbytes for layer in layers)  # type: ignore[union-attr]
    held = ModulatedNetwork(network, layers, device=CPU)
    assert 0 <= held.host_bytes - biases - base.away_bytes <= 6 * 256 * len(layers)
    (rows,) = held.outputs([torch.zeros(1, base.shapes[layers[0]][0])])
    assert rows.nbytes == base.vector_bytes


def test_the_card_holds_vectors_and_buffers_instead_and_the_machine_the_weights() -> None:
    facts, costs = costs_of(FLUX)
    plain, cached = load(), load(modulation_cache=True)
    base = costs.frozen_base(facts, cached)
    with_it, without = (
        {
            item.name: item.bytes
            for item in predict(each, facts=facts, costs=costs).by_phase["training"]
        }
        for each in (cached, plain)
    )
    assert without["base weights"] - with_it["base weights"] == base.away_bytes
    assert with_it["modulation vectors"] == base.samples_ahead * base.vector_bytes
    assert with_it["modulation buffers"] == 2 * 2 * 3072 * 6 * 3072
    peaks = [predict(each, facts=facts, costs=costs).peak_bytes for each in (plain, cached)]
    assert 0.85 * base.away_bytes < peaks[0] - peaks[1] < base.away_bytes
    hosts = [
        predict_host(
            each, facts=facts, costs=costs, limit_bytes=99 * GIB, pinnable_bytes=None
        ).bytes
        for each in (plain, cached)
    ]
    assert hosts[1] - hosts[0] == base.away_bytes


def test_what_comes_between_steps_is_waited_for_and_not_dequantised_in_them() -> None:
    facts, costs = costs_of(FLUX)
    work = {
        cached: step_work(
            load(base_precision="int8", modulation_cache=cached),
            facts=facts,
            costs=costs,
            batch_size=4,
            pinnable_bytes=None,
        )
        for cached in (False, True)
    }
    base = costs.frozen_base(facts, load(base_precision="int8", modulation_cache=True))
    assert work[False].waited_bytes == 0
    assert work[True].waited_bytes == 4 * base.away_bytes / base.samples_ahead
    assert work[True].dequantised_bytes < 0.75 * work[False].dequantised_bytes


@pytest.mark.parametrize(("source", "card_gib"), [(FLUX, 48), (QWEN, 48), (SD35, 24)])
def test_it_is_taken_where_less_has_to_be_recomputed_for_it(source: str, card_gib: float) -> None:
    same: dict[str, Any] = {"sampling__every_steps": 0, "priority": "speed"}
    made = planned(source, machine(card_gib, ram_gib=56), **same)
    without = planned(source, machine(card_gib, ram_gib=56), **same, **{KEY: False})
    assert made.config.memory.modulation_cache is True and made.modulation_samples > 20
    assert without.config.memory.modulation_cache is False and without.modulation_samples == 0
    assert middle_s(made) < middle_s(without)
    assert made.memory.fits and made.host is not None and made.host.fits
    assert "without it, " in reason(made, "modulation_cache")


def test_it_is_not_taken_where_everything_fits() -> None:
    made = planned(FLUX, machine(80, ram_gib=56))
    assert made.config.memory.modulation_cache is False
    assert "all layers fit" in reason(made, "modulation_cache")


@pytest.mark.parametrize(
    ("source", "settings", "why"),
    [
        (FLUX, {"adapter__targets": "all"}, "adapter.targets=all trains"),
        (SD35, {"adapter__targets": "all"}, "adapter.targets=all trains"),
        (QWEN, {"adapter__targets": "all"}, "adapter.targets=all trains"),
        (FLUX, {"base__assistant": "some.safetensors"}, "base.assistant needs"),
        (SDXL, {}, "has no large layers"),
        ("lodestones/Chroma1-HD", {}, "has no large layers"),
    ],
)
def test_what_cannot_be_is_refused_and_not_chosen(
    source: str, settings: dict[str, Any], why: str
) -> None:
    made = planned(source, machine(48, ram_gib=56), **settings)
    assert made.config.memory.modulation_cache is False
    assert why in reason(made, "modulation_cache")
    with pytest.raises(RequestError, match="memory.modulation_cache=true, but ") as caught:
        planned(source, machine(48, ram_gib=56), **settings, **{KEY: True})
    assert why in caught.value.found and exit_code(caught.value) == 2


def test_on_the_processor_it_is_done_where_it_is_asked_for_and_saves_nothing() -> None:
    nothing = replace(machine(0, ram_gib=120), gpus=(), gpu_reason="no GPU")
    made = planned(FLUX, nothing, optimizer__name="adamw")
    asked = planned(FLUX, nothing, optimizer__name="adamw", **{KEY: True})
    assert made.config.memory.modulation_cache is False
    assert "free no memory" in reason(made, "modulation_cache")
    assert asked.config.memory.modulation_cache is True
    assert asked.memory.peak_bytes > made.memory.peak_bytes
    items = {item.name for item in asked.memory.by_phase["training"]}
    assert "modulation weights" in items


def test_a_run_that_began_before_there_was_a_choice_goes_on_without() -> None:
    facts = known_base(FLUX)
    assert facts is not None
    begun = flatten(planned(FLUX, machine(48, ram_gib=56)).config) | {
        KEY.replace("__", "."): "auto"
    }
    made = plan(
        PlanInput(
            decided={"output.format": ("kohya", "known before")},
            resolved=resolve(
                family="flux",
                tier="24+",
                priority="balanced",
                preset="auto",
                config_file=None,
                overrides={},
                run_settings=begun,
            ),
            facts=facts,
            family=family("flux"),
            hardware=machine(48, ram_gib=56),
            images=20,
            samples_per_epoch=20,
            buckets=((1024, 1024),),
            kept_at_once={(1024, 1024): 1},
        )
    )
    assert made.config.memory.modulation_cache is False
    assert reason(made, "modulation_cache") == "the run began without it"

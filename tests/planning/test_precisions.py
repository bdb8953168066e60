"""Precisions of every family on GPUs with and without bf16, and what is said when one is asked for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.errors import MachineError, RequestError, exit_code
from lora_trainer.config.layers import resolve
from lora_trainer.hardware.machine import GIB
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput
from tests.planning.test_plan import MACHINE

IN_FP16 = frozenset({"sd15", "sd2", "sdxl", "sd3"})
"""ComfyUI's supported_inference_dtypes (e3c3552) has bf16 and fp32 alone for Qwen-Image and Z-Image. FLUX.1, FLUX.2 and
Chroma it runs in fp16 with clamped activations; training them in it is NaN (sd-scripts #1571, musubi-tuner #897)."""
TURING = ("NVIDIA GeForce RTX 2080", 8, (7, 5))
PASCAL = ("NVIDIA GeForce GTX 1080 Ti", 11, (6, 1))
AMPERE = ("NVIDIA GeForce RTX 3090", 24, (8, 6))
OLD = pytest.mark.parametrize("card", [TURING, PASCAL], ids=["turing", "pascal"])
EVERY = pytest.mark.parametrize("family", families.MODULES)
Card = tuple[str, int, tuple[int, int]]


def planned(family: str, card: Card, *, memory_gib: int = 56, **overrides: Any) -> Plan:
    name, card_gib, capability = card
    named = families.family(family)
    facts = named.releases.get(next(iter(named.releases)))
    assert facts is not None
    gpu = Gpu(
        index=0,
        name=name,
        total_bytes=card_gib * GIB,
        free_bytes=int((card_gib - 0.5) * GIB),
        compute_capability=capability,
        driver="570",
    )
    tier = "6-8" if card_gib < 10 else "10-12" if card_gib < 16 else "16-24"
    return plan(
        PlanInput(
            decided={"output.format": ("kohya", "known before")},
            resolved=resolve(
                family=family,
                tier=tier,
                priority="balanced",
                preset="auto",
                config_file=None,
                overrides={key.replace("__", "."): value for key, value in overrides.items()},
            ),
            facts=facts,
            family=named,
            hardware=replace(MACHINE, gpus=(gpu,), ram_free_bytes=memory_gib * GIB),
            images=20,
            samples_per_epoch=20,
            buckets=(),
        )
    )


@EVERY
def test_a_card_with_bf16_trains_in_it(family: str) -> None:
    assert planned(family, AMPERE).config.train.precision == "bf16"


@EVERY
@OLD
def test_a_card_without_bf16_trains_in_what_the_base_takes(family: str, card: Card) -> None:
    """R6: fp16 was planned for every family; the transformers' loss is NaN in it."""
    made = planned(family, card)
    reason = made.origins["train.precision"].reason
    assert made.config.train.precision == ("fp16" if family in IN_FP16 else "fp32")
    assert "not known to have bf16" in reason
    assert ("twice the memory" in reason) is (family not in IN_FP16)
    assert made.memory.fits


@EVERY
def test_texts_stay_in_16_bits_where_only_training_needs_32(family: str) -> None:
    made, usual = planned(family, TURING), planned(family, AMPERE)
    key = "text_encoder_precision"
    assert getattr(made.config.memory, key) == getattr(usual.config.memory, key)


@EVERY
@pytest.mark.parametrize("card", [TURING, AMPERE], ids=["turing", "ampere"])
def test_fp16_is_refused_where_it_gives_no_numbers(family: str, card: Card) -> None:
    if family in IN_FP16:
        assert planned(family, card, train__precision="fp16").config.train.precision == "fp16"
        return
    best = "fp32" if card == TURING else "bf16"
    with pytest.raises(RequestError, match=f"{family} bases overflow to NaN in fp16") as caught:
        planned(family, card, train__precision="fp16")
    assert caught.value.fix == f"use --set train.precision={best}"
    assert exit_code(caught.value) == 2


@EVERY
def test_bf16_on_a_card_without_it_names_what_there_is(family: str) -> None:
    best = "fp16" if family in IN_FP16 else "fp32"
    with pytest.raises(
        RequestError, match=r"8\.0 or higher, but .*compute capability 7\.5"
    ) as caught:
        planned(family, TURING, train__precision="bf16")
    assert caught.value.fix == f"use --set train.precision={best}"


@pytest.mark.parametrize(
    ("family", "card", "advised"),
    [("zimage", AMPERE, "bf16"), ("zimage", TURING, None), ("sd3", TURING, "fp16")],
)
def test_less_memory_is_advised_in_a_precision_that_gives_numbers(
    family: str, card: Card, advised: str | None
) -> None:
    """The nearest setting that fits was train.precision=fp16 for every base on every GPU."""
    card_gib = {"zimage": 24, "sd3": 10}[family]
    with pytest.raises(MachineError, match="needs at least") as caught:
        planned(
            family,
            (card[0], card_gib, card[2]),
            train__precision="fp32",
            memory__base_precision="fp32",
            base__assistant="assistant.safetensors",  # with which nothing is streamed
        )
    if advised is None:
        assert "train.precision" not in caught.value.fix
    else:
        assert caught.value.fix == f"use --set train.precision={advised}, which fits"

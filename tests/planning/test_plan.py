"""The planner: nothing stays auto, each value follows from base, machine, data and settings, with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer import families
from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import build_config, flatten
from lora_trainer.config.constraints import OPTIMIZER_PACKAGES
from lora_trainer.families.base import BaseFacts, PartFacts
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.optimizer_facts import optimizer_remarks
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.run_time import run_length
from tests.fakes.plans import (
    LIBRARIES,
    MACHINE,
    WITHOUT_CARD,
    costs_of,
    load_of,
    machine,
    planned,
    reason,
    request,
)
from tests.fakes.stable_diffusion import sd15_facts

LEFT_TO_RUN = {
    *("base.model", "base.companion", "data.caption_tokens", "data.cache_dir", "output.name"),
}


@pytest.mark.parametrize("hardware", [MACHINE, WITHOUT_CARD], ids=["cuda", "cpu"])
def test_no_auto_is_left_and_every_decision_has_a_reason(hardware: Hardware) -> None:
    asked = request(None, hardware)
    made = plan(asked)
    left = {key for key, value in flatten(made.config).items() if value == "auto"}
    assert left == LEFT_TO_RUN
    before = flatten(asked.resolved.config)
    decided = {key for key, value in before.items() if value == "auto"} - LEFT_TO_RUN
    for key in decided:
        assert made.origins[key].layer == "planner" and made.origins[key].reason
    for key in set(before) - decided:
        assert made.origins[key] == asked.resolved.origins[key]


def test_values_that_follow_from_the_base_and_the_machine() -> None:
    config = planned().config
    assert (config.data.resolution, config.hardware.threads) == (512, 6)
    assert config.adapter.alpha == config.adapter.rank
    assert (config.hardware.device, config.train.precision) == ("cuda", "bf16")
    assert planned(overrides={"adapter.kind": "oft"}).config.adapter.alpha == "auto"
    typed = planned(overrides={"hardware.device": "cpu"})
    assert typed.memory.limit_bytes == MACHINE.ram_usable_bytes < MACHINE.ram_free_bytes
    for made in (typed, planned(None, WITHOUT_CARD)):
        assert (made.config.hardware.device, made.config.train.precision) == ("cpu", "fp32")
    assert reason(made, "hardware.device") == "no NVIDIA driver"
    with pytest.raises(MachineError, match="no NVIDIA driver") as caught:
        planned(None, WITHOUT_CARD, overrides={"hardware.device": "cuda"})
    assert caught.value.exit_code == 4


def test_a_resolution_the_base_cannot_have_names_its_neighbours() -> None:
    with pytest.raises(RequestError, match=r"1000 is not a multiple of 64.*960 or 1024"):
        planned(overrides={"data.resolution": 1000})


def test_a_missing_package_replaces_a_preset_and_refuses_the_user() -> None:
    without = replace(MACHINE, packages={"torch": "2.13.0"})
    preset = planned(None, without, preset_tier="6-8")
    assert preset.config.optimizer.name == "adamw"
    assert "pip install bitsandbytes" in reason(preset, "optimizer.name")
    assert planned(preset_tier="6-8").config.optimizer.name == "adamw8bit"
    for name, package in OPTIMIZER_PACKAGES.items():
        packages = {key: value for key, value in LIBRARIES.items() if key != package}
        with pytest.raises(MachineError, match=f"pip install {package}"):
            planned(None, replace(MACHINE, packages=packages), overrides={"optimizer.name": name})


# ---- precisions

IN_FP16 = frozenset({"sd15", "sd2", "sdxl", "sd3"})
"""ComfyUI's supported_inference_dtypes (e3c3552) has bf16 and fp32 alone for Qwen-Image and Z-Image. FLUX.1, FLUX.2 and
Chroma it runs in fp16 with clamped activations; training them in it is NaN (sd-scripts #1571, musubi-tuner #897)."""
TURING = machine(8, ram_gib=52, name="NVIDIA GeForce RTX 2080", compute_capability=(7, 5))
PASCAL = machine(11, ram_gib=52, name="NVIDIA GeForce GTX 1080 Ti", compute_capability=(6, 1))
AMPERE = machine(24, ram_gib=52, name="NVIDIA GeForce RTX 3090")
PRECISION = "train.precision"


@pytest.mark.parametrize("name", ["sd15", "sd3", "flux", "qwen"])
def test_each_family_trains_in_what_its_base_and_the_gpu_have(name: str) -> None:
    """R6: fp16 was planned for every family; the transformers' loss is NaN in it."""
    base = next(iter(families.family(name).releases))
    usual, best = planned(base, AMPERE).config, "fp16" if name in IN_FP16 else "fp32"
    assert usual.train.precision == "bf16"
    for old in (TURING, PASCAL):
        made = planned(base, old)
        assert made.config.train.precision == best
        assert made.config.memory.text_encoder_precision == usual.memory.text_encoder_precision
        assert "not known to have bf16" in reason(made, PRECISION)
        assert ("twice the memory" in reason(made, PRECISION)) is (name not in IN_FP16)
        assert made.memory.fits
    with pytest.raises(RequestError, match=r"8\.0 or higher, but .* capability 7\.5") as caught:
        planned(base, TURING, overrides={PRECISION: "bf16"})
    assert caught.value.fix == f"use --set {PRECISION}={best}"
    for hardware, instead in ((TURING, best), (AMPERE, "bf16")):
        if name in IN_FP16:
            made = planned(base, hardware, overrides={PRECISION: "fp16"})
            assert made.config.train.precision == "fp16"
            continue
        with pytest.raises(RequestError, match=f"{name} bases overflow to NaN in fp16") as caught:
            planned(base, hardware, overrides={PRECISION: "fp16"})
        assert caught.value.fix == f"use --set {PRECISION}={instead}"
        assert caught.value.exit_code == 2


def test_less_memory_is_advised_in_a_precision_that_gives_numbers() -> None:
    """The nearest setting that fits was train.precision=fp16 for every base on every GPU."""
    asked = {PRECISION: "fp32", "memory.base_precision": "fp32"}
    asked["base.assistant"] = "assistant.safetensors"  # with which nothing is streamed
    for name, capability, gib, advised in (
        ("zimage", (8, 6), 24, f"{PRECISION}=bf16, which fits"),
        ("zimage", (7, 5), 24, ""),
        ("sd3", (7, 5), 10, f"{PRECISION}=fp16, which fits"),
    ):
        release = next(iter(families.family(name).releases))
        hardware = machine(gib, ram_gib=52, compute_capability=capability)
        with pytest.raises(MachineError, match="needs at least") as caught:
            planned(release, hardware, overrides=asked)
        assert advised in caught.value.fix and (PRECISION in caught.value.fix) == bool(advised)


def test_large_text_encoders_run_in_16_bits() -> None:
    key = "memory.text_encoder_precision"
    for parameters, overrides, precision, why in (
        (2_000_000_000, {}, "fp32", "2,000 million parameters"),
        (2_000_000_001, {}, "bf16", "2.0 billion parameters"),
        (2_000_000_001, {PRECISION: "fp32"}, "fp32", "2,000 million parameters"),
        (2_000_000_001, {key: "fp32"}, "fp32", ""),
    ):
        parts = {**sd15_facts().parts, "text_encoder": PartFacts(parameters=parameters)}
        facts = replace(sd15_facts(), parts=parts)
        made = planned(facts, machine(24), overrides=overrides)
        assert made.config.memory.text_encoder_precision == made.load.text_precision == precision
        assert reason(made, key) == why


# ---- what depends on the kind of base

FLOW = replace(sd15_facts(), prediction="flow")
V_PREDICTION = replace(sd15_facts(), prediction="v_prediction", zero_terminal_snr=True)
GAMMA, WEIGHTING, ZERO = (
    f"objective.{name}" for name in ("min_snr_gamma", "weighting", "zero_terminal_snr")
)


@pytest.mark.parametrize(
    ("facts", "asked", "weighting", "gamma"),
    [
        (sd15_facts(), {}, "min_snr", 5.0),
        (sd15_facts(), {WEIGHTING: "p2"}, "p2", 5.0),
        (FLOW, {}, "none", None),
        (FLOW, {WEIGHTING: "cosmap"}, "cosmap", None),
    ],
)
def test_a_weighting_is_chosen_for_the_kind_of_base(
    facts: BaseFacts, asked: dict[str, Any], weighting: str, gamma: float | None
) -> None:
    """The presets ask for signal-to-noise weights; a base trained by flow matching has none."""
    made = planned(facts, overrides=asked)
    objective = made.config.objective
    assert (objective.weighting, objective.min_snr_gamma) == (weighting, gamma)
    by_default = planned(facts, overrides=asked, layers={} if asked else {GAMMA: "default"})
    assert by_default.config.objective == objective
    assert ("flow matching" in reason(made, GAMMA)) is (facts is FLOW and GAMMA not in asked)


@pytest.mark.parametrize(
    ("facts", "kind"),
    [(FLOW, "soft_min_snr"), (V_PREDICTION, "sigma_sqrt"), (sd15_facts(), "cosmap")],
)
def test_a_weighting_of_the_other_kind_of_base_is_refused(facts: BaseFacts, kind: str) -> None:
    with pytest.raises(RequestError, match=f"{WEIGHTING}={kind} is for bases") as caught:
        planned(facts, overrides={WEIGHTING: kind})
    assert caught.value.fix.endswith(f"--set {WEIGHTING}=none")
    made = planned(facts, overrides={WEIGHTING: kind}, layers={WEIGHTING: "preset quality"})
    assert made.config.objective.weighting == "none", "a preset's wish gives way"
    with pytest.raises(RequestError, match="is trained by flow matching") as caught:
        planned(FLOW, layers={GAMMA: "config mine.toml"})
    assert caught.value.fix.endswith(f"--set {GAMMA}=null")


def test_the_kind_of_base_becomes_a_setting() -> None:
    """Named in run.json, so that a resume meets the same."""
    for facts, asked, prediction, zero in (
        (V_PREDICTION, {}, "v_prediction", True),
        (V_PREDICTION, {ZERO: False}, "v_prediction", False),
        (FLOW, {}, "flow", False),
    ):
        made = planned(facts, overrides=asked)
        assert made.config.base.prediction == prediction
        assert made.config.objective.zero_terminal_snr is zero
        assert made.origins[ZERO].layer == ("command line" if asked else "planner")


# ---- the optimizer

RATE = "optimizer.learning_rate"


@pytest.mark.parametrize(
    ("name", "rate"),
    [("adamw", 1e-4), ("lion", 2e-5), ("came", 1e-5), ("muon", 2e-4), ("prodigy", 1.0)],
)
def test_the_learning_rate_of_a_preset_follows_the_optimizer(name: str, rate: float) -> None:
    made = planned(overrides={"optimizer.name": name})
    assert made.config.optimizer.learning_rate == pytest.approx(rate)
    assert made.origins[RATE].layer == ("planner" if rate != 1e-4 else "family sd15")
    assert (name in reason(made, RATE)) == (rate != 1e-4)


def test_a_learning_rate_that_somebody_set_is_never_changed() -> None:
    typed = {"optimizer.name": "lion", RATE: 3e-4, "optimizer.beta2": 0.9}
    made = planned(overrides=typed)
    assert (made.config.optimizer.learning_rate, made.config.optimizer.beta2) == (3e-4, 0.9)
    for layer in ("config mine.toml", "preset /my/settings.json", "resumed run"):
        made = planned(overrides={"optimizer.name": "lion"}, layers={RATE: layer})
        assert made.config.optimizer.learning_rate == 1e-4


def test_lion_has_a_decay_of_its_own_and_schedule_free_no_schedule() -> None:
    name, schedule, free = "optimizer.name", "optimizer.schedule", "schedulefree_adamw"
    decays = [planned(overrides={name: each}).config.optimizer.beta2 for each in ("lion", "adamw")]
    assert decays == [0.99, 0.999]
    made = planned(overrides={name: free})
    assert made.config.optimizer.schedule == "constant"
    assert "needs no schedule" in reason(made, schedule)
    with pytest.raises(RequestError, match=r"optimizer\.schedule=linear"):
        planned(overrides={name: free, schedule: "linear"})
    typed = planned(overrides={name: free, schedule: "constant"})
    assert typed.origins[schedule].layer == "command line"


def test_a_rate_that_nobody_would_use_and_tensors_left_to_adamw_are_remarked_on() -> None:
    for name, usual, odd in (("adamw", 2e-3, 1.0), ("prodigy", 1.0, 1e-4), ("lion", 1e-4, 1e-2)):
        for rate in (usual, odd):
            config: Any = build_config({"optimizer.name": name, RATE: rate})
            said = [each.what for each in optimizer_remarks(config, shapes={})]
            assert [f"unusual for {name}" in what for what in said] == [True] * (rate == odd)
    config = build_config({"optimizer.name": "muon", "adapter.dora": True})
    (remark,) = optimizer_remarks(config, shapes={"line": (24, 36), "conv": (54, 20, 9)})
    assert remark.what == "4 of 6 tensors are no matrices, so AdamW trains them"


def test_prodigy_may_freeze_layers_and_trains_text_encoders_at_its_own_rate() -> None:
    pattern = {"optimizer.learning_rate_pattern": {"attn": 0, "ff": 1}}
    optimizer = build_config({"optimizer.name": "prodigy", **pattern}).optimizer
    assert optimizer.text_encoder_scale == 1.0 == optimizer.new_tokens_scale
    assert build_config({}).optimizer.text_encoder_scale == 0.5


# ---- length and disk


def of_length(images: int, *, batch_size: int = 1, views: int = 120, **more: Any) -> Plan:
    """Plan a run of this many images; `more` are of the input, `kind` of the concept."""
    asked = {"train.views": views, "train.batch_size": batch_size}
    asked["train.concept"] = more.pop("kind", "any")
    plain = {"images": images, "samples_per_epoch": images, "overrides": asked}
    return planned(None, machine(24), **{**plain, **more})


@pytest.mark.parametrize(
    ("views", "images", "batch_size", "steps"),
    [
        (60, 14, 8, 150),  # counts as 20
        (120, 100, 2, 6000),
        (120, 500, 4, 4800),  # counts as 160
        (120, 30_000, 4, 7500),  # every image at least once
        (120, 1, 7, 343),  # rounded up
    ],
)
def test_steps_by_the_documented_formula(
    views: int, images: int, batch_size: int, steps: int
) -> None:
    made = of_length(images, batch_size=batch_size, views=views)
    assert made.steps == made.config.train.steps == steps
    why = reason(made, "train.steps")
    assert all(str(number) in why for number in (views, images, 20, 160, batch_size))


@given(images=st.integers(1, 500), batch_size=st.integers(1, 16), views=st.integers(1, 1000))
def test_more_images_or_views_are_never_fewer_steps_and_each_is_seen(
    images: int, batch_size: int, views: int
) -> None:
    steps, more_images, more_views = (
        run_length(images=count, batch_size=batch_size, views=each)[0]
        for count, each in ((images, views), (images + 1, views), (images, views + 1))
    )
    assert steps * batch_size >= images
    assert more_images >= steps and more_views >= steps


def test_repeats_shift_weight_and_lengthen_a_run_only_where_images_would_be_missed() -> None:
    for samples, repeats, steps in (
        (20, 1, 2400),
        (20 * 10, 10, 2400),
        (20 * 1000, 1000, 2400),
        (10 * 1 + 10 * 20, 1, 2400),
        (19 * 200 + 1, 1, 3801),  # all of the one image's share once
    ):
        made = of_length(20, samples_per_epoch=samples, fewest_repeats=repeats)
        assert made.steps == steps
    assert of_length(20, samples_per_epoch=200, fewest_repeats=10).epochs == 12


def test_regularisation_images_come_on_top_of_those_that_are_learned() -> None:
    plain, more = (of_length(14, batch_size=8, regularisation_per_epoch=k) for k in (0, 7))
    assert more.steps == 1.5 * plain.steps
    assert reason(more, "train.steps").endswith("each with 0.5 regularisation images")


def test_a_style_needs_fewer_views_of_more_images() -> None:
    plain, style, person = (of_length(100, kind=kind) for kind in ("any", "style", "person"))
    assert style.steps == plain.steps / 2 == person.steps / 2
    assert reason(style, "train.steps").startswith("style: 60 views")
    assert of_length(15, kind="style").steps == of_length(15).steps


def cadences(**overrides: Any) -> tuple[int, ...]:
    config = planned(
        overrides={f"{key.replace('__', '.')}": v for key, v in overrides.items()}
    ).config
    return (
        config.output.save_every_steps,
        config.sampling.every_steps,
        config.train.validate_every_steps,
    )  # type: ignore[return-value]


def test_cadences_follow_the_length() -> None:
    assert cadences() == (480, 480, 240)
    assert cadences(train__steps=3) == (1, 1, 1)
    assert cadences(output__save_every_epochs=2) == (0, 480, 240)
    assert cadences(output__save_every_steps=400) == (400, 400, 240)


def test_disk_is_that_of_cache_states_and_exports() -> None:
    """One state and two exports more than are kept; mean and deviation of a latent in fp32."""
    plain = planned(overrides={"adapter.targets": "attention"})
    parameters = 3_188_736
    keeps = plain.config.output
    assert plain.disk_bytes["states"] == (keeps.keep_states + 1) * (4 + 8) * parameters
    kept_exports = keeps.keep_last + keeps.keep_best + 2
    assert plain.disk_bytes["exports"] == kept_exports * 2 * parameters
    latent, text = 2 * 4 * 4 * 64 * 64, costs_of().sample_cost(load_of().workload())
    assert plain.disk_bytes["cache"] == 20 * latent + 21 * text.conditioning_bytes
    more = {"output.keep_states": 5, "data.flip": True, "adapter.targets": "attention"}
    made = planned(overrides={**more, "adapter.kind": "loha"}, texts=40)
    assert made.disk_bytes["states"] == 2 * 6 * (4 + 8) * parameters
    assert made.disk_bytes["cache"] == 40 * latent + 41 * text.conditioning_bytes

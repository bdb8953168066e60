"""The planner: nothing stays auto, each value follows from base, machine, data and settings, with a reason."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer import families
from lora_trainer.common.errors import MachineError
from lora_trainer.config.config import build_config, flatten
from lora_trainer.config.constraints import OPTIMIZER_PACKAGES
from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.optimizer_facts import optimizer_remarks
from lora_trainer.planning.plan import plan
from lora_trainer.planning.run_time import run_length
from lora_trainer.planning.speedups import pass_shapes
from tests.fakes.plans import (
    LIBRARIES,
    MACHINE,
    WITHOUT_CARD,
    machine,
    planned,
    reason,
    request,
)

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


@pytest.mark.parametrize("name", families.MODULES)
def test_a_gpu_without_bf16_trains_in_what_gives_numbers(name: str) -> None:
    """R6: fp16 was planned for every family; the transformers' loss is NaN in it."""
    made = planned(next(iter(families.family(name).releases)), TURING)
    assert made.config.train.precision == ("fp16" if name in IN_FP16 else "fp32")


# ---- the optimizer

RATE = "optimizer.learning_rate"


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


# ---- length


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


def test_shapes_of_passes() -> None:
    """Steps take what comes: in several buckets groups of any size, in one only what is left over."""
    assert pass_shapes({(8, 8): 4}, batch_size=4) == [(8, 8, 4)]
    assert pass_shapes({(8, 8): 4}, batch_size=6) == [(8, 8, 4), (8, 8, 2)]
    assert pass_shapes({(8, 8): 2}, batch_size=6, processes=2) == [(8, 8, 2), (8, 8, 1)]
    shapes = pass_shapes({(8, 8): 2, (6, 10): 1}, batch_size=4)
    assert shapes == [(8, 8, 2), (6, 10, 1), (8, 8, 1)], "full groups of large buckets first"

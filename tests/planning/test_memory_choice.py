"""Which load is chosen: it fits, the batch stays, nothing asked for is raised, and the reason is said."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import build_config, flatten, parse_assignment
from lora_trainer.config.declare import CHECKPOINTING
from lora_trainer.hardware.machine import GIB
from lora_trainer.planning.plan import Plan
from tests.fakes.plans import (
    CARD,
    FLUX,
    MACHINE,
    QWEN,
    SDXL,
    bytes_by_name,
    machine,
    middle,
    planned,
    reason,
)

RANKS = {"bf16": 0, "int8": 1, "fp8": 2, "nf4": 3}
BATCH, MICRO, LEVEL = "train.batch_size", "memory.micro_batch", "memory.gradient_checkpointing"
BASE, STREAMED = "memory.base_precision", "memory.streamed_blocks"
OFFLOAD, SAMPLES = "memory.text_encoder_offload", "sampling.every_steps"
SIZES = ((512, 512), (448, 576))


def free(gib: float, **how: Any) -> Plan:
    """Plan Stable Diffusion 1.5 for a GPU of 12 GiB with so much of it free."""
    hardware = replace(MACHINE, gpus=(replace(CARD, free_bytes=int(gib * GIB)),))
    return planned(None, hardware, **{"buckets": SIZES, **how})


def kept(made: Plan) -> tuple[str, int]:
    return str(made.config.memory.base_precision), made.config.memory.streamed_blocks


def step_s(made: Plan) -> float:
    return middle(made.seconds_per_step)


# ---- a small base


def test_less_memory_means_smaller_micro_batches_then_recomputing_then_streaming() -> None:
    made = [
        free(gib, overrides={BATCH: 4}).config.memory
        for gib in (12, 5.5, 5, 3.7, 3.3, 2.8, 2.5, 2.45)
    ]
    assert [(each.micro_batch, each.gradient_checkpointing) for each in made] == [
        (4, "none"), (3, "none"), (2, "none"), (1, "none"),
        (2, "selective"), (1, "full"), (1, "full"), (1, "full"),
    ]  # fmt: skip
    streamed = [each.streamed_blocks for each in made]
    assert streamed[:6] == [0] * 6
    assert 0 < streamed[6] < streamed[7] <= 16


@given(
    gib=st.floats(2.9, 14),
    batch_size=st.integers(1, 6),
    micro_batch=st.sampled_from(["auto", 1, 2, 6]),
    checkpointing=st.sampled_from(["auto", *CHECKPOINTING, True, False]),
    streamed=st.sampled_from(["auto", 0, 4]),
    precision=st.sampled_from(["auto", "bf16", "int8", "nf4"]),
)
def test_it_fits_the_batch_stays_and_nothing_asked_for_is_raised(
    gib: float,
    batch_size: int,
    micro_batch: int | str,
    checkpointing: str | bool,
    streamed: int | str,
    precision: str,
) -> None:
    assume(streamed != 4 or checkpointing not in ("none", False))
    micro = min(micro_batch, batch_size) if isinstance(micro_batch, int) else micro_batch
    asked = {BATCH: batch_size, MICRO: micro, LEVEL: checkpointing, STREAMED: streamed}
    asked[BASE] = precision
    before = flatten(build_config(asked))
    made = free(gib, overrides=asked)
    after = flatten(made.config)
    assert made.memory.fits
    assert made.memory.limit_bytes == int(gib * GIB)
    assert after[BATCH] == batch_size
    assert 1 <= after[MICRO] <= (batch_size if micro == "auto" else int(micro))
    assert max(made.images_at_once.values()) == after[MICRO]
    levels = [CHECKPOINTING.index(each[LEVEL]) for each in (before, after) if each[LEVEL] != "auto"]
    assert levels == sorted(levels)
    assert after[STREAMED] >= (4 if streamed == 4 else 0)
    assert precision in ("auto", after[BASE]), "a value that changes the result stays"
    for key in asked:
        assert (made.origins[key].layer == "planner") == (after[key] != before[key])


def test_a_lowered_value_says_the_bytes_of_the_one_asked_for() -> None:
    made = free(3.1, overrides={LEVEL: False, BATCH: 2})
    assert made.config.memory.gradient_checkpointing == "selective"
    assert reason(made, LEVEL).startswith("instead of none: light would take 3.62 GiB")
    assert "3.10 GiB free on NVIDIA GeForce RTX 3060" in reason(made, LEVEL)


def test_sample_images_are_given_up_before_the_run_is() -> None:
    made = free(3.0)
    assert made.config.sampling.every_steps == 0
    assert "sample images would take" in reason(made, SAMPLES)
    assert "sampling" not in made.memory.phases
    slower = free(3.4, overrides={BATCH: 1}).config.sampling
    assert slower.every_steps == 0, "they would fit, with steps more than a fifth longer"


def test_when_nothing_fits_the_setting_it_names_does_or_it_says_how_much_would() -> None:
    for gib, overrides in (
        (2.2, {"data.resolution": 1024}),
        (2.9, {"adapter.rank": 512}),
        (2.5, {"train.precision": "fp32"}),
        (2.4, {"adapter.rank": 64, BATCH: 8}),
        (2.2, {BASE: "bf16", LEVEL: "offloaded"}),
    ):
        # no buckets: the square of the resolution is planned for
        with pytest.raises(MachineError, match="needs at least") as caught:
            free(gib, overrides=overrides, buckets=())
        assert caught.value.exit_code == 4
        key, value = parse_assignment(caught.value.fix.split()[2].rstrip(","))
        assert free(gib, overrides={**overrides, key: value}, buckets=()).memory.fits
    with pytest.raises(MachineError, match=r"a GPU with 2\.\d\d GiB free") as caught:
        free(1.5)
    assert "1.50 GiB free on NVIDIA GeForce RTX 3060" in str(caught.value)


def test_the_largest_bucket_decides_and_smaller_ones_hold_more_images() -> None:
    def peak_bytes(*buckets: tuple[int, int]) -> int:
        return free(12, overrides={BATCH: 2}, buckets=buckets).memory.peak_bytes

    mixed = peak_bytes((256, 256), (512, 512), (320, 320))
    assert mixed == peak_bytes((512, 512)) == peak_bytes() > peak_bytes((256, 256))
    buckets = ((1024, 1024), (512, 1024), (512, 512))
    asked = {BATCH: 8, LEVEL: "light", STREAMED: 0, SAMPLES: 0}
    made = planned(SDXL, machine(13), buckets=buckets, overrides=asked)
    counts = [made.images_at_once[bucket] for bucket in buckets]
    assert counts == sorted(counts) and counts[0] < counts[-1] == made.config.memory.micro_batch
    assert made.memory.fits
    assert f"{counts[0] + 1} of 1024x1024 px would take" in reason(made, MICRO)


# ---- limits


def test_memory_that_a_plan_may_use() -> None:
    """What is planned must fit under the bound that `run/device.py` sets."""
    for gpu, allowed_gib, limit_gib, left_mib in (
        ({}, 4.0, 4, 0),
        ({}, 40.0, 12, 0),
        ({"display": True}, None, 12, 400),
        ({"spills": True}, None, 12, 600),
        ({"spills": True}, 8.0, 8, 0),  # that is left anyway
        ({"spills": True}, 11.9, 11.9, 600 - 102.4),
    ):
        asked = {"hardware.vram_limit_gib": allowed_gib}
        made = planned(None, machine(12, **gpu), overrides=asked).memory
        assert made.limit_bytes == int(limit_gib * GIB)
        desktop_bytes = bytes_by_name(made.items).get("desktop", 0)
        assert desktop_bytes == pytest.approx(left_mib * 2**20, abs=2)


@pytest.mark.parametrize(("total_gib", "spared_gib"), [(8, 0.8), (256, 4)], ids=str)
def test_a_plan_leaves_the_machine_a_margin(total_gib: int, spared_gib: float) -> None:
    """FLUX.1 on 12 GiB took 20.61 of 20.72 GiB of free memory: the machine would have swapped."""
    free_bytes = int(20.72 * GIB)
    hardware = replace(machine(12), ram_total_bytes=total_gib * GIB, ram_free_bytes=free_bytes)
    made = planned(FLUX, hardware)
    assert made.host is not None
    assert made.host.peak_bytes <= made.host.limit_bytes
    assert free_bytes - made.host.limit_bytes == pytest.approx(spared_gib * GIB, abs=1)


# ---- a large base


def test_streaming_keeps_a_large_base_whole_where_the_machine_has_the_memory() -> None:
    made = planned(FLUX)
    precision, streamed = kept(made)
    assert precision == "bf16"
    assert 30 < streamed < 57
    assert made.host is not None and made.host.fits
    assert bytes_by_name(made.host.items)["streamed blocks"] > 10e9
    assert "all 57 blocks on the GPU would take 2" in reason(made, STREAMED)
    assert "int8" in reason(made, BASE) and "nf4" in reason(made, BASE)
    assert kept(planned(FLUX, overrides={"base.assistant": "a.safetensors"})) == ("nf4", 0)
    roomy = planned(FLUX, machine(80))
    assert kept(roomy) == ("bf16", 0)
    assert roomy.config.memory.gradient_checkpointing == "none"
    assert roomy.config.memory.text_encoder_offload is False
    assert reason(roomy, STREAMED) == "all blocks fit on the device"


def test_a_machine_with_less_memory_means_fewer_bits() -> None:
    """The pinned copy has to be there; nf4 is the last resort."""
    plans = [planned(FLUX, machine(7.5, ram_gib=ram)) for ram in (28, 16, 11.2)]
    for made in plans:
        alone = reason(made, BASE).count("does not fit") == 2
        decided = "only where clearly faster" in reason(made, BASE)
        assert decided is not alone, "a rule decided where two fit"
    assert alone
    ranks = [RANKS[kept(made)[0]] for made in plans]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0 < ranks[-1]
    with pytest.raises(MachineError, match="of the machine's memory beside the GPU") as caught:
        planned(QWEN, machine(12, ram_gib=12))
    assert caught.value.exit_code == 4


def test_without_bitsandbytes_there_is_no_nf4() -> None:
    without = machine(packages={"bitsandbytes": None})
    made = planned(FLUX, without, overrides={"optimizer.name": "adamw"})
    assert "nf4" not in reason(made, BASE)
    with pytest.raises(MachineError, match="nf4 needs bitsandbytes"):
        planned(FLUX, without, overrides={BASE: "nf4"})


@pytest.mark.parametrize("source", [FLUX, QWEN, SDXL])
@pytest.mark.parametrize("gib", [8, 24])
@pytest.mark.parametrize("ram_gib", [17, 28])
def test_speed_is_never_slower_and_quality_never_less_precise(
    source: str, gib: float, ram_gib: float
) -> None:
    same = {"data.resolution": 1024, "adapter.rank": 16, SAMPLES: 0}
    hardware = machine(gib, ram_gib=ram_gib)
    made = [
        planned(source, hardware, priority=priority, preset_tier="10-12", overrides=same)
        for priority in ("speed", "balanced", "quality")
    ]
    times = [step_s(each) for each in made]
    assert times == sorted(times)
    ranks = [RANKS[kept(each)[0]] for each in made]
    assert ranks == sorted(ranks, reverse=True)


def test_more_memory_is_never_slower() -> None:
    times = [
        step_s(planned(FLUX, machine(gib, ram_gib=60), overrides={SAMPLES: 0}, preset_tier="10-12"))
        for gib in (5.5, 8, 12, 24, 60)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_text_encoders_are_offloaded_where_they_alone_are_too_large() -> None:
    """T5-XXL takes 9.1 GiB in bf16."""
    for gib, asked, offloaded, why in (
        (12, "auto", False, "text encoders fit on the device"),
        (8, "auto", True, "text encoders would take 10."),
        (24, True, True, ""),
        (8, False, True, "instead of false: text encoders would take 10."),
    ):
        made = planned(FLUX, machine(gib), overrides={OFFLOAD: asked})
        assert made.config.memory.text_encoder_offload is offloaded
        assert reason(made, OFFLOAD).startswith(why)


@pytest.mark.parametrize(
    ("source", "asked", "words"),
    [
        (QWEN, {STREAMED: 61}, "60 blocks.* Fix: use a number from 0 to 60"),
        (
            FLUX,
            {STREAMED: 9, "base.assistant": "a.safetensors"},
            "weights do not move with streamed blocks",
        ),
        (SDXL, {STREAMED: 9, "hardware.device": "cpu"}, "needs a GPU with memory of its own"),
        (SDXL, {OFFLOAD: True, "hardware.device": "cpu"}, "needs a GPU with memory of its own"),
    ],
)
def test_streaming_that_cannot_be_is_refused(
    source: str, asked: dict[str, Any], words: str
) -> None:
    with pytest.raises(RequestError, match=words):
        planned(source, machine(24), overrides=asked)


def test_on_a_processor_the_base_stays_whole_unless_asked() -> None:
    for asked, base, level in (
        ({}, "fp32", None),
        ({BASE: "int8"}, "int8", None),
        ({LEVEL: "offloaded"}, "fp32", "full"),
    ):
        made = planned(SDXL, overrides={"hardware.device": "cpu", "data.resolution": 512, **asked})
        assert kept(made) == (base, 0)
        assert made.config.memory.gradient_checkpointing == level or level is None
        assert made.host is None


def test_blocks_that_cannot_be_pinned_are_priced_and_fewer_bits_may_be_the_better_way() -> None:
    """WSL2 lets a process pin half a GiB; streaming then takes what its slow copies take."""
    bound = replace(MACHINE, pinnable_bytes=GIB // 2)
    asked = {BASE: "bf16", STREAMED: 40}
    with_pins, without = (planned(FLUX, each, overrides=asked) for each in (MACHINE, bound))
    assert with_pins.host is not None
    copied_bytes = 2 * (bytes_by_name(with_pins.host.items)["streamed blocks"] - GIB // 2)
    for slow, fast, rate in zip(
        without.seconds_per_step, with_pins.seconds_per_step, (8.8e9, 2.4e9), strict=True
    ):
        assert slow - fast > 0.9 * copied_bytes / rate - 0.2 * fast
    assert "GB of unpinned memory" in without.time_note
    assert "unpinned" not in with_pins.time_note
    assert kept(planned(FLUX))[0] == "bf16"
    assert step_s(planned(FLUX, bound)) <= step_s(without)

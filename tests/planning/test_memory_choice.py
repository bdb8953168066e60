"""What is chosen to make large bases fit: the fastest or the most precise, within GPU and machine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.common.errors import MachineError, RequestError, exit_code
from lora_trainer.config.config import flatten
from lora_trainer.config.layers import Priority, resolve
from lora_trainer.families import family, known_base
from lora_trainer.hardware.machine import (
    DISPLAY_MARGIN_BYTES,
    GIB,
    MOST_SPARED_BYTES,
    SPILL_MARGIN_BYTES,
    Hardware,
)
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.memory import Prediction
from lora_trainer.planning.plan import Plan, plan
from lora_trainer.planning.plan_input import PlanInput

FLUX = "black-forest-labs/FLUX.1-dev"
QWEN = "Qwen/Qwen-Image"
SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
RANKS = {"bf16": 0, "int8": 1, "fp8": 2, "nf4": 3}


def machine(card_gib: float, *, ram_gib: float = 28, bitsandbytes: str | None = "0.50") -> Hardware:
    """Return one whose plans may use `ram_gib`: what is free but for the margin."""
    card = Gpu(
        index=0,
        name="NVIDIA GeForce RTX 3060",
        total_bytes=int(card_gib * GIB),
        free_bytes=int(card_gib * GIB),
        compute_capability=(8, 6),
        driver="570",
    )
    return Hardware(
        gpus=(card,),
        gpu_reason="one",
        cpu_name="",
        cpu_threads=8,
        ram_total_bytes=64 * GIB,
        ram_free_bytes=int(ram_gib * GIB) + MOST_SPARED_BYTES,
        packages={"torch": "2.13", "bitsandbytes": bitsandbytes},
        reasons={"cpu_threads": "8 cores"},
        expandable_segments=True,
    )


def planned(
    source: str,
    hardware: Hardware,
    *,
    priority: Priority = "balanced",
    buckets: tuple[tuple[int, int], ...] = ((1024, 1024),),
    **overrides: Any,
) -> Plan:
    facts = known_base(source)
    assert facts is not None
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    return plan(
        PlanInput(
            decided={"output.format": ("kohya", "known before")},
            resolved=resolve(
                family=facts.family,
                tier="10-12",
                priority=priority,
                preset="auto",
                config_file=None,
                overrides=settings,
            ),
            facts=facts,
            family=family(facts.family),
            hardware=hardware,
            images=20,
            samples_per_epoch=20,
            buckets=buckets,
        )
    )


def kept(made: Plan) -> tuple[str, int]:
    memory = made.config.memory
    return str(memory.base_precision), memory.streamed_blocks


def reason(made: Plan, key: str) -> str:
    return made.origins[f"memory.{key}"].reason


def middle_s(made: Plan) -> float:
    low, high = made.seconds_per_step
    return (low * high) ** 0.5


def test_streaming_keeps_a_large_base_whole_where_the_machine_has_the_memory() -> None:
    made = planned(FLUX, machine(12))
    precision, streamed = kept(made)
    assert precision == "bf16"
    assert 30 < streamed < 57
    assert made.host is not None and made.host.fits
    assert "all 57 blocks on the GPU would take 2" in reason(made, "streamed_blocks")
    assert "int8" in reason(made, "base_precision") and "nf4" in reason(made, "base_precision")


def desktop_bytes(made: Prediction) -> int:
    return sum(item.bytes for item in made.items if item.name == "desktop")


def test_a_driver_that_spills_leaves_the_margin_that_the_allocator_is_bound_to() -> None:
    """What is planned must fit under the bound that `run/device.py` sets."""
    plain = machine(12)
    spilling = replace(plain, gpus=(replace(plain.gpus[0], spills=True),))
    screen = replace(plain, gpus=(replace(plain.gpus[0], display=True),))
    for found, left_bytes in (
        (plain, 0),
        (screen, DISPLAY_MARGIN_BYTES),
        (spilling, SPILL_MARGIN_BYTES),
    ):
        made = planned(SDXL, found).memory
        assert made.limit_bytes == 12 * GIB
        assert desktop_bytes(made) == left_bytes
    asked = planned(SDXL, spilling, hardware__vram_limit_gib=8).memory
    assert (asked.limit_bytes, desktop_bytes(asked)) == (8 * GIB, 0), "that is left anyway"
    asked = planned(SDXL, spilling, hardware__vram_limit_gib=11.9).memory
    assert asked.limit_bytes == int(11.9 * GIB)
    assert asked.limit_bytes - desktop_bytes(asked) == 12 * GIB - SPILL_MARGIN_BYTES


def test_a_machine_with_less_memory_means_fewer_bits() -> None:
    """The pinned copy has to be there; nf4 is the last resort."""
    plans = [planned(FLUX, machine(7.5, ram_gib=ram)) for ram in (28, 16, 11.2)]
    for made in plans:
        said = reason(made, "base_precision")
        alone = said.count("does not fit") == 2
        assert ("only where clearly faster" in said) is not alone, "a rule decided where two fit"
    assert "does not fit" in said and alone
    ranks = [RANKS[kept(made)[0]] for made in plans]
    assert ranks == sorted(ranks)
    assert ranks[0] == 0 and ranks[-1] > 0


def test_a_machine_that_cannot_hold_the_text_encoder_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(MachineError, match="of the machine's memory beside the GPU") as caught:
        planned(QWEN, machine(12, ram_gib=12))
    assert exit_code(caught.value) == 4


def test_without_bitsandbytes_there_is_no_nf4() -> None:
    made = planned(FLUX, machine(12, bitsandbytes=None), optimizer__name="adamw")
    assert "nf4" not in reason(made, "base_precision")
    with pytest.raises(MachineError, match="nf4 needs bitsandbytes"):
        planned(FLUX, machine(12, bitsandbytes=None), memory__base_precision="nf4")


@pytest.mark.parametrize("source", [FLUX, QWEN, SDXL])
@pytest.mark.parametrize("card_gib", [5.5, 8, 12, 24])
@pytest.mark.parametrize("ram_gib", [17, 28])
def test_speed_is_never_slower_and_quality_never_less_precise(
    source: str, card_gib: float, ram_gib: float
) -> None:
    same: dict[str, Any] = {
        "data__resolution": 1024,
        "adapter__rank": 16,
        "sampling__every_steps": 0,
    }
    made = {
        priority: planned(source, machine(card_gib, ram_gib=ram_gib), priority=priority, **same)
        for priority in ("speed", "balanced", "quality")
    }
    times = [middle_s(made[priority]) for priority in ("speed", "balanced", "quality")]
    assert times == sorted(times)
    ranks = [RANKS[kept(made[priority])[0]] for priority in ("quality", "balanced", "speed")]
    assert ranks == sorted(ranks)


def test_more_memory_is_never_slower() -> None:
    times = [
        middle_s(planned(FLUX, machine(card_gib, ram_gib=64), sampling__every_steps=0))
        for card_gib in (5.5, 8, 10, 12, 16, 24, 40, 60)
    ]
    assert times == sorted(times, reverse=True)
    assert times[-1] < times[0]


def test_a_card_with_room_for_everything_streams_and_recomputes_nothing() -> None:
    made = planned(FLUX, machine(80))
    assert kept(made) == ("bf16", 0)
    assert made.config.memory.gradient_checkpointing == "none"
    assert made.config.memory.text_encoder_offload is False
    assert reason(made, "streamed_blocks") == "all blocks fit on the device"


def test_text_encoders_are_offloaded_where_they_alone_are_too_large() -> None:
    """T5-XXL takes 9.1 GiB in bf16."""
    assert planned(FLUX, machine(12)).config.memory.text_encoder_offload is False
    small = planned(FLUX, machine(8))
    assert small.config.memory.text_encoder_offload is True
    assert "text encoders would take 10." in reason(small, "text_encoder_offload")
    asked = planned(FLUX, machine(24), memory__text_encoder_offload=True)
    assert asked.config.memory.text_encoder_offload is True
    lowered = planned(FLUX, machine(8), memory__text_encoder_offload=False)
    assert lowered.config.memory.text_encoder_offload is True
    assert reason(lowered, "text_encoder_offload").startswith("instead of false: text encoders")


def test_smaller_buckets_hold_more_images_at_once() -> None:
    """Each as many as fit; the plan's micro-batch is that of the smallest bucket."""
    buckets = ((1024, 1024), (512, 1024), (512, 512))
    made = planned(
        SDXL,
        machine(13),
        buckets=buckets,
        train__batch_size=8,
        memory__gradient_checkpointing="light",
        memory__streamed_blocks=0,
        sampling__every_steps=0,
    )
    counts = [made.images_at_once[bucket] for bucket in buckets]
    assert counts == sorted(counts) and counts[0] < counts[-1]
    assert made.config.memory.micro_batch == max(counts)
    assert made.memory.fits
    if counts[0] < 8:
        assert f"{counts[0] + 1} of 1024x1024 px would take" in reason(made, "micro_batch")


def test_what_does_not_go_with_streaming_is_refused() -> None:
    with pytest.raises(RequestError, match="60 blocks") as caught:
        planned(QWEN, machine(24), memory__streamed_blocks=61)
    assert caught.value.fix == "use a number from 0 to 60"
    with pytest.raises(RequestError, match="weights do not move with streamed blocks"):
        planned(FLUX, machine(24), memory__streamed_blocks=9, base__assistant="a.safetensors")
    with pytest.raises(RequestError, match="needs a GPU with memory of its own"):
        planned(SDXL, machine(24), memory__streamed_blocks=9, hardware__device="cpu")
    with pytest.raises(RequestError, match="needs a GPU with memory of its own"):
        planned(SDXL, machine(24), memory__text_encoder_offload=True, hardware__device="cpu")


def test_an_assistant_keeps_blocks_on_the_card() -> None:
    made = planned(FLUX, machine(12), base__assistant="a.safetensors")
    precision, streamed = kept(made)
    assert (precision, streamed) == ("nf4", 0)


def test_on_a_processor_the_base_stays_whole_unless_asked() -> None:
    asked = {"hardware__device": "cpu", "data__resolution": 512}
    plain = planned(SDXL, machine(24), **asked)
    assert kept(plain) == ("fp32", 0)
    assert plain.host is None
    assert kept(planned(SDXL, machine(24), **asked, memory__base_precision="int8")) == ("int8", 0)
    beside = planned(SDXL, machine(24), **asked, memory__gradient_checkpointing="offloaded")
    assert beside.config.memory.gradient_checkpointing == "full"


def test_a_typed_precision_stays_and_the_error_names_one_that_fits() -> None:
    tight = machine(6, ram_gib=14)
    assert kept(planned(FLUX, tight))[0] != "bf16"
    with pytest.raises(MachineError) as caught:
        planned(FLUX, tight, memory__base_precision="bf16")
    named = caught.value.fix.split()[2].rstrip(",").partition("=")
    assert named[0] == "memory.base_precision"
    assert planned(FLUX, tight, memory__base_precision=named[2]).memory.fits


def test_every_setting_is_settled_and_unchanged_ones_keep_their_origin() -> None:
    asked: dict[str, Any] = {
        "memory__base_precision": "int8",
        "memory__streamed_blocks": 40,
        "memory__gradient_checkpointing": "full",
        "memory__text_encoder_offload": True,
        "memory__micro_batch": 1,
    }
    made = planned(FLUX, machine(24), **asked)
    values = flatten(made.config)
    for name, value in asked.items():
        key = name.replace("__", ".")
        assert values[key] == value
        assert made.origins[key].layer == "command line"


def test_the_memory_of_the_machine_is_itemised() -> None:
    made = planned(FLUX, machine(12, ram_gib=30))
    assert made.host is not None
    items = {item.name: item.bytes for item in made.host.items}
    assert sum(items.values()) == made.host.bytes
    assert items["streamed blocks"] > 10e9
    assert made.host.loading_bytes == 2 * 11_901_408_320
    assert not made.host.loads_slowly
    assert replace(made.host, limit_bytes=20 * GIB).loads_slowly


@pytest.mark.parametrize(
    ("total_gib", "spared_gib"), [(8, 0.8), (32, 3.2), (64, 4), (256, 4)], ids=str
)
def test_a_plan_leaves_the_machine_a_margin(total_gib: int, spared_gib: float) -> None:
    """FLUX.1 on 12 GiB took 20.61 of 20.72 GiB of free memory: the machine would have swapped."""
    free_bytes = int(20.72 * GIB)
    found = replace(machine(12), ram_total_bytes=total_gib * GIB, ram_free_bytes=free_bytes)
    made = planned(FLUX, found)
    assert made.host is not None
    assert made.host.bytes <= made.host.limit_bytes
    assert found.ram_free_bytes - made.host.limit_bytes == pytest.approx(spared_gib * GIB, abs=1)


def test_blocks_that_cannot_be_pinned_are_priced_and_fewer_bits_may_be_the_better_way() -> None:
    """WSL2 lets a process pin half a GiB; streaming then takes what its slow copies take."""
    free = machine(12)
    bound = replace(free, pinnable_bytes=GIB // 2)
    asked: dict[str, Any] = {"memory__base_precision": "bf16", "memory__streamed_blocks": 40}
    with_pins, without = (planned(FLUX, each, **asked) for each in (free, bound))
    streamed = next(item for item in with_pins.host.items if item.name == "streamed blocks")  # type: ignore[union-attr]  # a plan for a GPU
    copied = 2 * (streamed.bytes - GIB // 2)
    for slow, fast, rate in zip(
        without.seconds_per_step, with_pins.seconds_per_step, (8.8e9, 2.4e9), strict=True
    ):
        assert slow - fast > 0.9 * copied / rate - 0.2 * fast
    assert "GB of unpinned memory" in without.time_note
    assert "unpinned" not in with_pins.time_note
    assert kept(planned(FLUX, free))[0] == "bf16"
    chosen = planned(FLUX, bound)
    assert middle_s(chosen) <= middle_s(without)

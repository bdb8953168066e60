"""When products with an int8 base are computed int8 by int8: where that is predicted to be clearly faster."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lora_trainer.common.errors import MachineError
from lora_trainer.config.base_precision import INT8_TEMPORARY_BYTES, BaseMatmul
from lora_trainer.config.config import AdapterSettings
from lora_trainer.families import family, known_base
from lora_trainer.hardware.machine import GIB, Hardware
from lora_trainer.planning.loads import Load, RememberedCosts
from lora_trainer.planning.memory import predict
from lora_trainer.planning.plan import Plan
from lora_trainer.planning.step_time import LINEAR_SHARE, card, gpu_step_time, step_work
from tests.planning.test_memory_choice import FLUX, SDXL, machine, planned, reason
from tests.test_prepare import PROCESSOR


def with_card(name: str, capability: tuple[int, int] | None = (8, 6), **values: Any) -> Hardware:
    found = machine(24, **values)
    gpu = replace(found.gpus[0], name=name, compute_capability=capability)
    return replace(found, gpus=(gpu,))


def matmul(source: str, hardware: Hardware, **values: Any) -> Plan:
    return planned(source, hardware, **{"memory__base_precision": "int8", **values})


@pytest.mark.parametrize(
    ("name", "source", "value"),
    [
        ("RTX 3090", FLUX, "int8"),
        ("A100", FLUX, "dequantized"),
        ("H100", FLUX, "dequantized"),
        ("RTX 3090", SDXL, "dequantized"),
    ],
)
def test_auto_takes_what_is_predicted_to_be_clearly_faster(
    name: str, source: str, value: str
) -> None:
    """Wide layers on GPUs whose int8 rate is four times the other; elsewhere the rounding costs more."""
    made = matmul(source, with_card(name), memory__streamed_blocks=0)
    assert made.config.memory.base_matmul == value
    assert "s a step with int8 products" in reason(made, "base_matmul")


def test_a_faster_step_is_what_the_plan_predicts_then() -> None:
    hardware = with_card("RTX 3090")
    seconds = {
        value: matmul(FLUX, hardware, memory__base_matmul=value).seconds_per_step[1]
        for value in ("auto", "int8", "dequantized")
    }
    assert seconds["auto"] == seconds["int8"] < seconds["dequantized"] / 1.1


@pytest.mark.parametrize(
    ("hardware", "values", "why"),
    [
        (with_card("RTX 2080", (7, 5)), {}, "RTX 2080 has no fast int8 products"),
        (with_card("RTX 3090", None), {}, "RTX 3090 has no fast int8 products"),
        (with_card("RTX 3090"), {"priority": "quality"}, "quality: int8 products would round"),
        (with_card("RTX 3090"), {"memory__base_precision": "fp8"}, "the base is in fp8"),
    ],
)
def test_where_it_is_not_even_weighed(hardware: Hardware, values: Any, why: str) -> None:
    made = matmul(FLUX, hardware, **values)
    assert made.config.memory.base_matmul == "dequantized"
    assert reason(made, "base_matmul").startswith(why)


def test_it_never_makes_a_base_int8_unless_it_is_asked_for() -> None:
    hardware = replace(with_card("RTX 3090"), gpus=(replace(machine(96).gpus[0], name="RTX 3090"),))
    made = planned(FLUX, hardware, priority="speed")
    assert made.config.memory.base_precision == "bf16"
    assert made.config.memory.base_matmul == "dequantized"
    asked = planned(FLUX, hardware, priority="speed", memory__base_matmul="int8")
    assert asked.config.memory.base_precision == "int8"
    assert "base_matmul=int8" in reason(asked, "base_precision")


def test_a_card_without_int8_products_is_refused_before_the_start() -> None:
    with pytest.raises(MachineError, match=r"8\.0 or higher, but that of RTX 2080 is 7\.5"):
        matmul(FLUX, with_card("RTX 2080", (7, 5)), memory__base_matmul="int8")


def test_a_processor_does_it_when_asked_and_not_otherwise() -> None:
    small = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    for asked, made in (("auto", "dequantized"), ("int8", "int8")):
        found = matmul(small, PROCESSOR, memory__base_matmul=asked, buckets=((512, 512),))
        assert found.config.memory.base_matmul == made


def flux_facts() -> Any:
    facts = known_base(FLUX)
    assert facts is not None
    return facts


LOAD = Load(
    device="cuda",
    precision="bf16",
    base_precision="int8",
    adapter=AdapterSettings(rank=16, targets="attention"),
    text_precision="bf16",
    text_offload=False,
    optimizer="adamw",
    micro_batch=1,
    checkpointing="full",
    streamed_blocks=0,
    bucket_px=(1024, 1024),
    samples=False,
    sample_side_px=1024,
    prepared_samples=4,
)


@pytest.mark.parametrize("images", [1, 4])
def test_arithmetic_moves_to_int8_and_bytes_are_moved_for_it(images: int) -> None:
    costs = RememberedCosts(family=family("flux"), facts=flux_facts())
    plain, codes = (
        step_work(
            replace(LOAD, base_matmul=value),
            costs,
            batch_size=images,
            pinnable_bytes=None,
        )
        for value in ("dequantized", "int8")
    )
    assert plain.int8_flops == plain.int8_bytes == 0
    # Of a block that runs again two passes of three: backwards a GPU may have no such product.
    assert codes.flops == plain.flops
    assert codes.int8_flops / codes.flops == pytest.approx(LINEAR_SHARE * 2 / 3)
    whole = step_work(
        replace(LOAD, base_matmul="int8", checkpointing="none"),
        costs,
        batch_size=images,
        pinnable_bytes=None,
    )
    assert whole.int8_flops / whole.flops == pytest.approx(LINEAR_SHARE / 2)
    assert codes.kernels > plain.kernels
    fast, slow = card("RTX 3090", total_bytes=24 * GIB), card("RTX A6000", total_bytes=48 * GIB)
    assert (fast.int8_speedup, slow.int8_speedup) == (4, 2)
    same = replace(fast, int8_speedup=2.0)
    times = [gpu_step_time(codes, each, precision="bf16").high_s for each in (fast, same)]
    assert times[0] < times[1]


@pytest.mark.parametrize("value", ["dequantized", "int8"])
def test_what_lies_beside_a_product_is_in_the_prediction(value: BaseMatmul) -> None:
    costs = RememberedCosts(family=family("flux"), facts=flux_facts())
    made = predict(replace(LOAD, base_matmul=value), costs)
    found = {item.name: item.bytes for item in made.items}["dequantised layer"]
    assert found == (INT8_TEMPORARY_BYTES if value == "int8" else 2 * 3072 * 18432)

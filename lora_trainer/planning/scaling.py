"""How many images a second more GPUs are predicted to train. No torch.

A model and not a measurement: all GPUs compute equally long, nothing is overlapped, and then a ring carries the
gradients once around at the speed of its slowest link. Input is the time of a step on one GPU, its images and the
bytes of the gradients; output a row for each number of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lora_trainer.config.declare import Precision
from lora_trainer.costs.base_costs import ELEMENT_BYTES
from lora_trainer.lora.adapter_size import total_elements
from lora_trainer.planning.gpu_rates import link_of
from lora_trainer.planning.plan import Plan, device_of
from lora_trainer.planning.plan_input import PlanInput

COUNTS: Sequence[int] = (2, 4, 8, 16, 32, 64)
GPUS_OF_A_MACHINE = 8
# Between machines: 25 Gbit Ethernet, less its headers. Of each message, software and network together.
NETWORK_BYTES_PER_S = 2.8e9
LATENCY_S = 20e-6


@dataclass(frozen=True, kw_only=True)
class Scaled:
    """What `processes` GPUs are predicted to train; `efficiency` is of as many times one GPU."""

    processes: int
    images_per_s: float
    efficiency: float


def ring_all_reduce_s(
    size_bytes: float, *, devices: int, bytes_per_s: float, latency_s: float = LATENCY_S
) -> float:
    """Return the seconds of a ring all-reduce: 2 (N - 1) messages of size / N, each with its latency.

    Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, 2009.
    """
    return 2 * (devices - 1) * (size_bytes / devices / bytes_per_s + latency_s)


def scaled(
    step_s: float,
    *,
    images: float,
    gradient_bytes: float,
    machine_bytes_per_s: float,
    counts: Sequence[int] = COUNTS,
) -> Iterator[Scaled]:
    """Yield what GPUs come to that train `images` in a step of `step_s` each, in machines of eight."""
    for count in counts:
        is_one_machine = count <= GPUS_OF_A_MACHINE
        slowest = machine_bytes_per_s if is_one_machine else NETWORK_BYTES_PER_S
        reduced_s = ring_all_reduce_s(gradient_bytes, devices=count, bytes_per_s=slowest)
        yield Scaled(
            processes=count,
            images_per_s=count * images / (step_s + reduced_s),
            efficiency=step_s / (step_s + reduced_s),
        )


def scaling_of(plan: Plan, inputs: PlanInput) -> Iterator[Scaled]:
    """Yield what more GPUs like this run's come to, each with the images of one now; nothing for a processor."""
    gpu = device_of(plan.config, inputs.hardware, sharing=inputs.sharing)
    if gpu is None:
        return
    low_s, high_s = plan.seconds_per_step
    (slow, fast), _ = link_of(gpu)
    sizes: Mapping[Precision, int] = ELEMENT_BYTES
    elements = total_elements(inputs.costs.adapter_tensors(plan.load.adapter))
    yield from scaled(
        (low_s * high_s) ** 0.5,
        images=plan.config.train.batch_size / inputs.processes,
        gradient_bytes=elements * sizes[plan.config.hardware.reduced_as],
        machine_bytes_per_s=(slow * fast) ** 0.5,
    )


def scaling_text(rows: Sequence[Scaled]) -> str:
    """Return the rows in a sentence; "" for none."""
    if not rows:
        return ""
    each = ", ".join(
        f"{row.processes}: {row.images_per_s:.3g} ({row.efficiency:.0%})" for row in rows
    )
    return (
        f"predicted images a second of so many like this one, each with as many images a step: {each}; in machines of "
        f"{GPUS_OF_A_MACHINE} over PCIe, between them 25 Gbit Ethernet"
    )

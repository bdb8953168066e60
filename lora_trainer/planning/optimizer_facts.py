"""Facts about each optimizer without torch: how its settings differ from AdamW's, and the bytes of its states.

Input is a name and a preset's learning rate, which is meant for AdamW; output the settings this optimizer
needs changed, each with its reason, and warnings about unusual values that the user has set.

For bytes, input is the number of trained tensors by shape, because libraries treat small tensors differently
from large ones, and some optimizers matrices differently from vectors.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.events import Finding, note, warning
from lora_trainer.config.declare import SCHEDULE_FREE, OptimizerName
from lora_trainer.config.running import RunConfig
from lora_trainer.hardware.devices import pinned_bytes
from lora_trainer.lora.adapter_size import Shape, adapter_tensors

RATE, SECOND_DECAY, SCHEDULE = "optimizer.learning_rate", "optimizer.beta2", "optimizer.schedule"


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """One optimizer: its learning rate is `rate_factor` times AdamW's, or always `rate`; `why` says so in words.

    `beta2` is the second decay if it differs from AdamW's; a learning rate outside `usual_rates` gets a
    warning. `states` in fp32 and `states_8bit` are kept for each trained tensor, of its size; the driver moves those
    of a paged optimizer to host memory while the GPU is full.
    """

    rate_factor: float = 1.0
    rate: float | None = None
    why: str = ""
    beta2: float | None = None
    # Of optimizers whose steps are as long as AdamW's, as in use for adapters.
    usual_rates: tuple[float, float] = (1e-6, 2e-2)
    states: int = 0
    states_8bit: int = 0
    is_paged: bool = False


OPTIMIZERS: Mapping[str, OptimizerFacts] = {
    name: OptimizerFacts(**facts)
    for name, facts in tomllib.loads(
        Path(__file__).with_name("optimizers.toml").read_text(encoding="utf-8")
    ).items()
}


def needed_otherwise(name: OptimizerName, *, preset_rate: float) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value, reason) for each setting whose preset or default suits only AdamW."""
    facts = OPTIMIZERS[name]
    if facts.rate is not None:
        yield RATE, facts.rate, f"{name} {facts.why}"
    elif facts.rate_factor != 1.0:
        rate = float(f"{preset_rate * facts.rate_factor:.6g}")  # 2e-05, not 2.0000000000000002e-05
        yield RATE, rate, f"{name} {facts.why}: {preset_rate:g} is preset"
    if facts.beta2 is not None:
        yield SECOND_DECAY, facts.beta2, f"the value in {name}'s paper"
    if name == SCHEDULE_FREE:
        yield SCHEDULE, "constant", f"{name} needs no schedule"


def optimizer_remarks(
    config: RunConfig, *, shapes: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Yield warnings about the optimizer's settings; `shapes` maps adapted layers to (fan_in, out)."""
    name, rate = config.optimizer.name, config.optimizer.learning_rate
    facts = OPTIMIZERS[name]
    low, high = facts.usual_rates
    if not low <= rate <= high:
        reason = f": {name} {facts.why}" if facts.why else ""
        odd = f"{RATE}={rate:g} is unusual for {name}{reason}"
        advice = "leave it out, and it follows the optimizer"
        yield warning("learning-rate", None, odd, advice=advice)
    if name == "muon":
        tensors = adapter_tensors(shapes, config.adapter)
        others = sum(count for shape, count in tensors.items() if len(shape) != 2)
        if others:
            what = f"{others} of {tensors.total()} tensors are no matrices, so AdamW trains them"
            advice = "no action needed; adapter.targets=transformer leaves convolutions out"
            yield note("muon", None, what, advice=advice)


# ---- bytes of states

MASTER_BYTES = GRADIENT_BYTES = 4
# bitsandbytes (0.49 and 0.50, optim/optimizer.py): states of tensors with fewer than EIGHT_BIT_ELEMENTS stay
# in fp32; 8-bit states have an fp32 scale for each SCALED_ELEMENTS elements; a paged optimizer keeps
# its scales and the states of tensors with fewer than PAGED_ELEMENTS on the GPU.
EIGHT_BIT_ELEMENTS = 4096
SCALED_ELEMENTS = 256
PAGED_ELEMENTS = 100_000


def state_bytes(tensors: Mapping[Shape, int], optimizer: str) -> tuple[int, int]:
    """Return the bytes of an optimizer's states that stay on the device, and those the driver may page out.

    `tensors` is the number of trained tensors by shape.
    """
    on_device = paged = 0
    for shape, count in tensors.items():
        for size, is_paged in _states(shape, optimizer):
            on_device += 0 if is_paged else count * size
            paged += count * size if is_paged else 0
    return on_device, paged


def copied_bytes(
    tensors: Mapping[Shape, int], optimizer: str, *, pinned: bool, copies: int = 0
) -> int:
    """Return the bytes of the host copies for saving: fp32 masters, optimizer states, and the export.

    Torch rounds each `pinned` tensor up to a power of two, at least a page. Paged states are no device
    memory for torch, so their copies are not pinned. `copies` counts
    further sets of the masters' size (a running average, the best weights).
    """
    total = 0
    for shape, count in tensors.items():
        # The masters, further sets of their size, and the export.
        masters = ((MASTER_BYTES * math.prod(shape), False),) * (2 + copies)
        for size, is_paged in (*masters, *_states(shape, optimizer)):
            total += count * (pinned_bytes(size) if pinned and not is_paged else size)
    return total


def _states(shape: Shape, optimizer: str) -> tuple[tuple[int, bool], ...]:
    """Return (bytes, is paged) for each state of one tensor."""
    elements, facts = math.prod(shape), OPTIMIZERS[optimizer]
    if facts.states_8bit:
        if elements < EIGHT_BIT_ELEMENTS:
            return ((4 * elements, False),) * facts.states_8bit
        # Rounded up: a last, shorter group has a scale too.
        scales = 4 * math.ceil(elements / SCALED_ELEMENTS)
        is_paged = facts.is_paged and elements >= PAGED_ELEMENTS
        return ((elements, is_paged), (scales, False)) * facts.states_8bit
    states = (elements,) * facts.states
    match optimizer:
        case "adafactor":
            states = _second_moment(shape)
        case "came":  # second moments of the updates and, for matrices only, of their instability
            states = (elements, *_second_moment(shape) * (1 if len(shape) < 2 else 2))
        case "muon":  # tensors that are no matrices are trained by AdamW
            states = (elements,) * (1 if len(shape) == 2 else OPTIMIZERS["adamw"].states)
    return tuple((4 * size, False) for size in states)


def _second_moment(shape: Shape) -> tuple[int, ...]:
    """Return the elements of a factored second moment: rows and columns; a vector's is not factored."""
    if len(shape) < 2:
        return shape
    # As in Adafactor's code: the last two dimensions are factored, a convolution's others are kept.
    *others, rows, columns = shape
    return (math.prod(others) * rows, math.prod(others) * columns)

"""What follows from an optimizer's row: how its settings differ from AdamW's, and the bytes of its states.

Input is a name and a preset's learning rate, which is meant for AdamW; output the settings this optimizer
needs changed, each with its reason, and warnings about unusual values that the user has set.

For bytes, input is the number of trained tensors by shape, because libraries treat small tensors differently
from large ones, and some optimizers matrices differently from vectors.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from lora_trainer.common.events import Finding, note, warning
from lora_trainer.config.config import flatten
from lora_trainer.config.optimizers import OPTIMIZERS, SCHEDULE, SCHEDULE_FREE, Shape, row_of
from lora_trainer.config.running import Config, RunConfig
from lora_trainer.hardware.devices import pinned_bytes
from lora_trainer.lora.adapter_size import adapter_tensors
from lora_trainer.planning.own_optimizer import measured_states

RATE, SECOND_DECAY = "optimizer.learning_rate", "optimizer.beta2"


def needed_otherwise(name: str, *, preset_rate: float) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value, reason) for each setting whose preset or default suits only AdamW."""
    facts = row_of(name)
    if facts.rate is not None:
        yield RATE, facts.rate, f"{name} {facts.why}"
    elif facts.rate_factor != 1.0:
        rate = float(f"{preset_rate * facts.rate_factor:.6g}")  # 2e-05, not 2.0000000000000002e-05
        yield RATE, rate, f"{name} {facts.why}: {preset_rate:g} is preset"
    if facts.beta2 is not None:
        yield SECOND_DECAY, facts.beta2, f"the value in {name}'s paper"
    if name == SCHEDULE_FREE:
        yield SCHEDULE, "constant", f"{name} needs no schedule"


# Settings of the optimizers by name that one given as `module:Class` does not get.
_NOT_GIVEN = ("optimizer.beta1", "optimizer.beta2", "optimizer.epsilon", "optimizer.weight_decay")


def optimizer_remarks(
    config: RunConfig, *, shapes: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Yield warnings about the optimizer's settings; `shapes` maps adapted layers to (fan_in, out)."""
    name, rate = config.optimizer.name, config.optimizer.learning_rate
    facts = row_of(name)
    low, high = facts.usual_rates
    if not low <= rate <= high:
        reason = f": {name} {facts.why}" if facts.why else ""
        odd = f"{RATE}={rate:g} is unusual for {name}{reason}"
        advice = "leave it out, and it follows the optimizer"
        yield warning("learning-rate", None, odd, advice=advice)
    if name not in OPTIMIZERS:
        mine, defaults = flatten(config), flatten(Config())
        ignored = [key for key in _NOT_GIVEN if mine[key] != defaults[key]]
        if ignored:
            what = f"{', '.join(ignored)} is not given to {name}"
            advice = "put what it takes into optimizer.options, by the names of its own arguments"
            yield note("optimizer-options", None, what, advice=advice)
    if name == "muon":
        tensors = adapter_tensors(shapes, config.adapter)
        others = sum(count for shape, count in tensors.items() if len(shape) != 2)
        if others:
            what = f"{others} of {tensors.total()} tensors are not matrices, so AdamW trains them"
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


def state_bytes(
    tensors: Mapping[Shape, int], optimizer: str, options: Mapping[str, Any] = MappingProxyType({})
) -> tuple[int, int]:
    """Return the bytes of an optimizer's states that stay on the device, and those the driver may page out.

    `tensors` is the number of trained tensors by shape. An optimizer that is given as `module:Class` with its
    `options` is made and tried once for each shape.
    """
    on_device = paged = 0
    for shape, count in tensors.items():
        for size, is_paged in _states(shape, optimizer, options):
            on_device += 0 if is_paged else count * size
            paged += count * size if is_paged else 0
    return on_device, paged


def copied_bytes(
    tensors: Mapping[Shape, int],
    optimizer: str,
    options: Mapping[str, Any] = MappingProxyType({}),
    *,
    pinned: bool,
    copies: int = 0,
) -> int:
    """Return the bytes of the host copies for saving: fp32 masters, optimizer states, and the export.

    Torch rounds each `pinned` tensor up to a power of two, at least a page. Paged states are not device
    memory for torch, so their copies are not pinned. `copies` counts
    further sets of the masters' size (a running average, the best weights).
    """
    total = 0
    for shape, count in tensors.items():
        # The masters, further sets of their size, and the export.
        masters = ((MASTER_BYTES * math.prod(shape), False),) * (2 + copies)
        for size, is_paged in (*masters, *_states(shape, optimizer, options)):
            total += count * (pinned_bytes(size) if pinned and not is_paged else size)
    return total


def _states(
    shape: Shape, optimizer: str, options: Mapping[str, Any]
) -> tuple[tuple[int, bool], ...]:
    """Return (bytes, is paged) for each state of one tensor."""
    if optimizer not in OPTIMIZERS:
        return tuple((size, False) for size in measured_states(optimizer, options, shape))
    elements, row = math.prod(shape), OPTIMIZERS[optimizer]
    if row.states_8bit:
        if elements < EIGHT_BIT_ELEMENTS:
            return ((4 * elements, False),) * row.states_8bit
        # Rounded up: a last, shorter group has a scale too.
        scales = 4 * math.ceil(elements / SCALED_ELEMENTS)
        is_paged = row.is_paged and elements >= PAGED_ELEMENTS
        return ((elements, is_paged), (scales, False)) * row.states_8bit
    if row.state_elements is not None:
        return tuple((4 * size, False) for size in row.state_elements(shape))
    return ((4 * elements, False),) * row.states

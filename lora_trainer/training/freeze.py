"""Freezes parts of the adapter (a text encoder's, say) after a share of the steps.

A frozen parameter gets no gradient, and optimizers skip parameters without one: neither weight decay nor
momentum moves it. Freezing depends on the step number alone, so a resumed run does the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class FreezeAfter:
    """Parameters that are trained in the steps before `end_step` (0-based) and frozen from then on."""

    parameters: Sequence[nn.Parameter]
    end_step: int


def end_step(share: float, *, steps: int) -> int:
    """Return the first step (0-based) after a share of all steps; at least 1, so that one step trains."""
    return max(1, round(share * steps))


def enter_stages(stages: Sequence[FreezeAfter], *, step: int) -> None:
    """Set `requires_grad` of the parameters of all stages for this step (0-based)."""
    for stage in stages:
        for parameter in stage.parameters:
            parameter.requires_grad_(step < stage.end_step)

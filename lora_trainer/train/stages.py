"""Which parts of the adapter are trained in a step: some of them stop before the end.

What has stopped gets no gradient, and optimizers leave a parameter without one alone: no weight decay
and no momentum moves it. Which stage a step is in follows from its number, so a resume agrees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Parameters that are trained in the steps before `end_step` (0-based) and stay as they are then."""

    parameters: Sequence[nn.Parameter]
    end_step: int


def end_step(share: float, *, steps: int) -> int:
    """Return the first step after a share of all steps, at least one of which is before it."""
    return max(1, round(share * steps))


def enter_stages(stages: Sequence[Stage], *, step: int) -> None:
    """Let gradients reach what is trained in this step (0-based), and nothing else of the stages."""
    for stage in stages:
        for parameter in stage.parameters:
            parameter.requires_grad_(step < stage.end_step)

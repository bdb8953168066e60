"""What has stopped being trained stays as it is, to the bit, whatever the optimizer would do to it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lora_trainer.training.freeze import FreezeAfter, end_step, enter_stages


@pytest.mark.parametrize(
    ("share", "steps", "expected"), [(0.5, 10, 5), (1.0, 7, 7), (0.001, 10, 1), (0.25, 6, 2)]
)
def test_a_share_of_the_steps(share: float, steps: int, expected: int) -> None:
    assert end_step(share, steps=steps) == expected


def test_what_stopped_is_moved_by_neither_momentum_nor_weight_decay() -> None:
    stopping, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([stopping, other], lr=0.1, weight_decay=0.5, fused=True)
    seen = []
    for step in range(6):
        enter_stages([FreezeAfter(parameters=[stopping], end_step=3)], step=step)
        (stopping * other).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seen.append((stopping.detach().clone(), other.detach().clone()))
    moved = [
        [not torch.equal(one[part], two[part]) for one, two in zip(seen, seen[1:], strict=False)]
        for part in (0, 1)
    ]
    assert moved == [[True, True, False, False, False], [True] * 5]


def test_a_step_that_is_gone_back_to_is_trained_as_before() -> None:
    parameter = nn.Parameter(torch.ones(1))
    stages = [FreezeAfter(parameters=[parameter], end_step=3)]
    for step, trained in ((2, True), (3, False), (2, True)):
        enter_stages(stages, step=step)
        assert parameter.requires_grad is trained

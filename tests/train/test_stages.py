"""What has stopped being trained stays as it is, to the bit, whatever the optimizer would do to it."""

from __future__ import annotations

import torch
from torch import nn

from lora_trainer.training.training import FreezeAfter


def test_what_stopped_is_moved_by_neither_momentum_nor_weight_decay() -> None:
    stopping, other = (nn.Parameter(torch.ones(3)) for _ in range(2))
    optimizer = torch.optim.AdamW([stopping, other], lr=0.1, weight_decay=0.5, fused=True)
    stage = FreezeAfter(parameters=[stopping], end_step=3)
    # Step 2 comes again after a rollback, and is trained as before.
    for step, is_moved in ((0, True), (1, True), (2, True), (3, False), (4, False), (2, True)):
        stage.enter(step)
        before = (stopping.detach().clone(), other.detach().clone())
        (stopping * other).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        assert torch.equal(stopping, before[0]) is not is_moved
        assert not torch.equal(other, before[1])

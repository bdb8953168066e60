"""What a run does when the device is full with one image at a time: the same result in less memory.

Input is a denoiser as planned, output the remedies in the order of what they cost: blocks are
recomputed, their inputs wait in host memory, then their weights do.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import nn

from lora_trainer.config import CHECKPOINTING, MemorySettings, concrete
from lora_trainer.model.checkpointing import apply_checkpointing
from lora_trainer.model.streaming import repeated_blocks, stream_blocks
from lora_trainer.train.training import Remedy


def remedies(
    denoiser: nn.Module, settings: MemorySettings, *, device: torch.device
) -> tuple[Remedy, ...]:
    """Return what is left to do beyond the planned settings; each is applied on top of those before."""
    return tuple(_remedies(denoiser, settings, device))


def _remedies(
    denoiser: nn.Module, settings: MemorySettings, device: torch.device
) -> Iterator[Remedy]:
    planned = concrete(settings.gradient_checkpointing)
    stronger = CHECKPOINTING[CHECKPOINTING.index(planned) :]
    for old, new in zip(stronger, stronger[1:], strict=False):
        yield Remedy(
            key="memory.gradient_checkpointing",
            old=old,
            new=new,
            apply=partial(apply_checkpointing, denoiser, new),
        )
    blocks = len(repeated_blocks(denoiser))
    if not concrete(settings.streamed_blocks) and blocks:
        yield Remedy(
            key="memory.streamed_blocks",
            old=0,
            new=blocks,
            apply=partial(_stream, denoiser, blocks, device),
        )


def _stream(denoiser: nn.Module, count: int, device: torch.device) -> None:
    stream_blocks(denoiser, count=count, device=device)

"""The plain way to compute a planned training: which memory and speed features are undone.

Every change gives the same adapter up to rounding and takes no more device memory than planned, except for
modulation layers, which come back to the device only where there is room.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from lora_trainer.config.config import Checkpointing, RunConfig
from lora_trainer.hardware.device_calls import free_and_total_bytes, kind_of
from lora_trainer.network.checkpointing import apply_checkpointing
from lora_trainer.network.quantize import dequantize_products
from lora_trainer.run.build import TrainComponents
from lora_trainer.run.oom_fallbacks import oom_fallbacks
from lora_trainer.training.training import OomFallback, PlainWay

PLAIN: Checkpointing = "full"
"""torch's own checkpointing of whole blocks."""


def plain_way(config: RunConfig, parts: TrainComponents, *, sharing: int) -> PlainWay:
    """Return the plain way of a training whose networks are as planned; nothing is applied yet."""
    planned = config.memory.model_copy(update={"gradient_checkpointing": PLAIN, "kept_share": 0.0})
    return PlainWay(
        changes=tuple(_changes(config, parts)),
        remedies=oom_fallbacks(
            parts.networks.denoiser, planned, device=parts.model.device, sharing=sharing
        ),
    )


def _changes(config: RunConfig, parts: TrainComponents) -> Iterator[OomFallback]:
    memory, networks = config.memory, parts.networks
    kind, share = memory.gradient_checkpointing, memory.kept_share
    recompute = partial(apply_checkpointing, networks.denoiser, PLAIN)
    if kind != PLAIN:
        yield OomFallback(key="memory.gradient_checkpointing", old=kind, new=PLAIN, apply=recompute)
    elif share:
        yield OomFallback(key="memory.kept_share", old=share, new=0.0, apply=recompute)
    if networks.int8 is not None and not networks.int8.against_forward:
        yield OomFallback(
            key="memory.base_matmul",
            old="int8",
            new="dequantized",
            apply=partial(dequantize_products, networks.denoiser),
        )
    if parts.streamed is not None:
        yield OomFallback(
            key="copies of streamed blocks",
            old="ahead",
            new="when due",
            apply=parts.streamed.copy_when_due,
        )
    if networks.modulation is not None and parts.model.foresight is not None:
        if _room_bytes(parts.model.device) > networks.modulation.host_bytes:
            yield OomFallback(
                key="memory.modulation_cache", old=True, new=False, apply=partial(_put_back, parts)
            )
        else:
            yield OomFallback(
                key="copies of modulation layers",
                old="ahead",
                new="when due",
                apply=networks.modulation.copy_when_due,
            )


def _put_back(parts: TrainComponents) -> None:
    assert parts.networks.modulation is not None and parts.model.foresight is not None
    parts.model.foresight.end()
    parts.networks.modulation.put_back(parts.networks.denoiser)


def _room_bytes(device: torch.device) -> float:
    """Return a rough estimate of the device memory that the planned step leaves free.

    Before the first step no activation is allocated yet, so half of the free memory counts as needed.
    """
    if not kind_of(device).own_memory:
        return float("inf")
    free_bytes, _ = free_and_total_bytes(device)
    return free_bytes / 2

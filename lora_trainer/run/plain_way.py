"""The plain way to compute a planned training: which memory and speed features are undone.

Every change gives the same adapter up to rounding and takes no more device memory than planned.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lora_trainer.config.config import Checkpointing, RunConfig
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.quantize import dequantize_products
from lora_trainer.run.build import TrainComponents
from lora_trainer.run.oom_fallbacks import oom_fallbacks
from lora_trainer.training.training import OomFallback, PlainWay

PLAIN: Checkpointing = "full"
"""torch's own checkpointing of whole blocks."""


def plain_way(config: RunConfig, parts: TrainComponents, *, sharing: int) -> PlainWay:
    """Return the plain way of a training whose networks are as planned; nothing is applied yet."""
    planned = config.memory.model_copy(update={"gradient_checkpointing": PLAIN})
    return PlainWay(
        changes=tuple(_changes(config, parts)),
        remedies=oom_fallbacks(
            parts.networks.denoiser, planned, device=parts.model.device, sharing=sharing
        ),
    )


def _changes(config: RunConfig, parts: TrainComponents) -> Iterator[OomFallback]:
    memory, networks = config.memory, parts.networks
    kind = memory.gradient_checkpointing
    recompute = partial(apply_checkpointing, networks.denoiser, PLAIN)
    if kind != PLAIN:
        yield OomFallback(key="memory.gradient_checkpointing", old=kind, new=PLAIN, apply=recompute)
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

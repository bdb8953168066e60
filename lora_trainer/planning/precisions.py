"""Which precisions a base is computed in on a card: what the family allows, of what the card has. No torch."""

from __future__ import annotations

from collections.abc import Sequence

from lora_trainer.config.config import Precision
from lora_trainer.hardware.machine import Gpu


def on_card(allowed: Sequence[Precision], gpu: Gpu) -> tuple[Precision, ...]:
    """Return those of a family's precisions that a card computes itself, the best first; fp32 is one of them.

    Other cards compute bf16 by way of fp32: right, but slowly, and with attention that keeps all scores.
    """
    return tuple(precision for precision in allowed if precision != "bf16" or gpu.has_bf16)


def in_16_bits(allowed: Sequence[Precision], gpu: Gpu | None) -> Precision | None:
    """Return the best 16-bit precision of a family's on a card, None where there is none."""
    found = on_card(allowed, gpu) if gpu is not None else ()
    return next((precision for precision in found if precision != "fp32"), None)

"""Which pictures are held out for the validation loss: a draw by content, so file names do not matter."""

from __future__ import annotations

from collections.abc import Sequence

from lora_trainer.data.scan import ImageRecord
from lora_trainer.randomness import Stream, shuffled


def hold_out(
    records: Sequence[ImageRecord], *, fraction: float, seed: int
) -> tuple[tuple[ImageRecord, ...], tuple[ImageRecord, ...]]:
    """Split records into (trained, held out), the second `fraction` of all, rounded down.

    Files with identical bytes stay on one side, so that no held-out picture is ever trained.
    """
    contents = shuffled({record.content_hash for record in records}, seed, Stream.VALIDATION_SPLIT)
    held = frozenset(contents[: int(fraction * len(contents))])
    trained = tuple(record for record in records if record.content_hash not in held)
    return trained, tuple(record for record in records if record.content_hash in held)

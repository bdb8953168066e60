"""The samples of a slider at one step, from less to more.

Input: the samples of a run's history. Output: for each prompt the image at each strength.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_trainer.config.prompt_line import without_strength
from lora_trainer.reporting.history import SampleImage


@dataclass(frozen=True, kw_only=True)
class Strips:
    """The newest samples of prompts that were drawn at several strengths."""

    step: int
    strengths: tuple[float, ...]
    """From less to more."""
    rows: Mapping[tuple[str, str], Sequence[SampleImage | None]]
    """For each prompt without its strength, with its seed: the image at each strength, None where it was not drawn."""


def strips_of(samples: Sequence[SampleImage]) -> Strips | None:
    """Return the strips of the newest step; None without a prompt at several strengths."""
    last = max((image.step for image in samples), default=0)
    drawn: dict[tuple[str, str], dict[float, SampleImage]] = {}
    for image in samples:
        if image.step != last:
            continue
        prompt, strength = without_strength(image.prompt)
        if strength is not None:
            drawn.setdefault((prompt, image.seed), {})[strength] = image
    several = {name: images for name, images in drawn.items() if len(images) > 1}
    if not several:
        return None
    strengths = tuple(sorted({strength for images in several.values() for strength in images}))
    return Strips(
        step=last,
        strengths=strengths,
        rows={
            name: tuple(images.get(strength) for strength in strengths)
            for name, images in several.items()
        },
    )

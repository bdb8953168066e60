"""Pairs of drawn scenes that differ in one attribute, with the instruction that leads from one to the other.

Usage: python scripts/base/edits.py FOLDER [--count 30]: writes a dataset of pairs for the edit that the base never saw

Input: a seed and an index. Output: two images, the second drawn with the same random numbers as the first, and a
sentence. What the editing base learns is `learned_edit`: another colour of the object or of the background, or the
face or the dots taken away. `night` is what it never sees: an edit for a user's LoRA.
"""

from __future__ import annotations

import argparse
import random
from dataclasses import dataclass
from pathlib import Path

from PIL import Image
from scenes import COLOURS, scene_of

NIGHT = "make it night"
NIGHT_COLOUR = "black"
TRAINED_SEED, HELD_OUT_SEED = 1, 2


@dataclass(frozen=True, kw_only=True)
class Edit:
    """Two images of one size, the instruction between them, and the two colours that the second has.

    `way_back` leads from the second to the first; None where a sentence of this kind cannot say it.
    """

    before: Image.Image
    after: Image.Image
    instruction: str
    way_back: str | None = None
    object_colour: str
    background_colour: str


def learned_edit(seed: int, index: int, width_px: int = 64, height_px: int = 64) -> Edit:
    """Draw edit `index` of the editing base's training."""
    rng = random.Random(f"edit/{seed}/{index}")
    colour, background, other = rng.sample(list(COLOURS), 3)
    key, size_px = f"edit/{seed}/{index}/drawing", (width_px, height_px)
    before = scene_of(key, colour, background, *size_px)
    kind = rng.choices(("object", "background", "extra"), (5, 4, 1))[0]
    way_back: str | None = None
    attempt = 0
    while kind == "extra" and before.extra is None:
        attempt += 1
        key = f"edit/{seed}/{index}/drawing {attempt}"
        before = scene_of(key, colour, background, *size_px)
    match kind:
        case "object":
            way_back = f"recolour the object {colour}"
            instruction, colour = f"recolour the object {other}", other
        case "background":
            way_back = f"recolour the background {background}"
            instruction, background = f"recolour the background {other}", other
        case _:
            instruction = f"remove the {before.extra}"
    after = scene_of(key, colour, background, *size_px, plain=kind == "extra")
    return Edit(
        before=before.image, after=after.image, instruction=instruction, way_back=way_back,
        object_colour=colour, background_colour=background,
    )  # fmt: skip


def night(seed: int, index: int, width_px: int = 64, height_px: int = 64) -> Edit:
    """Draw edit `index` of a user: the background turns black, everything else stays."""
    rng = random.Random(f"night/{seed}/{index}")
    colour, background = rng.sample([name for name in COLOURS if name != NIGHT_COLOUR], 2)
    key, size_px = f"night/{seed}/{index}/drawing", (width_px, height_px)
    return Edit(
        before=scene_of(key, colour, background, *size_px).image,
        after=scene_of(key, colour, NIGHT_COLOUR, *size_px).image,
        instruction=NIGHT,
        object_colour=colour,
        background_colour=NIGHT_COLOUR,
    )


def write_pairs(folder: Path, count: int) -> None:
    """Write pairs of `night` as a dataset: images, their captions, and references of their names."""
    references = folder / "references"
    references.mkdir(parents=True)
    for index in range(count):
        edit = night(TRAINED_SEED, index)
        edit.after.save(folder / f"{index:02}.png")
        edit.before.save(references / f"{index:02}.png")
        (folder / f"{index:02}.txt").write_text(edit.instruction + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=30)
    options = parser.parse_args()
    write_pairs(options.folder, options.count)


if __name__ == "__main__":
    main()

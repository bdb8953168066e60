"""Pairs of drawn scenes for a slider from blue to red: everything but the object's colour is the same.

Usage: python scripts/base/colour_pairs.py FOLDER [--count 8]: writes a dataset with `more/` and `less/`

The captions do not name the colour, which is what the slider changes.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from scenes import scene_of

SIDES = {"more": "red", "less": "blue"}
SIDE_PX = 64


def write_pairs(folder: Path, count: int) -> None:
    """Write pairs of images, and a caption beside each image of `more`."""
    for index in range(count):
        for side, colour in SIDES.items():
            (folder / side).mkdir(parents=True, exist_ok=True)
            scene = scene_of(f"slider/{index}", colour, "white", SIDE_PX, SIDE_PX, plain=True)
            scene.image.save(folder / side / f"{index:02}.png")
            if side == "more":
                words = scene.caption.replace(f" {colour} ", " ").replace("a egg", "an egg")
                (folder / side / f"{index:02}.txt").write_text(words + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, write the dataset."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=8)
    options = parser.parse_args()
    write_pairs(options.folder, options.count)


if __name__ == "__main__":
    main()

"""Draw the example dataset: 16 captioned images of the cartoon character Zibbo.

Usage: python scripts/draw_example.py [--output datasets/example]

The same files every time; sizes, aspect ratios and formats are mixed, as in a real dataset.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "base"))

from characters import ZIBBO, Pose, draw  # noqa: E402 - after sys.path
from scenes import COLOURS  # noqa: E402 - after sys.path

TRIGGER = "zibbo"
SAVE_OPTIONS: dict[str, dict[str, Any]] = {
    "png": {"optimize": True},
    "jpg": {"quality": 92},
    "webp": {"quality": 92, "method": 6},
}
LEFT, RIGHT, UP, DOWN = (-1.0, 0.0), (1.0, 0.0), (0.0, -1.0), (0.0, 1.0)
LEFT_UP = (-0.6, -0.4)
# Width and height in pixels, background, format, pose.
PICTURES: tuple[tuple[int, int, str, str, Pose], ...] = (
    (256, 256, "yellow", "png", Pose(arms="waving", tilt=-4)),
    (320, 240, "red", "jpg", Pose(arms="arms up", mouth="laughing", position=(0.4, 0.58))),
    (240, 320, "purple", "webp", Pose(gaze=LEFT, scale=0.71)),
    (384, 256, "white", "png", Pose(arms="arms out", mouth="surprised", position=(0.62, 0.57))),
    (256, 384, "pink", "jpg", Pose(arms="waving", mouth="laughing", scale=0.67, tilt=-3)),
    (448, 280, "blue", "webp", Pose(gaze=UP, mouth="surprised", position=(0.4, 0.57), scale=0.62)),
    (448, 448, "brown", "png", Pose(arms="arms up", tilt=-8, scale=0.57)),
    (213, 160, "gray", "jpg", Pose(gaze=RIGHT, mouth="sad", tilt=5)),
    (192, 256, "black", "webp", Pose(arms="pointing left", gaze=LEFT_UP, scale=0.65)),
    (288, 192, "yellow", "jpg", Pose(arms="arms up", mouth="surprised", position=(0.64, 0.58))),
    (224, 336, "gray", "png", Pose(gaze=DOWN, mouth="sad", tilt=-6, scale=0.71)),
    (384, 240, "red", "webp", Pose(arms="pointing left", mouth="laughing", position=(0.57, 0.57))),
    (192, 192, "pink", "jpg", Pose(mouth="laughing", scale=0.61, tilt=10)),
    (400, 300, "purple", "png", Pose(arms="waving", gaze=RIGHT, position=(0.52, 0.58), tilt=-9)),
    (270, 360, "blue", "jpg", Pose(arms="arms out", tilt=4, scale=0.64)),
    (352, 352, "white", "webp", Pose(arms="arms out", mouth="sad", tilt=-10)),
)  # fmt: skip
README = """\
# Example dataset: Zibbo
Sixteen captioned images of an original cartoon character. The trigger word is `zibbo`.
Drawn by `scripts/draw_example.py` from plain shapes: no artwork, photograph or image model.
Sizes, aspect ratios and formats (PNG, JPEG, WebP) differ on purpose, as in a real dataset.
Licence: CC0 1.0 (public domain), do with it what you like.
"""


def draw_example(folder: Path) -> None:
    """Write the images, their captions and a README into the folder, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, (width_px, height_px, background, suffix, pose) in enumerate(PICTURES, start=1):
        image = draw(
            ZIBBO, pose, width_px=width_px, height_px=height_px, background=COLOURS[background]
        )
        stem = f"{TRIGGER}_{number:02}"
        image.save(folder / f"{stem}.{suffix}", **SAVE_OPTIONS[suffix])
        article = "an" if background == "orange" else "a"
        caption = f"{TRIGGER}, {ZIBBO.words}, {pose.words}, on {article} {background} background"
        (folder / f"{stem}.txt").write_text(caption + "\n", encoding="utf-8")
    (folder / "README.md").write_text(README, encoding="utf-8")


def main() -> None:
    """Read the command line and draw."""
    parser = argparse.ArgumentParser(description="Draw the example dataset.")
    parser.add_argument("--output", type=Path, default=Path("datasets/example"), metavar="FOLDER")
    draw_example(parser.parse_args().output)


if __name__ == "__main__":
    main()

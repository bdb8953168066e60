"""Draws the strip of samples at the top of README.md: one prompt and seed a row, from step 0 to the end of a run.

`lora-train datasets/example && python scripts/sample_strip.py runs/example` writes docs/pictures/strip.jpg;
the last column is images of the dataset, which the LoRA learned from.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont, ImageOps

OUT = Path(__file__).resolve().parents[1] / "docs" / "pictures" / "strip.jpg"
SIDE_PX, GAP_PX, LABEL_PX = 192, 6, 28
EXAMPLE = OUT.parents[2] / "datasets" / "example"
LEARNED = ("zibbo_01.png", "zibbo_04.png")
SHOWN = 5
"""Columns: step 0, the last step, and steps between them at equal distances."""


def main() -> None:
    """Read a run's samples and write the strip."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("run", type=Path)
    arguments.add_argument("--prompts", type=int, nargs="+", default=[2, 1])
    arguments.add_argument(
        "--images", type=Path, nargs="+", default=[EXAMPLE / name for name in LEARNED]
    )
    options = arguments.parse_args()
    folders = sorted((options.run / "samples").glob("step-*"))
    shown = [folders[round(i * (len(folders) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
    strip(shown, options.prompts, options.images).save(OUT, quality=90, optimize=True)


def strip(folders: list[Path], prompts: list[int], images: list[Path]) -> Image.Image:
    """Return the samples as a grid, a row a prompt and a column a step, and images of the dataset beside them."""
    width_px = (len(folders) + 1) * (SIDE_PX + GAP_PX) + GAP_PX
    height_px = LABEL_PX + len(prompts) * (SIDE_PX + GAP_PX) - GAP_PX
    picture = Image.new("RGB", (width_px, height_px), "white")
    for column, folder in enumerate(folders):
        step = int(folder.name.removeprefix("step-"))
        words = "base model" if step == 0 else f"step {step}"
        samples = [folder / f"{prompt:02d}.png" for prompt in prompts]
        _paste(picture, column * (SIDE_PX + GAP_PX), words, samples)
    _paste(picture, width_px - SIDE_PX, "trained on", images)
    return picture


def _paste(picture: Image.Image, left_px: int, words: str, tiles: list[Path]) -> None:
    font = ImageFont.load_default(size=18)
    at = (left_px + SIDE_PX / 2, LABEL_PX / 2)
    ImageDraw.Draw(picture).text(at, words, "#333", font, anchor="mm")
    for row, path in enumerate(tiles):
        with Image.open(path) as image:
            tile = ImageOps.fit(image.convert("RGB"), (SIDE_PX, SIDE_PX), Image.Resampling.LANCZOS)
        picture.paste(tile, (left_px, LABEL_PX + row * (SIDE_PX + GAP_PX)))


if __name__ == "__main__":
    main()

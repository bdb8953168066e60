"""Check a slider of the embedded base: does its property follow the strength, and does everything else stay?

Usage: python scripts/base/evaluate_slider.py runs/colour --property colour [--seeds 20] [--strip FILE] [--json FILE]

For fixed seeds the prompt of the slider is drawn at the strengths -2, -1, 0, 1, 2 through diffusers' plain pipeline
with the exported file. Measured are the object's colour, its size and its place, and the background's colour, each as
a share of the range that the scenes of the base's training have: of colour from the palette's blue (0) to its red (1),
of size from the radius of small objects (0) to that of large ones (1), of place a quarter of the side, of other
colours the mean distance of two colours of the palette.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from colour_measure import DIFFERENT_DELTA_E, lab
from evaluate import GUIDANCE_SCALE, RESOLUTION_PX, ROOT, STEPS, write_json
from evaluate_lora import open_run
from PIL import Image
from scenes import COLOURS, SIZES

STRENGTHS = (-2.0, -1.0, 0.0, 1.0, 2.0)
FIRST_SEED = 60_000
RED, BLUE = (lab(COLOURS[name]) for name in ("red", "blue"))
PLACE_RANGE = 0.25
ALLOWED_DRIFT = 1 / 3
ZOOM = 2


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What an image shows, each in ranges; `object_colour` and `background` are Lab."""

    colour: float
    size: float
    place: Any
    object_colour: Any
    background: Any

    def away(self, other: Measured, what: str) -> float:
        """Return how far two images are apart in one respect, in ranges."""
        match what:
            case "colour" | "size":
                return abs(float(getattr(self, what) - getattr(other, what)))
            case "place":
                return float(np.linalg.norm(self.place - other.place)) / PLACE_RANGE
            case _:
                difference = getattr(self, what) - getattr(other, what)
                return float(np.linalg.norm(difference)) / _palette_range()


def _palette_range() -> float:
    colours = [lab(rgb) for rgb in COLOURS.values()]
    return fmean(float(np.linalg.norm(a - b)) for a, b in itertools.combinations(colours, 2))


def measure(image: Image.Image) -> Measured:
    """Measure an image of one object on a plain background, which the border shows."""
    values = lab(np.asarray(image.convert("RGB")))
    border = np.concatenate([values[:3].reshape(-1, 3), values[-3:].reshape(-1, 3)])
    background = np.median(border, axis=0)
    inside = np.linalg.norm(values - background, axis=-1) > DIFFERENT_DELTA_E
    if not inside.any():
        raise SystemExit("an image shows no object: the slider is too strong to be measured")
    object_colour = np.median(values[inside], axis=0)
    rows, columns = np.nonzero(inside)
    height, width = inside.shape
    small, large = (fmean(SIZES[name]) for name in ("small", "large"))
    line = RED - BLUE
    return Measured(
        colour=float((object_colour - BLUE) @ line / (line @ line)),
        size=(float(np.sqrt(inside.mean() / np.pi)) - small) / (large - small),
        # Medians: a few specks of the background far from the object say nothing of its place.
        place=np.array([np.median(columns) / width, np.median(rows) / height]),
        object_colour=object_colour,
        background=background,
    )


# What has to stay, by the property that a slider moves. The object's whole colour moves with a slider of colour.
OTHERS = {
    "colour": ("size", "place", "background"),
    "size": ("object_colour", "place", "background"),
}


def evaluate(rows: Sequence[Sequence[Measured]], moved: str) -> dict[str, Any]:
    """Return what is asked of a slider, from the images of each seed by strength."""
    centre = STRENGTHS.index(0.0)
    values = [[float(getattr(one, moved)) for one in row] for row in rows]
    monotone = [all(a < b for a, b in itertools.pairwise(row)) for row in values]

    def furthest(what: str) -> float:
        """Return the mean over the seeds of the furthest from strength 0."""
        return fmean(max(one.away(row[centre], what) for one in row) for row in rows)

    way = furthest(moved)
    steps = [
        fmean(row[at] for row in values) - fmean(row[centre] for row in values) for at in range(5)
    ]
    return {
        "seeds": len(rows),
        "monotone": sum(monotone) / len(monotone),
        "moves": way,
        "by_strength": dict(zip(map(str, STRENGTHS), steps, strict=True)),
        "drift": {what: furthest(what) / way for what in OTHERS[moved]},
    }


def main() -> None:
    """Read the command line, draw, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--property", choices=sorted(OTHERS), default="colour")
    parser.add_argument("--prompt", help="another than the slider's own")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=STEPS, help="denoising steps of an image")
    parser.add_argument("--strip", type=Path, default=ROOT / "build" / "base" / "slider.png")
    parser.add_argument("--rows", type=int, default=4, help="seeds in the strip")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    run = open_run(options.run, base=None)
    prompt = options.prompt
    if prompt is None:
        sample = [row for row in run.events if row["event"] == "sample"][-1]["images"][0]
        prompt = sample["prompt"].partition(" --m ")[0]
    pipeline = run.pipeline(adapted=True)
    images = []
    for strength in STRENGTHS:
        pipeline.set_adapters(pipeline.get_active_adapters(), adapter_weights=strength)
        drawn = pipeline(
            [prompt] * options.seeds,
            generator=[torch.Generator().manual_seed(FIRST_SEED + k) for k in range(options.seeds)],
            num_inference_steps=options.steps,
            guidance_scale=GUIDANCE_SCALE,
            width=RESOLUTION_PX,
            height=RESOLUTION_PX,
        )
        images.append(drawn.images)
    by_seed = list(zip(*images, strict=True))
    found = evaluate([[measure(image) for image in row] for row in by_seed], options.property)
    print(json.dumps(found, indent=2))
    is_monotone, drift = found["monotone"] >= 0.9, max(found["drift"].values())
    print(f"monotone in {found['monotone']:.0%} of {options.seeds} (asked: 90 %): {is_monotone}")
    print(f"largest drift {drift:.2f} of the change (asked: below 0.33): {drift < ALLOWED_DRIFT}")
    write_json(options.json, {"prompt": prompt, **found})
    side = by_seed[0][0].width * ZOOM
    rows = by_seed[: options.rows]
    sheet = Image.new("RGB", (len(STRENGTHS) * side, len(rows) * side), "white")
    for y, row in enumerate(rows):
        for x, image in enumerate(row):
            zoomed = image.resize((side, side), Image.Resampling.BICUBIC)
            sheet.paste(zoomed, (x * side, y * side))
    options.strip.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(options.strip)
    print(f"strip: {options.strip}")


if __name__ == "__main__":
    main()

"""Check the embedded base: does it draw the colours it is asked for, how exact is its autoencoder.

Usage: python scripts/base/evaluate.py [--base FOLDER] [--images 100] [--sheet FILE] [--json FILE]

Fixed prompts and seeds through diffusers' plain StableDiffusionPipeline, 25 steps at guidance 5; the
colours are measured by `colour_measure`. Then the PSNR of images the autoencoder has never seen,
cut as the trainer cuts them. Prints tables, writes a contact sheet (wrong images in a red frame).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from colour_measure import NAMES, Seen, look
from diffusers import StableDiffusionPipeline
from PIL import Image, ImageDraw
from scenes import SHAPES
from vae import psnr_db

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from lora_trainer.config.inputs import DataSettings  # noqa: E402 - after sys.path
from lora_trainer.dataset.buckets import buckets_for, cut, place  # noqa: E402 - after sys.path
from lora_trainer.dataset.images import IMAGE_EXTENSIONS, decode  # noqa: E402 - after sys.path

STEPS, GUIDANCE_SCALE = 25, 5.0
FIRST_SEED = 20_000
RESOLUTION_PX, BUCKET_STEP_PX = 64, 8
SHEET_COLUMNS, ZOOM, CAPTION_PX = 10, 2, 24


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """A sentence and the two colours it asks for."""

    text: str
    object_colour: str
    background_colour: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was asked for, with which seed, and what was drawn."""

    prompt: Prompt
    seed: int
    seen: Seen

    @property
    def object_right(self) -> bool:
        return self.seen.object_colour == self.prompt.object_colour

    @property
    def background_right(self) -> bool:
        return self.seen.background_colour == self.prompt.background_colour


def prompts(count: int) -> list[Prompt]:
    """Return the first `count` fixed prompts: every pair of two colours once, in a fixed order."""
    rng = random.Random("evaluate/prompts")
    pairs = [(first, second) for first in NAMES for second in NAMES if first != second]
    rng.shuffle(pairs)
    found = []
    for index in range(count):
        colour, background = pairs[index % len(pairs)]
        article = "an" if background == "orange" else "a"
        text = f"a large {colour} {rng.choice(SHAPES)} on {article} {background} background"
        found.append(Prompt(text=text, object_colour=colour, background_colour=background))
    return found


def load_pipeline(base: Path) -> StableDiffusionPipeline:
    """Load a base of the diffusers layout in float32, as any other program would."""
    pipeline = StableDiffusionPipeline.from_pretrained(base, dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(
    pipeline: StableDiffusionPipeline, texts: Sequence[str], *, first_seed: int, batch: int
) -> Iterator[Image.Image]:
    """Yield one 64x64 image per prompt; number k has the seed `first_seed` + k whatever the batch."""
    for first in range(0, len(texts), batch):
        group = list(texts[first : first + batch])
        seeds = range(first_seed + first, first_seed + first + len(group))
        yield from pipeline(
            group,
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=STEPS,
            guidance_scale=GUIDANCE_SCALE,
            width=RESOLUTION_PX,
            height=RESOLUTION_PX,
        ).images


def reconstruction_db(pipeline: StableDiffusionPipeline, dataset: Path) -> dict[str, float]:
    """Return the PSNR of each image of a folder, bucketed and cut as the trainer does, in dB."""
    settings = DataSettings()
    buckets = buckets_for(
        resolution_px=RESOLUTION_PX, step_px=BUCKET_STEP_PX, max_aspect=settings.max_aspect
    )
    found = {}
    for file in sorted(dataset.iterdir()):
        if file.suffix.lower() in IMAGE_EXTENSIONS:
            image = decode(file, settings=settings).image
            placed = cut(image, place(*image.size, buckets=buckets), flip=False)
            found[file.name] = psnr_db(pipeline.vae, [placed])
    return found


def share(rights: Sequence[bool]) -> float:
    """Return the share of True, 0 of nothing."""
    return sum(rights) / len(rights) if rights else 0.0


def print_table(verdicts: Sequence[Verdict]) -> None:
    """Print right of asked for each colour as object and as background, then the totals."""
    print(f"{'colour':8} {'object':>9} {'background':>11}   drawn instead")
    for name in NAMES:
        objects = [one for one in verdicts if one.prompt.object_colour == name]
        backgrounds = [one for one in verdicts if one.prompt.background_colour == name]
        wrong = [str(one.seen.object_colour) for one in objects if not one.object_right]
        wrong += [one.seen.background_colour for one in backgrounds if not one.background_right]
        right = sum(one.object_right for one in objects)
        right_behind = sum(one.background_right for one in backgrounds)
        counts = f"{right:4}/{len(objects):<4} {right_behind:6}/{len(backgrounds):<4}"
        print(f"{name:8} {counts}   {', '.join(wrong)}")


def write_sheet(
    file: Path, tiles: Sequence[tuple[Image.Image, str, bool]], *, columns: int = SHEET_COLUMNS
) -> None:
    """Write (image, two lines of text, right) tiles as one PNG, wrong ones in a red frame."""
    width_px, height_px = RESOLUTION_PX * ZOOM + 6, RESOLUTION_PX * ZOOM + 6 + CAPTION_PX
    rows = -(-len(tiles) // columns)
    sheet = Image.new("RGB", (columns * width_px, rows * height_px), "white")
    pen = ImageDraw.Draw(sheet)
    for index, (image, text, right) in enumerate(tiles):
        x, y = index % columns * width_px, index // columns * height_px
        if not right:
            pen.rectangle((x, y, x + width_px - 1, y + height_px - CAPTION_PX - 1), fill="red")
        zoomed = image.resize((image.width * ZOOM, image.height * ZOOM), Image.Resampling.NEAREST)
        sheet.paste(zoomed, (x + 3, y + 3))
        pen.multiline_text((x + 4, y + height_px - CAPTION_PX), text, "black", spacing=0)
    file.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(file)


def write_json(file: Path | None, content: dict[str, Any]) -> None:
    """Write the numbers, if a file for them was named."""
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    """Read the command line, generate, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=ROOT / "lora_trainer" / "embedded")
    parser.add_argument("--dataset", type=Path, default=ROOT / "datasets" / "example")
    parser.add_argument("--images", type=int, default=100)
    parser.add_argument("--batch", type=int, default=20, help="images made at a time")
    parser.add_argument("--sheet", type=Path, default=ROOT / "build" / "base" / "sheet.png")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    pipeline = load_pipeline(options.base)
    asked = prompts(options.images)
    texts = [prompt.text for prompt in asked]
    images = list(generate(pipeline, texts, first_seed=FIRST_SEED, batch=options.batch))
    verdicts = [
        Verdict(prompt=prompt, seed=FIRST_SEED + index, seen=look(image))
        for index, (prompt, image) in enumerate(zip(asked, images, strict=True))
    ]
    print_table(verdicts)
    shares = {
        "object": share([one.object_right for one in verdicts]),
        "background": share([one.background_right for one in verdicts]),
        "both": share([one.object_right and one.background_right for one in verdicts]),
    }
    for name, value in shares.items():
        print(f"{name} right: {value:.1%} of {len(verdicts)}")
    psnr = reconstruction_db(pipeline, options.dataset)
    mean_db = sum(psnr.values()) / len(psnr)
    spread = f"{min(psnr.values()):.2f} to {max(psnr.values()):.2f}"
    print(f"autoencoder on {options.dataset.name}: {mean_db:.2f} dB, {len(psnr)} images, {spread}")
    tiles = [
        (image, _two_lines(one.prompt.text), one.object_right and one.background_right)
        for image, one in zip(images, verdicts, strict=True)
    ]
    write_sheet(options.sheet, tiles)
    print(f"contact sheet: {options.sheet}")
    content = {
        "images": len(verdicts), "steps": STEPS, "guidance_scale": GUIDANCE_SCALE, "right": shares,
        "psnr_db": {"mean": mean_db, "by_image": psnr}, "verdicts": [asdict(one) for one in verdicts],
    }  # fmt: skip
    write_json(options.json, content)


def _two_lines(text: str) -> str:
    return text.removeprefix("a large ").removesuffix(" background").replace(" on ", "\non ")


if __name__ == "__main__":
    main()

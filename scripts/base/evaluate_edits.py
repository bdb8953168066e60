"""Check edits of the embedded editing base on pairs that nothing was trained on, with and without their references.

Usage: python scripts/base/evaluate_edits.py [RUN] [--edit learned|night] [--pairs 50] [--sheet FILE] [--json FILE]

With a RUN its exported LoRA is loaded, else the base is drawn alone. An edit is right where the object and the
background have the colours of the drawn result, by `colour_measure`; beside it how much of the object is where it was,
as the overlap (intersection over union) of what differs from the background. diffusers' plain InstructPix2Pix pipeline
draws; without a reference it is given latents of zeros, which is what it compares with itself.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from colour_measure import DIFFERENT_DELTA_E, lab, look
from diffusers import StableDiffusionInstructPix2PixPipeline, UNet2DConditionModel
from edits import HELD_OUT_SEED, Edit, learned_edit, night
from evaluate import RESOLUTION_PX, ROOT, load_pipeline, share, write_json, write_sheet
from PIL import Image

sys.path.insert(0, str(ROOT))

from lora_trainer.lora_file.write import final_export_name  # noqa: E402 - after sys.path
from lora_trainer.run.run_folder import read_run  # noqa: E402 - after sys.path

EMBEDDED, EMBEDDED_EDIT = (ROOT / "lora_trainer" / name for name in ("embedded", "embedded_edit"))
EDITS: Mapping[str, Callable[[int, int], Edit]] = {"learned": learned_edit, "night": night}
FIRST_SEED = 80_000
BATCH = 25


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What was drawn for a pair, whether it has the right colours, and how much of the object is where it was."""

    image: Image.Image
    right: bool
    overlap: float


def load_editor(unet: Path) -> StableDiffusionInstructPix2PixPipeline:
    """Load the editing base: a U-Net of its own, every other part of the embedded base."""
    plain = load_pipeline(EMBEDDED)
    network = UNet2DConditionModel.from_pretrained(unet, torch_dtype=torch.float32)
    parts = {**plain.components, "unet": network}
    editor = StableDiffusionInstructPix2PixPipeline(**parts, requires_safety_checker=False)
    editor.set_progress_bar_config(disable=True)
    return editor


def inside(image: Image.Image) -> Any:
    """Return which pixels [H, W] differ from the background, which the border shows."""
    values = lab(np.asarray(image.convert("RGB")))
    border = np.concatenate([values[:3].reshape(-1, 3), values[-3:].reshape(-1, 3)])
    return np.linalg.norm(values - np.median(border, axis=0), axis=-1) > DIFFERENT_DELTA_E


def draw(
    editor: Any, edits: Sequence[Edit], *, steps: int, guidance_scale: float, blind: bool
) -> list[Image.Image]:
    """Return an image for each edit, number k with seed `FIRST_SEED` + k; `blind`: without the references."""
    drawn: list[Image.Image] = []
    side = RESOLUTION_PX // editor.vae_scale_factor
    for first in range(0, len(edits), BATCH):
        group = edits[first : first + BATCH]
        seeds = range(FIRST_SEED + first, FIRST_SEED + first + len(group))
        drawn += editor(
            [edit.instruction for edit in group],
            image=torch.zeros(len(group), 4, side, side)
            if blind
            else [edit.before for edit in group],
            generator=[torch.Generator().manual_seed(seed) for seed in seeds],
            num_inference_steps=steps,
            guidance_scale=guidance_scale,
        ).images
    return drawn


def judge(edit: Edit, image: Image.Image) -> Verdict:
    """Compare an image with the drawn result of its edit."""
    seen, wanted = look(image), (edit.object_colour, edit.background_colour)
    here, there = inside(image), inside(edit.after)
    overlap = float((here & there).sum() / max(1, (here | there).sum()))
    right = (seen.object_colour, seen.background_colour) == wanted
    return Verdict(image=image, right=right, overlap=overlap)


def main() -> None:
    """Read the command line, draw, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, nargs="?", help="the folder of a finished run")
    parser.add_argument("--unet", type=Path, default=EMBEDDED_EDIT)
    parser.add_argument("--edit", choices=sorted(EDITS), default="night")
    parser.add_argument("--pairs", type=int, default=50)
    parser.add_argument("--steps", type=int, default=20, help="denoising steps of an image")
    parser.add_argument("--guidance", type=float, default=5.0)
    parser.add_argument("--sheet", type=Path, default=ROOT / "build" / "edits" / "sheet.png")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    editor = load_editor(options.unet)
    if options.run is not None:
        name = final_export_name(read_run(options.run).name)
        editor.load_lora_weights(str(options.run), weight_name=name)
    edits = [EDITS[options.edit](HELD_OUT_SEED, index) for index in range(options.pairs)]
    found: dict[str, Any] = {}
    for title, blind in (("with references", False), ("without references", True)):
        images = draw(
            editor, edits, steps=options.steps, guidance_scale=options.guidance, blind=blind
        )
        verdicts = [judge(edit, image) for edit, image in zip(edits, images, strict=True)]
        right, overlap = share([one.right for one in verdicts]), fmean(v.overlap for v in verdicts)
        print(f"{title}: right {right:.0%} of {len(verdicts)}, overlap {overlap:.2f}")
        found[title] = {"right": right, "overlap": overlap}
        if not blind:
            tiles = []
            for edit, verdict in zip(edits, verdicts, strict=True):
                words = edit.instruction.replace(" the ", " the\n")
                tiles += [(edit.before, words, True), (verdict.image, "", verdict.right)]
            write_sheet(options.sheet, tiles)
    write_json(options.json, {"pairs": len(edits), "steps": options.steps, **found})


if __name__ == "__main__":
    main()

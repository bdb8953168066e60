"""Draws what the miniatures' cards on the page Train show: images of the untouched miniatures, none chosen.

python scripts/base/card_picture.py     # writes gui/assets/miniature.png and miniature_edit.png

The second has a reference, and what the miniature that edits makes of it.
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from edits import HELD_OUT_SEED, learned_edit
from evaluate_edits import EMBEDDED_EDIT, draw, load_editor
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "gui" / "assets" / "miniature.png"
PROMPTS = (
    "a large red circle on a yellow background",
    "a blue star on a white background",
    "an orange heart with a face on a green background",
    "a purple triangle above a yellow square on a black background",
)
PICTURE_EDIT = PICTURE.with_name("miniature_edit.png")
EDIT = 7
STEPS, GUIDANCE, SEED, SIDE_PX = 25, 5.0, 1, 64


def main() -> None:
    """Draw the prompts with one seed each and put them beside each other."""
    pipeline = StableDiffusionPipeline.from_pretrained(
        ROOT / "lora_trainer" / "embedded", torch_dtype=torch.float32, safety_checker=None
    )
    pipeline.set_progress_bar_config(disable=True)
    whole = Image.new("RGB", (len(PROMPTS) * SIDE_PX, SIDE_PX))
    for number, prompt in enumerate(PROMPTS):
        generator = torch.Generator().manual_seed(SEED + number)
        drawn = pipeline(
            prompt, num_inference_steps=STEPS, guidance_scale=GUIDANCE, generator=generator
        )
        whole.paste(drawn.images[0], (number * SIDE_PX, 0))
    whole.save(PICTURE, optimize=True)
    edit = learned_edit(HELD_OUT_SEED, EDIT)
    editor = load_editor(EMBEDDED_EDIT)
    (made,) = draw(editor, [edit], steps=STEPS, guidance_scale=GUIDANCE, blind=False)
    whole = Image.new("RGB", (2 * SIDE_PX, SIDE_PX))
    whole.paste(edit.before, (0, 0))
    whole.paste(made, (SIDE_PX, 0))
    whole.save(PICTURE_EDIT, optimize=True)


if __name__ == "__main__":
    main()

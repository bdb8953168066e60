"""Draws what the miniature's card on the page Train shows: four images of the untouched miniature, none chosen.

python scripts/base/card_picture.py     # writes gui/assets/miniature.png
"""

from __future__ import annotations

from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
PICTURE = ROOT / "gui" / "assets" / "miniature.png"
PROMPTS = (
    "a large red circle on a yellow background",
    "a blue star on a white background",
    "an orange heart with a face on a green background",
    "a purple triangle above a yellow square on a black background",
)
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


if __name__ == "__main__":
    main()

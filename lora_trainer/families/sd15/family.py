"""Stable Diffusion 1.x: one CLIP text encoder, a 4-channel VAE, a convolutional U-Net, epsilon prediction.

The embedded miniature base is of this family too: the same pipeline with small numbers. All sizes are
therefore read from the base's own configs.
"""

from __future__ import annotations

from dataclasses import replace

from lora_trainer.families.base.text.clip import ClipEncoder, clip_encoders
from lora_trainer.families.base.traits import AdapterNames
from lora_trainer.families.base.unet import UNetFamily


class StableDiffusion1(UNetFamily):
    """The family of Stable Diffusion 1.1 to 1.5 and everything fine-tuned from them."""

    name = "sd15"
    text = clip_encoders(ClipEncoder, {"clip_l": "cond_stage_model.transformer."})
    formats = replace(
        UNetFamily.formats,
        names=AdapterNames(kohya="sd_v1", modelspec="stable-diffusion-v1/lora"),
    )


FAMILY = StableDiffusion1()

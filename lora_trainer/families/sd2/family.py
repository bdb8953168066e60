"""Stable Diffusion 2.x: an OpenCLIP text encoder, linear projections, epsilon at 512 px or velocity at 768 px.

The text encoder's configuration has one layer less than OpenCLIP's, so its last hidden state is
OpenCLIP's penultimate. A checkpoint does not state its prediction type; one of its weights shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import pstdev

from lora_trainer.families.base.facts import BaseFacts, BaseRelease, Prediction
from lora_trainer.families.base.stated import Stated
from lora_trainer.families.base.text.clip import ClipEncoder, clip_encoders
from lora_trainer.families.base.traits import AdapterNames
from lora_trainer.families.base.unet import UNetFamily
from lora_trainer.families.files.hub_files import GGUF
from lora_trainer.families.files.unet_file import read_numbers, unet_names
from lora_trainer.families.files.weight_files import read_header

TELLING_WEIGHTS = (
    "output_blocks.11.1.transformer_blocks.0.norm1.bias",
    "up_blocks.3.attentions.2.transformer_blocks.0.norm1.bias",
)
# The weight's deviation is above it in the public v-prediction releases, below it in the others; ComfyUI tests
# the same weight.
TELLING_DEVIATION = 0.09


class StableDiffusion2(UNetFamily):
    """The family of Stable Diffusion 2.0 and 2.1 and everything fine-tuned from them."""

    name = "sd2"
    text = clip_encoders(ClipEncoder, {"clip_h": "cond_stage_model.model."})

    def _as_predicted(self, release: BaseRelease, stated: Stated, file: Path) -> BaseRelease:
        told = super()._as_predicted(release, stated, file)
        if told.prediction == release.prediction:
            return told
        # The companion is of the other kind, so its native size does not apply either.
        row = next(each for each in self.published if each.prediction == told.prediction)
        side = row.architecture["sample_size"]
        return replace(told, architecture={**told.architecture, "sample_size": side})

    def measured_prediction(self, file: Path) -> Prediction | None:
        """Return the prediction type by the deviation of one weight, or of a GGUF by the size in its name."""
        # Its tensors are read by the package gguf, which facts have to do without.
        if file.suffix == GGUF:
            sizes: Mapping[str, Prediction] = {"768": "v_prediction", "512": "epsilon"}
            return next((kind for size, kind in sizes.items() if size in file.stem), None)
        names = unet_names(read_header(file))
        stored = next((names[name] for name in TELLING_WEIGHTS if name in names), "")
        values = read_numbers(file, stored)
        if not values:
            return None
        # The population's deviation, as ComfyUI's torch.std(..., unbiased=False) in SD20.model_type.
        return "v_prediction" if pstdev(values) > TELLING_DEVIATION else "epsilon"

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        if facts.release.prediction == "v_prediction":
            return AdapterNames(kohya="sd_v2_v", modelspec="stable-diffusion-v2-768-v/lora")
        return AdapterNames(kohya="sd_v2", modelspec="stable-diffusion-v2-512/lora")


FAMILY = StableDiffusion2()

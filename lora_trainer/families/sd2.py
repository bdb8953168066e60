"""Stable Diffusion 2.x: an OpenCLIP text encoder, linear projections, epsilon at 512 px or velocity at 768 px.

The text encoder's configuration has one layer less than OpenCLIP's, so its last hidden state is
OpenCLIP's penultimate. A checkpoint does not state its prediction type; one of its weights shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import pstdev

from lora_trainer.families.base_files.unet_file import read_numbers, unet_names
from lora_trainer.families.base_files.weight_files import GGUF, read_header
from lora_trainer.families.facts import (
    AdapterNames,
    Assumption,
    BaseFacts,
    BaseRelease,
    Header,
    Layout,
    Prediction,
)
from lora_trainer.families.text.clip import ClipEncoder, clip_encoders
from lora_trainer.families.unet import UNetFamily

NATIVE_PX: Mapping[Prediction, int] = {"epsilon": 512, "v_prediction": 768}
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

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        facts = super().facts(layout, source=source)
        single = layout.part_file("denoiser")
        if single is None:
            return facts
        prediction = checkpoint_prediction(single)
        if prediction is None:
            return replace(facts, assumed=_assumed(single, facts.prediction))
        if prediction == facts.prediction:
            return facts
        # The companion is of the other kind, so its native size does not apply either.
        return replace(facts, prediction=prediction, resolution_px=NATIVE_PX[prediction])

    def file_release(self, file: Path, header: Header) -> BaseRelease:
        release, prediction = super().file_release(file, header), checkpoint_prediction(file)
        if prediction is None:
            return replace(release, assumed=_assumed(file, release.prediction))
        trained = next(each for each in self.published if each.prediction == prediction)
        return replace(trained, zero_terminal_snr=release.zero_terminal_snr)

    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        if facts.prediction == "v_prediction":
            return AdapterNames(kohya="sd_v2_v", modelspec="stable-diffusion-v2-768-v/lora")
        return AdapterNames(kohya="sd_v2", modelspec="stable-diffusion-v2-512/lora")


def _assumed(file: Path, prediction: Prediction) -> Assumption:
    other = "epsilon" if prediction == "v_prediction" else "v_prediction"
    return Assumption(
        sentence=f"the weight that shows the prediction type of a Stable Diffusion 2 cannot be read in {file.name}: "
        f"it is taken for {prediction}",
        setting=f"if that is wrong, use --set base.prediction={other}",
    )


def checkpoint_prediction(file: Path) -> Prediction | None:
    """Return a checkpoint's prediction type from the deviation of one weight, None without that weight."""
    # Its tensors are read by the package gguf, which facts have to do without.
    if file.suffix == GGUF:
        return None
    names = unet_names(read_header(file))
    stored = next((names[name] for name in TELLING_WEIGHTS if name in names), "")
    values = read_numbers(file, stored)
    if not values:
        return None
    # The population's deviation, as ComfyUI's torch.std(..., unbiased=False) in SD20.model_type.
    return "v_prediction" if pstdev(values) > TELLING_DEVIATION else "epsilon"


FAMILY = StableDiffusion2()

"""Stable Diffusion XL: two CLIP text encoders, a U-Net conditioned on the image's size and crop, 1024 px.

Podell et al. 2023 (arXiv 2307.01952). Illustrious, Pony and NoobAI are this network with other weights;
some predict velocity. Conditioning is `text`, `pooled` and `time_ids`.
"""

from __future__ import annotations

from dataclasses import replace

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseRelease
from lora_trainer.families.base.layout import DENOISER, Layout
from lora_trainer.families.base.text.clip import ClipPairEncoder, clip_encoders
from lora_trainer.families.base.traits import AdapterNames, FileFormat, PipelineTraits
from lora_trainer.families.base.unet import UNetFamily
from lora_trainer.families.base.unet_numbers import unet_numbers
from lora_trainer.families.files.unet_file import ldm_module

BASE = "stabilityai/stable-diffusion-xl-base-1.0"


class StableDiffusionXL(UNetFamily):
    """The family of SDXL 1.0 and everything fine-tuned from it, without the refiner."""

    name = "sdxl"
    text = clip_encoders(
        ClipPairEncoder,
        {
            "clip_l": "conditioner.embedders.0.transformer.",
            "clip_g": "conditioner.embedders.1.model.",
        },
        penultimate=True,
    )
    pipeline = PipelineTraits(
        class_name="StableDiffusionXLPipeline",
        absent={"feature_extractor": None, "image_encoder": None, "add_watermarker": False},
        # It counts only without a negative prompt, and ours pass one; stated, so that no folder decides.
        states=lambda facts: {"force_zeros_for_empty_prompt": True},
    )
    editor = "StableDiffusionXLInstructPix2PixPipeline"
    formats = replace(
        UNetFamily.formats,
        names=AdapterNames(
            kohya="sdxl_base_v1-0",  # A1111 recognises SDXL LoRAs by the start "sdxl_"
            modelspec="stable-diffusion-xl-v1-base/lora",
        ),
    )

    # ---- facts

    def _described(self, plain: BaseRelease, layout: Layout) -> BaseRelease:
        """Raise InputError for relatives of SDXL: other blocks (adapter files have no names for them) or EDM."""
        release, source = super()._described(plain, layout), plain.ids[0]
        keys = ("layers_per_block", "down_block_types", "up_block_types")
        unet, usual = map(unet_numbers, (release.architecture, self.published[0].architecture))
        if any(unet[key] != usual[key] for key in keys):
            raise InputError(
                f"the U-Net of {source} has resnets {unet[keys[0]]} in {unet[keys[1]]}, SDXL's "
                f"{usual[keys[0]]} in {usual[keys[1]]}",
                fix=f"use SDXL or a fine-tune of it, such as {BASE}",
            )
        scheduler = str(release.scheduler.get("_class_name", ""))
        if scheduler.startswith("EDM"):
            raise InputError(
                f"{layout.folder / 'scheduler'} is {scheduler}: training with EDM's noise levels is not supported",
                fix=f"use SDXL or a fine-tune of it, such as {BASE}",
            )
        # Some velocity fine-tunes were published with the scheduler of SDXL base, which states epsilon.
        published = next((each for each in self.published if source in each.ids), None)
        if published is None or published.prediction == "epsilon":
            return release
        return replace(
            release, prediction=published.prediction, zero_terminal_snr=published.zero_terminal_snr
        )

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        """Return the checkpoint's name for the U-Net in kohya's files, the base class's name otherwise.

        All readers accept checkpoint names: ComfyUI and A1111 use them for the U-Net, diffusers 0.42 maps
        all of them back. With diffusers' names A1111 would lose the upsamplers because it computes
        their block numbers as in Stable Diffusion 1.
        """
        if component == DENOISER and format == "kohya":
            return "lora_unet_" + ldm_module(
                module, architecture=self.published[0].architecture
            ).replace(".", "_")
        return super().lora_key_name(format, component, module)


FAMILY = StableDiffusionXL()

"""Stable Diffusion XL: two CLIP text encoders, a U-Net conditioned on the image's size and crop, 1024 px.

Podell et al. 2023 (arXiv 2307.01952). Illustrious, Pony and NoobAI are this network with other weights;
some predict velocity. Conditioning is `text`, `pooled` and `time_ids`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import (
    DENOISER,
    AdapterNames,
    AdapterTargets,
    BaseFacts,
    BaseRelease,
    Conditioning,
    FileFormat,
    Layout,
    Prediction,
)
from lora_trainer.families.base_files.base_folder import components
from lora_trainer.families.base_files.unet_file import UNetTraits
from lora_trainer.families.base_files.unet_layers import ldm_module, read_unet
from lora_trainer.families.facts import OPENRAIL
from lora_trainer.families.text import clip
from lora_trainer.families.unet import VAE, VAE_PARAMETERS, UNetFamily

if TYPE_CHECKING:
    from torch import Tensor, nn

ARCHITECTURE: Mapping[str, Any] = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 128,
    "in_channels": 4,
    "out_channels": 4,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
    "block_out_channels": [320, 640, 1280],
    "layers_per_block": 2,
    "transformer_layers_per_block": [1, 2, 10],
    "cross_attention_dim": 2048,
    # Numbers of heads in spite of the name (diffusers issue 2011); each head has 64 channels.
    "attention_head_dim": [5, 10, 20],
    "norm_num_groups": 32,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    # 1280 of pooled text, and 256 for each of the six `time_ids`.
    "projection_class_embeddings_input_dim": 2816,
}
SCHEDULER: Mapping[str, Any] = {
    "_class_name": "EulerDiscreteScheduler",
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "num_train_timesteps": 1000,
    "prediction_type": "epsilon",
    "steps_offset": 1,
    "timestep_spacing": "leading",
}
FULL_BYTES = 13_876_000_000
HALF_BYTES = 6_940_000_000
BASE = "stabilityai/stable-diffusion-xl-base-1.0"
IDS: Mapping[str, tuple[Prediction, int]] = {
    BASE: ("epsilon", FULL_BYTES),
    "Laxhar/noobai-XL-1.1": ("epsilon", HALF_BYTES),
    "Laxhar/noobai-XL-Vpred-1.0": ("v_prediction", HALF_BYTES),
}
"""Hub id -> prediction type (velocity implies zero-terminal SNR) and bytes of its weights."""
REFINER_TRAITS = UNetTraits(
    in_channels=4, text_width=1280, linear_projection=True, added_width=2560
)


def _release(source: str, prediction: Prediction, download_bytes: int) -> BaseRelease:
    return BaseRelease(
        ids=(source,),
        architecture=ARCHITECTURE,
        vae=VAE,
        scheduler=SCHEDULER,
        parameters={
            "denoiser": 2_567_463_684,
            "vae": VAE_PARAMETERS,
            "text_encoder": 817_720_320,
        },
        max_tokens=77,
        download_bytes=download_bytes,
        licence=OPENRAIL if source == BASE else None,
        prediction=prediction,
        zero_terminal_snr=prediction == "v_prediction",
    )


class StableDiffusionXL(UNetFamily):
    """The family of SDXL 1.0 and everything fine-tuned from it, without the refiner."""

    name = "sdxl"
    pipeline_class = "StableDiffusionXLPipeline"
    absent_components = {"feature_extractor": None, "image_encoder": None, "add_watermarker": False}
    published = tuple(_release(source, *release) for source, release in IDS.items())
    metadata = AdapterNames(
        kohya="sdxl_base_v1-0",  # A1111 recognises SDXL LoRAs by the start "sdxl_"
        modelspec="stable-diffusion-xl-v1-base/lora",
    )
    checkpoints = {BASE: ("Illustrious", "Pony", "NoobAI")}
    texts = (
        clip.ClipPart(
            role="clip_l",
            kohya="lora_te1",
            embedding="clip_l",
            checkpoint="conditioner.embedders.0.transformer.",
            released=clip.ClipSize(layers=12, width=768, inner=3072),
        ),
        clip.ClipPart(
            component="text_encoder_2",
            role="clip_g",
            network="CLIPTextModelWithProjection",
            kohya="lora_te2",
            embedding="clip_g",
            checkpoint="conditioner.embedders.1.model.",
            released=clip.ClipSize(layers=32, width=1280, inner=5120),
        ),
    )
    text_encoder_class = clip.ClipPairEncoder

    def owns(self, traits: UNetTraits) -> bool:
        """Return whether sizes and pooled text stand beside the timestep; miniature bases have any width."""
        return traits.in_channels == 4 and traits.added_width > 0 and traits != REFINER_TRAITS

    # ---- facts

    def detect(self, folder: Path) -> bool:
        return super().detect(folder) or _is_refiner(folder)

    def facts(self, layout: Layout, *, source: str) -> BaseFacts:
        if _is_refiner(layout.folder):
            raise InputError(
                f"{layout.folder} is a refiner: it has no first text encoder, and adapters are not trained on it",
                fix=f"give the base model, such as {BASE}",
            )
        facts = super().facts(layout, source=source)
        _check(facts, layout)
        # Some velocity fine-tunes were published with the scheduler of SDXL base, which states epsilon.
        release = self.releases.get(source)
        if release is None or release.prediction == "epsilon":
            return facts
        return replace(
            facts,
            prediction=release.prediction,
            zero_terminal_snr=release.zero_terminal_snr,
        )

    def clip_skips(self, layout: Layout | None) -> Mapping[int, int]:
        """Return one layer: SDXL always reads the layer before the last, which 2 means in other programs."""
        return {1: 1, 2: 1}

    def trained_size(self, part: clip.ClipPart, facts: BaseFacts) -> clip.ClipSize:
        """Return the size without the last layer that `lora_targets` leaves out."""
        size = super().trained_size(part, facts)
        whole = part is self.texts[-1]
        return size if whole else replace(size, layers=size.layers - 1)

    # ---- training

    def added_conditioning(self, conditioning: Conditioning) -> Mapping[str, Tensor]:
        return {"text_embeds": conditioning["pooled"], "time_ids": conditioning["time_ids"]}

    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        """Return the layers that get an adapter, in text encoders those that get a gradient.

        The U-Net reads both encoders one layer before the last, so the first encoder's last layer gets no
        gradient; the second encoder's last layer gets one through `pooled`.
        """
        names = super().lora_targets(network, targets)
        if targets != "text_encoder" or hasattr(network, "text_projection"):
            return names
        layers: Any = network.config
        unread = f"layers.{layers.num_hidden_layers - 1}."
        return [name for name in names if unread not in name]

    # ---- files

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        """Return the checkpoint's name for the U-Net in kohya's files, the base class's name otherwise.

        All readers accept checkpoint names: ComfyUI and A1111 use them for the U-Net, diffusers 0.42 maps
        all of them back. With diffusers' names A1111 would lose the upsamplers because it computes
        their block numbers as in Stable Diffusion 1.
        """
        if component == DENOISER and format == "kohya":
            return "lora_unet_" + ldm_module(module, architecture=ARCHITECTURE).replace(".", "_")
        return super().lora_key_name(format, component, module)

    # ---- images

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments; the pipeline fills in the image's own size and no crop."""
        arguments = super().sampler_arguments(conditioning, negative, guidance_scale=guidance_scale)
        return {
            **arguments,
            "pooled_prompt_embeds": conditioning["pooled"],
            "negative_pooled_prompt_embeds": negative["pooled"],
        }


FAMILY = StableDiffusionXL()


def _is_refiner(folder: Path) -> bool:
    classes = components(folder)
    return "unet" in classes and "text_encoder_2" in classes and "text_encoder" not in classes


def _check(facts: BaseFacts, layout: Layout) -> None:
    """Raise InputError for relatives of SDXL: other blocks (adapter files have no names for them) or EDM."""
    unet, released = read_unet(facts.architecture), read_unet(ARCHITECTURE)
    if (unet.resnets, unet.down_attention, unet.up_attention) != (
        released.resnets,
        released.down_attention,
        released.up_attention,
    ):
        raise InputError(
            f"the U-Net of {facts.source} has resnets {unet.resnets} with attention {unet.down_attention}, "
            f"SDXL's {released.resnets} with {released.down_attention}",
            fix=f"use SDXL or a fine-tune of it, such as {BASE}",
        )
    scheduler = str(facts.scheduler.get("_class_name", ""))
    if scheduler.startswith("EDM"):
        raise InputError(
            f"{layout.folder / 'scheduler'} is {scheduler}: training with EDM's noise levels is not supported",
            fix=f"use SDXL or a fine-tune of it, such as {BASE}",
        )

"""Facts of a base that need no weight loaded: places of its parts, sizes, schedule, guidance. Torch-free.

The methods of `BaseFacts` that return tensors import torch and diffusers when they are called.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base_files.unet_config import UNET_CLASS, read_unet
from lora_trainer.families.text.chunks import AROUND
from lora_trainer.families.traits import Guidance, Licence

if TYPE_CHECKING:
    from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "flow"]
Part = Literal["denoiser", "vae", "text_encoder"]
PARTS: tuple[Part, ...] = ("denoiser", "vae", "text_encoder")
"""`text_encoder` stands for all text encoders and tokenizers of a base together."""
DENOISER = "denoiser"
"""Component name of the denoiser in adapter keys; text encoders are `text_encoder`, `text_encoder_2`."""


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a safetensors header: dtype as written there (`F16`, `BF16`, ...) and shape."""

    dtype: str
    shape: tuple[int, ...]


Header = Mapping[str, TensorInfo]


@dataclass(frozen=True, kw_only=True)
class WeightPlace:
    """Where a checkpoint keeps a layer's weight: a whole tensor, or the `rows` (first, end) of a fused tensor.

    `swapped`: the two halves of the rows stand there in the other order.
    """

    tensor: str
    rows: tuple[int, int] | None = None
    swapped: bool = False


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the parts of a base lie on this machine.

    `folder` is a diffusers folder: configs, tokenizers, scheduler, and the weights of every part that
    has no entry in `files`. An entry of `files` replaces the folder's weights: it is a `.safetensors`
    checkpoint of one or all parts (as ComfyUI has them), or a folder with the part's config.json and
    weights (a separate VAE). `text` gives the file of single text encoders by component, each in a file
    of its own or in an all-in-one checkpoint.
    """

    folder: Path
    files: Mapping[Part, Path] = field(default_factory=dict)
    text: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """One part of a base model: parameter count, and the hash of weights and config ("" if not on disk)."""

    parameters: int
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A fact that no file of a base contains: a sentence with the value assumed, and the setting that changes it."""

    sentence: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How an image was scaled and cropped to its bucket, in pixels.

    `original_px` is (width, height) before scaling, `corner_px` the (left, top) of the crop in the scaled
    image, `target_px` the bucket's (width, height).
    """

    original_px: tuple[int, int]
    corner_px: tuple[int, int]
    target_px: tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class BaseRelease:
    """A public release that can be planned without a download, or a base as its folder states it.

    `ids` are Hub ids. `vae` has the keys that `Family.latent_shape` reads, `scheduler` those that
    `BaseFacts.flow_shift` reads. Without a `licence` the release has one of its owner's own.
    """

    ids: tuple[str, ...]
    architecture: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[Part, int]
    max_tokens: int
    download_bytes: int = 0
    licence: Licence | None = None
    variant: str = ""
    distilled: bool = False
    prediction: Prediction = "flow"
    zero_terminal_snr: bool = False


Conditioning = Mapping[str, "Tensor"]
"""Named tensors beside the noisy latents; each tensor's first dimension is the batch.

A family with texts of varying length returns a single prompt unpadded, with a `text_mask` of ones
[1, length]; a batch is padded with zeros on dimension 1 to its longest text.
"""


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """Facts of a base model that are read without loading a weight.

    `source` is the user's spelling of the base, `layout` its files (None: a public release that is not
    downloaded). `parts` has an entry per `PARTS`; `architecture` is the denoiser's configuration as
    diffusers writes it, `scheduler` the scheduler's. `variant` names the release where a family has
    several ("medium", "schnell"); `distilled` bases lose their few-step ability in training.
    `zero_terminal_snr`: the last training timestep is pure noise. Text encoders read a prompt in `chunks`
    of `max_tokens` tokens and return the hidden states of layer `clip_skip`, counted from the last (1);
    `clip_skips` has by `base.clip_skip` the layers that they can return.
    `patch` is the side of the square of latents that becomes one token (a U-Net's: 1).
    `assumed`: a fact that no file contains, None where all are read. A file whose companion is not on
    this machine has no `layout`; `missing` then names the parts to download and their source.
    """

    family: str
    source: str
    layout: Layout | None
    resolution_px: int
    bucket_step_px: int
    latent_channels: int
    vae_factor: int
    max_tokens: int
    prediction: Prediction
    guidance: Guidance
    patch: int
    parts: Mapping[str, PartFacts]
    architecture: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    distilled: bool = False
    zero_terminal_snr: bool = False
    download_bytes: int = 0
    missing: str = ""
    assumed: Assumption | None = None
    chunks: int = 1
    clip_skip: int = 1
    clip_skips: Mapping[int, int] = field(default_factory=lambda: {1: 1})

    @property
    def chunk_room(self) -> int:
        """Prompt tokens in one chunk, begin and end tokens excluded."""
        return self.max_tokens - AROUND

    @property
    def text_tokens(self) -> int:
        """Length of the text conditioning in tokens: begin, end and padding included."""
        return self.max_tokens + (self.chunks - 1) * self.chunk_room

    @property
    def located(self) -> Layout:
        """The layout of a base that is on this machine; AssertionError for a base that is not downloaded."""
        if self.layout is None:
            raise AssertionError(f"{self.source} is known by name only; locate it before loading")
        return self.layout

    def with_clip_skip(self, clip_skip: int) -> BaseFacts:
        """Return the facts with text of the layer that `base.clip_skip` means; raises RequestError for none."""
        if clip_skip in self.clip_skips:
            return replace(self, clip_skip=self.clip_skips[clip_skip])
        layers = max(self.clip_skips.values())
        if layers == 1:
            raise RequestError(
                f"base.clip_skip={clip_skip}, but {self.source} reads text from one layer only",
                fix="leave base.clip_skip out",
            )
        raise RequestError(
            f"base.clip_skip={clip_skip}, but the text encoder of {self.source} has {layers} layers",
            fix=f"use at most {layers}; 2 is usual for Stable Diffusion 1 trained on tags",
        )

    def network_numbers(self) -> Mapping[str, Any]:
        """Return the values of `architecture` that fix the network: bases of equal values cost the same.

        Configurations of equal U-Nets differ in many other keys. A key that is left out has diffusers' default.
        """
        if self.architecture.get("_class_name") == UNET_CLASS:
            return asdict(read_unet(self.architecture))
        return {key: value for key, value in self.architecture.items() if not key.startswith("_")}

    def geometry_conditioning(self, geometry: Geometry) -> Conditioning:
        """Return the U-Net's input made from an image's sizes and crop, batch 1; empty for all but SDXL's.

        `time_ids` are int64 [1, 6]: original height, width, crop top, left, target height, width. They stay
        integers because bf16 has no numbers between 1024 and 1032.
        """
        if self.architecture.get("addition_embed_type") != "text_time":
            return {}
        import torch

        pairs = (geometry.original_px, geometry.corner_px, geometry.target_px)
        return {"time_ids": torch.tensor([[value for x, y in pairs for value in (y, x)]])}

    def scheduler_config(self) -> dict[str, Any]:
        """Return the scheduler's configuration with these facts' prediction and terminal noise.

        Rescaled levels end in pure noise, and sampling must then start there: Lin et al. 2023
        (arXiv 2305.08891), sections 3.1 and 3.3.
        """
        config = {
            **self.scheduler,
            "prediction_type": self.prediction,
            "rescale_betas_zero_snr": self.zero_terminal_snr,
        }
        return {**config, "timestep_spacing": "trailing"} if self.zero_terminal_snr else config

    def alphas_cumprod(self) -> Tensor:
        """Return the cumulative signal level of every training timestep, float64 [timesteps]; not for flow."""
        assert self.prediction != "flow", f"{self.family} is trained by flow matching"
        from diffusers import DDPMScheduler

        # DDPM's class whatever the base samples with: it can rescale to zero terminal SNR, PNDM's
        # cannot, and both compute the same levels from one configuration.
        levels: Tensor = DDPMScheduler.from_config(self.scheduler_config()).alphas_cumprod.double()
        return levels

    def flow_shift(self, *, width_px: int, height_px: int) -> float:
        """Return s of sigma' = s sigma / (1 + (s - 1) sigma) that the base's own sampler uses at an image size.

        With dynamic shifting it is exp(mu), mu linear in the number of image tokens (Esser et al. 2024,
        arXiv 2403.03206, section 5.3.2; FLUX.1's sampler), or mu itself for `time_shift_type` "linear";
        else the scheduler's fixed shift.
        """
        assert self.prediction == "flow", f"{self.family} is not trained by flow matching"
        scheduler = self.scheduler
        if not scheduler.get("use_dynamic_shifting", False):  # absent in the oldest configurations
            return float(scheduler.get("shift", 1.0))  # diffusers' own default
        token_px = self.vae_factor * self.patch
        tokens = (width_px // token_px) * (height_px // token_px)
        first, last = (
            scheduler.get("base_image_seq_len", 256),
            scheduler.get("max_image_seq_len", 4096),
        )
        low, high = scheduler.get("base_shift", 0.5), scheduler.get("max_shift", 1.15)
        mu = low + (high - low) * (tokens - first) / (last - first)
        return mu if scheduler.get("time_shift_type", "exponential") == "linear" else math.exp(mu)

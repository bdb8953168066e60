"""Facts of a base that need no weight loaded: its release, sizes, schedule, guidance. Torch-free.

The methods that return tensors import torch and diffusers when they are called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Self

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.layout import Layout, Part
from lora_trainer.families.base.unet_numbers import UNET_CLASS, unet_numbers

if TYPE_CHECKING:
    from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "flow"]

# Tokens around each chunk of a prompt that CLIP reads: its begin and its end.
AROUND = 2


# Named tensors beside the noisy latents; each tensor's first dimension is the batch.
#
# A family with texts of varying length returns a single prompt unpadded, with a `text_mask` of ones [1,
# length]; a batch is padded with zeros on dimension 1 to its longest text.
Conditioning = Mapping[str, "Tensor"]


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How a base follows a guidance scale above 1.

    `two_passes`: a step predicts twice, for the prompt and for the negative prompt; `embedded`: the network
    reads the scale.
    """

    two_passes: bool
    embedded: bool

    def conditioning(self, scale: float) -> Mapping[str, Tensor]:
        """Return the network's input `guidance`, float32 [1]; empty for a network that does not read it."""
        import torch

        return {"guidance": torch.tensor([scale])} if self.embedded else {}


BY_TWO_PASSES = Guidance(two_passes=True, embedded=False)


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """One part of a base model: parameter count, and the hash of weights and config ("" if not on disk)."""

    parameters: int
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A fact that no file of a base states: a sentence with the value assumed, and the advice that changes it.

    `key` is the setting that decides it.
    """

    sentence: str
    advice: str
    key: str


@dataclass(frozen=True, kw_only=True)
class SamplingRecipe:
    """How a release is drawn as it is published: steps, our guidance scale (1: none), changes of its scheduler."""

    steps: int
    guidance_scale: float
    scheduler: Mapping[str, Any] = field(default_factory=dict)


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
class Licence:
    """The licence of a public release: its name, what it allows in a few words, whether it is gated.

    `is_gated`: the Hub gives the files only to who is signed in and has accepted the terms on the release's page.
    """

    name: str
    allows: str
    is_gated: bool = False


@dataclass(frozen=True, kw_only=True)
class BaseRelease:
    """A public release that can be planned without a download (releases.toml), or a base as its folder states it.

    `ids` are Hub ids. `architecture` is the denoiser's configuration as diffusers writes it, `scheduler` the
    scheduler's, of a release those keys that `BaseFacts.flow_shift` reads, and `vae` those that
    `VaeLatents.shape` reads. Without a `licence` the release has one of its owner's own. `checkpoints` are
    well-known ones made from it, with which its LoRAs work too. `variant` names the release where a family has
    several ("medium", "schnell"); `distilled` bases lose their few-step ability in training, `distillation` is the
    kind ("lightning"). `drawing`: how it is drawn. `zero_terminal_snr`: the last training timestep is pure noise.
    `system_prompt` is put before every prompt, None where the family's text has none. `assumed`: the facts that no
    file states.
    """

    ids: Sequence[str]
    architecture: Mapping[str, Any]
    vae: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    parameters: Mapping[Part, int]
    max_tokens: int
    download_bytes: int = 0
    licence: Licence | None = None
    checkpoints: Sequence[str] = ()
    variant: str = ""
    drawing: SamplingRecipe
    distilled: bool = False
    distillation: str = ""
    prediction: Prediction = "flow"
    zero_terminal_snr: bool = False
    system_prompt: str | None = None
    assumed: Sequence[Assumption] = ()

    def assuming(self, fact: str, value: str, *, key: str, other: str, name: str) -> Self:
        """Return the release with one more assumption: nothing in the file of that name states `fact`."""
        assumption = Assumption(
            sentence=f"nothing in {name} states {fact}; assumed: {value}",
            advice=f"if that is wrong, use --set {key}={other}",
            key=key,
        )
        return replace(self, assumed=(*self.assumed, assumption))


@dataclass(frozen=True, kw_only=True)
class BaseFacts(BaseRelease):
    """Facts of a base model that are read without loading a weight: those of a release, and how this one is used.

    `source` is the user's spelling of the base, `layout` its files (None: a public release that is not
    downloaded). `parts` has an entry per `PARTS`. Text encoders read a prompt in `chunks` of `max_tokens`
    tokens and return the hidden states of layer `clip_skip`, counted from the last (1); `clip_skips` has by
    `base.clip_skip` the layers that they can return. `patch` is the side of the square of latents that becomes
    one token (a U-Net's: 1). A file whose companion is not on this machine has no `layout`; `missing` then
    names the parts to download and their source.
    """

    family: str
    source: str
    layout: Layout | None
    resolution_px: int
    bucket_step_px: int
    latent_channels: int
    vae_factor: int
    guidance: Guidance
    patch: int
    parts: Mapping[str, PartFacts]
    shifts_by_tokens: bool = False
    missing: str = ""
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
        assert self.layout is not None, f"{self.source} is known by name only; locate it first"
        return self.layout

    def with_clip_skip(self, clip_skip: int) -> BaseFacts:
        """Return the facts with text of the layer that `base.clip_skip` means; raises RequestError for none."""
        if clip_skip in self.clip_skips:
            return replace(self, clip_skip=self.clip_skips[clip_skip])
        most = max(self.clip_skips)
        raise RequestError(
            f"base.clip_skip={clip_skip}, but the most that {self.source} allows is {most}",
            fix=f"use at most {most}, or leave base.clip_skip out",
        )

    def with_system_prompt(self, prompt: str) -> BaseFacts:
        """Return the facts with `base.system_prompt`; raises RequestError where the family's text has none."""
        if prompt == "auto" or (self.system_prompt is None and not prompt.strip()):
            return self
        if self.system_prompt is None:
            raise RequestError(
                f"base.system_prompt is set, but prompts of {self.source} (family {self.family}) have no system prompt",
                fix="leave base.system_prompt out, or use data.caption_prefix, which is put before captions only",
            )
        return replace(self, system_prompt=prompt.strip())

    def network_numbers(self) -> Mapping[str, Any]:
        """Return the values of `architecture` that fix the network, as JSON: bases of equal values cost the same.

        Configurations of equal U-Nets differ in many other keys. A key that is left out has diffusers' default.
        """
        if self.architecture.get("_class_name") == UNET_CLASS:
            return unet_numbers(self.architecture)
        numbers = {key: each for key, each in self.architecture.items() if not key.startswith("_")}
        plain: dict[str, Any] = json.loads(json.dumps(numbers))
        return plain

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

    def sampling_scheduler(self) -> Any:
        """Return the base's own sampler, or DDIM where the base's sampler cannot start from pure noise."""
        import diffusers

        own = {**self.scheduler, **self.drawing.scheduler}
        if self.prediction == "flow":
            return getattr(diffusers, own["_class_name"]).from_config(own)
        # A base may name a scheduler that this diffusers does not have.
        kind: Any = getattr(diffusers, str(own.get("_class_name", "")), diffusers.DDIMScheduler)
        config = {**self.scheduler_config(), **self.drawing.scheduler}
        if "rescale_betas_zero_snr" not in kind._get_init_keys(kind):
            # A class without the parameter (PNDM, Stable Diffusion 1's) would warn and start from a level with
            # signal in it. DDIM can, and is the sampler of Lin et al. 2023 (arXiv 2305.08891).
            if self.zero_terminal_snr:
                kind = diffusers.DDIMScheduler
            else:
                config.pop("rescale_betas_zero_snr")
        return kind.from_config(config)

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

        With dynamic shifting, or where `shifts_by_tokens`, it is exp(mu), mu linear in the number of image tokens
        (Esser et al. 2024, arXiv 2403.03206, section 5.3.2; FLUX.1's sampler), or mu itself for
        `time_shift_type` "linear"; else the scheduler's fixed shift.
        """
        assert self.prediction == "flow", f"{self.family} is not trained by flow matching"
        scheduler = self.scheduler
        by_size = scheduler.get(
            "use_dynamic_shifting", False
        )  # absent in the oldest configurations
        if not by_size and not self.shifts_by_tokens:
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

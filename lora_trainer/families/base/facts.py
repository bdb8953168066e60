"""Facts of a base that need no weight loaded: its release, sizes, schedule, guidance. Torch-free.

The methods that return tensors import torch and diffusers when they are called.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.layout import Layout, Part
from lora_trainer.families.base.references import References
from lora_trainer.families.base.unet_numbers import UNET_CLASS, unet_numbers

if TYPE_CHECKING:
    from torch import Tensor

Prediction = Literal["epsilon", "v_prediction", "flow"]

# Tokens around each chunk of a prompt that CLIP reads: its begin and its end.
AROUND = 2


# Named tensors beside the noisy latents; each tensor's first dimension is the batch.
#
# A family with texts of varying length returns a single prompt unpadded, with a `text_mask` of ones [1,
# length]; a batch is padded with zeros on dimension 1 to its longest text. What is moved to a device has the texts'
# numbers of tokens as `TEXT_LENGTHS`, int64 [B]. Where reference images stand within the text, `IMAGE_PLACES`, int64
# [B, references], has the number of tokens before each.
Conditioning = Mapping[str, "Tensor"]
TEXT_LENGTHS, IMAGE_PLACES = "text_lengths", "image_places"
# Stay in host memory, wherever the others are: networks need these as numbers, and the host would wait for the
# device to read them there.
ON_HOST = frozenset({TEXT_LENGTHS, IMAGE_PLACES})


def with_text_lengths(conditioning: Conditioning) -> Conditioning:
    """Return conditioning in host memory with `TEXT_LENGTHS`, if its texts have a mask."""
    mask = conditioning.get("text_mask")
    return conditioning if mask is None else {**conditioning, TEXT_LENGTHS: mask.sum(dim=1)}


def image_places(conditioning: Conditioning) -> tuple[int, ...]:
    """Return the number of a text's tokens before each reference image within it, which all texts of a batch share.

    References of one batch are equally large, and the prompt stands behind them.
    """
    places = conditioning.get(IMAGE_PLACES)
    if places is None:
        return ()
    rows = places.tolist()
    assert all(row == rows[0] for row in rows), f"texts of one pass have images at {rows}"
    return tuple(rows[0])


@dataclass(frozen=True, kw_only=True)
class Guidance:
    """How a base follows a guidance scale above 1."""

    two_passes: bool
    """A step predicts twice, for the prompt and for the negative prompt."""
    embedded: bool
    """The network reads the scale."""

    def conditioning(self, scale: float) -> Mapping[str, Tensor]:
        """Return the network's input `guidance`, float32 [1]; empty for a network that does not read it."""
        import torch

        return {"guidance": torch.tensor([scale])} if self.embedded else {}


BY_TWO_PASSES = Guidance(two_passes=True, embedded=False)


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """One part of a base model."""

    parameters: int
    """How many numbers its weights have."""
    identity: str = ""
    """The hash of its weights and configuration; "" while they are not read, or not on this machine."""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A fact that no file of a base states."""

    sentence: str
    """What is not stated, and the value that is assumed."""
    advice: str
    """What to do if the value is wrong."""
    key: str
    """The setting that decides it."""


@dataclass(frozen=True, kw_only=True)
class SamplingRecipe:
    """How images of a release are drawn as it is published."""

    steps: int
    guidance_scale: float
    """Our guidance scale; 1 means no guidance."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the scheduler's configuration that differ from the release's own."""


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How an image was scaled and cropped to its bucket."""

    original_px: tuple[int, int]
    """(width, height) before scaling."""
    corner_px: tuple[int, int]
    """(left, top) of the crop in the scaled image."""
    target_px: tuple[int, int]
    """(width, height) of the bucket."""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence of a public release."""

    name: str
    allows: str
    """What it allows, in a few words."""
    is_gated: bool = False
    """The Hub gives the files only to who is signed in and has accepted the terms on the release's page."""
    companies: Literal["free", "conditions", "no"] = "conditions"
    """Whether a company may use the model for its work."""


@dataclass(frozen=True, kw_only=True)
class Assistant:
    """A published LoRA that is on while a base is trained, and off while it draws.

    It undoes what training would break: a distillation to few steps or to no guidance.
    """

    id: str
    """Its repository on the Hub."""
    file: str = ""
    """Its file there; "" where the repository has one weight file."""
    download_bytes: int
    """Size of the file, whose tensors have 16 bits."""

    @property
    def source(self) -> str:
        """It as `base.assistant` names it."""
        return f"{self.id}/{self.file}" if self.file else self.id


@dataclass(frozen=True, kw_only=True)
class BaseRelease:
    """What a base is, whoever uses it: a public release as its family.toml states it, or what files state of one."""

    ids: Sequence[str]
    """Its ids on the Hub; of files their path or id as the user gave it."""
    architecture: Mapping[str, Any]
    """The denoiser's configuration, as diffusers writes it."""
    vae: Mapping[str, Any]
    """The VAE's configuration; of a public release the keys that `VaeLatents.shape` reads."""
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    """The scheduler's configuration; of a public release the keys that `BaseFacts.flow_shift` reads."""
    parameters: Mapping[Part, int]
    """How many parameters each part has, with an entry for each of `PARTS`."""
    reference_parameters: Mapping[Part, int] = field(default_factory=dict)
    """How many more a part has in layers that only reference images go through."""
    max_tokens: int
    """Tokens of a prompt that the text encoders read at once; longer prompts need several chunks."""
    download_bytes: int = 0
    """Size of its files on the Hub, 0 where it is not a public release."""
    licence: Licence | None = None
    """None: a licence of its owner's own."""
    checkpoints: Sequence[str] = ()
    """Well-known checkpoints that were made from it, with which its LoRAs work too."""
    variant: str = ""
    """Which of the family's releases it is, where there are several ("medium", "schnell")."""
    drawing: SamplingRecipe
    """How its images are drawn."""
    distilled: bool = False
    """It draws in few steps, an ability that is lost in training."""
    distillation: str = ""
    """How it was distilled ("lightning"); "" where it is not distilled."""
    assistant: Assistant | None = None
    """The LoRA that it is trained with by default."""
    prediction: Prediction = "flow"
    """What the denoiser predicts."""
    zero_terminal_snr: bool = False
    """The last training timestep is pure noise."""
    system_prompt: str | None = None
    """Its own system prompt; None: the family's."""
    assumed: Sequence[Assumption] = ()
    """The facts that no file states."""

    def assuming(self, fact: str, value: str, *, key: str, other: str, name: str) -> BaseRelease:
        """Return the release with one more assumption: nothing in the file of that name states `fact`."""
        assumption = Assumption(
            sentence=f"nothing in {name} states {fact}; assumed: {value}",
            advice=f"if that is wrong, use --set {key}={other}",
            key=key,
        )
        return replace(self, assumed=(*self.assumed, assumption))

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
        """Return the scheduler's configuration with this release's prediction and terminal noise.

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
            name = own.get("_class_name", "FlowMatchEulerDiscreteScheduler")
            return getattr(diffusers, name).from_config(own)
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
        assert self.prediction != "flow", f"{self.ids[0]} is trained by flow matching"
        from diffusers import DDPMScheduler

        # DDPM's class whatever the base samples with: it can rescale to zero terminal SNR, PNDM's
        # cannot, and both compute the same levels from one configuration.
        levels: Tensor = DDPMScheduler.from_config(self.scheduler_config()).alphas_cumprod.double()
        return levels


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """A base as a training uses it: what it is, where it lies, and its sizes, read without loading a weight."""

    release: BaseRelease
    """What the base is. Settings that correct it (`base.prediction`, `base.distilled`) are applied."""
    family: str
    """The name of its family."""
    source: str
    """The base as the user spelled it."""
    layout: Layout | None
    """Its files on this machine; None where some are missing."""
    missing: str = ""
    """The parts to download and their source, where a checkpoint's companion is not on this machine."""
    download_bytes: int = 0
    """Size of what has to be downloaded before a training."""
    readings: Mapping[str, str]
    """Part -> the name of the way in which its outputs are read, `vae` and `text_encoder`; "" for the plain way.

    Families share encoders, often the very file, and some of them the way: FLUX.2 klein, FLUX.2 dev and FLUX.3 have one
    for their VAE, where Ideogram 4 orders the channels otherwise; Z-Image and klein read other layers of Qwen3 4B.
    """
    parts: Mapping[str, PartFacts]
    """The parts as they are in its files, with an entry for each of `PARTS`."""
    resolution_px: int
    """Side of the square images that it was trained on."""
    bucket_step_px: int
    """Sides of buckets are multiples of this."""
    latent_channels: int
    """Channels of the latents that the denoiser reads."""
    vae_factor: int
    """Pixels along a side of an image for each of its latents."""
    patch: int
    """Side of the square of latents that becomes one token; 1 in a U-Net."""
    guidance: Guidance
    """How it follows a guidance scale."""
    references: References | None = None
    """How it reads reference images; None: it reads none."""
    has_reference_layers: bool = False
    """Its networks are loaded with the layers that only reference images go through; `parts` counts them."""
    shifts_by_tokens: bool = False
    """The noise is shifted by the image's size, though the base's own sampler has one shift for all."""
    unshifted_px: int = 0
    """Side of the square image whose noise is not shifted, where the shift is an image's side by it; 0: elsewhere."""
    system_prompt: str | None = None
    """What is put before every prompt; None where the family's texts have no system prompt."""
    chunks: int = 1
    """Chunks of `max_tokens` tokens in which a prompt is read."""
    clip_skip: int = 1
    """The layer whose hidden states the text encoders return, counted from the last, which is 1."""
    clip_skips: Mapping[int, int] = field(default_factory=lambda: {1: 1})
    """Value of `base.clip_skip` -> the layer that it means, of all that are allowed."""

    @property
    def chunk_room(self) -> int:
        """Prompt tokens in one chunk, begin and end tokens excluded."""
        return self.release.max_tokens - AROUND

    @property
    def text_tokens(self) -> int:
        """Length of the text conditioning in tokens: begin, end and padding included."""
        return self.release.max_tokens + (self.chunks - 1) * self.chunk_room

    @property
    def located(self) -> Layout:
        """The layout of a base that is on this machine; AssertionError for a base that is not downloaded."""
        assert self.layout is not None, f"{self.source} is known by name only; locate it first"
        return self.layout

    @property
    def sees_references(self) -> bool:
        """Whether text encoders see reference images beside the prompt."""
        return self.references is not None and self.references.seen_tokens is not None

    @property
    def layouts(self) -> int:
        """How many kinds of passes differ in more than sizes: each number of references within the text is one."""
        reads = self.references
        return 1 if reads is None or not reads.in_text else 1 + reads.most

    def for_references(self) -> BaseFacts:
        """Return the facts of the base as it is loaded for reference images: most have no layers for them alone."""
        more = self.release.reference_parameters
        if self.has_reference_layers or self.references is None or not more:
            return self
        parts = dict(self.parts)
        for part, count in more.items():
            parts[part] = replace(parts[part], parameters=parts[part].parameters + count)
        return replace(self, parts=parts, has_reference_layers=True)

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

    def flow_shift(self, *, width_px: int, height_px: int) -> float:
        """Return s of sigma' = s sigma / (1 + (s - 1) sigma) that the base's own sampler uses at an image size.

        With dynamic shifting, or where `shifts_by_tokens`, it is exp(mu), mu linear in the number of image tokens
        (Esser et al. 2024, arXiv 2403.03206, section 5.3.2; FLUX.1's sampler), or mu itself for
        `time_shift_type` "linear"; else the scheduler's fixed shift. With `unshifted_px` it is the side of a square of
        as many pixels, in those.
        """
        assert self.release.prediction == "flow", f"{self.family} is not trained by flow matching"
        if self.unshifted_px:
            return math.sqrt(width_px * height_px) / self.unshifted_px
        scheduler = self.release.scheduler
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

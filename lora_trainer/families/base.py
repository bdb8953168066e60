"""The interface of a model family: facts, loading, encoding, prediction, names.

No module outside this folder names a family. Importing a family does not import torch: facts are plain
data, and its methods import the heavy libraries. A new family is one module with a `FAMILY`, one line in
the registry and its presets.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.common.caption_markup import NewWord as NewWord
from lora_trainer.common.caption_markup import Weighted
from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import Targets
from lora_trainer.families.checkpoints.unet_config import UNET_CLASS, read_unet
from lora_trainer.families.text.chunks import AROUND
from lora_trainer.families.traits import AUTOENCODER_KL as AUTOENCODER_KL
from lora_trainer.families.traits import BY_TWO_PASSES as BY_TWO_PASSES
from lora_trainer.families.traits import AdapterFormats as AdapterFormats
from lora_trainer.families.traits import AdapterNames as AdapterNames
from lora_trainer.families.traits import FileFormat as FileFormat
from lora_trainer.families.traits import Guidance as Guidance
from lora_trainer.families.traits import NetworkTraits as NetworkTraits
from lora_trainer.families.traits import TextInputs as TextInputs
from lora_trainer.families.traits import VaePeak as VaePeak

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn

Prediction = Literal["epsilon", "v_prediction", "flow"]
Part = Literal["denoiser", "vae", "text_encoder"]
PARTS: tuple[Part, ...] = ("denoiser", "vae", "text_encoder")
"""`text_encoder` stands for all text encoders and tokenizers of a base together."""
AdapterTargets = Targets | Literal["text_encoder"]
WEIGHTS = ".weights"
"""Suffix of the key of an encoder's prompt weights; the key of its tokens has no suffix."""
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
class Latents:
    """Posterior of one image: `mean` and `std`, float32 [channels, height, width], already scaled for the denoiser."""

    mean: Tensor
    std: Tensor


Conditioning = Mapping[str, "Tensor"]
"""Named tensors beside the noisy latents; each tensor's first dimension is the batch.

A family with texts of varying length returns a single prompt unpadded, with a `text_mask` of ones
[1, length]; a batch is padded with zeros on dimension 1 to its longest text.
"""


class ImageEncoder(ABC):
    """The VAE; only caching uses it."""

    @abstractmethod
    def encode_images(self, pixels: Tensor) -> list[Latents]:
        """Encode float32 [B, 3, H, W] in [-1, 1]; raises InputError when a latent is not finite."""


class TextEncoder(ABC):
    """Tokenizers and text networks on one device, for caching and for training the text encoders."""

    networks: Mapping[str, nn.Module]
    """Component name ("text_encoder", "text_encoder_2") -> network, in the family's order."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return token ids (and masks) int64 [B, ...] by name, on the CPU, truncated to the networks' limits."""

    @abstractmethod
    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Run the networks on tokens of `tokenize`; with gradients where enabled, result on the device."""

    def learn(self, word: NewWord) -> None:
        """Tokenize `word` as new tokens from now on; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        """Return a text's token ids by component, without special tokens; for `new_token_keys` families."""
        raise AssertionError("these text encoders learn no new words")

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        """Tokenize the joined parts and add each token's prompt weight, float32 [1, ...], under
        names that end in `WEIGHTS`; for families that `supports_prompt_weights`."""
        raise AssertionError("these text encoders do not weigh words")

    @abstractmethod
    def count_tokens(self, prompt: str) -> int:
        """Return the number of tokens of `prompt` before truncation, without special tokens and template."""

    @abstractmethod
    def prompt_room(self) -> int:
        """Return the largest `count_tokens` of a prompt that is not truncated."""

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encode texts to float32 (masks: int64) tensors on the CPU, without gradients."""
        return self.encode_tokens(self.tokenize(prompts))

    def encode_tokens(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Encode tokens of `tokenize` to float32 (masks: int64) tensors on the CPU, without gradients."""
        import torch

        with torch.no_grad():
            conditioning = self.embed(tokens)
        return {
            name: (tensor.float() if tensor.is_floating_point() else tensor).cpu()
            for name, tensor in conditioning.items()
        }


class Sampler(ABC):
    """Samples images from encoded prompts with the denoiser in training and the base's own scheduler."""

    @abstractmethod
    def image(
        self,
        conditioning: Conditioning,
        negative: Conditioning,
        *,
        seed: int,
        size_px: tuple[int, int],
        steps: int,
        guidance_scale: float,
    ) -> Image.Image:
        """Return one RGB image of (width, height); equal to the plain pipeline's with a CPU generator of `seed`."""


class Family(ABC):
    """One model family; instances hold no state."""

    name: str
    default_source: str
    """Hub id offered on a GPU when no base is named, and the companion of single-file checkpoints."""
    text: TextInputs
    traits: NetworkTraits
    formats: AdapterFormats

    # ---- facts, without torch

    @abstractmethod
    def facts_from_hub_id(self, source: str) -> BaseFacts | None:
        """Return facts of a public release from its Hub id alone, None for any other id."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Return whether a diffusers folder is of this family, from its JSON files alone."""

    @abstractmethod
    def detect_file(self, header: Header) -> frozenset[Part]:
        """Return the parts a single-file checkpoint of this family holds; empty: not of this family."""

    @abstractmethod
    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        """Read facts from configs and safetensors headers; raises InputError naming a missing part."""

    def facts_from_file(self, file: Path, header: Header) -> BaseFacts:
        """Return facts of the public release that a single file with this header has the sizes of.

        Variant, prediction type and denoiser size are the file's own; InputError when no release fits.
        """
        facts = self.facts_from_hub_id(self.default_source)
        assert facts is not None
        return facts

    @abstractmethod
    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        """Return the files of each of `PARTS`; their hash is the part's identity."""

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        """Return where a single-file checkpoint keeps each "component.module"; empty where that is unknown."""
        return {}

    @abstractmethod
    def prompt_shapes(
        self, architecture: Mapping[str, Any], *, text_tokens: int
    ) -> Mapping[str, tuple[int, ...]]:
        """Return the shape of each conditioning tensor of a text of `text_tokens` tokens, batch 1.

        `text_tokens` counts like `max_tokens`. Names that end in `mask` are int64, all others float.
        """

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return (fan_in, out) of each module in the text encoders' `lora_targets`, by component."""
        return {}

    @abstractmethod
    def adapter_names(self, facts: BaseFacts) -> AdapterNames:
        """Return what an adapter's metadata calls this base."""

    # ---- networks

    @abstractmethod
    def load_image_encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        """Load the VAE in float32, frozen; in fp16 some overflow."""

    @abstractmethod
    def load_text_encoder(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> TextEncoder:
        """Load tokenizers and text networks in `dtype`, frozen."""

    @abstractmethod
    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load the denoiser frozen, in `dtype`."""

    @abstractmethod
    def empty_denoiser(self, architecture: Mapping[str, Any]) -> nn.Module:
        """Build the denoiser from its configuration, weights undefined; call under a `meta` device."""

    # ---- training

    def geometry_conditioning(self, facts: BaseFacts, geometry: Geometry) -> Conditioning:
        """Return the conditioning made from the image's sizes and crop, batch 1; empty for most families."""
        return {}

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """Run one forward pass: [B, C, H, W] -> prediction of the same shape.

        `timesteps` is int64 [B] in [0, 999] for epsilon and v, float32 [B] = 1000 sigma for flow.
        """

    @abstractmethod
    def lora_targets(self, network: nn.Module, targets: AdapterTargets) -> list[str]:
        """Return the full module names that get an adapter, in module order.

        `network` is the denoiser, or with `targets` "text_encoder" a text network of a family that trains them.
        """

    # ---- files

    @abstractmethod
    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        """Return the name of a module in a file of that format, of `file_formats`.

        `component` is `denoiser`, `text_encoder`, ...; `module` the name in the network that
        `load_denoiser` or `load_text_encoder` gives.
        """

    def layer_names(self, layers: Iterable[str]) -> Mapping[str, tuple[str, ...]]:
        """Return other names of denoiser layers in adapter files -> the diffusers layers they stand for.

        The layers are in the order of their rows: the releases' own code fuses several into one weight.
        """
        return {}

    def swaps_halves(self, layer: str, shape: tuple[int, ...]) -> bool:
        """Return whether files with the layer's other names have the two halves of its rows swapped."""
        return False

    # ---- images

    @abstractmethod
    def build_sampler(
        self,
        facts: BaseFacts,
        *,
        denoiser: nn.Module,
        device: torch.device,
        decode_on: torch.device | None = None,
    ) -> Sampler:
        """Return a sampler around a denoiser that is on `device`.

        The VAE moves to `decode_on` (None: `device`) only while it decodes an image.
        """

    @abstractmethod
    def pipeline_arguments(
        self,
        pipeline: DiffusionPipeline,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments that reproduce the sampler's images.

        Prompts are encoded here where `facts` reads them in chunks.
        """

    @abstractmethod
    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        """Return diffusers' own text-to-image pipeline in `dtype` (VAE float32), as any other program would load it."""

"""The seam a model family fills: facts, loading, encoding, prediction, names. Nothing else knows families.

Importing a family costs no torch: facts are plain data, heavy imports live inside its methods. A new
family is one module with a `FAMILY`, one line in the registry and its presets; the tests iterate the
registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.families.costs import SampleCost, Targets, Workload

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn

Prediction = Literal["epsilon", "v_prediction"]


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """One network of a base model: parameter count, and the hash of weights and config ("" if not on disk)."""

    parameters: int
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """What is known about a base model without loading a weight.

    `source` is what the user wrote, `path` the local diffusers folder (None: known by name only,
    not downloaded). `parts` holds `denoiser`, `vae` and `text_encoder`; `architecture` is the
    denoiser's configuration as diffusers writes it.
    """

    family: str
    source: str
    path: Path | None
    resolution_px: int
    bucket_step_px: int
    latent_channels: int
    vae_factor: int
    max_tokens: int
    prediction: Prediction
    parts: Mapping[str, PartFacts]
    architecture: Mapping[str, Any]
    download_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Posterior of one image: `mean` and `std`, float32 [channels, height, width], already scaled for the denoiser."""

    mean: Tensor
    std: Tensor


Conditioning = Mapping[str, "Tensor"]
"""Named text-encoder outputs; each tensor's first dimension is the batch."""


class Encoders(ABC):
    """The parts that are needed while caching only, on one device; dropped before the denoiser loads."""

    @abstractmethod
    def encode_images(self, pixels: Tensor) -> list[Latents]:
        """Encode float32 [B, 3, H, W] in [-1, 1]; raises InputError when a latent is not finite."""

    @abstractmethod
    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encode texts to float32 tensors whose first dimension is len(prompts)."""

    @abstractmethod
    def count_tokens(self, prompt: str) -> int:
        """Return the tokens of `prompt` before truncation, special tokens excepted."""


class Sampler(ABC):
    """Makes images with the denoiser being trained, with the base's own scheduler, text already encoded."""

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
    """One model family. Instances hold no state; everything is passed in."""

    name: str
    default_source: str
    """Hub id offered on a GPU when no base is named."""
    base_model_version: str
    """kohya's `ss_base_model_version`, which A1111 and Forge read."""
    modelspec_architecture: str
    """`modelspec.architecture` of an adapter (ModelSpec 1.0.1)."""

    @abstractmethod
    def known(self, source: str) -> BaseFacts | None:
        """Return facts of a well-known Hub id from its name alone, else None."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Say whether a diffusers folder is of this family, from its JSON files alone."""

    @abstractmethod
    def facts(self, folder: Path, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        """Read facts from configs and safetensors headers; raises InputError naming a missing part."""

    @abstractmethod
    def parts(self, folder: Path) -> Mapping[str, tuple[Path, ...]]:
        """Return the files that make the identity of `denoiser`, `vae` and `text_encoder`."""

    @abstractmethod
    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        """Return memory and FLOPs of training on one sample, from the architecture alone."""

    @abstractmethod
    def adapter_parameters(self, facts: BaseFacts, *, rank: int, targets: Targets) -> int:
        """Return how many parameters an adapter of this rank has."""

    @abstractmethod
    def load_encoders(self, facts: BaseFacts, *, device: torch.device) -> Encoders:
        """Load VAE and text encoder in float32, frozen."""

    @abstractmethod
    def load_denoiser(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> nn.Module:
        """Load the denoiser frozen, in `dtype`."""

    @abstractmethod
    def alphas_cumprod(self, facts: BaseFacts) -> Tensor:
        """Return the cumulative signal level of every training timestep, float64 [timesteps]."""

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """One forward pass: [B, C, H, W] and int64 [B] -> prediction of the same shape."""

    @abstractmethod
    def lora_targets(self, denoiser: nn.Module, targets: Targets) -> list[str]:
        """Return the full module names that get an adapter, in module order."""

    @abstractmethod
    def kohya_module(self, module: str) -> str:
        """Return the kohya/ComfyUI name of denoiser module `module` (`lora_unet_...`)."""

    @abstractmethod
    def diffusers_module(self, module: str) -> str:
        """Return the diffusers name of denoiser module `module` (`unet....`)."""

    @abstractmethod
    def build_sampler(
        self, facts: BaseFacts, *, denoiser: nn.Module, device: torch.device
    ) -> Sampler:
        """Return a sampler around a denoiser that is on `device`; the VAE is moved there only for an image."""

    @abstractmethod
    def plain_pipeline(self, facts: BaseFacts, *, device: torch.device) -> DiffusionPipeline:
        """Return diffusers' own text-to-image pipeline in float32, untouched, as any other program would load it."""

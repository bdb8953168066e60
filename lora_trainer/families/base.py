"""The interface of a model family: facts, loading, encoding, prediction, names.

No module outside this folder names a family. Importing a family does not import torch: facts are plain
data, and its methods import the heavy libraries.

A new family is a module NAME.py with a `FAMILY`, of a subclass of `FlowFamily` (flow.py) or `UNetFamily`
(unet.py) rather than of `Family`; its line in `MODULES` (__init__.py), how its files are told apart
(recognise.py), the names of its layers in others' files where they differ (transformer_names.py), and
presets/NAME.json. scripts/write_layer_tables.py writes its rows in layer_tables.json, scripts/write_cost_tables.py
those in costs/cost_tables.json. docs/adding-a-family.md goes through it with an example.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

# `X as X` is a re-export to mypy: families import the whole interface from this module.
from lora_trainer.common.caption_markup import NewWord as NewWord
from lora_trainer.common.caption_markup import Weighted
from lora_trainer.config.config import Targets
from lora_trainer.families.facts import PARTS as PARTS
from lora_trainer.families.facts import Assumption as Assumption
from lora_trainer.families.facts import BaseFacts as BaseFacts
from lora_trainer.families.facts import Conditioning as Conditioning
from lora_trainer.families.facts import Geometry as Geometry
from lora_trainer.families.facts import Layout as Layout
from lora_trainer.families.facts import Part as Part
from lora_trainer.families.facts import PartFacts as PartFacts
from lora_trainer.families.facts import Prediction as Prediction
from lora_trainer.families.traits import AUTOENCODER_KL as AUTOENCODER_KL
from lora_trainer.families.traits import BY_TWO_PASSES as BY_TWO_PASSES
from lora_trainer.families.traits import AdapterFormats as AdapterFormats
from lora_trainer.families.traits import AdapterNames as AdapterNames
from lora_trainer.families.traits import FileFormat as FileFormat
from lora_trainer.families.traits import Guidance as Guidance
from lora_trainer.families.traits import Licence as Licence
from lora_trainer.families.traits import NetworkTraits as NetworkTraits
from lora_trainer.families.traits import OtherNames as OtherNames
from lora_trainer.families.traits import TextInputs as TextInputs
from lora_trainer.families.traits import VaePeak as VaePeak

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn

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
class Latents:
    """Posterior of one image: `mean` and `std`, float32 [channels, height, width], already scaled for the denoiser."""

    mean: Tensor
    std: Tensor


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
    text: TextInputs
    traits: NetworkTraits
    formats: AdapterFormats
    licences: Mapping[str, Licence]
    """By Hub id of a public release; one that is not named here has a licence of its owner's own."""
    checkpoints: Mapping[str, tuple[str, ...]] = MappingProxyType({})
    """By Hub id of a public release: well-known checkpoints made from it, with which its LoRAs work too."""

    # ---- facts, without torch

    @property
    @abstractmethod
    def releases(self) -> Mapping[str, BaseFacts]:
        """Facts of the public releases by Hub id, known without their files.

        The first is offered on a GPU when no base is named, and is the companion of single-file checkpoints.
        """

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
        return next(iter(self.releases.values()))

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
        """Return the names of this base in an adapter's metadata."""

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

    @abstractmethod
    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        """Return the other names of denoiser layers of these shapes [out, in, ...]; () where unknown."""

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

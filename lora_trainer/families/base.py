"""The seam a model family fills: facts, loading, encoding, prediction, names. Nothing else knows families.

Importing a family costs no torch: facts are plain data, heavy imports live inside its methods. A new
family is one module with a `FAMILY`, one line in the registry and its presets; the tests iterate the
registry.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from lora_trainer.caption_markup import NewWord as NewWord
from lora_trainer.caption_markup import Weighted
from lora_trainer.config import CHECKPOINTING, Checkpointing, Precision
from lora_trainer.errors import RequestError
from lora_trainer.families.chunks import AROUND
from lora_trainer.families.costs import SampleCost, Targets, Workload

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn

Prediction = Literal["epsilon", "v_prediction", "flow"]
Part = Literal["denoiser", "vae", "text_encoder"]
PARTS: tuple[Part, ...] = ("denoiser", "vae", "text_encoder")
"""`text_encoder` is everything that turns a prompt into conditioning: all encoders and tokenizers."""
FileFormat = Literal["kohya", "diffusers", "comfyui"]
WEIGHTS = ".weights"
"""End of the name under which the weights of an encoder's tokens are, beside the tokens themselves."""
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
    """Where a layer's weight lies in a checkpoint: a tensor, or the `rows` (first, end) of a fused one."""

    tensor: str
    rows: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Where the parts of a base lie on this machine.

    `folder` is a diffusers folder: configs, tokenizers, scheduler, and the weights of every part that
    has no entry in `files`. `files` names a `.safetensors` checkpoint (all parts or one), or a folder
    with a part's own config.json and weights, that is used instead: a checkpoint from ComfyUI, a
    separate VAE.
    """

    folder: Path
    files: Mapping[Part, Path] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PartFacts:
    """One part of a base model: parameter count, and the hash of weights and config ("" if not on disk)."""

    parameters: int
    identity: str = ""


@dataclass(frozen=True, kw_only=True)
class Assumption:
    """A fact that no file of a base tells: a sentence on how it was taken, and the setting that says otherwise."""

    sentence: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class BaseFacts:
    """What is known about a base model without loading a weight.

    `source` is what the user wrote, `layout` where it is (None: known by name only, not downloaded).
    `parts` has an entry per `PARTS`; `architecture` is the denoiser's configuration as diffusers
    writes it, `scheduler` the scheduler's. `variant` names the release within the family where
    that matters ("medium", "schnell"); `distilled` bases lose their few-step ability in training.
    `zero_terminal_snr` says that the last training timestep is pure noise. Texts are read in `chunks`
    of `max_tokens` each, from the layer that `clip_skip` counts from the last one, which is 1.
    `assumed` is what nothing tells.
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
    parts: Mapping[str, PartFacts]
    architecture: Mapping[str, Any]
    scheduler: Mapping[str, Any] = field(default_factory=dict)
    variant: str = ""
    distilled: bool = False
    zero_terminal_snr: bool = False
    download_bytes: int = 0
    assumed: Assumption | None = None
    chunks: int = 1
    clip_skip: int = 1

    @property
    def chunk_room(self) -> int:
        """Tokens of a text that one chunk holds, without its begin and end."""
        return self.max_tokens - AROUND

    @property
    def text_tokens(self) -> int:
        """The tokens of a text that the denoiser is told, begin, end and padding among them."""
        return self.max_tokens + (self.chunks - 1) * self.chunk_room

    @property
    def located(self) -> Layout:
        """The layout of a base that is on this machine; a base known by name only is a bug here."""
        if self.layout is None:
            raise AssertionError(f"{self.source} is known by name only; locate it before loading")
        return self.layout


@dataclass(frozen=True, kw_only=True)
class Geometry:
    """How an image became its bucket, in pixels: size as scaled, crop corner in that, size trained.

    `original_px` is (width, height) before scaling; `corner_px` (left, top); `target_px` the bucket.
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

A family with texts of varying length returns them unpadded for a single prompt, with a
`text_mask` of ones [1, length]; batches are padded with zeros on dimension 1 to the longest.
"""


class ImageEncoder(ABC):
    """The VAE, needed while caching only."""

    @abstractmethod
    def encode_images(self, pixels: Tensor) -> list[Latents]:
        """Encode float32 [B, 3, H, W] in [-1, 1]; raises InputError when a latent is not finite."""


class TextEncoder(ABC):
    """Tokenizers and text networks on one device, needed while caching, or trained along."""

    networks: Mapping[str, nn.Module]
    """Component name ("text_encoder", "text_encoder_2") -> network, in the family's order."""

    @abstractmethod
    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        """Return what the networks read, int64 [B, ...] by name, on the CPU; truncated to their limits."""

    @abstractmethod
    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Run the networks on what `tokenize` gave, with gradients where they are enabled; on the device."""

    def learn(self, word: NewWord) -> None:
        """Read a word as tokens of its own from now on; if the family is `teachable`."""
        raise AssertionError("these text encoders learn no new words")

    def numbers(self, text: str) -> Mapping[str, Sequence[int]]:
        """Return by component the numbers of a text's tokens, without any around it; if `teachable`."""
        raise AssertionError("these text encoders learn no new words")

    def tokenize_weighted(self, parts: Sequence[Weighted]) -> Mapping[str, Tensor]:
        """Return what `tokenize` gives for the parts as one text, and under names that end in `WEIGHTS`
        the weight of each token, float32 [1, ...]; if the family `weighs_words`."""
        raise AssertionError("these text encoders do not weigh words")

    @abstractmethod
    def count_tokens(self, prompt: str) -> int:
        """Return the tokens of `prompt` before truncation, special tokens and template excepted."""

    @abstractmethod
    def prompt_room(self) -> int:
        """Return how many tokens, counted so, a prompt may have without anything being cut."""

    def encode_prompts(self, prompts: Sequence[str]) -> Conditioning:
        """Encode texts to float32 (masks: int64) tensors on the CPU, without gradients."""
        return self.encode_tokens(self.tokenize(prompts))

    def encode_tokens(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        """Do what `encode_prompts` does with what a text was tokenized to."""
        import torch

        with torch.no_grad():
            found = self.embed(tokens)
        return {
            name: (tensor.float() if tensor.is_floating_point() else tensor).cpu()
            for name, tensor in found.items()
        }


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
    """Hub id offered on a GPU when no base is named, and the companion of single-file checkpoints."""
    file_formats: tuple[FileFormat, ...]
    """Key formats its adapters can be written in, the most widely read first (`output.format=auto`)."""
    refused_formats: Mapping[FileFormat, str]
    """Why each other format is refused: who could not read it, and what to use."""
    trainable_text: bool = False
    """Whether its text encoders can be trained along."""
    teachable: Mapping[str, str] = {}
    """Component of each text encoder that can learn a new word -> key of its vectors in embedding files."""
    weighs_words: bool = False
    """Whether its text encoders take weights of words, as in `(word:1.2)`."""
    reads_chunks: bool = False
    """Whether texts that are too long for its encoders are read in chunks (`BaseFacts.chunks`)."""
    precisions: tuple[Precision, ...]
    """What its denoiser can be trained in, the best first: in any other its numbers leave the range."""
    encoding_elements_per_px: int = 5 * 128
    decoding_elements_per_px: int = 6 * 128
    """What its VAE has alive at the peak, in elements for each pixel of one image: of AutoencoderKL 5 and 6
    maps of its 128 channels at full size, which `LiveStorages` counts on its networks."""
    one_text_length: bool = True
    """Whether all texts are as long, padding included; else each has a length of its own and a mask."""
    block_pattern: str = r"\w+\.\d+(?=\.)"
    """Matches the beginning of a layer's name that is the name of its repeated block."""
    unquantised: tuple[str, ...] = ()
    """Parts of the names of layers inside blocks that a quantised base keeps in full precision."""
    modulation: tuple[str, ...] = ()
    """Endings of the names of linear layers inside blocks that nothing of the image reaches; empty: too
    few weights are in such layers to keep them elsewhere."""

    # ---- facts, without torch

    @abstractmethod
    def known(self, source: str) -> BaseFacts | None:
        """Return facts of a well-known Hub id from its name alone, else None."""

    @abstractmethod
    def detect(self, folder: Path) -> bool:
        """Say whether a diffusers folder is of this family, from its JSON files alone."""

    @abstractmethod
    def detect_file(self, header: Header) -> frozenset[Part]:
        """Return the parts a single-file checkpoint of this family holds; empty: not of this family."""

    @abstractmethod
    def facts(self, layout: Layout, *, source: str, identities: Mapping[str, str]) -> BaseFacts:
        """Read facts from configs and safetensors headers; raises InputError naming a missing part."""

    @abstractmethod
    def parts(self, layout: Layout) -> Mapping[str, tuple[Path, ...]]:
        """Return the files that make the identity of each of `PARTS`."""

    def public_architectures(self) -> tuple[Mapping[str, Any], ...]:
        """Return the denoiser's configuration of each public release, the default one first."""
        facts = self.known(self.default_source)
        return (facts.architecture,) if facts is not None else ()

    def with_clip_skip(self, facts: BaseFacts, clip_skip: int) -> BaseFacts:
        """Return facts with texts read from another layer (1: the last); raises RequestError."""
        if clip_skip != 1:
            found = f"base.clip_skip={clip_skip}, but {facts.source} reads text from one layer only"
            raise RequestError(found, fix="leave base.clip_skip out")
        return facts

    def guides_by_two_passes(self, facts: BaseFacts) -> bool:
        """Say whether a guidance scale above 1 takes two predictions a step, with the prompt and without."""
        return True

    def passes_with(self, conditioning: Conditioning) -> int:
        """Return what one sample's conditioning must share with others to be rows of the same passes."""
        return 0

    def text_modules(self) -> Mapping[str, Sequence[str]]:
        """Return by component the layers of text networks that adapter files of any trainer may change."""
        return {}

    def checkpoint_weights(self, header: Header) -> Mapping[str, WeightPlace]:
        """Return by "component.module" where a single-file checkpoint keeps the layers; empty: not known."""
        return {}

    @abstractmethod
    def sample_cost(self, facts: BaseFacts, workload: Workload) -> SampleCost:
        """Return memory and FLOPs of training on one sample, from the architecture alone."""

    def known_checkpointing(
        self, facts: BaseFacts, *, element_bytes: int, targets: Targets, wide_adapter: bool
    ) -> tuple[Checkpointing, ...]:
        """Return the kinds of checkpointing whose `sample_cost` is known without running the network."""
        return CHECKPOINTING

    @abstractmethod
    def adapter_shapes(
        self, facts: BaseFacts, *, targets: Targets
    ) -> Mapping[str, tuple[int, ...]]:
        """Return (fan_in, out) of each denoiser module that gets an adapter, in module order.

        `fan_in` counts the kernel; where that has more than one element, its size comes third.
        """

    def text_adapter_shapes(self, facts: BaseFacts) -> Mapping[str, Mapping[str, tuple[int, ...]]]:
        """Return by component what `adapter_shapes` does, of the modules that `text_targets` names."""
        return {}

    def linear_shapes(self, facts: BaseFacts) -> Mapping[str, tuple[int, int]]:
        """Return (fan_in, out) of the linear layers in the denoiser's repeated blocks, in module order."""
        found = self.adapter_shapes(facts, targets="all")
        return {name: (shape[0], shape[1]) for name, shape in found.items() if len(shape) == 2}

    def modulation_layers(self, facts: BaseFacts) -> tuple[str, ...]:
        """Return the names of the layers that end in one of `modulation`, in module order."""
        endings = tuple(f".{ending}" for ending in self.modulation)
        return tuple(name for name in self.linear_shapes(facts) if name.endswith(endings))

    def modulated_by(self, facts: BaseFacts) -> tuple[str, ...]:
        """Return the names of the conditioning that `modulation_input` reads."""
        return ()

    @abstractmethod
    def base_model_version(self, facts: BaseFacts) -> str:
        """Return kohya's `ss_base_model_version`, which A1111, Forge and model managers read."""

    @abstractmethod
    def modelspec_architecture(self, facts: BaseFacts) -> str:
        """Return `modelspec.architecture` of an adapter (ModelSpec 1.0.1)."""

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

    def alphas_cumprod(self, facts: BaseFacts) -> Tensor:
        """Return the cumulative signal level of every training timestep, float64 [timesteps]."""
        raise AssertionError(f"{self.name} is trained by flow matching: it has no such levels")

    def flow_shift(self, facts: BaseFacts, *, width_px: int, height_px: int) -> float:
        """Return s of sigma' = s sigma / (1 + (s - 1) sigma) that the base's own sampler uses at this size."""
        raise AssertionError(f"{self.name} is no flow-matching family")

    def geometry_conditioning(self, facts: BaseFacts, geometry: Geometry) -> Conditioning:
        """Return what the denoiser is told about the image's geometry, batch 1; most are told nothing."""
        return {}

    def guidance_conditioning(self, facts: BaseFacts, *, guidance_scale: float) -> Conditioning:
        """Return the guidance embedding's input where the base has one, batch 1 (float32 [1])."""
        return {}

    @abstractmethod
    def predict(
        self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, conditioning: Conditioning
    ) -> Tensor:
        """One forward pass: [B, C, H, W] -> prediction of the same shape.

        `timesteps` is int64 [B] in [0, 999] for epsilon and v, float32 [B] = 1000 sigma for flow.
        """

    def modulation_input(
        self,
        denoiser: nn.Module,
        timesteps: Tensor,
        conditioning: Conditioning,
        *,
        dtype: torch.dtype,
    ) -> Tensor:
        """Return what `predict` gives the layers of `modulation`, bit by bit: [B, width] in `dtype`.

        `timesteps` are those of `predict`; of the conditioning there is `modulated_by`.
        """
        raise AssertionError(f"{self.name} has no modulation layers to compute ahead")

    @abstractmethod
    def lora_targets(self, denoiser: nn.Module, targets: Targets) -> list[str]:
        """Return the full module names that get an adapter, in module order."""

    def text_targets(self, network: nn.Module) -> list[str]:
        """Return the module names of a text network that get an adapter, in module order."""
        raise AssertionError(f"{self.name} does not train its text encoders")

    # ---- files

    @abstractmethod
    def file_module(self, format: FileFormat, component: str, module: str) -> str:
        """Return the name of a module in a file of that format, of `file_formats`.

        `component` is `denoiser`, `text_encoder`, ...; `module` the name in the network that
        `load_denoiser` or `load_text_encoder` gives.
        """

    def checkpoint_module(self, module: str) -> str | None:
        """Return what the releases' own code calls a denoiser's module, None where it has the same names or none.

        Adapter files of other trainers use those names.
        """
        return None

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

        The VAE comes only for an image, to `decode_on`, which is `device` where nothing is said.
        """

    def prompt_arguments(
        self, prompt: str, negative: str, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the plain pipeline's arguments with which it draws what the sampler draws."""
        return {"prompt": prompt, "negative_prompt": negative, "guidance_scale": guidance_scale}

    def pipeline_arguments(
        self,
        pipeline: DiffusionPipeline,
        facts: BaseFacts,
        prompt: str,
        negative: str,
        *,
        guidance_scale: float,
    ) -> Mapping[str, Any]:
        """Return what `prompt_arguments` does, of texts as long as `facts` reads them."""
        return self.prompt_arguments(prompt, negative, guidance_scale=guidance_scale)

    @abstractmethod
    def plain_pipeline(
        self, facts: BaseFacts, *, dtype: torch.dtype, device: torch.device
    ) -> DiffusionPipeline:
        """Return diffusers' own text-to-image pipeline in `dtype` (VAE float32), as any other program would load it."""

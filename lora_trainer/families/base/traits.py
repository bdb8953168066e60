"""Plain values that a family states about its network, its VAE, diffusers' pipeline and adapter files. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from lora_trainer.config.declare import Precision, Targets
from lora_trainer.families.base.facts import BY_TWO_PASSES, BaseFacts, Conditioning, Guidance

FileFormat = Literal["kohya", "diffusers", "comfyui"]


# Block pattern of networks whose blocks are in lists at the top: `transformer_blocks.0.`
INDEXED_BLOCK = r"\w+\.\d+(?=\.)"


@dataclass(frozen=True, kw_only=True)
class VaePeak:
    """Peak of a VAE's live tensors in elements per pixel of one image, as `LiveStorages` counts them."""

    encoding: int
    decoding: int
    blocked: tuple[int, int]  # both with `DeviceKind.blocks_convolutions`, which copies tensors


AUTOENCODER_KL = VaePeak(encoding=640, decoding=768, blocked=(640, 960))  # 5 and 6 maps of 128
# Wan's and Qwen-Image's: it pads each map by two frames and caches maps for a next frame, which an image never has.
VIDEO_VAE = VaePeak(encoding=970, decoding=1740, blocked=(1260, 2026))


@dataclass(frozen=True, kw_only=True)
class NetworkTraits:
    """Facts of a family's denoiser and VAE.

    `class_name` is diffusers' class of the denoiser, `folder` its folder and its name in the pipeline.
    `endings` are those of the names of the modules that get an adapter; of these `unused_in_last_block` change
    nothing there, because the last of `transformer_blocks` drops its text output. `patch` is the side of the
    square of latents that becomes one token. `precisions`: dtypes in which the denoiser can be trained, the best
    first; its activations overflow in others. `block_pattern` matches the name of the repeated block at the start
    of a layer's name; `quantization_skip`: parts of names of layers inside blocks that a quantised base keeps in
    full precision. `swapped_layers`: endings of layers whose original code has shift before scale, where diffusers
    has the reverse, if these two are all their rows. `refiners`: beginnings of names of layers of the blocks before
    the main ones, which `adapter.refiners` leaves out. `sides`: shares of the base's own size that it can be trained at
    too, the largest first. `shifts_by_tokens`: trainers shift the noise by the size of the
    image as FLUX.1's sampler does, though the base's own sampler has one shift for all. `unshifted_px`: the sampler
    shifts the noise by the ratio of an image's side to this one, the root of the ratio of their pixels; 0: by its
    scheduler's configuration. `shares_vae`: whether the
    VAE in another family's checkpoint counts, as FLUX.1's does for those that use it too. `fp32_in_files`: parts of
    the original code's names of the tensors that diffusers keeps in float32 by its own names. `unread`: parts,
    between the dots of names, of the layers that images from text never go through, diffusers' and the original code's:
    they are not loaded, and files of adapters may have them. `reference_layers`: parts, likewise, of the names of
    layers that only reference images go through -> those of the equal layers of the image; they are loaded for
    references.
    """

    class_name: str
    folder: str
    endings: Mapping[Targets, tuple[str, ...]]
    unused_in_last_block: tuple[str, ...] = ()
    patch: int
    precisions: tuple[Precision, ...]
    block_pattern: str
    quantization_skip: tuple[str, ...] = ()
    swapped_layers: tuple[str, ...] = ()
    refiners: tuple[str, ...] = ()
    sides: tuple[float, ...] = ()
    shifts_by_tokens: bool = False
    unshifted_px: int = 0
    vae_peak: VaePeak = AUTOENCODER_KL
    shares_vae: bool = False
    fp32_in_files: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    reference_layers: Mapping[str, str] = field(default_factory=dict)

    def reads(self, name: str, *, references: bool = False) -> bool:
        """Return whether a tensor or module of the denoiser, of that name, is loaded, with `references` or without."""
        if not self.unread and not self.reference_layers:
            return True
        left_out = {*self.unread, *(() if references else self.reference_layers)}
        return left_out.isdisjoint(name.split("."))

    def is_for_references(self, name: str) -> bool:
        """Return whether only reference images go through a tensor or module of the denoiser, of that name."""
        return not self.reference_layers.keys().isdisjoint(name.split("."))


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """diffusers' blocks of a modular pipeline, by the names that they have in it; a name stands for all blocks in it.

    `encoding` are those that make of a prompt what the denoiser reads, `decoding` those that make images of latents.
    `unused` are left out: networks that change a prompt before it is read. `class_of` returns the class of the blocks
    by the denoiser's configuration, where that is not the same for all releases. `editing` is the workflow that draws
    with reference images, where there is one.
    """

    class_name: str
    encoding: tuple[str, ...]
    decoding: tuple[str, ...] = ("decode",)
    unused: tuple[str, ...] = ()
    class_of: Callable[[Mapping[str, Any]], str] | None = None
    workflow: str = "text2image"
    editing: str = ""

    def of(self, architecture: Mapping[str, Any]) -> str:
        """Return the class of the blocks of a base by its denoiser's configuration."""
        return self.class_name if self.class_of is None else self.class_of(architecture)


@dataclass(frozen=True, kw_only=True)
class PipelineTraits:
    """Facts of diffusers' text-to-image pipeline of a family.

    `blocks`: of a family that has a modular pipeline only; `class_name` is then what the index of its folder names.
    `absent`: arguments that switch off its optional components. `text_arguments`: conditioning of a prompt -> the
    pipeline's argument for it, of texts as `as_read` returns the prompt's and the negative prompt's.
    `scale_argument`: its guidance scale, which is `scale_offset` less than ours, prompt + (scale - 1) (prompt -
    negative). `takes_negative`: whether it takes a negative prompt, before which `negative_prefix` has to be put.
    `system_argument`: its argument for another system prompt.
    `guidance`: how a base of this architecture, distilled or not, follows a guidance scale. `states`: arguments that
    say what a base is; else a pipeline would take them from the folder that brings its other parts.
    `reads_vae`: it reads the VAE's statistics also for latents, and counts them before they are folded to squares.
    `sigmas`: the noise levels of as many steps of a base that has its own, else None. `processor` makes of a tokenizer
    what the pipeline takes in its place. `mend` changes a whole pipeline.
    `scales`: of a guidance scale and a number of steps the pipeline's arguments for them, where steps differ in their
    scale. `images`: what draws with encoded prompts in place of a pipeline that takes none, made of the facts of a
    base, its denoiser and the network of `unguided`; its call is that of a pipeline. `unguided`: component with a
    second, frozen network of the denoiser's class, which predicts without a prompt where images are drawn with
    guidance; where a base lacks it, the denoiser does so.
    """

    class_name: str
    blocks: Blocks | None = None
    absent: Mapping[str, Any] = field(default_factory=dict)
    text_arguments: Mapping[str, str] = field(
        default_factory=lambda: {"text": "prompt_embeds", "pooled": "pooled_prompt_embeds"}
    )
    as_read: Callable[[Conditioning, Conditioning], Iterable[Mapping[str, Any]]] = (
        lambda prompt, negative: (prompt, negative)
    )
    scale_argument: str = "guidance_scale"
    scale_offset: float = 0.0
    takes_negative: bool = True
    system_argument: str = ""
    negative_prefix: str = ""
    guidance: Callable[[Mapping[str, Any], bool], Guidance] = lambda architecture, distilled: (
        BY_TWO_PASSES
    )
    states: Callable[[BaseFacts], Mapping[str, Any]] = lambda facts: {}
    reads_vae: bool = False
    sigmas: Callable[[BaseFacts, int], Sequence[float] | None] = lambda facts, steps: None
    processor: Callable[[Any], Any] | None = None
    mend: Callable[[Any], None] = lambda pipeline: None
    scales: Callable[[float, int], Mapping[str, Any]] | None = None
    images: Callable[..., Any] | None = None
    unguided: str = ""


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """Names of the base in an adapter's metadata.

    `kohya` is `ss_base_model_version`, which A1111, Forge and model managers read; `modelspec` is
    `modelspec.architecture` (ModelSpec 1.0.1).
    """

    kohya: str
    modelspec: str


@dataclass(frozen=True, kw_only=True)
class AdapterFormats:
    """Key formats of a family's adapter files; `written` and `refused` together are all formats.

    `written`: the most widely read first (`output.format=auto`). `refused`: why each other format is
    refused, that is the programs that could not read it, and the format to use. `names` are those of a family
    whose releases share them. ComfyUI maps diffusers' own keys of to_q, to_k and to_v, behind `comfyui_prefix`,
    to rows of its fused weight; where it does not, `original` has the format: its names are those of the
    releases' own code (transformer_names.toml), where several layers are one weight if it `joins`. `unread`: what
    a program loses of a file in a format, a sentence.
    """

    written: tuple[FileFormat, ...]
    refused: Mapping[FileFormat, str]
    names: AdapterNames | None = None
    comfyui_prefix: str = "transformer."
    original: frozenset[FileFormat] = frozenset()
    joins: bool = True
    unread: Mapping[FileFormat, str] = field(default_factory=dict)

    @property
    def joined(self) -> frozenset[FileFormat]:
        """The formats in which several layers are one weight."""
        return self.original if self.joins else frozenset()


@dataclass(frozen=True, kw_only=True)
class OtherNames:
    """Names that adapter files and checkpoints have for layers of the denoiser beside diffusers' names.

    `layers`: such a name -> the diffusers layers it stands for, in the order of their rows, because the
    releases' own code fuses several into one weight. `swapped`: layers the halves of whose rows stand there
    in the other order.
    """

    layers: Mapping[str, tuple[str, ...]]
    swapped: frozenset[str] = frozenset()

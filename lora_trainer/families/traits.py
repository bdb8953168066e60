"""Plain values that a family states: about its texts, its network, its adapter files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from lora_trainer.config.declare import Precision

if TYPE_CHECKING:
    from torch import Tensor

FileFormat = Literal["kohya", "diffusers", "comfyui"]
INDEXED_BLOCK = r"\w+\.\d+(?=\.)"
"""Block pattern of networks whose blocks are in lists at the top: `transformer_blocks.0.`"""


@dataclass(frozen=True, kw_only=True)
class Licence:
    """The licence of a public release: its name, what it allows in a few words, whether it is gated.

    `is_gated`: the Hub gives the files only to who is signed in and has accepted the terms on the release's page.
    """

    name: str
    allows: str
    is_gated: bool = False


# As the releases' pages on the Hub name them, 2026.
APACHE = Licence(name="Apache 2.0", allows="free for every use")
OPENRAIL = Licence(
    name="Open RAIL-M", allows="free, also for work you sell; harmful uses are ruled out"
)
STABILITY = Licence(
    name="Stability AI Community",
    allows="free below a revenue of 1 million dollars a year",
    is_gated=True,
)
FLUX_DEV = Licence(
    name="FLUX Non-Commercial", allows="the model is for non-commercial use", is_gated=True
)


@dataclass(frozen=True, kw_only=True)
class VaePeak:
    """Peak of a VAE's live tensors in elements per pixel of one image, as `LiveStorages` counts them."""

    encoding: int
    decoding: int
    blocked: tuple[int, int]  # both with `DeviceKind.blocks_convolutions`, which copies tensors


AUTOENCODER_KL = VaePeak(encoding=640, decoding=768, blocked=(640, 960))  # 5 and 6 maps of 128


@dataclass(frozen=True, kw_only=True)
class TextInputs:
    """A family's text encoders: their layers, their names in files, and how they read prompts.

    `layers`: by component the weights' shapes [out, in] of each layer in the public releases, which adapter
    files of any trainer may contain. `roles`: component -> ComfyUI's name of the encoder ("clip_l", "t5xxl").
    `multiple`: the network pads texts to a multiple of this many tokens. `one_length`: the texts of one
    forward pass must have one length. `encoder_files`: single encoders can be read from files of their own
    (`Layout.text`). A setting that needs a field which is False or empty is refused: `trainable` encoders,
    prompt weights as in `(word:1.2)`, prompts above the limit read in `chunks`, and new words
    (`new_token_keys`: component -> key of its vectors in embedding files).
    """

    layers: Mapping[str, Mapping[str, tuple[int, ...]]]
    roles: Mapping[str, str]
    multiple: int
    one_length: bool
    encoder_files: bool
    trainable: bool = False
    prompt_weights: bool = False
    chunks: bool = False
    new_token_keys: Mapping[str, str] = field(default_factory=dict)

    def batch_group_key(self, conditioning: Mapping[str, Tensor]) -> int:
        """Return the key that the samples of one forward pass must share: their text's length, or 0."""
        return int(conditioning["text_mask"].sum()) if self.one_length else 0


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
class NetworkTraits:
    """Facts of a family's networks that planning and quantization read.

    `precisions`: dtypes in which its denoiser can be trained, the best first; its activations overflow in others.
    `block_pattern` matches the name of the repeated block at the start of a layer's name;
    `quantization_skip`: parts of names of layers inside blocks that a quantised base keeps in full precision.
    """

    precisions: tuple[Precision, ...]
    block_pattern: str
    quantization_skip: tuple[str, ...]
    vae_peak: VaePeak


@dataclass(frozen=True, kw_only=True)
class AdapterFormats:
    """Key formats of a family's adapter files; together the two are all formats.

    `written`: the most widely read first (`output.format=auto`). `refused`: why each other format is
    refused, that is the programs that could not read it, and the format to use.
    """

    written: tuple[FileFormat, ...]
    refused: Mapping[FileFormat, str]


@dataclass(frozen=True, kw_only=True)
class OtherNames:
    """Names that adapter files and checkpoints have for layers of the denoiser beside diffusers' names.

    `layers`: such a name -> the diffusers layers it stands for, in the order of their rows, because the
    releases' own code fuses several into one weight. `swapped`: layers the halves of whose rows stand there
    in the other order.
    """

    layers: Mapping[str, tuple[str, ...]]
    swapped: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class AdapterNames:
    """Names of the base in an adapter's metadata.

    `kohya` is `ss_base_model_version`, which A1111, Forge and model managers read; `modelspec` is
    `modelspec.architecture` (ModelSpec 1.0.1).
    """

    kohya: str
    modelspec: str

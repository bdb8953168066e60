"""Where the parts of a base lie on this machine, and where a file keeps a weight. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Part = Literal["denoiser", "vae", "text_encoder"]


# `text_encoder` stands for all text encoders and tokenizers of a base together.
PARTS: tuple[Part, ...] = ("denoiser", "vae", "text_encoder")


# Component name of the denoiser in adapter keys; text encoders are `text_encoder`, `text_encoder_2`.
DENOISER = "denoiser"


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

    def part_folder(self, part: Part, subfolder: str) -> Path:
        """Return the folder of a part's config.json: the folder in `files`, else `subfolder`."""
        override = self.files.get(part)
        return override if override is not None and override.is_dir() else self.folder / subfolder

    def part_file(self, part: Part) -> Path | None:
        """Return the single file that holds a part's weights, None where they are in a folder."""
        override = self.files.get(part)
        return override if override is not None and override.is_file() else None

    def text_file(self, component: str) -> Path | None:
        """Return the single file that holds a text encoder, None where it is in the folder."""
        return self.text.get(component, self.part_file("text_encoder"))

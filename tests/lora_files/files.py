"""The files of the corpus, and what each layer's weight must change by."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.lora_files.kinds import Written
from tests.lora_files.layers import Layer
from tests.lora_files.trainers import Case

LARGE = 2**24
"""Layers of more numbers than this are read, but not compared: their updates take a second each."""


@dataclass(frozen=True)
class Expected:
    """The rows of what was written for a layer that one layer in diffusers' names has."""

    written: Written
    layer: Layer
    rows: slice
    seed: int

    @property
    def weight(self) -> Tensor | None:
        """The base's weight of this layer, made up, as no base is on this machine; None: it is not read."""
        return self._whole[self.rows] if self.written.based else None

    @property
    def base_weight(self) -> Tensor:
        """What the base has for the whole layer that was written for; zeros where the update does not read it."""
        return (
            self._whole if self.written.based else torch.zeros(self.layer.out, *self.layer.inputs)
        )

    @cached_property
    def _whole(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randn(self.layer.out, *self.layer.inputs, generator=generator)

    @property
    def delta(self) -> Tensor:
        """What the weight changes by, float64."""
        whole = self._whole if self.written.based else torch.empty(0)
        return self.written.delta(whole, self.rows)

    @property
    def numbers(self) -> int:
        """How many numbers the layer's weight has."""
        return (self.rows.stop - self.rows.start) * math.prod(self.layer.inputs)


STATED = {
    "sd15": "sd_v1", "sd2": "sd_v2", "sdxl": "sdxl_base_v1-0", "sd3": "3-5-medium", "flux": "flux1",
    "flux2": "flux2", "chroma": "chroma", "zimage": "zimage", "qwen": "qwen_image",
}  # fmt: skip


def build(case: Case, path: Path, *, most: int | None = None) -> dict[str, Expected]:
    """Write the file of a case; return what is expected by "component.layer".

    With only the first `most` layers of every part its names may fit several families: the header then
    says which, as kohya's trainers write it.
    """
    tensors, expected = dict[str, Tensor](), dict[str, Expected]()
    for part in case.parts:
        for layer in list(part.layers)[:most]:
            seed = zlib.crc32(f"{case.name}{part.component}{layer.name}".encode())
            written = part.kind(layer, torch.Generator().manual_seed(seed))
            spelt = part.spell(layer.name)
            for end, tensor in written.tensors.items():
                key = f"{spelt}{end}" if end.startswith("_") else f"{spelt}.{end}"
                assert key not in tensors
                tensors[key] = tensor.contiguous()
            begin = 0
            for name, out in layer.parts:
                rows = slice(begin, begin + out)
                expected[f"{part.component}.{name}"] = Expected(written, layer, rows, seed)
                begin += out
    for key, shape in case.extra.items():
        tensors[key] = torch.zeros(shape)
    stated = {} if most is None else {"ss_base_model_version": STATED[case.family]}
    save_file(tensors, path, metadata={**case.metadata, **stated} or None)
    return expected


def some(expected: Mapping[str, Expected], *, most: int) -> dict[str, Expected]:
    """Return a few small layers of every kind and component, parts of joined ones first."""
    order = sorted(
        (key for key in expected if expected[key].numbers < LARGE),
        key=lambda key: (-len(expected[key].layer.parts), zlib.crc32(key.encode())),
    )
    groups: dict[tuple[str, str], list[str]] = {}
    for key in order:
        groups.setdefault((key.partition(".")[0], expected[key].written.kind), []).append(key)
    first = [keys[0] for keys in groups.values()]
    return {key: expected[key] for key in list(dict.fromkeys([*first, *order]))[:most]}

"""The tools' memory is that of a module or a tensor, however many there are."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file import stream
from lora_trainer.network.live_storages import LiveStorages
from lora_trainer.tools import adapters
from lora_trainer.tools.adapters import Weighted
from lora_trainer.tools.convert import convert
from lora_trainer.tools.extract import extract
from lora_trainer.tools.merge import merge
from lora_trainer.tools.merge_base import bake
from lora_trainer.tools.resize import ResizeLimits, resize
from tests.fakes.adapters import draw_module
from tests.fakes.tool_files import saved

SIDE, RANK = 256, 32
MODULE_BYTES = 2 * SIDE * RANK * 4
WEIGHT_BYTES = SIDE * SIDE * 4
FEW, MANY = 4, 24
ROW_BYTES = 16384
"""What a header, names and what is said of a module may take: they are kept."""


def names(count: int) -> list[str]:
    """Return modules of the public release of Stable Diffusion 1."""
    blocks = [f"down_blocks.{level}.attentions.{index}" for level in range(3) for index in range(2)]
    layers = [f"attn{number}.to_{side}" for number in (1, 2) for side in "qkv"]
    return [f"{block}.transformer_blocks.0.{layer}" for block in blocks for layer in layers][:count]


def adapter(path: Path, count: int) -> Path:
    modules: Mapping[str, ModuleTensors] = {
        f"denoiser.{name}": draw_module((SIDE, SIDE), rank=RANK, seed=number, scale=0.3)
        for number, name in enumerate(names(count))
    }
    return saved(path, "sd15", modules, format="kohya")


def checkpoint(path: Path, count: int, *, seed: int = 0) -> Path:
    """Write a checkpoint in one file, with diffusers' names, whose layers are all of one size."""
    draw = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {
        "conv_in.weight": torch.ones(8, 4, 3, 3),
        "down_blocks.0.attentions.0.proj_in.weight": torch.ones(8, 8, 1, 1),
        # What tells the family.
        "down_blocks.2.attentions.1.transformer_blocks.0.attn2.to_k.weight": torch.ones(8, 768),
    }
    for name in names(count):
        tensors[f"{name}.weight"] = torch.randn(SIDE, SIDE, generator=draw)
    save_file(tensors, path)
    return path


def peaks_bytes(work: Callable[[], object]) -> tuple[int, int]:
    """Return the most that tensors took while something ran, and the most that Python's own memory did."""
    work()  # what libraries keep of a first time does not count
    with LiveStorages() as tensors:
        work()
    tracemalloc.start()
    try:
        work()
        return tensors.peak_bytes, tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def assert_bounded(found: Mapping[int, tuple[int, int]], *, unit_bytes: int) -> None:
    """Tensors take the same for any number of modules, the rest but names and places more."""
    (few_tensors, few), (many_tensors, many) = found[FEW], found[MANY]
    assert few_tensors == many_tensors < 8 * unit_bytes
    assert unit_bytes < few_tensors + few < MANY * unit_bytes / 2
    assert many - few < (MANY - FEW) * ROW_BYTES


@pytest.fixture(autouse=True)
def _hashing_holds_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """It holds up to 2 MB of any file, which would hide what is measured of files of 3 MB."""
    monkeypatch.setattr(stream, "_LEGACY_END", 4096)


@pytest.fixture(autouse=True)
def _names_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """The empty network of the public release, built for its names, is as large as it is real."""
    family = families.family("sd15")
    names = adapters._names_in(family, family.published[0].architecture)
    monkeypatch.setattr(adapters, "_names_of", lambda *_: names)


@pytest.mark.parametrize("tool", ["convert", "merge", "cut", "resize"])
def test_modules_come_and_go_one_by_one(tool: str, tmp_path: Path) -> None:
    def work(count: int) -> object:
        file, other = (tmp_path / f"{count}{each}.safetensors" for each in "ab")
        both = [Weighted(file=file, weight=0.5), Weighted(file=other, weight=2)]
        out = tmp_path / "out.safetensors"
        match tool:
            case "convert":
                return convert(file, format="diffusers", output=out, force=True)
            case "merge":
                return merge(both, output=out, force=True)
            case "cut":
                return merge(both, output=out, rank=RANK, force=True)
            case _:
                return resize(file, ResizeLimits(rank=4), output=out, force=True)

    found = {}
    for count in (FEW, MANY):
        for each in "ab":
            adapter(tmp_path / f"{count}{each}.safetensors", count)
        found[count] = peaks_bytes(partial(work, count))
    # Two factors of float64, and those of two files.
    assert_bounded(found, unit_bytes=4 * MODULE_BYTES)


@pytest.mark.parametrize("tool", ["bake", "extract"])
def test_weights_come_and_go_one_by_one(tool: str, tmp_path: Path) -> None:
    def work(count: int) -> object:
        one, other = (str(tmp_path / f"{count}-{seed}.safetensors") for seed in (0, 1))
        inputs = [Weighted(file=tmp_path / f"{count}.safetensors", weight=0.5)]
        out = tmp_path / "out.safetensors"
        if tool == "bake":
            return bake(inputs, base=one, output=out, force=True)
        return extract(one, other, output=out, rank=4, force=True)

    found = {}
    for count in (FEW, MANY):
        adapter(tmp_path / f"{count}.safetensors", count)
        for seed in (0, 1):
            checkpoint(tmp_path / f"{count}-{seed}.safetensors", count, seed=seed)
        found[count] = peaks_bytes(partial(work, count))
    assert_bounded(found, unit_bytes=WEIGHT_BYTES)

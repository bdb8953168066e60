"""The peak memory of loading a quantised file into a quantised base at true size, on this processor. Linux only.

Usage: python benchmarks/quantised_load.py FILE --made-of FAMILY [--release N] [--layout fp8] [--precision nf4]

Writes FILE, a sparse safetensors file with the release's own names and shapes, its blocks' matrices in a layout of
ComfyUI, plans a training on it, loads it as the command does, and prints the kernel's high-water mark beside the plan's
phase "loading" without what is made after it (adapter, optimizer, copies). Z-Image takes 6 GB of memory in nf4.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import struct
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer import api, families  # noqa: E402 - after sys.path
from lora_trainer.families.base.layout import Layout  # noqa: E402 - after sys.path
from lora_trainer.run.build import load_networks  # noqa: E402 - after sys.path
from tests.fakes.original_names import NORMS, original_names  # noqa: E402 - after sys.path

GIB = 2**30
AFTER_LOADING = ("adapter weights", "adapter gradients", "optimizer states", "copies for saving")


def main() -> None:
    options = _options()
    if not options.file.exists():
        _write(options.file, options.made_of, options.release, options.layout)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(4):
            image = Image.effect_noise((512, 512), 90).convert("RGB")
            image.save(Path(folder) / f"{number}.png")
        settings = {
            "base.model": str(options.file),
            "memory.base_precision": options.precision,
            "train.precision": "bf16",
            "data.resolution": 512,
        }
        prepared = api.plan(Path(folder), settings=settings).prepared
        layout = Layout(folder=Path(folder), files={"denoiser": options.file})
        facts = replace(prepared.facts, layout=layout)
        prepared = replace(prepared, inputs=replace(prepared.inputs, facts=facts))
        items = prepared.plan.memory.by_phase["loading"]
        before, began = _resident("VmRSS"), time.monotonic()
        Path("/proc/self/clear_refs").write_text("5")
        networks = load_networks(prepared)
        seconds, peak, after = time.monotonic() - began, _resident("VmHWM"), _resident("VmRSS")
    for item in items:
        print(f"{item.name:24} {item.bytes / GIB:7.3f} GiB  {item.note}")
    planned = sum(item.bytes for item in items if item.name not in AFTER_LOADING)
    count = sum(parameter.numel() for parameter in networks.denoiser.parameters())
    print(f"{count:,} numbers left unquantised; {seconds:.0f} s")
    print(f"before {before / GIB:.2f}, peak {peak / GIB:.2f}, after {after / GIB:.2f} GiB")
    print(f"planned {planned / GIB:.2f} GiB, deviation {planned / peak - 1:+.1%}")


def _resident(key: str) -> int:
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return 1024 * int(re.findall(rf"{key}:\s+(\d+) kB", text)[0])


def _write(file: Path, name: str, number: int, layout: str) -> None:
    """Write a sparse file of a release's denoiser; its numbers are zeros."""
    family = families.family(name)
    with torch.device("meta"):
        network = family.empty_denoiser(family.published[number].architecture)
    state = network.state_dict()
    if name in NORMS:
        state = original_names(name, state)
    entries: dict[str, Any] = {}
    end = 0

    def add(key: str, dtype: str, shape: tuple[int, ...], size: int) -> None:
        nonlocal end
        size *= math.prod(shape)
        entries[key] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + size]}
        end += size

    stated: dict[str, dict[str, Any]] = {}
    for key, tensor in state.items():
        shape, stem = tuple(tensor.shape), key.removesuffix(".weight")
        if stem == key or len(shape) != 2 or not re.search(r"\.\d+\.", key) or shape[1] % 256:
            add(key, "BF16", shape, 2)
        elif layout == "nvfp4":
            rows, blocks = -(-shape[0] // 128) * 128, -(-shape[1] // 64) * 4
            add(key, "U8", (shape[0], shape[1] // 2), 1)
            add(f"{key}_scale", "F8_E4M3", (rows, blocks), 1)
            add(f"{key}_scale_2", "F32", (), 4)
            stated[stem] = {"format": "nvfp4"}
        elif layout == "int8_convrot":
            add(key, "I8", shape, 1)
            add(f"{key}_scale", "F32", (shape[0], 1), 4)
            stated[stem] = {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 256}
        else:
            add(key, "F8_E4M3", shape, 1)
            add(f"{stem}.scale_weight", "F32", (), 4)
    header = json.dumps(
        {**entries, "__metadata__": {"_quantization_metadata": json.dumps({"layers": stated})}}
        if stated
        else entries
    ).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(header)) + header)
        stream.truncate(8 + len(header) + end)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--made-of", required=True, choices=families.NAMES)
    parser.add_argument("--release", type=int, default=0)
    parser.add_argument("--layout", choices=("fp8", "int8_convrot", "nvfp4"), default="fp8")
    parser.add_argument("--precision", choices=("nf4", "int8", "fp8"), default="nf4")
    return parser.parse_args()


if __name__ == "__main__":
    main()

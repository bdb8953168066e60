"""Adapter files of every kind that the code writes, and the comparison of what a reader made of one.

A reader is a function that patches a base with a file by its own code; `run` gives it every file,
compares each weight with base + update and prints one line for each family, format and kind.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load, load_file, save_file
from torch import Tensor

from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors, update
from lora_trainer.lora_file.key_formats import format_for
from lora_trainer.lora_file.write import contents_of
from scripts.readers.networks import DENOISERS, Base, base_of
from tests.fakes.adapters import adapter_for, draw_lokr, exported

FORMATS: tuple[FileFormat, ...] = ("kohya", "diffusers", "comfyui")
KINDS = ("lora", "text", "locon", "dora", "loha", "lokr", "oft")
TOLERANCE = 1e-5
"""Of the largest weight of a module, in float32."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What a reader did: keys of the file it did not use, and weights by "component.module"."""

    unread: Sequence[str] = ()
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    refused: str | None = None


Reader = Callable[[Path, Base], Reading]


def run(
    reader: Reader,
    *,
    name: str,
    commit: str,
    only: Sequence[str] = (),
    prepare: Callable[[Base], Base] = lambda base: base,
) -> None:
    """Print what a reader makes of every file, in the order of families, formats and kinds.

    `prepare` may change a base to what the reader can hold.
    """
    print(f"{name} at {commit}")
    for family in only or DENOISERS:
        base = prepare(base_of(family))
        for format in FORMATS:
            words = [f"{kind}: {_outcome(reader, base, format, kind)}" for kind in KINDS]
            print(f"{family:7} {format:9} " + "; ".join(words), flush=True)


def adapter(base: Base, kind: str) -> AdapterTensors | None:
    """Return a random adapter with alpha other than the rank; None for what the family cannot train."""
    targets = "all" if kind == "locon" else "transformer"
    names = base.family.lora_targets(base.denoiser, targets)
    if kind == "dora":
        return adapter_for("denoiser", base.denoiser, names, dora=True, rank=2, scale=0.6)
    if kind == "lokr":
        weights = {name: base.denoiser.get_parameter(f"{name}.weight") for name in names}
        return {
            f"denoiser.{name}": draw_lokr(tuple(weight.shape), rank=2, scale=0.6, seed=number)
            for number, (name, weight) in enumerate(weights.items())
        }
    if kind in ("loha", "oft"):
        return adapter_for("denoiser", base.denoiser, names, kind=kind, rank=2, scale=0.6)
    tensors = adapter_for("denoiser", base.denoiser, names, rank=2, scale=0.6)
    if kind != "text":
        return tensors
    if not base.texts:
        return None
    for component, network in base.texts.items():
        tensors |= adapter_for(
            component, network, base.family.lora_targets(network, "text_encoder"), rank=2, scale=0.6
        )
    return tensors


def _outcome(reader: Reader, base: Base, format: FileFormat, kind: str) -> str:
    tensors = adapter(base, kind)
    if tensors is None:
        return "-"
    try:
        format_for(base.family, format, contents_of(tensors))
    except RequestError:
        return "not written"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "a.safetensors"
        # Without a header, by which a program might know the file.
        save_file(
            load(
                exported(
                    tensors,
                    name=base.family.name,
                    format=format,
                    layers=layer_shapes(base.denoiser),
                )
            ),
            file,
        )
        keys = len(load_file(file))
        reading = reader(file, base)
    if reading.refused is not None:
        return f"REFUSED ({reading.refused[:100]})"
    if reading.unread:
        return f"{len(reading.unread)} of {keys} tensors UNREAD (first {reading.unread[0][:90]})"
    worst = max(_errors(base, tensors, reading.weights))
    return "equal" if worst[0] <= TOLERANCE else f"OFF by {worst[0]:.1e} ({worst[1]})"


def _errors(
    base: Base, tensors: AdapterTensors, found: Mapping[str, Tensor]
) -> Iterator[tuple[float, str]]:
    """Yield the largest error of each module, relative to its largest weight; unchanged ones too."""
    networks = {"denoiser": base.denoiser, **base.texts}
    for key, weight in found.items():
        component, _, module = key.partition(".")
        before = networks[component].get_parameter(f"{module}.weight").detach()
        change = update(tensors[key], before) if key in tensors else torch.zeros_like(before)
        difference = weight.reshape(before.shape) - (before + change.reshape(before.shape))
        yield float(difference.abs().max() / before.abs().max()), key
    if missing := tensors.keys() - found.keys():
        raise KeyError(f"the reader gave no weight of {sorted(missing)[0]}")


def arguments(description: str) -> argparse.Namespace:
    """Return the checkout of the reader, its commit and the families to check."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--checkout", type=Path, required=True, help="folder with its source")
    parser.add_argument("--commit", required=True, help="what it was taken at, for the record")
    parser.add_argument("--family", action="append", default=[], help="only this family")
    return parser.parse_args()

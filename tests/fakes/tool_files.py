"""Adapter files of tiny bases, what they add to the weights, and the commands on them: material for the tools."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.cli import main
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.metadata import metadata
from lora_trainer.tools.adapters import open_source
from lora_trainer.tools.base_weights import open_base
from tests.fakes.adapters import adapter_for, export_info, exported
from tests.fakes.family_bases import CPU, base_of, denoiser_of, facts_of
from tests.fakes.ldm_file import write_checkpoint

Deltas = Mapping[str, Tensor]


def tool(command: str, *words: object, **options: object) -> dict[str, Any]:
    """Run a command in this process; return what it prints with --json, or raise its error."""
    line = [command, *map(str, words), "--json"]
    for name, value in options.items():
        if value is True:
            line.append(f"--{name}")
        elif value is not None and value is not False:
            line.append(f"--{name}={value}")
    answer = main.app(line, exit_on_error=False, print_error=False)
    printed: dict[str, Any] = json.loads(json.dumps(answer, allow_nan=False))
    return printed


def weighted(files: Mapping[Path, float]) -> list[str]:
    """Return the words of `merge` for files with weights."""
    return [f"{file}:{weight}" for file, weight in files.items()]


@cache
def networks_of(name: str) -> Mapping[str, nn.Module]:
    """Return the denoiser and the trainable text encoders of a family's tiny base by component."""
    family = families.family(name)
    texts: Mapping[str, nn.Module] = {}
    if family.text.trainable:
        loaded = family.load_text_encoder(facts_of(name), dtype=torch.float32, device=CPU)
        texts = loaded.networks
    return {"denoiser": denoiser_of(name), **texts}


def adapter_of(
    name: str, *, text: bool = False, every: int = 1, **options: Any
) -> dict[str, ModuleTensors]:
    """Return a random adapter on the layers that the family trains, or on every second, third and so on.

    `options` are those of `adapter_for`.
    """
    family, found = families.family(name), dict[str, ModuleTensors]()
    for component, network in networks_of(name).items():
        if component == "denoiser" or text:
            targets = "all" if component == "denoiser" else "text_encoder"
            layers = family.lora_targets(network, targets)
            found |= adapter_for(component, network, layers, **options)
    return dict(list(found.items())[::every])


def saved(
    path: Path,
    name: str,
    tensors: Mapping[str, ModuleTensors],
    *,
    format: Any = None,
    precision: Any = "fp32",
    **entries: str,
) -> Path:
    """Write an adapter as a training of the family would export it, by default in its first format."""
    family, facts = families.family(name), facts_of(name)
    info = export_info(
        base_model_version=family.adapter_names(facts).kohya,
        architecture=family.adapter_names(facts).modelspec,
        prediction=facts.prediction,
    )
    data = exported(
        tensors,
        name=name,
        format=format or family.formats.written[0],
        precision=precision,
        metadata={**metadata(info), **entries},
    )
    path.write_bytes(data)
    return path


def checkpoint(path: Path, name: str, base: Path | None = None, **options: Any) -> Path:
    """Write a tiny base, or another folder of its family, as a checkpoint in one file."""
    return write_checkpoint(base or base_of(name), path, families.family(name).texts, **options)


def entries_of(file: Path | str) -> dict[str, str]:
    """Return the entries of a header."""
    with safe_open(file, framework="np") as opened:
        return dict(opened.metadata() or {})


def deltas(file: Path | str, base: Path | str) -> dict[str, Tensor]:
    """Return what a file adds to each weight of a base, float64 [out, in, ...]."""
    with open_base(str(base)) as weights, open_source(Path(file), names=weights.names()) as source:
        return {key: update(source[key], weights.places[key].weight().double()) for key in source}


def distance(found: Deltas, wanted: Deltas) -> float:
    """Return the largest |found - wanted| / |wanted| of a layer; infinite for other layers."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)


def energy(found: Deltas) -> float:
    """Return the squared norm of all layers together."""
    return sum(float(each.square().sum()) for each in found.values())

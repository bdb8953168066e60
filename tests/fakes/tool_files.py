"""Adapter files of tiny bases, and what they add to the weights: material for the tools."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.families.base import FileFormat
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.header import open_checked
from lora_trainer.lora_file.metadata import metadata
from lora_trainer.tools.adapters import Weighted, open_source
from lora_trainer.tools.base_weights import open_base
from tests.fakes.adapters import adapter_for, export_info, exported
from tests.fakes.family_bases import CPU, base_of, denoiser_of, facts_of
from tests.fakes.ldm_file import write_checkpoint

Deltas = Mapping[str, Tensor]
FORMATS: tuple[FileFormat, ...] = ("kohya", "diffusers", "comfyui")


@cache
def networks_of(name: str) -> Mapping[str, nn.Module]:
    """Return the denoiser and the trainable text encoders of a family's tiny base by component."""
    family = families.family(name)
    texts: Mapping[str, nn.Module] = {}
    if family.text.trainable:
        loaded = family.load_text_encoder(facts_of(name), dtype=torch.float32, device=CPU)
        texts = loaded.networks
    return {"denoiser": denoiser_of(name), **texts}


def adapter_of(name: str, *, text: bool = False, **options: Any) -> dict[str, ModuleTensors]:
    """Return a random adapter on every layer that the family trains; `options` are `adapter_for`'s."""
    family, networks = families.family(name), networks_of(name)
    found = adapter_for(
        "denoiser",
        networks["denoiser"],
        family.lora_targets(networks["denoiser"], "all"),
        **options,
    )
    if text:
        for component, network in networks.items():
            if component != "denoiser":
                found |= adapter_for(
                    component, network, family.lora_targets(network, "text_encoder"), **options
                )
    return found


def saved(
    path: Path,
    name: str,
    tensors: Mapping[str, ModuleTensors],
    *,
    format: FileFormat,
    precision: Any = "fp32",
    **entries: str,
) -> Path:
    """Write an adapter as a training of the family would export it."""
    family, facts = families.family(name), facts_of(name)
    info = export_info(
        base_model_version=family.adapter_names(facts).kohya,
        architecture=family.adapter_names(facts).modelspec,
        prediction=facts.prediction,
    )
    data = exported(
        tensors,
        family=family,
        format=format,
        precision=precision,
        metadata={**metadata(info), **entries},
    )
    path.write_bytes(data)
    return path


def checkpoint(path: Path, name: str, base: Path | None = None, **options: Any) -> Path:
    """Write a tiny base, or another folder of its family, as a checkpoint in one file."""
    return write_checkpoint(base or base_of(name), path, families.family(name).texts, **options)


def weighted(files: Mapping[Path, float]) -> list[Weighted]:
    return [Weighted(file=file, weight=weight) for file, weight in files.items()]


def entries_of(file: Path) -> dict[str, str]:
    """Return the entries of a header."""
    with open_checked(file) as opened:
        return dict(opened.metadata)


def deltas(file: Path, base: Path | str) -> dict[str, Tensor]:
    """Return what a file adds to each weight of a base, float64 [out, in, ...]."""
    with open_base(str(base)) as weights, open_source(file, names=weights.names()) as source:
        return {key: delta(source[key], weights.places[key].weight()) for key in source}


def delta(module: ModuleTensors, weight: Tensor) -> Tensor:
    """Return the update of a weight in float64."""
    return update(module, weight.double())


def distance(found: Deltas, wanted: Deltas) -> float:
    """Return the largest |found - wanted| / |wanted| of a layer; infinite for other layers."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[key] - wanted[key]).norm() / wanted[key].norm()) for key in wanted)


def energy(found: Deltas) -> float:
    """Return the squared norm of all layers together."""
    return sum(float(each.square().sum()) for each in found.values())

"""Random adapters of every kind, their files, what they add to the weights of a base, and the commands on them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.cli import main
from lora_trainer.config.config import flatten
from lora_trainer.config.running import Config
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.metadata import ExportInfo, SubsetSummary
from lora_trainer.lora_file.write import write_export
from lora_trainer.tools.adapters import open_source
from lora_trainer.tools.base_weights import open_base
from tests.fakes.family_bases import CPU, base_of, denoiser_of, facts_of
from tests.fakes.ldm_file import write_checkpoint
from tests.lora_files.kinds import factors

RANK, ALPHA = 4, 1.5
Deltas = Mapping[str, Tensor]


class Draws:
    """Standard normal numbers, the same for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)


def draw_module(
    shape: tuple[int, ...],
    *,
    kind: Any = "lora",
    rank: int = RANK,
    scale: float = ALPHA / RANK,
    size: float = 0.15,
    seed: int = 0,
) -> ModuleTensors:
    """Return an adapter of a weight of this shape ([out, in, ...]); an OFT turns pairs of outputs."""
    draw, (out, inputs, *kernel) = Draws(seed), shape
    flat, half = inputs * int(torch.Size(kernel).numel()), max(1, inputs // 2)
    shapes: Mapping[str, Mapping[str, tuple[int, ...]]] = {
        "lora": {"down": (rank, inputs, *kernel), "up": (out, rank, *(1,) * len(kernel))},
        "loha": {
            "w1_a": (out, rank),
            "w1_b": (rank, flat),
            "w2_a": (out, rank),
            "w2_b": (rank, flat),
        },
        "lokr": {"w1": (out // 2, half), "w2_a": (2, rank), "w2_b": (rank, flat // half)},
        "oft": {"blocks": (out // 2, 2, 2)},
    }
    size = size**0.5 if kind == "loha" else size
    tensors = {name: draw(*each) * size for name, each in shapes[kind].items()}
    rank, scale = (2, 1.0) if kind == "oft" else (rank, scale)
    return ModuleTensors(kind=kind, tensors=tensors, rank=rank, scale=scale)


def draw_lokr(
    shape: tuple[int, ...], *, rank: int = RANK, scale: float = ALPHA / RANK, seed: int = 0
) -> ModuleTensors:
    """Return a LoKr split as training splits it: readers rebuild the factors' shapes by that rule."""
    draw, (out, inputs, *kernel) = Draws(seed), shape
    (out_left, out_right), (in_left, in_right) = (factors(size, -1) for size in (out, inputs))
    tensors = {"w1": draw(out_left, in_left) * 0.2}
    if rank >= max(in_right, out_right) / 2:
        tensors["w2"], scale = draw(out_right, in_right, *kernel) * 0.2, 1.0
    else:
        tensors["w2_a"] = draw(out_right, rank) * 0.2
        tensors["w2_b"] = draw(rank, in_right * int(torch.Size(kernel).numel())) * 0.2
    return ModuleTensors(kind="lokr", tensors=tensors, rank=rank, scale=scale)


def with_magnitude(module: ModuleTensors, weight: Tensor, *, seed: int = 0) -> ModuleTensors:
    """Make a DoRA of it whose outputs are up to a fifth longer or shorter than the base's."""
    norms = weight.detach().flatten(1).norm(dim=1)
    moved = norms * (1 + 0.2 * Draws(seed)(len(norms)).clamp(-1, 1))
    return replace(module, tensors={**module.tensors, "magnitude": moved})


def adapter_for(
    component: str,
    network: nn.Module,
    names: Iterable[str],
    *,
    dora: bool = False,
    seed: int = 0,
    **options: object,
) -> dict[str, ModuleTensors]:
    """Return a random adapter for the named modules of a network, another for another seed."""
    modules = {}
    for number, name in enumerate(names, start=1000 * seed):
        weight = network.get_parameter(f"{name}.weight")
        module = draw_module(tuple(weight.shape), seed=number, **options)  # type: ignore[arg-type]
        module = with_magnitude(module, weight, seed=number) if dora else module
        modules[f"{component}.{name}"] = module
    return modules


def small_adapter(seed: int = 0, *, size: float = 1.0, **options: Any) -> dict[str, ModuleTensors]:
    """Return three modules of a U-Net: a 1x1 convolution, a linear layer, a 3x3 convolution."""
    shapes = {
        "denoiser.down_blocks.0.attentions.0.proj_in": (6, 8, 1, 1),
        "denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_k": (10, 12),
        "denoiser.mid_block.resnets.0.conv1": (4, 6, 3, 3),
    }
    return {
        key: draw_module(shape, size=size, seed=seed * 10 + number, **options)
        for number, (key, shape) in enumerate(shapes.items())
    }


def export_info(**changes: object) -> ExportInfo:
    """Return what a run of three folders' images would say about itself."""
    facts = json.loads(Path(__file__).with_name("export_info.json").read_text(encoding="utf-8"))
    facts["settings"] = flatten(Config()) | facts["settings"]
    facts["subsets"] = tuple(SubsetSummary(**each) for each in facts["subsets"])
    return ExportInfo(**{**facts, **changes})


def export(
    path: Path,
    tensors: Mapping[str, ModuleTensors],
    *,
    name: str = "sd15",
    format: Any = "kohya",
    precision: Any = "fp32",
    layers: Mapping[str, tuple[int, ...]] | None = None,
    **changes: object,
) -> None:
    """Write an adapter of a family as a training does; `changes` are those of `export_info`.

    `layers` are all of its base's, by default of the tiny base of the tests.
    """
    family, info = families.family(name), export_info(**changes)
    if layers is None and format in family.formats.original:
        layers = denoiser_layers(family, facts_of(name).release.architecture)
    write_export(
        path,
        tensors,
        family=family,
        info=info,
        format=format,
        precision=precision,
        layers=layers,
    )


def exported(tensors: Mapping[str, ModuleTensors], **options: Any) -> bytes:
    """Return the file of an adapter; `options` are those of `export`."""
    with TemporaryDirectory() as folder:
        export(Path(folder) / "a.safetensors", tensors, **options)
        return (Path(folder) / "a.safetensors").read_bytes()


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
    export(
        path,
        tensors,
        name=name,
        format=format or family.formats.written[0],
        precision=precision,
        base_model_version=family.adapter_names(facts).kohya,
        architecture=family.adapter_names(facts).modelspec,
        prediction=facts.release.prediction,
    )
    if entries:
        save_file(load_file(path), path, metadata={**entries_of(path), **entries})
    return path


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


def checkpoint(path: Path, name: str, base: Path | None = None, **options: Any) -> Path:
    """Write a tiny base, or another folder of its family, as a checkpoint in one file."""
    return write_checkpoint(base or base_of(name), path, families.family(name).text, **options)


def entries_of(file: Path | str) -> dict[str, str]:
    """Return the entries of a header."""
    with safe_open(file, framework="np") as opened:
        return dict(opened.metadata() or {})


def body_of(file: Path) -> bytes:
    """Return the bytes of all tensors of a file."""
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


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

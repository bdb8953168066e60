"""One module for layers that are one weight in a file's names, and which layers those are.

The reverse of `module_update.take_rows`: modules trained apart are written side by side, with zeros where one
has nothing to say about another's rows, so the joined module changes each layer as its own did.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.traits import FileFormat
from lora_trainer.lora.adapter_size import KIND_NAMES
from lora_trainer.lora.tensors import ModuleTensors, split_key
from lora_trainer.lora_file.base_layers import Shape
from lora_trainer.lora_file.key_formats import JOINABLE
from lora_trainer.lora_file.module_update import PRODUCTS


@dataclass(frozen=True, kw_only=True)
class FileModule:
    """A module as a file names it, and the layers it is for: "component.module" and outputs, in order of rows.

    The outputs are 0 where one layer is the whole module.
    """

    name: str
    layers: tuple[tuple[str, int], ...]


def file_modules(
    keys: Iterable[str], *, family: Family, format: FileFormat, layers: Mapping[str, Shape]
) -> tuple[FileModule, ...]:
    """Return the modules of a file that holds the adapter of `keys`; `layers` are all of the denoiser's.

    Raises InputError for a layer of a joined weight whose other layers' sizes are not known.
    """
    joins: dict[str, tuple[str, tuple[str, ...]]] = {}
    if format in family.formats.original:
        if not layers:
            raise ValueError(f"{family.name} needs the denoiser's layers for its {format} format")
        for name, parts in family.layer_names(layers).layers.items():
            joins |= {part: joins.get(part, (name, parts)) for part in parts}
    modules: dict[str, FileModule] = {}
    for key in keys:
        component, layer = split_key(key)
        spelt, parts = joins.get(layer, (layer, (layer,)))
        if component != DENOISER or len(parts) == 1:
            one = spelt if component == DENOISER else layer
            name = family.lora_key_name(format, component, one)
            if name in modules:
                raise ValueError("two modules share one name in the file")
            modules[name] = FileModule(name=name, layers=((key, 0),))
            continue
        name = family.lora_key_name(format, component, spelt)
        if not all(layers[part] for part in parts):
            raise InputError(
                f"the sizes of the layers that {name} joins are not known",
                fix="name the base model it was made for with --base",
            )
        modules[name] = FileModule(
            name=name,
            layers=tuple((f"{DENOISER}.{part}", layers[part][0]) for part in parts),
        )
    return tuple(modules.values())


def join(module: FileModule, modules: Mapping[str, ModuleTensors]) -> ModuleTensors:
    """Return the module that the file has, of strength 1 where it joins several layers.

    Raises InputError for modules that do not make one: of several kinds, or DoRA of some layers only.
    """
    if len(module.layers) == 1:
        return modules[module.layers[0][0]]
    found = {key: modules.get(key) for key, _ in module.layers}
    whole = [each for each in found.values() if each is not None]
    first, roles = whole[0], {role for each in whole for role in each.tensors}
    magnitudes = ["magnitude" in each.tensors for each in whole]
    is_dora = any(magnitudes)
    if (
        {each.kind for each in whole} != {first.kind}
        or first.kind not in JOINABLE
        or any(each.rows is not None or "input_magnitude" in each.tensors for each in whole)
        or (is_dora and not (all(magnitudes) and len(whole) == len(found)))
    ):
        kinds = ", ".join(dict.fromkeys(KIND_NAMES[each.kind] for each in whole))
        raise InputError(
            f"{module.name} is one layer in this format, but the changes of its parts ({kinds}"
            f"{', DoRA of some' if is_dora else ''}) cannot be joined",
            fix="write it with output.format=diffusers",
        )
    tensors: dict[str, Tensor] = {}
    products = PRODUCTS.get(first.kind, ())
    blocks = _blocks(whole, [read for _, read in products])
    rows = [height for _, height in module.layers]
    for number, (written, read) in enumerate(products):
        # The strength of a module goes into one of its products.
        parts = [
            (_float64(each.tensors[written]) * (1.0 if number else each.scale), block)
            for each, block in zip(whole, blocks, strict=True)
        ]
        tensors[written] = _in_blocks(parts, [each is not None for each in found.values()], rows)
        reads = {
            block: _float64(each.tensors[read]) for each, block in zip(whole, blocks, strict=True)
        }
        tensors[read] = torch.cat([reads[block] for block in sorted(reads)])
    for role in roles - {name for pair in products for name in pair}:
        tensors[role] = torch.cat(
            [
                _float64(each.tensors[role])
                if each and role in each.tensors
                else _zeros(height, whole, role)
                for height, each in zip(rows, found.values(), strict=True)
            ]
        )
    rank = len(tensors[products[0][1]]) if products else first.rank
    return replace(first, tensors=tensors, rank=rank, scale=1.0)


def _blocks(whole: Sequence[ModuleTensors], reads: Sequence[str]) -> list[int]:
    """Return the block of ranks of each module: a new one, or that of a module that reads by the same factors.

    Files of others have one factor for all of a joined layer, which is written once again.
    """
    distinct: list[ModuleTensors] = []
    blocks: list[int] = []
    for module in whole:
        same = (
            number
            for number, other in enumerate(distinct)
            if all(torch.equal(module.tensors[name], other.tensors[name]) for name in reads)
        )
        block = next(same, len(distinct))
        if block == len(distinct):
            distinct.append(module)
        blocks.append(block)
    return blocks


def _in_blocks(
    parts: Sequence[tuple[Tensor, int]], present: Sequence[bool], rows: Sequence[int]
) -> Tensor:
    """Return the parts [rows, rank, ...] below each other, each in the columns of its block, else zeros."""
    widths = {block: part.shape[1] for part, block in parts}
    starts = [0, *accumulate(widths[block] for block in sorted(widths))]
    joined = torch.zeros(sum(rows), starts[-1], *parts[0][0].shape[2:], dtype=torch.float64)
    row, left = 0, iter(parts)
    for is_there, height in zip(present, rows, strict=True):
        if is_there:
            part, block = next(left)
            joined[row : row + height, starts[block] : starts[block + 1]] = part
        row += height
    return joined


def _zeros(rows: int, whole: Sequence[ModuleTensors], role: str) -> Tensor:
    """Return what a layer without a module has in place of a difference or a bias: no change."""
    like = next(each.tensors[role] for each in whole if role in each.tensors)
    return torch.zeros(rows, *like.shape[1:], dtype=torch.float64)


def _float64(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)  # MPS has no float64

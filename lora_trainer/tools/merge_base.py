"""`merge --into`: adapters baked into a base model, shard by shard, tensor by tensor.

Input are adapter files with weights and a diffusers folder or a checkpoint in one file, output a base
model of the same layout. Weights keep their dtype; tensors that no adapter changes are copied byte for byte.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import disk_error, retry_while_open, sync_folder, temporary_beside
from lora_trainer.common.wording import public_text
from lora_trainer.families.base.layout import WeightPlace
from lora_trainer.families.files.hub_files import index_in
from lora_trainer.lora.low_rank import fits
from lora_trainer.lora.tensors import update
from lora_trainer.lora_file.read_tensors import tensor_bytes
from lora_trainer.lora_file.tensor_file import (
    HASHES,
    Body,
    Opened,
    write_tensors,
)
from lora_trainer.tools.adapters import (
    SUFFIX,
    AdapterTarget,
    ToolResult,
    Weighted,
    WeightedSources,
    open_weighted,
)
from lora_trainer.tools.base_weights import (
    TEXT_MODEL,
    WEIGHT,
    BaseWeights,
    in_place_order,
    open_base,
    open_file,
    read_tensor,
    rows_at,
)

_WEIGHTS = frozenset(
    {".safetensors", ".bin", ".ckpt", ".pt", ".pth", ".msgpack", ".h5", ".onnx", ".gguf"}
)
_AVERAGED = "model_ema."
# The weight or bias of a layer that changes, and where in a tensor it lies.
Changed = tuple[str, WeightPlace]
# By folder and tensor the layers that change; variants of a file have the same tensors.
Changes = Mapping[tuple[Path, str], Sequence[Changed]]


def bake(inputs: Sequence[Weighted], *, base: str, output: Path, force: bool = False) -> ToolResult:
    """Write a base model with adapters in its weights; `output` is a folder or a file, as the base is.

    Raises RequestError for an output that exists or lies in the base and for values beyond a weight's
    dtype, InputError for files that cannot be used or do not fit the base, and MachineError when the
    disk refuses; nothing is left behind then.
    """
    with ExitStack() as stack:
        opened = stack.enter_context(open_base(base))
        if opened.single:
            AdapterTarget(path=output, force=force).check("the base is one file, ")
        else:
            _refuse_folder(opened, output, force=force)
        for path in (opened.path, *(file for file, _ in inputs)):
            if path.resolve().is_relative_to(output.resolve()):
                raise RequestError(
                    f"{path} would be replaced by the result", fix="give another --output"
                )
        adapters = open_weighted(inputs, stack, names=opened.names())
        merge = _BaseMerge(base=opened, adapters=adapters, changes=_changes(opened, adapters))
        notes = (merge.write_file if opened.single else merge.write_folder)(output, force=force)
        family, layers = opened.family.name, len(adapters.layers)
        return ToolResult(
            file=output,
            family=family,
            facts=(f"a {family} base model, {layers} layers changed",),
            notes=tuple(notes),
            values={"layers": layers},
        )


def _refuse_folder(base: BaseWeights, output: Path, *, force: bool) -> None:
    if output.suffix == SUFFIX:
        raise RequestError(
            f"the base is a folder, --output {output.name} names a file",
            fix="give --output the name of a folder",
        )
    if not output.parent.is_dir():
        raise RequestError(f"the folder {output.parent} does not exist", fix="create it first")
    if output.resolve().is_relative_to(base.path.resolve()):
        raise RequestError(f"{output} lies in the base model", fix="give another --output")
    replaceable = force and index_in(output) is not None
    if output.exists() and not replaceable:
        fault = (
            "is not a diffusers folder, so --force does not replace it"
            if force
            else "exists already"
        )
        raise RequestError(f"{output} {fault}", fix="give another --output")


def _changes(base: BaseWeights, adapters: WeightedSources) -> Changes:
    """Return the tensors that change; every module is read once, before anything is written.

    Raises InputError naming the first module that does not fit.
    """
    changes: dict[tuple[Path, str], list[Changed]] = {}
    for key in adapters.layers:
        weight, bias = f"{key}{WEIGHT}", f"{key}.bias"
        out, *inputs = base.tensors[weight].shape
        fan_in, names = math.prod(inputs), {weight}
        for source in adapters.sources:
            if (module := source.get(key)) is None:
                continue
            fault = ""
            if "bias" in module.tensors:
                names.add(bias)
            if bias in names - base.tensors.keys():
                fault = f"the bias of {key}, which has none in the base"
            elif not fits(module, out=out, fan_in=fan_in):
                fault = f"{key}, whose weight is {out}x{fan_in} in the base, in another size"
            if fault:
                raise InputError(
                    f"{source.contents.name} changes {fault}",
                    fix="give the base model that the adapter was made for",
                )
        for name in names:
            location = base.tensors[name]
            tensor = location.at.tensor.removeprefix(TEXT_MODEL)
            tensor_key = (location.file.path.parent, tensor)
            changes.setdefault(tensor_key, []).append((name, location.at))
    return changes


@dataclass(frozen=True, kw_only=True)
class _BaseMerge:
    """Adapters, and the tensors of a base that they change."""

    base: BaseWeights
    adapters: WeightedSources
    changes: Changes

    def write_file(self, output: Path, *, force: bool) -> list[str]:
        """Write a checkpoint in one file; return notes."""
        file = next(iter(self.base.tensors.values())).file
        names = [
            file.path.stem,
            *(Path(source.contents.name).stem for source in self.adapters.sources),
        ]
        merged_from = {"modelspec.merged_from": public_text(", ".join(names))}
        self._rewrite(file, output, entries=merged_from, force=force)
        averaged = any(name.startswith(_AVERAGED) for name in file.entries)
        return [f"{_AVERAGED}*, the averaged weights, are without the adapters"] if averaged else []

    def write_folder(self, output: Path, *, force: bool) -> list[str]:
        """Write a diffusers folder; return notes."""
        temporary = temporary_beside(output)
        try:
            temporary.mkdir()
            left_out = self._fill(self.base.path, temporary, top=True)
            _replace(temporary, output, force=force)
        except OSError as error:
            raise disk_error(output, error) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        return [f"{name} was left out: it would lack the adapters" for name in left_out]

    def _fill(self, folder: Path, target: Path, *, top: bool = False) -> list[str]:
        """Copy a folder, weights of changed components with the changes; return the files left out.

        Weights in other formats than safetensors would be without them, as would checkpoints beside the
        components' folders. All shards and variants (such as fp16) of a component are changed.
        """
        left_out = []
        changed = any(folder == changed_folder for changed_folder, _ in self.changes)
        for entry in sorted(folder.iterdir()):
            new = target / entry.name
            if entry.name.startswith("."):
                continue
            if entry.is_dir():
                new.mkdir()
                left_out += self._fill(entry, new)
            elif changed and entry.suffix == SUFFIX:
                with ExitStack() as stack:
                    self._rewrite(open_file(entry, stack), new)
            elif entry.suffix in _WEIGHTS and (top or changed):
                left_out.append(entry.relative_to(folder.parent).as_posix())
            else:
                shutil.copyfile(entry, new)  # links are followed
                with new.open("rb+") as copied:
                    os.fsync(copied.fileno())
        return left_out

    def _rewrite(
        self,
        file: Opened,
        new: Path,
        *,
        entries: Mapping[str, str] | None = None,
        force: bool = False,
    ) -> None:
        """Write a file again with changed weights, tensors in their order, one at a time."""
        folder, metadata = file.path.parent, {**file.metadata, **(entries or {})}

        def bodies() -> Iterator[Body]:
            for name, entry in file.entries.items():
                layers = self.changes.get((folder, name.removeprefix(TEXT_MODEL)))
                if layers is None:
                    yield file.read(entry)
                else:
                    yield tensor_bytes(self._merged(name, read_tensor(file, name), layers))

        hashes = [key for key in HASHES if key in metadata]
        write_tensors(new, file.entries, bodies(), metadata=metadata, hashes=hashes, force=force)

    def _merged(self, name: str, weight: Tensor, changes: Sequence[Changed]) -> Tensor:
        """Return a tensor of the base with all changes, in its dtype; raises RequestError beyond its range."""
        # A copy, because DoRA and OFT go by the weights of the base, whatever else is merged.
        wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
        merged = weight.to(wide, copy=True)
        for key, at in changes:
            rows = slice(None) if at.rows is None else slice(*at.rows)
            layer, _, part = key.rpartition(".")
            for module, strength in self.adapters.modules(layer):
                # The update of DoRA, OFT, GLoRA or IA3 is computed from the base's weight in diffusers' order.
                if part == "bias" and "bias" in module.tensors:
                    change = module.tensors["bias"].to(wide)
                elif part == "weight" and (module.kind != "full" or "difference" in module.tensors):
                    change = update(module, rows_at(at, weight))
                else:
                    continue
                merged[rows] += strength * in_place_order(at, change)
        largest, limit = float(merged.abs().max()), torch.finfo(weight.dtype).max
        if not largest <= limit:  # fp8 would be clipped without a word
            raise RequestError(
                f"{name} would reach {largest:.3g}, its dtype ends at {limit:.3g}",
                fix="merge with a lower weight, or into the bf16 or fp32 version of the base model",
            )
        return merged.to(weight.dtype)


def _replace(temporary: Path, output: Path, *, force: bool) -> None:
    """Give a finished folder its name; one that was there goes only when the new one is in its place."""
    old = temporary.with_name(f"{temporary.name}-old"[-200:])
    if output.exists() and force:
        retry_while_open(lambda: output.rename(old))
    try:
        retry_while_open(lambda: temporary.rename(output))
    except OSError:
        if old.exists():
            old.rename(output)
        raise
    sync_folder(output.parent)
    shutil.rmtree(old, ignore_errors=True)

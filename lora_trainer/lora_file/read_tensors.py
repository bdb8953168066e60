"""Reading the adapter out of a file of any trainer, layer by layer, as tensors under this program's names.

Input is a safetensors file and the layers of a base (`base_layers.LayerNames`), output
ModuleTensors. A module that stands for several layers of the base is taken apart by its rows. Tensors
are read when asked for, so that any number of files can be worked on in the memory of one module.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.config.declare import Precision
from lora_trainer.families.base.layout import TensorInfo
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.base_layers import LayerNames, LayerRows
from lora_trainer.lora_file.embedding import BUNDLED
from lora_trainer.lora_file.key_formats import kind_of_others
from lora_trainer.lora_file.module_update import NoRows, Update, swap_halves, take_rows
from lora_trainer.lora_file.read import Contents, ModuleFactors, open_contents
from lora_trainer.lora_file.tensor_file import refuse

# Floating-point dtypes by their names in files.
SLOT_DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
_NAMES = {dtype: name for name, dtype in SLOT_DTYPES.items()} | {
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def tensor_info(tensor: Tensor) -> TensorInfo:
    """Return how a header describes a tensor."""
    return TensorInfo(dtype=_NAMES[tensor.dtype], shape=tuple(tensor.shape))


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, copied only where they do not lie in order."""
    flat = tensor.detach().contiguous().reshape(-1)
    data: Any = flat.view(torch.uint8).numpy()
    return memoryview(data)


_OTHER_KIND = "give an adapter of a kind that `lora-train inspect` knows"
_OTHER_BASE = "give an adapter made for this base model, or name its base with --base"


@dataclass(kw_only=True, eq=False)
class OpenAdapter(Mapping[str, ModuleTensors]):
    """An adapter file that is open for reading: modules by "component.module", each read when looked up.

    Keys are sorted; `items()` holds one module at a time.
    """

    names: LayerNames
    """Finds the layers of its base."""
    must_be_finite: bool
    """Whether a module with NaN or infinity is refused."""
    contents: Contents
    """Its modules by their spelling in the file."""
    _places: Mapping[str, tuple[str, LayerRows]]
    _last: tuple[str, Update] | None = field(default=None, init=False)

    @property
    def precision(self) -> Precision:
        """The narrowest precision that holds every factor."""
        dtypes = {
            entry.dtype
            for part in self.contents.parts.values()
            for role, entry in part.entries.items()
            if role not in ("alpha", "magnitude")
        }
        if dtypes == {"F16"}:
            return "fp16"
        return "bf16" if dtypes == {"BF16"} else "fp32"

    def kernel(self, key: str) -> tuple[int, ...]:
        """Return the size of a layer's kernel, () where it has none or its shape is not known."""
        return self.names.shape(key)[2:]

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __contains__(self, key: object) -> bool:
        return key in self._places  # the base class would read the module

    def __getitem__(self, key: str) -> ModuleTensors:
        """Return one module's tensors on the CPU; raises InputError for misshapen ones.

        They have the file's dtype, and float64 where they had to be computed.
        """
        spelling, layer = self._places[key]
        update = self._update(spelling)
        try:
            if layer.rows is not None:
                update = take_rows(update, *layer.rows, part=layer.part)
            if layer.swapped:
                update = swap_halves(update)
        except NoRows as error:
            raise InputError(
                f"{self.contents.name} cannot be used with one weight for each layer: {spelling!r} {error}",
                fix="use it in the program it was made with, which keeps these layers in one weight",
            ) from None
        return self._tensors(update, spelling, key=key)

    def module(self, spelling: str) -> ModuleTensors:
        """Return a module as it is spelt, of all layers that it joins; raises InputError as a look-up does."""
        return self._tensors(self._update(spelling), spelling, key=spelling)

    def _update(self, spelling: str) -> Update:
        # Joined layers come one after the other.
        if self._last is None or self._last[0] != spelling:
            self._last = (spelling, self.contents.update(spelling))
        return self._last[1]

    def _tensors(self, update: Update, spelling: str, *, key: str) -> ModuleTensors:
        tensors, entries = dict[str, Tensor](), self.contents.parts[spelling].entries
        for role, array in sorted(update.tensors.items()):
            tensor = torch.from_numpy(np.array(array))
            dtype = tensor.dtype if tensor.is_floating_point() else torch.float32
            # In the dtype that the file has it in; numbers that were computed are float64.
            entry = entries.get(role.removeprefix("input_"))
            if entry is not None and dtype != torch.float64:
                dtype = SLOT_DTYPES.get(entry.dtype, dtype)
            tensors[role] = tensor.to(dtype)
            if self.must_be_finite and not tensors[role].float().isfinite().all():
                raise InputError(
                    f"{self.contents.name} holds NaN or infinity in {key} ({role})",
                    fix="use an earlier save of the training it came from",
                )
        module: ModuleTensors = replace(cast(Any, update), tensors=tensors)
        return module


@contextmanager
def open_adapter(
    path: Path, *, names: LayerNames, must_be_finite: bool = False
) -> Iterator[OpenAdapter]:
    """Open an adapter file of any trainer; `names` finds the layers of the base by spelling.

    Raises InputError where the file is not a whole safetensors file, where modules are unknown or lack
    tensors, and where a tensor belongs to no kind of adapter that is known.
    """
    with open_contents(path) as contents:
        places = _places(contents.parts, names, name=contents.name)
        unknown = [key for key in contents.unknown if not key.startswith(BUNDLED)]
        if unknown:
            refuse(
                contents.name,
                f"holds {len(unknown)} tensors of unknown kinds; the first is {unknown[0]!r}"
                f"{kind_of_others(unknown)}",
                fix=_OTHER_KIND,
            )
        if not places:
            refuse(contents.name, "holds no adapter", fix=_OTHER_KIND)
        yield OpenAdapter(
            names=names,
            must_be_finite=must_be_finite,
            contents=contents,
            _places=dict(sorted(places.items())),
        )


def read_tensors(path: Path, *, names: LayerNames) -> dict[str, ModuleTensors]:
    """Return all modules of an adapter file at once; see `open_adapter`."""
    with open_adapter(path, names=names) as adapter:
        return dict(adapter)


def _places(
    parts: Mapping[str, ModuleFactors], names: LayerNames, *, name: str
) -> dict[str, tuple[str, LayerRows]]:
    layers_of = {spelling: names.find(spelling, size=part.size) for spelling, part in parts.items()}
    unknown = sorted(spelling for spelling, layers in layers_of.items() if not layers)
    if unknown:
        refuse(
            name,
            f"has {len(unknown)} of {len(parts)} modules that the base model lacks; the first is {unknown[0]!r}",
            fix=_OTHER_BASE,
        )
    places: dict[str, tuple[str, LayerRows]] = {}
    for spelling, part in parts.items():
        if not part.complete:
            refuse(
                name,
                f"lacks tensors of {spelling!r}: it has only {', '.join(part.entries)}",
                fix=_OTHER_KIND,
            )
        for layer in layers_of[spelling]:
            if layer.key in places:
                twice = f"names one module twice, {spelling!r} and {places[layer.key][0]!r}"
                refuse(name, twice, fix=_OTHER_KIND)
            # A slice would pass over rows that a joined layer does not have.
            whole = (layers_of[spelling][-1].rows or (0, 0))[1]
            if layer.rows is not None and (
                layer.rows[0] >= layer.rows[1] or part.size[0] not in (0, whole)
            ):
                fault = (
                    f"has {part.size[0]} outputs in {spelling!r}, the layers that it joins have "
                )
                refuse(
                    name,
                    f"{fault}{whole or 'unknown sizes'}",
                    fix=f"{_OTHER_BASE}, a diffusers folder",
                )
            places[layer.key] = (spelling, layer)
    return places

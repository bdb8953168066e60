"""The weights of a base model, tensor by tensor: a diffusers folder or a single-file checkpoint.

Input is what `--base` says, output where the weight of every layer lies, read when asked for. No
network is built.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from lora_trainer import families
from lora_trainer.config import BaseSettings
from lora_trainer.errors import InputError
from lora_trainer.families.base import DENOISER, BaseFacts, Family, TensorInfo, WeightPlace
from lora_trainer.families.folder import AGAIN
from lora_trainer.model.load import describe, locate
from lora_trainer.output.adapter_names import file_names
from lora_trainer.output.adapter_tensors import split_key
from lora_trainer.output.checked_header import Entry, open_checked
from lora_trainer.output.tensor_slots import DTYPES
from lora_trainer.tools.adapters import Naming

SUFFIX = ".safetensors"
WEIGHT = ".weight"
TEXT_MODEL = "text_model."
"""transformers 5 leaves it out of the names of some CLIP encoders; here all go without."""


@dataclass(frozen=True, kw_only=True)
class TensorFile:
    """A safetensors file that is open, its header checked; tensors in file order."""

    path: Path
    entries: Mapping[str, Entry]
    metadata: Mapping[str, str]
    _file: BinaryIO
    _start: int

    def read(self, name: str) -> bytes:
        """Return a tensor's bytes; raises InputError when the file cannot be read."""
        entry = self.entries[name]
        try:
            self._file.seek(self._start + entry.begin)
            data = self._file.read(entry.end - entry.begin)
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}", fix=AGAIN) from None
        if len(data) != entry.end - entry.begin:
            raise InputError(f"{self.path} changed while it was read", fix="start again")
        return data

    def tensor(self, name: str) -> Tensor:
        """Return a tensor; raises InputError for integers, which a quantised weight may be, and for NaN."""
        entry = self.entries[name]
        if entry.dtype not in DTYPES:
            raise InputError(
                f"{name} in {self.path.name} is {entry.dtype}: the base is quantised",
                fix="use the fp16, bf16 or fp32 version of this base model",
            )
        data = bytearray(self.read(name))
        found = torch.frombuffer(data, dtype=DTYPES[entry.dtype]).reshape(entry.shape)
        if not found.float().isfinite().all():
            raise InputError(f"{name} in {self.path.name} holds NaN or infinity", fix=AGAIN)
        return found


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where the weight of a layer lies: an open file, and a tensor or some rows of it."""

    file: TensorFile
    at: WeightPlace

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in, ...] of the weight."""
        whole = self.file.entries[self.at.tensor].shape
        return whole if self.at.rows is None else (self.at.rows[1] - self.at.rows[0], *whole[1:])

    def weight(self) -> Tensor:
        """Return the weight in its dtype; raises InputError as `TensorFile.tensor` does."""
        whole = self.file.tensor(self.at.tensor)
        return whole if self.at.rows is None else whole[slice(*self.at.rows)]


@dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """A base model that is open: a place per "component.module".

    `components` has the folder of each network, empty for a checkpoint in one file.
    """

    source: str
    path: Path
    family: Family
    places: Mapping[str, Place]
    components: Mapping[str, Path]

    @property
    def single(self) -> bool:
        return not self.components

    def naming(self) -> Naming:
        """Return what adapter files call the layers of this base."""
        modules: dict[str, list[str]] = {}
        for key in self.places:
            component, module = split_key(key)
            modules.setdefault(component, []).append(module)
        kernels = {key: place.shape[2:] for key, place in self.places.items() if place.shape[2:]}
        return Naming(family=self.family, names=file_names(self.family, modules), kernels=kernels)


@contextmanager
def open_base(source: str) -> Iterator[BaseWeights]:
    """Open a diffusers folder, a Hub id (downloaded if need be) or a checkpoint in one file.

    Raises InputError for what is no base model, or a checkpoint whose layout is not known by its family.
    """
    path = Path(source).expanduser()
    with ExitStack() as stack:
        if path.is_file() or path.suffix == SUFFIX:
            yield _single(source, path, stack)
        else:
            yield _folder(locate(BaseSettings(model=source)), stack)


def _single(source: str, path: Path, stack: ExitStack) -> BaseWeights:
    file = open_file(path, stack)
    header = {
        name: TensorInfo(dtype=entry.dtype, shape=entry.shape)
        for name, entry in file.entries.items()
    }
    found = families.detect_file(header)
    if found is None:
        describe(BaseSettings(model=source))  # raises saying what it is instead
        raise InputError(f"{path.name} is no base model", fix="give a checkpoint or a folder")
    family, _ = found
    places = family.checkpoint_weights(header)
    if not places:
        raise InputError(
            f"{path.name} is a single file of {family.name}, whose layout has no map here",
            fix="give the diffusers folder of this base model",
        )
    return BaseWeights(
        source=source,
        path=path,
        family=family,
        places={key: Place(file=file, at=at) for key, at in places.items()},
        components={},
    )


def _folder(facts: BaseFacts, stack: ExitStack) -> BaseWeights:
    family, layout = families.family(facts.family), facts.located
    places: dict[str, Place] = {}
    components: dict[str, Path] = {}
    parts = family.parts(layout)
    for part in (DENOISER, "text_encoder") if family.trainable_text else (DENOISER,):
        for path in parts[part]:
            if path.suffix == SUFFIX:
                component = part if part == DENOISER else path.parent.name
                components[component] = path.parent
                places |= _places_in(open_file(path, stack), component)
    return BaseWeights(
        source=facts.source,
        path=layout.folder,
        family=family,
        places=places,
        components=components,
    )


def _places_in(file: TensorFile, component: str) -> dict[str, Place]:
    return {
        f"{component}.{module}": Place(file=file, at=WeightPlace(tensor=name))
        for name, entry in file.entries.items()
        if (module := module_of(name, component)) is not None and len(entry.shape) > 1
    }


def module_of(name: str, component: str) -> str | None:
    """Return the module whose weight a tensor in a component's folder is, None for other tensors."""
    if not name.endswith(WEIGHT):
        return None
    module = name.removesuffix(WEIGHT)
    return module if component == DENOISER else module.removeprefix(TEXT_MODEL)


def open_file(path: Path, stack: ExitStack) -> TensorFile:
    """Open a file of a base until `stack` closes; raises InputError when it is not whole."""
    try:
        opened = stack.enter_context(open_checked(path))
    except InputError as error:
        raise InputError(error.found, fix=AGAIN) from None
    return TensorFile(
        path=path,
        entries={entry.key: entry for entry in opened.entries},
        metadata=opened.metadata,
        _file=opened.file,
        _start=opened.file.tell(),
    )

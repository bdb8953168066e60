"""Tensors kept on the disk between two passes over an adapter, so that memory holds one module.

A spool is a file without a name in the folder of the result, so it is gone when the program is, however
that ends. Input are tensors in any order, output the same tensors by name.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.read_tensors import SLOT_DTYPES, slot, tensor_bytes
from lora_trainer.lora_file.stream import Slot


@dataclass(kw_only=True, eq=False)
class TensorSpool:
    """Tensors by name on the disk; `slots` has the dtype and the shape of each."""

    _file: IO[bytes]
    _folder: Path
    slots: dict[str, Slot] = field(default_factory=dict)
    _offsets: dict[str, int] = field(default_factory=dict)

    def add(self, name: str, tensor: Tensor) -> None:
        """Put a tensor at the end; raises MachineError when the disk refuses."""
        if name in self.slots:
            raise ValueError(f"two tensors are called {name}")
        try:
            self._offsets[name] = self._file.seek(0, 2)
            self._file.write(tensor_bytes(tensor))
        except OSError as error:
            raise disk_error(self._folder, error) from error
        self.slots[name] = slot(name, tensor)

    def read(self, name: str) -> bytes:
        """Return a tensor's bytes; raises MachineError when the disk refuses."""
        try:
            self._file.seek(self._offsets[name])
            return self._file.read(self.slots[name].bytes)
        except OSError as error:
            raise disk_error(self._folder, error) from error

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as it was added."""
        slot, data = self.slots[name], bytearray(self.read(name))
        return torch.frombuffer(data, dtype=SLOT_DTYPES[slot.dtype]).reshape(slot.shape)


@contextmanager
def tensor_spool(folder: Path) -> Iterator[TensorSpool]:
    """Open an empty spool; raises MachineError when the disk refuses."""
    try:
        file = tempfile.TemporaryFile(dir=folder, prefix=TEMPORARY_PREFIX)  # noqa: SIM115 - closed below
    except OSError as error:
        raise disk_error(folder, error) from error
    try:
        yield TensorSpool(_file=file, _folder=folder)
    finally:
        # Closing writes what is still buffered: a full disk would refuse it a second time.
        with suppress(OSError):
            file.close()


@dataclass(kw_only=True, eq=False)
class ModuleSpool(Mapping[str, ModuleTensors]):
    """An adapter on the disk: modules by "component.module", each read when looked up."""

    _spool: TensorSpool
    _modules: dict[str, ModuleTensors] = field(default_factory=dict)

    def add(self, key: str, module: ModuleTensors) -> None:
        """Put a module at the end."""
        for role, tensor in module.tensors.items():
            self._spool.add(f"{key}:{role}", tensor)
        empty = dict.fromkeys(module.tensors, torch.empty(0))
        self._modules[key] = replace(module, tensors=empty)

    def __getitem__(self, key: str) -> ModuleTensors:
        module = self._modules[key]
        tensors = {role: self._spool.tensor(f"{key}:{role}") for role in module.tensors}
        return replace(module, tensors=tensors)

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


@contextmanager
def module_spool(folder: Path) -> Iterator[ModuleSpool]:
    """Open an empty spool for modules."""
    with tensor_spool(folder) as spool:
        yield ModuleSpool(_spool=spool)

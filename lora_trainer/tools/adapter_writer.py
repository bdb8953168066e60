"""Writing a LoRA that need not fit into memory, by way of a file without a name.

Tensors kept on the disk between two passes over an adapter, so that memory holds one module.

A spool is a file without a name in the folder of the result: it is gone when the program is, however
that ends. Input are tensors in any order, output the same tensors by name.

Writing an adapter that need not fit into memory: every module checked as a reader would see it.

Input are modules that are read when looked up, output a file in the names of kohya, of diffusers or
of ComfyUI, with the same bytes that an export of the live adapter would have. The file appears when
it is whole.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO

import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.common.errors import InputError, RequestError, TrainingStopped
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.names import ALPHA
from lora_trainer.lora_file.read_tensors import SLOT_DTYPES, slot, tensor_bytes
from lora_trainer.lora_file.stream import Slot, ordered, refuse_existing, write_tensors
from lora_trainer.lora_file.strength import FOLDED
from lora_trainer.lora_file.verify import matches
from lora_trainer.lora_file.write import common_alpha
from lora_trainer.tools.spelling import Spelling


@dataclass(kw_only=True, eq=False)
class TensorSpool:
    """Tensors by name on the disk; `slots` says what is there."""

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
        place = self.slots[name]
        data = bytearray(self.read(name))
        return torch.frombuffer(data, dtype=SLOT_DTYPES[place.dtype]).reshape(place.shape)


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


SUFFIX = ".safetensors"
_BUG = "report this as a bug; nothing was written"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a written adapter is, for its header: `rank` and `alpha` are those of most modules."""

    modules: int
    rank: int
    alpha: float
    kinds: frozenset[str]
    dora: bool


def refuse_output(path: Path, *, force: bool) -> None:
    """Raise RequestError where an adapter cannot be written, before any work is done."""
    if path.suffix != SUFFIX:
        raise RequestError(
            f"--output {path.name} does not end with {SUFFIX}", fix=f"call it {path.stem}{SUFFIX}"
        )
    refuse_existing(path, force=force)


def write_adapter(
    path: Path,
    modules: AdapterTensors,
    spelling: Spelling,
    *,
    entries: Callable[[Summary], Mapping[str, str]],
    force: bool,
) -> Summary:
    """Write an adapter; `entries` gives the header's entries but the hashes.

    Modules are looked up twice, one at a time. Raises RequestError for an output that exists, unless
    `force`, and for values beyond the precision, and MachineError when the disk refuses.
    """
    refuse_output(path, force=force)
    lora_alpha = common_alpha(modules.values())
    ranks: Counter[int] = Counter()
    alphas: Counter[float | None] = Counter()
    kinds, dora = set[str](), False
    with tensor_spool(path.parent) as spool:
        for key, module in modules.items():
            alphas[_add(spool, key, module, spelling, lora_alpha=lora_alpha)] += 1
            ranks[module.rank] += 1
            kinds.add(module.kind)
            dora |= module.dora
        rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
        summary = Summary(
            modules=len(modules),
            rank=rank,
            alpha=float(rank) if alpha is None else alpha,
            kinds=frozenset(kinds),
            dora=dora,
        )
        slots = ordered(spool.slots.values())
        strength = {FOLDED: "multiplied in"} if None in alphas else {}
        write_tensors(
            path,
            slots,
            (spool.read(slot.name) for slot in slots),
            metadata={**entries(summary), **strength},
            force=force,
        )
    return summary


def _add(
    spool: TensorSpool, key: str, module: ModuleTensors, spelling: Spelling, *, lora_alpha: float
) -> float | None:
    """Spool one module once it reads back right; return the alpha it states, None: multiplied in."""
    named = spelling.tensors(key, module, lora_alpha=lora_alpha)
    try:
        (match,) = matches(
            save(named), {key: module}, family=spelling.family, precision=spelling.precision
        )
    except TrainingStopped as error:
        raise InputError(error.found, fix=_BUG) from None
    if not match.explained:
        raise InputError(f"{key} would change by {match.relative_error:.1e} when written", fix=_BUG)
    for name, tensor in named.items():
        spool.add(name, tensor)
    return next((float(tensor) for name, tensor in named.items() if name.endswith(ALPHA)), None)

"""Opening adapter files of any trainer with the right names: family, modules, kernels, precision.

Input is a file and, where it is not the public release, the base it was made for; output an
OpenAdapter whose modules are read one at a time, checked for numbers that are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lora_trainer import families
from lora_trainer.config import BaseSettings, Precision
from lora_trainer.errors import InputError, LoraTrainError
from lora_trainer.families.base import DENOISER, Family
from lora_trainer.families.recognise import adapter_family
from lora_trainer.formats import Contents
from lora_trainer.model.adapters import layer_names
from lora_trainer.model.load import EMBEDDED, describe
from lora_trainer.output import adapter_file
from lora_trainer.output.adapter_names import Role, file_names
from lora_trainer.output.adapter_problems import KeyFormat, key_format
from lora_trainer.output.adapter_read import OpenAdapter, open_adapter
from lora_trainer.output.adapter_tensors import ModuleTensors, split_key
from lora_trainer.tools.header_entries import stated_base

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NO_FACTORS: frozenset[Role] = frozenset({"alpha", "magnitude"})
_ADAPTER = "give a LoRA in a whole .safetensors file"


@dataclass(frozen=True, kw_only=True)
class Source:
    """An adapter file that is open: its family, how it spells keys, the precision of its factors.

    `kernels` has the kernel sizes of the base's convolutions by "component.module".
    """

    path: Path
    family: Family
    contents: Contents
    format: KeyFormat
    precision: Precision
    kernels: Mapping[str, tuple[int, ...]]
    adapter: OpenAdapter

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.adapter.metadata

    def read(self, key: str) -> ModuleTensors:
        """Return one module; raises InputError naming a tensor that holds NaN or infinity."""
        module = self.adapter[key]
        for role, tensor in module.tensors.items():
            if not tensor.float().isfinite().all():
                raise InputError(
                    f"{self.path.name} holds NaN or infinity in {key} ({role})",
                    fix="use an earlier save of the training it came from",
                )
        return module


@dataclass(frozen=True, eq=False)
class CheckedModules(Mapping[str, ModuleTensors]):
    """All modules of a source by "component.module", each read and checked when looked up."""

    source: Source

    def __getitem__(self, key: str) -> ModuleTensors:
        return self.source.read(key)

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.adapter)

    def __len__(self) -> int:
        return len(self.source.adapter)


@dataclass(frozen=True, kw_only=True)
class Naming:
    """What a network's modules are called in files of any trainer, and the kernels of its convolutions."""

    family: Family
    names: Mapping[str, str]
    kernels: Mapping[str, tuple[int, ...]]


@contextmanager
def open_source(
    path: Path, *, base: str | None = None, naming: Naming | None = None
) -> Iterator[Source]:
    """Open an adapter file; `base` is the model it was made for, the family's public release by default.

    `naming` says what `base` would, for a base that is open already. Raises InputError where the file is
    no whole adapter, its family is not known or it has modules that the base lacks.
    """
    contents = adapter_file.read_contents(path)
    parts = {name: part for name, part in contents.parts.items() if part.kind is not None}
    if not parts:
        raise InputError(f"{path.name} holds no adapter", fix=_ADAPTER)
    naming = naming or _naming(path, contents, base=base)
    with open_adapter(path, names=naming.names) as adapter:
        yield Source(
            path=path,
            family=naming.family,
            contents=Contents(
                kinds=frozenset(str(part.kind) for part in parts.values()),
                dora=any("magnitude" in part.entries for part in parts.values()),
                text=any(split_key(key)[0] != DENOISER for key in adapter),
            ),
            format=key_format(parts),
            precision=_precision(parts.values()),
            kernels=naming.kernels,
            adapter=adapter,
        )


def _naming(path: Path, contents: adapter_file.Contents, *, base: str | None) -> Naming:
    """Return the names in the first network that has all of the file's modules."""
    if base is not None:
        facts = describe(BaseSettings(model=base))
        return _names_in(families.family(facts.family), facts.architecture)
    family = _family(path, contents)
    found = [_names_in(family, architecture) for architecture in family.public_architectures()]
    for naming in found:
        if contents.parts.keys() <= naming.names.keys():
            return naming
    stated = _stated_architecture(contents.metadata, family)
    return found[0] if stated is None else _names_in(family, stated)


def _family(path: Path, contents: adapter_file.Contents) -> Family:
    shapes = {name: part.down_shape for name, part in contents.parts.items()}
    name = adapter_family(shapes, metadata=contents.metadata)
    if name not in families.MODULES:
        raise InputError(
            f"{path.name} is an adapter of family {name}; known are {', '.join(families.MODULES)}",
            fix="name the base model it was made for with --base",
        )
    return families.family(name)


def _names_in(family: Family, architecture: Mapping[str, Any]) -> Naming:
    with torch.device("meta"):
        network = family.empty_denoiser(architecture)
    kernels = {
        f"{DENOISER}.{name}": tuple(module.kernel_size)
        for name, module in network.named_modules()
        if isinstance(module, nn.Conv2d)
    }
    modules: dict[str, Sequence[str]] = {DENOISER: layer_names(network), **family.text_modules()}
    return Naming(family=family, names=file_names(family, modules), kernels=kernels)


def _stated_architecture(metadata: Mapping[str, str], family: Family) -> Mapping[str, Any] | None:
    """Return the configuration of the base that our own metadata name, if it is on this machine.

    A file is no reason to look into any folder: only the embedded base and Hub ids are.
    """
    source = stated_base(metadata)
    if source is None or not (source == EMBEDDED or _HUB_ID.fullmatch(source)):
        return None
    try:
        facts = describe(BaseSettings(model=source))
    except LoraTrainError:
        return None  # the public release is what there is
    return facts.architecture if facts.family == family.name else None


def _precision(parts: Iterable[adapter_file.Part]) -> Precision:
    """Return the narrowest precision that holds every factor."""
    dtypes = {
        entry.dtype
        for part in parts
        for role, entry in part.entries.items()
        if role not in _NO_FACTORS
    }
    if dtypes == {"F16"}:
        return "fp16"
    return "bf16" if dtypes == {"BF16"} else "fp32"

"""Opening adapter files of any trainer with the right names: family, modules, kernels, precision.

Input is a file and, where it is not the public release, the base it was made for; output an
OpenAdapter whose modules are read one at a time, checked for numbers that are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_trainer import families
from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.config.config import BaseSettings, Precision
from lora_trainer.families.base import DENOISER, Family
from lora_trainer.families.locate import EMBEDDED, describe
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora.tensors import ModuleTensors, split_key
from lora_trainer.lora_file.embedding import bundled
from lora_trainer.lora_file.fitting_base import Fit, check_usable, released_names
from lora_trainer.lora_file.formats import AdapterContents
from lora_trainer.lora_file.names import LayerNames, Role, file_names
from lora_trainer.lora_file.problems import KeyFormat, key_format
from lora_trainer.lora_file.read import Contents, ModuleFactors
from lora_trainer.lora_file.read_tensors import OpenAdapter, open_adapter
from lora_trainer.tools.header_entries import stated_base

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_NO_FACTORS: frozenset[Role] = frozenset({"alpha", "magnitude"})


@dataclass(frozen=True, kw_only=True, eq=False)
class AdapterSource(Mapping[str, ModuleTensors]):
    """An adapter file that is open: modules by "component.module", each read and checked when looked up.

    `format` is how it spells keys, `precision` that of its factors; `names` finds the layers of its base,
    `words` are the new words whose vectors are in the file too.
    """

    path: Path
    family: Family
    contents: AdapterContents
    format: KeyFormat
    precision: Precision
    names: LayerNames
    words: Sequence[str]
    adapter: OpenAdapter

    @property
    def metadata(self) -> Mapping[str, str]:
        return self.adapter.metadata

    def kernel(self, key: str) -> tuple[int, ...]:
        """Return the size of a layer's kernel, () where it has none or its shape is not known."""
        return self.names.shape(key)[2:]

    def __getitem__(self, key: str) -> ModuleTensors:
        """Return one module; raises InputError naming a tensor that holds NaN or infinity."""
        module = self.adapter[key]
        for role, tensor in module.tensors.items():
            if not tensor.float().isfinite().all():
                raise InputError(
                    f"{self.path.name} holds NaN or infinity in {key} ({role})",
                    fix="use an earlier save of the training it came from",
                )
        return module

    def __contains__(self, key: object) -> bool:
        return key in self.adapter  # the base class would read the module

    def __iter__(self) -> Iterator[str]:
        return iter(self.adapter)

    def __len__(self) -> int:
        return len(self.adapter)


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """An adapter file and the weight on its update."""

    file: Path
    weight: float


@dataclass(frozen=True, kw_only=True)
class WeightedSources:
    """Adapters of one base and the weight on the update of each."""

    sources: Sequence[AdapterSource]
    weights: Sequence[float]

    @cached_property
    def layers(self) -> tuple[str, ...]:
        """The layers that any of the adapters changes, as "component.module", sorted."""
        return tuple(sorted({key for source in self.sources for key in source}))

    def modules(self, key: str) -> list[tuple[ModuleTensors, float]]:
        """Return (module, weight) of each adapter that changes a layer."""
        pairs = zip(self.sources, self.weights, strict=True)
        return [(source[key], weight) for source, weight in pairs if key in source]


@contextmanager
def open_source(
    path: Path, *, base: str | None = None, names: LayerNames | None = None
) -> Iterator[AdapterSource]:
    """Open an adapter file; `base` is the model it was made for, the family's public release by default.

    `names` finds the layers of a base that is open already. Raises InputError where the file is no whole
    adapter, its family is not known or it has modules that the base lacks or has in another size.
    """
    if names is None and base is not None:
        facts = describe(BaseSettings(model=base))
        names = _names_in(families.family(facts.family), facts.architecture)
    contents, fit = check_usable(path, names=names)
    parts = {name: part for name, part in contents.parts.items() if part.kind is not None}
    names = names or _names_of(contents, fit)
    with open_adapter(path, names=names) as adapter:
        yield AdapterSource(
            path=path,
            family=names.family,
            contents=_stated_contents(
                parts, text=any(split_key(key)[0] != DENOISER for key in adapter)
            ),
            format=key_format(parts),
            precision=_precision(parts.values()),
            names=names,
            words=bundled(contents.unknown),
            adapter=adapter,
        )


def open_weighted(
    inputs: Sequence[Weighted],
    stack: ExitStack,
    *,
    base: str | None = None,
    names: LayerNames | None = None,
) -> WeightedSources:
    """Open adapter files until `stack` closes; raises RequestError for none, and as `open_source`."""
    if not inputs:
        raise RequestError("there is nothing to merge", fix="give at least one adapter file")
    opened = (open_source(each.file, base=base, names=names) for each in inputs)
    sources = [stack.enter_context(each) for each in opened]
    return WeightedSources(sources=sources, weights=[each.weight for each in inputs])


def _stated_contents(parts: Mapping[str, ModuleFactors], *, text: bool) -> AdapterContents:
    """Return the contents of an adapter by its header alone; see `write.contents_of`."""
    magnitudes = [
        part.entries["magnitude"] for part in parts.values() if "magnitude" in part.entries
    ]
    return AdapterContents(
        kinds=frozenset(part.kind for part in parts.values() if part.kind is not None),
        dora=bool(magnitudes),
        text=text,
        bias=any(
            {"bias", "up_bias"} & part.entries.keys() and part.kind != "norm"
            for part in parts.values()
        ),
        input_dora=any(
            entry.key.endswith("dora_scale") and entry.shape[:1] == (1,) != entry.shape[1:2]
            for entry in magnitudes
        ),
    )


def _names_of(contents: Contents, fit: Fit) -> LayerNames:
    """Return the names in the release that the file's modules fit, else in the base that our metadata name."""
    if fit.exact and fit.names is not None:
        return fit.names
    family = families.family(fit.family)
    architecture = _stated_architecture(contents.metadata, family)
    if architecture is not None:
        return _names_in(family, architecture)
    return fit.names or released_names(family.name, 0)


def _names_in(family: Family, architecture: Mapping[str, Any]) -> LayerNames:
    # The sizes of this base's text encoders are in its weights only; those of the release may be others.
    text = {component: list(modules) for component, modules in family.text.layers.items()}
    return file_names(family, {DENOISER: denoiser_layers(family, architecture), **text})


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


def _precision(parts: Iterable[ModuleFactors]) -> Precision:
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

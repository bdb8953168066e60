"""Opening adapter files of any trainer with the right names: family, modules, kernels, precision.

Input is a file and, where it is not the public release, the base it was made for; output an
OpenAdapter whose modules are read one at a time, checked for numbers that are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import DENOISER, Family
from lora_trainer.families.locate import EMBEDDED, describe
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.fitting_base import Fit, check_usable, released_names
from lora_trainer.lora_file.metadata import stated_base
from lora_trainer.lora_file.names import LayerNames
from lora_trainer.lora_file.read import Contents
from lora_trainer.lora_file.read_tensors import OpenAdapter, open_adapter

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, kw_only=True)
class Weighted:
    """An adapter file and the weight on its update."""

    file: Path
    weight: float


@dataclass(frozen=True, kw_only=True)
class WeightedSources:
    """Adapters of one base and the weight on the update of each."""

    sources: Sequence[OpenAdapter]
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
) -> Iterator[OpenAdapter]:
    """Open an adapter file; `base` is the model it was made for, the family's public release by default.

    `names` finds the layers of a base that is open already. Raises InputError where the file is no whole
    adapter, its family is not known or it has modules that the base lacks or has in another size.
    """
    if names is None and base is not None:
        facts = describe(BaseSettings(model=base))
        names = _names_in(families.family(facts.family), facts.architecture)
    contents, fit = check_usable(path, names=names)
    names = names or _names_of(contents, fit)
    with open_adapter(path, names=names, must_be_finite=True) as adapter:
        yield adapter


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
    return LayerNames(family, {DENOISER: denoiser_layers(family, architecture), **text})


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

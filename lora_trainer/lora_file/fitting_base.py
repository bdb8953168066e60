"""Which base an adapter file fits: by its layers' names and sizes, compared with all public releases.

Input is a file's header, output a family, the release whose layers fit, and the modules that do not. A
file is for the family that has all of its layers in their sizes; metadata and habits of trainers decide
only between families that do not differ in them. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base import DENOISER
from lora_trainer.families.layer_tables import released_layers
from lora_trainer.families.recognise import adapter_family, stated_version
from lora_trainer.lora_file.header import refuse
from lora_trainer.lora_file.names import LayerNames, Shape, kind_of_others
from lora_trainer.lora_file.read import Contents, ModuleFactors, read_contents

_NUMBER = re.compile(r"\d+")
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A module whose size is not that of its layer, (out, fan in) each."""

    module: str
    size: Size
    expected: Size


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The family of a file, and the other families that its layers fit as well.

    `names` finds the layers of the release that fits best, None where no release has the file's layers;
    `exact` says that all sizes are those of it, `misfits` are the modules of another size, none where
    the whole file is of another size.
    """

    family: str
    others: tuple[str, ...] = ()
    names: LayerNames | None = None
    misfits: tuple[Misfit, ...] = ()
    exact: bool = False


@lru_cache(maxsize=32)
def released_names(family: str, release: int) -> LayerNames:
    """Return the layers of one public release of a family, to be found by any trainer's spelling."""
    seam = families.family(family)
    return LayerNames(seam, {DENOISER: released_layers(family)[release], **seam.text.layers})


def recognise(parts: Mapping[str, ModuleFactors], metadata: Mapping[str, str]) -> Fit:
    """Return the family that a file's modules fit, `unknown` where names, sizes and metadata tell none."""
    stated_name = stated_version(metadata)
    fitting: dict[str, LayerNames] = {}
    if any(_is_denoiser(name) for name in parts):
        for family in families.MODULES:
            names = next(
                (each for each in _releases(family, parts) if not any(find_misfits(parts, each))),
                None,
            )
            if names is not None:
                fitting[family] = names
    # Metadata may be wrong, so it decides only between families that all have the file's layers.
    if fitting:
        chosen = stated_name if stated_name in fitting else _preferred(parts, fitting)
        others = () if chosen == stated_name else tuple(name for name in fitting if name != chosen)
        return Fit(family=chosen, others=others, names=fitting[chosen], exact=True)
    family = adapter_family(
        {name: part.down_shape for name, part in parts.items()}, metadata=metadata
    )
    if family not in families.MODULES:
        return Fit(family=family)
    return _closest(parts, family)


def _closest(parts: Mapping[str, ModuleFactors], family: str) -> Fit:
    """Return the release of a family that has all the names and most of the sizes."""
    by_release = [(names, tuple(find_misfits(parts, names))) for names in _releases(family, parts)]
    if not by_release:
        return Fit(family=family)
    names, misfits = min(by_release, key=lambda each: len(each[1]))
    # A base of another width has none of the sizes: that is no error of the file.
    sized_modules = sum(part.size != (0, 0) for part in parts.values())
    return Fit(family=family, names=names, misfits=misfits if len(misfits) < sized_modules else ())


def check_usable(path: Path, *, names: LayerNames | None) -> tuple[Contents, Fit]:
    """Read a file's header and find the base it fits; raises InputError saying why it cannot be used.

    `names` finds the layers of the base that was asked for, None: the family tells which that is.
    """
    contents = read_contents(path)
    parts = {name: part for name, part in contents.parts.items() if part.kind is not None}
    if not parts:
        refuse(path, f"holds no adapter{kind_of_others(contents.unknown)}")
    fit = recognise(parts, contents.metadata)
    if names is None and fit.family not in families.MODULES:
        raise InputError(
            f"{path.name} is an adapter of family {fit.family}; known are {', '.join(families.MODULES)}",
            fix="name the base model it was made for with --base",
        )
    misfits = fit.misfits if names is None else tuple(find_misfits(parts, names))
    if misfits:
        first = misfits[0]
        raise InputError(
            f"{path.name} changes {first.module!r} in the size {sized(first.size)}, the layer is "
            f"{sized(first.expected)}",
            fix="give an adapter made for this base model, or name its base with --base",
        )
    return contents, fit


def sized(size: Size) -> str:
    """Return (out, fan in) in words, `?` for a side that the tensors do not tell."""
    return "x".join(str(number) if number else "?" for number in size)


def find_misfits(parts: Mapping[str, ModuleFactors], names: LayerNames) -> Iterable[Misfit]:
    """Yield the modules whose size is not that of the layers that they stand for."""
    for module, part in parts.items():
        expected = _expected_size(module, part, names)
        if expected is None:
            continue
        if any(
            side not in (0, layer_side)
            for side, layer_side in zip(part.size, expected, strict=True)
        ):
            yield Misfit(module=module, size=part.size, expected=expected)


def _expected_size(module: str, part: ModuleFactors, names: LayerNames) -> Size | None:
    """Return (out, fan in) of the layers that a module stands for; None where a shape is not known."""
    layers = names.find(module) or names.find(module, size=part.size)
    shapes: list[Shape] = [names.shape(layer.key) for layer in layers]
    if not shapes or not all(shapes):
        return None
    return sum(shape[0] for shape in shapes), math.prod(shapes[0][1:])


def _releases(family: str, parts: Mapping[str, ModuleFactors]) -> Iterator[LayerNames]:
    """Yield the layers of each public release of a family that has a layer for every module."""
    for release in range(len(released_layers(family))):
        names = released_names(family, release)
        if all(names.find(module, size=part.size) for module, part in parts.items()):
            yield names


def _is_denoiser(module: str) -> bool:
    """Say whether a module may be of a denoiser: text encoders alone are those of many families."""
    return re.match(r"(?:lora_|lycoris_)?te\d?_|text_encoder|clip_[lg]\.|t5", module) is None


def _preferred(parts: Mapping[str, ModuleFactors], fitting: Mapping[str, LayerNames]) -> str:
    """Return the family that trains all kinds of layers that its blocks have, else the first.

    Trainers that change whole blocks change all that is in them: of two families that differ by layers
    the file has not, the one is meant that lacks them.
    """
    for family, names in fitting.items():
        changed = {
            _kind_of(layer.key)
            for module, part in parts.items()
            for layer in names.find(module, size=part.size)
        }
        kinds = {
            _kind_of(f"{DENOISER}.{layer}")
            for layer, shape in names.layers[DENOISER].items()
            if len(shape) > 1 and "blocks." in layer
        }
        if kinds and kinds <= changed:
            return family
    return next(iter(fitting))


def _kind_of(key: str) -> str:
    return _NUMBER.sub("#", key)

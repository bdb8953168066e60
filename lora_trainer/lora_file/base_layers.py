"""The layers of a base by every spelling of any trainer's files, and the base that a file's layers fit.

Dots and underscores count as one, known prefixes fall away, and a family has tables of its layers' other names.
A file is for the family that has all of its layers in their sizes, compared with all public releases; metadata and
habits of trainers decide only between families that do not differ in them. Torch-free.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.releases import released_layers
from lora_trainer.families.files.recognise import adapter_family, stated_version
from lora_trainer.lora_file.key_formats import PART_MARK, kind_of_others
from lora_trainer.lora_file.read import Contents, ModuleFactors, read_contents
from lora_trainer.lora_file.tensor_file import refuse

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LayerRows:
    """The rows of a joined layer in a file that belong to one layer of the network."""

    key: str
    rows: tuple[int, int] | None = None
    """(first, end); None: all rows."""
    part: tuple[int, int] = (0, 1)
    """(index among the joined layers, their number)."""
    swapped: bool = False
    """Whether the two halves of the rows change places."""


_PREFIX = re.compile(
    r"(?:lora_unet|oft_unet|lora_transformer|lora_prior_unet|lora_dit|lycoris|lora|model_diffusion_model|diffusion_model"
    r"|base_model_model|unet|transformer|denoiser|pipe_dit|dit|model|module|_orig_mod|net|_fsdp_wrapped_module)_"
)
_TEXT_PREFIX = re.compile(
    r"(?:lora_|lycoris_)?(?:te(?P<flat>\d?)"
    r"|text_encoders_(?P<role>clip_[lgh]|t5xxl|\w+?(?=_transformer_)|[a-z0-9]+)"
    r"|text_encoder(?:_(?P<number>\d))?"
    r"|(?P<bare>clip_[lgh]|t5xxl|t5))_(?:transformer_)?"
)
_TEXT_INNER = re.compile(
    r"(?:base_model_model|model|language_model|text_model|transformer|module)_"
)
_OLD_CLIP = re.compile(r"(.+_self_attn)_to_(q|k|v|out)")
_ROLE_NAMES = {"t5": "t5xxl"}


class LayerNames:
    """Finds layers of a base by every spelling that files of any trainer have for them.

    `modules` has the layers of each component ("denoiser", "text_encoder", ...), with the shapes of their
    weights where they are known, by which joined layers are taken apart.
    """

    def __init__(
        self, family: Family, modules: Mapping[str, Mapping[str, Shape] | Sequence[str]]
    ) -> None:
        layers: dict[str, dict[str, Shape]] = {
            component: dict(names) if isinstance(names, Mapping) else dict.fromkeys(names, ())
            for component, names in modules.items()
        }
        self.family, self.layers = family, layers
        self._denoiser: dict[str, tuple[LayerRows, ...]] = {}
        self._text: dict[str, dict[str, LayerRows]] = {}
        for component, shapes in layers.items():
            if (inside := family.text.inside.get(component)) is not None:
                # Of a network among the denoiser's tensors files have the names that it has there, or diffusers'.
                for name in shapes:
                    layer = (LayerRows(key=f"{component}.{name}"),)
                    self._denoiser[_flat(inside + name)] = layer
                    self._denoiser[_flat(f"{component}.{name}")] = layer
                continue
            if component != DENOISER:
                self._text[component] = {
                    flat: LayerRows(key=f"{component}.{name}")
                    for name in shapes
                    for flat in _stripped(_flat(name), _TEXT_INNER)
                }
                continue
            by_name = {name: (LayerRows(key=f"{DENOISER}.{name}"),) for name in shapes}
            for name, layer in by_name.items():
                self._denoiser.setdefault(_flat(name), layer)
            other = family.layer_names(shapes)
            for spelt, layer_names in other.layers.items():
                joined = _joined(layer_names, shapes, swapped=other.swapped)
                self._denoiser.setdefault(_flat(spelt), joined)
            for name, layer in by_name.items():
                # Old files have the output of an attention without its place in a list of two.
                if name.endswith("to_out.0"):
                    self._denoiser.setdefault(_flat(name.removesuffix(".0")), layer)
        self._numbers = {
            component: int(number) if (number := component.rpartition("_")[2]).isdigit() else 1
            for component in self._text
        }

    def shape(self, key: str) -> Shape:
        """Return the shape of a layer's weight by "component.module", () where it is not known."""
        component, _, name = key.partition(".")
        return self.layers.get(component, {}).get(name, ())

    def find(self, spelling: str, *, size: tuple[int, int] | None = None) -> tuple[LayerRows, ...]:
        """Return the layers that a spelling stands for, in the order of their rows; () for no layer.

        `size` is (out, fan in) of the update, as far as it is known, 0 where not: it tells text
        encoders apart whose layers have the same names.
        """
        spelling, _, part = spelling.partition(PART_MARK)
        layers = self._text_layer(spelling, size)
        if not layers or _TEXT_PREFIX.match(_bare(spelling)) is None:
            # A denoiser may have layers of its text encoder's names: without a prefix the size tells which is meant.
            own = self._denoiser_layers(spelling)
            if own and (not layers or self._fits(own, size) or not self._fits(layers, size)):
                layers = own
        if part:
            number = int(part)
            return (LayerRows(key=layers[number].key),) if number < len(layers) else ()
        return layers

    def _denoiser_layers(self, spelling: str) -> tuple[LayerRows, ...]:
        for candidate in _stripped(_flat(spelling), _PREFIX):
            if candidate.startswith("sformer_blocks_"):  # written by a replacement gone wrong
                candidate = f"tran{candidate}"
            # Old diffusers named the attention processor between the attention and its layer.
            names = (candidate, candidate.replace("_processor_", "_"))
            if layers := self._denoiser.get(names[0]) or self._denoiser.get(names[1], ()):
                return layers
        return ()

    def _fits(self, layers: tuple[LayerRows, ...], size: tuple[int, int] | None) -> bool:
        """Return whether an update of that size, as far as it is known, is one of a single layer."""
        shape = self.shape(layers[0].key)
        if size is None or len(layers) > 1 or len(shape) < 2:
            return True
        wanted = (shape[0], math.prod(shape[1:]))
        return all(own in (0, whole) for own, whole in zip(size, wanted, strict=True))

    def _text_layer(self, spelling: str, size: tuple[int, int] | None) -> tuple[LayerRows, ...]:
        flat = _bare(spelling)
        match = _TEXT_PREFIX.match(flat)
        rest = [flat] if match is None else [flat[match.end() :], flat]
        hits = {
            component: layer
            for name in rest
            for component, table in self._text.items()
            if (layer := _in_text(table, name)) is not None
        }
        if match is None and len(hits) != 1:
            fitting = tuple(
                layer
                for layer in hits.values()
                for shape in [self.shape(layer.key)]
                if size is None or len(shape) < 2 or size == (shape[0], math.prod(shape[1:]))
            )
            return fitting if len(fitting) == 1 else ()
        if match is not None:
            role = match["role"] or match["bare"]
            name, number = _ROLE_NAMES.get(role, role), int(match["flat"] or match["number"] or 1)
            for component, layer in hits.items():
                own_role = self.family.text.roles.get(component)
                if own_role == name if role else self._numbers[component] == number:
                    return (layer,)
        return tuple(hits.values())[:1]


def _flat(name: str) -> str:
    return name.replace(".", "_")


def _bare(name: str) -> str:
    return _flat(name).removeprefix("base_model_model_")


def _stripped(name: str, prefix: re.Pattern[str]) -> Iterator[str]:
    """Yield a name, then with one known prefix after the other taken away."""
    yield name
    while match := prefix.match(name):
        name = name[match.end() :]
        yield name


def _in_text(table: Mapping[str, LayerRows], name: str) -> LayerRows | None:
    for candidate in _stripped(name, _TEXT_INNER):
        if (layer := table.get(candidate)) is not None:
            return layer
        if (old := _OLD_CLIP.fullmatch(candidate)) and (
            layer := table.get(f"{old[1]}_{old[2]}_proj")
        ) is not None:
            return layer
    return None


def _joined(
    names: Sequence[str], shapes: Mapping[str, Shape], *, swapped: Set[str]
) -> tuple[LayerRows, ...]:
    """Return the rows of each layer of `names` in the weight that joins them; one layer has the whole weight."""
    if len(names) == 1:
        return (LayerRows(key=f"{DENOISER}.{names[0]}", swapped=names[0] in swapped),)
    ends = [*accumulate(shapes[name][0] if shapes[name] else 0 for name in names)]
    return tuple(
        LayerRows(key=f"{DENOISER}.{name}", rows=rows, part=(number, len(names)))
        for number, (name, rows) in enumerate(zip(names, pairwise([0, *ends]), strict=True))
    )


# ---- the base that a file fits


_NUMBER = re.compile(r"\d+")
_TEXT_MODULE = re.compile(r"(?:lora_|lycoris_)?te\d?_|text_encoder|clip_[lg]\.|t5")
Size = tuple[int, int]


# A module whose size is not that of its layer: name, its size and the layer's, (out, fan in) each.
Misfit = tuple[str, Size, Size]


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The family of a file, and how well its layers fit."""

    family: str
    others: tuple[str, ...] = ()
    """Other families that the layers fit as well."""
    names: LayerNames | None = None
    """Finds the layers of the release that fits best; None if no release has the file's layers."""
    misfits: tuple[Misfit, ...] = ()
    """The modules of another size; empty if the whole file has another size."""
    exact: bool = False
    """Whether all sizes are those of the release."""


@lru_cache(maxsize=32)
def released_names(family: str, release: int) -> LayerNames:
    """Return the layers of one public release of a family, to be found by any trainer's spelling."""
    seam = families.family(family)
    return LayerNames(seam, {DENOISER: released_layers(family)[release], **seam.text.layers})


def recognise(parts: Mapping[str, ModuleFactors], metadata: Mapping[str, str]) -> Fit:
    """Return the family that a file's modules fit, `unknown` where names, sizes and metadata tell none."""
    stated_name = stated_version(metadata)
    fitting: dict[str, LayerNames] = {}
    # Layers of text encoders alone are those of many families.
    for family in families.NAMES if not all(map(_TEXT_MODULE.match, parts)) else ():
        for names in _releases(family, parts):
            if not any(find_misfits(parts, names)):
                fitting[family] = names
                break
    # Metadata may be wrong, so it decides only between families that all have the file's layers.
    if fitting:
        chosen = stated_name if stated_name in fitting else next(iter(fitting))
        # Trainers that change whole blocks change all that is in them: of two families that differ by layers the
        # file has not, the one is meant that lacks them, and has all kinds of its blocks' layers changed.
        for family, names in fitting.items() if chosen != stated_name else ():
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
                chosen = family
                break
        others = () if chosen == stated_name else tuple(name for name in fitting if name != chosen)
        return Fit(family=chosen, others=others, names=fitting[chosen], exact=True)
    widths = {name: part.size[1] for name, part in parts.items()}
    family = adapter_family(widths, metadata=metadata)
    releases = _releases(family, parts) if family in families.NAMES else ()
    by_release = [(names, tuple(find_misfits(parts, names))) for names in releases]
    if not by_release:
        return Fit(family=family)
    # The release that has all the names and most of the sizes.
    names, misfits = min(by_release, key=lambda each: len(each[1]))
    # A base of another width has none of the sizes: this is not an error of the file.
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
    if names is None and fit.family not in families.NAMES:
        raise InputError(
            f"{path.name} is an adapter of family {fit.family}; known are {', '.join(families.NAMES)}",
            fix="name the base model it was made for with --base",
        )
    misfits = fit.misfits if names is None else find_misfits(parts, names)
    for module, size, expected in misfits:
        raise InputError(
            f"{path.name} changes {module!r} in the size {sized(size)}, the layer is {sized(expected)}",
            fix="give an adapter made for this base model, or name its base with --base",
        )
    return contents, fit


def sized(size: Shape) -> str:
    """Return a shape in words, `?` for a side that the tensors do not tell."""
    return "x".join(str(number) if number else "?" for number in size)


def find_misfits(parts: Mapping[str, ModuleFactors], names: LayerNames) -> Iterable[Misfit]:
    """Yield the modules whose size is not that of the layers that they stand for."""
    for module, part in parts.items():
        layers = names.find(module) or names.find(module, size=part.size)
        shapes = [names.shape(layer.key) for layer in layers]
        if shapes and all(shapes):
            out, fan_in = sum(shape[0] for shape in shapes), math.prod(shapes[0][1:])
            if part.size[0] not in (0, out) or part.size[1] not in (0, fan_in):
                yield module, part.size, (out, fan_in)


def _releases(family: str, parts: Mapping[str, ModuleFactors]) -> Iterator[LayerNames]:
    """Yield the layers of each public release of a family that has a layer for every module."""
    for release in range(len(released_layers(family))):
        names = released_names(family, release)
        if all(names.find(module, size=part.size) for module, part in parts.items()):
            yield names


def _kind_of(key: str) -> str:
    return _NUMBER.sub("#", key)

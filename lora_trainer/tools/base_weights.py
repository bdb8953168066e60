"""The weights of a base model, tensor by tensor, without building its networks.

Input is a diffusers folder, a Hub id or a checkpoint in one file, output the location of every layer's weight, read
when looked up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.common.files import user_path
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER, WeightPlace
from lora_trainer.families.base.releases import released_layers
from lora_trainer.families.files.locate import describe, locate
from lora_trainer.families.files.weight_files import AGAIN, is_beside_weight, unread_quantisation
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.base_layers import LayerNames, released_names
from lora_trainer.lora_file.read_tensors import SLOT_DTYPES
from lora_trainer.lora_file.tensor_file import Opened, open_checked
from lora_trainer.tools.adapters import SUFFIX

WEIGHT = ".weight"
# transformers 5 leaves it out of the names of some CLIP encoders; here all go without.
TEXT_MODEL = "text_model."


def read_tensor(file: Opened, name: str) -> Tensor:
    """Return a floating-point tensor of an open file; raises InputError when it holds NaN or infinity."""
    entry = file.entries[name]
    tensor = torch.frombuffer(file.read(entry), dtype=SLOT_DTYPES[entry.dtype])
    if not tensor.float().isfinite().all():
        raise InputError(f"{name} in {file.path.name} holds NaN or infinity", fix=AGAIN)
    return tensor.reshape(entry.shape)


@dataclass(frozen=True, kw_only=True)
class WeightLocation:
    """Where the weight of a layer lies: an open file, and a tensor or some rows of it."""

    file: Opened
    at: WeightPlace

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [out, in, ...] of the weight."""
        whole = self.file.entries[self.at.tensor].shape
        return whole if self.at.rows is None else (self.at.rows[1] - self.at.rows[0], *whole[1:])

    def weight(self) -> Tensor:
        """Return the weight [out, in, ...] in its dtype; raises InputError as `read_tensor` does."""
        return rows_at(self.at, read_tensor(self.file, self.at.tensor))


def rows_at(at: WeightPlace, whole: Tensor) -> Tensor:
    """Return the rows of a tensor that are a layer's, in the order of diffusers' layer."""
    return in_place_order(at, whole if at.rows is None else whole[slice(*at.rows)])


def in_place_order(at: WeightPlace, rows: Tensor) -> Tensor:
    """Return rows in the order of the other layout: with the halves exchanged, where it has them so."""
    return rows.roll(len(rows) // 2, 0) if at.swapped else rows


@dataclass(frozen=True, kw_only=True)
class BaseWeights:
    """A base model that is open."""

    source: str
    path: Path
    family: Family
    tensors: Mapping[str, WeightLocation]
    """The location of each tensor by "component.module.weight" and the like."""
    single: bool
    """Whether it is a checkpoint in one file."""

    @cached_property
    def places(self) -> Mapping[str, WeightLocation]:
        """The matrices and kernels of layers by "component.module"."""
        return {
            key.removesuffix(WEIGHT): location
            for key, location in self.tensors.items()
            if key.endswith(WEIGHT) and len(location.shape) > 1
        }

    def names(self) -> LayerNames:
        """Return the layers of this base by the names that files of any trainer have for them."""
        layers: dict[str, dict[str, tuple[int, ...]]] = {}
        for key, location in self.tensors.items():
            if key.endswith(WEIGHT):
                component, module = split_key(key.removesuffix(WEIGHT))
                layers.setdefault(component, {})[module] = location.shape
        return LayerNames(self.family, layers)


@contextmanager
def open_base(source: str) -> Iterator[BaseWeights]:
    """Open a diffusers folder, a Hub id (downloaded if need be) or a checkpoint in one file.

    Raises InputError for a file or folder that is not a base model and for a quantised one.
    """
    path = Path(user_path(source))
    with ExitStack() as stack:
        if path.is_file() and path.suffix == SUFFIX:
            yield _single(source, path, stack)
        else:
            yield _folder(locate(BaseSettings(model=source)), stack)


def _single(source: str, path: Path, stack: ExitStack) -> BaseWeights:
    file = open_file(path, stack)
    recognised = families.detect_file(file.entries)
    if recognised is None:
        describe(BaseSettings(model=source))  # raises InputError naming its kind
        raise InputError(f"{path.name} is not a base model", fix="give a checkpoint or a folder")
    family, _ = recognised
    places = family.checkpoint_weights(file.entries)
    opened = BaseWeights(
        source=source, path=path, family=family, tensors=_tensors(file, places), single=True
    )
    if places:
        return opened
    # A transformer's checkpoint names its layers as LoRA files do. Take the release that shares the most layer names
    # with the file. Its layer sizes then say which layers store their two halves in the opposite order.
    for release in range(len(released_layers(family.name))):
        places = max(places, _places(file, released_names(family.name, release)), key=len)
    opened = replace(opened, tensors=_tensors(file, places))
    return replace(opened, tensors=_tensors(file, _places(file, opened.names())))


def _places(file: Opened, names: LayerNames) -> dict[str, WeightPlace]:
    """Return the matrices of a file that are layers of `names`, by "component.module"."""
    places: dict[str, WeightPlace] = {}
    for tensor, info in file.entries.items():
        if tensor.endswith(WEIGHT) and len(info.shape) > 1:
            out = info.shape[0]
            layers = names.find(tensor.removesuffix(WEIGHT), size=(out, math.prod(info.shape[1:])))
            # In a base of another width, joined layers have the same shares of the rows.
            whole = (layers[-1].rows or (0, out))[1] if layers else 0
            if whole and not any(layer.rows[1] * out % whole for layer in layers if layer.rows):
                for layer in layers:
                    first, end = layer.rows or (0, 0)
                    rows = (first * out // whole, end * out // whole) if layer.rows else None
                    places[layer.key] = WeightPlace(tensor=tensor, rows=rows, swapped=layer.swapped)
    return places


def _tensors(file: Opened, places: Mapping[str, WeightPlace]) -> dict[str, WeightLocation]:
    """Return the weights at these places of a file, and the biases that lie beside them."""
    tensors: dict[str, WeightLocation] = {}
    for key, at in places.items():
        location = WeightLocation(file=file, at=at)
        if location.shape:
            tensors[f"{key}{WEIGHT}"] = location
        bias = f"{at.tensor.removesuffix('weight')}bias"
        if bias in file.entries:  # in the same rows as its weight where layers are joined
            tensors[f"{key}.bias"] = replace(location, at=replace(at, tensor=bias))
    return tensors


def _folder(facts: BaseFacts, stack: ExitStack) -> BaseWeights:
    family, layout = families.family(facts.family), facts.located
    tensors: dict[str, WeightLocation] = {}
    parts = family.parts(layout)
    # Adapters of others change networks that stand among the denoiser's tensors in files.
    changeable = {DENOISER, *(family.text.roles if family.text.trainable else family.text.inside)}
    for part in (DENOISER, "text_encoder"):
        for path in parts[part]:
            component = part if part == DENOISER else path.parent.name
            if path.suffix == SUFFIX and component in changeable:
                file = open_file(path, stack)
                for name, entry in file.entries.items():
                    if entry.dtype in SLOT_DTYPES:  # others are positions and counters
                        location = WeightLocation(file=file, at=WeightPlace(tensor=name))
                        tensors[f"{component}.{name.removeprefix(TEXT_MODEL)}"] = location
    source, folder = facts.source, layout.folder
    return BaseWeights(source=source, path=folder, family=family, tensors=tensors, single=False)


def open_file(path: Path, stack: ExitStack) -> Opened:
    """Open a file of a base until `stack` closes; raises InputError when it is not whole, or quantised."""
    try:
        file = stack.enter_context(open_checked(path))
    except InputError as error:
        raise InputError(error.found, fix=AGAIN) from None
    kind = unread_quantisation(path)
    scale = next(filter(is_beside_weight, file.entries), None)
    if kind or scale:  # a training reads some of these; these tools cannot write them
        raise InputError(
            f"{path.name} is quantised{f' {kind}' if kind else f': it has scales such as {scale}'}",
            fix="use the fp16, bf16 or fp32 version of this base model",
        )
    return file

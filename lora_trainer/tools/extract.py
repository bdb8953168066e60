"""`extract`: the difference of two base models of one family as a LoRA.

Input are two diffusers folders or checkpoints, output the best LoRA of a rank, or of the rank that an
energy needs, of every layer that differs. Two weights are in memory at a time. What a LoRA does not
reach (norms, biases, embeddings) is measured and said.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import Precision, Targets
from lora_trainer.costs.cost_table import adapter_shapes
from lora_trainer.families.base import DENOISER, FileFormat
from lora_trainer.lora.low_rank import Singular, seeded, truncated
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.formats import Asked
from lora_trainer.lora_file.write import contents_of
from lora_trainer.tools.adapter_writer import (
    ModuleSpool,
    module_spool,
    refuse_output,
    write_adapter,
)
from lora_trainer.tools.base_weights import BaseWeights, WeightLocation, open_base
from lora_trainer.tools.header_entries import extracted
from lora_trainer.tools.resize import Cut, ResizeLimits
from lora_trainer.tools.spelling import Spelling, asked_format, reader_notes

_FIRST_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What was written; `cuts` has each layer that differs, `energy` the share of all their energy kept.

    `unreached` is the share of the whole difference that lies in tensors this LoRA cannot change.
    """

    file: Path
    family: str
    format: FileFormat
    precision: Precision
    cuts: Mapping[str, Cut]
    energy: float
    unreached: float
    notes: tuple[str, ...]


def extract(
    tuned: str,
    base: str,
    *,
    output: Path,
    rank: int | None = None,
    energy: float | None = None,
    targets: Targets = "all",
    format: Asked = "auto",
    precision: Precision = "fp16",
    force: bool = False,
) -> Extracted:
    """Write `tuned` minus `base` as a LoRA: of `rank`, or of what `energy` needs, at most `rank` if both.

    Raises RequestError for limits that are none, InputError for models that are equal, quantised, of
    different families or sizes, and MachineError when the disk refuses; nothing is written then.
    """
    if rank is None and energy is None:
        raise RequestError("nothing says how much to keep", fix="give --rank, --energy or both")
    ResizeLimits(rank=rank, energy=energy).check()
    refuse_output(output, force=force)
    with ExitStack() as stack:
        spool = stack.enter_context(module_spool(output.parent))
        first, second = (stack.enter_context(open_base(source)) for source in (tuned, base))
        if first.family is not second.family:
            raise InputError(
                f"{tuned} is of family {first.family.name}, {base} of {second.family.name}",
                fix="give two models of one family",
            )
        family = second.family
        layers = _layers(first, second, targets)
        found = _Difference(tuned=first, base=second, rank=rank, energy=energy)
        found.take(layers, spool)
        if not found.cuts:
            raise InputError(
                f"{tuned} and {base} are the same in every layer that a LoRA changes",
                fix="give a model that was fine-tuned, and the one it started from",
            )
        contents = contents_of(spool)
        spelling = Spelling(
            family=family,
            format=asked_format(family, format, contents),
            precision=precision,
        )
        write_adapter(
            output,
            spool,
            spelling,
            entries=lambda summary: extracted(
                tuned,
                base,
                family=family,
                facts=second.facts(),
                title=output.stem,
                summary=summary,
            ),
            force=force,
        )
    return Extracted(
        file=output,
        family=family.name,
        format=spelling.format,
        precision=precision,
        cuts=found.cuts,
        energy=found.kept / found.reached if found.reached > 0 else 1.0,
        unreached=found.unreached / (found.unreached + found.reached),
        notes=(*_not_compared(first, second), *reader_notes(spelling.format, contents)),
    )


@dataclass(kw_only=True)
class _Difference:
    """Takes two bases apart, layer by layer; energies are squared norms of what differs.

    `reached` is the energy in the layers, `kept` what their cut updates have of it, `unreached` that in
    all other tensors that both bases have.
    """

    tuned: BaseWeights
    base: BaseWeights
    rank: int | None
    energy: float | None
    cuts: dict[str, Cut] = field(default_factory=dict)
    kept: float = 0.0
    reached: float = 0.0
    unreached: float = 0.0

    def take(self, layers: Sequence[str], spool: ModuleSpool) -> None:
        """Put the update of every layer that differs into `spool`, and measure the rest."""
        done = set(layers)
        for key in layers:
            difference = _difference(key, self.tuned.places[key], self.base.places[key])
            if difference.any():
                self._cut(key, difference, spool)
        for places, others in (
            (self.tuned.places, self.base.places),
            (self.tuned.rest, self.base.rest),
        ):
            for key in places.keys() & others.keys() - done:
                self.unreached += _energy(_difference(key, places[key], others[key]))

    def _cut(self, key: str, difference: Tensor, spool: ModuleSpool) -> None:
        found, rank = self._decomposed(key, difference)
        self.cuts[key] = Cut(
            old_rank=min(difference.flatten(1).shape), new_rank=rank, energy=found.kept(rank)
        )
        self.reached += found.energy
        self.kept += found.kept(rank) * found.energy
        spool.add(key, found.lora(rank))

    def _decomposed(self, key: str, difference: Tensor) -> tuple[Singular, int]:
        """Return as many singular values as are needed, and how many those are."""
        most = min(difference.flatten(1).shape)
        limit = most if self.rank is None else min(self.rank, most)
        if self.energy is None:
            return truncated(difference, rank=limit, generator=seeded(key)), limit
        rank = min(_FIRST_RANK, limit)
        while True:
            found = truncated(difference, rank=rank, generator=seeded(key))
            wanted = found.rank_for_energy(self.energy)
            if wanted is not None or rank >= limit:
                return found, min(wanted or limit, limit)
            rank = min(2 * rank, limit)


def _layers(tuned: BaseWeights, base: BaseWeights, targets: Targets) -> list[str]:
    """Return the layers that a LoRA of these targets changes, as "component.module".

    Text encoders are compared as far as both bases have them. Raises InputError for denoisers that
    have other layers than each other.
    """
    _refuse_other_layers(tuned, base)
    folder = next((each for each in (base, tuned) if not each.single), None)
    if folder is not None:
        names: Iterable[str] = adapter_shapes(base.family, folder.facts(), targets=targets)
    else:  # by the names alone: the configuration of checkpoints may not be on this machine
        layers = (split_key(key)[1] for key in base.places if _denoises(key))
        names = base.family.lora_targets(_skeleton(layers), targets)
    keys = [f"{DENOISER}.{name}" for name in names]
    for component, modules in base.family.text.layers.items():
        keys += [f"{component}.{name}" for name in modules]
    return [key for key in keys if key in base.places and key in tuned.places]


def _refuse_other_layers(tuned: BaseWeights, base: BaseWeights) -> None:
    for has, lacks in ((tuned, base), (base, tuned)):
        only = sorted(key for key in has.places.keys() - lacks.places.keys() if _denoises(key))
        if only:
            raise InputError(
                f"{has.source} has {len(only)} layers that {lacks.source} lacks, first {only[0]}",
                fix="give two models of one architecture; a pruned or distilled one has fewer layers",
            )


def _skeleton(names: Iterable[str]) -> nn.Module:
    """Return a network with layers of these names, and nothing in them."""
    root = nn.Module()
    for name in sorted(names):
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, nn.Linear(1, 1, device="meta"))
    return root


def _denoises(key: str) -> bool:
    return split_key(key)[0] == DENOISER


def _not_compared(tuned: BaseWeights, base: BaseWeights) -> tuple[str, ...]:
    """Return a note for each text encoder that only one of the bases has."""
    first, second = ({split_key(key)[0] for key in each.places} for each in (tuned, base))
    return tuple(
        f"{component} was not compared: only one of the models has it"
        for component in sorted(first ^ second)
    )


def _difference(key: str, tuned: WeightLocation, base: WeightLocation) -> Tensor:
    """Return tuned minus base, float32 in the shape of `base`.

    Where their dtypes differ, the finer one is rounded to the coarser first: what was never trained
    is then equal, and no noise of rounding is taken for a change. Raises InputError for other sizes.
    """
    shape, own = base.shape, tuned.shape
    if (own[:1], math.prod(own)) != (shape[:1], math.prod(shape)):
        raise InputError(
            f"{key} is {_sized(own)} in one model and {_sized(shape)} in the other",
            fix="give two models of one architecture",
        )
    first, second = tuned.weight(), base.weight()
    dtype = max(first.dtype, second.dtype, key=lambda each: torch.finfo(each).eps)
    found: Tensor = first.to(dtype).float().reshape(shape) - second.to(dtype).float()
    return found


def _sized(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _energy(difference: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2

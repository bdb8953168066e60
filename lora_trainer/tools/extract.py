"""`extract`: the difference of two base models of one family as a LoRA.

Input are two diffusers folders or checkpoints, output the best LoRA of a rank, or of the rank that an
energy needs, of every layer that differs. Two weights are in memory at a time. The part that a
LoRA does not reach (norms, biases, embeddings) is measured and said.
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
from lora_trainer.families.base import DENOISER
from lora_trainer.lora.low_rank import approximated
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.formats import FormatRequest
from lora_trainer.lora_file.write import contents_of
from lora_trainer.tools.adapter_writer import (
    WrittenAdapter,
    file_spec,
    refuse_output,
    write_adapter,
)
from lora_trainer.tools.base_weights import BaseWeights, WeightLocation, open_base
from lora_trainer.tools.header_entries import extracted
from lora_trainer.tools.resize import Cut, ResizeLimits
from lora_trainer.tools.spool import ModuleSpool, module_spool


@dataclass(frozen=True, kw_only=True)
class Extracted(WrittenAdapter):
    """The file that was written; `cuts` has each layer that differs, `energy` the share of their energy kept.

    `unreached` is the share of the whole difference that lies in tensors this LoRA cannot change.
    """

    cuts: Mapping[str, Cut]
    energy: float
    unreached: float


def extract(
    tuned: str,
    base: str,
    *,
    output: Path,
    rank: int | None = None,
    energy: float | None = None,
    targets: Targets = "all",
    format: FormatRequest = "auto",
    precision: Precision = "fp16",
    force: bool = False,
) -> Extracted:
    """Write `tuned` minus `base` as a LoRA: of `rank`, or of the rank that `energy` needs, at most `rank` if both.

    Raises RequestError for limits that are none, InputError for models that are equal, quantised, of
    different families or sizes, and MachineError when the disk refuses; nothing is written then.
    """
    if rank is None and energy is None:
        raise RequestError("nothing says how much to keep", fix="give --rank, --energy or both")
    limits = ResizeLimits(rank=rank, energy=energy)
    limits.check()
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
        compared = _Comparison(tuned=first, base=second, limits=limits)
        compared.extract(layers, spool)
        if not compared.cuts:
            raise InputError(
                f"{tuned} and {base} are the same in every layer that a LoRA changes",
                fix="give a model that was fine-tuned, and the one it started from",
            )
        spec, notes = file_spec(
            spool,
            contents_of(spool),
            family=family,
            format=format,
            precision=precision,
            default=precision,
        )
        write_adapter(
            output,
            spool,
            spec,
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
        format=spec.format,
        precision=precision,
        cuts=compared.cuts,
        energy=compared.kept_energy / compared.reached if compared.reached > 0 else 1.0,
        unreached=compared.unreached / (compared.unreached + compared.reached),
        notes=(*_not_compared(first, second), *notes),
    )


@dataclass(kw_only=True)
class _Comparison:
    """Two bases compared layer by layer; energies are squared Frobenius norms of differences.

    `reached` is the energy in the layers, `kept_energy` the part of it in their cut updates, `unreached` the
    energy in all other tensors that both bases have.
    """

    tuned: BaseWeights
    base: BaseWeights
    limits: ResizeLimits
    cuts: dict[str, Cut] = field(default_factory=dict)
    kept_energy: float = 0.0
    reached: float = 0.0
    unreached: float = 0.0

    def extract(self, layers: Sequence[str], spool: ModuleSpool) -> None:
        """Put the update of every layer that differs into `spool`, and measure the rest."""
        for key in layers:
            difference = _difference(key, self.tuned.places[key], self.base.places[key])
            if difference.any():
                self._cut(key, difference, spool)
        for tuned, base in (
            (self.tuned.places, self.base.places),
            (self.tuned.rest, self.base.rest),
        ):
            for key in tuned.keys() & base.keys() - set(layers):
                self.unreached += _energy(_difference(key, tuned[key], base[key]))

    def _cut(self, key: str, difference: Tensor, spool: ModuleSpool) -> None:
        limits = self.limits
        # The best update of a rank is the first singular values (Eckart and Young 1936); of large layers they
        # are computed by subspace iteration, as many as the limits need.
        decomposed = approximated(difference, enough=limits.rank_of, limit=limits.rank, seed=key)
        rank = limits.rank_of(decomposed)
        share = decomposed.kept(rank)
        old_rank = min(difference.flatten(1).shape)
        self.cuts[key] = Cut(old_rank=old_rank, new_rank=rank, energy=share)
        self.reached += decomposed.energy
        self.kept_energy += share * decomposed.energy
        spool.add(key, decomposed.lora(rank))


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

    Where their dtypes differ, the finer one is rounded to the coarser first, so that layers which were
    never trained are equal and no noise of rounding is taken for a change. Raises InputError for other sizes.
    """
    shape, tuned_shape = base.shape, tuned.shape
    if (tuned_shape[:1], math.prod(tuned_shape)) != (shape[:1], math.prod(shape)):
        raise InputError(
            f"{key} is {_sized(tuned_shape)} in one model and {_sized(shape)} in the other",
            fix="give two models of one architecture",
        )
    first, second = tuned.weight(), base.weight()
    dtype = max(first.dtype, second.dtype, key=lambda each: torch.finfo(each).eps)
    difference: Tensor = first.to(dtype).float().reshape(shape) - second.to(dtype).float()
    return difference


def _sized(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "a number"


def _energy(difference: Tensor) -> float:
    return float(torch.linalg.vector_norm(difference, dtype=torch.float64)) ** 2

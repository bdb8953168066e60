"""`resize`: an adapter cut to a lower rank, each module to its largest singular values.

Input is a file and how much to keep: a rank for all modules, or by module the rank that a share of the energy
or a ratio to the largest value needs. Output is a LoRA file and how much of the update was kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora.low_rank import (
    LowRankUpdate,
    NotLowRank,
    Singular,
    added,
    approximated,
    kind_name,
    product,
    singular,
)
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, needs_weight, update
from lora_trainer.tools.adapters import Weighted, WeightedSources, open_weighted
from lora_trainer.tools.base_weights import open_base
from lora_trainer.tools.convert import AdapterTarget, ToolResult, carried

Parts = Sequence[tuple[ModuleTensors, float]]
"""The modules of several adapters that change one layer, and the weight on the update of each."""
WeightOf = Callable[[str, ModuleTensors], Tensor]
"""Returns the base's weight of a layer for a module whose update depends on it; raises RequestError."""


@dataclass(frozen=True, kw_only=True)
class ResizeLimits:
    """How much of each module to keep: at most `rank`, and of these the ranks that `ratio` or `energy` needs.

    `ratio` keeps singular values of at least the largest divided by it (kohya's sv_ratio), `energy`
    the fewest whose squares add up to that share (kohya's sv_fro counts its root).
    """

    rank: int | None = None
    ratio: float | None = None
    energy: float | None = None

    def check(self) -> None:
        """Raise RequestError for limits that are none, or contradict each other."""
        if self.rank is None and self.ratio is None and self.energy is None:
            raise RequestError(
                "nothing says how much to keep", fix="give --rank, --ratio or --energy"
            )
        if self.ratio is not None and self.energy is not None:
            raise RequestError("--ratio and --energy are two answers", fix="give one of them")
        if self.rank is not None and self.rank < 1:
            raise RequestError(f"--rank {self.rank} is no rank", fix="give a number above 0")
        if self.ratio is not None and not (1 <= self.ratio < math.inf):
            raise RequestError(f"--ratio {self.ratio:g} is none", fix="give 1 or more, such as 10")
        if self.energy is not None and not (0 < self.energy <= 1):
            raise RequestError(
                f"--energy {self.energy:g} is no share", fix="give a number up to 1, such as 0.95"
            )

    def rank_of(self, decomposed: Singular) -> int:
        """Return the rank that a module gets."""
        most = len(decomposed.values)
        ranks = [most, self.rank or most]
        if self.ratio is not None:
            ranks.append(decomposed.rank_for_ratio(self.ratio))
        if self.energy is not None:
            ranks.append(decomposed.rank_for_energy(self.energy) or most)
        return min(ranks)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One module before and after; `energy` is the share of the squared norm of its update that was kept."""

    old_rank: int
    new_rank: int
    energy: float


@dataclass(kw_only=True)
class RankCutter:
    """Cuts updates to the ranks that the limits allow, one layer after the other.

    `modules` has the results, which are small beside the layers that they change.
    """

    limits: ResizeLimits
    modules: dict[str, ModuleTensors] = field(default_factory=dict)
    cuts: dict[str, Cut] = field(default_factory=dict)
    _kept: float = 0.0
    reached: float = 0.0
    """Energy of all updates so far, before they were cut."""

    @property
    def energy(self) -> float:
        """The share of the energy of all updates that was kept."""
        return self._kept / self.reached if self.reached > 0 else 1.0

    def text(self, whole: str) -> str:
        """Say how much of `whole` was kept, and in which layer least."""
        key, cut = min(self.cuts.items(), key=lambda item: item[1].energy)
        least = percent(cut.energy)
        rest = "" if least == percent(1.0) else f", least {least} in {key}"
        return f"kept {percent(self.energy)} of {whole}{rest}"

    def new_ranks(self) -> str:
        """Return the ranks of the results, smallest, largest and usual."""
        return ranks_text(cut.new_rank for cut in self.cuts.values())

    def values(self) -> dict[str, Any]:
        """Return what scripts are told: each layer's cut, and the kept share of all layers' squared norm."""
        cuts = {key: asdict(cut) for key, cut in self.cuts.items()}
        return {"cuts": cuts, "energy": self.energy}

    def cut_all(
        self, adapters: WeightedSources, total: AdapterTensors, *, weight_of: WeightOf, keeps: bool
    ) -> None:
        """Cut every layer's sum; `total` has those of norms, which have no rank.

        `keeps` leaves LoRAs of one file as they are that keep all of their values.
        """
        for key in adapters.layers:
            parts = adapters.modules(key)
            if all(module.kind == "norm" for module, _ in parts):
                self.modules[key] = total[key]
                continue
            decomposed = self.decompose(
                key, parts, kernel=adapters.sources[0].kernel(key), weight_of=weight_of
            )
            module = parts[0][0]
            is_whole = self.limits.rank_of(decomposed) >= min(module.rank, len(decomposed.values))
            if keeps and is_whole and module.kind == "lora" and not module.dora:
                self._count(key, module, decomposed, old_rank=module.rank, energy=1.0)
            else:
                self.cut(key, decomposed, old_rank=module.rank, parts=parts)

    def cut(self, key: str, decomposed: Singular, *, old_rank: int, parts: Parts = ()) -> None:
        """Keep the best LoRA of an update, with the biases of its `parts`."""
        rank = self.limits.rank_of(decomposed)
        module = with_bias(decomposed.lora(rank), parts)
        self._count(key, module, decomposed, old_rank=old_rank, energy=decomposed.kept(rank))

    def _count(
        self, key: str, module: ModuleTensors, decomposed: Singular, *, old_rank: int, energy: float
    ) -> None:
        self.modules[key] = module
        self.cuts[key] = Cut(old_rank=old_rank, new_rank=module.rank, energy=energy)
        self.reached += decomposed.energy
        self._kept += energy * decomposed.energy

    def decompose(
        self, key: str, parts: Parts, *, kernel: tuple[int, ...], weight_of: WeightOf
    ) -> Singular:
        """Return the singular values of a sum of updates: exactly of thin factors, else the largest."""
        if not any(needs_weight(module) for module, _ in parts):
            try:
                return singular(summed(key, parts, kernel=kernel))
            except NotLowRank:
                pass
        changes = [
            weight * update(module, weight_of(key, module) if needs_weight(module) else None)
            for module, weight in parts
        ]
        change = sum(changes[1:], changes[0])
        if change.dim() == 2 and kernel:
            change = change.reshape(change.shape[0], -1, *kernel)
        return approximated(change, enough=self.limits.rank_of, limit=self.limits.rank, seed=key)


def summed(key: str, parts: Parts, *, kernel: tuple[int, ...]) -> LowRankUpdate:
    """Return a sum of updates as thin factors; raises NotLowRank, and InputError where sizes differ."""
    updates = [(product(module, kernel=kernel), weight) for module, weight in parts]
    sizes = {(part.up.shape[0], part.down.shape[1]) for part, _ in updates}
    if len(sizes) > 1:
        raise InputError(
            f"the adapters were made for different base models: {key} is "
            + " and ".join(f"{out}x{fan_in}" for out, fan_in in sorted(sizes)),
            fix="merge adapters of the same base model",
        )
    return added(updates)


def with_bias(cut: ModuleTensors, parts: Parts) -> ModuleTensors:
    """Return a module with the weighted sum of the biases of the modules that it was made from."""
    biases = [part.tensors["bias"].float() * w for part, w in parts if "bias" in part.tensors]
    if not biases:
        return cut
    return replace(cut, tensors={**cut.tensors, "bias": torch.stack(biases).sum(0)})


def ranks_text(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    if ordered[0] == ordered[-1]:
        return str(ordered[0])
    return f"{ordered[0]} to {ordered[-1]} (median {median(ordered):g})"


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.4g} %"


def resize(
    file: Path, limits: ResizeLimits, target: AdapterTarget, *, base: str | None = None
) -> ToolResult:
    """Write `file` with lower ranks; format and precision are the file's own where they can be.

    Modules that keep all their values stay as they are, alpha included; all other kinds become LoRA,
    approximated by the largest singular values of their whole update, and norms stay. Raises
    RequestError where an update depends on weights and `base` is not named (DoRA, OFT, GLoRA, IA3), or
    for limits that are none, and InputError for a file that cannot be used; nothing is written then.
    """
    limits.check()
    target.check()
    with ExitStack() as stack:
        adapters = open_weighted([Weighted(file=file, weight=1.0)], stack, base=base)
        (source,) = adapters.sources
        cutter = RankCutter(limits=limits)
        cutter.cut_all(adapters, source, weight_of=_weight_of(base, stack), keeps=True)
        family = source.names.family
        for each in family.formats.written:
            if target.format == "auto" and each == source.format:
                target = replace(target, format=each)
        written = target.write(
            cutter.modules,
            family=family,
            default=source.precision,
            entries=lambda summary: carried(source.metadata, summary, resized=True),
        )
    facts = []
    if cutter.cuts:  # none where all modules are norms
        old_ranks = ranks_text(cut.old_rank for cut in cutter.cuts.values())
        facts = [f"rank {old_ranks} -> {cutter.new_ranks()}", cutter.text("the energy")]
    return written.with_more(*facts, **cutter.values())


def _weight_of(base: str | None, stack: ExitStack) -> WeightOf:
    """Return what reads a layer's weight from a base, which is opened when the first one is asked for."""
    open_weights = cache(lambda: stack.enter_context(open_base(str(base))))

    def weight(key: str, module: ModuleTensors) -> Tensor:
        if base is None:
            raise RequestError(
                f"{key} cannot be resized: what {kind_name(module)} changes depends on the base's weights",
                fix="name the base model it was made for with --base, a folder or a checkpoint",
            )
        places = open_weights().places
        if key not in places:
            raise RequestError(f"{base} has no weight of {key}", fix="name its own base")
        return places[key].weight()

    return weight

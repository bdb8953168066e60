"""Sums of adapters: `merge` adds several up, exactly or cut to a rank, `resize` cuts one.

Input are files with weights, output a file whose update is the weighted sum of theirs. Exactly: the factors side by
side, so that ranks add up, in fp32 where their own precision would round the weights. Cut: the best LoRA of a rank,
or of the rank that a share of the energy or a ratio to the largest singular value needs, and how much of the update
was kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.wording import public_text
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.low_rank import (
    LowRankUpdate,
    NotLowRank,
    Singular,
    approximated,
    kind_name,
    lora,
    product,
    singular,
)
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.base_layers import sized
from lora_trainer.lora_file.key_formats import SCALED, key_format
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY, made_for, stated_base
from lora_trainer.tools.adapters import (
    AdapterTarget,
    Parts,
    ToolResult,
    Weighted,
    WeightedSources,
    carried,
    notes_on_new_tokens,
    open_weighted,
)
from lora_trainer.tools.base_weights import open_base

_BAKE = "merge it into its base model with --into"
# Returns the base's weight of a layer for a module whose update depends on it; raises RequestError.
WeightOf = Callable[[str, ModuleTensors], Tensor]


def merge(
    inputs: Sequence[Weighted],
    target: AdapterTarget,
    *,
    rank: int | None = None,
    base: str | None = None,
) -> ToolResult:
    """Write the weighted sum of adapters; `rank` None: exactly. The precision is the widest of theirs by default.

    `base` is the model they were made for, where that is not the family's public release.

    Raises RequestError where no exact sum exists or the format cannot hold it, InputError for files
    that cannot be used or belong to different families; nothing is written then.
    """
    cutter = RankCutter(limits=RankLimits(rank=rank))
    if rank is not None:
        cutter.limits.check()
    target.check()
    with ExitStack() as stack:
        adapters = open_weighted(inputs, stack, base=base)
        first, *others = adapters.sources
        for other in others:
            if other.names.family is not first.names.family:
                raise InputError(
                    f"{first.contents.name} is for {first.names.family.name}, {other.contents.name} for "
                    f"{other.names.family.name}",
                    fix="merge adapters of one family",
                )
        if rank is not None:
            cutter.cut_all(adapters, weight_of=_weight_of(base, stack))
        # All entries that the files share, and the names of the files.
        headers = [source.contents.metadata for source in adapters.sources]
        common = dict(set.intersection(*(set(header.items()) for header in headers)))
        bases = {stated_base(header) for header in headers}
        if len(bases) == 1 and (made_with := bases.pop()) is not None:
            common.setdefault(SETTINGS_ENTRY, made_for(made_with))
        names = (public_text(Path(source.contents.name).stem) for source in adapters.sources)
        title = public_text(target.path.stem)
        precisions = {source.precision for source in adapters.sources}
        written = target.write(
            _Sum(adapters=adapters) if rank is None else cutter.modules,
            family=first.names.family,
            layers=first.names.layers[DENOISER],
            default=precisions.pop() if len(precisions) == 1 else "fp32",
            entries={
                **carried(common, resized=True),
                "ss_output_name": title,
                "modelspec.title": title,
                "modelspec.merged_from": ", ".join(names),
            },
            exact=rank is None,
        )
    energy = cutter.energy
    share = "the whole sum" if energy == 1 else f"{percent(energy)} of the sum's energy"
    return written.with_more(f"rank {written.values['rank']} holds {share}", energy=energy)


# ---- exact sums


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sum(Mapping[str, ModuleTensors]):
    """The weighted sum of adapters, made module by module when looked up."""

    adapters: WeightedSources

    def __iter__(self) -> Iterator[str]:
        return iter(self.adapters.layers)

    def __len__(self) -> int:
        return len(self.adapters.layers)

    def __getitem__(self, key: str) -> ModuleTensors:
        kernel = self.adapters.sources[0].kernel(key)
        return _exact_sum(key, self.adapters.modules(key), kernel=kernel)


def _exact_sum(key: str, parts: Parts, *, kernel: tuple[int, ...]) -> ModuleTensors:
    """Return a weighted sum of modules; raises RequestError where none is exact."""
    if len(parts) == 1:
        return _scaled(key, *parts[0])
    if all(module.kind in ("full", "norm") for module, _ in parts):
        return _with_sums(key, parts[0][0], parts, "difference", "bias")
    scale, units = 1.0, parts
    if all(module.kind == "lora" and not module.dora for module, _ in parts):
        scales = {module.scale * weight for module, weight in parts}
        if len(scales) == 1:  # nothing needs to be multiplied in, and rounded
            scale = scales.pop()
            units = [(replace(module, scale=1.0), 1.0) for module, _ in parts]
    try:
        total = _side_by_side(key, units, kernel=kernel)
    except NotLowRank as error:
        raise RequestError(f"{key} cannot be added up: {error}", fix=_BAKE) from None
    merged = lora(up=total.up, down=total.down, inputs=total.inputs, scale=scale)
    return _with_sums(key, merged, parts, "bias")


def _scaled(key: str, module: ModuleTensors, weight: float) -> ModuleTensors:
    """Return a module of one file with its weight on it; raises RequestError where that is not linear."""
    if weight == 1:
        return module
    if module.dora or module.kind in ("oft", "oft_in"):
        raise RequestError(
            f"{key} is {kind_name(module)}, whose update does not grow with its factors: weight {weight:g} cannot "
            "be written",
            fix=_BAKE,
        )
    names, scale = {"bias", "difference", "by_output", "by_input"}, module.scale
    if module.kind == "lokr" and {"w1", "w2"} <= module.tensors.keys():
        names.add("w1")  # readers ignore the strength of a LoKr whose factors are both whole
    elif module.kind in SCALED:
        scale *= weight
    changed = {
        name: module.tensors[name].float() * weight for name in names & module.tensors.keys()
    }
    return replace(module, tensors={**module.tensors, **changed}, scale=scale)


def _side_by_side(key: str, parts: Parts, *, kernel: tuple[int, ...]) -> LowRankUpdate:
    """Return a sum of updates as thin factors; raises NotLowRank, and InputError where sizes differ."""
    updates = [(product(module, kernel=kernel), weight) for module, weight in parts]
    _check_one_size(key, {(part.up.shape[0], part.down.shape[1]) for part, _ in updates})
    # U1 D1 + U2 D2 = [U1 U2] [D1; D2], so ranks add up.
    return LowRankUpdate(
        up=torch.cat([part.up * weight for part, weight in updates], dim=1),
        down=torch.cat([part.down for part, _ in updates], dim=0),
        inputs=max((part.inputs for part, _ in updates), key=len),
    )


def _check_one_size(key: str, sizes: set[tuple[int, int]]) -> None:
    if len(sizes) > 1:
        raise InputError(
            f"the adapters were made for different base models: {key} is "
            + " and ".join(map(sized, sorted(sizes))),
            fix="merge adapters of the same base model",
        )


def _with_sums(key: str, module: ModuleTensors, parts: Parts, *names: str) -> ModuleTensors:
    """Return a module with the weighted sums of these tensors, of those parts that have them.

    Raises InputError where sizes differ; a kernel of 1x1 may be there or not.
    """
    sums = dict[str, Tensor]()
    for part, weight in parts:
        for name in set(names) & part.tensors.keys():
            own = part.tensors[name].float() * weight
            total = sums.get(name, torch.zeros_like(own))
            _check_one_size(key, {(len(each), each[0].numel()) for each in (total, own)})
            sums[name] = total + own.reshape(total.shape)
    return replace(module, tensors={**module.tensors, **sums})


# ---- lower ranks


@dataclass(frozen=True, kw_only=True)
class RankLimits:
    """How many ranks of each module to keep."""

    rank: int | None = None
    """At most this many."""
    ratio: float | None = None
    """Keep singular values of at least the largest divided by this (kohya's sv_ratio)."""
    energy: float | None = None
    """Keep the fewest singular values whose squares add up to this share (kohya's sv_fro counts its root)."""

    def check(self, options: str = "--rank, --ratio or --energy") -> None:
        """Raise RequestError for limits that are none of the command's `options`, or contradict each other."""
        limits = {name: value for name, value in vars(self).items() if value is not None}
        if not limits:
            raise RequestError("no limit for the ranks is given", fix=f"give {options}")
        if {"ratio", "energy"} <= limits.keys():
            raise RequestError("--ratio and --energy cannot be combined", fix="give one of them")
        for name, value in limits.items():
            is_share = name == "energy"
            if not (0 < value <= 1 if is_share else 1 <= value < math.inf):
                allowed = "above 0 and up to 1, such as 0.95" if is_share else "from 1, such as 10"
                raise RequestError(
                    f"--{name} {value:g} is not allowed", fix=f"give a number {allowed}"
                )

    def rank_of(self, decomposed: Singular) -> int:
        """Return the rank that a module gets."""
        values = decomposed.values
        ranks = [len(values), self.rank or len(values)]
        if self.ratio is not None:
            ranks.append(max(1, int(((values >= values[0] / self.ratio) & (values > 0)).sum())))
        if self.energy is not None:
            # The first sum that is large enough; where none is, more values may be needed than there are.
            least = self.energy * decomposed.energy * (1 - 1e-12)
            ranks.append(int((values.square().cumsum(0) < least).sum()) + 1)
        return min(ranks)


@dataclass(kw_only=True)
class RankCutter:
    """Cuts updates to the ranks that the limits allow, one layer after the other."""

    limits: RankLimits
    modules: dict[str, ModuleTensors] = field(default_factory=dict)
    """The results, which are small compared with the layers that they change."""
    cuts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By layer: the ranks before and after, and the share of the squared norm of its update that was kept."""
    reached: float = 0.0
    """The energy of all updates so far, before they were cut."""
    _kept: float = 0.0

    @property
    def energy(self) -> float:
        """The share of the energy of all updates that was kept."""
        return self._kept / self.reached if self.reached > 0 else 1.0

    def text(self, whole: str) -> str:
        """Say how much of `whole` was kept, and in which layer least."""
        key, cut = min(self.cuts.items(), key=lambda item: item[1]["energy"])
        least = percent(cut["energy"])
        rest = "" if least == percent(1.0) else f", least {least} in {key}"
        return f"kept {percent(self.energy)} of {whole}{rest}"

    def ranks(self, which: str = "new_rank") -> str:
        """Return the ranks of the results, or before (`old_rank`): smallest, largest and usual."""
        ordered = sorted(cut[which] for cut in self.cuts.values())
        if ordered[0] == ordered[-1]:
            return str(ordered[0])
        return f"{ordered[0]} to {ordered[-1]} (median {median(ordered):g})"

    def cut_all(
        self, adapters: WeightedSources, *, weight_of: WeightOf, keeps: bool = False
    ) -> None:
        """Cut every layer's sum but those of norms, which have no rank.

        `keeps`: leave a LoRA from a single file unchanged if the cut would keep all of its values.
        """
        for key in adapters.layers:
            parts, kernel = adapters.modules(key), adapters.sources[0].kernel(key)
            if all(module.kind == "norm" for module, _ in parts):
                self.modules[key] = _exact_sum(key, parts, kernel=kernel)
                continue
            decomposed = self._decomposed(key, parts, kernel=kernel, weight_of=weight_of)
            keeps_all = keeps and parts[0][0].kind == "lora" and not parts[0][0].dora
            self.cut(key, decomposed, old_rank=parts[0][0].rank, parts=parts, keeps=keeps_all)

    def cut(
        self,
        key: str,
        decomposed: Singular,
        *,
        old_rank: int,
        parts: Parts = (),
        keeps: bool = False,
    ) -> None:
        """Keep the best LoRA of an update, with the biases of its `parts`, float32 and of scale 1.

        `keeps` leaves the only part as it is where all of its values are kept.
        """
        values, rank = decomposed.values, self.limits.rank_of(decomposed)
        if keeps and rank >= min(old_rank, len(values)):
            module, energy = parts[0][0], 1.0
        else:
            roots = values[:rank].sqrt()  # both factors get half of every value
            up, down = decomposed.left[:, :rank] * roots, roots[:, None] * decomposed.right[:rank]
            module = _with_sums(
                key, lora(up=up, down=down, inputs=decomposed.inputs), parts, "bias"
            )
            energy = 1.0  # of an update of zero
            if decomposed.energy > 0:
                energy = min(1.0, float(values[:rank].square().sum()) / decomposed.energy)
        self.modules[key] = module
        self.cuts[key] = {"old_rank": old_rank, "new_rank": module.rank, "energy": energy}
        self.reached += decomposed.energy
        self._kept += energy * decomposed.energy

    def _decomposed(
        self, key: str, parts: Parts, *, kernel: tuple[int, ...], weight_of: WeightOf
    ) -> Singular:
        """Return the singular values of a sum of updates: exactly of thin factors, else the largest."""
        if not any(module.needs_weight for module, _ in parts):
            try:
                return singular(_side_by_side(key, parts, kernel=kernel))
            except NotLowRank:
                pass
        changes = []
        for module, strength in parts:
            weight = weight_of(key, module) if module.needs_weight else None
            changed = strength * update(module, weight)
            if changed.dim() == 2 and kernel:  # some files have kernels flattened
                changed = changed.reshape(changed.shape[0], -1, *kernel)
            changes.append(changed)
        change = sum(changes[1:], changes[0])
        return approximated(change, enough=self.limits.rank_of, limit=self.limits.rank, seed=key)


def percent(share: float) -> str:
    """Return a share for people."""
    return f"{100 * share:.4g} %"


def resize(
    file: Path, limits: RankLimits, target: AdapterTarget, *, base: str | None = None
) -> ToolResult:
    """Write `file` with lower ranks; format and precision are the file's own where they can be.

    Modules that keep all their values stay as they are, alpha included; all other kinds become LoRA,
    approximated by the largest singular values of their whole update, and norms stay. Raises
    RequestError where an update depends on weights and `base` is not named (DoRA, OFT, GLoRA, IA3), or
    for limits that are none, and InputError for a file that cannot be used; nothing is written then.
    """
    limits.check()
    target.check()
    cutter = RankCutter(limits=limits)
    with ExitStack() as stack:
        adapters = open_weighted([(file, 1.0)], stack, base=base)
        (source,) = adapters.sources
        cutter.cut_all(adapters, weight_of=_weight_of(base, stack), keeps=True)
        family = source.names.family
        for each in family.formats.written:
            if target.format == "auto" and each == key_format(source.contents.parts):
                target = replace(target, format=each)
        written = target.write(
            cutter.modules,
            family=family,
            layers=source.names.layers[DENOISER],
            default=source.precision,
            entries=carried(source.contents.metadata, resized=True),
        )
    facts = []
    if cutter.cuts:  # none where all modules are norms
        ranks = f"rank {cutter.ranks('old_rank')} -> {cutter.ranks()}"
        facts = [ranks, cutter.text("the energy")]
    notes = notes_on_new_tokens(file, target.path, source.contents.metadata)
    return written.with_more(*facts, notes=notes, cuts=cutter.cuts, energy=cutter.energy)


def _weight_of(base: str | None, stack: ExitStack) -> WeightOf:
    """Return what reads a layer's weight from a base, which is opened when the first one is asked for."""
    open_weights = cache(lambda: stack.enter_context(open_base(str(base))))

    def weight(key: str, module: ModuleTensors) -> Tensor:
        if base is None:
            raise RequestError(
                f"{key} cannot become a LoRA: the change by {kind_name(module)} depends on the base's weights",
                fix="name the base model it was made for with --base, a folder or a checkpoint",
            )
        places = open_weights().places
        if key not in places:
            raise RequestError(f"{base} has no weight of {key}", fix="name its own base")
        return places[key].weight()

    return weight

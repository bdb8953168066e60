"""`resize`: an adapter cut to a lower rank, each module to its largest singular values.

Input is a file and how much to keep: a rank for all modules, or by module the rank that a share of the energy
or a ratio to the largest value needs. Output is a LoRA file and how much of the update was kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import Precision
from lora_trainer.lora.low_rank import (
    NotLowRank,
    Singular,
    approximated,
    kind_name,
    product,
    singular,
)
from lora_trainer.lora.tensors import ModuleTensors, needs_weight, update
from lora_trainer.lora_file.formats import FormatRequest
from lora_trainer.lora_file.write import contents_of
from lora_trainer.tools.adapter_writer import (
    WrittenAdapter,
    file_spec,
    refuse_output,
    write_adapter,
)
from lora_trainer.tools.adapters import AdapterSource, open_source
from lora_trainer.tools.base_weights import open_base
from lora_trainer.tools.header_entries import carried
from lora_trainer.tools.spool import ModuleSpool, module_spool


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
        limit = (
            len(decomposed.values) if self.rank is None else min(self.rank, len(decomposed.values))
        )
        if self.ratio is not None:
            limit = min(limit, decomposed.rank_for_ratio(self.ratio))
        if self.energy is not None:
            limit = min(limit, decomposed.rank_for_energy(self.energy) or limit)
        return limit


@dataclass(frozen=True, kw_only=True)
class Cut:
    """One module before and after; `energy` is the share of the squared norm of its update that was kept."""

    old_rank: int
    new_rank: int
    energy: float


@dataclass(frozen=True, kw_only=True)
class Resized(WrittenAdapter):
    """The file that was written; `energy` is the kept share of the squared norm of all updates together."""

    cuts: Mapping[str, Cut]
    energy: float


def resize(
    file: Path,
    limits: ResizeLimits,
    *,
    output: Path,
    format: FormatRequest = "auto",
    precision: Precision | None = None,
    base: str | None = None,
    force: bool = False,
) -> Resized:
    """Write `file` with lower ranks; format and precision are the file's own where they can be.

    Modules that keep all their values stay as they are, alpha included; all other kinds become LoRA,
    approximated by the largest singular values of their whole update, and norms stay. Raises
    RequestError where an update depends on weights and `base` is not named (DoRA, OFT, GLoRA, IA3), or
    for limits that are none, and InputError for a file that cannot be used; nothing is written then.
    """
    limits.check()
    refuse_output(output, force=force)
    with open_source(file, base=base) as source, module_spool(output.parent) as spool:
        cuts, energy = _cut(source, spool, limits, base=base)
        contents = contents_of(spool)
        spec, notes = file_spec(
            spool,
            contents,
            family=source.family,
            format=_format(source, format),
            precision=precision,
            default=source.precision,
        )
        write_adapter(
            output,
            spool,
            spec,
            entries=lambda summary: carried(source.metadata, summary, resized=True),
            force=force,
        )
    return Resized(
        file=output,
        family=source.family.name,
        format=spec.format,
        precision=spec.precision,
        cuts=cuts,
        energy=energy,
        notes=notes,
    )


def _cut(
    source: AdapterSource, spool: ModuleSpool, limits: ResizeLimits, *, base: str | None
) -> tuple[dict[str, Cut], float]:
    """Put every module, cut, into `spool`; return the cut of each, and the share of all energy kept."""
    cuts: dict[str, Cut] = {}
    kept_energy = whole = 0.0
    with ExitStack() as stack:
        open_weights = cache(lambda: stack.enter_context(open_base(str(base))))

        def base_weight(key: str, module: ModuleTensors) -> Tensor:
            if base is None:
                raise RequestError(
                    f"{key} cannot be resized: what {kind_name(module)} changes depends on the base's weights",
                    fix="name the base model it was made for with --base, a folder or a checkpoint",
                )
            places = open_weights().places
            if key not in places:
                raise RequestError(f"{base} has no weight of {key}", fix="name its own base")
            return places[key].weight()

        for key, module in source.items():
            if module.kind == "norm":  # a vector has no rank
                spool.add(key, module)
                continue
            decomposed = _singular(
                key, module, kernel=source.kernel(key), limits=limits, base_weight=base_weight
            )
            rank = limits.rank_of(decomposed)
            unchanged = module.kind == "lora" and not module.dora
            unchanged = unchanged and rank >= min(module.rank, len(decomposed.values))
            spool.add(
                key, module if unchanged else with_bias(decomposed.lora(rank), [(module, 1.0)])
            )
            new_rank = module.rank if unchanged else rank
            share = 1.0 if unchanged else decomposed.kept(rank)
            cuts[key] = Cut(old_rank=module.rank, new_rank=new_rank, energy=share)
            whole += decomposed.energy
            kept_energy += share * decomposed.energy
    return cuts, kept_energy / whole if whole > 0 else 1.0


def with_bias(cut: ModuleTensors, parts: Sequence[tuple[ModuleTensors, float]]) -> ModuleTensors:
    """Return a module with the weighted sum of the biases of the modules that it was made from."""
    biases = [part.tensors["bias"].float() * w for part, w in parts if "bias" in part.tensors]
    if not biases:
        return cut
    return replace(cut, tensors={**cut.tensors, "bias": torch.stack(biases).sum(0)})


def _singular(
    key: str,
    module: ModuleTensors,
    *,
    kernel: tuple[int, ...],
    limits: ResizeLimits,
    base_weight: Callable[[str, ModuleTensors], Tensor],
) -> Singular:
    """Return the singular values of a module's update, those of a LoRA exactly, else the largest."""
    if needs_weight(module):
        change = update(module, base_weight(key, module))
    else:
        try:
            return singular(product(module, kernel=kernel))
        except NotLowRank:
            change = update(module)
            if change.dim() == 2 and kernel:
                change = change.reshape(change.shape[0], -1, *kernel)
    return approximated(change, enough=limits.rank_of, limit=limits.rank, seed=key)


def _format(source: AdapterSource, format: FormatRequest) -> FormatRequest:
    """Return the file's own format where none is named and the family writes it."""
    if format != "auto":
        return format
    return next((each for each in source.family.formats.written if each == source.format), format)

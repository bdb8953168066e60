"""`merge`: several adapters of one family into one, exactly or cut to a rank.

Input are files with weights, output a file whose update is the weighted sum of theirs. Exactly: the
factors side by side, so that ranks add up, in fp32 where their own precision would round the
weights. Cut: the best LoRA of a rank, by singular values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import torch

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora.low_rank import NotLowRank, kind_name, lora
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.read_tensors import OpenAdapter
from lora_trainer.tools.adapters import Weighted, WeightedSources, open_weighted
from lora_trainer.tools.convert import AdapterTarget, ToolResult, merged
from lora_trainer.tools.resize import (
    Parts,
    RankCutter,
    ResizeLimits,
    percent,
    summed,
    with_bias,
)

_BAKE = "merge it into its base model with --into"


def parse_weighted(text: str) -> Weighted:
    """Read FILE or FILE:WEIGHT; raises RequestError for a weight that is no number or 0."""
    name, colon, number = text.rpartition(":")
    if not colon or Path(text).exists():
        return Weighted(file=Path(text), weight=1.0)
    try:
        weight = float(number)
    except ValueError:
        return Weighted(file=Path(text), weight=1.0)  # a colon of the path
    if not math.isfinite(weight) or weight == 0:
        raise RequestError(f"{text} has weight {number}", fix="give a number other than 0")
    return Weighted(file=Path(name), weight=weight)


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
    if rank is not None and rank < 1:
        raise RequestError(f"--rank {rank} is no rank", fix="give a whole number above 0")
    target.check()
    with ExitStack() as stack:
        adapters = open_weighted(inputs, stack, base=base)
        sources = adapters.sources
        _refuse_other_families(sources)
        total = _Sum(adapters=adapters)
        energy = 1.0
        modules: Mapping[str, ModuleTensors] = total
        if rank is not None:
            cutter = RankCutter(limits=ResizeLimits(rank=rank))
            cutter.cut_all(adapters, total, weight_of=_no_weight, keeps=False)
            energy, modules = cutter.energy, cutter.modules
        files = [(Path(source.name).stem, source.metadata) for source in sources]
        precisions = {source.precision for source in sources}
        written = target.write(
            modules,
            family=sources[0].names.family,
            default=precisions.pop() if len(precisions) == 1 else "fp32",
            entries=lambda summary: merged(files, summary, title=target.path.stem),
            exact=rank is None,
        )
    share = "the whole sum" if energy == 1 else f"{percent(energy)} of the sum's energy"
    return written.with_more(f"rank {written.values['rank']} holds {share}", energy=energy)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Sum(Mapping[str, ModuleTensors]):
    """The weighted sum of adapters, made module by module when looked up."""

    adapters: WeightedSources

    def __iter__(self) -> Iterator[str]:
        return iter(self.adapters.layers)

    def __len__(self) -> int:
        return len(self.adapters.layers)

    def __getitem__(self, key: str) -> ModuleTensors:
        parts = self.adapters.modules(key)
        if len(parts) == 1:
            return _scaled(key, *parts[0])
        if all(module.kind in ("full", "norm") for module, _ in parts):
            return _differences(key, parts)
        # U1 D1 + U2 D2 = [U1 U2] [D1; D2], so ranks add up.
        if all(module.kind == "lora" and not module.dora for module, _ in parts):
            scales = {module.scale * weight for module, weight in parts}
            if len(scales) == 1:  # nothing needs to be multiplied in, and rounded
                units = [(replace(module, scale=1.0), 1.0) for module, _ in parts]
                return with_bias(self._exactly(key, units, scale=scales.pop()), parts)
        return with_bias(self._exactly(key, parts), parts)

    def _exactly(self, key: str, parts: Parts, *, scale: float = 1.0) -> ModuleTensors:
        """Return the sum as factors side by side; raises RequestError where a part is no product of factors."""
        try:
            total = summed(key, parts, kernel=self.adapters.sources[0].kernel(key))
        except NotLowRank as error:
            raise _no_sum(key, str(error)) from None
        return lora(up=total.up, down=total.down, inputs=total.inputs, scale=scale)


def _no_sum(key: str, reason: str) -> RequestError:
    return RequestError(f"{key} cannot be added up: {reason}", fix=_BAKE)


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
    tensors = module.tensors
    if "bias" in tensors:
        module = replace(module, tensors={**tensors, "bias": tensors["bias"].float() * weight})
    if module.kind in ("full", "norm", "ia3"):
        names = {"difference", "by_output", "by_input"} & tensors.keys()
        changed = {name: tensors[name].float() * weight for name in names}
        return replace(module, tensors={**module.tensors, **changed})
    if module.kind == "lokr" and {"w1", "w2"} <= module.tensors.keys():
        # Readers ignore the strength of a LoKr whose factors are both whole.
        return replace(
            module, tensors={**module.tensors, "w1": module.tensors["w1"].float() * weight}
        )
    return replace(module, scale=module.scale * weight)


def _differences(key: str, parts: Parts) -> ModuleTensors:
    """Return the sum of whole differences, of weights or of norms."""
    scaled = [_scaled(key, module, weight) for module, weight in parts]
    kinds = {module.kind for module in scaled}
    names = {name for module in scaled for name in module.tensors}
    return replace(
        scaled[0],
        kind=kinds.pop(),
        tensors={
            name: torch.stack(
                [module.tensors[name].float() for module in scaled if name in module.tensors]
            ).sum(0)
            for name in sorted(names)
        },
    )


def _no_weight(key: str, module: ModuleTensors) -> NoReturn:
    raise _no_sum(key, f"what {kind_name(module)} changes depends on the base's weights")


def _refuse_other_families(sources: Sequence[OpenAdapter]) -> None:
    first, *others = sources
    for other in others:
        if other.names.family is not first.names.family:
            raise InputError(
                f"{first.name} is for {first.names.family.name}, {other.name} for {other.names.family.name}",
                fix="merge adapters of one family",
            )

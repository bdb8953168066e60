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

import torch

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import Precision
from lora_trainer.lora.low_rank import (
    LowRankUpdate,
    NotLowRank,
    Singular,
    added,
    approximated,
    kind_name,
    lora,
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
from lora_trainer.tools.adapters import AdapterSource, Weighted, WeightedSources, open_weighted
from lora_trainer.tools.header_entries import merged
from lora_trainer.tools.resize import with_bias
from lora_trainer.tools.spool import ModuleSpool, module_spool

_BAKE = "merge it into its base model with --into"


@dataclass(frozen=True, kw_only=True)
class Merged(WrittenAdapter):
    """The file that was written; `energy` is the share of the sum's squared norm that a lower rank kept."""

    modules: int
    rank: int
    energy: float


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
    *,
    output: Path,
    rank: int | None = None,
    format: FormatRequest = "auto",
    precision: Precision | None = None,
    base: str | None = None,
    force: bool = False,
) -> Merged:
    """Write the weighted sum of adapters; `rank` None: exactly. `precision` None: the widest of theirs.

    `base` is the model they were made for, where that is not the family's public release.

    Raises RequestError where no exact sum exists or the format cannot hold it, InputError for files
    that cannot be used or belong to different families; nothing is written then.
    """
    if rank is not None and rank < 1:
        raise RequestError(f"--rank {rank} is no rank", fix="give a whole number above 0")
    refuse_output(output, force=force)
    with ExitStack() as stack:
        adapters = open_weighted(inputs, stack, base=base)
        sources = adapters.sources
        _refuse_other_families(sources)
        total = _Sum(adapters=adapters)
        energy = 1.0
        modules: Mapping[str, ModuleTensors] = total
        if rank is not None:
            spool = stack.enter_context(module_spool(output.parent))
            energy = _cut(total, spool, rank=rank)
            modules = spool
        contents = contents_of(modules)
        spec, notes = file_spec(
            modules,
            contents,
            family=sources[0].family,
            format=format,
            precision=precision,
            default=_widest(sources),
            exact=rank is None,
        )
        files = [(source.path.stem, source.metadata) for source in sources]
        summary = write_adapter(
            output,
            modules,
            spec,
            entries=lambda summary: merged(files, summary, title=output.stem),
            force=force,
        )
    return Merged(
        file=output,
        family=spec.family.name,
        format=spec.format,
        precision=spec.precision,
        modules=summary.modules,
        rank=summary.rank,
        energy=energy,
        notes=notes,
    )


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
                return with_bias(_as_lora(self.products(key, units), scale=scales.pop()), parts)
        return with_bias(_as_lora(self.products(key, parts)), parts)

    def products(self, key: str, parts: Sequence[tuple[ModuleTensors, float]]) -> LowRankUpdate:
        """Return the sum as thin factors; raises RequestError where a part is none, or sizes differ."""
        kernel = self.adapters.sources[0].kernel(key)
        try:
            updates = [(product(module, kernel=kernel), weight) for module, weight in parts]
        except NotLowRank as error:
            raise RequestError(f"{key} cannot be added up: {error}", fix=_BAKE) from None
        sizes = {(part.up.shape[0], part.down.shape[1]) for part, _ in updates}
        if len(sizes) > 1:
            raise InputError(
                f"the adapters were made for different base models: {key} is "
                + " and ".join(f"{out}x{fan_in}" for out, fan_in in sorted(sizes)),
                fix="merge adapters of the same base model",
            )
        return added(updates)


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


def _differences(key: str, parts: Sequence[tuple[ModuleTensors, float]]) -> ModuleTensors:
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


def _as_lora(total: LowRankUpdate, scale: float = 1.0) -> ModuleTensors:
    return lora(up=total.up, down=total.down, inputs=total.inputs, scale=scale)


def _cut(total: _Sum, spool: ModuleSpool, *, rank: int) -> float:
    """Put the best LoRA of a rank of every module into `spool`; return the share of energy kept."""
    kept_energy = whole = 0.0
    for key in total:
        parts = total.adapters.modules(key)
        if all(module.kind == "norm" for module, _ in parts):  # a vector has no rank
            spool.add(key, total[key])
            continue
        decomposed = _singular(total, key, parts, rank=rank)
        whole += decomposed.energy
        kept_energy += decomposed.kept(rank) * decomposed.energy
        spool.add(key, with_bias(decomposed.lora(min(rank, len(decomposed.values))), parts))
    return kept_energy / whole if whole > 0 else 1.0


def _singular(
    total: _Sum, key: str, parts: Sequence[tuple[ModuleTensors, float]], *, rank: int
) -> Singular:
    """Return the singular values of a sum: exactly of thin factors, else the largest of the whole matrix."""
    try:
        return singular(total.products(key, parts))
    except RequestError:
        if any(needs_weight(module) for module, _ in parts):
            raise
        kernel = total.adapters.sources[0].kernel(key)
        changes = [weight * update(module) for module, weight in parts]
        shape = (changes[0].shape[0], -1, *kernel)
        change = sum(changes[1:], changes[0]).reshape(shape if kernel else changes[0].shape)
        return approximated(change, enough=lambda _: rank, limit=rank, seed=key)


def _refuse_other_families(sources: Sequence[AdapterSource]) -> None:
    first, *others = sources
    for other in others:
        if other.family is not first.family:
            raise InputError(
                f"{first.path.name} is for {first.family.name}, {other.path.name} for {other.family.name}",
                fix="merge adapters of one family",
            )


def _widest(sources: Sequence[AdapterSource]) -> Precision:
    precisions = {source.precision for source in sources}
    return precisions.pop() if len(precisions) == 1 else "fp32"

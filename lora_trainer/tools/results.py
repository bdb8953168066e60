"""The results of the tools as lines for people and as plain values for scripts.

Input are the results of `convert`, `merge`, `merge --into`, `resize` and `extract`. Nothing is computed
here but medians and percentages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from statistics import median
from typing import Any

from lora_trainer.tools.adapter_writer import WrittenAdapter
from lora_trainer.tools.extract import Extracted
from lora_trainer.tools.merge import Merged
from lora_trainer.tools.merge_base import MergedBase
from lora_trainer.tools.resize import Cut, Resized

Result = WrittenAdapter | MergedBase


def result_json(result: Result) -> dict[str, Any]:
    """Return a result's fields by name; `cuts` by "component.module"."""
    return {**asdict(result), "file": str(result.file)}


def result_text(result: Result) -> str:
    """Return the file that was written, its size and its losses, a line each, notes last."""
    lines = [f"wrote {result.file}", *_facts(result)]
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])


def _facts(result: Result) -> Iterable[str]:
    if isinstance(result, MergedBase):
        yield f"a {result.family} base model, {result.layers} layers changed"
        return
    yield f"{result.family}, {result.format} format, {result.precision}, {result.modules} modules"
    if isinstance(result, Merged):
        share = (
            "the whole sum"
            if result.energy == 1
            else f"{_share(result.energy)} of the sum's energy"
        )
        yield f"rank {result.rank} holds {share}"
    elif isinstance(result, Resized):
        yield f"rank {_ranks(cut.old_rank for cut in result.cuts.values())} -> {_cuts(result.cuts)}"
        yield f"kept {_share(result.energy)} of the energy{_least(result.cuts)}"
    elif isinstance(result, Extracted):
        yield f"rank {_cuts(result.cuts)}"
        yield f"kept {_share(result.energy)} of these layers' energy{_least(result.cuts)}"
        yield (
            f"{_share(result.unreached)} of the whole difference is out of reach: other layers, norms, "
            "biases, embeddings"
        )


def _cuts(cuts: Mapping[str, Cut]) -> str:
    return _ranks(cut.new_rank for cut in cuts.values())


def _ranks(ranks: Iterable[int]) -> str:
    ordered = sorted(ranks)
    if ordered[0] == ordered[-1]:
        return str(ordered[0])
    return f"{ordered[0]} to {ordered[-1]} (median {median(ordered):g})"


def _least(cuts: Mapping[str, Cut]) -> str:
    """Name the layer that lost most."""
    key, cut = min(cuts.items(), key=lambda item: item[1].energy)
    share = _share(cut.energy)
    return "" if share == _share(1.0) else f", least {share} in {key}"


def _share(value: float) -> str:
    return f"{100 * value:.4g} %"

"""Writing an adapter that need not fit into memory: every module checked as a reader would see it.

Input are modules that are read when looked up, output a file in the names of kohya, of diffusers or
of ComfyUI, with the same bytes that an export of the live adapter would have. The file appears when
it is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save

from lora_trainer.errors import InputError, RequestError, TrainingStopped
from lora_trainer.output.adapter_names import ALPHA
from lora_trainer.output.adapter_strength import FOLDED
from lora_trainer.output.adapter_tensors import AdapterTensors, ModuleTensors
from lora_trainer.output.export import common_alpha
from lora_trainer.output.fidelity import matches
from lora_trainer.output.stream_file import ordered, refuse_existing, write_tensors
from lora_trainer.tools.spelling import Spelling
from lora_trainer.tools.spool import TensorSpool, tensor_spool

SUFFIX = ".safetensors"
_BUG = "report this as a bug; nothing was written"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a written adapter is, for its header: `rank` and `alpha` are those of most modules."""

    modules: int
    rank: int
    alpha: float
    kinds: frozenset[str]
    dora: bool


def refuse_output(path: Path, *, force: bool) -> None:
    """Raise RequestError where an adapter cannot be written, before any work is done."""
    if path.suffix != SUFFIX:
        raise RequestError(
            f"--output {path.name} does not end with {SUFFIX}", fix=f"call it {path.stem}{SUFFIX}"
        )
    refuse_existing(path, force=force)


def write_adapter(
    path: Path,
    modules: AdapterTensors,
    spelling: Spelling,
    *,
    entries: Callable[[Summary], Mapping[str, str]],
    force: bool,
) -> Summary:
    """Write an adapter; `entries` gives the header's entries but the hashes.

    Modules are looked up twice, one at a time. Raises RequestError for an output that exists, unless
    `force`, and for values beyond the precision, and MachineError when the disk refuses.
    """
    refuse_output(path, force=force)
    lora_alpha = common_alpha(modules.values())
    ranks: Counter[int] = Counter()
    alphas: Counter[float | None] = Counter()
    kinds, dora = set[str](), False
    with tensor_spool(path.parent) as spool:
        for key, module in modules.items():
            alphas[_add(spool, key, module, spelling, lora_alpha=lora_alpha)] += 1
            ranks[module.rank] += 1
            kinds.add(module.kind)
            dora |= module.dora
        rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
        summary = Summary(
            modules=len(modules),
            rank=rank,
            alpha=float(rank) if alpha is None else alpha,
            kinds=frozenset(kinds),
            dora=dora,
        )
        slots = ordered(spool.slots.values())
        strength = {FOLDED: "multiplied in"} if None in alphas else {}
        write_tensors(
            path,
            slots,
            (spool.read(slot.name) for slot in slots),
            metadata={**entries(summary), **strength},
            force=force,
        )
    return summary


def _add(
    spool: TensorSpool, key: str, module: ModuleTensors, spelling: Spelling, *, lora_alpha: float
) -> float | None:
    """Spool one module once it reads back right; return the alpha it states, None: multiplied in."""
    named = spelling.tensors(key, module, lora_alpha=lora_alpha)
    try:
        (match,) = matches(
            save(named), {key: module}, family=spelling.family, precision=spelling.precision
        )
    except TrainingStopped as error:
        raise InputError(error.found, fix=_BUG) from None
    if not match.explained:
        raise InputError(f"{key} would change by {match.relative_error:.1e} when written", fix=_BUG)
    for name, tensor in named.items():
        spool.add(name, tensor)
    return next((float(tensor) for name, tensor in named.items() if name.endswith(ALPHA)), None)

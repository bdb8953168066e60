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

import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.config import Precision
from lora_trainer.errors import InputError, RequestError, TrainingStopped
from lora_trainer.families.base import Family, FileFormat
from lora_trainer.output.adapter_names import ALPHA
from lora_trainer.output.adapter_strength import FOLDED
from lora_trainer.output.adapter_tensors import AdapterTensors, ModuleTensors
from lora_trainer.output.export import common_alpha, file_tensors
from lora_trainer.output.fidelity import matches
from lora_trainer.output.stream_file import ordered, refuse_existing, write_tensors
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


@dataclass(frozen=True, kw_only=True)
class Spelling:
    """How a file spells an adapter."""

    family: Family
    format: FileFormat
    precision: Precision

    def tensors(self, key: str, module: ModuleTensors, *, lora_alpha: float) -> dict[str, Tensor]:
        """Return the file's tensors of one module by name; raises RequestError for values beyond the precision."""
        try:
            return dict(
                file_tensors(
                    module,
                    key=key,
                    family=self.family,
                    format=self.format,
                    precision=self.precision,
                    lora_alpha=lora_alpha,
                )
            )
        except TrainingStopped as error:
            raise RequestError(error.found, fix="write it with --precision fp32") from None

    def exact(self, modules: AdapterTensors) -> bool:
        """Say whether this precision holds every value as fp32 would."""
        alpha = common_alpha(modules.values())
        whole = Spelling(family=self.family, format=self.format, precision="fp32")
        return all(
            self._same(key, module, whole=whole, lora_alpha=alpha)
            for key, module in modules.items()
        )

    def _same(self, key: str, module: ModuleTensors, *, whole: Spelling, lora_alpha: float) -> bool:
        try:
            found = self.tensors(key, module, lora_alpha=lora_alpha)
        except RequestError:
            return False
        wanted = whole.tensors(key, module, lora_alpha=lora_alpha)
        return all(torch.equal(found[name].float(), wanted[name]) for name in wanted)


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
    alpha = common_alpha(modules.values())
    ranks: Counter[int] = Counter()
    kinds, dora, folded = set[str](), False, False
    with tensor_spool(path.parent) as spool:
        for key, module in modules.items():
            folded |= _add(spool, key, module, spelling, lora_alpha=alpha)
            ranks[module.rank] += 1
            kinds.add(module.kind)
            dora |= module.dora
        rank = ranks.most_common(1)[0][0]
        summary = Summary(
            modules=len(modules),
            rank=rank,
            alpha=float(rank) if folded else alpha,
            kinds=frozenset(kinds),
            dora=dora,
        )
        slots = ordered(spool.slots.values())
        strength = {FOLDED: "multiplied in"} if folded else {}
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
) -> bool:
    """Spool one module once it reads back right; return whether its strength is multiplied in."""
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
    return not any(name.endswith(ALPHA) for name in named)

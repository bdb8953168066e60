"""Writing an adapter that need not fit into memory: its format and precision, every module checked.

Input are modules that are read when looked up, output a file in the names of kohya, of diffusers or
of ComfyUI, with the same bytes that an export of the live adapter would have. The file appears when
it is whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.common.errors import InputError, RequestError, TrainingStopped
from lora_trainer.config.declare import Precision
from lora_trainer.families.base import Family, FileFormat
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.formats import AdapterContents, FormatRequest, format_for, format_notes
from lora_trainer.lora_file.names import ALPHA
from lora_trainer.lora_file.stream import ordered, refuse_existing, write_tensors
from lora_trainer.lora_file.strength import FOLDED
from lora_trainer.lora_file.verify import check_written
from lora_trainer.lora_file.write import common_alpha, contents_of, file_tensors
from lora_trainer.tools.spool import TensorSpool, tensor_spool

SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class WrittenAdapter:
    """The file that a tool wrote; `rank` is that of most modules.

    `notes` are for the user, such as the losses that readers will have.
    """

    file: Path
    family: str
    format: FileFormat
    precision: Precision
    modules: int
    rank: int
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The facts about an adapter that its header states: `rank` and `alpha` are those of most modules."""

    rank: int
    alpha: float
    contents: AdapterContents


@dataclass(frozen=True, kw_only=True)
class _FileSpec:
    """The file to write: whose layers it has, in which key names and which precision."""

    family: Family
    format: FileFormat
    precision: Precision

    def tensors(self, key: str, module: ModuleTensors, *, lora_alpha: float) -> dict[str, Tensor]:
        """Return the file's tensors of one module by name; raises RequestError for values beyond the precision."""
        try:
            return file_tensors(
                module,
                key=key,
                family=self.family,
                format=self.format,
                precision=self.precision,
                lora_alpha=lora_alpha,
            )
        except TrainingStopped as error:
            raise RequestError(error.found, fix="write it with --precision fp32") from None

    def exact(self, modules: AdapterTensors, *, lora_alpha: float) -> bool:
        """Say whether this precision holds every value as fp32 would."""
        fp32 = replace(self, precision="fp32")
        for key, module in modules.items():
            try:
                rounded = self.tensors(key, module, lora_alpha=lora_alpha)
            except RequestError:
                return False
            exact = fp32.tensors(key, module, lora_alpha=lora_alpha)
            if not all(torch.equal(rounded[name].float(), exact[name]) for name in exact):
                return False
        return True


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
    *,
    family: Family,
    format: FormatRequest,
    precision: Precision | None,
    default: Precision,
    entries: Callable[[Summary], Mapping[str, str]],
    exact: bool = False,
    force: bool,
) -> WrittenAdapter:
    """Write an adapter; `entries` gives the header's entries but the hashes.

    Without `precision` it is `default`; with `exact` it is fp32 instead where `default` would round, and
    a note says so. Modules are looked up several times, one at a time. Raises RequestError with the reason
    where the format cannot hold the adapter, for values beyond the precision and for an output that exists,
    unless `force`, and MachineError when the disk refuses.
    """
    contents = contents_of(modules)
    try:
        format = format_for(family, format, contents)
    except RequestError as error:
        raise RequestError(_as_option(error.found), fix=_as_option(error.fix)) from None
    notes = [_as_option(note) for note in format_notes(format, contents)]
    lora_alpha = common_alpha(modules.values())
    spec = _FileSpec(family=family, format=format, precision=precision or default)
    rounds = exact and precision is None and default != "fp32"
    if rounds and not spec.exact(modules, lora_alpha=lora_alpha):
        spec = replace(spec, precision="fp32")
        notes.insert(
            0, f"written in fp32, as {default} would round it; --precision {default} rounds"
        )
    ranks: Counter[int] = Counter()
    alphas: Counter[float | None] = Counter()
    with tensor_spool(path.parent) as spool:
        for key, module in modules.items():
            alphas[_add(spool, key, module, spec, lora_alpha=lora_alpha)] += 1
            ranks[module.rank] += 1
        rank, alpha = ranks.most_common(1)[0][0], alphas.most_common(1)[0][0]
        summary = Summary(
            rank=rank, alpha=float(rank) if alpha is None else alpha, contents=contents
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
    return WrittenAdapter(
        file=path,
        family=family.name,
        format=format,
        precision=spec.precision,
        modules=len(modules),
        rank=rank,
        notes=tuple(notes),
    )


def _as_option(text: str) -> str:
    plain = text.replace("--set output.format=", "output.format=")
    return plain.replace("output.format=", "--format ")


def _add(
    spool: TensorSpool, key: str, module: ModuleTensors, spec: _FileSpec, *, lora_alpha: float
) -> float | None:
    """Spool one module once it reads back right; return the alpha it states, None: multiplied in."""
    tensors = spec.tensors(key, module, lora_alpha=lora_alpha)
    try:
        check_written(save(tensors), {key: module}, family=spec.family, precision=spec.precision)
    except TrainingStopped as error:
        raise InputError(error.found, fix="report this as a bug; nothing was written") from None
    for name, tensor in tensors.items():
        spool.add(name, tensor)
    return next((float(tensor) for name, tensor in tensors.items() if name.endswith(ALPHA)), None)

"""`extract`: the difference of two base models of one family as a LoRA.

Input are two diffusers folders or checkpoints, output the best LoRA of a rank, or of the rank that an
energy needs, of every layer that differs. Two weights are in memory at a time. What a LoRA does not
reach (norms, biases, embeddings) is measured and said.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.config import BaseSettings, Precision
from lora_trainer.errors import InputError, RequestError
from lora_trainer.families.base import DENOISER, BaseFacts, Family, FileFormat
from lora_trainer.families.costs import Targets
from lora_trainer.formats import Asked
from lora_trainer.model.load import describe
from lora_trainer.output.adapter_tensors import split_key
from lora_trainer.output.export import contents_of
from lora_trainer.tools.adapter_writer import Spelling, refuse_output, write_adapter
from lora_trainer.tools.base_weights import BaseWeights, open_base
from lora_trainer.tools.convert import asked_format
from lora_trainer.tools.header_entries import extracted
from lora_trainer.tools.low_rank import Singular, truncated
from lora_trainer.tools.resize import Cut
from lora_trainer.tools.spool import ModuleSpool, module_spool

_FIRST_RANK = 16


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """What was written; `cuts` has each layer that differs, `energy` the share of all their energy kept.

    `unreached` is the share of the whole difference that lies in tensors no LoRA changes.
    """

    file: Path
    family: str
    format: FileFormat
    precision: Precision
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
    format: Asked = "auto",
    precision: Precision = "fp16",
    force: bool = False,
) -> Extracted:
    """Write `tuned` minus `base` as a LoRA: of `rank`, or of what `energy` needs, at most `rank` if both.

    Raises RequestError for limits that are none, InputError for models that are equal, of different
    families or sizes, and MachineError when the disk refuses; nothing is written then.
    """
    _check(rank, energy)
    refuse_output(output, force=force)
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_base(source)) for source in (tuned, base))
        if first.family is not second.family:
            raise InputError(
                f"{tuned} is of family {first.family.name}, {base} of {second.family.name}",
                fix="give two models of one family",
            )
        family = second.family
        spool = stack.enter_context(module_spool(output.parent))
        layers = _layers(second, targets)
        found = _Difference(tuned=first, base=second, rank=rank, energy=energy)
        found.take(layers, spool)
        if not found.cuts:
            raise InputError(
                f"{tuned} and {base} are the same in every layer that a LoRA changes",
                fix="give a model that was fine-tuned, and the one it started from",
            )
        spelling = Spelling(
            family=family,
            format=asked_format(family, format, contents_of(spool)),
            precision=precision,
        )
        write_adapter(
            output,
            spool,
            spelling,
            entries=lambda summary: extracted(
                tuned,
                base,
                family=family,
                facts=_facts(second),
                title=output.stem,
                summary=summary,
            ),
            force=force,
        )
    return Extracted(
        file=output,
        family=family.name,
        format=spelling.format,
        precision=precision,
        cuts=found.cuts,
        energy=found.kept / found.reached if found.reached > 0 else 1.0,
        unreached=found.unreached / (found.unreached + found.reached),
    )

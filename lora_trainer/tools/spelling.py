"""How a tool spells the adapter it writes: key format and precision, chosen with the reasons said.

Input is what was asked for and what the adapter holds, output a Spelling and notes for the user.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.common.errors import RequestError, TrainingStopped
from lora_trainer.config.config import Precision
from lora_trainer.families.base import Family, FileFormat
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.formats import AdapterContents, Asked, format_for, format_notes
from lora_trainer.lora_file.write import common_alpha, file_tensors


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


def without_rounding(
    modules: AdapterTensors,
    *,
    family: Family,
    format: FileFormat,
    asked: Precision | None,
    own: Precision,
) -> tuple[Spelling, tuple[str, ...]]:
    """Return the spelling in the precision asked for, else in `own` if that holds every value, else fp32.

    The notes say why it is fp32.
    """
    spelling = Spelling(family=family, format=format, precision=asked or own)
    if asked is not None or own == "fp32" or spelling.exact(modules):
        return spelling, ()
    note = f"written in fp32, as {own} would round it; --precision {own} rounds"
    return Spelling(family=family, format=format, precision="fp32"), (note,)


def asked_format(family: Family, asked: Asked, contents: AdapterContents) -> FileFormat:
    """Return the format as `formats.format_for` does, with the tools' own option in its error."""
    try:
        return format_for(family, asked, contents)
    except RequestError as error:
        raise RequestError(_as_option(error.found), fix=_as_option(error.fix)) from None


def reader_notes(format: FileFormat, contents: AdapterContents) -> tuple[str, ...]:
    """Return what readers of such a file will miss, as `formats.format_notes` does."""
    return tuple(_as_option(note) for note in format_notes(format, contents))


def _as_option(text: str) -> str:
    plain = text.replace("--set output.format=", "output.format=")
    return plain.replace("output.format=", "--format ")

"""`convert`: an adapter of any trainer in the key names of kohya, of diffusers or of ComfyUI.

Input is a file, output one with the same updates in other names. Where the new format states no
strength, it is multiplied into the tensors, in fp32 if their own precision would round it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.config import Precision
from lora_trainer.errors import RequestError
from lora_trainer.families.base import Family, FileFormat
from lora_trainer.formats import Asked, Contents, format_for, format_notes
from lora_trainer.tools.adapter_writer import SUFFIX, Spelling, refuse_output, write_adapter
from lora_trainer.tools.adapters import CheckedModules, open_source
from lora_trainer.tools.header_entries import carried


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What was written; `notes` say what readers of the format will miss, and why fp32 if not asked for."""

    file: Path
    family: str
    format: FileFormat
    precision: Precision
    modules: int
    notes: tuple[str, ...]


def convert(
    file: Path,
    *,
    format: FileFormat,
    output: Path | None = None,
    precision: Precision | None = None,
    base: str | None = None,
    force: bool = False,
) -> Converted:
    """Write `file` in another format, beside it by default; `precision` is the file's own by default.

    Raises RequestError with the reason where the format cannot hold the adapter, InputError for a file
    that cannot be used and MachineError when the disk refuses; nothing is written then.
    """
    output = file.with_name(f"{file.stem}-{format}{SUFFIX}") if output is None else output
    refuse_output(output, force=force)
    with open_source(file, base=base) as source:
        chosen = asked_format(source.family, format, source.contents)
        notes = format_notes(chosen, source.contents)
        modules = CheckedModules(source)
        spelling = Spelling(
            family=source.family, format=chosen, precision=precision or source.precision
        )
        if precision is None and spelling.precision != "fp32" and not spelling.exact(modules):
            notes += (f"written in fp32, as {spelling.precision} would round it",)
            spelling = Spelling(family=source.family, format=chosen, precision="fp32")
        summary = write_adapter(
            output,
            modules,
            spelling,
            entries=lambda summary: carried(source.metadata, summary, resized=False),
            force=force,
        )
    return Converted(
        file=output,
        family=source.family.name,
        format=chosen,
        precision=spelling.precision,
        modules=summary.modules,
        notes=notes,
    )


def asked_format(family: Family, asked: Asked, contents: Contents) -> FileFormat:
    """Return the format as `formats.format_for` does, with the tools' own option in its error."""
    try:
        return format_for(family, asked, contents)
    except RequestError as error:
        found, fix = (
            text.replace("--set output.format=", "--format ").replace("output.format=", "--format ")
            for text in (error.found, error.fix)
        )
        raise RequestError(found, fix=fix) from None

"""`convert`: an adapter of any trainer in the key names of kohya, of diffusers or of ComfyUI.

Input is a file, output one with the same updates in other names. Where the new format states no
strength, it is multiplied into the tensors, in fp32 if their own precision would round it.
"""

from __future__ import annotations

from pathlib import Path

from lora_trainer.config.declare import Precision
from lora_trainer.families.base import FileFormat
from lora_trainer.lora_file.header import file_of
from lora_trainer.tools.adapter_writer import SUFFIX, WrittenAdapter, refuse_output, write_adapter
from lora_trainer.tools.adapters import open_source
from lora_trainer.tools.header_entries import carried


def convert(
    file: Path,
    *,
    format: FileFormat,
    output: Path | None = None,
    precision: Precision | None = None,
    base: str | None = None,
    force: bool = False,
) -> WrittenAdapter:
    """Write `file` in another format, beside it by default; `precision` is the file's own by default.

    Raises RequestError with the reason where the format cannot hold the adapter, InputError for a file
    that cannot be used and MachineError when the disk refuses; nothing is written then.
    """
    file = file_of(file)
    output = file.with_name(f"{file.stem}-{format}{SUFFIX}") if output is None else output
    refuse_output(output, force=force)
    with open_source(file, base=base) as source:
        return write_adapter(
            output,
            source,
            family=source.names.family,
            format=format,
            precision=precision,
            default=source.precision,
            entries=lambda summary: carried(source.metadata, summary, resized=False),
            exact=True,
            force=force,
        )

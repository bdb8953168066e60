"""The command `import`: converts settings files of other trainers. torch is not imported."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from lora_trainer.cli.options import Json, Reply
from lora_trainer.common.errors import RequestError


def import_settings(
    file: Path,
    /,
    *,
    output: Annotated[
        Path | None, Parameter(help="settings file to write, .toml or .json [default: print TOML]")
    ] = None,
    force: Annotated[bool, Parameter(negative="", help="replace an existing output")] = False,
    json: Json = False,
) -> Reply:
    """Turn another trainer's settings file into a lora-train settings file; reports every key."""
    from lora_trainer.common.files import write_atomic
    from lora_trainer.importing.reading import import_file
    from lora_trainer.importing.writing import report, settings_json, settings_toml

    writers = {".toml": settings_toml, ".json": settings_json}
    if output is not None and output.suffix.lower() not in writers:
        raise RequestError(f"{output} is no settings file", fix="name it .toml or .json")
    if output is not None and output.exists() and not force:
        raise RequestError(f"{output} exists", fix="choose another --output, or add --force")
    imported = import_file(file)
    if output is not None:
        write_atomic(output, writers[output.suffix.lower()](imported).encode())
    if json:
        return imported.to_json()
    return settings_toml(imported) if output is None else f"{report(imported)}\nwrote {output}"

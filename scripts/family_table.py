"""Makes the tables of the families in docs/models.md and docs/formats.md, from family.toml and what a family states."""

from __future__ import annotations

from pathlib import Path

from lora_trainer import families
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.releases import released_layers
from lora_trainer.families.base.tables import head
from lora_trainer.families.base.traits import FileFormat
from scripts.marked_tables import with_table

DOCS = Path(__file__).resolve().parents[1] / "docs"
PAGE, FORMATS_PAGE = DOCS / "models.md", DOCS / "formats.md"
FORMATS: tuple[FileFormat, ...] = ("kohya", "diffusers", "comfyui")


def family_table() -> str:
    """Return the table of the families and their base models as Markdown."""
    lines = ["| family | base models |", "|---|---|"]
    for name in families.NAMES:
        lines.append(f"| {head(name)['name']} | {head(name)['bases']} |")
    return "\n".join(lines) + "\n"


def format_table() -> str:
    """Return the table of the key formats, each with the name of one layer in it, as Markdown."""
    lines = [
        f"| family | {' | '.join(f'`{each}`' for each in FORMATS)} | `auto` |",
        "|---|---|---|---|---|",
    ]
    for name in families.NAMES:
        family = families.family(name)
        cells = (_cell(family, format) for format in FORMATS)
        lines.append(f"| {name} | {' | '.join(cells)} | {family.formats.written[0]} |")
    return "\n".join(lines) + "\n"


def _cell(family: Family, format: FileFormat) -> str:
    """Return the name of a query layer in a format, or why the format is refused."""
    formats = family.formats
    if format in formats.refused:
        return f"refused: {formats.refused[format]}"
    layers = released_layers(family.name)[0]
    refiners = family.traits.refiners or (" ",)
    layer = next(each for each in layers if each.endswith("to_q") and not each.startswith(refiners))
    if format not in formats.original:
        return f"`{family.lora_key_name(format, DENOISER, layer)}`"
    own = family.layer_names(layers).layers
    spelt = next((each for each, parts in own.items() if layer in parts), layer)
    joined = ", q, k and v as one layer" if len(own.get(spelt, ())) > 1 else ""
    return f"`{family.lora_key_name(format, DENOISER, spelt)}`{joined}"


def with_family_table(page: str) -> str:
    """Return the text of docs/models.md with a new table between its markers."""
    return with_table(page, "families", family_table())


def with_format_table(page: str) -> str:
    """Return the text of docs/formats.md with a new table between its markers."""
    return with_table(page, "formats", format_table())

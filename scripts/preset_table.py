"""Write tables from presets/*.json: those of docs/presets.md, and that of views in docs/captions.md.

`python -m scripts.preset_table`.

One row for each tier and priority, resolved as a run would resolve it; one column for each setting
that is not the same in all rows. tests/scripts/test_tables.py fails when the page holds other tables.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lora_trainer.config import PRIORITIES, Priority
from lora_trainer.config.config import flatten, setting_keys
from lora_trainer.config.layers import TIERS, AskedFor, load_presets, preset_families, resolve
from lora_trainer.families import detect
from lora_trainer.families.base.tables import head
from lora_trainer.families.files.locate import EMBEDDED_FOLDER
from scripts.marked_tables import with_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "presets.md"
CAPTIONS_PAGE = PAGE.with_name("captions.md")


def preset_tables() -> str:
    """Return the table of every family that has presets, as Markdown."""
    return "\n".join(_table(family) for family in preset_families())


def with_preset_tables(page: str) -> str:
    """Return the text of docs/presets.md with new tables between its two markers."""
    return with_table(page, "presets", preset_tables())


def views_of_families() -> Iterator[tuple[str, Sequence[int]]]:
    """Yield families with the same `train.views` on a GPU, by priority; the most usual views come last."""
    names: dict[tuple[int, ...], list[str]] = {}
    for family in preset_families():
        names.setdefault(_views(family, "10-12"), []).append(head(family)["name"])
    usual = max(names, key=lambda views: len(names[views]))
    for views, found in names.items():
        if views != usual:
            yield ", ".join(found), views
    yield "all other families", usual


def with_view_table(page: str) -> str:
    """Return the text of docs/captions.md with a new table of views between its two markers."""
    rows = [
        *views_of_families(),
        ("the built-in miniature base", _views(detect(EMBEDDED_FOLDER).name, "cpu")),
    ]
    lines = [
        _line(["family", *(f"`{priority}`" for priority in PRIORITIES)]),
        _line(["---", *("---:" for _ in PRIORITIES)]),
        *(_line([name, *(f"{count} views" for count in views)]) for name, views in rows),
    ]
    return with_table(page, "views", "\n".join(lines) + "\n")


def _views(family: str, tier: str) -> tuple[int, ...]:
    return tuple(_settings(family, tier, priority)["train.views"] for priority in PRIORITIES)


def _table(family: str) -> str:
    presets = load_presets(family)
    rows = [(tier, priority) for tier in TIERS for priority in PRIORITIES]
    settings = {row: _settings(family, *row) for row in rows if not presets.unsupported(*row)}
    layers = (presets.tiers, presets.priorities, presets.cells, {"base": presets.base})
    preset = {key for layer in layers for values in layer.values() for key in values}
    keys = [key for key in setting_keys() if key in preset]
    shown = {key: {row: _shown(values[key]) for row, values in settings.items()} for key in keys}
    varying = [key for key in keys if len(set(shown[key].values())) > 1]
    same = [f"`{key}` {min(shown[key].values())}" for key in keys if key not in varying]
    lines = [
        f"**{presets.title}** (`presets/{family}.json`)",
        "",
        _line(["GB", "priority", *(f"`{key}`" for key in varying)]),
        _line(["---", "---", *("---:" for _ in varying)]),
    ]
    for row in rows:
        values = [shown[key][row] for key in varying] if row in settings else ["unsupported"]
        lines.append(_line([*row, *values]))
    for cell in (row for row in rows if row not in settings):
        lines += ["", f"{'/'.join(cell)} is unsupported: {presets.unsupported(*cell)}."]
    return "\n".join([*lines, "", f"In all rows: {', '.join(same)}.", ""])


def _settings(family: str, tier: str, priority: Priority) -> Mapping[str, Any]:
    resolved = resolve(AskedFor(), family=family, tier=tier, priority=priority)
    return flatten(resolved.config)


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    return value if isinstance(value, str) else json.dumps(value)


def _line(values: Iterable[str]) -> str:
    return f"| {' | '.join(values)} |"


def main() -> None:
    """Rewrite the tables in docs/presets.md and docs/captions.md."""
    for page, new in ((PAGE, with_preset_tables), (CAPTIONS_PAGE, with_view_table)):
        page.write_text(new(page.read_text(encoding="utf-8")), encoding="utf-8")
        sys.stderr.write(f"wrote the preset table of {page.name}\n")


if __name__ == "__main__":
    main()

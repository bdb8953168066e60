"""Makes everything that is made: `python -m scripts.make [--check] [FAMILY ...]`.

Shapes of layers, traced costs and replayed plans of the releases, the tables of README.md and docs/, the schema of
the presets. Only what is old is made again. Most takes seconds; costs take minutes a release (half an hour for a
U-Net), a replayed plan one or two. With `--check` nothing is written: each old file is named, and the exit code
is 1 if there is one.

Costs are old when a release has none or `VERSION` of scripts/write_cost_tables.py was raised, not when the code that
is traced has changed: a digest of it would change with every line of a family, a layer or a library's release, and
each time hours of traces would give equal numbers. tests/families/test_cost_table.py traces points of three releases
anew, a U-Net among them, and fails where they cost something else. A change that costs in other families alone is
noticed by nothing: raise `VERSION` with it.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer import families
from lora_trainer.common.files import json_bytes
from lora_trainer.families.base.tables import head, made_file, made_tables
from scripts import (
    allocator_table,
    family_table,
    model_table,
    plan_tables,
    preset_table,
    release_table,
    row_tables,
    timestep_table,
    write_cost_tables,
    write_layer_tables,
    write_schema,
)
from scripts.made_tables import write_made

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, kw_only=True)
class Page:
    """A committed file, and its new text by the text that it has; made in seconds."""

    file: Path
    new: Callable[[str], str]


# In the order in which they are made: plans follow from the presets, and the front page shows them.
PAGES: Sequence[Page] = (
    Page(
        file=write_schema.SCHEMA,
        new=lambda text: json_bytes(write_schema.preset_schema()).decode("utf-8"),
    ),
    Page(file=family_table.PAGE, new=family_table.with_family_table),
    Page(file=family_table.FORMATS_PAGE, new=family_table.with_format_table),
    Page(file=preset_table.PAGE, new=preset_table.with_preset_tables),
    Page(file=preset_table.CAPTIONS_PAGE, new=preset_table.with_view_table),
    Page(file=row_tables.OBJECTIVE_PAGE, new=row_tables.with_loss_table),
    Page(file=row_tables.OPTIMIZERS_PAGE, new=row_tables.with_optimizer_table),
    Page(file=timestep_table.PAGE, new=timestep_table.with_timestep_table),
    Page(file=plan_tables.PAGE, new=lambda text: plan_tables.page().rstrip() + "\n"),
    Page(file=model_table.PAGE, new=model_table.with_model_tables),
    Page(file=release_table.PAGE, new=release_table.with_release_table),
)


def old_packages(names: Sequence[str], *, write: bool) -> list[str]:
    """Return the `__init__.py` of families that are missing, and write them if asked."""
    old = []
    for name in names:
        file = made_file(name).with_name("__init__.py")
        if not file.is_file():
            old.append(file.relative_to(ROOT).as_posix())
            if write:
                title = head(name)["name"]
                file.write_text(
                    f'"""The family of {title}, and of what is made from it."""\n', encoding="utf-8"
                )
    return old


def old_pages(pages: Sequence[Page] = PAGES, *, write: bool) -> list[str]:
    """Return the names of the files that are old, and write them anew if asked."""
    old = []
    for page in pages:
        text = page.file.read_text(encoding="utf-8")
        if (new := page.new(text)) != text:
            old.append(page.file.relative_to(ROOT).as_posix())
            if write:
                page.file.write_text(new, encoding="utf-8")
    return old


def old_layers(names: Sequence[str], *, write: bool) -> list[str]:
    """Return the tables.json whose layers are not those of the networks, and write them anew if asked."""
    old = []
    for name in names:
        rows = json.loads(json.dumps(write_layer_tables.layer_rows(families.family(name))))
        if rows != made_tables(name).get("layers"):
            old.append(f"{made_file(name).relative_to(ROOT).as_posix()} (layers)")
            if write:
                write_made(name, layers=rows)
    return old


def old_costs(names: Sequence[str], *, write: bool) -> list[str]:
    """Return the tables.json that lack the costs of a release, and trace them if asked."""
    old = []
    for name in names:
        family = families.family(name)
        missing = write_cost_tables.missing(family)
        file = made_file(name).relative_to(ROOT).as_posix()
        old += [f"{file} (costs of {source})" for source in missing]
        if write and missing:
            write_cost_tables.trace_missing(family)
    return old


def old_replays(names: Sequence[str], *, write: bool) -> list[str]:
    """Return the plans that were not replayed as they are now, and replay them if asked."""
    stale = [str(cell) for cell in allocator_table.stale_cells(names)]
    if write and stale:
        allocator_table.replay(names)
    return [f"docs/allocator.json ({cell})" for cell in stale]


def main() -> None:
    """Make what is old, or name it."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("families", nargs="*", help="only the tables of these families")
    options.add_argument(
        "--check", action="store_true", help="write nothing; exit code 1 if a file is old"
    )
    asked = options.parse_args()
    names, write = asked.families or families.NAMES, not asked.check
    old: list[str] = []
    # Plans follow from layers and costs, so these come first.
    for made in (old_packages, old_layers, old_costs, old_replays):
        old += made(names, write=write)
    old += old_pages(write=write)
    for name in old:
        sys.stdout.write(f"{'old' if asked.check else 'made'}: {name}\n")
    if asked.check and old:
        sys.exit("run python -m scripts.make")


if __name__ == "__main__":
    main()

"""Write the table of releases in docs/models.md: licence, size, assistant, the smallest GPU at the base's own size.

`python -m scripts.release_table`. What is published is in the family.toml of each family; which GPU is enough is read
from the table of docs/plans.md, which scripts/plan_tables.py makes. tests/scripts/test_tables.py fails when the page
holds another table.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lora_trainer import families
from lora_trainer.config import PRIORITIES
from lora_trainer.families.base.facts import BaseFacts
from scripts import plan_tables
from scripts.marked_tables import with_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "models.md"
MARK = "releases"
NOT_STATED = "its owner's own"
# Whether a company may use a model for its work, by `Licence.companies`.
COMPANIES = {"free": "yes", "conditions": "under conditions", "no": "no"}


def release_table() -> str:
    """Return the table as Markdown; releases whose networks are equal need the same GPU."""
    own_size = f"own size on, GiB ({', '.join(PRIORITIES)})"
    lines = [
        f"| release | parameters | download | licence | company work | what it allows | assistant | {own_size} |",
        "|---|---:|---:|---|---|---|---|---|",
    ]
    planned_as = {plan_tables.network_of(source): source for source in plan_tables.releases()}
    hours = _cells(plan_tables.PAGE.read_text(encoding="utf-8"))
    for name in families.NAMES:
        family = families.family(name)
        for source in (release.ids[0] for release in family.published):
            facts = family.releases[source]
            row = hours[planned_as[plan_tables.network_of(source)].partition("/")[2]]
            lines.append(f"| {' | '.join((*_stated(source, facts), _enough(row, facts)))} |")
    return "\n".join(lines) + "\n"


def _stated(source: str, facts: BaseFacts) -> tuple[str, ...]:
    release, licence = facts.release, facts.release.licence
    gate = "; to be accepted on the Hub" if licence and licence.is_gated else ""
    return (
        source,
        f"{sum(release.parameters.values()) / 1e9:.1f} B",
        f"{release.download_bytes / 1e9:.0f} GB",
        licence.name + gate if licence else NOT_STATED,
        COMPANIES[licence.companies] if licence else "",
        licence.allows if licence else "",
        release.assistant.id if release.assistant else "",
    )


def _enough(row: Mapping[tuple[str, str], int], facts: BaseFacts) -> str:
    """Return for each priority the smallest GPU on which a night is enough at the base's own size, in GiB."""
    found = []
    for priority in PRIORITIES:
        cards = [
            str(size)
            for card, size in plan_tables.CARDS.items()
            if row[card, priority] >= facts.resolution_px
        ]
        found.append(cards[0] if cards else "none")
    return ", ".join(found)


def _cells(page: str) -> dict[str, dict[tuple[str, str], int]]:
    """Return the size of the images, in px, by release and by (GPU, priority), from the table of hours."""
    columns = [(card, priority) for card in plan_tables.CARDS for priority in PRIORITIES]
    rows = {}
    for line in page.partition("| hours, px |")[2].partition("\n\n")[0].splitlines()[2:]:
        name, *cells = (cell.strip() for cell in line.strip("| ").split("|"))
        sizes = (int(cell.partition(", ")[2]) for cell in cells)
        rows[name] = dict(zip(columns, sizes, strict=True))
    return rows


def with_release_table(page: str) -> str:
    """Return the text of docs/models.md with a new table between its two markers."""
    return with_table(page, MARK, release_table())


if __name__ == "__main__":
    PAGE.write_text(with_release_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

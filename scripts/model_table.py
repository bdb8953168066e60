"""Write the tables of models in README.md from what the planner finds: `python -m scripts.model_table`.

One row for each public release that is computed otherwise than the others: for three reference GPUs
(scripts/plan_tables.py) how long a balanced run of 20 images takes, and at which image size. The first
screen has the rows of the releases that most people ask for, under the names that they use.
tests/scripts/test_tables.py fails when the page holds another table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from lora_trainer.config.declare import settled
from lora_trainer.families import known_base
from scripts.marked_tables import with_table
from scripts.plan_tables import CARDS, planned, releases
from scripts.release_table import COMPANIES, NOT_STATED

PAGE = Path(__file__).resolve().parents[1] / "README.md"
MODELS, TIMES = "models", "times"
"""The pairs of markers between which the tables stand: all releases, and those of the first screen."""
FIRST_SCREEN = {
    "stabilityai/stable-diffusion-xl-base-1.0": "SDXL, Illustrious, Pony, NoobAI",
    "black-forest-labs/FLUX.1-dev": "FLUX.1-dev",
    "Tongyi-MAI/Z-Image": "Z-Image",
    "Qwen/Qwen-Image": "Qwen-Image",
}


def model_table(names: Mapping[str, str], *, has_licences: bool) -> str:
    """Return the table of releases {source: name in the table} as Markdown."""
    licences, rule = (
        ("licence | company work | download | ", "---|---|---:|") if has_licences else ("", "")
    )
    lines = [
        f"| model | {licences}steps | {' | '.join(CARDS)} |",
        f"|---|{rule}---:|{'---:|' * len(CARDS)}",
    ]
    for source, name in names.items():
        plans = [planned(source, card) for card in CARDS]
        cells = [
            f"{plan.run_time.seconds / 3600:.1f} h, {plan.config.data.resolution} px"
            for plan in plans
        ]
        steps = " to ".join(
            f"{n:,}" for n in sorted({settled(p.config.train.steps) for p in plans})
        )
        terms = [*_terms(source)] if has_licences else []
        lines.append(f"| {' | '.join((name, *terms, steps, *cells))} |")
    return "\n".join(lines) + "\n"


def _terms(source: str) -> Iterator[str]:
    """Yield licence, whether it allows a company's work, and download of a release."""
    facts = known_base(source)
    assert facts is not None
    licence = facts.release.licence
    yield licence.name if licence else NOT_STATED
    yield COMPANIES[licence.companies] if licence else ""
    yield f"{facts.release.download_bytes / 1e9:.0f} GB"


def with_model_tables(page: str) -> str:
    """Return the text of README.md with new tables between their markers."""
    page = with_table(
        page, MODELS, model_table({source: source for source in releases()}, has_licences=True)
    )
    return with_table(page, TIMES, model_table(FIRST_SCREEN, has_licences=False))


if __name__ == "__main__":
    PAGE.write_text(with_model_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

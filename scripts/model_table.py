"""Write the table of models in README.md from what the planner finds: `python scripts/model_table.py`.

One row for each public release that is computed otherwise than the others: for three reference GPUs
(scripts/plan_tables.py) how long a balanced run of 20 images takes, and at which image size.
tests/scripts/test_model_table.py fails when the page holds another table.
"""

from __future__ import annotations

from pathlib import Path

from scripts.plan_tables import CARDS, planned, releases

PAGE = Path(__file__).resolve().parents[1] / "README.md"
BEGIN, END = "<!-- models:begin -->\n", "<!-- models:end -->\n"


def model_table() -> str:
    """Return the table as Markdown."""
    lines = [f"| model | {' | '.join(CARDS)} |", "|---|---:|---:|---:|"]
    for source in releases():
        plans = [planned(source, card) for card in CARDS]
        cells = [
            f"{plan.run_time.seconds / 3600:.1f} h, {plan.config.data.resolution} px"
            for plan in plans
        ]
        lines.append(f"| {source} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def with_model_table(page: str) -> str:
    """Return the text of README.md with a new table between its two markers."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"the page lacks {BEGIN.strip()} or, after it, {END.strip()}")
    return before + begin + model_table() + end + after


if __name__ == "__main__":
    PAGE.write_text(with_model_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

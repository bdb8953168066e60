"""The files of a run that somebody takes along: the LoRA of each step, the report, the folder.

Inputs: a run folder, the exports by step, which one was marked. Output: escaped markup; its buttons
name a step, which the page's handler checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.charts import Html, join, tag

from .markup import delete_button, table
from .media import REPORT, run_url, samples_url
from .run_best import Best


def files_html(folder: Path, *, exported: Mapping[int, str], best: Best | None) -> Html:
    """Return the LoRA files with their download, the newest first, the best one on top."""
    rows = [_row(folder, exported[step], step=step, best=best) for step in sorted(exported)[::-1]]
    if best is not None:
        rows.insert(0, _row(folder, best.file, step=best.step, best=None, best_of_all=True))
    listed = (
        table(("LoRA of", "file", "size", ""), rows, class_="files")
        if rows
        else tag("p", "No LoRA file yet: the first save writes one.", class_="quiet")
    )
    delete = delete_button("run", folder.name, name=folder.name, then="/")
    where = tag("p", "Folder: ", tag("code", str(folder.resolve())))
    return join((listed, _report(folder), _samples(folder), where, tag("p", delete)))


def _samples(folder: Path) -> Html:
    if not (folder / "samples").is_dir():
        return Html("")
    name = f"{folder.name}.zip"
    link = tag("a", "Download all samples", href=samples_url(folder.name), download=name)
    return tag("p", link, " as one zip.")


def _row(
    folder: Path, name: str, *, step: int, best: Best | None, best_of_all: bool = False
) -> tuple[str, ...]:
    marked = best is not None and best.step == step
    button = tag(
        "button",
        "\u2605 Marked as the best" if marked else "\u2606 Mark this as the best",
        type="button",
        data_best=step,
        disabled="" if marked else None,
        aria_label=f"Mark step {step} as the best",
    )
    link = tag("a", name, href=run_url(folder.name, name), download=name, translate="no")
    of = f"the best: step {step:,}" if best_of_all else f"step {step:,}"
    return of, link, _size(folder / name), "" if best_of_all else button


def _size(file: Path) -> str:
    try:
        return bytes_text(file.stat().st_size)
    except OSError:  # pruned since it was listed
        return "gone"


def _report(folder: Path) -> Html:
    if not (folder / REPORT).is_file():
        return tag("p", "The report is written when the training ends.", class_="quiet")
    href = run_url(folder.name, REPORT)
    link = tag("a", "Open the report", href=href, target="_blank", rel="noopener")
    return tag("p", link, ": curves, problems, dataset, settings, timings on one page.")

"""report.html: a run and the score of its LoRA, on one page that needs nothing else.

Input: a run folder, nothing but it. Output: `report.html` in that folder: images inside, no script,
no request (a content security policy tells the browser), the same bytes for the same folder. The template of the
same name beside this file is the page; here are the facts that it shows. A text from a caption, a name or a
message is escaped where it enters (charts.py). docs/scores.md has the formulas of the score.
"""

from __future__ import annotations

import base64
import datetime
import io
import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.common.event_kinds import SEVERITIES, Finished, Problem
from lora_trainer.common.files import read_json_object, read_regular, write_atomic
from lora_trainer.common.records import as_json, of_json
from lora_trainer.common.wording import (
    INTERRUPTED_EXIT_CODES,
    against_base,
    bytes_text,
    duration_text,
    reach_text,
    step_seconds_text,
)
from lora_trainer.config.config import all_settings
from lora_trainer.planning.timesteps import shares_sentence
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.best_step import best_saved, held_out, judgement, standing_of_saved
from lora_trainer.reporting.charts import (
    WHOLE,
    Html,
    loss_curve,
    rate_curve,
    render,
    smoothed_losses,
    timestep_bars,
)
from lora_trainer.reporting.coach import Advice, coach
from lora_trainer.reporting.history import (
    RunHistory,
    SampleImage,
    read_history,
)
from lora_trainer.reporting.run_record import DatasetRecord, FindingRecord
from lora_trainer.reporting.score import VALIDATION_FILE, WEIGHTS, ScoreRecord
from lora_trainer.reporting.strips import strips_of

REPORT_FILE = "report.html"


def write_report(run_folder: Path) -> Path:
    """Write the report of a run, ended or not, and return its path.

    Raises RequestError when run.json is damaged, MachineError when the disk refuses the file.
    """
    path = run_folder / REPORT_FILE
    write_atomic(path, document(read_history(run_folder)).encode(), durable=False)
    return path


@dataclass(frozen=True, kw_only=True)
class ReportView:
    """What report.html shows of a run."""

    name: str
    history: RunHistory
    grid: SampleGrid | None
    """None for a run that made no samples."""
    strip: Strip | None
    """None for a run that is not a slider."""
    reach: str
    """How far a slider goes, in words; empty where that was not measured."""
    loss_curve: Html
    rate_curve: Html
    timesteps: Html
    """Empty for a run of a release that did not plan them."""
    timesteps_sentence: str
    judgement: str
    """How well a finished run learned, as its page says it; empty for any other."""
    score: ScoreRecord | None
    """None where it was not measured."""
    advice: Sequence[Advice]
    """What the next training should do otherwise."""
    problems: Sequence[Remark]
    data: DatasetRecord
    buckets: Sequence[tuple[str, float, float]]
    """Each bucket with its images and the share of the largest one."""
    findings: Sequence[Remark]
    values: Mapping[str, Any]
    """Every setting."""
    units: Mapping[str, str]
    """The unit of each setting."""
    at_default: Sequence[str]
    """Settings that are folded away."""
    timings: Sequence[tuple[str, str]]
    environment: Sequence[tuple[str, Any]]
    command: str
    """As a shell takes it."""


def report_view(history: RunHistory) -> ReportView:
    """Return what a run's folder tells, as the page shows it."""
    run, infos = history.run, all_settings()
    # As run.json has them: tuples are lists there.
    defaults = json.loads(json.dumps({info.key: info.default for info in infos}))
    findings = sorted(map(_finding, run.dataset.findings), key=lambda finding: finding.file)
    return ReportView(
        name=run.name or history.started.name or history.folder.name,
        history=history,
        grid=sample_grid(history),
        strip=strip_of(history),
        reach=_reach(history.folder),
        loss_curve=loss_curve(history, replace(WHOLE, best=best_saved(history) or 0)),
        rate_curve=rate_curve(history),
        timesteps=timestep_bars(history.run.plan.timesteps),
        timesteps_sentence=shares_sentence(history.run.plan.timesteps),
        judgement=judgement(standing_of_saved(history), held_out=held_out(history))
        if isinstance(history.end, Finished) and history.validations
        else "",
        score=_score(history.folder),
        advice=coach(history),
        problems=_counted(map(_problem, history.problems)),
        data=run.dataset,
        buckets=_buckets(run.dataset.buckets),
        findings=_counted(findings),
        values=run.settings,
        units={info.key: info.unit for info in infos},
        at_default=[
            key for key, value in run.settings.items() if key in defaults and defaults[key] == value
        ],
        timings=list(_timings(history)),
        environment=list(flat(as_json(run.environment))),
        command=shlex.join(run.command),
    )


def document(history: RunHistory) -> Html:
    """Return the whole page."""
    return render(
        REPORT_FILE,
        **vars(report_view(history)),
        against_base=against_base,
        base_name=title,
        best_step=best_saved(history),
        duration_text=duration_text,
        interrupted=INTERRUPTED_EXIT_CODES,
        severities=SEVERITIES,
        size_of=partial(size_in, history.folder),
        smoothed_losses=smoothed_losses,
        utc=partial(datetime.datetime.fromtimestamp, tz=datetime.UTC),
        value_text=value_text,
        weights=WEIGHTS,
    )


def _reach(folder: Path) -> str:
    score = _score(folder)
    reach = score.figures.get("reach") if score is not None else None
    if not isinstance(reach, list) or len(reach) != 2:
        return ""
    return reach_text(reach) if all(isinstance(each, int | float) for each in reach) else ""


def _score(folder: Path) -> ScoreRecord | None:
    try:
        return of_json(ScoreRecord, read_json_object(folder / VALIDATION_FILE))
    except (OSError, RequestError):
        return None


_MEMORY = {
    "vram_bytes": "device memory in tensors, highest",
    "vram_reserved_bytes": "device memory reserved, highest",
    "vram_used_bytes": "whole GPU in use, highest",
    "host_bytes": "memory of the process, highest",
}


@dataclass(frozen=True, kw_only=True)
class Remark:
    """A problem of the run or a finding on its dataset, as texts."""

    severity: str
    what: str
    file: str
    advice: str
    code: str
    count: int = 1
    """How many of the same there were."""


def _problem(problem: Problem) -> Remark:
    return Remark(
        severity=problem.severity,
        what=problem.what,
        file=problem.file or "",
        advice=problem.fix,
        code=problem.code,
    )


def _finding(found: FindingRecord) -> Remark:
    return Remark(
        severity=found.severity,
        what=found.what,
        file=found.file or "",
        advice=found.advice,
        code=found.code,
    )


def _counted(remarks: Iterable[Remark]) -> list[Remark]:
    """Return each remark once with its `count`, the worst first."""
    counted = [replace(remark, count=count) for remark, count in Counter(remarks).items()]
    ranks: dict[str, int] = {severity: rank for rank, severity in enumerate(SEVERITIES)}
    return sorted(counted, key=lambda remark: ranks.get(remark.severity, len(ranks)))


def _buckets(counts: Mapping[str, float]) -> list[tuple[str, float, float]]:
    """Return the buckets with their images and the share of the largest one, the largest first."""
    most = max(filter(math.isfinite, counts.values()), default=1.0)
    ordered = sorted(counts.items(), key=lambda entry: -entry[1])
    return [(name, count, count / most) for name, count in ordered]


def value_text(value: Any, unit: str = "") -> str:
    """Return a JSON value in words: `on`, `off`, `none`, lists with commas, numbers with their unit."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if value is None:
        return "none"
    if isinstance(value, list):
        return ", ".join(value_text(entry) for entry in value) or "none"
    if isinstance(value, int | float):
        words = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{words} {unit}" if unit else words
    return str(value) or "empty"


def _timings(history: RunHistory) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the figures of time and memory."""
    timed = [row for row in history.steps if math.isfinite(row.seconds)]
    if seconds := sorted(row.seconds for row in timed):
        yield "step, median", step_seconds_text(statistics.median(seconds))
        yield "step, slowest of 20", step_seconds_text(seconds[math.ceil(0.95 * len(seconds)) - 1])
        waited = [row for row in timed if math.isfinite(row.data_wait_s)]
        total_s = math.fsum(row.seconds for row in waited)
        wait_s = math.fsum(row.data_wait_s for row in waited)
        yield "share of waiting for data", f"{100 * wait_s / total_s if total_s else 0.0:.1f} %"
        batch = history.started.batch_size
        if math.isfinite(batch) and sum(seconds) > 0:
            yield "images per second of steps", f"{batch * len(seconds) / sum(seconds):.1f}"
        saves_s = [saved.seconds for saved in history.saves]
        if saves_s:
            yield f"saves, {len(saves_s)} together", duration_text(math.fsum(saves_s))
    # NaN is never the larger one.
    peaks = {name: max([0.0, *(getattr(row, name) for row in history.steps)]) for name in _MEMORY}
    yield from ((_MEMORY[name], bytes_text(peak)) for name, peak in peaks.items() if peak)
    memory = history.run.plan.memory
    predicted = memory.peak_bytes
    if not predicted > 0:
        return
    yield "memory, predicted peak", bytes_text(predicted)
    reserved = peaks["vram_reserved_bytes"]
    measured = reserved + memory.runtime_bytes if reserved else peaks["host_bytes"]
    if measured:
        yield "predicted over measured", f"{100 * (predicted / measured - 1):+.0f} %"


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("a b", leaf) for every leaf of nested objects and lists of objects."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, dict):
            yield from flat(entry, f"{name} ")
        elif isinstance(entry, list) and any(isinstance(item, dict) for item in entry):
            yield from flat({str(index): item for index, item in enumerate(entry)}, f"{name} ")
        else:
            yield name, entry


# ---- the grid of samples

MAX_COLUMNS = 12
EMBEDDED_MAX_PX = 384
SMALL_PX = 128


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A sample in the grid: an image as a data URI; without one, `words` say why, `fault` more exactly."""

    words: str
    uri: str = ""
    fault: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleGrid:
    """The samples of a run, a row for each prompt and a column for each step."""

    steps: Sequence[int]
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    """The prompt, the seed and a cell for each step."""
    left_out: int
    """Sampled steps that have no column."""

    @property
    def columns(self) -> list[str]:
        """The steps in words."""
        return [column_name(step) for step in self.steps]


def sample_grid(history: RunHistory) -> SampleGrid | None:
    """Return the grid of a run's samples; None when it made none."""
    images = {(image.prompt, image.seed, image.step): image for image in history.samples}
    if not images:
        return None
    all_steps = sorted({step for *_, step in images})
    # Evenly spaced by position, the first and the last step among them.
    positions = np.linspace(0, len(all_steps) - 1, min(len(all_steps), MAX_COLUMNS))
    steps = [all_steps[round(position)] for position in positions]
    rows = [
        (prompt, seed, [_cell(images.get((prompt, seed, step)), history.folder) for step in steps])
        for prompt, seed in dict.fromkeys((prompt, seed) for prompt, seed, _ in images)
    ]
    return SampleGrid(steps=steps, rows=rows, left_out=len(all_steps) - len(steps))


@dataclass(frozen=True, kw_only=True)
class Strip:
    """The newest samples of prompts that were drawn at several strengths, side by side."""

    columns: Sequence[str]
    """The strengths in words, from less to more."""
    rows: Sequence[tuple[str, str, Sequence[Cell]]]
    """The prompt without its strength, the seed and a cell for each strength."""


def strip_of(history: RunHistory) -> Strip | None:
    """Return the strip of a slider; None for a run without prompts at several strengths."""
    strips = strips_of(history.samples)
    if strips is None:
        return None
    return Strip(
        columns=[f"strength {strength:g}" for strength in strips.strengths],
        rows=[
            (prompt, seed, [_cell(image, history.folder) for image in images])
            for (prompt, seed), images in strips.rows.items()
        ],
    )


def column_name(step: int) -> str:
    """Return a step in words; step 0 is the untouched base."""
    return f"step {step:,}" if step else "base"


def _cell(image: SampleImage | None, folder: Path) -> Cell:
    if image is None:
        return Cell(words="not sampled")
    try:
        data = read_regular(inside(folder, image.file))
        with Image.open(io.BytesIO(data)) as picture:
            picture.load()
            kind = "png"
            if picture.format != "PNG" or max(picture.size) > SMALL_PX:  # large images are reduced
                reduced, buffer, kind = picture.convert("RGB"), io.BytesIO(), "jpeg"
                reduced.thumbnail((EMBEDDED_MAX_PX, EMBEDDED_MAX_PX), Image.Resampling.LANCZOS)
                reduced.save(buffer, format="JPEG", quality=88, subsampling=0)
                data = buffer.getvalue()
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        # Pillow raises SyntaxError for some damaged PNG chunks.
        return Cell(words="unreadable", fault=f"{image.file}: {type(error).__name__}")
    uri = f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}"
    return Cell(words=f"{column_name(image.step)}: {image.prompt}", uri=uri)


def size_in(folder: Path, file: str) -> str:
    """Return the size of a file of the run folder as text."""
    try:
        return bytes_text(inside(folder, file).stat().st_size)
    except (OSError, ValueError):
        return "no longer in the run folder"


def inside(folder: Path, file: str) -> Path:
    """Return the path of `file` in `folder`; raises ValueError when it leads out of it."""
    try:
        path = (folder / file).resolve()
    except (
        OSError,
        RuntimeError,
    ) as error:  # a link that leads to itself: an OSError from Python 3.13 on
        raise ValueError(f"{file} leads nowhere") from error
    if not path.is_relative_to(folder.resolve()):
        raise ValueError(f"{file} is outside of the run folder")
    return path

"""The head of a run's page and its log: figures, memory against the prediction, texts as text."""

from __future__ import annotations

import json
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui.run_log import line_of, log
from lora_trainer.gui.run_state import look
from lora_trainer.gui.run_view import head, machine_now, memory

from lora_trainer.hardware.nvml import CardState
from lora_trainer.reporting.history import HistoryReader, read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import HOSTILE_CAPTION, FakeRun, fake_run

GIB = 1 << 30


def shown(folder: Path) -> str:
    return head(look(folder, read_status(folder), now_s=time.time()), read_history(folder))


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return fake_run(tmp_path / "runs" / "live", steps=30)


def test_head_has_progress_pace_time_left_and_losses(run: FakeRun) -> None:
    folder = until(run, 12)
    write_status(folder)
    page = shown(folder)
    assert "width:40.0%" in page and 'aria-valuenow="40"' in page
    for words in ("12 of 30", "Time left", "0.19 s", "mean of the last 12 steps"):
        assert words in page
    assert "below the base&#x27;s" in page


def test_what_the_machine_does_is_told_of_the_gpus_that_a_run_trains_on(run: FakeRun) -> None:
    folder = until(run, 12)
    write_status(folder)
    status = read_status(folder)
    idle = CardState(total_bytes=8 * GIB, used_bytes=GIB, load_percent=1, celsius=31, watts=9.6)
    ours = replace(idle, load_percent=98, celsius=71, watts=None, users=frozenset({status.pid}))
    said = machine_now(status, (idle, ours))
    assert said == "GPU 98 % busy, 71 °C."
    assert machine_now(status, (idle,)) == "GPU 1 % busy, 31 °C, 10 W."
    unknown = CardState(total_bytes=8 * GIB, used_bytes=GIB)
    assert machine_now(status, (unknown,)) == ""
    assert said in head(look(folder, status, now_s=time.time()), read_history(folder), said)


def test_before_the_first_step_there_are_no_figures_of_steps(run: FakeRun) -> None:
    folder = until(run, 0)
    write_status(folder, step=0, phase="cache", done=1, total=9, message="x.png", left_s=None)
    page = shown(folder)
    assert "Preparing the images: 1 of 9." in page
    assert "A step takes" not in page and "Time left" not in page and "meter" not in page
    stages = re.findall(r'<li class="(\w+)"', page)
    assert stages == ["done", "now", "later", "later", "later"]
    assert "1 of 9" in page and 'aria-current="step"' in page and 'aria-valuenow="11"' in page
    write_status(folder, step=0, phase="train", done=0, total=30)
    assert "stages" not in shown(folder)  # the first step is done: the time left is known


def test_a_failure_stands_above_the_figures(run: FakeRun) -> None:
    folder = until(run, 12)
    message = "<img src=x onerror=alert(1)>. Fix: <b>do</b> it."
    write_status(folder, state="failed", exit_code=3, message=message)
    page = shown(folder)
    assert page.index("What to do: ") < page.index("figures")
    assert "<img" not in page and "<b>do" not in page
    assert "&lt;b&gt;do&lt;/b&gt; it" in page


def test_a_finished_run_names_the_best_step_that_has_a_file_and_where_its_lora_works(
    tmp_path: Path,
) -> None:
    folder = finished_run(tmp_path / "runs" / "done", saves=(10, 20))
    write_status(folder, state="finished", exit_code=0)
    validated(folder, {21: (20, 0.04)})
    assert "Step 20 did best" in shown(folder) and "compare its samples below" in shown(folder)
    assert "Download step 20 (best)" in shown(folder) and "Around step" not in shown(folder)
    validated(folder, {15: (15, 0.001)})
    page = shown(folder)
    assert "Step 20 did best" in page and "Download step 20 (best)" in page
    assert "Around step 15 the loss was lower (0.0010)" in page
    assert "not in ComfyUI" in page and "Copy to ComfyUI" not in page
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record["base"]["source"] = "owner/model"
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    assert "not in ComfyUI" not in shown(folder) and "Copy to ComfyUI" in shown(folder)


def validated(folder: Path, others: dict[int, tuple[int, float]]) -> None:
    """Give the validations of a run, by step, another step and loss."""
    file = folder / "events.jsonl"
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        if row["event"] == "validation" and row["step"] in others:
            row["step"], row["loss"] = others[row["step"]]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


@pytest.mark.parametrize(
    ("state", "offered"), [("failed", True), ("stopped", True), ("running", False)]
)
def test_a_run_that_ended_early_is_trained_again_with_changes(
    run: FakeRun, state: str, offered: bool
) -> None:
    folder = until(run, 12)
    write_status(folder, state=state, exit_code=None if state == "running" else 5)
    assert ("/train?again=live" in shown(folder)) is offered


def on_a_card(run: FakeRun) -> FakeRun:
    for row in run.events:
        if row["event"] == "step":
            row |= {
                "vram_bytes": 6 * GIB,
                "vram_reserved_bytes": 7 * GIB + row["step"],
                "vram_used_bytes": 8 * GIB,
            }
    return run


def with_plan(folder: Path, **memory_fields: Any) -> Path:
    record = json.loads((folder / "run.json").read_text("utf-8"))
    record["plan"]["memory"] |= memory_fields
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    return folder


def test_memory_of_a_card_is_compared_as_it_was_predicted(run: FakeRun) -> None:
    items = [{"name": "runtime", "bytes": GIB, "note": ""}, "odd", {"name": "base"}]
    folder = with_plan(
        on_a_card(run).write(), items=items, peak_bytes=9 * GIB, limit_bytes=11 * GIB
    )
    found = memory(read_history(folder))
    assert found is not None
    assert found.now_bytes == 8 * GIB
    assert found.highest_bytes == 8 * GIB + 30, "the highest reserved plus what libraries hold"
    assert (found.predicted_bytes, found.limit_bytes) == (9 * GIB, 11 * GIB)
    write_status(folder)
    assert (
        "on the GPU, with all that uses it, now 8.0 GiB, this training at most 8.0 GiB, predicted 9.0 GiB, limit"
        in shown(folder)
    )


def test_without_a_card_it_is_the_memory_of_the_process(run: FakeRun) -> None:
    found = memory(read_history(run.write()))
    assert found is not None
    assert (found.now_of, found.highest_bytes) == ("now {size}", GIB)
    assert found.predicted_bytes == 1_310_000_000


def test_log_is_in_words_and_has_the_newest_first(run: FakeRun) -> None:
    reader = HistoryReader(run.write())
    reader.read()
    page = log(reader.recent())
    assert page.index("Finished: zorble.safetensors.") < page.index("Started: 30 steps")
    words = re.sub("<[^>]*>", "", page)
    for said in (
        "Step 10: saved zorble-step00000010.safetensors and step-00000010 (3.1 MiB of state",
        "Changed \u201cMicro batch\u201d 8 -&gt; 4: out of memory in backward",
        "The base: validation loss 0.1337.",
        "Step 20: 3 sample images.",
        "warning: broken/owl &lt;b&gt;17&lt;/b&gt;.jpg: image is cut off",
        "export it again",
    ):
        assert said in words, said
    assert HOSTILE_CAPTION not in page and "<b>17" not in page
    assert "step 7" not in words.lower(), "single steps are in the chart"


@pytest.mark.parametrize(
    ("row", "severity", "words"),
    [
        ({"event": "stopped", "exit_code": 143, "step": 2, "reason": "asked"}, "", "at step 2"),
        ({"event": "stopped", "exit_code": 4, "step": 2, "reason": "no disk"}, "error", "no disk"),
        ({"event": "stopped", "exit_code": [], "reason": "odd"}, "error", "odd"),
        ({"event": "out_of_memory", "images_at_once": 8}, "warning", "with 8 images"),
        ({"event": "resumed", "step": 4, "exactness": "EXACT"}, "", "as if it had not stopped"),
        ({"event": "run_started", "resumed_from": 4}, "", "Started again from step 4"),
        ({"event": "something_new"}, "", "Something new."),
        ({"event": "problem", "what": "w", "severity": "<b>"}, "warning", "w."),
    ],
)
def test_records_in_words(row: dict[str, Any], severity: str, words: str) -> None:
    line = line_of(row)
    assert line.severity == severity
    assert words in line.words


VALUES = st.none() | st.integers() | st.floats() | st.text(max_size=3) | st.lists(st.none())
KEYS = st.sampled_from(
    ["time", "step", "seconds", "bytes", "loss", "file", "fix", "what", "images"]
)
KINDS = ["run_started", "resumed", "cached", "validation", "sample", "saved", "change", "problem"]


@given(st.sampled_from([*KINDS, "stopped", "finished", "x"]), st.dictionaries(KEYS, VALUES))
def test_damaged_records_are_no_error(kind: str, fields: dict[str, Any]) -> None:
    log([{**fields, "event": kind}])

"""The page of a run: what is said of it at each moment, its buttons, figures, log, and which parts are drawn again."""

from __future__ import annotations

import json
import math
import os
import re
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from lora_trainer.gui.run_actions import use_as_best
from lora_trainer.gui.run_follow import Followed
from lora_trainer.gui.run_log import line_of, log
from lora_trainer.gui.run_parts import damaged_parts, parts, stamp
from lora_trainer.gui.run_state import (
    END_AFTER_S,
    Look,
    Possible,
    explained,
    left_text,
    look,
    possible,
    recovery,
    remarks,
    sentence,
)
from lora_trainer.gui.run_view import head, machine_now, memory
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.hardware.nvml import CardState
from lora_trainer.queue import commands
from lora_trainer.reporting.control import Control, Request
from lora_trainer.reporting.history import HistoryReader, read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import HOSTILE_CAPTION, FakeRun, fake_run

DEAD = 2**22 - 3
TRAINING = Possible(save=True, sample=True, stop=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of 30 steps at step 12; its last save was at step 10."""
    return until(fake_run(tmp_path / "runs" / "live", steps=30), 12)


def now(folder: Path, *, later_s: float = 0.0) -> Look:
    return look(folder, read_status(folder), now_s=time.time() + later_s)


def said(folder: Path) -> str:
    return sentence(now(folder), read_history(folder))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "Training."),
        (
            {"phase": "cache", "done": 14, "total": 23, "message": "x.png"},
            "Preparing the images: 14 of 23.",
        ),
        (
            {"phase": "cache", "done": 3, "total": 9, "message": "captions"},
            "Preparing the captions: 3 of 9.",
        ),
        ({"phase": "sample", "done": 1, "total": 4}, "Making sample images 1 of 4."),
        ({"phase": "load"}, "Loading the base model."),
        ({"phase": "", "state": "starting"}, "Starting."),
        ({"phase": "", "state": "training"}, "Training."),
        ({"phase": "novel", "message": "something new"}, "something new."),
        ({"phase": "stop"}, "Saving the state, step 12."),
        ({"phase": "quit"}, "Stopping at once, without saving."),
        ({"state": "finished", "exit_code": 0}, "Finished after 12 steps."),
        (
            {"state": "stopped", "exit_code": 143},
            "Stopped at step 12 of 30, its state saved; Resume goes on from there.",
        ),
        ({"state": "failed", "exit_code": 4}, "Failed at step 12 of 30."),
        ({"pid": DEAD}, "Interrupted at step 12 of 30."),
    ],
)
def test_one_sentence_says_what_it_does(folder: Path, fields: dict[str, Any], words: str) -> None:
    write_status(folder, **fields)
    assert said(folder).startswith(words)


def test_stop_saves_force_stop_does_not_and_a_process_that_obeys_neither_is_ended(
    folder: Path,
) -> None:
    write_status(folder)
    assert possible(now(folder)) == TRAINING
    Control(folder).request("stop")
    assert possible(now(folder)) == Possible(force=True)
    assert said(folder).startswith("Asked to stop")
    write_status(folder, phase="stop")  # it has seen the request
    Control(folder).done("stop")
    assert possible(now(folder)) == Possible(force=True)
    assert "goes on from step 10" in remarks(now(folder), read_history(folder))[0]
    Control(folder).request("stop_now")
    assert possible(now(folder)) == Possible()
    later = now(folder, later_s=END_AFTER_S + 1)
    assert possible(later) == Possible(end=True)
    assert str(os.getpid()) in remarks(later, read_history(folder))[0]


def test_one_that_has_seen_force_stop_and_hangs_can_be_ended_too(folder: Path) -> None:
    write_status(folder, phase="quit", heartbeat_s=time.time() - END_AFTER_S - 1)
    assert possible(now(folder)) == Possible(end=True)
    write_status(folder, phase="quit")
    assert possible(now(folder)) == Possible()


@pytest.mark.parametrize("state", ["stopped", "failed", "interrupted"])
def test_what_ended_early_can_be_resumed(folder: Path, state: str) -> None:
    write_status(folder, **({"pid": DEAD} if state == "interrupted" else {"state": state}))
    assert read_status(folder).state == state
    assert possible(now(folder)) == Possible(resume=True)
    write_status(folder, state="finished")
    assert possible(now(folder)) == Possible()


def test_a_run_that_waits_in_the_queue_to_go_on_says_so(folder: Path) -> None:
    write_status(folder, state="stopped", exit_code=143)
    words = ["datasets/x", f"--resume-from={folder.resolve()}"]
    commands.add(folder.parent, words, label="live")
    assert said(folder) == "Waits in the queue to be resumed from step 12 of 30."
    assert possible(now(folder)) == Possible()
    commands.remove(folder.parent, commands.items(folder.parent)[0].id)
    assert possible(now(folder)) == Possible(resume=True)


def test_a_failure_is_told_with_what_to_do(folder: Path) -> None:
    message = "the disk is full. Fix: free some space."
    write_status(folder, state="failed", exit_code=4, message=message)
    history = read_history(folder)
    assert explained(now(folder), history) == ("the disk is full.", "free some space.")
    write_status(folder, pid=DEAD)
    what, fix = explained(now(folder), history) or ("", "")
    assert "without a word" in what and "from step 10" in fix
    write_status(folder)
    assert explained(now(folder), history) is None
    (folder / "status.json").write_text("[]")
    assert "cannot be read" in (explained(now(folder), history) or ("", ""))[0]


@pytest.mark.parametrize(("request_", "word"), [("save", "to save"), ("sample", "sample images")])
def test_a_request_that_waits_is_said(folder: Path, request_: Request, word: str) -> None:
    write_status(folder)
    assert remarks(now(folder), read_history(folder)) == []
    Control(folder).request(request_)
    (line,) = remarks(now(folder), read_history(folder))
    assert word in line


def test_silence_of_a_process_that_lives_is_said(folder: Path) -> None:
    write_status(folder, heartbeat_s=time.time() - 200)
    assert "nothing for 3 min" in remarks(now(folder), read_history(folder))[0]
    write_status(folder, heartbeat_s=time.time() - 200, state="finished")
    assert remarks(now(folder), read_history(folder)) == []


def test_a_recovery_from_out_of_memory_is_said_until_the_batch_has_grown_back(
    tmp_path: Path,
) -> None:
    run = fake_run(tmp_path / "runs" / "full", steps=30)
    folder = until(run, 20)
    write_status(folder)
    (line,) = remarks(now(folder), read_history(folder))
    assert line.startswith("Recovered from out of memory at step 15: images at a time 8 -> 4")
    run.emit("change", key="memory.micro_batch", old=4, new=8, reason="50 steps in a row fitted")
    run.write()
    assert recovery(read_history(folder)) is None


def test_time_left_is_no_more_exact_than_it_can_be() -> None:
    assert left_text(12.3) == "about 13 s"
    assert left_text(600.0) == "about 10 min 00 s"
    assert left_text(math.nan) == left_text(-1.0) == ""


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


@pytest.fixture
def long_run(tmp_path: Path) -> Path:
    long_run = until(fake_run(tmp_path / "runs" / "live", steps=1000), 600)
    write_status(long_run, step=600, steps=1000)
    return long_run


def append(long_run: Path, **row: object) -> None:
    with (long_run / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def changed(long_run: Path, followed: Followed, before: dict[str, object]) -> set[str]:
    found = parts(now(long_run), followed.read(long_run))
    names = {name for name, part in found.items() if before.get(name) != part.key}
    before.update({name: part.key for name, part in found.items()})
    return names


def test_a_step_changes_the_head_and_only_now_and_then_the_chart(long_run: Path) -> None:
    followed, before = Followed(), dict[str, object]()
    assert len(changed(long_run, followed, before)) == 8
    assert changed(long_run, followed, before) == set()
    drawn = []
    for step in range(601, 607):
        append(long_run, event="step", step=step, loss=0.5, seconds=0.2)
        write_status(long_run, step=step, steps=1000)
        drawn.append(changed(long_run, followed, before))
    assert all("head" in names and names <= {"head", "chart"} for names in drawn)
    assert sum("chart" in names for names in drawn) == 2
    append(long_run, event="validation", step=606, loss=0.4)
    assert changed(long_run, followed, before) >= {"chart", "log"}


def test_a_sample_or_a_star_changes_the_sheet(long_run: Path) -> None:
    followed, before = Followed(), dict[str, object]()
    changed(long_run, followed, before)
    (long_run / "zorble-step00000333.safetensors").write_bytes(b"x")
    assert changed(long_run, followed, before) == {"samples", "files"}
    stamped = stamp(now(long_run))
    use_as_best(Workplace(runs=long_run.parent), "live", 333)
    assert stamp(now(long_run)) != stamped
    assert changed(long_run, followed, before) == {"samples", "files", "chart"}
    append(long_run, event="sample", step=600, images=[{"prompt": "p", "seed": 1, "file": "x"}])
    assert changed(long_run, followed, before) == {"samples", "log"}


def test_everything_can_be_drawn(long_run: Path) -> None:
    found = parts(now(long_run), Followed().read(long_run))
    drawn = {name: part.draw() for name, part in found.items()}
    assert "<svg" in drawn["chart"]["drawn"]
    assert drawn["samples"]["run"] == "live"
    assert drawn["buttons"] == Possible(save=True, sample=True, stop=True)
    assert drawn["where"] is False
    json.dumps(drawn["samples"], allow_nan=False)


def test_before_the_first_step_the_chart_says_so(tmp_path: Path) -> None:
    long_run = until(fake_run(tmp_path / "runs" / "new", steps=5), 0)
    write_status(long_run, step=0)
    found = parts(now(long_run), Followed().read(long_run))
    assert "begins with the first step" in found["chart"].draw()["drawn"]


def test_where_the_images_are_is_asked_only_if_it_is_not_known(long_run: Path) -> None:
    write_status(long_run, state="stopped", exit_code=143)
    assert parts(now(long_run), Followed().read(long_run))["where"].draw() is True


def test_a_damaged_record_is_told_and_the_run_can_still_be_stopped(long_run: Path) -> None:
    (long_run / "run.json").write_text("{")
    with pytest.raises(RequestError) as refused:
        Followed().read(long_run)
    found = damaged_parts(now(long_run), str(refused.value))
    assert set(found) == {
        *("head", "buttons", "where", "chart", "samples", "log", "settings", "files")
    }
    drawn = {name: part.draw() for name, part in found.items()}
    assert "not JSON" in drawn["head"]
    assert drawn["buttons"].stop


def test_tabs_of_one_run_share_what_was_read(long_run: Path) -> None:
    followed = Followed()
    counts: list[int] = []

    def read() -> None:
        for _ in range(20):
            counts.append(len(followed.read(long_run).history.steps))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(601, 640):
        append(long_run, event="step", step=step, loss=0.5)
    for thread in threads:
        thread.join()
    assert len(followed.read(long_run).history.steps) == 639
    assert all(600 <= count <= 639 for count in counts)
    first = followed.read(long_run).history.steps[0]
    assert followed.read(long_run).history.steps[0] is first, "it was not parsed again"


def test_readers_of_runs_nobody_looks_at_are_let_go(tmp_path: Path) -> None:
    followed = Followed()
    folders = [fake_run(tmp_path / str(number), steps=2).write() for number in range(12)]
    first = followed.read(folders[0]).history.steps[0]
    for long_run in folders:
        followed.read(long_run)
    assert followed.read(folders[0]).history.steps[0] is not first

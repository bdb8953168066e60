"""What the page shows of a run folder: sentences, points, escaped texts; no way out of the root."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from lora_trainer.gui import answers, state

from lora_trainer.errors import RequestError
from lora_trainer.output.history_reader import read_history
from lora_trainer.output.status import Control, read_status
from tests.fakes.run_folder import HOSTILE_CAPTION, FakeRun, fake_run


def write_status(folder: Path, **fields: Any) -> None:
    process = psutil.Process()
    status: dict[str, Any] = {
        "state": "training",
        "pid": process.pid,
        "pid_started_s": process.create_time(),
        "name": folder.name,
        "step": 12,
        "steps": 30,
        "message": "step 12 of 30, loss 0.1000",
        "heartbeat_s": time.time(),
        "exit_code": None,
    }
    (folder / "status.json").write_text(json.dumps(status | fields), encoding="utf-8")


def until(run: FakeRun, step: int) -> Path:
    run.events = [
        row for row in run.events if row.get("step", 0) <= step and row["event"] != "finished"
    ]
    return run.write()


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "runs"
    folder.mkdir()
    return folder


@pytest.fixture
def running(root: Path) -> Path:
    folder = until(fake_run(root / "live", steps=30), 12)
    write_status(folder)
    return folder


def shown(folder: Path) -> state.RunView:
    return state.view(folder, read_status(folder))


def test_runs_that_train_come_first_then_the_newest(root: Path, running: Path) -> None:
    for age, name in enumerate(("newer", "older"), start=1):
        folder = fake_run(root / name, steps=3).write()
        write_status(folder, state="finished", step=3, steps=3, exit_code=0)
        for file in folder.glob("*.json*"):
            os.utime(file, (time.time() + 10 - age, time.time() + 10 - age))
    entries = state.runs(root)
    assert [entry.name for entry in entries] == ["live", "newer", "older"]
    assert [entry.label for entry in entries][:2] == [
        "live: running, 12/30",
        "newer: finished, 3/3",
    ]


def test_only_folders_with_records_are_runs(root: Path) -> None:
    (root / "empty").mkdir()
    (root / "file").write_text("")
    hidden = root / ".launch"
    hidden.mkdir()
    (hidden / "run.json").write_text("{}")
    assert state.runs(root) == ()
    assert state.runs(root / "missing") == ()


@pytest.mark.parametrize(
    "name", ["../secret", "..", ".", "", "live/..", "live/../../secret", "link", "\0", None]
)
def test_no_name_leads_out_of_the_root(root: Path, running: Path, name: str | None) -> None:
    secret = root.parent / "secret"
    fake_run(secret, steps=3).write()
    (root / "link").symlink_to(secret, target_is_directory=True)
    assert [entry.name for entry in state.runs(root)] == ["live"]
    for asked in (name, str(secret), str(running)):
        with pytest.raises(RequestError, match="no run"):
            state.run_folder(root, asked)
    assert state.run_folder(root, "live") == running


def test_a_running_run_can_be_steered_and_not_resumed(running: Path) -> None:
    view = shown(running)
    assert set(view.requests) == {"stop", "stop_now", "save", "sample"}
    assert not view.can_resume
    assert "step 12 of 30, loss 0.1000, about 0:0" in view.head
    assert "width:40.0%" in view.head


def test_a_request_that_waits_is_said(running: Path) -> None:
    Control(running).request("stop")
    Control(running).request("sample")
    assert "Asked to sample and stop" in shown(running).head


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"state": "caching", "message": "latents"}, "Preparing: latents"),
        ({"state": "stopped", "exit_code": 143}, "Stopped at step 12 of 30"),
        ({"state": "failed", "exit_code": 4, "message": "no disk"}, "(exit code 4): no disk"),
        ({"pid": 2**22 - 3}, "Interrupted at step 12 of 30"),
    ],
)
def test_sentence_for_each_state(running: Path, fields: dict[str, Any], said: str) -> None:
    write_status(running, **fields)
    view = shown(running)
    assert said in view.head
    assert view.can_resume == (fields["state"] != "caching" if "state" in fields else True)
    assert bool(view.requests) != view.can_resume


def test_a_finished_run_is_measured_against_its_base(root: Path) -> None:
    folder = fake_run(root / "done", steps=30).write()
    write_status(folder, state="finished", step=30, exit_code=0)
    view = shown(folder)
    assert "Finished after 30 steps; validation loss " in view.head
    assert "below the base" in view.head
    assert not view.can_resume
    assert not view.requests


def test_points_are_means_and_validations_stay_whole(root: Path) -> None:
    history = read_history(fake_run(root / "x", steps=90).write())
    points = state.loss_points(history, limit=30)
    train = [point for point in points if point[2] == state.SERIES_TRAIN]
    assert len(train) == 30
    first = sum(row.loss for row in history.steps[:3]) / 3
    assert train[0] == (3, pytest.approx(first), state.SERIES_TRAIN)
    assert train[-1][0] == 90
    validations = [point for point in points if point[2] == state.SERIES_VALIDATION]
    assert [step for step, _, _ in validations] == [row.step for row in history.validations]
    assert validations[0][0] == 0


def test_losses_that_are_no_number_leave_the_plot_valid_json(root: Path) -> None:
    run = fake_run(root / "x", steps=5)
    for row in run.events:
        if row["event"] == "step" and row["step"] == 3:
            row["loss"] = None
    points = state.loss_points(read_history(run.write()))
    assert all(math.isfinite(loss) for _, loss, _ in points)
    payload = state.plot_payload(points)
    assert payload is not None
    json.dumps(payload, allow_nan=False)
    assert state.plot_payload(()) is None


def test_texts_of_the_run_are_shown_as_text(root: Path) -> None:
    folder = until(fake_run(root / "<b>name & co", steps=30), 12)
    write_status(folder, state="failed", exit_code=3, message="<img src=x onerror=alert(1)>")
    view = shown(folder)
    page = view.head + view.samples + view.problems + view.files
    assert HOSTILE_CAPTION.split(">")[0] not in page
    for markup in ("<b>name", "<img src=x", "<script", "<b>17"):
        assert markup not in page
    assert "&lt;b&gt;name &amp; co" in view.head
    assert "&lt;script&gt;" in view.samples
    assert "owl &lt;b&gt;17" in view.problems


def test_samples_and_links_stay_inside_the_run(root: Path) -> None:
    (root / "secret.png").write_bytes(b"secret")
    run = fake_run(root / "x", steps=3)
    run.write()
    for row in run.events:
        if row["event"] == "sample":
            row["images"] = [{"prompt": "p", "seed": 1, "file": "../secret.png"}]
        if row["event"] in ("saved", "finished"):
            row["export"] = "../secret.png"
    lines = "".join(json.dumps(row) + "\n" for row in run.events)
    (run.folder / "events.jsonl").write_text(lines, encoding="utf-8")
    write_status(run.folder)
    view = shown(run.folder)
    assert "unreadable" in view.samples
    assert "<a" not in view.files


def test_links_lead_to_the_export_with_its_name_quoted(root: Path) -> None:
    run = fake_run(root / "a #b?", steps=3)
    for row in run.events:
        if row["event"] == "saved":
            row["export"] = None  # as when a last save writes a state only
    folder = run.write()
    write_status(folder)
    assert (
        f"/gradio_api/file={root.as_posix()}/a%20%23b%3F/zorble.safetensors" in shown(folder).files
    )


def test_a_damaged_run_says_so(running: Path) -> None:
    (running / "run.json").write_text("{", encoding="utf-8")
    view = shown(running)
    assert "not JSON" in view.head
    assert not view.requests
    (running / "status.json").write_text("[]", encoding="utf-8")
    assert read_status(running).state == "interrupted"


def test_stamp_changes_with_what_is_seen_and_not_with_a_heartbeat(running: Path) -> None:
    before = state.stamp(running, read_status(running))
    write_status(running, heartbeat_s=0.0)
    assert state.stamp(running, read_status(running)) == before
    Control(running).request("save")
    asked = state.stamp(running, read_status(running))
    with (running / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write("{}\n")
    written = state.stamp(running, read_status(running))
    write_status(running, pid=2**22 - 3)
    dead = state.stamp(running, read_status(running))
    assert len({before, asked, written, dead}) == 4


def test_every_setting_is_in_the_table() -> None:
    from lora_trainer.config import setting_keys

    rows = answers.setting_rows()
    assert [row[0] for row in rows] == list(setting_keys())
    assert all(len(row) == len(answers.SETTING_COLUMNS) and row[3] for row in rows)


def test_report_shows_findings_as_text() -> None:
    finding = {"severity": "warning", "file": "<i>.png", "what": "small", "advice": "larger"}
    report = {
        "images": 3,
        "score": 0.5,
        "parts": {"sharpness": 0.25},
        "buckets": {"64x64": 3},
        "findings": [finding],
    }
    html = answers.report_html(report)
    assert "3 images, score 0.50 of 1" in html
    assert "sharpness 0.25" in html
    assert "64x64 x3" in html
    assert "&lt;i&gt;.png: " in html
    assert "<i>" not in html


def test_plan_says_whether_it_fits_how_long_and_what_was_decided() -> None:
    memory = {"items": [{"name": "base", "bytes": 2**30, "note": "<n>"}], "peak_bytes": 2**31}
    plan = {
        "base": "embedded",
        "preset": "cpu",
        "priority": "speed",
        "memory": {**memory, "limit_bytes": 2**32, "fits": True},
        "time": {"steps": 60, "epochs": 2.0, "seconds_per_step": [1, 2], "note": "by table"},
        "disk": {"cache": 2**20},
        "settings": {
            "train.steps": {"value": 60, "origin": "planner", "reason": "by images"},
            "train.seed": {"value": 42, "origin": "default", "reason": ""},
        },
    }
    html = answers.plan_html(plan)
    assert "Needs 2.0 GiB at its peak: fits in 4.0 GiB" in html
    assert "about 1 min 00 s to 2 min 00 s" in html
    assert "&lt;n&gt;" in html
    assert "train.steps" in html
    assert "train.seed" not in html
    over = {**plan, "memory": {**memory, "limit_bytes": 2**30, "fits": False}}
    assert "does not fit in 1.0 GiB" in answers.plan_html(over)
    unknown = {**plan, "memory": {**memory, "limit_bytes": None}, "time": {"note": "unmeasured"}}
    assert "no limit is known" in answers.plan_html(unknown)
    assert "unmeasured" in answers.plan_html(unknown)

"""A run folder with values of the wrong kind in its files breaks no page: others are shown, it says what is wrong.

Each value of each file that a run writes is replaced, one after the other; somebody may have sent the folder.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import live, lora_files, run_best, runs
from lora_trainer.gui.home import view as home_view
from lora_trainer.gui.library import view as library
from lora_trainer.gui.queue import view as queue_view
from lora_trainer.gui.run import view as run_view
from lora_trainer.gui.run.parts import sample_sheet
from lora_trainer.gui.run_settings import compared_settings
from lora_trainer.gui.runs import Followed
from lora_trainer.gui.server.templates import render
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.hardware.machine import detect
from lora_trainer.queue import worker
from tests.fakes.run_folder import fake_run

WRONG: tuple[Any, ...] = ({"a": 1}, [1], "text", None, -1e400, True)


def places(value: Any, path: tuple[Any, ...] = (), depth: int = 3) -> Iterator[tuple[Any, ...]]:
    """Yield where values stand in a JSON value, to some depth."""
    yield path
    children = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    for key, child in list(children)[:40] if depth else ():
        yield from places(child, (*path, key), depth - 1)


def replaced(value: Any, path: tuple[Any, ...], wrong: Any) -> Any:
    if not path:
        return wrong
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], wrong)
    return copy


def every_page(work: Workplace, hardware: Any) -> str:
    """Return all that the pages show of the runs; what they call an error is not one of Python."""
    followed = Followed()
    german = words("de")
    entries = runs.find_runs(work.runs)
    shown = [json.dumps(live.live(work, followed, german)), home_view.stamp(work, entries)]
    shown.append(home_view.machine_line(work, hardware, german))
    shown.append(
        render("home/cards.html", german, **home_view.shown(work, followed, german, entries))
    )
    shown.append(str(queue_view.view(work, words("en"))))
    found = lora_files.entries(work)
    shown.append(str(library.grid(found, of=len(found), said=words("en"))))
    for run in runs.find_runs(work.runs):
        folder = work.runs / run.name
        run_best.read_best(folder)
        try:
            history = followed.read(folder)
            shown.append(str(run_view.shown(folder, followed, german)))
            compared_settings(history.history.run)
            sample_sheet(
                folder,
                history.history,
                exported=run_best.exports(folder, history.history),
                best=run_best.read_best(folder),
                _=german,
            )
        except (LoraTrainError, OSError) as error:  # as the page's handler shows it
            shown.append(str(error))
    return " ".join(shown)


@pytest.fixture
def damaged(work: Workplace, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return one of two runs, whose files are replaced; the other one has to be shown all the same."""
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    fake_run(work.runs / "healthy", steps=3).write()
    folder = fake_run(work.runs / "sent", steps=6).write()
    status = {
        "state": "finished",
        "pid": 1,
        "pid_started_s": 1.0,
        "name": "sent",
        "step": 4,
        "steps": 4,
        "phase": "export",
        "done": 0,
        "total": 0,
        "message": "",
        "heartbeat_s": 1.0,
        "left_s": 1.0,
        "exit_code": 0,
    }
    (folder / "status.json").write_text(json.dumps(status))
    return folder


@pytest.mark.parametrize("name", ["status.json", "run.json", "events.jsonl"])
def test_one_value_of_the_wrong_kind_breaks_no_page(
    damaged: Path, work: Workplace, name: str
) -> None:
    hardware, file = detect(), damaged / name
    whole = file.read_text()
    rows = [json.loads(line) for line in whole.splitlines()] if name == "events.jsonl" else None
    value = {row["event"]: row for row in rows} if rows else json.loads(whole)
    faults = []
    tried = 0
    found = list(places(value, depth=2))
    # The status is read by every page, and is small: each of its values is each wrong one.
    cases = [
        (path, wrong)
        for index, path in enumerate(found)
        for wrong in (WRONG if name == "status.json" else WRONG[index % len(WRONG) :][:1])
    ]
    for path, wrong in cases:
        changed = replaced(value, path, wrong)
        if rows:
            lines = changed.values() if isinstance(changed, dict) else [changed]
            file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        else:
            file.write_text(json.dumps(changed))
        tried += 1
        try:
            assert "healthy" in every_page(work, hardware)
        except Exception as error:  # noqa: BLE001 - any exception is what is looked for
            faults.append((path, wrong, f"{type(error).__name__}: {error}"))
    assert tried > 10 and faults == []

"""Which parts of a run's page are drawn again, and that two tabs read one run once."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from lora_trainer.gui.run_actions import use_as_best
from lora_trainer.gui.run_follow import Followed
from lora_trainer.gui.run_parts import damaged_parts, parts, stamp
from lora_trainer.gui.run_state import Look, Possible, look
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import fake_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = until(fake_run(tmp_path / "runs" / "live", steps=1000), 600)
    write_status(folder, step=600, steps=1000)
    return folder


def now(folder: Path) -> Look:
    return look(folder, read_status(folder), now_s=time.time())


def append(folder: Path, **row: object) -> None:
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def changed(folder: Path, followed: Followed, before: dict[str, object]) -> set[str]:
    found = parts(now(folder), followed.read(folder))
    names = {name for name, part in found.items() if before.get(name) != part.key}
    before.update({name: part.key for name, part in found.items()})
    return names


def test_a_step_changes_the_head_and_only_now_and_then_the_chart(folder: Path) -> None:
    followed, before = Followed(), dict[str, object]()
    assert len(changed(folder, followed, before)) == 8
    assert changed(folder, followed, before) == set()
    drawn = []
    for step in range(601, 607):
        append(folder, event="step", step=step, loss=0.5, seconds=0.2)
        write_status(folder, step=step, steps=1000)
        drawn.append(changed(folder, followed, before))
    assert all("head" in names and names <= {"head", "chart"} for names in drawn)
    assert sum("chart" in names for names in drawn) == 2
    append(folder, event="validation", step=606, loss=0.4)
    assert changed(folder, followed, before) >= {"chart", "log"}


def test_a_sample_or_a_star_changes_the_sheet(folder: Path) -> None:
    followed, before = Followed(), dict[str, object]()
    changed(folder, followed, before)
    (folder / "zorble-step00000333.safetensors").write_bytes(b"x")
    assert changed(folder, followed, before) == {"samples", "files"}
    stamped = stamp(now(folder))
    use_as_best(Workplace(runs=folder.parent), "live", 333)
    assert stamp(now(folder)) != stamped
    assert changed(folder, followed, before) == {"samples", "files", "chart"}
    append(folder, event="sample", step=600, images=[{"prompt": "p", "seed": 1, "file": "x"}])
    assert changed(folder, followed, before) == {"samples", "log"}


def test_everything_can_be_drawn(folder: Path) -> None:
    found = parts(now(folder), Followed().read(folder))
    drawn = {name: part.draw() for name, part in found.items()}
    assert "<svg" in drawn["chart"]["drawn"]
    assert drawn["samples"]["run"] == "live"
    assert drawn["buttons"] == Possible(save=True, sample=True, stop=True)
    assert drawn["where"] is False
    json.dumps(drawn["samples"], allow_nan=False)


def test_before_the_first_step_the_chart_says_so(tmp_path: Path) -> None:
    folder = until(fake_run(tmp_path / "runs" / "new", steps=5), 0)
    write_status(folder, step=0)
    found = parts(now(folder), Followed().read(folder))
    assert "begins with the first step" in found["chart"].draw()["drawn"]


def test_where_the_images_are_is_asked_only_if_it_is_not_known(folder: Path) -> None:
    write_status(folder, state="stopped", exit_code=143)
    assert parts(now(folder), Followed().read(folder))["where"].draw() is True


def test_a_damaged_record_is_told_and_the_run_can_still_be_stopped(folder: Path) -> None:
    (folder / "run.json").write_text("{")
    with pytest.raises(RequestError) as refused:
        Followed().read(folder)
    found = damaged_parts(now(folder), str(refused.value))
    assert set(found) == {
        *("head", "buttons", "where", "chart", "samples", "log", "settings", "files")
    }
    drawn = {name: part.draw() for name, part in found.items()}
    assert "not JSON" in drawn["head"]
    assert drawn["buttons"].stop


def test_tabs_of_one_run_share_what_was_read(folder: Path) -> None:
    followed = Followed()
    counts: list[int] = []

    def read() -> None:
        for _ in range(20):
            counts.append(len(followed.read(folder).history.steps))

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(601, 640):
        append(folder, event="step", step=step, loss=0.5)
    for thread in threads:
        thread.join()
    assert len(followed.read(folder).history.steps) == 639
    assert all(600 <= count <= 639 for count in counts)
    first = followed.read(folder).history.steps[0]
    assert followed.read(folder).history.steps[0] is first, "it was not parsed again"


def test_readers_of_runs_nobody_looks_at_are_let_go(tmp_path: Path) -> None:
    followed = Followed()
    folders = [fake_run(tmp_path / str(number), steps=2).write() for number in range(12)]
    first = followed.read(folders[0]).history.steps[0]
    for folder in folders:
        followed.read(folder)
    assert followed.read(folders[0]).history.steps[0] is not first

"""A drawing that gives way to a training waits for it and goes on by itself; how long it takes is told on ground."""

from __future__ import annotations

import math
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lora_trainer.gui import drawing, drawing_process, jobs
from lora_trainer.gui.library import try_prompts
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace

from lora_trainer.hardware.kept_memory import Taker
from lora_trainer.run import samples
from tests.fakes.live_runs import write_status
from tests.fakes.run_folder import fake_run

ENGLISH = words("en")


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    (tmp_path / "runs").mkdir()
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def job(work: Workplace) -> jobs.Job:
    about = {"file": "a/x.safetensors", "prompts": ["a cat"], "strengths": [1.0], "seed": 1}
    return jobs.hand_over(work, kind=try_prompts.KIND, about=about)


def drawer_of(work: Workplace, job: jobs.Job) -> drawing_process.Drawer:
    drawer = drawing_process.Drawer(work=work)
    drawer._job = job
    drawing.Folder.of(work).asked.mkdir(parents=True)
    return drawer


def give_way(monkeypatch: pytest.MonkeyPatch, drawer: drawing_process.Drawer) -> None:
    def leave(code: int) -> None:
        raise SystemExit(code)

    monkeypatch.setattr(drawing_process.os, "_exit", leave)
    with pytest.raises(SystemExit):
        drawer._give_way()


def test_what_is_ended_for_a_training_waits_in_another_process(
    work: Workplace, job: jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[str, ...]] = []

    def start(work: Workplace, folder: drawing.Folder, *after: str) -> Any:
        begun.append(after)
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(drawing_process, "start_process", start)
    taker = Taker(keeper_pid=os.getpid(), pid=77, started_s=1.5)
    monkeypatch.setattr(drawing_process, "taken_by", lambda: taker)
    give_way(monkeypatch, drawer_of(work, job))
    assert begun == [("77", "1.5")]
    assert [file.name for file in drawing.Folder.of(work).asked.iterdir()] == [job.id]
    assert jobs.read(work, job.id).state == "running", "the page goes on asking"


def test_what_is_ended_by_hand_has_ended(
    work: Workplace, job: jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawing_process, "taken_by", lambda: None)
    give_way(monkeypatch, drawer_of(work, job))
    assert jobs.read(work, job.id).exit_code == drawing.GAVE_WAY


def test_it_goes_on_when_the_training_has_ended_and_not_where_somebody_stopped_it(
    work: Workplace, job: jobs.Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawer = drawer_of(work, job)
    asked = drawing.Folder.of(work).asked / job.id
    asked.touch()
    jobs.take(job.folder)
    lives = [True, False]
    seen: list[str] = []
    monkeypatch.setattr(drawing_process, "is_alive", lambda **_: lives.pop(0))
    fake_run(work.runs / "moths").write()
    write_status(work.runs / "moths", state="training", step=1, steps=30)
    monkeypatch.setattr(drawing_process.runs, "trains", lambda _: False)

    def rest(_: float) -> None:
        seen.append(try_prompts._said(work, jobs.read(work, job.id), 0, 1, ENGLISH))

    monkeypatch.setattr(drawing_process.time, "sleep", rest)
    assert drawer.wait_for(77, 1.5) and asked.exists()
    assert len(seen) == 1 and seen[0].startswith("Waits for ") and "goes on by itself" in seen[0]
    lives[:] = [True]
    drawing.stop(job)
    assert not drawer.wait_for(77, 1.5)
    assert jobs.read(work, job.id).exit_code == drawing.STOPPED


def test_no_time_is_told_after_one_step_and_one_after_some(work: Workplace) -> None:
    def left(pictures: int, step: int) -> float:
        far = drawing.Far(pictures=pictures, step=step, steps=25, seconds=60)
        return far.left_s(5)

    assert math.isnan(left(0, 0)) and math.isnan(left(0, 1)) and math.isnan(left(0, 7))
    assert left(0, 8) == pytest.approx(60 / 8 * (125 - 8)) and left(1, 0) == pytest.approx(240)


def test_pictures_that_are_there_are_not_drawn_again(tmp_path: Path) -> None:
    drawn: list[float] = []

    def image(prompt: str, *, strength: float, **_: Any) -> Any:
        drawn.append(strength)
        return SimpleNamespace(save=lambda file, format: file.write(b"png"))

    adapter = SimpleNamespace(
        refuse_references=lambda _: None,
        facts=SimpleNamespace(bucket_step_px=8),
        file=Path("x.safetensors"),
        image=image,
    )
    bench: Any = SimpleNamespace(load=lambda run, base: adapter)
    for go_on, expected in ((False, [0.5, 1.0]), (True, []), (False, [0.5, 1.0])):
        drawn.clear()
        found = samples.make_images(
            tmp_path / "x.safetensors",
            prompts=["a cat"],
            base=None,
            output=tmp_path / "out",
            seed=1,
            strengths=[0.5, 1.0],
            bench=bench,
            go_on=go_on,
        )
        assert len(list(found)) == 2 and drawn == expected

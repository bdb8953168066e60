"""`tune`: trials of the queue, compared, ended early, continued after a kill, within their hours.

Trainings are made up here but for the last test: `Trainings` does what a queue's worker and its trainers would, and a
run's gain follows from its learning rate.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config.layers import read_settings_file
from lora_trainer.queue import commands
from lora_trainer.queue.commands import Item
from lora_trainer.tuning.result import BEST_FILE, PAGE_FILE, write_result
from lora_trainer.tuning.space import Choices, Span
from lora_trainer.tuning.study import Study, StudyRecord
from lora_trainer.tuning.tune import BELOW_MEDIAN, NO_TIME, Tuner
from tests.fakes.runs import run_cli, toy

RATE = "optimizer.learning_rate"
STEPS = 12
STEP_S = 10.0
RECORD = StudyRecord(
    words=("images",),
    settings={"adapter.kind": "lora"},
    folder=".",
    name="cats-tune",
    seed=42,
    sampler="tpe",
    space=(
        Span(name=RATE, low=1e-5, high=1e-2),
        Choices(
            name="adapter.rank", by_label={"8": {"adapter.rank": 8}, "16": {"adapter.rank": 16}}
        ),
    ),
    planned={RATE: 1e-4, "adapter.rank": 16},
    fixed={"data.validation_fraction": 0.2},
    steps=STEPS,
    run_s=STEPS * STEP_S,
)


def gain_at(rate: float, step: int) -> float:
    """Return a gain that is largest at a rate of 1e-3, and grows with the steps."""
    return 0.3 * math.exp(-abs(math.log10(rate) + 3)) * step / STEPS


@dataclass
class Trainings:
    """A queue whose trainings are made up: each `advance` is one step of every one that runs."""

    runs: Path
    slots: int = 1
    now_s: float = 1_000_000.0
    fails: set[str] = field(default_factory=set)
    steps: dict[str, int] = field(default_factory=dict)
    words: dict[str, list[str]] = field(default_factory=dict)

    def settings(self, item: Item) -> dict[str, Any]:
        pairs = (word.partition("=") for word in item.argv if "=" in word)
        return {key: json.loads(value) for key, _, value in pairs}

    def advance(self, runs: Path) -> None:
        """Do what happens in ten seconds."""
        self.now_s += STEP_S
        listed = commands.items(runs)
        running = [item for item in listed if item.state == "running"]
        for item in commands.in_order(listed)[: self.slots - len(running)]:
            name = str(self.settings(item)["output.name"])
            self._become(item, state="running", run=name, started_s=self.now_s - STEP_S)
            self._write(item, kind="validation", step=0, by_timestep=[[500, 1.0]])
        for item in commands.items(runs):
            if item.state == "running":
                self._train(item)

    def _train(self, item: Item) -> None:
        folder = self.runs / str(item.run)
        step = self.steps[item.label] = self.steps.get(item.label, 0) + 1
        settings = self.settings(item)
        if item.label in self.fails:
            self._become(item, state="failed", ended_s=self.now_s, error="it does not fit")
            return
        loss = 1 - gain_at(settings[RATE], step)
        self._write(item, kind="validation", step=step, by_timestep=[[500, loss]])
        if (folder / "control" / "stop").exists():
            (folder / "control" / "stop").unlink()
            self._become(item, state="stopped", ended_s=self.now_s)
        elif step == STEPS:
            self._become(item, state="finished", ended_s=self.now_s)

    def _become(self, item: Item, **changes: Any) -> None:
        with commands.changing(self.runs):
            commands.write(self.runs, replace(item, **changes))

    def _write(self, item: Item, *, kind: str, **fields: Any) -> None:
        folder = self.runs / str(self.settings(item)["output.name"])
        folder.mkdir(exist_ok=True)
        row = {
            "event": kind,
            "loss": 1.0,
            "images": 3,
            "seconds": 1.0,
            **fields,
            "time": self.now_s,
        }
        with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


@dataclass
class Bench:
    """A study in a folder, with made-up trainings."""

    folder: Path
    trainings: Trainings
    hours: float = 100.0
    most: int | None = 8
    said: list[str] = field(default_factory=list)
    record: StudyRecord = RECORD
    storage: str | None = None

    def tuner(self) -> Tuner:
        """Open the study as a new process does."""
        return Tuner(
            study=Study(self.record, self.folder, storage=self.storage),
            runs=self.folder.parent,
            hours=self.hours,
            most_trials=self.most,
            at_once=self.trainings.slots,
            say=self.said.append,
            now_s=lambda: self.trainings.now_s,
        )

    def run(self, tuner: Tuner | None = None) -> Study:
        """Tune to the end."""
        tuner = tuner or self.tuner()
        while tuner.tick():
            self.trainings.advance(self.folder.parent)
        return tuner.study


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    folder = tmp_path / "runs" / RECORD.name
    folder.mkdir(parents=True)
    return Bench(folder=folder, trainings=Trainings(folder.parent))


def outline(study: Study) -> list[tuple[Any, ...]]:
    return [(row.number, dict(row.settings), row.end, row.gain) for row in study.rows()]


def test_the_plan_is_tried_first_the_best_is_found_and_the_others_end_early(bench: Bench) -> None:
    study = bench.run()
    rows = study.rows()
    assert len(rows) == 8 and all(row.end for row in rows)
    assert rows[0].settings == {RATE: 1e-4, "adapter.rank": 16}
    assert rows[0].gain == pytest.approx(gain_at(1e-4, STEPS))
    result = write_result(study, bench.folder)
    best = result.best
    assert best is not None and best.gain is not None and best.gain > (rows[0].gain or 0)
    assert best.best_step == STEPS
    # The file holds what was asked for and what was found, and is read as a settings file.
    values = read_settings_file(bench.folder / BEST_FILE).values
    assert values == {"adapter.kind": "lora", **best.settings}
    page = (bench.folder / PAGE_FILE).read_text(encoding="utf-8")
    early = [row for row in rows if row.end == "pruned"]
    assert early and all(row.reason == BELOW_MEDIAN and row.gain is None for row in early)
    assert all(STEPS // 4 <= max(row.gains) < STEPS for row in early)
    assert not any(row.end == "pruned" for row in rows[:4])
    assert f"trial {early[0].number}: ended early, {BELOW_MEDIAN}" in bench.said
    assert result.sentence in page and 'class="line best"' in page and BEST_FILE in page
    item = commands.items(bench.folder.parent)[-1]
    assert item.argv[0] == "images" and bench.trainings.settings(item).keys() == {
        "adapter.kind", "data.validation_fraction", RATE, "adapter.rank", "output.name",
    }  # fmt: skip


def test_a_study_killed_at_any_tick_proposes_and_finds_the_same(
    bench: Bench, tmp_path: Path
) -> None:
    whole = outline(bench.run())
    folder = tmp_path / "other" / RECORD.name
    folder.mkdir(parents=True)
    again = Bench(folder=folder, trainings=Trainings(folder.parent))
    ticks = 0
    while again.tuner().tick():  # each with a process of its own
        ticks += 1
        if ticks % 3:  # nobody may have been there for a while
            again.trainings.advance(folder.parent)
    assert outline(again.tuner().study) == whole


def test_killed_before_its_item_was_added_a_trial_is_added_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(commands, "add", lambda *_, **__: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception):
            bench.tuner().tick()
    assert commands.items(bench.folder.parent) == ()
    for _ in range(2):
        assert bench.tuner().tick()
        assert [item.label for item in commands.items(bench.folder.parent)] == ["cats-tune-trial-0"]


def test_hours_bound_what_is_tried(bench: Bench) -> None:
    bench.hours, bench.most = 3.4 * STEPS * STEP_S / 3600, None
    study = bench.run()
    assert len(study.rows()) == 3 and {row.end for row in study.rows()} == {"complete"}
    # More hours go on with the same study.
    bench.hours *= 2
    assert len(bench.run().rows()) > 5


def test_a_trial_that_runs_when_the_hours_are_spent_is_ended(bench: Bench) -> None:
    bench.hours, bench.most = 1.2 * STEPS * STEP_S / 3600, None
    bench.record = replace(RECORD, run_s=0.0)  # a plan that promised too much
    study = bench.run()
    # The first, without which there would be no result, goes to its end.
    assert [row.end for row in study.rows()] == ["complete"]
    bench.hours = 1.8 * STEPS * STEP_S / 3600
    tuner = bench.tuner()
    row = tuner.study.ask()
    tuner._start(row)
    last = bench.run(tuner).rows()[-1]
    assert (last.end, last.reason) == ("pruned", NO_TIME)


def test_what_fails_is_told_and_passed_over_unless_everything_does(bench: Bench) -> None:
    bench.trainings.fails = {"cats-tune-trial-1"}
    study = bench.run()
    failed = study.row(1)
    assert (failed.end, failed.reason) == ("failed", "it does not fit")
    assert "trial 1: failed: it does not fit" in bench.said and len(study.rows()) == 8


def test_three_failures_and_no_result_end_it(bench: Bench) -> None:
    bench.trainings.fails = {f"cats-tune-trial-{number}" for number in range(9)}
    with pytest.raises(RequestError, match="3 trials failed and none finished: it does not fit"):
        bench.run()


def test_stopped_and_killed_trials_are_resumed(bench: Bench) -> None:
    tuner = bench.tuner()
    for _ in range(4):
        tuner.tick()
        bench.trainings.advance(bench.folder.parent)
    tuner.stop()
    bench.trainings.advance(bench.folder.parent)
    (item,) = commands.items(bench.folder.parent)
    assert item.state == "stopped"
    assert bench.tuner().tick()
    (item,) = commands.items(bench.folder.parent)
    assert item.state == "waiting" and item.argv[0] == "--resume-from"
    assert bench.run().rows()[0].gain == pytest.approx(gain_at(1e-4, STEPS))


def test_two_gpus_train_two_and_two_machines_share_a_storage(bench: Bench, tmp_path: Path) -> None:
    bench.trainings.slots = 2
    tuner = bench.tuner()
    tuner.tick()
    assert len(commands.items(bench.folder.parent)) == 2
    storage = f"sqlite:///{tmp_path / 'shared.db'}"
    other = tmp_path / "other" / RECORD.name
    other.mkdir(parents=True)
    here = replace(bench, trainings=Trainings(bench.folder.parent), storage=storage, most=3)
    for item in commands.items(bench.folder.parent):
        commands.remove(bench.folder.parent, item.id)
    there = Bench(folder=other, trainings=Trainings(other.parent), storage=storage, most=3)
    one, two = here.tuner(), there.tuner()
    left = [True, True]
    while any(left):
        left = [one.tick(), two.tick()]
        here.trainings.advance(bench.folder.parent)
        there.trainings.advance(other.parent)
    rows = one.study.rows()
    assert len(rows) == 3 and all(row.end for row in rows)
    assert {row.is_here for row in rows} == {True, False}
    assert [row.number for row in rows if row.is_here] == [
        row.number for row in two.study.rows() if not row.is_here
    ]
    with pytest.raises(RequestError, match="varies other settings"):
        Study(replace(RECORD, space=RECORD.space[:1]), other, storage=storage)


def test_a_storage_that_cannot_be_opened_is_refused(bench: Bench) -> None:
    with pytest.raises(RequestError, match="storage of the study cannot be opened"):
        Study(RECORD, bench.folder, storage="nonsense://x")


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the queue's trainings run here, one after another, instead of in a worker's processes."""
    from lora_trainer.cli import main
    from lora_trainer.queue import worker

    def work(runs: Path) -> None:
        for item in commands.in_order(commands.items(runs)):
            code = main.run(list(item.argv))
            name = next(word for word in item.argv if word.startswith("output.name="))
            changed = replace(
                item,
                state="failed" if code else "finished",
                run=json.loads(name.partition("=")[2]),
                started_s=0.0,
                ended_s=2.0,
            )
            with commands.changing(runs):
                commands.write(runs, changed)

    monkeypatch.setattr(worker, "ensure_worker", work)
    monkeypatch.setattr("lora_trainer.tuning.tune.POLL_S", 0.0)


def test_the_command_tunes_and_goes_on(
    tmp_path: Path, in_this_process: None, capsys: pytest.CaptureFixture[str]
) -> None:
    place = toy(tmp_path, images=8).with_base()
    words = ["tune", *place.arguments(), "--name", "toy", "--hours", "1", "--json"]
    assert run_cli([*words, "--trials", "2"]) == 0
    folder = place.runs / "toy-tune"
    found: Mapping[str, Any] = read_settings_file(folder / BEST_FILE).values
    assert RATE in found and found["data.resolution"] == 16 and (folder / PAGE_FILE).exists()
    capsys.readouterr()
    assert run_cli([*words, "--trials", "3", "--resume"]) == 0
    printed = capsys.readouterr().out  # by the trainings in this process too
    trials = json.loads(printed[printed.index('{\n  "folder"') :])["trials"]
    assert [trial["end"] for trial in trials] == ["complete"] * 3
    assert all(math.isfinite(trial["gain"]) for trial in trials)
    assert (place.runs / "toy-tune-trial-2" / "toy-tune-trial-2.safetensors").exists()
    assert run_cli([*words, "--resume", "--seed", "3"]) == 2
    assert "was begun with" in capsys.readouterr().err

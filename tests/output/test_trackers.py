"""Dashboards: the tags they get, and that none of their failures reaches a run."""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.reporting.trackers import start_trackers
from tests.fakes.made_events import made
from tests.fakes.run_folder import fake_run, relay

STEP: dict[str, Any] = {
    "step": 3, "images": 8, "loss": 0.5, "lr": 2e-3, "grad_norm": 0.7, "seconds": 0.2,
    "data_wait_s": 0.01, "vram_bytes": 3 << 30, "vram_reserved_bytes": 4 << 30,
    "vram_used_bytes": 5 << 30, "host_bytes": 2 << 30, "epoch": 0.1,
}  # fmt: skip


def listening(
    *, name: str = "wandb", folder: Path = Path(), error: BaseException | None = None
) -> tuple[EventStream, list[Event], Mock]:
    """Return a stream, the problems on it, and a tracker of a service that listens; its first log raises `error`.

    Another thread logs: `tracker.wait` returns when all is logged.
    """
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    events, problems, tracker = EventStream(), list[Event](), Mock()
    tracker.log.side_effect = error
    service = Mock(requires_logging_directory=False, return_value=tracker)
    every, settings = {name.replace("_", "-"): "1"}, {"a": 1, "b": (2,)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOGGER_TYPE_TO_CLASS, name, service)
        patch.setitem(sys.modules, name, Mock())
        (aside,) = start_trackers(
            [name], packages=every, run_folder=folder, settings=settings, events=events
        )
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    tracker.wait = partial(aside.close, within_s=60)
    return events, problems, tracker


def test_tags_of_a_step_and_a_validation() -> None:
    events, _, tracker = listening()
    events.emit(made("step", **STEP))
    events.emit(made("step", **{**STEP, "step": 4, "loss": 0.3}))
    events.emit(
        made("validation", step=4, loss=0.25, by_timestep=[[62, 0.2], [937.5, 0.3]], images=2)
    )
    events.emit(made("step", **{**STEP, "vram_bytes": 0, "grad_norm": None}))
    tracker.wait()
    tracker.store_init_configuration.assert_called_once_with({"a": 1, "b": "(2,)"})
    first, second, validation, last = tracker.log.call_args_list
    assert first == call({
        "loss/current": 0.5, "loss/average": 0.5, "lr/unet": 2e-3, "norm/grad_norm": 0.7,
        "time/step_s": 0.2, "time/data_wait_s": 0.01, "sys/vram_gib": 3.0,
        "sys/vram_reserved_gib": 4.0, "sys/vram_used_gib": 5.0, "sys/host_gib": 2.0,
    }, step=3)  # fmt: skip
    assert 0.3 < second.args[0]["loss/average"] < 0.5
    by_timestep = {"loss/validation_t0062": 0.2, "loss/validation_t0938": 0.3}
    assert validation == call({"loss/validation": 0.25, **by_timestep}, step=4)
    assert not {"sys/vram_gib", "norm/grad_norm"} & set(last.args[0])


@given(st.lists(st.floats(0.01, 10), min_size=1))
def test_the_average_stays_within_what_it_saw_and_follows_the_newest(losses: list[float]) -> None:
    events, _, tracker = listening()
    for loss in losses:
        events.emit(made("step", **{**STEP, "loss": loss}))
    tracker.wait()
    averages = [each.args[0]["loss/average"] for each in tracker.log.call_args_list]
    assert averages[0] == pytest.approx(losses[0])  # no bias at the start
    for before, now, loss in zip(averages, averages[1:], losses[1:], strict=False):
        between = sorted((before, loss))
        assert between[0] * (1 - 1e-9) <= now <= between[1] * (1 + 1e-9)
    assert min(losses) * (1 - 1e-9) <= averages[-1] <= max(losses) * (1 + 1e-9)


def join_closing_thread() -> None:
    for thread in threading.enumerate():
        if thread.name == "lora-train-tracker":
            thread.join()


def test_a_failing_tracker_is_one_problem_and_is_closed_and_training_goes_on() -> None:
    events, problems, tracker = listening(error=ConnectionError("the dashboard\nis down"))
    for step in range(3):
        events.emit(made("step", **{**STEP, "step": step}))
    events.emit(made("finished", step=3))
    tracker.wait()
    (problem,) = problems
    said = "tracker wandb stopped logging: ConnectionError: the dashboard is down"
    assert (problem.fields["what"], problem.fields["code"]) == (said, "TRN-05")
    join_closing_thread()
    assert tracker.log.call_count == tracker.finish.call_count == 1


def test_closed_once_at_the_end(tmp_path: Path) -> None:
    events, problems, tracker = listening(name="comet_ml")
    events.emit(made("phase", phase="load", message="", done=0, total=0))
    events.emit(made("sample", step=0, images=[{"file": "x.png"}]))  # it takes none
    events.emit(made("stopped", step=1, reason="r", exit_code=130))
    events.emit(made("finished", step=1))
    events.emit(made("step", **STEP))
    tracker.wait()
    assert tracker.finish.call_count == 1 and not problems
    assert not tracker.log.called and not tracker.log_images.called
    # A sample image that is gone is one problem, after which the tracker is left alone.
    events, problems, tracker = listening(name="aim", folder=tmp_path)
    events.emit(made("sample", step=5, images=[{"file": "gone.png"}]))
    events.emit(made("step", **STEP))
    tracker.wait()
    join_closing_thread()
    assert [event.fields["code"] for event in problems] == ["TRN-05"] and not tracker.log.called
    assert tracker.finish.call_count == 1


def test_a_tracker_that_hangs_in_its_start_or_later_delays_no_event() -> None:
    hang, began = threading.Event(), threading.Event()

    def wait(*_: object, **__: object) -> None:
        began.set()
        hang.wait(60)

    events, problems, tracker = listening(error=wait)  # type: ignore[arg-type]  # Mock calls it
    for _ in range(3):
        events.emit(made("step", **STEP))
    assert began.wait(60) and tracker.log.call_count == 1
    events.emit(made("finished", step=3))
    assert not problems and not tracker.finish.called
    hang.set()
    tracker.wait()
    assert tracker.log.call_count == 3 and tracker.finish.call_count == 1


def test_a_tracker_that_cannot_be_used_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    names = ("tensorboard", "wandb", "tensorbord", "tensorboard", "aim")
    packages = {"tensorboard": "2.21.0", "wandb": None}
    for aside in start_trackers(
        names, packages=packages, run_folder=tmp_path, settings={}, events=events
    ):
        aside.close(within_s=60)
    rows = {event.fields["what"].split(" ")[1]: event.fields for event in seen}
    broken, left_out, unknown, missing = map(rows.pop, ("tensorboard", "wandb", "names", "aim"))
    assert not rows
    assert "pip install wandb" in left_out["fix"]
    assert unknown["what"].endswith("Did you mean 'tensorboard'?")
    assert (broken["code"], missing["severity"]) == ("TRN-05", "note")


def test_tensorboard_gets_the_run_with_its_images(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing import event_accumulator as reader  # type: ignore[import-untyped]  # ships no types

    events, problems = EventStream(), []
    run = fake_run(tmp_path, steps=6)
    run.write()
    settings = {"train.steps": 6, "sampling.prompts": ["a"]}
    packages = {"tensorboard": "1"}
    wanted = {"packages": packages, "run_folder": run.folder, "settings": settings}
    (aside,) = start_trackers(["tensorboard"], **wanted, events=events)
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    run.events = [event for event in run.events if event["event"] != "problem"]
    relay(run, events)
    aside.close(within_s=60)
    written = reader.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [entry.step for entry in written.Scalars("loss/validation")] == list(range(7))
    assert len(written.Scalars("loss/current")) == 6
    assert [image.step for image in written.Images("samples/00")] == [0, 2, 4, 6]
    image = written.Images("samples/01")[0]
    assert (image.width, image.height) == (64, 64)
    assert not problems
    assert not [path for path in (run.folder / "tensorboard").iterdir() if path.is_dir()]

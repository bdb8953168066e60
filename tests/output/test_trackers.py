"""Dashboards: the tags they get, and that none of their failures reaches a run."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.common.events import Event, EventStream
from lora_trainer.reporting.trackers import start_trackers
from tests.fakes.run_folder import fake_run, relay

STEP: dict[str, Any] = {
    "step": 3, "images": 8, "loss": 0.5, "lr": 2e-3, "grad_norm": 0.7, "seconds": 0.2,
    "data_wait_s": 0.01, "vram_bytes": 3 << 30, "vram_reserved_bytes": 4 << 30,
    "vram_used_bytes": 5 << 30, "host_bytes": 2 << 30, "epoch": 0.1,
}  # fmt: skip


class FakeTracker:
    """A tracker of accelerate that keeps what it is given; raises from the call numbered `fails_at` on."""

    def __init__(self, *, fails_at: int | None = None, error: BaseException | None = None) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []
        self.fails_at = fails_at
        self.error = error or ConnectionError("the dashboard\nis down")
        self.closed = 0

    def start(self) -> None:
        pass

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        assert values == {"a": 1, "b": "(2,)"}

    def log(self, values: dict[str, float], step: int | None) -> None:
        self.calls.append((values, step))
        if self.fails_at is not None and len(self.calls) >= self.fails_at:
            raise self.error

    def log_images(self, images: dict[str, Any], step: int) -> None:
        raise AssertionError("no image to log")

    def finish(self) -> None:
        self.closed += 1


def listening(
    tracker: FakeTracker, *, name: str = "wandb", folder: Path = Path()
) -> tuple[EventStream, list[Event]]:
    """Return a stream that the tracker listens to under a service's name, and its problems."""
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    events, problems = EventStream(), list[Event]()
    every = {name.replace("_", "-"): "1"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(LOGGER_TYPE_TO_CLASS, name, _Made(tracker))
        settings = {"a": 1, "b": (2,)}
        start_trackers([name], packages=every, run_folder=folder, settings=settings, events=events)
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    return events, problems


class _Made:
    """Stands for the class of a tracker that is made already."""

    requires_logging_directory = False

    def __init__(self, tracker: FakeTracker) -> None:
        self.tracker = tracker

    def __call__(self, label: str) -> FakeTracker:
        return self.tracker


def eventually_closed(tracker: FakeTracker) -> bool:
    """Wait for the thread that closes a tracker that failed."""
    for thread in threading.enumerate():
        if thread.name == "lora-train-tracker":
            thread.join()
    return tracker.closed == 1


def test_tags_of_a_step_and_a_validation() -> None:
    tracker = FakeTracker()
    events, _ = listening(tracker)
    events.emit("step", **STEP)
    events.emit("step", **{**STEP, "step": 4, "loss": 0.3})
    events.emit("validation", step=4, loss=0.25, by_timestep=[[62, 0.2], [937.5, 0.3]], images=2)
    assert tracker.calls[0] == (
        {
            "loss/current": 0.5, "loss/average": 0.5, "lr/unet": 2e-3, "norm/grad_norm": 0.7,
            "time/step_s": 0.2, "time/data_wait_s": 0.01, "sys/vram_gib": 3.0,
            "sys/vram_reserved_gib": 4.0, "sys/vram_used_gib": 5.0, "sys/host_gib": 2.0,
        },
        3,
    )  # fmt: skip
    assert 0.3 < tracker.calls[1][0]["loss/average"] < 0.5
    validation = {
        "loss/validation": 0.25,
        "loss/validation_t0062": 0.2,
        "loss/validation_t0938": 0.3,
    }
    assert tracker.calls[2] == (validation, 4)
    events.emit("step", **{**STEP, "vram_bytes": 0, "grad_norm": None})
    assert not {"sys/vram_gib", "norm/grad_norm"} & set(tracker.calls[3][0])


@given(st.lists(st.floats(0.01, 10), min_size=1))
def test_the_average_stays_within_what_it_saw_and_follows_the_newest(losses: list[float]) -> None:
    tracker = FakeTracker()
    events, _ = listening(tracker)
    for loss in losses:
        events.emit("step", **{**STEP, "loss": loss})
    averages = [values["loss/average"] for values, _ in tracker.calls]
    assert averages[0] == pytest.approx(losses[0])  # no bias at the start
    for before, now, loss in zip(averages, averages[1:], losses[1:], strict=False):
        between = sorted((before, loss))
        assert between[0] * (1 - 1e-9) <= now <= between[1] * (1 + 1e-9)
    assert min(losses) * (1 - 1e-9) <= averages[-1] <= max(losses) * (1 + 1e-9)


def test_a_failing_tracker_is_one_problem_and_is_closed_and_training_goes_on(
    tmp_path: Path,
) -> None:
    tracker = FakeTracker(fails_at=5)
    events, problems = listening(tracker)
    run = fake_run(tmp_path, steps=20)
    run.events = [event for event in run.events if event["event"] in ("step", "finished")]
    relay(run, events)
    (problem,) = problems
    assert problem.fields["what"] == (
        "tracker wandb stopped logging: ConnectionError: the dashboard is down"
    )
    assert problem.fields["code"] == "TRN-05"
    assert len(tracker.calls) == 5 and eventually_closed(tracker)


def test_closed_once_at_the_end_and_an_interrupt_is_not_swallowed(tmp_path: Path) -> None:
    tracker = FakeTracker()
    events, problems = listening(tracker, name="comet_ml")
    events.emit("phase", phase="load", message="", done=0, total=0)
    events.emit("sample", step=0, images=[{"file": "x.png"}])  # it takes none
    events.emit("stopped", step=1, reason="r", exit_code=130)
    events.emit("finished", step=1)
    events.emit("step", **STEP)
    assert tracker.closed == 1 and not tracker.calls and not problems
    # A sample image that is gone is one problem, after which the tracker is left alone.
    events, problems = listening(tracker := FakeTracker(), name="aim", folder=tmp_path)
    events.emit("sample", step=5, images=[{"file": "gone.png"}])
    events.emit("step", **STEP)
    assert [event.fields["code"] for event in problems] == ["TRN-05"] and not tracker.calls
    events, _ = listening(FakeTracker(fails_at=1, error=KeyboardInterrupt()))
    with pytest.raises(KeyboardInterrupt):
        events.emit("step", **STEP)


def test_a_tracker_that_cannot_be_used_is_one_problem(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    events, seen = EventStream(), list[Event]()
    events.subscribe(seen.append)
    names = ("tensorboard", "wandb", "tensorbord", "tensorboard", "aim")
    packages = {"tensorboard": "2.21.0", "wandb": None}
    start_trackers(names, packages=packages, run_folder=tmp_path, settings={}, events=events)
    assert len(events.listeners) == 1, "none has started"
    broken, left_out, unknown, missing = (event.fields for event in seen)
    said = [row["what"].split(" ")[1] for row in (left_out, unknown, missing, broken)]
    assert said == ["wandb", "names", "aim", "tensorboard"]
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
    start_trackers(
        ["tensorboard"],
        packages=packages,
        run_folder=run.folder,
        settings=settings,
        events=events,
    )
    events.subscribe(lambda event: problems.append(event) if event.kind == "problem" else None)
    run.events = [event for event in run.events if event["event"] != "problem"]
    relay(run, events)
    written = reader.EventAccumulator(str(run.folder / "tensorboard")).Reload()
    assert [entry.step for entry in written.Scalars("loss/validation")] == list(range(7))
    assert len(written.Scalars("loss/current")) == 6
    assert [image.step for image in written.Images("samples/00")] == [0, 2, 4, 6]
    assert (written.Images("samples/01")[0].width, written.Images("samples/01")[0].height) == (
        64,
        64,
    )
    assert not problems
    assert not [path for path in (run.folder / "tensorboard").iterdir() if path.is_dir()]

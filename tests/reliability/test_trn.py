"""TRN-01 to 06: what goes wrong in a training costs no run: numbers, memory, samples, logs, the preparing thread.

The trainings are real ones on the tiny base; what goes wrong is put in between. On a GPU, encoders that do not fit go
on on the processor; here two names of the one processor stand for the two devices. Steps are prepared by one thread of
the process, so there is no worker to be killed; what is left of TRN-06 is a thread that raises, ends or waits.
"""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.common.events import read_jsonl
from lora_trainer.run.samples import ONE_COLOUR
from lora_trainer.training import loop
from lora_trainer.training.dataloader import TrainingDataLoader
from lora_trainer.training.loss import Model
from tests.fakes.runs import QUIET, STEPS, Toy, events, last_state, toy, trajectory
from tests.fakes.training import at_start, build_feeder, build_training, distance

INJECTIONS = int(os.environ.get("RELIABILITY_INJECTIONS", "1"))
Figure = Callable[..., None]
SETTINGS: dict[str, Any] = {
    "logging__trackers": [],
    "train__batch_size": 4,
    "memory__micro_batch": 4,
    "optimizer__name": "adamw",
}
"""Four images a step, so that there is something to halve."""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run."""
    place = toy(tmp_path_factory.mktemp("trn")).with_base()
    assert place.train(**SETTINGS) == 0
    return place


def train(place: Toy, name: str, *more: str, **settings: Any) -> int:
    return place.train("--name", name, *more, **{**SETTINGS, **settings})


@dataclass
class Fault:
    """Spoils calls of a function: those whose number, from 1 on, is in `at`; `instead` of doing them."""

    real: Callable[..., Any]
    at: Container[int]
    spoil: Callable[[Any], Any]
    instead: bool = False
    calls: int = 0
    hits: list[int] = field(default_factory=list)

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls not in self.at:
            return self.real(*args, **options)
        self.hits.append(self.calls)
        return self.spoil(None if self.instead else self.real(*args, **options))


def full(_: object) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


@pytest.mark.parametrize("number", range(INJECTIONS))
def test_trn_01_not_a_number_anywhere_loses_no_run_and_is_never_saved(
    number: int, tmp_path_factory: pytest.TempPathFactory, place: Toy, figure: Figure
) -> None:
    """Up to eleven spoilt steps, in rows of up to six: skipped, or gone back from."""
    draw = random.Random(number)
    rows = [(draw.randint(1, 10), draw.randint(1, 6)) for _ in range(draw.randint(1, 2))]
    at = frozenset(call for first, length in rows for call in range(first, first + length))
    with pytest.MonkeyPatch.context() as patch:
        fault = Fault(Model.losses_of, at, lambda losses: losses * torch.nan)
        patch.setattr(Model, "losses_of", lambda *args: fault(*args))
        name = f"nan-{number}"
        assert train(place, name, **QUIET) == 0
    run = place.runs / name
    assert fault.hits
    assert [row["step"] for row in events(run, "step")] == list(range(1, STEPS + 1))
    problems = [row for row in read_jsonl(run / "problems.jsonl") if row["code"] == "TRN-01"]
    assert problems
    files = [run / f"{name}.safetensors", *run.glob("states/*/*.safetensors")]
    for file in files:
        for tensor in load_file(file).values():
            assert tensor.double().isfinite().all(), file
    figure("injections", tried=1, lost=0, nan_files=0)


def test_trn_03_samples_that_fail_are_a_problem_and_nothing_else(place: Toy) -> None:
    """For lack of memory, also one by one, and then for another reason."""
    errors = iter([torch.OutOfMemoryError("CUDA out of memory")] * 2 + [KeyError("x")] * 2)

    def fail(*_: object, **__: object) -> Any:
        raise next(errors)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lora_trainer.run.samples.SampleAction._images", fail)
        assert train(place, "samples", sampling__every_steps=3) == 0
    run = place.runs / "samples"
    problems = [row for row in read_jsonl(run / "problems.jsonl") if row["code"] == "TRN-03"]
    assert [problem["what"].split(":")[0] for problem in problems] == [
        "the sample images of step 0 was skipped",
        "no sample images at step 3",
        "no sample images at step 6",
    ]
    assert trajectory(run) == trajectory(place.run), "and the weights are the exact ones again"


def test_sample_images_of_one_colour_are_named(place: Toy) -> None:
    """A VAE whose decoder is zeros encodes and trains as it should, and no loss shows it."""
    grey = Image.new("RGB", (16, 16), "grey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lora_trainer.families.base.sampling.Sampler.image", lambda *_, **__: grey)
        assert train(place, "grey", sampling__every_steps=3) == 0
    rows = read_jsonl(place.runs / "grey" / "problems.jsonl")
    found = [row["what"] for row in rows if row["code"] == ONE_COLOUR]
    assert found == [
        f"all sample images at step {step} have one colour, which is not a picture"
        for step in (0, 3, 6)
    ]
    rows = read_jsonl(place.run / "problems.jsonl")
    assert not [row for row in rows if "one colour" in row["what"]], "of a real picture"


def test_trn_04_fp16_overflows_advance_neither_the_optimizer_nor_the_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every third step overflows: the loss scale falls, the schedule goes by steps, nothing is lost."""
    tiny = build_training(build_feeder(batch_size=2), steps=9, precision=torch.float16)
    scaler = tiny.training.scaler
    scaler.load_state_dict(scaler.state_dict() | {"scale": 8.0})
    fault = Fault(Model.losses_of, (3, 6, 9), lambda losses: losses * 1e38)
    monkeypatch.setattr(Model, "losses_of", lambda *args: fault(*args))
    loop.train_steps(tiny.training, at_start(micro_batch=2))
    overflows = [row for row in tiny.of_kind("change") if row["key"] == "loss scale"]
    assert len(overflows) == len(fault.hits) > 0
    counts = {float(state["step"]) for state in tiny.training.optimizer.state.values()}
    assert counts == {9.0 - len(fault.hits)}
    assert [row["step"] for row in tiny.of_kind("step")] == list(range(1, 10))
    assert [row["lr"] for row in tiny.of_kind("step")] == [
        tiny.training.learning_rate(step) for step in range(9)
    ]


BESIDE = {
    "lora_trainer.cache.encode._encode_image": 2,
    "lora_trainer.cache.encode.TextEntries.encode": 2,
    "lora_trainer.training.actions.FixedLosses.by_timestep": 2,
    "lora_trainer.run.samples.SampleAction._images": 2,
    "lora_trainer.training.actions.SaveAction.state": 3,
}
IN_A_STEP = {"torch.Tensor.backward": 2, "torch.optim.AdamW.step": 4}
"""Where it happens, and in which call."""


@pytest.mark.parametrize("phases", [BESIDE, IN_A_STEP], ids=["beside the steps", "in steps"])
def test_trn_02_a_run_that_ran_out_of_memory_once_ends_with_the_same_adapter(
    phases: dict[str, int],
    place: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    figure: Figure,
) -> None:
    faults = {}
    for name, at in phases.items():
        instead = not name.endswith("AdamW.step")  # which is torn once its work is done
        faults[name] = fault = Fault(resolve_name(name), (at,), full, instead)
        monkeypatch.setattr(name, lambda *args, fault=fault, **more: fault(*args, **more))
    # Another index makes it another device, whose encoders are handed over.
    another = torch.device("cpu", 0)
    monkeypatch.setattr("lora_trainer.run.build.planned_device", lambda _: another)
    in_a_step = phases is IN_A_STEP
    name = "in-a-step" if in_a_step else "beside"
    assert train(place, name, data__cache_dir=str(tmp_path / "cache")) == 0
    for where, fault in faults.items():
        assert fault.calls > fault.hits[0], f"{where}: it happened, and was tried again"
    run = place.runs / name
    changes = [row for row in events(run, "change") if row["key"] == "memory.micro_batch"]
    assert all(row["new"] < row["old"] for row in changes)
    assert bool(changes) == in_a_step
    ours, theirs = (load_file(last_state(each) / ADAPTER) for each in (run, place.run))
    names = sorted(ours)
    pairs = [tensors[name] for name in names for tensors in (ours, theirs)]
    assert distance(pairs[::2], pairs[1::2]) < 5e-5, "the same adapter, up to rounding"
    images = {row["step"]: row["images"] for row in events(run, "step")}
    assert images == {step: 4 * step for step in range(1, STEPS + 1)}
    for kind in ("validation", "sample"):
        assert len(events(run, kind)) == len(events(place.run, kind)) > 0, kind
    assert (run / f"{name}.safetensors").is_file()
    figure("injections", tried=len(phases), lost=0, nan_files=0)


@pytest.mark.parametrize(
    ("name", "doing"),
    [
        ("cache.encode._encode_image", "caching"),
        ("run.build.load_networks", "loading"),
        ("run.run_job.exporter", "exporting"),
    ],
)
def test_trn_02_what_cannot_be_made_smaller_is_one_line_and_the_same_command_goes_on(
    name: str,
    doing: str,
    place: Toy,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = f"without {name}"
    settings = {"data__cache_dir": str(tmp_path / "cache")} if doing == "caching" else {}
    with monkeypatch.context() as patch:
        real = resolve_name(f"lora_trainer.{name}")
        first = 3 if doing == "caching" else 1
        patch.setattr(f"lora_trainer.{name}", Fault(real, range(first, 99), full, instead=True))
        capsys.readouterr()
        assert train(place, run, **settings) == 4
    told = capsys.readouterr().err.strip().splitlines()
    assert f"ran out of memory while {doing}" in told[-1]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == (
        2 if doing == "caching" else 0
    )
    if doing != "caching":
        assert events(place.runs / run, "out_of_memory"), "the memo of full GPUs listens to it"
    if doing != "loading":
        assert train(place, run, "--resume", **settings) == 0
        assert trajectory(place.runs / run) == trajectory(place.run)


def test_trn_05_a_log_whose_disk_is_full_is_one_warning(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of events.jsonl, after four lines; status.json: tests/output/test_status.py."""
    lines, real_open = count(1), Path.open

    def open_(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self.name == "events.jsonl" and mode == "a" and next(lines) > 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real_open(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    capsys.readouterr()
    assert train(place, "no-events", **QUIET) == 0
    run, shown = place.runs / "no-events", capsys.readouterr()
    assert (run / "no-events.safetensors").exists()
    assert (run / "report.html").exists()
    assert (shown.out + shown.err).count("No space left on device") == 1
    assert len(events(run, "step")) == 2


def test_trn_06_a_disk_that_does_not_answer_holds_up_nobody_who_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The third signal raises KeyboardInterrupt while the thread hangs in a read."""
    begun, answered = threading.Event(), threading.Event()

    def prepare(self: TrainingDataLoader, step: int) -> None:
        begun.set()
        answered.wait()

    monkeypatch.setattr(TrainingDataLoader, "prepare", prepare)
    monkeypatch.setattr("lora_trainer.cache.background.LEAVING_S", 0.05)
    try:
        with pytest.raises(KeyboardInterrupt), build_feeder().stream(0, 10):
            assert begun.wait(20)
            raise KeyboardInterrupt
    finally:
        answered.set()
        for thread in threading.enumerate():
            if thread.name == "lora-train-ahead":
                thread.join()

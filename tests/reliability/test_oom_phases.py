"""TRN-02: running out of memory in every phase of a whole run; it ends with the same adapter, or goes on.

On a GPU, encoders that do not fit go on on the processor. Here two names of the one processor stand
for the two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from lora_trainer.checkpoint.states import ADAPTER
from tests.fakes.runs import STEPS, Toy, events, last_state, toy, trajectory
from tests.fakes.training import distance

Figure = Callable[..., None]
SETTINGS = {
    "logging__trackers": [],
    "train__batch_size": 4,
    "memory__micro_batch": 4,
    "optimizer__name": "adamw",
}


@dataclass
class Once:
    """Fails in the given call of a function, from 1 on, `times` times; `torn`: after its work was done."""

    real: Callable[..., Any]
    at: int
    times: int = 1
    torn: bool = False
    calls: int = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.at <= self.calls < self.at + self.times:
            if self.torn:
                self.real(*args, **options)
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.real(*args, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run."""
    place = toy(tmp_path_factory.mktemp("oom")).with_base()
    assert place.train(**SETTINGS) == 0
    return place


BESIDE = {
    "lora_trainer.cache.encode._encode_image": 2,
    "lora_trainer.cache.encode.TextEntries.encode": 2,
    "lora_trainer.training.actions.FixedLosses.by_timestep": 2,
    "lora_trainer.run.samples.SampleAction._write": 2,
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
        faults[name] = fault = Once(resolve_name(name), at, torn=name.endswith("AdamW.step"))
        monkeypatch.setattr(name, lambda *args, fault=fault, **more: fault(*args, **more))
    # Another index makes it another device, whose encoders are handed over.
    another = torch.device("cpu", 0)
    monkeypatch.setattr("lora_trainer.run.caching.planned_device", lambda _: another)
    in_a_step = phases is IN_A_STEP
    name = "in-a-step" if in_a_step else "beside"
    settings = {**SETTINGS, "data__cache_dir": str(tmp_path / "cache")}
    assert place.train("--name", name, **settings) == 0
    for where, fault in faults.items():
        assert fault.calls > fault.at, f"{where}: it happened, and was tried again"
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
        ("run.session.exporter", "exporting"),
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
    run, settings = f"without {name}", {**SETTINGS}
    if doing == "caching":
        settings["data__cache_dir"] = str(tmp_path / "cache")
    with monkeypatch.context() as patch:
        real = resolve_name(f"lora_trainer.{name}")
        patch.setattr(f"lora_trainer.{name}", Once(real, 3 if doing == "caching" else 1, 100))
        capsys.readouterr()
        assert place.train("--name", run, **settings) == 4
    told = capsys.readouterr().err.strip().splitlines()
    assert f"ran out of memory while {doing}" in told[-1]
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 2 * (doing == "caching")
    if doing != "loading":
        assert place.train("--name", run, "--resume", **settings) == 0
        assert trajectory(place.runs / run) == trajectory(place.run)

"""TRN-02: running out of memory in every phase of a whole run; it ends with the same adapter, or goes on.

On a GPU, encoders that do not fit go on on the processor. Here two names of the one processor stand
for the two devices.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.cache import encode
from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.common.events import read_jsonl
from lora_trainer.run import build, caching, session
from lora_trainer.run.samples import SampleAction
from lora_trainer.training.actions import FixedLosses, SaveAction
from lora_trainer.training.loss import Model
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
    """Fails in the given call of a function, from 1 on."""

    real: Callable[..., Any]
    at: int
    calls: int = 0

    def __call__(self, *args: Any, **options: Any) -> Any:
        self.calls += 1
        if self.calls == self.at:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return self.real(*args, **options)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The undisturbed run."""
    place = toy(tmp_path_factory.mktemp("oom")).with_base()
    assert place.train(**SETTINGS) == 0
    return place


def adapter(run: Path) -> list[Tensor]:
    found = load_file(last_state(run) / ADAPTER)
    return [found[name] for name in sorted(found)]


PHASES: dict[str, tuple[Any, str, int]] = {
    "images": (encode, "_encode_image", 2),
    "texts": (encode.TextEntries, "encode", 2),
    "forward": (Model, "losses_of", 30),
    "backward": (Tensor, "backward", 2),
    "optimizer": (torch.optim.AdamW, "step", 4),
    "validation": (FixedLosses, "by_timestep", 2),
    "samples": (SampleAction, "_write", 2),
    "state": (SaveAction, "state", 3),
}
"""Where it happens, and in which call."""


@pytest.mark.parametrize("phase", PHASES)
def test_trn_02_a_run_that_ran_out_of_memory_once_ends_with_the_same_adapter(
    phase: str, place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, figure: Figure
) -> None:
    owner, name, at = PHASES[phase]
    fault = Once(getattr(owner, name), at)
    monkeypatch.setattr(owner, name, lambda *args, **options: fault(*args, **options))
    # Another index makes it another device, whose encoders are handed over.
    monkeypatch.setattr(caching, "planned_device", lambda _: torch.device("cpu", 0))
    settings: dict[str, Any] = {**SETTINGS}
    if phase in ("images", "texts"):
        settings["data__cache_dir"] = str(tmp_path / "cache")
    assert place.train("--name", phase, **settings) == 0
    assert fault.calls > at, "it happened, and was tried again"
    run = place.runs / phase
    changes = [row for row in events(run, "change") if row["key"] == "memory.micro_batch"]
    assert all(row["new"] < row["old"] for row in changes)
    assert bool(changes) == (phase in ("forward", "backward", "optimizer"))
    assert distance(adapter(run), adapter(place.run)) < 5e-5, "the same adapter, up to rounding"
    last = {row["step"]: row for row in events(run, "step")}
    assert [last[step]["images"] for step in range(1, STEPS + 1)] == [
        4 * step for step in range(1, STEPS + 1)
    ]
    for kind, key in (("validation", "loss"), ("sample", "images")):
        assert len(events(run, kind)) == len(events(place.run, kind)) > 0, key
    assert (run / f"{phase}.safetensors").is_file()
    figure("injections", tried=1, lost=0, nan_files=0)


@pytest.mark.parametrize(
    ("owner", "name", "doing"),
    [
        (build, "load_networks", "loading"),
        (build, "inject", "loading"),
        (session, "exporter", "exporting"),
    ],
    ids=["base", "adapter", "export"],
)
def test_trn_02_what_cannot_be_made_smaller_is_one_line_and_the_same_command_goes_on(
    owner: Any,
    name: str,
    doing: str,
    place: Toy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = f"loading {name}"
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, Once(getattr(owner, name), 1))
        capsys.readouterr()
        assert place.train("--name", run, **SETTINGS) == 4
    told = capsys.readouterr().err.strip().splitlines()
    assert f"ran out of memory while {doing}" in told[-1]
    kinds = [row["event"] for row in read_jsonl(place.runs / run / "events.jsonl")]
    assert "out_of_memory" in kinds
    assert place.train("--name", run, "--resume", **SETTINGS) == 0
    assert trajectory(place.runs / run) == trajectory(place.run)

"""Whole runs in which a means of fitting or speed fails: tried once more plainly, the same numbers, said once.

Each fault is what a GPU, a driver or a library may do that the processor does not: the mechanism raises.
"""

from __future__ import annotations

import gc
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS
from lora_trainer.common.errors import MachineError
from lora_trainer.network.block_swap import Streamed
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.gradient_checkpointing import BlockRunner
from lora_trainer.network.pinned_memory import CopyStream
from lora_trainer.reporting.run_record import read as read_record
from lora_trainer.training import loop, step
from tests.fakes.family_bases import base_of, facts_at, side_of
from tests.fakes.pinning import pinning_driver, stream_on_a_processor
from tests.fakes.runs import Toy, contents, events, last_state, problems, toy, trajectory
from tests.fakes.trainee import compiled_calls

pytestmark = pytest.mark.timeout(300)  # a loaded machine is not a failure
FAULT = "CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"
RETRIED, REFUSED = "not about memory", "refused to pin"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    made = toy(tmp_path_factory.mktemp("plain"))
    shutil.copytree(base_of("flux"), made.base)
    return made


@pytest.fixture(autouse=True, scope="module")
def _streams_on_a_processor() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patched:
        stream_on_a_processor(patched)
        yield


def train(place: Toy, name: str, *more: str, code: int = 0, **settings: Any) -> Path:
    side_px = side_of(facts_at(place.base))
    found = place.train(
        "--name", name, *more, data__resolution=side_px, output__precision="fp32", **settings
    )
    gc.collect()  # unpins memory that is left in cycles while the driver of the test is still there
    assert found == code
    return place.runs / name


def fault(*_: object, **__: object) -> Any:
    raise RuntimeError(FAULT)


def break_what_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that keep some results, and copies that run beside the computation."""
    runs, makes = BlockRunner.__call__, CopyStream.__init__

    def call(self: BlockRunner, block: nn.Module, *args: Any) -> Any:
        keeps = self._kind in ("light", "selective")  # a plan traces them on `meta`
        return fault() if keeps and not args[0].is_meta else runs(self, block, *args)

    def make(self: Any, device: torch.device, *, beside: bool = True) -> None:
        makes(self, device, beside=beside)
        if beside:
            self.copy = fault

    monkeypatch.setattr(BlockRunner, "__call__", call)
    monkeypatch.setattr(CopyStream, "__init__", make)


PLAIN: Mapping[str, Any] = {
    "memory__gradient_checkpointing": "full",
    "memory__base_precision": "int8",
    "sampling__every_steps": 4,
    "train__validate_every_steps": 4,
}
EVERYTHING: Mapping[str, Any] = {
    **PLAIN,
    "memory__gradient_checkpointing": "selective",
    "memory__streamed_blocks": 3,
}
"""Each fails once a run uses it, so a run in which one of them was left on would fail again."""


@pytest.fixture(scope="module")
def plain(place: Toy) -> Path:
    """A run that starts plainly."""
    return train(place, "plain", **PLAIN)


def said(run: Path, text: str) -> list[str]:
    return [row["what"] for row in problems(run) if text in row["what"]]


def test_all_that_fails_is_done_without_and_an_interrupted_run_goes_on_plainly(
    place: Toy, plain: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error of any of them was the end of the run, with a traceback."""
    break_what_can_fail(monkeypatch)
    real, calls = loop.judge_step, 0

    def failing(*args: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise MachineError("the plug was pulled", fix="put it back")
        return real(*args)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(loop, "judge_step", failing)
        broken = train(place, "broken", code=4, **EVERYTHING)
    (retry,) = said(broken, RETRIED)
    changed = {"memory.gradient_checkpointing": "full", "copies of streamed blocks": "when due"}
    assert FAULT in retry and all(f"{key}={value}" in retry for key, value in changed.items())
    changes = [row for row in events(broken, "change") if FAULT in row["reason"]]
    assert {row["key"]: row["new"] for row in changes} == changed
    with monkeypatch.context() as patched:
        patched.setattr(step, "forward_backward", fault)
        train(place, "broken", "--resume", code=5, **EVERYTHING)
    assert "failed with every optional feature off: RuntimeError: CUDA" in capsys.readouterr().err
    resumed = train(place, "broken", "--resume", **EVERYTHING)
    assert len(said(resumed, RETRIED)) == 1, "it was tried again"
    assert FAULT in (resumed / "report.html").read_text(encoding="utf-8")
    assert trajectory(resumed) == trajectory(plain) != []
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        first, second = load_file(last_state(resumed) / file), load_file(last_state(plain) / file)
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), file


def test_without_a_fault_they_give_the_same_numbers(
    place: Toy, plain: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fakes above prove nothing if blocks were not streamed."""
    loads = 0
    real = Streamed._load

    def counting(self: Streamed, index: int) -> Any:
        nonlocal loads
        loads += 1
        return real(self, index)

    monkeypatch.setattr(Streamed, "_load", counting)
    run = train(place, "counted", **EVERYTHING)
    assert loads > 0 and said(run, RETRIED) == []
    assert trajectory(run) == trajectory(plain)


# ---- host memory that the driver does not pin

STREAMED: Mapping[str, Any] = {
    "memory__streamed_blocks": 3,
    "memory__gradient_checkpointing": "full",
}


def test_a_run_whose_pinning_is_refused_goes_on_with_the_same_losses(
    place: Toy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended before, with exit code 4; WSL is asked for what it gives, blocks first."""
    whole = trajectory(train(place, "whole", **STREAMED))
    with monkeypatch.context() as patched:
        driver = pinning_driver(patched)
        assert trajectory(train(place, "pinned", **STREAMED)) == whole
    assert len(driver.in_place) >= 3, "three blocks, and copies for saving"
    assert said(place.runs / "pinned", REFUSED) == []
    blocks = driver.in_place[:3]

    with monkeypatch.context() as patched:
        driver = pinning_driver(patched, most_bytes=sum(blocks) // 2)
        run = train(place, "refused", **STREAMED)
    assert trajectory(run) == whole
    assert driver.refusals == 1 and driver.peak_bytes <= sum(blocks) // 2
    (refusal,) = said(run, REFUSED)
    assert "takes two to three times as long, and steps wait for it" in refusal
    assert events(run, "finished")

    # With a driver that refuses a byte more than the platform's bound there is no refusal.
    most_bytes = -(-blocks[0] // 4096) * 4096 + -(-blocks[1] // 4096) * 4096 + 70_000
    monkeypatch.setattr("lora_trainer.hardware.machine.is_under_windows", lambda *_: True)
    monkeypatch.setattr("lora_trainer.hardware.machine.WSL_PINNABLE_BYTES", most_bytes)
    for module in ("planning.memory", "network.pinned_memory"):
        monkeypatch.setattr(f"lora_trainer.{module}.RESERVED_BYTES", 60_000)
    driver = pinning_driver(monkeypatch, most_bytes=most_bytes)
    run = train(place, "wsl", **STREAMED)
    assert driver.refusals == 0 and said(run, REFUSED) == []
    assert driver.in_place[:2] == blocks[:2], "what is copied in every step is pinned first"
    assert trajectory(run) == whole


# ---- compiled blocks: traced and differentiated as for the compiler, whose code is not made, as that takes minutes

COMPILED: dict[str, Any] = {
    "adapter__kind": "oft",
    "adapter__targets": "attention",
    "data__validation_fraction": 0.0,
    "hardware__compile": "blocks",
    "logging__trackers": [],
    "output__measure": False,
    "sampling__every_steps": 0,
    "train__batch_size": 1,
}


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The calls of compiled blocks in each run of a test."""
    found: list[list[int]] = []

    def make(*args: Any, **kwargs: Any) -> CompiledBlocks:
        blocks = CompiledBlocks(*args, backend="aot_eager", **kwargs)
        found.append(compiled_calls(blocks))
        kept = Path(os.environ["TORCHINDUCTOR_CACHE_DIR"])
        assert kept.parent.name == "compiled" and kept.parent.parent.name == "cache"
        return blocks

    torch.compiler.reset()  # else shapes that other tests compiled count towards the limit of this one
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setattr("lora_trainer.run.run_job.CompiledBlocks", make)
    return found


@pytest.fixture
def tiny(tmp_path: Path) -> Toy:
    """Images of one shape, on a tiny base."""
    return toy(tmp_path, images=1).with_base()


def went_on(tiny: Toy, folder: Path) -> tuple[Path, dict[str, Any]]:
    """Go on from the state of step 2 with a copy of the run; return its folder and what it said."""
    copied = tiny.copy(folder)
    shutil.rmtree(last_state(copied.run))
    (copied.run / "toy.safetensors").unlink()
    assert copied.train("--resume", steps=4, **COMPILED) == 0
    (resumed,) = events(copied.run, "resumed")
    assert resumed["step"] == 2
    return copied.run, resumed


def test_a_run_with_compiled_blocks_goes_on_exactly(
    tiny: Toy, made: list[list[int]], tmp_path: Path
) -> None:
    assert tiny.train(steps=4, **COMPILED) == 0
    assert len(made[0]) == 4 * len({*made[0]}), "every pass of every step, and nothing else"
    record = read_record(tiny.run)
    assert record.settings["hardware.compile"] == "blocks"
    assert record.environment.exactness["compiler"]
    run, resumed = went_on(tiny, tmp_path / "resumed")
    assert resumed["exactness"] == "EXACT", resumed["differences"]
    assert len(made[1]) == 2 * len({*made[0]})
    assert trajectory(run) == trajectory(tiny.run)
    assert contents(last_state(run)) == contents(last_state(tiny.run))


def test_a_run_whose_compiler_fails_is_the_one_without_and_says_so(
    tiny: Toy, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: Any, __: Any) -> Any:
        raise OSError("no compiler")

    tried: list[CompiledBlocks] = []

    def make(*args: Any, **kwargs: Any) -> CompiledBlocks:
        tried.append(CompiledBlocks(*args, backend=broken, **kwargs))
        return tried[-1]

    monkeypatch.setattr("lora_trainer.run.run_job.CompiledBlocks", make)
    assert tiny.train(steps=4, **COMPILED) == 0
    (said,) = (row for row in problems(tiny.run) if "compiled blocks" in row["what"])
    assert "no compiler" in said["what"] and "hardware.compile=none" in said["fix"]
    changes = [row for row in events(tiny.run, "change") if row["key"] == "hardware.compile"]
    assert [(row["old"], row["new"]) for row in changes] == [("blocks", "none")]
    run, _ = went_on(tiny, tmp_path / "resumed")
    assert len(tried) == 1, "a resumed run does not try again"
    assert contents(last_state(run)) == contents(last_state(tiny.run))
    assert tiny.train("--name", "plain", steps=4, **COMPILED | {"hardware__compile": "none"}) == 0
    assert trajectory(tiny.runs / "plain") == trajectory(tiny.run)

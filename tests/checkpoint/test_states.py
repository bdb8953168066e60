"""Resume states: damaged every way, pruned, exact to the bit; faults of the disk: reliability/."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.checkpoint.states import TrainingState, load_newest
from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from tests.fakes.states import bits, loaded_step, save_state, state_at

ALL_FILES = (
    "adapter.safetensors",
    "optim.safetensors",
    "optim.json",
    "state.json",
    "MANIFEST.json",
)


@pytest.fixture(scope="module")
def two_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "states"
    for step in (100, 200):
        save_state(folder, state_at(step))
    return folder


@pytest.fixture
def states(two_states: Path, tmp_path: Path) -> Path:
    """A folder of its own with the states of steps 100 and 200."""
    return shutil.copytree(two_states, tmp_path / "states")


def loaded(folder: Path) -> tuple[TrainingState | None, list[Event]]:
    events: list[Event] = []
    return load_newest(folder, events=EventStream(listeners=[events.append])), events


# ---- damaged states


DAMAGE: Mapping[str, Callable[[bytes, bytes], bytes | None]] = {
    "deleted": lambda data, other: None,
    "empty": lambda data, other: b"",
    "truncated": lambda data, other: data[: len(data) // 2],
    "lost last byte": lambda data, other: data[:-2],
    "longer": lambda data, other: data + b"x",
    "of another step": lambda data, other: other,
}
"""By name what becomes of a file's bytes, given those of step 100; flipped bits have a test of their own."""


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_state_is_moved_aside_and_the_older_one_used(
    two_states: Path, tmp_path: Path, name: str
) -> None:
    for damage, changed in DAMAGE.items():
        folder = shutil.copytree(two_states, tmp_path / damage)
        file, other = (folder / f"step-00000{step}" / name for step in (200, 100))
        spoilt = changed(file.read_bytes(), other.read_bytes())
        file.unlink()
        if spoilt is not None:
            file.write_bytes(spoilt)
        before = {path.name: path.read_bytes() for path in file.parent.iterdir()}
        state, (event,) = loaded(folder)
        assert bits(state) == bits(state_at(100)), damage
        aside = folder / "bad-step-00000200"
        assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
        assert (event.fields["file"], event.fields["severity"]) == ("step-00000200", "error")


def test_a_renamed_state_and_another_format_are_noticed(states: Path) -> None:
    shutil.copytree(states / "step-00000100", states / "step-00000900")
    assert loaded_step(states) == 200
    manifest = states / "step-00000200" / "MANIFEST.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format_version": 2}))
    state, (event,) = loaded(states)
    assert state is not None and state.step == 100
    assert "format is 2" in event.fields["what"]


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(ALL_FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_no_single_flipped_bit_is_used(
    two_states: Path, tmp_path_factory: pytest.TempPathFactory, name: str, where: float, bit: int
) -> None:
    """Only a flip in the manifest's white space can leave a state valid, as nothing is lost."""
    folder = shutil.copytree(two_states, tmp_path_factory.mktemp("flip") / "states")
    file = folder / "step-00000200" / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    file.write_bytes(data)
    state = load_newest(folder, events=None)
    assert state is not None and bits(state) == bits(state_at(state.step))
    assert state.step == 100 or name == "MANIFEST.json"


def test_a_second_bad_state_of_the_same_step_does_not_replace_the_first(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent", events=None) is None
    for content in ("first", "second"):
        (tmp_path / "step-00000007").mkdir(parents=True)
        (tmp_path / "step-00000007" / "note").write_text(content)
        assert load_newest(tmp_path, events=None) is None
    assert (tmp_path / "bad-step-00000007" / "note").read_text() == "first"
    assert (tmp_path / "bad-step-00000007.2" / "note").read_text() == "second"


def test_a_folder_that_cannot_be_listed_is_no_new_start(
    states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)  # Python 3.11 and 3.12
    monkeypatch.setattr(os, "scandir", refuse)  # 3.13
    with pytest.raises(MachineError, match="cannot read"):
        load_newest(states, events=None)


# ---- what is kept


@pytest.mark.parametrize(("keep", "expected"), [(1, [9, 50]), (3, [9, 40, 50])])
def test_the_newest_states_are_kept_never_fewer_than_two_and_nothing_else_is_touched(
    tmp_path: Path, keep: int, expected: list[int]
) -> None:
    others = {"bad-step-00000001", "step-1", "step-00000002.bak", "notes", ".tmp-step-00000003.1"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / "step-00000005").symlink_to(tmp_path / "notes")  # a state on another disk
    (tmp_path / f".tmp-step-00000010.{os.getpid()}" / "torn").mkdir(parents=True)
    for step in (10, 20, 30, 40, 50, 9):  # the state just saved is kept, whatever its step
        save_state(tmp_path, state_at(step), keep=keep)
    kept = {f"step-{step:08d}" for step in expected}
    assert {path.name for path in tmp_path.iterdir()} == {*others, *kept}
    for step in (99_999_999, 100_000_000):  # by number, not by name or time
        save_state(tmp_path, state_at(step))
    os.utime(tmp_path / "step-100000000", (0, 0))
    state = load_newest(tmp_path, events=None)
    assert state is not None and state.step == 100_000_000


def test_leftovers_of_living_processes_stay(states: Path) -> None:
    dead, living, own = 999_999_999, os.getppid(), os.getpid()
    for pid in (dead, living, own):
        for kind in ("tmp", "del"):
            (states / f".{kind}-step-00000300.{pid}").mkdir()
            (states / f".{kind}-step-00000300.{pid}" / "state.json").write_text("{}")
    state, events = loaded(states)
    assert state is not None and state.step == 200 and events == []
    left = {path.name for path in states.iterdir() if path.name.startswith(".")}
    assert left == {f".tmp-step-00000300.{living}", f".del-step-00000300.{living}"}


def test_every_file_and_folder_is_synced_before_the_state_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[str, str]] = []
    names: dict[int, str] = {}
    real = {name: getattr(os, name) for name in ("open", "fsync", "rename")}

    def opened(path: Any, *args: Any, **options: Any) -> int:
        descriptor: int = real["open"](path, *args, **options)
        names[descriptor] = Path(path).name
        return descriptor

    def renamed(source: Any, target: Any) -> None:
        done.append(("rename", Path(target).name))
        real["rename"](source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", lambda number: done.append(("fsync", names[number])))
    monkeypatch.setattr(os, "rename", renamed)
    for step in (1, 2, 3):
        save_state(tmp_path / "states", state_at(step))
    unfinished, own = f".tmp-step-00000003.{os.getpid()}", os.getpid()
    assert done[0] == ("fsync", tmp_path.name), "the new states folder is durable itself"
    assert done[-9:] == [
        *(("fsync", name) for name in ALL_FILES),
        ("fsync", unfinished),
        ("rename", "step-00000003"),
        ("fsync", "states"),
        ("rename", f".del-step-00000001.{own}"),
    ]


# ---- exact to the bit


def test_a_state_comes_back_bit_for_bit_from_files_without_pickle(tmp_path: Path) -> None:
    one, other = (save_state(tmp_path / run, state_at(250)) for run in ("a", "b"))
    state = load_newest(tmp_path / "a", events=None)
    assert state is not None
    assert bits(state) == bits(state_at(250))
    assert list(state.adapter) == list(state_at(250).adapter)
    first, second = state.optimizer["state"].values()
    assert first["qmap"] is second["wrapped"]["q"], "shared tensors stay shared"
    assert {path.name for path in one.iterdir()} == {*ALL_FILES}
    for name in ALL_FILES:
        data = (one / name).read_bytes()
        assert data == (other / name).read_bytes(), "the same state gives the same files"
        # A safetensors file begins with the length of its JSON header, eight bytes.
        assert data[8 if name.endswith(".safetensors") else 0 :].startswith(b"{")


def test_adapters_that_are_not_finite_and_foreign_values_are_not_saved(tmp_path: Path) -> None:
    spoilt = state_at(1)
    spoilt.adapter["a.down"][0, 0] = math.nan
    with pytest.raises(TrainingStopped, match=r"step 1 is not saved: a\.down"):
        save_state(tmp_path, spoilt)
    for guard, message in (
        ({"mask": torch.ones(1)}, r"there is a tensor at extras\.guard\.mask"),
        ({"seen": {1}}, r"cannot save a set at extras\.guard\.seen"),
        ({(1, 2): 3}, r"cannot save the key \(1, 2\)"),
    ):
        with pytest.raises(TypeError, match=message):
            save_state(tmp_path, replace(state_at(1), guard=guard))  # type: ignore[arg-type]  # wrong on purpose
    assert list(tmp_path.iterdir()) == []


plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


def round_trip(folder: Path, optimizer: dict[Any, Any]) -> Any:
    """Return an optimizer's values as they come back from the disk."""
    state = TrainingState(step=1, images_seen=0, adapter={}, optimizer=optimizer, guard={})
    save_state(folder, state)
    found = load_newest(folder, events=None)
    assert found is not None
    return found.optimizer


@settings(max_examples=40, deadline=None)
@given(plain_values)
def test_plain_values_survive(tmp_path_factory: pytest.TempPathFactory, value: Any) -> None:
    folder = tmp_path_factory.getbasetemp() / "plain"
    assert bits(round_trip(folder, {"value": value})) == bits({"value": value})


def test_tensors_of_every_kind_survive(tmp_path: Path) -> None:
    floats = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    others = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool)
    tensors: dict[Any, Any] = {
        f"{dtype} {shape}": torch.arange(math.prod(shape)).reshape(shape).to(dtype)
        for dtype in (*floats, *others)
        for shape in ((), (0, 3), (2, 3))
    }
    tensors |= {f"{name} T": tensor.T for name, tensor in tensors.items() if tensor.ndim}
    tensors |= {1: torch.ones(2), "1": torch.zeros(2)}  # both would be called 1 in the file
    assert bits(round_trip(tmp_path, tensors)) == bits(tensors)

"""Resume states: damaged every way, pruned, locked, exact to the bit; faults of the disk: reliability/."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from bitsandbytes.optim import AdamW8bit
from hypothesis import given, settings
from hypothesis import strategies as st

from lora_trainer.checkpoint.codec import Packed, pack, unpack
from lora_trainer.checkpoint.states import FILES, LoopValues, TrainingState, load_newest, save_state
from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.common.events import Event, EventStream, read_jsonl
from tests.fakes.states import bits, loaded_step, state_at

ALL_FILES = (*FILES, "MANIFEST.json")


@pytest.fixture(scope="module")
def two_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "states"
    for step in (100, 200):
        save_state(folder, state_at(step), keep=2)
    return folder


# ---- damaged states


def flip(data: bytes, position: int) -> bytes:
    return data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :]


DAMAGE: Mapping[str, Callable[[bytes], bytes | None]] = {
    "deleted": lambda data: None,
    "empty": lambda data: b"",
    "truncated": lambda data: data[: len(data) // 2],
    "lost last byte": lambda data: data[:-2],
    "longer": lambda data: data + b"x",
    "first byte flipped": lambda data: flip(data, 0),
    "middle byte flipped": lambda data: flip(data, len(data) // 2),
    "zeros": lambda data: bytes(len(data)),
}


def problems_of(folder: Path) -> tuple[TrainingState | None, list[Event]]:
    events: list[Event] = []
    return load_newest(folder, events=EventStream(listeners=[events.append])), events


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("name", ALL_FILES)
def test_a_damaged_state_is_moved_aside_and_the_older_one_used(
    two_states: Path, tmp_path: Path, name: str, damage: str
) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    file = folder / "step-00000200" / name
    spoilt = DAMAGE[damage](file.read_bytes())
    file.unlink()
    if spoilt is not None:
        file.write_bytes(spoilt)
    before = {path.name: path.read_bytes() for path in (folder / "step-00000200").iterdir()}
    found, events = problems_of(folder)
    assert bits(found) == bits(state_at(100))
    aside = folder / "bad-step-00000200"
    assert {path.name: path.read_bytes() for path in aside.iterdir()} == before
    (event,) = events
    assert event.fields["file"] == "step-00000200"
    assert event.fields["severity"] == "error"


@pytest.mark.parametrize("name", ALL_FILES)
def test_a_file_of_another_step_is_noticed(two_states: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    shutil.copy(folder / "step-00000100" / name, folder / "step-00000200" / name)
    assert loaded_step(folder) == 100


def test_a_renamed_state_is_noticed(two_states: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    shutil.copytree(folder / "step-00000100", folder / "step-00000900")
    assert loaded_step(folder) == 200


def test_another_format_version_is_named(two_states: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    manifest = folder / "step-00000200" / "MANIFEST.json"
    newer = json.loads(manifest.read_text()) | {"format_version": 2}
    manifest.write_text(json.dumps(newer))
    found, (event,) = problems_of(folder)
    assert found is not None
    assert found.step == 100
    assert "format is 2" in event.fields["what"]


@settings(max_examples=50, deadline=None)
@given(
    name=st.sampled_from(ALL_FILES), where=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7)
)
def test_no_single_flipped_bit_is_used(
    two_states: Path, tmp_path_factory: pytest.TempPathFactory, name: str, where: float, bit: int
) -> None:
    """Only a flip in the manifest's white space can leave a state valid, as nothing is lost."""
    folder = tmp_path_factory.mktemp("flip") / "states"
    shutil.copytree(two_states, folder)
    file = folder / "step-00000200" / name
    data = bytearray(file.read_bytes())
    data[int(where * len(data))] ^= 1 << bit
    file.write_bytes(data)
    found = load_newest(folder, events=None)
    assert found is not None
    assert bits(found) == bits(state_at(found.step))
    assert found.step == 100 or name == "MANIFEST.json"


def test_all_states_damaged_is_not_an_error_but_reported(two_states: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    for file in folder.glob("step-*/state.json"):
        file.unlink()
    found, events = problems_of(folder)
    assert found is None
    assert [event.fields["file"] for event in events] == ["step-00000200", "step-00000100"]
    assert len(list(folder.glob("bad-step-*"))) == 2


def test_a_second_bad_state_of_the_same_step_does_not_replace_the_first(tmp_path: Path) -> None:
    for content in ("first", "second"):
        (tmp_path / "step-00000007").mkdir(parents=True)
        (tmp_path / "step-00000007" / "note").write_text(content)
        assert load_newest(tmp_path, events=None) is None
    assert (tmp_path / "bad-step-00000007" / "note").read_text() == "first"
    assert (tmp_path / "bad-step-00000007.2" / "note").read_text() == "second"


def test_nothing_to_load(tmp_path: Path) -> None:
    assert load_newest(tmp_path / "absent", events=None) is None
    assert load_newest(tmp_path, events=None) is None


def test_a_folder_that_cannot_be_listed_is_no_new_start(
    two_states: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(MachineError, match="cannot read"):
        load_newest(two_states, events=None)


# ---- what is kept


@pytest.mark.parametrize(("keep", "expected"), [(1, [40, 50]), (2, [40, 50]), (3, [30, 40, 50])])
def test_the_newest_states_are_kept_but_never_fewer_than_two(
    tmp_path: Path, keep: int, expected: list[int]
) -> None:
    for step in (10, 20, 30, 40, 50):
        save_state(tmp_path, state_at(step), keep=keep)
    assert sorted(int(path.name[5:]) for path in tmp_path.glob("step-*")) == expected
    assert {path.name for path in tmp_path.iterdir()} == {
        "log.jsonl",
        *(f"step-{step:08d}" for step in expected),
    }


def test_the_state_just_saved_is_kept_even_below_stale_ones(tmp_path: Path) -> None:
    for step in (100, 200, 300, 50):
        save_state(tmp_path, state_at(step), keep=2)
    assert {path.name for path in tmp_path.glob("step-*")} == {"step-00000050", "step-00000300"}


def test_pruning_touches_nothing_else(tmp_path: Path) -> None:
    others = ["bad-step-00000001", "step-1", "step-00000002.bak", "notes", ".tmp-step-00000003.1"]
    for name in others:
        (tmp_path / name).mkdir()
    for step in (10, 20, 30):
        save_state(tmp_path, state_at(step), keep=2)
    assert {path.name for path in tmp_path.iterdir()} >= set(others)


def test_steps_are_ordered_by_number_not_by_name_or_time(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000):
        save_state(tmp_path, state_at(step), keep=2)
    os.utime(tmp_path / "step-100000000", (0, 0))
    assert loaded_step(tmp_path) == 100_000_000


def test_leftovers_of_living_processes_stay(two_states: Path, tmp_path: Path) -> None:
    folder = tmp_path / "states"
    shutil.copytree(two_states, folder)
    dead, living, own = 999_999_999, os.getppid(), os.getpid()
    for pid in (dead, living, own):
        for kind in ("tmp", "del"):
            (folder / f".{kind}-step-00000300.{pid}").mkdir()
            (folder / f".{kind}-step-00000300.{pid}" / "state.json").write_text("{}")
    found, events = problems_of(folder)
    assert found is not None
    assert found.step == 200
    assert events == []
    left = {path.name for path in folder.iterdir() if path.name.startswith(".")}
    assert left == {f".tmp-step-00000300.{living}", f".del-step-00000300.{living}"}


def test_what_an_earlier_save_of_this_process_left_is_no_obstacle(tmp_path: Path) -> None:
    unfinished = tmp_path / f".tmp-step-00000001.{os.getpid()}"
    unfinished.mkdir()
    (unfinished / "adapter.safetensors").write_bytes(b"half")
    save_state(tmp_path, state_at(1), keep=2)
    assert loaded_step(tmp_path) == 1


def test_the_log_has_one_line_per_state_even_after_a_torn_one(tmp_path: Path) -> None:
    save_state(tmp_path, state_at(1), keep=2)
    with (tmp_path / "log.jsonl").open("ab") as log:
        log.write(b'{"step": 2, "by')
    save_state(tmp_path, state_at(3), keep=2)
    rows = read_jsonl(tmp_path / "log.jsonl")
    assert [row["step"] for row in rows] == [1, 3]
    size = sum(file.stat().st_size for file in (tmp_path / "step-00000003").iterdir())
    assert rows[1]["bytes"] == size


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

    def synced(descriptor: int) -> None:
        done.append(("fsync", names[descriptor]))

    def renamed(source: Any, target: Any) -> None:
        done.append(("rename", Path(target).name))
        real["rename"](source, target)

    monkeypatch.setattr(os, "open", opened)
    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    for step in (1, 2, 3):
        save_state(tmp_path / "states", state_at(step), keep=2)
    unfinished, own = f".tmp-step-00000003.{os.getpid()}", os.getpid()
    assert done[0] == ("fsync", tmp_path.name), "the new states folder is durable itself"
    assert done[-10:] == [
        *(("fsync", name) for name in ALL_FILES),
        ("fsync", unfinished),
        ("rename", "step-00000003"),
        ("fsync", "states"),
        ("fsync", "log.jsonl"),
        ("rename", f".del-step-00000001.{own}"),
    ]


# ---- exact to the bit


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    save_state(tmp_path, state_at(250), keep=2)
    found = load_newest(tmp_path, events=None)
    assert found is not None
    assert bits(found) == bits(state_at(250))
    assert list(found.adapter) == list(state_at(250).adapter)
    first, second = found.optimizer["state"].values()
    assert first["qmap"] is second["wrapped"]["q"], "shared tensors stay shared"


def test_the_same_state_gives_the_same_files(tmp_path: Path) -> None:
    for run in ("a", "b"):
        save_state(tmp_path / run, state_at(5), keep=2)
    for name in ALL_FILES:
        one, other = (tmp_path / run / "step-00000005" / name for run in ("a", "b"))
        assert one.read_bytes() == other.read_bytes()


def test_spoilt_adapters_and_foreign_values_are_not_saved(tmp_path: Path) -> None:
    spoilt = state_at(1)
    spoilt.adapter["a.down"][0, 0] = math.nan
    with pytest.raises(TrainingStopped, match=r"step 1 is not saved: a\.down"):
        save_state(tmp_path, spoilt, keep=2)
    plain = vars(state_at(1))
    with pytest.raises(TypeError, match=r"there is a tensor at extras\.guard\.mask"):
        save_state(
            tmp_path,
            TrainingState(**plain | {"loop": LoopValues(guard={"mask": torch.ones(1)})}),
            keep=2,
        )
    with pytest.raises(TypeError, match=r"cannot save a set at extras\.guard\.seen"):
        save_state(
            tmp_path, TrainingState(**plain | {"loop": LoopValues(guard={"seen": {1}})}), keep=2
        )
    assert list(tmp_path.iterdir()) == []


def test_no_pickle_is_written(tmp_path: Path) -> None:
    folder = save_state(tmp_path, state_at(1), keep=2)
    for file in folder.iterdir():
        assert file.suffix in {".json", ".safetensors"}
        # A safetensors file begins with the length of its JSON header, eight bytes.
        first = 8 if file.suffix == ".safetensors" else 0
        assert file.read_bytes()[first : first + 1] == b"{"


OPTIMIZERS: Mapping[str, Callable[[list[torch.nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda weights: torch.optim.AdamW(weights, lr=1e-3),
    "sgd with momentum": lambda weights: torch.optim.SGD(weights, lr=1e-3, momentum=0.9),
    "adamw8bit": lambda weights: AdamW8bit(weights, lr=1e-3),
}


def training(optimizer: str) -> tuple[list[torch.nn.Parameter], torch.optim.Optimizer]:
    """Return two weights, one large enough for 8-bit moments and one below their limit of 4096."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((64, 128), (4, 8))
    weights = [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in shapes]
    return weights, OPTIMIZERS[optimizer](weights)


def take_steps(
    weights: list[torch.nn.Parameter], optimizer: torch.optim.Optimizer, *, steps: range
) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for weight in weights:
            weight.grad = torch.randn(weight.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_goes_on_with_the_same_bits(name: str, tmp_path: Path) -> None:
    weights, optimizer = training(name)
    take_steps(weights, optimizer, steps=range(3))
    adapter = {str(number): weight for number, weight in enumerate(weights)}
    saved = TrainingState(
        step=3,
        images_seen=3,
        adapter=adapter,
        optimizer=optimizer.state_dict(),
        loop=LoopValues(guard={}),
    )
    save_state(tmp_path, saved, keep=2)
    take_steps(weights, optimizer, steps=range(3, 6))

    found = load_newest(tmp_path, events=None)
    assert found is not None
    resumed_weights, resumed_optimizer = training(name)
    with torch.no_grad():
        for number, weight in enumerate(resumed_weights):
            weight.copy_(found.adapter[str(number)])
    resumed_optimizer.load_state_dict(dict(found.optimizer))
    take_steps(resumed_weights, resumed_optimizer, steps=range(3, 6))
    assert bits(resumed_weights) == bits(weights)
    assert bits(resumed_optimizer.state_dict()) == bits(optimizer.state_dict())


def test_8_bit_moments_are_stored_as_bytes(tmp_path: Path) -> None:
    weights, optimizer = training("adamw8bit")
    take_steps(weights, optimizer, steps=range(1))
    packed = pack(optimizer.state_dict())
    assert {str(tensor.dtype) for tensor in packed.tensors.values()} == {
        "torch.uint8",
        "torch.float32",
    }


# ---- the codec

plain_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=50, deadline=None)
@given(plain_values)
def test_plain_values_survive_json(value: Any) -> None:
    tree = json.loads(json.dumps(pack(value).tree, allow_nan=False))
    assert bits(unpack(Packed(tree=tree, tensors={}))) == bits(value)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.bool,
        torch.uint8,
        torch.int8,
    ],
)
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_of_every_kind_survive(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    state = TrainingState(
        step=1,
        images_seen=0,
        adapter={},
        optimizer={"a": tensor, "b": tensor.T if tensor.ndim else 0},
        loop=LoopValues(guard={}),
    )
    save_state(tmp_path, state, keep=2)
    found = load_newest(tmp_path, events=None)
    assert found is not None
    assert bits(found.optimizer) == bits(state.optimizer)


def test_a_packed_tensor_is_a_snapshot() -> None:
    weight = torch.ones(2)
    packed = pack({1: weight, "1": torch.zeros(2)})
    weight += 1
    assert unpack(packed)[1].tolist() == [1.0, 1.0]
    assert unpack(packed)["1"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("tree", [3, {"int": "1", "float": "0x0p+0"}, {"set": []}, {}])
def test_a_damaged_tree_is_refused(tree: Any) -> None:
    with pytest.raises(ValueError, match="packed value"):
        unpack(Packed(tree=tree, tensors={}))

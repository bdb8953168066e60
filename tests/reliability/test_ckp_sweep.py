"""CKP-02 and CKP-03: every writer is killed and failed at every one of its file operations.

What counts is what is found afterwards: the old content or the new one, whole, and nothing half-done.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.checkpoint.states import TrainingState, load_newest
from lora_trainer.common.errors import MachineError
from lora_trainer.common.events import read_jsonl
from lora_trainer.common.files import CappedFolder
from lora_trainer.run import run_folder
from tests.fakes.adapters import export, exported, small_adapter
from tests.fakes.disk import Disk, Killed, operations_of
from tests.fakes.states import bits, loaded_step, save_state, state_at

Figure = Callable[..., None]
KEY = CacheKey.of("text", text="a cat")
ERRORS = [errno.EIO, errno.ENOSPC, errno.EACCES, errno.EPERM]


@pytest.fixture(scope="module")
def two_states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "states"
    for step in (100, 200):
        save_state(folder, state_at(step), keep=2)
    return folder


@pytest.mark.parametrize("error", [Killed(), OSError(errno.EIO, "Input/output error")])
def test_ckp_02_03_a_fault_while_loading_loses_nothing(
    two_states: Path, tmp_path: Path, error: BaseException
) -> None:
    """The newest state is damaged and leftovers lie about; loading is stopped at each operation."""

    def prepared(name: str) -> Path:
        folder = tmp_path / name
        shutil.copytree(two_states, folder)
        (folder / "step-00000300").mkdir()
        shutil.copytree(folder / "step-00000100", folder / ".tmp-step-00000400.999999999")
        (folder / ".del-step-00000050.999999999").mkdir()
        return folder

    whole = prepared("whole")
    count = operations_of(lambda: load_newest(whole, events=None))
    assert count >= 8
    for at in range(count):
        folder = prepared(f"fault{at}")
        with Disk(at=at, error=error, after=at % 2 == 0).in_use():
            try:
                found = load_newest(folder, events=None)
            except Killed:
                found = None
            except MachineError as told:
                assert "Input/output error" in told.found
                found = None
        assert found is None or bits(found) == bits(state_at(200))
        assert loaded_step(folder) == 200
        assert (folder / "bad-step-00000300").is_dir()


class Writer(NamedTuple):
    """Writes version 0 or 1 of something into a folder; `read` says which is there, None: nothing."""

    write: Callable[[Path, int], object]
    read: Callable[[Path], int | None]


def of_states(*before: TrainingState) -> Writer:
    """Return a writer of a state after some others, of which the last one is version 0."""
    new = state_at(300)

    def write(folder: Path, version: int) -> None:
        states = folder / "states"
        last = {path.name for path in states.glob(f"step-{before[-1].step:08d}")}
        for state in (before, [new])[version]:
            save_state(states, state)
        assert version == 0 or {path.name for path in states.iterdir()} == {"step-00000300", *last}

    def read(folder: Path) -> int | None:
        state = load_newest(folder / "states", events=None)
        assert bits(load_newest(folder / "states", events=None)) == bits(state), "it is still there"
        assert not list((folder / "states").glob(".*")), "what was half done is gone"
        return None if state is None else [bits(before[-1]), bits(new)].index(bits(state))

    return Writer(write, read)


def write_cache(folder: Path, version: int) -> None:
    cache(folder).write(KEY, {"mean": np.full((2, 3, 4), float(version), dtype=np.float32)})


def read_cache(folder: Path) -> int | None:
    arrays = cache(folder).read(KEY)
    return None if arrays is None else int(arrays["mean"].min())


def cache(folder: Path) -> Cache:
    def problem(what: str, **_: object) -> None:
        raise AssertionError(f"a fault of the disk is not a damaged entry: {what}")

    return Cache(
        folder=CappedFolder(root=folder / "cache", limit_bytes=1 << 30), on_problem=problem
    )


def write_adapter(folder: Path, version: int) -> None:
    export(folder / "a.safetensors", small_adapter(version), precision="fp16")


def read_adapter(folder: Path) -> int | None:
    file = folder / "a.safetensors"
    whole = [exported(small_adapter(version), precision="fp16") for version in (0, 1)]
    return whole.index(file.read_bytes()) if file.exists() else None


def write_log(folder: Path, version: int) -> None:
    """A resume drops what came after its state; version 0 is the whole log, 1 the shortened one."""
    if version == 0:
        rows = [{"event": "step", "step": step} for step in (1, 2, 3)]
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    else:
        run_folder.cut_events(folder, step=2)


def read_log(folder: Path) -> int | None:
    steps = [row["step"] for row in read_jsonl(folder / "events.jsonl")]
    return {(): None, (1, 2, 3): 0, (1, 2): 1}[tuple(steps)]


WRITERS = {
    "state": of_states(state_at(100), state_at(200)),
    "state of a step": of_states(state_at(300, seed=99)),
    "cache entry": Writer(write_cache, read_cache),
    "export": Writer(write_adapter, read_adapter),
    "events.jsonl": Writer(write_log, read_log),
}


@pytest.mark.parametrize(
    ("name", "first"),
    [*((name, False) for name in WRITERS), ("state", True), ("cache entry", True)],
)
def test_ckp_02_03_a_fault_leaves_each_file_as_it_was_or_as_it_should_be(
    name: str, first: bool, tmp_path: Path, figure: Figure
) -> None:
    """A kill, and an error, which is one line, at each operation; `first`: there was nothing before."""
    writer = WRITERS[name]

    def begun(folder: Path) -> Path:
        folder.mkdir()
        if not first:
            writer.write(folder, 0)
        return folder

    whole = begun(tmp_path / "count")
    count = operations_of(lambda: writer.write(whole, 1))
    seen: dict[bool, list[int]] = {False: [], True: []}
    for at in range(count):
        for after in (False, True):
            folder = begun(tmp_path / f"{at}-{after}")
            with pytest.raises(Killed), Disk(at=at, error=Killed(), after=after).in_use():
                writer.write(folder, 1)
            found = writer.read(folder)
            assert found in ((None, 1) if first else (0, 1))
            seen[after].append(int(found == 1))
            writer.write(folder, 1)
            assert writer.read(folder) == 1, "what a kill left is not an obstacle"
        folder = begun(tmp_path / f"{at}")
        error = OSError(ERRORS[at % len(ERRORS)], os.strerror(ERRORS[at % len(ERRORS)]))
        allowed: tuple[int | None, ...] = (1,)  # only what did not matter may pass
        try:
            with Disk(at=at, error=error, after=at % 3 == 0).in_use():
                writer.write(folder, 1)
        except MachineError as told:
            assert str(error.strerror) in told.found or at % 3 == 0, "it is closed and closed again"
            allowed = (None, 1) if first else (0, 1)
        left = [path for path in folder.rglob(".tmp-*") if at < count - 1]
        assert not left, "the temporary file is removed"
        assert writer.read(folder) in allowed
    assert all(outcomes == sorted(outcomes) for outcomes in seen.values())
    assert {0, 1} == {*seen[False], *seen[True]}, "before and after the moment that counts"
    figure("io_kills", tried=2 * count, survived=2 * count)
    figure("io_errors", tried=count, survived=count)

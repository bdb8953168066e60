"""A cache is emptied when nobody works with it, and only of its own; whole entries are not read again."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_trainer.cache.store import Cache, CacheKey, clear, entries, in_use, missing
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import CappedFolder
from tests.fakes.runs import ROOT

NAME = f"{'0123456789abcdef' * 4}.safetensors"
OURS = (f"latents/01/{NAME}", f"text/01/{NAME}", f"damaged/{NAME}")
NOT_OURS = (
    "notes.txt",
    ".memo.sqlite",
    NAME,
    f"mine/{NAME}",
    "latents/01/model.safetensors",
    f"latents/01/{NAME}.bak",
)
HOLDS = """
import sys
from pathlib import Path
from lora_trainer.cache.store import in_use
with in_use(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def cache(tmp_path: Path) -> CappedFolder:
    folder = CappedFolder(root=tmp_path / "cache", limit_bytes=1 << 20)
    folder.create()
    for name in (*OURS, *NOT_OURS):
        path = folder.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * 10)
    return folder


def test_entries_go_and_everything_else_stays(cache: CappedFolder) -> None:
    assert sum(size for _, size in entries(cache)) == 30
    assert clear(cache) == (3, 30)
    there = {path.relative_to(cache.root).as_posix() for path in cache.root.rglob("*")}
    assert not there & set(OURS) and there >= set(NOT_OURS)
    (cache.root / cache.marker).unlink()
    with pytest.raises(MachineError, match="is not a cache"):
        clear(cache)
    with in_use(cache.root / "deep" / "cache"):
        assert len(list((cache.root / "deep" / "cache").glob(".in-use-*"))) == 1
    assert not list((cache.root / "deep" / "cache").glob(".in-use-*"))
    with pytest.raises(MachineError, match="cannot write"), in_use(cache.root / NAME / "cache"):
        pass


def test_a_cache_that_a_training_uses_is_left_alone(cache: CappedFolder) -> None:
    command = [sys.executable, "-c", HOLDS, str(cache.root)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, cwd=ROOT, **pipes) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        with pytest.raises(MachineError, match="a training uses"):
            clear(cache)
        assert sum(size for _, size in entries(cache)) == 30
        process.kill()
        process.communicate("")
    assert clear(cache) == (3, 30)
    assert not list(cache.root.glob(".in-use-*"))


# ---- entries that were found whole are not read again


class Whole:
    """Three entries, which of them `missing` reads, and what is said of them."""

    def __init__(self, folder: CappedFolder, monkeypatch: pytest.MonkeyPatch) -> None:
        self.said: list[str] = []
        self.cache = Cache(folder=folder, on_problem=lambda what, **_: self.said.append(what))
        self.keys = [CacheKey.of("text", text=str(index)) for index in range(3)]
        self.read: list[int] = []
        real = Cache.read

        def noted(cache: Cache, key: CacheKey) -> object:
            self.read.append(self.keys.index(key))
            return real(cache, key)

        monkeypatch.setattr(Cache, "read", noted)
        self.write(age_s=7200)

    def write(self, *, age_s: float) -> None:
        for index, key in enumerate(self.keys):
            self.cache.write(key, {"x": np.full(40, index, dtype=np.float32)})
            at_s = time.time() - age_s
            os.utime(self.cache.path(key), (at_s, at_s))

    def missing(self) -> tuple[set[int], list[int]]:
        """Return which entries are missing, and which were read to know it."""
        self.read.clear()
        digests = missing(self.keys, self.cache)
        return {self.keys.index(key) for key in self.keys if key.digest in digests}, sorted(
            self.read
        )

    def damage(self, index: int) -> None:
        data = bytearray(self.cache.path(self.keys[index]).read_bytes())
        data[-3] ^= 1
        self.cache.path(self.keys[index]).write_bytes(data)


@pytest.fixture
def whole(cache: CappedFolder, monkeypatch: pytest.MonkeyPatch) -> Whole:
    (cache.root / ".memo.sqlite").unlink()
    return Whole(cache, monkeypatch)


def test_whole_entries_are_read_once_and_changed_ones_again(whole: Whole) -> None:
    assert whole.missing() == (set(), [0, 1, 2])
    assert whole.missing() == (set(), [])
    first, second, third = map(whole.cache.path, whole.keys)
    whole.damage(0)
    second.unlink()
    before = third.stat()
    third.rename(third.with_name("kept"))  # keeps its inode from being used again
    third.write_bytes(third.with_name("kept").read_bytes())
    os.utime(third, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert whole.missing() == ({0, 1}, [0, 2])
    assert "moved to damaged/" in whole.said[0] and not first.exists()
    whole.write(age_s=0)
    for _ in range(2):
        assert whole.missing() == (set(), [0, 1, 2]), "a power cut can still take what is young"


def test_entries_that_were_removed_are_forgotten(whole: Whole) -> None:
    def remembered() -> set[bytes]:
        with closing(sqlite3.connect(whole.cache.folder.root / ".memo.sqlite")) as memo:
            return {key for (key,) in memo.execute("SELECT key FROM memo")}

    whole.missing()
    assert remembered() == {key.digest.encode() for key in whole.keys}
    small = replace(whole.cache.folder, limit_bytes=1)
    replace(whole.cache, folder=small).prune(whole.keys[:1])
    assert remembered() == {whole.keys[0].digest.encode()}
    clear(small)
    assert remembered() == set()


@pytest.mark.parametrize("method", ["open", "replace", "replace, of another user"])
def test_a_bad_entry_that_stays_where_it_is_passes_for_whole_no_more(
    method: str, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else every start would take it for whole, and every training stop at it."""
    whole.missing()
    method, _, of_another = method.partition(",")
    bad, real = whole.cache.path(whole.keys[0]), getattr(Path, method)
    times = bad.stat()
    whole.damage(0)
    os.utime(bad, ns=(times.st_atime_ns, times.st_mtime_ns))  # a bit that rotted

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == bad:
            raise OSError(5, "Input/output error")
        return real(self, *arguments, **options)

    def refuse(*_: Any, **options: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(Path, method, fail)
        if of_another:
            patch.setattr(os, "utime", refuse)
        assert whole.cache.read(whole.keys[0]) is None and bad.exists()
        refused = "cannot be read" if method == "open" else "cannot be moved aside"
        assert f"{refused} (Input/output error)" in whole.said[0]
        assert whole.missing()[0] == {0}


def test_use_is_noted_without_a_change_of_the_time_of_writing(whole: Whole) -> None:
    def since_use_s() -> list[float]:
        return [time.time() - whole.cache.path(key).stat().st_atime for key in whole.keys]

    whole.missing()
    assert max(since_use_s()) < 60
    for key in whole.keys:
        os.utime(whole.cache.path(key), ns=(0, whole.cache.path(key).stat().st_mtime_ns))
        whole.cache.read(key)
    assert max(since_use_s()) < 60
    assert whole.missing() == (set(), [])


def test_a_memo_that_cannot_be_written_is_said_and_stops_nothing(whole: Whole) -> None:
    (whole.cache.folder.root / ".memo.sqlite").mkdir()
    assert whole.missing() == (set(), [0, 1, 2])
    assert "unable to open database file" in whole.said[0]

"""What is known to be whole is not read again; what is not known, changed or young, is."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_trainer.cache.keys import CacheKey, text_key
from lora_trainer.cache.store import MAX_REMEMBERED, Cache, CacheIndex, missing
from lora_trainer.common.files import CappedFolder
from lora_trainer.common.memo import FILE_NAME, MemoTable

COUNT = 3


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def cache(tmp_path: Path, told: list[str]) -> Cache:
    folder = CappedFolder(root=tmp_path / "cache", limit_bytes=1 << 30)
    folder.create()
    return Cache(folder=folder, on_problem=lambda what, **_: told.append(what))


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the digests of the entries that are read."""
    found: list[str] = []
    real = Cache.read

    def noted(self: Cache, key: CacheKey) -> object:
        found.append(key.digest)
        return real(self, key)

    monkeypatch.setattr(Cache, "read", noted)
    return found


def written(cache: Cache, *, age_s: float = 600.0, count: int = COUNT) -> list[CacheKey]:
    keys = [
        text_key(text=f"text {index}", encoder_identity="e", max_tokens=7, content="fp32")
        for index in range(count)
    ]
    for index, key in enumerate(keys):
        cache.write(key, {"x": np.full(40, index, dtype=np.float32)})
        at_s = time.time() - age_s
        os.utime(cache.path(key), (at_s, at_s))
    return keys


def damage(cache: Cache, key: CacheKey) -> None:
    data = bytearray(cache.path(key).read_bytes())
    data[-3] ^= 1
    cache.path(key).write_bytes(data)


def test_whole_entries_are_read_once(cache: Cache, read: list[str]) -> None:
    keys = written(cache)
    assert missing(keys, cache) == frozenset()
    assert read == [key.digest for key in keys]
    assert missing(keys, cache) == frozenset()
    assert len(read) == COUNT


def test_what_is_not_there_is_missing(cache: Cache) -> None:
    keys = written(cache)
    assert missing(keys, cache) == frozenset()
    cache.path(keys[1]).unlink()
    assert missing(keys, cache) == {keys[1].digest}


def test_an_entry_damaged_after_it_was_found_whole_is_found_out(
    cache: Cache, told: list[str]
) -> None:
    """By the time of its change, at the same size: it is moved aside as ever."""
    keys = written(cache)
    missing(keys, cache)
    damage(cache, keys[0])
    assert missing(keys, cache) == {keys[0].digest}
    assert "moved to damaged/" in told[0]
    assert not cache.has(keys[0])


@pytest.mark.parametrize("fault", ["cannot be read", "cannot be moved"])
def test_a_bad_entry_that_stays_where_it_is_passes_for_whole_no_more(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    """Else every start would take it for whole, and every training stop at it."""
    keys = written(cache)
    missing(keys, cache)
    bad = cache.path(keys[0])

    real = Path.open

    def fail(self: Path, *arguments: Any, **options: Any) -> Any:
        if self == bad:
            raise OSError(5, "Input/output error")
        return real(self, *arguments, **options)

    with monkeypatch.context() as patch:
        if fault == "cannot be moved":
            times = bad.stat()
            damage(cache, keys[0])
            os.utime(bad, ns=(times.st_atime_ns, times.st_mtime_ns))  # a bit that rotted
            patch.setattr(Path, "replace", fail)
        else:
            patch.setattr(Path, "open", fail)
        assert cache.read(keys[0]) is None
        assert bad.exists()
        assert missing(keys, cache) == {keys[0].digest}


def test_another_file_under_the_same_name_and_time_is_read(cache: Cache, read: list[str]) -> None:
    keys = written(cache)
    missing(keys, cache)
    path, before = cache.path(keys[0]), cache.path(keys[0]).stat()
    path.rename(path.with_name("kept"))  # keeps its inode from being used again
    path.write_bytes(path.with_name("kept").read_bytes())
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    read.clear()
    assert missing(keys, cache) == frozenset()
    assert read == [keys[0].digest]


def test_an_entry_that_may_not_be_on_the_disk_yet_is_read_again(
    cache: Cache, read: list[str]
) -> None:
    keys = written(cache, age_s=0)
    missing(keys, cache)
    missing(keys, cache)
    assert len(read) == 2 * COUNT
    assert not (cache.folder.root / FILE_NAME).exists()


def test_reading_for_training_does_not_make_it_forgotten(cache: Cache, read: list[str]) -> None:
    """Its use is noted without a change of the time of its last change."""
    keys = written(cache, age_s=7200)
    missing(keys, cache)
    before = [cache.path(key).stat() for key in keys]
    assert all(time.time() - stat.st_atime < 60 for stat in before), "noted"
    for key in keys:
        os.utime(cache.path(key), ns=(0, cache.path(key).stat().st_mtime_ns))
        cache.read(key)
        assert time.time() - cache.path(key).stat().st_atime < 60, "noted again"
    read.clear()
    missing(keys, cache)
    assert read == []


def test_many_entries_are_read_by_several_threads_with_the_same_answer(
    cache: Cache, told: list[str]
) -> None:
    keys = written(cache, count=150)
    for index in (3, 77, 149):
        damage(cache, keys[index])
    assert missing(keys, cache) == {keys[index].digest for index in (3, 77, 149)}
    assert len(told) == 3


@pytest.mark.parametrize("data", [b"", b"\n", b"not a checksum\n12345678", bytes(100)])
def test_a_damaged_memo_is_an_empty_one(cache: Cache, read: list[str], data: bytes) -> None:
    keys = written(cache)
    missing(keys, cache)
    (cache.folder.root / FILE_NAME).write_bytes(data)
    assert missing(keys, cache) == frozenset()
    assert len(read) == 2 * COUNT


def index_in(folder: Path) -> CacheIndex:
    return CacheIndex(table=MemoTable.load(folder, "whole entries"))


def test_what_two_runs_find_is_kept_of_both(tmp_path: Path) -> None:
    first, second = (index_in(tmp_path) for _ in range(2))
    first.add(1)
    second.add(2)
    first.save()
    second.save()
    assert set(index_in(tmp_path).written_stamps) == {1, 2}


def test_what_was_not_used_is_forgotten_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_REMEMBERED >= 1_000_000
    monkeypatch.setattr("lora_trainer.cache.store.MAX_REMEMBERED", 3)
    memo = index_in(tmp_path)
    for stamp in (1, 2, 3):
        memo.add(stamp)
    memo.save()
    later = index_in(tmp_path)
    assert later.has(1)
    later.add(4)
    later.save()
    assert set(index_in(tmp_path).written_stamps) == {3, 1, 4}


def test_a_memo_that_cannot_be_written_is_said_and_stops_nothing(
    cache: Cache, told: list[str]
) -> None:
    keys = written(cache)
    (cache.folder.root / FILE_NAME).mkdir()
    assert missing(keys, cache) == frozenset()
    assert "unable to open database file" in told[0]

"""The memo of a cache folder: several processes save, and no damage gives a wrong value."""

from __future__ import annotations

import os
import sqlite3
import time
from pathlib import Path

import pytest

from lora_trainer.common import memo
from lora_trainer.common.errors import MachineError
from lora_trainer.common.files import sha256_bytes, sha256_file
from lora_trainer.common.memo import FILE_NAME, HashMemo, MemoTable, is_damaged

ENTRIES = {"a": "1", "b": "two", os.fsdecode(b"/\xff.png"): "a name that is not UTF-8"}


def saved(folder: Path, entries: dict[str, str] | None = None, *, version: str = "1") -> None:
    table = MemoTable.load(folder, "numbers", version=version)
    for key, value in (entries or ENTRIES).items():
        table.put(key, value)
    table.save()


def loaded(folder: Path, *, version: str = "1") -> dict[str, str]:
    return MemoTable.load(folder, "numbers", version=version).entries


def test_values_are_there_for_the_next_process(tmp_path: Path) -> None:
    saved(tmp_path / "cache")
    assert loaded(tmp_path / "cache") == ENTRIES
    assert not is_damaged(tmp_path / "cache")


def test_entries_that_two_processes_save_are_both_there(tmp_path: Path) -> None:
    first, second = MemoTable.load(tmp_path, "numbers"), MemoTable.load(tmp_path, "numbers")
    first.put("a", "1")
    second.put("b", "2")
    first.save()
    second.save()
    assert loaded(tmp_path) == {"a": "1", "b": "2"}


def test_values_of_another_version_are_forgotten(tmp_path: Path) -> None:
    saved(tmp_path)
    other = MemoTable.load(tmp_path, "other")
    other.put("a", "3")
    other.save()
    assert loaded(tmp_path, version="2") == {}
    saved(tmp_path, {"c": "4"}, version="2")
    assert loaded(tmp_path, version="2") == {"c": "4"}
    assert loaded(tmp_path) == {}
    assert other.stored() == {"a": "3"}


@pytest.mark.parametrize("content", [b"half", b"{}", b"SQLite format 3\x00" + bytes(200)])
def test_a_damaged_memo_is_an_empty_one_and_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / FILE_NAME).write_bytes(content)
    assert loaded(tmp_path) == {}
    assert is_damaged(tmp_path)
    saved(tmp_path)
    assert loaded(tmp_path) == ENTRIES


def test_no_flipped_bit_gives_a_wrong_value(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / FILE_NAME
    data = file.read_bytes()
    lost = 0
    for index in range(len(data)):
        if data[index] == 0 and index % 16:
            continue  # pages are mostly empty
        flipped = bytearray(data)
        flipped[index] ^= 1
        file.write_bytes(flipped)
        entries = loaded(tmp_path)
        assert entries.items() <= ENTRIES.items()
        lost += entries != ENTRIES
    assert lost > 100


def test_a_memo_that_others_keep_locked_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_BUSY_S", 0.01)
    saved(tmp_path)
    other = sqlite3.connect(tmp_path / FILE_NAME, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    saved(tmp_path, {"c": "3"})
    other.close()
    assert loaded(tmp_path) == ENTRIES


def test_a_memo_that_cannot_be_written_names_the_file(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(MachineError, match="cannot write .*memo"):
        saved(tmp_path / "cache")


def old_file(path: Path, data: bytes = b"x", *, age_s: float = 100.0) -> Path:
    path.write_bytes(data)
    moment_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(moment_ns, moment_ns))
    return path


# ---- content hashes


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Collects the files that are really read."""
    read: list[Path] = []

    def count(path: Path) -> str:
        read.append(path)
        return sha256_file(path)

    monkeypatch.setattr(memo, "sha256_file", count)
    return read


def test_a_file_is_hashed_once_also_over_processes(tmp_path: Path, hashed: list[Path]) -> None:
    file, store = old_file(tmp_path / "a"), tmp_path / "memo"
    hashes = HashMemo.load(store)
    assert hashes.sha256(file) == hashes.sha256(file) == sha256_bytes(b"x")
    hashes.save()
    assert HashMemo.load(store).sha256(file) == sha256_bytes(b"x")
    assert hashed == [file]


def test_changed_content_is_hashed_again_even_with_its_old_time(
    tmp_path: Path, hashed: list[Path]
) -> None:
    """Same size and mtime: the change time gives it away."""
    file, hashes = old_file(tmp_path / "a"), HashMemo.load(tmp_path / "none")
    old = file.stat()
    hashes.sha256(file)
    file.write_bytes(b"y")
    os.utime(file, ns=(old.st_atime_ns, old.st_mtime_ns))
    assert hashes.sha256(file) == sha256_bytes(b"y")


def test_a_file_written_just_now_is_not_remembered(tmp_path: Path, hashed: list[Path]) -> None:
    file, hashes = old_file(tmp_path / "a", age_s=0), HashMemo.load(tmp_path / "none")
    hashes.sha256(file)
    hashes.sha256(file)
    assert hashed == [file, file]

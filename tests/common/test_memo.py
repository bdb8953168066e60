"""The memo of a cache folder: several processes save, and no damage gives a wrong value."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from lora_trainer.common import memo
from lora_trainer.common.errors import MachineError

ENTRIES = {"a": "1", "b": "two", os.fsdecode(b"/\xff.png"): "a name that is not UTF-8"}


def saved(folder: Path, entries: dict[str, str] | None = None, *, version: str = "1") -> None:
    table = memo.MemoTable.load(folder, "numbers", version=version)
    for key, value in (entries or ENTRIES).items():
        table.put(key, value)
    table.save()


def loaded(folder: Path, *, version: str = "1") -> dict[str, str]:
    return memo.MemoTable.load(folder, "numbers", version=version).entries


def test_entries_that_two_processes_save_are_both_there_until_another_version(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "cache"
    names = ("numbers", "numbers", "other")
    tables = [memo.MemoTable.load(folder, name) for name in names]
    for table, key in zip(tables, "abc", strict=True):
        table.put(key, f"of {key}")
    for table in tables:
        table.save()
    assert loaded(folder) == {"a": "of a", "b": "of b"}
    assert loaded(folder, version="2") == {}
    saved(folder, {"d": "4"}, version="2")
    assert (loaded(folder, version="2"), loaded(folder)) == ({"d": "4"}, {})
    assert memo.MemoTable.load(folder, "other").entries == {"c": "of c"}


@pytest.mark.parametrize("content", [b"half", b"SQLite format 3\x00" + bytes(200)])
def test_a_damaged_memo_is_an_empty_one_and_is_made_anew(tmp_path: Path, content: bytes) -> None:
    (tmp_path / memo.MEMO_FILE).write_bytes(content)
    assert loaded(tmp_path) == {}
    saved(tmp_path)
    assert loaded(tmp_path) == ENTRIES


WRITE_VERSION = (18,)
"""Place of the file format write version in SQLite's header."""


def test_no_flipped_bit_gives_a_wrong_value_or_ends_a_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path)
    file = tmp_path / memo.MEMO_FILE
    data = file.read_bytes()
    lost = 0
    monkeypatch.setattr(memo, "_ROWS_AT_ONCE", 2)
    for index in range(len(data)):
        if data[index] == 0 and index % 16:
            continue  # pages are mostly empty
        for bit in (0x01, 0x80):
            flipped = bytearray(data)
            flipped[index] ^= bit
            file.write_bytes(flipped)
            entries = loaded(tmp_path)
            assert entries.items() <= ENTRIES.items()
            lost += entries != ENTRIES
            if bit == 0x80 and index not in WRITE_VERSION:  # of a later SQLite: read only
                saved(tmp_path)
                assert loaded(tmp_path).items() <= ENTRIES.items()
    assert lost > 100


def test_a_key_that_damage_moves_before_the_others_is_not_read_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_ROWS_AT_ONCE", 3)
    saved(tmp_path, {key * 8: f"of {key}" for key in "bde"})
    file = tmp_path / memo.MEMO_FILE
    file.write_bytes(file.read_bytes().replace(b"e" * 8, b"a" * 8))
    assert loaded(tmp_path) == {key * 8: f"of {key}" for key in "bd"}


def test_a_locked_memo_is_no_error_and_one_that_cannot_be_written_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memo, "_BUSY_S", 0.01)
    saved(tmp_path)
    other = sqlite3.connect(tmp_path / memo.MEMO_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    saved(tmp_path, {"c": "3"})
    other.close()
    assert loaded(tmp_path) == ENTRIES
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(MachineError, match="cannot write .*memo"):
        saved(tmp_path / "file")


def test_a_file_is_hashed_once_over_processes_and_again_once_it_may_have_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Mock(wraps=memo.sha256_file)
    monkeypatch.setattr(memo, "sha256_file", read)
    file, store = tmp_path / "a", tmp_path / "memo"
    file.write_bytes(b"x")
    hashes = memo.HashMemo(store)
    for _ in range(2):
        assert hashes.sha256(file) == hashlib.sha256(b"x").hexdigest()
    assert read.call_count == 2, "written just now: it may change without another time"
    old_ns = time.time_ns() - int(100e9)
    os.utime(file, ns=(old_ns, old_ns))
    for _ in range(2):
        assert hashes.sha256(file) == hashlib.sha256(b"x").hexdigest()
    hashes.table.save()
    assert memo.HashMemo(store).sha256(file) == hashlib.sha256(b"x").hexdigest()
    assert read.call_count == 3
    file.write_bytes(b"y")
    os.utime(file, ns=(old_ns, old_ns))
    changed = memo.HashMemo(store)
    assert changed.sha256(file) == hashlib.sha256(b"y").hexdigest(), "the change time gives it away"

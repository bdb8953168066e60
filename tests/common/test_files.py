"""Files that are whole or absent: atomic writes, strict JSON, capped folders."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.files import (
    CappedFolder,
    json_bytes,
    read_json_object,
    sha256_bytes,
    sha256_file,
    write_atomic,
    write_file,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def written(path: Path, data: bytes = b"x", *, age_s: float = 100.0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    moment_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(moment_ns, moment_ns))
    return path


# ---- writing


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_replaces_the_whole_file(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "a.bin"
    for data in (b"long" * 1_000_000, b"", b"short"):
        write_atomic(file, data, durable=durable)
        assert file.read_bytes() == data
    assert names(tmp_path) == ["a.bin"]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
def test_a_refused_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    file = tmp_path / "a.bin"
    write_atomic(file, b"old")

    def refuse(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path if step == "replace" else os, step, refuse)
    with pytest.raises(MachineError, match=r"a.bin: No space left on device \([\d,]+ bytes free\)"):
        write_atomic(file, b"new")
    monkeypatch.undo()
    assert file.read_bytes() == b"old" and names(tmp_path) == ["a.bin"]
    with pytest.raises(MachineError, match="nowhere"):
        write_atomic(tmp_path / "nowhere" / "a", b"x")


def test_a_durable_write_flushes_file_then_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder after the rename, or a power cut could lose the name."""
    order: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        order.append("folder" if folder else "file")
        fsync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        order.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    write_atomic(tmp_path / "a", b"x")
    assert order == ["file", "rename", "folder"]
    order.clear()
    write_atomic(tmp_path / "a", b"x", durable=False)
    assert order == ["rename"]


@pytest.mark.parametrize("name", ["x" * 250, "ü" * 125, "😀" * 62])
def test_a_very_long_name_can_be_written(tmp_path: Path, name: str) -> None:
    write_atomic(tmp_path / name, b"data")
    assert (tmp_path / name).read_bytes() == b"data"


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usual = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: usual(descriptor, data[:7]))
    write_file(tmp_path / "a", bytes(range(100)), durable=False)
    assert (tmp_path / "a").read_bytes() == bytes(range(100))


# ---- hashing and JSON


def test_json_is_written_readably_and_read_with_a_byte_order_mark(tmp_path: Path) -> None:
    assert json_bytes({"a": "é"}) == '{\n  "a": "é"\n}\n'.encode()
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_bytes({"a": float("nan")})
    file = tmp_path / "a.json"
    file.write_bytes(b"\xef\xbb\xbf" + b'{"a": [1, {"b": null}]}')
    assert read_json_object(file) == {"a": [1, {"b": None}]}
    assert sha256_bytes(file.read_bytes()) == sha256_file(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{\n "a": 1,\n}', r"a.json:3:1: not JSON|a.json:2:8: not JSON"),
        (b'{"a": 1, "b": {"c": 2, "c": 3}}', "'c' occurs twice"),
        (b'{"a": NaN}', "NaN is not a number"),
        (b'{"a": -Infinity}', "-Infinity is not a number"),
        (b"[1]", "holds a list"),
        (b"", "not JSON"),
        (b"\xff\xfe{", "cannot read"),
        (b"[" * 200_000, "a.json"),
        (None, "cannot read"),
    ],
)
def test_other_files_are_refused_with_the_place(
    tmp_path: Path, text: bytes | None, message: str
) -> None:
    file = tmp_path / "a.json"
    if text is not None:
        file.write_bytes(text)
    with pytest.raises(RequestError, match=message):
        read_json_object(file)


# ---- capped folders


def capped(root: Path, limit_bytes: int = 250) -> CappedFolder:
    folder = CappedFolder(root=root, limit_bytes=limit_bytes)
    folder.create()
    return folder


def test_the_least_recently_used_go_first(tmp_path: Path) -> None:
    folder = capped(tmp_path / "cache")
    made = {name: written(folder.root / "k" / name, bytes(100), age_s=age) for name, age in AGES}
    assert folder.used_bytes() == 400
    assert folder.prune(keep=[]) == 200
    assert names(folder.root / "k") == ["new", "newer"]
    assert folder.prune(keep=[]) == 0
    assert replace(folder, limit_bytes=0).prune(keep=[made["new"]]) == 100
    assert [path.name for path, _ in folder.files()] == ["new"], "in use, and over the limit"


AGES = [("new", 20.0), ("older", 30.0), ("oldest", 40.0), ("newer", 10.0)]


def test_reading_counts_as_use(tmp_path: Path) -> None:
    folder = capped(tmp_path / "cache", limit_bytes=100)
    read, unread = (
        written(folder.root / n, bytes(100), age_s=a) for n, a in (("r", 50), ("u", 40))
    )
    os.utime(read, ns=(time.time_ns(), read.stat().st_mtime_ns))
    folder.prune(keep=[])
    assert read.exists() and not unread.exists()


def test_a_folder_without_our_marker_is_never_touched(tmp_path: Path) -> None:
    file = written(tmp_path / "precious")
    assert CappedFolder(root=tmp_path, limit_bytes=0).prune(keep=[]) == 0
    assert file.exists()


def test_marker_and_temporary_files_are_no_entries(tmp_path: Path) -> None:
    folder = capped(tmp_path, limit_bytes=0)
    written(tmp_path / ".tmp-1-a")
    folder.create()
    assert folder.used_bytes() == 0
    assert folder.prune(keep=[]) == 0
    assert names(tmp_path) == [".lora-train-cache", ".tmp-1-a"]
    with pytest.raises(MachineError, match="cannot write"):
        CappedFolder(root=tmp_path / ".tmp-1-a" / "cache", limit_bytes=0).create()

"""Unpacks pictures and captions of a zip into a folder, all of them or nothing.

Input: a zip from anywhere. Output: a new folder with pictures and captions, and what was left out by
name. Nothing is written outside of that folder; an archive that tries, or that unpacks to more than
it says, leaves nothing behind.
"""

from __future__ import annotations

import io
import shutil
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from lora_trainer.common.errors import InputError, MachineError, first_line
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, retry_while_open

from .upload_names import Names, is_image, safe_path, without_common_folder

_DIRECTORY_MAX_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
_SMALL_BYTES = 2**20
_SMALL_TOTAL_BYTES = 16 * 2**20
_FREE_AFTERWARDS_BYTES = 2**30
_ENCRYPTED = 0x1
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
# What zipfile raises for damaged content, besides OSError.
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError)


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one upload may bring; `ratio` is unpacked to packed bytes, of a file above 1 MiB and of all above 16."""

    files: int = 20_000
    file_bytes: int = 2**30
    total_bytes: int = 16 * 2**30
    ratio: float = 200.0


@dataclass(frozen=True, kw_only=True)
class Received:
    """What an upload brought: files in `folder`, and "name: reason" of those left out."""

    folder: Path
    images: int = 0
    captions: int = 0
    left_out: tuple[str, ...] = ()


def unpack(
    archive: Path, *, into: Path, limits: Limits = Limits(), name: str | None = None
) -> Received:
    """Unpack pictures and captions of a zip into the new or empty folder `into`, all of them or nothing.

    `name` is what its owner calls the zip, by default what its file is called.
    Raises InputError for an archive that is damaged, leads out of its folder or is too large,
    MachineError when the disk refuses.
    """
    name = archive.name if name is None else name
    with _opened(archive, name) as content:
        entries = _entries(content, name, limits, packed_bytes=archive.stat().st_size)
        with _new_folder(into, need_bytes=sum(entry.info.file_size for entry in entries)) as folder:
            received = _extract(content, entries, folder, name)
    return replace(received, folder=into)


class _BoundedReader(io.BufferedReader):
    """zipfile reads a zip's directory in one piece of the size that the zip claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _DIRECTORY_MAX_BYTES:
            raise zipfile.BadZipFile("its list of files is too long")
        return super().read(size)


@contextmanager
def _opened(archive: Path, name: str) -> Iterator[zipfile.ZipFile]:
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(archive.open("rb", buffering=0))
            file = stack.enter_context(_BoundedReader(raw))
            content = stack.enter_context(zipfile.ZipFile(file))
        except (*_DAMAGED, OSError) as error:
            raise _unreadable(name, error) from None
        try:
            yield content
        except _DAMAGED as error:
            raise _unreadable(name, error) from None


def _unreadable(name: str, error: Exception) -> InputError:
    found = f"{name} is not a zip that can be unpacked: {first_line(error)}"
    return InputError(found, fix="pack it again")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    info: zipfile.ZipInfo
    parts: tuple[str, ...]


def _entries(
    content: zipfile.ZipFile, name: str, limits: Limits, *, packed_bytes: int
) -> list[_Entry]:
    """Return the files of a zip; raises InputError when one of them is not a plain file inside."""
    infos = content.infolist()
    if len(infos) > limits.files:
        raise _refused(name, f"holds {len(infos):,} files, {limits.files:,} are allowed")
    entries = []
    for info in infos:
        parts = _parts(info.orig_filename)
        kind = stat.S_IFMT(info.external_attr >> 16)
        if parts is None:
            raise _refused(name, f"names {info.orig_filename[:80]!r}, which leads out of it")
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            raise _refused(name, f"holds {info.orig_filename[:80]!r}, a link or a device")
        if info.flag_bits & _ENCRYPTED:
            raise _refused(name, "is encrypted")
        if info.compress_type not in _METHODS:
            raise _refused(name, "is packed with an unusual method")
        if not info.is_dir() and kind != stat.S_IFDIR:
            _check_size(info, name, limits)
            entries.append(_Entry(info=info, parts=parts))
    total_bytes = sum(entry.info.file_size for entry in entries)
    if total_bytes > limits.total_bytes:
        raise _refused(
            name, f"unpacks to {total_bytes:,} bytes, {limits.total_bytes:,} are allowed"
        )
    # Of the whole file: entries may share their bytes, and many small ones escape the limit of each.
    if total_bytes > max(_SMALL_TOTAL_BYTES, packed_bytes * limits.ratio):
        raise _refused(name, _like_a_bomb(limits))
    return _without_litter(entries)


def _check_size(info: zipfile.ZipInfo, name: str, limits: Limits) -> None:
    if info.file_size > limits.file_bytes:
        raise _refused(name, f"holds a file of {info.file_size:,} bytes")
    if info.file_size > max(_SMALL_BYTES, info.compress_size * limits.ratio):
        raise _refused(name, _like_a_bomb(limits))


def _like_a_bomb(limits: Limits) -> str:
    return f"unpacks to more than {limits.ratio:g} times its size, as a bomb does"


def _parts(name: str) -> tuple[str, ...] | None:
    """Return the folders and the name of an entry, None for a name that leads elsewhere."""
    # Zips made on Windows may have backslashes; a drive or a share begins before the first folder.
    parts = name.replace("\\", "/").rstrip("/").split("/")
    if "\0" in name or ":" in parts[0] or any(part in ("", "..") for part in parts):
        return None
    return tuple(part for part in parts if part != ".")


def _without_litter(entries: list[_Entry]) -> list[_Entry]:
    """Drop what a file system packed along, and the one folder that everything lies in."""
    kept = [entry for entry in entries if not _is_litter(entry.parts)]
    paths = without_common_folder([entry.parts for entry in kept])
    return [replace(entry, parts=path) for entry, path in zip(kept, paths, strict=True)]


def _is_litter(parts: tuple[str, ...]) -> bool:
    """Whether a file system's own bookkeeping was packed along."""
    return not parts or parts[0] == "__MACOSX" or parts[-1] in (".DS_Store", "Thumbs.db")


def _extract(content: zipfile.ZipFile, entries: list[_Entry], folder: Path, name: str) -> Received:
    images = captions = 0
    left_out: list[str] = []
    names: dict[Path, Names] = {}
    for entry in entries:
        shown = "/".join(entry.parts)
        safe, reason = safe_path(entry.parts)
        if reason:
            left_out.append(f"{shown}: {reason}")
            continue
        place = folder.joinpath(*safe[:-1])
        place.mkdir(parents=True, exist_ok=True)
        target = place / names.setdefault(place, Names()).free(safe[-1])
        with target.open("xb") as file:
            for chunk in _chunks(content, entry.info, name=name):
                file.write(chunk)
        images += is_image(safe[-1])
        captions += not is_image(safe[-1])
    if not images:
        raise _refused(name, "holds no pictures")
    return Received(folder=folder, images=images, captions=captions, left_out=tuple(left_out))


def _chunks(content: zipfile.ZipFile, info: zipfile.ZipInfo, *, name: str) -> Iterator[bytes]:
    left_bytes = info.file_size
    try:
        with content.open(info) as packed:
            while chunk := packed.read(_CHUNK_BYTES):
                left_bytes -= len(chunk)
                if left_bytes < 0:
                    raise _refused(name, "unpacks to more than it says")
                yield chunk
    except OSError as error:  # of the archive: what is written is written elsewhere
        raise zipfile.BadZipFile(first_line(error)) from None


@contextmanager
def _new_folder(into: Path, *, need_bytes: int) -> Iterator[Path]:
    """Yield a folder that takes the place of the empty `into` in the end, and goes should anything go wrong."""
    try:
        into.parent.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(into.parent).free < need_bytes + _FREE_AFTERWARDS_BYTES:
            raise MachineError(
                f"{need_bytes:,} bytes do not fit on the disk of {into.parent}",
                fix="free some space",
            )
        folder = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=into.parent))
    except OSError as error:
        raise disk_error(into, error) from error
    try:
        yield folder
        folder.chmod(0o755)
        retry_while_open(lambda: _take_place(folder, into))
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise disk_error(into, error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _take_place(folder: Path, empty: Path) -> None:
    try:
        folder.rename(empty)
    except FileExistsError:  # Windows replaces no folder
        empty.rmdir()
        folder.rename(empty)


def _refused(name: str, found: str) -> InputError:
    return InputError(f"{name} {found}", fix="pack only pictures and captions, in one folder")

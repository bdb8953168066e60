"""Takes pictures and captions that a browser sent, one by one or in a zip, into a folder of ours.

Inputs: files that gradio has put into `<runs>/.gui/incoming/`, with the names that the browser gave.
Outputs: `<runs>/.gui/uploads/NAME/` with the pictures and captions, whole or not at all; what was
left out is told by name. A zip comes from anywhere: nothing of it is written outside of that folder,
and one that tries, or that unpacks to more than it says, leaves nothing behind.
"""

from __future__ import annotations

import io
import itertools
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from lora_trainer.config import DataSettings
from lora_trainer.data.captions import extension_names
from lora_trainer.data.images import IMAGE_EXTENSIONS
from lora_trainer.data.listing import METADATA_NAME
from lora_trainer.errors import InputError, MachineError, first_line
from lora_trainer.files import TEMPORARY_PREFIX, disk_error

from .workplace import Workplace

FOLDER, INCOMING = "uploads", "incoming"
CAPTION_EXTENSIONS = frozenset(extension_names(DataSettings().caption_extensions))
_DIRECTORY_MAX_BYTES = 16 * 2**20
_CHUNK_BYTES = 2**20
_SMALL_BYTES = 2**20
_NAME_MAX_BYTES = 150
_FREE_AFTERWARDS_BYTES = 2**30
_FORBIDDEN = frozenset('<>:"/\\|?*')
_DEVICE_NAMES = frozenset(
    {"con", "prn", "aux", "nul", *(f"{port}{n}" for port in ("com", "lpt") for n in range(10))}
)
_ENCRYPTED = 0x1
_METHODS = frozenset({zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED})
_DAMAGED = (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError)
"""What zipfile raises for damaged content, besides OSError."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How much one upload may bring; `ratio` is unpacked to packed bytes of files above 1 MiB."""

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


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that a browser sent: where it lies, and the name that the browser gave it."""

    path: Path
    name: str


def upload_folder(work: Workplace, name: str) -> Path:
    """Return a free place for a new dataset of that name."""
    wanted = safe_name(name) or "dataset"
    parent = work.own / FOLDER
    return next(parent / free for free in _numbered(wanted) if not (parent / free).exists())


def save_files(work: Workplace, files: Iterable[Upload], *, into: Path) -> Received:
    """Put uploaded pictures and captions into a folder of `work.own`, new or not.

    Names are made safe and unique, picture and caption of one name alike. Raises InputError for
    files that were not uploaded here, MachineError when the disk refuses.
    """
    incoming = (work.own / INCOMING).resolve()
    uploaded = list(files)
    for upload in uploaded:
        if not upload.path.resolve().is_relative_to(incoming):
            raise InputError(f"{upload.name!r} was not uploaded", fix="choose the files once more")
    images = captions = 0
    left_out: list[str] = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        names = _Names([path.name for path in into.iterdir()])
        for upload in uploaded:
            name = safe_name(upload.name)
            reason = _reason_against(name)
            if reason:
                left_out.append(f"{upload.name}: {reason}")
                continue
            _move(upload.path, into / names.free(name))
            images += _is_image(name)
            captions += not _is_image(name)
    except OSError as error:
        raise disk_error(into, error) from error
    return Received(folder=into, images=images, captions=captions, left_out=tuple(left_out))


def _move(source: Path, target: Path) -> None:
    """Copy first: a reader sees the whole file or none, also across filesystems."""
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}"[:_NAME_MAX_BYTES])
    try:
        shutil.copyfile(source, temporary)
        temporary.rename(target)
    finally:
        temporary.unlink(missing_ok=True)


def unpack(archive: Path, *, into: Path, limits: Limits = Limits()) -> Received:
    """Unpack pictures and captions of a zip into the new folder `into`, all of them or nothing.

    Raises InputError for an archive that is damaged, leads out of its folder or is too large,
    MachineError when the disk refuses.
    """
    with _opened(archive) as content:
        entries = _entries(content, archive.name, limits)
        with _new_folder(into, need_bytes=sum(entry.info.file_size for entry in entries)) as folder:
            received = _extract(content, entries, folder, archive.name)
    return replace(received, folder=into)


class _BoundedReader(io.BufferedReader):
    """zipfile reads a zip's directory in one piece of the size that the zip claims."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _DIRECTORY_MAX_BYTES:
            raise zipfile.BadZipFile("its list of files is too long")
        return super().read(size)


@contextmanager
def _opened(archive: Path) -> Iterator[zipfile.ZipFile]:
    with ExitStack() as stack:
        try:
            raw = stack.enter_context(archive.open("rb", buffering=0))
            file = stack.enter_context(_BoundedReader(raw))
            content = stack.enter_context(zipfile.ZipFile(file))
        except (*_DAMAGED, OSError) as error:
            raise _unreadable(archive, error) from None
        try:
            yield content
        except _DAMAGED as error:
            raise _unreadable(archive, error) from None


def _unreadable(archive: Path, error: Exception) -> InputError:
    found = f"{archive.name} is no zip that can be unpacked: {first_line(error)}"
    return InputError(found, fix="pack it again")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    info: zipfile.ZipInfo
    parts: tuple[str, ...]


def _entries(content: zipfile.ZipFile, name: str, limits: Limits) -> list[_Entry]:
    """Return the files of a zip; raises InputError when one of them is no plain file inside."""
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
    return _without_common_folder(entries)


def _check_size(info: zipfile.ZipInfo, name: str, limits: Limits) -> None:
    if info.file_size > limits.file_bytes:
        raise _refused(name, f"holds a file of {info.file_size:,} bytes")
    if info.file_size > max(_SMALL_BYTES, info.compress_size * limits.ratio):
        raise _refused(
            name, f"unpacks to more than {limits.ratio:g} times its size, as a bomb does"
        )


def _parts(name: str) -> tuple[str, ...] | None:
    """Return the folders and the name of an entry, None for a name that leads elsewhere."""
    # Zips made on Windows may have backslashes; a drive or a share begins before the first folder.
    parts = name.replace("\\", "/").rstrip("/").split("/")
    if "\0" in name or ":" in parts[0] or any(part in ("", "..") for part in parts):
        return None
    return tuple(part for part in parts if part != ".")


def _without_common_folder(entries: list[_Entry]) -> list[_Entry]:
    """Drop the one folder that everything lies in, as when a folder was packed."""
    kept = [entry for entry in entries if not _is_litter(entry.parts)]
    tops = {entry.parts[0] if len(entry.parts) > 1 else "" for entry in kept}
    if len(tops) != 1 or "" in tops:
        return kept
    return [replace(entry, parts=entry.parts[1:]) for entry in kept]


def _is_litter(parts: tuple[str, ...]) -> bool:
    """Whether a file system's own bookkeeping was packed along."""
    return not parts or parts[0] == "__MACOSX" or parts[-1] in (".DS_Store", "Thumbs.db")


def _extract(content: zipfile.ZipFile, entries: list[_Entry], folder: Path, name: str) -> Received:
    images = captions = 0
    left_out: list[str] = []
    names: dict[Path, _Names] = {}
    for entry in entries:
        shown = "/".join(entry.parts)
        safe = [safe_name(part) for part in entry.parts]
        reason = _reason_against(safe[-1])
        if len(safe) > 2 or not all(safe):
            reason = "lies more than one folder deep"
        if reason:
            left_out.append(f"{shown}: {reason}")
            continue
        place = folder.joinpath(*safe[:-1])
        place.mkdir(exist_ok=True)
        target = place / names.setdefault(place, _Names()).free(safe[-1])
        with target.open("xb") as file:
            for chunk in _chunks(content, entry.info, name=name):
                file.write(chunk)
        images += _is_image(safe[-1])
        captions += not _is_image(safe[-1])
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
    """Yield a folder that becomes `into` in the end, and is removed should anything go wrong."""
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
        folder.rename(into)
    except OSError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise disk_error(into, error) from error
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


class _Names:
    """Names for the files of one upload: a picture that gets a number shares it with its caption."""

    def __init__(self, existing: Iterable[str] = ()) -> None:
        self._stems_before = {Path(name).stem.casefold() for name in existing}
        self._given: set[str] = set()

    def free(self, name: str) -> str:
        """Return `name`, with a number where it is taken; case does not tell names apart."""
        path = Path(name)
        for stem in _numbered(path.stem):
            found = f"{stem}{path.suffix}"
            if stem.casefold() in self._stems_before or found.casefold() in self._given:
                continue
            self._given.add(found.casefold())
            return found
        raise AssertionError("numbers do not end")


def _numbered(name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}-{number}" for number in itertools.count(2))


def safe_name(name: str) -> str:
    """Return a name that every file system takes for one visible file; "" when nothing is left.

    Only the last part of a path counts: a browser that uploads a folder names it too.
    """
    last = name.replace("\\", "/").rpartition("/")[2]
    plain = "".join("_" if c in _FORBIDDEN or not c.isprintable() else c for c in last)
    stem, dot, extension = plain.strip(" .").rpartition(".")
    stem, extension = (stem, f"{dot}{extension}") if dot else (extension, "")
    room = _NAME_MAX_BYTES - len(extension.encode(errors="replace"))
    cut = stem.encode("utf-8", errors="replace")[: max(1, room)].decode("utf-8", errors="ignore")
    stem = cut.lstrip("-. ").rstrip(" .")  # no name may be taken for an option
    if stem.partition(".")[0].casefold() in _DEVICE_NAMES:
        stem = f"_{stem}"
    return f"{stem}{extension}" if stem else ""


def _reason_against(name: str) -> str:
    """Say why a file is not taken; an empty string for one that is."""
    if not name:
        return "has no usable name"
    extension = Path(name).suffix.lower()
    if name == METADATA_NAME or extension in IMAGE_EXTENSIONS | CAPTION_EXTENSIONS:
        return ""
    return "is neither a picture nor a caption"


def _is_image(name: str) -> bool:
    return Path(name).suffix.lower() in IMAGE_EXTENSIONS


def _refused(name: str, found: str) -> InputError:
    return InputError(f"{name} {found}", fix="pack only pictures and captions, in one folder")


def forget_old(folder: Path, *, kept_s: float) -> None:
    """Remove what an interface that was killed has left of uploads, after some time."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.is_dir() and time.time() - path.stat().st_mtime > kept_s:
                    shutil.rmtree(path, ignore_errors=True)

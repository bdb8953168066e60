"""All sample images of a run as one zip, made while it is sent: nothing of it lies on the disk.

Input: the folder of a run. Output: the bytes of the zip, piece by piece; images are stored as they are, as PNG does
not get smaller by packing.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

_CHUNK_BYTES = 2**20


def sample_files(run: Path) -> list[Path]:
    """Return the sample images of a run, step by step; no file that a link leads to."""
    samples = run / "samples"
    return sorted(
        path
        for path in samples.glob("step-*/*.png")
        if not path.is_symlink() and not path.parent.is_symlink() and path.is_file()
    )


def zipped(files: list[Path], *, below: Path) -> Iterator[bytes]:
    """Yield a zip of files, each under its name below a folder; one that is gone by now is left out."""
    sink = _Sink()
    # A sink that cannot seek makes zipfile write sizes after each file instead of before it.
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED) as archive:  # type: ignore[call-overload]  # it has no `seek`
        for path in files:
            try:
                info = zipfile.ZipInfo.from_file(
                    path, path.relative_to(below).as_posix(), strict_timestamps=False
                )
                opened = path.open("rb")
            except OSError:
                continue
            with opened, archive.open(info, "w") as entry:
                while chunk := opened.read(_CHUNK_BYTES):
                    entry.write(chunk)
                    yield sink.taken()
            yield sink.taken()
    yield sink.taken()


class _Sink:
    """A file that can only be written, and whose content is taken away as it comes."""

    def __init__(self) -> None:
        self._buffer = io.BytesIO()

    def write(self, data: bytes) -> int:
        return self._buffer.write(data)

    def flush(self) -> None:
        """Nothing is held back."""

    def taken(self) -> bytes:
        data = self._buffer.getvalue()
        self._buffer = io.BytesIO()
        return data

"""The few file operations a resume state is made of, each durable before it returns.

Every change that `checkpoints.py` makes on the disk goes through here and `files.py`, so that tests
can stop or fail it at each one. All raise OSError.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from lora_trainer.files import Data, open_binary, retry_while_open, sync_folder, write_file


def make_folder(folder: Path) -> None:
    """Make `folder` and its parents so that they survive a power cut."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        os.mkdir(path)  # noqa: PTH102 - one place where every operation is an os call
        sync_folder(path.parent)


def write_folder(folder: Path, contents: Mapping[str, Data]) -> None:
    """Make a new folder and write its files in the order given; all are on the disk afterwards."""
    os.mkdir(folder)  # noqa: PTH102
    for name, data in contents.items():
        write_file(folder / name, data, durable=True)
    sync_folder(folder)


def rename_durably(source: Path, target: Path) -> None:
    """Rename within one folder; `target` must not exist."""
    retry_while_open(lambda: os.rename(source, target))  # noqa: PTH104
    sync_folder(target.parent)


def append_durably(file: Path, line: bytes) -> None:
    """Append one line; a line that a kill tore is ended first, so that only itself is lost."""
    descriptor = open_binary(file, os.O_RDWR | os.O_CREAT | os.O_APPEND)
    try:
        size = os.fstat(descriptor).st_size
        os.lseek(descriptor, max(0, size - 1), os.SEEK_SET)
        torn = os.read(descriptor, 1) not in (b"", b"\n")
        view = memoryview(b"\n" * torn + line + b"\n")
        while view:
            view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_tree(path: Path) -> None:
    """Remove a folder and what is in it, or a file; nothing happens when there is none."""
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove_tree(entry)
        retry_while_open(lambda: os.rmdir(path))  # noqa: PTH106
    elif path.exists() or path.is_symlink():
        retry_while_open(lambda: os.unlink(path))  # noqa: PTH108

"""Resume states as files: nested values and tensors, written whole and read back bit for bit; no pickle.

First the few file operations a resume state is made of, each durable before it returns: every change that
`states.py` makes on the disk goes through here and `common/files.py`, so that tests can stop or fail it at
each one. All raise OSError.

Then nested Python values with tensors, a state dict of an optimizer or the loop's values, as JSON plus named
tensors, and back. Floats are written in hex (NaN and -0.0 survive), integers as text (JSON readers round
large ones), and every object in the JSON has exactly one key, which names the type it stands for.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lora_trainer.common.files import (
    Data,
    Part,
    open_binary,
    retry_while_open,
    sync_folder,
    write_file,
)
from lora_trainer.lora_file.read_tensors import tensor_bytes, tensor_info
from lora_trainer.lora_file.stream import header_bytes, ordered


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
    """Remove a folder with its files, or a file; nothing happens when there is none."""
    if path.is_dir() and not path.is_symlink():
        for entry in sorted(path.iterdir()):
            remove_tree(entry)
        retry_while_open(lambda: os.rmdir(path))  # noqa: PTH106
    elif path.exists() or path.is_symlink():
        retry_while_open(lambda: os.unlink(path))  # noqa: PTH108


Copy = Callable[[str, Tensor], Tensor]
"""Copies the tensor of that name, unique in a state, into contiguous memory of the host."""


@dataclass(frozen=True, kw_only=True)
class Packed:
    """A JSON value and the tensors, on the CPU, that it names."""

    tree: Any
    tensors: Mapping[str, Tensor]


def pack(value: Any, *, copy: Copy | None = None) -> Packed:
    """Take None, bool, int, float, str, list, tuple, dict and Tensor apart, however nested.

    A tensor that occurs twice is stored once and shared again after `unpack`; `copy` takes each as
    it is now, by default into new memory. Raises TypeError naming the place of anything else.
    """
    take = copy or (lambda _, tensor: snapshot(tensor))
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def named(tensor: Tensor, where: str) -> str:
        if id(tensor) not in names:
            name = where or "value"
            while name in tensors:  # {1: ...} beside {"1": ...}
                name += "'"
            names[id(tensor)] = name
            tensors[name] = take(name, tensor)
        return names[id(tensor)]

    def tree(value: Any, where: str) -> Any:
        match value:
            case Tensor():  # asked first: training waits, and most values are tensors
                return {"tensor": named(value, where)}
            case None | bool() | str():
                return value
            case int():
                return {"int": str(value)}
            case float():
                return {"float": value.hex()}
            case Mapping():
                if wrong := [key for key in value if not isinstance(key, (str, int))]:
                    raise TypeError(f"cannot save the key {wrong[0]!r}")
                return {"dict": [[tree(k, ""), tree(v, _at(where, k))] for k, v in value.items()]}
            case list() | tuple():
                items = [tree(item, _at(where, index)) for index, item in enumerate(value)]
                return {"tuple": items} if isinstance(value, tuple) else items
        raise TypeError(f"cannot save a {type(value).__name__} at {where}")

    return Packed(tree=tree(value, ""), tensors=tensors)


def _at(where: str, key: object) -> str:
    return f"{where}.{key}" if where else str(key)


def unpack(packed: Packed) -> Any:
    """Return the value that was packed; raises ValueError or KeyError for a damaged one."""

    def value(tree: Any) -> Any:
        if tree is None or isinstance(tree, (bool, str)):
            return tree
        if isinstance(tree, list):
            return [value(item) for item in tree]
        if isinstance(tree, dict) and len(tree) == 1:
            ((kind, content),) = tree.items()
            match kind:
                case "int":
                    return int(content)
                case "float":
                    return float.fromhex(content)
                case "tensor":
                    return packed.tensors[content]
                case "tuple":
                    return tuple(value(content))
                case "dict":
                    return dict(value(pair) for pair in content)
        raise ValueError(f"a packed value cannot be {tree!r:.80}")

    return value(packed.tree)


def file_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return a safetensors file of tensors on the CPU without copying them: header, then each one."""
    infos = ordered({name: tensor_info(tensor) for name, tensor in tensors.items()})
    bodies = [tensor_bytes(tensors[name]) for name in infos if tensors[name].numel()]
    return [header_bytes(infos, {}), *bodies]


def snapshot(tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU that later training cannot change."""
    return tensor.detach().to("cpu", copy=True).contiguous()

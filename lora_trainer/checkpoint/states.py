"""Resume states that survive a kill at any instant: written aside, hashed, published by a rename.

Input is a TrainingState, output `states/step-00000250/` with adapter.safetensors, optim.safetensors
and optim.json, state.json and, written last, MANIFEST.json with the size and SHA-256 of each. A
state is valid when its manifest verifies; nothing else decides (no mtime, no "latest" pointer).
Older states are pruned only after the new one is durable, and two are always kept. No pickle.

Nested values with tensors, a state dict of an optimizer or the values of the loop, are JSON plus named tensors.
Floats are written in hex (NaN and -0.0 survive), integers as text (JSON readers round large ones), and every object
in the JSON has exactly one key, which names the type it stands for.

How a value is added to a state: at `TrainingState`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors import SafetensorError
from safetensors.torch import load
from torch import Tensor

from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.common.event_kinds import Severity
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import (
    Data,
    Part,
    disk_error,
    json_bytes,
    parts_of,
    read_regular,
    retry_while_open,
    sha256_bytes,
    sync_folder,
    write_file,
)
from lora_trainer.lora_file.read_tensors import tensor_bytes, tensor_info
from lora_trainer.lora_file.tensor_file import header_bytes, ordered


def rename_durably(source: Path, target: Path) -> None:
    """Rename within one folder; `target` must not exist."""
    retry_while_open(lambda: os.rename(source, target))  # noqa: PTH104
    sync_folder(target.parent)


def remove_tree(path: Path) -> None:
    """Remove a folder with its files, or a link to one; nothing happens when there is none."""
    if path.is_symlink() or path.exists():
        remove: Callable[[Path], object] = os.unlink if path.is_symlink() else shutil.rmtree
        retry_while_open(lambda: remove(path))


# Copies the tensor of that name, unique in a state, into contiguous memory of the host.
Copy = Callable[[str, Tensor], Tensor]


def snapshot(_: str, tensor: Tensor) -> Tensor:
    """Return a contiguous copy on the CPU, in new memory, that later training cannot change."""
    return tensor.detach().to("cpu", copy=True).contiguous()


def _pack(value: Any, copy: Copy) -> tuple[Any, dict[str, Tensor]]:
    """Take None, bool, int, float, str, list, tuple, dict and Tensor apart, however nested.

    Returns a JSON value and the tensors that it names. A tensor that occurs twice is stored once and shared
    again after `_unpack`; `copy` takes each as it is now. Raises TypeError naming the place of anything else.
    """
    tensors: dict[str, Tensor] = {}
    names: dict[int, str] = {}

    def tree(value: Any, where: str) -> Any:
        inside = f"{where}." if where else ""
        match value:
            case Tensor():  # asked first: training waits, and most values are tensors
                if id(value) not in names:
                    while where in tensors:  # {1: ...} beside {"1": ...}
                        where += "'"
                    names[id(value)] = where
                    tensors[where] = copy(where, value)
                return {"tensor": names[id(value)]}
            case None | bool() | str():
                return value
            case int():
                return {"int": str(value)}
            case float():
                return {"float": value.hex()}
            case Mapping():
                if wrong := [key for key in value if not isinstance(key, (str, int))]:
                    raise TypeError(f"cannot save the key {wrong[0]!r}")
                return {"dict": [[tree(k, ""), tree(v, f"{inside}{k}")] for k, v in value.items()]}
            case list() | tuple():
                items = [tree(item, f"{inside}{index}") for index, item in enumerate(value)]
                return {"tuple": items} if isinstance(value, tuple) else items
        raise TypeError(f"cannot save a {type(value).__name__} at {where}")

    return tree(value, ""), tensors


def _unpack(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Return the value that was packed; raises ValueError or KeyError for a damaged one."""
    match tree:
        case None | bool() | str():
            return tree
        case list():
            return [_unpack(item, tensors) for item in tree]
        case {"int": content}:
            return int(content)
        case {"float": content}:
            return float.fromhex(content)
        case {"tensor": content}:
            return tensors[content]
        case {"tuple": content}:
            return tuple(_unpack(content, tensors))
        case {"dict": content}:
            return dict(_unpack(content, tensors))
    raise ValueError(f"a packed value cannot be {tree!r:.80}")


def file_parts(tensors: Mapping[str, Tensor]) -> list[Part]:
    """Return a safetensors file of tensors on the CPU without copying them: header, then each one."""
    infos = ordered({name: tensor_info(tensor) for name, tensor in tensors.items()})
    bodies = [tensor_bytes(tensors[name]) for name in infos if tensors[name].numel()]
    return [header_bytes(infos, {}), *bodies]


FORMAT_VERSION = 1
MANIFEST = "MANIFEST.json"
ADAPTER, STATE = "adapter.safetensors", "state.json"
# The key of the loop's own values in state.json.
LOOP = "extras"
OPTIMIZER_TENSORS, OPTIMIZER = "optim.safetensors", "optim.json"
TENSOR_FILES = (ADAPTER, OPTIMIZER_TENSORS)
FILES = (*TENSOR_FILES, OPTIMIZER, STATE)
MIN_KEPT = 2
_PUBLISHED = re.compile(r"step-(\d{8,})")
_LEFTOVER = re.compile(r"\.(tmp|del)-step-(\d{8,})\.(\d+)")


@dataclass(frozen=True, kw_only=True)
class TrainingState:
    """All that the next step depends on and that cannot be computed from the settings.

    `adapter` holds the fp32 masters by name, `optimizer` a `state_dict()`; loaded tensors are on the CPU. The fields
    after them are the values that the loop itself must know after a kill, one object in state.json (`LOOP`): None,
    bool, int, float, str, lists and dicts of them. The loss scale and the steps since it last changed are None without
    fp16.

    To add a value of the loop: give a new field here a default, the value that an older state without it stands for;
    the loop keeps it in a field of `Progress` (training/actions.py; with a default, set in training/loop.py), which
    `SaveAction.state` writes and `SaveAction.restored` reads. A value of a guard, such as a running mean of gradient
    norms, is instead a field of GuardState in training/guards.py, with a default too, and nothing is added here.
    Tensors belong to the adapter or the optimizer. Raise FORMAT_VERSION only where an older state would be read
    wrongly; states of another version are never read.
    """

    step: int
    images_seen: int
    adapter: Mapping[str, Tensor]
    optimizer: Mapping[str, Any]
    guard: Mapping[str, Any]
    loss_scale: float | None = None
    loss_scale_growth: int | None = None

    @property
    def is_good(self) -> bool:
        """Whether training may go back to it: weights saved amid skipped steps may be what they were skipped for."""
        return _is_good(self.guard)

    def restore_loss_scale(self, scaler: torch.amp.GradScaler) -> None:
        """Put the loss scale back, which does nothing without fp16."""
        if scaler.is_enabled():
            scaler.load_state_dict(
                scaler.state_dict()
                | {"scale": self.loss_scale, "_growth_tracker": self.loss_scale_growth}
            )
            # After a step that failed between `unscale_` and `step`, the scaler would refuse to unscale
            # again. torch resets this record in `update` only, which would also change the scale.
            scaler._per_optimizer_states.clear()


# The fields that have a place of their own in a state's files; the loop's own values are all others.
_OWN_PLACE = ("step", "images_seen", "adapter", "optimizer")
LOOP_FIELDS = [field.name for field in fields(TrainingState) if field.name not in _OWN_PLACE]


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A state as it was at one moment, on the host; later steps cannot change it.

    `contents` are those of `FILES` before they are bytes: tensors by name, or a JSON value.
    """

    step: int
    is_good: bool
    contents: Mapping[str, Any]


def _is_good(guard: Mapping[str, Any]) -> bool:
    return not guard.get("skipped_in_row", 0)


def freeze(state: TrainingState, *, copy: Copy = snapshot) -> Frozen:
    """Copy a state; raises NonFiniteAdapter, having copied nothing.

    This is all of a save that training waits for.
    """
    # What is not finite makes a sum that is not; one pass, and one answer from a device.
    sums = [tensor.sum() for tensor in state.adapter.values()]
    if sums and not bool(torch.stack(sums).isfinite().all()):
        # Six times as slow as the sums, which can also overflow.
        for name, tensor in state.adapter.items():
            if not tensor.isfinite().all():
                raise NonFiniteAdapter(
                    f"step {state.step} is not saved: {name} holds values that are not finite numbers",
                    fix="resume from the last state with a lower optimizer.learning_rate",
                )
    plain = {
        "step": state.step,
        "images_seen": state.images_seen,
        "adapter": list(state.adapter),
        LOOP: {name: getattr(state, name) for name in LOOP_FIELDS},
    }
    tree, loose_tensors = _pack(plain, snapshot)
    if loose_tensors:
        raise TypeError(f"there is a tensor at {min(loose_tensors)}; only plain values are saved")
    adapter = {name: copy(f"adapter.{name}", tensor) for name, tensor in state.adapter.items()}
    optimizer, tensors = _pack(state.optimizer, lambda name, it: copy(f"optimizer.{name}", it))
    contents = (adapter, tensors, optimizer, tree)
    return Frozen(
        step=state.step,
        is_good=state.is_good,
        contents=dict(zip(FILES, contents, strict=True)),
    )


def thaw(frozen: Frozen) -> TrainingState:
    """Return the state that was frozen, in memory of its own."""
    contents = dict(frozen.contents)
    for file in TENSOR_FILES:
        contents[file] = {name: tensor.clone() for name, tensor in contents[file].items()}
    return _state(contents)


def tensors_digest(frozen: Frozen) -> str:
    """Return the SHA-256 of all tensors of a state, which is the same for the same bits only."""
    return sha256_bytes(
        [part for file in TENSOR_FILES for part in file_parts(frozen.contents[file])]
    )


def state_files(frozen: Frozen) -> dict[str, bytes]:
    """Return the files of a state, to be sent to another process."""
    return {name: b"".join(parts_of(data)) for name, data in _encode(frozen).items()}


class NonFiniteAdapter(TrainingStopped):
    """The adapter holds values that are not finite numbers; such a state is never kept."""


def write_state(folder: Path, frozen: Frozen, *, keep: int) -> Path:
    """Write a state into `folder`, then prune to the `keep` (at least 2) newest; return its folder.

    With a state that is not good the newest good one is kept too. On return the state survives a power cut. Raises
    MachineError when the disk refuses anything, in which case older states are untouched.
    """
    contents, step = _encode(frozen), frozen.step
    contents[MANIFEST] = json_bytes(_manifest(step, contents))
    target = folder / _folder_name(step)
    unfinished = folder / f".tmp-{target.name}.{os.getpid()}"
    try:
        for missing in [path for path in (folder, *folder.parents) if not path.exists()][::-1]:
            os.mkdir(missing)  # noqa: PTH102 - every operation is an os call, which tests can fail
            sync_folder(missing.parent)  # a power cut must not take the new folder away
        remove_tree(unfinished)
        os.mkdir(unfinished)  # noqa: PTH102
        for name, data in contents.items():
            write_file(unfinished / name, data, durable=True)
        sync_folder(unfinished)
        if target.exists():
            _discard(target)
        rename_durably(unfinished, target)
        # Remove all but this one and the `keep` - 1 states before it by step.
        steps = {path: int(match[1]) for path, match in _matching(folder, _PUBLISHED)}
        steps.pop(target)
        others = sorted(steps, key=steps.__getitem__, reverse=True)
        kept = others[: max(keep, MIN_KEPT) - 1]
        if not frozen.is_good:
            kept.extend(islice(filter(_holds_good, others), 1))
        for path in others:
            if path not in kept:
                _discard(path)
        for path, match in _matching(folder, _LEFTOVER):
            if match[1] == "del" and int(match[3]) == os.getpid():
                remove_tree(path)
    except OSError as error:
        with suppress(OSError):
            remove_tree(unfinished)
        raise disk_error(target, error) from error
    return target


def load_newest(folder: Path, *, events: EventStream | None) -> TrainingState | None:
    """Return the valid state of the highest step, or None when there is none; call it at start.

    Newer states that do not verify are moved aside as `bad-step-…` and reported; what dead
    processes left half-written or half-removed is cleaned up. Raises MachineError only when the
    folder cannot be listed or a state cannot be read: starting anew, or from an older state, would be worse.
    """
    state = None
    try:
        if not folder.is_dir():
            return None
        # Published states, and states that a dead process was taking away: highest step first, published ones first.
        candidates = [(int(match[1]), True, path) for path, match in _matching(folder, _PUBLISHED)]
        ours = [(path, match) for path, match in _matching(folder, _LEFTOVER) if _is_ours(match)]
        candidates += [(int(match[2]), False, path) for path, match in ours if match[1] == "del"]
        for step, is_published, path in sorted(candidates, reverse=True):
            state_or_reason = _read(path, step=step)
            if isinstance(state_or_reason, str):
                if is_published:
                    unusable = f"resume state is not usable: {state_or_reason}"
                    _report(events, path, unusable, severity="error")
                    endings = chain([""], map(".{}".format, count(2)))
                    names = (folder / f"bad-{path.name}{ending}" for ending in endings)
                    free = next(name for name in names if not name.exists())
                    with _tolerating(events, path, "cannot move it aside"):
                        os.rename(path, free)  # noqa: PTH104
                continue
            state = state_or_reason
            if not is_published:
                # Killed between taking an old state of this step away and putting the new one there.
                with _tolerating(events, path, "cannot restore it"):
                    rename_durably(path, folder / _folder_name(step))
            break
    except OSError as error:
        raise MachineError(
            f"cannot read {folder}: {error.strerror}", fix="make the folder readable, then resume"
        ) from error
    for path, _ in ours:
        with _tolerating(events, path, "cannot remove leftovers"):
            remove_tree(path)
    return state


def is_written(folder: Path, *, step: int) -> bool:
    """Say whether `folder` has a state of that step."""
    return (folder / _folder_name(step)).is_dir()


def load_last_good(folder: Path, *, before: int) -> TrainingState | None:
    """Return the valid good state of the highest step below `before`, None without one; raises MachineError."""
    steps = {path: int(match[1]) for path, match in _matching(folder, _PUBLISHED)}
    for path in sorted(steps, key=steps.__getitem__, reverse=True):
        if steps[path] < before and _holds_good(path):
            state = _read(path, step=steps[path])
            if isinstance(state, TrainingState):
                return state
    return None


def _holds_good(path: Path) -> bool:
    """Say whether the state in a folder is good, by its file alone; one that cannot be read is not."""
    with suppress(OSError, ValueError, TypeError, KeyError, RecursionError):
        plain = _unpack(json.loads(read_regular(path / STATE)), {})
        return _is_good(plain[LOOP]["guard"])
    return False


def _discard(path: Path) -> None:
    """Take a state out of the count with one rename; its files are removed later."""
    hidden = path.with_name(f".del-{path.name}.{os.getpid()}")
    remove_tree(hidden)
    retry_while_open(lambda: os.rename(path, hidden))  # noqa: PTH104


def _encode(frozen: Frozen) -> dict[str, Data]:
    return {
        file: file_parts(content) if file in TENSOR_FILES else json_bytes(content)
        for file, content in frozen.contents.items()
    }


def state_of(files: Mapping[str, bytes]) -> TrainingState:
    """Return the state of `state_files`; raises ValueError, KeyError and the like for damaged ones."""
    return _state(
        {
            name: load(files[name]) if name in TENSOR_FILES else json.loads(files[name])
            for name in FILES
        }
    )


def _state(contents: Mapping[str, Any]) -> TrainingState:
    """Return the state of the contents of its files, as `Frozen` has them."""
    plain, tensors = _unpack(contents[STATE], {}), contents[ADAPTER]
    return TrainingState(
        step=plain["step"],
        images_seen=plain["images_seen"],
        adapter={name: tensors[name] for name in plain["adapter"]},
        optimizer=_unpack(contents[OPTIMIZER], contents[OPTIMIZER_TENSORS]),
        # Older states have keys that nothing reads any more.
        **{key: value for key, value in plain[LOOP].items() if key in LOOP_FIELDS},
    )


def _manifest(step: int, contents: Mapping[str, Data]) -> dict[str, Any]:
    files = {
        name: {"sha256": sha256_bytes(data), "bytes": sum(map(len, parts_of(data)))}
        for name, data in contents.items()
    }
    return {"format_version": FORMAT_VERSION, "step": step, "files": files}


# Errors that say that something else is in the place of a file.
_NOT_FILES = (errno.EINVAL, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO)


def _read(folder: Path, *, step: int) -> TrainingState | str:
    """Read and verify a state; return the reason when it is not valid.

    Raises MachineError when it cannot be read, as its files are then not known to be damaged.
    """
    try:
        manifest = json.loads(read_regular(folder / MANIFEST))
        contents = {name: read_regular(folder / name) for name in FILES}
        if manifest["format_version"] != FORMAT_VERSION:
            version = manifest["format_version"]
            return f"its format is {version!r}, this program reads {FORMAT_VERSION}"
        expected = _manifest(step, contents)
        changed = [name for name in FILES if manifest["files"][name] != expected["files"][name]]
        if changed or manifest != expected:
            return f"{(*changed, MANIFEST)[0]} is not as it was written"
        return state_of(contents)
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        if error.errno in _NOT_FILES:
            return f"{type(error).__name__}: {error}"
        # What the disk does not give now may be whole; the run must not go on from an older state.
        raise MachineError(
            f"cannot read the state {folder}: {error.strerror or error}",
            fix="make it readable, then resume; without that folder the run goes on from the state before it",
        ) from error
    except (ValueError, TypeError, KeyError, RecursionError, SafetensorError) as error:
        return f"{type(error).__name__}: {error}"


def _report(events: EventStream | None, path: Path, what: str, *, severity: Severity) -> None:
    if events is not None:
        fix = "nothing to do: the run goes on from the newest state that is whole"
        events.problem(what, fix=fix, severity=severity, file=path.name, code="CKP-05")


@contextmanager
def _tolerating(events: EventStream | None, path: Path, what: str) -> Iterator[None]:
    """Report an OSError of the block as a problem of the run instead of letting it through."""
    try:
        yield
    except OSError as error:
        _report(events, path, f"{what}: {error.strerror}", severity="warning")


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def _matching(folder: Path, pattern: re.Pattern[str]) -> Iterator[tuple[Path, re.Match[str]]]:
    for path in sorted(folder.iterdir()):
        if match := pattern.fullmatch(path.name):
            yield path, match


def _is_ours(leftover: re.Match[str]) -> bool:
    """Whether no other living process can work on it; at start, our own pid is a reused one."""
    pid = int(leftover[3])
    return pid == os.getpid() or not psutil.pid_exists(pid)

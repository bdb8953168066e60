"""Saves that training does not wait for: copied to the host between two steps, written by a thread.

Inputs are a TrainingState and the rest of the save (the rolling export); output are a state
on the disk and then, not before, the `saved` event: that event is the acknowledgement. At most one
save is under way, the next one waits for it, so that `save_every_steps` stays the most a kill can
lose. A disk that refuses is a problem twice and the end of the run the third time; the last save of a
run is tried all the same.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from lora_trainer.checkpoint.states import Copy, Frozen, TrainingState, freeze, thaw, write_state
from lora_trainer.common.errors import LoraTrainError, MachineError, first_line
from lora_trainer.common.events import EventStream
from lora_trainer.hardware.device_calls import mark, may_copy_ahead
from lora_trainer.network import pinned_memory
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.network.pinned_memory import pinned

MAX_FAILURES = 3
# Writes the rolling export of a save and returns its name; runs in the writer's thread.
Export = Callable[[], str]
# Copies what an export needs; runs in the training thread.
Exporter = Callable[[Copy], Export]


# Pinned memory for copies: pieces of these sizes, each twice the one before, cut into parts at multiples of the last.
FIRST_PIECE_BYTES, MOST_PIECE_BYTES, PART_BYTES = 2**20, 64 * 2**20, 256


@dataclass(kw_only=True)
class HostCopies:
    """Host memory that every save uses again: mapping new pages would double the time of a copy.

    The tensors taken are copied by `mark`, all at once: one copy after another would wake and lose the
    threads each time. Copies from a CUDA device go to pinned memory, where there is any, and may still be
    under way then; `arrived` waits.
    """

    buffers: dict[str, Tensor] = field(default_factory=dict)
    marked: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pieces: list[Tensor] = field(default_factory=list)
    used: int = 0
    device: torch.device | None = None
    copied: torch.Event | None = None

    def take(self, name: str, tensor: Tensor) -> Tensor:
        """Return the buffer of that name, which has the values of `tensor` after the next `mark`."""
        buffer = self.buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = self._room(tensor)
            self.buffers[name] = buffer
        if may_copy_ahead(tensor.device):
            self.device = tensor.device
        self.marked.append((buffer, tensor.detach()))
        return buffer

    def _room(self, tensor: Tensor) -> Tensor:
        """Return host memory for a tensor; where it is pinned, a part of a larger piece.

        A state has thousands of tensors, and each request to pin memory stops the device for a moment.
        """
        if not pinned_memory.pins_for(tensor.device):
            return pinned().empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        size = -(-tensor.nbytes // PART_BYTES) * PART_BYTES
        if self.pieces and self.used + size <= self.pieces[-1].nbytes:
            piece = self.pieces[-1]
        else:
            twice = 2 * self.pieces[-1].nbytes if self.pieces else FIRST_PIECE_BYTES
            least = min(twice, MOST_PIECE_BYTES)
            piece = pinned().empty(
                (max(size, least),), dtype=torch.uint8, device=tensor.device, rare=True
            )
            self.pieces.append(piece)
            self.used = 0
        part = piece[self.used : self.used + tensor.nbytes]
        self.used += size
        return part.view(tensor.dtype).view(tensor.shape)

    def mark(self) -> None:
        """Make the copies of a save, or ask the device for them."""
        copies, self.marked = self.marked, []
        if copies:
            buffers, tensors = map(list, zip(*copies, strict=True))
            # What cannot be waited for by an event is waited for here: MPS copies late all the same.
            torch._foreach_copy_(buffers, tensors, non_blocking=self.device is not None)
        if self.device is not None:
            self.copied = mark(self.device)

    def arrived(self) -> None:
        """Return once all copies asked for before the last `mark` are made."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass(kw_only=True)
class StateWriter:
    """Writes the states of one run into `folder`, `keep` of them, and remembers the newest copy.

    As a context manager it waits at the end for the save under way, unless somebody wants to quit at
    once.
    """

    folder: Path
    keep: int
    events: EventStream
    copies: HostCopies = field(default_factory=HostCopies)
    failures: int = 0
    _newest: Frozen | None = None
    _thread: threading.Thread | None = None
    _failed: LoraTrainError | None = None
    _unwritten: LoraTrainError | None = None
    _mistake: Exception | None = None

    def __enter__(self) -> StateWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not KeyboardInterrupt:
            self.wait()

    def remember(self, state: TrainingState) -> None:
        """Copy a state that `newest` shall return, without writing it; as `save`, waits and raises."""
        self.wait()
        self._newest = freeze(state, copy=self.copies.take)
        self.copies.mark()

    def save(self, state: TrainingState, *, export: Exporter | None, last: bool = False) -> None:
        """Copy `state` and have it written, then exported; returns after the copy.

        Raises the third failure in a row, unless it is the `last` save of the run, and
        NonFiniteAdapter; in both cases nothing is copied.
        """
        began = time.perf_counter()
        self.wait()
        if not last and self.failures >= MAX_FAILURES and self._failed is not None:
            raise self._failed
        # Started first: a thread that starts takes the interpreter, which would be waited for here.
        copied: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._thread = threading.Thread(
            target=lambda: copied.get()(),
            name="lora-train-state-writer",
            daemon=True,  # quitting at once must not wait for the disk
        )
        try:
            self._thread.start()
        except RuntimeError:  # the system allows no more threads: it is written here
            self._thread = None
        work: Callable[[], None] = lambda: None  # noqa: E731 - if the copy fails
        try:
            frozen = self._newest = freeze(state, copy=self.copies.take)
            write_export = export(self.copies.take) if export is not None else None
            self.copies.mark()
            blocked_s = time.perf_counter() - began
            work = partial(self._work, frozen, write_export, began, blocked_s, last)
        finally:
            if self._thread is not None:
                copied.put(work)
            else:
                work()

    def wait(self) -> None:
        """Return when no save is under way; raises errors other than those of the disk or the adapter."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._mistake is not None:
            mistake, self._mistake = self._mistake, None
            raise mistake

    def wait_for_acknowledgement(self) -> None:
        """Return when the last state is on the disk; raises MachineError when it is not."""
        self.wait()
        if self._unwritten is not None:
            raise self._unwritten

    def newest(self) -> TrainingState:
        """Return the newest state that was copied, also when the disk refused it."""
        assert self._newest is not None, "nothing was remembered at the start"
        self.copies.arrived()
        return thaw(self._newest)

    def _work(
        self, frozen: Frozen, export: Export | None, began: float, blocked_s: float, last: bool
    ) -> None:
        self._failed = self._unwritten = None
        folder = file = None
        try:
            with _out_of_memory_as_error():
                self.copies.arrived()
                folder = write_state(self.folder, frozen, keep=self.keep)
                file = export() if export is not None else None
        except LoraTrainError as error:
            self._failed = error
            self._unwritten = error if folder is None else None  # a state counts without its export
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._mistake = error
            return
        if folder is not None:
            self.events.emit(
                "saved",
                step=frozen.step,
                export=file,
                state=folder.name,
                bytes=sum(path.stat().st_size for path in folder.iterdir()),
                seconds=time.perf_counter() - began,
                blocked_s=blocked_s,
            )
        self.failures = self.failures + 1 if self._failed is not None else 0
        if self._failed is not None:
            counted = f"{self.failures} of {MAX_FAILURES} in a row end the run"
            which = f"step {frozen.step} failed ({'the last save' if last else counted})"
            self.events.problem(
                f"saving at {which}: {self._failed.found}", fix=self._failed.fix, code="CKP-03"
            )


@contextmanager
def _out_of_memory_as_error() -> Iterator[None]:
    """Turn running out of memory into a MachineError: a save that failed, as one the disk refused."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and not is_out_of_memory(error):
            raise
        raise MachineError(
            f"there was not enough memory to write it: {first_line(error)}",
            fix="close what else uses the machine's memory",
        ) from error

"""Saves that training does not wait for: copied to the host between two steps, written by a thread of the run.

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
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import torch
from torch import Tensor

from lora_trainer.checkpoint.states import (
    Copy,
    Frozen,
    TrainingState,
    freeze,
    is_written,
    load_last_good,
    snapshot,
    thaw,
    write_state,
)
from lora_trainer.common.errors import LoraTrainError, MachineError, first_line
from lora_trainer.common.event_kinds import Saved
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
    """Writes the states of one run into `folder`, `keep` of them, and remembers the one to go back to.

    As a context manager it has a thread for all saves of the run, and waits at the end for the save under way, unless
    somebody wants to quit at once. Without the thread, also where the system allows none, a save is written at once.
    """

    folder: Path
    keep: int
    events: EventStream
    copies: HostCopies = field(default_factory=HostCopies)
    failures: int = 0
    _good: Frozen | None = None
    _thread: threading.Thread | None = None
    _saves: SimpleQueue[Callable[[], None] | None] = field(default_factory=SimpleQueue)
    # Held while a save is under way: to release a lock needs no memory.
    _busy: threading.Lock = field(default_factory=threading.Lock)
    _failed: LoraTrainError | None = None
    _unwritten: LoraTrainError | None = None
    _mistake: Exception | None = None

    def __enter__(self) -> StateWriter:
        # Once and before the training: where memory is used up, Python 3.11 waits for ever for a thread to start.
        if self._thread is None:
            # As a daemon, because quitting at once must not wait for the disk.
            thread = threading.Thread(
                target=self._serve, name="lora-train-state-writer", daemon=True
            )
            with suppress(RuntimeError):  # the system allows no more threads
                thread.start()
                self._thread = thread
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is not KeyboardInterrupt:
                self.wait()
        finally:
            thread, self._thread = self._thread, None
            if thread is not None:
                self._saves.put(None)
                if kind is not KeyboardInterrupt:
                    thread.join()

    def remember(self, state: TrainingState) -> None:
        """Copy the state that training begins with, for `last_good`, without writing it; as `save`, waits and raises.

        A run that was killed amid steps that were skipped goes back to the good state before them.
        """
        self.wait()
        if not state.is_good:
            state = load_last_good(self.folder, before=state.step) or state
        self._good = freeze(state, copy=self.copies.take)
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
        # One that is not good must not take the memory of the good one.
        frozen = freeze(state, copy=self.copies.take if state.is_good else snapshot)
        if frozen.is_good:
            self._good = frozen
        write_export = export(self.copies.take) if export is not None else None
        self.copies.mark()
        blocked_s = time.perf_counter() - began
        work = partial(self._work, frozen, write_export, began, blocked_s, last)
        if self._thread is None or not self._thread.is_alive():
            work()
            return
        self._busy.acquire()
        try:
            self._saves.put(work)
        except BaseException:
            self._busy.release()
            raise

    def _serve(self) -> None:
        """Do the saves of the run, one after another."""
        while (work := self._saves.get()) is not None:
            try:
                work()
            except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
                self._mistake = error
            finally:
                del work  # a copy that is not remembered is freed
                self._busy.release()

    def wait(self) -> None:
        """Return when no save is under way; raises errors other than those of the disk or the adapter."""
        with self._busy:
            mistake, self._mistake = self._mistake, None
        if mistake is not None:
            raise mistake

    def wait_for_acknowledgement(self) -> None:
        """Return when the last state is on the disk; raises MachineError when it is not."""
        self.wait()
        if self._unwritten is not None:
            raise self._unwritten

    def last_good(self) -> TrainingState:
        """Return the newest state that training may go back to, also when the disk refused it."""
        assert self._good is not None, "nothing was remembered at the start"
        self.copies.arrived()
        return thaw(self._good)

    def _write(self, frozen: Frozen) -> Path:
        """Write a state; where it is not good, first the good one before it, which a resume needs to go back to."""
        good = self._good
        if not frozen.is_good and good is not None and not is_written(self.folder, step=good.step):
            write_state(self.folder, good, keep=self.keep)
        return write_state(self.folder, frozen, keep=self.keep)

    def _work(
        self, frozen: Frozen, export: Export | None, began: float, blocked_s: float, last: bool
    ) -> None:
        self._failed = self._unwritten = None
        folder = file = None
        try:
            with _out_of_memory_as_error():
                self.copies.arrived()
                folder = self._write(frozen)
                file = export() if export is not None else None
        except LoraTrainError as error:
            self._failed = error
            self._unwritten = error if folder is None else None  # a state counts without its export
        except Exception as error:  # noqa: BLE001 - handed to the training thread, which raises it
            self._mistake = error
            return
        if folder is not None:
            self.events.emit(
                Saved(
                    step=frozen.step,
                    export=file,
                    state=folder.name,
                    bytes=sum(path.stat().st_size for path in folder.iterdir()),
                    seconds=time.perf_counter() - began,
                    blocked_s=blocked_s,
                )
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
            fix="close other programs that use the machine's memory",
        ) from error

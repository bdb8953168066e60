"""Host memory that a GPU copies beside its computation, and copies to and from it that nobody waits for.

A system refuses to pin beyond a limit that it does not report: WSL2 at half a GiB to one, Windows at about
half of the memory. So this module, the only one that pins, requests no more than the platform is known to
allow; memory that is copied in every step comes first, and after a refusal the rest stays unpinned. Results do
not change: unpinned copies are slower, and the host waits for them. The limit is one for the whole process, so
the count is global: `counted` sets a new one for a run.
"""

from __future__ import annotations

import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock

import torch
from torch import Tensor

from lora_trainer.common.errors import first_line
from lora_trainer.hardware.device_calls import (
    current_stream,
    kind_of,
    mark,
    may_copy_ahead,
    register_host,
    side_stream,
    unregister_host,
)
from lora_trainer.hardware.devices import PAGE_BYTES, RESERVED_BYTES, pinned_bytes
from lora_trainer.hardware.machine import GIB

OnRefusal = Callable[[str], None]


def pins_for(device: torch.device, *, in_place: bool = False) -> bool:
    """Say whether host memory is pinned for this device: new memory, or existing memory with `in_place`."""
    kind = kind_of(device)
    return kind.pins_in_place if in_place else kind.pins


class PinnedMemory:
    """The bytes this process has pinned, at most `limit_bytes` (None: until the system refuses).

    `on_refusal` is called with a message when the system refuses.
    """

    def __init__(
        self, *, limit_bytes: int | None = None, on_refusal: OnRefusal = lambda _: None
    ) -> None:
        self.limit_bytes, self.on_refusal = limit_bytes, on_refusal
        self.bytes = 0
        self.refused = False
        self._lock = RLock()
        # torch keeps freed pinned memory and reuses it for requests of the same size, a power of two.
        self._kept = Counter[int]()
        # Finalizers run in any thread at any time, even in one that holds the lock: they only append.
        self._freed = deque[int]()

    def empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
        rare: bool = False,
    ) -> Tensor:
        """Return host memory for copies to or from `device`, pinned if possible.

        Memory that is `rare`, not copied in every step, leaves RESERVED_BYTES for memory that is.
        """
        if not pins_for(device):
            return _empty(shape, strides, dtype, pin=False)
        taken_bytes = pinned_bytes(torch.Size(shape).numel() * dtype.itemsize)
        with self._lock:
            while self._freed:
                self._kept[self._freed.popleft()] += 1
            # Freed memory of this size is used again, and counts no more.
            is_reused = self._kept[taken_bytes] > 0
            if is_reused:
                self._kept[taken_bytes] -= 1
                self.bytes -= taken_bytes
            if is_reused or self._has_room(taken_bytes, rare=rare):
                try:
                    tensor = _empty(shape, strides, dtype, pin=True)
                except RuntimeError as error:
                    # torch has cleared CUDA's last error, which `register_host` does not.
                    self._refuse(taken_bytes, first_line(error))
                else:
                    self.bytes += taken_bytes
                    weakref.finalize(tensor, self._freed.append, taken_bytes).atexit = False
                    return tensor
        return _empty(shape, strides, dtype, pin=False)

    def in_place(self, memory: Tensor, *, device: torch.device) -> Callable[[], None] | None:
        """Pin existing memory of whole pages (`whole_pages`); return the function that unpins it.

        None means that the memory was not pinned. Call the function only when no copy is under way.
        """
        size, address = -(-memory.nbytes // PAGE_BYTES) * PAGE_BYTES, memory.data_ptr()
        with self._lock:
            if not pins_for(device, in_place=True) or not self._has_room(size, rare=True):
                return None
            code = register_host(address, memory.nbytes)
            if code != 0:
                _clear_last_error(device)
                self._refuse(size, f"CUDA error {code}")
                return None
            self.bytes += size
        unregister = unregister_host  # the driver that pinned this memory unpins it, however late

        def undo() -> None:
            unregister(address)
            with self._lock:
                self.bytes -= size

        return undo

    def _has_room(self, size: int, *, rare: bool) -> bool:
        if self.refused:
            return False
        reserved = RESERVED_BYTES if rare else 0
        return self.limit_bytes is None or self.bytes + size + reserved <= self.limit_bytes

    def _refuse(self, size: int, reason: str) -> None:
        self.refused = True
        self.on_refusal(
            f"the system refused to pin another {size / GIB:.2f} GiB of host memory, "
            f"{self.bytes / GIB:.2f} GiB are pinned ({reason}): the rest is copied unpinned, which "
            "takes two to three times as long, and steps wait for it; the results are the same"
        )


def _empty(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, *, pin: bool
) -> Tensor:
    """Allocate host memory; raises RuntimeError if the system refuses to pin it."""
    if strides is None:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=pin)


def _clear_last_error(device: torch.device) -> None:
    """Clear CUDA's last error, which the check after the next kernel would attribute to that kernel."""
    with suppress(RuntimeError):  # raised by the check after this kernel
        torch.empty(1, device=device).zero_()


_count = PinnedMemory()


def pinned() -> PinnedMemory:
    """Return the present count of pinned memory."""
    return _count


@contextmanager
def counted(*, limit_bytes: int | None, on_refusal: OnRefusal) -> Iterator[PinnedMemory]:
    """Use a new count with this limit while a block runs."""
    global _count
    before, _count = _count, PinnedMemory(limit_bytes=limit_bytes, on_refusal=on_refusal)
    try:
        yield _count
    finally:
        _count = before


def pinned_copy(tensor: Tensor, *, device: torch.device) -> Tensor:
    """Return a pinned copy of a host tensor; the tensor itself if memory is not pinned for `device`."""
    if not pins_for(device):
        return tensor
    return pinned().empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def whole_pages(size: int) -> Tensor:
    """Return uint8 [size] that shares no memory page with other data, as pinning in place requires."""
    pages = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(pages + PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + size]


class AsyncRead:
    """A copy of a few float32 numbers to the host, queued behind the work that computes them.

    `float(tensor)` would wait for all work queued so far, also that of later steps; `read` waits for its copy.
    """

    def __init__(self, values: Tensor) -> None:
        self._host = values.detach()
        self._copied: torch.Event | None = None
        if may_copy_ahead(values.device):
            # Into pageable memory the driver copies by way of its own buffer, and the host waits for it.
            self._host = pinned().empty(values.shape, dtype=values.dtype, device=values.device)
            self._host.copy_(values.detach(), non_blocking=True)
            self._copied = mark(values.device)

    def read(self) -> list[float]:
        """Return the numbers; waits until the copy is done, not for work queued later."""
        if self._copied is not None:
            self._copied.synchronize()
        numbers: list[float] = self._host.tolist()
        return numbers


# An event at the end of a copy; None if the copy is over.
Done = torch.Event | None


class CopyStream:
    """The copies of one device; with `beside=False` they run in order with the computation.

    The caller of `copy` keeps both tensors alive until it has called `wait`: the allocator does not know of the
    side stream and would reuse their memory. Telling it (`record_stream`) would hold memory back for as
    long as the host runs ahead.
    """

    def __init__(self, device: torch.device, *, beside: bool = True) -> None:
        self.device = device
        self._stream = side_stream(device) if beside else None

    def copy(self, target: Tensor, source: Tensor) -> Done:
        """Start target <- source, after all work queued so far; asynchronous if host memory is pinned."""
        if self._stream is None:
            target.copy_(source)
            return None
        # The source may still be computed, and the target still read, by work queued earlier.
        self._stream.wait_stream(current_stream(self.device))
        with torch.get_device_module(self.device).stream(self._stream):
            target.copy_(source, non_blocking=True)
            event: Done = self._stream.record_event()
        return event

    def wait(self, event: Done) -> None:
        """Make all work queued from now on wait for a copy; the host does not wait."""
        if event is not None:
            current_stream(self.device).wait_event(event)

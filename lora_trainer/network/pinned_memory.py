"""Host memory that a card copies beside its computation: the one place that pins it, and keeps count.

Pinned memory is lent by the system, and no system says how much of it there is before it refuses: WSL2
half a GiB to one, Windows about half of the memory. So no more is asked for than the platform is known
to give, what is copied in every step comes first, and after a refusal the rest stays ordinary memory.
That changes no number: copies are slower, and the host waits for them.

How much a process has pinned is known to the driver alone and is one number for the process, so the count
is one too: `counted` puts a new one in force for a run.
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
from lora_trainer.hardware.device_calls import kind_of, register_host, unregister_host
from lora_trainer.hardware.machine import GIB
from lora_trainer.hardware.torch_allocator import PAGE_BYTES, RESERVED_BYTES, pinned_bytes

_NOWHERE = torch.device("meta")
"""Where networks are traced."""
Told = Callable[[str], None]


def pins_for(device: torch.device, *, in_place: bool = False) -> bool:
    """Say whether host memory is pinned for copies to and from this device, or where it is `in_place`."""
    if device == _NOWHERE:
        return False
    kind = kind_of(device)
    return kind.pins_in_place if in_place else kind.pins


class PinnedMemory:
    """What this process has pinned, in bytes, at most `limit_bytes` (None: until the system refuses).

    `told` hears once that it refused.
    """

    def __init__(self, *, limit_bytes: int | None = None, told: Told = lambda _: None) -> None:
        self.limit_bytes, self.told = limit_bytes, told
        self.bytes = 0
        self.refused = False
        self._lock = RLock()
        # Torch keeps what is freed, and gives it to the next of the same size, a power of two.
        self._kept = Counter[int]()
        self._freed = deque[int]()  # garbage is collected in any thread, at any time: no lock there

    def empty(
        self,
        shape: Sequence[int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        strides: Sequence[int] | None = None,
        rare: bool = False,
    ) -> Tensor:
        """Return host memory for copies to or from `device`, pinned if it can be.

        What is `rare`, not copied in every step, leaves room for what is.
        """
        if not pins_for(device):
            return _empty(shape, strides, dtype)
        taken_bytes = pinned_bytes(torch.Size(shape).numel() * dtype.itemsize)
        with self._lock:
            if self._reused(taken_bytes) or self._has_room(taken_bytes, rare=rare):
                try:
                    tensor = _pinned_empty(shape, strides, dtype)
                except RuntimeError as error:  # torch clears CUDA's last error itself
                    self._refuse(taken_bytes, first_line(error))
                else:
                    self.bytes += taken_bytes
                    weakref.finalize(tensor, self._freed.append, taken_bytes).atexit = False
                    return tensor
        return _empty(shape, strides, dtype)

    def in_place(self, memory: Tensor, *, device: torch.device) -> Callable[[], None] | None:
        """Pin memory where it is, whole pages (`whole_pages`); return what undoes that, None: unpinned.

        Unpinning must wait until no copy is under way.
        """
        size, address = -(-memory.nbytes // PAGE_BYTES) * PAGE_BYTES, memory.data_ptr()
        with self._lock:
            if not pins_for(device, in_place=True) or not self._has_room(size, rare=True):
                return None
            code = _register(address, memory.nbytes)
            if code != 0:
                _clear_last_error(device)
                self._refuse(size, f"CUDA error {code}")
                return None
            self.bytes += size

        def undo() -> None:
            _unregister(address)
            with self._lock:
                self.bytes -= size

        return undo

    def _has_room(self, size: int, *, rare: bool) -> bool:
        if self.refused:
            return False
        reserved = RESERVED_BYTES if rare else 0
        return self.limit_bytes is None or self.bytes + size + reserved <= self.limit_bytes

    def _reused(self, size: int) -> bool:
        """Say whether torch has memory of this size that was freed; if so it is counted once."""
        while self._freed:
            self._kept[self._freed.popleft()] += 1
        if not self._kept[size]:
            return False
        self._kept[size] -= 1
        self.bytes -= size
        return True

    def _refuse(self, size: int, reason: str) -> None:
        self.refused = True
        self.told(
            f"the system refused to pin another {size / GIB:.2f} GiB of host memory, "
            f"{self.bytes / GIB:.2f} GiB are pinned ({reason}): the rest is copied unpinned, which "
            "takes two to three times as long, and steps wait for it; the numbers are the same"
        )


def _empty(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype, *, pin: bool = False
) -> Tensor:
    if strides is None:
        return torch.empty(shape, dtype=dtype, pin_memory=pin)
    return torch.empty_strided(shape, strides, dtype=dtype, pin_memory=pin)


def _pinned_empty(
    shape: Sequence[int], strides: Sequence[int] | None, dtype: torch.dtype
) -> Tensor:
    """Raises RuntimeError where the system refuses."""
    return _empty(shape, strides, dtype, pin=True)


def _register(address: int, size: int) -> int:
    """Return CUDA's error, 0 for none."""
    return register_host(address, size)


def _unregister(address: int) -> None:
    unregister_host(address)


def _clear_last_error(device: torch.device) -> None:
    """Make CUDA forget a refusal, which the check behind the next kernel would take for that kernel's."""
    with suppress(RuntimeError):  # of this check
        torch.empty(1, device=device).zero_()


_count = PinnedMemory()


def pinned() -> PinnedMemory:
    """Return the count that is in force."""
    return _count


@contextmanager
def counted(*, limit_bytes: int | None, told: Told) -> Iterator[PinnedMemory]:
    """Count what is pinned while a block runs, up to this limit."""
    global _count
    before, _count = _count, PinnedMemory(limit_bytes=limit_bytes, told=told)
    try:
        yield _count
    finally:
        _count = before


def pinned_copy(tensor: Tensor, *, device: torch.device) -> Tensor:
    """Return a host tensor as one that can be copied to `device` without waiting; itself if none can."""
    if not pins_for(device):
        return tensor
    return pinned().empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)


def whole_pages(size: int) -> Tensor:
    """Return uint8 [size] that shares no page with other memory, as pinning in place needs."""
    pages = -(-size // PAGE_BYTES) * PAGE_BYTES
    memory = torch.empty(pages + PAGE_BYTES, dtype=torch.uint8)
    start = -memory.data_ptr() % PAGE_BYTES
    return memory[start : start + size]

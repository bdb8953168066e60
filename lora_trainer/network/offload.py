"""Networks that wait in host memory and compute on a device, one block at a time for many calls together.

For networks that only run forward, such as text encoders during caching. The calls (one for each text) run in threads
that meet before each block: the block is copied to the device once, all of them pass it one after another, and the
device's copy is dropped, as the weights in host memory are still there. Each call computes alone what it would compute
alone, with the same bits; only the order of the copies differs.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

import torch
from accelerate.utils import send_to_device
from torch import nn

from lora_trainer.hardware.device_calls import free_and_total_bytes, kind_of, may_copy_ahead
from lora_trainer.network.block_swap import PackedBlock
from lora_trainer.network.out_of_memory import free_memory, is_out_of_memory
from lora_trainer.network.pinned_memory import pinned

Result = TypeVar("Result")
# Each call has a thread.
MOST_TOGETHER = 64
# What a call keeps on the device from block to block, over the weights of its network: the hidden states of all layers
# take 1.2 % (Qwen3, Gemma 2) to 1.4 % (Qwen2.5-VL), of which twice as much is allowed. A T5 keeps its position bias and
# the states of one layer, 0.4 % with 512 tokens: as it is by far the largest, it is reckoned by itself.
KEPT_SHARE = 1 / 36
KEPT_SHARE_OF_T5 = 1 / 125
_T5 = frozenset({"T5EncoderModel", "UMT5EncoderModel"})
# Room for the largest block, and for what is alive while a call passes it.
BLOCK_SHARE = 1 / 6


class _Unit:
    """A part of a network that is on the device as a whole, or not at all."""

    def __init__(self) -> None:
        self._packed: PackedBlock | None = None

    def load(self, module: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
        """Copy the part to the device; yield what unpins its host memory, at the first call only."""
        if self._packed is None:  # parts that no call reads are never packed
            self._packed = PackedBlock(module)
            self._packed.move_to_host()
            host = self._packed.host
            if (unpin := pinned().in_place(host, device=device)) is not None:
                yield partial(_unpin, unpin, host)
        memory = torch.empty(self._packed.bytes, dtype=torch.uint8, device=device)
        memory.copy_(self._packed.host, non_blocking=may_copy_ahead(device))
        self._packed.hold(self._packed.views(memory))

    def drop(self) -> None:
        """Let the part use its host memory again, which nothing has changed."""
        assert self._packed is not None
        self._packed.hold(self._packed.host_views)


def _unpin(unpin: Callable[[], None], host: torch.Tensor) -> None:
    """Unpin memory that is alive until then, as this function holds it."""
    unpin()


class Offloaded:
    """Networks of one device that are in host memory for their callers: inputs and outputs are there."""

    def __init__(self, networks: Sequence[nn.Module], device: torch.device) -> None:
        self.device = device
        self.copies = 0
        sizes = {network: sum(each.nbytes for each in network.parameters()) for network in networks}
        self._weights_bytes = sum(sizes.values())
        self._kept_bytes = sum(
            size * (KEPT_SHARE_OF_T5 if type(network).__name__ in _T5 else KEPT_SHARE)
            for network, size in sizes.items()
        )
        # Calls meet by state that all of them share: another group waits until this one has ended.
        self._group = threading.Lock()
        self._turn = threading.Lock()
        self._whose_turn: int | None = None
        self._arrived = list[tuple[_Unit, nn.Module]]()
        self._loaded: _Unit | None = None
        self._meeting = threading.Barrier(1)
        self._unpins = list[Callable[[], None]]()
        weakref.finalize(self, _call_all, self._unpins).atexit = False
        for network in networks:
            self._prepare(network)

    def together(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Return the results of the first calls, of as many as fit on the device at once; at least of one."""
        count = min(len(calls), self._most_together())
        while True:
            try:
                with self._group:
                    return self._run(calls[:count])
            except RuntimeError as error:
                if count == 1 or not is_out_of_memory(error):
                    raise
            # Outside the except block: its traceback would keep the tensors alive that must go.
            free_memory()
            count = -(-count // 2)

    def _prepare(self, network: nn.Module) -> None:
        for module in _parts(network):
            unit = _Unit()
            module.register_forward_pre_hook(partial(self._begin, unit))
            module.register_forward_hook(self._end, always_call=True)
        inside = {id(layer) for part in _parts(network) for layer in part.modules()}
        for module in network.modules():
            if id(module) not in inside:  # a few numbers, such as positions
                _keep_on(module, self.device)
        # Code outside the parts, such as masks, runs on the device of the inputs.
        network.register_forward_pre_hook(
            lambda _, args, kwargs: send_to_device((args, kwargs), self.device), with_kwargs=True
        )
        network.register_forward_hook(lambda _, args, output: send_to_device(output, "cpu"))

    def _most_together(self) -> int:
        if not kind_of(self.device).own_memory:
            return MOST_TOGETHER
        free_bytes, _ = free_and_total_bytes(self.device)
        room_bytes = free_bytes - BLOCK_SHARE * self._weights_bytes
        return max(1, min(MOST_TOGETHER, int(room_bytes / self._kept_bytes)))

    def _run(self, calls: Sequence[Callable[[], Result]]) -> list[Result]:
        """Run calls together; raises the first error that one of them raised."""
        errors = list[BaseException]()
        self._meeting, self._arrived = threading.Barrier(len(calls), action=self._change), []

        def work(call: Callable[[], Result]) -> Result | None:
            try:
                return call()
            except BaseException as error:  # noqa: BLE001 - the others wait for this one, so they end too
                errors.append(error)
                self._meeting.abort()
                return None

        with ThreadPoolExecutor(len(calls)) as pool:
            results = list(pool.map(work, calls))
        self._drop()
        if errors:
            broken = (each for each in errors if not isinstance(each, threading.BrokenBarrierError))
            raise next(broken, errors[0])
        return results  # type: ignore[return-value]  # None only beside an error

    def _begin(self, unit: _Unit, module: nn.Module, *_: Any) -> None:
        with self._turn:
            self._arrived.append((unit, module))
        self._meeting.wait()
        self._turn.acquire()
        self._whose_turn = threading.get_ident()

    def _end(self, *_: Any) -> None:
        # A call that ended at the meeting, as another one failed, has no turn.
        if self._whose_turn == threading.get_ident():
            self._whose_turn = None
            self._turn.release()

    def _change(self) -> None:
        """Put the part that all calls have come to in place of the one before; runs while all of them wait."""
        (unit, module), *others = self._arrived
        assert all(other is unit for other, _ in others), "calls of one network go the same way"
        self._arrived = []
        if unit is self._loaded:
            return
        self._drop()
        self._unpins += unit.load(module, self.device)
        self._loaded, self.copies = unit, self.copies + 1

    def _drop(self) -> None:
        if self._loaded is not None:
            self._loaded.drop()
        self._loaded = None


def _parts(network: nn.Module) -> Iterator[nn.Module]:
    """Yield the blocks (entries of lists of modules) and the layers outside of them, in module order."""
    if isinstance(network, nn.ModuleList):
        yield from network
    elif any(True for _ in network.children()):
        for child in network.children():
            yield from _parts(child)
    elif network._parameters:
        yield network


def _keep_on(module: nn.Module, device: torch.device) -> None:
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter.to(device), requires_grad=False)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = buffer.to(device)


def _call_all(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()

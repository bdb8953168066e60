"""The processes of one training and the few things they do together; torch.distributed is the engine.

Each process sums the gradients of its own samples. One flat all-reduce(SUM) per optimizer step carries
them with the loss and what somebody asked for, so that everything that changes a step follows from
the same numbers on all of them. There is no DDP wrapper: an out-of-memory retry stays local, and a
process may have more micro-batches than another, or none. Alone, nothing here does anything.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no exports listed

from lora_trainer.errors import (
    RESUME,
    LoraTrainError,
    MachineError,
    StoppedBySignal,
    TrainingStopped,
    first_line,
)
from lora_trainer.launch import Place
from lora_trainer.model.readback import Readback
from lora_trainer.train.watch import LOOK, Watch

PATIENCE = timedelta(days=7)
"""The watch tells who is gone; sampling or caching of another process may take as long as it takes."""
STOPS = (int(signal.SIGTERM), int(signal.SIGINT))
"""What a run may be asked to end with; the first that anybody was asked for counts."""


@dataclass(kw_only=True)
class Ranks:
    """All processes of a training, seen from one of them.

    `device` is where collectives take their tensors; `lag` the steps after which a request that went
    round with the gradients is read, so that no step waits for the device.
    """

    place: Place = field(default_factory=Place)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lag: int = 0
    watch: Watch | None = None
    _asked: deque[Readback] = field(default_factory=deque)
    _stop: int | None = None
    _flat: Tensor | None = None
    _trained: list[bool] | None = None

    @property
    def alone(self) -> bool:
        return self.place.count == 1

    def connect(self, device: torch.device, *, lag: int) -> None:
        """Make collectives possible, once the plan says on which device; waits for all processes."""
        if self.alone or self.watch is None:
            return
        self.device = torch.device("cuda") if device.type == "cuda" else torch.device("cpu")
        self.lag = lag
        self.watch.wait_for_all("ready")
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            # A connection of its own: waiting on one blocks every other use of it, the watch's too.
            store=_store(self.place, "collectives", timeout=PATIENCE, keep=False),
            rank=self.place.rank,
            world_size=self.place.count,
            timeout=PATIENCE,
        )

    # ---- the step

    def reduce(
        self,
        parameters: Sequence[nn.Parameter],
        loss: Tensor,
        *,
        ask: Callable[[], int | None],
        in_place: bool = False,
    ) -> Tensor:
        """Sum gradients and loss over all processes, in place; return the loss of the whole batch.

        A parameter that has no gradient anywhere keeps none: optimizers leave it alone, as they do
        in one process. `ask` returns the signal this process was asked to end with. `in_place`: the
        sums go into the memory that gradients have.
        """
        if self.alone:
            return loss
        stop = ask()
        flat = self._flat = self._buffer(parameters)
        views, told = self._views(flat, parameters), flat[-len(parameters) - len(STOPS) - 1 :]
        for view, parameter in zip(views, parameters, strict=True):
            if parameter.grad is None:
                view.zero_()
            else:
                view.copy_(parameter.grad)
        told[0] = loss
        flags = torch.tensor(
            [
                *(float(number == stop) for number in STOPS),
                *(float(parameter.grad is not None) for parameter in parameters),
            ],
            pin_memory=flat.is_cuda,
        )
        told[1:].copy_(flags, non_blocking=True)
        with self._together():
            dist.all_reduce(flat)
        if self._trained is None:  # every sample passes the same network: once is enough
            self._trained = [bool(count) for count in told[1 + len(STOPS) :].tolist()]
        for view, parameter, trained in zip(views, parameters, self._trained, strict=True):
            wanted = trained and parameter.requires_grad  # what has stopped was in the first step
            if in_place and wanted and parameter.grad is not None:
                parameter.grad.copy_(view)
            else:
                parameter.grad = view.to(parameter.device) if wanted else None
        self._asked.append(Readback(told[1 : 1 + len(STOPS)].clone()))
        return told[0].clone().to(loss.device)

    def _buffer(self, parameters: Sequence[nn.Parameter]) -> Tensor:
        """Return the memory of the sum, the same in every step: nothing is allocated on the way."""
        if self._flat is not None:
            return self._flat
        size = sum(parameter.numel() for parameter in parameters)
        return torch.empty(size + 1 + len(STOPS) + len(parameters), device=self.device)

    @staticmethod
    def _views(flat: Tensor, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        sizes = [parameter.numel() for parameter in parameters]
        parts = flat[: sum(sizes)].split(sizes)
        return [part.view_as(like) for part, like in zip(parts, parameters, strict=True)]

    def stop_asked(self, ask: Callable[[], int | None]) -> int | None:
        """Return the signal to end with after this step, the same on all processes; alone, `ask` it."""
        if self.alone:
            return ask()
        while len(self._asked) > self.lag:
            counts = self._asked.popleft().read()
            asked = [number for number, count in zip(STOPS, counts, strict=True) if count]
            self._stop = asked[0] if asked else self._stop
        return self._stop

    # ---- between steps

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the sums over all processes, exact to float64."""
        if self.alone:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self._together():
            dist.all_reduce(tensor)
        found: list[float] = tensor.tolist()
        return found

    def from_leader(self, data: bytes | None) -> bytes:
        """Return the bytes the first process gives; the others give None."""
        if self.alone:
            assert data is not None
            return data
        length = torch.tensor([len(data or b"")], dtype=torch.int64, device=self.device)
        with self._together():
            dist.broadcast(length, src=0)
            size = int(length.item())
            if size == 0:
                return b""
            if data is None:
                buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
            else:
                buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self.device)
            dist.broadcast(buffer, src=0)
        return buffer.cpu().numpy().tobytes()

    def wait_for_all(self, what: str) -> None:
        """Return when every process has come here; no collective, and the reason if one has ended."""
        if self.alone or self.watch is None:
            return
        self.watch.wait_for_all(what)

    def end_together(self) -> None:
        """Say that all is done (the leader), or wait for that (the others): success is of the whole run."""
        if self.alone or self.watch is None:
            return
        if self.place.leads:
            self.watch.give("done", "1")
        else:
            self.watch.take("done")

    def require_same(self, digest: bytes, *, step: int) -> None:
        """Raise TrainingStopped, on all processes, where theirs came to another state than the first's."""
        if self.alone:
            return
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(self.device)
        found = [torch.empty_like(mine) for _ in range(self.place.count)]
        with self._together():
            dist.all_gather(found, mine)
        other = [rank for rank, theirs in enumerate(found) if not torch.equal(theirs, found[0])]
        if other:
            raise TrainingStopped(
                f"process {', '.join(map(str, other))} of {self.place.count} came to other weights than "
                f"process 0 by step {step}; nothing of it was saved",
                fix=f"check that all machines are alike, then {RESUME}",
            )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Turn what a collective raises when another process has ended into the reason for that."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            reason = self.watch.reason() if self.watch else ""
            raise MachineError(
                reason or f"another process of this training ended: {first_line(error)}", fix=LOOK
            ) from error


@contextmanager
def joined(place: Place, *, timeout_s: float) -> Iterator[Ranks]:
    """Meet the other processes in the launcher's store; on an error of this one, they learn why."""
    if place.count == 1:
        yield Ranks()
        return
    own = _store(place, "watch", timeout=timedelta(seconds=timeout_s), keep=place.leads)
    watch = Watch(place=place, store=own, timeout_s=timeout_s)
    watch.start()
    try:
        yield Ranks(place=place, watch=watch)
    except StoppedBySignal:
        raise
    except LoraTrainError as error:
        watch.fail(error.found.rstrip("."))
        raise
    except BaseException as error:
        watch.fail(f"{type(error).__name__}: {first_line(error)}")
        raise
    finally:
        watch.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(place: Place, name: str, *, timeout: timedelta, keep: bool) -> PrefixStore:
    """Connect to the store where all processes meet; `keep`: be the one that has it."""
    try:
        store = TCPStore(
            place.address,
            place.port,
            is_master=keep and not place.launcher_keeps_store,
            timeout=timeout,
            wait_for_workers=False,  # the watch sees who does not come, and says so
        )
    except RuntimeError as error:
        raise MachineError(
            f"process {place.rank} of {place.count} does not reach the others at "
            f"{place.address}:{place.port}: {first_line(error)}",
            fix="look at the first process's output; it may have ended",
        ) from error
    return PrefixStore(f"lora-train/{place.attempt}/{name}", store)

"""The processes of one training and the few things they do together; torch.distributed is the engine.

Each process sums the gradients of its own samples. One flat all-reduce(SUM) per optimizer step carries
them with the loss and what somebody asked for, so that everything that changes a step follows from
the same numbers on all of them. There is no DDP wrapper: an out-of-memory retry stays local, and a
process may have more micro-batches than another, or none. Alone, nothing here does anything.
"""

from __future__ import annotations

import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no exports listed

from lora_trainer.device_calls import kind_of, may_copy_ahead
from lora_trainer.errors import (
    RESUME,
    LoraTrainError,
    MachineError,
    StoppedBySignal,
    TrainingStopped,
    first_line,
)
from lora_trainer.launch import Place, without_launcher
from lora_trainer.model.pinned_memory import pinned_copy
from lora_trainer.model.readback import Readback
from lora_trainer.train.heartbeat import LOOK, PeerMonitor

PATIENCE = timedelta(days=7)
"""The monitor tells who is gone; sampling or caching of another process may take as long as it takes."""
CONNECT = "with several networks, NCCL_SOCKET_IFNAME (processors: GLOO_SOCKET_IFNAME) names the one to use"
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
    monitor: PeerMonitor | None = None
    _asked: deque[Readback] = field(default_factory=deque)
    _stop: int | None = None
    _flat: Tensor | None = None
    _trained: list[bool] | None = None

    @property
    def alone(self) -> bool:
        return self.place.count == 1

    def connect(self, device: torch.device, *, lag: int) -> None:
        """Make collectives possible, once the plan says on which device; waits for all processes."""
        if self.alone or self.monitor is None:
            return
        backend = kind_of(device).collectives
        if not dist.is_backend_available(backend):
            backend = "gloo"  # on Windows, say
        # gloo sums in host memory; the other backends on the device.
        self.device = torch.device("cpu" if backend == "gloo" else device.type)
        self.lag = lag
        self.monitor.wait_for_all("ready")
        # torch has one time limit for connecting and for all collectives to come, which must be patient.
        with self.monitor.limited("connecting to the other processes", advice=CONNECT):
            try:
                dist.init_process_group(
                    backend,
                    # A connection of its own: waiting on one blocks every other use, the monitor's too.
                    store=_store(self.place, "collectives", timeout=PATIENCE, keep=False),
                    rank=self.place.rank,
                    world_size=self.place.count,
                    timeout=PATIENCE,
                )
            except (RuntimeError, ValueError) as error:
                reason = self.monitor.reason() or f"cannot connect: {first_line(error)}"
                raise MachineError(reason, fix=CONNECT) from error
            self.sum([1.0])  # NCCL connects in its first collective
        self.monitor.started()

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
            ]
        )
        told[1:].copy_(
            pinned_copy(flags, device=flat.device), non_blocking=may_copy_ahead(flat.device)
        )
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
        sent = [data]
        if not self.alone:
            with self._together():
                dist.broadcast_object_list(sent, src=0, device=self.device)
        (received,) = sent
        assert received is not None
        return received

    def wait_for_all(self, what: str) -> None:
        """Return when every process has come here; no collective, and the reason if one has ended."""
        if self.alone or self.monitor is None:
            return
        self.monitor.wait_for_all(what)

    def end_together(self) -> None:
        """Say that all is done (the leader), or wait for that (the others): success is of the whole run."""
        if self.alone or self.monitor is None:
            return
        if self.place.leads:
            self.monitor.give("done", "1")
        else:
            self.monitor.take("done")

    def require_same(self, digest: bytes, *, step: int) -> None:
        """Raise TrainingStopped, on all processes, where theirs came to another state than the first's."""
        if self.alone:
            return
        digests: list[bytes] = [b""] * self.place.count
        with self._together():
            dist.all_gather_object(digests, digest)
        other = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
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
            reason = self.monitor.reason() if self.monitor else ""
            raise MachineError(
                reason or f"another process of this training ended: {first_line(error)}", fix=LOOK
            ) from error


def isolate_accelerate() -> None:
    """Let accelerate take this process for the only one, whatever the launcher says.

    Its trackers, log lines and hooks ask `PartialState()`, which calls `init_process_group` where a
    launcher started several processes. Only the first process has trackers: it would wait there for
    the others, and they for it. The state is made once in a process, so nothing asks again.
    """
    with without_launcher():
        PartialState(cpu=True)


@contextmanager
def joined(place: Place, *, timeout_s: float) -> Iterator[Ranks]:
    """Meet the other processes in the launcher's store; on an error of this one, they learn why."""
    if place.count == 1:
        yield Ranks()
        return
    own = _store(place, "monitor", timeout=timedelta(seconds=timeout_s), keep=place.leads)
    monitor = PeerMonitor(place=place, store=own, timeout_s=timeout_s)
    monitor.start()
    try:
        yield Ranks(place=place, monitor=monitor)
    except StoppedBySignal:
        raise
    except LoraTrainError as error:
        monitor.fail(error.found.rstrip("."))
        raise
    except BaseException as error:
        monitor.fail(f"{type(error).__name__}: {first_line(error)}")
        raise
    finally:
        monitor.stop()
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
            use_libuv=sys.platform != "win32",  # torch is built without it there, and raises
            wait_for_workers=False,  # the monitor sees who does not come, and says so
        )
    except RuntimeError as error:
        raise MachineError(
            f"process {place.rank} of {place.count} does not reach the others at "
            f"{place.address}:{place.port}: {first_line(error)}",
            fix="look at the first process's output; it may have ended",
        ) from error
    return PrefixStore(f"lora-train/{place.attempt}/{name}", store)

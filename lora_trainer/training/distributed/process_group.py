"""The processes of one training and their few common operations, by torch.distributed.

Each process sums the gradients of its own samples. One flat all-reduce(SUM) per optimizer step carries the
gradients, the loss and requested stops, so every decision that changes a step follows from the same
numbers on all processes. There is no DDP wrapper: an out-of-memory retry stays local, and a process may
have more micro-batches than another, or none. With a single process every operation here does nothing.
"""

from __future__ import annotations

import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from accelerate import PartialState
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # no exports listed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from lora_trainer.common.errors import (
    RESUME,
    LoraTrainError,
    MachineError,
    StoppedBySignal,
    TrainingStopped,
    first_line,
)
from lora_trainer.common.processes import DistEnv, without_launcher
from lora_trainer.config.declare import Precision
from lora_trainer.hardware.device_calls import gpu_identity, kind_of, may_copy_ahead
from lora_trainer.network.pinned_memory import AsyncRead, pinned_copy
from lora_trainer.training.distributed.heartbeat import CONNECT, LOOK, PeerMonitor

# Time limit of collectives. It is long because the monitor notices processes that are gone, while another
# process may sample or cache for hours.
PATIENCE = timedelta(days=7)
# What makes the mean of a bucket in 16 bits: each process divides, casts and adds up.
_HOOKS: Mapping[str, Callable[[Any, Any], Any]] = {
    "bf16": default_hooks.bf16_compress_hook,
    "fp16": default_hooks.fp16_compress_hook,
}
# Signals that request a stop; if processes got different ones, the first in this order is used.
STOPS = (int(signal.SIGTERM), int(signal.SIGINT))


@dataclass(frozen=True)
class _Bucket:
    """What torch's hooks ask of a bucket of gradients, float32 [elements]."""

    gradients: Tensor

    def buffer(self) -> Tensor:
        return self.gradients


@dataclass(kw_only=True)
class ProcessGroup:
    """All processes of a training, as one of them sees it.

    `device` holds the tensors of collectives (the host for gloo). `lag` is the number of steps after which
    stop requests, which travel with the gradients, are read, so that no step waits for the device. `share_gpus`:
    some processes compute on one GPU. `layers_vary`: some samples pass layers that others do not, such as those for
    reference images.
    """

    dist_env: DistEnv = field(default_factory=DistEnv)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    lag: int = 0
    monitor: PeerMonitor | None = None
    share_gpus: bool = False
    layers_vary: bool = False
    reduced_as: Precision = "fp32"
    """The dtype in which gradients travel."""
    _asked: deque[AsyncRead] = field(default_factory=deque)
    _stop: int | None = None
    _flat: Tensor | None = None
    _trained: list[bool] | None = None

    @property
    def is_single(self) -> bool:
        return self.dist_env.count == 1

    def connect(self, device: torch.device, *, lag: int, reduced_as: Precision = "fp32") -> None:
        """Make collectives possible, once the plan says on which device; waits for all processes."""
        self.reduced_as = reduced_as
        if self.monitor is None:
            return
        backend = self._backend(device)
        # gloo sums in host memory; the other backends sum on the device.
        self.device = torch.device("cpu" if backend == "gloo" else device.type)
        self.lag = lag
        self.monitor.wait_for_all("ready")
        # torch uses one timeout for connecting and for all later collectives. It has to be long for the
        # collectives, so the monitor limits the connecting.
        self.monitor.connecting_since_s = time.monotonic()
        try:
            dist.init_process_group(
                backend,
                # A connection of its own: a wait blocks its connection, and with a shared one the
                # monitor could not send heartbeats meanwhile.
                store=_store(self.dist_env, "collectives", timeout=PATIENCE, keep=False),
                rank=self.dist_env.rank,
                world_size=self.dist_env.count,
                timeout=PATIENCE,
                # Without it NCCL guesses the GPU, warns of that, and may connect another one.
                device_id=device if backend == "nccl" else None,
            )
        except (RuntimeError, ValueError) as error:
            reason = self.monitor.reason() or f"cannot connect: {first_line(error)}"
            raise MachineError(reason, fix=CONNECT) from error
        # NCCL connects in its first collective, so have that one under the limit.
        self.sum([1.0])
        self.monitor.is_starting = False

    def _backend(self, device: torch.device) -> str:
        """Return the backend for sums on these devices: gloo where the usual one is missing (Windows, say) or refuses.

        NCCL refuses processes that share a GPU ("Duplicate GPU detected"). Whether any do only all of them
        know: a scheduler may show each a GPU of its own under the same number.
        """
        backend = kind_of(device).collectives
        if backend == "gloo" or not dist.is_backend_available(backend):
            return "gloo"
        assert self.monitor is not None
        self.monitor.store.set(f"gpu/{self.dist_env.rank}", gpu_identity(device))
        gpus = [self.monitor.take(f"gpu/{rank}") for rank in range(self.dist_env.count)]
        self.share_gpus = len(set(gpus)) < len(gpus)
        return "gloo" if self.share_gpus else backend

    # ---- the step

    def reduce(
        self,
        parameters: Sequence[nn.Parameter],
        loss: Tensor,
        *,
        ask: Callable[[], int | None],
    ) -> Tensor:
        """Sum gradients and loss over all processes, in place; return the loss of the whole batch.

        A parameter without a gradient on every process keeps none, so optimizers skip it, as they do in a
        run of one process. `ask` returns the stop signal of this process or None.
        """
        if self.is_single:
            return loss
        stop = ask()
        # One flat buffer: all gradients | loss | one flag per stop signal | one flag per parameter, set
        # where this process has a gradient. Each collective costs a fixed latency, so there is only one.
        # It is allocated once, so later steps need no new memory.
        sizes = [parameter.numel() for parameter in parameters]
        flags_and_loss = 1 + len(STOPS) + len(parameters)
        if self._flat is None:
            self._flat = torch.empty(sum(sizes) + flags_and_loss, device=self.device)
        flat = self._flat
        *pieces, tail = flat.split([*sizes, flags_and_loss])
        views = [piece.view_as(like) for piece, like in zip(pieces, parameters, strict=True)]
        for view, parameter in zip(views, parameters, strict=True):
            view.zero_() if parameter.grad is None else view.copy_(parameter.grad)
        tail[0] = loss
        has_gradient = [parameter.grad is not None for parameter in parameters]
        flags = torch.tensor([*(number == stop for number in STOPS), *has_gradient]).float()
        tail[1:].copy_(
            pinned_copy(flags, device=flat.device), non_blocking=may_copy_ahead(flat.device)
        )
        with self._together():
            if self.reduced_as == "fp32":
                dist.all_reduce(flat)
            else:
                self._reduce_compressed(flat[: sum(sizes)], tail)
        # Reading these flags waits for the device, so it is done in the first step only where all samples pass
        # the same layers, and the same parameters get gradients in every step.
        if self._trained is None or self.layers_vary:
            self._trained = [bool(count) for count in tail[1 + len(STOPS) :].tolist()]
        for view, parameter, trained in zip(views, parameters, self._trained, strict=True):
            # `requires_grad` is off for stages that have ended since the first step.
            trains = trained and parameter.requires_grad
            parameter.grad = view.to(parameter.device) if trains else None
        self._asked.append(AsyncRead(tail[1 : 1 + len(STOPS)].clone()))
        whole_loss: Tensor = tail[0].clone().to(loss.device)
        return whole_loss

    def _reduce_compressed(self, gradients: Tensor, rest: Tensor) -> None:
        """Sum in place: gradients in 16 bits, by torch's hooks for DDP; loss and flags as they are."""
        others = dist.all_reduce(rest, async_op=True)
        mean = _HOOKS[self.reduced_as](None, _Bucket(gradients)).wait()
        torch.mul(mean, dist.get_world_size(), out=gradients)
        others.wait()

    def stop_asked(self, ask: Callable[[], int | None]) -> int | None:
        """Return the stop signal to end with after this step, the same on all processes, or None.

        A single process calls `ask`; several read the flags that were reduced `lag` steps ago.
        """
        if self.is_single:
            return ask()
        while len(self._asked) > self.lag:
            counts = self._asked.popleft().read()
            requested = [number for number, count in zip(STOPS, counts, strict=True) if count]
            self._stop = requested[0] if requested else self._stop
        return self._stop

    # ---- between steps

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return the elementwise sums over all processes, in float64."""
        if self.is_single:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64, device=self.device)
        with self._together():
            dist.all_reduce(tensor)
        totals: list[float] = tensor.tolist()
        return totals

    def from_leader(self, value: Any) -> Any:
        """Return the `value` of the first process on all processes; the others pass None."""
        sent = [value]
        if not self.is_single:
            with self._together():
                dist.broadcast_object_list(sent, src=0, device=self.device)
        return sent[0]

    def wait_for_all(self, what: str) -> None:
        """Return once every process has called this; raises MachineError with the reason if one has ended.

        It is not a collective, so it works before `connect`.
        """
        if self.monitor is not None:
            self.monitor.wait_for_all(what)

    def end_together(self) -> None:
        """As leader publish that the run is done, else wait for it: a follower succeeds only with the run."""
        if self.monitor is not None:
            lead = self.dist_env.is_main
            self.monitor.store.set("done", "1") if lead else self.monitor.take("done")

    def require_same(self, digest: str, *, step: int) -> None:
        """Raise TrainingStopped on all processes if the digests of their states differ."""
        if self.is_single:
            return
        digests = [""] * self.dist_env.count
        with self._together():
            dist.all_gather_object(digests, digest)
        other = [rank for rank, theirs in enumerate(digests) if theirs != digests[0]]
        if other:
            raise TrainingStopped(
                f"process {', '.join(map(str, other))} of {self.dist_env.count} has different weights "
                f"from process 0 at step {step}; this step was not saved",
                fix=f"check that all machines have the same GPUs and library versions, then {RESUME}",
            )

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Turn the error of a collective whose peer has ended into a MachineError with the peer's reason."""
        try:
            yield
        except (RuntimeError, dist.DistError) as error:
            reason = self.monitor.reason() if self.monitor else ""
            raise MachineError(
                reason or f"another process of this training ended: {first_line(error)}", fix=LOOK
            ) from error


def isolate_accelerate() -> None:
    """Make accelerate treat this process as a single one, whatever the launcher's variables say.

    accelerate's trackers, log lines and hooks create `PartialState()`, which calls `init_process_group` if
    a launcher has started several processes. Only the first process has trackers, so it would wait there
    for the others, and they elsewhere for it. `PartialState` is a singleton: created here once, without
    the launcher's variables, it never connects.
    """
    with without_launcher():
        PartialState(cpu=True)


@contextmanager
def joined(dist_env: DistEnv, *, timeout_s: float) -> Iterator[ProcessGroup]:
    """Join the other processes at the launcher's store; an error of this process is published to them."""
    if dist_env.count == 1:
        yield ProcessGroup()
        return
    store = _store(dist_env, "monitor", timeout=timedelta(seconds=timeout_s), keep=dist_env.is_main)
    monitor = PeerMonitor(dist_env=dist_env, store=store, timeout_s=timeout_s)
    monitor.start()
    try:
        yield ProcessGroup(dist_env=dist_env, monitor=monitor)
    except BaseException as error:
        if not isinstance(error, StoppedBySignal):
            reason = f"{type(error).__name__}: {first_line(error)}"
            if isinstance(error, LoraTrainError):
                reason = error.found.rstrip(".")
            monitor.fail(reason)
        raise
    finally:
        monitor.stop()
        if dist.is_initialized():
            dist.destroy_process_group()


def _store(dist_env: DistEnv, name: str, *, timeout: timedelta, keep: bool) -> PrefixStore:
    """Connect to the store of all processes; with `keep` host it, unless the launcher does."""
    try:
        store = TCPStore(
            dist_env.address,
            dist_env.port,
            is_master=keep and not dist_env.launcher_keeps_store,
            timeout=timeout,
            use_libuv=sys.platform != "win32",  # torch is built without it there, and raises
            wait_for_workers=False,  # the monitor reports processes that never come
        )
    except RuntimeError as error:
        raise MachineError(
            f"process {dist_env.rank} of {dist_env.count} cannot reach the others at "
            f"{dist_env.address}:{dist_env.port}: {first_line(error)}",
            fix="read the output of process 0; it may have ended",
        ) from error
    return PrefixStore(f"lora-train/{dist_env.attempt}/{name}", store)

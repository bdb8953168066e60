"""Trains the same few steps in one way after the other: what came out, how long a step took, its memory.

Input is a size and the name of a way (`cases.WAYS`); output is what it came to beside the way that it
is held against, which is trained first in the same process. Each training has a network of its own of
the same random weights. Where the same bits are promised, torch computes the compared steps
deterministically, and afterwards as it usually does, which is what is timed.
"""

from __future__ import annotations

import math
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from benchmarks.gpu_day.cases import WAYS, Way
from benchmarks.gpu_day.device import Here
from benchmarks.ladder_rungs import our_adapter, peft_adapter
from benchmarks.trainee import Case, frozen_network, sharing, training
from lora_trainer.common.errors import first_line
from lora_trainer.common.event_kinds import Change, Event, Step
from lora_trainer.common.events import EventStream
from lora_trainer.hardware.device_calls import synchronize
from lora_trainer.network.block_swap import repeated_blocks, stream_blocks
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.network.gradient_checkpointing import apply_checkpointing
from lora_trainer.network.out_of_memory import free_memory
from lora_trainer.network.quantize import quantize
from lora_trainer.training.actions import Progress
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import train_steps

COMPARED, WARM = 4, 2
"""Steps that are compared, and those that follow before the timed ones."""
TIMED = {"cuda": 10, "cpu": 2}
RATE = 1.0
"""Of plain gradient descent: updates are the clipped gradients, so they show how far those are off."""
FP32_BOUND = 1e-3
"""With a network in float32, where nothing is rounded to 8 bits."""


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a way came to: losses and the adapter's change after the compared steps, on the host."""

    losses: list[float]
    update: Tensor
    step_s: float
    peak_bytes: int | None
    reserved_bytes: int | None
    notes: list[str]


class GivenUp(Exception):
    """The loop went on in another way than it was asked to."""


_trained: dict[tuple[str, str], Trained] = {}
"""What this process has trained, by size and way."""


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Train in this way, and in the one it is held against unless that was done; raises what that raises."""
    name, size = values["way"], values["size"]
    way = WAYS[name]
    case = Case.from_words(size, device=here.device, size="tiny" if here.tiny else "true size")
    if (size, way.against) not in _trained:
        _trained[size, way.against] = train(case, WAYS[way.against])
    other = _trained[size, way.against]
    own = _trained[size, name] = train(case, way)
    found = judged(own, other, way, in_fp32=case.precision == torch.float32)
    return {"way": name, "against": way.against, "case": case.title, **found}


def judged(own: Trained, other: Trained, way: Way, *, in_fp32: bool) -> dict[str, Any]:
    """Say how far two trainings are apart, and whether what is promised of one of them holds."""
    exact = in_fp32 and way.base == "whole"
    loss_bound = FP32_BOUND if exact else way.loss_bound
    update_bound = FP32_BOUND if exact else way.update_bound
    same_bits = own.losses == other.losses and torch.equal(own.update, other.update)
    pairs = zip(own.losses, other.losses, strict=True)
    loss_difference = max(abs(loss - its) / abs(its) for loss, its in pairs)
    update_difference = float((own.update - other.update).norm() / other.update.norm())
    finite = all(map(math.isfinite, (*own.losses, *other.losses, update_difference)))
    within = finite and loss_difference <= loss_bound and update_difference <= update_bound
    return {
        "promise": way.promise,
        "holds": finite and (same_bits if way.promise == "bits" else within),
        "same_bits": same_bits,
        "finite": finite,
        "loss_difference": loss_difference if finite else None,
        "update_difference": update_difference if finite else None,
        "loss_bound": loss_bound,
        "update_bound": update_bound,
        "losses": [loss if math.isfinite(loss) else None for loss in own.losses],
        "step_s": own.step_s,
        "against_step_s": other.step_s,
        "peak_bytes": own.peak_bytes,
        "against_peak_bytes": other.peak_bytes,
        "reserved_bytes": own.reserved_bytes,
        "against_reserved_bytes": other.reserved_bytes,
        "notes": own.notes,
    }


def train(case: Case, way: Way) -> Trained:
    """Train in this way, deterministically where bits are promised and torch has all it takes for that."""
    if way.promise == "bound":
        return _train(case, way)
    try:
        return _train(case, way, deterministic="strict")
    except RuntimeError as error:
        if "deterministic" not in str(error):
            raise
        note = f"train.deterministic would end this run: {first_line(error)}"
    free_memory()  # outside the except block: its traceback keeps tensors alive
    found = _train(case, way, deterministic="where possible")
    found.notes.append(note)
    return found


def _train(case: Case, way: Way, *, deterministic: str = "") -> Trained:
    torch.use_deterministic_algorithms(
        bool(deterministic), warn_only=deterministic == "where possible"
    )
    try:
        with tempfile.TemporaryDirectory(prefix="ways-") as folder:
            return _run(case, way, Path(folder))
    finally:
        torch.use_deterministic_algorithms(False)
        free_memory()


def _run(case: Case, way: Way, folder: Path) -> Trained:
    network = frozen_network(case)
    if way.base != "whole":
        skip = case.family.traits.quantization_skip
        quantize(network, "int8", device=case.device, skip=skip)
    events = EventStream()
    parameters = _with_adapter(case, way, network)
    apply_checkpointing(network, way.checkpointing)
    streamed = None
    if way.streamed:
        count = max(1, round(way.streamed * len(repeated_blocks(network))))
        streamed = stream_blocks(network, count=count, device=case.device)
        if not way.beside:
            streamed.copy_when_due()
    course = Course(case=case, parameters=parameters)
    losses: list[float] = []
    given_up: list[str] = []

    def listen(event: Event) -> None:
        if isinstance(event, Step):
            losses.append(event.loss)
        elif isinstance(event, Change):
            given_up.append(f"{event.key} became {event.new}: {event.reason}")

    events.subscribe(listen)
    groups = [{"params": parameters, "lr_scale": 1.0}]
    inputs = training(
        case,
        network,
        folder,
        parameters=parameters,
        optimizer=torch.optim.SGD(groups, lr=RATE, fused=True),
        learning_rate=lambda step: RATE,
        steps=course.steps,
        events=events,
        actions=[course],
        compiled=_compiled(case, way, network),
    )
    train_steps(inputs, Progress(step=0, images=0, guard=GuardState(micro_batch=case.batch)))
    if given_up:
        raise GivenUp(given_up[0])
    return Trained(
        losses=losses[:COMPARED],
        update=course.update(),
        step_s=course.step_s,
        peak_bytes=course.peak_bytes,
        reserved_bytes=course.reserved_bytes,
        notes=[],
    )


def _with_adapter(case: Case, way: Way, network: nn.Module) -> list[nn.Parameter]:
    """Put the adapter of a way on a network; peft's gets the values of ours."""
    if way.adapter == "fused":
        return list(our_adapter(case, network).parameters())
    like = sharing(network)
    our_adapter(case, like)
    return peft_adapter(case, network, like)


def _compiled(case: Case, way: Way, network: nn.Module) -> CompiledBlocks | None:
    """Return the compiled blocks of a way, None without; on a CPU blocks are traced but not compiled."""
    if not way.compiled:
        return None
    backend = "inductor" if case.device.type == "cuda" else "eager"
    return CompiledBlocks(network, shapes=case.latent_shapes, backend=backend)


@dataclass(kw_only=True)
class Course:
    """An action of the loop: ends the compared steps, then lets some warm up and times the rest."""

    what: ClassVar[str] = "the comparison"
    case: Case
    parameters: list[nn.Parameter]
    step_s: float = math.nan
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    _began: list[Tensor] = field(default_factory=list)
    _ended: list[Tensor] = field(default_factory=list)
    _timed_from_s: float = 0.0

    @property
    def steps(self) -> int:
        """How many steps there are."""
        return COMPARED + WARM + TIMED[self.case.device.type]

    def due(self, progress: Progress) -> bool:
        """Look at the step that is over; nothing is ever due."""
        step, deterministic = progress.step, torch.are_deterministic_algorithms_enabled()
        if step == 0:
            self._began = self._values()
        if step == 1 and not deterministic:
            self._watch_memory()  # what is compiled is compiled
        if step == COMPARED:
            self._ended = self._values()
            torch.use_deterministic_algorithms(False)
            if deterministic:
                self._watch_memory()
        if step == self.steps - TIMED[self.case.device.type]:
            self._timed_from_s = self._now()
        if step == self.steps:
            self.step_s = (self._now() - self._timed_from_s) / TIMED[self.case.device.type]
            if self.case.device.type == "cuda":
                self.peak_bytes = torch.cuda.max_memory_allocated(self.case.device)
                self.reserved_bytes = torch.cuda.max_memory_reserved(self.case.device)
        return False

    def __call__(self, progress: Progress) -> None: ...

    def update(self) -> Tensor:
        """Return the change of all parameters in the compared steps."""
        pairs = zip(self._ended, self._began, strict=True)
        return torch.cat([(end - start).flatten() for end, start in pairs])

    def _values(self) -> list[Tensor]:
        return [parameter.detach().to("cpu", copy=True) for parameter in self.parameters]

    def _watch_memory(self) -> None:
        if self.case.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.case.device)

    def _now(self) -> float:
        synchronize(self.case.device)
        return time.perf_counter()

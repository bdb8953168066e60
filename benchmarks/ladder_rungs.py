"""The rungs of the step ladder: one training each, of which steps can be asked for when it is their turn.

`Bare` is what anybody would write first: forward, backward, clipping and optimizer on tensors in
memory, with peft's LoRA. `Ours` is `lora_trainer.training.loop.train_steps` in a thread of its own, with its
feeder, cache, guards, events.jsonl and status.json.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from benchmarks.trainee import Case, training
from lora_trainer.common.event_kinds import Change, Event, Step
from lora_trainer.common.events import EventStream, JsonlWriter
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter import Adapter, inject
from lora_trainer.network.compiling import CompiledBlocks
from lora_trainer.reporting.status import StatusWriter
from lora_trainer.training.actions import Progress
from lora_trainer.training.guards import GuardState
from lora_trainer.training.loop import train_steps
from lora_trainer.training.loss import Batch, add_noise, sample_losses, target
from lora_trainer.training.optimizers import build_optimizer
from lora_trainer.training.step import Training


class Rung(Protocol):
    """One way to train; `losses` are those of the steps taken, `take` returns seconds a step.

    `fell_back` is why it does not compute as its name says any more; empty: it does. `resident_bytes` is
    what it had on the device before its first step.
    """

    name: str
    losses: list[float]
    fell_back: str
    resident_bytes: int

    def take(self, count: int) -> list[float]: ...


def our_adapter(case: Case, network: nn.Module) -> Adapter:
    """Put our LoRA on a network; a random second half, so that all gradients count."""
    config = case.config
    adapter = inject(
        {DENOISER: network},
        modules={DENOISER: case.family.lora_targets(network, config.adapter.targets)},
        settings=config.adapter,
        alpha=float(config.adapter.rank),
        seed=config.train.seed,
    )
    with torch.no_grad():
        for name, tensor in adapter.state().items():
            if name.endswith(".up"):
                tensor.normal_(std=0.01)
    return adapter


def peft_adapter(case: Case, network: nn.Module, like: nn.Module) -> list[nn.Parameter]:
    """Put peft's own LoRA on a network, float32 as peft has it, with the values of another network's."""
    config = case.config.adapter
    names = case.family.lora_targets(network, config.targets)
    lora = LoraConfig(r=config.rank, lora_alpha=config.rank, target_modules=names)
    inject_adapter_in_model(lora, network)
    values = dict(like.named_parameters())
    trained = [(name, p) for name, p in network.named_parameters() if p.requires_grad]
    for name, parameter in trained:
        parameter.data = values[name].detach().float().clone()
    return [parameter for _, parameter in trained]


@dataclass(kw_only=True)
class Bare:
    """Forward, backward, clip, optimizer; `autocast` and `reads_loss` are what trainers add to that."""

    name: str
    case: Case
    network: nn.Module
    parameters: list[nn.Parameter]
    batches: Sequence[Batch]
    autocast: bool = False
    reads_loss: bool = False
    losses: list[float] = field(default_factory=list)
    fell_back: str = ""
    resident_bytes: int = 0

    def __post_init__(self) -> None:
        self.resident_bytes = bytes_of(self.network)
        settings = self.case.config.optimizer
        self._optimizer = torch.optim.AdamW(
            self.parameters,
            lr=settings.learning_rate,
            betas=(settings.beta1, settings.beta2),
            eps=settings.epsilon,
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self._taken = 0

    def take(self, count: int) -> list[float]:
        """Train `count` steps; return seconds of each on a CPU, of all, evenly, on a GPU."""
        clock = Clock(self.case.device)
        for _ in range(count):
            loss = self._loss(self.batches[self._taken])
            loss.backward()
            nn.utils.clip_grad_norm_(self.parameters, self.case.config.train.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
            if self.reads_loss or not self._taken:
                self.losses.append(float(loss.detach()))
            self._taken += 1
            clock.lap()
        return clock.seconds()

    def _loss(self, batch: Batch) -> Tensor:
        given, case = batch, self.case
        prediction = case.facts.release.prediction
        alpha, sigma, weights, _ = given.numbers
        noisy = add_noise(given.latents, given.noise, alpha, sigma).to(case.precision)
        wanted = target(given.latents, given.noise, alpha, sigma, prediction)
        mixed = torch.autocast(case.device.type, torch.bfloat16) if self.autocast else nullcontext()
        with mixed:
            predicted = case.family.predict(
                self.network, noisy, given.timesteps, given.conditioning
            )
        losses = sample_losses(predicted.float(), wanted)
        loss: Tensor = (losses * weights).mean()
        return loss


def bytes_of(network: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> int:
    """Return the bytes of a network with its adapter, and of what an optimizer keeps of it."""
    kept = list((*network.parameters(), *network.buffers()))
    if optimizer is not None:
        states = optimizer.state.values()
        kept += [value for state in states for value in state.values() if torch.is_tensor(value)]
    return sum(tensor.nbytes for tensor in kept)


class Clock:
    """Seconds of steps: of each, or where a device works behind the program's back those of all, evenly."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._laps = device, 0
        self._each: list[float] = []
        self.begin()

    def begin(self) -> None:
        """Start over."""
        self._wait()
        self._each, self._laps = [], 0
        self._began = self._last = time.perf_counter()

    def lap(self) -> None:
        """Note the end of a step."""
        now = time.perf_counter()
        self._each.append(now - self._last)
        self._last, self._laps = now, self._laps + 1

    def seconds(self) -> list[float]:
        """Return seconds a step."""
        if self._device.type == "cpu":
            return self._each
        self._wait()
        return [(time.perf_counter() - self._began) / self._laps] * self._laps

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Ours:
    """The product's own loop; it takes its steps in a thread, and waits there between turns."""

    def __init__(
        self,
        name: str,
        case: Case,
        network: nn.Module,
        adapter: Adapter,
        folder: Path,
        *,
        steps: int,
        compiled: CompiledBlocks | None,
    ) -> None:
        self.name, self.compiled = name, compiled
        self.losses: list[float] = []
        self.waits: list[float] = []
        self.fell_back = ""
        self._left, self._clock = 0, Clock(case.device)
        self._go, self._rest = threading.Event(), threading.Event()
        self._failure: BaseException | None = None
        self._threads = torch.get_num_threads()
        inputs = self._training(case, network, adapter, folder, steps=steps)
        self.resident_bytes = bytes_of(network, inputs.optimizer)
        self._thread = threading.Thread(target=self._run, args=(inputs,), daemon=True)

    def take(self, count: int) -> list[float]:
        """Let the loop take `count` steps; return seconds a step."""
        self._left = count
        if not self._thread.is_alive():
            self._thread.start()
        self._go.set()
        self._rest.wait()
        self._rest.clear()
        failure, self._failure = self._failure, None  # its traceback keeps tensors alive
        if failure is not None:
            raise failure
        return self._clock.seconds()

    # ---- as an action of the loop: asked before the first step and after each

    def due(self, progress: Progress) -> bool:
        """Note the end of a step, and rest when the turn is over."""
        if progress.step:
            self._clock.lap()
            self._left -= 1
        if self._left == 0 and progress.step:
            self._rest.set()
        if not (progress.step and self._left):
            self._go.wait()
            self._go.clear()
            self._clock.begin()
        return False

    def __call__(self, progress: Progress) -> None: ...

    what: ClassVar[str] = "the turns"

    def _run(self, inputs: Training) -> None:
        torch.set_num_threads(self._threads)  # each thread of the program has a number of its own
        start = GuardState(micro_batch=inputs.micro_batch)
        try:
            train_steps(inputs, Progress(step=0, images=0, guard=start))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that measures, which raises it
            self._failure = error
        self._rest.set()

    def _training(
        self, case: Case, network: nn.Module, adapter: Adapter, folder: Path, *, steps: int
    ) -> Training:
        settings, events = case.config.optimizer, EventStream()
        events.subscribe(self._on_event)
        events.subscribe(JsonlWriter(folder / f"{self.name}.jsonl", lambda _: True, events))
        events.subscribe(StatusWriter(folder, events))
        return training(
            case,
            network,
            folder,
            parameters=adapter.parameters(),
            optimizer=build_optimizer(adapter.groups(settings), settings),
            steps=steps + 1,  # the thread waits in the middle of the run, and ends with the program
            events=events,
            actions=[self],
            compiled=self.compiled,
        )

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Change):
            self.fell_back = self.fell_back or f"{event.key}: {event.reason}"
        if isinstance(event, Step):
            self.losses.append(event.loss)
            self.waits.append(event.data_wait_s / event.seconds)

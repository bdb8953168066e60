"""The first steps of a run in every way of computing convolutions; those that follow are in the fastest.

The steps are those of the training, none is done twice. Every way has its turn twice, the second time in the reverse
order, so that a card that gets warm slows all. Input: the clock around each step; output: the way and what it saves.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar, get_args

import torch

from lora_trainer.common.errors import MachineError
from lora_trainer.common.event_kinds import Change
from lora_trainer.common.events import EventStream
from lora_trainer.config.declare import ConvolutionWay
from lora_trainer.network.convolutions import Convolutions
from lora_trainer.planning.known_convolutions import TIMED_STEPS, TURN_STEPS
from lora_trainer.training.actions import Progress
from lora_trainer.training.guards import GuardState

WAYS: tuple[ConvolutionWay, ...] = get_args(ConvolutionWay)
_TURNS = (*WAYS, *reversed(WAYS))
LEAST_GAIN = 0.03
"""Share of a step's time that another way than the plain one must save."""
LEAST_TIMED = 2
"""Timed steps of a turn without which its way is not judged."""
KEY = "hardware.convolutions"


@dataclass(kw_only=True)
class ConvolutionTrial:
    """An action that is due after each of the first steps of a process, and first among those of a step.

    A way has to be faster than the plain one in both of its turns, and what it saves is the less of the two: a
    program that begins or ends beside the training makes a way faster in one of them only.

    `remember` gets the fastest way and the share of a step that it saves; it may raise MachineError. A step with passes
    of a size that its way has not had before is not timed: its algorithms were chosen, or its kernels compiled, in it.
    When a step had to do with less, out of memory say, the comparison ends, and the plain way stays.
    """

    what: ClassVar[str] = "the comparison of convolutions"
    convolutions: Convolutions
    events: EventStream
    remember: Callable[[ConvolutionWay, float], None]
    clock: Callable[[], float] = time.perf_counter
    is_over: bool = False
    _turn: int = 0
    _steps: int = 0
    _timed_steps: int = 0
    _began_s: float | None = None
    _shapes: list[torch.Size] = field(default_factory=list)
    _known: set[tuple[ConvolutionWay, torch.Size]] = field(default_factory=set)
    _timed: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Of each turn the seconds of its timed steps, for each number of the latents."""
    _had: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        self.convolutions.on_pass = self._pass_begins

    def due(self, progress: Progress) -> bool:
        return self._began_s is not None and not self.is_over

    def __call__(self, progress: Progress) -> GuardState | None:
        """Note the time of the step that is over, and take the next turn; the device has finished the step."""
        assert self._began_s is not None
        took_s, shapes = self.clock() - self._began_s, self._shapes
        self._began_s, self._shapes = None, []
        if self._lost_something(progress.guard):
            self._end("plain", "a step had to do with less memory or in the plain way")
            return None
        way = self.convolutions.way
        passes = {(way, shape) for shape in shapes}
        if passes <= self._known:
            self._timed[self._turn].append(took_s / sum(shape.numel() for shape in shapes))
            self._timed_steps += 1
        self._known |= passes
        self._steps += 1
        if self._timed_steps == TIMED_STEPS or self._steps == TURN_STEPS:
            self._steps, self._timed_steps, self._turn = 0, 0, self._turn + 1
            if self._turn == len(_TURNS):
                self._judge()
            elif _TURNS[self._turn] != way:
                self.convolutions.choose(_TURNS[self._turn])
        return None

    def _pass_begins(self, shape: torch.Size) -> None:
        if self._began_s is None:
            self._began_s = self.clock()
        self._shapes.append(shape)

    def _lost_something(self, guard: GuardState) -> bool:
        has = (guard.micro_batch, guard.remedies, guard.plain, guard.uncompiled)
        had, self._had = self._had, has
        return had is not None and had != has

    def _judge(self) -> None:
        saved = self._saved()
        if not saved:
            self._end("plain", "too few steps of equal sizes to compare")
            return
        fastest = max(saved, key=saved.__getitem__)
        shares = ", ".join(f"{way} {share:.1%}" for way, share in saved.items())
        reason = f"what the ways save of a plain step: {shares}"
        if saved[fastest] < LEAST_GAIN:
            fastest, reason = "plain", f"no other way saves {LEAST_GAIN:.0%} of a step ({shares})"
        self._end(fastest, reason)
        try:
            self.remember(fastest, saved.get(fastest, 0.0))
        except MachineError as error:  # a full disk costs one comparison more
            self.events.problem(
                f"the fastest convolutions could not be noted: {error.found}",
                fix=error.fix,
                severity="note",
            )

    def _saved(self) -> dict[ConvolutionWay, float]:
        """Return the share of a plain step that each other way saves in the worse of its turns."""
        turns: dict[ConvolutionWay, list[float]] = defaultdict(list)
        for turn, way in enumerate(_TURNS):
            if len(self._timed[turn]) >= LEAST_TIMED:
                turns[way].append(median(self._timed[turn]))
        plain = turns.pop("plain", [])
        return {
            way: min(1 - own / other for own, other in zip(seconds, plain, strict=True))
            for way, seconds in turns.items()
            if len(seconds) == len(plain) == 2
        }

    def _end(self, way: ConvolutionWay, reason: str) -> None:
        self.is_over = True
        self.convolutions.on_pass = lambda shape: None
        if self.convolutions.way != way:
            self.convolutions.choose(way)
        self.events.emit(Change(key=KEY, old="fastest", new=way, reason=reason))

"""Where a run is, and what may happen between its steps. Imported by the loop and by its actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from lora_trainer.train.guards import GuardState


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Optimizer steps finished, images they used, the guards' memory.

    `ending` is set when no further step follows in this process, `stopping` when somebody asked for
    that: then only what a resume needs is done.
    """

    step: int
    images: int
    guard: GuardState
    ending: bool = False
    stopping: bool = False


class Action(Protocol):
    """Something done between steps; asked once before the first step and after every step."""

    what: ClassVar[str]
    """What it makes, to begin a sentence with."""

    def due(self, progress: Progress) -> bool:
        """Say whether this step concerns it; must be cheap."""

    def __call__(self, progress: Progress) -> GuardState | None:
        """Do it; a guard state that is returned takes the place of the one of `progress`."""

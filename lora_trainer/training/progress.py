"""The progress of a run, and the protocol of its actions. Imported by the loop and by the actions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from lora_trainer.training.guards import GuardState


@dataclass(frozen=True, kw_only=True)
class Progress:
    """Optimizer steps finished, images they used, and the guard state.

    `ending` is set when no further step follows in this process. `stopping` is set as well when a stop was
    requested: then only the actions that a resume needs are due.
    """

    step: int
    images: int
    guard: GuardState
    ending: bool = False
    stopping: bool = False


class Action(Protocol):
    """Something that runs between steps; `due` is called before the first step and after every step."""

    what: ClassVar[str]
    """The result of the action as a noun phrase, to begin a message with: "the validation"."""

    def due(self, progress: Progress) -> bool:
        """Say whether the action runs at this step; must be cheap."""

    def __call__(self, progress: Progress) -> GuardState | None:
        """Run the action; a returned guard state replaces that of `progress`."""

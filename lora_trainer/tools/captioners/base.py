"""What every captioner does: texts for upright RGB pictures, the same for the same picture."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from PIL import Image

from lora_trainer.errors import InputError, MachineError


@dataclass(frozen=True, kw_only=True)
class Description:
    """What a model says of one picture; `cut`: it had more to say than it was allowed."""

    text: str
    cut: bool = False


class Captioner(Protocol):
    """A loaded model. `batch_size` pictures at a time are worth while on its device."""

    @property
    def batch_size(self) -> int: ...

    @property
    def device(self) -> str: ...

    def describe(self, pictures: Sequence[Image.Image]) -> list[Description]:
        """Return a description of each picture; raises OutOfRoom when memory runs out."""
        ...

    def give_back(self) -> None:
        """Free what was kept for the next pictures; call it outside the `except` block."""
        ...


class OutOfRoom(Exception):
    """The device has no memory for so many pictures at a time."""


class UnusableModel(InputError):
    """A captioning model whose files do not fit what runs them."""

    def __init__(self, name: str, what: str) -> None:
        super().__init__(
            f"captioning model {name} {what}",
            fix="take another one; `lora-train caption --help` names those known",
        )


def no_room(name: str, what: str) -> MachineError:
    """Return the error of a model that is too large for the device."""
    return MachineError(
        f"captioning model {name} {what}",
        fix="end what else uses it, take a smaller --model, or --device cpu",
    )

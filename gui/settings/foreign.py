"""Settings files of other trainers that are uploaded on the page of all settings.

Input: the text of a file and its name. Output: the settings of this program that it comes to, and what to know
of them; None for a file of this program, or of nobody that is known.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.importing.reading import import_bytes, remarks

from ..setting_edit import FOLDER


@dataclass(frozen=True, kw_only=True)
class Imported:
    """Settings, and lines on where they are from and what has no equivalent."""

    settings: dict[str, Any]
    note: str


def imported(text: str, *, name: str) -> Imported | None:
    """Read a file of another trainer; raises RequestError for what it asks and cannot be done here."""
    try:
        foreign = import_bytes(text.encode("utf-8", errors="replace"), name)
    except InputError:  # setting_edit.replaced says what is wrong with a file of this program
        return None
    settings = {key: value for key, value in foreign.settings.items() if key != FOLDER}
    return Imported(settings=settings, note="\n".join(remarks(foreign)))

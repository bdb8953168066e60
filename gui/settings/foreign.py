"""Settings of another trainer, or of a LoRA file, that are brought to the pages.

Input: the text of a file and its name; of a LoRA that of its header. Output: the settings of this program that it
comes to, and what to know of them; None for a settings file of this program, or of nobody that is known.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.importing import trained_files
from lora_trainer.importing.reading import import_bytes, remarks
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY, header_settings

from ..setting_edit import FOLDER


@dataclass(frozen=True, kw_only=True)
class Brought:
    """Settings of a file: where each is from, which are the nearest that there is, what has no equivalent, and why."""

    trainer: str
    settings: dict[str, Any]
    note: str = ""
    dataset: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    is_slider: bool = False
    said: list[str] = field(default_factory=list)
    """The settings that the file itself says; the others are defaults of its trainer."""
    nearest: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)


def brought(text: str, *, name: str) -> Brought | None:
    """Read a file; raises InputError for a LoRA that says nothing, RequestError for what cannot be done here."""
    is_lora = name.lower().endswith(trained_files.SUFFIX)
    if is_lora and SETTINGS_ENTRY in (entries := trained_files.entries_of(text.encode(), name)):
        return Brought(trainer="lora-train", settings=_of_ours(header_settings(entries)))
    try:
        foreign = import_bytes(text.encode("utf-8", errors="replace"), name)
    except InputError:  # setting_edit.replaced says what is wrong with a file of this program
        if is_lora:
            raise
        return None
    unknown = dict.fromkeys(foreign.unknown, "is not known")
    return Brought(
        trainer=foreign.trainer,
        settings=_of_ours(foreign.settings),
        note="\n".join(remarks(foreign)),
        dataset=foreign.dataset or "",
        sources=foreign.sources,
        is_slider=foreign.is_dataset,
        said=[key for key, source in foreign.sources.items() if foreign.named & {*source.split()}],
        nearest=foreign.nearest,
        left_out=foreign.without_equivalent | unknown,
    )


def _of_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the folder of the runs, which is that of the pages."""
    return {key: value for key, value in settings.items() if key != FOLDER}

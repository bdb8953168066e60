"""Settings of another trainer, or of a LoRA file, that are brought to the pages.

Input: the text of a file and its name; of a LoRA that of its header. Output: the settings of this program that it
comes to, and what to know of them; None for a settings file of this program, or of nobody that is known.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.importing import trained_files
from lora_trainer.importing.reading import import_bytes, remarks
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY, header_settings

from ..drafts import Draft
from ..setting_edit import FOLDER

# A longer file is not kept to be read again when its images come: the header of a LoRA may have megabytes.
_KEPT_CHARACTERS = 100_000


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
    not_needed: dict[str, str] = field(default_factory=dict)
    """What the file says and nothing has to be set for here."""
    text: str = ""
    """The file itself, where its length is in epochs: it is read again when other images come."""


def brought(text: str, *, name: str, images: Path | None = None) -> Brought | None:
    """Read a file, for the images of a folder where they are known.

    Raises InputError for a LoRA that says nothing, RequestError for what cannot be done here.
    """
    is_lora = name.lower().endswith(trained_files.SUFFIX)
    if is_lora and SETTINGS_ENTRY in (entries := trained_files.entries_of(text.encode(), name)):
        return Brought(trainer="lora-train", settings=_of_ours(header_settings(entries)))
    try:
        foreign = import_bytes(text.encode("utf-8", errors="replace"), name, images=images)
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
        not_needed=foreign.nothing_to_set,
        text=text if foreign.counts_images and len(text) <= _KEPT_CHARACTERS else "",
    )


def report_of(found: Brought, *, file: str) -> str:
    """Return what a draft keeps of a file that was brought, as JSON."""
    return json.dumps({**asdict(found), "file": file}, ensure_ascii=False)


def for_images(draft: Draft, images: Path) -> Draft:
    """Return a draft with what its file says of these images: epochs and a warm-up in steps become settings.

    A setting that somebody has changed since stays. Raises RequestError.
    """
    before = json.loads(draft.brought) if draft.brought else {}
    if not before.get("text"):
        return draft
    found = brought(before["text"], name=before["file"], images=images)
    if found is None:  # it was read when it was brought, by an earlier version
        return draft
    for key, value in found.settings.items():
        was = before["settings"].get(key)
        if value != was and draft.settings.get(key) == was:
            draft = draft.with_setting(key, value)
    return replace(draft, brought=report_of(found, file=before["file"]))


def _of_ours(settings: dict[str, Any]) -> dict[str, Any]:
    """Return settings without the folder of the runs, which is that of the pages."""
    return {key: value for key, value in settings.items() if key != FOLDER}

"""What somebody has filled in for a training that is not started yet, kept in files.

Inputs: the values of the pages. Outputs: `<runs>/.gui/drafts/ID.json`. Going back, an error, a
reload, another tab or a new start of the interface find the draft as it was left; it ends by being
started. The page All settings writes into the same draft.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import LoraTrainError, MachineError, RequestError
from lora_trainer.common.files import disk_error, json_bytes, locked, read_json_object, write_atomic
from lora_trainer.config.config import build_config, refuse_removed, without_retired

from .workplace import Workplace

STEPS = (1, 2)
IMAGES, SLIDER, PAIRS = KINDS = ("images", "slider", "pairs")
"""What a training learns from: images, the words of a slider, images with what each was before."""
# Entries of a draft that are not texts.
_NOT_TEXTS = ("settings", "also", "slider", "step", "planned")
_LOCK_WITHIN_S = 10.0
# So many of the newest drafts are looked through for the one that a training was started from.
_LOOKED_AT = 50
_ID = re.compile(r"[0-9a-f]{12,20}")


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A training to be; an empty text leaves the choice to lora-train.

    `kind` is one of KINDS; a slider is trained on its words `slider` (slider_words.py), what else on the folder
    `dataset`, which may be a slider's file too. `settings` are {"section.name": value} over the preset, `also` further
    values of some settings, each for a training of its own (variants.py), `step` is where the page Train stands,
    `started_as` the item of the queue, `series` the several trainings that it was started as, `planned` what the plan
    that was shown then chose, `brought` what there is to say of the file that its settings are from, as JSON.
    """

    id: str
    kind: str = IMAGES
    dataset: str = ""
    slider: Mapping[str, str] = field(default_factory=dict)
    base: str = ""
    priority: str = "balanced"
    name: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    also: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    step: int = 1
    started_as: str = ""
    series: str = ""
    planned: Mapping[str, Any] = field(default_factory=dict)
    brought: str = ""

    @property
    def is_given(self) -> bool:
        """Whether it says what is to be learned from."""
        return any(map(str.strip, self.slider.values() if self.kind == SLIDER else [self.dataset]))

    def with_setting(self, key: str, value: Any) -> Draft:
        """Return the draft with one setting; raises RequestError for an impossible value."""
        settings = {**self.settings, key: value}
        build_config(settings)
        return replace(self, settings=settings)

    def without_setting(self, key: str) -> Draft:
        """Return the draft with that setting left to the preset."""
        return replace(self, settings={k: v for k, v in self.settings.items() if k != key})


def new(work: Workplace, *, dataset: str = "") -> Draft:
    """Return an empty draft with an id of its own, saved."""
    draft = Draft(id=new_id(), dataset=dataset)
    save(work, draft)
    return draft


def new_id() -> str:
    """Return an id of which nothing else is; later ones sort behind earlier ones."""
    return f"{time.time_ns():x}"


def save(work: Workplace, draft: Draft) -> None:
    """Write a draft; raises MachineError."""
    file = _file(work, draft.id)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error
    write_atomic(file, json_bytes(asdict(draft)), durable=False)


def read(work: Workplace, draft_id: str | None) -> Draft:
    """Return a draft; raises RequestError when there is none of that id or it is damaged."""
    if not draft_id or not _ID.fullmatch(draft_id) or not (file := _file(work, draft_id)).is_file():
        raise RequestError(f"the draft {draft_id!r} does not exist", fix="begin a new training")
    values = read_json_object(file)
    try:
        draft = Draft(**values)
        texts = all(
            isinstance(getattr(draft, entry.name), str)
            for entry in fields(draft)
            if entry.name not in _NOT_TEXTS
        )
        if not texts or draft.step not in STEPS or not isinstance(draft.settings, dict):
            raise TypeError("a value of the wrong kind")
        if draft.kind not in KINDS or not isinstance(draft.slider, dict):
            raise TypeError("a value of the wrong kind")
        if not all(isinstance(text, str) for text in draft.slider.values()):
            raise TypeError("a value of the wrong kind")
        refuse_removed(draft.settings)
        draft = replace(draft, settings=without_retired(draft.settings))
        build_config(draft.settings)
        if not isinstance(draft.also, dict) or not isinstance(draft.planned, dict):
            raise TypeError("a value of the wrong kind")
        for key, values in draft.also.items():
            for value in values:
                build_config({key: value})
    except (TypeError, LoraTrainError) as error:
        raise RequestError(
            f"the draft {file.name} cannot be read: {error}", fix="begin a new training"
        ) from None
    return draft


@contextmanager
def changing(work: Workplace) -> Iterator[None]:
    """Be the only one who reads a draft and writes it back; raises MachineError. It does not nest.

    A field that is left by pressing a button, and two tabs, change the same draft at once.
    """
    busy = MachineError(f"the drafts have been locked for {_LOCK_WITHIN_S:.0f} s", fix="try again")
    with locked(_folder(work) / ".lock", within_s=_LOCK_WITHIN_S, busy=busy):
        yield


def waiting(work: Workplace, *, within: int) -> Iterator[Draft]:
    """Yield the readable drafts among the `within` newest that are not started, the newest first."""
    try:
        names = sorted((path.stem for path in _folder(work).glob("*.json")), reverse=True)
    except OSError:
        return
    for name in names[:within]:
        with suppress(RequestError):
            draft = read(work, name)
            if not draft.started_as:
                yield draft


def current(work: Workplace, *, is_last: bool = False) -> Draft:
    """Return the newest draft that is readable and not started, else a new one.

    With `is_last` none that lay aside when a newer one was started: nobody thinks of that one any more.
    """
    try:
        names = sorted((path.stem for path in _folder(work).glob("*.json")), reverse=True)
    except OSError:
        names = []
    for name in names:
        try:
            draft = read(work, name)
        except RequestError:
            continue
        if not draft.started_as:
            return draft
        if is_last:
            break
    return new(work)


def started_as(work: Workplace, item_id: str) -> Draft | None:
    """Return the draft that an item of the queue was started from, None where it was not, or its draft is gone."""
    try:
        files = sorted(_folder(work).glob("*.json"), reverse=True)[:_LOOKED_AT]
    except OSError:
        return None
    for file in files:
        with suppress(RequestError):
            if read_json_object(file).get("started_as") == item_id:
                return read(work, file.stem)
    return None


def _folder(work: Workplace) -> Path:
    return work.own / "drafts"


def _file(work: Workplace, draft_id: str) -> Path:
    return _folder(work) / f"{draft_id}.json"

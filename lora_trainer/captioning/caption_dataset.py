"""`lora-train caption`: a caption by a model for every image of a dataset that has none.

Input is a dataset and a `CaptionRequest`, output are NAME.txt files beside the images, written one by one, and
an event for each. What is there stays there: captions are replaced only where that is asked for,
never if they were edited meanwhile, and `caption_files` keeps the old ones. Torch-free until a
model is loaded.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from lora_trainer.captioning.caption_files import (
    CaptionJournal,
    Chosen,
    Target,
    choose,
    content_of,
    opened,
)
from lora_trainer.captioning.captioners import (
    CaptioningModel,
    CaptionRequest,
    ModelCaption,
    OutOfRoom,
    Shown,
    Tagger,
    download,
    find,
    load_tagger,
    no_room,
    what_it_writes,
)
from lora_trainer.captioning.json_answers import NotACaption, caption_in, form_of
from lora_trainer.common.errors import InputError, StoppedBySignal
from lora_trainer.common.event_kinds import Caption, Captioned, Captioning, Downloading
from lora_trainer.common.events import EventStream
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.caption_rules import with_trigger
from lora_trainer.dataset.captions import MAX_CAPTION_CHARACTERS, clean
from lora_trainer.dataset.images import ImageDecodeError, decode
from lora_trainer.reporting.control import StopFlag, taking_signals

if TYPE_CHECKING:  # it imports torch
    from lora_trainer.captioning.describer import Describer


def caption_dataset(
    dataset: Path, request: CaptionRequest, *, events: EventStream, stop: StopFlag
) -> None:
    """Write the captions that are missing, or all with `overwrite`; `stop` is asked between images.

    Signals are taken once the model is loaded; before that nothing is there to be ended well.

    Raises RequestError for options that do not go together, InputError when no image could be
    captioned, MachineError without the model or memory, StoppedBySignal when asked to stop.
    """
    model, chosen = look(dataset, request)
    work = _Work(request=request, chosen=chosen, events=events)
    if not chosen.targets:
        work.finish()
        return
    with opened(request.output or dataset, request.decisive(model.source)) as journal:
        captioner = _load(request, model, events)
        events.emit(
            Captioning(
                pictures=len(chosen.targets),
                had_one=len(chosen.captioned),
                model=model.source,
                device=captioner.device,
                precision=captioner.precision,
            )
        )
        with taking_signals(stop):
            work.run(captioner, journal, stop)
        journal.finish()
    work.finish()


def look(dataset: Path, request: CaptionRequest) -> tuple[CaptioningModel, Chosen]:
    """Return which model and which images are meant, without loading or writing anything."""
    model = find(request.model)
    if request.json_for is not None:
        form_of(request.json_for)
    if model.writes is not None:
        request.refuse_unfit(model.writes)
    return model, choose(
        dataset, overwrite=request.overwrite, only=request.images, output=request.output
    )


@dataclass(kw_only=True)
class _Work:
    """One call at work: counts as it goes, and tells."""

    request: CaptionRequest
    chosen: Chosen
    events: EventStream
    written: int = 0
    failed: int = 0
    first_fault: str = ""

    def __post_init__(self) -> None:
        for refusal in self.chosen.refused:
            self._fail(*refusal)
        if self.chosen.findings:
            self.events.problem(
                f"these files are named like images but are not images: {self.chosen.findings}",
                fix="`lora-train check` names them",
            )

    def run(self, captioner: Tagger | Describer, journal: CaptionJournal, stop: StopFlag) -> None:
        """Caption the targets in order, as many at a time as there is memory for."""
        batch = captioner.batch_size
        self._say_what_pairs_get(captioner)
        waiting = deque(enumerate(self.chosen.targets, start=1))
        while waiting:
            if (number := stop()) is not None:
                count = f"{self.written} of {len(self.chosen.targets)}"
                raise StoppedBySignal(
                    number,
                    found=f"stopped with {count} captions written",
                    fix="run the same command again to go on",
                )
            batch_targets = [waiting.popleft() for _ in range(min(batch, len(waiting)))]
            pictures = [
                (index, target, picture)
                for index, target in batch_targets
                if (picture := self._picture(target, journal)) is not None
            ]
            while pictures:
                part = pictures[:batch]
                try:
                    descriptions = captioner.describe([picture for *_, picture in part])
                except OutOfRoom:
                    if len(part) == 1:
                        reason = "has not enough memory for one image"
                        raise no_room(self.request.model, reason) from None
                    batch = len(part) // 2
                    self.events.problem(
                        f"out of memory with {len(part)} images at a time; continuing with {batch}",
                        fix="nothing to do",
                        severity="note",
                    )
                    continue
                for (index, target, _), description in zip(part, descriptions, strict=True):
                    self._write(index, target, description, journal)
                pictures = pictures[batch:]

    def finish(self) -> None:
        """Say how it went; raises InputError when there was something to do and nothing was done."""
        if self.failed and not self.written:
            raise InputError(
                f"no image could be captioned ({self.failed} tried); the first {self.first_fault}",
                fix="see the line of each image",
            )
        had_one = len(self.chosen.captioned)
        self.events.emit(Captioned(written=self.written, failed=self.failed, had_one=had_one))

    def _say_what_pairs_get(self, captioner: Tagger | Describer) -> None:
        """Say so where the captions of editing pairs will not be instructions."""
        alone = [
            target
            for target in self.chosen.targets
            if target.references and not captioner.compares(len(target.references))
        ]
        if alone:
            self.events.problem(
                f"images with reference images ({len(alone)}) get captions of what they show, not of what changes:"
                f" {self.request.model} sees one image at a time",
                fix="take a chat model, which `lora-train caption --help` names, or write them by hand",
            )

    def _picture(self, target: Target, journal: CaptionJournal) -> Shown | None:
        if journal.has_written(target.file, target.before):
            self.written += 1  # by the call that this one goes on with
            return None
        settings = DataSettings()
        try:
            image = decode(target.picture, settings=settings, crop=target.crop).image
            references = (decode(path, settings=settings).image for path in target.references)
            return Shown(image=image, references=tuple(references))
        except ImageDecodeError as fault:
            self._fail(target.name, fault.reason, fault.fix)
            return None

    def _write(
        self, index: int, target: Target, description: ModelCaption, journal: CaptionJournal
    ) -> None:
        """Write one line: prefix, the model's words and suffix, as typed, the trigger first.

        The trigger is left out where the words hold it already, and stands where they say `[trigger]`.
        """
        model_text, cut = description
        if not clean(model_text).strip(" .,;"):
            fix = "take another --model, or a lower --threshold for a tagger"
            self._fail(target.name, "is one that the model says nothing about", fix)
            return
        if content_of(target.file) != target.before:
            fix = "nothing to do, or run it again with --overwrite"
            self._fail(target.name, f"got another caption meanwhile ({target.file.name})", fix)
            return
        if self.request.json_for is not None:
            form = form_of(self.request.json_for)
            try:
                text = caption_in(model_text, form, trigger=self.request.trigger)
            except NotACaption as fault:
                why = f"gets no caption: the model's answer {'is cut and ' if cut else ''}{fault}"
                fix = (
                    "a higher --max-tokens" if cut else "take a larger --model, or write it by hand"
                )
                self._fail(target.name, why, fix)
                return
            self._put(index, target, text, journal, cut=False)
            return
        words = "".join(sign for sign in clean(model_text) if sign.isprintable())
        words = words.strip(" ,;")
        prefix, suffix = clean(self.request.prefix), clean(self.request.suffix)
        if suffix.startswith(","):
            words = words.rstrip(" .")
        apart = "" if suffix.startswith(tuple(",.;:!?")) else " "
        text = with_trigger(f"{prefix} {words}{apart}{suffix}".strip(), self.request.trigger)
        text = text[:MAX_CAPTION_CHARACTERS].rstrip()
        self._put(index, target, text, journal, cut=cut)

    def _put(
        self, index: int, target: Target, text: str, journal: CaptionJournal, *, cut: bool
    ) -> None:
        journal.write(target.file, f"{text}\n".encode(), before=target.before)
        self.written += 1
        self.events.emit(
            Caption(
                index=index,
                count=len(self.chosen.targets),
                image=target.name,
                file=str(target.file),
                caption=text,
                cut=cut,
            )
        )

    def _fail(self, name: str, what: str, fix: str) -> None:
        self.failed += 1
        self.first_fault = self.first_fault or what
        self.events.problem(what, fix=fix, file=name)


def _load(
    request: CaptionRequest, model: CaptioningModel, events: EventStream
) -> Tagger | Describer:
    folder = model.folder
    if folder is None:
        events.emit(Downloading(model=model.source, gigabytes=model.download_gb))
        folder = download(model)
    writes = what_it_writes(folder)
    request.refuse_unfit(writes)  # of a Hub id nobody knew before
    if writes == "tags":
        return load_tagger(folder, request)
    from lora_trainer.captioning.describer import load_describer

    return load_describer(folder, request)

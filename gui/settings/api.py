"""What the page All settings does with a draft.

Inputs: what its script asks (requests.py). Outputs: the draft's file, which the page Train shows too; answers as
JSON values, with their sentences in the language of the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError

from .. import command_lines, drafts, setting_edit, slider_words
from ..command_lines import Plans
from ..datasets import notes
from ..drafts import Draft
from ..server.translation import Words
from ..workplace import Workplace
from . import presets, view
from .foreign import Brought, brought, for_images, report_of
from .requests import Bring, Change, Keep, Load, Look, OfDraft, Replace, Reset

Reply = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Api:
    """What the page does with a draft; all raise LoraTrainError.

    Changes are read, made and written one at a time: two tabs, and the page Train, write into one file.
    """

    work: Workplace
    plans: Plans

    def look(self, asked: Look, _: Words) -> Reply:
        """Return the draft if it is another than the page shows, else nothing."""
        draft = drafts.read(self.work, asked.draft)
        return {} if view.stamp(draft) == asked.stamp else self._state(draft)

    def change(self, asked: Change, _: Words) -> Reply:
        """Set one setting to what was typed."""

        def set_to(draft: Draft) -> Draft:
            return setting_edit.changed(draft, key=asked.key, text=asked.text)

        return self._write(asked, set_to)

    def reset(self, asked: Reset, _: Words) -> Reply:
        """Leave one setting to the preset."""
        return self._write(asked, lambda draft: setting_edit.without(draft, key=asked.key))

    def replace(self, asked: Replace, _: Words) -> Reply:
        """Set the settings of a settings file and no others, unless they are not those of `stamp`."""
        with drafts.changing(self.work):
            draft = drafts.read(self.work, asked.draft)
            if asked.stamp not in ("", view.stamp(draft)):
                raise RequestError(
                    "these settings were changed elsewhere meanwhile",
                    fix="type on to replace them all the same, or press Escape to see them",
                )
            edited = _replaced(draft, text=asked.text, name=asked.name)
            self._save(edited.draft)
        note = "\n".join(_.message(line) for line in edited.note.splitlines())
        return {**self._state(edited.draft), "note": note}

    def bring(self, asked: Bring, _: Words) -> Reply:
        """Make a draft of a file, for the images of the draft that is shown; return where its page is."""
        found = brought(asked.text, name=asked.name)
        draft = self._for_what_is_shown(asked.draft, found)
        is_slider = found is not None and found.is_slider
        slider = slider_words.brought(
            self.work, draft, text=asked.text, name=asked.name, is_slider=is_slider
        )
        if slider is not None:
            draft = slider
            if found is None:  # words alone, without a setting
                self._save(draft)
                return {"url": "/train?" + urlencode({"draft": draft.id})}
        if found is None:
            draft = setting_edit.replaced(draft, text=asked.text, name=asked.name).draft
            found = Brought(trainer="lora-train", settings=setting_edit.given(draft))
        else:
            draft = setting_edit.replaced(draft, text=setting_edit.as_json(found.settings)).draft
        draft = replace(draft, brought=report_of(found, file=asked.name))
        if draft.dataset:
            root = self.work.dataset(draft.dataset)
            draft = notes.with_masks(self.work, for_images(draft, root), root)
        self._save(draft)
        return {"url": "/train?" + urlencode({"draft": draft.id})}

    def _for_what_is_shown(self, shown: str, found: Brought | None) -> Draft:
        """Return a draft for the images or words of the one that is shown, else for what a file names."""
        empty = drafts.Draft(id=drafts.new_id())
        if shown and (before := drafts.read(self.work, shown)).is_given:
            return replace(empty, kind=before.kind, dataset=before.dataset, slider=before.slider)
        try:
            dataset = self.work.dataset(found.dataset) if found and found.dataset else None
        except LoraTrainError:
            return empty
        return empty if dataset is None else replace(empty, dataset=str(dataset))

    def plan(self, asked: OfDraft, _: Words) -> Reply:
        """Return what the settings come to; takes as long as `lora-train plan`."""
        draft = drafts.read(self.work, asked.draft)
        if not draft.is_given:
            # Nothing to refuse: the plan comes with them, and a button leads there.
            return {**view.planned(draft, command_lines.Answer(values=None), _), "lacks": True}
        try:
            answer = self.plans.of(draft)
        except (RequestError, InputError) as error:
            answer = command_lines.Answer(values=None, error=str(error))
        return view.planned(draft, answer, _)

    def command(self, asked: OfDraft, _: Words) -> Reply:
        """Return the training as a command line."""
        words = command_lines.train_words(drafts.read(self.work, asked.draft), self.work)
        return {"command": command_lines.command_line(words)}

    def keep(self, asked: Keep, _: Words) -> Reply:
        """Save the changed settings under a name; the name of a run is not one of them."""
        draft = drafts.read(self.work, asked.draft)
        values = {k: v for k, v in setting_edit.given(draft).items() if k != setting_edit.NAME}
        try:
            file = presets.save(self.work, values, name=asked.name, over=asked.over)
        except presets.Taken as error:
            return {**view.refusal(error, _), "taken": True}
        note = _("Saved as {}; --preset takes this file too.", file)
        return {**self._state(draft), "note": note}

    def load(self, asked: Load, _: Words) -> Reply:
        """Set the settings that were saved under a name and no others, and keep the run's name."""
        with drafts.changing(self.work):
            draft = drafts.read(self.work, asked.draft)
            text = presets.text(self.work, name=asked.name)
            loaded = setting_edit.replaced(draft, text=text).draft
            if not loaded.name:
                loaded = setting_edit.changed(loaded, key=setting_edit.NAME, text=draft.name)
            self._save(loaded)
        return self._state(loaded)

    def _write(self, asked: OfDraft, change: Callable[[Draft], Draft]) -> Reply:
        with drafts.changing(self.work):
            before = drafts.read(self.work, asked.draft)
            draft = change(before)
            self._save(draft)
        self._note_masks(before, draft)
        return self._state(draft)

    def _note_masks(self, before: Draft, draft: Draft) -> None:
        """Remember what was said of the masks of its images: the next draft about them begins so too."""
        said = draft.settings.get(notes.MASKS, "")
        if draft.dataset and said != before.settings.get(notes.MASKS, ""):
            with suppress(LoraTrainError):  # the folder is not there, which the plan says
                notes.note_masks(self.work, self.work.folder(draft.dataset), str(said))

    def _save(self, draft: Draft) -> None:
        setting_edit.check_paths(draft, self.work)
        drafts.save(self.work, draft)

    def _state(self, draft: Draft) -> Reply:
        return view.state(self.work, draft)


def _replaced(draft: Draft, *, text: str, name: str) -> setting_edit.Edited:
    """Return the draft with the settings of a file of this program, or else of another trainer."""
    try:
        return setting_edit.replaced(draft, text=text, name=name)
    except RequestError:
        others = brought(text, name=name)
        if others is None:
            raise
    ours = setting_edit.as_json(others.settings)
    return replace(setting_edit.replaced(draft, text=ours), note=others.note)

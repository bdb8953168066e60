"""The page All settings: every setting of a draft, with what is in force and where it comes from.

Inputs: the draft in the address, else the newest one; what is typed. Outputs: the draft's file, which
the page Train shows too. The form is drawn by assets/expert*.js from JSON, so that a hundred fields
appear at once; each function below answers it with one object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import disk_error

from .. import drafts, expert_edit, expert_view, launch, setting_presets
from ..drafts import Draft
from ..foreign_settings import imported
from ..launch import Plans
from ..server.asset_files import asset
from ..workplace import Workplace
from .gradio_events import html

Asked = Mapping[str, Any]
Reply = dict[str, Any] | None

SCRIPTS = tuple(
    f"{name}.js"
    for name in ("expert_parts", "expert_field", "expert_plan", "expert_file", "expert")
)
_MOUNT = '<div class="expert">Drawing the settings …</div>'


def build(work: Workplace) -> None:
    """Lay the page out."""
    html(
        value=expert_view.form(),
        html_template=_MOUNT,
        js_on_load="".join(map(asset, SCRIPTS)),
        server_functions=served(ExpertDesk(work=work, plans=Plans(work))),
        elem_id="expert",
    )


def served(desk: ExpertDesk) -> list[Callable[[Any], Reply]]:
    """Return what the script may call, by name."""
    return [
        _answering(desk.work, function)
        for function in (
            desk.open,
            desk.look,
            desk.change,
            desk.reset,
            desk.replace,
            desk.plan,
            desk.command,
            desk.keep,
            desk.load,
        )
    ]


@dataclass(frozen=True, kw_only=True)
class ExpertDesk:
    """What the page does with a draft; all raise LoraTrainError.

    Changes are read, made and written one at a time: two tabs, and the page Train, write into one file.
    """

    work: Workplace
    plans: Plans

    def open(self, asked: Asked) -> Reply:
        """Return the draft that the address names, else the newest one."""
        named = _text(asked, "draft")
        return self._state(drafts.read(self.work, named) if named else drafts.current(self.work))

    def look(self, asked: Asked) -> Reply:
        """Return the draft if it is another than the page shows."""
        draft = self._draft(asked)
        return None if expert_view.stamp(draft) == _text(asked, "stamp") else self._state(draft)

    def change(self, asked: Asked) -> Reply:
        """Set one setting to what was typed."""
        key, text = _text(asked, "key"), _text(asked, "text")
        return self._write(asked, lambda draft: expert_edit.changed(draft, key=key, text=text))

    def reset(self, asked: Asked) -> Reply:
        """Leave one setting to the preset."""
        key = _text(asked, "key")
        return self._write(asked, lambda draft: expert_edit.without(draft, key=key))

    def replace(self, asked: Asked) -> Reply:
        """Set the settings of a settings file and no others, unless they are not those of `stamp`."""
        basis = _text(asked, "stamp")
        with drafts.changing(self.work):
            draft = self._draft(asked)
            if basis not in ("", expert_view.stamp(draft)):
                raise RequestError(
                    "these settings were changed elsewhere meanwhile",
                    fix="type on to replace them all the same, or press Escape to see them",
                )
            text, name = _text(asked, "text"), _text(asked, "name")
            edited = _replaced(draft, text=text, name=name)
            self._save(edited.draft)
        return {**self._state(edited.draft), "note": edited.note}

    def plan(self, asked: Asked) -> Reply:
        """Return what the settings come to; takes as long as `lora-train plan`."""
        draft = self._draft(asked)
        if not draft.dataset.strip():
            said = "Choose the folder of your images on the page Train: the plan needs it."
            return {**expert_view.planned(draft, launch.Answer(values=None)), "said": [said]}
        try:
            answer = self.plans.of(draft)
        except (RequestError, InputError) as error:
            answer = launch.Answer(values=None, error=str(error))
        return expert_view.planned(draft, answer)

    def command(self, asked: Asked) -> Reply:
        """Return the training as a command line."""
        words = launch.train_words(self._draft(asked), self.work)
        return {"command": launch.command_line(words)}

    def keep(self, asked: Asked) -> Reply:
        """Save the changed settings under a name; the name of a run is not one of them."""
        draft = self._draft(asked)
        values = {k: v for k, v in expert_edit.given(draft).items() if k != expert_edit.NAME}
        name, over = _text(asked, "name"), asked.get("over") is True
        file = setting_presets.save(self.work, values, name=name, over=over)
        return {**self._state(draft), "note": f"Saved as {file}; --preset takes this file too."}

    def load(self, asked: Asked) -> Reply:
        """Set the settings that were saved under a name and no others, and keep the run's name."""
        with drafts.changing(self.work):
            draft = self._draft(asked)
            text = setting_presets.text(self.work, name=_text(asked, "name"))
            loaded = expert_edit.replaced(draft, text=text).draft
            if not loaded.name:
                loaded = expert_edit.changed(loaded, key=expert_edit.NAME, text=draft.name)
            self._save(loaded)
        return self._state(loaded)

    def _write(self, asked: Asked, change: Callable[[Draft], Draft]) -> Reply:
        with drafts.changing(self.work):
            draft = change(self._draft(asked))
            self._save(draft)
        return self._state(draft)

    def _save(self, draft: Draft) -> None:
        expert_edit.check_paths(draft, self.work)
        drafts.save(self.work, draft)

    def _draft(self, asked: Asked) -> Draft:
        return drafts.read(self.work, _text(asked, "draft"))

    def _state(self, draft: Draft) -> dict[str, Any]:
        return expert_view.state(self.work, draft)


def _replaced(draft: Draft, *, text: str, name: str) -> expert_edit.Edited:
    """Return the draft with the settings of a file of this program, or else of another trainer."""
    try:
        return expert_edit.replaced(draft, text=text, name=name)
    except RequestError:
        others = imported(text, name=name)
        if others is None:
            raise
    ours = expert_edit.as_json(others.settings)
    return replace(expert_edit.replaced(draft, text=ours), note=others.note)


def _answering(work: Workplace, function: Callable[[Asked], Reply]) -> Callable[[Any], Reply]:
    """Return a function for the script: a refusal is an answer too."""

    @functools.wraps(function)
    def answer(asked: Any) -> Reply:
        try:
            if not isinstance(asked, dict):
                raise RequestError("the request is no object", fix="reload the page")
            return function(asked)
        except LoraTrainError as error:
            return expert_view.refusal(error)
        except OSError as error:
            return expert_view.refusal(disk_error(work.own, error))

    return answer


def _text(asked: Asked, key: str) -> str:
    value = asked.get(key, "")
    if not isinstance(value, str):
        raise RequestError(f"{key} is no text", fix="reload the page")
    return value

"""What the page Train does: from the values of its fields to the draft, the report, the plan, the queue.

Each function returns a handler for one event of the page. Inputs: the fields in the order of
`train.Widgets.fields`, of which a draft keeps all. Outputs: gradio updates; a refusal is a line of
markup and loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.choices import CONCEPT
from lora_trainer.config.config import build_config
from lora_trainer.dataset.listing import list_dataset
from lora_trainer.queue import commands
from lora_trainer.reporting.history import mapping

from .. import bases, drafts, launch, plan_view, state, uploads
from ..dataset_summary import summary
from ..drafts import Draft
from ..markup import error_html, note_html
from ..plans import Plans
from ..posted import Posted
from ..warm import BASES
from ..workplace import Workplace

IMAGES, CHECK, STARTED = 1, 2, 3


def opening(work: Workplace) -> Callable[[gr.Request], list[Any]]:
    """Return the handler that fills the page from the draft in the address, or the newest one."""

    def load(request: gr.Request) -> list[Any]:
        asked = request.query_params
        said = ""
        try:
            draft = _wanted(work, asked)
        except LoraTrainError as error:
            draft, said = drafts.current(work), error_html(str(error))
        step = STARTED if draft.started_as else draft.step
        return [
            draft.id,
            draft.dataset,
            # What was downloaded since the start can be chosen too.
            gr.Dropdown(choices=bases.choices(), value=draft.base or "auto"),
            draft.priority,
            draft.name,
            str(draft.settings.get("data.trigger") or ""),
            str(draft.settings.get(CONCEPT) or "any"),
            gr.Walkthrough(selected=step),
            said,
            gr.Button(link=f"/settings?draft={draft.id}"),
            _waiting(work, draft),
        ]

    return load


def _wanted(work: Workplace, asked: Mapping[str, str]) -> Draft:
    """Return the draft that an address asks for; a folder never takes the place of another one."""
    named = asked.get("draft", "")
    if named and named != "new":
        return drafts.read(work, named)
    # The example is known to be good: its images need no look before the plan.
    folder, step = (
        (str(uploads.example(work)), CHECK)
        if asked.get("example")
        else (asked.get("folder", ""), IMAGES)
    )
    newest = drafts.current(work)
    if named == "new" or (folder and newest.dataset not in ("", folder)):
        newest = drafts.new(work, dataset=folder)
    if folder and (newest.dataset, newest.step) != (folder, step):
        newest = replace(newest, dataset=folder, step=max(newest.step, step))
        drafts.save(work, newest)
    return newest


def recalling(work: Workplace) -> Callable[[str], list[Any]]:
    """Return the handler that shows again what was seen of a draft: the report, the plan."""

    def recall(draft_id: str) -> list[Any]:
        try:
            draft = drafts.read(work, draft_id)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip(), gr.skip()]
        if not draft.dataset or draft.started_as:
            return [gr.skip(), gr.skip(), gr.skip()]
        report, usable = _report(work, draft)
        plan = _plan(work, draft) if draft.step == CHECK else gr.skip()
        return [report, gr.Button(visible=usable), plan]

    return recall


def keeping(work: Workplace) -> Callable[..., str]:
    """Return the handler that writes the fields into the draft."""

    def keep(*fields: str | None) -> str:
        try:
            _kept(work, fields)
        except LoraTrainError as error:
            return error_html(str(error))
        return ""

    return keep


def looking(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that reports on the folder of images."""

    def look(*fields: str | None) -> list[Any]:
        try:
            draft = _kept(work, fields)
            report, usable = _report(work, draft)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip(), gr.Button(visible=False)]
        return ["", report, gr.Button(visible=usable)]

    return look


def receiving(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that looks at a folder which the browser has just sent."""

    def receive(event: gr.EventData, *fields: str | None) -> list[Any]:
        draft_id, _, *rest = fields
        said = note_html(str(event.said))
        shown = looking(work)(draft_id, str(event.received), *rest)
        return [str(event.received), shown[0] or said, *shown[1:]]

    return receive


def planning(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that goes to the plan and shows it."""

    def plan(*fields: str | None) -> list[Any]:
        try:
            draft = _kept(work, fields, step=CHECK)
        except LoraTrainError as error:
            return [gr.skip(), error_html(str(error)), gr.skip()]
        return [gr.Walkthrough(selected=CHECK), "", _plan(work, draft)]

    return plan


def replanning(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that shows the plan anew; where the page stands by then, it stays."""

    def replan(*fields: str | None) -> list[Any]:
        try:
            draft = _kept(work, fields)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip()]
        return ["", _plan(work, draft)]

    return replan


def base_cards(work: Workplace, plans: Plans) -> list[Callable[[Any], dict[str, Any]]]:
    """Return what the cards of the base models ask: which there are, and whether one fits."""

    def bases_list(asked: Any) -> dict[str, Any]:
        try:
            draft = drafts.read(work, Posted.of(asked).text("draft"))
            answer = launch.ask(BASES)
        except LoraTrainError as error:
            return {"error": str(error)}
        if answer.values is None:
            return {"error": answer.error}
        return {"cards": bases.cards(answer.values["releases"]), "chosen": draft.base or "auto"}

    def base_fits(asked: Any) -> dict[str, Any]:
        try:
            posted = Posted.of(asked)
            draft = drafts.read(work, posted.text("draft"))
            answer = plans.of(replace(draft, base=posted.text("source", at_most=300)))
        except (LoraTrainError, OSError) as error:
            return {"fits": None, "said": str(error)}
        if answer.values is None:
            return {"fits": False, "said": answer.error.partition(" Fix: ")[0]}
        return {
            "fits": mapping(answer.values, "memory").get("fits") is not False,
            "said": plan_view.fit_sentence(mapping(answer.values, "memory")),
        }

    return [bases_list, base_fits]


def choosing(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler of a card: its base is chosen, and planned with."""

    def choose(event: gr.EventData, *fields: str | None) -> list[Any]:
        draft_id, dataset, _, *rest = fields
        source = str(event.source)
        return [source, *replanning(work)(draft_id, dataset, source, *rest)]

    return choose


def stepping(work: Workplace, step: int) -> Callable[[str], Any]:
    """Return the handler of a button that leads to another step."""

    def go(draft_id: str) -> Any:
        try:
            with drafts.changing(work):
                drafts.save(work, replace(drafts.read(work, draft_id), step=step))
        except LoraTrainError as error:
            return [gr.skip(), error_html(str(error))]
        return [gr.Walkthrough(selected=step), ""]

    return go


def starting(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that puts the training into the queue."""

    def start(*fields: str | None) -> list[Any]:
        try:
            draft = _kept(work, fields)
            with drafts.changing(work):
                draft = drafts.read(work, draft.id)
                if not draft.started_as:
                    words = launch.train_words(draft, work)
                    label = draft.name or work.folder(draft.dataset).name
                    item = commands.add(work.runs, words, label=label)
                    draft = replace(draft, started_as=item.id)
                    drafts.save(work, draft)
            commands.ensure_worker(work.runs)
        except LoraTrainError as error:
            return [gr.skip(), error_html(str(error)), gr.skip()]
        return [gr.Walkthrough(selected=STARTED), "", _waiting(work, draft)]

    return start


def following(work: Workplace) -> Callable[[str], Any]:
    """Return the handler of the tick: from the queue to the page of the run, or back with a reason."""

    def follow(draft_id: str) -> Any:
        try:
            draft = drafts.read(work, draft_id)
            if not draft.started_as:
                return gr.skip()
            item = _item(work, draft)
            if item is not None and item.run:
                return [gr.skip(), "", gr.skip(), {"to": state.page_url(item.run)}]
            if item is not None and not item.has_ended:
                return [gr.skip(), gr.skip(), _waiting(work, draft), gr.skip()]
            with drafts.changing(work):
                drafts.save(work, replace(draft, started_as="", step=CHECK))
        except LoraTrainError:  # said where something is pressed
            return gr.skip()
        reason = "it was taken off the queue" if item is None else item.error
        said = error_html(reason or "the training ended before it began")
        return [gr.Walkthrough(selected=CHECK), said, note_html("Not started."), gr.skip()]

    return follow


def _kept(work: Workplace, fields: tuple[str | None, ...], *, step: int | None = None) -> Draft:
    """Return the draft with the values of the page, saved; raises LoraTrainError."""
    draft_id, dataset, base, priority, name, trigger, concept = (field or "" for field in fields)
    with drafts.changing(work):
        draft = drafts.read(work, draft_id)
        if draft.started_as:
            return draft
        draft = replace(draft, dataset=dataset, base=base, priority=priority, name=name)
        draft = replace(draft, step=step or draft.step)
        if trigger.strip():
            draft = draft.with_setting("data.trigger", trigger.strip())
        else:
            draft = draft.without_setting("data.trigger")
        draft = draft.without_setting(CONCEPT)
        if concept not in ("", "any"):
            draft = draft.with_setting(CONCEPT, concept)
        drafts.save(work, draft)
        return draft


def _report(work: Workplace, draft: Draft) -> tuple[str, bool]:
    """Return the report on the dataset, and whether it can be trained on."""
    try:
        answer = launch.ask(launch.check_words(draft, work))
        folder = work.folder(draft.dataset)
        if answer.values is None:
            return error_html(answer.error), False
        settings = build_config(draft.settings).data
        names = [picture.name for picture in list_dataset(folder, settings=settings).pictures]
    except LoraTrainError as error:
        return error_html(str(error)), False
    return summary(folder, answer.values, names), True


def _plan(work: Workplace, draft: Draft) -> str:
    try:
        answer = launch.ask(launch.plan_words(draft, work))
    except LoraTrainError as error:
        return error_html(str(error))
    if answer.values is None:
        return error_html(answer.error)
    return plan_view.plan(answer.values)


def _item(work: Workplace, draft: Draft) -> commands.Item | None:
    if not draft.started_as:
        return None
    return next((item for item in commands.items(work.runs) if item.id == draft.started_as), None)


def _waiting(work: Workplace, draft: Draft) -> str:
    item = _item(work, draft)
    if item is None:
        return note_html("Nothing is started yet.")
    if item.state == "waiting":
        before = [
            other
            for other in commands.items(work.runs)
            if other.state == "running" or (other.state == "waiting" and other.order < item.order)
        ]
        if before:
            return note_html(
                f"Waiting: {len(before)} before it. It starts by itself; the page Queue shows all."
            )
    return note_html("Starting: the run opens here once its data and base are checked.")

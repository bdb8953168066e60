"""What the page Train does: from the values of its fields to the draft, the report, the plan, the queue.

Each function returns a handler for one event of the page. Inputs: the fields in the order of
`train_page.Widgets.fields`, of which a draft keeps all. Outputs: gradio updates; a refusal is a line of
markup and loses nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import gradio as gr

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.config.layers import CONCEPT
from lora_trainer.queue import commands, worker
from lora_trainer.reporting.history import mapping

from .. import (
    bases,
    drafts,
    expert_edit,
    launch,
    plan_view,
    run_actions,
    state,
    uploads,
)
from ..dataset_summary import summary
from ..datasets import check
from ..drafts import Draft
from ..launch import Plans
from ..markup import button, error_html, join, note_html, stages_html, tag
from ..posted import Posted
from ..run_state import downloading, setting_out
from ..warm import BASES
from ..workplace import Workplace
from .gradio_events import answering
from .share import hub_sign_in

IMAGES, CHECK, STARTED = 1, 2, 3
_COURSE_CHARACTERS = 20_000
# For the plan, what it fills in, the button Train, and the line beside it.
_AS_IT_WAS = [gr.skip()] * 4


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
            gr.Timer(active=bool(draft.started_as)),
        ]

    return load


def _wanted(work: Workplace, asked: Mapping[str, str]) -> Draft:
    """Return the draft that an address asks for; without its id a folder takes no other one's place."""
    named = asked.get("draft", "")
    if named and named != "new":
        return _with_folder(work, named, asked.get("folder", ""))
    if asked.get("again"):
        return run_actions.clone(work, asked["again"], mended=bool(asked.get("mended")))
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
        if asked.get("example") and "data.trigger" not in newest.settings:
            newest = newest.with_setting("data.trigger", uploads.EXAMPLE_TRIGGER)
        drafts.save(work, newest)
    return newest


def _with_folder(work: Workplace, draft_id: str, folder: str) -> Draft:
    """Return a draft, with a folder whose images were just sent in place of the one it had."""
    with drafts.changing(work):
        draft = drafts.read(work, draft_id)
        if not folder or draft.dataset == folder:
            return draft
        if draft.started_as:
            return drafts.new(work, dataset=folder)
        draft = replace(draft, dataset=folder, step=IMAGES)
        drafts.save(work, draft)
        return draft


def recalling(work: Workplace) -> Callable[[str], list[Any]]:
    """Return the handler that shows again what was seen of a draft: the report, the plan and what it fills in."""

    def recall(draft_id: str) -> list[Any]:
        try:
            draft = drafts.read(work, draft_id)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip(), gr.skip(), *_AS_IT_WAS]
        if not draft.dataset or draft.started_as:
            return [gr.skip(), gr.skip(), gr.skip(), *_AS_IT_WAS]
        planned = _plan(work, draft, {}) if draft.step == CHECK else _AS_IT_WAS
        return [*_report(work, draft), *planned]

    return recall


def keeping(work: Workplace) -> Callable[..., str]:
    """Return the handler that writes the fields into the draft."""

    def keep(*fields: Any) -> str:
        try:
            _kept(work, fields)
        except LoraTrainError as error:
            return error_html(str(error))
        return ""

    return keep


def looking(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that reports on the folder of images."""

    def look(*fields: Any) -> list[Any]:
        try:
            draft = _kept(work, fields)
            seen = _report(work, draft)
        except LoraTrainError as error:
            return [error_html(str(error)), gr.skip(), gr.skip(), gr.Button(visible=False)]
        return ["", *seen]

    return look


def planning(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that goes to the plan and shows it."""

    def plan(*fields: Any) -> list[Any]:
        try:
            draft = _kept(work, fields, step=CHECK)
        except LoraTrainError as error:
            return [gr.skip(), error_html(str(error)), *_AS_IT_WAS]
        return [gr.Walkthrough(selected=CHECK), "", *_plan(work, draft, fields[-1])]

    return plan


def replanning(work: Workplace) -> Callable[..., list[Any]]:
    """Return the handler that shows the plan anew; where the page stands by then, it stays."""

    def replan(*fields: Any) -> list[Any]:
        try:
            draft = _kept(work, fields)
        except LoraTrainError as error:
            return [error_html(str(error)), *_AS_IT_WAS]
        return ["", *_plan(work, draft, fields[-1])]

    return replan


def base_cards(work: Workplace, plans: Plans) -> list[Callable[[Any], dict[str, Any]]]:
    """Return what the cards of the base models ask: which there are, whether one fits, a sign-in to the Hub."""

    def bases_list(asked: Any) -> dict[str, Any]:
        try:
            draft = drafts.read(work, Posted.of(asked).text("draft"))
            answer = launch.ask(BASES)
        except LoraTrainError as error:
            return {"error": str(error)}
        if answer.values is None:
            return {"error": answer.error}
        return {
            "cards": bases.cards(answer.values["releases"]),
            "chosen": draft.base or "auto",
            "signed_in": bases.signed_in(),
        }

    def base_fits(asked: Any) -> dict[str, Any]:
        try:
            posted = Posted.of(asked)
            draft = drafts.read(work, posted.text("draft"))
            answer = plans.of(replace(draft, base=posted.text("source", at_most=300)))
        except (LoraTrainError, OSError) as error:
            return {"fits": "", "said": "Not known", "why": str(error)}
        if answer.values is None:
            why = answer.error.partition(" Fix: ")[0]
            return {"fits": "bad", "said": "Does not fit this machine", "why": why}
        fits, said = plan_view.pace(answer.values)
        why = plan_view.fit_sentence(mapping(answer.values, "memory"))
        base = str(answer.values.get("base"))
        if base == bases.EMBEDDED:
            fits, said = "slow", "A try-out, not for ComfyUI or Forge"
        return {"fits": fits, "said": said, "why": why, "picks": bases.title(base)}

    return [bases_list, base_fits, answering(hub_sign_in)]


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

    def start(*fields: Any) -> list[Any]:
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
            worker.ensure_worker(work.runs)
        except LoraTrainError as error:
            return [gr.skip(), error_html(str(error)), gr.skip(), gr.skip()]
        return [gr.Walkthrough(selected=STARTED), "", _waiting(work, draft), gr.Timer(active=True)]

    return start


def following(work: Workplace) -> Callable[[str], Any]:
    """Return the handler of the tick: from the queue to the page of the run, or back with a reason."""

    def follow(draft_id: str) -> Any:
        try:
            draft = drafts.read(work, draft_id)
            if not draft.started_as:  # another tab has followed it
                return [gr.skip(), gr.skip(), gr.skip(), gr.Timer(active=False), gr.skip()]
            item = _item(work, draft)
            if item is not None and item.run:
                to = {"to": state.page_url(item.run)}
                return [gr.skip(), "", gr.skip(), gr.Timer(active=False), to]
            if item is not None and not item.has_ended:
                return [gr.skip(), gr.skip(), _waiting(work, draft), gr.skip(), gr.skip()]
            with drafts.changing(work):
                drafts.save(work, replace(draft, started_as="", step=CHECK))
        except LoraTrainError:  # said where something is pressed
            return gr.skip()
        reason = "it was taken off the queue" if item is None else item.error
        said = error_html(reason or "the training ended before it began")
        waiting, still = note_html("Not started."), gr.Timer(active=False)
        return [gr.Walkthrough(selected=CHECK), said, waiting, still, gr.skip()]

    return follow


def _kept(work: Workplace, fields: tuple[Any, ...], *, step: int | None = None) -> Draft:
    """Return the draft with the values of the page, saved; raises LoraTrainError."""
    *texts, course = fields
    draft_id, dataset, base, priority, name, trigger, concept = (text or "" for text in texts)
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
        draft = _with_course(draft, course)
        drafts.save(work, draft)
        return draft


def _with_course(draft: Draft, course: object) -> Draft:
    """Return the draft with what was typed into assets/course.js; raises RequestError."""
    posted = Posted.of(course or {})
    if not posted.values.get("changed"):  # what the plan filled in is no choice of anybody
        return draft
    for name, text in posted.pairs("changed", at_most=_COURSE_CHARACTERS).items():
        key = plan_view.COURSE.get(name, "")  # a name of nobody's is refused as any unknown setting
        if not text.strip():
            draft = expert_edit.without(draft, key=key)
            continue
        draft = expert_edit.changed(draft, key=key, text=text)
    return draft


def _report(work: Workplace, draft: Draft) -> list[Any]:
    """Return the report on the dataset, the folder whose images are shown, the button to the next step."""
    try:
        words = launch.check_words(draft, work)
        answer = launch.ask(words)
        folder = work.folder(draft.dataset)
    except LoraTrainError as error:
        return [error_html(str(error)), {"folder": ""}, gr.Button(visible=False)]
    if answer.values is None:
        return [error_html(answer.error), {"folder": ""}, gr.Button(visible=False)]
    check.remember(work, folder, words, answer.values)  # for the cards of the images
    judged = launch.judged_for(draft, folder)
    assumed = bases.title(judged) if judged != draft.base else ""
    report, is_good = summary(folder, answer.values, assumed=assumed)
    on = "Looks good, next step" if is_good else "Continue anyway"
    return [report, {"folder": str(folder)}, gr.Button(on, visible=True)]


def _plan(work: Workplace, draft: Draft, course: Any) -> list[Any]:
    """Return the plan, what it fills in, the button Train, and what it starts, or why it cannot be pressed.

    `course` was kept in the draft before.
    """
    try:
        answer = launch.ask(launch.plan_words(draft, work))
    except LoraTrainError as error:
        return _no_plan(draft, str(error), course)
    if answer.values is None:
        return _no_plan(draft, answer.error.removeprefix("error: "), course)
    return [
        plan_view.plan(answer.values),
        plan_view.course(answer.values, draft, (course or {}).get("changed", {})),
        gr.Button(_train_label(work, answer.values), interactive=True),
        plan_view.brief(answer.values),
    ]


def _train_label(work: Workplace, values: Mapping[str, Any]) -> str:
    """Return what the button does with a plan: another training that goes on comes first."""
    waits = any(not item.has_ended for item in commands.items(work.runs))
    is_try_out = values.get("base") == bases.EMBEDDED
    if waits or worker.outside(work.runs, ()):
        return "Add try-out to queue" if is_try_out else "Add to queue"
    return "Train a try-out" if is_try_out else "Train"


def _no_plan(draft: Draft, line: str, course: Any) -> list[Any]:
    """Return as `_plan` why there is no plan; a base of somebody's own choice can be left by a button."""
    line = line[:1].upper() + line[1:]
    plan = error_html(line)
    if draft.base not in ("", "auto"):
        attributes: dict[str, str | float | None] = {"data-base": "auto"}
        plan = join([plan, button("Choose a base for this machine", attributes=attributes)])
    why = note_html(f"Train waits for a plan that works: {line.partition(' Fix: ')[0]}")
    fields = plan_view.course_without_plan(draft, (course or {}).get("changed", {}))
    return [plan, fields, gr.Button("Train", interactive=False), why]


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
    download = commands.download_of(work.runs, item)
    if download is not None:
        stop = tag("p", "You may leave this page. ", tag("a", "Queue", href="/queue"), " stops it.")
        return join([stages_html(downloading(download)), stop])
    said = note_html("Starting: the run opens here once its data and base are checked.")
    if item.state == "waiting":
        return said
    return join([said, stages_html(setting_out())])

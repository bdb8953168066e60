"""What the page Train shows of a draft, part by part, and what becomes of a draft by what is typed or pressed.

Inputs: drafts, the answers of `lora-train check` and `plan`, the queue. Outputs: typed parts; drafts and items of
the queue in files. A refusal loses nothing of what was typed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.config.config import SettingInfo, all_settings
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.queue import commands, worker
from lora_trainer.reporting import base_names
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.plan_record import PlanRecord

from .. import command_lines, drafts, run_actions, slider_words, uploads, variants
from ..datasets import caption_job, check, notes
from ..drafts import PAIRS, SLIDER, Draft
from ..markup import button, capital, join, keys_in, note_html, plain, setting_said, tag
from ..messages import error, sentence
from ..plan_view import from_now_s
from ..server.asset_files import EXAMPLE_IMAGES, example_url
from ..server.templates import render
from ..server.translation import Words
from ..setting_text import text_of
from ..settings.foreign import for_images
from ..slider_words import LESS, MORE
from ..workplace import Workplace
from . import fields, plan, trigger_word
from .base_cards import that_fits, verdict_of
from .report import report

IMAGES, CHECK = drafts.STEPS
_ADVICE = (
    (
        "One thing, seen in many ways",
        "What stays the same in all images is learned: vary the pose, the place, the light and the distance.",
    ),
    (
        "Sharp, and nothing over it",
        "1,500 px on the longer side are plenty for any base. "
        "No text and no frames; ten good ones are better than fifty poor ones.",
    ),
    (
        "A sentence to each",
        "It says what else is in the image, so that this can change later. You may have them written here.",
    ),
)
_NEXT = "Next step"
# What is looked for first in the settings of another trainer.
_KNOWN = (
    "base.model",
    "optimizer.learning_rate",
    "adapter.rank",
    "adapter.alpha",
    "train.steps",
    "train.batch_size",
    "data.resolution",
)
# What a base says that is nowhere.
_MISSING = "does not exist"
# As many settings of a refusal are led to.
_LINKS = 3


@dataclass(frozen=True, kw_only=True)
class DraftPart:
    """What the draft keeps: the texts of the fields that it sets, and where the page stands."""

    texts: Mapping[str, str]
    step: int
    is_started: bool
    told: Mapping[str, Html]
    """What is to be said of a value beside its field, by the key of the field, before there is a plan."""


@dataclass(frozen=True, kw_only=True)
class ImagesPart:
    """The report on the images, and what the button that goes on says; `folder` is empty where there are none.

    `lacks` is what has to be there before it can be pressed, empty where it can or a report says what is wrong.
    """

    html: Html
    folder: str = ""
    next: str = ""
    lacks: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanPart:
    """The plan, what it fills in, what the button says and whether it can be pressed, and what stands beside it."""

    html: Html
    beside: Html
    filled: Mapping[str, str]
    length: plan.Length | None
    button: str
    works: bool
    told: Mapping[str, Html] = field(default_factory=dict)
    """What the plan says of a value beside its field, by the key of the field."""
    verdict: Mapping[str, Any] | None = None
    """What the card of the chosen base says, None where it could not be asked."""


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A draft after what was typed, and what of it cannot be, by the keys of the fields."""

    draft: Draft
    refused: Mapping[str, str]


def wanted(work: Workplace, asked: Mapping[str, str]) -> Draft:
    """Return the draft that an address asks for; without its id a folder takes no other one's place."""
    named = asked.get("draft", "")
    if named and named != "new":
        return _with_folder(work, named, asked.get("folder", ""))
    if asked.get("again"):
        return run_actions.clone(
            work,
            asked["again"],
            mended=bool(asked.get("mended")),
            advice=asked.get("advice", ""),
        )
    # The example is known to be good: its images need no look before the plan.
    folder, step = (
        (str(uploads.example(work)), CHECK)
        if asked.get("example")
        else (asked.get("folder", ""), IMAGES)
    )
    newest = drafts.current(work)
    is_of_others = newest.is_given and (newest.kind == SLIDER or newest.dataset != folder)
    if named == "new" or (folder and is_of_others):
        newest = drafts.new(work)
    if (kind := asked.get("kind", "")) in drafts.KINDS and kind != newest.kind:
        newest = fields.of_kind(newest, kind)
        drafts.save(work, newest)
    if folder and (newest.dataset, newest.step) != (folder, step):
        if newest.dataset != folder:
            newest = _of_folder(work, newest, folder, keeps_kind="kind" in asked)
        newest = replace(newest, step=max(newest.step, step))
        drafts.save(work, newest)
    # From the page Datasets too: each of its captions begins with the word.
    if folder and uploads.is_example(work, folder) and "data.trigger" not in newest.settings:
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
            draft = drafts.new(work)
        draft = replace(_of_folder(work, draft, folder, keeps_kind=False), step=IMAGES)
        drafts.save(work, draft)
        return draft


def _of_folder(work: Workplace, draft: Draft, folder: str, *, keeps_kind: bool) -> Draft:
    """Return a draft that is about a folder from now on: with the trigger word that was set for its images, the masks
    that were painted for them, and the length of a file that was brought, which counts them.

    It is not a slider any more. Whether it is of pairs its images say, unless it `keeps_kind`, as somebody chose that.
    """
    if draft.kind == SLIDER:
        draft = fields.of_kind(draft, drafts.IMAGES)
    draft = replace(draft, dataset=folder)
    try:
        root = work.dataset(folder)
    except LoraTrainError:  # which the report on the images says
        return draft
    if not keeps_kind:
        draft = fields.of_kind(draft, run_actions.kind_of(root))
    draft = notes.with_masks(work, for_images(draft, root), root)
    word = notes.read(work, root).trigger
    return (
        draft
        if not word or fields.TRIGGER in draft.settings or draft.kind == PAIRS
        else draft.with_setting(fields.TRIGGER, word)
    )


def keep(
    work: Workplace, draft_id: str, typed: Mapping[str, str], *, step: int | None = None
) -> Kept:
    """Write into the draft what was typed, and nothing else of it; raises RequestError, MachineError.

    One that is started stays as it is.
    """
    with drafts.changing(work):
        before = draft = drafts.read(work, draft_id)
        if draft.started_as:
            return Kept(draft=draft, refused={})
        refused: dict[str, str] = {}
        for key, text in typed.items():
            try:
                draft = fields.changed(draft, key=key, text=text)
            except RequestError as problem:
                refused[key] = str(problem)
        if draft.dataset != before.dataset and draft.kind != SLIDER:
            draft = _of_folder(work, draft, draft.dataset, keeps_kind=fields.KIND in typed)
        draft = replace(draft, step=step or draft.step)
        if draft != before:
            drafts.save(work, draft)
        return Kept(draft=draft, refused=refused)


def start(work: Workplace, draft_id: str, *, plans: command_lines.Plans | None = None) -> Draft:
    """Put the training, or each of several, into the queue, once; raises LoraTrainError.

    What the plan among `plans` chose is kept, so that it can be said before the training begins.
    """
    with drafts.changing(work):
        draft = drafts.read(work, draft_id)
        if not draft.started_as:
            _refuse_while_captioned(work, command_lines.dataset_of(draft, work))
            shown = None if plans is None else _shown_plan(draft, plans)
            draft = replace(draft, planned={} if shown is None else _chosen(shown))
            if any(draft.also.values()):
                planned = {} if shown is None else _varied(draft, shown)
                series = variants.start(work, _with_prompts(draft, shown), planned=planned)
                draft = replace(draft, started_as=series.members[0].item, series=series.id)
            else:
                words = command_lines.train_words(draft, work)
                label = command_lines.label_of(draft, work)
                item = commands.add(work.runs, words, label=label)
                draft = replace(draft, started_as=item.id)
            drafts.save(work, draft)
    worker.ensure_worker(work.runs)
    return draft


def _with_prompts(draft: Draft, shown: PlanRecord | None) -> Draft:
    """Return the draft of several trainings with the prompts that its plan has shown.

    Each reads its images when it starts, and would choose others if captions were changed meanwhile: their pictures
    could not be compared.
    """
    prompts = [] if shown is None else [line for line in shown.sampling.prompts if line]
    if not prompts or fields.PROMPTS in draft.settings or draft.kind == SLIDER:
        return draft
    return draft.with_setting(fields.PROMPTS, prompts)


def _shown_plan(draft: Draft, plans: command_lines.Plans) -> PlanRecord | None:
    """Return the plan that was shown of a draft, None without one."""
    try:
        answer = plans.known(draft)
    except OSError:  # the images are gone, which the training itself says
        return None
    return None if answer is None else answer.plan


def _chosen(found: PlanRecord) -> Mapping[str, Any]:
    """Return what the page of a training that starts says of its plan: the time in seconds beside other programs."""
    return {"base": found.base, "steps": found.time.steps, "range_s": from_now_s(found.time)}


def _varied(draft: Draft, found: PlanRecord) -> Mapping[str, Any]:
    """Return what a plan chose for the settings by which the trainings of a draft differ."""
    values = {key: found.value(key) for key in draft.also} | {fields.STEPS: found.time.steps}
    return {key: value for key, value in values.items() if key in draft.also and value is not None}


def _refuse_while_captioned(work: Workplace, dataset: Path) -> None:
    """Raise RequestError while captions of the images are written: those that come later would not be trained."""
    job = caption_job.of_folder(work, dataset)
    if caption_job.is_writing(job):
        raise RequestError(
            f"captions of these images are being written: {caption_job.state(job)['said']}",
            fix="wait until they are written, or stop that on the page Images",
        )


def advice() -> list[tuple[str, str, str]]:
    """Return what makes good images, each with a picture of the example: its address, what, and why."""
    return [
        (example_url(name), what, why)
        for name, (what, why) in zip(EXAMPLE_IMAGES, _ADVICE, strict=False)
    ]


def draft_part(_work: Workplace, draft: Draft, said: Words) -> DraftPart:
    """Return what the draft keeps."""
    return DraftPart(
        texts=fields.texts(draft),
        step=draft.step,
        is_started=bool(draft.started_as),
        told={fields.TRIGGER: _of_trigger(draft, said)},
    )


def _of_trigger(draft: Draft, said: Words) -> Html:
    """Return what is to be said of the trigger word: that an ordinary one changes all that it stands for."""
    word = str(draft.settings.get(fields.TRIGGER) or "")
    if not trigger_word.is_ordinary(word):
        return Html("")
    line = said(
        "The base knows “{text}” already, and all that it draws for it would change. "
        "A rare word before it keeps the rest as it is.",
        word,
    )
    rare = trigger_word.coined(draft.id, beside=word)
    return join([line, " ", _types_trigger(said("Take “{text}”", rare), rare)])


def _types_trigger(label: str, word: str) -> Html:
    """Return the button that types a trigger word."""
    attributes: dict[str, str | float | None] = {"data-types": fields.TRIGGER, "data-value": word}
    return button(label, attributes=attributes)


def brought(draft: Draft, said: Words) -> Mapping[str, Any] | None:
    """Return what there is to say of the file that the settings are from, None where they are from no file.

    What everybody knows comes first, then what the file says, then the defaults of its trainer.
    """
    if not draft.brought:
        return None
    found = json.loads(draft.brought)
    infos = {info.key: info for info in all_settings()}
    stated = found.get("said")  # drafts of earlier versions do not know
    rows = [
        {
            "label": setting_said(key, said),
            "key": key,
            "source": found["sources"].get(key, ""),
            "value": _as_words(infos[key], value),
            "shown": said.message(_short(key, _as_words(infos[key], value))),
            "is_missing": key == fields.BASE and _is_missing_file(str(value)),
            "without": _as_words(infos[key], infos[key].default),
        }
        for key, value in found["settings"].items()
        if key in infos
    ]
    places = {key: place for place, key in enumerate(_KNOWN)}
    last = len(places)
    rows.sort(key=lambda row: (places.get(row["key"], last), row["key"] not in (stated or ())))
    # What changes something; the rest is as it would be without the file.
    changing = [row for row in rows if row["value"] != row["without"]]
    own = len(rows) if stated is None else sum(row["key"] in stated for row in rows)
    return {
        "not_needed": {},  # drafts of earlier versions do not know
        **found,
        "trainer": found["trainer"].replace("sd-scripts", "kohya"),  # as people call it
        "own": own if found["sources"] else len(rows),
        "rows": rows,
        "first": [row for row in rows if row["key"] in places and row["value"]],
        "changing": changing,
        "same": [row for row in rows if row not in changing],
        "defaults": len(rows) - own if found["sources"] else 0,
    }


def _short(key: str, value: str) -> str:
    """Return a value as a tile shows it: a base by its name, a file without its folders."""
    if key == fields.BASE and value in MINIATURES:
        return base_names.title(value)
    return value.replace("\\", "/").rpartition("/")[2]


def _is_missing_file(source: str) -> bool:
    """Whether a base is named as a file, and none is there."""
    is_file = source.lower().endswith((".safetensors", ".ckpt", ".gguf"))
    return is_file and not Path(source).expanduser().exists()


def _as_words(info: SettingInfo, value: object) -> str:
    """Return a value as somebody reads it: a word of a choice without quotes."""
    return value if isinstance(value, str) else text_of(info, value)


def images_part(work: Workplace, draft: Draft, said: Words) -> ImagesPart:
    """Return the report on the images; takes as long as `lora-train check`."""
    if missing := lacks(draft, said):
        return ImagesPart(html=Html(""), next=said(_NEXT), lacks=missing)
    if not draft.is_given:
        return ImagesPart(html=Html(""))
    try:
        dataset = command_lines.dataset_of(draft, work)
        if dataset.is_file():
            return _words_part(dataset, said)
        folder, words = dataset, command_lines.check_words(draft, work)
        answer, refusal = command_lines.ask(words), ""
        if answer.values is None and draft.base:
            # Settings that were brought name a base that may not be here: the images are, and are looked at without it.
            draft, refusal = replace(draft, base=""), answer.error
            words = command_lines.check_words(draft, work)
            answer = command_lines.ask(words)
    except LoraTrainError as problem:
        return ImagesPart(html=error(str(problem), said))
    if answer.values is None:
        return ImagesPart(html=error(refusal or answer.error, said))
    check.remember(work, folder, words, answer.values)  # for the cards of the images
    judged = command_lines.judged_for(draft, folder)
    assumed = said.message(base_names.title(judged)) if judged != draft.base else ""
    shown, is_good = report(answer.values, said, assumed=assumed)
    on = (
        "Looks good, next step" if is_good and (draft.brought or not refusal) else "Continue anyway"
    )
    if refusal and not draft.brought:  # beside what was brought it is said already
        line = said.message(plain(refusal.removeprefix("error: ").partition(" Fix: ")[0]))
        without = said("The images are judged without it; the next step chooses a base model.")
        shown = Html(note_html(f"{capital(line).rstrip('.')}. {without}") + shown)
    return ImagesPart(html=shown, folder=str(folder), next=said(on))


def lacks(draft: Draft, said: Words) -> str:
    """Return what is still to be given before a slider or pairs can go on, empty for nothing.

    Of images the page says so itself: there is nothing else on it.
    """
    if draft.kind == SLIDER and not any(draft.slider.get(key, "").strip() for key in (MORE, LESS)):
        return said("Fill in More of or Less of, and it goes on here.")
    if draft.kind == PAIRS and not draft.is_given:
        return said("Give the images before and after, and it goes on here.")
    return ""


def _words_part(file: Path, said: Words) -> ImagesPart:
    """Return what a slider does, from the file of its words; raises InputError."""
    directions = slider_words.read(file)
    shown = render("train/slider.html", said, directions=directions)
    return ImagesPart(html=shown, next=said(_NEXT))


def plan_part(work: Workplace, draft: Draft, said: Words, plans: command_lines.Plans) -> PlanPart:
    """Return the plan; takes as long as `lora-train plan`."""
    try:
        answer = plans.of(draft, anew=True)
    except (LoraTrainError, OSError) as problem:
        return _no_plan(draft, str(problem), said)
    found, verdict = answer.plan, verdict_of(answer, said)
    if found is None:
        nothing = _no_plan(draft, answer.error.removeprefix("error: "), said)
        return replace(nothing, verdict=verdict)
    single = PlanPart(
        html=plan.plan(
            found,
            said,
            slider=draft.slider if draft.kind == SLIDER else None,
            **_leads_to(plans, draft, found, said),
        ),
        beside=join([_nameless(draft, found, said), plan.beside(found, said)]),
        filled=plan.filled(found),
        told=plan.at_fields(found, draft, said),
        length=plan.length(found, draft),
        button=said(_train_label(work, found)),
        works=True,
        verdict=verdict,
    )
    if not any(draft.also.values()):
        return single
    return _of_all(draft, single, found, said, plans)


def _nameless(draft: Draft, found: PlanRecord, said: Words) -> Html:
    """Return that nothing would call up what is learned, with what mends it; empty where something would."""
    count = found.images.get("all", 0)
    words = (found.value(key) for key in (fields.TRIGGER, "data.class_word", "data.caption_prefix"))
    if draft.kind == PAIRS or not count or found.images.get("no-caption") != count or any(words):
        return Html("")
    what = (
        said("The image has no caption, and the trigger word is empty.")
        if count == 1
        else said(
            "None of the {#} images has a caption, and the trigger word is empty.", f"{count:,}"
        )
    )
    why = said("No prompt would call up what is learned: with the LoRA on, every image changes.")
    rare = trigger_word.coined(draft.id)
    ways = [
        _types_trigger(said("Set the trigger word “{text}”", rare), rare),
        button(said("Write captions"), attributes={"data-captions": ""}),
    ]
    told = tag("p", tag("b", what), " ", tag("span", why, class_="why"))
    return tag("div", told, tag("p", join(ways), class_="actions"), class_="nameless")


def _leads_to(
    plans: command_lines.Plans, draft: Draft, found: PlanRecord, said: Words
) -> Mapping[str, Any]:
    """Return the base that a try-out leads to, how long it takes and what is chosen afresh for it; and what a file
    says of length and size, which is for its own base: on the miniature it would take weeks.

    Nothing for a plan for other programs.
    """
    if found.base not in MINIATURES:
        return {}
    if of_file := [
        key for key in (fields.STEPS, fields.SIZE) if draft.brought and key in draft.settings
    ]:
        return {"of_file": of_file, "on_base": draft.base or "auto"}
    base = that_fits(plans, draft, said)
    if not base:
        return {}
    answer = plans.of(fields.on_base(draft, base))  # known since it was found to fit
    time = str(verdict_of(answer, said).get("time", ""))
    return {"leads_to": base, "leads_to_time": time, "afresh": fields.of_try_out(draft)}


def _of_all(
    draft: Draft, single: PlanPart, found: PlanRecord, said: Words, asked: command_lines.Plans
) -> PlanPart:
    """Return the plan of a draft's own training, and beside the button what all of its trainings take."""
    plans = [found]
    planned = plan.filled(found)
    for key, values in draft.also.items():
        shown = {variants.text_of_value(key, value) for value in values}
        if planned.get(key) in shown:
            line = said(
                "{text} {} is what it has already: leave it out of the further values.",
                said(fields.label(key)),
                planned[key],
            )
            return replace(single, beside=note_html(line), works=False)
    for variant in variants.variants(draft)[1:]:
        answer = asked.of(variant.draft, anew=True)
        if answer.plan is None:
            why = said.message(plain(answer.error.removeprefix("error: ").partition(" Fix: ")[0]))
            line = said("One of the trainings cannot be: {}", capital(why))
            return replace(single, beside=note_html(line), works=False)
        plans.append(answer.plan)
    return replace(
        single,
        beside=join([_nameless(draft, found, said), plan.beside(found, said, every=plans)]),
        button=said("Queue {#} trainings", len(plans)),
    )


def _train_label(work: Workplace, found: PlanRecord) -> str:
    """Return what the button does with a plan: another training that goes on comes first."""
    waits = any(not item.has_ended for item in commands.items(work.runs))
    is_try_out = found.base in MINIATURES
    if waits or worker.outside(work.runs, ()):
        return "Add try-out to queue" if is_try_out else "Add to queue"
    return "Train a try-out" if is_try_out else "Train"


def _link_to(draft: Draft, key: str, said: Words) -> Html:
    """Return a link to the field of a setting that a refusal names."""
    address = f"/settings?{urlencode({'draft': draft.id})}#{key}"
    label = said("Open the setting {text}", setting_said(key, said))
    return tag("a", label, class_="ui-button", href=address)


def _no_plan(draft: Draft, line: str, said: Words) -> PlanPart:
    """Return why there is no plan; a base of somebody's own choice can be left by a button.

    Nothing is filled in: what another base's plan had chosen would be read as chosen for this one.
    """
    what = line.partition(" Fix: ")[0].removesuffix(".")
    found, keys = said.message(plain(what)), keys_in(line)[:_LINKS]
    is_own_base = draft.base not in ("", "auto")
    is_absent = is_own_base and _MISSING in what
    ways = [
        button(said("Browse for the base model"), kind="primary", attributes={"data-base": ""}),
        button(said("Choose a base for this machine"), attributes={"data-base": "auto"}),
    ]
    if is_absent:  # said once, with the buttons that do what a terminal is told
        lead = said("The base model {} is not on this machine.", _short(fields.BASE, draft.base))
        advice = said("Browse to where you keep it, or take one that this machine can have.")
        told = tag("p", tag("b", lead), " ", advice)
        html = tag(
            "div", told, tag("p", join(ways), class_="actions"), class_="gate notice warning"
        )
    else:
        html = join(
            [
                tag("p", sentence(line, said), class_="error notice"),
                tag("p", join(ways), class_="actions") if is_own_base else None,
                *(_link_to(draft, key, said) for key in keys),
            ]
        )
    waits = said("Train waits for a plan that works: {}", capital(found))
    return PlanPart(
        html=html,
        beside=note_html(
            said("It goes on here once the base model is chosen.") if is_absent else waits
        ),
        filled={},
        length=None,
        button=said("Train"),
        works=False,
    )

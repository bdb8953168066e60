"""The plan of a draft as the page Train shows it: what is trained, how long it takes, whether it fits.

Input: the plan as `lora-train plan --json` has it. Outputs: what plan.html and beside.html show, and the texts of the
fields that the plan fills in. Nothing is computed here but units and widths; what the plan does not say is not shown.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from lora_trainer.common.wording import bytes_text
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.config.prompt_line import without_strength
from lora_trainer.planning.timesteps import shares_sentence
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html, text, timestep_bars
from lora_trainer.reporting.plan_record import MemoryRecord, PlanRecord
from lora_trainer.reporting.report import value_text

from .. import plan_view, slider_words
from ..datasets.view import badge_kind
from ..drafts import Draft
from ..markup import setting_said
from ..messages import message, sentence
from ..server.templates import render
from ..server.translation import Words
from . import fields

Light = Literal["good", "slow", "bad", ""]
# Of what a plan puts on the disk: what all trainings on the same images read.
CACHE = "cache"
# A training that may take longer than a night is called slow.
SLOW_S = 8 * 3600.0
# Nobody waits for one of days.
TOO_SLOW_S = 48 * 3600.0
# Parts of the memory in plainer words than those of the planner.
_PLAIN = {"runtime": "the program itself", "allocator slack": "gaps between what is kept"}
# What the plan warns of that is about one field: said there.
_AT_FIELD = {"learning-rate": fields.RATE}
# A choice of somebody beyond these is remarked on: how often an image is seen, and the rank.
_MOST_TIMES, _MOST_RANK = 1000, 128
# What the size that a base is trained in makes of the images, said where the base is chosen.
_OF_BASE = {
    "low-resolution": (
        "1 of {#} images is smaller than this base is trained at and would be enlarged",
        "{#} of {#} images are smaller than this base is trained at and would be enlarged",
        "What is enlarged is learned soft: give larger ones, or choose a smaller size.",
        "{#} of {#} images are small",
    ),
    "blurred": (
        "1 of {#} images looks blurred at this size",
        "{#} of {#} images look blurred at this size",
        "Leave out what is blurred, or choose a smaller size.",
        "{#} of {#} images look blurred in it",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Time:
    """How long all of it takes; `text` says why not where that is not known."""

    text: str
    is_slow: bool
    steps: int | None
    hint: str
    source: str
    """Where the time comes from, in a few words."""
    now: str = ""
    """How long it takes beside the programs that run now, where these make a difference."""
    alone: str = ""
    """`text` within a sentence."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """The verdict on a plan: the colour of its light, the word beside it, how long it takes."""

    light: Light
    word: str
    time: str


@dataclass(frozen=True, kw_only=True)
class Length:
    """What makes a number of steps a number of times through the images."""

    epochs_per_step: float
    images: int
    held_out: int
    batch: int
    trains_on_all: bool
    """Whether the draft says so; that none is kept aside may have another reason."""


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of the memory bar, or the limit in it, as a share of its length."""

    css: str
    share: float
    text: str


def plan(
    found: PlanRecord,
    said: Words,
    *,
    leads_to: str = "",
    leads_to_time: str = "",
    afresh: Sequence[str] = (),
    of_file: Sequence[str] = (),
    on_base: str = "",
    slider: Mapping[str, str] | None = None,
) -> Html:
    """Return a plan: one line and what it warns of; numbers and decisions folded.

    A try-out comes with the one press that leads to the base `leads_to`, which is for other programs and fits here,
    and how long that takes; empty where none does. Settings `afresh` are left to the plan by it.
    One whose settings `of_file` were brought for another base comes with the press that leaves them to the plan, on the
    same base `on_base`.
    """
    memory, time = found.memory, found.time
    return render(
        "train/plan.html",
        said,
        time=duration(found, said),
        known_by=list(
            dict.fromkeys(map(said.message, filter(None, (time.source, *time.corrections))))
        ),
        fits=memory.fits is not False,
        fit=fit(found, said),
        is_try_out=found.base in MINIATURES,
        is_slow_here=pace(found, said).light == "slow",
        leads_to=leads_to,
        leads_to_name=title(leads_to),
        leads_to_time=leads_to_time,
        afresh=" ".join(afresh),
        of_file=" ".join(of_file),
        on_base=on_base,
        remarks=[*of_images(found, said), *_remarks(found, said)],
        base=found.base,
        base_name=title(found.base),
        family=found.family,
        preset=found.preset,
        priority=found.priority,
        slides=_slides(found, slider or {}, said),
        steps="unknown" if time.steps is None else time.steps,
        **_chosen(found),
        pieces=list(_pieces(memory, said)),
        limit=None if (share := plan_view.limit_share(memory)) is None else 100 * share,
        items=[(_PLAIN.get(item.name, item.name), item.bytes, item.note) for item in memory.items],
        disk=_disk(found, said),
        timesteps=timestep_bars(found.timesteps),
        timesteps_sentence=said.message(shares_sentence(found.timesteps)),
        decided=list(_decided(found, said)),
    )


def together(plans: Sequence[PlanRecord], said: Words) -> str:
    """Return in a sentence what several trainings take, one after another; all of them read the same cache.

    Beside what runs now, as the time of each of them is said.
    """
    known = _each_s(plans)
    cache = max(found.disk.get(CACHE, 0) for found in plans)
    own = sum(size for found in plans for name, size in found.disk.items() if name != CACHE)
    disk = bytes_text(int(cache + own))
    if len(known) < len(plans):
        return said("{#} trainings, one after another: {#} on the disk.", len(plans), disk)
    low_s, high_s = (math.fsum(pair[end] for pair in known) for end in (0, 1))
    time = plan_view.span((low_s, high_s), said)
    return said(
        "{#} trainings, one after another: {text} together, {#} on the disk.",
        len(plans),
        time,
        disk,
    )


def _each_s(plans: Sequence[PlanRecord]) -> list[tuple[float, float]]:
    """Return the shortest and the longest time of each training whose time is known, beside what runs now."""
    pairs = (plan_view.from_now_s(found.time) for found in plans)
    return [pair for pair in pairs if pair is not None]


def beside(found: PlanRecord, said: Words, *, every: Sequence[PlanRecord] = ()) -> Html:
    """Return what Train starts, in the words beside it: how long, how much, how large, on what.

    Of several trainings `every` has their plans: how long they take together, and each of them.
    """
    time = duration(found, said)
    if known := _each_s(every) if every else ():
        shortest_s, longest_s = min(low for low, _ in known), max(high for _, high in known)
        same_steps = len({each.time.steps for each in every}) == 1
        time = replace(
            time,
            text=plan_view.span((shortest_s, longest_s), said),
            now="",
            steps=time.steps if same_steps else None,
        )
    return render(
        "train/beside.html",
        said,
        time=time,
        is_try_out=found.base in MINIATURES,
        is_too_slow=max(plan_view.from_now_s(found.time) or (0.0,)) > TOO_SLOW_S,
        of_all=together(every, said) if every else "",
        beside_others=plan_view.load_of(found.time) > 1,
        **_chosen(found),
    )


def filled(found: PlanRecord) -> dict[str, str]:
    """Return the texts of the fields that the plan fills in, by key."""
    chosen = {row.key: found.value(row.key) for row in fields.planned()}
    # The plan counts the steps, and words the prompts; those of a slider at each strength, which a prompt typed here
    # is drawn at by itself. Without captions it is one without words, which the field says in its own.
    prompts = [line for line in found.sampling.prompts if line]
    if not found.images.get("all"):
        prompts = list(dict.fromkeys(without_strength(line)[0] for line in prompts))
    chosen |= {fields.STEPS: found.time.steps, fields.PROMPTS: prompts}
    return {row.key: fields.as_text(row, chosen[row.key]) for row in fields.planned()}


def length(found: PlanRecord, draft: Draft) -> Length:
    """Return what the fields of the length are computed with."""
    time = found.time
    return Length(
        epochs_per_step=time.epochs / time.steps if time.steps else 0.0,
        images=time.images,
        held_out=time.held_out,
        batch=found.value("train.batch_size"),
        trains_on_all=draft.settings.get("data.validation_fraction") == 0,
    )


def duration(found: PlanRecord, said: Words) -> Time:
    """Return how long all of it takes, as far as that is known; its parts as a hint."""
    time, pair, from_now = found.time, found.time.range_s, plan_view.from_now_s(found.time)
    note = said.message(time.note)
    if pair is None:
        return Time(text=note, is_slow=False, steps=None, hint="", source="")
    parts = ", ".join(said.message(part) for part in time.parts_s)
    return Time(
        text=plan_view.span(pair, said, begins=True),
        is_slow=is_slow(pair),
        steps=time.steps,
        hint=said("{}; counted are {}", note, parts) if parts else "",
        source=said.message(time.source),
        alone=plan_view.span(pair, said),
        now="" if from_now is None or from_now == pair else plan_view.span(from_now, said),
    )


def pace(found: PlanRecord, said: Words) -> Pace:
    """Return whether a plan is good, slow or bad for this machine, that in a word, and how long it takes from now.

    The word is about the time beside it: what other programs use now makes both longer.
    """
    if found.memory.fits is False:
        return Pace(light="bad", word=said("Does not fit"), time="")
    from_now = plan_view.from_now_s(found.time)
    if from_now is None:
        return Pace(light="good", word=said("Fits"), time="")
    time = plan_view.span(from_now, said)
    if max(from_now) > TOO_SLOW_S:
        return Pace(light="slow", word=said("Too slow"), time=time)
    if is_slow(from_now):
        return Pace(light="slow", word=said("Fits, but slow"), time=time)
    return Pace(light="good", word=said("Fits"), time=time)


def fit(found: PlanRecord, said: Words) -> str:
    """Return in a sentence whether it fits."""
    return said.message(plan_view.fit_sentence(found.memory))


def is_slow(run_s: Sequence[float]) -> bool:
    """Return whether a training of this range of seconds may take longer than a night."""
    return max(run_s) > SLOW_S


def _chosen(found: PlanRecord) -> dict[str, Any]:
    """Return the choices that are named in sentences."""
    keys = {
        "optimizer": "optimizer.name",
        "rank": "adapter.rank",
        "size_px": "data.resolution",
        "batch": "train.batch_size",
    }
    return {name: found.value(key) for name, key in keys.items()}


def _slides(found: PlanRecord, words: Mapping[str, str], said: Words) -> str:
    """Return what a slider of these words goes from and to, and where it is drawn; empty without words."""
    less, more = (words.get(key, "").strip() for key in (slider_words.LESS, slider_words.MORE))
    if less and more:
        told = said("It goes from “{}” to “{}”.", less, more)
    elif less or more:
        told = said("It brings more of “{}”.", more) if more else said("It takes away “{}”.", less)
    else:
        return ""
    drawn = (without_strength(line)[1] for line in found.sampling.prompts)
    strengths = sorted({each for each in drawn if each is not None})
    if not strengths:
        return told
    listed = ", ".join(f"{each:g}".replace("-", "−") for each in strengths)
    return f"{told} {said('The samples show it at the strengths {}.', listed)}"


def _pieces(memory: MemoryRecord, said: Words) -> Iterator[Piece]:
    for part in plan_view.memory_parts(memory.items):
        share = part.size_bytes / plan_view.bar_bytes(memory)
        yield Piece(css=part.css, share=100 * share, text=said.message(part.text))


def _disk(found: PlanRecord, said: Words) -> str:
    sizes = found.disk.items()
    return ", ".join(f"{said.message(name)} {bytes_text(size)}" for name, size in sizes)


def _decided(found: PlanRecord, said: Words) -> Iterator[dict[str, Any]]:
    """Yield the settings that are not at their default, each with its reason."""
    for key, setting in found.settings.items():
        if setting.origin != "default":
            yield {
                "key": key,
                "label": setting_said(key, said),
                "value": said.message(title(setting.value))
                if key == "base.model" and isinstance(setting.value, str)
                else said.value(value_text(setting.value)),
                "origin": plan_view.origin_said(setting.origin, said),
                "reason": message(setting.reason, said),
            }


def of_images(found: PlanRecord, said: Words) -> Iterator[dict[str, Any]]:
    """Yield of how many images the planned size makes something that harms the training; `short` is for a card.

    `shows` is the badge of these images on the step Images.
    """
    of_all = f"{found.images.get('all', 0):,}"
    for kind, (of_one, of_several, advice, short) in _OF_BASE.items():
        count = found.images.get(kind, 0)
        if count:
            told = said(of_one, of_all) if count == 1 else said(of_several, f"{count:,}", of_all)
            brief = said(short, f"{count:,}", of_all)
            yield {
                "what": told,
                "advice": said(advice),
                "severity": "warning",
                "short": brief,
                "shows": badge_kind(kind),
                "label": said("Show it" if count == 1 else "Show them"),
            }


def at_fields(found: PlanRecord, draft: Draft, said: Words) -> dict[str, Html]:
    """Return what is unusual about values of the page's fields, by the key of the field; empty for what is usual."""
    told = dict.fromkeys((fields.STEPS, fields.RANK, *_AT_FIELD.values()), Html(""))
    for remark in found.remarks:
        if key := _AT_FIELD.get(remark.kind):
            told[key] = Html(f"{sentence(remark.what, said)}. {sentence(remark.advice, said)}.")
    times, rank = round(found.time.epochs), found.value(fields.RANK) or 0
    if fields.STEPS in draft.settings and found.time.images and times > _MOST_TIMES:
        line = said(
            "Each image would be seen {#} times, and so learned by heart; some hundred are plenty.",
            f"{times:,}",
        )
        told[fields.STEPS] = text(line)
    if fields.RANK in draft.settings and rank > _MOST_RANK:
        line = said(
            "4 to {#} are usual: more makes a larger file that learns your images by heart sooner.",
            _MOST_RANK,
        )
        told[fields.RANK] = text(line)
    return told


def _remarks(found: PlanRecord, said: Words) -> Iterator[dict[str, Any]]:
    """Yield what the plan warns of, each with its advice; what a field has beside it is said there."""
    for remark in found.remarks:
        if remark.kind in _AT_FIELD:
            continue
        # What needs no action needs no advice either, such as a setting for who knows it already.
        is_advised = not remark.advice.startswith("no action needed")
        yield {
            "what": sentence(remark.what, said),
            "advice": sentence(remark.advice, said) if is_advised else "",
            "severity": "note",
            "shows": "",
        }

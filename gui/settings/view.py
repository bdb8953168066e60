"""What the page All settings shows: the form, a draft in it, and what the plan makes of it.

Inputs: the settings model, a draft, a plan. Outputs: the form for fields.html, JSON values for the script. Texts of
values are those of setting_text.py, so that the script converts nothing.
"""

from __future__ import annotations

import hashlib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import SettingInfo, all_settings, flatten
from lora_trainer.config.layers import CONCEPT, AskedFor, Resolved, resolve
from lora_trainer.config.running import Config
from lora_trainer.importing.words import words_of_settings
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.plan_record import MemoryRecord, PlanRecord, SettingRecord

from .. import command_lines, drafts
from ..command_lines import Answer
from ..drafts import Draft
from ..markup import capital, named, worded
from ..plan_view import (
    bar_bytes,
    fit_sentence,
    from_now_s,
    limit_share,
    memory_parts,
    origin_said,
    span,
)
from ..server.language import ENGLISH
from ..server.translation import Words, words
from ..setting_edit import FOLDER, NAME, as_json, given
from ..setting_text import text_of
from ..workplace import Workplace
from . import presets

_DEFAULT, _COMMAND_LINE = "default", "command line"
_WORDS = {True: "yes", False: "no", "auto": "automatic"}
# What is changed most often, in a section of its own before all others.
USUAL = (
    *("base.model", "output.name", "data.trigger", "data.resolution", "data.repeats", "data.flip"),
    *("train.steps", "train.batch_size", "train.seed"),
    *("adapter.kind", "adapter.rank", "adapter.alpha"),
    *("optimizer.name", "optimizer.learning_rate", "optimizer.schedule"),
    *("memory.base_precision", "memory.gradient_checkpointing"),
    *("sampling.prompts", "sampling.every_steps", "output.save_every_steps"),
)


# The icon of each section.
_ICONS = {
    "usual": "star",
    "base": "box",
    "data": "images",
    "adapter": "layers",
    "train": "play",
    "objective": "sparkles",
    "slider": "contrast",
    "optimizer": "settings",
    "memory": "hard-drive",
    "hardware": "cpu",
    "output": "download",
    "sampling": "image-plus",
    "logging": "external-link",
}
# So many of the drafts that wait are offered.
_OFFERED = 8


@dataclass(frozen=True, kw_only=True)
class Word:
    """A value that a field offers, and how it is called."""

    text: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """All that draws the field of a setting; `also` are words by which the search finds it too, with `others`."""

    key: str
    label: str
    unit: str
    doc: str
    detail: str
    source: str
    kind: str
    words: tuple[Word, ...]
    allowed: str
    may_be_empty: bool
    also: str
    others: tuple[str, ...]
    default: str
    is_fixed: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the settings with its fields."""

    name: str
    label: str
    doc: str
    icon: str
    fields: tuple[Field, ...]
    usual: tuple[Field, ...] = ()
    """Its fields that stand under what is changed most often."""


@cache
def form(language: str = ENGLISH) -> tuple[Section, ...]:
    """Return the sections with their fields, what is changed most often first, in a language by its code."""
    said, infos = words(language), {info.key: info for info in all_settings()}
    usual = Section(
        name="usual",
        label=said("Most used"),
        doc=said("what is changed most often"),
        icon=_ICONS["usual"],
        fields=tuple(_field(infos[key], said) for key in USUAL),
    )
    others = (
        Section(
            name=name,
            label=said(name.capitalize()),
            doc=said(field.description or ""),
            icon=_ICONS[name],
            fields=tuple(
                _field(info, said)
                for info in infos.values()
                if info.section == name and info.key not in USUAL
            ),
            usual=tuple(each for each in usual.fields if infos[each.key].section == name),
        )
        for name, field in Config.model_fields.items()
    )
    return (usual, *others)


def _field(info: SettingInfo, said: Words) -> Field:
    doc = named(info.doc)
    # Who reads another language finds a setting by its English words too, which manuals and others use.
    english = [text for text in (info.label, doc) if said(text) != text]
    everyday = _everyday(f"{info.label} {doc}")
    others = tuple(words_of_settings().get(info.key, ()))
    # "Streamed blocks" has its unit in its name.
    unit = "" if info.unit and info.label.endswith(f" {info.unit}") else info.unit
    return Field(
        key=info.key,
        label=said(info.label),
        unit=said(unit),
        doc=said(doc),
        detail=said(named(info.detail)),
        source=info.source,
        kind=info.form.kind,
        words=tuple(_word(info, word, said) for word in info.form.words),
        allowed=said.message(info.form.allowed),
        may_be_empty=info.form.nullable,
        also=" ".join([*english, *everyday]),
        others=others,
        default=text_of(info, info.default),
        is_fixed=info.key == FOLDER,
    )


@cache
def _searched_as() -> Mapping[str, list[str]]:
    """Return the everyday words by which a setting is found whose text has a word."""
    return tomllib.loads(Path(__file__).with_name("searched_as.toml").read_text(encoding="utf-8"))


def _everyday(text: str) -> list[str]:
    """Return the everyday words for what an English text is about."""
    own = set(re.findall(r"\w+", text.lower()))
    found = (others for word, others in _searched_as().items() if word in own)
    return list(dict.fromkeys(chain.from_iterable(found)))


def _word(info: SettingInfo, word: Any, said: Words) -> Word:
    label = said(_WORDS[word]) if word in _WORDS else str(word)
    return Word(text=text_of(info, word), label=label)


def stamp(draft: Draft) -> str:
    """Return what changes whenever the page has to show something else of the draft."""
    content = [draft.kind, draft.dataset, draft.slider, draft.priority, draft.started_as]
    content.append(given(draft))
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


@dataclass(frozen=True, kw_only=True)
class Offered:
    """A draft to choose from; an empty name stands for one that says nothing yet."""

    id: str
    name: str


def offered(work: Workplace, draft: Draft) -> list[Offered]:
    """Return the draft that is shown, further ones that wait, and an empty one."""
    others = (each for each in drafts.waiting(work, within=3 * _OFFERED) if each.id != draft.id)
    given_ones = [draft, *islice((each for each in others if each.is_given), _OFFERED - 1)]
    # Two drafts on the same images are told apart by nothing but which is newer: the newer one is offered.
    named = {_called(work, each): each.id for each in reversed(given_ones)} | {
        _called(work, draft): draft.id
    }
    found = [Offered(id=of, name=name) for name, of in reversed(named.items()) if name]
    return [*found, Offered(id=draft.id if not draft.is_given else "new", name="")]


def _called(work: Workplace, draft: Draft) -> str:
    """Return what the training of a draft is called, as the queue calls it; empty where it says nothing yet."""
    if not draft.is_given:
        return ""
    try:
        return command_lines.label_of(draft, work)
    except LoraTrainError:  # its images are gone, which the plan says
        return draft.name or re.split(r"[\\/]", draft.dataset.rstrip("\\/"))[-1]


def state(work: Workplace, draft: Draft) -> dict[str, Any]:
    """Return what a draft sets, as the fields and the JSON beside them show it."""
    values = given(draft)
    infos = {info.key: info for info in all_settings()}
    return {
        "id": draft.id,
        "stamp": stamp(draft),
        "kind": draft.kind,
        "dataset": draft.is_given,
        "called": _called(work, draft),
        "started": bool(draft.started_as),
        "given": {key: text_of(infos[key], value) for key, value in values.items()},
        "json": as_json(values),
        "folder": str(work.runs),
        "presets": presets.names(work),
    }


def planned(draft: Draft, answer: Answer, said: Words) -> dict[str, Any]:
    """Return what is in force, where it comes from, what does not matter, and whether it fits.

    Without a plan the defaults stand in its place, with the reason why there is none.
    """
    plan = answer.plan
    own = given(draft)
    settings = dict(plan.settings) if plan is not None else {}
    if name := own.get(NAME):  # plans are asked for without it, as it changes nothing of them
        settings[NAME] = SettingRecord(value=name, origin=_COMMAND_LINE, reason="")
    values = {
        **flatten(Config()),
        **own,
        **{key: setting.value for key, setting in settings.items()},
    }
    preset = None if plan is None else _preset(plan)
    return {
        "stamp": stamp(draft),
        "error": capital(worded(answer.error.removeprefix("error: "), said)),
        "fields": {
            info.key: _in_force(
                info,
                settings.get(info.key)
                or SettingRecord(value=values[info.key], origin=_DEFAULT, reason=""),
                preset=preset,
                said=said,
            )
            for info in all_settings()
        },
        "unused": {
            info.key: worded(reason, said)
            for info in all_settings()
            if (reason := info.unused(values))
        },
        "blamed": [info.key for info in all_settings() if f"{info.key}=" in answer.error],
        "said": [] if plan is None else list(_sentences(plan, said)),
        "memory": None if plan is None else _memory(plan.memory, said),
    }


def _in_force(
    info: SettingInfo, setting: SettingRecord, *, preset: Resolved | None, said: Words
) -> dict[str, str]:
    """Return the value in force, its layer and that in words, why, and what it were without the draft's own."""
    origin = setting.origin
    found = {
        "text": text_of(info, setting.value),
        "layer": origin,
        "from": origin_said(origin, said),
        "reason": worded(setting.reason, said),
        "preset": text_of(info, info.default),
        "preset_from": origin_said(_DEFAULT, said),
    }
    if preset is not None and info.key != CONCEPT:  # which is above its presets
        found["preset"] = text_of(info, flatten(preset.config)[info.key])
        found["preset_from"] = origin_said(preset.origins[info.key].layer, said)
    return found


def _preset(plan: PlanRecord) -> Resolved | None:
    """Return the layers below what the draft sets; None where the plan does not say which they are."""
    priority = next((name for name in PRIORITIES if name == plan.priority), None)
    if priority is None:
        return None
    chosen = plan.value(CONCEPT)
    concept = {CONCEPT: chosen} if isinstance(chosen, str) else {}
    try:
        return resolve(
            AskedFor(overrides=concept),
            family=plan.family,
            tier=plan.tier,
            priority=priority,
        )
    except (RequestError, KeyError):
        return None


def _sentences(plan: PlanRecord, said: Words) -> Iterator[str]:
    """Yield what is trained, for how long, and what the plan warns of."""
    steps = "0" if plan.time.steps is None else f"{plan.time.steps:,}"
    from_now = from_now_s(plan.time)
    if from_now is not None:
        yield said(
            "{}: {#} steps, {text}.", said.message(title(plan.base)), steps, span(from_now, said)
        )
    else:
        yield said("{}: {#} steps.", said.message(title(plan.base)), steps)
    for remark in plan.remarks:
        what, advice = (capital(worded(text, said)) for text in (remark.what, remark.advice))
        yield f"{what}. {advice}."


def _memory(memory: MemoryRecord, said: Words) -> dict[str, Any]:
    """Return the bar: its pieces and the limit as shares of its length."""
    length = bar_bytes(memory)
    return {
        "said": said.message(fit_sentence(memory)),
        "fits": memory.fits is not False,
        "parts": [
            {"css": part.css, "text": said.message(part.text), "share": part.size_bytes / length}
            for part in memory_parts(memory.items)
        ],
        "limit": limit_share(memory),
    }


def refusal(error: LoraTrainError, said: Words) -> dict[str, str]:
    """Return a refusal as the script takes it."""
    return {"error": capital(worded(str(error), said))}

"""What the page All settings shows: the form, a draft in it, and what the plan makes of it.

Inputs: the settings model, a draft, the JSON of `lora-train plan --json`. Outputs: the form for fields.html, JSON
values for the script. Texts of values are those of setting_text.py, so that the script converts nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.wording import duration_text
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import SettingInfo, all_settings, flatten
from lora_trainer.config.layers import CONCEPT, AskedFor, Resolved, resolve
from lora_trainer.config.running import Config
from lora_trainer.importing.words import words_of_settings
from lora_trainer.reporting.history import mapping, number, sequence

from ..command_lines import Answer
from ..drafts import Draft
from ..markup import named, worded
from ..plan_view import fit_sentence, memory_parts
from ..server.language import ENGLISH
from ..server.translation import Words, words
from ..setting_edit import FOLDER, as_json, given
from ..setting_text import text_of
from ..workplace import Workplace
from . import presets

Values = Mapping[str, Any]

_DEFAULT = "default"
# Where a value comes from in words, by the layer of the plan; another layer is named itself.
_FROM = {"default": _DEFAULT, "command line": "from you", "planner": "from planner"}
_YES_NO = {True: "yes", False: "no"}
# How much longer the bar is than the larger of peak and limit.
_ROOM = 1.04


@dataclass(frozen=True, kw_only=True)
class Word:
    """A value that a field offers, and how it is called."""

    text: str
    label: str


@dataclass(frozen=True, kw_only=True)
class Field:
    """All that draws the field of a setting; `also` are words by which the search finds it too."""

    key: str
    label: str
    unit: str
    doc: str
    kind: str
    words: tuple[Word, ...]
    allowed: str
    also: str
    default: str
    is_fixed: bool


@dataclass(frozen=True, kw_only=True)
class Section:
    """A section of the settings with its fields."""

    name: str
    label: str
    doc: str
    fields: tuple[Field, ...]


@cache
def form(language: str = ENGLISH) -> tuple[Section, ...]:
    """Return the sections with their fields, in a language by its code."""
    said, infos = words(language), all_settings()
    return tuple(
        Section(
            name=name,
            label=said(name.capitalize()),
            doc=said(field.description or ""),
            fields=tuple(_field(info, said) for info in infos if info.section == name),
        )
        for name, field in Config.model_fields.items()
    )


def _field(info: SettingInfo, said: Words) -> Field:
    doc = named(info.doc)
    # Who reads another language finds a setting by its English words too, which manuals and others use.
    english = [text for text in (info.label, doc) if said(text) != text]
    return Field(
        key=info.key,
        label=said(info.label),
        unit=said(info.unit),
        doc=said(doc),
        kind=info.form.kind,
        words=tuple(_word(info, word, said) for word in info.form.words),
        allowed=said(info.form.allowed),
        also=" ".join([*words_of_settings().get(info.key, ()), *english]),
        default=text_of(info, info.default),
        is_fixed=info.key == FOLDER,
    )


def _word(info: SettingInfo, word: Any, said: Words) -> Word:
    label = said(_YES_NO[word]) if isinstance(word, bool) else str(word)
    return Word(text=text_of(info, word), label=label)


def stamp(draft: Draft) -> str:
    """Return what changes whenever the page has to show something else of the draft."""
    content = [draft.dataset, draft.priority, draft.started_as, given(draft)]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:20]


def state(work: Workplace, draft: Draft) -> dict[str, Any]:
    """Return what a draft sets, as the fields and the JSON beside them show it."""
    values = given(draft)
    infos = {info.key: info for info in all_settings()}
    return {
        "id": draft.id,
        "stamp": stamp(draft),
        "dataset": draft.dataset,
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
    plan = answer.values or {}
    settings = mapping(plan, "settings")
    values = {
        **flatten(Config()),
        **given(draft),
        **{key: mapping(settings, key).get("value") for key in settings},
    }
    preset = _preset(plan)
    return {
        "stamp": stamp(draft),
        "error": worded(answer.error.removeprefix("error: "), said),
        "fields": {
            info.key: _in_force(
                info,
                {"value": values[info.key], **mapping(settings, info.key)},
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
        "said": list(_sentences(plan, said)),
        "memory": _memory(mapping(plan, "memory"), said) if plan else None,
    }


def _in_force(
    info: SettingInfo, row: Values, *, preset: Resolved | None, said: Words
) -> dict[str, str]:
    """Return the value in force, its layer and that in words, why, and what it were without the draft's own."""
    origin = str(row.get("origin", _DEFAULT))
    found = {
        "text": text_of(info, row["value"]),
        "layer": origin,
        "from": said(_FROM[origin]) if origin in _FROM else said("from {}", origin),
        "reason": worded(str(row.get("reason") or ""), said),
        "preset": text_of(info, info.default),
        "preset_from": said(_DEFAULT),
    }
    if preset is not None and info.key != CONCEPT:  # which is above its presets
        found["preset"] = text_of(info, flatten(preset.config)[info.key])
        found["preset_from"] = said.message(preset.origins[info.key].layer)
    return found


def _preset(plan: Values) -> Resolved | None:
    """Return the layers below what the draft sets; None where the plan does not say which they are."""
    priority = next((name for name in PRIORITIES if name == plan.get("priority")), None)
    if priority is None:
        return None
    chosen = mapping(mapping(plan, "settings"), CONCEPT).get("value")
    concept = {CONCEPT: chosen} if isinstance(chosen, str) else {}
    try:
        return resolve(
            AskedFor(overrides=concept),
            family=str(plan.get("family")),
            tier=str(plan.get("tier")),
            priority=priority,
        )
    except (RequestError, KeyError):
        return None


def _sentences(plan: Values, said: Words) -> Iterator[str]:
    """Yield what is trained, for how long, and what the plan warns of."""
    if not plan:
        return
    time = mapping(plan, "time")
    what = (plan.get("base"), plan.get("preset"), plan.get("priority"), time.get("steps"))
    pair = [value for value in sequence(time, "run_s") if isinstance(value, int | float)]
    if len(pair) == 2:
        low, high = map(duration_text, pair)
        yield said("{}, preset {}, {}: {} steps, about {} to {}.", *what, low, high)
    else:
        yield said("{}, preset {}, {}: {} steps.", *what)
    for row in sequence(plan, "remarks"):
        if isinstance(row, dict):
            found, advice = (worded(str(row.get(key, "")), said) for key in ("what", "advice"))
            yield f"{found}: {advice}."


def _memory(memory: Values, said: Words) -> dict[str, Any]:
    """Return the bar: its pieces and the limit as shares of its length."""
    peak, limit = number(memory, "peak_bytes"), number(memory, "limit_bytes")
    known = math.isfinite(limit)
    length = max(peak, limit if known else 0.0) * _ROOM or 1.0
    return {
        "said": said.message(fit_sentence(memory)),
        "fits": memory.get("fits") is not False,
        "parts": [
            {"css": part.css, "text": said.message(part.text), "share": part.size_bytes / length}
            for part in memory_parts(sequence(memory, "items"))
        ],
        "limit": limit / length if known else None,
    }


def refusal(error: LoraTrainError, said: Words) -> dict[str, str]:
    """Return a refusal as the script takes it."""
    return {"error": worded(str(error), said)}

"""The page of all settings as plain values: the form, a draft in it, and what the plan makes of it.

Inputs: the settings model, a draft, the JSON of `lora-train plan --json`. Outputs: JSON for
assets/expert*.js. Texts of values are those of expert_text.py, so that the script converts nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.wording import duration_text
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import SettingInfo, all_settings, flatten
from lora_trainer.config.layers import CONCEPT, AskedFor, Resolved, resolve
from lora_trainer.config.running import Config
from lora_trainer.importing.words import words_of_settings
from lora_trainer.reporting.history import mapping, number, sequence

from . import setting_presets
from .drafts import Draft
from .expert_edit import FOLDER, as_json, given
from .expert_text import text_of
from .launch import Answer
from .markup import named
from .plan_view import fit_sentence, memory_parts
from .workplace import Workplace

Values = Mapping[str, Any]

_ORIGINS = {"command line": "you"}
_YES_NO = {True: "yes", False: "no"}
# How much longer the bar is than the larger of peak and limit.
_ROOM = 1.04


def form() -> dict[str, Any]:
    """Return the form: sections with their settings, each with all that draws its field."""
    infos = all_settings()
    return {
        "sections": [
            {
                "name": name,
                "label": name.capitalize(),
                "doc": field.description,
                "settings": [_field(info) for info in infos if info.section == name],
            }
            for name, field in Config.model_fields.items()
        ]
    }


def _field(info: SettingInfo) -> dict[str, Any]:
    return {
        "key": info.key,
        "label": info.label,
        "unit": info.unit,
        "doc": named(info.doc),
        "kind": info.form.kind,
        "words": [
            {"text": text_of(info, word), "label": _YES_NO.get(word, str(word))}
            if isinstance(word, bool)
            else {"text": text_of(info, word), "label": word}
            for word in info.form.words
        ],
        "allowed": info.form.allowed,
        "also": " ".join(words_of_settings().get(info.key, ())),
        "default": text_of(info, info.default),
        "fixed": info.key == FOLDER,
    }


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
        "presets": setting_presets.names(work),
    }


def planned(draft: Draft, answer: Answer) -> dict[str, Any]:
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
        "error": named(answer.error.removeprefix("error: ")),
        "fields": {
            info.key: _in_force(
                info, mapping(settings, info.key), preset, fallback=values[info.key]
            )
            for info in all_settings()
        },
        "unused": {
            info.key: named(reason) for info in all_settings() if (reason := info.unused(values))
        },
        "blamed": [info.key for info in all_settings() if f"{info.key}=" in answer.error],
        "said": [named(sentence) for sentence in _sentences(plan)],
        "memory": _memory(mapping(plan, "memory")) if plan else None,
    }


def _in_force(
    info: SettingInfo, row: Values, preset: Resolved | None, *, fallback: Any
) -> dict[str, str]:
    found = {
        "text": text_of(info, row.get("value", fallback)),
        "from": _origin(str(row.get("origin", "default"))),
        "reason": named(str(row.get("reason") or "")),
        "preset": text_of(info, info.default),
        "preset_from": "default",
    }
    if preset is not None and info.key != CONCEPT:  # which is above its presets
        found["preset"] = text_of(info, flatten(preset.config)[info.key])
        found["preset_from"] = preset.origins[info.key].layer
    return found


def _origin(layer: str) -> str:
    return _ORIGINS.get(layer, layer)


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


def _sentences(plan: Values) -> Iterator[str]:
    """Yield what is trained, for how long, and what the plan warns of."""
    if not plan:
        return
    time = mapping(plan, "time")
    preset = f"{plan.get('base')}, preset {plan.get('preset')}, {plan.get('priority')}"
    length = f"{time.get('steps')} steps"
    pair = [value for value in sequence(time, "run_s") if isinstance(value, int | float)]
    if len(pair) == 2:
        low, high = map(duration_text, pair)
        length += f", about {low} to {high}"
    yield f"{preset}: {length}."
    for row in sequence(plan, "remarks"):
        if isinstance(row, dict):
            yield f"{row.get('what', '')}: {row.get('advice', '')}."


def _memory(memory: Values) -> dict[str, Any]:
    """Return the bar: its pieces and the limit as shares of its length."""
    peak, limit = number(memory, "peak_bytes"), number(memory, "limit_bytes")
    known = math.isfinite(limit)
    length = max(peak, limit if known else 0.0) * _ROOM or 1.0
    return {
        "said": fit_sentence(memory),
        "fits": memory.get("fits") is not False,
        "parts": [
            {"css": part.css, "text": part.text, "share": part.size_bytes / length}
            for part in memory_parts(sequence(memory, "items"))
        ],
        "limit": limit / length if known else None,
    }


def refusal(error: LoraTrainError) -> dict[str, str]:
    """Return a refusal as the script takes it."""
    return {"error": named(str(error))}

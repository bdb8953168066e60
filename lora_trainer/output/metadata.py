"""What the header of an exported file tells: keys that A1111, Forge, ComfyUI and browsers read.

Input is an ExportInfo of plain values, output a mapping of strings: `ss_*` (kohya's names),
`modelspec.*` (ModelSpec 1.0.1) and `lora_train.*` (our version and the resolved settings). Files
are shared, so folders are reduced to names, and paths, tokens and machine settings left out.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import fields, replace
from datetime import UTC, datetime
from typing import Any

from lora_trainer import __version__
from lora_trainer.families.base import Prediction
from lora_trainer.output.export_info import ExportInfo, SubsetSummary
from lora_trainer.output.privacy import public_source, public_text
from lora_trainer.output.training_metadata import training_metadata

__all__ = ["ExportInfo", "SubsetSummary", "metadata", "usage_hint"]

MACHINE_SETTINGS = ("output.folder", "data.cache_dir")
"""Settings that say where things lie on this machine and nothing about the result."""

_PREDICTIONS: Mapping[Prediction, str] = {
    "epsilon": "epsilon",
    "v_prediction": "v",
    "flow": "flow",
}
_SOURCES = ("base.model", "base.vae", "base.companion", "base.assistant", "train.init_from")
"""Settings that name a model: a Hub id is for everybody, a folder on this machine is not."""


def metadata(info: ExportInfo) -> dict[str, str]:
    """Return all header entries but the hashes, which need the tensors; every value is text."""
    public: ExportInfo = _public(replace(info, settings=_without_folders(info.settings)))
    values = {
        **training_metadata(public),
        **_modelspec(public),
        **_own(public),
    }
    return {
        key: value if isinstance(value, str) else str(value)
        for key, value in sorted(values.items())
    }


def _modelspec(info: ExportInfo) -> dict[str, Any]:
    side, settings = info.settings["data.resolution"], info.settings
    low, high = settings["objective.min_timestep"], settings["objective.max_timestep"]
    required = {
        "sai_model_spec": "1.0.1",
        "architecture": info.architecture,
        "implementation": "diffusers",
        "implementation_version": f"lora-train/{__version__}",
        "title": info.title,
        "resolution": f"{side}x{side}",
        "date": datetime.fromtimestamp(info.saved_at_s, UTC).isoformat(timespec="seconds"),
        "prediction_type": _PREDICTIONS[info.prediction],
    }
    picture = info.thumbnail_jpeg
    optional = {
        "trigger_phrase": info.trigger,
        "usage_hint": usage_hint(info.trigger or ""),
        "description": info.description,
        "author": info.author,
        "license": info.license,
        "merged_from": ", ".join(info.merged_from),
        "timestep_range": f"{low},{high}" if (low, high) != (0, 999) else None,
        "thumbnail": f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        if picture
        else None,
    }
    present = {**required, **{key: value for key, value in optional.items() if value}}
    return {f"modelspec.{key}": value for key, value in present.items()}


def usage_hint(trigger: str) -> str:
    """Return the sentence that tells how a trigger is used, an empty one for no trigger."""
    return f"Put '{trigger}' into the prompt." if trigger else ""


def _own(info: ExportInfo) -> dict[str, Any]:
    settings = {key: value for key, value in info.settings.items() if key not in MACHINE_SETTINGS}
    return {
        "lora_train.version": __version__,
        "lora_train.settings": _json(settings),
        "lora_train.base_identity": info.base_identity,
    }


def _without_folders(settings: Mapping[str, Any]) -> dict[str, Any]:
    named = {key: public_source(settings[key]) for key in _SOURCES if settings.get(key)}
    return {**settings, **named}


def _public(value: Any) -> Any:
    """Clean every text inside `value`, however nested, so that no field can be forgotten."""
    if isinstance(value, str):
        return public_text(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_public(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, (ExportInfo, SubsetSummary)):
        return replace(
            value, **{field.name: _public(getattr(value, field.name)) for field in fields(value)}
        )
    return value


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=True)

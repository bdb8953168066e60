"""Write presets/schema.json anew after a change of `Config`: python scripts/write_schema.py."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.config import PRIORITIES
from lora_trainer.config.config import setting_schemas
from lora_trainer.config.layers import TIERS

SCHEMA = Path(__file__).resolve().parent.parent / "presets" / "schema.json"


def preset_schema() -> dict[str, Any]:
    """Return the JSON Schema of the files in `presets/`, made from `Config`."""
    settings = {"$ref": "#/$defs/settings"}
    reason = {"type": "string", "minLength": 1, "description": "why this pair cannot work"}
    unsupported = _object({"unsupported": reason}, required=["unsupported"])
    pairs = f"^({'|'.join(TIERS)})/({'|'.join(PRIORITIES)})$"
    parts = {
        "$schema": {"type": "string"},
        "family": {"type": "string", "description": "the model family, as the file is named"},
        "title": {"type": "string"},
        "base": {**settings, "description": "for every tier and priority of the family"},
        "tiers": _object(dict.fromkeys(TIERS, settings), required=list(TIERS)),
        "priorities": _object(dict.fromkeys(PRIORITIES, settings), required=list(PRIORITIES)),
        "cells": {
            "type": "object",
            "patternProperties": {pairs: {"anyOf": [settings, unsupported]}},
            "additionalProperties": False,
        },
    }
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Presets of one model family; later wins: base, tier, priority, cell",
        **_object(parts, required=[name for name in parts if name not in ("$schema", "cells")]),
        "$defs": {"settings": _object(setting_schemas(), required=[])},
    }


def _object(properties: Mapping[str, Any], *, required: list[str]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": dict(properties),
        "required": required,
        "additionalProperties": False,
    }


if __name__ == "__main__":
    write_atomic(SCHEMA, json_bytes(preset_schema()))
    print(f"wrote {SCHEMA}")

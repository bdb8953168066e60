"""Write presets/schema.json anew after a change of `Config`: python scripts/write_schema.py."""

from __future__ import annotations

from pathlib import Path

from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.config.layers import preset_schema

SCHEMA = Path(__file__).resolve().parent.parent / "presets" / "schema.json"

if __name__ == "__main__":
    write_atomic(SCHEMA, json_bytes(preset_schema()))
    print(f"wrote {SCHEMA}")

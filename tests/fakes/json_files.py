"""Changing the JSON files of a base, for tests of what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON object; None removes a key."""
    found = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    kept = {key: value for key, value in found.items() if value is not None}
    file.write_text(json.dumps(kept), encoding="utf-8")

"""The priorities of presets: speed, balanced or quality."""

from __future__ import annotations

from typing import Literal, get_args

Priority = Literal["speed", "balanced", "quality"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)

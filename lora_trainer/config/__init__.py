"""Every setting: declared once, layered with origins, built into one typed value."""

from typing import Literal, get_args

# Words of the command line, which `--help` shows without importing pydantic.
Priority = Literal["speed", "balanced", "quality"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Concept = Literal["any", "person", "style", "object"]

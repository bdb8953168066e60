"""What a program may do with the interface instead of a browser: Gradio's API, and tools for assistants."""

from typing import Literal

Tools = Literal["off", "read", "write"]
"""Which tools assistants get: none, those that change nothing, all."""

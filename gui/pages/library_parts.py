"""What the tabs of the page of one LoRA have in common.

A part says which of its widgets are filled when a file is opened, and with what.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..lora_files import Header, LoraFile


@dataclass(frozen=True, kw_only=True)
class LibraryTab:
    """A tab: `opened` gives the values of `outputs` for a file."""

    outputs: Sequence[Any]
    opened: Callable[[LoraFile, Header], Sequence[Any]]

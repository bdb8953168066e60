"""The options that the handlers of the pages share: none of them is an address for programs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRIVATE: Mapping[str, Any] = {"api_visibility": "private"}
QUIET: Mapping[str, Any] = {**PRIVATE, "show_progress": "hidden", "concurrency_limit": None}
"""For handlers that answer at once: no spinner, and none waits for another one."""

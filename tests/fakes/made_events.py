"""Events for tests that care for some fields only; the others are as in a row that does not have them."""

from __future__ import annotations

from typing import Any

from lora_trainer.common.event_kinds import Event, event_of_row


def made(kind: str, **fields: Any) -> Event:
    """Return an event of a kind from the fields of its row."""
    event = event_of_row({"event": kind, "step": 0, **fields})
    assert event is not None
    return event

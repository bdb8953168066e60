"""What pages of Gradio ask of share/: the sign-in to the Hub."""

from __future__ import annotations

from typing import Any

from .. import bases
from ..posted import Posted


def hub_sign_in(posted: Posted) -> dict[str, Any]:
    """Keep the token that was typed into share/sign_in.js, and return whose it is."""
    return {"name": bases.sign_in(posted.text("token", at_most=300))}

"""What a script sends to name a LoRA of a run, on the page LoRAs and in the dialogs that share one."""

from __future__ import annotations

from ..server.pages import Body, Text


class OfLora(Body):
    """What is asked of one LoRA, RUN/FILE."""

    file: Text

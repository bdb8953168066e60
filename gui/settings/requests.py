"""What the script of the page All settings asks; each names the draft that it shows."""

from __future__ import annotations

from typing import Annotated

from pydantic import StringConstraints

from ..server.pages import Body

Word = Annotated[str, StringConstraints(max_length=4096)]


class OfDraft(Body):
    """A draft: what the settings come to, or the command line of it."""

    draft: Word


class Look(OfDraft):
    """The draft as it is now; `stamp` is of what the page shows."""

    stamp: Word


class Reset(OfDraft):
    """One setting to be left to the preset."""

    key: Word


class Change(OfDraft):
    """What was typed for one setting."""

    key: Word
    text: str


class Replace(OfDraft):
    """A settings file in place of all settings; `stamp` is of those that it was made from, empty for any.

    `name` is of the file, which tells its kind; without one it is JSON of the page.
    """

    text: str
    name: Word = "settings.json"
    stamp: Word = ""


class Bring(Body):
    """A file that becomes a draft; `draft` is the one that the page shows, empty on other pages.

    The text of a LoRA is its header.
    """

    name: Word
    text: str
    draft: Word = ""


class Keep(OfDraft):
    """The changed settings to be saved under a name, `over` those that have it."""

    name: Word
    over: bool = False


class Load(OfDraft):
    """The settings that were saved under a name."""

    name: Word

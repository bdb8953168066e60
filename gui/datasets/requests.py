"""What scripts ask of a dataset folder; see `api`. Every folder and every name is checked again where it is used."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StringConstraints

from ..server.pages import Body
from .caption_job import MODELS
from .edit_many import MAX_TEXT_CHARACTERS, Joint, Kind
from .mask_edit import MAX_PNG_BYTES
from .open_dataset import Resolution

MAX_NAMES = 100_000
MAX_CHARACTERS = 10**6


def _known_model(name: str) -> str:
    if name not in MODELS:
        raise ValueError(f"no model is named {name!r}")
    return name


def _each_once(names: list[str]) -> list[str]:
    return list(dict.fromkeys(names))


Name = Annotated[str, StringConstraints(max_length=4096)]
Names = Annotated[list[Name], Field(max_length=MAX_NAMES), AfterValidator(_each_once)]
# A caption; the one who asks is told where it is too long to be saved.
Text = Annotated[str, StringConstraints(max_length=MAX_CHARACTERS)]
Words = Annotated[str, StringConstraints(max_length=MAX_TEXT_CHARACTERS)]


class Recent(Body):
    """The folders used lately."""


class Folder(Body):
    """Something about a whole folder."""

    folder: Name


class Undo(Folder):
    """The last step, only if it is called so where a step is named."""

    step: Annotated[str, StringConstraints(max_length=200)] = ""


class Look(Folder):
    """All cards; a name, and a trigger word and a size to judge the images for, are remembered."""

    name: Annotated[str, StringConstraints(max_length=100)] | None = None
    trigger: Annotated[str, StringConstraints(max_length=100)] | None = None
    resolution: Resolution | None = None


class Picture(Folder):
    """Something about one image."""

    file: Name


class Pictures(Folder):
    """Something about several images."""

    files: Names


class KeepOne(Folder):
    """Leave out all but one of the images that are alike, by the kind of finding."""

    kind: Literal["duplicate", "near-duplicate"]


class Save(Picture):
    """One caption; `seen` is the text that it replaces. Captions of one `group` are one step of undo."""

    text: Text
    seen: Text
    group: Annotated[str, StringConstraints(max_length=100)]


class Mask(Picture):
    """The mask of an image, painted as a PNG, a data URL; an empty one removes it."""

    mask: Annotated[str, StringConstraints(max_length=MAX_PNG_BYTES * 2)]


Share = Annotated[float, Field(ge=-1e-6, le=1 + 1e-6)]


class Crop(Picture):
    """The part of an image that is trained: left, top, right, bottom as shares of its sides; None for the whole."""

    box: tuple[Share, Share, Share, Share] | None


class Edit(Folder):
    """One edit of many captions."""

    kind: Kind
    text: Words
    replacement: Words
    joint: Joint


class Preview(Edit):
    """What it would change of these images."""

    files: Names


class Apply(Edit):
    """Make it as it was previewed: `seen` has for each image the text that it replaces."""

    seen: Annotated[dict[Name, Text], Field(max_length=MAX_NAMES)]


class Caption(Pictures):
    """Have a model write captions, of all images that have none where no files are named."""

    model: Annotated[Name, AfterValidator(_known_model)]
    prompt: Annotated[str, StringConstraints(max_length=2000)] = ""
    mode: Literal["missing", "replace"]

"""A dataset folder as it is at this moment: pictures, excluded ones, what is known and chosen.

Inputs: the folder, the workplace with its notes, drafts and answered checks. Output: a value that is
made anew for every request, so that it never lags behind the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from tokenizers import Tokenizer

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.caption_rules import read_tokenizer
from lora_trainer.dataset.captions import same_name, split_name
from lora_trainer.dataset.listing import EXCLUDED_FOLDER, ImageFile, Listing, list_dataset
from lora_trainer.reporting.history import mapping

from ..command_lines import Words, check_words
from ..drafts import Draft
from ..uploads import is_unnamed, is_uploaded
from ..workplace import Workplace
from . import check, notes
from .caption_edit import Edit, caption_changes
from .changes import Change
from .check import Check
from .notes import Notes
from .view import CheckedPictures, Reader

# Sizes that one can look at a dataset for, in pixels; empty: as the draft or the base has it.
Resolution = Literal["", "512", "768", "1024"]
RESOLUTIONS: tuple[Resolution, ...] = get_args(Resolution)
Counters = dict[Path, Tokenizer | None]


@dataclass(frozen=True, kw_only=True)
class OpenDataset:
    """A dataset folder as it is now."""

    work: Workplace
    root: Path
    notes: Notes
    draft: Draft
    settings: DataSettings
    listing: Listing
    excluded: tuple[ImageFile, ...]
    problem: str
    counters: Counters

    @property
    def pictures(self) -> tuple[ImageFile, ...]:
        return self.listing.pictures

    @property
    def extensions(self) -> Sequence[str]:
        return self.settings.caption_extensions

    @property
    def resolution(self) -> str:
        return self.notes.resolution if self.notes.resolution in RESOLUTIONS[1:] else ""

    @property
    def trigger(self) -> str:
        """The word that captions are searched for: as chosen on the page, else of the draft."""
        chosen = self.notes.trigger
        return self.settings.trigger or "" if chosen is None else chosen

    @property
    def name(self) -> str:
        """What the dataset is called: as somebody named it, else as its folder; an upload without a name is called
        by its trigger word, else as its first image."""
        if self._is_a_heap:
            return Path(self.pictures[0].name).stem
        is_nameless = is_uploaded(self.work, self.root) and is_unnamed(self.root.name)
        return self.notes.name or (self.trigger if is_nameless else "") or self.root.name

    @property
    def others(self) -> int:
        """How many images that can be read there are beside the one that the dataset is called after."""
        if not self._is_a_heap:
            return 0
        return sum(not self.reader.is_unreadable(each) for each in self.pictures[1:])

    @property
    def _is_a_heap(self) -> bool:
        """Whether loose images were uploaded, of which nobody has said what they are."""
        is_nameless = is_uploaded(self.work, self.root) and is_unnamed(self.root.name)
        is_told = bool(self.notes.name or self.trigger)
        return is_nameless and not is_told and bool(self.pictures)

    @property
    def trained_as(self) -> str:
        """What the size is without a choice of one."""
        own = self.draft.settings.get("data.resolution", "auto")
        return "the base\u2019s own size" if own == "auto" else f"{own} px, as in your draft"

    @cached_property
    def words(self) -> Words:
        draft = replace(self.draft, dataset=str(self.root))
        if self.resolution:
            draft = draft.with_setting("data.resolution", int(self.resolution))
        return check_words(draft, self.work)

    @cached_property
    def stamp(self) -> str:
        return check.stamp_of(self.pictures, self.words)

    @cached_property
    def known(self) -> Check:
        return check.known(self.work, self.root, stamp=self.stamp)

    @cached_property
    def reader(self) -> Reader:
        limit = mapping(self.known.values, "caption_limit")
        names = frozenset(picture.name for picture in self.pictures)
        return Reader(
            root=self.root,
            extensions=self.extensions,
            trigger=self.trigger,
            counter=self._counter(limit),
            room_tokens=int(limit.get("tokens", 0)),
            checked=CheckedPictures.of(self.known.values, names=names),
        )

    @property
    def away(self) -> Reader:
        return Reader(root=self.root, extensions=self.extensions)

    def picture(self, name: str) -> ImageFile:
        """Return a picture of the listing; raises RequestError for any other name."""
        return _by_name(self._by_name, name)

    def excluded_picture(self, name: str) -> ImageFile:
        """Return an excluded picture; raises RequestError for any other name."""
        return _by_name({picture.name: picture for picture in self.excluded}, name)

    def changes(self, edits: Sequence[Edit]) -> list[Change]:
        """Return what makes these edits; raises InputError."""
        return caption_changes(edits, root=self.root, extensions=self.extensions)

    def alike(self, picture: ImageFile) -> list[ImageFile]:
        """Return the pictures that may share a caption file with this one, itself among them."""
        stem = same_name(split_name(picture.name)[0])
        return [p for p in self.pictures if same_name(split_name(p.name)[0]) == stem]

    @cached_property
    def _by_name(self) -> Mapping[str, ImageFile]:
        return {picture.name: picture for picture in self.pictures}

    def _counter(self, limit: Mapping[str, Any]) -> Tokenizer | None:
        if "tokenizer" not in limit:
            return None
        folder = Path(str(limit["tokenizer"]))
        if folder not in self.counters:
            self.counters[folder] = read_tokenizer(folder)
        return self.counters[folder]


def _listed(root: Path, settings: DataSettings) -> tuple[Listing, str]:
    """Return the pictures of a folder, and why there are none."""
    try:
        return list_dataset(root, settings=settings), ""
    except InputError as error:
        return Listing(pictures=(), findings=()), str(error)


def _by_name(pictures: Mapping[str, ImageFile], name: str) -> ImageFile:
    found = pictures.get(name)
    if found is None:
        raise RequestError(
            f"the folder has no picture {name[:200]!r} now", fix="load the page again"
        )
    return found


def open_dataset(work: Workplace, root: Path, *, counters: Counters) -> OpenDataset:
    """Look at a folder; `counters` keeps the tokenizers that were read before."""
    draft = notes.draft_for(work, root)
    settings = build_config(draft.settings).data
    listing, problem = _listed(root, settings)
    return OpenDataset(
        work=work,
        root=root,
        notes=notes.read(work, root),
        draft=draft,
        settings=settings,
        listing=listing,
        excluded=_listed(root / EXCLUDED_FOLDER, settings)[0].pictures,
        problem=problem,
        counters=counters,
    )

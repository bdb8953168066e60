"""What scripts ask of a dataset folder, and change in it.

Inputs: the bodies of `requests`, which anybody may send: the folder is checked by the workplace, a picture is one of
its listing. Outputs: cards and history as plain values. All changes go through the journal of the folder.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.dataset.listing import ImageFile, list_dataset
from lora_trainer.reporting.history import number

from .. import jobs
from ..clock import day_text
from ..uploads import is_uploaded
from ..workplace import Workplace
from . import caption_job, check, crop_edit, exclusion, findings, mask_edit, notes, requests
from .caption_edit import Edit
from .edit_many import EditMany
from .journal import History, Journal, Outcome
from .name_captions import caption_from_names, own_description
from .open_dataset import Counters, OpenDataset, open_dataset
from .view import summary

MAX_CAPTION_CHARACTERS = 20_000
_BY_HAND = "type what is in the images, or go on: each is trained with the trigger word"
_SHOWN = 4  # images on the card of a folder
Json = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class DatasetApi:
    """Answers the scripts."""

    work: Workplace
    _counters: Counters = field(default_factory=dict)
    _finding: threading.Lock = field(default_factory=threading.Lock)

    def look(self, asked: requests.Look) -> Json:
        """Return all cards."""
        root = self.work.folder(asked.folder)
        noted = known = notes.opened(self.work, root)
        if asked.trigger is not None:
            noted = replace(noted, trigger=asked.trigger.strip(), resolution=asked.resolution or "")
        if asked.name is not None:
            noted = replace(noted, name=" ".join(asked.name.split()))
        if noted != known:
            notes.save(self.work, noted)
        return self._view(root)

    def recent(self, asked: requests.Recent) -> Json:
        """Return the folders used lately."""
        return {"recent": notes.recent(self.work)}

    def glance(self, asked: requests.Folder) -> Json:
        """Return what the card of a folder shows."""
        opened = self._open(asked)
        can_be_shown = [each for each in opened.pictures if not opened.reader.is_unreadable(each)]
        # Of ten thousand not the first four, which often are of one scene.
        step = max(1, len(can_be_shown) // _SHOWN)
        before = {
            each.name: here[0] for each in can_be_shown if (here := opened.reader.references(each))
        }
        shown = [each.name for each in can_be_shown[::step][:_SHOWN]]
        if before:  # of pairs both pictures, beside each other
            shown = [name for after in shown for name in (before.get(after, ""), after) if name]
        return {
            "name": opened.name,
            "others": opened.others,
            "uploaded": is_uploaded(self.work, opened.root),
            "images": len(can_be_shown),
            "are_pairs": bool(can_be_shown) and len(before) == len(can_be_shown),
            "without_caption": sum(opened.reader.lacks_caption(each) for each in opened.pictures),
            "shown": shown[:_SHOWN],
            "used": _day(opened.notes.opened_s),
        }

    def check(self, asked: requests.Folder) -> Json:
        """Run `lora-train check` where something has changed; the next look shows what it says."""
        opened = self._open(asked)
        if opened.pictures:
            check.run(self.work, opened.root, opened.words, stamp=opened.stamp)
        return {}

    def findings(self, asked: requests.Folder) -> tuple[float, list[Mapping[str, Any]]]:
        """Return how good the images are, 0 to 1 or NaN, and what is odd about them and their captions now."""
        opened = self._open(asked)
        return number(opened.known.values, "score"), findings.of_dataset(opened)

    def use_masks(self, asked: requests.Folder) -> Json:
        """Have the newest draft about the folder train with the masks that are there."""
        root = self.work.folder(asked.folder)
        self._follow_masks(root)
        return self._view(root)

    def save(self, asked: requests.Save) -> Json:
        """Write one caption; answers {saved} with the cards it changed, or {newer} with what stands in the file now."""
        root, journal = self._place(asked)
        text = asked.text
        if len(text) > MAX_CAPTION_CHARACTERS:
            raise RequestError(
                f"the caption has {len(text):,} characters, at most {MAX_CAPTION_CHARACTERS:,} are saved",
                fix="shorten it",
            )
        with journal.locked():
            opened = self._opened(root)
            picture = opened.picture(asked.file)
            caption = opened.reader.caption(picture)
            if caption.text not in (asked.seen, text):
                return {"newer": caption.text, "cards": [opened.reader.card(picture)]}
            edit = Edit(picture=picture, caption=caption, text=text)
            changes = opened.changes([edit])
            if changes:
                title = f"the caption of {picture.name}"
                outcome = journal.perform(title, changes, group=asked.group)
                if outcome.left:  # changed between the reading above and the writing
                    caption = self._opened(root).reader.caption(picture)
                    return {"newer": caption.text, "cards": []}
        opened = self._opened(root)
        cards = [opened.reader.card(other) for other in opened.alike(picture)]
        return {"saved": True, "cards": cards, **_steps(journal.history())}

    def preview(self, asked: requests.Preview) -> Json:
        """Return what an edit of many captions would change, and how many have already what it adds."""
        opened, edit = self._open(asked), _edit_many(asked)
        rows, have = [], 0
        places: set[tuple[str, str]] = set()
        for picture in map(opened.picture, asked.files):
            caption = opened.reader.caption(picture)
            place = (caption.file, picture.name if caption.place == "line" else "")
            after = edit.apply(caption.text)
            unreadable = opened.reader.is_unreadable(picture)
            if caption.locked or unreadable or place in places:
                continue
            places.add(place)
            if after == caption.text:
                have += edit.adds
                continue
            rows.append({"file": picture.name, "before": caption.text, "after": after})
        return {"rows": rows, "have": have, "title": edit.title()}

    def apply(self, asked: requests.Apply) -> Json:
        """Make an edit of many captions as it was previewed."""
        (root, journal), edit = self._place(asked), _edit_many(asked)
        with journal.locked():
            opened = self._opened(root)
            edits, left = [], []
            for name, before in asked.seen.items():
                picture = opened.picture(name)
                caption = opened.reader.caption(picture)
                if caption.text != before:
                    left.append(
                        f"{name} has another caption since the preview and is left as it is"
                    )
                    continue
                edits.append(Edit(picture=picture, caption=caption, text=edit.apply(before)))
            changes = opened.changes(edits)
            outcome = journal.perform(edit.title(), changes) if changes else None
        if edit.kind == "trigger" and _is_in_all(edit, self._opened(root)):
            step = outcome.step.id if outcome else ""
            notes.use_trigger(self.work, root, edit.text.strip(), step=step)
        return self._told(root, outcome, left)

    def undo(self, asked: requests.Undo, *, said: Callable[[str], str] = str) -> Json:
        """Take the last step back; raises RequestError where it is another one than was asked for.

        That is named as it was `said`, in the language of the reader.
        """
        _, journal = self._place(asked)
        if asked.step and said(_steps(journal.history())["undo"]) != asked.step:
            raise RequestError(
                "something else was changed since", fix="take it back on the page Datasets"
            )
        return self._turned(asked, back=True)

    def redo(self, asked: requests.Folder) -> Json:
        """Make the step that was taken back again."""
        return self._turned(asked, back=False)

    def _turned(self, asked: requests.Folder, *, back: bool) -> Json:
        root, journal = self._place(asked)
        before = self._masks(root)
        outcome = journal.undo() if back else journal.redo()
        if outcome is not None:
            notes.follow_trigger(self.work, root, step=outcome.step.id, back=back)
        if self._masks(root) != before:
            self._follow_masks(root)
        return self._told(root, outcome)

    def _masks(self, root: Path) -> int:
        settings = self._opened(root).settings.model_copy(update={"masks": "files"})
        with suppress(InputError):  # no pictures
            pictures = list_dataset(root, settings=settings).pictures
            return sum(picture.mask is not None for picture in pictures)
        return 0

    def exclude(self, asked: requests.Pictures) -> Json:
        """Move pictures into `_excluded/`."""
        return self._moved(asked, back=False)

    def keep_one(self, asked: requests.KeepOne) -> Json:
        """Move all but one of the pictures that are alike into `_excluded/`: the best of each stays."""
        extra = findings.extra_of(self._open(asked), asked.kind)
        return self.exclude(requests.Pictures(folder=asked.folder, files=extra))

    def put_back(self, asked: requests.Pictures) -> Json:
        """Move excluded pictures back."""
        return self._moved(asked, back=True)

    def closer(self, asked: requests.Picture) -> Json:
        """Return the mask of an image and what training sees of it."""
        opened = self._open(asked)
        picture = opened.picture(asked.file)
        bucket = str(opened.reader.card(picture).get("bucket", ""))
        return {
            **_mask_edit(opened, picture.name).shown(bucket=bucket),
            "used": opened.settings.masks,
        }

    def subject(self, asked: requests.Picture) -> Json:
        """Return a mask of what an image shows; nothing is written until it is saved."""
        opened = self._open(asked)
        with self._finding:  # a model each: one after another
            return {"subject": _mask_edit(opened, opened.picture(asked.file).name).subject()}

    def mask(self, asked: requests.Mask) -> Json:
        """Write the mask of an image; the newest draft of the folder trains with masks from then on."""
        root, journal = self._place(asked)
        with journal.locked():
            opened = self._opened(root)
            picture = opened.picture(asked.file)
            changes = _mask_edit(opened, picture.name).changes(asked.mask)
            outcome = journal.perform(f"the mask of {picture.name}", changes) if changes else None
        self._follow_masks(root)
        return self._told(root, outcome)

    def crop(self, asked: requests.Crop) -> Json:
        """Write which part of an image is trained."""
        root, journal = self._place(asked)
        with journal.locked():
            opened = self._opened(root)
            picture = opened.picture(asked.file)
            changes = crop_edit.changes(
                root, picture, box=asked.box, settings=opened.settings, every=opened.pictures
            )
            outcome = journal.perform(f"the crop of {picture.name}", changes) if changes else None
        return self._told(root, outcome)

    def _follow_masks(self, root: Path) -> None:
        """Have the newest draft train with the masks that the folder has, if it has any."""
        follow = notes.use_masks if self._masks(root) else notes.drop_masks
        follow(self.work, root)

    def _moved(self, asked: requests.Pictures, *, back: bool) -> Json:
        root, journal = self._place(asked)
        with journal.locked():
            opened = self._opened(root)
            find = opened.excluded_picture if back else opened.picture
            chosen = [find(name) for name in asked.files]
            act = exclusion.put_back if back else exclusion.exclude
            changes = act(
                chosen,
                every=opened.excluded if back else opened.pictures,
                root=opened.root,
                extensions=opened.extensions,
            )
            title = f"put {_named(chosen)} back" if back else f"exclude {_named(chosen)}"
            outcome = journal.perform(title, changes) if changes else None
        return self._told(root, outcome)

    def caption(self, asked: requests.Caption) -> Json:
        """Have a model write captions; where it cannot come, images without one get what they say of themselves."""
        opened = self._open(asked)
        files = [opened.picture(name).name for name in asked.files]
        if not files and caption_job.is_out_of_reach(asked.model):
            return self._captions_without_model(asked)
        job = caption_job.start(
            self.work,
            opened.root,
            model=asked.model,
            files=files,
            trigger=opened.reader.trigger,
            prompt=asked.prompt,
            replace=asked.mode == "replace",
        )
        return caption_job.state(job)

    def caption_names(self, asked: requests.Folder) -> Json:
        """Write captions without a model, from descriptions and names, of images that have none."""
        told, found = self._write_without_model(asked, with_names=True)
        if found.same:
            raise RequestError(
                f"all that the names say is \u201c{found.same}\u201d, the same of each image",
                fix=_BY_HAND,
            )
        if not found.written:
            raise RequestError(
                "the names of these files and folders say nothing in words",
                fix=_BY_HAND,
            )
        return told

    def _captions_without_model(self, asked: requests.Caption) -> Json:
        """Write what the images say of themselves; words of names are only offered, as they may say little."""
        told, found = self._write_without_model(asked, with_names=False)
        why = caption_job.why_out_of_reach(asked.model)
        done = f"{found.written} captions were taken from the images' own descriptions."
        if found.written == 1:
            done = "1 caption was taken from the image's own description."
        left = found.left
        rest = (
            f"{left} images have no caption: "
            "type what is in them, or go on, and they are trained with the trigger word."
        )
        if left == 1:
            rest = "1 image has no caption: type what is in it, or go on, and it is trained with the trigger word."
        if same := found.same:
            rest = (
                f"All that the names say is \u201c{same}\u201d, the same of each image, so no caption was written: "
                "type what differs in them, or go on, and they are trained with the trigger word."
            )
        offer = f"The names of {found.named} of them have words, which can be taken as captions."
        if found.named == 1:
            offer = "The name of 1 of them has words, which can be taken as its caption."
        said = [
            why,
            *([done] if found.written else ()),
            *([rest] if left else ()),
            *([offer] if found.named else ()),
        ]
        return {**told, "instead": said, "written": found.written, "named": found.named}

    def _write_without_model(
        self, asked: requests.Folder, *, with_names: bool
    ) -> tuple[Json, _Found]:
        """Write captions that the images have in them, and with `with_names` else words of their names.

        A text of names that is the same for all images tells none from another; it is returned and not written.
        """
        root, journal = self._place(asked)
        with journal.locked():
            opened = self._opened(root)
            own, names, left, outcome = list[Edit](), list[Edit](), 0, None
            for picture in opened.pictures:
                caption = opened.reader.caption(picture)
                if caption.text.strip() or caption.locked or opened.reader.is_unreadable(picture):
                    continue
                if text := own_description(picture):
                    own.append(Edit(picture=picture, caption=caption, text=text))
                elif text := caption_from_names(picture.name, root=root):
                    names.append(Edit(picture=picture, caption=caption, text=text))
                else:
                    left += 1
            texts = {edit.text for edit in (*own, *names)}
            same = texts.pop() if len(own) + len(names) > 1 and len(texts) == 1 else ""
            edits = [] if same else [*own, *(names if with_names else ())]
            if changes := opened.changes(edits):
                title = "captions from names" if with_names else "captions from the images"
                outcome = journal.perform(title, changes)
        found = _Found(
            written=len(edits),
            left=left + len(own) + len(names) - len(edits),
            named=0 if same or with_names else len(names),
            same=same,
        )
        return self._told(root, outcome), found

    def caption_state(self, asked: requests.Folder) -> Json:
        """Return how far the newest captioning of the folder is."""
        root = self.work.folder(asked.folder)
        job = caption_job.of_folder(self.work, root)
        return {
            **caption_job.state(job),
            "models": caption_job.models(),
            "suggested": caption_job.suggested(notes.draft_for(self.work, root).base),
        }

    def caption_stop(self, asked: requests.Folder) -> Json:
        """End it after the image it is at."""
        job = caption_job.of_folder(self.work, self.work.folder(asked.folder))
        if job is not None:
            jobs.stop(job)
        return caption_job.state(job)

    def caption_undo(self, asked: requests.Folder) -> Json:
        """Take back what the last captioning wrote."""
        root, journal = self._place(asked)
        with journal.locked():
            said = caption_job.take_back(root)
        return {**self._view(root), "step": said, "left": []}

    def _told(self, root: Path, outcome: Outcome | None, left: Sequence[str] = ()) -> Json:
        untouched = [*left, *(outcome.left if outcome else ())]
        return {
            **self._view(root),
            "step": outcome.step.title if outcome else "",
            "left": untouched,
        }

    def _view(self, root: Path) -> Json:
        history = self._journal(root).history()  # first: it may finish what was cut short
        opened = self._opened(root)
        reader = opened.reader
        return {
            "folder": str(root),
            "name": opened.name,
            "others": opened.others,
            "uploaded": is_uploaded(self.work, root),
            "pictures": [reader.card(picture) for picture in opened.pictures],
            "excluded": [opened.away.card(picture) for picture in opened.excluded],
            "problem": opened.problem,
            "check": {
                "fresh": opened.known.fresh or not opened.pictures,
                "error": opened.known.error,
                **summary(opened.known.values),
            },
            "trigger": reader.trigger,
            "resolution": opened.resolution,
            "trained_as": opened.trained_as,
            **_steps(history),
        }

    def _place(self, asked: requests.Folder) -> tuple[Path, Journal]:
        root = self.work.folder(asked.folder)
        return root, self._journal(root)

    def _journal(self, root: Path) -> Journal:
        return Journal(root=root, folder=self.work.own / "undo")

    def _open(self, asked: requests.Folder) -> OpenDataset:
        return self._opened(self.work.folder(asked.folder))

    def _opened(self, root: Path) -> OpenDataset:
        return open_dataset(self.work, root, counters=self._counters)


def _is_in_all(edit: EditMany, opened: OpenDataset) -> bool:
    """Whether the captions of all images that can be read are as an edit makes them."""
    reader = opened.reader
    readable = (each for each in opened.pictures if not reader.is_unreadable(each))
    texts = (reader.caption(each).text for each in readable)
    return all(edit.apply(text) == text for text in texts)


@dataclass(frozen=True, kw_only=True)
class _Found:
    """What images say without a model: how many captions were `written`, how many images are `left` without one.

    Of those `named` have words in their names. `same` is the text where it is one of all images.
    """

    written: int
    left: int
    named: int
    same: str


def _mask_edit(opened: OpenDataset, name: str) -> mask_edit.MaskEdit:
    """Find an image with its mask, also where the settings do not ask for masks yet."""
    opened.picture(name)  # raises RequestError for any other name
    settings = opened.settings.model_copy(update={"masks": "files"})
    pictures = list_dataset(opened.root, settings=settings).pictures
    picture = next(each for each in pictures if each.name == name)
    return mask_edit.MaskEdit(root=opened.root, picture=picture, settings=settings)


def _edit_many(asked: requests.Edit) -> EditMany:
    return EditMany(
        kind=asked.kind, text=asked.text, replacement=asked.replacement, joint=asked.joint
    )


def _steps(history: History) -> Json:
    return {
        "undo": history.done[-1].title if history.done else "",
        "redo": history.undone[-1].title if history.undone else "",
    }


def _day(time_s: float) -> str:
    return day_text(time_s) if time_s else ""


def _named(pictures: Sequence[ImageFile]) -> str:
    return pictures[0].name if len(pictures) == 1 else f"{len(pictures)} pictures"

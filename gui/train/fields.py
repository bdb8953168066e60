"""The fields of the page Train. Adding one takes its row in `FIELDS` and the German of its texts.

From a row derive what is drawn (fields.html), what the page's script reads and sends (fields.js), what a draft
keeps, and the words of the command line. Inputs: a draft, and a text that was typed. Outputs: the texts of the
fields, the draft with another one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.config import PRIORITIES
from lora_trainer.config.layers import CONCEPT

from .. import drafts, setting_edit, slider_words, variants
from ..drafts import Draft
from ..setting_text import text_of

Kind = Literal["text", "number", "lines", "switch", "cards", "choice", "folder", "base", "also"]
"""`text`, `lines` and `folder` are typed as they are; an empty one is left to lora-train."""
# Where on the page a field stands, in the order of page.html.
Part = Literal[
    "kind", "images", "words", "subject", "names", "base", "priority", "length", "size", "samples"
]
KIND, DATASET, PRIORITY, BASE = "kind", "dataset", "priority", setting_edit.BASE
SLIDER = "slider:"
"""Before an entry of `Draft.slider`."""
STEPS, PROMPTS, TRIGGER = "train.steps", "sampling.prompts", "data.trigger"
SIZE, RANK, RATE = "data.resolution", "adapter.rank", "optimizer.learning_rate"
ALSO = "also:"
"""Before the key of a setting: its further values."""


@dataclass(frozen=True, kw_only=True)
class Field:
    """A field of the page."""

    key: str
    """A setting; or what a draft keeps beside its settings: `kind`, `dataset`, `priority`, words of a slider."""
    label: str
    kind: Kind
    part: Part
    info: str = ""
    placeholder: str = ""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of `cards` and `choice`: each text with its label."""
    unset: str = ""
    """The text that leaves the field to lora-train, beside an empty one; `true` for a switch that is on by default."""
    is_planned: bool = False
    """Shows what the plan chose until somebody types something else."""
    rows: int = 4
    """Of `lines`: how many are seen."""
    not_of: str = ""
    """The kind of training that has no such field."""
    varies: bool = False
    """May have further values, each for a training of its own: a field of the kind `also` stands behind it."""

    @property
    def also(self) -> Field:
        """The field for the further values."""
        return Field(key=ALSO + self.key, label=self.label, kind="also", part=self.part)


_ROWS = (
    Field(
        key=KIND,
        label="What does it learn from?",
        kind="cards",
        part="kind",
        options={
            drafts.IMAGES: "Images of what it is to draw",
            drafts.SLIDER: "A slider, from words",
            drafts.PAIRS: "Before and after pairs",
        },
        unset=drafts.IMAGES,
    ),
    Field(
        key=SLIDER + slider_words.TARGET,
        label="What it acts on",
        kind="text",
        part="words",
        info="The images that change. Left empty, all images do.",
        placeholder="a person",
    ),
    Field(
        key=SLIDER + slider_words.MORE,
        label="More of",
        kind="text",
        part="words",
        info="What the same image shows at strength 1.",
        placeholder="an old person",
    ),
    Field(
        key=SLIDER + slider_words.LESS,
        label="Less of",
        kind="text",
        part="words",
        info="What it shows at strength \u22121.",
        placeholder="a young person",
    ),
    Field(
        key=SLIDER + slider_words.KEEP,
        label="What stays as it is (optional), one a line",
        kind="lines",
        part="words",
        rows=2,
        placeholder="a dog\na house",
        info="Images that look the same at each strength: an age slider for people leaves dogs and houses alone. "
        "Name nothing that is much like what it acts on, which would hold it back.",
    ),
    Field(
        key=DATASET,
        label="Folder with your images",
        kind="folder",
        part="images",
        info="Used where it is; captions that you change are saved beside the images.",
        placeholder="/path/to/a/folder/with/images",
    ),
    Field(
        key=BASE,
        label="Or another one",
        kind="base",
        part="base",
        info="A model that is on this machine, its folder or file, or a name on Hugging Face such as owner/name.",
        unset="auto",
    ),
    Field(
        key=CONCEPT,
        label="What do your images show?",
        kind="cards",
        part="subject",
        options={
            "person": "A person, animal or character",
            "style": "A style",
            "object": "An object",
            "any": "Not sure, or something else",
        },
        unset="any",
        not_of=f"{drafts.SLIDER} {drafts.PAIRS}",
    ),
    Field(
        key=PRIORITY,
        label="What matters most?",
        kind="choice",
        part="priority",
        options={
            "speed": "Speed: done soonest",
            "balanced": "Balanced",
            "quality": "Quality: takes longer",
        },
        unset="balanced",
    ),
    Field(
        key=TRIGGER,
        label="Trigger word (optional)",
        kind="text",
        part="names",
        not_of=f"{drafts.SLIDER} {drafts.PAIRS}",
        info="A rare word that calls it up later in a prompt. While it trains the word goes before each "
        "caption that lacks it, and into the samples' prompts; your files stay as they are.",
    ),
    Field(
        key=setting_edit.NAME,
        label="Name (optional)",
        kind="text",
        part="names",
        info="Of the training and its file.",
    ),
    Field(key=STEPS, label="Steps", kind="number", part="length", is_planned=True, varies=True),
    Field(
        key=SIZE,
        label="Size of the images, px",
        kind="number",
        part="size",
        is_planned=True,
    ),
    Field(
        key=RANK,
        label="Rank: how much it can learn",
        kind="number",
        part="size",
        is_planned=True,
        varies=True,
    ),
    Field(
        key=RATE,
        label="Learning rate",
        kind="number",
        part="size",
        is_planned=True,
        varies=True,
    ),
    Field(
        key="train.seed",
        label="Seed",
        kind="number",
        part="size",
        is_planned=True,
        varies=True,
    ),
    Field(
        key=PROMPTS,
        label="What the samples show, one a line",
        kind="lines",
        part="samples",
        info="While it trains, an image is drawn for each line, so that you see what it has learned.",
        placeholder="such as: a cat on a sofa, in the evening sun",
        rows=8,
        is_planned=True,
    ),
)
FIELDS = tuple(each for row in _ROWS for each in ((row, row.also) if row.varies else (row,)))
_OF_IMAGES = (CONCEPT, TRIGGER, PROMPTS)
_BY_KEY = {row.key: row for row in FIELDS}


def texts(draft: Draft) -> dict[str, str]:
    """Return the texts of the fields that the draft sets, by key."""
    own = {KIND: draft.kind, DATASET: draft.dataset, PRIORITY: draft.priority}
    words = {SLIDER + key: text for key, text in draft.slider.items()}
    given = {**own, **words, **setting_edit.given(draft)}
    shown = {row.key: as_text(row, given[row.key]) for row in FIELDS if row.key in given}
    return shown | {ALSO + key: variants.text_for(draft, key) for key in draft.also}


def as_text(row: Field, value: object) -> str:
    """Return the text that a field shows for a value."""
    if row.key in (KIND, DATASET, PRIORITY) or row.key.startswith(SLIDER):
        return str(value)
    info = setting_edit.setting(row.key)
    return str(value) if info.form.kind == "choice" else text_of(info, value)


def changed(draft: Draft, *, key: str, text: str) -> Draft:
    """Return the draft with the text that was typed into a field; an empty one leaves it to lora-train.

    Raises RequestError for what cannot be a value, and for a field that the page does not have.
    """
    row = _BY_KEY.get(key)
    if row is None:
        raise RequestError(f"the page Train has no field {key!r}", fix="load the page again")
    if key == DATASET:
        return replace(draft, dataset=text)
    if key == KIND:
        return of_kind(draft, text or row.unset)
    if key.startswith(SLIDER):
        words = {**draft.slider, key.removeprefix(SLIDER): text}
        return replace(draft, slider={name: said for name, said in words.items() if said.strip()})
    if key == PRIORITY:
        priority = text or row.unset
        if priority not in PRIORITIES:
            raise RequestError(
                f"{text[:100]!r} is not one of {', '.join(PRIORITIES)}", fix="choose one of these"
            )
        return replace(draft, priority=priority)
    if row.kind == "also":
        return variants.with_values(draft, key=key.removeprefix(ALSO), text=text)
    text = text if row.kind == "lines" else text.strip()
    if text.strip() in ("", row.unset):
        return setting_edit.without(draft, key=key)
    return setting_edit.changed(draft, key=key, text=text)


def of_kind(draft: Draft, kind: str) -> Draft:
    """Return the draft as one of another kind, without what is only said of the other; raises RequestError.

    A slider has neither a subject nor a trigger word, and its samples are not those of images. An edit has neither of
    the first two: its instruction calls it up. What a file says of them that was brought stays, as the page says so.
    """
    if kind not in drafts.KINDS:
        raise RequestError(
            f"{kind[:100]!r} is not one of {', '.join(drafts.KINDS)}", fix="choose one of these"
        )
    if drafts.SLIDER in (kind, draft.kind) and kind != draft.kind:
        for key in _OF_IMAGES:
            draft = setting_edit.without(draft, key=key)
    if kind == drafts.PAIRS != draft.kind and not draft.brought:
        for key in (CONCEPT, TRIGGER):
            draft = setting_edit.without(draft, key=key)
    return replace(draft, kind=kind)


def label(key: str) -> str:
    """Return the label of the field of a setting."""
    return _BY_KEY[key].label


def planned() -> Iterator[Field]:
    """Yield the fields that the plan fills in."""
    return (row for row in FIELDS if row.is_planned)


def of_try_out(draft: Draft) -> tuple[str, ...]:
    """Return the settings that somebody chose for a try-out and no base for other programs is trained well with.

    What a file says was not chosen for a try-out.
    """
    return () if draft.brought else (STEPS, SIZE)


def on_base(draft: Draft, base: str) -> Draft:
    """Return the draft of a try-out on a base for other programs."""
    for key in of_try_out(draft):
        draft = draft.without_setting(key)
    return replace(draft, base=base)

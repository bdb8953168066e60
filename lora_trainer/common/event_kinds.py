"""Every kind of event, one class each: what it holds in a program, and as a row of events.jsonl.

The fields stand in the order of the row. A class has no default for what every event of its kind says, so that whoever
emits one says it; a row of an older release or of a damaged file may lack it, and `event_of_row` reads that as "not
known": NaN for a figure, 0 for a count, nothing for a text or a list.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, get_type_hints

from lora_trainer.common.records import as_json, figure, is_step, reader_of

Severity = Literal["note", "warning", "error"]
# Most severe first.
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")

# Fields that a row has only where they are not the default, which stands here.
_RARE: Mapping[str, Mapping[str, object]] = {"sample": {"asked": False}, "change": {"step": None}}


@dataclass(frozen=True, kw_only=True, slots=True)
class Event:
    """Something that happened; the classes below say what."""

    kind: ClassVar[str] = "event"
    """Its name in a row."""
    time_s: float = math.nan
    """Unix time at which it was emitted; the stream says it."""

    @property
    def fields(self) -> dict[str, Any]:
        """The values of the row as plain JSON, without kind and time; a number that is not finite is None."""
        values = ((name, getattr(self, name)) for name in _NAMES[type(self)])
        rare = _RARE.get(self.kind, {})
        return {
            name: as_json(value)
            for name, value in values
            if name not in rare or value != rare[name]
        }

    @property
    def text_values(self) -> dict[str, str]:
        """Those of its values that are texts."""
        values = ((name, getattr(self, name)) for name in _NAMES[type(self)])
        return {name: value for name, value in values if isinstance(value, str)}


# ---- any command


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem(Event):
    """Something was skipped, clamped, retried or wrong; problems.jsonl has these and nothing else."""

    kind: ClassVar = "problem"
    what: str
    fix: str
    """What the user can do."""
    severity: Severity
    file: str | None
    """The file it is about, relative to its folder."""
    code: str
    """A code of docs/faults.md, such as TRN-05; may be empty."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase(Event):
    """A part of the work began or has come further. It is told of and not recorded."""

    kind: ClassVar = "phase"
    phase: str
    """download, scan, plan, cache, load, base, train, sample, export, report; stop and quit when asked to end."""
    message: str
    done: int
    """Finished parts."""
    total: int
    """All parts; 0 where they cannot be counted."""


# ---- a training


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStarted(Event):
    """A run, or the rest of one that is resumed, begins."""

    kind: ClassVar = "run_started"
    name: str
    family: str
    base: str
    """As the user named it: a Hub id, a file or a folder."""
    steps: float
    """Steps of the whole run."""
    batch_size: float
    device: str
    tier: str
    """The preset's row for this machine's memory."""
    priority: str
    preset: str
    images: float
    """Images that are trained on."""
    validation_images: float
    regularisation_images: float
    resumed_from: int | None
    """The step that it goes on from; None for a new run."""
    every_steps: Mapping[str, int]
    """Steps between two rounds of each kind of event, `sample` and `validation`; 0: never."""
    planned_s: Mapping[str, float]
    """Predicted seconds of each part of the whole run."""
    planned_from: str
    """Where the prediction comes from, for people."""
    directions: float = 0
    """Of a slider from words, which has no images."""
    pairs: float = 0
    """Of a slider from images: the pairs of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumed(Event):
    """A run goes on from a saved state; stands before `run_started`."""

    kind: ClassVar = "resumed"
    step: int
    exactness: str
    """EXACT, SAME-STREAM or CHANGED."""
    differences: Sequence[str]
    """What is not as it was, a line each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cached(Event):
    """All that the run reads is in the cache."""

    kind: ClassVar = "cached"
    latents: float
    """Encoded now, as the two below."""
    texts: float
    masks: float
    found: float
    """Entries that were there already."""
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Step(Event):
    """One optimizer step is done. On a GPU its numbers are read some steps later."""

    kind: ClassVar = "step"
    step: int
    """Counts from 1."""
    images: int
    """Images trained on so far, each as often as it was."""
    data_wait_s: float
    """Time for which the step waited for its batch."""
    lr: float
    epoch: float
    latents: int
    """Elements of the batch's latents, by which a step's work is measured."""
    loss: float
    """NaN where it was not finite, as `grad_norm`."""
    grad_norm: float
    vram_bytes: int
    """The most that tensors have taken of the device so far."""
    vram_reserved_bytes: int
    """The most that the allocator has reserved for them so far."""
    vram_used_bytes: int
    """In use on the whole device now, by other programs too."""
    vram_now_bytes: int
    """In use by tensors now."""
    host_bytes: int
    """The process's resident memory now."""
    host_own_bytes: int
    """That without mapped files, which the system may drop."""
    seconds: float
    """From one report to the next, without samples, saves and validations."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation(Event):
    """The loss on held-out images was measured; step 0 is the untouched base."""

    kind: ClassVar = "validation"
    step: int
    loss: float
    by_timestep: Sequence[tuple[float, float]]
    """Pairs of timestep and loss."""
    images: float
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleFile:
    """One sample image."""

    prompt: str
    """The whole line, with its options."""
    seed: int | str
    file: str
    """Relative to the run folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Samples(Event):
    """Sample images were made; those of step 0 are the untouched base's."""

    kind: ClassVar = "sample"
    step: int
    images: Sequence[SampleFile]
    seconds: float
    asked: bool = False
    """Whether somebody asked for them, so that they say nothing of the next round."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview(Event):
    """A small quick image of the first prompt was drawn; that of step 0 is the untouched base's."""

    kind: ClassVar = "preview"
    step: int
    file: str
    """Relative to the run folder."""
    prompt: str
    seed: int | str
    drawn: str
    """`real`, decoded by the base's VAE, or `approximate`."""
    denoising_steps: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved(Event):
    """A resume state was written, and a LoRA file beside it if `export` names one."""

    kind: ClassVar = "saved"
    step: int
    export: str | None
    state: str | None
    """The folder of the state in states/."""
    bytes: int
    """Size of the state."""
    seconds: float
    """From the copy of the weights to the last file."""
    blocked_s: float
    """Time of that for which the training stood still."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change(Event):
    """A setting or another value of the plan is another one from now on."""

    kind: ClassVar = "change"
    step: int | None = None
    """None: the step that was reported last."""
    key: str
    """The setting's key, or words for what is not a setting."""
    old: object
    new: object
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory(Event):
    """The device ran out of memory."""

    kind: ClassVar = "out_of_memory"
    images_at_once: float
    """Images of the pass that did not fit; 0 outside of a step."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Cores(Event):
    """How the threads that compute wait for each other has changed, because of other programs' load."""

    kind: ClassVar = "cores"
    taken: float
    """Processors that other programs use."""
    threads: float
    """Threads that compute."""
    waiting: str
    """`spinning`, or `asleep` where they give way."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BaseLosses(Event):
    """The losses that `Learned` is compared with."""

    kind: ClassVar = "base_losses"
    step: int
    seconds: float
    losses: Sequence[float]
    """Empty where one is not a number."""


# With a smaller change of its losses a run learns nothing.
LEAST_CHANGE = 3e-4


@dataclass(frozen=True, kw_only=True, slots=True)
class Learned(Event):
    """How far the losses of a few training images have moved, once in a run."""

    kind: ClassVar = "learned"
    step: int
    seconds: float
    change: float
    """The relative change of the loss at some noise level by the end of the run, extrapolated."""

    @property
    def learns(self) -> bool:
        """Whether the losses move at all; where they do not, the training is stopped."""
        return self.change >= LEAST_CHANGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured(Event):
    """Parts of the finished LoRA's score (docs/scores.md)."""

    kind: ClassVar = "measured"
    step: int
    parts: Mapping[str, float]
    """0 to 1 by name."""
    reach: Sequence[float] = ()
    """Of a slider: which share of the way to their goals the strengths 1 and -1 go."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLoss:
    """The losses of one image, each the mean over the same timesteps with the same noise."""

    image: str
    """Relative to the dataset's folder."""
    held_out: bool
    base: float
    """Without the LoRA."""
    lora: float
    """With it, and with the image's own caption."""
    other_caption: float
    """With it, and with the caption of another image."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageLosses(Event):
    """What the finished LoRA has learned of each image, of many images of some."""

    kind: ClassVar = "image_losses"
    step: int
    seconds: float
    levels: int
    """At how many noise levels each was predicted."""
    images: Sequence[ImageLoss]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished(Event):
    """The run has ended as it should, and its LoRA is written."""

    kind: ClassVar = "finished"
    step: int
    early: str
    """Why it ended before its last step; empty where it did not."""
    doubt: str
    """What speaks against the LoRA; empty where nothing does."""
    seconds: float
    """Of this session, from the first step."""
    export: str | None
    """The LoRA file."""
    validation_loss: float
    """The last one, NaN where nothing was validated; so is the base's."""
    base_validation_loss: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Stopped(Event):
    """The run has ended before its end: somebody stopped it, or an error did."""

    kind: ClassVar = "stopped"
    reason: str
    exit_code: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Uploaded(Event):
    """The LoRA was uploaded to the Hub."""

    kind: ClassVar = "uploaded"
    address: str
    private: bool


# ---- captions by a model


@dataclass(frozen=True, kw_only=True, slots=True)
class Downloading(Event):
    """A captioning model is downloaded."""

    kind: ClassVar = "downloading"
    model: str
    gigabytes: float | None
    """None where nobody knows."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captioning(Event):
    """The model is loaded and begins."""

    kind: ClassVar = "captioning"
    pictures: int
    """Images that get a caption."""
    had_one: int
    """Images that have a caption already."""
    model: str
    device: str
    precision: str = ""
    """How its weights are loaded; empty where that is not told."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Caption(Event):
    """One caption was written."""

    kind: ClassVar = "caption"
    index: int
    """Counts from 1 to `count`."""
    count: int
    image: str
    file: str
    """The file of the caption."""
    caption: str
    cut: bool
    """Whether the model was stopped by --max-tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Captioned(Event):
    """All is done."""

    kind: ClassVar = "captioned"
    written: int
    failed: int
    """Images without a caption."""
    had_one: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UnknownEvent(Event):
    """A row of a kind that this release does not have: of another release, or of a damaged file."""

    kind: ClassVar = "unknown"
    name: str
    """The kind that the row gives."""


_OF_A_RUN = (
    RunStarted,
    Resumed,
    Cached,
    Step,
    Validation,
    Samples,
    Preview,
    Saved,
    Change,
    OutOfMemory,
)
_OF_ITS_END = (BaseLosses, Learned, Measured, ImageLosses, Finished, Stopped, Uploaded, Cores)
_OF_CAPTIONS = (Downloading, Captioning, Caption, Captioned)
KINDS: Mapping[str, type[Event]] = {
    each.kind: each for each in (Problem, Phase, *_OF_A_RUN, *_OF_ITS_END, *_OF_CAPTIONS)
}
# A row of these without its step is of no use.
_NEED_THEIR_STEP = (Step, Validation, Samples, Preview, Saved, Resumed)
# The names of the fields of each class, without the time.
_NAMES: Mapping[type[Event], Sequence[str]] = {
    each: tuple(entry.name for entry in fields(each) if entry.name != "time_s")
    for each in (*KINDS.values(), UnknownEvent)
}


# ---- a row as an event


def event_of_row(row: Mapping[str, Any]) -> Event | None:
    """Return a row of events.jsonl or problems.jsonl as an event; None for one without a kind or its step.

    Values of another type count as missing, keys that no field has are passed over.
    """
    name = row.get("event")
    if not isinstance(name, str):
        return None
    time_s = figure(row.get("time"))
    kind = KINDS.get(name)
    if kind is None:
        return UnknownEvent(name=name, time_s=time_s)
    if issubclass(kind, _NEED_THEIR_STEP) and not is_step(row.get("step")):
        return None
    values = {key: read(row.get(key)) for key, read in _READERS[kind].items()}
    return kind(**values, time_s=time_s)


def _severity(value: Any) -> Severity:
    return value if value in SEVERITIES else "warning"


def _readers(kind: type[Event]) -> dict[str, Callable[[Any], Any]]:
    types = get_type_hints(kind)
    return {
        name: _severity if types[name] == Severity else reader_of(types[name])
        for name in _NAMES[kind]
    }


_READERS = {kind: _readers(kind) for kind in KINDS.values()}

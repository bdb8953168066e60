"""What is weak in a finished training, each in a plain sentence with the change that the next one should have.

Input: a run folder's history, with the losses of its images (the event `image_losses`) and its sample images. Output:
`Advice`, the most important first; none where nothing stands out. Each rule is a function with its thresholds beside
it; docs/experiments/scores.md says on which planted faults they were measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from lora_trainer.common.event_kinds import Change, Finished, ImageLoss, Validation
from lora_trainer.config.optimizers import row_of
from lora_trainer.config.prompt_line import without_strength
from lora_trainer.reporting.history import RunHistory, SampleImage

Kind = Literal[
    "too-fast",
    "too-slow",
    "too-long",
    "too-short",
    "by-heart",
    "caption",
    "image",
    "prompt",
    "alike",
]

RATE, STEPS, PROMPTS = "optimizer.learning_rate", "train.steps", "sampling.prompts"

# A loss this much below another differs from it by more than the noise of a few images at fixed timesteps.
CLEARLY = 0.02
# A gain below this is nothing that anybody sees in a picture, one from the second on is a LoRA that learned.
NOTHING, LEARNED = 0.02, 0.10
# The rate is changed by the factor between neighbours of the usual grid (1e-4, 3e-4, 1e-3), twice where all but
# nothing was learned.
RATE_FACTOR = 3.0
# A best step later than this share of the run is as good as its end: the steps after it cost little.
NEAR_THE_END = 0.8
# The last third of a run that still brings more than this share of the whole gain would bring more if it went on.
STILL_LEARNING, LONGER = 0.15, 1.5
# Held-out images gain less than this share of what trained images gain: the LoRA knows its images and not the subject.
BY_HEART = 0.25
# An image stands out where its gain is this many deviations below the others', and below this share of their gain.
DEVIATIONS, LEAST_SHARE = 4.0, 0.6
# Fewer trained images have no peers to be compared with.
FEWEST_PEERS = 4
# Or where so much more of its error is left than of the others'.
MUCH_MORE = 2.0
# The captions of others fit an image better than its own below this share; above it both are the same to the LoRA.
MISFIT = -0.005
# Captions differ by hundredths, which one noise level cannot tell from chance; the share was found with three.
FEWEST_LEVELS = 3
# The median absolute deviation of a normal distribution times this is its standard deviation.
MAD_TO_DEVIATION = 1.4826
# Most images that one sentence names.
MOST_NAMED = 6
# Sample images are compared in this size; two that differ by less than this share of the range look the same.
COMPARED_PX, LOOKS_SAME = 64, 0.02
# Images of different prompts that differ by less than this share of what the base's differed by are one image.
COLLAPSED = 0.25


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Something weak, and what to do about it."""

    kind: Kind
    what: str
    """What was found, as a sentence."""
    advice: str
    """What to do, as a sentence."""
    images: Sequence[str] = ()
    """The images of the dataset that it is about."""
    samples: Sequence[str] = ()
    """The sample images that it is about, relative to the run folder."""
    changes: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    """The settings of the next training that differ; none where the images or captions are to be changed."""
    label: str = ""
    """What a button says that makes the next training with these changes."""


def coach(history: RunHistory) -> list[Advice]:
    """Return what is weak in a finished run; nothing for one that has not finished."""
    if not isinstance(history.end, Finished):
        return []
    pace = next(_pace(history), None)
    # What is said of single images means nothing where the training as a whole went wrong.
    went_wrong = pace is not None and pace.kind in ("too-fast", "too-slow")
    found = [] if pace is None else [pace]
    if not went_wrong:
        found += [*_captions(history.images, levels=history.image_levels), *_prompts(history)]
    return [*found, *_alike(history)]


# ---- the training as a whole: rate and length, of which one is said


def _pace(history: RunHistory) -> Iterator[Advice]:
    """Yield what rate or length should have been, the surest first."""
    measured = [row for row in history.validations if math.isfinite(row.loss)]
    base = history.base_validation
    held_out = _gain(base.loss, measured[-1].loss) if base and len(measured) > 1 else math.nan
    trained = _median_gain(history.images)
    best = _gain(base.loss, min(row.loss for row in measured)) if base and measured else math.nan
    # One that was better than the base on its way was right, and went on for too long.
    if _went_back(history) or (held_out < -CLEARLY and best < CLEARLY):
        yield from _too_fast(history)
    known = [gain for gain in (held_out, best, trained) if math.isfinite(gain)]
    if known and max(known) < NOTHING:
        yield from _too_slow(history, gain=max(known))
    if base is not None and len(measured) > 2:
        yield from _too_long(base, measured)
    if trained >= LEARNED and held_out < BY_HEART * trained:
        yield from _by_heart(history, trained=trained, held_out=held_out)
    if base is not None and len(measured) > 2:
        yield from _too_short(base, measured)


def _gain(before: float, after: float) -> float:
    """Return the share of a loss that is gone, NaN where there was none."""
    return 1 - after / before if before > 0 else math.nan


def _median_gain(images: Sequence[ImageLoss]) -> float:
    gains = [_gain(image.base, image.lora) for image in images if not image.held_out]
    finite = [gain for gain in gains if math.isfinite(gain)]
    return median(finite) if finite else math.nan


def _went_back(history: RunHistory) -> bool:
    """Return whether the training became unstable and went back to a saved state."""
    changes = (mark.event for mark in history.marks)
    return any(
        isinstance(each, Change) and each.key == f"{RATE} factor" and each.reason.startswith("back")
        for each in changes
    )


def _too_fast(history: RunHistory) -> Iterator[Advice]:
    why = (
        "The training became unstable and had to go back. It learned too fast."
        if _went_back(history)
        else "The LoRA makes images that it never saw worse than the base does. It learned too fast."
    )
    yield _with_rate(
        history,
        kind="too-fast",
        what=why,
        advice="A lower learning rate changes the base more carefully.",
        factor=1 / RATE_FACTOR,
    )


def _too_slow(history: RunHistory, *, gain: float) -> Iterator[Advice]:
    yield _with_rate(
        history,
        kind="too-slow",
        what="The LoRA changes almost nothing: with and without it the base knows the images equally well.",
        advice="A higher learning rate lets it learn in the same number of steps.",
        factor=RATE_FACTOR if gain > NOTHING / RATE_FACTOR else RATE_FACTOR**2,
    )


def _with_rate(history: RunHistory, *, kind: Kind, what: str, advice: str, factor: float) -> Advice:
    """Return advice with the learning rate times a factor; without a button where the optimizer finds its rate."""
    rate, optimizer = history.run.settings.get(RATE), history.run.settings.get("optimizer.name")
    if not isinstance(rate, (int, float)) or row_of(str(optimizer)).rate is not None:
        return Advice(kind=kind, what=what, advice=advice)
    changed = float(f"{rate * factor:.2g}")
    return Advice(
        kind=kind,
        what=what,
        advice=advice,
        changes={RATE: changed},
        label=f"Train again with learning rate {changed:g}",
    )


def _too_long(base: Validation, measured: Sequence[Validation]) -> Iterator[Advice]:
    """Yield that the best step lies clearly before the end, by the losses of the validations."""
    last, best = measured[-1], min(measured, key=lambda row: row.loss)
    is_early = 0 < best.step <= NEAR_THE_END * last.step
    if (
        is_early
        and _gain(base.loss, best.loss) >= CLEARLY
        and last.loss > best.loss * (1 + CLEARLY)
    ):
        yield Advice(
            kind="too-long",
            what=f"It was best at step {best.step:,}; the {last.step - best.step:,} steps after that made it worse.",
            advice="A shorter training stops where it was best.",
            changes={STEPS: best.step},
            label=f"Train again with {best.step:,} steps",
        )


def _too_short(base: Validation, measured: Sequence[Validation]) -> Iterator[Advice]:
    """Yield that the last third of a run still brought much, by the losses of the validations."""
    last, best = measured[-1], min(measured, key=lambda row: row.loss)
    before = [row.loss for row in measured if row.step <= last.step * 2 / 3]
    whole, lately = base.loss - last.loss, min(before) - last.loss
    if best is last and whole >= CLEARLY * base.loss and lately > STILL_LEARNING * whole:
        longer = round(LONGER * last.step)
        yield Advice(
            kind="too-short",
            what="It was still learning when it ended.",
            advice="A longer training brings out more of the images.",
            changes={STEPS: longer},
            label=f"Train again with {longer:,} steps",
        )


def _by_heart(history: RunHistory, *, trained: float, held_out: float) -> Iterator[Advice]:
    steps = history.steps[-1].step if history.steps else 0
    shorter = max(1, round(steps / LONGER))
    yield Advice(
        kind="by-heart",
        what=f"It learned its images by heart: their error is {100 * trained:.0f} % lower, that of images it "
        f"never saw {100 * max(0.0, held_out):.0f} %.",
        advice="More different images help most; else a shorter training.",
        changes={STEPS: shorter},
        label=f"Train again with {shorter:,} steps",
    )


# ---- each image and its caption


def _captions(images: Sequence[ImageLoss], *, levels: int) -> Iterator[Advice]:
    """Yield images whose caption does not fit, and images of which little was learned."""
    trained = [image for image in images if not image.held_out and _is_known(image)]
    if len(trained) < FEWEST_PEERS or _median_gain(trained) < LEARNED:
        return
    # How much better an image is known by its own caption than by another one.
    own_better = {image.image: _gain(image.other_caption, image.lora) for image in trained}
    misfits: list[str] = []
    if levels >= FEWEST_LEVELS and median(own_better.values()) > CLEARLY:
        misfits = sorted(name for name, better in own_better.items() if better < MISFIT)
    if misfits:
        yield Advice(
            kind="caption",
            what=f"{_named(misfits)}: another image's caption fits better than its own."
            if len(misfits) == 1
            else f"{_named(misfits)}: other images' captions fit better than their own.",
            advice="Correct what the caption says that the image does not show.",
            images=misfits,
        )
    gains = {image.image: _gain(image.base, image.lora) for image in trained}
    left = {image.image: image.lora for image in trained}
    # Of what is left the orders of magnitude are compared: images differ by factors in how hard they are.
    known = {name: -math.log(loss) for name, loss in left.items()}
    unlearned = [
        name
        for name in gains
        if (name in _outliers(gains) and gains[name] < LEAST_SHARE * median(gains.values()))
        or (name in _outliers(known) and left[name] > MUCH_MORE * median(left.values()))
    ]
    unlearned = [name for name in unlearned if name not in misfits]
    if unlearned:
        yield Advice(
            kind="image",
            what=f"{_named(unlearned)}: little was learned of it, and much of the others."
            if len(unlearned) == 1
            else f"{_named(unlearned)}: little was learned of them, and much of the others.",
            advice="Look whether the caption says what is special about it, or leave it out if it does not belong.",
            images=unlearned,
        )


def _is_known(image: ImageLoss) -> bool:
    return all(0 < loss < math.inf for loss in (image.base, image.lora, image.other_caption))


def _outliers(values: Mapping[str, float]) -> list[str]:
    """Return the names of values far below the others, the lowest first."""
    usual = median(values.values())
    deviation = MAD_TO_DEVIATION * median(abs(value - usual) for value in values.values())
    low = [name for name, value in values.items() if value < usual - DEVIATIONS * deviation]
    return sorted(low, key=lambda name: values[name])


def _named(names: Sequence[str]) -> str:
    named = ", ".join(names[:MOST_NAMED])
    return named if len(names) <= MOST_NAMED else f"{named} and {len(names) - MOST_NAMED} more"


# ---- the prompts of the sample images


def _prompts(history: RunHistory) -> Iterator[Advice]:
    """Yield prompts whose samples are as without the LoRA, and samples that have become one image."""
    pairs = _first_and_last(history)
    loaded = {
        prompt: (first, last)
        for prompt, (before, after) in pairs.items()
        if (first := _pixels(history.folder / before.file)) is not None
        and (last := _pixels(history.folder / after.file)) is not None
    }
    if not loaded:
        return
    if len(loaded) > 1 and _spread([last for _, last in loaded.values()]) < COLLAPSED * _spread(
        [first for first, _ in loaded.values()]
    ):
        yield _with_rate(
            history,
            kind="prompt",
            what="All prompts give nearly the same image with the LoRA.",
            advice="A lower learning rate, or captions that differ more, keep them apart.",
            factor=1 / RATE_FACTOR,
        )
        return
    strengths = {prompt: without_strength(prompt)[1] for prompt in loaded}
    same = [
        prompt
        for prompt, (first, last) in loaded.items()
        if strengths[prompt] != 0 and _difference(first, last) < LOOKS_SAME  # 0 is the base itself
    ]
    if same and all(strength is not None for strength in strengths.values()):
        yield _with_rate(
            history,
            kind="prompt",
            what=f"The slider does not change the image of {_quoted(same)}.",
            advice="Train it longer or at a higher learning rate, or say what is more and less in clearer words.",
            factor=RATE_FACTOR,
        )
        return
    trigger = str(history.run.settings.get("data.trigger") or "")
    lines = [prompt for prompt in loaded if prompt in same and trigger not in prompt]
    if same:
        written = {
            PROMPTS: [f"{trigger}, {prompt}" if prompt in lines else prompt for prompt in loaded]
        }
        yield Advice(
            kind="prompt",
            what=f"The LoRA does not change the image of {_quoted(same)}.",
            advice=f"The prompt lacks the trigger word {trigger}."
            if trigger and lines
            else "Its words are not those of the captions.",
            samples=[pairs[prompt][1].file for prompt in same],
            changes=written if trigger and lines else {},
            label="Train again with the trigger word in the prompts" if trigger and lines else "",
        )


def _first_and_last(history: RunHistory) -> dict[str, tuple[SampleImage, SampleImage]]:
    """Return for each prompt the base's sample and the last one of the same seed."""
    first = {(image.prompt, image.seed): image for image in history.samples if image.step == 0}
    last = {(image.prompt, image.seed): image for image in history.samples if image.step}
    return {key[0]: (first[key], last[key]) for key in first if key in last}


def _pixels(file: Path) -> NDArray[np.float32] | None:
    """Return an image in a small size, float32 [side, side, 3] in 0 to 1; None for one that cannot be read."""
    try:
        with Image.open(file) as image:
            small = image.convert("RGB").resize((COMPARED_PX, COMPARED_PX), Image.Resampling.BOX)
    except (OSError, ValueError, Image.DecompressionBombError):
        return None
    return np.asarray(small, dtype=np.float32) / np.float32(255)


def _difference(one: NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """Return the mean difference of two images as a share of the range."""
    return float(np.abs(one - other).mean())


def _spread(images: Sequence[NDArray[np.float32]]) -> float:
    """Return the mean difference of the images among each other."""
    return float(np.mean([_difference(one, other) for one, other in combinations(images, 2)]))


def _quoted(prompts: Sequence[str]) -> str:
    shown = ", ".join(f"\u201c{prompt}\u201d" for prompt in prompts[:2])
    return shown if len(prompts) <= 2 else f"{shown} and {len(prompts) - 2} more"


# ---- what `check` found before the training


def _alike(history: RunHistory) -> Iterator[Advice]:
    """Yield images that look the same as others, which then count several times."""
    names = sorted(
        {
            found.file
            for found in history.run.dataset.findings
            if found.kind in ("duplicate", "near-duplicate") and found.file
        }
    )
    if names:
        yield Advice(
            kind="alike",
            what=f"{_named(names)}: the same as another image, so it counted twice."
            if len(names) == 1
            else f"{_named(names)}: the same as others, so they counted twice.",
            advice="Leave one of each out, and the others get their share.",
            images=names,
        )

"""The plan of a draft in words and as a bar: what is trained, how long it takes, whether it fits.

Input: the JSON of `lora-train plan --json`. Output: escaped markup. Nothing is computed here but
units and widths; what the plan does not say is not shown.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.wording import bytes_text
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.history import mapping, number, sequence

from .bases import EMBEDDED, RECOMMENDED, title
from .drafts import Draft
from .expert_edit import setting
from .expert_text import text_of
from .markup import button, icon, inline, join, setting_label, table, tag

Values = Mapping[str, Any]

_PARTS = (
    ("program", "program {size}", ("runtime", "library workspaces")),
    ("base", "base model {size}", ("base weights", "VAE weights", "text encoder weights")),
    (
        "adapter",
        "LoRA and optimizer {size}",
        ("adapter weights", "adapter gradients", "optimizer states"),
    ),
    ("margin", "room for others and holes {size}", ("desktop", "allocator slack")),
)
# A training that may take longer than a night is called slow.
SLOW_S = 8 * 3600.0
DAY_S = 24 * 3600.0
# The settings that the page Train fills in from the plan, by the names of assets/course.js.
COURSE = {
    "steps": "train.steps",
    "prompts": "sampling.prompts",
    "resolution": "data.resolution",
    "rank": "adapter.rank",
    "learning_rate": "optimizer.learning_rate",
}
# What the size that a base is trained in makes of the images, said where the base is chosen.
_OF_BASE = {
    "low-resolution": (
        "{count} of {images} images are smaller than this base is trained at and would be enlarged",
        "What is learned from them is soft: give larger ones, or choose a smaller size.",
    ),
    "blurred": (
        "{count} of {images} images look blurred at this size",
        "Leave them out, or choose a smaller size.",
    ),
}
_REST = ("work", "working memory {size}")
_PHASES = {
    "images": "preparing images",
    "texts": "preparing captions",
    "training": "training",
    "sampling": "drawing samples",
}


@dataclass(frozen=True, kw_only=True)
class MemoryPart:
    """One piece of the memory bar."""

    css: str
    label: str
    size_bytes: float

    @property
    def text(self) -> str:
        """What it is and its size."""
        return self.label.format(size=bytes_text(self.size_bytes))


def plan(values: Values) -> Html:
    """Return a plan: one line and what it warns of; numbers and decisions folded."""
    folded = tag(
        "details",
        tag("summary", "Memory, and every decision"),
        sentence(values),
        memory_bar(values),
        details(values),
    )
    return tag("div", line(values), remarks(values), folded, class_="plan")


def course(values: Values, draft: Draft, taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a plan fills in for assets/course.js: length, size, samples, which of them are the draft's own.

    `taken` are the typed texts that the draft has by now.
    """
    time, settings = mapping(values, "time"), mapping(values, "settings")
    steps = number(time, "steps")
    prompts = sequence(mapping(values, "sampling"), "prompts")
    return {
        "steps": int(steps),
        "epochs_per_step": number(time, "epochs") / steps,
        "images": int(number(time, "images")),
        "held_out": int(number(time, "held_out")),
        "prompts": text_of(setting(COURSE["prompts"]), prompts),
        "resolution": str(_value(settings, COURSE["resolution"])),
        "rank": str(_value(settings, COURSE["rank"])),
        "learning_rate": str(_value(settings, COURSE["learning_rate"])),
        "batch": _value(settings, "train.batch_size"),
        "taken": dict(taken),
        "own": [name for name, key in COURSE.items() if key in draft.settings],
    }


def course_without_plan(draft: Draft, taken: Mapping[str, Any]) -> dict[str, Any]:
    """Return as `course` what stands in the fields where there is no plan: what the draft sets, nothing else.

    What another base's plan had chosen would be read as chosen for this one.
    """
    own = {name: key for name, key in COURSE.items() if key in draft.settings}
    texts = {name: text_of(setting(key), draft.settings[key]) for name, key in own.items()}
    return {
        **dict.fromkeys(COURSE, ""),
        **texts,
        "epochs_per_step": 0,
        "images": 0,
        "held_out": 0,
        "batch": 0,
        "taken": dict(taken),
        "own": list(own),
    }


def line(values: Values) -> Html:
    """Return in a line how long it takes and whether it fits."""
    memory = mapping(values, "memory")
    fits = memory.get("fits") is not False
    return tag(
        "p",
        tag("span", icon("clock"), duration(values)),
        *(
            tag("span", "(", tag("span", str(text)), ")", class_="quiet")
            for text in sequence(mapping(values, "time"), "corrections")
        ),
        tag(
            "span",
            icon("circle-check" if fits else "circle-alert"),
            fit_sentence(memory),
            class_="fit" if fits else "fit error",
        ),
        class_="plan-line",
    )


def brief(values: Values) -> Html:
    """Return what Train starts, in the words beside it: how long, how much, how large, on what.

    A try-out comes with the one press that leads to a base of other programs.
    """
    settings = mapping(values, "settings")
    size_px, base = _value(settings, "data.resolution"), str(values.get("base"))
    parts = [duration(values), tag("span", f"images of {size_px} px")]
    parts.append(tag("span", f"rank {_value(settings, 'adapter.rank')}"))
    if base != EMBEDDED:
        return tag("p", *parts, tag("span", base, translate="no"), class_="brief")
    warning = tag(
        "p",
        icon("triangle-alert"),
        tag("b", f"Only a try-out, in {size_px} px: its file is not for ComfyUI."),
        button(f"Take {title(RECOMMENDED)}", attributes={"data-base": RECOMMENDED}),
        class_="try-out",
    )
    return join([warning, tag("p", *parts, class_="brief")])


def sentence(values: Values) -> Html:
    """Return in a sentence or two what will be trained, for how long, and where it comes from."""
    settings = mapping(values, "settings")
    base = f"{values.get('base')} ({values.get('family')}), {_value(settings, 'optimizer.name')}, "
    chosen = (
        f"rank {_value(settings, 'adapter.rank')}",
        f"{_value(settings, 'data.resolution')} px",
        f"{_value(settings, 'train.batch_size')} images a step",
        f"{mapping(values, 'time').get('steps', 'unknown')} steps",
    )
    preset = f"Preset {values.get('preset')}, {values.get('priority')}: "
    return tag(
        "p",
        tag("b", preset),
        tag("span", base, translate="no"),
        *(tag("span", text) + tag("span", ", ") for text in chosen[:-1]),
        tag("span", chosen[-1]),
        ".",
        class_="choice",
    )


def duration(values: Values) -> Html:
    """Return how long all of it takes, as far as that is known; its parts as a hint."""
    time = mapping(values, "time")
    pair = [value for value in sequence(time, "run_s") if isinstance(value, int | float)]
    if len(pair) != 2:
        return tag("b", str(time.get("note", "")))
    parts = ", ".join(mapping(time, "parts_s"))
    steps = time.get("steps")
    return tag(
        "span",
        tag(
            "b",
            _span(*pair, one="About {length}", two="About {low} to {high}"),
            class_="slow" if is_slow(pair) else None,
        ),
        f", {steps:,} steps" if isinstance(steps, int) else None,
        title=f"{time.get('note', '')}; counted are {parts}" if parts else None,
    )


def pace(values: Values) -> tuple[str, str]:
    """Return whether a plan is good, slow or bad for this machine, and that in a few words."""
    if mapping(values, "memory").get("fits") is False:
        return "bad", "Does not fit this machine"
    pair = [
        value
        for value in sequence(mapping(values, "time"), "run_s")
        if isinstance(value, int | float)
    ]
    if len(pair) != 2:
        return "good", "Fits this machine"
    said = _span(*pair, one="about {length}", two="about {low} to {high}")
    return ("slow", f"Fits, but slow: {said}") if is_slow(pair) else ("good", f"Fits: {said}")


def is_slow(run_s: Sequence[float]) -> bool:
    """Return whether a training of this range of seconds may take longer than a night."""
    return max(run_s) > SLOW_S


def _span(low_s: float, high_s: float, *, one: str, two: str) -> str:
    low, high = _coarse(low_s), _coarse(high_s)
    return two.format(low=low, high=high) if low != high else one.format(length=low)


def _coarse(seconds: float) -> str:
    """Return a duration as somebody says it who does not know it better."""
    if seconds < 90:
        return f"{max(10, 10 * round(seconds / 10))} s"
    if seconds < 5400:
        return f"{round(seconds / 60)} min"
    return f"{seconds / 3600:.1f} h" if seconds < 2 * DAY_S else f"{seconds / DAY_S:.0f} days"


def memory_bar(values: Values) -> Html:
    """Return the memory at the peak as a bar with the limit, and the same in words."""
    memory = mapping(values, "memory")
    peak, limit = number(memory, "peak_bytes"), number(memory, "limit_bytes")
    parts = list(memory_parts(sequence(memory, "items")))
    scale = max(peak, limit if math.isfinite(limit) else 0.0) * 1.04 or 1.0
    pieces = (
        tag("i", class_=part.css, style=f"width:{part.size_bytes / scale:.2%}", title=part.text)
        for part in parts
    )
    limit_line = (
        tag("b", class_="limit", style=f"left:{limit / scale:.2%}", title="the limit")
        if math.isfinite(limit)
        else None
    )
    said = fit_sentence(memory)
    return tag(
        "div",
        tag("div", *pieces, limit_line, class_="bar-of-parts", role="img", aria_label=said),
        tag(
            "p",
            *(tag("span", tag("i", class_=part.css), part.text) for part in parts),
            class_="legend",
        ),
        class_="memory",
    )


def details(values: Values) -> Html:
    """Return the memory by item, the disk, and what was decided with its reason."""
    disk = ", ".join(f"{name} {bytes_text(size)}" for name, size in mapping(values, "disk").items())
    return tag(
        "div",
        table(("memory at the peak", "size", ""), _items(mapping(values, "memory"))),
        tag("p", f"Disk: {disk}.") if disk else None,
        tag("h3", "Settings that are not at their default"),
        table(("setting", "value", "from", "why"), _decided(mapping(values, "settings"))),
    )


def _items(memory: Values) -> Iterator[tuple[str, str, str]]:
    for row in sequence(memory, "items"):
        if isinstance(row, dict):
            size = bytes_text(number(row, "bytes"))
            yield str(row.get("name")), size, str(row.get("note", ""))


def _decided(settings: Values) -> Iterator[tuple[Html, str, str, Html]]:
    for key in settings:
        row = mapping(settings, key)
        if row.get("origin") != "default":
            value = row.get("value")
            typed = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            reason = inline(str(row.get("reason") or ""))
            yield tag("span", setting_label(key), title=key), typed, str(row.get("origin")), reason


def remarks(values: Values) -> Html:
    """Return what the plan warns of, each with its advice."""
    found = [row for row in sequence(values, "remarks") if isinstance(row, dict)]
    others = (
        tag(
            "p",
            tag("span", inline(str(row.get("what", "")))),
            ". ",
            tag("span", inline(str(row.get("advice", ""))), class_="quiet"),
            class_=f"notice {row.get('severity', 'note')}",
        )
        for row in found
    )
    return join([*_of_images(values), *others])


def _of_images(values: Values) -> Iterator[Html]:
    """Yield of how many images the planned size makes something that harms the training."""
    images = mapping(values, "images")
    for kind, (said, advice) in _OF_BASE.items():
        count = images.get(kind)
        if isinstance(count, int):
            what = said.format(count=f"{count:,}", images=f"{number(images, 'all'):,.0f}")
            yield tag(
                "p",
                tag("span", what),
                ". ",
                tag("span", advice, class_="quiet"),
                class_="notice warning",
            )


def _value(settings: Values, key: str) -> Any:
    return mapping(settings, key).get("value")


def memory_parts(items: Sequence[Any]) -> Iterator[MemoryPart]:
    """Yield the pieces of the bar that a plan's memory items make."""
    rows = [row for row in items if isinstance(row, dict)]
    named = {name for _, _, names in _PARTS for name in names}
    for css, label, names in (*_PARTS[:-1], (*_REST, None), _PARTS[-1]):
        size = sum(
            number(row, "bytes")
            for row in rows
            if (row.get("name") in names if names is not None else row.get("name") not in named)
        )
        if size:
            yield MemoryPart(css=css, label=label, size_bytes=size)


def fit_sentence(memory: Values) -> str:
    """Return in a sentence whether it fits."""
    peak = bytes_text(number(memory, "peak_bytes"))
    phase = _PHASES.get(str(memory.get("phase")), str(memory.get("phase")))
    if memory.get("limit_bytes") is None:
        return f"Needs {peak} at most, while {phase}; no limit is known."
    limit = bytes_text(number(memory, "limit_bytes"))
    if memory.get("fits"):
        return f"Fits: needs {peak} of {limit} at most, while {phase}."
    return f"Does not fit: needs {peak}, and {limit} may be used."

"""A line that says what a sample image shows and, behind it, how it is drawn: `a cat --n blurry --w 512 --d 1 --s 20`.

The letters are those of sd-scripts and ai-toolkit. Everything that takes prompts reads them here: `sampling.prompts`,
`lora-train sample`, what somebody asks of a run, tries on the page, imports. Captions that serve as prompts have no
options. What a line does not say is that of the settings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import build_config

# An option and its value, up to the next one: a blank, two dashes, letters, then a blank, "=" or the end.
_OPTION = re.compile(
    r"(?:^|(?<=\s))--([A-Za-z_]+)(?:(?:\s+|=)(.*?))??(?=\s+--[A-Za-z_]+(?:[\s=]|$)|\s*$)", re.S
)
# What is left in the text and was meant as an option: `--w64`, `--w:64`, an option without a blank before it, a dash
# that an editor has put in for two.
_NEARLY = re.compile(
    r"(?:--|[\u2010-\u2015\ufe58\ufe63\uff0d]{1,2})"
    r"(?:([whdlgsm])[\s:=]*-?\d[\d.]*(?=[\s,]|$)|(?<=\S--)(n)(?=\s)|(?<=\s[\u2012-\u2015])(n)(?=\s))",
    re.I,
)
NEGATIVE, WIDTH, HEIGHT, SEED, GUIDANCE, DISTILLED, STEPS, STRENGTH = "nwhdlgsm"
# What checks the number behind a letter. A size has limits of its own.
_SETTINGS = {
    SEED: "sampling.seed",
    GUIDANCE: "sampling.guidance_scale",
    DISTILLED: "sampling.guidance_scale",
    STEPS: "sampling.steps",
}
LETTERS = {
    NEGATIVE: "negative prompt",
    WIDTH: "width",
    HEIGHT: "height",
    SEED: "seed",
    GUIDANCE: "guidance",
    DISTILLED: "guidance",
    STEPS: "steps",
    STRENGTH: "strength of the LoRA",
}
# Strengths at which the images of a slider are drawn, side by side.
STRIP = (-2.0, -1.0, 0.0, 1.0, 2.0)
MOST_STRENGTH = 100
MOST_PX = 8192


@dataclass(frozen=True, kw_only=True)
class SamplePrompt:
    """A prompt and how its image is drawn; None: as the settings say."""

    line: str
    """The prompt as it was written."""
    text: str
    negative: str | None = None
    width_px: int | None = None
    height_px: int | None = None
    seed: int | None = None
    guidance_scale: float | None = None
    steps: int | None = None
    strength: float | None = None
    """Factor on the adapter."""

    def size_px(self, side_px: int) -> tuple[int, int]:
        """Return width and height; a side that is not given is `side_px`."""
        return self.width_px or side_px, self.height_px or side_px


def parted(line: str) -> tuple[str, dict[str, str]]:
    """Return a prompt without its options, and these by letter."""
    options = {match[1].lower(): (match[2] or "").strip() for match in _OPTION.finditer(line)}
    return _OPTION.sub("", line).strip(), options


def without_strength(line: str) -> tuple[str, float | None]:
    """Return a prompt without its option for the strength, and the strength; None where it has none to be read."""
    value = parted(line)[1].get(STRENGTH, "")
    try:
        strength = float(value)
    except ValueError:
        return line, None
    return line.replace(f" --{STRENGTH} {value}", ""), strength


def read_prompt(line: str) -> SamplePrompt:
    """Read a prompt with its options; raises RequestError for one that is unknown or has no such value."""
    text, options = parted(line)
    for name in options.keys() - LETTERS.keys():
        raise RequestError(
            f"the sample prompt {_short(line)} has the option --{name}, which is not read here",
            fix=f"leave it out; known are {', '.join(f'--{one} ({LETTERS[one]})' for one in LETTERS)}",
        )
    if nearly := _NEARLY.search(text):
        letter = next(filter(None, nearly.groups())).lower()
        raise RequestError(
            f"the sample prompt {_short(line)} has {nearly[0].strip()}, which is not read as an option",
            fix=f"write --{letter} with a blank before it and behind it, or leave it out",
        )
    numbers = {
        letter: number
        for letter, value in options.items()
        if letter != NEGATIVE and (number := _number(line, letter, value)) is not None
    }
    guidance = {numbers[letter] for letter in (GUIDANCE, DISTILLED) if letter in numbers}
    if len(guidance) > 1:
        # FLUX and its like have a guidance inside (--g) beside a plain one that is 1: off.
        guidance -= {1}
    if len(guidance) > 1:
        raise RequestError(
            f"the sample prompt {_short(line)} has two values of guidance, --l and --g",
            fix="leave one of them out",
        )

    def whole(letter: str) -> int | None:
        return int(numbers[letter]) if letter in numbers else None

    return SamplePrompt(
        line=line,
        text=text,
        negative=options.get(NEGATIVE),
        width_px=whole(WIDTH),
        height_px=whole(HEIGHT),
        seed=whole(SEED),
        guidance_scale=next(iter(guidance), None),
        steps=whole(STEPS),
        strength=numbers.get(STRENGTH),
    )


def plain_prompt(text: str) -> SamplePrompt:
    """Return a text that has no options, as captions have none."""
    return SamplePrompt(line=text, text=text)


def strip(prompt: SamplePrompt, *, seed: int) -> list[SamplePrompt]:
    """Return a prompt at each strength of `STRIP` with one seed, or alone where it has a strength."""
    if prompt.strength is not None:
        return [replace(prompt, seed=seed)]
    return [
        replace(prompt, line=f"{prompt.line} --m {strength:g}", seed=seed, strength=strength)
        for strength in STRIP
    ]


def seeds(prompts: Sequence[SamplePrompt], first: int) -> list[int]:
    """Return the seed of each prompt: its own, else `first` plus its place."""
    return [first + at if prompt.seed is None else prompt.seed for at, prompt in enumerate(prompts)]


def check_sizes(
    prompts: Sequence[SamplePrompt], *, step_px: int, planned_side_px: int | None = None
) -> None:
    """Raise RequestError for a size that the base cannot draw, or that takes more memory than is planned.

    A training plans for square images of `planned_side_px`: the memory goes with the area.
    """
    for prompt in prompts:
        for letter, side_px in ((WIDTH, prompt.width_px), (HEIGHT, prompt.height_px)):
            if side_px is not None and side_px % step_px:
                near = max(step_px, round(side_px / step_px) * step_px)
                raise RequestError(
                    f"the sample prompt {_short(prompt.line)} has --{letter} {side_px}, and this base "
                    f"draws multiples of {step_px} px",
                    fix=f"write --{letter} {near}",
                )
        if planned_side_px is None:
            continue
        width_px, height_px = prompt.size_px(planned_side_px)
        if width_px * height_px > planned_side_px**2:
            raise RequestError(
                f"the sample prompt {_short(prompt.line)} asks for {width_px}x{height_px} px; memory is "
                f"planned for sample images of the area of {planned_side_px}x{planned_side_px} px",
                fix="make --w and --h smaller, or draw it with `lora-train sample` afterwards",
            )


def _number(line: str, letter: str, value: str) -> float | None:
    """Return the number behind a letter, None for the seed -1, which leaves it open; raises RequestError."""
    where = f"the sample prompt {_short(line)} has --{letter} {value}".rstrip()
    try:
        number = float(value)
    except ValueError:
        raise RequestError(
            f"{where}, which is not a number", fix=f"write --{letter} with its {LETTERS[letter]}"
        ) from None
    if letter == SEED and number == -1:
        return None
    if letter == STRENGTH:
        if not abs(number) <= MOST_STRENGTH:
            raise RequestError(
                where, fix=f"write a number from -{MOST_STRENGTH} to {MOST_STRENGTH}"
            )
        return number
    if letter in (WIDTH, HEIGHT):
        if not (number.is_integer() and 1 <= number <= MOST_PX):
            raise RequestError(where, fix=f"write a whole number of px from 1 to {MOST_PX}")
        return number
    try:
        build_config({_SETTINGS[letter]: int(number) if number.is_integer() else number})
    except RequestError as error:
        raise RequestError(
            f"{where}: {error.found}", fix=f"write another number behind --{letter}"
        ) from None
    return number


def _short(line: str) -> str:
    return repr(line if len(line) <= 80 else f"{line[:77]}...")

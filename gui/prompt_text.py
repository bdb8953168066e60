"""A prompt as it is shown to people: `a cat --m -2 --s 20` is "a cat, strength −2, 20 steps".

Input: a line of config/prompt_line.py. Output: its words, then its options in the language of the reader.
"""

from __future__ import annotations

from collections.abc import Iterator

from lora_trainer.config.prompt_line import (
    DISTILLED,
    GUIDANCE,
    HEIGHT,
    LETTERS,
    NEGATIVE,
    SEED,
    STEPS,
    STRENGTH,
    WIDTH,
    parted,
)

from .server.translation import Words


def spoken_prompt(line: str, _: Words) -> str:
    """Return a prompt without the letters of its options; a line with others than those known stays as it is."""
    text, options = parted(line)
    if not options or options.keys() - LETTERS.keys():
        return line
    return ", ".join(filter(None, (text, *_told(options, _))))


def _told(options: dict[str, str], _: Words) -> Iterator[str]:
    said = {
        STRENGTH: "strength {#}",
        STEPS: "{#} steps",
        SEED: "seed {#}",
        GUIDANCE: "guidance {#}",
        DISTILLED: "guidance {#}",
        WIDTH: "{#} px wide",
        HEIGHT: "{#} px high",
        NEGATIVE: "without: {}",
    }
    for letter, value in options.items():
        yield _(said[letter], value if letter == NEGATIVE else value.replace("-", "\u2212"))

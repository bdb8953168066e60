"""Options behind sample prompts, as sd-scripts and its relatives read them: `a cat --n blurry --w 512 --d 1 --s 20`.

Here all prompts share the negative prompt, the steps and the guidance, the seed is that of the first, and the size is
that of the training. What prompts say otherwise is named. Source: sd-scripts' `line_to_prompt_dict`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

from lora_trainer.importing.foreign import Foreign, as_number

# An option and its value, up to the next one: a blank, two dashes, one or two letters, a blank.
_OPTION = re.compile(r"(?:^|\s)--([a-z]{1,3})\s+(.*?)(?=\s--[a-z]{1,3}\s|\s*$)", re.DOTALL)
_SHARED = {
    "n": "sampling.negative_prompt",
    "s": "sampling.steps",
    "l": "sampling.guidance_scale",
}


def parted(line: str) -> tuple[str, dict[str, str]]:
    """Return a prompt without its options, and these by letter."""
    options = {match[1]: match[2].strip() for match in _OPTION.finditer(line)}
    return _OPTION.sub("", line).strip(), options


def set_prompts(foreign: Foreign, lines: Iterable[str], *keys: str) -> bool:
    """Set the prompts of sample images from lines with options; return whether there is one."""
    rows = [parted(line) for line in lines]
    rows = [(text, options) for text, options in rows if text and not text.startswith("#")]
    if not rows:
        return False
    foreign.set("sampling.prompts", [text for text, _ in rows], *keys)
    given = [options for _, options in rows]
    said = []
    for letter, setting in _SHARED.items():
        values = {options.get(letter) for options in given} - {None}
        value = next((options[letter] for options in given if letter in options), None)
        if value is not None and setting not in foreign.settings:
            foreign.carry(setting, keys[0], value)
        if len(values) > 1 or (values and any(letter not in options for options in given)):
            said.append(f"all prompts have the --{letter} of the first that has one")
    seeds = [options["d"] for options in given if "d" in options]
    if seeds and "sampling.seed" not in foreign.settings:
        foreign.carry("sampling.seed", keys[0], seeds[0])
    with suppress(ValueError):
        first = as_number(seeds[0]) if seeds else 0
        if seeds and [as_number(seed) for seed in seeds] != [first + at for at in range(len(rows))]:
            said.append("the seed is that of the first prompt, the next prompt adds 1")
    if any({"w", "h"} & options.keys() for options in given):
        said.append("images have the size of the training")
    if others := sorted({name for one in given for name in one} - {*_SHARED, "d", "w", "h"}):
        said.append(f"without {', '.join(f'--{name}' for name in others)}")
    if said:
        foreign.is_nearest(keys[0], "; ".join(said))
    return True

"""Sample prompts of other trainers, which have their options behind them as ours do: `a cat --n blurry --w 512`.

Options that are not read here, and values that cannot be drawn, are left out and named.
"""

from __future__ import annotations

from collections.abc import Iterable

from lora_trainer.common.errors import RequestError
from lora_trainer.config.prompt_line import LETTERS, parted, read_prompt
from lora_trainer.importing.foreign import Foreign


def set_prompts(foreign: Foreign, lines: Iterable[str], *keys: str) -> bool:
    """Set the prompts of sample images from lines with options; return whether there is one."""
    rows = [(line.strip(), *parted(line)) for line in lines]
    rows = [row for row in rows if row[1] and not row[1].startswith("#")]
    if not rows:
        return False
    prompts, without = [], list[str]()
    for line, text, options in rows:
        prompt = text
        for letter, value in options.items():
            longer = f"{prompt} --{letter} {value}".rstrip()
            try:
                read_prompt(longer)
            except RequestError:
                # A value is said where the option is known, as it is then the value that is in the way.
                without.append(f"--{letter} {value}" if letter in LETTERS else f"--{letter}")
            else:
                prompt = longer
        prompts.append(line if prompt.split() == line.split() else prompt)
    foreign.set("sampling.prompts", prompts, *keys)
    if without:
        foreign.is_nearest(keys[0], f"without {', '.join(dict.fromkeys(without))}")
    return True

"""Other trainers' words for our settings: `network_dim` is adapter.rank, `fp8_base` memory.base_precision.

They are taken from the tables that read those trainers' files, and from `[words]` of trainers/words.toml for keys
that take more than a table to read. For searches by somebody who knows another trainer.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from lora_trainer.config.config import setting_keys
from lora_trainer.importing.foreign import rules_of, table_of
from lora_trainer.importing.reading import TRAINERS


@cache
def words_of_settings() -> Mapping[str, tuple[str, ...]]:
    """Return other trainers' words by our setting: `{"adapter.rank": ("network_dim", ...), ...}`.

    They are spelled as those trainers spell them; a setting without such words is not there.
    """
    words: dict[str, dict[str, None]] = defaultdict(dict)
    ours = set(setting_keys())
    for setting, key in _pairs():
        # What only folders have (data.weight) is set in data.folders.
        words[setting if setting in ours else "data.folders"].setdefault(_word(key))
    return {setting: tuple(of_one) for setting, of_one in sorted(words.items())}


def settings_called(words: str) -> tuple[str, ...]:
    """Return our settings that we or others call so; letter case and marks between the parts do not count.

    Our own name comes first, then exactly these words, then longer ones that hold them: `lr` is
    optimizer.learning_rate, then optimizer.text_encoder_learning_rate of `text_encoder_lr`. None fits: empty.
    """
    wanted = _parts(words)
    own: list[str] = []
    exact: list[str] = []
    longer: list[str] = []
    theirs = words_of_settings()
    for setting in setting_keys() if wanted else ():
        own_name = _parts(setting.rpartition(".")[2])
        spellings = [_parts(name) for name in theirs.get(setting, ())]
        if wanted == own_name:
            own.append(setting)
        elif wanted in spellings:
            exact.append(setting)
        elif any(_holds(spelling, wanted) for spelling in (own_name, *spellings)):
            longer.append(setting)
    return (*own, *exact, *longer)


def _parts(words: str) -> list[str]:
    """Return the parts of a word in lower case: `--Network-Dim` has two."""
    return re.findall(r"[^\W_]+", words.lower())


def _holds(parts: list[str], wanted: list[str]) -> bool:
    starts = range(len(parts) - len(wanted) + 1)
    return any(parts[start : start + len(wanted)] == wanted for start in starts)


def _word(key: str) -> str:
    """Return the last part of a key, with the part before it where it says too little by itself."""
    *before, last = key.replace("[]", "").split(".")
    is_enough = last not in table_of("words")["alone"]["parts"].split()
    return last if is_enough else ".".join((*before[-1:], last))


def _pairs() -> Iterator[tuple[str, str]]:
    """Yield each of our settings with each key that is read as it."""
    for setting, words in table_of("words")["words"].items():
        yield from ((setting, word) for word in words.split())
    for trainer in TRAINERS:
        for name in trainer.tables:
            yield from _of_table(name)
        yield from _of_parts(trainer.table)
    optimizers = table_of("optimizers")
    yield from ((setting, option) for option, setting in optimizers["options"].items())
    for row in optimizers["optimizers"]:
        yield from (("optimizer.name", name) for name in row["names"].split())
    yield from (("optimizer.schedule", name) for name in optimizers["schedules"])
    yield from (("adapter.kind", name) for name in table_of("words")["kinds"])


def _of_table(name: str) -> Iterator[tuple[str, str]]:
    for key, rule in rules_of(name).items():
        if rule.setting:
            yield rule.setting, key
    for setting, keys in table_of(name).get("also", {}).items():
        yield from ((setting, key) for key in keys.split())


def _of_parts(table: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield what a trainer's tables of adapter, optimizer, schedule and folders name."""
    adapter = table.get("adapter", {})
    for name in ("kind", "rank", "alpha"):
        if name in adapter:
            yield f"adapter.{name}", adapter[name]
    optimizer, schedule = table.get("optimizer", {}), table.get("schedule", {})
    if "name" in optimizer:
        yield "optimizer.name", optimizer["name"]
    yield from (("optimizer.learning_rate", key) for key in optimizer.get("rate", ()))
    yield from (("optimizer.schedule", key) for key in schedule.get("keys", ()))
    for part, setting in (
        ("warmup", "optimizer.warmup_fraction"),
        ("cycles", "optimizer.schedule_cycles"),
        ("power", "optimizer.schedule_power"),
    ):
        if part in schedule:
            yield setting, schedule[part]
    fields = {**table.get("fields", {}), **table.get("folders", {}).get("fields", {})}
    yield from ((f"data.{field}", key) for key, field in fields.items())

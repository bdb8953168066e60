"""When the queue may start a training: paused, only at night, only while nothing else works on the machine; and
whether what it starts may download.

Input: `.queue/rules.json`, the time of day, whether other programs use the device. Output: why nothing starts now, in
words. What runs already goes on; "pause all" asks it to save and stop, and it is the first to go on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, TypeAdapter, ValidationError

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import json_bytes, read_regular, write_atomic
from lora_trainer.queue import commands
from lora_trainer.reporting.control import Control

When = Literal["always", "idle", "night"]
Hour = Annotated[int, Field(ge=0, le=23)]
_FILE = "rules.json"
# huggingface_hub reads the first when it is imported; the second says that it is ours to take away again.
_OFFLINE, _OURS = OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "LORA_TRAIN_SWITCHED_OFFLINE")


@dataclass(frozen=True, kw_only=True)
class Rules:
    """`when` trainings may start, the night from `night_from` to `night_to` o'clock; `paused`: none until it goes on.

    `stopped` are the items that a pause has stopped. `offline`: what is started downloads nothing.
    """

    paused: bool = False
    when: When = "always"
    night_from: Hour = 22
    night_to: Hour = 7
    stopped: tuple[str, ...] = ()
    offline: bool = False

    def is_night(self, hour: int) -> bool:
        """Return whether an hour of the day is in the night; one that ends as it begins lasts all day."""
        if self.night_from < self.night_to:
            return self.night_from <= hour < self.night_to
        return hour >= self.night_from or hour < self.night_to

    def holds(self, *, now_s: float, is_idle: bool) -> str:
        """Return why nothing starts now, an empty text where it may; `now_s` is a Unix time."""
        if self.paused:
            return "the queue is paused"
        if self.when == "night" and not self.is_night(time.localtime(now_s).tm_hour):
            return f"trainings start only between {self.night_from}:00 and {self.night_to}:00"
        if self.when == "idle" and not is_idle:
            return "other programs use the machine, and trainings start only while it is idle"
        return ""


_RULES = TypeAdapter(Rules)


def read_rules(runs: Path) -> Rules:
    """Return the rules of a queue, the usual ones where there are none or they are damaged."""
    try:
        return _RULES.validate_json(read_regular(_file(runs)))
    except (OSError, ValidationError):
        return Rules()


def change_when(runs: Path, *, when: When, night: tuple[int, int] | None = None) -> Rules:
    """Let trainings start always, only while the machine is idle, or at night; raises RequestError, MachineError."""
    with commands.changing(runs):
        before = read_rules(runs)
        hours = (before.night_from, before.night_to) if night is None else night
        try:
            rules = _RULES.validate_python(
                asdict(before) | {"when": when, "night_from": hours[0], "night_to": hours[1]}
            )
        except ValidationError:
            raise RequestError(
                f"{when}, {hours[0]} to {hours[1]}, are not times of the queue",
                fix="choose always, idle or night, and hours from 0 to 23",
            ) from None
        return _write(runs, rules)


def switch_offline(runs: Path, *, offline: bool) -> Rules:
    """Forbid or allow downloads of all that is started from now on; raises MachineError."""
    with commands.changing(runs):
        return _write(runs, replace(read_rules(runs), offline=offline))


def is_offline(environment: Mapping[str, str]) -> bool:
    """Whether an environment forbids downloads, by the words that huggingface_hub takes for yes."""
    word = environment.get(_OFFLINE) or environment.get("TRANSFORMERS_OFFLINE", "")
    return word.upper() in ("1", "ON", "YES", "TRUE")


def is_offline_by_user(environment: Mapping[str, str]) -> bool:
    """Whether whoever started the program has forbidden downloads, which no switch takes back."""
    return is_offline(environment) and _OURS not in environment


def environment_of(rules: Rules, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment in which a process downloads as the rules say."""
    if is_offline_by_user(environment):
        return dict(environment)
    free = {key: word for key, word in environment.items() if key not in OFFLINE_VARIABLES}
    return free | ({_OFFLINE: "1", _OURS: "1"} if rules.offline else {})


def pause(runs: Path, *, stop: bool) -> Rules:
    """Start nothing until `go_on`; with `stop` what runs is asked to save and end, and goes on first then.

    Raises MachineError.
    """
    with commands.changing(runs):
        stopped = list[str]()
        for item in commands.items(runs) if stop else ():
            if item.state == "running" and item.run is not None:
                Control(runs / item.run).request("stop")
                stopped.append(item.id)
        before = read_rules(runs)
        ids = tuple(dict.fromkeys((*before.stopped, *stopped)))
        return _write(runs, replace(before, paused=True, stopped=ids))


def go_on(runs: Path) -> Rules:
    """Start trainings again, those first that the pause has stopped; raises MachineError."""
    with commands.changing(runs):
        rules = _write(runs, replace(read_rules(runs), paused=False))
    take_up_stopped(runs)
    return rules


def take_up_stopped(runs: Path) -> None:
    """Put what a pause has stopped back in front of the queue that goes on; raises MachineError.

    A training that is still saving follows at a later call.
    """
    rules = read_rules(runs)
    if rules.paused or not rules.stopped:
        return
    states = {item.id: item.state for item in commands.items(runs)}
    ended = [id for id in rules.stopped if states.get(id) != "running"]
    for id in reversed(ended):
        # One that had finished before it was stopped, or that somebody removed, has nothing to go on with.
        if states.get(id) == "stopped":
            commands.again(runs, id)
            commands.move(runs, id, by=-commands.MOST_ITEMS)
    with commands.changing(runs):
        now = read_rules(runs)
        _write(runs, replace(now, stopped=tuple(id for id in now.stopped if id not in ended)))


def _write(runs: Path, rules: Rules) -> Rules:
    write_atomic(_file(runs), json_bytes(asdict(rules)))
    return rules


def _file(runs: Path) -> Path:
    return commands.queue_folder(runs) / _FILE

"""A dataset of words: what a slider changes, from a TOML file of its targets. No torch.

A slider is a LoRA that makes more or less of a property, by the sign of its strength. It needs no images: the base
itself knows what `more` and `less` say. The file has a table for each target:

    [[sliders]]
    target = "a person"
    more = "an old person"
    less = "a young person"
    attributes = ["a woman", "a man"]
    keep = ["a dog", "a house"]
    weight = 1.0

`attributes` are put before the three prompts in turn, so that the direction is not that of one of them (Gandikota et
al. 2023, arXiv 2311.12092, section 4.1). `keep` are prompts that the slider must leave as they are. Files of other
trainers are read too (`foreign_sliders`).
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from lora_trainer.common.errors import InputError, did_you_mean
from lora_trainer.common.events import shown
from lora_trainer.dataset.foreign_sliders import words_of_others

_PARSERS: Mapping[str, tuple[str, Callable[[str], Any]]] = {
    ".toml": ("TOML", tomllib.loads),
    ".json": ("JSON", json.loads),
    ".yaml": ("YAML", yaml.safe_load),
    ".yml": ("YAML", yaml.safe_load),
}
# A prompt has at most some hundred tokens.
Prompt = Annotated[str, Field(max_length=2000)]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class SliderTarget(BaseModel):
    """One table of the file: a prompt whose images get more or less of a property."""

    model_config = ConfigDict(extra="forbid", frozen=True, str_strip_whitespace=True)

    target: Prompt = ""
    more: Prompt = ""
    less: Prompt = ""
    attributes: tuple[Name, ...] = ()
    keep: tuple[Name, ...] = ()
    weight: Annotated[float, Field(gt=0.0, le=100.0, allow_inf_nan=False)] = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Direction:
    """A target with one of its attributes: the prompts of a sample of a slider, and the prompts to keep."""

    target: str
    more: str
    less: str
    keep: tuple[str, ...]
    weight: float

    @property
    def name(self) -> str:
        """What its random draws are named by: its prompts."""
        return repr((self.target, self.more, self.less))

    @property
    def texts(self) -> tuple[str, ...]:
        """All of its prompts."""
        return (self.target, self.more, self.less, *self.keep)


@dataclass(frozen=True, kw_only=True)
class Words:
    """What a slider's file says: its directions, each once, and what of another trainer's file was not read."""

    directions: tuple[Direction, ...]
    trainer: str = ""
    """Whose file it is; empty: this program's."""
    notes: tuple[str, ...] = ()


def is_slider_file(dataset: Path) -> bool:
    """Return whether a dataset is a file of a slider, by its name."""
    return dataset.suffix.lower() in _PARSERS and not dataset.is_dir()


def read_sliders(file: Path) -> Words:
    """Return the words of a slider's file; raises InputError for one that cannot be used."""
    kind, parse = _PARSERS[file.suffix.lower()]
    try:
        content = parse(file.read_bytes().decode("utf-8-sig"))
    except FileNotFoundError:
        raise InputError(f"{file} does not exist", fix="name an existing file") from None
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise InputError(f"{file} cannot be read ({reason})", fix="allow reading it") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        line = " ".join(str(error).split())[:200]
        raise InputError(f"{shown(str(file))} is not {kind}: {line}", fix=_EXAMPLE) from None
    if not isinstance(content, dict):
        raise InputError(f"{shown(str(file))} holds no table", fix=_EXAMPLE)
    others_words = words_of_others(content)
    trainer, notes = "", list[str]()
    if others_words is not None:
        trainer, rows, notes = others_words
        content = {"sliders": rows}
    tables = content.get("sliders")
    others = [name for name in content if name != "sliders"]
    if not isinstance(tables, list) or not tables or others:
        found = f"has {shown(others[0])!r}" if others else "has no [[sliders]]"
        raise InputError(f"{shown(str(file))} {found}", fix=_EXAMPLE)
    directions = [
        direction
        for number, table in enumerate(tables, start=1)
        for direction in _expanded(_read(table, file=file, number=number))
    ]
    return Words(
        directions=tuple({direction.name: direction for direction in directions}.values()),
        trainer=trainer,
        notes=tuple(notes),
    )


def share_keeping(directions: Sequence[Direction]) -> float:
    """Return the share of directions with prompts to keep, 0 without directions."""
    return sum(bool(each.keep) for each in directions) / max(1, len(directions))


_EXAMPLE = (
    'write a table [[sliders]] with target, more and less, such as target = "a person", '
    'more = "an old person", less = "a young person" (docs/sliders.md)'
)


def _read(table: object, *, file: Path, number: int) -> SliderTarget:
    where = f"slider {number} of {shown(str(file))}"
    try:
        read = SliderTarget.model_validate(table)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        key = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            found = f"{where} has {shown(key)!r}"
            fix = f"its keys are {', '.join(SliderTarget.model_fields)}"
            fix += did_you_mean(key, tuple(SliderTarget.model_fields))
            raise InputError(found, fix=fix) from None
        reason = problem["msg"][:1].lower() + problem["msg"][1:]
        raise InputError(f"{where}: {shown(key)}: {reason}", fix="correct it") from None
    if read.more == read.less:
        what = (
            "says neither more nor less" if not read.more else "says the same as more and as less"
        )
        raise InputError(f"{where} {what}", fix="give two prompts that differ in one property")
    return read


def _expanded(table: SliderTarget) -> Iterator[Direction]:
    for attribute in table.attributes or ("",):
        target, more, less = (
            ", ".join(filter(None, (attribute, prompt)))
            for prompt in (table.target, table.more, table.less)
        )
        yield Direction(target=target, more=more, less=less, keep=table.keep, weight=table.weight)

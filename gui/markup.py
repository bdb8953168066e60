"""The components of the visual system as markup: icons, buttons, progress, states, notices, the frame.

Inputs: texts, which may be of anybody. Output: escaped markup for the classes of assets/site.css. Pages
put these together.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache

from lora_trainer.config.config import all_settings
from lora_trainer.reporting.charts import Html, text

from .server.translation import Words

PRODUCT = "lora-train"
_SETTING = re.compile(r"(?:--set[ =])?\b(?P<key>[a-z]+\.[a-z0-9_]+)\b(?P<equals>=)?(?!\.\w)")
# What a message says to a terminal, and what that is called on the pages.
_ON_PAGES = {
    "`lora-train check`": "the page Datasets",
    "--priority speed": "\u201cWhat matters most?\u201d = Speed",
}
_VOID = frozenset({"br", "img", "input", "meta"})

# How a language quotes: a text of which the first and the last sign count.
_QUOTES = "\u201cword\u201d"
_QUOTED = re.compile("\u201c([^\u201c\u201d]+)\u201d")


@dataclass(frozen=True, kw_only=True)
class Place:
    """An entry of the bar: a page, its address, its icon; `tool` ones stand at the end, small."""

    name: str
    path: str
    icon: str
    tool: bool = False
    also: tuple[str, ...] = ()
    """Other words that somebody types as its address."""


PLACES = (
    Place(name="Home", path="/", icon="house", also=("runs", "trainings")),
    Place(name="Train", path="/train", icon="sparkles", also=("training", "new")),
    Place(name="Datasets", path="/datasets", icon="images", also=("dataset", "images")),
    Place(name="Queue", path="/queue", icon="list-ordered"),
    Place(name="LoRAs", path="/library", icon="layers", also=("lora",)),
    Place(name="Trash", path="/trash", icon="trash-2", tool=True),
    Place(name="All settings", path="/settings", icon="settings", tool=True),
    Place(name="Machine", path="/doctor", icon="stethoscope", tool=True),
)


def place_named(path: str) -> str | None:
    """Return the address of the page that somebody means who types its name, such as `/loras`; None for none."""
    word = path.strip("/").casefold()
    for place in PLACES:
        names = (place.name.casefold(), place.name.casefold().replace(" ", "-"), *place.also)
        if word in names or f"/{word}" == place.path:
            return place.path
    return None


def tag(name: str, /, *children: str | None, **attributes: str | float | None) -> Html:
    """Return `<name ...>children</name>`; None is left out, of children and of attributes.

    A trailing underscore of an attribute is dropped (`class_`), the others become hyphens.
    """
    attributes_text = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    if name in _VOID:
        return Html(f"<{name}{attributes_text}>")
    return Html(f"<{name}{attributes_text}>{join(children)}</{name}>")


def join(parts: Iterable[str | None]) -> Html:
    """Return the parts one after another, each escaped unless it is markup."""
    return Html("".join(text(part) for part in parts if part is not None))


def icon(name: str) -> Html:
    """Return an icon of assets/icons.svg, by its name there; readers of screens pass over it."""
    use = tag("use", href=f"/ui/icons.svg#{name}")
    return tag("svg", use, class_="icon", aria_hidden="true")


def button(
    label: str,
    *,
    icon_name: str = "",
    kind: str = "",
    disabled: bool = False,
    attributes: dict[str, str | float | None] | None = None,
) -> Html:
    """Return a button; `kind` is of big, primary, danger, bare, several with a space between."""
    return tag(
        "button",
        icon(icon_name) if icon_name else None,
        label,
        type="button",
        class_=kind or None,
        disabled="" if disabled else None,
        **(attributes or {}),
    )


def note_html(line: str) -> Html:
    """Return a remark, an empty string for none."""
    return tag("p", inline(line), class_="notice") if line else Html("")


def inline(text: str, _: Words | None = None) -> Html:
    """Return a message of the trainer as a page shows it: `code` as code, settings by their labels.

    `_`: in the language of the reader, what is not code.
    """
    parts = _at_backticks(named(text))
    return join(tag("code", part) if at % 2 else _message(part, _) for at, part in enumerate(parts))


def inline_sentence(text: str, _: Words | None = None) -> Html:
    """Return a message as `inline` does, as a sentence: its capital and its dot are not part of what is translated."""
    return Html(f"{capital(inline(text.rstrip('. '), _))}.")


def worded(text: str, _: Words) -> str:
    """Return a message as `inline` does, for a script that makes code of what stands in backticks."""
    parts = _at_backticks(named(text))
    return "`".join(part if at % 2 else _message(part, _) for at, part in enumerate(parts))


def _message(part: str, _: Words | None) -> str:
    """Return a part of a message in a language, with the space around it, and settings as their labels are there."""
    said = part.strip()
    if not _ or not said or (told := _.message(said)) == said:
        return part

    quotes = _(_QUOTES)

    def labelled(match: re.Match[str]) -> str:
        key = _keys_by_label().get(match[1])
        return f"{quotes[0]}{setting_said(key, _)}{quotes[-1]}" if key else match[0]

    return part.replace(said, _QUOTED.sub(labelled, told))


def named(text: str) -> str:
    """Return a message in the words of the pages, settings by their labels, outside of `code`."""
    for typed, shown in _ON_PAGES.items():
        text = text.replace(typed, shown)
    parts = _at_backticks(text)
    return "`".join(
        part if at % 2 else _SETTING.sub(_label_in, part) for at, part in enumerate(parts)
    )


def keys_in(text: str) -> list[str]:
    """Return the keys of the settings that a message names, each once."""
    found = (match["key"] for match in _SETTING.finditer(text))
    return [key for key in dict.fromkeys(found) if key in _labels()]


def capital(line: str) -> str:
    """Return a line that begins with a capital, as one that stands for itself; a name in front stays as it is."""
    first = line.partition(" ")[0]
    is_name = any(sign in first.rstrip(".,:;") for sign in "./_=\\")
    return line if is_name else line[:1].upper() + line[1:]


def _at_backticks(text: str) -> list[str]:
    """Return a text in parts of which every second one is code; it is whole with an odd backtick."""
    parts = text.split("`")
    return parts if len(parts) % 2 else [text]


def plain(text: str) -> str:
    """Return a message as `inline` does, for a script that sets it as text."""
    return named(text).replace("`", "")


def _label_in(match: re.Match[str]) -> str:
    if match["key"] not in _labels():
        return match[0]
    equals = " = " if match["equals"] else ""
    return f"\u201c{setting_label(match['key'])}\u201d{equals}"


def setting_label(key: str) -> str:
    """Return the label of a setting, with its section where another one has the same; the key of an unknown one."""
    return _labels().get(key, key)


def setting_said(key: str, said: Words) -> str:
    """Return the label of a setting in the language of the reader."""
    section, colon, label = setting_label(key).partition(": ")
    return f"{said(section)}: {said(label)}" if colon else said(section)


@cache
def _keys_by_label() -> Mapping[str, str]:
    return {label: key for key, label in _labels().items()}


@cache
def _labels() -> Mapping[str, str]:
    infos = all_settings()
    counts = Counter(info.label for info in infos)
    return {
        info.key: info.label
        if counts[info.label] == 1
        else f"{info.section.capitalize()}: {info.label}"
        for info in infos
    }


def table(head: Iterable[str], rows: Iterable[Iterable[str | None]], *, class_: str = "") -> Html:
    """Return a table that scrolls sideways where it does not fit; a None cell is empty."""
    header = tag("tr", *(tag("th", cell, scope="col") if cell else tag("td") for cell in head))
    body = (tag("tr", *(tag("td", cell or "") for cell in row)) for row in rows)
    grid = tag("table", tag("thead", header), tag("tbody", *body), class_=class_ or None)
    return tag("div", grid, class_="scroll")

"""The languages of the pages, which are written in English, and the one that a request asks for.

Inputs: a request's cookie and Accept-Language; languages/CODE.json with the texts of each language, and what the
family.toml of each family says that a release is good for.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import lora_trainer

from .cookies import cookies

ENGLISH = "en"
COOKIE = "lora_train_language"
# In which a script says the language of its page.
HEADER = "lora-train-language"
_FOLDER = Path(__file__).parents[1] / "languages"
# The text whose translation is the name of the language itself: `Deutsch`.
_OWN_NAME = "English"


@cache
def languages() -> dict[str, str]:
    """Return the languages by code, each by its own name, English first."""
    others = {path.stem: words(path.stem)[_OWN_NAME] for path in sorted(_FOLDER.glob("*.json"))}
    return {ENGLISH: _OWN_NAME, **others}


def words(code: str) -> dict[str, str]:
    """Return the texts of a language by their English texts."""
    texts: dict[str, str] = json.loads((_FOLDER / f"{code}.json").read_text(encoding="utf-8"))
    return {**texts, **families_words(code)}


@cache
def families_words(code: str) -> dict[str, str]:
    """Return what the releases of the families are good for, by the English sentences.

    From the files themselves: importing the families takes a second.
    """
    folder = Path(lora_trainer.__file__).with_name("families")
    tables = (
        tomllib.loads(file.read_text(encoding="utf-8")) for file in folder.glob("*/family.toml")
    )
    return {
        release["good_for"]: release["good_for_in"][code]
        for table in tables
        for release in table["releases"]
        if code in release.get("good_for_in", {})
    }


def wanted(headers: Mapping[str, str]) -> str:
    """Return the language of a request: of the page whose script asks, else the chosen one, else the browser's first.

    Another tab may have chosen another language meanwhile: a page stays in one. `headers` are by their names in lower
    case.
    """
    for code in (headers.get(HEADER, ""), next(cookies(headers.get("cookie", ""), COOKIE), "")):
        if code in languages():
            return code
    return next((code for code in _accepted(headers) if code in languages()), ENGLISH)


def _accepted(headers: Mapping[str, str]) -> list[str]:
    """Return the codes of Accept-Language, the most wished first, without their countries."""
    ranked: list[tuple[float, str]] = []
    for part in headers.get("accept-language", "").split(","):
        tag, _, weight = part.strip().partition(";q=")
        try:
            ranked.append((float(weight or 1), tag.partition("-")[0].lower()))
        except ValueError:
            continue
    return [code for weight, code in sorted(ranked, key=lambda pair: -pair[0]) if weight > 0]

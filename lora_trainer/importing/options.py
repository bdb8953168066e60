"""The options of a training file while they are read, and the small things that readers do with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lora_trainer.config import all_settings
from lora_trainer.importing.findings import Findings

DEFAULT = "the default there"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of a file; a reader takes those it knows."""

    values: Mapping[str, Any]
    found: Findings

    def set(self, name: str, key: str, value: Any) -> None:
        self.found.set(key, value, name)

    def given(self, name: str) -> Any:
        """Return an option's value; None where it is off or missing."""
        value = self.values.get(name)
        return None if value in (None, False, "", []) else value


def set_read(options: Options, told: str, key: str, text: str, read: Callable[[str], Any]) -> None:
    try:
        value = read(text)
    except ValueError:
        options.found.lacks(told, text, f"cannot be read as {key}")
        return
    options.found.set(key, value, told)


def is_true(text: str) -> bool:
    return text.strip().lower() == "true"


def pairs_of(arguments: Any) -> dict[str, str]:
    """Return the `name=value` words of an option as a dictionary."""
    words = arguments if isinstance(arguments, list) else str(arguments or "").split()
    pairs = (str(word).partition("=") for word in words)
    return {name.strip(): value.strip() for name, _, value in pairs if name.strip()}


def words_of(key: str) -> tuple[str | bool, ...]:
    (info,) = (info for info in all_settings() if info.key == key)
    return info.form.words


Reader = Callable[[Options], None]

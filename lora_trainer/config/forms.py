"""The form field of a setting: its kind of value, its choices, its bounds.

Input: the JSON Schema that pydantic makes of one field. Output: a `Form`. No setting is named here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Kind = Literal["switch", "choice", "number", "text", "list", "mapping"]
Word = str | bool

_KINDS: Mapping[str, Kind] = {
    "integer": "number",
    "number": "number",
    "array": "list",
    "object": "mapping",
    "string": "text",
}


@dataclass(frozen=True, kw_only=True)
class Form:
    """The form field of one setting.

    `words` are all values of a choice, or the words that a number also takes (`auto`). `whole`: a number
    must be an integer. `low` and `high` are bounds in the setting's unit, included unless `above_low` or
    `below_high`. `nullable`: the setting may be null.
    """

    kind: Kind
    words: tuple[Word, ...] = ()
    whole: bool = False
    low: float | None = None
    high: float | None = None
    above_low: bool = False
    below_high: bool = False
    nullable: bool = False

    @property
    def allowed(self) -> str:
        """The allowed values in words; "" for kinds that need no explanation."""
        parts = [self._range()] if self.kind == "number" else []
        if self.kind == "number":
            parts += [str(word) for word in self.words]
        if self.nullable:
            parts.append("empty: none")
        return " or ".join(part for part in parts if part)

    def _range(self) -> str:
        noun = "a whole number" if self.whole else "a number"
        low = f"{'above' if self.above_low else 'from'} {_figure(self.low)}"
        high = f"{'below' if self.below_high else 'to'} {_figure(self.high)}"
        bounds = ((low, self.low), (high, self.high))
        return " ".join([noun, *(text for text, bound in bounds if bound is not None)])


def form_of(schema: Mapping[str, Any]) -> Form:
    """Return the form of a field's schema; raises ValueError for a union of two open types."""
    parts = list(schema.get("anyOf", [schema]))
    nullable = any(part.get("type") == "null" for part in parts)
    words = tuple(word for part in parts for word in _words(part))
    open_ended = [part for part in parts if _open_kind(part) is not None]
    if not open_ended:
        if words == (True, False):
            return Form(kind="switch", nullable=nullable)
        return Form(kind="choice", words=words, nullable=nullable)
    (part,) = open_ended
    kind = _open_kind(part)
    assert kind is not None
    return Form(
        kind=kind,
        words=words,
        whole=part.get("type") == "integer",
        low=part.get("minimum", part.get("exclusiveMinimum")),
        high=part.get("maximum", part.get("exclusiveMaximum")),
        above_low="exclusiveMinimum" in part,
        below_high="exclusiveMaximum" in part,
        nullable=nullable,
    )


def _figure(bound: float | None) -> str:
    if bound is None:
        return ""
    return f"{int(bound):,}" if bound == int(bound) else f"{bound:,g}"


def label_of(name: str, *, unit: str = "") -> str:
    """Return a setting's name for display: "Min SNR gamma" for `min_snr_gamma`, "Save every N steps"."""
    words = name.split("_")
    if unit and len(words) > 1 and words[-1] == unit.lower():
        words.pop()  # the unit is shown beside the value
    text = " ".join(_SPELLED.get(word, word) for word in words).replace("every ", "every N ")
    has_own_case = any(letter.isupper() for letter in text.split()[0])  # rsLoRA keeps its small r
    return text if has_own_case else text[:1].upper() + text[1:]


_SPELLED = {
    "conv": "convolution",
    "dir": "folder",
    "ema": "EMA",
    "grad": "gradient",
    "init": "start",
    "multires": "multi-resolution",
    "vae": "VAE",
    "p2": "P2",
    "snr": "SNR",
    "lora": "LoRA",
    "lokr": "LoKr",
    "dora": "DoRA",
    "rslora": "rsLoRA",
    "vram": "VRAM",
}


def _open_kind(part: Mapping[str, Any]) -> Kind | None:
    """Return the kind of a schema part with unlimited values, None for choices, switches and null."""
    if "enum" in part or "const" in part or part.get("type") in ("boolean", "null"):
        return None
    return _KINDS[part["type"]]


def _words(part: Mapping[str, Any]) -> Iterator[Word]:
    if part.get("type") == "boolean":
        yield from (True, False)
    elif "const" in part:
        yield part["const"]
    else:
        yield from part.get("enum", ())

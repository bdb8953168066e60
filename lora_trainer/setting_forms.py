"""What a form needs to know of a setting: which kind of value it takes, its words, its bounds.

Input: the JSON Schema that pydantic makes of one field. Output: a `Form`. Nothing here knows a
setting by name.
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
    """How a setting is filled in.

    `words` are all values of a choice, and of a number the words it takes too (`auto`); `whole` is
    of numbers. `low` and `high` are bounds in the setting's unit, themselves allowed unless `above_low`
    or `below_high`. `nullable` settings take null.
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
        """What can be filled in, in words; empty where that goes without saying."""
        parts = [self._range()] if self.kind == "number" else []
        if self.kind == "number":
            parts += [str(word) for word in self.words]
        if self.nullable:
            parts.append("empty: none")
        return " or ".join(part for part in parts if part)

    def _range(self) -> str:
        what = "a whole number" if self.whole else "a number"
        low = f"{'above' if self.above_low else 'from'} {_figure(self.low)}"
        high = f"{'below' if self.below_high else 'to'} {_figure(self.high)}"
        bounds = ((low, self.low), (high, self.high))
        return " ".join([what, *(text for text, bound in bounds if bound is not None)])


def form_of(schema: Mapping[str, Any]) -> Form:
    """Return the form of a field's schema; raises ValueError for two open types in one."""
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
    """Return the name of a setting as people read it: `min_snr_gamma` is "Min SNR gamma"."""
    words = name.split("_")
    if unit and len(words) > 1 and words[-1] == unit.lower():
        words.pop()  # the unit stands beside the value
    text = " ".join(_SPELLED.get(word, word) for word in words)
    begins_as_a_name = any(letter.isupper() for letter in text.split()[0])  # rsLoRA
    return text if begins_as_a_name else text[:1].upper() + text[1:]


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
    """Return the kind of a part that has more values than a list could show."""
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

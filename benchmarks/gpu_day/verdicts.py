"""Which options win enough to stay: of time a twentieth, or of memory a tenth, in one case at least. No torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from benchmarks.gpu_day.cases import REFERENCE, SLICES
from benchmarks.gpu_day.results import Results

LEAST_TIME, LEAST_MEMORY = 0.05, 0.10
WAY, RUNG = "way", "rung"
OPTIONS: Mapping[str, Sequence[tuple[str, str, str]]] = {
    "memory.gradient_checkpointing=full": [(WAY, "full", REFERENCE)],
    "memory.gradient_checkpointing=selective": [(WAY, "selective", "full")],
    "memory.gradient_checkpointing=light": [(WAY, "light", "selective")],
    "memory.gradient_checkpointing=offloaded": [(WAY, "offloaded", "full")],
    "memory.streamed_blocks": [(WAY, "full, streamed", "full")],
    "streamed blocks copied beside the computation": [
        (WAY, "full, streamed", "full, streamed in turn")
    ],
    "adapters fused with their layers": [
        (WAY, REFERENCE, "peft's adapters"),
        (RUNG, "ours", "trainers' way"),
    ],
    "hardware.compile=blocks": [(WAY, "compiled", REFERENCE), (RUNG, "ours, compiled", "ours")],
    "memory.base_precision=int8": [(WAY, "int8", "full")],
}
"""What each is compared with: the same without it, or for a kind of recomputing with the next that keeps less."""
Word = Literal["keep", "take out", "wrong", "not measured"]


@dataclass(frozen=True, kw_only=True)
class Gain:
    """What an option saves in a case, as shares of what it is compared with; memory None: not measured."""

    case: str
    time: float
    memory: float | None

    @property
    def enough(self) -> bool:
        """Whether it is worth having for this case alone."""
        return self.time >= LEAST_TIME or (self.memory or 0.0) >= LEAST_MEMORY


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """An option, what it saves, and the cases in which it does not compute what it should."""

    option: str
    gains: Sequence[Gain]
    wrong: Sequence[str]

    @property
    def word(self) -> Word:
        """What is to be done with it."""
        if self.wrong:
            return "wrong"
        if not self.gains:
            return "not measured"
        return "keep" if any(gain.enough for gain in self.gains) else "take out"

    def best(self, kind: Literal["time", "memory"]) -> Gain | None:
        """Return the case in which it saves most."""
        measured = [gain for gain in self.gains if getattr(gain, kind) is not None]
        return max(measured, key=lambda gain: getattr(gain, kind), default=None)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A way of computing a case: seconds of a step, and the bytes it needs."""

    step_s: float
    bytes: int | None
    holds: bool = True


def verdicts(results: Results) -> list[Verdict]:
    """Return one for each option."""
    measured = {WAY: _ways(results), RUNG: _rungs(results)}
    return [_verdict(option, pairs, measured) for option, pairs in OPTIONS.items()]


def _verdict(
    option: str,
    pairs: Sequence[tuple[str, str, str]],
    measured: Mapping[str, Mapping[str, Mapping[str, Step]]],
) -> Verdict:
    gains, wrong = [], []
    for kind, name, without in pairs:
        for case, steps in measured[kind].items():
            if name not in steps or without not in steps:
                continue
            own, other = steps[name], steps[without]
            if not own.holds:
                wrong.append(f"{case}, {name}")
            memory = 1 - own.bytes / other.bytes if own.bytes and other.bytes else None
            gains.append(Gain(case=case, time=1 - own.step_s / other.step_s, memory=memory))
    return Verdict(option=option, gains=gains, wrong=wrong)


def _ways(results: Results) -> dict[str, dict[str, Step]]:
    """Return the ways of each case."""
    found: dict[str, dict[str, Step]] = {}
    for row in _done(results):
        if "way" not in row:
            continue
        steps = found.setdefault(row["case"], {})
        steps[row["way"]] = Step(step_s=row["step_s"], bytes=row["peak_bytes"], holds=row["holds"])
        against = Step(step_s=row["against_step_s"], bytes=row["against_peak_bytes"])
        steps.setdefault(row["against"], against)
    return found


def _rungs(results: Results) -> dict[str, dict[str, Step]]:
    found: dict[str, dict[str, Step]] = {}
    for row in _done(results):
        for name, rung in row.get("rungs", {}).items():
            steps = found.setdefault(row["case"], {})
            steps[name] = Step(step_s=rung["median_s"], bytes=rung["peak_bytes"])
    return found


def _done(results: Results) -> Iterator[dict[str, Any]]:
    for piece in SLICES:
        for _, row in results.rows(piece):
            if row["status"] == "done":
                yield row["result"]


def said(found: Sequence[Verdict]) -> Iterator[str]:
    """Yield the rule and what follows from it, as lines to print."""
    yield (
        f"An option stays if it saves {LEAST_TIME:.0%} of the time or {LEAST_MEMORY:.0%} of the memory "
        "of a step in one case at least."
    )
    for verdict in found:
        yield f"  {verdict.option}: {verdict.word}{described(verdict)}"


def described(verdict: Verdict) -> str:
    """Return what a verdict rests on."""
    if verdict.wrong:
        return f": not the same training in {'; '.join(verdict.wrong)}"
    words = []
    for kind in ("time", "memory"):
        best = verdict.best(kind)
        if best is not None:
            words.append(f"{getattr(best, kind):+.1%} {kind} ({best.case})")
    return f": saves at best {', '.join(words)}" if words else ""

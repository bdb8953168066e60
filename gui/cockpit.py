"""What a training takes of this machine now, in a few figures for each page: load, memory, heat, power, pace.

Inputs: the history of a run, what the driver says of the GPUs, the processor. Output: figures in words, and a warning
before the machine gets slow. Figures that nothing tells are left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.common.records import figure
from lora_trainer.common.wording import bytes_text, step_seconds_text
from lora_trainer.hardware.nvml import TOO_HOT, CardState
from lora_trainer.reporting.history import RunHistory
from lora_trainer.reporting.status import RunStatus

from .run.head import cards_of, memory
from .run_state import step_s
from .workplace import Workplace

_PRICE = "power-price.json"
# A GPU that has less left to its limit of heat, in degrees, is about to lower its clock.
_NEAR_HEAT = 4
# Of memory that is fuller, the next larger batch goes elsewhere or ends the training.
_FULL = 0.97


# The figure that the bar of the memory belongs to.
MEMORY = "Memory"


@dataclass(frozen=True, kw_only=True)
class Cockpit:
    """The figures, each as a name and a text; the memory as a share of what was predicted; what is about to happen."""

    figures: tuple[tuple[str, str], ...]
    memory_share: float | None
    warning: str


def cockpit(
    status: RunStatus,
    history: RunHistory,
    cards: Sequence[CardState],
    *,
    processor_percent: float,
    free_share: float,
    price: float | None,
) -> Cockpit:
    """Return what a running training takes; `free_share` is of the machine's memory, `price` of a kilowatt-hour."""
    used = cards_of(status, cards)
    found = memory(history)
    on_card = any(row.vram_reserved_bytes > 0 for row in history.steps[-1:])
    shown = used if on_card or not history.steps else ()
    figures = tuple(_figures(shown, history, processor_percent=processor_percent, price=price))
    share = None
    if found is not None and found.predicted_bytes > 0 and found.now_bytes > 0:
        share = found.now_bytes / found.predicted_bytes
    warning = next(_warnings(shown, free_share=free_share), "")
    return Cockpit(figures=figures, memory_share=share, warning=warning)


def _figures(
    cards: Sequence[CardState],
    history: RunHistory,
    *,
    processor_percent: float,
    price: float | None,
) -> Iterator[tuple[str, str]]:
    loads = [card.load_percent for card in cards if card.load_percent is not None]
    if loads:
        yield "GPU", f"{sum(loads) / len(loads):.0f} %"
    elif not cards:
        yield "Processor", f"{processor_percent:.0f} %"
    found = memory(history)
    if found is not None and found.now_bytes > 0:
        now = bytes_text(found.now_bytes)
        predicted = found.predicted_bytes
        yield MEMORY, f"{now} of {bytes_text(predicted)}" if predicted > 0 else now
    heat = [card.celsius for card in cards if card.celsius is not None]
    if heat:
        yield "Heat", f"{max(heat)} \u00b0C"
    watts = [card.watts for card in cards if card.watts is not None]
    if watts:
        yield "Power", f"{sum(watts):.0f} W"
    if watts and price:
        yield "Costs an hour", f"{sum(watts) / 1000 * price:.2f}"
    pace_s = step_s(history)
    if math.isfinite(pace_s):
        yield "A step", step_seconds_text(pace_s)


def _warnings(cards: Sequence[CardState], *, free_share: float) -> Iterator[str]:
    """Yield what makes the training slow now or soon, the worst first."""
    for card in cards:
        if card.held_back & TOO_HOT:
            yield "The GPU is too hot and has lowered its clock: give it more air."
        if card.used_bytes > _FULL * card.total_bytes:
            yield (
                "The memory of the GPU is nearly full: close other programs on it, before the driver moves memory "
                "to the machine and each step takes several times as long."
            )
        limit = card.slows_at_celsius
        if limit is not None and card.celsius is not None and limit - card.celsius <= _NEAR_HEAT:
            yield "The GPU is nearly as hot as it may get: give it more air, before it lowers its clock."
    if free_share < 1 - _FULL:
        yield "The memory of the machine is nearly full: close other programs, before it swaps to the disk."


def cockpit_now(work: Workplace, status: RunStatus, history: RunHistory, cards: Any) -> Cockpit:
    """Return it with what the machine says now."""
    ram = psutil.virtual_memory()
    return cockpit(
        status,
        history,
        cards,
        processor_percent=psutil.cpu_percent(),
        free_share=ram.available / ram.total,
        price=power_price(work),
    )


def power_price(work: Workplace) -> float | None:
    """Return the price of a kilowatt-hour that somebody typed, None before."""
    try:
        price = figure(read_json_object(_price_file(work)).get("per_kwh"))
    except RequestError:  # none yet, or damaged
        return None
    return price if math.isfinite(price) and price > 0 else None


def keep_power_price(work: Workplace, typed: str) -> float | None:
    """Keep the price of a kilowatt-hour, as 0.35 or 0,35; an empty text forgets it. Raises RequestError."""
    price = None
    if typed.strip():
        try:
            price = float(typed.strip().replace(",", "."))
        except ValueError:
            price = math.nan
        if not 0 < price < 1000:
            raise RequestError(
                f"{typed.strip()[:20]!r} is not a price", fix="type a number such as 0.35"
            )
    work.own.mkdir(parents=True, exist_ok=True)
    write_atomic(_price_file(work), json_bytes({"per_kwh": price}))
    return price


def _price_file(work: Workplace) -> Path:
    return work.own / _PRICE

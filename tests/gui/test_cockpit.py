"""The figures of the machine on every page: those of a GPU, those of the processor, warnings, the price of power."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import live, runs
from lora_trainer.gui.cockpit import Cockpit, cockpit, keep_power_price, power_price
from lora_trainer.gui.server.translation import words as words_of
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from lora_trainer.hardware.nvml import TOO_HOT, CardState
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import until, write_status
from tests.fakes.run_folder import fake_run

GIB = 1 << 30
CARD = CardState(
    total_bytes=12 * GIB,
    used_bytes=9 * GIB,
    load_percent=97,
    celsius=71,
    watts=285.0,
    slows_at_celsius=90,
)


@pytest.fixture
def training(work: Workplace) -> Path:
    folder = until(fake_run(work.runs / "live", steps=30), 12)
    write_status(folder)
    return folder


def seen(folder: Path, *cards: CardState, on_card: bool, **more: Any) -> Cockpit:
    history = read_history(folder)
    if on_card:
        row = replace(history.steps[-1], vram_reserved_bytes=8 * GIB, vram_used_bytes=9 * GIB)
        history = replace(history, steps=(row,))
    known = {"processor_percent": 140.0, "free_share": 0.5, "price": None, **more}
    return cockpit(read_status(folder), history, cards, **known)


def test_a_gpu_tells_load_memory_heat_power_and_what_an_hour_costs(training: Path) -> None:
    found = seen(training, CARD, on_card=True, price=0.4)
    named = dict(found.figures)
    assert (named["GPU"], named["Heat"], named["Power"]) == ("97 %", "71 \u00b0C", "285 W")
    assert named["Costs an hour"] == "0.11"
    assert named["Memory"].startswith("9.0 GiB of ")
    assert "Processor" not in named
    assert "Costs an hour" not in dict(seen(training, CARD, on_card=True).figures)


def test_a_training_on_the_processor_tells_its_load_and_nothing_of_an_idle_gpu(
    training: Path,
) -> None:
    named = dict(seen(training, CARD, on_card=False, price=0.4).figures)
    assert named["Processor"] == "140 %"
    assert named.keys() <= {"Processor", "Memory", "A step"}


def test_warnings_come_before_the_machine_is_slow(training: Path) -> None:
    def warned(card: CardState = CARD, **more: Any) -> str:
        return seen(training, card, on_card=True, **more).warning

    assert warned() == ""
    assert "nearly as hot" in warned(replace(CARD, celsius=87))
    assert "nearly full" in warned(replace(CARD, used_bytes=int(11.8 * GIB)))
    assert "too hot and has lowered" in warned(replace(CARD, held_back=TOO_HOT & 0x20))
    assert "memory of the machine" in warned(free_share=0.01)


def test_every_page_hears_it_in_its_language_while_something_trains(
    training: Path, work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "card_states", lambda: (CARD,))
    (one,) = live.live(work, runs.Followed(), words_of("de"))["training"]
    assert "Prozessor" in {name for name, _ in one["cockpit"]["figures"]}
    write_status(training, state="finished", step=30, exit_code=0)
    assert live.live(work, runs.Followed(), words_of("de"))["training"] == []


def test_a_price_is_kept_in_either_spelling_and_forgotten(work: Workplace) -> None:
    assert power_price(work) is None
    assert keep_power_price(work, " 0,35 ") == power_price(work) == 0.35
    with pytest.raises(RequestError, match="is not a price"):
        keep_power_price(work, "much")
    assert power_price(work) == 0.35
    assert keep_power_price(work, "") is power_price(work) is None

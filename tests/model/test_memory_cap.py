"""The bound on the allocator: what was asked for, what the driver really has, or none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_trainer.hardware.machine import spill_margin_bytes
from lora_trainer.planning.memory import GIB, RUNTIME_BYTES
from lora_trainer.run import device
from lora_trainer.run.device import cap_allocator

CARD = torch.device("cuda", 0)
CONTEXT = RUNTIME_BYTES["cuda"]
MARGIN = spill_margin_bytes(24 * GIB)


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    set_to: list[float] = []
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=24 * GIB)
    )

    def bound(fraction: float, device: torch.device) -> None:
        assert device.index is not None, "torch refuses a device without one"
        set_to.append(fraction)

    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bound)
    return set_to


def test_what_is_asked_for_counts_with_the_context(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: False)
    assert cap_allocator(limit_bytes=8 * GIB, free_bytes=20 * GIB, device=CARD) == 8 * GIB - CONTEXT
    assert fractions == [(8 * GIB - CONTEXT) / (24 * GIB)]


def test_no_bound_where_the_driver_refuses(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: False)
    assert cap_allocator(limit_bytes=None, free_bytes=20 * GIB, device=CARD) is None
    assert fractions == []


def test_always_a_bound_where_the_driver_spills(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: True)
    allowed = cap_allocator(limit_bytes=None, free_bytes=20 * GIB, device=CARD)
    assert allowed == 20 * GIB - MARGIN - CONTEXT
    assert fractions == [allowed / (24 * GIB)]


@pytest.mark.parametrize("asked_gib", [8, 20, 22])
def test_what_is_asked_for_leaves_the_margin_there_too(
    asked_gib: int, fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: True)
    allowed = cap_allocator(limit_bytes=asked_gib * GIB, free_bytes=20 * GIB, device=CARD)
    assert allowed == min(asked_gib * GIB, 20 * GIB - MARGIN) - CONTEXT
    assert fractions == [allowed / (24 * GIB)]


def test_a_bound_above_the_card_is_the_card(
    fractions: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: False)
    cap_allocator(limit_bytes=40 * GIB, free_bytes=20 * GIB, device=CARD)
    assert fractions == [1.0]

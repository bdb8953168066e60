"""The bound on the allocator: what was asked for, what the driver really has, or none."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lora_trainer.hardware.machine import spill_margin_bytes
from lora_trainer.planning.memory import RUNTIME_BYTES
from lora_trainer.run import device
from lora_trainer.run.device import cap_allocator

GIB = 2**30
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


@pytest.mark.parametrize(
    ("spills", "limit_gib", "allowed"),
    [
        (False, 8, 8 * GIB - CONTEXT),  # the context counts in what is asked for
        (False, None, None),  # where the driver refuses, no bound is needed
        (False, 40, 24 * GIB),  # a bound above the card is the card
        (True, None, 20 * GIB - MARGIN - CONTEXT),  # where it spills there always is one
        (True, 22, 20 * GIB - MARGIN - CONTEXT),
    ],
)
def test_the_bound_on_the_allocator(
    spills: bool,
    limit_gib: int | None,
    allowed: int | None,
    fractions: list[float],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(device, "driver_spills", lambda: spills)
    limit_bytes = None if limit_gib is None else limit_gib * GIB
    assert cap_allocator(limit_bytes=limit_bytes, free_bytes=20 * GIB, device=CARD) == allowed
    assert fractions == ([] if allowed is None else [allowed / (24 * GIB)])

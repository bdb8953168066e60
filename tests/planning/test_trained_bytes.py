"""Bytes of optimizer states and of the copies a save makes, against the libraries and a real save."""

from __future__ import annotations

import math
from collections import Counter
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer.checkpoint.states import TrainingState
from lora_trainer.checkpoint.writer import StateWriter
from lora_trainer.common.events import EventStream
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.lora.adapter import inject
from lora_trainer.planning import optimizer_facts
from lora_trainer.training.optimizers import build_optimizer

PAGED_ELEMENTS = 100_000
SIZES = (1, 255, 4095, 4096, 5000, PAGED_ELEMENTS)
SHARED = ("step", "qmap1", "qmap2")
"""Of a few bytes, or one for all tensors."""


TRAINED = ((16, 320), (1280, 16), (4, 8, 3, 3), (12, 4, 1, 1), (5, 5), (7,), (2, 4, 4))


@pytest.mark.parametrize("name", optimizer_facts.OPTIMIZERS)
def test_states_of_every_optimizer_are_as_large_as_its_library_makes_them(name: str) -> None:
    """Where what is trained starts at zero, Prodigy keeps nothing of its start, which is counted."""
    sizes = [(elements,) for elements in SIZES] if name.startswith("adamw") else []
    for shape, start in product((*TRAINED, *sizes), (0.0, 1.0)):
        parameter = nn.Parameter(torch.full(shape, start))
        settings = OptimizerSettings.model_validate({"name": name})
        optimizer = build_optimizer([{"params": [parameter], "lr_scale": 1.0}], settings)
        real = sum(
            value.nbytes
            for key, value in optimizer.state[parameter].items()
            if torch.is_tensor(value) and value.dim() and key not in SHARED
        )
        spared = parameter.nbytes if name == "prodigy" and not start else 0
        assert sum(optimizer_facts.state_bytes({shape: 3}, name)) == 3 * (real + spared), shape


@pytest.mark.parametrize(
    ("elements", "paged"), [(PAGED_ELEMENTS - 1, False), (PAGED_ELEMENTS, True)]
)
def test_bitsandbytes_pages_what_is_counted_as_paged(
    elements: int, paged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own rule is asked with a stand-in for a tensor on a GPU."""
    import bitsandbytes.optim.optimizer as library
    from bitsandbytes.optim import PagedAdamW8bit

    asked: list[int] = []

    def get_paged(*shape: int, **_: Any) -> Any:
        asked.append(math.prod(shape))

    optimizer = PagedAdamW8bit([nn.Parameter(torch.zeros(1))])
    monkeypatch.setattr(library.F, "get_paged", get_paged)
    monkeypatch.setattr(library.F, "fill", lambda *_: None)
    monkeypatch.setattr(library.torch, "zeros_like", lambda *_, **__: None)
    on_card: Any = SimpleNamespace(
        device=torch.device("cuda"), numel=lambda: elements, shape=(elements,)
    )
    optimizer.get_state_buffer(on_card, dtype=torch.uint8)
    assert bool(asked) is paged
    on_device, paged_bytes = optimizer_facts.state_bytes({(elements,): 3}, "paged_adamw8bit")
    assert paged_bytes == (3 * 2 * elements if paged else 0)
    assert (on_device + paged_bytes, 0) == optimizer_facts.state_bytes(
        {(elements,): 3}, "adamw8bit"
    )
    assert on_device > 0, "its scales are never paged"


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_copies_are_those_that_a_save_keeps(name: str, tmp_path: Path) -> None:
    network = nn.Sequential(nn.Linear(300, 70), nn.Linear(70, 90)).requires_grad_(False)
    plain = AdapterSettings.model_validate({"rank": 16})
    modules = {"denoiser": ["0", "1"]}
    adapter = inject({"denoiser": network}, modules=modules, settings=plain, alpha=16.0, seed=1)
    settings = OptimizerSettings.model_validate({"name": name})
    optimizer = build_optimizer(adapter.groups(settings), settings)
    writer = StateWriter(folder=tmp_path, keep=2, events=EventStream())
    state = TrainingState(
        step=1, images_seen=1, adapter=adapter.state(), optimizer=optimizer.state_dict(), guard={}
    )

    def exported(copy: Any) -> Any:
        for key, module in adapter.tensors().items():
            for part, tensor in module.tensors.items():
                copy(f"export.{key}.{part}", tensor)
        return lambda: "a file"

    with writer:
        writer.save(state, export=exported)
    kept = sum(
        tensor.nbytes
        for key, tensor in writer.copies.buffers.items()
        if key.rpartition(".")[2] not in SHARED
    )
    tensors = Counter(tuple(parameter.shape) for parameter in adapter.parameters())
    assert optimizer_facts.copied_bytes(tensors, name, pinned=False) == kept
    assert kept < optimizer_facts.copied_bytes(tensors, name, pinned=True)

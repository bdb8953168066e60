"""Resume states that differ in every bit, and what makes two of them equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from lora_trainer.checkpoint.states import TrainingState, freeze, load_newest, write_state


def state_at(step: int, *, seed: int | None = None) -> TrainingState:
    generator = torch.Generator().manual_seed(step if seed is None else seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    shared = draw(16)
    return TrainingState(
        step=step,
        images_seen=4 * step,
        adapter={"b.up": draw(6, 2), "a.down": draw(2, 5), "c.conv": draw(2, 3, 3, 3)},
        optimizer={
            "state": {
                0: {"step": torch.tensor(float(step)), "exp_avg": draw(6, 2), "qmap": shared},
                1: {"step": 7, "wrapped": {"state1": (draw(9) * 50).to(torch.uint8), "q": shared}},
            },
            "param_groups": [
                {"lr": 0.1 * step, "betas": (0.9, 0.999), "fused": None, "params": [0, 1]}
            ],
        },
        guard={
            "micro_batch": 3,
            "losses": [0.1, -0.0, math.inf, 1e-320],
            "trend": {"mean": 65536.0, "count": 2**70},
            "lowered": True,
            "rung": None,
        },
        loss_scale=65536.0,
        loss_scale_growth=2**70,
    )


def save_state(folder: Path, state: TrainingState, *, keep: int = 2) -> Path:
    return write_state(folder, freeze(state), keep=keep)


def bits(value: Any) -> Any:
    """Return a value in which equality means equal bits, tensors and floats included."""
    if isinstance(value, torch.Tensor):
        data = value.contiguous().reshape(-1).view(torch.uint8)
        return (str(value.dtype), tuple(value.shape), bytes(data.tolist()))
    if isinstance(value, float):
        return ("float", value.hex())
    if isinstance(value, TrainingState):
        return bits(vars(value))
    if isinstance(value, Mapping):
        return {(type(key), key): bits(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return (type(value), [bits(item) for item in value])
    return (type(value), value)


def loaded_step(folder: Path) -> int | None:
    """Load without faults; the state found must be whole, and nothing half-done may be left."""
    found = load_newest(folder, events=None)
    if found is None:
        return None
    assert bits(found) == bits(state_at(found.step))
    assert not [path.name for path in folder.iterdir() if path.name.startswith(".")]
    return found.step

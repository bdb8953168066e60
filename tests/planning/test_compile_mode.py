"""The mode of torch.compile: kept where it can be used, else `default` with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.plan import plan
from tests.fakes.plans import machine, planned, request

BLOCKS = {"hardware.compile": "blocks", "memory.gradient_checkpointing": "full"}


def mode_and_reason(mode: str, hardware: Hardware, **overrides: Any) -> tuple[str, str]:
    settings = {**BLOCKS, "hardware.compile_mode": mode}
    settings |= {key.replace("__", "."): value for key, value in overrides.items()}
    made = plan(request(None, hardware, overrides=settings))
    return made.config.hardware.compile_mode, made.origins["hardware.compile_mode"].reason


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_a_mode_that_can_be_used_stays(mode: str) -> None:
    assert mode_and_reason(mode, machine(24))[0] == mode


@pytest.mark.parametrize(
    ("mode", "gib", "overrides", "why"),
    [
        ("reduce-overhead", 24, {"hardware__compile": "none"}, "nothing is compiled"),
        ("reduce-overhead", 24, {"adapter__dropout": 0.1}, "nothing is compiled"),
        ("reduce-overhead", 24, {"memory__streamed_blocks": 2}, "at another address"),
        (
            "reduce-overhead",
            24,
            {"train__batch_size": 4, "memory__micro_batch": 2},
            "several passes a step",
        ),
        ("max-autotune", 24, {"train__deterministic": True}, "by their time"),
    ],
)
def test_a_mode_that_cannot_be_used_says_why(
    mode: str, gib: int, overrides: dict[str, Any], why: str
) -> None:
    chosen, reason = mode_and_reason(mode, machine(gib), **overrides)
    assert chosen == "default" and f"instead of {mode}" in reason and why in reason


def test_graphs_are_a_gpus_alone() -> None:
    made = planned(
        overrides={**BLOCKS, "hardware.compile_mode": "reduce-overhead", "hardware.device": "cpu"}
    )
    assert made.config.hardware.compile_mode == "default"
    assert "only a GPU has CUDA graphs" in made.origins["hardware.compile_mode"].reason

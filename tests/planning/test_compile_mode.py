"""When blocks are compiled by themselves; the mode: kept where it can be used, else `default` with the reason."""

from __future__ import annotations

from typing import Any

import pytest

from lora_trainer.hardware.machine import Hardware
from lora_trainer.planning.plan import compiled_sizes, plan
from tests.fakes.plans import machine, planned, request

SERVER = machine(80, ram_gib=200)
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
        ("reduce-overhead", 24, {"adapter__dora": True}, "nothing is compiled"),
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


# ---- hardware.compile=auto

FLUX = "black-forest-labs/FLUX.1-dev"
Z_IMAGE = "Tongyi-MAI/Z-Image"
LONG = {"train.steps": 3000}


def chosen(base: str, hardware: Hardware = SERVER, **overrides: Any) -> tuple[str, str]:
    """Return what `auto` becomes, and why."""
    settings = {key.replace("__", "."): value for key, value in overrides.items()}
    made = plan(request(base, hardware, overrides=settings))
    return made.config.hardware.compile, made.origins["hardware.compile"].reason


@pytest.mark.parametrize("base", [FLUX, Z_IMAGE])
def test_a_long_run_is_compiled_and_a_short_one_not(base: str) -> None:
    long, short = (chosen(base, train__steps=steps) for steps in (3000, 20))
    assert (long[0], short[0]) == ("blocks", "none")
    for _, why in (long, short):
        assert "compiling" in why and "by what others measured" in why


def test_what_is_not_known_to_gain_is_left_out_by_itself_and_not_when_it_is_asked_for() -> None:
    without = {"triton": None}
    for hardware, overrides, why in (
        (machine(80, packages=without, ram_gib=200), LONG, "Triton, which compiles for GPUs"),
        (machine(80, ram_gib=200, compute_capability=(6, 1)), LONG, "7.0 or higher"),
        (SERVER, {**LONG, "memory.streamed_blocks": 4}, "wait for copies"),
        (SERVER, {**LONG, "hardware.device": "cpu"}, "on a GPU only"),
    ):
        made = plan(
            request("stabilityai/stable-diffusion-xl-base-1.0", hardware, overrides=overrides)
        )
        assert made.config.hardware.compile == "none"
        assert why in made.origins["hardware.compile"].reason
        asked = {**overrides, "hardware.compile": "blocks"}
        made = plan(request("stabilityai/stable-diffusion-xl-base-1.0", hardware, overrides=asked))
        assert made.config.hardware.compile == "blocks"


@pytest.mark.parametrize(
    "overrides",
    [
        {"adapter.dropout": 0.1, "adapter.rank_dropout": 0.1},
        {"adapter.kind": "oft", "optimizer.name": "adamw"},
        {"memory.gradient_checkpointing": "selective"},
        {"memory.gradient_checkpointing": "light"},
        {"memory.gradient_checkpointing": "none"},
        {"objective.contrast_scale": 3.5},
        {"memory.base_precision": "int8"},
    ],
)
def test_levels_masks_and_passes_without_gradients_are_no_obstacle(
    overrides: dict[str, Any],
) -> None:
    made = plan(request(FLUX, SERVER, overrides={**LONG, **overrides}))
    assert made.config.hardware.compile == "blocks"


@pytest.mark.parametrize("kind", ["loha", "lokr"])
def test_peft_s_own_layers_are_left_out(kind: str) -> None:
    assert chosen(FLUX, **{"adapter.kind": kind}, **LONG)[0] == "none"


def test_one_code_serves_all_sizes_where_there_are_several() -> None:
    def sizes(base: str, mode: str = "default", **changes: Any) -> tuple[int, bool]:
        inputs = request(base, SERVER, overrides={**LONG, "hardware.compile_mode": mode}, **changes)
        made = plan(inputs)
        shapes, any_size = compiled_sizes(inputs, made.config, images_at_once=made.images_at_once)
        return len(shapes), any_size

    buckets = {"buckets": ((1024, 1024), (768, 1344), (1344, 768))}
    assert sizes(FLUX, buckets=((1024, 1024),)) == (1, False), "code of its own is the fastest"
    assert sizes(FLUX, **buckets) == (3, True)
    assert sizes(FLUX, "reduce-overhead", **buckets) == (3, False), "a graph is of one size"
    assert sizes(Z_IMAGE, buckets=((1024, 1024),)) == (1, True), "lengths of texts differ"

"""Optimizer state before the first step, and the learning rate as a formula of the step."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import OptimizerSettings
from lora_trainer.hardware.devices import KINDS
from lora_trainer.training.optimizers import (
    build_optimizer,
    learning_rate,
    restore_optimizer,
    set_learning_rate,
)

SCHEDULES = st.sampled_from(["constant", "linear", "cosine"])
NAMES = pytest.mark.parametrize("name", ["adamw", "adamw8bit", "paged_adamw8bit"])
EIGHT_BIT = pytest.mark.parametrize("name", ["adamw8bit", "paged_adamw8bit"])


def settings(name: str = "adamw") -> OptimizerSettings:
    return OptimizerSettings.model_validate(
        {"name": name, "learning_rate": 1e-2, "beta1": 0.8, "beta2": 0.9, "weight_decay": 0.2}
    )


def parameters() -> list[nn.Parameter]:
    """One tensor that 8-bit optimizers keep in 8 bits (4096 elements or more) and a small one."""
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(n, 16, generator=generator)) for n in (256, 3)]


def one_group(own: list[nn.Parameter], scale: float = 1.0) -> dict[str, Any]:
    return {"params": own, "lr_scale": scale}


def give_gradients(own: list[nn.Parameter], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in own:
        parameter.grad = torch.randn(parameter.shape, generator=generator)


@NAMES
def test_state_is_there_before_the_first_step_and_nothing_moved(name: str) -> None:
    own, untouched = parameters(), parameters()
    optimizer = build_optimizer([one_group(own)], settings(name))
    assert all(torch.equal(a, b) for a, b in zip(own, untouched, strict=True))
    assert all(parameter.grad is None for parameter in own)
    assert [group["lr"] for group in optimizer.param_groups] == [1e-2]
    for parameter in own:
        state = optimizer.state[parameter]
        assert float(state["step"]) == 0
        assert len([value for value in state.values() if torch.is_tensor(value)]) >= 2


@NAMES
def test_real_steps_equal_those_of_a_fresh_optimizer(name: str) -> None:
    """Also proves the settings arrive: every one of them moves the second step."""
    from bitsandbytes.optim import AdamW8bit

    own, reference = parameters(), parameters()
    make = torch.optim.AdamW if name == "adamw" else AdamW8bit
    fresh = make(reference, lr=1e-2, betas=(0.8, 0.9), eps=1e-8, weight_decay=0.2)
    optimizer = build_optimizer([one_group(own)], settings(name))
    for seed in (7, 8):
        give_gradients(own, seed)
        give_gradients(reference, seed)
        optimizer.step()
        fresh.step()
        for mine, other in zip(own, reference, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


@EIGHT_BIT
def test_the_8_bit_optimizers_keep_8_bits(name: str) -> None:
    own = parameters()
    optimizer = build_optimizer([one_group(own)], settings(name))
    assert optimizer.state[own[0]]["state1"].dtype == torch.uint8


@EIGHT_BIT
def test_a_missing_bitsandbytes_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.optim", None)
    with pytest.raises(MachineError, match=f"optimizer.name={name} needs bitsandbytes"):
        build_optimizer([one_group(parameters())], settings(name))


def test_a_gpu_gets_the_paged_class_and_a_cpu_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU all state is in host memory, and the paged class would only warn of that."""
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    own = parameters()
    assert type(build_optimizer([one_group(own)], settings("paged_adamw8bit"))) is AdamW8bit
    monkeypatch.setattr("lora_trainer.training.optimizers.kind_of", lambda _: KINDS["cuda"])
    made = []
    monkeypatch.setattr("lora_trainer.training.optimizers._allocate", made.append)
    build_optimizer([one_group(own)], settings("paged_adamw8bit"))
    build_optimizer([one_group(own)], settings("adamw8bit"))
    assert [type(optimizer) for optimizer in made] == [PagedAdamW8bit, AdamW8bit]


@NAMES
def test_a_restored_optimizer_goes_on_to_the_same_bits(name: str) -> None:
    own = parameters()
    straight = build_optimizer([one_group(own)], settings(name))
    for seed in range(4):
        if seed == 2:
            state = copy.deepcopy(straight.state_dict())
            other = [nn.Parameter(parameter.detach().clone()) for parameter in own]
        give_gradients(own, seed)
        straight.step()
    restored = build_optimizer([one_group(other)], settings(name))
    restore_optimizer(restored, state)
    for seed in (2, 3):
        give_gradients(other, seed)
        restored.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(own, other, strict=True))


def test_a_resume_takes_the_factors_of_its_own_settings_not_those_of_the_state() -> None:
    """A lower learning rate beside a text encoder's own raises the factor of the text encoder."""
    own, other = parameters(), parameters()
    saved = build_optimizer([one_group(own[:1]), one_group(own[1:], 0.5)], settings())
    lower = settings().model_copy(update={"learning_rate": 1e-3})
    restored = build_optimizer([one_group(other[:1]), one_group(other[1:], 5.0)], lower)
    restore_optimizer(restored, saved.state_dict())
    set_learning_rate(restored, 1e-3)
    assert [group["lr"] for group in restored.param_groups] == [1e-3, 5e-3]


def test_a_state_that_is_grouped_otherwise_is_refused_by_name() -> None:
    own, other = parameters(), parameters()
    saved = build_optimizer([one_group(own[:1]), one_group(own[1:], 0.5)], settings())
    merged = build_optimizer([one_group(other)], settings())
    with pytest.raises(RequestError, match="groups the layers by learning rate otherwise"):
        restore_optimizer(merged, saved.state_dict())


def test_paged_state_is_filled_where_it_is_and_not_replaced() -> None:
    """bitsandbytes marks managed memory by an attribute, and puts new tensors in its place."""
    own, other = parameters(), parameters()
    saved = build_optimizer([one_group(own)], settings("adamw8bit"))
    give_gradients(own, 1)
    saved.step()
    optimizer = build_optimizer([one_group(other)], settings("paged_adamw8bit"))
    paged = {name: optimizer.state[other[0]][name] for name in ("state1", "state2")}
    for tensor in paged.values():
        tensor.is_paged = True
    restore_optimizer(optimizer, saved.state_dict())
    assert all(optimizer.state[other[0]][name] is tensor for name, tensor in paged.items())
    found, wanted = optimizer.state[other[0]], saved.state[own[0]]
    assert all(torch.equal(found[name], wanted[name]) for name in ("state1", "state2", "absmax1"))


@NAMES
def test_a_plain_group_moves_bit_for_bit_as_a_list_of_parameters(name: str) -> None:
    """Trajectories of runs must not change because groups exist."""
    from bitsandbytes.optim import AdamW8bit

    own, reference = parameters(), parameters()
    optimizer = build_optimizer([one_group(own)], settings(name))
    shared: Mapping[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-8, "weight_decay": 0.2}
    make = partial(torch.optim.AdamW, fused=True) if name == "adamw" else AdamW8bit
    plain: torch.optim.Optimizer = make(reference, **shared)
    for seed in (7, 8):
        set_learning_rate(optimizer, 3e-3)
        plain.param_groups[0]["lr"] = 3e-3
        for each, tensors in ((optimizer, own), (plain, reference)):
            give_gradients(tensors, seed)
            each.step()
    assert all(torch.equal(mine, other) for mine, other in zip(own, reference, strict=True))


@NAMES
def test_each_group_learns_at_its_share_of_the_rate(name: str) -> None:
    """The first step of AdamW without decay is the learning rate, whatever the gradient."""
    slow, fast = parameters()
    chosen = OptimizerSettings.model_validate(
        {"name": name, "learning_rate": 1e-2, "weight_decay": 0.0}
    )
    optimizer = build_optimizer([one_group([slow], 0.5), one_group([fast], 16.0)], chosen)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-3, pytest.approx(0.16)]
    before = [slow.detach().clone(), fast.detach().clone()]
    set_learning_rate(optimizer, 1e-3)
    assert [group["lr"] for group in optimizer.param_groups] == [5e-4, 1.6e-2]
    give_gradients([slow, fast], 7)
    optimizer.step()
    moved = [
        float((after.detach() - value).abs().median())
        for after, value in zip((slow, fast), before, strict=True)
    ]
    assert moved == [pytest.approx(5e-4, rel=0.02), pytest.approx(1.6e-2, rel=0.02)]


def test_a_restored_optimizer_keeps_the_factors_of_its_groups() -> None:
    def built() -> torch.optim.Optimizer:
        slow, fast = parameters()
        return build_optimizer([one_group([slow]), one_group([fast], 3.0)], settings())

    restored = built()
    restored.load_state_dict(built().state_dict())
    set_learning_rate(restored, 1.0)
    assert [group["lr"] for group in restored.param_groups] == [1.0, 3.0]


def rates(schedule: str, steps: int, warmup: float, rate: float = 2e-4) -> list[float]:
    chosen = OptimizerSettings.model_validate(
        {"learning_rate": rate, "schedule": schedule, "warmup_fraction": warmup}
    )
    formula = learning_rate(chosen, steps=steps)
    return [formula(step) for step in range(steps)]


@example(schedule="cosine", steps=1, warmup=0.9, rate=1.0)
@example(schedule="linear", steps=4, warmup=0.9, rate=1.0)
@given(
    schedule=SCHEDULES,
    steps=st.integers(1, 400),
    warmup=st.floats(0.0, 0.9),
    rate=st.floats(1e-6, 1.0),
)
def test_every_step_trains_and_the_peak_is_the_setting(
    schedule: str, steps: int, warmup: float, rate: float
) -> None:
    found = rates(schedule, steps, warmup, rate)
    peak = found.index(max(found))
    assert min(found) > 0
    assert max(found) == pytest.approx(rate, rel=1e-9)
    assert all(a < b for a, b in pairwise(found[: peak + 1])), "it rises to the peak"
    assert all(a >= b for a, b in pairwise(found[peak:])), "and never again after it"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_decaying_schedules_end_near_zero(schedule: str) -> None:
    found = rates(schedule, 200, 0.1)
    assert found[20] == pytest.approx(2e-4) and found[-1] < 0.02 * 2e-4
    middle = found[20 + 90] / 2e-4
    assert middle == pytest.approx(0.5, abs=0.01)


def test_constant_stays_after_its_warm_up() -> None:
    found = rates("constant", 100, 0.1)
    assert found[:10] == pytest.approx([2e-4 * (step + 1) / 11 for step in range(10)])
    assert found[10:] == pytest.approx([2e-4] * 90)


def test_linear_and_cosine_differ() -> None:
    linear, cosine = rates("linear", 100, 0.0), rates("cosine", 100, 0.0)
    assert cosine[25] > 1.1 * linear[25] and cosine[75] < 0.7 * linear[75]


def test_the_rate_is_a_pure_function_of_the_step() -> None:
    """A resumed run asks for step k without having asked for the steps before."""
    formula = learning_rate(OptimizerSettings(), steps=50)
    forward = [formula(step) for step in range(50)]
    assert [formula(step) for step in reversed(range(50))] == forward[::-1]
    assert learning_rate(OptimizerSettings(), steps=50)(31) == forward[31]

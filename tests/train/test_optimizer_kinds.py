"""Every optimizer: it is the one that was asked for, learns, begins as new, and comes back from a state."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, get_args

import pytest
import torch
from torch import nn

from lora_trainer.checkpoint.codec import Packed, pack, unpack
from lora_trainer.common.errors import MachineError
from lora_trainer.config.config import SCHEDULE_FREE, OptimizerName, OptimizerSettings, all_settings
from lora_trainer.config.constraints import OPTIMIZER_PACKAGES
from lora_trainer.planning.optimizer_facts import RATE, needed_otherwise
from lora_trainer.training.optimizers import (
    averaged_weights,
    build_optimizer,
    effective_rate,
    learning_rate,
    make_optimizer,
    restore_optimizer,
    set_learning_rate,
)

NAMES: tuple[OptimizerName, ...] = get_args(OptimizerName)
EVERY = pytest.mark.parametrize("name", NAMES)
SHAPES = ((256, 16), (8, 24), (12,), (4, 3, 3, 3))
MODULES = {
    "bitsandbytes": "bitsandbytes.optim",
    "prodigyopt": "prodigyopt",
    "pytorch-optimizer": "pytorch_optimizer",
    "schedulefree": "schedulefree",
}


def settings(name: str, **values: Any) -> OptimizerSettings:
    rate = 1.0 if name == "prodigy" else 1e-2
    return OptimizerSettings.model_validate({"name": name, "learning_rate": rate, **values})


def parameters() -> list[nn.Parameter]:
    """A tensor that is kept in 8 bits, a matrix, a vector and a kernel; the matrix starts at zero."""
    generator = torch.Generator().manual_seed(1)
    found = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
    found[1].data.zero_()
    return found


def groups(own: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    return [{"params": list(own), "lr_scale": 1.0}]


def walk(
    optimizer: torch.optim.Optimizer,
    own: Sequence[nn.Parameter],
    seeds: Sequence[int],
    *,
    drift: float = 0.5,
) -> None:
    """Take a step for each seed, with gradients that have a direction in common."""
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        for parameter in own:
            parameter.grad = torch.randn(parameter.shape, generator=generator) + drift
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def walked(
    name: str, seeds: Sequence[int] = range(4), *, drift: float = 0.5, **values: Any
) -> torch.Tensor:
    own = parameters()
    walk(build_optimizer(groups(own), settings(name, **values)), own, seeds, drift=drift)
    return flat(own)


def flat(own: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in own])


@EVERY
def test_it_begins_as_new_and_has_moved_nothing(name: str) -> None:
    own, fresh = parameters(), parameters()
    allocated = build_optimizer(groups(own), settings(name))
    assert torch.equal(flat(own), flat(parameters()))
    assert len(allocated.state) == len(own), "all of its state is there"
    before = sizes(allocated)
    new = make_optimizer([{**groups(fresh)[0], "lr": settings(name).learning_rate}], settings(name))
    for seed in range(4):
        walk(allocated, own, [seed])
        walk(new, fresh, [seed])
        assert torch.equal(flat(own), flat(fresh)), f"step {seed}"
    assert sizes(allocated) == before == sizes(new), "no step takes memory"


def sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [
        sum(value.numel() for value in state.values() if torch.is_tensor(value) and value.dim())
        for state in optimizer.state.values()
    ]


def test_no_two_move_alike() -> None:
    """But for AdamW with paged state, which is the one with state in 8 bits on a CPU."""
    found = {name: walked(name) for name in NAMES if name != "paged_adamw8bit"}
    for name, one in found.items():
        assert not any(
            torch.equal(one, other) for another, other in found.items() if another != name
        ), name


@EVERY
def test_it_lowers_a_loss_at_the_rate_it_is_given(name: OptimizerName) -> None:
    """An update of rank 2 is found by a factorised one, from noisy samples of it."""
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randn(24, 2, generator=generator) @ torch.randn(2, 32, generator=generator) / 8
    down = nn.Parameter(torch.randn(4, 32, generator=generator) / 6)
    up = nn.Parameter(torch.zeros(24, 4))
    given = {key.partition(".")[2]: v for key, v, _ in needed_otherwise(name, preset_rate=1e-2)}
    chosen = OptimizerSettings.model_validate({"name": name, "learning_rate": 1e-2, **given})
    optimizer = build_optimizer(groups([down, up]), chosen)
    steps = 400 if name in ("lion", "lion8bit", "prodigy") else 150
    rate = learning_rate(chosen, steps=steps)
    for step in range(steps):
        set_learning_rate(optimizer, rate(step))
        inputs = torch.randn(32, 16, generator=generator)
        (up @ (down @ inputs) - wanted @ inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with averaged_weights(optimizer) if name == SCHEDULE_FREE else nullcontext():
        left = (up @ down - wanted).detach().square().sum() / wanted.square().sum()
    assert float(left) < 0.35


@EVERY
def test_a_state_that_was_written_down_goes_on_to_the_same_bits(name: str) -> None:
    own, other = parameters(), parameters()
    straight = build_optimizer(groups(own), settings(name))
    walk(straight, own, range(3))
    state, weights = written_and_read(straight), flat(own)
    walk(straight, own, range(3, 6))

    restored = build_optimizer(groups(other), settings(name))
    walk(restored, other, range(20, 25))  # a rollback comes from somewhere else
    put(weights, other)
    restore_optimizer(restored, state)
    walk(restored, other, range(3, 6))
    assert torch.equal(flat(other), flat(own))
    assert same(written_and_read(restored), written_and_read(straight))


@EVERY
def test_it_can_go_back_to_its_beginning(name: str) -> None:
    own = parameters()
    optimizer = build_optimizer(groups(own), settings(name))
    state, weights = written_and_read(optimizer), flat(own)
    walk(optimizer, own, range(3))
    first = flat(own)
    put(weights, own)
    restore_optimizer(optimizer, state)
    walk(optimizer, own, range(3))
    assert torch.equal(flat(own), first)


def written_and_read(optimizer: torch.optim.Optimizer) -> Any:
    packed = pack(optimizer.state_dict())
    return unpack(Packed(tree=json.loads(json.dumps(packed.tree)), tensors=packed.tensors))


def put(values: torch.Tensor, own: Sequence[nn.Parameter]) -> None:
    parts = values.split([parameter.numel() for parameter in own])
    for parameter, part in zip(own, parts, strict=True):
        parameter.data.copy_(part.view_as(parameter))


def same(one: Any, other: Any) -> bool:
    if torch.is_tensor(one):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


@EVERY
def test_what_gets_no_gradient_stays_as_it_is(name: str) -> None:
    """Text encoders and new words may stop being trained before the end."""
    own = parameters()
    optimizer = build_optimizer(groups(own), settings(name, weight_decay=0.5))
    walk(optimizer, own, range(3))
    for stopped in (own[:2], own):
        before = flat(stopped)
        moving = own[len(stopped) :]
        walk(optimizer, moving, range(3))
        assert torch.equal(flat(stopped), before)


TRIED: dict[str, Any] = {
    "beta1": 0.7,
    "beta2": 0.9,
    "epsilon": 0.1,
    "weight_decay": 0.5,
    "muon_momentum": 0.5,
    "prodigy_d_coef": 4.0,
    "prodigy_growth_rate": 1.01,
}


@pytest.mark.parametrize("setting", TRIED)
@EVERY
def test_a_setting_counts_exactly_where_it_is_said_to(name: str, setting: str) -> None:
    info = next(info for info in all_settings() if info.key == f"optimizer.{setting}")
    # Adafactor's decay is below any limit at first, Prodigy's rate almost zero.
    seeds, drift = range(24), 9.0 if name == "prodigy" else 0.5
    default = walked(name, seeds, drift=drift)
    moved = not torch.equal(walked(name, seeds, drift=drift, **{setting: TRIED[setting]}), default)
    assert moved is not bool(info.unused({"optimizer.name": name}))


@pytest.mark.parametrize(
    ("name", "setting"),
    [("prodigy", "prodigy_d_coef"), ("muon", "muon_momentum"), (SCHEDULE_FREE, "beta2")],
)
def test_a_resume_keeps_the_settings_it_was_given(name: str, setting: str) -> None:
    def resumed(value: Any) -> torch.Tensor:
        own = parameters()
        saved = build_optimizer(groups(own), settings(name))
        walk(saved, own, range(16))
        other = build_optimizer(groups(own), settings(name, **{setting: value}))
        restore_optimizer(other, written_and_read(saved))
        walk(other, own, range(16, 32))
        return flat(own)

    default = getattr(settings(name), setting)
    assert torch.equal(resumed(default), walked(name, range(32)))
    assert not torch.equal(resumed(TRIED[setting]), resumed(default))


@pytest.mark.parametrize("name", [name for name in NAMES if name != "prodigy"])
def test_each_group_learns_at_its_share_of_the_rate(name: str) -> None:
    """Prodigy has one rate for all: its settings refuse another."""
    own = parameters()
    slow, fast = own[0], nn.Parameter(own[0].detach().clone())
    before = slow.detach().clone()
    optimizer = build_optimizer(
        [{"params": [slow], "lr_scale": 0.5}, {"params": [fast], "lr_scale": 4.0}],
        settings(name, weight_decay=0.0),
    )
    set_learning_rate(optimizer, 1e-3)
    slow.grad = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1))
    fast.grad = slow.grad.clone()
    optimizer.step()
    moved = [float((tensor.detach() - before).norm()) for tensor in (slow, fast)]
    assert moved[1] == pytest.approx(8 * moved[0], rel=1e-3)


@EVERY
def test_a_missing_library_is_named_with_what_to_install(
    name: OptimizerName, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = OPTIMIZER_PACKAGES.get(name)
    if package is None:
        assert name == "adamw"
        return
    monkeypatch.setitem(sys.modules, MODULES[package], None)
    with pytest.raises(MachineError, match=f"optimizer.name={name} needs {package}") as caught:
        build_optimizer(groups(parameters()), settings(name))
    assert f"pip install -U {package}" in caught.value.fix


def test_making_one_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    """Prodigy announces its weight decay, which would stand among what scripts read."""
    for name in NAMES:
        build_optimizer(groups(parameters()), settings(name, weight_decay=0.1))
    assert capfd.readouterr().out == ""


def test_prodigys_rate_is_what_it_has_found() -> None:
    own = parameters()
    optimizer = build_optimizer(groups(own), settings("prodigy"))
    first = effective_rate(optimizer, 0.5)
    walk(optimizer, own, range(30), drift=9.0)
    assert first == pytest.approx(0.5e-6)
    assert effective_rate(optimizer, 0.5) > 2 * first
    plain = build_optimizer(groups(parameters()), settings("adamw"))
    assert effective_rate(plain, 0.5) == 0.5


def test_muon_moves_matrices_by_their_singular_vectors_and_the_rest_by_adamw() -> None:
    own = parameters()
    before = [parameter.detach().clone() for parameter in own]
    walk(build_optimizer(groups(own), settings("muon", weight_decay=0.0)), own, [0])
    adamw = parameters()
    walk(build_optimizer(groups(adamw), settings("adamw", weight_decay=0.0)), adamw, [0])
    wide = before[0] - own[0].detach()
    values = torch.linalg.svdvals(wide) / (1e-2 * 0.2 * 16)  # rate, and 0.2 sqrt(256)
    assert values.min() > 0.5 and values.max() < 1.5
    for mine, other in zip(own[2:], adamw[2:], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_muon_leaves_the_vectors_of_words_to_adamw() -> None:
    own, adamw = parameters()[:1], parameters()[:1]
    words = {**groups(own)[0], "embedding": True}
    walk(build_optimizer([words], settings("muon", weight_decay=0.0)), own, range(3))
    walk(build_optimizer(groups(adamw), settings("adamw", weight_decay=0.0)), adamw, range(3))
    torch.testing.assert_close(own, adamw, rtol=1e-4, atol=1e-6)


def test_the_average_is_the_librarys_and_the_weights_come_back_to_the_bit() -> None:
    own, other = parameters(), parameters()
    optimizer = build_optimizer(groups(own), settings(SCHEDULE_FREE))
    theirs: Any = build_optimizer(groups(other), settings(SCHEDULE_FREE))
    walk(optimizer, own, range(5))
    walk(theirs, other, range(5))
    theirs.eval()
    trained, storage = flat(own), [parameter.data_ptr() for parameter in own]
    state = written_and_read(optimizer)
    with pytest.raises(ZeroDivisionError), averaged_weights(optimizer):
        assert torch.equal(flat(own), flat(other))
        assert not torch.allclose(flat(own), trained, atol=1e-4)
        raise ZeroDivisionError  # an out-of-memory error for instance
    assert torch.equal(flat(own), trained)
    assert [parameter.data_ptr() for parameter in own] == storage
    assert same(written_and_read(optimizer), state)
    walk(optimizer, own, [5])


@EVERY
def test_a_preset_of_adamw_is_turned_into_its_own(name: OptimizerName) -> None:
    found = {key: value for key, value, _ in needed_otherwise(name, preset_rate=1e-4)}
    rates = {"prodigy": 1.0, "lion": 2e-5, "lion8bit": 2e-5, "came": 1e-5, "muon": 2e-4}
    assert found.get(RATE, 1e-4) == rates.get(name, 1e-4)

"""Every optimizer: the one asked for, learns, begins as new, comes back from a state."""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.config import all_settings, build_config
from lora_trainer.config.optimizers import OPTIMIZERS, OptimizerSettings
from lora_trainer.hardware.devices import KINDS
from lora_trainer.planning.optimizer_facts import needed_otherwise, state_bytes
from lora_trainer.training import optimizers, schedules
from tests.fakes.states import bits

NAMES = tuple(OPTIMIZERS)
SCHEDULE_FREE = "schedulefree_adamw"
EVERY = pytest.mark.parametrize("name", NAMES)
SHAPES = ((256, 16), (8, 24), (12,), (4, 3, 3, 3))


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
    walk(optimizers.build_optimizer(groups(own), settings(name, **values)), own, seeds, drift=drift)
    return flat(own)


def flat(own: Sequence[nn.Parameter]) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in own])


@EVERY
def test_it_begins_as_new_and_has_moved_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Nor printed anything: Prodigy announces its weight decay, which would stand among what scripts read."""
    own, fresh = parameters(), parameters()
    allocated = optimizers.build_optimizer(groups(own), settings(name))
    assert torch.equal(flat(own), flat(parameters()))
    if not OPTIMIZERS[name].made_anew:
        assert len(allocated.state) == len(own), "all of its state is there"
    before = sizes(allocated)
    monkeypatch.setattr(optimizers, "_allocate", lambda optimizer: None)
    new = optimizers.build_optimizer(groups(fresh), settings(name))
    assert capfd.readouterr().out == ""
    for seed in range(4):
        walk(allocated, own, [seed])
        walk(new, fresh, [seed])
        assert torch.equal(flat(own), flat(fresh)), f"step {seed}: does its row need made_anew?"
    assert sizes(allocated) == sizes(new)
    assert OPTIMIZERS[name].made_anew or sizes(allocated) == before, "no step takes memory"


def sizes(optimizer: torch.optim.Optimizer) -> list[int]:
    return [
        sum(value.numel() for value in state.values() if torch.is_tensor(value) and value.dim())
        for state in optimizer.state.values()
    ]


# How often an optimizer's step reads a number from the device; others never do.
READS = {
    # Its library adds up the estimate of the rate in Python.
    "prodigy": 2 * len(SHAPES),
}


class Reads(TorchDispatchMode):
    """Counts how often a number is read from a tensor, for which the host waits where a device computes it."""

    READING = ("_local_scalar_dense", "nonzero", "masked_select", "equal")

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function.overloadpacket.__name__ in self.READING
        return function(*args, **(kwargs or {}))


@EVERY
def test_a_step_reads_numbers_only_where_a_reason_is_told(name: str) -> None:
    own = parameters()
    optimizer = optimizers.build_optimizer(groups(own), settings(name))
    with Reads() as reads:
        walk(optimizer, own, [0])
    assert reads.count == READS.get(name, 0)


@EVERY
def test_it_lowers_a_loss_at_the_rate_it_is_given(name: Any) -> None:
    """An update of rank 2 is found by a factorised one, from noisy samples of it."""
    generator = torch.Generator().manual_seed(3)
    wanted = torch.randn(24, 2, generator=generator) @ torch.randn(2, 32, generator=generator) / 8
    down = nn.Parameter(torch.randn(4, 32, generator=generator) / 6)
    up = nn.Parameter(torch.zeros(24, 4))
    given = {key.partition(".")[2]: v for key, v, _ in needed_otherwise(name, preset_rate=1e-2)}
    chosen = OptimizerSettings.model_validate({"name": name, "learning_rate": 1e-2, **given})
    optimizer = optimizers.build_optimizer(groups([down, up]), chosen)
    steps = 400 if name in ("lion", "lion8bit", "prodigy") else 150
    rate = schedules.learning_rate(chosen, steps=steps)
    for step in range(steps):
        optimizers.set_learning_rate(optimizer, rate(step))
        inputs = torch.randn(32, 16, generator=generator)
        (up @ (down @ inputs) - wanted @ inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizers.averaged_weights(optimizer) if name == SCHEDULE_FREE else nullcontext():
        left = (up @ down - wanted).detach().square().sum() / wanted.square().sum()
    assert float(left) < 0.35


@EVERY
def test_what_gets_no_gradient_stays_as_it_is(name: str) -> None:
    """Text encoders and new words may stop being trained before the end."""
    own = parameters()
    optimizer = optimizers.build_optimizer(groups(own), settings(name, weight_decay=0.5))
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
        saved = optimizers.build_optimizer(groups(own), settings(name))
        walk(saved, own, range(16))
        other = optimizers.build_optimizer(groups(own), settings(name, **{setting: value}))
        optimizers.restore_optimizer(other, copy.deepcopy(saved.state_dict()))
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
    optimizer = optimizers.build_optimizer(
        [{"params": [slow], "lr_scale": 0.5}, {"params": [fast], "lr_scale": 4.0}],
        settings(name, weight_decay=0.0),
    )
    optimizers.set_learning_rate(optimizer, 1e-3)
    slow.grad = torch.randn(slow.shape, generator=torch.Generator().manual_seed(1))
    fast.grad = slow.grad.clone()
    optimizer.step()
    moved = [float((tensor.detach() - before).norm()) for tensor in (slow, fast)]
    assert moved[1] == pytest.approx(8 * moved[0], rel=1e-3)


def test_a_missing_library_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pytorch_optimizer", None)
    with pytest.raises(MachineError, match="optimizer.name=muon needs pytorch-optimizer") as caught:
        optimizers.build_optimizer(groups(parameters()), settings("muon"))
    assert "pip install -U pytorch-optimizer" in caught.value.fix


def test_muon_moves_matrices_by_their_singular_vectors_and_the_rest_by_adamw() -> None:
    """The rest are other tensors, and the vectors of new words."""
    own, words = parameters(), parameters()[0]
    before = [parameter.detach().clone() for parameter in own]
    both = [*groups(own), {**groups([words])[0], "embedding": True}]
    muon = optimizers.build_optimizer(both, settings("muon", weight_decay=0.0))
    walk(muon, [words, *own[1:], own[0]], [0])  # gradients are drawn in this order
    adamw = parameters()
    walk(optimizers.build_optimizer(groups(adamw), settings("adamw", weight_decay=0.0)), adamw, [0])
    wide = before[0] - own[0].detach()
    values = torch.linalg.svdvals(wide) / (1e-2 * 0.2 * 16)  # rate, and 0.2 sqrt(256)
    assert values.min() > 0.5 and values.max() < 1.5
    for mine, other in zip([words, *own[2:]], [adamw[0], *adamw[2:]], strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-6)


def test_the_average_is_the_librarys_and_the_weights_come_back_to_the_bit() -> None:
    own, other = parameters(), parameters()
    optimizer = optimizers.build_optimizer(groups(own), settings(SCHEDULE_FREE))
    theirs: Any = optimizers.build_optimizer(groups(other), settings(SCHEDULE_FREE))
    walk(optimizer, own, range(5))
    walk(theirs, other, range(5))
    theirs.eval()
    trained, storage = flat(own), [parameter.data_ptr() for parameter in own]
    state = copy.deepcopy(optimizer.state_dict())
    with pytest.raises(ZeroDivisionError), optimizers.averaged_weights(optimizer):
        assert torch.equal(flat(own), flat(other))
        assert not torch.allclose(flat(own), trained, atol=1e-4)
        raise ZeroDivisionError  # an out-of-memory error for instance
    assert torch.equal(flat(own), trained)
    assert [parameter.data_ptr() for parameter in own] == storage
    assert bits(optimizer.state_dict()) == bits(state)
    walk(optimizer, own, [5])


# ---- AdamW, plain and in 8 bits


@pytest.mark.parametrize("name", ["adamw", "adamw8bit", "paged_adamw8bit"])
def test_steps_are_those_of_the_library_to_the_bit_with_every_setting(name: str) -> None:
    from bitsandbytes.optim import AdamW8bit

    own, reference = parameters(), parameters()
    values = {"beta1": 0.8, "beta2": 0.9, "epsilon": 1e-6, "weight_decay": 0.2}
    optimizer = optimizers.build_optimizer(groups(own), settings(name, **values))
    shared: dict[str, Any] = {"betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.2}
    plain = (
        torch.optim.AdamW(reference, lr=3e-3, fused=True, **shared)
        if name == "adamw"
        else AdamW8bit(reference, lr=3e-3, **shared)
    )
    optimizers.set_learning_rate(optimizer, 3e-3)
    for seed in (7, 8):
        walk(optimizer, own, [seed])
        walk(plain, reference, [seed])
    assert torch.equal(flat(own), flat(reference))
    if name != "adamw":
        assert optimizer.state[own[0]]["state1"].dtype == torch.uint8


def test_a_gpu_gets_the_paged_class_and_a_cpu_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a CPU all state is in host memory, and the paged class would only warn of that."""
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    own = groups(parameters())
    unpaged = optimizers.build_optimizer(own, settings("paged_adamw8bit"))
    assert isinstance(unpaged, AdamW8bit) and not unpaged.is_paged
    monkeypatch.setattr("lora_trainer.training.optimizers.kind_of", lambda _: KINDS["cuda"])
    made: list[torch.optim.Optimizer] = []
    monkeypatch.setattr("lora_trainer.training.optimizers._allocate", made.append)
    optimizers.build_optimizer(own, settings("paged_adamw8bit"))
    optimizers.build_optimizer(own, settings("adamw8bit"))
    assert [type(optimizer).__base__ for optimizer in made] == [PagedAdamW8bit, AdamW8bit]


@pytest.mark.parametrize(
    ("name", "waits"),
    [("adamw8bit", 0), ("lion8bit", 0), ("lion", 0), ("paged_adamw8bit", 1)],
)
def test_a_step_of_bitsandbytes_does_not_wait_for_the_device_after_each_tensor(
    name: str, waits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import bitsandbytes.optim.optimizer
    import bitsandbytes.utils

    waited: list[object] = []
    for module in (bitsandbytes.optim.optimizer, bitsandbytes.utils):
        monkeypatch.setattr(module, "sync_gpu", waited.append)
    monkeypatch.setattr("lora_trainer.training.optimizers.kind_of", lambda _: KINDS["cuda"])
    own = parameters()
    with warnings.catch_warnings(action="ignore"):  # paging is not there on the processor
        optimizer = optimizers.build_optimizer(groups(own), settings(name))
    waited.clear()
    walk(optimizer, own, [7])
    assert len(own) > 1 and len(waited) == waits


def test_paged_state_is_filled_where_it_is_and_not_replaced() -> None:
    """bitsandbytes marks managed memory by an attribute, and puts new tensors in its place."""
    own, other = parameters(), parameters()
    saved = optimizers.build_optimizer(groups(own), settings("adamw8bit"))
    walk(saved, own, [1])
    optimizer = optimizers.build_optimizer(groups(other), settings("paged_adamw8bit"))
    paged = {name: optimizer.state[other[0]][name] for name in ("state1", "state2")}
    for tensor in paged.values():
        tensor.is_paged = True
    optimizers.restore_optimizer(optimizer, saved.state_dict())
    assert all(optimizer.state[other[0]][name] is tensor for name, tensor in paged.items())
    found, wanted = optimizer.state[other[0]], saved.state[own[0]]
    assert all(torch.equal(found[name], wanted[name]) for name in ("state1", "state2", "absmax1"))


def test_a_resume_takes_the_factors_of_its_own_settings_and_refuses_other_groups() -> None:
    """A lower learning rate beside a text encoder's own raises the factor of the text encoder."""

    def built(first: float, second: float) -> torch.optim.Optimizer:
        one, *others = parameters()
        scaled = [{"params": [one], "lr_scale": first}, {"params": others, "lr_scale": second}]
        return optimizers.build_optimizer(scaled, settings("adamw"))

    state = built(1.0, 0.5).state_dict()
    restored = built(1.0, 5.0)
    optimizers.restore_optimizer(restored, state)
    optimizers.set_learning_rate(restored, 1e-3)
    assert [group["lr"] for group in restored.param_groups] == [1e-3, 5e-3]
    merged = optimizers.build_optimizer(groups(parameters()), settings("adamw"))
    with pytest.raises(RequestError, match="groups the layers by learning rate differently"):
        optimizers.restore_optimizer(merged, state)


# ---- an optimizer that is given by its path

# With a product over all steps, state that does not begin at zero, a count in the group, and none at all.
OWN: dict[str, dict[str, Any]] = {
    "torch.optim:NAdam": {"betas": [0.8, 0.9], "decoupled_weight_decay": True},
    "torch.optim:Adagrad": {"initial_accumulator_value": 0.1},
    "pytorch_optimizer:AdaBelief": {"rectify": True},
    "torch.optim:SGD": {},
}


@pytest.mark.parametrize("path", OWN)
def test_any_optimizer_of_torch_is_as_its_library_makes_it_and_comes_back_to_the_bit(
    path: str,
) -> None:
    chosen = settings(path, options=OWN[path])
    own, reference, resumed = parameters(), parameters(), parameters()
    optimizer = optimizers.build_optimizer(groups(own), chosen)
    assert torch.equal(flat(own), flat(reference)), "allocating has moved nothing"
    module, _, name = path.partition(":")
    plain = getattr(importlib.import_module(module), name)(reference, lr=1e-2, **OWN[path])
    for seed in (7, 8):
        walk(optimizer, own, [seed])
        walk(plain, reference, [seed])
    assert torch.equal(flat(own), flat(reference))
    for parameter, target in zip(own, resumed, strict=True):
        target.data.copy_(parameter.data)
    again = optimizers.build_optimizer(groups(resumed), chosen)
    optimizers.restore_optimizer(again, copy.deepcopy(optimizer.state_dict()))
    walk(optimizer, own, [9])
    walk(again, resumed, [9])
    assert torch.equal(flat(own), flat(resumed))
    sizes = Counter(tuple(parameter.shape) for parameter in own)
    assert sum(state_bytes(sizes, path, OWN[path])) == sum(
        value.nbytes
        for parameter in own
        for value in optimizer.state[parameter].values()
        if torch.is_tensor(value) and value.dim()
    )


@pytest.mark.parametrize(
    ("path", "options", "error", "says"),
    [
        ("torch.optim:LBFGS", {}, RequestError, "cannot take a step"),
        ("torch.optim:Adagrad", {"rate": 3}, RequestError, "cannot be made with.*rate"),
        ("torch.optim:Adagard", {}, RequestError, "torch.optim has no Adagard"),
        ("nowhere.at:All", {}, MachineError, "nowhere.at cannot be imported"),
        ("collections:OrderedDict", {}, RequestError, "is a.*and not an optimizer|cannot be made"),
    ],
)
def test_what_is_not_an_optimizer_is_refused_by_the_plan_of_its_memory(
    path: str, options: dict[str, Any], error: type[Exception], says: str
) -> None:
    with pytest.raises(error, match=says):
        state_bytes({(8, 8): 1}, path, options)


def test_a_word_that_is_not_an_optimizer_is_refused_with_the_nearest() -> None:
    with pytest.raises(RequestError, match=r"adamw8bt.*not an optimizer.*adamw8bit"):
        build_config({"optimizer.name": "adamw8bt"})

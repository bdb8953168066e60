"""Optimizers and the learning rate as a formula of the step, both from libraries.

Parameters come in groups with a factor on the learning rate (`lr_scale`): text encoders, patterns,
LoRA+. The learning rate is a pure function of the step (diffusers' schedule formulas), so a resume
needs no scheduler state. Optimizer state is allocated before step 1: an optimizer step cannot run
out of memory half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from lora_trainer.config import OptimizerSettings
from lora_trainer.errors import BROKEN_PACKAGE, MachineError, RequestError, package_problem

LearningRate = Callable[[int], float]
_HYPERPARAMETERS = ("betas", "eps", "weight_decay", "lr_scale")
Group = Mapping[str, Any]
"""`params`, a list of parameters, and `lr_scale`, the factor on the learning rate."""


def build_optimizer(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimizer with its state allocated; raises MachineError when its library is missing."""
    rated = [{**group, "lr": settings.learning_rate * group["lr_scale"]} for group in groups]
    shared: dict[str, Any] = {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }
    if settings.name == "adamw":
        optimizer: torch.optim.Optimizer = torch.optim.AdamW(rated, fused=True, **shared)
    else:
        optimizer = _adamw_8bit(rated, shared, name=settings.name)
    _allocate(optimizer)
    return optimizer


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a resume state into an optimizer of `build_optimizer`; its hyperparameters stay its own.

    A resume may change them; torch would put the old ones back without a word. Paged state stays paged:
    bitsandbytes would replace its managed memory by tensors on the device, and a run that fitted
    would not fit once it is resumed. Raises RequestError when parameters are grouped otherwise.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group["params"]) for group in optimizer.param_groups]:
        raise RequestError(
            "the saved state groups the layers by learning rate otherwise than these settings do",
            fix="resume with the run's own learning rates of text encoders and patterns, and LoRA+",
        )
    paged = [
        (parameter, name, tensor)
        for parameter, values in optimizer.state.items()
        for name, tensor in values.items()
        if getattr(tensor, "is_paged", False)
    ]
    own = [{name: group[name] for name in _HYPERPARAMETERS} for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    for group, values in zip(optimizer.param_groups, own, strict=True):
        group.update(values)
    for parameter, name, tensor in paged:
        tensor.copy_(optimizer.state[parameter][name])
        optimizer.state[parameter][name] = tensor


def learning_rate(settings: OptimizerSettings, *, steps: int) -> LearningRate:
    """Return step (0-based) -> learning rate, by diffusers' formula of that name."""
    probe = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=settings.learning_rate)
    warmup = min(round(settings.warmup_fraction * steps), steps - 1)
    # Constant with a warm-up has a name of its own in diffusers; `constant` ignores warm-up steps.
    name = "constant_with_warmup" if settings.schedule == "constant" else settings.schedule
    # diffusers' formulas are zero at the first step of a warm-up and after the last step: both would
    # train nothing, so the formula is stretched by one step at each end and asked one step ahead.
    scheduler = get_scheduler(
        name, probe, num_warmup_steps=warmup + 1, num_training_steps=steps + 1
    )
    formula = scheduler.lr_lambdas[0]
    return lambda step: settings.learning_rate * float(formula(step + 1))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group: `value` times the group's factor."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["lr_scale"]


def _adamw_8bit(
    groups: Sequence[Group], shared: dict[str, Any], *, name: str
) -> torch.optim.Optimizer:
    try:
        from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit
    except BROKEN_PACKAGE as error:
        raise MachineError(
            f"optimizer.name={name} needs bitsandbytes, {package_problem(error)}",
            fix="pip install -U bitsandbytes, or use --set optimizer.name=adamw",
        ) from None
    # On a CPU all state is in host memory anyway, where the same numbers need no pages.
    on_gpu = groups[0]["params"][0].is_cuda
    make = PagedAdamW8bit if name == "paged_adamw8bit" and on_gpu else AdamW8bit
    optimizer: torch.optim.Optimizer = make(groups, **shared)
    return optimizer


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer create its state by a step that changes nothing: no gradient, rate zero."""
    rates = [group["lr"] for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        if isinstance(state["step"], torch.Tensor):
            state["step"].zero_()
        else:
            state["step"] = 0

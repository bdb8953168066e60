"""Builds and restores optimizers, and gives the learning rate as a formula of the step.

Parameters come in groups with a factor on the learning rate (`lr_scale`) for text encoders, layer patterns
and LoRA+. The learning rate is a pure function of the step (diffusers' schedule formulas), so a resume
needs no scheduler state. Optimizer state is allocated before step 1, so that a step cannot run out of
memory because the state does not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch import nn

from lora_trainer.config import OptimizerSettings
from lora_trainer.errors import RequestError
from lora_trainer.train.optimizer_kinds import LEARNED_IN_GROUPS, Group, make_optimizer

LearningRate = Callable[[int], float]


def build_optimizer(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimizer with its state allocated; raises MachineError when its library is missing."""
    rated = [{**group, "lr": settings.learning_rate * group["lr_scale"]} for group in groups]
    optimizer = make_optimizer(rated, settings)
    _allocate(optimizer)
    return optimizer


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a resume state into an optimizer of `build_optimizer`, but keep its hyperparameters.

    A resume may change hyperparameters, and `load_state_dict` would silently restore the old ones. Values
    that an optimizer learns per group (LEARNED_IN_GROUPS) do come from the state. Paged state stays
    paged: bitsandbytes would replace its managed memory by tensors on the device, and a run that fitted
    would not fit after a resume. Raises RequestError when the parameters are grouped otherwise.
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
    hyperparameters = [
        _without(group, {"params", *LEARNED_IN_GROUPS}) for group in optimizer.param_groups
    ]
    optimizer.load_state_dict(dict(state))
    for group, values in zip(optimizer.param_groups, hyperparameters, strict=True):
        group.update(values)
    for parameter, name, tensor in paged:
        tensor.copy_(optimizer.state[parameter][name])
        optimizer.state[parameter][name] = tensor


def _without(group: Mapping[str, Any], names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in names}


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
    """Set the learning rate of every parameter group to `value` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["lr_scale"]


def effective_rate(optimizer: torch.optim.Optimizer, rate: float) -> float:
    """Return the learning rate in force, without `lr_scale`: Prodigy multiplies `rate` by its estimate d."""
    return rate * float(optimizer.param_groups[0].get("d", 1.0))


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the weights by Schedule-Free's average while the block runs.

    The trained weights are set aside and come back bit for bit: the library converts back with rounding,
    so a run's result would depend on when it makes sample images. Needs the memory of the weights twice.
    """
    switch: Any = optimizer
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    trained = [parameter.data for parameter in parameters]
    copies = [tensor.clone() for tensor in trained]
    for parameter, copy in zip(parameters, copies, strict=True):
        parameter.data = copy
    switch.eval()
    try:
        yield
    finally:
        switch.train()
        for parameter, tensor in zip(parameters, trained, strict=True):
            parameter.data = tensor


def _allocate(optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer allocate its state by a step that changes no weight: zero gradients, rate zero.

    Step counts and averages of that step are reset afterwards, so the optimizer is as new.
    """
    before = [_without(group, {"params"}) for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, before, strict=True):
        for name in group.keys() - values.keys() - {"params"}:
            del group[name]
        group.update(values)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name == "step" or name.startswith("exp_avg")):
                value.zero_()  # averages of squares: some add a constant that is not zero
        if isinstance(state.get("step"), int):
            state["step"] = 0

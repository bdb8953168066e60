"""Optimizers from their rows (config/optimizers.py), each from its library.

Input is parameter groups and the settings; output is an optimizer whose state is allocated before step 1, so
that a step cannot run out of memory because the state does not fit. All use the same hyperparameters where
they have them.

Groups have a factor on the learning rate (`lr_scale`) for text encoders, layer patterns and LoRA+;
schedules.py has the learning rate as a function of the step.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, RequestError, package_problem
from lora_trainer.common.imports import arguments_of
from lora_trainer.config.optimizers import OPTIMIZERS, SCHEDULE_FREE, OptimizerSettings, row_of
from lora_trainer.hardware.device_calls import kind_of
from lora_trainer.planning.own_optimizer import own_optimizer

# `params`, a list of parameters; `lr_scale`, the factor on the learning rate; `lr`, the product; `embedding`,
# true if the parameters are rows of a text encoder's embedding table.
Group = Mapping[str, Any]
# What the trainer itself puts into groups; a resume takes it from the settings.
OURS_IN_GROUPS = frozenset({"params", "lr", "initial_lr", "lr_scale", "embedding", "use_muon"})


def _from_library(groups: Sequence[Group], settings: OptimizerSettings) -> Any:
    """Return the optimizer of these settings as its library makes it, before its state is allocated."""
    row, device = row_of(settings.name), kind_of(groups[0]["params"][0].device)
    arguments = dict(row.arguments(settings))
    if settings.name not in OPTIMIZERS:
        return own_optimizer(row.path, groups, arguments)
    path = row.path
    if row.shared_memory_path and not device.own_memory:
        path = row.shared_memory_path
    if settings.name == "adamw":
        arguments["fused"] = device.fused_skips
    module, _, name = path.partition(":")
    make = getattr(importlib.import_module(module), name)
    if module.startswith("bitsandbytes"):
        make = _queued(make)
    more = row.group_arguments(settings)
    made: Sequence[Group] = [{**group, **more} for group in groups]
    if row.matrices_apart:
        made = [*_matrices_apart(made)]
    optimizer = make(made, **arguments)
    if settings.name == SCHEDULE_FREE:
        optimizer.train()
    return optimizer


def _matrices_apart(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield the matrices and the other tensors of each group as groups of their own.

    Rows of an embedding table are vectors, each with a meaning of its own.
    """
    for group, is_matrix in product(groups, (True, False)):
        by_muon = [t.dim() == 2 and not group.get("embedding") for t in group["params"]]
        tensors = [t for t, muon in zip(group["params"], by_muon, strict=True) if muon is is_matrix]
        if tensors:
            yield {**group, "params": tensors, "use_muon": is_matrix}


def _queued(kind: type[Any]) -> type[Any]:
    """Return an optimizer class of bitsandbytes whose step queues its work and goes on.

    The library waits for the device after each tensor (0.50, `sync_gpu` in `Optimizer8bit.step`): 836 waits a step
    for FLUX.1, in which the device has nothing to do. Kernels of one stream run in their order without that. A
    paged optimizer waits once at the end, as the library does, because prefetches run beside the stream.
    """
    from bitsandbytes.utils import sync_gpu

    class Queued(kind):  # type: ignore[misc]  # the library has no types
        initialized: bool

        @torch.no_grad()
        def step(self, closure: Callable[[], Any] | None = None) -> Any:
            assert closure is None
            if not self.initialized:
                self.check_overrides()
                self.to_gpu()
                self.initialized = True
            parameter = None
            for group_index, group in enumerate(self.param_groups):
                for index, parameter in enumerate(group["params"]):
                    if parameter.grad is None:
                        continue
                    if not self.state[parameter]:
                        self.init_state(group, parameter, group_index, index)
                    self.prefetch_state(parameter)
                    self.update_step(group, parameter, group_index, index)
            if self.is_paged and parameter is not None:
                sync_gpu(parameter)

    Queued.__name__ = Queued.__qualname__ = kind.__name__
    return Queued


def build_optimizer(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Build the optimizer with its state allocated; raises MachineError when its library is missing."""
    rated = [{**group, "lr": settings.learning_rate * group["lr_scale"]} for group in groups]
    try:
        optimizer: torch.optim.Optimizer = _from_library(rated, settings)
    except BROKEN_PACKAGE as error:
        package = row_of(settings.name).package
        raise MachineError(
            f"optimizer.name={settings.name} needs {package}, {package_problem(error)}",
            fix=f"pip install -U {package}, or use --set optimizer.name=adamw",
        ) from None
    _allocate(optimizer)
    if row_of(settings.name).made_anew:
        # The memory of the states stays with torch's allocator, from which the first step takes it.
        optimizer = _from_library(rated, settings)
    return optimizer


def restore_optimizer(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Load a resume state into an optimizer of `build_optimizer`, but keep its hyperparameters.

    A resume may change hyperparameters, which are the arguments of the class, and `load_state_dict` would silently
    restore the old ones. Values that an optimizer learns per group (Prodigy's d) do come from the state. Paged state
    stays paged: bitsandbytes would replace its managed memory by tensors on the device, and a run that fitted
    would not fit after a resume. Raises RequestError when the parameters are grouped otherwise.
    """
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != [len(group["params"]) for group in optimizer.param_groups]:
        raise RequestError(
            "the saved state groups the layers by learning rate differently from these settings",
            fix="resume with the run's own learning rates of text encoders and patterns, and LoRA+",
        )
    paged = [
        (parameter, name, tensor)
        for parameter, values in optimizer.state.items()
        for name, tensor in values.items()
        if getattr(tensor, "is_paged", False)
    ]
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    given = _arguments_of(type(optimizer)) | OURS_IN_GROUPS - {"params"}
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update({name: value for name, value in values.items() if name in given})
    for parameter, name, tensor in paged:
        tensor.copy_(optimizer.state[parameter][name])
        optimizer.state[parameter][name] = tensor


def _arguments_of(kind: type[torch.optim.Optimizer]) -> frozenset[str]:
    """Return the names of the arguments of an optimizer's class and of those it derives from."""
    return frozenset(name for each in kind.__mro__ for name in arguments_of(each))


def set_learning_rate(optimizer: torch.optim.Optimizer, value: float) -> None:
    """Set the learning rate of every parameter group to `value` times the group's `lr_scale`."""
    for group in optimizer.param_groups:
        group["lr"] = value * group["lr_scale"]


@contextmanager
def averaged_weights(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Replace the weights by Schedule-Free's average while the block runs.

    The trained weights are set aside and come back bit for bit: the library converts back with rounding,
    so a run's result would depend on when it makes sample images. Needs the memory of the weights twice.
    """
    switch: Any = optimizer
    parameters = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    trained = [parameter.data for parameter in parameters]
    for parameter, copy in [(parameter, parameter.data.clone()) for parameter in parameters]:
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
    before = [dict(group) for group in optimizer.param_groups]
    set_learning_rate(optimizer, 0.0)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.clear()
        group.update(values)
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and (name == "step" or name.startswith("exp_avg")):
                value.zero_()  # averages of squares: some add a constant that is not zero
        if isinstance(state.get("step"), int):
            state["step"] = 0

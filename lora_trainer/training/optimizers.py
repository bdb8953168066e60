"""Optimizers by name, each from its library.

Input is parameter groups and the settings; output is an optimizer whose state is allocated before step 1, so
that a step cannot run out of memory because the state does not fit. All use the same hyperparameters where
they have them. torch's own Adafactor and Muon are not used: the first scales each step by the norm of the
tensor, which is zero for a LoRA's `up`, and the second refuses tensors that are no matrices.

Groups have a factor on the learning rate (`lr_scale`) for text encoders, layer patterns and LoRA+;
schedules.py has the learning rate as a function of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any

import torch

from lora_trainer.common.errors import BROKEN_PACKAGE, MachineError, RequestError, package_problem
from lora_trainer.config.config import setting_info
from lora_trainer.config.learning import OptimizerSettings
from lora_trainer.hardware.device_calls import kind_of

# `params`, a list of parameters; `lr_scale`, the factor on the learning rate; `lr`, the product; `embedding`,
# true if the parameters are rows of a text encoder's embedding table.
Group = Mapping[str, Any]
# Decay of the instability of updates (Luo et al. 2023, arXiv 2307.02047).
CAME_BETA3 = 0.9999
# Keys of parameter groups that are state of the optimizer and no hyperparameters, so a resume restores them.
LEARNED_IN_GROUPS = frozenset(
    {
        "step",  # pytorch-optimizer
        *("d", "d_max", "d_hat", "d_numerator", "d_denom", "k"),  # Prodigy
        *("weight_sum", "lr_max", "scheduled_lr", "train_mode"),  # Schedule-Free, and its k
    }
)


def _from_library(groups: Sequence[Group], settings: OptimizerSettings) -> Any:
    """Return the optimizer of these settings as its library makes it, before its state is allocated."""
    device, name = kind_of(groups[0]["params"][0].device), settings.name
    betas, decay = (settings.beta1, settings.beta2), settings.weight_decay
    rated: dict[str, Any] = {"lr": settings.learning_rate, "betas": betas, "weight_decay": decay}
    like_adam: dict[str, Any] = {**rated, "eps": settings.epsilon}
    if name == "adamw":
        return torch.optim.AdamW(list(groups), fused=device.fused_skips, **like_adam)  # type: ignore[arg-type]  # dicts
    if name in ("adamw8bit", "paged_adamw8bit", "lion", "lion8bit"):
        # AdamW in 8 bits (Dettmers et al. 2021, arXiv 2110.02861), Lion (Chen et al. 2023, arXiv 2302.06675)
        from bitsandbytes import optim

        if name in ("lion", "lion8bit"):
            kind = optim.Lion8bit if name == "lion8bit" else optim.Lion
            return _queued(kind)(groups, **rated)
        # Paging moves state between device and host memory. A device that has no memory of its own keeps all
        # state in host memory anyway, and the unpaged optimizer computes the same numbers.
        if name == "paged_adamw8bit" and device.own_memory:
            return _queued(optim.PagedAdamW8bit)(groups, **like_adam)
        from lora_trainer.training.queued_adamw8bit import QueuedAdamW8bit

        return QueuedAdamW8bit(groups, **like_adam)
    if name == "schedulefree_adamw":  # Defazio et al. 2024, arXiv 2405.15682
        from schedulefree import AdamWScheduleFree

        optimizer = AdamWScheduleFree(groups, **like_adam)
        optimizer.train()
        return optimizer
    if name == "prodigy":
        # Mishchenko and Defazio 2023, arXiv 2306.06101, as its authors advise for diffusion models. The decay is
        # set per group, because Prodigy prints it when it is an argument.
        from prodigyopt import Prodigy

        del like_adam["weight_decay"]
        return Prodigy(
            [{**group, "weight_decay": decay} for group in groups],
            d_coef=settings.prodigy_d_coef,
            growth_rate=settings.prodigy_growth_rate or float("inf"),
            use_bias_correction=True,
            safeguard_warmup=settings.warmup_fraction > 0,
            **like_adam,
        )
    from pytorch_optimizer import CAME, AdaFactor, Muon

    copies = [dict(group) for group in groups]
    if name == "came":  # Luo et al. 2023, arXiv 2307.02047
        return CAME(copies, **{**rated, "betas": (*betas, CAME_BETA3)})
    if name == "adafactor":
        # Shazeer and Stern 2018, arXiv 1804.04235, at the learning rate of the settings and without momentum
        plain = {**rated, "betas": (None, settings.beta2)}
        return AdaFactor(copies, scale_parameter=False, relative_step=False, **plain)
    # Jordan 2024 with the rates of Liu et al. 2025, arXiv 2502.16982; AdamW for tensors that are no matrices. Rows of
    # an embedding table are vectors, each with a meaning of its own.
    assert name == "muon"
    split = []
    for group, is_matrix in product(groups, (True, False)):
        by_muon = [t.dim() == 2 and not group.get("embedding") for t in group["params"]]
        tensors = [t for t, muon in zip(group["params"], by_muon, strict=True) if muon is is_matrix]
        if tensors:
            split.append({**group, "params": tensors, "use_muon": is_matrix})
    return Muon(
        split,
        momentum=settings.muon_momentum,
        weight_decay=decay,
        use_adjusted_lr=True,
        adamw_betas=betas,
        adamw_eps=settings.epsilon,
        adamw_wd=decay,
    )


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
        package = setting_info("optimizer.name").handling.packages.get(settings.name)
        raise MachineError(
            f"optimizer.name={settings.name} needs {package}, {package_problem(error)}",
            fix=f"pip install -U {package}, or use --set optimizer.name=adamw",
        ) from None
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
    before = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict(dict(state))
    learned = {"params", *LEARNED_IN_GROUPS}
    for group, values in zip(optimizer.param_groups, before, strict=True):
        group.update({name: value for name, value in values.items() if name not in learned})
    for parameter, name, tensor in paged:
        tensor.copy_(optimizer.state[parameter][name])
        optimizer.state[parameter][name] = tensor


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

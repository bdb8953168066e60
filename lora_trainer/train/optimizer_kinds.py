"""Optimizers by name, each from its library, and the values that they keep per parameter group.

Input is parameter groups, each with its learning rate, and the settings; output is an optimizer without
state. All use the same hyperparameters where they have them. torch's own Adafactor and Muon are not used:
the first scales each step by the norm of the tensor, which is zero for a LoRA's `up`, and the second
refuses tensors that are no matrices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lora_trainer.config import OptimizerName, OptimizerSettings
from lora_trainer.device_calls import kind_of
from lora_trainer.errors import BROKEN_PACKAGE, MachineError, package_problem
from lora_trainer.planning.optimizers import OPTIMIZERS

Group = Mapping[str, Any]
"""`params`, a list of parameters; `lr_scale`, the factor on the learning rate; `lr`, the product; `embedding`,
true if the parameters are rows of a text encoder's embedding table."""
Maker = Callable[[Sequence[Group], OptimizerSettings], torch.optim.Optimizer]
CAME_BETA3 = 0.9999
"""Decay of the instability of updates (Luo et al. 2023, arXiv 2307.02047)."""
LEARNED_IN_GROUPS = frozenset(
    {
        "step",  # pytorch-optimizer
        *("d", "d_max", "d_hat", "d_numerator", "d_denom", "k"),  # Prodigy
        *("weight_sum", "lr_max", "scheduled_lr", "train_mode"),  # Schedule-Free, and its k
    }
)
"""Keys of parameter groups that are state of the optimizer and no hyperparameters, so a resume restores
them."""


def make_optimizer(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Return the optimizer of that name without state; raises MachineError when its library is missing."""
    try:
        return _MAKERS[settings.name](groups, settings)
    except BROKEN_PACKAGE as error:
        package = OPTIMIZERS[settings.name].package
        raise MachineError(
            f"optimizer.name={settings.name} needs {package}, {package_problem(error)}",
            fix=f"pip install -U {package}, or use --set optimizer.name=adamw",
        ) from None


def _adam_like(settings: OptimizerSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "weight_decay": settings.weight_decay,
    }


def _without_epsilon(settings: OptimizerSettings) -> dict[str, Any]:
    return {name: value for name, value in _adam_like(settings).items() if name != "eps"}


def _adamw(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    fused = kind_of(groups[0]["params"][0].device).fused_skips
    return torch.optim.AdamW(list(groups), fused=fused, **_adam_like(settings))  # type: ignore[arg-type]  # dicts


def _adamw_8bit(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    from bitsandbytes.optim import AdamW8bit, PagedAdamW8bit

    # Paging moves state between device and host memory. A device that has no memory of its own keeps all
    # state in host memory anyway, and the unpaged optimizer computes the same numbers.
    beside = kind_of(groups[0]["params"][0].device).own_memory
    make = PagedAdamW8bit if settings.name == "paged_adamw8bit" and beside else AdamW8bit
    optimizer: torch.optim.Optimizer = make(groups, **_adam_like(settings))
    return optimizer


def _lion(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Chen et al. 2023, arXiv 2302.06675."""
    from bitsandbytes.optim import Lion, Lion8bit

    make = Lion8bit if settings.name == "lion8bit" else Lion
    optimizer: torch.optim.Optimizer = make(groups, **_without_epsilon(settings))
    return optimizer


def _adafactor(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Shazeer and Stern 2018, arXiv 1804.04235, with the learning rate of the settings and without momentum."""
    from pytorch_optimizer import AdaFactor

    return AdaFactor(
        [dict(group) for group in groups],
        lr=settings.learning_rate,
        betas=(None, settings.beta2),
        weight_decay=settings.weight_decay,
        scale_parameter=False,
        relative_step=False,
    )


def _came(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Luo et al. 2023, arXiv 2307.02047."""
    from pytorch_optimizer import CAME

    return CAME(
        [dict(group) for group in groups],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2, CAME_BETA3),
        weight_decay=settings.weight_decay,
    )


def _muon(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Jordan 2024 with the rates of Liu et al. 2025, arXiv 2502.16982; AdamW for tensors that are no matrices."""
    from pytorch_optimizer import Muon

    split = []
    for group in groups:
        for is_matrix in (True, False):
            tensors = [
                tensor for tensor in group["params"] if _is_matrix(tensor, group) is is_matrix
            ]
            if tensors:
                split.append({**group, "params": tensors, "use_muon": is_matrix})
    return Muon(
        split,
        momentum=settings.muon_momentum,
        weight_decay=settings.weight_decay,
        use_adjusted_lr=True,
        adamw_betas=(settings.beta1, settings.beta2),
        adamw_eps=settings.epsilon,
        adamw_wd=settings.weight_decay,
    )


def _is_matrix(tensor: Tensor, group: Group) -> bool:
    return tensor.dim() == 2 and not group.get("embedding", False)


def _prodigy(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Mishchenko and Defazio 2023, arXiv 2306.06101, as its authors advise for diffusion models."""
    from prodigyopt import Prodigy

    shared = _adam_like(settings)
    decay = shared.pop(
        "weight_decay"
    )  # set per group, because Prodigy prints it when it is an argument
    optimizer: torch.optim.Optimizer = Prodigy(
        [{**group, "weight_decay": decay} for group in groups],
        d_coef=settings.prodigy_d_coef,
        growth_rate=settings.prodigy_growth_rate or float("inf"),
        use_bias_correction=True,
        safeguard_warmup=settings.warmup_fraction > 0,
        **shared,
    )
    return optimizer


def _schedule_free(groups: Sequence[Group], settings: OptimizerSettings) -> torch.optim.Optimizer:
    """Defazio et al. 2024, arXiv 2405.15682."""
    from schedulefree import AdamWScheduleFree

    schedule_free = AdamWScheduleFree(groups, **_adam_like(settings))
    schedule_free.train()
    optimizer: torch.optim.Optimizer = schedule_free
    return optimizer


_MAKERS: Mapping[OptimizerName, Maker] = {
    "adamw": _adamw,
    "adamw8bit": _adamw_8bit,
    "paged_adamw8bit": _adamw_8bit,
    "lion": _lion,
    "lion8bit": _lion,
    "adafactor": _adafactor,
    "came": _came,
    "muon": _muon,
    "prodigy": _prodigy,
    "schedulefree_adamw": _schedule_free,
}

"""How large an adapter's updates are beside the weights they change, and how much of their rank they use.

Input: the base's networks and the adapter's tensors; output a number per module. Nothing of the size
of the model is formed: a module at a time, and of a plain LoRA only its factors' products.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from lora_trainer.model.attached import change_of, layer_of
from lora_trainer.model.quantize import frozen_weight
from lora_trainer.output.adapter_tensors import AdapterTensors, ModuleTensors
from lora_trainer.tools.low_rank import NotLowRank, product, singular
from lora_trainer.validation.parts import DEAD_BELOW, SANE_UP_TO, effective_rank


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """By module: |update| / |weight|, infinite for numbers that are not finite, and effective rank / rank.

    `ranks_used` lacks modules whose update is no product of thin matrices; `why_not` says why.
    """

    relative_norms: Mapping[str, float]
    ranks_used: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.relative_norms.values()))

    @property
    def dead(self) -> list[str]:
        """Modules that change nothing."""
        return [key for key, norm in self.relative_norms.items() if norm < DEAD_BELOW]

    @property
    def exploded(self) -> list[str]:
        """Modules whose update is larger than half their weight, or not finite."""
        return [key for key, norm in self.relative_norms.items() if not norm <= SANE_UP_TO]


@torch.no_grad()
def weight_figures(networks: Mapping[str, nn.Module], tensors: AdapterTensors) -> WeightFigures:
    """Measure every module; raises InputError where the adapter does not fit the networks."""
    norms: dict[str, float] = {}
    used: dict[str, float] = {}
    why_not = ""
    for key, module in tensors.items():
        layer = layer_of(networks, key, module)
        if not all(bool(tensor.isfinite().all()) for tensor in module.tensors.values()):
            norms[key] = math.inf
            continue
        weight = float(torch.linalg.vector_norm(frozen_weight(layer), dtype=torch.float32))
        norm = _plain_norm(module)
        if norm is None:
            norm = float(torch.linalg.vector_norm(change_of(layer, module)))
        norms[key] = norm / weight if weight > 0 else (math.inf if norm > 0 else 0.0)
        try:
            used[key] = rank_used(module)
        except NotLowRank as error:
            why_not = str(error)
    return WeightFigures(relative_norms=norms, ranks_used=used, why_not=why_not)


def rank_used(module: ModuleTensors) -> float:
    """Return effective rank / the most it could be; raises NotLowRank."""
    thin = product(_on_cpu(module))
    values = singular(thin).values
    return effective_rank(values.tolist()) / len(values)


def _plain_norm(module: ModuleTensors) -> float | None:
    """Return |up down| of a plain LoRA from the factors' Gram matrices, None for other kinds."""
    if module.kind != "lora" or module.dora:
        return None
    up, down = (_double(module.tensors[name]).flatten(1) for name in ("up", "down"))
    squared = ((up.T @ up) * (down @ down.T)).sum()
    return float(squared.clamp(min=0).sqrt()) * abs(module.scale)


def _double(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().to(torch.float64)  # MPS has no float64


def _on_cpu(module: ModuleTensors) -> ModuleTensors:
    tensors = {name: tensor.detach().cpu() for name, tensor in module.tensors.items()}
    return ModuleTensors(kind=module.kind, tensors=tensors, rank=module.rank, scale=module.scale)

"""Networks that are nothing but their tensors, under the names that a reader holds them by."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class Tree(nn.Module):
    """Nested modules; leaves with a weight of two or four dimensions are Linear and Conv2d."""

    def hold(self, tensors: Mapping[str, Tensor]) -> Tree:
        """Take copies of tensors by dotted names, and return itself."""
        for name, tensor in tensors.items():
            *path, end = name.split(".")
            module: nn.Module = self
            for depth, part in enumerate(path, start=1):
                if part not in module._modules:
                    weight = (
                        tensors.get(".".join((*path, "weight"))) if depth == len(path) else None
                    )
                    module.add_module(part, _leaf(weight))
                module = module.get_submodule(part)
            module.register_parameter(end, nn.Parameter(tensor.clone(), requires_grad=False))
        return self


def clip_name(name: str) -> str:
    """CLIP lost its `text_model.` in transformers 5; readers have it."""
    return name if name.startswith(("text_model.", "text_projection")) else f"text_model.{name}"


def _leaf(weight: Tensor | None) -> nn.Module:
    with torch.device("meta"):
        if weight is not None and weight.dim() == 2:
            return nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        if weight is not None and weight.dim() == 4:
            return nn.Conv2d(weight.shape[1], weight.shape[0], tuple(weight.shape[2:]), bias=False)  # type: ignore[arg-type]
    return nn.Module()

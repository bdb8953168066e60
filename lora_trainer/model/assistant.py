"""A frozen LoRA that runs beside the layers of a distilled base while it is trained.

Training breaks a few-step base's distillation. An assistant that undoes the distillation is active while
training and off while sampling, so that what is learned fits the distilled base. The weights stay as
they are: its part is added by forward hooks, whether or not an adapter wraps the layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from lora_trainer.errors import InputError
from lora_trainer.families.base import DENOISER
from lora_trainer.output.adapter_tensors import AdapterTensors, ModuleTensors, split_key


class Assistant:
    """A switch over the hooks of one assistant; it is on after `attach`."""

    def __init__(self) -> None:
        self.enabled = True

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the base as it is while the block runs: for samples and for measuring the base itself."""
        before, self.enabled = self.enabled, False
        try:
            yield
        finally:
            self.enabled = before


def attach(denoiser: nn.Module, tensors: AdapterTensors) -> Assistant:
    """Let an adapter file run beside the layers of a denoiser, in their dtype, without gradients of its own.

    Works before and after `inject`. Raises InputError for anything but a plain LoRA of this denoiser.
    """
    layers = {key: _layer(denoiser, key, module) for key, module in tensors.items()}
    assistant = Assistant()
    for key, layer in layers.items():
        layer.register_forward_hook(_hook(assistant, layer, tensors[key]))
    return assistant


def _layer(denoiser: nn.Module, key: str, module: ModuleTensors) -> nn.Linear | nn.Conv2d:
    """Return the frozen layer, inside its adapter if it has one."""
    component, name = split_key(key)
    if module.kind != "lora" or module.dora:
        kind = "DoRA" if module.dora else module.kind
        raise InputError(
            f"the assistant is a {kind} adapter; only a plain LoRA can run beside a base",
            fix="give a plain LoRA, or leave base.assistant out",
        )
    found = dict(denoiser.named_modules()).get(name) if component == DENOISER else None
    layer = getattr(found, "base_layer", found)
    down, up = module.tensors["down"], module.tensors["up"]
    if (
        not isinstance(layer, nn.Linear | nn.Conv2d)
        or layer.weight.shape[0] != up.shape[0]
        or layer.weight[:1].numel() != down[:1].numel()
    ):
        raise InputError(
            f"the assistant changes {key}, which this base does not have in that size",
            fix="give the assistant that was made for this base, or leave base.assistant out",
        )
    return layer


def _hook(assistant: Assistant, layer: nn.Linear | nn.Conv2d, module: ModuleTensors) -> Any:
    weight = layer.weight
    rank = module.tensors["down"].shape[0]
    down = module.tensors["down"].to(weight).reshape(rank, *weight.shape[1:])
    up = (module.tensors["up"].float() * module.scale).to(weight)
    up = up.reshape(weight.shape[0], rank, *(1,) * (weight.dim() - 2))

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if not assistant.enabled:
            return output
        x = inputs[0]
        if isinstance(layer, nn.Linear):
            return output + F.linear(F.linear(x, down), up)
        middle = F.conv2d(
            x, down, stride=layer.stride, padding=layer.padding, dilation=layer.dilation
        )
        return output + F.conv2d(middle, up)

    return add

"""LoRA files beside the frozen layers of a base, added by forward hooks at a strength that can change.

The base weights do not change: hooks add the update whether or not an adapter wraps the layer, so it works with
quantised and streamed layers, and at strength 0 every prediction equals the base's, bit for bit.

An assistant is such a file beside a few-step base while it is trained. Training on that base breaks its
distillation; an assistant that undoes the distillation is on during training and off during sampling, so the
trained adapter fits the distilled base.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.low_rank import fits, kind_name
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, split_key, update
from lora_trainer.network.quantize import frozen_weight, weight_shape

Layer = nn.Linear | nn.Conv2d
# Returns the adapter's part of a layer's output for the layer's input.
Apply = Callable[[Tensor], Tensor]


@dataclass(kw_only=True)
class LoraStrength:
    """The strength of an attached adapter; it is 0 after `attach_lora`, 1 after `attach_assistant`."""

    strength: float = 0.0

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """Apply the adapter at this strength while the block runs."""
        before, self.strength = self.strength, strength
        try:
            yield
        finally:
            self.strength = before


def attach_assistant(denoiser: nn.Module, tensors: AdapterTensors) -> LoraStrength:
    """Hook an assistant beside a denoiser's layers; raises InputError for anything but a plain LoRA of it."""
    for module in tensors.values():
        if not _is_plain(module):
            raise InputError(
                f"the assistant is a {kind_name(module)} adapter; only a plain LoRA can run beside a base",
                fix="give a plain LoRA, or train without one: --set base.assistant=none",
            )
    assistant = attach_lora({DENOISER: denoiser}, tensors)
    assistant.strength = 1.0
    return assistant


def attach_lora(networks: Mapping[str, nn.Module], tensors: AdapterTensors) -> LoraStrength:
    """Hook an adapter beside the layers it changes; raises InputError where they do not fit it."""
    dial = LoraStrength()
    layers = {key: layer_of(networks, key, module) for key, module in tensors.items()}
    for key, layer in layers.items():
        layer.register_forward_hook(_hook(dial, layer, tensors[key]))
    return dial


def layer_of(networks: Mapping[str, nn.Module], key: str, module: ModuleTensors) -> Layer:
    """Return the frozen layer that a module of an adapter changes, unwrapped if it is adapted itself.

    Raises InputError if the base has no such layer of that size.
    """
    component, name = split_key(key)
    try:
        wrapper: nn.Module | None = networks[component].get_submodule(name)
    except (KeyError, AttributeError):
        wrapper = None
    layer = getattr(wrapper, "base_layer", wrapper)
    if module.kind == "norm":
        raise InputError(
            f"the adapter changes the norm {key}; only linear layers and convolutions are measured",
            fix="merge it into its base, and draw samples with that",
        )
    if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1):
        out, *inner = weight_shape(layer)
        if fits(module, out=out, fan_in=prod(inner)):
            return layer
    raise InputError(
        f"the LoRA changes {key}, which this base does not have in that size",
        fix="name the base that it was made for, or give another file",
    )


def change_of(layer: Layer, module: ModuleTensors) -> Tensor:
    """Return the update of a layer's weight at strength 1, float32 [out, in, ...]."""
    weight = frozen_weight(layer).float()
    if module.kind == "full" and "difference" not in module.tensors:  # a bias alone
        return torch.zeros_like(weight)
    tensors = {name: tensor.to(weight.device) for name, tensor in module.tensors.items()}
    return update(replace(module, tensors=tensors), weight).reshape(weight.shape)


def _hook(dial: LoraStrength, layer: Layer, module: ModuleTensors) -> Any:
    apply = _low_rank(layer, module) if _is_plain(module) else None
    bias = module.tensors.get("bias")

    def add(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if dial.strength == 0:
            return output
        if apply is not None:
            change = apply(inputs[0])
        else:  # made in every pass: stored for all layers it would take as much as the base
            change = _applied(layer, inputs[0], change_of(layer, module).to(inputs[0]))
        if bias is not None:
            change = change + bias.reshape(-1, *(1,) * (len(weight_shape(layer)) - 2)).to(output)
        return torch.add(output, change, alpha=dial.strength)

    return add


def _is_plain(module: ModuleTensors) -> bool:
    return module.kind == "lora" and not module.dora


def _low_rank(layer: Layer, module: ModuleTensors) -> Apply:
    shape = weight_shape(layer)
    rank = module.tensors["down"].shape[0]
    down = module.tensors["down"].reshape(rank, *shape[1:])
    up = module.tensors["up"].reshape(shape[0], rank, *(1,) * (len(shape) - 2))
    factors: dict[tuple[torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}

    def apply(x: Tensor) -> Tensor:
        location = (x.device, x.dtype)
        # The input's device, not the layer's: a streamed layer's weights are in host memory between passes.
        if location not in factors:
            # Scaled in fp32: a file's scale need not be a power of two.
            factors[location] = (down.to(*location), (up.float() * module.scale).to(*location))
        own_down, own_up = factors[location]
        middle = _applied(layer, x, own_down)
        return (
            F.linear(middle, own_up) if isinstance(layer, nn.Linear) else F.conv2d(middle, own_up)
        )

    return apply


def _applied(layer: Layer, x: Tensor, weight: Tensor) -> Tensor:
    if isinstance(layer, nn.Linear):
        return F.linear(x, weight)
    return F.conv2d(x, weight, None, layer.stride, layer.padding, layer.dilation)

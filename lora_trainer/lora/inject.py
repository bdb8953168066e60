"""Adapter layers put into frozen networks: peft's LoRA, LoHa and LoKr, our own OFT.

Trained parameters are float32 whatever the base's dtype. Each tensor is initialised from a generator of its
own, seeded by (seed, module name), so a layer's initial values do not depend on which other layers are
adapted. Every update starts at zero.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from peft import LoHaConfig, LoKrConfig, LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.lora.adapter_layers import CUSTOM, FusedLinear, LeanConv2d, LeanDora, RotatedLayer
from lora_trainer.lora.adapter_size import (
    AdapterKind,
    Width,
    block_size,
    factored_norm,
    layer_width,
)
from lora_trainer.lora.dropout import SampleMasks, gated, gates
from lora_trainer.lora.tensors import ModuleTensors, split_key
from lora_trainer.network.quantize import described, frozen_weight, weight_shape

_NAME = "default"


@dataclass(frozen=True, kw_only=True)
class AdaptedLayer:
    """One adapted layer and its trainable parameters by name.

    `switch(False)` turns the layer's update off, `switch(True)` on again. `scaled(s)` multiplies the update by s;
    None for kinds whose update is not a multiple of a strength.
    """

    kind: AdapterKind
    width: Width
    parameters: Mapping[str, nn.Parameter]
    switch: Callable[[bool], None]
    scaled: Callable[[float], None] | None = None

    def tensors(self) -> ModuleTensors:
        """Return the live values, detached."""
        values = {name: parameter.detach() for name, parameter in self.parameters.items()}
        if "magnitude" in values:
            values["magnitude"] = values["magnitude"].flatten()
        width = self.width
        return ModuleTensors(kind=self.kind, tensors=values, rank=width.rank, scale=width.scale)

    def update_norm(self) -> Tensor:
        """Return the Frobenius norm of the layer's update, a float32 scalar on its device.

        From the factors' Gram matrices, without the [out, in] product; only LoHa's product is formed.
        """
        factors = self.tensors().tensors
        if self.kind == "loha":
            flat = {name: factor.flatten(1) for name, factor in factors.items()}
            first = flat["w1_a"] @ flat["w1_b"]
            norm = torch.linalg.vector_norm(first * (flat["w2_a"] @ flat["w2_b"]))
        else:
            norm = factored_norm(factors, norm=torch.linalg.vector_norm)
        scaled: Tensor = norm * abs(self.width.scale)
        return scaled


def adapt(
    network: nn.Module,
    modules: Sequence[str],
    *,
    component: str,
    settings: AdapterSettings,
    alpha: float,
    seed: int,
    masks: SampleMasks | None = None,
) -> dict[str, AdaptedLayer]:
    """Adapt the named layers and return them by "component.module", in that order.

    `masks` collect the masks by sample of the settings. Raises RequestError for a layer that cannot be adapted.
    """
    keys = {f"{component}.{module}": network.get_submodule(module) for module in modules}
    widths: dict[str, Width] = {}
    for key, layer in keys.items():
        if isinstance(layer, nn.Linear):
            kernel = 1
        elif isinstance(layer, nn.Conv2d) and layer.groups == 1:
            kernel = math.prod(layer.kernel_size)
        else:
            raise RequestError(
                f"adapter.kind={settings.kind} cannot change {key}: it is a {type(layer).__name__}, and only "
                "linear layers and ungrouped 2D convolutions can be changed",
                fix="choose narrower adapter.targets",
            )
        widths[key] = layer_width(key, kernel=kernel, settings=settings, alpha=alpha)
    if settings.kind == "oft":
        return {key: _rotate(network, key, layer, widths[key].rank) for key, layer in keys.items()}
    for rank in dict.fromkeys(width.rank for width in widths.values()):
        names = [split_key(key)[1] for key, width in widths.items() if width.rank == rank]
        # peft warns of a second adapter, and this is the same.
        vars(network).pop("peft_config", None)
        # DoRA starts from the weights' norms, the other kinds from nothing of them.
        with nullcontext() if settings.dora else described(network):
            inject_adapter_in_model(
                _peft_config(settings, names, rank), network, adapter_name=_NAME
            )
    layers = {
        key: _peft_layer(network, key, layer, widths[key], settings, seed=seed)
        for key, layer in keys.items()
    }
    if masks is not None:
        for key in keys:
            _mask(masks, key, network.get_submodule(split_key(key)[1]), settings)
    return layers


def _mask(masks: SampleMasks, key: str, layer: Any, settings: AdapterSettings) -> None:
    """Put masks over the inputs, the ranks and the whole of a layer's update."""
    is_lora = settings.kind == "lora"
    if is_lora:
        down = layer.lora_A[_NAME]
        rank, channels = down.weight.shape[:2]
    else:
        rank, channels = 1, layer.get_base_layer().weight.shape[1]
    before, after = gates(masks, key, settings, channels=channels, rank=rank)
    if not is_lora:
        real = layer._get_delta_activations
        layer._get_delta_activations = lambda name, x, *args, **kwargs: gated(
            real(name, gated(x, before), *args, **kwargs), after
        )
    elif isinstance(layer, FusedLinear | LeanConv2d) and not layer.lora_variant:
        layer.before, layer.gates = before, after
    else:
        down.register_forward_pre_hook(lambda _, inputs: (gated(inputs[0], before), *inputs[1:]))
        down.register_forward_hook(lambda _, _inputs, output: gated(output, after))


def _peft_config(settings: AdapterSettings, names: Sequence[str], rank: int) -> PeftConfig:
    # peft matches a list of names by their ends too; a pattern has to match whole names.
    shared: dict[str, Any] = {"r": rank, "target_modules": "|".join(map(re.escape, names))}
    if settings.kind == "lora":
        # With init_lora_weights=False peft draws values that `_peft_layer` replaces.
        config = LoraConfig(**shared, use_dora=settings.dora, init_lora_weights=False)
        config._register_custom_module(dict(CUSTOM))
        return config
    # peft drops a layer if torch.rand(1) <= module_dropout, so 0.0 would drop one pass in 2**24.
    shared |= {"alpha": rank, "module_dropout": -1.0}
    if settings.kind == "loha":
        return LoHaConfig(**shared)
    return LoKrConfig(**shared, decompose_factor=settings.lokr_factor)


def _peft_layer(
    network: nn.Module,
    key: str,
    base: nn.Module,
    width: Width,
    settings: AdapterSettings,
    *,
    seed: int,
) -> AdaptedLayer:
    layer: Any = network.get_submodule(split_key(key)[1])
    assert layer is not base, f"peft did not adapt {key}"
    if settings.kind == "lora":
        parameters = {"down": layer.lora_A[_NAME].weight, "up": layer.lora_B[_NAME].weight}
    else:
        # peft's "hada_w1_a" and the like, of which a layer has those that it needs, in the order in which they
        # are trained and saved.
        factors = {
            name.partition("_")[2]: getattr(layer, name) for name in layer.adapter_layer_names
        }
        parameters = {name: values[_NAME] for name, values in factors.items() if _NAME in values}
    # Programs that read LoKr files ignore alpha if both factors are full matrices, so training does too.
    if parameters.keys() == {"w1", "w2"}:
        width = Width(rank=width.rank, scale=1.0)
    layer.scaling[_NAME] = width.scale
    component, module = split_key(key)
    for name, parameter in parameters.items():
        counters = (module if component == DENOISER else key, *(() if name == "down" else (name,)))
        generator = torch.Generator().manual_seed(draw_seed(seed, Stream.ADAPTER_INIT, *counters))
        # The update is zero, its first gradient is not. LoRA uses Kaiming's uniform distribution and zero (Hu et
        # al. 2021), LoHa and LoKr are as in LyCORIS.
        values = torch.zeros(parameter.shape, dtype=torch.float32)
        match settings.kind, name:
            case ("lora", "down") | ("lokr", "w1" | "w2_a"):
                nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
            case "loha", "w1_a":
                values.normal_(std=0.1, generator=generator)
            case "loha", "w1_b" | "w2_b":
                values.normal_(std=1.0, generator=generator)
        parameter.data = values.to(parameter.device)
    if settings.dora:
        # Magnitudes equal to the norms of the frozen weight, by the formula of the forward pass, so that the
        # initial update is exactly zero.
        norms = layer.lora_magnitude_vector[_NAME]
        weight = frozen_weight(layer.get_base_layer()).float()
        magnitude = norms.get_weight_norm(weight, torch.zeros_like(weight), scaling=1.0)
        if type(norms) is DoraLinearLayer:
            norms = LeanDora(fan_in_fan_out=False)  # type: ignore[no-untyped-call]
            layer.lora_magnitude_vector[_NAME] = norms
        norms.weight = parameters["magnitude"] = nn.Parameter(magnitude)
    return AdaptedLayer(
        kind=settings.kind,
        width=width,
        parameters=parameters,
        # peft's own switch would also freeze the parameters.
        switch=lambda on: setattr(layer, "_disable_adapters", not on),
        scaled=None
        if settings.dora
        else lambda strength: layer.scaling.update({_NAME: width.scale * strength}),
    )


def _rotate(network: nn.Module, key: str, layer: nn.Module, rank: int) -> AdaptedLayer:
    out = weight_shape(layer)[0]
    size = block_size(out, rank=rank)
    rotated = RotatedLayer(layer, out=out, size=size)
    network.set_submodule(split_key(key)[1], rotated)
    return AdaptedLayer(
        kind="oft",
        width=Width(rank=size, scale=1.0),
        parameters={"blocks": rotated.blocks},
        switch=lambda on: setattr(rotated, "enabled", on),
    )

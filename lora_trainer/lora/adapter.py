"""The adapter of a run: all adapted layers of the denoiser and the text encoders, as one thing.

`inject` puts it into frozen networks; `Adapter` gives its parameters to the optimizer, its tensors to
exports, its state to a resume. What kind it is, only `injection` knows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import AdapterSettings, OptimizerSettings
from lora_trainer.families.base import DENOISER, Family
from lora_trainer.lora.adapter_size import first_match
from lora_trainer.lora.dropout import SampleMasks, drops
from lora_trainer.lora.inject import AdaptedLayer, adapt
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, split_key

_INITIAL, _AVERAGE, _BEST, _NEW_TOKENS = "initial.", "average.", "best.", "new_tokens."


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapted layers by "component.module"; `rank` and `alpha` are those of the settings.

    `masks` are those of its dropout, None without any. `average` holds a running average of each
    parameter, by its name in `state`; empty without one. `new_tokens` are the vectors of a new word
    [tokens, width] by component, which are learned along.
    """

    layers: Mapping[str, AdaptedLayer]
    rank: int
    alpha: float
    masks: SampleMasks | None = None
    average: Mapping[str, Tensor] = field(default_factory=dict)
    best: Mapping[str, Tensor] = field(default_factory=dict)
    """Likewise the weights of the lowest validation loss so far; empty where they are not kept."""
    new_tokens: Mapping[str, nn.Parameter] = field(default_factory=dict)

    def parameters(self) -> list[nn.Parameter]:
        """Return what is trained, in module order; `groups` freezes some."""
        return [parameter for _, parameter in self._all() if parameter.requires_grad]

    def groups(self, settings: OptimizerSettings) -> list[dict[str, Any]]:
        """Return the optimizer's groups: "params", and "lr_scale", a factor on the learning rate.

        The group of new tokens is marked "embedding": its rows are no matrix of a layer.
        Freezes the layers whose pattern says 0. LoRA+ (Hayou et al. 2024, arXiv 2402.12354) raises the
        factor of `up`. Raises RequestError when nothing is left to train.
        """
        groups: dict[float, list[nn.Parameter]] = {}
        for key, layer in self.layers.items():
            scale = _learning_rate_scale(key, settings)
            for name, parameter in layer.parameters.items():
                parameter.requires_grad_(scale > 0)
                if scale > 0:
                    ratio = settings.lora_plus_ratio if name == "up" else 1.0
                    groups.setdefault(scale * ratio, []).append(parameter)
        if not groups:
            raise RequestError(
                "optimizer.learning_rate_pattern freezes every layer",
                fix="give at least one layer a factor above 0",
            )
        found = [{"params": own, "lr_scale": scale} for scale, own in groups.items()]
        if self.new_tokens:
            own = list(self.new_tokens.values())
            found.append({"params": own, "lr_scale": settings.new_tokens_scale, "embedding": True})
        return found

    def tensors(self) -> AdapterTensors:
        """Return the live float32 tensors, detached, on their device.

        PiSSA is a LoRA of twice the rank, against the base as it was loaded.
        """
        return {key: layer.tensors() for key, layer in self.layers.items()}

    def words(self) -> dict[str, Tensor]:
        """Return the live vectors of the new word, detached, by component."""
        return {component: vectors.detach() for component, vectors in self.new_tokens.items()}

    def state(self) -> dict[str, Tensor]:
        """Return {"component.module.tensor": value} for a resume; more as "initial....", "average....", "best....".

        The first is PiSSA's start; `inject` takes it back, so that a resumed run starts at the same bits.
        """
        average = {f"{_AVERAGE}{name}": tensor for name, tensor in self.average.items()}
        return self._named() | average | {f"{_BEST}{name}": t for name, t in self.best.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a resume state in; raises RequestError when it belongs to another adapter."""
        own = self.state()
        if state.keys() != own.keys() or any(state[name].shape != own[name].shape for name in own):
            raise RequestError(
                "the saved state belongs to an adapter of another rank or other layers",
                fix="resume with the run's own adapter settings, or start a new run",
            )
        for name, tensor in own.items():
            tensor.copy_(state[name])

    def load_tensors(self, tensors: AdapterTensors) -> None:
        """Go on from an adapter file; where its alpha was another, its tensors are scaled to ours.

        Raises RequestError when kind, layers or ranks differ, before anything is changed.
        """
        _refuse_others(self.layers, tensors)
        for key, layer in self.layers.items():
            values = _rescaled(tensors[key], layer.width.scale)
            with torch.no_grad():
                for name, parameter in layer.parameters.items():
                    parameter.copy_(values[name].reshape(parameter.shape))
                    if self.average:
                        self.average[f"{key}.{name}"].copy_(parameter)

    def update_average(self, step: int, *, decay: float) -> None:
        """Take the weights after optimizer step `step`, counted from 1, into the running average.

        The decay begins low, min(decay, step / (step + 9)), so that the start is soon forgotten; it is
        a function of the step, so nothing but the average itself is to be kept for a resume.
        """
        share = 1.0 - min(decay, step / (step + 9.0))
        live = self._named()
        torch._foreach_lerp_(
            list(self.average.values()), [live[name] for name in self.average], share
        )

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Exchange weights and their running average while the block runs; takes no memory."""
        with self._exchanged(self.average):
            yield

    def keep_as_best(self) -> None:
        """Copy the weights in force over the best so far."""
        live = self._named()
        torch._foreach_copy_(list(self.best.values()), [live[name] for name in self.best])

    @contextmanager
    def at_best(self) -> Iterator[None]:
        """Exchange weights and the best so far while the block runs; takes no memory."""
        with self._exchanged(self.best):
            yield

    @contextmanager
    def _exchanged(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        self._exchange(others)
        try:
            yield
        finally:
            self._exchange(others)

    @contextmanager
    def off(self) -> Iterator[None]:
        """Leave the networks as they are without the adapter while the block runs."""
        for layer in self.layers.values():
            layer.switch(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.switch(True)

    def _exchange(self, others: Mapping[str, Tensor]) -> None:
        for name, parameter in self._all():
            other = others[name]
            parameter.data, other.data = other.data, parameter.data

    def _all(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter, frozen ones too, with its name in `state`."""
        return _named_parameters(self.layers, self.new_tokens)

    def _named(self) -> dict[str, Tensor]:
        """Return the live tensors and PiSSA's start by name, detached."""
        live = {name: parameter.detach() for name, parameter in self._all()}
        start = {
            f"{_INITIAL}{key}.{name}": tensor.detach()
            for key, layer in self.layers.items()
            for name, tensor in layer.initial.items()
        }
        return live | start

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Hold the values an export in `dtype` holds while the block runs, then the exact ones again.

        Also when the device runs out of memory while they are rounded. New tokens are exported whole.
        """
        named = self._named().items()
        held = [tensor for name, tensor in named if not name.startswith(_NEW_TOKENS)]
        exact = [tensor.clone() for tensor in held]
        try:
            for tensor in held:
                tensor.copy_(tensor.to(dtype))
            yield
        finally:
            for tensor, value in zip(held, exact, strict=True):
                tensor.copy_(value)


def inject(
    networks: Mapping[str, nn.Module],
    *,
    modules: Mapping[str, Sequence[str]],
    settings: AdapterSettings,
    alpha: float,
    seed: int,
    initial: Mapping[str, Tensor] | None = None,
    averaged: bool = False,
    new_tokens: Mapping[str, nn.Parameter] = MappingProxyType({}),
    keep_best: bool = False,
) -> Adapter:
    """Put an adapter on the named modules of frozen networks, both by component; updates start at zero.

    `alpha` is `settings.alpha` without `auto`. `initial` is the state of the run that is resumed:
    PiSSA starts at the factors in it instead of decomposing the weights again. `averaged`: with a
    running average, which starts where the weights do, as what `keep_best` keeps does. `new_tokens`
    are learned along. Raises
    RequestError when no layer or a layer of another sort is named.
    """
    starts = initial and {
        name.removeprefix(_INITIAL): tensor
        for name, tensor in initial.items()
        if name.startswith(_INITIAL)
    }
    layers: dict[str, AdaptedLayer] = {}
    masks = SampleMasks() if drops(settings) else None
    for component, names in modules.items():
        if not names:
            raise RequestError(
                f"no layer of the {component.replace('_', ' ')} matches adapter.targets",
                fix="choose other adapter.targets",
            )
        layers |= adapt(
            networks[component],
            names,
            component=component,
            settings=settings,
            alpha=alpha,
            seed=seed,
            initial=starts,
            masks=masks,
        )
    named = dict(_named_parameters(layers, new_tokens))
    return Adapter(
        layers=layers,
        rank=settings.rank,
        alpha=alpha,
        masks=masks,
        average=_copy(named) if averaged else {},
        best=_copy(named) if keep_best else {},
        new_tokens=new_tokens,
    )


def _copy(named: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in named.items()}


def _named_parameters(
    layers: Mapping[str, AdaptedLayer], new_tokens: Mapping[str, nn.Parameter]
) -> Iterator[tuple[str, nn.Parameter]]:
    for key, layer in layers.items():
        for name, parameter in layer.parameters.items():
            yield f"{key}.{name}", parameter
    for component, vectors in new_tokens.items():
        yield f"{_NEW_TOKENS}{component}", vectors


def layer_names(network: nn.Module) -> list[str]:
    """Return the names of all layers that could have an adapter, in module order."""
    return [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear | nn.Conv2d)
    ]


def layer_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that an adapter file could change, by layer, in module order."""
    return {
        name: tuple(module.weight.shape)
        for name, module in network.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and not isinstance(module, nn.Embedding)
    }


def denoiser_layers(family: Family, architecture: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return what `layer_shapes` does of a denoiser that need not be loaded, nor be quantised as it is."""
    with torch.device("meta"):
        return layer_shapes(family.empty_denoiser(architecture))


def _learning_rate_scale(key: str, settings: OptimizerSettings) -> float:
    """Return the factor on `optimizer.learning_rate` of one layer; 0: frozen."""
    scale = 1.0
    if split_key(key)[0] != DENOISER:
        scale = settings.text_encoder_scale
    patterns = settings.learning_rate_pattern
    pattern = first_match(key, patterns, setting="optimizer.learning_rate_pattern")
    return scale if pattern is None else scale * patterns[pattern]


def _rescaled(module: ModuleTensors, scale: float) -> dict[str, Tensor]:
    """Return float32 tensors that give at `scale` the update they gave at their own."""
    values = {name: tensor.float() for name, tensor in module.tensors.items()}
    if module.kind != "oft" and module.scale != scale:
        outer = {"lora": "up", "loha": "w1_a", "lokr": "w1"}[module.kind]
        values[outer] = values[outer] * (module.scale / scale)
    return values


def _refuse_others(layers: Mapping[str, AdaptedLayer], tensors: AdapterTensors) -> None:
    """Raise RequestError naming the first thing in which an adapter file differs, and the setting for it."""
    own, other = _kind(layers), _kind(tensors)
    if own != other:
        raise RequestError(
            f"train.init_from holds a {' '.join(other)} adapter, this run trains {' '.join(own)}",
            fix=f"--set adapter.kind={other[0]} --set adapter.dora={str('dora' in other).lower()}",
        )
    if any(layer.initial for layer in layers.values()):
        raise RequestError(
            "adapter.init=pissa starts at the base's singular vectors, not at train.init_from",
            fix="--set adapter.init=default",
        )
    if tensors.keys() != layers.keys():
        extra, missing = sorted(tensors.keys() - layers.keys()), sorted(layers.keys() - tensors)
        example = f", such as {(extra or missing)[0]}"
        text = bool({split_key(key)[0] for key in extra + missing} - {DENOISER})
        setting = "adapter.targets and adapter.text_encoder" if text else "adapter.targets"
        raise RequestError(
            f"train.init_from changes {len(extra)} layers that this run does not train, and lacks "
            f"{len(missing)} that it trains{example}",
            fix=f"set {setting} as they were when the file was trained",
        )
    for key, layer in layers.items():
        for name, parameter in layer.parameters.items():
            found = tensors[key].tensors.get(name)
            if found is None or _flat_shape(found) != _flat_shape(parameter, name):
                raise RequestError(
                    f"train.init_from has rank {tensors[key].rank} in {key}, this run has "
                    f"{layer.width.rank}, or the base model is another",
                    fix="set adapter.rank, conv_rank, rank_pattern and lokr_factor as they were "
                    "when the file was trained",
                )


def _kind(layers: Mapping[str, AdaptedLayer] | AdapterTensors) -> tuple[str, ...]:
    """Return what kinds there are, such as ("lora", "dora")."""
    found = [
        layer.tensors() if isinstance(layer, AdaptedLayer) else layer for layer in layers.values()
    ]
    kinds = sorted({module.kind for module in found})
    return (*kinds, "dora") if any(module.dora for module in found) else tuple(kinds)


def _flat_shape(tensor: Tensor, name: str = "") -> tuple[int, ...]:
    """A 1x1 convolution may have been written as a linear layer; norms have one dimension in files."""
    if name == "magnitude" or tensor.dim() == 1:
        return (tensor.numel(),)
    if name == "blocks" or tensor.dim() == 3:
        return tuple(tensor.shape)
    return (tensor.shape[0], tensor.numel() // tensor.shape[0])

"""The adapter of a run: all adapted layers of the denoiser and the text encoders together.

`inject` puts it into frozen networks; `Adapter` gives its parameters to the optimizer, its tensors to
exports and its state to a resume state. Only `injection` distinguishes the kinds of adapters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_trainer.common.errors import RequestError
from lora_trainer.common.randomness import Stream, draw_seed
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.lora.adapter_size import first_match
from lora_trainer.lora.dropout import SampleMasks, masks_samples
from lora_trainer.lora.inject import AdaptedLayer, adapt
from lora_trainer.lora.tensors import AdapterTensors, split_key

_AVERAGE, _BEST, _NEW_TOKENS = "average.", "best.", "new_tokens."
# Relative excess that is tolerated: a layer scaled back to the limit may round to just above it, and the next
# step would change its bits again although the optimizer did not move it.
NORM_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """The adapted layers by "component.module"."""

    layers: Mapping[str, AdaptedLayer]
    rank: int
    """The rank in the settings."""
    alpha: float
    """The alpha in the settings."""
    masks: SampleMasks | None = None
    """Its masks by sample; None where nothing is left out."""
    average: Mapping[str, Tensor] = field(default_factory=dict)
    """A running average of each parameter by its name in `state`; empty if the run keeps none."""
    best: Mapping[str, Tensor] = field(default_factory=dict)
    """The weights of the lowest validation loss so far, by name; empty if the run does not keep them."""
    new_tokens: Mapping[str, nn.Parameter] = field(default_factory=dict)
    """The trained vectors of a new word, [tokens, width] by component."""

    def parameters(self) -> list[nn.Parameter]:
        """Return the trained parameters in module order, without those that `groups` has frozen."""
        return [parameter for _, parameter in self._all() if parameter.requires_grad]

    def groups(self, settings: OptimizerSettings) -> list[dict[str, Any]]:
        """Return the optimizer's groups: "params", and "lr_scale", a factor on the learning rate.

        The group of new tokens is marked "embedding", because its rows are not a matrix of a layer.
        Freezes the layers whose learning rate pattern is 0. LoRA+ (Hayou et al. 2024, arXiv 2402.12354)
        raises the factor of `up`. Raises RequestError when no layer is left to train.
        """
        groups: dict[float, list[nn.Parameter]] = {}
        patterns = settings.learning_rate_pattern
        for key, layer in self.layers.items():
            scale = 1.0 if split_key(key)[0] == DENOISER else settings.text_encoder_scale
            if (pattern := first_match(key, patterns)) is not None:
                scale *= patterns[pattern]
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
        words = list(self.new_tokens.values())
        of_words = {"params": words, "lr_scale": settings.new_tokens_scale, "embedding": True}
        return [
            *({"params": parameters, "lr_scale": scale} for scale, parameters in groups.items()),
            *([of_words] if words else []),
        ]

    def tensors(self) -> AdapterTensors:
        """Return the live float32 tensors, detached, on their device."""
        return {key: layer.tensors() for key, layer in self.layers.items()}

    def words(self) -> dict[str, Tensor]:
        """Return the live vectors of the new word, detached, by component."""
        return {component: vectors.detach() for component, vectors in self.new_tokens.items()}

    def state(self) -> dict[str, Tensor]:
        """Return {"component.module.tensor": value} of the live tensors for a resume state.

        Names that begin with "average." and "best." hold the running average and the best weights.
        """
        average = {f"{_AVERAGE}{name}": tensor for name, tensor in self.average.items()}
        return self._named() | average | {f"{_BEST}{name}": t for name, t in self.best.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copy a resume state in; raises RequestError when it belongs to another adapter."""
        live_state = self.state()
        if state.keys() != live_state.keys() or any(
            state[name].shape != live_state[name].shape for name in live_state
        ):
            raise RequestError(
                "the saved state belongs to an adapter of another rank or other layers",
                fix="resume with the run's own adapter settings, or start a new run",
            )
        for name, tensor in live_state.items():
            tensor.copy_(state[name])

    def load_tensors(self, tensors: AdapterTensors) -> None:
        """Start from an adapter file; if its alpha differs, its tensors are scaled to the same update.

        Raises RequestError when kind, layers or ranks differ, before any tensor is changed.
        """
        _refuse_others(self.layers, self.tensors(), tensors)
        for key, layer in self.layers.items():
            module = tensors[key]
            values = {name: tensor.float() for name, tensor in module.tensors.items()}
            if module.kind != "oft" and module.scale != layer.width.scale:
                outer = {"lora": "up", "loha": "w1_a", "lokr": "w1"}[module.kind]
                values[outer] = values[outer] * (module.scale / layer.width.scale)
            with torch.no_grad():
                for name, parameter in layer.parameters.items():
                    parameter.copy_(values[name].reshape(parameter.shape))
                    if self.average:
                        self.average[f"{key}.{name}"].copy_(parameter)

    def update_average(self, step: int, *, decay: float) -> None:
        """Update the running average with the weights after optimizer step `step`, counted from 1.

        The decay begins low, min(decay, step / (step + 9)), so that the initial weights are soon forgotten.
        It is a function of the step, so a resume needs nothing but the average itself.
        """
        share = 1.0 - min(decay, step / (step + 9.0))
        live = self._named()
        torch._foreach_lerp_(
            list(self.average.values()), [live[name] for name in self.average], share
        )

    def keep_as_best(self) -> None:
        """Copy the present weights over the best weights so far."""
        live = self._named()
        torch._foreach_copy_(list(self.best.values()), [live[name] for name in self.best])

    @contextmanager
    def swapped(self, others: Mapping[str, Tensor]) -> Iterator[None]:
        """Swap the weights with `average` or `best` while a block runs; needs no memory."""

        # `.data` is swapped, not the parameters: the optimizer and the hooks keep their references.
        def exchange() -> None:
            for name, parameter in self._all():
                other = others[name]
                parameter.data, other.data = other.data, parameter.data

        exchange()
        try:
            yield
        finally:
            exchange()

    @contextmanager
    def off(self) -> Iterator[None]:
        """Switch the updates of all layers off while the block runs."""
        for layer in self.layers.values():
            layer.switch(False)
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.switch(True)

    @contextmanager
    def at(self, strength: float) -> Iterator[None]:
        """Multiply the updates of all layers by `strength` while the block runs, forward and backward.

        Not for DoRA and OFT, whose updates are not multiples of a strength.
        """
        changes = [layer.scaled for layer in self.layers.values()]
        for change in changes:
            assert change is not None, "a DoRA or OFT adapter has no strength in training"
            change(strength)
        try:
            yield
        finally:
            for change in filter(None, changes):
                change(1.0)

    def _all(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter, frozen ones too, with its name in `state`."""
        for key, layer in self.layers.items():
            for name, parameter in layer.parameters.items():
                yield f"{key}.{name}", parameter
        for component, vectors in self.new_tokens.items():
            yield f"{_NEW_TOKENS}{component}", vectors

    def _named(self) -> dict[str, Tensor]:
        """Return the live tensors by name, detached."""
        return {name: parameter.detach() for name, parameter in self._all()}

    @torch.no_grad()
    def limit_norms(self, limit: float) -> None:
        """Scale the updates of trained layers whose Frobenius norm is above `limit` back to it.

        Max-norm regularisation after Srebro & Shraibman 2005 and Srivastava et al. 2014 (sd-scripts:
        scale_weight_norms). The host does not wait for the device. For LoRA, LoHa and LoKr; not for DoRA,
        whose update is more than the product of the factors.
        """
        layers = [
            layer
            for layer in self.layers.values()
            if any(parameter.requires_grad for parameter in layer.parameters.values())
        ]
        if not layers:  # new tokens alone are left to train
            return
        excess = torch.stack([layer.update_norm() for layer in layers]) / limit
        for layer, too_large in zip(layers, excess.unbind(), strict=True):
            factors: list[Tensor] = list(layer.parameters.values())
            # The update is the product of n factors, so each takes the n-th root of the correction.
            back = too_large.pow(-1 / len(factors))
            torch._foreach_mul_(factors, torch.where(too_large > 1 + NORM_TOLERANCE, back, 1.0))

    @contextmanager
    def rounded(self, dtype: torch.dtype) -> Iterator[None]:
        """Round the weights to `dtype`, as an export does, while the block runs; then restore them exactly.

        They are restored as well if the device runs out of memory during rounding. New tokens are not
        rounded, as exports keep them in float32.
        """
        live_items = self._named().items()
        tensors = [tensor for name, tensor in live_items if not name.startswith(_NEW_TOKENS)]
        exact = [tensor.clone() for tensor in tensors]
        try:
            for tensor in tensors:
                tensor.copy_(tensor.to(dtype))
            yield
        finally:
            for tensor, value in zip(tensors, exact, strict=True):
                tensor.copy_(value)


def inject(
    networks: Mapping[str, nn.Module],
    *,
    modules: Mapping[str, Sequence[str]],
    settings: AdapterSettings,
    alpha: float,
    seed: int,
    averaged: bool = False,
    new_tokens: Mapping[str, nn.Parameter] = MappingProxyType({}),
    keep_best: bool = False,
) -> Adapter:
    """Put an adapter on the named modules of frozen networks, both by component; updates start at zero.

    `alpha` is `settings.alpha` without `auto`. `averaged` adds a running average and `keep_best` a copy for the
    best weights; both begin equal to the weights. `new_tokens` are trained too.
    Raises RequestError when a component has no named layer, or a layer that cannot be adapted.
    """
    layers: dict[str, AdaptedLayer] = {}
    masks = SampleMasks() if masks_samples(settings) else None
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
            masks=masks,
        )
    for vectors in new_tokens.values():
        vectors.requires_grad_(True)  # peft froze them with the text encoder that it adapted
    adapter = Adapter(
        layers=layers, rank=settings.rank, alpha=alpha, masks=masks, new_tokens=new_tokens
    )
    average, best = (
        {name: tensor.clone() for name, tensor in adapter._named().items()} if wanted else {}
        for wanted in (averaged, keep_best)
    )
    return replace(adapter, average=average, best=best)


def layer_shapes(network: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight that an adapter file could change, by layer, in module order."""
    return {
        name: tuple(module.weight.shape)
        for name, module in network.named_modules()
        if isinstance(getattr(module, "weight", None), nn.Parameter)
        and not isinstance(module, nn.Embedding)
    }


def denoiser_layers(family: Family, architecture: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return `layer_shapes` of a denoiser from its architecture alone, without loading any weight."""
    with torch.device("meta"):
        return layer_shapes(family.empty_denoiser(architecture))


def _refuse_others(
    layers: Mapping[str, AdaptedLayer], current: AdapterTensors, tensors: AdapterTensors
) -> None:
    """Raise RequestError for the first difference of an adapter file, naming the setting to change."""
    own_kind, other_kind = _kind(current), _kind(tensors)
    if own_kind != other_kind:
        untrained = set(other_kind) - {"lora", "loha", "lokr", "oft", "dora"}
        run = "which is not trained here" if untrained else f"this run trains {' '.join(own_kind)}"
        settings = f"--set adapter.kind={other_kind[0]} --set adapter.dora={str('dora' in other_kind).lower()}"
        raise RequestError(
            f"train.init_from holds a {' '.join(other_kind)} adapter, {run}",
            fix="make a LoRA of it with `lora-train resize FILE --rank N`, where its kind allows that"
            if untrained
            else settings,
        )
    if tensors.keys() != layers.keys():
        extra, missing = sorted(tensors.keys() - layers.keys()), sorted(layers.keys() - tensors)
        raise RequestError(
            f"train.init_from changes {len(extra)} layers that this run does not train, and lacks "
            f"{len(missing)} that it trains, such as {(extra or missing)[0]}",
            fix="set adapter.targets, adapter.refiners and adapter.text_encoder as they were when the file was trained",
        )
    for key, layer in layers.items():
        trained = {name: _flat_shape(each, name) for name, each in layer.parameters.items()}
        shapes = {name: _flat_shape(each) for name, each in tensors[key].tensors.items()}
        if shapes != trained:
            surplus = "".join(f", {name}" for name in sorted(shapes.keys() - trained.keys()))
            raise RequestError(
                f"train.init_from has rank {tensors[key].rank}{surplus} in {key}, this run has rank "
                f"{layer.width.rank}, or the base model is another",
                fix="set adapter.rank, conv_rank, rank_pattern and lokr_factor as they were when the file was "
                "trained; merge a file with biases into the base and train on that",
            )


def _kind(tensors: AdapterTensors) -> tuple[str, ...]:
    """Return the sorted kinds of the layers, such as ("lora", "dora")."""
    kinds = sorted({module.kind for module in tensors.values()})
    return (*kinds, "dora") if any(module.dora for module in tensors.values()) else tuple(kinds)


def _flat_shape(tensor: Tensor, name: str = "") -> tuple[int, ...]:
    """Return a shape that is the same for tensors that files write in several ways.

    A 1x1 convolution may have been written as a linear layer, and norms have one dimension in files.
    """
    if name == "magnitude" or tensor.dim() == 1:
        return (tensor.numel(),)
    if name == "blocks" or tensor.dim() == 3:
        return tuple(tensor.shape)
    return (tensor.shape[0], tensor.numel() // tensor.shape[0])


# ---- new tokens


class ExtendedTable(nn.Module):
    """Replaces a network's token table; token numbers -1, -2, ... are rows 0, 1, ... of `vectors`."""

    def __init__(self, base_table: nn.Embedding, vectors: nn.Parameter) -> None:
        super().__init__()
        self.known, self.vectors = base_table, vectors

    def forward(self, numbers: Tensor) -> Tensor:
        """Return [..., width] in the dtype of the base's table for token numbers [...]."""
        # Both lookups run for all positions, with indices clamped into range, and `where` chooses: masks
        # of varying size would make the host wait for the device.
        base_rows: Tensor = self.known(numbers.clamp(min=0))
        new = functional.embedding((-1 - numbers).clamp(min=0), self.vectors)
        return torch.where((numbers < 0).unsqueeze(-1), new.to(base_rows.dtype), base_rows)


def add_new_tokens(
    text: TextEncoder, count: int, *, start: str | None, seed: int
) -> dict[str, nn.Parameter]:
    """Extend the tables of `text` by `count` vectors of its new word; return them, [count, width] each.

    They start at the vectors of the word `start`, repeated in turn, or at random vectors with the table's
    standard deviation. Raises RequestError for a `start` without tokens.

    Vectors trained beside a frozen table are pivotal tuning: Gal et al. 2022 (arXiv 2208.01618) learn the vectors
    of a word; Roich et al. 2021 (arXiv 2106.05744) first find such a pivot and then tune the generator around it.
    """
    numbers = {} if start is None else text.numbers(start)
    vectors = {}
    for component, network in text.networks.items():
        base_table = network.get_input_embeddings()  # type: ignore[operator]  # transformers' own
        assert isinstance(base_table, nn.Embedding)
        rows = base_table.weight
        if start is None:
            generator = torch.Generator().manual_seed(draw_seed(seed, Stream.NEW_TOKENS, component))
            drawn = torch.randn(count, rows.shape[1], generator=generator)
            values = drawn.to(rows.device) * rows.float().std()
        elif of_start := numbers[component]:
            chosen = [of_start[index % len(of_start)] for index in range(count)]
            values = rows[torch.tensor(chosen, device=rows.device)].float().clone()
        else:
            raise RequestError(
                f"adapter.new_tokens_from={start!r} has no tokens", fix="use a word such as person"
            )
        vectors[component] = nn.Parameter(values)  # float32 whatever the dtype of the table
        table = ExtendedTable(base_table, vectors[component])
        network.set_input_embeddings(table)  # type: ignore[operator]  # transformers' own
    return vectors

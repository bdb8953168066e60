"""The networks of a training: loaded, quantised, streamed and given their adapter, as the plan says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from lora_trainer.caching import runs_text_encoders
from lora_trainer.config import Config, concrete
from lora_trainer.data.tokens import new_word
from lora_trainer.device import CPU, DTYPES, planned_device
from lora_trainer.families.base import DENOISER, WEIGHTS, Conditioning, TextEncoder
from lora_trainer.model.adapters import Adapter, denoiser_layers, inject, layer_shapes
from lora_trainer.model.assistant import Assistant, attach
from lora_trainer.model.attention import apply_attention
from lora_trainer.model.checkpointing import apply_checkpointing
from lora_trainer.model.modulation import ModulatedNetwork
from lora_trainer.model.new_tokens import add_new_tokens
from lora_trainer.model.products import Int8Layouts
from lora_trainer.model.quantize import quantize
from lora_trainer.model.streaming import Streamed, stream_blocks
from lora_trainer.output.adapter_names import file_names
from lora_trainer.output.adapter_read import read_tensors
from lora_trainer.output.checkpoints import TrainingState
from lora_trainer.prepare import Prepared
from lora_trainer.quantization import QUANTIZATIONS, BaseMatmul, BasePrecision
from lora_trainer.train.foresight import Foresight
from lora_trainer.train.training import Model


@dataclass(frozen=True, kw_only=True)
class Networks:
    """What is on the device while training: the denoiser, text encoders trained along, an assistant.

    `modulation` are the denoiser's layers that are not on it; `int8` are the products its device has with
    a base of int8 codes, where such were asked for.
    """

    denoiser: nn.Module
    text: TextEncoder | None
    assistant: Assistant | None
    modulation: ModulatedNetwork | None = None
    int8: Int8Layouts | None = None


def load_networks(prepared: Prepared) -> Networks:
    config, device, family = prepared.config, planned_device(prepared), prepared.family
    precision = DTYPES[concrete(config.train.precision)]
    # A base that will be smaller on the device than as it is loaded is never whole there.
    streamed = concrete(config.memory.streamed_blocks)
    kept: BasePrecision = concrete(config.memory.base_precision)
    cached = concrete(config.memory.modulation_cache)
    smaller = streamed or cached or kept in QUANTIZATIONS
    place = CPU if smaller else device
    denoiser = family.load_denoiser(prepared.facts, dtype=precision, device=place)
    apply_attention(denoiser, concrete(config.memory.attention))
    layouts = None
    if kept in ("int8", "fp8", "nf4"):
        matmul: BaseMatmul = concrete(config.memory.base_matmul)
        layouts = quantize(denoiser, kept, device=device, skip=family.unquantised, matmul=matmul)
    modulation = _modulation(prepared, denoiser) if cached else None
    if not streamed:
        denoiser.to(device)
    text = None
    if runs_text_encoders(config):
        text = family.load_text_encoder(prepared.facts, dtype=precision, device=device)
        if word := new_word(config):
            text.learn(word)
    return Networks(
        denoiser=denoiser,
        text=text,
        assistant=_assistant(prepared, denoiser),
        modulation=modulation,
        int8=layouts,
    )


def _modulation(prepared: Prepared, denoiser: nn.Module) -> ModulatedNetwork:
    wanted = set(prepared.family.modulation_layers(prepared.facts))
    names = [name for name, _ in denoiser.named_modules() if name in wanted]
    return ModulatedNetwork(denoiser, names, device=planned_device(prepared))


def _assistant(prepared: Prepared, denoiser: nn.Module) -> Assistant | None:
    file = prepared.config.base.assistant
    if file is None:
        return None
    names = file_names(prepared.family, _layers(prepared, {}))
    return attach(denoiser, read_tensors(Path(file).expanduser(), names=names))


def with_adapter(prepared: Prepared, networks: Networks, state: TrainingState | None) -> Adapter:
    config, family = prepared.config, prepared.family
    inside: dict[str, nn.Module] = {DENOISER: networks.denoiser}
    modules = {DENOISER: family.lora_targets(networks.denoiser, config.adapter.targets)}
    if networks.text is not None and config.adapter.text_encoder:
        inside |= networks.text.networks
        modules |= {
            name: family.text_targets(network) for name, network in networks.text.networks.items()
        }
    starts = config.train.init_from if state is None else None
    text = {} if networks.text is None else networks.text.networks
    layers = _layers(prepared, text) if starts is not None else {}  # as they are without an adapter
    adapter = inject(
        inside,
        modules=modules,
        settings=config.adapter,
        alpha=_alpha(config),
        seed=config.train.seed,
        initial=state.adapter if state is not None else None,
        averaged=config.train.ema_decay is not None,
        new_tokens=_new_tokens(config, networks.text),
        keep_best=config.output.keep_best,
    )
    if starts is not None:
        names = file_names(family, layers)
        adapter.load_tensors(read_tensors(Path(starts).expanduser(), names=names))
    return adapter


def _layers(
    prepared: Prepared, text: Mapping[str, nn.Module]
) -> dict[str, Mapping[str, tuple[int, ...]]]:
    """Return the shapes of all layers by component, those of loaded text encoders by their own names."""
    family = prepared.family
    return {
        DENOISER: denoiser_layers(family, prepared.facts.architecture),
        **family.text_modules(),
        **{name: layer_shapes(network) for name, network in text.items()},
    }


def _new_tokens(config: Config, text: TextEncoder | None) -> dict[str, nn.Parameter]:
    word = new_word(config)
    if text is None or word is None:
        return {}
    return add_new_tokens(
        text, word.tokens, start=config.adapter.new_tokens_from, seed=config.train.seed
    )


def _alpha(config: Config) -> float:
    """Return alpha; OFT has none, which leaves its setting at auto."""
    alpha = config.adapter.alpha
    return float(config.adapter.rank) if alpha == "auto" else alpha


def arrange(prepared: Prepared, networks: Networks) -> Streamed | None:
    """Let blocks be recomputed, and streamed; both with their adapters in place. Return what streams them.

    Host memory is pinned in the order of how often it is copied.
    """
    memory = prepared.config.memory
    apply_checkpointing(
        networks.denoiser,
        concrete(memory.gradient_checkpointing),
        kept_share=concrete(memory.kept_share),
    )
    streamed = None
    if count := concrete(memory.streamed_blocks):
        streamed = stream_blocks(networks.denoiser, count=count, device=planned_device(prepared))
    if networks.modulation is not None:
        networks.modulation.pin()
    return streamed


def build_model(prepared: Prepared, networks: Networks, adapter: Adapter) -> Model:
    return Model(
        denoiser=networks.denoiser,
        predict=prepared.family.predict,
        embed=_embedding(networks.text),
        prediction=prepared.facts.prediction,
        precision=DTYPES[concrete(prepared.config.train.precision)],
        device=planned_device(prepared),
        masks=adapter.masks,
        batch_group_key=prepared.family.passes_with,
        without_adapter=adapter.off,
        foresight=_foresight(prepared, networks),
    )


def _foresight(prepared: Prepared, networks: Networks) -> Foresight | None:
    family, facts = prepared.family, prepared.facts
    if networks.modulation is None:
        return None
    dtype = DTYPES[concrete(prepared.config.train.precision)]
    return Foresight(
        network=networks.modulation,
        names=family.modulated_by(facts),
        inputs=partial(family.modulation_input, networks.denoiser, dtype=dtype),
        dtype=dtype,
        device=planned_device(prepared),
        most_samples=prepared.plan.modulation_samples,
    )


def _embedding(text: TextEncoder | None) -> Callable[[Conditioning], Conditioning]:
    """Return what turns a batch's texts into conditioning: cached outputs as they are, tokens by running."""
    if text is None:
        return lambda conditioning: conditioning
    tokenized = text.tokenize([""])
    names = frozenset(tokenized) | {name + WEIGHTS for name in tokenized}

    def embed(conditioning: Conditioning) -> Conditioning:
        tokens = {name: value for name, value in conditioning.items() if name in names}
        told = {name: value for name, value in conditioning.items() if name not in names}
        return {**text.embed(tokens), **told}

    return embed

"""Which settings exclude or need each other: rules, each stated once.

A rule about one setting that is without effect beside another stands with the setting itself, as `only_for`,
`not_for` and `idle_with`: the form greys the field out, and an `enforced` setting is refused. `contradictions`
has the rules that need more than that. Input: a config; output: sentences that name values, reason and remedy.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from lora_trainer.config.declare import QUANTIZATIONS
from lora_trainer.config.optimizers import SCHEDULE_FREE
from lora_trainer.config.running import Config


def contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each rule that these settings break; `auto` breaks none."""
    broken = (*_broken_by_learning(config), *_broken_by_memory(config))
    yield from (f"{text}." for text in broken)


def typed(value: Any) -> str:
    """Return a value as a user types it."""
    return value if isinstance(value, str) else json.dumps(value)


def by_key(config: Config) -> dict[str, Any]:
    """Return the value of every setting by `section.name`, unlike `flatten` as it is in the config."""
    return {f"{section}.{name}": value for section, fields in config for name, value in fields}


def _above(value: float | str, limit: float | str) -> bool:
    return not isinstance(value, str) and not isinstance(limit, str) and value > limit


def _broken_by_learning(config: Config) -> Iterator[str]:
    """Yield the sentences on samples, adapter and optimizer."""
    data, objective, adapter = config.data, config.objective, config.adapter
    optimizer, side_px, more_px = config.optimizer, data.resolution, data.more_resolutions
    if (least := objective.min_timestep) > (most := objective.max_timestep):
        yield f"objective.min_timestep={least} is above objective.max_timestep={most}: lower one of them"
    if objective.weighting in ("min_snr", "soft_min_snr") and objective.min_snr_gamma is None:
        needs = "needs a number as objective.min_snr_gamma: 5 is usual"
        yield f"objective.weighting={objective.weighting} {needs}"
    if objective.prior == "base" and not data.has_regularisation:
        yield "objective.prior=base needs regularisation images: give data.regularisation_dir or mark a folder"
    if (weight := objective.preservation_weight) and not (data.class_word and data.triggers):
        words = "replaces data.trigger by data.class_word in captions: give both"
        yield f"objective.preservation_weight={weight:g} {words}"
    class_word = (data.class_word or "").strip().casefold()
    if weight and class_word in (trigger.casefold() for trigger in data.triggers):
        words = (
            f"keeps what the base makes of {data.class_word!r}, which is also a trigger to learn"
        )
        yield f"objective.preservation_weight={weight:g} {words}: choose another data.class_word"
    if len({side_px, *more_px}) <= len(more_px):
        twice = "name a size twice: leave it out of data.more_resolutions"
        yield f"data.resolution={side_px} and data.more_resolutions={more_px} {twice}"
    if adapter.new_tokens and not (data.trigger or "").strip():
        yield "adapter.new_tokens learns vectors for data.trigger, which is empty: choose a trigger word"
    if adapter.new_tokens and config.train.init_from is not None:
        yield "adapter.new_tokens starts new vectors, train.init_from continues a file: choose one"
    if _above(alpha := adapter.alpha, adapter.rank * 100):
        limit = f"over 100 times adapter.rank={adapter.rank}: use at most 100 times the rank"
        yield f"adapter.alpha={alpha} is {limit}"
    if adapter.noise_rank is not None and adapter.noise_rank > adapter.rank:
        limit = f"above adapter.rank={adapter.rank}: half of it is usual"
        yield f"adapter.noise_rank={adapter.noise_rank} is {limit}"
    if adapter.lokr_factor == 0:
        yield "adapter.lokr_factor=0 is not a size: use -1 or at least 1"
    factors = optimizer.learning_rate_pattern.values()
    if optimizer.name == "prodigy" and any(factor not in (0, 1) for factor in factors):
        yield (
            "optimizer.name=prodigy estimates a single rate for all weights: the factors of "
            "optimizer.learning_rate_pattern can be 0 and 1 only"
        )
    if optimizer.name == SCHEDULE_FREE and optimizer.beta1 == 0:
        yield (
            f"optimizer.name={SCHEDULE_FREE} averages the weights itself, and optimizer.beta1=0 switches "
            "that off: 0.9 is usual"
        )
    if optimizer.name == "muon" and adapter.kind == "oft":
        yield "optimizer.name=muon updates matrices, adapter.kind=oft has none: choose one"


def _broken_by_memory(config: Config) -> Iterator[str]:
    """Yield the sentences on files and memory."""
    memory, train, adapter = config.memory, config.train, config.adapter
    if config.output.weights == "ema" and train.ema_decay is None:
        yield "output.weights=ema needs train.ema_decay: 0.995 is usual"
    if _above(every := config.output.save_every_steps, train.steps):
        fix = "lower it, or 0 for only at the end"
        yield f"output.save_every_steps={every} is above train.steps={train.steps}: {fix}"
    if _above(memory.micro_batch, batch_size := train.batch_size):
        limit = f"above train.batch_size={batch_size}: use at most {batch_size}"
        yield f"memory.micro_batch={memory.micro_batch} is {limit}"
    base, precision = memory.base_precision, train.precision
    if "auto" not in (base, precision) and base not in (precision, *QUANTIZATIONS):
        fix = "use the same for both, or int8, fp8 or nf4 for the base"
        yield f"memory.base_precision={base} and train.precision={precision} differ: {fix}"
    streamed = memory.streamed_blocks
    if streamed not in ("auto", 0) and memory.gradient_checkpointing == "none":
        yield (
            f"memory.streamed_blocks={streamed} needs every block recomputed, not "
            "memory.gradient_checkpointing=none: use selective, full or offloaded"
        )
    if memory.text_encoder_offload is True and (adapter.text_encoder or adapter.new_tokens):
        yield (
            "memory.text_encoder_offload works while caching only, and adapter.text_encoder=true and "
            "adapter.new_tokens train with the text encoders: choose one"
        )

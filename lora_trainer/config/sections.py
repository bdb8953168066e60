"""All settings of a run as one value, and the contradictions among them.

Input: the sections. Output: `Config`, which cannot be built from settings that contradict each other.
The planner checks later whether base and GPU support the settings.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Generic, Self

from pydantic import Field, model_validator

from lora_trainer.config.base_precision import QUANTIZATIONS
from lora_trainer.config.declare import SCHEDULE_FREE, A_co, Decided, Section
from lora_trainer.config.inputs import BaseSettings, DataSettings
from lora_trainer.config.learning import AdapterSettings, ObjectiveSettings, TrainSettings
from lora_trainer.config.optimizer import OptimizerSettings
from lora_trainer.config.running import (
    HardwareSettings,
    LoggingSettings,
    MemorySettings,
    OutputSettings,
    SamplingSettings,
)


def _section(default: type[Section], doc: str) -> Any:
    return Field(default_factory=default, description=doc)


class Config(Section, Generic[A_co]):
    """All settings of one run, in the sections of config files; `Config` alone is a request, with `auto`."""

    base: BaseSettings = _section(BaseSettings, "the model to adapt")
    data: DataSettings[A_co] = _section(DataSettings, "images, captions, caches")
    adapter: AdapterSettings = _section(AdapterSettings, "the LoRA itself")
    train: TrainSettings[A_co] = _section(TrainSettings, "length, batch, precision")
    objective: ObjectiveSettings[A_co] = _section(ObjectiveSettings, "noise and loss")
    optimizer: OptimizerSettings = _section(OptimizerSettings, "optimizer and learning rates")
    memory: MemorySettings[A_co] = _section(MemorySettings, "fitting into memory")
    hardware: HardwareSettings[A_co] = _section(HardwareSettings, "which device")
    output: OutputSettings[A_co] = _section(OutputSettings, "files written")
    sampling: SamplingSettings[A_co] = _section(SamplingSettings, "sample images during training")
    logging: LoggingSettings = _section(LoggingSettings, "dashboards")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Self:
        sentences = list(_contradictions(self))
        if sentences:
            raise ValueError(" ".join(sentences))
        return self


class RunConfig(Config[Decided]):
    """All settings of a planned run: no field is `auto`, except names, folders and what has no meaning for the base."""


def _contradictions(config: Config) -> Iterator[str]:
    low, high = config.objective.min_timestep, config.objective.max_timestep
    if low > high:
        yield f"objective.min_timestep={low} is above objective.max_timestep={high}: lower one of them."
    weighting = config.objective.weighting
    if weighting in ("min_snr", "soft_min_snr") and config.objective.min_snr_gamma is None:
        yield f"objective.weighting={weighting} needs a number as objective.min_snr_gamma: 5 is usual."
    alpha, rank = config.adapter.alpha, config.adapter.rank
    if alpha != "auto" and alpha > rank * 100:
        yield f"adapter.alpha={alpha:g} is over 100 times adapter.rank={rank}: use at most {rank * 100}."
    steps, every = config.train.steps, config.output.save_every_steps
    if steps != "auto" and every != "auto" and every > steps:
        yield f"output.save_every_steps={every} is above train.steps={steps}: lower it, or 0 for only at the end."
    yield from _prior_contradictions(config)
    yield from _adapter_contradictions(config.adapter)
    if config.adapter.init == "pissa" and config.train.init_from is not None:
        yield "adapter.init=pissa and train.init_from both set the first weights: choose one."
    yield from _optimizer_contradictions(config)
    if config.optimizer.lora_plus_ratio != 1.0 and config.adapter.kind != "lora":
        yield f"optimizer.lora_plus_ratio is for adapter.kind=lora, not {config.adapter.kind}."
    for pattern in config.optimizer.learning_rate_pattern:
        yield from _pattern_problem("optimizer.learning_rate_pattern", pattern)
    if config.optimizer.text_encoder_learning_rate is not None and not config.adapter.text_encoder:
        yield "optimizer.text_encoder_learning_rate needs adapter.text_encoder=true."
    yield from _new_token_contradictions(config)
    if config.train.text_encoder_until != 1.0 and not config.adapter.text_encoder:
        yield "train.text_encoder_until needs adapter.text_encoder=true."
    if config.output.weights == "ema" and config.train.ema_decay is None:
        yield "output.weights=ema needs train.ema_decay: 0.995 is usual."
    if config.optimizer.max_weight_norm is not None:
        yield from _plain_product("optimizer.max_weight_norm", config.adapter)
    if config.train.tighten_on_spike and config.train.max_grad_norm == 0:
        yield "train.tighten_on_spike lowers train.max_grad_norm, which is 0 (off): choose a norm."
    sides = (config.data.resolution, *config.data.more_resolutions)
    if len(set(sides)) < len(sides):
        yield f"data.resolution and data.more_resolutions name a size twice: {', '.join(map(str, sides))}."
    micro, batch = config.memory.micro_batch, config.train.batch_size
    if micro != "auto" and micro > batch:
        yield f"memory.micro_batch={micro} is above train.batch_size={batch}: at most {batch}."
    yield from _validation_contradictions(config)
    yield from _memory_contradictions(config)


def _prior_contradictions(config: Config) -> Iterator[str]:
    data, objective = config.data, config.objective
    if objective.prior == "base" and not data.has_regularisation:
        yield "objective.prior=base needs regularisation images: give data.regularisation_dir or mark a folder."
    if not objective.preservation_weight:
        return
    triggers = [data.trigger, *(folder.trigger for folder in data.folders.values())]
    if data.class_word is None or not any(triggers):
        yield (
            f"objective.preservation_weight={objective.preservation_weight:g} replaces data.trigger by "
            "data.class_word in captions: give both."
        )


def _validation_contradictions(config: Config) -> Iterator[str]:
    never = config.train.validate_every_steps == 0 or config.data.validation_fraction == 0
    for key, is_set in (
        ("output.keep_best=true", config.output.keep_best),
        ("train.stop_after_validations", config.train.stop_after_validations is not None),
    ):
        if is_set and never:
            yield f"{key} needs validations: set data.validation_fraction and train.validate_every_steps above 0."


def _optimizer_contradictions(config: Config) -> Iterator[str]:
    optimizer = config.optimizer
    if optimizer.name == "prodigy":
        one_rate = "optimizer.name=prodigy estimates a single rate for all weights"
        if optimizer.lora_plus_ratio != 1.0:
            yield f"{one_rate}: leave optimizer.lora_plus_ratio={optimizer.lora_plus_ratio:g} out."
        for part in ("text_encoder_learning_rate", "new_tokens_learning_rate"):
            if getattr(optimizer, part) is not None:
                yield f"{one_rate}: leave optimizer.{part} out."
        if any(factor not in (0, 1) for factor in optimizer.learning_rate_pattern.values()):
            yield f"{one_rate}: the factors of optimizer.learning_rate_pattern can be 0 and 1 only."
    if optimizer.name == SCHEDULE_FREE:
        averages = f"optimizer.name={SCHEDULE_FREE} averages the weights itself"
        if optimizer.beta1 == 0:
            yield f"{averages}, and optimizer.beta1=0 switches that off: 0.9 is usual."
        if config.train.ema_decay is not None:
            yield f"{averages}: leave train.ema_decay={config.train.ema_decay:g} out."
        if optimizer.max_weight_norm is not None:
            limit = f"optimizer.max_weight_norm={optimizer.max_weight_norm:g}"
            yield f"{averages}, and {limit} would not limit the average: leave it out."
    if optimizer.name == "muon" and config.adapter.kind == "oft":
        yield "optimizer.name=muon updates matrices, adapter.kind=oft has none: choose one."


def _memory_contradictions(config: Config) -> Iterator[str]:
    memory, precision = config.memory, config.train.precision
    base_precision = memory.base_precision
    if "auto" not in (base_precision, precision) and base_precision not in (
        precision,
        *QUANTIZATIONS,
    ):
        yield (
            f"memory.base_precision={base_precision} and train.precision={precision} differ: "
            "use the same for both, or int8, fp8 or nf4 for the base."
        )
    if memory.base_matmul == "int8" and base_precision not in ("auto", "int8"):
        yield (
            f"memory.base_matmul=int8 needs a base in int8, not in {base_precision}: "
            "use memory.base_precision=int8."
        )
    if memory.streamed_blocks not in ("auto", 0) and memory.gradient_checkpointing == "none":
        yield (
            f"memory.streamed_blocks={memory.streamed_blocks} needs every block recomputed, not "
            "memory.gradient_checkpointing=none: use light, selective, full or offloaded."
        )
    if memory.text_encoder_offload is True and config.adapter.text_encoder:
        yield (
            "memory.text_encoder_offload works while caching only, and adapter.text_encoder=true trains the "
            "text encoders: choose one."
        )


def _new_token_contradictions(config: Config) -> Iterator[str]:
    if config.adapter.new_tokens == 0:
        unused = {
            "adapter.new_tokens_from": config.adapter.new_tokens_from is not None,
            "train.new_tokens_until": config.train.new_tokens_until != 1.0,
            "optimizer.new_tokens_learning_rate": config.optimizer.new_tokens_learning_rate
            is not None,
        }
        for key, is_set in unused.items():
            if is_set:
                yield f"{key} needs adapter.new_tokens: 2 is usual."
        return
    if not (config.data.trigger or "").strip():
        yield "adapter.new_tokens learns vectors for data.trigger, which is empty: choose a trigger word."
    if config.train.init_from is not None:
        yield "adapter.new_tokens starts new vectors, train.init_from continues a file: choose one."
    if config.memory.text_encoder_offload is True:
        yield (
            "memory.text_encoder_offload works while caching only, and adapter.new_tokens trains with the "
            "text encoders: choose one."
        )


def _adapter_contradictions(adapter: AdapterSettings) -> Iterator[str]:
    only_lora = {
        "dora": adapter.dora,
        "rslora": adapter.rslora,
        "init=pissa": adapter.init == "pissa",
    }
    for name, is_set in only_lora.items():
        if is_set and adapter.kind != "lora":
            yield f"adapter.{name} is for adapter.kind=lora, not {adapter.kind}: choose one."
    if adapter.rank_dropout and adapter.kind != "lora":
        yield f"adapter.rank_dropout is for adapter.kind=lora, not {adapter.kind}: use dropout."
    for name in ("dropout", "module_dropout"):
        if getattr(adapter, name) and adapter.kind == "oft":
            yield f"adapter.{name} is for lora, loha and lokr, not adapter.kind=oft: choose one."
    if adapter.module_dropout and adapter.dora:
        yield "adapter.module_dropout cannot switch off DoRA's norms: use dropout, or adapter.dora=false."
    if adapter.dora and adapter.init == "pissa":
        yield "adapter.dora and adapter.init=pissa cannot be combined: choose one."
    if adapter.kind == "oft" and (adapter.alpha != "auto" or adapter.conv_alpha is not None):
        yield "adapter.kind=oft is a rotation, which has no alpha: leave adapter.alpha and conv_alpha out."
    if adapter.lokr_factor == 0 or (adapter.lokr_factor != -1 and adapter.kind != "lokr"):
        yield "adapter.lokr_factor is -1 or at least 1, and for adapter.kind=lokr only."
    convolutions = adapter.conv_rank is not None or adapter.conv_alpha is not None
    if convolutions and adapter.targets != "all":
        yield "adapter.conv_rank and conv_alpha are for convolutions: set adapter.targets=all."
    for pattern in adapter.rank_pattern:
        yield from _pattern_problem("adapter.rank_pattern", pattern)


def _plain_product(key: str, adapter: AdapterSettings) -> Iterator[str]:
    """Yield a contradiction where `key` is set and an update is not the plain product of its factors."""
    others = {"kind=oft": adapter.kind == "oft", "dora": adapter.dora}
    others["init=pissa"] = adapter.init == "pissa"
    for name, is_set in others.items():
        if is_set:
            yield f"{key} and adapter.{name} cannot be combined: choose one."


def _pattern_problem(key: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{key} has {pattern!r}, which is no regular expression ({error})."

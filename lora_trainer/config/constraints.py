"""Which settings exclude or need each other, and their needs of the machine: tables of rules, each stated once.

A rule about one setting that is without effect beside another stands with the setting itself, as `only_for`,
`not_for` and `idle_with`: the form greys the field out, and an `enforced` setting is refused. `CONTRADICTIONS`
has the rules that need more than that. `unmet_needs` knows the packages and kinds of GPU that values need: the
planner refuses the user's value and replaces a preset's. Input: a config; output: sentences that name values,
reason and remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.declare import QUANTIZATIONS, SCHEDULE_FREE, OptimizerName
from lora_trainer.config.running import Config
from lora_trainer.hardware.nvml import Gpu


def contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each rule that these settings break; `auto` breaks none."""
    values = dict(config)
    yield from (f"{text}.".format_map(values) for when, text in CONTRADICTIONS if when(config))


def typed(value: Any) -> str:
    """Return a value as a user types it."""
    return value if isinstance(value, str) else json.dumps(value)


def by_key(config: Config) -> dict[str, Any]:
    """Return the value of every setting by `section.name`, unlike `flatten` as it is in the config."""
    return {f"{section}.{name}": value for section, fields in config for name, value in fields}


def _above(value: float | str, limit: float | str) -> bool:
    return not isinstance(value, str) and not isinstance(limit, str) and value > limit


CONTRADICTIONS: tuple[tuple[Callable[[Config], bool], str], ...] = (
    (
        lambda c: c.objective.min_timestep > c.objective.max_timestep,
        "objective.min_timestep={objective.min_timestep} is above "
        "objective.max_timestep={objective.max_timestep}: lower one of them",
    ),
    (
        lambda c: (
            c.objective.weighting in ("min_snr", "soft_min_snr")
            and c.objective.min_snr_gamma is None
        ),
        "objective.weighting={objective.weighting} needs a number as objective.min_snr_gamma: 5 is usual",
    ),
    (
        lambda c: _above(c.adapter.alpha, c.adapter.rank * 100),
        "adapter.alpha={adapter.alpha} is over 100 times adapter.rank={adapter.rank}: use at most 100 times "
        "the rank",
    ),
    (
        lambda c: _above(c.output.save_every_steps, c.train.steps),
        "output.save_every_steps={output.save_every_steps} is above train.steps={train.steps}: lower it, or 0"
        " for only at the end",
    ),
    (
        lambda c: _above(c.memory.micro_batch, c.train.batch_size),
        "memory.micro_batch={memory.micro_batch} is above train.batch_size={train.batch_size}: use at most "
        "{train.batch_size}",
    ),
    (
        lambda c: (
            len({c.data.resolution, *c.data.more_resolutions}) <= len(c.data.more_resolutions)
        ),
        "data.resolution={data.resolution} and data.more_resolutions={data.more_resolutions} name a size "
        "twice: leave it out of data.more_resolutions",
    ),
    # ---- what the samples are, and what they teach
    (
        lambda c: c.objective.prior == "base" and not c.data.has_regularisation,
        "objective.prior=base needs regularisation images: give data.regularisation_dir or mark a folder",
    ),
    (
        lambda c: (
            c.objective.preservation_weight > 0
            and (c.data.class_word is None or not c.data.triggers)
        ),
        "objective.preservation_weight={objective.preservation_weight:g} replaces data.trigger by "
        "data.class_word in captions: give both",
    ),
    (
        lambda c: c.adapter.new_tokens > 0 and not (c.data.trigger or "").strip(),
        "adapter.new_tokens learns vectors for data.trigger, which is empty: choose a trigger word",
    ),
    # ---- the adapter and its first weights
    (
        lambda c: c.adapter.new_tokens > 0 and c.train.init_from is not None,
        "adapter.new_tokens starts new vectors, train.init_from continues a file: choose one",
    ),
    # ---- the optimizer
    (
        lambda c: (
            c.optimizer.name == "prodigy"
            and any(factor not in (0, 1) for factor in c.optimizer.learning_rate_pattern.values())
        ),
        "optimizer.name=prodigy estimates a single rate for all weights: the factors of "
        "optimizer.learning_rate_pattern can be 0 and 1 only",
    ),
    (
        lambda c: c.optimizer.name == SCHEDULE_FREE and c.optimizer.beta1 == 0,
        "optimizer.name={optimizer.name} averages the weights itself, and optimizer.beta1=0 switches that "
        "off: 0.9 is usual",
    ),
    (
        lambda c: c.optimizer.name == "muon" and c.adapter.kind == "oft",
        "optimizer.name=muon updates matrices, adapter.kind=oft has none: choose one",
    ),
    (
        lambda c: c.output.weights == "ema" and c.train.ema_decay is None,
        "output.weights=ema needs train.ema_decay: 0.995 is usual",
    ),
    # ---- memory
    (
        lambda c: (
            "auto" not in (c.memory.base_precision, c.train.precision)
            and c.memory.base_precision not in (c.train.precision, *QUANTIZATIONS)
        ),
        "memory.base_precision={memory.base_precision} and train.precision={train.precision} differ: use the "
        "same for both, or int8, fp8 or nf4 for the base",
    ),
    (
        lambda c: (
            c.memory.streamed_blocks not in ("auto", 0)
            and c.memory.gradient_checkpointing == "none"
        ),
        "memory.streamed_blocks={memory.streamed_blocks} needs every block recomputed, not "
        "memory.gradient_checkpointing=none: use selective, full or offloaded",
    ),
    (
        lambda c: c.memory.streamed_blocks not in ("auto", 0) and c.base.assistant is not None,
        "memory.streamed_blocks and base.assistant cannot be combined, because the assistant's weights do not"
        " move with streamed blocks: leave one of them out",
    ),
    (
        lambda c: (
            c.memory.text_encoder_offload is True
            and (c.adapter.text_encoder or c.adapter.new_tokens > 0)
        ),
        "memory.text_encoder_offload works while caching only, and adapter.text_encoder=true and "
        "adapter.new_tokens train with the text encoders: choose one",
    ),
)


# ---- the machine

# The package of each optimizer that torch itself does not have.
OPTIMIZER_PACKAGES: Mapping[OptimizerName, str] = {
    "adamw8bit": "bitsandbytes",
    "paged_adamw8bit": "bitsandbytes",
    "lion": "bitsandbytes",
    "lion8bit": "bitsandbytes",
    "adafactor": "pytorch-optimizer",
    "came": "pytorch-optimizer",
    "muon": "pytorch-optimizer",
    "prodigy": "prodigyopt",
    "schedulefree_adamw": "schedulefree",
}
# The value of each setting with needs that every machine meets.
WORKS_ANYWHERE: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "memory.base_precision": "auto",
    "memory.streamed_blocks": 0,
    "memory.text_encoder_offload": False,
    "memory.attention": "sdpa",
    "hardware.compile": "none",
}
PACKAGE_NEEDS: Mapping[tuple[str, Any], str] = {
    **{("optimizer.name", name): package for name, package in OPTIMIZER_PACKAGES.items()},
    ("memory.base_precision", "nf4"): "bitsandbytes",
    ("memory.attention", "xformers"): "xformers",
}
# Settings that need a GPU with memory of its own.
OF_HOST_MEMORY = ("memory.streamed_blocks", "memory.text_encoder_offload")
# Replaced even if it is the user's, because the result is the same without it.
WISH = "memory.attention"


def unmet_needs(
    config: Config,
    *,
    gpu: Gpu | None,
    packages: Mapping[str, str | None],
    is_preset: Callable[[str], bool],
) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value to use instead, reason) for each preset that this machine cannot follow.

    Raises MachineError for a value of the user, RequestError for one of `OF_HOST_MEMORY`. `gpu` None is the
    processor; `packages` maps the installed packages to their versions.
    """
    values = by_key(config)
    for key, instead in WORKS_ANYWHERE.items():
        value, kind, fix = values[key], "", ""
        package = PACKAGE_NEEDS.get((key, value), "")
        if key in OF_HOST_MEMORY and value not in ("auto", 0):
            if gpu is None:
                kind = "a GPU with memory of its own, but this run is on the processor"
            elif not gpu.can.own_memory:
                kind = "a GPU with memory of its own, but this GPU shares the machine's memory"
        elif (key, value) == ("memory.attention", "xformers") and gpu is None:
            kind = "a GPU"
        # The kind of GPU comes first: a package would not help where the GPU cannot run it.
        if gpu is not None and (why := gpu.can.against(key, value)):
            problem = f"does not work on {gpu.can.says}: {why}"
        elif kind:
            problem = f"needs {kind}"
        elif package and packages.get(package) is None:
            problem, fix = (
                f"needs {package}, which is not installed",
                f"pip install {package}, or ",
            )
        else:
            continue
        if not is_preset(key) and (key != WISH or problem.startswith("does not")):
            fix += f"use --set {key}={typed(instead)}"
            error = RequestError if kind and key in OF_HOST_MEMORY else MachineError
            raise error(f"{key}={typed(value)} {problem}", fix=fix)
        yield key, instead, f"instead of {value}, which {problem}"

"""Which settings exclude or need each other, and their needs of the machine: tables of rules, each stated once.

A rule about one setting that is without effect beside another stands with the setting itself, as `only_for`,
`not_for` and `idle_with`: the form greys the field out, and an `enforced` setting is refused. `SETTINGS` has
the rules that need more than that. `NEEDS` has the packages and the kinds of GPU that values need: the
planner refuses the user's value and replaces a preset's. Input: a config; output: sentences that name values,
reason and remedy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.choices import QUANTIZATIONS
from lora_trainer.config.declare import SCHEDULE_FREE, OptimizerName
from lora_trainer.config.running import Config
from lora_trainer.hardware.nvml import Gpu


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One rule: settings for which `when` holds are refused. `found` and `fix` may name values as {section.name}."""

    when: Callable[[Config], bool]
    found: str
    fix: str

    def sentence(self, config: Config) -> str:
        """Return the refusal and its remedy, in one line."""
        return f"{self.found}: {self.fix}.".format_map(dict(config))


def contradictions(config: Config) -> Iterator[str]:
    """Yield a sentence for each rule that these settings break; `auto` breaks none."""
    yield from (rule.sentence(config) for rule in SETTINGS if rule.when(config))


def typed(value: Any) -> str:
    """Return a value as a user types it."""
    return value if isinstance(value, str) else json.dumps(value)


def by_key(config: Config) -> dict[str, Any]:
    """Return the value of every setting by `section.name`, unlike `flatten` as it is in the config."""
    return {f"{section}.{name}": value for section, fields in config for name, value in fields}


def _above(value: float | str, limit: float | str) -> bool:
    return not isinstance(value, str) and not isinstance(limit, str) and value > limit


def _trains_text(c: Config) -> bool:
    return c.adapter.text_encoder or c.adapter.new_tokens > 0


SETTINGS: tuple[Rule, ...] = (
    Rule(
        when=lambda c: c.objective.min_timestep > c.objective.max_timestep,
        found="objective.min_timestep={objective.min_timestep} is above "
        "objective.max_timestep={objective.max_timestep}",
        fix="lower one of them",
    ),
    Rule(
        when=lambda c: (
            c.objective.weighting in ("min_snr", "soft_min_snr")
            and c.objective.min_snr_gamma is None
        ),
        found="objective.weighting={objective.weighting} needs a number as objective.min_snr_gamma",
        fix="5 is usual",
    ),
    Rule(
        when=lambda c: _above(c.adapter.alpha, c.adapter.rank * 100),
        found="adapter.alpha={adapter.alpha} is over 100 times adapter.rank={adapter.rank}",
        fix="use at most 100 times the rank",
    ),
    Rule(
        when=lambda c: _above(c.output.save_every_steps, c.train.steps),
        found="output.save_every_steps={output.save_every_steps} is above train.steps={train.steps}",
        fix="lower it, or 0 for only at the end",
    ),
    Rule(
        when=lambda c: _above(c.memory.micro_batch, c.train.batch_size),
        found="memory.micro_batch={memory.micro_batch} is above train.batch_size={train.batch_size}",
        fix="use at most {train.batch_size}",
    ),
    Rule(
        when=lambda c: (
            len({c.data.resolution, *c.data.more_resolutions}) <= len(c.data.more_resolutions)
        ),
        found="data.resolution={data.resolution} and data.more_resolutions={data.more_resolutions} "
        "name a size twice",
        fix="leave it out of data.more_resolutions",
    ),
    # ---- what the samples are, and what they teach
    Rule(
        when=lambda c: c.objective.prior == "base" and not c.data.has_regularisation,
        found="objective.prior=base needs regularisation images",
        fix="give data.regularisation_dir or mark a folder",
    ),
    Rule(
        when=lambda c: (
            c.objective.preservation_weight > 0
            and (c.data.class_word is None or not c.data.triggers)
        ),
        found="objective.preservation_weight={objective.preservation_weight:g} replaces data.trigger by "
        "data.class_word in captions",
        fix="give both",
    ),
    Rule(
        when=lambda c: c.adapter.new_tokens > 0 and not (c.data.trigger or "").strip(),
        found="adapter.new_tokens learns vectors for data.trigger, which is empty",
        fix="choose a trigger word",
    ),
    # ---- the adapter and its first weights
    Rule(
        when=lambda c: c.adapter.new_tokens > 0 and c.train.init_from is not None,
        found="adapter.new_tokens starts new vectors, train.init_from continues a file",
        fix="choose one",
    ),
    Rule(
        when=lambda c: c.adapter.lokr_factor == 0,
        found="adapter.lokr_factor=0 is no size",
        fix="use -1 or at least 1",
    ),
    # ---- the optimizer
    Rule(
        when=lambda c: (
            c.optimizer.name == "prodigy"
            and any(factor not in (0, 1) for factor in c.optimizer.learning_rate_pattern.values())
        ),
        found="optimizer.name=prodigy estimates a single rate for all weights",
        fix="the factors of optimizer.learning_rate_pattern can be 0 and 1 only",
    ),
    Rule(
        when=lambda c: c.optimizer.name == SCHEDULE_FREE and c.optimizer.beta1 == 0,
        found="optimizer.name={optimizer.name} averages the weights itself, and optimizer.beta1=0 "
        "switches that off",
        fix="0.9 is usual",
    ),
    Rule(
        when=lambda c: c.optimizer.name == "muon" and c.adapter.kind == "oft",
        found="optimizer.name=muon updates matrices, adapter.kind=oft has none",
        fix="choose one",
    ),
    Rule(
        when=lambda c: c.output.weights == "ema" and c.train.ema_decay is None,
        found="output.weights=ema needs train.ema_decay",
        fix="0.995 is usual",
    ),
    # ---- memory
    Rule(
        when=lambda c: (
            "auto" not in (c.memory.base_precision, c.train.precision)
            and c.memory.base_precision not in (c.train.precision, *QUANTIZATIONS)
        ),
        found="memory.base_precision={memory.base_precision} and train.precision={train.precision} differ",
        fix="use the same for both, or int8, fp8 or nf4 for the base",
    ),
    Rule(
        when=lambda c: (
            c.memory.streamed_blocks not in ("auto", 0)
            and c.memory.gradient_checkpointing == "none"
        ),
        found="memory.streamed_blocks={memory.streamed_blocks} needs every block recomputed, not "
        "memory.gradient_checkpointing=none",
        fix="use selective, full or offloaded",
    ),
    Rule(
        when=lambda c: c.memory.streamed_blocks not in ("auto", 0) and c.base.assistant is not None,
        found="memory.streamed_blocks and base.assistant cannot be combined, because the assistant's "
        "weights do not move with streamed blocks",
        fix="leave one of them out",
    ),
    Rule(
        when=lambda c: c.memory.text_encoder_offload is True and _trains_text(c),
        found="memory.text_encoder_offload works while caching only, and adapter.text_encoder=true and "
        "adapter.new_tokens train with the text encoders",
        fix="choose one",
    ),
)


# ---- the machine

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
"""The package of each optimizer that torch itself does not have."""
WORKS_ANYWHERE: Mapping[str, Any] = {
    "optimizer.name": "adamw",
    "memory.base_precision": "auto",
    "memory.attention": "sdpa",
    "memory.streamed_blocks": 0,
    "memory.text_encoder_offload": False,
    "hardware.compile": "none",
}
"""The value of each setting with needs that every machine meets."""


def _against_host_memory(gpu: Gpu | None) -> str:
    if gpu is not None and gpu.can.own_memory:
        return ""
    here = "this run is on the processor" if gpu is None else "this GPU shares the machine's memory"
    return f"a GPU with memory of its own, but {here}"


@dataclass(frozen=True, kw_only=True)
class Need:
    """A value of a setting needs a package or a kind of GPU. `unmet` names the missing kind, "" if it is there.

    `is_wish`: the user's value is replaced too, because the result is the same without it.
    """

    key: str
    value: Any
    package: str = ""
    unmet: Callable[[Gpu | None], str] = lambda gpu: ""
    error: type[RequestError | MachineError] = MachineError
    is_wish: bool = False


ANY_NUMBER = object()
"""As `value` of a need: every number of blocks except 0."""
NEEDS: tuple[Need, ...] = (
    *(
        Need(key="optimizer.name", value=name, package=package)
        for name, package in OPTIMIZER_PACKAGES.items()
    ),
    Need(key="memory.base_precision", value="nf4", package="bitsandbytes"),
    Need(
        key="memory.streamed_blocks",
        value=ANY_NUMBER,
        unmet=_against_host_memory,
        error=RequestError,
    ),
    Need(
        key="memory.text_encoder_offload",
        value=True,
        unmet=_against_host_memory,
        error=RequestError,
    ),
    Need(
        key="memory.attention",
        value="xformers",
        package="xformers",
        unmet=lambda gpu: "" if gpu else "a GPU",
        is_wish=True,
    ),
)


def unmet_needs(
    config: Config,
    *,
    gpu: Gpu | None,
    packages: Mapping[str, str | None],
    is_preset: Callable[[str], bool],
) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value to use instead, reason) for each preset that this machine cannot follow.

    Raises RequestError or MachineError for a value of the user. `gpu` None is the processor; `packages` maps
    the installed packages to their versions.
    """
    values, refused_keys = by_key(config), set()
    # The kind of GPU comes first: a package would not help where the GPU cannot run it.
    for wish, why in (gpu.can.lacks if gpu is not None else {}).items():
        key, _, value = wish.partition("=")
        if gpu is None or str(values[key]) != value:
            continue
        if not is_preset(key):
            raise MachineError(
                f"{key}={value.lower()} does not work on {gpu.can.says}: {why}",
                fix=f"use --set {key}={WORKS_ANYWHERE[key]}",
            )
        refused_keys.add(key)
        yield key, WORKS_ANYWHERE[key], f"{value} is preset, but {why}"
    for need in NEEDS:
        key, value, instead = need.key, values[need.key], WORKS_ANYWHERE[need.key]
        is_used = value not in ("auto", 0) if need.value is ANY_NUMBER else value == need.value
        if not is_used or key in refused_keys:
            continue
        lead = f"instead of {value}, which" if need.is_wish else f"{value} is preset, but"
        if kind := need.unmet(gpu):
            problem, fix, reason = f"{key}={typed(value)} needs {kind}", "", f"{lead} needs {kind}"
        elif need.package and packages.get(need.package) is None:
            command = f"pip install {need.package}"
            problem = f"{key}={typed(value)} needs {need.package}, which is not installed"
            fix = f"{command}, or "
            subject = "" if need.is_wish else f" {need.package}"
            reason = f"{lead}{subject} is missing ({command})"
        else:
            continue
        if not (need.is_wish or is_preset(key)):
            fix += f"use --set {key}={typed(instead)}"
            raise need.error(problem, fix=fix)
        yield key, instead, reason

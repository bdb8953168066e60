"""Facts about each optimizer without torch: its library, and how its settings differ from AdamW's.

Input is a name and a preset's learning rate, which is meant for AdamW; output the settings this optimizer
needs changed, each with its reason, and warnings about unusual values that the user has set.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lora_trainer.common.events import Finding, note, warning
from lora_trainer.config.declare import SCHEDULE_FREE, OptimizerName
from lora_trainer.config.learning import OptimizerSettings
from lora_trainer.config.running import RunConfig
from lora_trainer.lora.adapter_size import adapter_tensors

RATE, SECOND_DECAY, SCHEDULE = "optimizer.learning_rate", "optimizer.beta2", "optimizer.schedule"
USUAL_RATES = (1e-6, 2e-2)
"""Range of learning rates in use for adapters, for optimizers whose steps are as long as AdamW's."""


@dataclass(frozen=True, kw_only=True)
class OptimizerFacts:
    """One optimizer: its learning rate is `rate_factor` times AdamW's, or always `rate`; `why` says so in words.

    `beta2` is the second decay if it differs from AdamW's; a learning rate outside `usual_rates` gets a
    warning.
    """

    rate_factor: float = 1.0
    rate: float | None = None
    why: str = ""
    beta2: float | None = None
    usual_rates: tuple[float, float] = USUAL_RATES


_LION = OptimizerFacts(
    rate_factor=0.2,
    why="steps by the sign alone, so its rate is a fifth of AdamW's",
    beta2=0.99,
    usual_rates=(1e-7, 4e-3),
)
OPTIMIZERS: Mapping[OptimizerName, OptimizerFacts] = {
    "adamw": OptimizerFacts(),
    "adamw8bit": OptimizerFacts(),
    "paged_adamw8bit": OptimizerFacts(),
    "lion": _LION,
    "lion8bit": _LION,
    "adafactor": OptimizerFacts(),
    "came": OptimizerFacts(
        rate_factor=0.1,
        why="steps ten times as far as AdamW at first, so its rate is a tenth",
        usual_rates=(1e-7, 2e-3),
    ),
    "muon": OptimizerFacts(
        rate_factor=2.0,
        why="steps a fifth of its rate, AdamW about twice that, so its rate is doubled",
        usual_rates=(1e-6, 4e-2),
    ),
    "prodigy": OptimizerFacts(
        rate=1.0,
        why="finds the learning rate itself, and this setting multiplies it",
        usual_rates=(0.1, 10.0),
    ),
    "schedulefree_adamw": OptimizerFacts(usual_rates=(1e-6, 1e-1)),
}


def needed_otherwise(name: OptimizerName, *, preset_rate: float) -> Iterator[tuple[str, Any, str]]:
    """Yield (setting, value, reason) for each setting whose preset or default suits only AdamW."""
    facts = OPTIMIZERS[name]
    if facts.rate is not None:
        yield RATE, facts.rate, f"{name} {facts.why}"
    elif facts.rate_factor != 1.0:
        rate = float(f"{preset_rate * facts.rate_factor:.6g}")  # 2e-05, not 2.0000000000000002e-05
        yield RATE, rate, f"{name} {facts.why}: {preset_rate:g} is preset"
    if facts.beta2 is not None:
        yield SECOND_DECAY, facts.beta2, f"the value in {name}'s paper"
    if name == SCHEDULE_FREE:
        yield SCHEDULE, "constant", f"{name} needs no schedule"


def optimizer_remarks(
    config: RunConfig, *, shapes: Mapping[str, Sequence[int]]
) -> Iterator[Finding]:
    """Yield warnings about the optimizer's settings; `shapes` maps adapted layers to (fan_in, out)."""
    if odd := _odd_rate(config.optimizer):
        advice = "leave it out, and it follows the optimizer"
        yield warning("learning-rate", None, odd, advice=advice)
    if config.optimizer.name == "muon":
        tensors = adapter_tensors(shapes, config.adapter)
        others = sum(count for shape, count in tensors.items() if len(shape) != 2)
        if others:
            what = f"{others} of {tensors.total()} tensors are no matrices, so AdamW trains them"
            advice = "no action needed; adapter.targets=transformer leaves convolutions out"
            yield note("muon", None, what, advice=advice)


def _odd_rate(settings: OptimizerSettings) -> str:
    low, high = OPTIMIZERS[settings.name].usual_rates
    if low <= settings.learning_rate <= high:
        return ""
    why = OPTIMIZERS[settings.name].why
    reason = f": {settings.name} {why}" if why else ""
    return f"{RATE}={settings.learning_rate:g} is unusual for {settings.name}{reason}"

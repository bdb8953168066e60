"""The rules for precisions: to compute in and to keep the frozen base in.

Input is a family's allowed precisions, the GPU, the settings and loads with their predicted seconds; output
a precision, or a choice with its reason. For the frozen base, `base_precisions` lists the candidates, `search.price`
weighs fewer bits against the seconds of a step, search.py takes the load that fits at the lowest price, and
`why_base_precision` says why it won; memory_choice.py puts these together. scripts/plan_tables.py repeats the
price in docs/plans.md. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lora_trainer.config.choices import BasePrecision
from lora_trainer.config.declare import Precision, settled
from lora_trainer.config.running import Config
from lora_trainer.hardware.nvml import Gpu
from lora_trainer.planning.loads import Load
from lora_trainer.planning.search import AUTOMATIC, FEWER_BITS


def on_card(allowed: Sequence[Precision], gpu: Gpu) -> tuple[Precision, ...]:
    """Return the allowed precisions that a GPU computes natively, the best first; fp32 is always among them.

    GPUs without bf16 emulate it through fp32: correct, but slow, and with attention that stores all scores.
    """
    return tuple(precision for precision in allowed if precision != "bf16" or gpu.has_bf16)


def in_16_bits(allowed: Sequence[Precision], gpu: Gpu | None) -> Precision | None:
    """Return the best allowed 16-bit precision on a GPU, None if there is none."""
    precisions = on_card(allowed, gpu) if gpu is not None else ()
    return next((precision for precision in precisions if precision != "fp32"), None)


def best_precision(
    allowed: Sequence[Precision], gpu: Gpu | None, *, family: str
) -> tuple[Precision, str]:
    """Return the value of `train.precision=auto` and its reason; `gpu` None: the processor."""
    if gpu is None:
        return "fp32", "16 bits save no time on a processor"
    best = on_card(allowed, gpu)[0]
    if best == "bf16":
        return best, f"{capability(gpu)} has bf16"
    reason = f"{capability(gpu)}: not known to have bf16"
    if best == "fp32":
        reason += (
            f", and in fp16 {family} bases overflow to NaN; fp32 takes twice the memory of 16 bits "
            "and several times as long"
        )
    return best, reason


def capability(gpu: Gpu) -> str:
    """Return a GPU's CUDA compute capability in words."""
    if gpu.compute_capability is None:
        return "an unknown compute capability"
    major, minor = gpu.compute_capability
    return f"compute capability {major}.{minor}"


def base_precisions(
    config: Config, gpu: Gpu | None, *, has_bitsandbytes: bool
) -> tuple[BasePrecision, ...]:
    """Return the values to try for `memory.base_precision`, the most precise first.

    A precision that the user chose stays the only one, because another would change the result.
    """
    setting = config.memory.base_precision
    train_precision: Precision = settled(config.train.precision)
    if setting != "auto":
        return (setting,)
    if gpu is None:
        return (train_precision,)
    return (train_precision, *(kind for kind in AUTOMATIC if kind != "nf4" or has_bitsandbytes))


def why_base_precision(
    load: Load,
    seconds: Mapping[BasePrecision, float],
    tried: Sequence[BasePrecision],
    *,
    priority: str,
    step_s: float,
) -> str:
    """Return why a load's base precision won, empty if the user chose it.

    `seconds` are those of a step by precision, of those that fit; `step_s` are those of `load`.
    """
    others = [precision for precision in tried if precision != load.base_precision]
    if not others:
        return "same as train.precision" if load.base_precision == load.precision else ""
    described = (
        f"{name} {seconds[name]:.3g} s" if name in seconds else f"{name} does not fit"
        for name in others
    )
    compared = f"about {step_s:.3g} s a step; {', '.join(described)}"
    if seconds.keys().isdisjoint(others):
        return compared  # no choice was left, so no rule decided
    rule = "quality: the most precise that fits"
    if priority in FEWER_BITS:
        rule = f"{priority}: fewer bits only where clearly faster"
    return f"{compared}; {rule}"

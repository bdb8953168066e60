"""The learning rate as a function of the step, by the formulas of diffusers, transformers and torch.

Input are the optimizer's settings and the number of steps; output is a function from the 0-based step to the
learning rate. A schedule of a library is an object that counts steps; here it becomes a function of the step
number, so that a resume needs no scheduler state and a run that asks for step 500 first gets the same rate.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from lora_trainer.common.errors import RequestError, first_line
from lora_trainer.common.imports import arguments_of, imported
from lora_trainer.config.optimizers import OptimizerSettings

LearningRate = Callable[[int], float]
# The first rate of one_cycle is the peak over this; torch's default (Smith and Topin 2017, arXiv 1708.07120).
ONE_CYCLE_START = 25.0
KEY, OPTIONS = "optimizer.schedule", "optimizer.schedule_options"


def learning_rate(settings: OptimizerSettings, *, steps: int) -> LearningRate:
    """Return step (0-based) -> learning rate for a run of `steps`.

    Raises MachineError when the module of a schedule named by its path cannot be imported, and RequestError when
    the schedule cannot be made from its options or gives a rate that is not a finite number above or equal to 0.
    """
    warmup = min(round(settings.warmup_fraction * steps), steps - 1)
    if ":" in settings.schedule:
        return _by_path(settings, steps=steps, warmup=warmup)
    peak = settings.learning_rate
    if settings.schedule == "one_cycle":
        # Stretched by one step at each end as the formulas below: without a warm-up torch would divide by zero,
        # and the last step would have a 10,000th of the first rate. The rate is highest at step `warmup`.
        cycle = OneCycleLR(
            _probe(1.0),
            max_lr=1.0,
            total_steps=steps + 2,
            pct_start=(warmup + 2) / (steps + 2),
            div_factor=ONE_CYCLE_START,
            cycle_momentum=False,
        )
        table = _Table(cycle)
        return lambda step: peak * table(step + 1)
    # The formulas of diffusers and transformers are zero at the first step of a warm-up and after the last
    # step: both would train nothing, so the formula is stretched by one step at each end and asked one step ahead.
    formula = _formula(settings, steps=steps + 1, warmup=warmup + 1)
    return lambda step: peak * float(formula(step + 1))


def _formula(settings: OptimizerSettings, *, steps: int, warmup: int) -> Callable[[int], float]:
    """Return the factor on the peak learning rate by step, as diffusers or transformers compute it."""
    from diffusers import optimization
    from transformers import get_wsd_schedule

    probe = _probe(settings.learning_rate)
    scheduler: Any
    match settings.schedule:
        case "warmup_stable_decay":  # Hu et al. 2024, arXiv 2404.06395
            decay = min(round(settings.decay_fraction * steps), steps - warmup)
            scheduler = get_wsd_schedule(
                probe, num_warmup_steps=warmup, num_decay_steps=decay, num_training_steps=steps
            )
        case "polynomial":
            scheduler = optimization.get_polynomial_decay_schedule_with_warmup(
                probe, warmup, steps, lr_end=0.0, power=settings.schedule_power
            )
        case name:
            # Constant with a warm-up has a name of its own in diffusers; `constant` ignores warm-up steps.
            scheduler = optimization.get_scheduler(
                "constant_with_warmup" if name == "constant" else name,
                probe,
                num_warmup_steps=warmup,
                num_training_steps=steps,
                num_cycles=settings.schedule_cycles,
            )
    factor: Callable[[int], float] = scheduler.lr_lambdas[0]
    return factor


# Parameters of schedules that mean the length of the run, and those that mean the steps of the warm-up.
_STEPS = frozenset({"num_training_steps", "total_steps", "total_iters", "T_max"})
_WARMUP = "num_warmup_steps"


def _by_path(settings: OptimizerSettings, *, steps: int, warmup: int) -> LearningRate:
    """Return the learning rate of a schedule that is named by its path, `module:Class`.

    What it calls the length of the run, and of the warm-up, is filled in where the options leave it out. A
    schedule without a warm-up of its own gets a straight one.
    """
    make = imported(settings.schedule, key=KEY)
    parameters = arguments_of(make)
    known = {name: steps for name in _STEPS} | {_WARMUP: warmup}
    filled = {
        name: known[name]
        for name, parameter in parameters.items()
        if name in known and parameter.default in (None, inspect.Parameter.empty)
    }
    options = {**filled, **settings.schedule_options}
    try:
        scheduler = make(_probe(settings.learning_rate), **options)
    except Exception as error:  # noqa: BLE001 - code that is not ours, with options that the user typed
        raise RequestError(
            f"{KEY}={settings.schedule} cannot be made with {options}: {first_line(error)}",
            fix=f"correct {OPTIONS}, which are the arguments after the optimizer",
        ) from None
    if not isinstance(scheduler, LRScheduler) or "metrics" in arguments_of(scheduler.step):
        raise RequestError(
            f"{KEY}={settings.schedule} is not a schedule of the step number",
            fix="name a class of torch.optim.lr_scheduler; train.lower_after_validations follows the "
            "validation loss",
        )
    has_warmup = _WARMUP in parameters or warmup == 0
    table = _Table(scheduler)

    def rate(step: int) -> float:
        value = table(step) * (1.0 if has_warmup else min(1.0, (step + 1) / (warmup + 1)))
        if not (math.isfinite(value) and value >= 0):
            raise RequestError(
                f"{KEY}={settings.schedule} gives the learning rate {value} at step {step}",
                fix=f"correct {OPTIONS}",
            )
        return value

    return rate


def _probe(rate: float) -> torch.optim.Optimizer:
    """Return an optimizer of one weight for a schedule to set the learning rate of."""
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=rate)


@dataclass
class _Table:
    """The learning rates of a schedule that counts steps, by step; made as far as they were asked for."""

    scheduler: LRScheduler
    _rates: list[float] = field(default_factory=list)

    def __call__(self, step: int) -> float:
        if isinstance(self.scheduler, LambdaLR):
            return float(self.scheduler.base_lrs[0] * self.scheduler.lr_lambdas[0](step))
        probe = self.scheduler.optimizer
        while len(self._rates) <= step:
            self._rates.append(float(probe.param_groups[0]["lr"]))
            probe.step()  # torch warns where a schedule steps before its optimizer; the probe has no gradient
            self.scheduler.step()
        return self._rates[step]

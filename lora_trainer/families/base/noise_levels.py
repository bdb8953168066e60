"""The noise levels that a base is trained at, as functions of one uniform random number.

A level fixes alpha and sigma in noisy = alpha x + sigma noise, and the timestep that the denoiser gets. Bases that
predict noise or v have a table of 1000 levels (Ho et al. 2020, arXiv 2006.11239); flow matching has a continuum
(Lipman et al. 2022, arXiv 2210.02747; alpha = 1 - sigma, timestep = 1000 sigma).

`timesteps_of` needs neither torch nor the table: a plan shows by it which timesteps a run will draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import BaseFacts

TIMESTEPS = 1000
# (width, height) in pixels.
Size = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class Level:
    """One noise level; `signal` is alpha-bar = alpha^2 (with alpha^2 + sigma^2 = 1), None for flow matching."""

    timestep: float
    alpha: float
    sigma: float
    signal: float | None


@dataclass(frozen=True, kw_only=True)
class Levels:
    """The noise levels of a base: random ones for training, evenly spaced ones for validation.

    `draw(uniform, size_px=...)` is the level for a uniform number in [0, 1), by the sampling density and the
    shift of the settings; `at(fraction)` the one at a fraction of the timesteps in (0, 1).
    `towards(level, steps, size_px=...)` are the levels that a sampler of so many steps stands at on its way from
    pure noise to a level, which is not among them; they are spaced as the base's own sampler spaces them.
    """

    draw: Callable[..., Level]
    at: Callable[[float], Level]
    towards: Callable[..., tuple[Level, ...]]


def levels_of(facts: BaseFacts, settings: ObjectiveSettings) -> Levels:
    """Return the levels that a base is trained at."""
    if facts.release.prediction != "flow":
        return table_levels(facts.release.alphas_cumprod().tolist(), settings)
    return flow_levels(settings, base_shift=_base_shift(facts))


def timesteps_of(facts: BaseFacts, settings: ObjectiveSettings) -> Callable[[float, Size], float]:
    """Return the timestep (0 to 1000) as a function of a uniform number in [0, 1) and the image's size in pixels."""
    if facts.release.prediction != "flow":
        timestep = _table_timestep(settings, count=TIMESTEPS)
        return lambda uniform, _size_px: timestep(uniform)
    sigma = _flow_sigma(settings, base_shift=_base_shift(facts))
    return lambda uniform, size_px: TIMESTEPS * sigma(uniform, size_px)


def table_levels(signal: Sequence[float], settings: ObjectiveSettings) -> Levels:
    """Return the levels of a base with a table of alpha-bar per timestep."""
    timestep = _table_timestep(settings, count=len(signal))

    def level(timestep: int) -> Level:
        # float32 like the tensors that alpha and sigma multiply, so that they equal the scheduler's values.
        exact, rounded = signal[timestep], np.float32(signal[timestep])
        alpha, sigma = float(np.sqrt(rounded)), float(np.sqrt(np.float32(1) - rounded))
        return Level(timestep=timestep, alpha=alpha, sigma=sigma, signal=exact)

    def draw(uniform: float, *, size_px: Size) -> Level:
        return level(timestep(uniform))

    # At zero-terminal SNR nothing of the image is in the last level: predicted noise says nothing there.
    first = max(number for number, share in enumerate(signal) if share > 0)

    def towards(end: Level, steps: int, *, size_px: Size) -> tuple[Level, ...]:
        last = min(int(end.timestep), first)
        return tuple(level(first - round((first - last) * k / steps)) for k in range(steps))

    return Levels(
        draw=draw, at=lambda fraction: level(int(fraction * len(signal))), towards=towards
    )


def flow_levels(settings: ObjectiveSettings, *, base_shift: Callable[[Size], float]) -> Levels:
    """Return the levels of a flow-matching base; `base_shift` is the shift s its sampler uses at a size."""
    sigma = _flow_sigma(settings, base_shift=base_shift)

    def level(sigma: float) -> Level:
        return Level(timestep=TIMESTEPS * sigma, alpha=1.0 - sigma, sigma=sigma, signal=None)

    def draw(uniform: float, *, size_px: Size) -> Level:
        return level(sigma(uniform, size_px))

    def towards(end: Level, steps: int, *, size_px: Size) -> tuple[Level, ...]:
        shift = base_shift(size_px)
        last = end.sigma / (shift - (shift - 1.0) * end.sigma)  # before the shift
        times = (1.0 - (1.0 - last) * k / steps for k in range(steps))
        return tuple(level(_shifted(time, shift)) for time in times)

    return Levels(draw=draw, at=level, towards=towards)


def _shifted(time: float, shift: float) -> float:
    """Return s t / (1 + (s - 1) t) (Esser et al. 2024, arXiv 2403.03206, section 5.3.2)."""
    return shift * time / (1.0 + (shift - 1.0) * time)


def _base_shift(facts: BaseFacts) -> Callable[[Size], float]:
    return lambda size_px: facts.flow_shift(width_px=size_px[0], height_px=size_px[1])


def _table_timestep(settings: ObjectiveSettings, *, count: int) -> Callable[[float], int]:
    """Return the timestep of a table with `count` rows as a function of a uniform number."""
    density = _density(settings)
    last = min(settings.max_timestep, count - 1)
    first = min(settings.min_timestep, last)
    rows = last - first + 1
    # A density below 1 may round to 1.0, and the index would be one past the last timestep.
    return lambda uniform: first + min(int(density(uniform) * rows), rows - 1)


def _flow_sigma(
    settings: ObjectiveSettings, *, base_shift: Callable[[Size], float]
) -> Callable[[float, Size], float]:
    """Return sigma as a function of a uniform number and the image's size in pixels.

    sigma = s t / (1 + (s - 1) t) for a t drawn by the density (Esser et al. 2024, arXiv 2403.03206, section
    5.3.2), then mapped linearly from (0, 1) to the range of timesteps. s > 1 moves training to higher noise.
    """
    density, fixed = _density(settings), settings.flow_shift
    lowest, highest = settings.min_timestep / TIMESTEPS, (settings.max_timestep + 1) / TIMESTEPS

    def sigma(uniform: float, size_px: Size) -> float:
        # One shift per size and not per batch: a sample's level must not depend on the images beside it.
        factor = base_shift(size_px) if fixed == "resolution" else float(fixed)
        time = density(uniform)
        return lowest + (highest - lowest) * _shifted(time, factor)

    return sigma


def _density(settings: ObjectiveSettings) -> Callable[[float], float]:
    """Return the quantile function that maps a uniform number to t in (0, 1) (Esser et al. 2024, section 3.1)."""

    def mode(uniform: float) -> float:
        # It falls from 1 to 0.
        u, scale = _midpoint(uniform), settings.mode_scale
        return 1.0 - u - scale * (math.cos(0.5 * math.pi * u) ** 2 - 1.0 + u)

    match settings.timestep_sampling:
        case "uniform":
            return _midpoint
        case "mode":
            return mode
        case "cosmap":
            return lambda uniform: 1.0 - 1.0 / (math.tan(0.5 * math.pi * _midpoint(uniform)) + 1.0)
        case "sigmoid":
            normal = NormalDist(0.0, 1.0)
        case "logit_normal":
            normal = NormalDist(settings.logit_mean, settings.logit_std)
    return lambda uniform: 1.0 / (1.0 + math.exp(-normal.inv_cdf(_midpoint(uniform))))


def _midpoint(uniform: float) -> float:
    """Clamp a draw off 0 and 1, where the normal quantile is infinite; at 0 there is no noise to learn."""
    return min(max(uniform, 2.0**-40), 1.0 - 2.0**-40)

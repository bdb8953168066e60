"""Which noise level a sample is trained at: a pure function of one uniform number, per kind of base.

A level says noisy = alpha x + sigma noise and which timestep the denoiser is told. Bases that predict
noise or v have a table of levels (Ho et al. 2020, arXiv 2006.11239); flow matching has every level
(Lipman et al. 2022, arXiv 2210.02747; alpha = 1 - sigma, timestep = 1000 sigma). Torch-free.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Protocol

import numpy as np

from lora_trainer.config import ObjectiveSettings

TIMESTEPS = 1000
Size = tuple[int, int]
"""(width, height) in pixels."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One noise level; `signal` is alpha^2 where alpha^2 + sigma^2 = 1, None for flow matching."""

    timestep: float
    alpha: float
    sigma: float
    signal: float | None


class Levels(Protocol):
    """How a base is trained over noise levels."""

    def draw(self, uniform: float, *, size_px: Size) -> Level:
        """Return the level for a uniform number in [0, 1), distributed as training wants it."""

    def at(self, fraction: float, *, size_px: Size) -> Level:
        """Return the level at a fraction of the timesteps in (0, 1), for validation."""


@dataclass(frozen=True, kw_only=True)
class TableLevels:
    """The levels of a discrete schedule: alpha-bar per timestep, drawn by `density` between two of them."""

    signal: Sequence[float]
    density: Callable[[float], float]
    first: int
    last: int

    def draw(self, uniform: float, *, size_px: Size) -> Level:
        count = self.last - self.first + 1
        # A density may round up to 1, where there is no timestep any more.
        return self._level(self.first + min(int(self.density(uniform) * count), count - 1))

    def at(self, fraction: float, *, size_px: Size) -> Level:
        return self._level(int(fraction * len(self.signal)))

    def _level(self, timestep: int) -> Level:
        signal = np.float32(self.signal[timestep])  # as the tensors that these numbers multiply
        return Level(
            timestep=timestep,
            alpha=float(np.sqrt(signal)),
            sigma=float(np.sqrt(np.float32(1) - signal)),
            signal=self.signal[timestep],
        )


@dataclass(frozen=True, kw_only=True)
class FlowLevels:
    """Levels of flow matching: `density` maps a uniform number to t, `shift` a size to s.

    sigma = s t / (1 + (s - 1) t) (Esser et al. 2024, arXiv 2403.03206, section 5.3.2), kept between
    `lowest` and `highest`.
    """

    density: Callable[[float], float]
    shift: Callable[[Size], float]
    lowest: float
    highest: float

    def draw(self, uniform: float, *, size_px: Size) -> Level:
        time = self.density(uniform)
        return self._level(
            self.lowest + (self.highest - self.lowest) * self._shifted(time, size_px)
        )

    def at(self, fraction: float, *, size_px: Size) -> Level:
        return self._level(fraction)

    def _shifted(self, time: float, size_px: Size) -> float:
        factor = self.shift(size_px)
        return factor * time / (1.0 + (factor - 1.0) * time)

    @staticmethod
    def _level(sigma: float) -> Level:
        return Level(timestep=TIMESTEPS * sigma, alpha=1.0 - sigma, sigma=sigma, signal=None)


def table_levels(signal: Sequence[float], settings: ObjectiveSettings) -> TableLevels:
    """Return the levels of a base with a table of alpha-bar."""
    last = min(settings.max_timestep, len(signal) - 1)
    first = min(settings.min_timestep, last)
    return TableLevels(signal=signal, density=_density(settings), first=first, last=last)


def flow_levels(settings: ObjectiveSettings, *, base_shift: Callable[[Size], float]) -> FlowLevels:
    """Return the levels of a flow-matching base; `base_shift` is what its own sampler uses at a size."""
    fixed = settings.flow_shift
    return FlowLevels(
        density=_density(settings),
        shift=base_shift if fixed == "resolution" else lambda _size: float(fixed),
        lowest=settings.min_timestep / TIMESTEPS,
        highest=(settings.max_timestep + 1) / TIMESTEPS,
    )


def _density(settings: ObjectiveSettings) -> Callable[[float], float]:
    """Return what maps a uniform number to t in (0, 1) (Esser et al. 2024, section 3.1)."""
    match settings.timestep_sampling:
        case "uniform":
            return _midpoint
        case "mode":
            return lambda uniform: _mode(_midpoint(uniform), scale=settings.mode_scale)
        case "cosmap":
            return lambda uniform: 1.0 - 1.0 / (math.tan(0.5 * math.pi * _midpoint(uniform)) + 1.0)
        case "sigmoid":
            normal = NormalDist(0.0, 1.0)
        case "logit_normal":
            normal = NormalDist(settings.logit_mean, settings.logit_std)
    return lambda uniform: 1.0 / (1.0 + math.exp(-normal.inv_cdf(_midpoint(uniform))))


def _mode(uniform: float, *, scale: float) -> float:
    """Return 1 - u - scale (cos^2(pi u / 2) - 1 + u), which falls from 1 to 0."""
    return 1.0 - uniform - scale * (math.cos(0.5 * math.pi * uniform) ** 2 - 1.0 + uniform)


def _midpoint(uniform: float) -> float:
    """Keep a draw off 0 and 1: at 0 there is no noise to learn from, and the normal has no quantile."""
    return min(max(uniform, 2.0**-40), 1.0 - 2.0**-40)

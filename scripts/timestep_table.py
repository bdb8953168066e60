"""Write the table of timestep shares in docs/objective.md: `python -m scripts.timestep_table`.

How often a default run trains a release at noise levels below 0.5 and 0.2, beside a trainer's own formula,
written here from its source and not from ours. tests/train/test_levels.py bounds one by the other
for every release; tests/scripts/test_tables.py fails when the page holds another table.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import NormalDist
from typing import Any

from lora_trainer import families
from lora_trainer.config import Priority
from lora_trainer.config.layers import AskedFor, resolve
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.noise_levels import levels_of
from lora_trainer.families.base.tables import family_table
from scripts.marked_tables import with_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "objective.md"
SIGMAS = (0.5, 0.2)
DRAWS = 4_000
"""Evenly spread numbers that stand for random ones: a share is exact to one in as many."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A trainer, and its share of timesteps with noise below sigma for images of side_px: below(sigma, side_px)."""

    name: str
    below: Callable[[float, int], float]


# ---- the trainers' formulas


def _unshifted(sigma: float, shift: float) -> float:
    """Return the t whose shift s t / (1 + (s - 1) t) is sigma."""
    return sigma / (shift - (shift - 1) * sigma)


def _logit_normal(shift: Callable[[int], float]) -> Callable[[float, int], float]:
    """The sigmoid of a normal number, shifted."""

    def below(sigma: float, side_px: int) -> float:
        time = _unshifted(sigma, shift(side_px))
        return NormalDist().cdf(math.log(time / (1 - time)))

    return below


def _by_tokens(*, most: int, high: float) -> Callable[[int], float]:
    """exp(mu), mu linear in the tokens of 16x16 pixels: 0.5 at 256, `high` at `most`."""

    def shift(side_px: int) -> float:
        return math.exp(0.5 + (high - 0.5) * ((side_px // 16) ** 2 - 256) / (most - 256))

    return shift


@cache
def _scaled_linear() -> tuple[float, ...]:
    """Noise sqrt(1 - alpha-bar) of Stable Diffusion's thousand timesteps."""
    first, last, found, kept = math.sqrt(0.00085), math.sqrt(0.012), [], 1.0
    for step in range(1000):
        kept *= 1 - (first + (last - first) * step / 999) ** 2
        found.append(math.sqrt(1 - kept))
    return tuple(found)


def _every_timestep_alike(sigma: float, _side_px: int) -> float:
    return sum(noise < sigma for noise in _scaled_linear()) / 1000


UNIFORM = Reference(name="sd-scripts, diffusers: uniform", below=_every_timestep_alike)
PLAIN = _logit_normal(lambda _side_px: 1.0)
AI_TOOLKIT = Reference(name="ai-toolkit: `timestep_type: sigmoid`", below=PLAIN)
ONE_TRAINER = Reference(name="OneTrainer, `#z-image LoRA`: logit-normal, shift 1", below=PLAIN)
LOGIT_NORMAL = Reference(name="sd-scripts, diffusion-pipe: logit-normal, shift 1", below=PLAIN)
FLUX_SHIFT = Reference(
    name="sd-scripts: `flux_shift`; OneTrainer, `#flux LoRA`",
    below=_logit_normal(_by_tokens(most=4096, high=1.15)),
)
FLUX2_SHIFT = Reference(
    name="musubi-tuner: `flux2_shift`; OneTrainer, `#flux2 LoRA`", below=FLUX_SHIFT.below
)
LUMINA_SHIFT = Reference(
    name="diffusion-pipe: logit-normal, `lumina_shift`", below=FLUX_SHIFT.below
)
QWEN_SHIFT = Reference(
    name="musubi-tuner: `qwen_shift`", below=_logit_normal(_by_tokens(most=8192, high=0.9))
)
KREA2_SHIFT = Reference(
    name="musubi-tuner: `krea2_shift`", below=_logit_normal(_by_tokens(most=6400, high=1.15))
)


def _ideogram4(sigma: float, side_px: int) -> float:
    """The sigmoid of a normal number around half the logarithm of the pixels by 512 x 512, of deviation 1.5."""
    mean = 0.5 * math.log(side_px * side_px / 512**2)
    return NormalDist(mean, 1.5).cdf(math.log(sigma / (1 - sigma)))


IDEOGRAM4 = Reference(name="diffusers, train_dreambooth_lora_ideogram4", below=_ideogram4)
SD3 = Reference(
    name="diffusers, train_dreambooth_lora_sd3: logit-normal, the scheduler's shift 3",
    below=_logit_normal(lambda _side_px: 3.0),
)
FORMULAS: Mapping[str, Reference] = {
    "uniform": UNIFORM,
    "sigmoid": AI_TOOLKIT,
    "z-image": ONE_TRAINER,
    "logit_normal": LOGIT_NORMAL,
    "flux_shift": FLUX_SHIFT,
    "flux2_shift": FLUX2_SHIFT,
    "lumina_shift": LUMINA_SHIFT,
    "qwen_shift": QWEN_SHIFT,
    "krea2_shift": KREA2_SHIFT,
    "ideogram4": IDEOGRAM4,
    "sd3": SD3,
}
"""By the name that `timesteps` of a release has in family.toml."""


def _reference(stated: str | Mapping[str, Any]) -> Reference:
    """Return the trainer that a release names: one of `FORMULAS`, or a logit-normal density with a fixed shift."""
    if isinstance(stated, str):
        return FORMULAS[stated]
    shift = float(stated["shift"])
    return Reference(name=stated["trainer"], below=_logit_normal(lambda _side_px: shift))


REFERENCES: Mapping[str, Reference] = {
    release["ids"][0]: _reference(release["timesteps"])
    for name in families.NAMES
    for release in family_table(name)["releases"]
    if "timesteps" in release
}
"""By the first Hub id of each public release."""


# ---- ours


def releases() -> Iterator[BaseFacts]:
    """Yield what is known of the public releases of each family, the default one first.

    Of a U-Net family only the default one: its releases draw alike, from all timesteps.
    """
    for name in families.NAMES:
        family = families.family(name)
        first = next(iter(family.releases))
        yield family.releases[first]
        for release in family.published:
            facts = family.releases[release.ids[0]]
            if facts.release.prediction == "flow" and facts.source != first:
                yield facts


def objective(
    facts: BaseFacts, *, tier: str = "10-12", priority: Priority = "balanced"
) -> ObjectiveSettings:
    """Return the objective of a default run with a base."""
    return resolve(
        AskedFor(),
        family=facts.family,
        tier=tier,
        priority=priority,
    ).config.objective


def share(facts: BaseFacts, settings: ObjectiveSettings, *, sigma: float, side_px: int) -> float:
    """Return the share of a run's timesteps with noise below sigma, for square images."""
    levels, size_px = levels_of(facts, settings), (side_px, side_px)
    drawn = (levels.draw((k + 0.5) / DRAWS, size_px=size_px).sigma for k in range(DRAWS))
    return sum(noise < sigma for noise in drawn) / DRAWS


def _shift(facts: BaseFacts, settings: ObjectiveSettings, side_px: int) -> float:
    if settings.flow_shift != "resolution":
        return settings.flow_shift
    return facts.flow_shift(width_px=side_px, height_px=side_px)


def timestep_table() -> str:
    """Return the table as Markdown."""
    below = " | ".join(f"sigma < {sigma}" for sigma in SIGMAS)
    there = " | ".join(f"there < {sigma}" for sigma in SIGMAS)
    lines = [
        f"| release | `timestep_sampling` | `flow_shift` | px | {below} | {there} | by the formula of |",
        "|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for facts in releases():
        settings, side_px = objective(facts), facts.resolution_px
        reference = REFERENCES[facts.source]
        shift = (
            "" if facts.release.prediction != "flow" else f"{_shift(facts, settings, side_px):.3g}"
        )
        ours = (share(facts, settings, sigma=sigma, side_px=side_px) for sigma in SIGMAS)
        theirs = (reference.below(sigma, side_px) for sigma in SIGMAS)
        shares = " | ".join(f"{100 * found:.1f} %" for found in (*ours, *theirs))
        source = facts.source.partition("/")[2]
        lines.append(
            f"| {source} | {settings.timestep_sampling} | {shift} | {side_px} | {shares} | {reference.name} |"
        )
    return "\n".join([*lines, ""])


def with_timestep_table(page: str) -> str:
    """Return the text of docs/objective.md with a new table between its two markers."""
    return with_table(page, "timesteps", timestep_table())


def main() -> None:
    """Rewrite the table in docs/objective.md."""
    PAGE.write_text(with_timestep_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    sys.stderr.write(f"wrote the table of timesteps of {PAGE.name}\n")


if __name__ == "__main__":
    main()

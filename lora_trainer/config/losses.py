"""Every error function of the loss as one row: its name in `objective.loss`, its formula, whether it has a delta.

Another error function is its formula and one more row of `LOSSES`, then `python -m scripts.make`; the allowed names,
the settings of the delta, the form of the GUI, the JSON schema and the table of docs/objective.md follow from the row.
Only the formulas need torch, so none is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, WithJsonSchema

from lora_trainer.common.errors import did_you_mean

if TYPE_CHECKING:
    from torch import Tensor

# (difference between prediction and target, delta) -> error of each element; delta broadcasts to the difference.
Formula = Callable[["Tensor", "Tensor"], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class ErrorFunction:
    """One error function of the loss."""

    formula: Formula
    written: str
    """The formula for readers: d is the prediction less its target, c the delta."""
    also_in: str
    """A trainer or a paper that has it too."""
    has_delta: bool = False
    """Whether `objective.huber_delta` and its schedule reach the formula; the others ignore their delta."""


def _squared(difference: Tensor, delta: Tensor) -> Tensor:
    return difference.square()


def _pseudo_huber(difference: Tensor, delta: Tensor) -> Tensor:
    """Return 2 delta (sqrt(d^2 + delta^2) - delta): d^2 near 0, 2 delta |d| far from it.

    Song & Dhariwal 2023, arXiv 2310.14189, at the scale of sd-scripts.
    """
    squares = difference.square()
    # The formula multiplied by its conjugate: for d << delta the difference sqrt(d^2 + delta^2) - delta
    # of two almost equal numbers would lose the digits of d.
    return 2 * delta * squares / ((squares + delta.square()).sqrt() + delta)


def _smooth_l1(difference: Tensor, delta: Tensor) -> Tensor:
    """Return 2 (sqrt(d^2 + delta^2) - delta), the smooth L1 error of sd-scripts: 2 |d| far from 0.

    This is Huber's error over its delta. Where delta falls with the noise level (`objective.huber_schedule`), it
    weighs noisier levels more than Huber's error does. A change of `_pseudo_huber` changes it too.
    """
    return _pseudo_huber(difference, delta) / delta


def _log_cosh(difference: Tensor, delta: Tensor) -> Tensor:
    """Return log(cosh(d)): d^2 / 2 near 0, |d| - log 2 far from it.

    OneTrainer's formula, with |d| for d: the error is even, and in float32 d + softplus(-2 d) has lost its
    digits at large negative d.
    """
    from torch.nn.functional import softplus  # noqa: PLC0415 - only training needs torch

    distance = difference.abs()
    return distance + softplus(-2.0 * distance) - math.log(2.0)


LOSSES = {
    "mse": ErrorFunction(formula=_squared, written="d²", also_in="every trainer"),
    "huber": ErrorFunction(
        formula=_pseudo_huber,
        written="2 c (sqrt(d² + c²) - c)",
        also_in="sd-scripts",
        has_delta=True,
    ),
    "smooth_l1": ErrorFunction(
        formula=_smooth_l1,
        written="2 (sqrt(d² + c²) - c)",
        also_in="sd-scripts",
        has_delta=True,
    ),
    "log_cosh": ErrorFunction(formula=_log_cosh, written="log(cosh(d))", also_in="OneTrainer"),
}
WITH_DELTA = tuple(name for name, row in LOSSES.items() if row.has_delta)


def _known(name: str) -> str:
    if name not in LOSSES:
        near = did_you_mean(name, tuple(LOSSES))
        raise ValueError(f"not an error function: use {', '.join(LOSSES)}.{near}")
    return name


LossName = Annotated[
    str, AfterValidator(_known), WithJsonSchema({"enum": list(LOSSES), "type": "string"})
]

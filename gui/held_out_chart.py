"""How trainings learned beside each other: how far the loss on held-out images lies below the base's, by step.

Inputs: for each training its name, its losses by step and the loss of the base. Output: a chart, each line of it with
a class `s0`, `s1` and so on, which the page gives a colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lora_trainer.reporting.charts import Chart, ChartLine, Html, draw

from .server.translation import Words

COLOURS = 6


@dataclass(frozen=True, kw_only=True)
class Learned:
    """What was measured of a training: the losses on held-out images by step, and that of the base."""

    label: str
    losses: Mapping[int, float]
    base_loss: float


def held_out_chart(trained: Sequence[Learned], _: Words) -> Html | None:
    """Return the chart, None where nothing was measured of any."""
    lines = [
        ChartLine(
            label=each.label,
            css=f"s{index % COLOURS}",
            points=[
                (0, 0.0),  # the base itself, so that the first measurement is a line already
                *(
                    (step, 100 * (1 - loss / each.base_loss))
                    for step, loss in sorted(each.losses.items())
                ),
            ],
        )
        for index, each in enumerate(trained)
        if each.losses and each.base_loss > 0
    ]
    if not lines:
        return None
    return draw(Chart(title=_("Held-out loss below the base's, %"), height_px=300, lines=lines))

"""Whether a base's modulation can be made ahead of the steps, its layers away from the device. Torch-free.

Input is the settings and what a family knows of the base; output why not, in words, or nothing.
`model/modulation.py` does it, `frozen.py` counts it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.families.base import BaseFacts
from lora_trainer.planning.loads import RememberedCosts


def against_modulation(
    values: Mapping[str, Any], *, facts: BaseFacts, costs: RememberedCosts
) -> str:
    """Return why modulation cannot be made ahead with these settings; empty: it can."""
    layers = set(costs.family.modulation_layers(facts))
    if not layers:
        return f"{facts.source} has no large layers that only noise levels and texts reach"
    if values["base.assistant"] is not None:
        return "an assistant runs beside layers that stay on the device"
    targets = values["adapter.targets"]
    if layers & costs.adapter_shapes(facts, targets=targets).keys():
        return f"adapter.targets={targets} trains adapters on these layers"
    return ""

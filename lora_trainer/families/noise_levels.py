"""Noise levels and samplers of the U-Net families, from the facts of a base alone.

Facts say what the network predicts and whether the last timestep is pure noise; training levels,
samples and plain pipelines all derive from here, so an override reaches each. Torch only in calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.errors import InputError
from lora_trainer.families.base import BaseFacts, Prediction


def scheduler_config(facts: BaseFacts) -> dict[str, Any]:
    """Return the base's scheduler configuration with the facts' prediction and terminal noise.

    Rescaled levels end in pure noise, and sampling must then start there: Lin et al. 2023
    (arXiv 2305.08891), sections 3.1 and 3.3.
    """
    found = {
        **facts.scheduler,
        "prediction_type": facts.prediction,
        "rescale_betas_zero_snr": facts.zero_terminal_snr,
    }
    if facts.zero_terminal_snr:
        found["timestep_spacing"] = "trailing"
    return found


def sampling_scheduler(facts: BaseFacts) -> Any:
    """Return the base's own sampler; DDIM for one that cannot start from pure noise."""
    import diffusers

    kind: Any = getattr(
        diffusers, str(facts.scheduler.get("_class_name", "")), diffusers.DDIMScheduler
    )
    found = scheduler_config(facts)
    if "rescale_betas_zero_snr" not in kind._get_init_keys(kind):
        if facts.zero_terminal_snr:
            kind = diffusers.DDIMScheduler
        else:
            found.pop("rescale_betas_zero_snr")
    return kind.from_config(found)


def stated_prediction(scheduler: Mapping[str, Any], folder: Path) -> Prediction:
    """Return what a scheduler's configuration says the network predicts; raises InputError for `sample`."""
    found = scheduler.get("prediction_type", "epsilon")  # absent in the oldest releases
    if found == "epsilon":
        return "epsilon"
    if found == "v_prediction":
        return "v_prediction"
    raise InputError(
        f"{folder / 'scheduler'}: prediction_type={found!r}, allowed are epsilon and v_prediction",
        fix="use a base model with one of these",
    )

"""Noise levels and samplers of the U-Net families, from the facts of a base alone.

Facts state the prediction type and whether the last timestep is pure noise. Training, samples and plain
pipelines all take their scheduler from here, so an override of the facts reaches all three. Torch is
imported inside calls only.
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
    config = {
        **facts.scheduler,
        "prediction_type": facts.prediction,
        "rescale_betas_zero_snr": facts.zero_terminal_snr,
    }
    if facts.zero_terminal_snr:
        config["timestep_spacing"] = "trailing"
    return config


def sampling_scheduler(facts: BaseFacts) -> Any:
    """Return the base's own sampler, or DDIM where the base's sampler cannot start from pure noise."""
    import diffusers

    kind: Any = getattr(
        diffusers, str(facts.scheduler.get("_class_name", "")), diffusers.DDIMScheduler
    )
    config = scheduler_config(facts)
    if "rescale_betas_zero_snr" not in kind._get_init_keys(kind):
        if facts.zero_terminal_snr:
            kind = diffusers.DDIMScheduler
        else:
            config.pop("rescale_betas_zero_snr")
    return kind.from_config(config)


def stated_prediction(scheduler: Mapping[str, Any], folder: Path) -> Prediction:
    """Return the prediction type in a scheduler's configuration; raises InputError for `sample`."""
    prediction = scheduler.get("prediction_type", "epsilon")  # absent in the oldest releases
    if prediction == "epsilon":
        return "epsilon"
    if prediction == "v_prediction":
        return "v_prediction"
    raise InputError(
        f"{folder / 'scheduler'}: prediction_type={prediction!r}, allowed are epsilon and v_prediction",
        fix="use a base model that predicts epsilon or v_prediction",
    )

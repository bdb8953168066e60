"""The dashboards that accelerate can log to, and the package that each needs."""

from __future__ import annotations

from collections.abc import Mapping

# accelerate's name of a tracker (`LOGGER_TYPE_TO_CLASS` of accelerate/tracking.py) -> its package, as pip names it.
PACKAGE_OF: Mapping[str, str] = {
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "comet_ml": "comet-ml",
    "aim": "aim",
    "mlflow": "mlflow",
    "clearml": "clearml",
    "dvclive": "dvclive",
    "swanlab": "swanlab",
    "trackio": "trackio",
}

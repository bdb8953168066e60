"""Dashboards through accelerate's trackers, with the tag names that kohya's scripts made usual.

Inputs: the run's events, the names of the trackers wanted. Outputs: scalars and sample images in
TensorBoard, Weights & Biases and the like. A dashboard is never worth a run: whatever a tracker raises is one problem,
after which it is left alone (FAULTS TRN-05). Torch-free until a tracker starts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.common.errors import did_you_mean
from lora_trainer.common.events import Event, EventStream
from lora_trainer.common.wording import one_line
from lora_trainer.reporting.status import Smoothed, measured

_GIB_BYTES = 1 << 30
_SCALARS = (str, bool, int, float, type(None))
_NAMES = (
    "aim",
    "clearml",
    "comet_ml",
    "dvclive",
    "mlflow",
    "swanlab",
    "tensorboard",
    "trackio",
    "wandb",
)
PACKAGES: Mapping[str, str] = {name: name.replace("_", "-") for name in _NAMES}
"""Tracker name of accelerate -> the package that has to be installed."""
LogImage = Callable[[str, Image.Image, int], Any]
"""Logs one image under a tag at a step."""


def usable_trackers(
    names: Iterable[str], *, packages: Mapping[str, str | None]
) -> tuple[list[str], list[tuple[str, str]]]:
    """Split `names` into those that can start, and (what, fix) of a problem for each of the others.

    `packages` gives installed versions by package name, None or no entry where one is missing.
    """
    usable: list[str] = []
    problems: list[tuple[str, str]] = []
    for name in dict.fromkeys(names):
        package = PACKAGES.get(name)
        if package is None:
            what = f"logging.trackers names {name!r}, which is not one of {', '.join(PACKAGES)}."
            what = (what + did_you_mean(name, PACKAGES)).rstrip(".")
            problems.append((what, "correct logging.trackers"))
        elif packages.get(package) is None:
            what = f"tracker {name} is left out: the package {package} is not installed"
            problems.append((what, f"pip install {package}, or drop it from logging.trackers"))
        else:
            usable.append(name)
    return usable, problems


@dataclass
class TrackerListener:
    """Listener that logs scalars to one tracker, and images of `folder` where it takes them.

    The first failure is reported and silences it; `close` is called once when the run ends.
    """

    tracker: Any  # of accelerate; each service has a class of its own
    events: EventStream
    name: str = "tracker"
    close: Callable[[], Any] | None = None
    log_image: LogImage | None = None
    folder: Path = field(default_factory=Path)
    _average: Smoothed = field(default_factory=Smoothed, init=False)
    _silent: bool = field(default=False, init=False)

    def __call__(self, event: Event) -> None:
        if self._silent:
            return
        if event.kind in ("step", "validation"):
            scalars = self._step_scalars if event.kind == "step" else _validation_scalars
            values, step = scalars(event.fields), event.fields["step"]
            self.attempt(partial(self.tracker.log, values, step=step))
        elif event.kind == "sample" and self.log_image is not None:
            self.attempt(partial(self._log_images, event.fields, self.log_image))
        elif event.kind in ("finished", "stopped") and self.close is not None:
            self.attempt(self.close)
            self._silent = True

    def _log_images(self, fields: Mapping[str, Any], log_image: LogImage) -> None:
        for index, image_row in enumerate(fields["images"]):
            with Image.open(self.folder / image_row["file"]) as image:
                log_image(f"samples/{index:02d}", image.convert("RGB"), fields["step"])

    def _step_scalars(self, fields: Mapping[str, Any]) -> dict[str, float]:
        values = {
            "loss/current": fields["loss"],
            "loss/average": self._average.add(measured(fields["loss"])),
            "lr/unet": fields["lr"],
            "norm/grad_norm": fields["grad_norm"],
            "time/step_s": fields["seconds"],
            "time/data_wait_s": fields["data_wait_s"],
        }
        for name in ("vram", "vram_reserved", "vram_used", "host"):
            if fields[f"{name}_bytes"]:
                values[f"sys/{name}_gib"] = fields[f"{name}_bytes"] / _GIB_BYTES
        return {name: value for name, value in values.items() if value is not None}

    def attempt(self, action: Callable[[], Any]) -> bool:
        """Do `action` and return True, or report its error, fall silent and return False."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nine services share no base error
            self._silent = True
            reason = one_line(f"{type(error).__name__}: {error}")[:300]
            self.events.problem(
                f"tracker {self.name} stopped logging: {reason}",
                fix=f"mend its folder or service, or drop {self.name} from logging.trackers "
                "(events.jsonl has every step)",
                code="TRN-05",
            )
            return False
        return True


def _validation_scalars(fields: Mapping[str, Any]) -> dict[str, float]:
    """Return the validation loss, whole and by timestep; sorted by name the tags go from clean to noisy."""
    parts = {f"loss/validation_t{round(time):04d}": loss for time, loss in fields["by_timestep"]}
    return {"loss/validation": fields["loss"], **parts}


def _image_logger(name: str, tracker: Any) -> LogImage | None:
    """Return how a tracker of accelerate takes an image, which differs; None where it takes none."""
    match name:
        case "tensorboard":
            return lambda tag, image, step: tracker.log_images(
                {tag: np.asarray(image)[None]}, step=step, dataformats="NHWC"
            )
        case "wandb" | "swanlab":
            return lambda tag, image, step: tracker.log_images({tag: [image]}, step=step)
        case "aim" | "clearml":
            return lambda tag, image, step: tracker.log_images({tag: image}, step=step)
        case _:
            return None


def start_trackers(
    names: Sequence[str], *, run_folder: Path, settings: Mapping[str, Any], events: EventStream
) -> None:
    """Start accelerate's trackers one by one and subscribe those that start; others are problems.

    `names` come from `usable_trackers`; `settings` go to services that keep a table of them.
    """
    if not names:
        return
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    table = {
        key: value if isinstance(value, _SCALARS) else str(value) for key, value in settings.items()
    }
    for name in names:
        # TensorBoard's run name is a folder; DESIGN wants runs/NAME/tensorboard.
        label = name if name == "tensorboard" else run_folder.name
        folder = (run_folder,) if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory else ()
        tracker = LOGGER_TYPE_TO_CLASS[name](label, *folder)
        listener = TrackerListener(
            tracker,
            events,
            name=name,
            close=tracker.finish,
            log_image=_image_logger(name, tracker),
            folder=run_folder,
        )
        started = listener.attempt(tracker.start)
        # In TensorBoard each start would add two time-stamped folders.
        if started and name != "tensorboard":
            started = listener.attempt(partial(tracker.store_init_configuration, table))
        if started:
            events.subscribe(listener)
            if listener.log_image is None:
                events.problem(
                    f"tracker {name} gets no sample images, accelerate has no call for it",
                    fix="look at them in the run folder or its report.html",
                    severity="note",
                )

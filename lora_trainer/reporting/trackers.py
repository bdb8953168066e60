"""Dashboards through accelerate's trackers, with the tag names that kohya's scripts made usual.

Inputs: the run's events, the names of the trackers wanted. Outputs: scalars and sample images in
TensorBoard, Weights & Biases and the like. A dashboard is never worth a run: whatever a tracker raises is one problem,
after which it is left alone (TRN-05 in docs/faults.md), and threads beside the training wait for the services.
Torch-free until a tracker starts.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from lora_trainer.common.errors import did_you_mean
from lora_trainer.common.event_kinds import Event, Finished, Samples, Step, Stopped, Validation
from lora_trainer.common.events import Aside, EventStream
from lora_trainer.common.files import open_regular
from lora_trainer.common.wording import one_line
from lora_trainer.hardware.dashboards import PACKAGE_OF
from lora_trainer.reporting.status import Smoothed

_GIB_BYTES = 1 << 30
# What accelerate imports of a tracker whose module has another name than the tracker.
_MODULES = {"tensorboard": "torch.utils.tensorboard"}
# A service may upload for as long at the end of a run.
END_WITHIN_S = 60.0
_SCALARS = (str, bool, int, float, type(None))
# Trackers that take images through accelerate -> the form in which they take one.
_IMAGES: Mapping[str, Callable[[Image.Image], Any]] = {
    "tensorboard": lambda image: np.asarray(image)[None],
    "wandb": lambda image: [image],
    "swanlab": lambda image: [image],
    "aim": lambda image: image,
    "clearml": lambda image: image,
}


def start_trackers(
    names: Iterable[str],
    *,
    packages: Mapping[str, str | None],
    run_folder: Path,
    settings: Mapping[str, Any],
    events: EventStream,
) -> list[Aside]:
    """Subscribe accelerate's trackers, each with a thread that starts it and logs to it; return them to be closed.

    A tracker that cannot be used is a problem. `packages` gives installed versions by package name, None or no
    entry where one is missing. `settings` go to services that keep a table of them.
    """
    unique, begun = list(dict.fromkeys(names)), list[Aside]()
    if not unique:
        return begun
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    note = partial(events.problem, severity="note")
    table = {
        key: value if isinstance(value, _SCALARS) else str(value) for key, value in settings.items()
    }
    for name in unique:
        package = PACKAGE_OF.get(name, name)
        if name not in LOGGER_TYPE_TO_CLASS:
            allowed = ", ".join(LOGGER_TYPE_TO_CLASS)
            what = f"logging.trackers names {name!r}, which is not one of {allowed}."
            what = (what + did_you_mean(name, LOGGER_TYPE_TO_CLASS)).rstrip(".")
            note(what, fix="correct logging.trackers")
            continue
        if packages.get(package) is None:
            note(
                f"tracker {name} is left out: the package {package} is not installed",
                fix=f"pip install {package}, or drop it from logging.trackers",
            )
            continue
        # TensorBoard's run name is a folder in the run folder: runs/NAME/tensorboard.
        label = name if name == "tensorboard" else run_folder.name
        folder = (run_folder,) if LOGGER_TYPE_TO_CLASS[name].requires_logging_directory else ()
        tracker = LOGGER_TYPE_TO_CLASS[name](label, *folder)
        listener = TrackerListener(tracker, events, name=name, folder=run_folder)
        # Here, as two threads that import may each meet modules that the other has imported in part.
        if not listener.attempt(partial(import_module, _MODULES.get(name, name))):
            continue
        if name not in _IMAGES:
            note(
                f"tracker {name} gets no sample images, accelerate has no call for it",
                fix="look at them in the run folder or its report.html",
            )
        start = partial(listener.started, table)
        aside = Aside(listener, events=events, title=f"tracker {name}", start=start)
        events.subscribe(aside)
        begun.append(aside)
    return begun


@contextmanager
def ended(trackers: Sequence[Aside]) -> Iterator[None]:
    """Let the trackers end with the block, however it ends unless somebody quits at once."""

    def end() -> None:
        for tracker in trackers:
            tracker.close(within_s=END_WITHIN_S)

    try:
        yield
    except Exception:
        end()
        raise
    end()


@dataclass
class TrackerListener:
    """Listener that logs scalars, and images if the tracker takes them, to one tracker.

    The first failure is reported, closes the tracker and silences it. Otherwise the tracker is closed when the run
    ends.
    """

    tracker: Any  # of accelerate; each service has a class of its own
    events: EventStream
    name: str
    folder: Path
    """The run folder that holds the images."""
    _average: Smoothed = field(default_factory=Smoothed, init=False)
    _silent: bool = field(default=False, init=False)

    def __call__(self, event: Event) -> None:
        if self._silent:
            return
        match event:
            case Step():
                figures = self._step_figures(event)
                self.attempt(lambda: self.tracker.log(figures, step=event.step))
            case Validation():  # sorted by name the tags of timesteps go from clean to noisy
                values = {
                    f"loss/validation_t{round(time):04d}": loss for time, loss in event.by_timestep
                }
                values["loss/validation"] = event.loss
                self.attempt(lambda: self.tracker.log(values, step=event.step))
            case Samples() if self.name in _IMAGES:
                self.attempt(lambda: self._log_images(event))
            case Finished() | Stopped():
                self._silent = True
                self.attempt(self.tracker.finish)

    def _step_figures(self, done: Step) -> dict[str, float]:
        """Return what is logged of a step: the figures that are known, and memory where it was measured."""
        values = {
            "loss/current": done.loss,
            "loss/average": self._average.add(done.loss),
            "lr/unet": done.lr,
            "norm/grad_norm": done.grad_norm,
            "time/step_s": done.seconds,
            "time/data_wait_s": done.data_wait_s,
        }
        sizes_bytes = {
            "sys/vram_gib": done.vram_bytes,
            "sys/vram_reserved_gib": done.vram_reserved_bytes,
            "sys/vram_used_gib": done.vram_used_bytes,
            "sys/host_gib": done.host_bytes,
        }
        values |= {name: size / _GIB_BYTES for name, size in sizes_bytes.items() if size}
        return {name: value for name, value in values.items() if not math.isnan(value)}

    def started(self, table: Mapping[str, Any]) -> bool:
        """Start the tracker, and give it the settings; False if it cannot be used."""
        begun = self.attempt(self.tracker.start)
        # In TensorBoard each start would add two time-stamped folders.
        if begun and self.name != "tensorboard":
            begun = self.attempt(partial(self.tracker.store_init_configuration, table))
        return begun

    def _close(self) -> None:
        with suppress(Exception):  # what went wrong with it has been reported
            self.tracker.finish()

    def _log_images(self, drawn: Samples) -> None:
        layout = {"dataformats": "NHWC"} if self.name == "tensorboard" else {}
        for index, image_row in enumerate(drawn.images):
            with open_regular(self.folder / image_row.file) as file, Image.open(file) as opened:
                image = _IMAGES[self.name](opened.convert("RGB"))
            images = {f"samples/{index:02d}": image}
            self.tracker.log_images(images, step=drawn.step, **layout)

    def attempt(self, action: Callable[[], Any]) -> bool:
        """Do `action` and return True, or report its error, close the tracker for good and return False."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - nine services share no base error
            if not self._silent:
                # Else its files and connections would stay open. A thread beside the training closes it, because
                # a service that is down may let it wait.
                self._silent = True
                threading.Thread(target=self._close, name="lora-train-tracker", daemon=True).start()
            reason = one_line(f"{type(error).__name__}: {error}")[:300]
            self.events.problem(
                f"tracker {self.name} stopped logging: {reason}",
                fix=f"repair its folder or service, or drop {self.name} from logging.trackers "
                "(events.jsonl has every step)",
                code="TRN-05",
            )
            return False
        return True

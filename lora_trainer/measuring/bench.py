"""`bench`: short trainings that differ in one setting each, as a table of speed and memory.

Input is a request as for training, output one row per variant. Each variant trains in its own process and
a temporary folder, so speed and peak memory are those of a real run, and one that runs out of memory does
not end the others.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.event_kinds import Cached, Step
from lora_trainer.common.events import read_events
from lora_trainer.config.config import flatten
from lora_trainer.reporting.run_record import read
from lora_trainer.run.prepare import Prepared, Request, prepare

WARMUP_STEPS = 2
QUIET: Mapping[str, Any] = {  # no samples, validation, saves or uploads beside the steps
    "sampling.every_steps": 0,
    "train.validate_every_steps": 0,
    "output.save_every_steps": 0,
    "output.hub_repo": None,
    "logging.trackers": [],
}


# Settings to change in a request; none for the run as planned.
Settings = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class BenchRow:
    """Measurements of a training with changed settings; `failure` is the program's last line if it did not finish.

    `seconds_per_step` is the median after the warm-up. `peak_bytes` is the memory that the allocator
    reserved on a GPU plus the planned context, or the process's memory on a processor; `predicted_bytes`
    is the plan's peak. `cached_images_per_s` is None if all cache entries existed.
    """

    name: str
    settings: Settings
    seconds_per_step: float | None = None
    images_per_s: float | None = None
    peak_bytes: int | None = None
    predicted_bytes: int | None = None
    cached_images_per_s: float | None = None
    failure: str | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def bench(
    request: Request,
    *,
    steps: int,
    only: Sequence[str] = (),
    on_start: Callable[[str, int], None] = lambda _name, _count: None,
) -> list[BenchRow]:
    """Measure the planned run and its variants, one after the other; `only` limits them to some settings.

    `on_start(variant, count)` is called before each. Raises RequestError for too few steps or for settings
    in `only` that no variant changes, and as planning does; a variant that fails is a row.
    """
    if steps < 1:
        raise RequestError(f"--steps {steps} is not allowed", fix="give 1 or more")
    candidates = list(variants(prepare(request)))
    varied = {key for settings in candidates for key in settings}
    for key in only:
        if key not in varied:
            raise RequestError(
                f"bench does not vary {key} here",
                fix=f"use one or more of {', '.join(sorted(varied))}",
            )
    chosen = [each for each in candidates if not only or not each or set(only) & set(each)]
    rows = []
    try:
        with tempfile.TemporaryDirectory(prefix="lora-train-bench-") as folder:
            for settings in chosen:
                on_start(_name(settings), len(chosen))
                rows.append(_measure(request, settings, steps=steps, folder=Path(folder)))
    except OSError as error:
        raise MachineError(
            f"the trainings could not be started: {error.strerror or error}",
            fix="free some space in the folder for temporary files",
        ) from error
    return rows


def _name(settings: Settings) -> str:
    return ", ".join(f"{key}={value}" for key, value in settings.items()) or "as planned"


def variants(prepared: Prepared) -> Iterator[Settings]:
    """Yield the settings of the run as planned, then those of runs that differ in one setting."""
    config = prepared.config
    yield {}
    batch_size, step_px = config.train.batch_size, prepared.facts.bucket_step_px
    powers = (1 << number for number in range(batch_size.bit_length()))
    sides_px = (int(config.data.resolution * share) // step_px * step_px for share in (0.5, 0.75))
    values: dict[str, tuple[Any, ...]] = {
        "memory.micro_batch": (*(power for power in powers if power < batch_size), batch_size),
        "memory.gradient_checkpointing": ("none", "light", "selective", "full"),
        "data.resolution": tuple(filter(None, sides_px)),
    }
    if config.hardware.device != "cpu":
        if prepared.hardware.packages.get("xformers"):
            values["memory.attention"] = ("sdpa", "xformers")
        if config.train.precision == "bf16" and "fp16" in prepared.family.traits.precisions:
            values["train.precision"] = ("fp16",)
    planned = flatten(config)
    for key, choices in values.items():
        for value in choices:
            if value != planned[key]:
                yield {key: value}


def _measure(request: Request, settings: Settings, *, steps: int, folder: Path) -> BenchRow:
    name = f"{len(list(folder.iterdir()))}"
    overrides = {
        # An empty cache, so that the first row of each resolution measures encoding too.
        "data.cache_dir": str(folder / "cache"),
        **request.overrides,
        **QUIET,
        **settings,
        "train.steps": WARMUP_STEPS + steps,
        "output.folder": str(folder),
        "output.name": name,
    }
    command = [sys.executable, "-m", "lora_trainer", str(request.dataset.resolve())]
    command += ["--preset", request.preset, "--priority", request.priority]
    if request.settings_file is not None:
        command += ["--config", request.settings_file.name]
    for key, value in overrides.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    finished = subprocess.run(
        command, capture_output=True, text=True, encoding="utf-8", check=False
    )
    if finished.returncode:
        lines = [line for line in finished.stderr.splitlines() if line.strip()]
        failure = lines[-1] if lines else f"ended with exit code {finished.returncode}"
        return BenchRow(name=_name(settings), settings=settings, failure=failure)
    return _row(settings, folder / name)


def _row(settings: Settings, folder: Path) -> BenchRow:
    """Return the measurements in a finished run's folder."""
    events = read_events(folder / "events.jsonl")
    steps = [event for event in events if isinstance(event, Step) and event.step > WARMUP_STEPS]
    memory = read(folder).plan.memory
    seconds = statistics.median(step.seconds for step in steps)
    images = steps[-1].images / steps[-1].step
    reserved = max(step.vram_reserved_bytes for step in steps)
    cached = next(event for event in events if isinstance(event, Cached))
    return BenchRow(
        name=_name(settings),
        settings=settings,
        seconds_per_step=seconds,
        images_per_s=images / seconds,
        peak_bytes=reserved + int(memory.runtime_bytes)
        if reserved
        else max(step.host_bytes for step in steps),
        predicted_bytes=int(memory.peak_bytes),
        cached_images_per_s=(
            cached.latents / cached.seconds if cached.latents and cached.seconds else None
        ),
    )

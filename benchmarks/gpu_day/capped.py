"""Predicted against measured memory of a whole training: `lora-train` itself where the allocator is capped.

Each training is a process of its own with `hardware.vram_limit_gib`, on a random base of true size and
12 images: caching, steps, a sample on the way. On a processor, where nothing is capped, host memory.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.gpu_day.device import Here
from benchmarks.random_bases import ROOT, write_true_size
from lora_trainer.common.events import read_jsonl
from lora_trainer.common.records import as_json
from lora_trainer.reporting.run_record import read
from tests.fakes.tiny_base import write_base

GIB = 1 << 30
WARM_STEPS = 3
TIERS = {6: "6-8", 8: "6-8", 12: "10-12", 16: "16-24", 24: "16-24"}
IMAGES = 12
SIZES_PX = ((1024, 1024), (1216, 832), (832, 1216))
TINY_PX = ((32, 32), (48, 24), (24, 48))


class NotTrained(Exception):
    """A training ended otherwise than by its last step."""


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Train once and read off what the run folder tells; raises NotTrained."""
    base, gib, steps = values["base"], values["gib"], values["steps"]
    runs = here.folder / "runs"
    settings = {
        "hardware.vram_limit_gib": gib,
        "hardware.device": here.device.type,
        "sampling.every_steps": steps // 2,
        "sampling.prompts": ["an image"],
        "sampling.steps": 4,
        "train.steps": steps,
    }
    preset = () if here.tiny else ("--preset", TIERS[gib])
    run = trained(
        (sys.executable, "-m", "lora_trainer"),
        dataset(here),
        base_folder(base, here),
        runs / f"{base}-{gib}",
        settings,
        words=("--priority", "balanced", *preset),
    )
    return summary(run)


def trained(
    start: Sequence[str],
    images: Path,
    base: Path,
    run: Path,
    settings: Mapping[str, Any],
    *,
    words: Sequence[str] = (),
) -> Path:
    """Train with a cache folder of its own, and return the run folder; raises NotTrained."""
    shutil.rmtree(run, ignore_errors=True)
    command = [*start, str(images), "--base", str(base), "--name", run.name, *words]
    told = {
        "data.cache_dir": str(run.with_name(f"{run.name}-cache")),
        "data.validation_fraction": 0,
        "output.folder": str(run.parent),
        "output.save_every_steps": 0,
        "logging.trackers": [],
        **settings,
    }
    for key, value in told.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    shutil.rmtree(told["data.cache_dir"], ignore_errors=True)
    if done.returncode:
        output = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise NotTrained(f"exit code {done.returncode}: {' / '.join(output[-3:]) or 'no output'}")
    return run


def summary(run: Path) -> dict[str, Any]:
    """Return prediction and measurement of a training, in bytes.

    `measured_bytes` is the highest that the allocator held, with the plan's share for CUDA's context.
    """
    record, events = read(run), read_jsonl(run / "events.jsonl")
    steps = [row for row in events if row["event"] == "step"]
    memory = record.plan.memory
    reserved = max(row["vram_reserved_bytes"] for row in steps)
    # With the context of CUDA, which the allocator does not see.
    measured = (
        reserved + memory.runtime_bytes if reserved else max(row["host_bytes"] for row in steps)
    )
    changes = [row for row in events if row["event"] == "change"]
    problems = read_jsonl(run / "problems.jsonl")
    return {
        "predicted_bytes": memory.peak_bytes,
        "predicted_phases": memory.phases,
        "measured_bytes": measured,
        "over": memory.peak_bytes / measured - 1,
        "allocated_bytes": max(row["vram_bytes"] for row in steps),
        "whole_device_bytes": max(row["vram_used_bytes"] for row in steps),
        "host_bytes": max(row["host_bytes"] for row in steps),
        "step_s": statistics.median(
            row["seconds"] for row in steps if row["step"] > min(WARM_STEPS, len(steps) - 1)
        ),
        "predicted_time": as_json(record.plan.time),
        "changes": [f"{row['key']}: {row['old']} -> {row['new']}" for row in changes],
        "problems": [row["what"] for row in problems if row["severity"] != "note"],
        "settings": {
            key: value
            for key, value in record.settings.items()
            if key.startswith(("memory.", "data.resolution", "optimizer.name", "hardware.compile"))
        },
    }


def base_folder(name: str, here: Here) -> Path:
    """Return the folder of a base, written where it is not there; a broken write leaves nothing."""
    folder = here.folder / "bases" / (f"tiny-{name}" if here.tiny else name)
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.parent.mkdir(parents=True, exist_ok=True)
    if here.tiny:
        write_base(name, unfinished)
    else:
        write_true_size(name, unfinished, device=here.device)
        if here.device.type == "cuda":
            torch.cuda.empty_cache()  # the training is another process
    return unfinished.rename(folder)


def dataset(here: Here) -> Path:
    """Return a folder of images of three shapes with captions, written where it is not there."""
    folder = here.folder / ("tiny-images" if here.tiny else "images")
    if folder.is_dir():
        return folder
    unfinished = folder.with_name(f"{folder.name}.unfinished")
    unfinished.mkdir(parents=True, exist_ok=True)
    sizes, rng = TINY_PX if here.tiny else SIZES_PX, np.random.default_rng(0)
    for index in range(IMAGES):
        colours = Image.fromarray(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8))
        image = colours.resize(sizes[index % len(sizes)], Image.Resampling.BICUBIC)
        image.save(unfinished / f"{index:02}.png", compress_level=1)
        (unfinished / f"{index:02}.txt").write_text(f"image number {index}")
    return unfinished.rename(folder)

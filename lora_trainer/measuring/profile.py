"""`profile`: a few steps of a training under torch's profiler, and the bottleneck found in them.

Input is a request as for training, output a run folder whose tensorboard/ holds the trace, and a
verdict: shares of a step's time that add up to 1, and a sentence with the setting that would change it.
The steps are a real run's: same caches, same loop, same plan.
"""

from __future__ import annotations

import re
import shutil
import statistics
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from lora_trainer.common.errors import RequestError
from lora_trainer.common.event_kinds import Saved, Step
from lora_trainer.common.events import Listener, read_events
from lora_trainer.config.running import RunConfig
from lora_trainer.measuring.bench import QUIET
from lora_trainer.run.lead import lead
from lora_trainer.run.prepare import Request, prepare
from lora_trainer.training.actions import Progress

# Steps before the profiler starts, as the first ones choose kernels and fill the allocator.
WARMUP_STEPS = 3


def profile_run(
    request: Request, *, steps: int, output: Path, listeners: tuple[Listener, ...] = ()
) -> dict[str, Any]:
    """Train `steps` steps under the profiler; the run folder in `output` keeps the trace but no adapter.

    Returns the verdict and its measurements as plain values; `operations` are seconds a step, the longest first.
    Raises RequestError for too few steps, and as training does.
    """
    if steps < 1:
        raise RequestError(f"--steps {steps} is not allowed", fix="give 1 or more")
    real = prepare(request)
    name = real.config.output.name
    name = real.dataset.folder.resolve().name if name == "auto" else name
    short = replace(
        request,
        overrides={
            **request.overrides,
            **QUIET,
            "train.steps": WARMUP_STEPS + steps,
            "output.folder": str(output),
            "output.name": f"{name}-profile",
        },
    )
    activities = [ProfilerActivity.CPU]
    by_device = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}
    # A CUDA build names its kind of device also on a machine without one.
    device = torch.accelerator.current_accelerator(check_available=True)
    if device is not None and device.type in by_device:
        activities.append(by_device[device.type])
    # `acc_events` changes nothing in one cycle, but torch 2.10 warns without it.
    profiler = profile(activities=activities, acc_events=True)
    watch = _Watch(last=WARMUP_STEPS + steps, profiler=profiler)
    file = lead(replace(short, watchers=(watch,)), listeners=listeners)
    trace = file.parent / "tensorboard"
    tensorboard_trace_handler(str(trace))(profiler)
    file.unlink()  # an adapter of so few steps is useless and would only be mistaken for a result
    shutil.rmtree(file.parent / "states", ignore_errors=True)
    events = read_events(file.parent / "events.jsonl")
    rows = [event for event in events if isinstance(event, Step) and event.step > WARMUP_STEPS]
    # Medians, so that one slow step does not matter.
    wall_s = statistics.median(row.seconds for row in rows)
    data_wait_s = statistics.median(row.data_wait_s for row in rows)
    work_s = _work(profiler, steps)
    save_s = max((event.seconds for event in events if isinstance(event, Saved)), default=0.0)
    longest = sorted(work_s.items(), key=lambda row: -row[1])
    return {
        **verdict(
            real.config, wall_s=wall_s, data_wait_s=data_wait_s, work_s=work_s, save_s=save_s
        ),
        "seconds_per_step": wall_s,
        "operations": dict(longest[:10]),
        "steps": steps,
        "trace": str(trace),
    }


@dataclass(kw_only=True)
class _Watch:
    """Starts the profiler after the warm-up and stops it after step `last`."""

    what: ClassVar = "the profile"
    last: int
    profiler: profile

    def due(self, progress: Progress) -> bool:
        return progress.step in (WARMUP_STEPS, self.last)

    def __call__(self, progress: Progress) -> None:
        # Kernels of the step before must be done, or they would count into the profile (or be missing).
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        (self.profiler.start if progress.step == WARMUP_STEPS else self.profiler.stop)()


def _work(profiler: profile, steps: int) -> dict[str, float]:
    """Return seconds a step by kernel on a GPU; on a processor by operation, without the operations it calls."""
    rows = profiler.key_averages()
    return {
        row.key: row.self_device_time_total * 1e-6 / steps
        for row in rows
        if row.device_type.name == "CUDA" and not row.is_user_annotation
    } or {
        row.key: row.self_cpu_time_total * 1e-6 / steps
        for row in rows
        if row.device_type.name == "CPU" and row.key.startswith(("aten::", "mkldnn"))
    }


Cause = Literal["data", "host", "compute", "memory", "saving"]
# What a step waits for.
CAUSES: Mapping[Cause, str] = {
    "data": "Waiting for prepared batches takes {percent} of the time",
    "host": "The program between operations, not the device, takes {percent} of the time",
    "compute": "Matrix products, convolutions and attention take {percent} of the time, so the device is fully used",
    "memory": "Operations that only move numbers (norms, sums, copies) take {percent} of the time",
    "saving": "Saving takes {percent} of the time",
}
# Operations and kernels limited by arithmetic, because they multiply matrices; all others move bytes.
MATRIX_WORK = re.compile(
    r"gemm|gemv|\bmm\b|addmm|bmm|linear|matmul|conv|wgrad|dgrad|attention|fmha|flash|cutlass|cudnn"
    r"|xmma|winograd",
    re.IGNORECASE,
)


def verdict(
    config: RunConfig,
    *,
    wall_s: float,
    data_wait_s: float,
    work_s: Mapping[str, float],
    save_s: float,
) -> dict[str, Any]:
    """Return shares of the time by cause, the largest cause, and a sentence with advice for these settings.

    Seconds are of one optimizer step: `wall_s` from step to step, with `data_wait_s` spent waiting for the next
    batch; `work_s` is the device's time by operation or kernel, where overlapping ones count fully. `save_s` is one
    save.
    """
    matrices = sum(s for name, s in work_s.items() if MATRIX_WORK.search(name))
    others = sum(work_s.values()) - matrices
    # Overlapping kernels add up to more than the time they took together, so they are scaled down to it.
    room = max(0.0, wall_s - data_wait_s)
    squeeze = min(1.0, room / (matrices + others)) if matrices + others else 0.0
    seconds: dict[Cause, float] = {
        "data": data_wait_s,
        "host": max(0.0, room - matrices - others),
        "compute": matrices * squeeze,
        "memory": others * squeeze,
        "saving": save_s / (config.output.save_every_steps or config.train.steps),
    }
    total = sum(seconds.values())
    shares = {cause: seconds[cause] / total if total else 0.0 for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: shares[name])
    cost = CAUSES[cause].format(percent=f"{100 * shares[cause]:.0f} %")
    # The settings that would change it, without those that are so already.
    batch_size, micro_batch = config.train.batch_size, config.memory.micro_batch
    level, resolution_px = config.memory.gradient_checkpointing, config.data.resolution
    bf16 = "train.precision=bf16 (now fp32) if the GPU supports it"
    if config.train.precision != "fp32" or config.hardware.device == "cpu":
        bf16 = ""
    lighter = f"a lighter memory.gradient_checkpointing (now {level}) if memory allows"
    more_at_once = (
        f"a larger memory.micro_batch (now {micro_batch} of train.batch_size={batch_size}) "
        "if memory allows"
        if micro_batch < batch_size
        else f"a larger train.batch_size (now {batch_size}), which changes the training"
    )
    faster: dict[Cause, tuple[str, ...]] = {
        "data": (
            f"a larger data.prefetch_steps (now {config.data.prefetch_steps})",
            "data.cache_dir on a faster disk",
        ),
        "host": (more_at_once,),
        "compute": (
            bf16,
            "" if level == "none" else lighter,
            f"a lower data.resolution (now {resolution_px})",
        ),
        "memory": (bf16, more_at_once),
        "saving": (f"a larger output.save_every_steps (now {config.output.save_every_steps})",),
    }
    sentence = f"{cost}: faster with {', or '.join(filter(None, faster[cause]))}"
    return {"sentence": sentence, "cause": cause, "shares": shares}

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
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch.profiler import ProfilerActivity, profile, tensorboard_trace_handler

from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import Event, Listener
from lora_trainer.config.running import RunConfig
from lora_trainer.measuring.bench import QUIET
from lora_trainer.run.prepare import Request, prepare
from lora_trainer.run.train import train
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
    file = train(replace(short, watchers=(watch,)), listeners=(*listeners, watch.listen))
    trace = file.parent / "tensorboard"
    tensorboard_trace_handler(str(trace))(watch.profiler)
    file.unlink()  # an adapter of so few steps is useless and would only be mistaken for a result
    shutil.rmtree(file.parent / "states", ignore_errors=True)
    measured = watch.measured(steps)
    longest = sorted(measured.work_s.items(), key=lambda row: -row[1])
    return {
        **verdict(measured, real.config),
        "seconds_per_step": measured.wall_s,
        "operations": dict(longest[:10]),
        "steps": steps,
        "trace": str(trace),
    }


@dataclass(kw_only=True)
class _Watch:
    """Starts the profiler after the warm-up, stops it after step `last`, and collects timing events."""

    what: ClassVar = "the profile"
    last: int
    profiler: profile
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    save_s: float = 0.0

    def due(self, progress: Progress) -> bool:
        return progress.step in (WARMUP_STEPS, self.last)

    def __call__(self, progress: Progress) -> None:
        # Kernels of the step before must be done, or they would count into the profile (or be missing).
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        (self.profiler.start if progress.step == WARMUP_STEPS else self.profiler.stop)()

    def listen(self, event: Event) -> None:
        if event.kind == "step" and event.fields["step"] > WARMUP_STEPS:
            self.rows.append(event.fields)
        elif event.kind == "saved":
            self.save_s = max(self.save_s, event.fields["seconds"])

    def measured(self, steps: int) -> Measured:
        """Return means per step; waiting and wall time are medians, so that one slow step does not matter.

        Work is by kernel on a GPU; on a processor by operation, without the operations it calls.
        """
        rows = self.profiler.key_averages()
        work_s = {
            row.key: row.self_device_time_total * 1e-6 / steps
            for row in rows
            if row.device_type.name == "CUDA" and not row.is_user_annotation
        } or {
            row.key: row.self_cpu_time_total * 1e-6 / steps
            for row in rows
            if row.device_type.name == "CPU" and row.key.startswith(("aten::", "mkldnn"))
        }
        return Measured(
            wall_s=statistics.median(row["seconds"] for row in self.rows),
            data_wait_s=statistics.median(row["data_wait_s"] for row in self.rows),
            work_s=work_s,
            save_s=self.save_s,
        )


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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Mean seconds of one optimizer step under the profiler.

    `wall_s` is from step to step, with `data_wait_s` spent waiting for the next batch. `work_s` is the
    device's time by operation or kernel, where overlapping ones count fully. `save_s` is one save.
    """

    wall_s: float
    data_wait_s: float
    work_s: Mapping[str, float]
    save_s: float


def verdict(measured: Measured, config: RunConfig) -> dict[str, Any]:
    """Return shares of the time by cause, the largest cause, and a sentence with advice for these settings."""
    save_s = measured.save_s / (config.output.save_every_steps or config.train.steps)
    matrices = sum(s for name, s in measured.work_s.items() if MATRIX_WORK.search(name))
    others = sum(measured.work_s.values()) - matrices
    # Overlapping kernels add up to more than the time they took together, so they are scaled down to it.
    room = max(0.0, measured.wall_s - measured.data_wait_s)
    squeeze = min(1.0, room / (matrices + others)) if matrices + others else 0.0
    seconds: dict[Cause, float] = {
        "data": measured.data_wait_s,
        "host": max(0.0, room - matrices - others),
        "compute": matrices * squeeze,
        "memory": others * squeeze,
        "saving": save_s,
    }
    total = sum(seconds.values())
    shares = {cause: seconds[cause] / total if total else 0.0 for cause in CAUSES}
    cause = max(CAUSES, key=lambda name: shares[name])
    cost = CAUSES[cause].format(percent=f"{100 * shares[cause]:.0f} %")
    # The settings that would change it, without those that are so already.
    batch_size, micro_batch = config.train.batch_size, config.memory.micro_batch
    checkpointing = config.memory.gradient_checkpointing
    bf16, lighter = [], []
    if config.train.precision == "fp32" and config.hardware.device != "cpu":
        bf16 = ["train.precision=bf16 (now fp32) if the GPU supports it"]
    if checkpointing != "none":
        lighter = [
            f"a lighter memory.gradient_checkpointing (now {checkpointing}) if memory allows"
        ]
    more_at_once = f"a larger train.batch_size (now {batch_size}), which changes the training"
    if micro_batch < batch_size:
        more_at_once = (
            f"a larger memory.micro_batch (now {micro_batch} of train.batch_size={batch_size}) "
            "if memory allows"
        )
    faster: dict[Cause, list[str]] = {
        "data": [
            f"a larger data.prefetch_steps (now {config.data.prefetch_steps})",
            "data.cache_dir on a faster disk",
        ],
        "host": [more_at_once],
        "compute": [*bf16, *lighter, f"a lower data.resolution (now {config.data.resolution})"],
        "memory": [*bf16, more_at_once],
        "saving": [f"a larger output.save_every_steps (now {config.output.save_every_steps})"],
    }
    sentence = f"{cost}: faster with {', or '.join(faster[cause])}"
    return {"sentence": sentence, "cause": cause, "shares": shares}

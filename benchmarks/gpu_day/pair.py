"""Two processes on one device against one: the same steps, to the bit where each image is a pass of its own.

With gloo that is the trainer itself under torchrun, two images a step, one a process; gradients are
added in host memory. NCCL refuses two processes on one GPU, which is tried in processes that do nothing
else: what it says is the result.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from benchmarks.gpu_day.capped import NotTrained, base_folder, dataset, trained
from benchmarks.gpu_day.device import Here
from benchmarks.random_bases import ROOT
from lora_trainer.common.events import read_jsonl
from lora_trainer.reporting.run_record import read

BASE = "sd15"
STEPS = {True: 3, False: 10}
"""By whether sizes are tiny."""
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
JOINS = """
import datetime, os, torch, torch.distributed as dist
torch.cuda.set_device(0)
dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=25))
numbers = torch.full((4,), float(os.environ["RANK"]) + 1, device="cuda:0")
dist.all_reduce(numbers)
print("sum", numbers.tolist())
dist.destroy_process_group()
"""
LOSS_BOUND, WEIGHT_BOUND = 1e-5, 5e-5
"""Of losses, relative, and of the adapter, by its length, where the bits are not the same."""


def measure(values: dict[str, Any], here: Here) -> dict[str, Any]:
    """Train with one process and with two, or try NCCL; raises NotTrained."""
    return _nccl() if values["backend"] == "nccl" else _two(here)


def _two(here: Here) -> dict[str, Any]:
    base, images, runs = base_folder(BASE, here), dataset(here), here.folder / "runs"
    settings = {
        "hardware.device": here.device.type,
        "train.steps": STEPS[here.tiny],
        "train.batch_size": 2,
        "train.deterministic": True,
        "train.precision": "fp32",
        "memory.micro_batch": 1,
        "memory.base_precision": "fp32",
        "optimizer.name": "adamw",
        "sampling.every_steps": 0,
        "train.validate_every_steps": 0,
    }
    if here.device.type == "cpu":
        settings["hardware.threads"] = 1
    if not here.tiny:
        settings["data.resolution"] = 512
    alone = (sys.executable, "-m", "lora_trainer")
    together = (sys.executable, *TORCHRUN, "-m", "lora_trainer")
    one = trained(alone, images, base, runs / "one", settings)
    two = trained(together, images, base, runs / "two", settings)
    return compared(one, two)


def compared(one: Path, two: Path) -> dict[str, Any]:
    """Return how far the run of two processes is from that of one; raises NotTrained if it is not of two."""
    processes = read(two).environment.exactness.get("processes")
    if processes != 2:
        raise NotTrained(f"{two.name} is of {processes} processes")
    losses, times = [], []
    for run in (one, two):
        steps = [row for row in read_jsonl(run / "events.jsonl") if row["event"] == "step"]
        losses.append([row["loss"] for row in steps])
        times.append(min(row["seconds"] for row in steps))
    weights = [load_file(run / f"{run.name}.safetensors") for run in (one, two)]
    pairs = [(weights[0][key].double(), weights[1][key].double()) for key in weights[0]]
    squares = sum(float((a - b).square().sum()) for a, b in pairs)
    length = sum(float(a.square().sum()) for a, _ in pairs)
    difference = max(abs(a - b) / abs(a) for a, b in zip(*losses, strict=True))
    distance = (squares / length) ** 0.5
    same_bits = losses[0] == losses[1] and all(torch.equal(a, b) for a, b in pairs)
    return {
        "holds": same_bits or (difference <= LOSS_BOUND and distance <= WEIGHT_BOUND),
        "same_bits": same_bits,
        "loss_difference": difference,
        "weight_distance": distance,
        "loss_bound": LOSS_BOUND,
        "weight_bound": WEIGHT_BOUND,
        "steps": len(losses[0]),
        "one_step_s": times[0],
        "two_step_s": times[1],
    }


def _nccl() -> dict[str, Any]:
    command = [sys.executable, *TORCHRUN, "--no-python", sys.executable, "-c", JOINS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    sums = [json.loads(line.removeprefix("sum ")) for line in said if line.startswith("sum ")]
    works = len(sums) == 2 and all(values == [3.0] * 4 for values in sums)
    refusals = [line for line in said if "Error" in line or "Duplicate GPU" in line]
    return {"works": works, "said": "" if works else " / ".join(refusals[:3]) or "nothing"}

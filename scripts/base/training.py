"""A small resumable training loop for the parts of the embedded base model.

One `Stage` = named modules, one loss as a pure function of the step number, AdamW with warm-up and
cosine decay, an EMA. Every step seeds torch from (seed, step), so a stage that is killed and started
again draws what it would have drawn. State is one safetensors file, replaced atomically.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What to train: `loss(step)` draws its own batch and returns a scalar with a graph."""

    name: str
    modules: nn.ModuleDict
    loss: Callable[[int], Tensor]
    steps: int
    learning_rate: float
    seed: int
    ema_decay: float = 0.999
    weight_decay: float = 1e-2
    warmup_steps: int = 200
    save_every_steps: int = 250


def train(stage: Stage, folder: Path) -> dict[str, Tensor]:
    """Train to `stage.steps`, resuming from `folder`; return the EMA weights by parameter name."""
    parameters = dict(stage.modules.named_parameters())
    optimizer = torch.optim.AdamW(
        parameters.values(),
        lr=stage.learning_rate,
        betas=(0.9, 0.99),
        weight_decay=stage.weight_decay,
    )
    ema = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    file = folder / f"{stage.name}.safetensors"
    first = _load(file, parameters, ema, optimizer)
    log = (folder / f"{stage.name}.jsonl").open("a", encoding="utf-8")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with log, Progress(*columns) as progress:
        bar = progress.add_task(stage.name, total=stage.steps, completed=first)
        smooth, started = float("nan"), time.monotonic()
        for step in range(first, stage.steps):
            torch.manual_seed(stage.seed * 1_000_003 + step)
            for group in optimizer.param_groups:
                group["lr"] = stage.learning_rate * _schedule(step, stage.steps, stage.warmup_steps)
            loss = stage.loss(step)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            decay = min(stage.ema_decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(
                list(ema.values()), [p.detach() for p in parameters.values()], 1 - decay
            )
            smooth = loss.item() if math.isnan(smooth) else 0.99 * smooth + 0.01 * loss.item()
            progress.update(bar, advance=1, description=f"{stage.name} loss {smooth:.4f}")
            if (step + 1) % 50 == 0:
                row = {"step": step + 1, "loss": smooth, "seconds": time.monotonic() - started}
                log.write(json.dumps(row) + "\n")
                log.flush()
            if (step + 1) % stage.save_every_steps == 0 or step + 1 == stage.steps:
                _save(file, step + 1, parameters, ema, optimizer)
    return ema


def _schedule(step: int, steps: int, warmup_steps: int) -> float:
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    return 0.02 + 0.98 * 0.5 * (
        1 + math.cos(math.pi * (step - warmup_steps) / (steps - warmup_steps))
    )


def _save(
    file: Path,
    step: int,
    parameters: dict[str, nn.Parameter],
    ema: dict[str, Tensor],
    optimizer: torch.optim.AdamW,
) -> None:
    tensors = {"step": torch.tensor(step)}
    for name, parameter in parameters.items():
        state = optimizer.state[parameter]
        tensors |= {f"weight/{name}": parameter.detach(), f"ema/{name}": ema[name]}
        tensors |= {f"{key}/{name}": state[key] for key in ("step", "exp_avg", "exp_avg_sq")}
    partial = file.with_suffix(".tmp")
    save_file({key: value.contiguous() for key, value in tensors.items()}, partial)
    partial.replace(file)


def _load(
    file: Path,
    parameters: dict[str, nn.Parameter],
    ema: dict[str, Tensor],
    optimizer: torch.optim.AdamW,
) -> int:
    if not file.exists():
        return 0
    with safe_open(file, "pt") as tensors, torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(tensors.get_tensor(f"weight/{name}"))
            ema[name].copy_(tensors.get_tensor(f"ema/{name}"))
            optimizer.state[parameter] = {
                key: tensors.get_tensor(f"{key}/{name}")
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
        return int(tensors.get_tensor("step"))

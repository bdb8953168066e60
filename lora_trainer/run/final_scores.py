"""The scores of every finished LoRA at the end of its run: size and rank of its updates, gain over the base.

Input: the base's networks with the adapter in them and the losses that the run has logged; output: parts and
figures of a Validation, RUN/validation.json and an event. No pass of the model is needed, and memory stays small:
one module at a time, for a plain LoRA only the small products of its factors. `lora-train validate` does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from lora_trainer.common.errors import LoraTrainError, first_line
from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora.lora_hooks import change_of, layer_of
from lora_trainer.lora.low_rank import NotLowRank, product, singular
from lora_trainer.lora.tensors import AdapterTensors
from lora_trainer.network.quantize import frozen_weight
from lora_trainer.reporting.history import RunHistory, read_history
from lora_trainer.reporting.score import (
    DEAD_BELOW,
    SANE_UP_TO,
    VALIDATION_FILE,
    WEIGHTS,
    Validation,
    effective_rank,
    gain_part,
    mean_gain,
    rank_part,
    weights_part,
)
from lora_trainer.run.build import Networks
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.training import Progress


@dataclass(frozen=True, kw_only=True)
class WeightFigures:
    """By module: |update| / |weight| (infinite where the update is not finite), and effective rank / rank.

    `ranks_used` lacks modules whose update is no product of thin matrices; `why_not` is the reason.
    """

    relative_norms: Mapping[str, float]
    ranks_used: Mapping[str, float] = field(default_factory=dict)
    why_not: str = ""

    @property
    def finite(self) -> bool:
        return all(map(math.isfinite, self.relative_norms.values()))

    @property
    def dead(self) -> list[str]:
        """Modules whose update is too small to change anything."""
        return [key for key, norm in self.relative_norms.items() if norm < DEAD_BELOW]

    @property
    def exploded(self) -> list[str]:
        """Modules whose update is larger than half their weight, or not finite."""
        return [key for key, norm in self.relative_norms.items() if not norm <= SANE_UP_TO]


@torch.no_grad()
def weight_figures(networks: Mapping[str, nn.Module], tensors: AdapterTensors) -> WeightFigures:
    """Measure every module; raises InputError where the adapter does not fit the networks."""
    norms: dict[str, float] = {}
    used: dict[str, float] = {}
    why_not = ""
    for key, module in tensors.items():
        layer = layer_of(networks, key, module)
        if not all(bool(tensor.isfinite().all()) for tensor in module.tensors.values()):
            norms[key] = math.inf
            continue
        # In float64, which MPS has not. The norm of a product is that of its singular values.
        on_host = {name: tensor.detach().cpu() for name, tensor in module.tensors.items()}
        try:
            values = singular(product(replace(module, tensors=on_host))).values
            norm = float(torch.linalg.vector_norm(values))
            used[key] = effective_rank(values.tolist()) / len(values)
        except NotLowRank as error:
            norm = float(torch.linalg.vector_norm(change_of(layer, module)))
            why_not = str(error)
        weight = float(torch.linalg.vector_norm(frozen_weight(layer), dtype=torch.float32))
        norms[key] = norm / weight if weight > 0 else (math.inf if norm > 0 else 0.0)
    return WeightFigures(relative_norms=norms, ranks_used=used, why_not=why_not)


def measure_weights(weights: WeightFigures, findings: Validation) -> None:
    """Add the parts that need only the adapter's tensors: weights and rank."""
    norms = list(weights.relative_norms.values())
    findings.parts["weights"] = weights_part(norms)
    findings.figures |= {
        "modules": len(norms),
        "relative_norm": spread(norms) if weights.finite else None,
        "dead": weights.dead,
        "exploded": weights.exploded,
    }
    if weights.ranks_used:
        used = list(weights.ranks_used.values())
        findings.parts["rank"] = rank_part(used)
        findings.figures["rank_used"] = spread(used)
    elif weights.finite:
        findings.left_out["rank"] = weights.why_not


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return the minimum, the mean and the maximum."""
    return {"least": min(values), "mean": fmean(values), "most": max(values)}


BY_COMMAND = "needs samples or more losses: lora-train validate RUN DATASET"


def validate_at_the_end(
    job: TrainingJob, networks: Networks, adapter: Adapter, file: Path, end: Progress
) -> None:
    """Write the parts that need no pass to validation.json; a failure is an event, never the end of a run."""
    try:
        result = Validation(file=file.name)
        measure_weights(weight_figures(networks.by_component, adapter.tensors()), result)
        _measure_gain(read_history(job.folder.path), end.step, result)
        for name in WEIGHTS.keys() - result.parts.keys() - result.left_out.keys():
            result.left_out[name] = BY_COMMAND
        path = job.folder.path / VALIDATION_FILE
        write_atomic(path, json_bytes(result.to_json()), durable=False)
    except (LoraTrainError, RuntimeError) as error:
        job.events.problem(
            f"the finished adapter was not measured: {first_line(error)}",
            fix="no action needed: the adapter itself is complete",
            severity="note",
        )
        return
    job.events.emit("measured", step=end.step, parts=result.to_json()["parts"])


def _measure_gain(history: RunHistory, step: int, findings: Validation) -> None:
    base, last = history.base_validation, history.last_validation
    if base is None or last is None or last.step != step or not base.by_timestep:
        findings.left_out["gain"] = "the run did not validate both the base and the last step"
        return
    before, after = ([loss for _, loss in row.by_timestep] for row in (base, last))
    if len(before) != len(after):
        findings.left_out["gain"] = "the two validations used different timesteps"
        return
    gain = mean_gain(before, after)
    findings.parts["gain"] = gain_part(gain)
    findings.figures |= {
        "gain": gain,
        "gain_by_timestep": [
            [timestep, 1 - new / old]
            for (timestep, old), new in zip(base.by_timestep, after, strict=True)
        ],
    }

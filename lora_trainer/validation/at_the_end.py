"""What is measured of every finished adapter: its weights, ranks and the gain over the base.

Input: the networks with the adapter in them and the losses the run has logged; output:
RUN/validation.json and an event. It takes no pass of the model; `lora-train validate` does the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import nn

from lora_trainer.errors import LoraTrainError, first_line
from lora_trainer.events import read_events
from lora_trainer.exporting import Job
from lora_trainer.families.base import DENOISER
from lora_trainer.files import json_bytes, write_atomic
from lora_trainer.model.adapters import Adapter
from lora_trainer.networks import Networks
from lora_trainer.output.history import ValidationRow, validation_row
from lora_trainer.run_folder import EVENTS_FILE, RunFolder
from lora_trainer.train.progress import Progress
from lora_trainer.validation.found import Found, measure_weights
from lora_trainer.validation.parts import WEIGHTS, gain_part, mean_gain
from lora_trainer.validation.result import VALIDATION_FILE, Validation
from lora_trainer.validation.weights import weight_figures

BY_COMMAND = "it takes samples or more losses: lora-train validate RUN DATASET"


def validate_at_the_end(
    job: Job, networks: Networks, adapter: Adapter, file: Path, end: Progress
) -> None:
    """Measure what costs nothing and write it down; a failure is a problem, never the end of a run."""
    inside: dict[str, nn.Module] = {DENOISER: networks.denoiser}
    if networks.text is not None:
        inside |= networks.text.networks
    try:
        result = _measured(job.folder, inside, adapter, file, end)
        path = job.folder.path / VALIDATION_FILE
        write_atomic(path, json_bytes(result.to_json()), durable=False)
    except (LoraTrainError, RuntimeError) as error:
        job.events.problem(
            f"the finished adapter was not measured: {first_line(error)}",
            fix="nothing to do: the adapter itself is whole",
            severity="note",
        )
        return
    job.events.emit("measured", step=end.step, parts=result.to_json()["parts"])


def _measured(
    folder: RunFolder, inside: Mapping[str, nn.Module], adapter: Adapter, file: Path, end: Progress
) -> Validation:
    found = Found()
    measure_weights(weight_figures(inside, adapter.tensors()), found)
    rows = [
        validation_row(row)
        for row in read_events(folder.path / EVENTS_FILE)
        if row["event"] == "validation" and isinstance(row.get("step"), int)
    ]
    _measure_gain(rows, end.step, found)
    for name in WEIGHTS.keys() - found.parts.keys() - found.left_out.keys():
        found.left_out[name] = BY_COMMAND
    return found.result(file.name)


def _measure_gain(rows: list[ValidationRow], step: int, found: Found) -> None:
    base = next((row for row in rows if row.step == 0), None)
    last = next((row for row in reversed(rows) if row.step == step > 0), None)
    if base is None or last is None or not base.by_timestep:
        found.left_out["gain"] = "the run validated neither base nor last step, or not both"
        return
    before, after = ([loss for _, loss in row.by_timestep] for row in (base, last))
    if len(before) != len(after):
        found.left_out["gain"] = "the validations are not of the same timesteps"
        return
    gain = mean_gain(before, after)
    found.parts["gain"] = gain_part(gain)
    found.figures |= {
        "gain": gain,
        "gain_by_timestep": [
            [timestep, 1 - new / old]
            for (timestep, old), new in zip(base.by_timestep, after, strict=True)
        ],
    }

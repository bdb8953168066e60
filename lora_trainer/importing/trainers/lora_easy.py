"""LoRA_Easy_Training_Scripts (derrian-distro): TOML files of sd-scripts' arguments by page, with subsets.

Each page has `args` and `dataset`; they are put together into one training and one dataset file of
sd-scripts and read as those, at ae5ce07.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing.folders import tables_of
from lora_trainer.importing.foreign import Foreign
from lora_trainer.importing.rules import Trainer
from lora_trainer.importing.trainers import sd_scripts, sd_scripts_dataset


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of all pages; the dataset's stand under the names of a dataset file."""
    if not any({"args", "dataset"} & set(page) for page in _pages(data)):
        return None
    mode = data.get("train_mode")
    if isinstance(mode, Mapping):
        mode = mode.get("train_mode")
    return {**_together(data, "args"), "train_mode": mode}


def _pages(data: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for name, page in data.items():
        if name.endswith("_args") and isinstance(page, Mapping):
            yield page


def _together(data: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return one part of all pages as one table."""
    values: dict[str, Any] = {}
    for page in _pages(data):
        table = page.get(part)
        values |= table if isinstance(table, Mapping) else {}
    return values


def read(foreign: Foreign) -> None:
    """Read the subsets as a dataset file, then the arguments as those of a training."""
    mode = foreign.values.pop("train_mode") or "lora"
    if mode != "lora":
        raise RequestError(
            f"train_mode={mode}: only LoRAs are trained here", fix="give a file of its LoRA mode"
        )
    foreign.stays("train_mode", "is what is trained here")
    values = foreign.values
    share = values.pop("warmup_ratio", None)
    if share is not None and "lr_warmup_steps" not in values:
        values["lr_warmup_steps"] = share
        foreign.called["lr_warmup_steps"] = "warmup_ratio"
    if isinstance(values.get("max_train_epochs"), int) and values["max_train_epochs"] > 0:
        values.pop("max_train_steps", None)
    foreign.is_flow = any(name in values for name in ("ae", "t5xxl", "clip_l"))
    subsets = [
        {key: value for key, value in one.items() if key != "name"}
        for one in tables_of(foreign.data.get("subsets"))
    ]
    if subsets:
        options = _together(foreign.data, "dataset")
        tables = {"": options, **{f"subsets[{n}].": one for n, one in enumerate(subsets)}}
        for prefix, table in tables.items():
            for key, value in table.items():
                values[f"datasets[0].{prefix}{key}"] = value
                foreign.called[f"datasets[0].{prefix}{key}"] = f"{prefix}{key}"
        dataset = {"datasets": [{**options, "subsets": subsets}]}
        sd_scripts_dataset.read_dataset(foreign, dataset)
    sd_scripts.read_training(foreign)


LORA_EASY = Trainer(
    "LoRA_Easy_Training_Scripts", ("sd_scripts_dataset", "sd_scripts", "lora_easy"), flat, read
)

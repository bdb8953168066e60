"""LoRA_Easy_Training_Scripts (derrian-distro): TOML files of sd-scripts' arguments by page, with subsets.

Each page has `args` and `dataset`; they are put together into one training and one dataset file of
sd-scripts and read as those, at ae5ce07.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing.rules import TOGETHER, Foreign, Idle, Lacks, Rule, Trainer, each
from lora_trainer.importing.trainers import sd_scripts, sd_scripts_dataset
from lora_trainer.importing.trainers.sd_scripts_keys import KEYS as SD_SCRIPTS_KEYS

_PROGRAM = Idle("is about that program, not about the result")
_OWN: Mapping[str, Rule] = {
    **each("train_mode sdxl save_toml save_toml_location tag_occurrence tag_file_location easy_name "
           "remove_underscores", _PROGRAM),
    "warmup_ratio": TOGETHER,
    **each("edm2_loss_weighting edm2_loss_weighting_optimizer edm2_loss_weighting_optimizer_lr", Lacks(
        "see objective.weighting")),
    **each("init_word num_vectors_per_token token_string", Idle("is of another training mode")),
}  # fmt: skip
KEYS: Mapping[str, Rule] = {
    **SD_SCRIPTS_KEYS,
    **_OWN,
    **sd_scripts_dataset.KEYS,
}


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of all pages; the dataset's stand under the names of a dataset file."""
    pages = [
        value
        for name, value in data.items()
        if name.endswith("_args") and isinstance(value, Mapping)
    ]
    if not any({"args", "dataset"} & set(page) for page in pages):
        return None
    values: dict[str, Any] = {}
    for page in pages:
        page_values = page.get("args")
        values |= page_values if isinstance(page_values, Mapping) else {}
    mode = data.get("train_mode")
    if isinstance(mode, Mapping):
        mode = mode.get("train_mode")
    return {**values, "train_mode": mode}


def read(foreign: Foreign) -> None:
    """Read the subsets as a dataset file, then the arguments as those of a training."""
    mode = foreign.values.get("train_mode") or "lora"
    if mode != "lora":
        raise RequestError(
            f"train_mode={mode}: only LoRAs are trained here", fix="give a file of its LoRA mode"
        )
    foreign.findings.stays("train_mode", "is what is trained here")
    values = {key: value for key, value in foreign.values.items() if key != "train_mode"}
    share = values.pop("warmup_ratio", None)
    if share is not None and "lr_warmup_steps" not in values:
        values["lr_warmup_steps"] = share
        foreign.called["lr_warmup_steps"] = "warmup_ratio"
    if isinstance(values.get("max_train_epochs"), int) and values["max_train_epochs"] > 0:
        values.pop("max_train_steps", None)
    foreign.values = values
    is_flow = any(name in values for name in ("ae", "t5xxl", "clip_l"))
    foreign.is_flow = is_flow
    dataset = _dataset(foreign.data)
    if dataset["datasets"][0]["subsets"]:
        foreign.extra |= _flat_dataset(dataset, foreign.called)
        sd_scripts_dataset.read_dataset(foreign, dataset)
    sd_scripts.read_training(foreign)


def _dataset(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pages' dataset options and the subsets as sd-scripts' dataset file has them."""
    options: dict[str, Any] = {}
    for name, page in data.items():
        page_options = (
            page.get("dataset") if name.endswith("_args") and isinstance(page, Mapping) else None
        )
        options |= page_options if isinstance(page_options, Mapping) else {}
    subsets = data.get("subsets")
    tables = (
        [dict(one) for one in subsets if isinstance(one, Mapping)]
        if isinstance(subsets, list)
        else []
    )
    for table in tables:
        table.pop("name", None)
    return {"datasets": [{**options, "subsets": tables}]}


def _flat_dataset(dataset: Mapping[str, Any], called: dict[str, str]) -> dict[str, Any]:
    """Return flat keys, and note what the file calls them."""
    (first,) = dataset["datasets"]
    flat_values = {f"datasets[0].{key}": value for key, value in first.items() if key != "subsets"}
    for key in flat_values:
        called[key] = key.removeprefix("datasets[0].")
    for number, table in enumerate(first["subsets"]):
        for key, value in table.items():
            name = f"datasets[0].subsets[{number}].{key}"
            flat_values[name] = value
            called[name] = f"subsets[{number}].{key}"
    return flat_values


LORA_EASY = Trainer(name="LoRA_Easy_Training_Scripts", flat=flat, keys=KEYS, read=read)

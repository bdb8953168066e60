"""The settings of a training, as its LoRA file tells them: sd-scripts and its relatives write `ss_` entries.

Input: the header of a .safetensors file. Output: the options as a settings file of sd-scripts has them. What the
entries tell of the training itself, such as hashes, captions and the step, is left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError
from lora_trainer.importing.trainers.sd_scripts import TRAINERS

SUFFIX = ".safetensors"
MAX_BYTES = 16 << 20
_LENGTH_BYTES = 8
# Entries whose names are not those of the options; the first that is there counts.
_NAMES = {
    "train_batch_size": ("batch_size_per_device", "total_batch_size"),
    "debiased_estimation_loss": ("debiased_estimation",),
    "pretrained_model_name_or_path": ("sd_model_name",),
    "vae": ("vae_name",),
}
_DATASET = ("batch_size_per_device", "resolution", "enable_bucket")
_SUBSET = ("num_repeats", "keep_tokens", "shuffle_caption", "flip_aug", "caption_dropout_rate")


def header_of(file: Path) -> bytes:
    """Return the header of a file, without its tensors; raises OSError, InputError."""
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
        if not 0 < length <= MAX_BYTES:
            raise _not_one(str(file))
        return stream.read(length)


def entries_of(header: bytes, name: str) -> Mapping[str, str]:
    """Return the entries in the header of a file; raises InputError."""
    try:
        entries = json.loads(header).get("__metadata__", {})
    except (ValueError, AttributeError, RecursionError):
        raise _not_one(name) from None
    if not isinstance(entries, dict):
        raise _not_one(name)
    return {str(key): str(value) for key, value in entries.items()}


def options(entries: Mapping[str, str], name: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of a training by its entries, and what of them is open; raises InputError for none."""
    told = {
        key.removeprefix("ss_"): _value(text)
        for key, text in entries.items()
        if key.startswith("ss_")
    }
    if "network_module" not in told:
        raise InputError(
            f"{name} does not say how it was trained",
            fix="give the settings file of its training, or a LoRA that was made by sd-scripts",
        )
    told |= _of_datasets(told.pop("datasets", None))
    for option, names in _NAMES.items():
        found = next((told[key] for key in names if told.get(key) is not None), None)
        if found is not None:
            told.setdefault(option, found)
    told |= _of_optimizer(told.get("optimizer"))
    if isinstance(arguments := told.get("network_args"), dict):
        told["network_args"] = [f"{key}={value}" for key, value in arguments.items()]
    if isinstance(size := told.get("resolution"), list):
        told["resolution"] = ",".join(map(str, size))
    left_open = {
        key: f"({told.pop(key)}) is a name without a folder: choose the file"
        for key in ("pretrained_model_name_or_path", "vae")
        if told.get(key) is not None and "/" not in str(told[key])
    }
    known = TRAINERS[1].keys.keys()
    kept = {key: value for key, value in told.items() if key in known and value is not None}
    return kept, left_open


def _value(text: str) -> Any:
    """Return what an entry means: they are Python's or JSON's texts of values."""
    python = {"None": None, "True": True, "False": False}
    if text in python:
        return python[text]
    try:
        return json.loads(f"[{text[1:-1]}]" if text[:1] + text[-1:] == "()" else text)
    except (ValueError, RecursionError):
        return text


def _of_datasets(datasets: Any) -> dict[str, Any]:
    """Return what the first dataset and its first subset have of a training's options."""
    if not (isinstance(datasets, list) and datasets and isinstance(datasets[0], dict)):
        return {}
    found = {key: datasets[0].get(key) for key in _DATASET}
    subsets = datasets[0].get("subsets")
    if isinstance(subsets, list) and len(subsets) == 1 and isinstance(subsets[0], dict):
        found |= {key: subsets[0].get(key) for key in _SUBSET}
    return {key: value for key, value in found.items() if value is not None}


def _of_optimizer(optimizer: Any) -> dict[str, Any]:
    """Return name and arguments of `bitsandbytes.optim.adamw.AdamW8bit(weight_decay=0.1,betas=(0.9, 0.99))`."""
    if not isinstance(optimizer, str):
        return {}
    name, _, told = optimizer.partition("(")
    # The commas between arguments are those before a name.
    arguments = [part.strip() for part in _parts(told.removesuffix(")"))]
    return {
        "optimizer_type": name.rpartition(".")[2],
        **({"optimizer_args": arguments} if arguments else {}),
    }


def _parts(told: str) -> list[str]:
    parts: list[str] = []
    for piece in told.split(","):
        if "=" in piece or not parts:
            parts.append(piece)
        else:
            parts[-1] += f",{piece}"
    return [part for part in parts if part.strip()]


def _not_one(name: str) -> InputError:
    return InputError(f"{name} is not a whole {SUFFIX} file", fix="give a LoRA file")

"""SimpleTuner's data backends and the files that config.json names; a backend of images is a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import (
    FolderTable,
    ImageFolder,
    named_file,
    path_of,
    set_folders,
    set_length,
    set_resolutions,
    tables_of,
)
from lora_trainer.importing.foreign import Foreign
from lora_trainer.importing.rules import flattened

LIST = "[]"
"""The name under which a file that holds a list is kept."""


def read_data(foreign: Foreign) -> None:
    """Set resolution, folders, batch and length."""
    share = foreign.number("caption_dropout_probability", 0.1) or 0.0
    foreign.set("data.caption_dropout", min(1.0, share), "caption_dropout_probability")
    size = foreign.nonzero("resolution", 1024)
    _resolution(foreign, size, foreign.values.get("resolution_type"), "resolution")
    tables = read_file(foreign, "data_backend_config")
    if isinstance(tables, list):
        backends = tables_of(tables)
        foreign.values |= flattened({"data_backends": backends})
        _read_tables(foreign, backends)
    shared.set_batch(foreign, "train_batch_size", "gradient_accumulation_steps", default=4)
    steps = foreign.number("max_train_steps")
    if steps:
        foreign.carry("train.steps", "max_train_steps", int(steps))
    else:
        set_length(foreign, foreign.number("num_train_epochs", 1), "num_train_epochs")


def _resolution(foreign: Foreign, size: float, kind: Any, key: str) -> None:
    side = math.sqrt(size) * 1000 if kind == "area" or size <= 16 else size
    if key in foreign.values:
        set_resolutions(foreign, [(side, side)], key)
    else:
        foreign.set("data.resolution", max(64, round(side / 64) * 64))


def read_backends(foreign: Foreign) -> None:
    """Read a file of data backends by itself."""
    _read_tables(foreign, foreign.data[LIST])


def _read_tables(foreign: Foreign, tables: Sequence[Mapping[str, Any]]) -> None:
    """Set the backends that hold images as folders of the dataset."""
    folders: list[ImageFolder] = []
    moving = ""
    for number, one in enumerate(tables):
        table = FolderTable((one, f"data_backends[{number}]."))
        path, kind = table.get("instance_data_dir"), str(table.get("dataset_type", "image"))
        is_folder = isinstance(path, str) and path and kind == "image"
        if table.get("disabled") or not is_folder:
            for name in table.names.values():
                foreign.stays(name, "is no folder of images that is trained")
            if kind in ("video", "audio") and not table.get("disabled"):
                moving = kind
            continue
        folder = ImageFolder(path=path_of(path), key=table.name("instance_data_dir"))
        folder.regularisation = bool(table.get("is_regularisation_data"))
        repeats, name = table.sourced("repeats", 0)
        if isinstance(repeats, int) and not isinstance(repeats, bool) and repeats >= 0:
            # Repeats are further views there: 0 shows each image once (documentation/DATALOADER.md).
            folder.settings["repeats"] = (repeats + 1, name)
        _captions(foreign, folder, table)
        if not folders:
            _sizes(foreign, table)
        folders.append(folder)
    if moving and not folders:
        raise RequestError(
            f"dataset_type={moving}: only images are trained here",
            fix="give a data backend of images",
        )
    set_folders(foreign, folders)


def _sizes(foreign: Foreign, table: FolderTable) -> None:
    """Set resolution and buckets as the first backend has them."""
    size, name = table.sourced("resolution")
    if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size <= 100_000:
        _resolution(foreign, float(size), table.get("resolution_type"), name)
    square = table.get("crop", True) and str(table.get("crop_aspect", "square")) == "square"
    foreign.set("data.buckets", not square, table.name("crop"), table.name("crop_aspect"))


def _captions(foreign: Foreign, folder: ImageFolder, table: FolderTable) -> None:
    """Set where the captions of one backend come from."""
    strategy, name = table.sourced("caption_strategy", "filename")
    prompt, prompt_name = table.sourced("instance_prompt")
    by_prompt = strategy in ("instanceprompt", "instance_prompt")
    if by_prompt or table.get("only_instance_prompt"):
        why = "one text for all images: name the folder N_WORDS, or give data.trigger"
        foreign.lacks(prompt_name, prompt, why)
    elif table.get("prepend_instance_prompt") and prompt:
        folder.settings["caption_prefix"] = (prompt, prompt_name)
    if strategy == "filename":
        note = "an image with a caption file keeps that"
        foreign.set("data.caption_fallback", "file_name", name, note=note)
    elif strategy in ("parquet", "csv"):
        why = f"name the table metadata.{strategy} and put it beside the images"
        foreign.lacks(name, strategy, why)


def read_file(foreign: Foreign, option: str) -> Any:
    """Return the contents of a JSON file that an option names, None where it is not there."""
    return named_file(foreign, option, json.loads, lambda _: True)

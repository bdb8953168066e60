"""SimpleTuner's data backends and the files that config.json names; a backend of images is a folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import (
    ImageFolder,
    named_file,
    path_of,
    set_folders,
    set_length,
    set_resolutions,
)
from lora_trainer.importing.foreign_settings import Findings
from lora_trainer.importing.rules import THERE, Foreign, carry, flattened

LIST = "[]"
"""The name under which a file that holds a list is kept."""


def read_data(foreign: Foreign) -> None:
    """Set resolution, folders, batch and length."""
    findings = foreign.findings
    tables = read_file(foreign, "data_backend_config")
    share = foreign.number("caption_dropout_probability", 0.1)
    findings.set(
        "data.caption_dropout",
        min(1.0, share or 0.0),
        *foreign.there("caption_dropout_probability"),
    )
    size = foreign.number("resolution", 1024) or 1024
    _resolution(foreign, size, str(foreign.get("resolution_type", "pixel_area")), "resolution")
    if isinstance(tables, list):
        backends = [one for one in tables if isinstance(one, Mapping)]
        foreign.extra |= flattened({"data_backends": backends})
        read_tables(foreign, backends)
    shared.set_batch(foreign, size=foreign.number("train_batch_size", 4), source="train_batch_size",
                     times=foreign.number("gradient_accumulation_steps"),
                     times_source="gradient_accumulation_steps")  # fmt: skip
    foreign.stay("the backends say more", "resolution", "resolution_type", "caption_strategy", "instance_prompt",
                 "prepend_instance_prompt", "only_instance_prompt", "masked_loss_probability")  # fmt: skip
    steps, epochs = foreign.number("max_train_steps", 0), foreign.number("num_train_epochs", 1)
    if steps:
        carry(findings, "train.steps", "max_train_steps", int(steps))
    else:
        set_length(foreign, epochs=epochs, source="num_train_epochs")
    foreign.stay("the other says how long it is", "max_train_steps", "num_train_epochs")


def _resolution(foreign: Foreign, size: float, kind: str, source: str) -> None:
    side = math.sqrt(size) * 1000 if kind == "area" or size <= 16 else size
    if source in {**foreign.values, **foreign.extra}:
        set_resolutions(foreign, [(side, side)], source)
    else:
        foreign.findings.set("data.resolution", max(64, round(side / 64) * 64), note=THERE)


def read_backends(foreign: Foreign) -> None:
    """Read a file of data backends by itself."""
    read_tables(foreign, foreign.data[LIST])


def read_tables(foreign: Foreign, tables: list[Mapping[str, Any]]) -> None:
    """Set the backends that hold images as folders of the dataset."""
    findings = foreign.findings
    folders: list[ImageFolder] = []
    moving = ""
    for number, table in enumerate(tables):
        where = f"data_backends[{number}]."
        image_folder = table.get("instance_data_dir")
        kind = str(table.get("dataset_type", "image"))
        if (
            kind not in ("image",)
            or table.get("disabled")
            or not isinstance(image_folder, str)
            or not image_folder
        ):
            moving = kind if kind in ("video", "audio") and not table.get("disabled") else moving
            why = "is no folder of images that is trained"
            for key in table:
                findings.stays(f"{where}{key}", why)
            continue
        folder = ImageFolder(path=path_of(image_folder), key=f"{where}instance_data_dir")
        folder.regularisation = bool(table.get("is_regularisation_data"))
        repeats = table.get("repeats", 0)
        if isinstance(repeats, int) and not isinstance(repeats, bool) and repeats >= 0:
            folder.settings["repeats"] = (
                # Repeats are further views there: 0 shows each image once (documentation/DATALOADER.md).
                repeats + 1,
                f"{where}repeats" if "repeats" in table else THERE,
            )
        _captions(table, folder, findings, where=where)
        size = table.get("resolution")
        if (
            isinstance(size, int | float)
            and not isinstance(size, bool)
            and 0 < size <= 100_000
            and not folders
        ):
            _resolution(
                foreign,
                float(size),
                str(table.get("resolution_type", "pixel_area")),
                f"{where}resolution",
            )
        aspect, crop = str(table.get("crop_aspect", "square")), table.get("crop", True)
        if not folders:
            names = [f"{where}{key}" for key in ("crop", "crop_aspect") if key in table]
            findings.set(
                "data.buckets",
                not (crop and aspect == "square"),
                *names,
                note="" if names else THERE,
            )
        for key in ("dataset_type", "disabled", "caption_strategy", "repeats", "resolution", "crop", "crop_aspect",
                    "is_regularisation_data", "instance_prompt", "prepend_instance_prompt",
                    "only_instance_prompt", "caption_dropout_probability"):  # fmt: skip
            used = {part for _, part in folder.settings.values()}
            if key in table and f"{where}{key}" not in {*findings.named, *used}:
                findings.stays(f"{where}{key}", "is as the first backend has it, or as it is here")
        folders.append(folder)
    if moving and not folders:
        raise RequestError(
            f"dataset_type={moving}: only images are trained here",
            fix="give a data backend of images",
        )
    set_folders(foreign, folders)


def _captions(
    table: Mapping[str, Any], folder: ImageFolder, findings: Findings, *, where: str
) -> None:
    """Set where the captions of one backend come from."""
    strategy = str(table.get("caption_strategy", "filename"))
    if strategy in ("instanceprompt", "instance_prompt") or table.get("only_instance_prompt"):
        why = "one text for all images: name the folder N_WORDS, or give data.trigger"
        findings.lacks(f"{where}instance_prompt", table.get("instance_prompt"), why)
    elif table.get("prepend_instance_prompt") and table.get("instance_prompt"):
        folder.settings["caption_prefix"] = (
            table["instance_prompt"],
            f"{where}instance_prompt",
        )
    if strategy == "filename":
        findings.set(
            "data.caption_fallback",
            "file_name",
            *([f"{where}caption_strategy"] if "caption_strategy" in table else []),
            note="an image with a caption file keeps that",
        )
    elif strategy in ("parquet", "csv"):
        findings.lacks(
            f"{where}caption_strategy",
            strategy,
            f"name the table metadata.{strategy} and put it beside the images",
        )


def read_file(foreign: Foreign, option: str) -> Any:
    """Return the contents of a JSON file that an option names, None where it is not there."""
    return named_file(foreign, option, json.loads, lambda _: True)

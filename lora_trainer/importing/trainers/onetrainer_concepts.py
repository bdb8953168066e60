"""OneTrainer's concepts and samples: tables in the settings file, or in files that it names.

A concept is a folder of the dataset; samples are prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_trainer.importing.folders import (
    FolderTable,
    ImageFolder,
    named_file,
    path_of,
    set_folders,
    tables_of,
)
from lora_trainer.importing.foreign import THERE, Foreign
from lora_trainer.importing.rules import flattened


def _named_list(foreign: Foreign, list_key: str, file_key: str) -> list[Mapping[str, Any]]:
    """Return the tables that stand in the file, or in the file that it names."""
    tables = foreign.data.get(list_key)
    if isinstance(tables, list):
        return tables_of(tables)
    tables = named_file(
        foreign,
        file_key,
        json.loads,
        lambda data: isinstance(data, list) and data == tables_of(data),
    )
    foreign.values |= flattened({list_key: tables}) if tables else {}
    return tables or []


def set_concepts(foreign: Foreign) -> None:
    """Set the concepts as folders of the dataset."""
    folders: list[ImageFolder] = []
    for number, concept in enumerate(_named_list(foreign, "concepts", "concept_file_name")):
        where = f"concepts[{number}]."
        values = FolderTable((flattened(concept), where))
        kind = str(values.get("type", "STANDARD")).upper()
        if values.get("enabled") is False or kind == "VALIDATION":
            why = "is off there"
            if kind == "VALIDATION":
                why = "is validated with only: keep it outside of the DATASET"
            for name in foreign.under(where):
                foreign.stays(f"{where}{name}", why)
        elif isinstance(values.get("path"), str) and values["path"]:
            folder = ImageFolder(path=path_of(values["path"]), key=values.name("path"))
            if kind == "PRIOR_PREDICTION":
                folder.regularisation = True
                foreign.set("objective.prior", "base", values.name("type"))
            _concept_fields(foreign, folder, values)
            folders.append(folder)
        else:
            foreign.untrained += (where,)
    set_folders(foreign, folders)


def _concept_fields(foreign: Foreign, folder: ImageFolder, values: FolderTable) -> None:
    folder.settings = {"repeats": (1, THERE)}
    times, name = values.sourced("balancing", 1.0)
    by_repeats = str(values.get("balancing_strategy", "REPEATS")).upper() == "REPEATS"
    if by_repeats and isinstance(times, int | float) and times >= 1:
        folder.settings["repeats"] = (round(times), name)
        if times != round(times):
            foreign.is_nearest(name, f"{times:g}: {round(times)} repeats")
    elif times not in (1, 1.0):
        why = "give repeats: a share of an epoch or a number of samples has no equivalent"
        foreign.lacks(name, times, why)
    if values.get("loss_weight", 1.0) not in (1, 1.0):
        folder.settings["weight"] = values.sourced("loss_weight")
    if values.get("image.enable_random_flip"):
        folder.settings["flip"] = (True, values.name("image.enable_random_flip"))
    if values.get("image.enable_resolution_override"):
        size, _ = values.sourced("image.resolution_override")
        name = values.name("image.enable_resolution_override")
        name = name.replace("enable_resolution", "resolution")
        foreign.lacks(name, size, "all images are trained at data.resolution")
    if values.get("text.enable_tag_shuffling"):
        folder.settings["shuffle_tags"] = (True, values.name("text.enable_tag_shuffling"))
        folder.settings["keep_tokens"] = values.sourced("text.keep_tags_count", 1)
        mark, name = values.sourced("text.tag_delimiter", ",")
        if mark != ",":
            foreign.lacks(name, mark, "tags are parted by commas")
    if values.get("text.tag_dropout_enable"):
        mode = str(values.get("text.tag_dropout_mode", "FULL"))
        field = "caption_dropout" if mode == "FULL" else "tag_dropout"
        folder.settings[field] = values.sourced("text.tag_dropout_probability", 0.0)
    source, name = values.sourced("text.prompt_source", "sample")
    if source == "filename":
        note = "an image with a caption file keeps that"
        foreign.set("data.caption_fallback", "file_name", name, note=note)
    elif source == "concept":
        why = "one text for all images: name the folder N_WORDS, or give data.trigger"
        path = name.replace("prompt_source", "prompt_path")
        foreign.lacks(path, values.get("text.prompt_path"), why)


def set_samples(foreign: Foreign) -> None:
    """Set prompts, and what the first of the samples says for all."""
    samples = [
        (f"samples[{number}].", one)
        for number, one in enumerate(_named_list(foreign, "samples", "sample_definition_file_name"))
        if one.get("enabled", True) is not False and one.get("prompt")
    ]
    if not samples:
        return
    texts = [str(one["prompt"]) for _, one in samples]
    foreign.set("sampling.prompts", texts, *(f"{where}prompt" for where, _ in samples))
    where = samples[0][0]
    for name, setting in (
        ("negative_prompt", "sampling.negative_prompt"),
        ("seed", "sampling.seed"),
        ("diffusion_steps", "sampling.steps"),
        ("cfg_scale", "sampling.guidance_scale"),
    ):
        if foreign.get(f"{where}{name}", None) is not None:
            foreign.carry(setting, f"{where}{name}")

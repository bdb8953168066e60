"""OneTrainer's concepts and samples: tables in the settings file, or in files that it names.

A concept is a folder of the dataset; samples are prompts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from lora_trainer.importing.folders import ImageFolder, path_of, set_folders
from lora_trainer.importing.rules import THERE, Foreign, carry, flattened


def _named_list(foreign: Foreign, list_key: str, file_key: str) -> list[Mapping[str, Any]]:
    """Return the tables that stand in the file, or in the file that it names."""
    inside = foreign.data.get(list_key)
    if isinstance(inside, list):
        foreign.stay("its contents stand in the file", file_key)
        return [table for table in inside if isinstance(table, Mapping)]
    file_name = foreign.on(file_key)
    if file_name is None:
        return []
    path = path_of(file_name)
    for file in (foreign.beside / path, foreign.beside / path.name, foreign.beside.parent / path):
        try:
            tables = json.loads(file.read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(tables, list) and all(isinstance(table, Mapping) for table in tables):
            foreign.extra |= flattened({list_key: tables})
            foreign.findings.stays(file_key, f"{file.name} is read too")
            return list(tables)
    foreign.findings.lacks(
        file_key, file_name, "no such JSON file here: put it beside the settings file"
    )
    return []


def set_concepts(foreign: Foreign) -> None:
    """Set the concepts as folders of the dataset."""
    findings, folders = foreign.findings, []
    for number, concept in enumerate(_named_list(foreign, "concepts", "concept_file_name")):
        where = f"concepts[{number}]."
        values = flattened(concept)
        everything = {**foreign.values, **foreign.extra}

        def told(name: str, *, where: str = where) -> str:
            return f"{where}{name}"

        kind = str(values.get("type", "STANDARD")).upper()
        if values.get("enabled") is False or kind == "VALIDATION":
            why = (
                "is off there"
                if kind != "VALIDATION"
                else "is validated with only: keep it outside of the DATASET"
            )
            for key in everything:
                if key.startswith(where):
                    findings.stays(key, why)
            continue
        if not isinstance(values.get("path"), str) or not values["path"]:
            continue
        folder = ImageFolder(path=path_of(values["path"]), key=told("path"))
        if kind == "PRIOR_PREDICTION":
            folder.regularisation = True
            findings.set("objective.prior", "base", told("type"))
        elif "type" in values:
            findings.stays(told("type"), "it is trained as all are")
        _concept_fields(foreign, folder, values, where)
        folders.append(folder)
    foreign.stay("is not given", "concepts", "concept_file_name")
    set_folders(foreign, folders)


def _concept_fields(
    foreign: Foreign, folder: ImageFolder, values: Mapping[str, Any], where: str
) -> None:
    findings, folder_settings = foreign.findings, folder.settings

    def stay(why: str, *names: str) -> None:
        for name in names:
            if name in values and f"{where}{name}" not in findings.named:
                findings.stays(f"{where}{name}", why)

    strategy = str(values.get("balancing_strategy", "REPEATS")).upper()
    times = values.get("balancing", 1.0)
    if strategy == "REPEATS" and isinstance(times, int | float) and times >= 1:
        folder_settings["repeats"] = (
            round(times),
            f"{where}balancing" if "balancing" in values else THERE,
        )
        if times != round(times):
            findings.is_nearest(f"{where}balancing", f"{times:g}: {round(times)} repeats")
    elif times not in (1, 1.0):
        why = "give repeats: a share of an epoch or a number of samples has no equivalent"
        findings.lacks(f"{where}balancing", times, why)
    if "repeats" not in folder_settings:
        folder_settings["repeats"] = (1, THERE)
    if values.get("loss_weight", 1.0) not in (1, 1.0):
        folder_settings["weight"] = (values["loss_weight"], f"{where}loss_weight")
    if values.get("image.enable_random_flip"):
        folder_settings["flip"] = (True, f"{where}image.enable_random_flip")
    if values.get("include_subdirectories"):
        findings.stays(f"{where}include_subdirectories", "subfolders are read, two levels deep")
    if values.get("image.enable_resolution_override"):
        why = "all images are trained at data.resolution"
        findings.lacks(
            f"{where}image.resolution_override", values.get("image.resolution_override"), why
        )
    if values.get("text.enable_tag_shuffling"):
        folder_settings["shuffle_tags"] = (True, f"{where}text.enable_tag_shuffling")
        keep = values.get("text.keep_tags_count", 1)
        folder_settings["keep_tokens"] = (
            keep,
            f"{where}text.keep_tags_count" if "text.keep_tags_count" in values else THERE,
        )
        if values.get("text.tag_delimiter", ",") != ",":
            findings.lacks(
                f"{where}text.tag_delimiter",
                values["text.tag_delimiter"],
                "tags are parted by commas",
            )
    if values.get("text.tag_dropout_enable"):
        mode, name = (
            str(values.get("text.tag_dropout_mode", "FULL")),
            f"{where}text.tag_dropout_probability",
        )
        field = "caption_dropout" if mode == "FULL" else "tag_dropout"
        folder_settings[field] = (values.get("text.tag_dropout_probability", 0.0), name)
    source = str(values.get("text.prompt_source", "sample"))
    if source == "filename":
        note = "an image with a caption file keeps that"
        findings.set("data.caption_fallback", "file_name", f"{where}text.prompt_source", note=note)
    elif source == "concept":
        why = "one text for all images: name the folder N_WORDS, or give data.trigger"
        findings.lacks(f"{where}text.prompt_path", values.get("text.prompt_path"), why)
    stay("is off there, or as it is here", *values)


def set_samples(foreign: Foreign) -> None:
    """Set prompts, and what the first of the samples says for all."""
    findings = foreign.findings
    samples = [one for one in _named_list(foreign, "samples", "sample_definition_file_name")
               if one.get("enabled", True) is not False and one.get("prompt")]  # fmt: skip
    if samples:
        findings.set("sampling.prompts", [str(one["prompt"]) for one in samples], "samples")
        first = samples[0]
        for name, key in (("negative_prompt", "sampling.negative_prompt"), ("seed", "sampling.seed"),
                          ("diffusion_steps", "sampling.steps"), ("cfg_scale", "sampling.guidance_scale")):  # fmt: skip
            if first.get(name) not in (None, ""):
                carry(findings, key, f"samples[0].{name}", first[name])
    everything = {**foreign.values, **foreign.extra}
    for key in everything:
        if key.startswith("samples[") and key not in findings.named and key.rpartition(".")[2] in (
            "enabled", "prompt", "negative_prompt", "seed", "diffusion_steps", "cfg_scale",
        ):  # fmt: skip
            findings.stays(key, "is in sampling.prompts, or the first sample says it for all")
    foreign.stay("is not given", "samples", "sample_definition_file_name")

"""The words of sliders in the files of other trainers: sd-scripts' prompts for LECO, ai-toolkit's slider jobs.

A row of sd-scripts (`train_leco.py`, 063ef10) says which prompts are compared and whether the target gets more of the
first (`enhance`) or less (`erase`); several rows of a slider are one direction here. A job of ai-toolkit (27a03a9) of
type `concept_slider` or `slider` has the words in its table `slider`. What these files say beside the words, and what
is done otherwise here, is named in notes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
# Keys of other trainers that say how a slider is trained, and the setting that says it here ("" for none).
_TRAINING = {
    "guidance_scale": "slider.guidance",
    "guidance_strength": "slider.guidance",
    "anchor_strength": "slider.keep_weight",
    "resolution": "data.resolution",
    "resolutions": "data.resolution",
    "batch_size": "train.batch_size",
    "dynamic_resolution": "",
    "dynamic_crops": "",
    "shuffle": "",
    "neutral": "",
    "neutrals": "",
    "neutral_prompt_file": "",
    "prompt_file": "",
}
_WITHOUT_EFFECT: tuple[Any, ...] = (None, "", [], False)


def words_of_others(content: Mapping[str, Any]) -> tuple[str, list[Row], list[str]] | None:
    """Return the trainer, the tables of a slider as this program writes them, and notes; None for other content.

    The values are not checked here.
    """
    job = _slider_of_job(content)
    if job is not None:
        return ("ai-toolkit", *_of_tables(_job_rows(job), job))
    prompts = content.get("prompts")
    inner = content.get("slider", content)
    if not isinstance(prompts, list) and isinstance(inner, Mapping):
        prompts = inner.get("targets", [inner] if "target_class" in inner else None)
    if not isinstance(prompts, list) or not all(isinstance(row, Mapping) for row in prompts):
        return None
    tables = list(prompts)
    if not tables or not all("target" in row or "target_class" in row for row in tables):
        return None
    return ("sd-scripts", *_of_tables(tables, inner if isinstance(inner, Mapping) else {}))


def _slider_of_job(content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the table `slider` of ai-toolkit's one process."""
    config = content.get("config")
    processes = config.get("process") if isinstance(config, Mapping) else None
    first = processes[0] if isinstance(processes, list) and processes else None
    slider = first.get("slider") if isinstance(first, Mapping) else None
    return slider if isinstance(slider, Mapping) else None


def _job_rows(slider: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the targets of a job, each with the anchors as prompts to keep."""
    targets = slider.get("targets")
    if isinstance(targets, list):
        anchors = [each for each in slider.get("anchors") or () if isinstance(each, Mapping)]
        keep = [each["prompt"] for each in anchors if each.get("prompt")]
        return [{**each, "keep": keep} for each in targets if isinstance(each, Mapping)]
    anchor = slider.get("anchor_class")
    return [
        {
            "target_class": slider.get("target_class", ""),
            "positive": slider.get("positive_prompt", ""),
            "negative": slider.get("negative_prompt", ""),
            "keep": [anchor] if anchor else [],
        }
    ]


def _of_tables(
    tables: Sequence[Mapping[str, Any]], around: Mapping[str, Any]
) -> tuple[list[Row], list[str]]:
    rows = [_row(table) for table in tables]
    return rows, sorted(set(_notes(tables, around)))


def _row(table: Mapping[str, Any]) -> Row:
    if "target_class" in table:
        target, more, less = (
            table.get(name) or "" for name in ("target_class", "positive", "negative")
        )
    else:
        target = table.get("target") or ""
        more, less = table.get("positive") or target, table.get("unconditional") or ""
        is_less = table.get("action", "erase") == "erase"
        multiplier = table.get("multiplier", 1.0)
        if is_less != (isinstance(multiplier, int | float) and multiplier < 0):
            more, less = less, more
    row: Row = {"target": target, "more": more, "less": less, "keep": table.get("keep") or []}
    return {**row, **({"weight": table["weight"]} if "weight" in table else {})}


def _notes(tables: Sequence[Mapping[str, Any]], around: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the file says and is not read from it."""
    for table in (*tables, around):
        for key, setting in _TRAINING.items():
            value = table.get(key)
            if any(value is each or value == each for each in _WITHOUT_EFFECT):
                continue
            how = f"is the setting {setting}" if setting else "has no equivalent here"
            yield f"{key} = {value} {how}"

"""Kohya's dataset files: `[general]`, `[[datasets]]`, `[[datasets.subsets]]`, the inner key wins.

Subsets become subfolders of the one folder they lie in, what they have of their own `data.folders`.
Where there is one subset only, its folder is the dataset.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lora_trainer.config import OWN_FOLDER
from lora_trainer.errors import RequestError
from lora_trainer.importing.findings import Findings
from lora_trainer.importing.training_keys import NOTHING_TO_SET, WITHOUT_EQUIVALENT

SUBSET_SAME: Mapping[str, str] = {
    "num_repeats": "repeats",
    "flip_aug": "flip",
    "shuffle_caption": "shuffle_tags",
    "keep_tokens": "keep_tokens",
    "keep_tokens_separator": "keep_tokens_separator",
    "secondary_separator": "secondary_separator",
    "caption_prefix": "caption_prefix",
    "caption_suffix": "caption_suffix",
    "caption_dropout_rate": "caption_dropout",
    "caption_dropout_every_n_epochs": "caption_dropout_every_epochs",
    "caption_tag_dropout_rate": "tag_dropout",
    "enable_wildcard": "wildcards",
}
"""Kohya's key -> ours in `data` and in `data.folders.NAME`."""
CLASS_TOKENS = (
    "is used there for pictures without a caption file; name the folder N_WORDS for that, or give "
    "data.trigger, which also goes into captions that lack it"
)


@dataclass(frozen=True, kw_only=True)
class Subset:
    """One subset with all that it inherits; `names` are its keys as they are to be told."""

    folder: PurePath
    values: Mapping[str, Any]
    names: Mapping[str, str]


def is_dataset(data: Mapping[str, Any]) -> bool:
    """Say whether a file is a dataset file."""
    return "datasets" in data


def read_dataset(data: Mapping[str, Any], found: Findings) -> None:
    """Add what a dataset file says; raises RequestError for subsets that lie in no common folder."""
    subsets, datasets = [], _tables(data, "datasets")
    for key in data.keys() - {"general", "datasets"}:
        found.unknown.append(key)
    for number, dataset in enumerate(datasets):
        shared, names = _merged(
            (_table(data, "general"), "general"), (dataset, f"datasets[{number}]")
        )
        shared.pop("subsets", None)
        if number == 0:
            _read_shared(shared, names, found)
        else:
            _read_further(dataset, number, datasets[0], found)
        for place, own in enumerate(_tables(dataset, "subsets")):
            where = f"datasets[{number}].subsets[{place}]"
            subsets.append(_subset(shared, names, own, where))
    _read_subsets(subsets, found)


def read_size(value: Any) -> int | None:
    """Return the side of the square with the area of a size: 512, "512", "512,768", [512, 768]."""
    parts = value.split(",") if isinstance(value, str) else value
    try:
        sides = [int(part) for part in parts] if isinstance(parts, list) else [int(parts)]
    except (TypeError, ValueError):
        return None
    return None if not sides or min(sides) < 1 else round(math.prod(sides) ** (1 / len(sides)))


def read_resolution(value: Any, name: str, found: Findings) -> None:
    """Set `data.resolution`, which is a side of a square."""
    side_px = read_size(value)
    if side_px is None:
        found.lacks(name, value, "is no size")
    else:
        found.set("data.resolution", side_px, name)


def read_caption_keys(
    values: Mapping[str, Any], names: Mapping[str, str], target: str, found: Findings
) -> set[str]:
    """Set what subsets can say under `target` (`data` or `data.folders.NAME`); return the keys done."""
    done = set()
    for key, ours in SUBSET_SAME.items():
        if key in values:
            done.add(key)
            if values[key] is not None and (values[key] != "" or "separator" not in key):
                found.set(f"{target}.{ours}", values[key], names[key])
            else:
                found.stays(names[key], "is not given")
    if values.get("enable_wildcard"):  # there it also draws one of a file's lines
        found.set(f"{target}.caption_lines", "one", names["enable_wildcard"])
    touched = values.get("shuffle_caption") or values.get("caption_tag_dropout_rate")
    if touched and "keep_tokens" not in values:
        found.set(f"{target}.keep_tokens", 0, "the default there")
    for key in ("caption_prefix", "caption_suffix"):
        if touched and values.get(key):
            why = "stays where it is; there its tags are shuffled and left out with the others"
            found.without_equivalent[f"{names[key]} among the tags"] = why
    return done


def _read_shared(values: Mapping[str, Any], names: Mapping[str, str], found: Findings) -> None:
    """Read what is of a dataset and not of its subsets."""
    if "resolution" in values:
        read_resolution(values["resolution"], names["resolution"], found)
    if "batch_size" in values:
        found.set("train.batch_size", values["batch_size"], names["batch_size"])
    source = names.get("enable_bucket", "the default there")
    found.set("data.buckets", bool(values.get("enable_bucket", False)), source)
    if "validation_split" in values:
        name = names["validation_split"]
        found.set("data.validation_fraction", values["validation_split"], name)
    own = {"resolution", "batch_size", "enable_bucket", "validation_split"}
    for key in values.keys() - own:
        if key not in SUBSET_KEYS:
            _read_other(key, values[key], names[key], found)


def _read_further(
    dataset: Mapping[str, Any], number: int, first: Mapping[str, Any], found: Findings
) -> None:
    """Read what is of a further dataset; the same pictures at another resolution are trained at both."""
    done = {"subsets"}
    side_px = read_size(dataset.get("resolution"))
    if side_px is not None and _folders(dataset) == _folders(first):
        known = found.values.get("data.more_resolutions", [])
        name = f"datasets[{number}].resolution"
        found.set("data.more_resolutions", [*known, side_px], name)
        done.add("resolution")
    for key in dataset.keys() - done - SUBSET_KEYS:
        why = "all pictures are trained as the first of the datasets says"
        found.lacks(f"datasets[{number}].{key}", dataset[key], why)


def _folders(dataset: Mapping[str, Any]) -> set[str]:
    return {str(subset.get("image_dir")) for subset in _tables(dataset, "subsets")}


def _read_subsets(subsets: Sequence[Subset], found: Findings) -> None:
    if not subsets:
        raise RequestError("the file names no subset", fix="give [[datasets.subsets]] an image_dir")
    different = _without_repetitions(subsets, found)
    parent, folders = _common(different)
    found.dataset = str(parent)
    extensions = dict.fromkeys(
        str(subset.values["caption_extension"])
        for subset in different
        if "caption_extension" in subset.values
    )
    if extensions:
        found.set("data.caption_extensions", list(extensions), "caption_extension")
    for subset, folder in zip(different, folders, strict=True):
        alone = len(different) == 1
        target = "data" if alone else f"data.folders.{folder}"
        if "num_repeats" not in subset.values:
            # The name of a folder means nothing there beside a dataset file.
            found.set(f"{target}.repeats", 1, "the default there")
        done = read_caption_keys(subset.values, subset.names, target, found)
        done |= _read_kind(subset, target, found)
        for key in subset.values.keys() - done - {"image_dir", "caption_extension"}:
            _read_other(key, subset.values[key], subset.names[key], found)


def _read_kind(subset: Subset, target: str, found: Findings) -> set[str]:
    """Set what kind of pictures a subset has, and whether their transparency masks them."""
    values, names = subset.values, subset.names
    if values.get("alpha_mask"):
        found.set("data.masks", "alpha", names["alpha_mask"])
        found.set("data.mask_background", 0.0, names["alpha_mask"])
    elif "alpha_mask" in values:
        found.stays(names["alpha_mask"], "is off")
    if values.get("is_reg") and target != "data":
        found.set(f"{target}.regularisation", True, names["is_reg"])
    elif "is_reg" in values:
        found.lacks(names["is_reg"], values["is_reg"], "there is nothing else to learn")
    return {"alpha_mask", "is_reg"}


def _read_other(key: str, value: Any, name: str, found: Findings) -> None:
    """Say what becomes of a key that is no setting here."""
    if key == "caption_separator":
        found.lacks(name, value if value != "," else None, "tags are separated by commas")
    elif key == "class_tokens":
        found.lacks(name, value, CLASS_TOKENS)
    elif key in NOTHING_TO_SET:
        found.stays(name, NOTHING_TO_SET[key])
    elif key in WITHOUT_EQUIVALENT:
        found.lacks(name, value, WITHOUT_EQUIVALENT[key])
    else:
        found.unknown.append(name)


SUBSET_KEYS = frozenset(
    {
        *SUBSET_SAME,
        "is_reg",
        "alpha_mask",
        "image_dir",
        "caption_extension",
        "caption_separator",
        "class_tokens",
        "color_aug",
        "random_crop",
        "random_crop_padding_percent",
        "face_crop_aug_range",
        "token_warmup_min",
        "token_warmup_step",
        "cache_info",
        "custom_attributes",
        "conditioning_data_dir",
        "metadata_file",
        "resize_interpolation",
    }
)
"""What a subset may say, or its dataset and `general` for it."""


def _subset(
    shared: Mapping[str, Any], names: Mapping[str, str], own: Mapping[str, Any], where: str
) -> Subset:
    inherited = {key: value for key, value in shared.items() if key in SUBSET_KEYS}
    merged = {**inherited, **own}
    folder = merged.get("image_dir")
    if not isinstance(folder, str) or not folder:
        raise RequestError(f"{where} names no folder of pictures", fix="give it an image_dir")
    return Subset(
        folder=PurePath(folder),
        values=merged,
        names={**names, **{key: f"{where}.{key}" for key in own}},
    )


def _without_repetitions(subsets: Sequence[Subset], found: Findings) -> list[Subset]:
    different: dict[PurePath, Subset] = {}
    for subset in subsets:
        known = different.setdefault(subset.folder, subset)
        if known is not subset:
            found.stays(subset.names["image_dir"], "is named before; its settings there count")
    return list(different.values())


def _common(subsets: Sequence[Subset]) -> tuple[PurePath, list[str]]:
    """Return the dataset folder, and the name in `data.folders` of each subset."""
    folders = [subset.folder for subset in subsets]
    if len(folders) == 1:
        return folders[0], [OWN_FOLDER]
    for root in dict.fromkeys((folders[0].parent, *folders)):
        if all(folder == root or folder.parent == root for folder in folders):
            return root, [OWN_FOLDER if folder == root else folder.name for folder in folders]
    places = ", ".join(dict.fromkeys(str(folder.parent) for folder in folders))
    raise RequestError(
        f"the subsets lie in different folders ({places}), a dataset is one folder",
        fix="make one folder, move their folders or links to them into it, and name these as image_dir",
    )


def _merged(
    *layers: tuple[Mapping[str, Any], str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values, later ones win, and where each is from."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for layer, where in layers:
        values |= layer
        names |= {key: f"{where}.{key}" for key in layer}
    return values, names


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, dict):
        raise RequestError(f"{key} is no table", fix=f"write [{key}] above its keys")
    return value


def _tables(data: Mapping[str, Any], key: str) -> list[Mapping[str, Any]]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, dict) for table in value):
        raise RequestError(f"{key} is no list of tables", fix=f"write [[{key}]] above each")
    return value

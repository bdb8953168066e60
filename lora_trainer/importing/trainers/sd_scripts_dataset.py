"""sd-scripts' dataset files: `[general]`, `[[datasets]]`, `[[datasets.subsets]]`, the inner key wins.

Subsets become subfolders of the one folder they lie in, what they have of their own `data.folders`. Where
there is one subset only, its folder is the dataset. The same options of a training file are read here too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.foreign import THERE, Foreign, Sourced
from lora_trainer.importing.rules import flattened, rules_of, table_of

SUBSET_FIELDS: Mapping[str, str] = table_of("sd_scripts_dataset")["fields"]
"""Their key -> ours in `data` and in `data.folders.NAME`."""
_CLASS_TOKENS = (
    "is used there for images without a caption file; name the folder N_WORDS for that, or give data.trigger, "
    "which also goes into captions that lack it"
)
_MASKS_BESIDE = "masks belong in a folder masks/ beside the images, under their names"


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file of sd-scripts, as other trainers' do not name folders so."""
    datasets = shared.tables_of(data.get("datasets"))
    keys = {key for one in datasets for key in one}
    is_one = "subsets" in keys or (keys and keys <= _keys("datasets[]."))
    return flattened(data) if is_one else None


def _keys(prefix: str) -> set[str]:
    """Return the keys of the tables of a dataset file under a prefix."""
    rules = rules_of("sd_scripts_dataset")
    names = {key.removeprefix(prefix) for key in rules if key.startswith(prefix)}
    return {name for name in names if "." not in name}


def read_training_options(foreign: Foreign) -> None:
    """Read a training file's options about the dataset, and the dataset file that it names."""
    values = shared.FolderTable((foreign.values, ""))
    has_file = foreign.on("dataset_config") is not None
    data = shared.named_file(foreign, "dataset_config", tomllib.loads, flat_dataset)
    if data is not None:
        read_dataset(foreign, data)
    if foreign.on("train_data_dir") and foreign.dataset is None:
        foreign.dataset = str(shared.path_of(values["train_data_dir"]))
        foreign.stays("train_data_dir", "is the DATASET of the command")
    if not has_file and "data.buckets" not in foreign.settings:
        for field, (value, key) in caption_fields(foreign, values).items():
            if key == THERE or field == "caption_lines":
                foreign.set(f"data.{field}", value, key)
            else:
                foreign.carry(f"data.{field}", key, value)
        foreign.set("data.buckets", foreign.flag("enable_bucket"), "enable_bucket")
        extension = foreign.first_on("caption_extension", "caption_extention")
        if extension:
            shared.add_extension(foreign, values[extension], extension)
        _set_held_out(foreign, values)
    for name, kind in (("masked_loss", "files"), ("alpha_mask", "alpha")):
        if foreign.on(name):
            shared.set_masks(foreign, kind, name, background=(0.0, name))
    if foreign.on("conditioning_data_dir"):
        foreign.lacks("conditioning_data_dir", values["conditioning_data_dir"], _MASKS_BESIDE)
    if foreign.on("reg_data_dir"):
        folder = str(shared.path_of(values["reg_data_dir"]))
        foreign.set("data.regularisation_dir", folder, "reg_data_dir")
    weight = foreign.number("prior_loss_weight")
    if weight and weight > 0:
        foreign.carry("objective.prior_weight", "prior_loss_weight")
    if foreign.on("weighted_captions") and not foreign.is_flow:
        foreign.set("data.emphasis", True, "weighted_captions")


def read_dataset(foreign: Foreign, data: Mapping[str, Any] | None = None) -> None:
    """Read a dataset file; raises RequestError where it names no folder of images."""
    tables = foreign.data if data is None else data
    folders: list[shared.ImageFolder] = []
    sizes: list[Sourced] = []
    general = tables.get("general", {})
    if not isinstance(general, Mapping):
        raise RequestError("general is no table", fix="write [general] above its keys")
    datasets = _tables(tables, "datasets")
    dataset_keys, subset_keys = _keys("datasets[]."), _keys("datasets[].subsets[].")
    # sd-scripts' documentation has examples with keys above all tables.
    top = {key: value for key, value in tables.items() if key in dataset_keys}
    for number, dataset in enumerate(datasets):
        where = f"datasets[{number}]."
        layers = [(top, ""), (general, "general."), (dataset, where)]
        values = shared.FolderTable(*layers)
        is_same = _image_dirs(dataset) == _image_dirs(datasets[0])
        if "resolution" in (dataset if number else values) and is_same:
            sizes.append(values.sourced("resolution"))
        if number == 0:
            _read_shared(foreign, values)
        for key in dataset_keys - subset_keys - {"subsets", *(["resolution"] if is_same else [])}:
            if not number or key not in dataset:
                continue
            if dataset[key] == datasets[0].get(key):
                foreign.stays(f"{where}{key}", "the first of the datasets says the same")
            else:
                why = "all images are trained as the first of the datasets says"
                foreign.lacks(f"{where}{key}", dataset[key], why)
        layers = [
            ({key: value for key, value in layer.items() if key in subset_keys}, prefix)
            for layer, prefix in layers
        ]
        for index, subset in enumerate(_tables(dataset, "subsets")):
            inner = f"{where}subsets[{index}]."
            folder = _subset(foreign, shared.FolderTable(*layers, (subset, inner)), inner)
            if folder is not None:
                folders.append(folder)
    if not folders:
        raise RequestError(
            "the file names no subset to train", fix="give [[datasets.subsets]] an image_dir"
        )
    shared.set_sizes(foreign, sizes)
    shared.set_folders(foreign, folders)
    if "data.validation_fraction" not in foreign.settings:
        foreign.set("data.validation_fraction", 0.0)


def caption_fields(foreign: Foreign, values: shared.FolderTable) -> dict[str, Sourced]:
    """Return what is done to captions and images, by field of ours."""
    fields = {
        field: values.sourced(key)
        for key, field in SUBSET_FIELDS.items()
        if values.get(key) not in (None, "")
    }
    if values.get("enable_wildcard"):  # there it also draws one of a file's lines
        fields["caption_lines"] = ("one", values.name("enable_wildcard"))
    touched = values.get("shuffle_caption") or values.get("caption_tag_dropout_rate")
    if touched and "keep_tokens" not in fields:
        fields["keep_tokens"] = (0, THERE)
    mark = str(values.get("keep_tokens_separator") or "")
    for key in ("caption_prefix", "caption_suffix"):
        text, source = values.get(key), values.name(key)
        if not isinstance(text, str) or not text:
            continue
        if mark and mark in text:
            # There the mark in it says that it is not shuffled; here it never is, and the mark would stay.
            fields[SUBSET_FIELDS[key]] = (" ".join(text.replace(mark, " ").split()), source)
            how = f"{text}: without the mark {mark}, as it is never shuffled here"
            foreign.is_nearest(source, how)
            if fields.get("keep_tokens", (1, ""))[0]:
                fields["keep_tokens"] = (0, values.name("keep_tokens_separator"))
        elif touched:
            how = "stays where it is; there its tags are shuffled with the others"
            foreign.is_nearest(source, how)
    return fields


def _read_shared(foreign: Foreign, values: shared.FolderTable) -> None:
    """Read the keys of a dataset that its subsets do not have."""
    if values.get("batch_size") is not None:
        foreign.carry("train.batch_size", values.name("batch_size"), values["batch_size"])
    buckets = bool(values.get("enable_bucket", False))
    foreign.set("data.buckets", buckets, values.name("enable_bucket"))
    if values.get("prior_loss_weight"):
        weight, name = values.sourced("prior_loss_weight")
        foreign.carry("objective.prior_weight", name, weight)
    _set_held_out(foreign, values)


def _set_held_out(foreign: Foreign, values: shared.FolderTable) -> None:
    share, name = values.sourced("validation_split")
    if isinstance(share, bool) or not isinstance(share, int | float):
        return
    if 0 < share <= 0.5:
        foreign.set("data.validation_fraction", float(share), name)
    elif share > 0.5:
        foreign.lacks(name, share, "at most half of the images can be held out")


def _image_dirs(dataset: Mapping[str, Any]) -> set[str]:
    return {str(subset.get("image_dir")) for subset in _tables(dataset, "subsets")}


def _subset(foreign: Foreign, values: shared.FolderTable, where: str) -> shared.ImageFolder | None:
    """Return a subset as a folder, None for one that is not trained on."""
    key = next((key for key in ("image_dir", "metadata_file") if values.get(key)), "")
    if not isinstance(values.get(key), str):
        raise RequestError(
            f"{where.removesuffix('.')} names no folder of images", fix="give it an image_dir"
        )
    path = shared.path_of(values[key])
    folder = shared.ImageFolder(
        path=path if key == "image_dir" else path.parent, key=values.name(key)
    )
    if values.get("conditioning_data_dir"):
        why = "control images are not trained; masks belong in a folder masks/ beside the images"
        control, name = values.sourced("conditioning_data_dir")
        foreign.lacks(name, control, why)
    share, name = values.sourced("validation_split")
    if name.startswith(where) and share == 1.0:
        why = "is validated with only and not trained: keep it outside of the DATASET"
        foreign.lacks(folder.key, str(folder.path), why)
        foreign.stays(name, "the folder is not trained")
        return None
    # The name of a folder means nothing there beside a dataset file.
    folder.settings = {"repeats": (1, THERE), **caption_fields(foreign, values)}
    if values.get("alpha_mask"):
        name = values.name("alpha_mask")
        shared.set_masks(foreign, "alpha", name, background=(0.0, name))
    folder.regularisation = bool(values.get("is_reg"))
    shared.add_extension(foreign, *values.sourced("caption_extension"))
    if values.get("class_tokens"):
        foreign.lacks(values.name("class_tokens"), values["class_tokens"], _CLASS_TOKENS)
    return folder


def _tables(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        raise RequestError(f"{key} is no list of tables", fix=f"write [[{key}]] above each")
    return value

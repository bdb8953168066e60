"""sd-scripts' dataset files: `[general]`, `[[datasets]]`, `[[datasets.subsets]]`, the inner key wins.

Subsets become subfolders of the one folder they lie in, what they have of their own `data.folders`. Where
there is one subset only, its folder is the dataset. The same options of a training file are read here too.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing.folders import (
    ImageFolder,
    named_file,
    path_of,
    read_size,
    set_folders,
    set_resolutions,
)
from lora_trainer.importing.rules import (
    THERE,
    TOGETHER,
    Foreign,
    Idle,
    Lacks,
    Rule,
    carry,
    each,
    flattened,
    under,
)

SUBSET_FIELDS: Mapping[str, str] = {
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
"""Their key -> ours in `data` and in `data.folders.NAME`."""
_MARKS = ("keep_tokens_separator", "secondary_separator")
_AUGMENTED = Lacks("images are only mirrored")
_SUBSET: Mapping[str, Rule] = {
    **each(
        " ".join(SUBSET_FIELDS)
        + " image_dir is_reg alpha_mask caption_extension class_tokens validation_split token_warmup_min "
        "conditioning_data_dir metadata_file",
        TOGETHER,
    ),
    "caption_separator": Lacks("tags are parted by commas", off=(",",)),
    **each("color_aug random_crop face_crop_aug_range", _AUGMENTED),
    "random_crop_padding_percent": Lacks("images are only mirrored", off=(0.05,)),
    "token_warmup_step": Lacks("all tags are there from the first step"),
    "cache_info": Idle("what is known of images is always kept"),
    "custom_attributes": Lacks("has no meaning here"),
    "resize_interpolation": Lacks(
        "images are always resized with Lanczos", off=("lanczos", "area")
    ),
    "validation_seed": Lacks("images are held out by content and train.seed"),
}
_DATASET: Mapping[str, Rule] = {
    **_SUBSET,
    **each(
        "resolution batch_size enable_bucket min_bucket_reso max_bucket_reso prior_loss_weight",
        TOGETHER,
    ),
    "bucket_no_upscale": Lacks("small images are enlarged to their bucket, and `check` names them"),
    "bucket_reso_steps": Idle("the base says in which steps the sides of buckets go"),
    "network_multiplier": Lacks("the adapter is trained at strength 1", off=(1, 1.0)),
    "debug_dataset": Idle("is about that program, not about the result"),
    "max_token_length": TOGETHER,
}
KEYS: Mapping[str, Rule] = {
    **_DATASET,
    **under("general.", _DATASET),
    **under("datasets[].", _DATASET),
    **under("datasets[].subsets[].", _SUBSET),
    **each("datasets general datasets[].subsets", TOGETHER),
}
_CLASS_TOKENS = (
    "is used there for images without a caption file; name the folder N_WORDS for that, or give data.trigger, "
    "which also goes into captions that lack it"
)


def is_dataset(data: Mapping[str, Any]) -> bool:
    """Say whether a file is a dataset file of sd-scripts, as other trainers' do not name folders so."""
    datasets = data.get("datasets")
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) for one in datasets):
        return False
    return bool(datasets) and any("subsets" in one for one in datasets) or _is_general(data)


def _is_general(data: Mapping[str, Any]) -> bool:
    keys = {key for one in data.get("datasets", ()) for key in one}
    return bool(keys) and keys <= set(_DATASET) and not keys & {"image_directory", "folder_path"}


def read_training_options(foreign: Foreign) -> None:
    """Read a training file's options about the dataset, and the dataset file that it names."""
    findings, values = foreign.findings, foreign.values
    file_name = foreign.on("dataset_config")
    if file_name is not None:
        _read_named(foreign)
    foreign.stay("is not given", "dataset_config")
    names = {name: name for name in values}
    if foreign.on("train_data_dir") and findings.dataset is None:
        findings.dataset = str(path_of(values["train_data_dir"]))
        findings.stays("train_data_dir", "is the DATASET of the command")
    foreign.stay("is not given, or the dataset file says more", "train_data_dir")
    if file_name is None and "data.buckets" not in findings.values:
        subset_values = {name: values[name] for name in SUBSET_FIELDS if name in values}
        for field, (value, key) in caption_fields(foreign, subset_values, names).items():
            if key == THERE:
                findings.set(f"data.{field}", value, note=THERE)
            elif field == "caption_lines":
                findings.set("data.caption_lines", value, key)
            else:
                carry(findings, f"data.{field}", key, value)
        source = [name for name in ("enable_bucket",) if name in values]
        findings.set(
            "data.buckets", foreign.flag("enable_bucket"), *source, note="" if source else THERE
        )
        _set_bounds(foreign, values, names)
        extension = next(
            (n for n in ("caption_extension", "caption_extention") if foreign.on(n)), None
        )
        if extension:
            findings.set("data.caption_extensions", [str(values[extension])], extension)
        _set_held_out(foreign, values, names)
    _set_masks(foreign)
    why = "the dataset file says more" if file_name is not None else "is not given"
    foreign.stay(why, *SUBSET_FIELDS, "enable_bucket", "caption_extension", "caption_extention",
                 "min_bucket_reso", "max_bucket_reso", "validation_split", "token_warmup_min")  # fmt: skip
    _set_regularisation(foreign)
    foreign.stay("repeats are in the names of folders", "dataset_repeats", "num_repeats")
    foreign.stay(
        "captions in metadata.jsonl are read from the dataset folder", "in_json", "metadata_file"
    )
    if foreign.on("weighted_captions") and not foreign.is_flow:
        findings.set("data.emphasis", True, "weighted_captions")
    foreign.stay("is off there, or of no use to this base", "weighted_captions")


def read_dataset(foreign: Foreign, data: Mapping[str, Any] | None = None) -> None:
    """Read a dataset file; raises RequestError where it names no folder of images."""
    findings, tables = foreign.findings, foreign.data if data is None else data
    folders: list[ImageFolder] = []
    general, datasets = _table(tables, "general"), _tables(tables, "datasets")
    # sd-scripts' documentation has examples with keys above all tables.
    top = {key: value for key, value in tables.items() if key in _DATASET}
    for number, dataset in enumerate(datasets):
        where = f"datasets[{number}]"
        values, names = _merged((top, ""), (general, "general"), (dataset, where))
        values.pop("subsets", None)
        if number == 0:
            _read_shared(foreign, values, names)
        else:
            _read_further(foreign, dataset, where, datasets[0])
        for index, subset in enumerate(_tables(dataset, "subsets")):
            inner = f"{where}.subsets[{index}]"
            inherited = {key: value for key, value in values.items() if key in _SUBSET}
            folder = _subset(
                foreign,
                {**inherited, **subset},
                {**names, **{k: f"{inner}.{k}" for k in subset}},
                inner,
            )
            if folder is not None:
                folders.append(folder)
    if not folders:
        raise RequestError(
            "the file names no subset to train", fix="give [[datasets.subsets]] an image_dir"
        )
    set_folders(foreign, folders)
    if "data.validation_fraction" not in findings.values:
        findings.set("data.validation_fraction", 0.0, note=THERE)


def caption_fields(
    foreign: Foreign, values: Mapping[str, Any], names: Mapping[str, str]
) -> dict[str, tuple[Any, str]]:
    """Return what is done to captions and images, as (value, key) by field of ours."""
    findings = foreign.findings
    fields: dict[str, tuple[Any, str]] = {}
    for key, field in SUBSET_FIELDS.items():
        value = values.get(key)
        if value in (None, ""):
            foreign.stay("is not given", names.get(key, key))
        else:
            fields[field] = (value, names[key])
    if values.get("enable_wildcard"):  # there it also draws one of a file's lines
        fields["caption_lines"] = ("one", names["enable_wildcard"])
    touched = values.get("shuffle_caption") or values.get("caption_tag_dropout_rate")
    if touched and "keep_tokens" not in fields:
        fields["keep_tokens"] = (0, THERE)
    mark = values.get("keep_tokens_separator")
    for key in ("caption_prefix", "caption_suffix"):
        text = values.get(key)
        if not isinstance(text, str) or not text:
            continue
        field, source = SUBSET_FIELDS[key], names[key]
        if mark and str(mark) in text:
            # There the mark in it says that it is not shuffled; here it never is, and the mark would stay.
            fields[field] = (" ".join(text.replace(str(mark), " ").split()), source)
            findings.is_nearest(
                source, f"{text}: without the mark {mark}, as it is never shuffled here"
            )
        elif touched:
            findings.is_nearest(
                source, "stays where it is; there its tags are shuffled with the others"
            )
    if (
        fields.get("keep_tokens", (1, ""))[0]
        and mark
        and any(str(mark) in str(values.get(key)) for key in ("caption_prefix", "caption_suffix"))
    ):
        fields["keep_tokens"] = (0, names["keep_tokens_separator"])
    return fields


def set_size(foreign: Foreign, name: str, value: Any) -> bool:
    """Set `data.resolution` from a size; return whether it is one."""
    try:
        size = read_size(value)
    except ValueError as error:
        foreign.findings.lacks(name, value, str(error))
        return False
    set_resolutions(foreign, [size], name)
    return True


def _read_named(foreign: Foreign) -> None:
    """Add the dataset file that a training file names, if it is there."""
    data = named_file(foreign, "dataset_config", tomllib.loads, is_dataset)
    if data is not None:
        before, foreign.data = foreign.data, data
        foreign.extra |= flattened(data)
        read_dataset(foreign, data)
        foreign.data = before


def _read_shared(foreign: Foreign, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Read what is of a dataset and not of its subsets."""
    findings = foreign.findings
    if "resolution" in values:
        set_size(foreign, names["resolution"], values["resolution"])
    if values.get("batch_size") is not None:
        carry(findings, "train.batch_size", names["batch_size"], values["batch_size"])
    source = [names["enable_bucket"]] if "enable_bucket" in names else []
    on = bool(values.get("enable_bucket", False))
    findings.set("data.buckets", on, *source, note="" if source else THERE)
    _set_bounds(foreign, values, names)
    if values.get("prior_loss_weight"):
        carry(
            findings,
            "objective.prior_weight",
            names["prior_loss_weight"],
            values["prior_loss_weight"],
        )
    _set_held_out(foreign, values, names)


def _set_bounds(foreign: Foreign, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    for key in ("min_bucket_reso", "max_bucket_reso"):
        if key in values and values[key] and foreign.findings.values.get("data.buckets"):
            why = "a bucket has the area of data.resolution, and data.max_aspect limits its sides"
            foreign.findings.stays(names[key], why)
        elif key in values:
            foreign.findings.stays(names[key], "buckets are off")


def _set_held_out(foreign: Foreign, values: Mapping[str, Any], names: Mapping[str, str]) -> None:
    share, name = values.get("validation_split"), names.get("validation_split", "")
    if isinstance(share, int | float) and not isinstance(share, bool) and 0 < share <= 0.5:
        foreign.findings.set("data.validation_fraction", float(share), name)
    elif "validation_split" in values and isinstance(share, int | float) and share > 0.5:
        foreign.findings.lacks(name, share, "at most half of the images can be held out")
    elif "validation_split" in values:
        foreign.findings.stays(name, "is off there")


def _read_further(
    foreign: Foreign, dataset: Mapping[str, Any], where: str, first: Mapping[str, Any]
) -> None:
    """Read what is of a further dataset; the same images at another resolution are trained at both."""
    findings, handled = foreign.findings, {"subsets"}
    same = {str(s.get("image_dir")) for s in _tables(dataset, "subsets")} == {
        str(s.get("image_dir")) for s in _tables(first, "subsets")
    }
    if "resolution" in dataset and same:
        handled.add("resolution")
        resolutions = findings.values.get("data.more_resolutions", [])
        side, before = (
            findings.values.get("data.resolution"),
            findings.sources.get("data.resolution", ""),
        )
        if set_size(foreign, f"{where}.resolution", dataset["resolution"]) and side is not None:
            other = findings.values["data.resolution"]
            findings.set("data.resolution", side, before)
            if other != side and other not in resolutions:
                findings.set("data.more_resolutions", [*resolutions, other], f"{where}.resolution")
    for key in dataset.keys() - handled:
        if key in _DATASET and key not in _SUBSET:
            why = "all images are trained as the first of the datasets says"
            if dataset[key] == first.get(key):
                findings.stays(f"{where}.{key}", "the first of the datasets says the same")
            else:
                findings.lacks(f"{where}.{key}", dataset[key], why)


def _subset(
    foreign: Foreign, values: Mapping[str, Any], names: Mapping[str, str], where: str
) -> ImageFolder | None:
    """Return a subset as a folder, None for one that is not trained on."""
    findings = foreign.findings
    folder_key = next((key for key in ("image_dir", "metadata_file") if values.get(key)), None)
    if folder_key is None or not isinstance(values[folder_key], str):
        raise RequestError(f"{where} names no folder of images", fix="give it an image_dir")
    path = path_of(values[folder_key])
    folder = ImageFolder(
        path=path if folder_key == "image_dir" else path.parent, key=names[folder_key]
    )
    if values.get("conditioning_data_dir"):
        why = "control images are not trained; masks belong in a folder masks/ beside the images"
        findings.lacks(names["conditioning_data_dir"], values["conditioning_data_dir"], why)
    if names.get("validation_split", "").startswith(where) and values["validation_split"] == 1.0:
        why = "is validated with only and not trained: keep it outside of the DATASET"
        findings.lacks(folder.key, str(folder.path), why)
        findings.stays(names["validation_split"], "the folder is not trained")
        return None
    folder.settings = caption_fields(foreign, values, names)
    if "repeats" not in folder.settings:
        # The name of a folder means nothing there beside a dataset file.
        folder.settings["repeats"] = (1, THERE)
    _read_kind(foreign, folder, values, names)
    if values.get("caption_extension"):
        extensions = [
            *findings.values.get("data.caption_extensions", []),
            str(values["caption_extension"]),
        ]
        unique = list(dict.fromkeys(extensions))
        findings.set("data.caption_extensions", unique, names["caption_extension"])
    if values.get("class_tokens"):
        findings.lacks(names["class_tokens"], values["class_tokens"], _CLASS_TOKENS)
    return folder


def _read_kind(
    foreign: Foreign, folder: ImageFolder, values: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    """Say whether images are there to keep the class, and whether their transparency masks them."""
    if values.get("alpha_mask"):
        foreign.findings.set("data.masks", "alpha", names["alpha_mask"])
        foreign.findings.set("data.mask_background", 0.0, names["alpha_mask"])
    elif "alpha_mask" in values:
        foreign.stay("is off there", names["alpha_mask"])
        foreign.findings.stays(names["alpha_mask"], "is off there")
    if values.get("is_reg"):
        folder.regularisation = True
        foreign.findings.named.add(names["is_reg"])
        foreign.findings.stays(names["is_reg"], "its images keep the class as it is")
    elif "is_reg" in values:
        foreign.findings.stays(names["is_reg"], "is off there")


def _set_masks(foreign: Foreign) -> None:
    for name, kind in (("masked_loss", "files"), ("alpha_mask", "alpha")):
        if foreign.on(name):
            foreign.findings.set("data.masks", kind, name)
            foreign.findings.set("data.mask_background", 0.0, name)
        foreign.stay("is off there", name)
    if foreign.on("conditioning_data_dir"):
        why = "masks belong in a folder masks/ beside the images, under their names"
        foreign.findings.lacks(
            "conditioning_data_dir", foreign.values["conditioning_data_dir"], why
        )


def _set_regularisation(foreign: Foreign) -> None:
    folder, weight = foreign.on("reg_data_dir"), foreign.number("prior_loss_weight")
    if folder is not None:
        foreign.findings.set("data.regularisation_dir", str(path_of(folder)), "reg_data_dir")
    foreign.stay("is not given", "reg_data_dir")
    if weight and weight > 0:
        carry(foreign.findings, "objective.prior_weight", "prior_loss_weight", weight)
    foreign.stay("is not given", "prior_loss_weight")


def _merged(
    *layers: tuple[Mapping[str, Any], str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values, later ones win, and where each is from."""
    values: dict[str, Any] = {}
    names: dict[str, str] = {}
    for layer, where in layers:
        values |= layer
        names |= {key: f"{where}.{key}" if where else key for key in layer}
    return values, names


def _table(data: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = data.get(key, {})
    if not isinstance(value, Mapping):
        raise RequestError(f"{key} is no table", fix=f"write [{key}] above its keys")
    return value


def _tables(data: Mapping[str, Any], key: str) -> Sequence[Mapping[str, Any]]:
    value = data.get(key, [])
    if not isinstance(value, list) or not all(isinstance(table, Mapping) for table in value):
        raise RequestError(f"{key} is no list of tables", fix=f"write [[{key}]] above each")
    return value

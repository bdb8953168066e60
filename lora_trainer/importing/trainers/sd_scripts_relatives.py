"""The programs that speak sd-scripts' arguments: two interfaces of it, and musubi-tuner.

kohya_ss (bmaltais): JSON files that its LoRA tab saves, at 45088f0 and older, zeros and empty texts that
mean "not given" included. LoRA_Easy_Training_Scripts (derrian-distro): TOML files by page, at ae5ce07; each page
has `args` and `dataset`, which become one training and one dataset file. Both are put back into sd-scripts'
arguments and read as those. musubi-tuner (kohya-ss): TOML files of a training, and of a dataset of images, at
30c658c; what differs is the network it trains, how timesteps are drawn, and the dataset. Text encoders are never
trained there.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import (
    THERE,
    Foreign,
    Sourced,
    Trainer,
    flattened,
    rules_of,
    table_of,
)
from lora_trainer.importing.prompt_options import set_prompts
from lora_trainer.importing.trainers import sd_scripts

# ---- kohya_ss

_OTHER_MODELS = ("hunyuan_", "anima_")


def flat_tab(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the values of the file, which is flat."""
    if {"folders", "accelerate_launch"} <= set(data):  # the defaults of the whole interface
        return flattened(data)
    # Of the first words sd-scripts' own files have one at most.
    is_one = len({*table_of("kohya_gui")["signs"].split()} & set(data)) >= 2
    return dict(data) if is_one or {"LoRA_type", "network_dim"} <= set(data) else None


def read_tab(foreign: Foreign) -> None:
    """Put the file into sd-scripts' arguments and read those."""
    if foreign.values.get("LoRA_type") is None:
        raise RequestError(
            "LoRA_type is missing: the file is of the dreambooth, finetune or textual inversion tab",
            fix="give a file that the LoRA tab has saved",
        )
    for key in list(foreign.values):
        if key.startswith(_OTHER_MODELS) and not key.endswith("_checkbox"):
            _drop(foreign, key, "is of a model that is not chosen")
    _model(foreign)
    _network(foreign)
    _numbers_and_words(foreign)
    arguments, rules = set(foreign.called), rules_of("sd_scripts")
    for key in list(foreign.values):
        argument = foreign.table["renamed"].get(key, key)
        if argument in rules and key not in foreign.called and argument not in arguments:
            _take(foreign, key, argument)
            arguments |= {argument} & foreign.values.keys()
    name = ""
    for part in training.split_words(foreign.word("additional_parameters", "")):
        # The arguments typed as text, which win.
        if part.startswith("--"):
            name, equals, value = part[2:].partition("=")
            foreign.values[name] = value if equals else True
        elif name:
            before = foreign.values[name]
            foreign.values[name] = part if before is True else f"{before} {part}"
    sd_scripts.read_training(foreign)


def _rename(foreign: Foreign, key: str, argument: str, value: Any) -> None:
    """Put what a key of the file says under sd-scripts' name for it."""
    foreign.values.pop(key, None)
    foreign.values[argument] = value
    if argument != key:
        if argument in foreign.nothing_to_set:
            foreign.out_of_use[argument] = foreign.nothing_to_set.pop(argument)
            foreign.named.discard(argument)
        foreign.called[argument] = key


def _drop(foreign: Foreign, key: str, why: str) -> None:
    """Leave a key out that the file has, and say why."""
    if key in foreign.values:
        del foreign.values[key]
        foreign.stays(key, why)


def _take(foreign: Foreign, key: str, argument: str) -> None:
    """Make a key an argument, unless its value means that it is not given."""
    value = foreign.values[key]
    zero_is_none = argument in foreign.table["zero_is_none"]["keys"].split()
    if value in ("", None) or (zero_is_none and value in (0, "0", False)):
        _drop(foreign, key, "is not given")
    else:
        _rename(foreign, key, argument, value)


def _model(foreign: Foreign) -> None:
    """Take the settings that count only while a model's box is ticked."""
    for box, table in foreign.table["of_model"].items():
        is_ticked = foreign.values.get(box)
        for key, argument in table.items():
            if not is_ticked:
                _drop(foreign, key, f"is of {box}, which is not ticked")
            elif key in foreign.values:
                _take(foreign, key, argument)
        _drop(foreign, box, "the base's files say what it is")


def _network(foreign: Foreign) -> None:
    table = foreign.table
    kind = str(foreign.values["LoRA_type"])
    module, algorithm = table["kinds"].get(kind, ("networks.lora", ""))
    if kind not in table["kinds"]:
        foreign.is_nearest("LoRA_type", f"{kind}: adapter.kind=lora")
    _rename(foreign, "LoRA_type", "network_module", module)
    options: dict[str, Any] = {"algo": algorithm} if algorithm else {}
    has_conv = algorithm or kind in ("Kohya DyLoRA", "Kohya LoCon")
    of_lycoris = table["network"]["of_lycoris"].split()
    for key in (*table["network"]["of_all"].split(), *of_lycoris, "LyCORIS_preset"):
        if key not in foreign.values or (key == "LyCORIS_preset" and not algorithm):
            continue
        value = foreign.values[key]
        is_off = value in ("", 0, False, None, "all") and not (key == "conv_dim" and algorithm)
        if key == "train_on_input":
            is_off |= algorithm != "ia3"
        used = has_conv if key.startswith("conv_") else algorithm or key not in of_lycoris
        if key != "LyCORIS_preset" and (not used or is_off):
            _drop(foreign, key, "is off there, or of another kind of LoRA")
            continue
        option = "preset" if key == "LyCORIS_preset" else key
        options[option] = foreign.values.pop(key)
        foreign.called[f"network_args.{option}"] = key
    if options:
        foreign.values["network_args"] = options


def _numbers_and_words(foreign: Foreign) -> None:
    """The warm-up is in percent; 0 as rate of the text encoder means that only the U-Net is trained."""
    rate, unet = foreign.nonzero("text_encoder_lr", 0), foreign.nonzero("unet_lr", 0)
    if rate:
        _rename(foreign, "text_encoder_lr", "text_encoder_lr", rate)
    elif not unet:
        _drop(foreign, "text_encoder_lr", "learning_rate is for it too")
    elif "text_encoder_lr" in foreign.values:
        _rename(foreign, "text_encoder_lr", "network_train_unet_only", True)
    percent, steps = foreign.nonzero("lr_warmup", 0), foreign.nonzero("lr_warmup_steps", 0)
    if percent and not steps:
        _drop(foreign, "lr_warmup_steps", "lr_warmup says more")
        _rename(foreign, "lr_warmup", "lr_warmup_steps", percent / 100)
    epoch = foreign.nonzero("epoch", 0)
    if epoch and not (foreign.number("max_train_epochs") or foreign.number("max_train_steps")):
        _rename(foreign, "epoch", "max_train_epochs", epoch)
    kind = foreign.word("noise_offset_type", "Original")
    unused = ("noise_offset", "adaptive_noise_scale") if kind == "Multires" else (
        "multires_noise_iterations", "multires_noise_discount")  # fmt: skip
    for key in unused if "noise_offset_type" in foreign.values else ():
        _drop(foreign, key, f"noise_offset_type is {kind}")
    lines = foreign.word("sample_prompts", "").splitlines()
    if set_prompts(foreign, lines, "sample_prompts"):
        del foreign.values["sample_prompts"]
    else:
        _drop(foreign, "sample_prompts", "is not given")


# ---- LoRA_Easy_Training_Scripts


def flat_pages(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of all pages; the dataset's stand under the names of a dataset file."""
    if not any({"args", "dataset"} & set(page) for page in _pages(data)):
        return None
    mode = data.get("train_mode")
    if isinstance(mode, Mapping):
        mode = mode.get("train_mode")
    return {**_together(data, "args"), "train_mode": mode}


def _together(data: Mapping[str, Any], part: str) -> dict[str, Any]:
    """Return one part of all pages as one table."""
    tables = [page.get(part) for page in _pages(data)]
    return {k: v for table in tables if isinstance(table, Mapping) for k, v in table.items()}


def _pages(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    pages = [page for name, page in data.items() if name.endswith("_args")]
    return [page for page in pages if isinstance(page, Mapping)]


def read_pages(foreign: Foreign) -> None:
    """Read the subsets as a dataset file, then the arguments as those of a training."""
    mode = foreign.values.pop("train_mode") or "lora"
    if mode != "lora":
        raise RequestError(
            f"train_mode={mode}: only LoRAs are trained here", fix="give a file of its LoRA mode"
        )
    foreign.stays("train_mode", "is what is trained here")
    values = foreign.values
    share = values.pop("warmup_ratio", None)
    if share is not None and "lr_warmup_steps" not in values:
        values["lr_warmup_steps"] = share
        foreign.called["lr_warmup_steps"] = "warmup_ratio"
    subsets = [
        {key: value for key, value in one.items() if key != "name"}
        for one in folders.tables_of(foreign.data.get("subsets"))
    ]
    if subsets:
        dataset = {**_together(foreign.data, "dataset"), "subsets": subsets}
        for key, value in flattened(dataset).items():
            values[f"datasets[0].{key}"] = value
            foreign.called[f"datasets[0].{key}"] = key
        foreign.data = {"datasets": [dataset]}
        sd_scripts.read_dataset(foreign)
    sd_scripts.read_training(foreign)


# ---- musubi-tuner

_NETWORKS = table_of("musubi")["networks"]


def flat_musubi(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values = sd_scripts.without_sections(data)
    module = str(values.get("network_module", "")).rpartition(".")[2]
    is_one = module in (*_NETWORKS["trained"], *_NETWORKS["others"])
    return values if "dit" in values or is_one else None


def flat_musubi_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file, which names folders as no other trainer's does."""
    datasets = folders.tables_of(data.get("datasets"))
    signs = {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}
    return flattened(data) if any(signs & set(one) for one in datasets) else None


def read_musubi(foreign: Foreign) -> None:
    """Read the settings that depend on several keys, and the named dataset file."""
    module = foreign.word("network_module", "networks.lora").rpartition(".")[2]
    if module not in _NETWORKS["trained"] and not module.startswith(("loha", "lokr")):
        raise RequestError(
            f"network_module={module} trains a model that is not trained here",
            fix=f"give a file with {' or '.join(_NETWORKS['trained'])}",
        )
    version = foreign.word("model_version", "")
    edits = "edit" in version or foreign.flag("edit") or foreign.flag("edit_plus")
    is_known = module == "lora_qwen_image" if edits else "kontext" not in version
    if not is_known or "layered" in version:
        raise RequestError(
            f"model_version={version} is a model that is not trained here",
            fix="give a file of a model that docs/models.md lists",
        )
    foreign.is_flow, foreign.trains_text = True, False
    foreign.edits = edits or module in _NETWORKS["edits"]
    sd_scripts.read_adapter(foreign)
    sd_scripts.read_rates(foreign)
    training.set_text_encoder(foreign, trained=False, key=THERE)
    foreign.set("objective.weighting", "none")
    foreign.set("objective.loss", "mse")
    folders.named_file(
        foreign, "dataset_config", tomllib.loads, flat_musubi_dataset, read_musubi_dataset
    )
    _timesteps(foreign, module)
    training.set_precision(foreign, "mixed_precision", missing="no")
    sd_scripts.read_output(foreign)
    sd_scripts.read_length(foreign)
    sd_scripts.carry_network_options(foreign)
    sd_scripts.carry_flow_weights(foreign)
    foreign.carry_if_on("optimizer.max_weight_norm", "scale_weight_norms")
    sd_scripts.carry_output(foreign)
    foreign.carry_if_on("objective.guidance_scale", "guidance_scale", default=1.0)


def _timesteps(foreign: Foreign, module: str) -> None:
    word = foreign.word("timestep_sampling", _NETWORKS["own_sampling"].get(module, "sigma"))
    if word == "ideogram4_shift":  # of this deviation, whatever the file says
        by_size = ("resolution", "timestep_sampling")
        std = (1.5, "timestep_sampling")
        training.set_timesteps(foreign, "logit_normal", "timestep_sampling", std=std, shift=by_size)
    elif word == "sigma":
        sd_scripts.set_density(foreign, sign=-1)
    elif word == "logsnr":
        mean = (-foreign.nonzero("logit_mean", 0.0) / 2, "logit_mean")
        std = (foreign.nonzero("logit_std", 1.0) / 2, "logit_std")
        training.set_timesteps(foreign, "logit_normal", "timestep_sampling", mean=mean, std=std)
    else:
        sd_scripts.set_sampling(foreign, word, _shift(foreign, word, module))
    training.set_timestep_range(foreign, "min_timestep", "max_timestep")
    buckets = foreign.number("num_timestep_buckets")
    if buckets and buckets > 1:
        strata = min(256, int(buckets))
        foreign.carry("objective.timestep_strata", "num_timestep_buckets", strata)


def _shift(foreign: Foreign, word: str, module: str) -> Sourced:
    key = "timestep_sampling"
    if word.startswith("qinglong"):
        foreign.is_nearest(key, f"{word}: sigmoid with the base's own shift")
    if _NETWORKS["own_shift"].get(module) in (word, word.replace("qinglong_qwen", "qwen_shift")):
        return "resolution", key
    if word.endswith("_shift") or word.startswith("qinglong"):
        sizes = {"qwen": (0.9, 8192), "krea2": (1.15, 6400)}
        high, most = next((row for name, row in sizes.items() if name in word), (1.15, 4096))
        token_px = 32 if module == "lora_flux_2" else 16
        return training.shift_by_tokens(foreign, key, word, high=high, most=most, token_px=token_px)
    if word == "shift":
        return foreign.sourced("discrete_flow_shift", 1.0)
    return 1.0, key


def read_musubi_dataset(foreign: Foreign) -> None:
    """Read a dataset file, this one by itself or that of a training."""
    around = (folders.table_under(foreign.data, "general"), "general.")
    tables = [
        {key: value for key, value in dataset.items() if value is not None}
        for dataset in folders.tables_of(foreign.data["datasets"])
    ]
    shared_by_all: dict[str, list[Sourced]] = {
        name: [] for name in ("resolution", "batch_size", "enable_bucket")
    }
    for folder in folders.read_folders(foreign, tables, "datasets", around):
        folder.settings["repeats"] = folder.sourced("num_repeats", 1)
        if folder.key.endswith("image_jsonl_file"):
            why = "captions in metadata.jsonl of the images' folder are read"
            foreign.is_nearest(folder.key, f"{folder.path.name}: {why}")
            folder.path = folder.path.parent
        if folder.references:
            _set_reference_size(foreign, folder)
        for name, values in shared_by_all.items():
            values += [folder.sourced(name)] if name in folder else []
    if not folders.set_sizes(foreign, shared_by_all["resolution"]):
        folders.set_resolutions(foreign, [(960, 544)], "resolution, by default there")
    batches, buckets = shared_by_all["batch_size"], shared_by_all["enable_bucket"]
    on, name = buckets[0] if buckets else (False, THERE)
    foreign.set("data.buckets", bool(on), name)
    if batches:
        foreign.carry("train.batch_size", batches[0][1], batches[0][0])
    for sourced, why in (
        (batches, "train.batch_size is for all folders"),
        (buckets, "data.buckets is"),
    ):
        for value, name in sourced[1:]:
            if name not in foreign.named:
                foreign.lacks(name, None if value == sourced[0][0] else value, why)


def _set_reference_size(foreign: Foreign, folder: folders.FolderTable) -> None:
    """Set how large reference images are: as the images to learn, as a size says, or as they are."""
    size, key = folder.sourced("control_resolution")
    own, own_key = folder.sourced("no_resize_control")
    if size is not None:
        try:
            width, height = folders.read_size(size)
        except ValueError as error:
            foreign.lacks(key, size, str(error))
            return
        side = max(64, round(math.sqrt(width * height) / 64) * 64)
        foreign.set("data.reference_resolution", side, key)
        if own is True:
            foreign.stays(own_key, "smaller ones keep their size")
    elif own is True:
        foreign.set("data.reference_resolution", 1024, own_key)
        foreign.is_nearest(own_key, "larger ones are scaled down to 1 megapixel")


_EASY_TABLES = ("sd_scripts_dataset", "sd_scripts", "lora_easy")
_MUSUBI_TABLES = ("sd_scripts", "musubi", "musubi_dataset")
_MUSUBI_DATASET = "musubi-tuner (a dataset file)"
TRAINERS = (
    Trainer("kohya_ss", ("kohya_gui", "sd_scripts"), flat_tab, read_tab),
    Trainer("LoRA_Easy_Training_Scripts", _EASY_TABLES, flat_pages, read_pages),
    Trainer(_MUSUBI_DATASET, _MUSUBI_TABLES[2:], flat_musubi_dataset, read_musubi_dataset),
    Trainer("musubi-tuner", _MUSUBI_TABLES, flat_musubi, read_musubi),
)

"""Kohya's training files: the options of its training scripts, with or without section headers.

Where an option is missing that changes the result, what it is there by default is set, if that is not
the default here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lora_trainer.config import CHUNK_TOKENS, build_config
from lora_trainer.data.listing import list_dataset
from lora_trainer.errors import InputError, RequestError
from lora_trainer.importing import learning
from lora_trainer.importing.dataset import SUBSET_SAME, read_caption_keys, read_resolution
from lora_trainer.importing.findings import Findings
from lora_trainer.importing.options import DEFAULT, Options, Reader
from lora_trainer.importing.training_keys import NOTHING_TO_SET, SAME, WITHOUT_EQUIVALENT

DEFAULT_STEPS = 1600
_AFTERWARDS = ("max_train_epochs", "dataset_config")
"""Options that are read when all others are."""
_PRECISIONS = {"no": "fp32", "float": "fp32", "fp16": "fp16", "bf16": "bf16"}


def read_training(data: Mapping[str, Any], found: Findings) -> None:
    """Add what a training file says, its dataset file excepted."""
    values = _flat(data)
    options = Options(values=values, found=found)
    for readers in (_READERS, _LATER):
        for names, reader in readers.items():
            given = [name for name in names if name in values]
            if not given and readers is _READERS:
                continue
            try:
                reader(options)
            except (TypeError, ValueError):  # a word where a number is meant, and the like
                for name in given:
                    found.lacks(name, values[name], "cannot be read")
    for name, value in values.items():
        if found.names(name):
            continue
        if name in _AFTERWARDS:
            continue
        if name in SAME and value is not None and value != "":
            found.set(SAME[name], value, name)
        elif name in SAME:
            found.stays(name, "is not given")
        elif name in NOTHING_TO_SET:
            found.stays(name, NOTHING_TO_SET[name])
        elif name in WITHOUT_EQUIVALENT:
            found.lacks(name, value, WITHOUT_EQUIVALENT[name])
        elif any(name in names for names in (*_READERS, *_LATER)):
            found.lacks(name, value, "means nothing beside the other options")
        else:
            found.unknown.append(name)


def read_length(data: Mapping[str, Any], found: Findings, *, beside: Path) -> None:
    """Turn epochs into steps, for which the pictures are counted; after the dataset file is read."""
    options = _flat(data)
    epochs = options.get("max_train_epochs")
    if "max_train_epochs" in options and not epochs:
        found.stays("max_train_epochs", "is not given")
    if not epochs:
        if "train.steps" not in found.values:
            found.set("train.steps", DEFAULT_STEPS, DEFAULT)
        return
    root = None if found.dataset is None else beside / found.dataset
    try:
        if root is None:
            raise InputError("no folder of pictures is named", fix="")
        settings = build_config({k: v for k, v in found.values.items() if k.startswith("data.")})
        samples = sum(one.repeats for one in list_dataset(root, settings=settings.data).pictures)
    except (InputError, RequestError) as error:
        why = (
            f"give train.steps = epochs x pictures with repeats / train.batch_size ({error.found})"
        )
        found.lacks("max_train_epochs", epochs, why)
        return
    batch = found.values.get("train.batch_size", 1)
    source = f"max_train_epochs of {samples} pictures, repeats included"
    found.set("train.steps", math.ceil(samples / batch) * epochs, source)


def _flat(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return all options; their sections mean nothing."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= value if isinstance(value, dict) else {name: value}
    return values


def _dataset(options: Options) -> None:
    options.found.dataset = str(options.values["train_data_dir"])
    options.found.stays("train_data_dir", "is the DATASET of the command")


def _captions(options: Options) -> None:
    names = {name: name for name in options.values}
    known = {name: options.values[name] for name in SUBSET_SAME if name in options.values}
    read_caption_keys(known, names, "data", options.found)
    if "dataset_repeats" in options.values:
        options.found.stays("dataset_repeats", "repeats are in the names of folders")


def _extension(options: Options) -> None:
    options.set(
        "caption_extension", "data.caption_extensions", [options.values["caption_extension"]]
    )


def _separator(options: Options) -> None:
    mark = options.values["caption_separator"]
    why = "tags are separated by commas"
    options.found.lacks("caption_separator", None if mark == "," else mark, why)


def _size(options: Options) -> None:
    read_resolution(options.values["resolution"], "resolution", options.found)


def _buckets(options: Options) -> None:
    on = bool(options.values.get("enable_bucket", False))
    source = "enable_bucket" if "enable_bucket" in options.values else DEFAULT
    if "dataset_config" not in options.values:
        options.found.set("data.buckets", on, source)


def _batch(options: Options) -> None:
    if "dataset_config" in options.values and "train_batch_size" not in options.values:
        name = "gradient_accumulation_steps"
        if name in options.values:
            times = options.values[name]
            why = "give train.batch_size = batch_size of the dataset x this"
            options.found.lacks(name, None if times == 1 else times, why)
        return
    size = options.values.get("train_batch_size") or 1
    times = options.values.get("gradient_accumulation_steps") or 1
    names = [n for n in ("train_batch_size", "gradient_accumulation_steps") if n in options.values]
    source = " x ".join(names) or DEFAULT
    options.set(source, "train.batch_size", size * times)
    if times > 1:
        options.set(source, "memory.micro_batch", size)


def _precision(options: Options) -> None:
    for name, key in (
        ("mixed_precision", "train.precision"),
        ("save_precision", "output.precision"),
    ):
        if name in options.values:
            ours = _PRECISIONS.get(str(options.values[name]))
            if ours is None:
                options.found.lacks(name, options.values[name], "is fp32, bf16 or fp16 here")
            else:
                options.set(name, key, ours)


def _prediction(options: Options) -> None:
    if options.given("v_parameterization"):
        options.set("v_parameterization", "base.prediction", "v_prediction")
    else:
        options.found.stays("v_parameterization", "the base's files say what it predicts")


def _last_timestep(options: Options) -> None:
    options.set("max_timestep", "objective.max_timestep", min(999, options.values["max_timestep"]))


def _checkpointing(options: Options) -> None:
    names = [n for n in ("cpu_offload_checkpointing", "gradient_checkpointing") if options.given(n)]
    if names:
        how = "offloaded" if names[0].startswith("cpu") else "full"
        options.set(names[0], "memory.gradient_checkpointing", how)
    for name in ("cpu_offload_checkpointing", "gradient_checkpointing"):
        if name in options.values and name not in names[:1]:
            options.found.stays(name, "the plan decides, and never changes the result")


def _attention(options: Options) -> None:
    for name in ("xformers", "sdpa"):
        if options.given(name):
            options.set(name, "memory.attention", name)
        elif name in options.values:
            options.found.stays(name, "is off (false)")


def _base_precision(options: Options) -> None:
    if options.given("fp8_base"):
        options.set("fp8_base", "memory.base_precision", "fp8")
    else:
        options.found.stays("fp8_base", "is off (false)")


def _keep(options: Options) -> None:
    for unit in ("epochs", "steps"):
        name, every = f"save_last_n_{unit}", options.given(f"save_every_n_{unit}")
        last = options.given(name)
        if last and every:
            options.set(name, "output.keep_last", max(1, last // every))
        elif name in options.values:
            options.found.lacks(name, last, f"give save_every_n_{unit}, or output.keep_last")


def _visibility(options: Options) -> None:
    asked = options.values["huggingface_repo_visibility"]
    options.set("huggingface_repo_visibility", "output.hub_private", asked != "public")


def _trackers(options: Options) -> None:
    asked = options.given("log_with")
    if asked is None:
        options.found.stays("log_with", "is not given")
    else:
        options.set("log_with", "logging.trackers", [asked])


def _comment(options: Options) -> None:
    if options.given("training_comment") and not options.given("metadata_description"):
        options.set("training_comment", "output.description", options.values["training_comment"])
    else:
        options.found.stays("training_comment", "is not given, or metadata_description is")


def _caption_length(options: Options) -> None:
    length = options.given("max_token_length")
    if length is None:
        options.found.set("data.caption_tokens", CHUNK_TOKENS, DEFAULT)
    else:
        options.set("max_token_length", "data.caption_tokens", int(length))


def _raw(options: Options) -> None:
    kind = options.values["model_prediction_type"]
    why = "the velocity is predicted as it is"
    options.found.lacks("model_prediction_type", None if kind == "raw" else kind, why)


def _masked(options: Options) -> None:
    kinds = {"masked_loss": "files", "alpha_mask": "alpha"}
    for name, kind in kinds.items():
        if options.given(name):
            options.set(name, "data.masks", kind)
            options.set(name, "data.mask_background", 0.0)
        elif name in options.values:
            options.found.stays(name, "is off")


def _regularisation(options: Options) -> None:
    folder, weight = options.given("reg_data_dir"), options.given("prior_loss_weight")
    if folder:
        options.set("reg_data_dir", "data.regularisation_dir", folder)
    elif "reg_data_dir" in options.values:
        options.found.stays("reg_data_dir", "is not given")
    if weight:
        options.set("prior_loss_weight", "objective.prior_weight", weight)
    elif "prior_loss_weight" in options.values:
        options.found.stays("prior_loss_weight", "is not given")


def _kind_of_base(options: Options) -> None:
    options.found.stays("v2", "the base's files say what it is")


_READERS: Mapping[tuple[str, ...], Reader] = {
    ("train_data_dir",): _dataset,
    ("caption_extension",): _extension,
    ("caption_separator",): _separator,
    (*SUBSET_SAME, "dataset_repeats"): _captions,
    ("resolution",): _size,
    ("network_module",): learning.adapter,
    ("network_args",): learning.adapter_arguments,
    ("optimizer_type", "use_8bit_adam", "use_lion_optimizer"): learning.optimizer,
    ("optimizer_args",): learning.optimizer_arguments,
    ("mixed_precision", "save_precision"): _precision,
    ("loss_type",): learning.loss,
    ("v_parameterization",): _prediction,
    ("max_timestep",): _last_timestep,
    ("gradient_checkpointing", "cpu_offload_checkpointing"): _checkpointing,
    ("xformers", "sdpa"): _attention,
    ("fp8_base",): _base_precision,
    ("save_last_n_epochs", "save_last_n_steps"): _keep,
    ("huggingface_repo_visibility",): _visibility,
    ("log_with",): _trackers,
    ("training_comment",): _comment,
    ("model_prediction_type",): _raw,
    ("masked_loss", "alpha_mask"): _masked,
    ("reg_data_dir", "prior_loss_weight"): _regularisation,
    ("v2",): _kind_of_base,
}
"""Readers of options that are there."""
_LATER: Mapping[tuple[str, ...], Reader] = {
    ("enable_bucket",): _buckets,
    ("max_token_length",): _caption_length,
    ("network_alpha",): learning.alpha,
    ("network_train_unet_only", "text_encoder_lr"): learning.text_encoder,
    ("learning_rate", "unet_lr"): learning.learning_rate,
    ("lr_scheduler", "lr_warmup_steps"): learning.schedule,
    ("train_batch_size", "gradient_accumulation_steps"): _batch,
    ("min_snr_gamma", "debiased_estimation_loss", "weighting_scheme"): learning.weighting,
    ("timestep_sampling", "discrete_flow_shift", "sigmoid_scale"): learning.timesteps,
}
"""Readers that also say what is there by default."""

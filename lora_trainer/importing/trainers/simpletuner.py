"""SimpleTuner (bghira): config.json with its data backends and LyCORIS file, and the backends by themselves.

Options are read with and without the dashes that older files have; so is `config.env`, which gives them as
variables (simpletuner/helpers/configuration/env_file.py). Its defaults are set where the file
leaves them out, such as a dropout of 0.1 and timesteps shifted by 3.
"""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import NO_ASSISTANT
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.command_lines import options_of
from lora_trainer.importing.foreign import (
    LIST,
    THERE,
    YES,
    Foreign,
    Sourced,
    Trainer,
    flattened,
    table_of,
)

_LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}
_TRACKERS = {
    "tensorboard": ["tensorboard"],
    "wandb": ["wandb"],
    "all": ["tensorboard", "wandb"],
    "none": [],
}
# Ways to keep the base that are ours, and those of fewer bits than ours.
_PRECISIONS = {
    **dict.fromkeys(("int8-quanto", "int8-torchao", "nf8-bnb", "int8-sdnq", "uint8-sdnq"), "int8"),
    **dict.fromkeys(("fp8-quanto", "fp8uz-quanto", "fp8-torchao", "fp8-sdnq"), "fp8"),
    "nf4-bnb": "nf4",
}
_FEW_BITS = ("int4-quanto", "int4-torchao", "int2-quanto", "int4-sdnq", "uint4-sdnq")


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options without dashes."""
    inner = data.get("config")
    options = inner if isinstance(inner, Mapping) and "_metadata" in data else data
    values = {name.lstrip("-"): value for name, value in options.items() if name != "_metadata"}
    signs = {"model_family", "data_backend_config", "dynamo_use_regional_compilation"}
    return values if signs & values.keys() else None


def is_environment(variables: Mapping[str, str]) -> bool:
    """Say whether variables are those of its `config.env`, or of an older `env.sh`."""
    names = table_of("simpletuner")["environment"]
    return "MODEL_TYPE" in variables and len(names.keys() & variables.keys()) >= 3


def options_of_environment(
    variables: Mapping[str, str],
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return what a `config.env` sets as options, and what stays open, with the reason.

    As there, `true` gives an option, `false` leaves it out, and the options in the extra arguments come last. The
    older files say which model it is by a variable of each.
    """
    table = table_of("simpletuner")
    is_other = [name for name in table["other_models"] if variables.get(name, "").lower() == "true"]
    if is_other:
        raise RequestError(
            f"{is_other[0]}=true: that model is not trained here", fix="give a file of another"
        )
    words = []
    for name, option in table["environment"].items():
        value = variables.get(name, "")
        if value.lower() == "true":
            words.append(f"--{option}")
        elif value and value.lower() != "false":
            words.append(f"--{option}={shlex.quote(value)}")
    extra = (variables.get(name, "") for name in ("TRAINER_EXTRA_ARGS", "DEBUG_EXTRA_ARGS"))
    read = options_of(" ".join([*words, *extra]))
    if "model_family" not in read.options:
        named = (
            family
            for name, family in table["model_of_variable"].items()
            if variables.get(name, "").lower() == "true"
        )
        read.options["model_family"] = next(named, table["model_of_no_variable"])
    return read.options, read.open


def flat_backends(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a file of data backends, which is a list."""
    tables = folders.tables_of(data.get(LIST))
    signs = {"instance_data_dir", "dataset_type", "caption_strategy"}
    return flattened({"data_backends": tables}) if any(signs & set(one) for one in tables) else None


def read(foreign: Foreign) -> None:
    """Read the settings that depend on several options, and the named files."""
    _model(foreign)
    _adapter(foreign)
    _optimizer(foreign)
    training.set_snr_weights(foreign, "snr_gamma")
    if foreign.word("loss_type", "l2") in ("huber", "smooth_l1"):
        delta = min(1.0, foreign.nonzero("huber_c", 0.1))
        foreign.set("objective.huber_delta", delta, "huber_c")
    _read_data(foreign)
    _timesteps(foreign)
    prompts = [foreign.values["validation_prompt"]] if foreign.on("validation_prompt") else []
    library = folders.named_file(foreign, "user_prompt_library", json.loads)
    if isinstance(library, Mapping):
        prompts += [one for one in library.values() if isinstance(one, str)]
    if prompts:
        key = foreign.first_on("validation_prompt") or "user_prompt_library"
        foreign.set("sampling.prompts", [str(text) for text in prompts], key)
    _single_keys(foreign)


def _model(foreign: Foreign) -> None:
    family = foreign.word("model_family", "")
    training.set_model(foreign, family, "model_family")
    kind = foreign.get("model_type", "full")
    if kind != "lora":
        raise RequestError(
            f"model_type={kind}: whole models are not trained here",
            fix="give a file with model_type lora",
        )
    flavours = foreign.table["flavours"][family]
    flavour = foreign.word("model_flavour", next(iter(flavours)))
    path = "pretrained_model_name_or_path"
    if not foreign.on(path) or not foreign.carry("base.model", path):
        if flavour not in flavours:
            raise RequestError(
                f"model_flavour={flavour} is a model that is not trained here",
                fix=f"use one of {', '.join(flavours)}",
            )
        foreign.set("base.model", flavours[flavour], "model_flavour", "model_family")
        precision = foreign.table["flavour_precisions"].get(family, {}).get(flavour)
        if precision:
            foreign.set("memory.base_precision", precision, "model_flavour")
            how = f"{flavour}: {flavours[flavour]}, kept in {precision}"
            foreign.is_nearest("model_flavour", how)
    training.set_precision(foreign, "mixed_precision", missing="bf16")


def _adapter(foreign: Foreign) -> None:
    is_lycoris = foreign.get("lora_type", "standard") == "lycoris"
    lycoris = folders.named_file(foreign, "lycoris_config", json.loads) if is_lycoris else None
    if isinstance(lycoris, Mapping):
        foreign.values |= flattened(lycoris, "lycoris_config.")
        key = "lycoris_config.linear_dim"
        whole = (training.WHOLE, key) if lycoris.get("full_matrix") else None
        training.read_adapter(foreign, spec=foreign.table["lycoris"]["adapter"], rank=whole)
    else:
        training.read_adapter(foreign, kind=("lora", "lora_type"))
    foreign.set("adapter.targets", "transformer")


def _optimizer(foreign: Foreign) -> None:
    # SimpleTuner's own defaults are a batch of 4 and the single accumulation below.
    at_once = foreign.nonzero("train_batch_size", 4) * foreign.nonzero(
        "gradient_accumulation_steps", 1
    )
    factors = {"lr_scale_sqrt": math.sqrt(max(1, at_once)), "lr_scale": at_once}
    name = next((name for name in factors if foreign.flag(name)), "")
    rate = training.read_optimizer(foreign, factor=factors.get(name, 1))
    if name and rate:
        foreign.is_nearest(name, f"the rate is {rate:g}, {factors[name]:g} times as high")
    ours = foreign.settings["optimizer.name"]
    if ours.startswith(("adamw", "paged")):
        for name, setting in foreign.table["adam_options"].items():
            is_free = setting == "optimizer.weight_decay" or setting not in foreign.settings
            if is_free and foreign.on(name) is not None:
                foreign.carry(setting, name)
    if isinstance(foreign.on("optimizer_config"), str):
        foreign.values["optimizer_config"] = foreign.values["optimizer_config"].replace(",", " ")
        training.expand(foreign, "optimizer_config")
    training.read_arguments(foreign, "optimizer_config.")
    warmup = foreign.nonzero("lr_warmup_steps", 0)
    schedule = foreign.values.get("lr_scheduler")
    # There the warm-up's steps are the length of these schedules' waves, so none are left to warm up.
    waves = schedule in ("cosine", "sine", "cosine_with_restarts")
    steps = foreign.number("max_train_steps")
    training.read_schedule(foreign, warmup=0 if waves else warmup, steps=steps)
    if waves and "lr_scheduler" not in foreign.nearest:
        how = f"one fall, there waves of lr_warmup_steps={warmup:g} steps without a warm-up"
        foreign.is_nearest("lr_scheduler", f"{schedule}: {how}")
    trained = foreign.flag("train_text_encoder")
    key = foreign.first_on("text_encoder_lr", "learning_rate") or THERE
    rates = [(key, foreign.number("text_encoder_lr", rate) or 0.0)]
    training.set_text_encoder(foreign, trained=trained, key="train_text_encoder", rates=rates)
    norm, method = foreign.number("max_grad_norm", 2.0), "grad_clip_method"
    if foreign.get(method, "value") == "norm":
        foreign.set("train.max_grad_norm", norm, "max_grad_norm")
    else:
        key = method if method in foreign.values else "max_grad_norm"
        foreign.set("train.max_grad_norm", 0.0, key)
        how = f"single numbers are cut off at {norm:g} there, which is rare: nothing is"
        foreign.is_nearest(key, how)


def _timesteps(foreign: Foreign) -> None:
    if not foreign.is_flow:
        training.set_timesteps(foreign, "uniform", THERE)
        return
    model = foreign.word("model_family", "")
    own = foreign.table["densities"].get(model)
    if own:
        mean = foreign.sourced(own["mean"], 0.0)
        std = foreign.sourced(own["std"], own["default_std"])
        own_shift = ("resolution", THERE)
        training.set_timesteps(foreign, "logit_normal", THERE, mean=mean, std=std, shift=own_shift)
        return
    uniform = foreign.flag("flow_use_uniform_schedule")
    beta = foreign.flag("flow_use_beta_schedule")
    stated = foreign.number("flow_schedule_shift", 3.0) or 0
    fixed = foreign.table["shifts"].get(model)
    shift = fixed or stated
    by_size = foreign.flag("flow_schedule_auto_shift") and shift <= 0
    if beta and not uniform:
        how = "sigmoid: both draw the middle more often"
        foreign.is_nearest("flow_use_beta_schedule", how)
    scale = 1.0 if uniform or beta else foreign.nonzero("flow_sigmoid_scale", 1.0)
    training.set_timesteps(
        foreign,
        "uniform" if uniform else "sigmoid",
        "flow_use_uniform_schedule" if uniform or beta else "flow_sigmoid_scale",
        std=(scale, "flow_sigmoid_scale"),
        shift=training.shift_by_size(foreign, model, "flow_schedule_auto_shift")
        if by_size
        else (shift or 1.0, THERE if fixed else "flow_schedule_shift"),
    )


def _read_data(foreign: Foreign) -> None:
    """Set resolution, folders, batch and length."""
    share = foreign.number("caption_dropout_probability", 0.1) or 0.0
    foreign.set("data.caption_dropout", min(1.0, share), "caption_dropout_probability")
    size = foreign.nonzero("resolution", 1024)
    _resolution(foreign, size, foreign.values.get("resolution_type"), "resolution")
    folders.named_file(
        foreign,
        "data_backend_config",
        lambda text: {LIST: json.loads(text)},
        lambda data: (
            isinstance(data[LIST], list)
            and flattened({"data_backends": folders.tables_of(data[LIST])})
        ),
        read_backends,
    )
    training.set_batch(foreign, "train_batch_size", "gradient_accumulation_steps", default=4)
    steps = foreign.number("max_train_steps")
    if steps:
        foreign.carry("train.steps", "max_train_steps", int(steps))
    else:
        folders.set_length(foreign, foreign.number("num_train_epochs", 1), "num_train_epochs")


def _resolution(foreign: Foreign, size: float, kind: Any, key: str) -> None:
    side = math.sqrt(max(0, size)) * 1000 if kind == "area" or size <= 16 else size
    if key in foreign.values:
        folders.set_resolutions(foreign, [(side, side)], key)
    else:
        foreign.set("data.resolution", max(64, round(side / 64) * 64))


def read_backends(foreign: Foreign) -> None:
    """Set the backends that hold images, this file's or those of a training, as folders of the dataset."""
    tables = folders.tables_of(foreign.data.get(LIST))
    is_first = True
    by_id = {str(one.get("id")): (number, one) for number, one in enumerate(tables)}
    for folder in folders.read_folders(foreign, tables, "data_backends", skip=_not_trained):
        del folder.settings["repeats"]
        repeats, name = folder.sourced("repeats", 0)
        if isinstance(repeats, int) and not isinstance(repeats, bool) and repeats >= 0:
            # Repeats are further views there: 0 shows each image once (documentation/DATALOADER.md).
            folder.settings["repeats"] = (repeats + 1, name)
        if foreign.edits is not False:
            folder.references = tuple(_references(foreign, folder, by_id))
        # Where the captions come from.
        strategy, name = folder.sourced("caption_strategy", "filename")
        prompt, prompt_name = folder.sourced("instance_prompt")
        by_prompt = strategy in ("instanceprompt", "instance_prompt")
        if by_prompt or folder.get("only_instance_prompt"):
            why = "one text for all images: name the folder N_WORDS, or give data.trigger"
            foreign.lacks(prompt_name, prompt, why)
        elif folder.get("prepend_instance_prompt") and prompt:
            folder.settings["caption_prefix"] = (prompt, prompt_name)
        if strategy == "filename":
            note = "an image with a caption file keeps that"
            foreign.set("data.caption_fallback", "file_name", name, note=note)
        elif strategy in ("parquet", "csv"):
            why = f"name the table metadata.{strategy} and put it beside the images"
            foreign.lacks(name, strategy, why)
        if is_first:  # which says resolution and buckets for all
            size, name = folder.sourced("resolution")
            if isinstance(size, int | float) and not isinstance(size, bool) and 0 < size <= 100_000:
                _resolution(foreign, float(size), folder.get("resolution_type"), name)
            shape = str(folder.get("crop_aspect", "square"))
            buckets = not (folder.get("crop", True) and shape == "square")
            foreign.set("data.buckets", buckets, folder.name("crop"), folder.name("crop_aspect"))
        is_first = False
    kinds = [str(one.get("dataset_type")) for one in tables if not one.get("disabled")]
    moving = [kind for kind in kinds if kind in ("video", "audio")]
    if moving and is_first:
        raise RequestError(
            f"dataset_type={moving[-1]}: only images are trained here",
            fix="give a data backend of images",
        )


def _references(
    foreign: Foreign,
    folder: folders.FolderTable,
    by_id: Mapping[str, tuple[int, Mapping[str, Any]]],
) -> Iterator[Sourced]:
    """Yield the folders of reference images that a backend names by their ids, each with its key."""
    for name in folders.paths_in(folder.get("conditioning_data")):
        number, backend = by_id.get(name, (0, {}))
        path, kind = backend.get("instance_data_dir"), str(backend.get("conditioning_type"))
        if isinstance(path, str) and path and kind.startswith("reference"):
            where = f"data_backends[{number}]."
            foreign.named |= {f"{where}conditioning_type", folder.name("conditioning_data")}
            foreign.stays(f"{where}conditioning_type", "its images are references")
            yield path, f"{where}instance_data_dir"


def _not_trained(backend: folders.FolderTable) -> str:
    path, kind = backend.get("instance_data_dir"), str(backend.get("dataset_type", "image"))
    if isinstance(path, str) and path and kind == "image" and not backend.get("disabled"):
        return ""
    return "is not a folder of images to train on"


def _single_keys(foreign: Foreign) -> None:
    """Carry over the options that count only where they are on, or for some bases or words."""
    is_noise = not foreign.is_flow
    foreign.carry_if_on("base.assistant", "assistant_lora_path")
    if foreign.flag("disable_assistant_lora"):
        foreign.set("base.assistant", NO_ASSISTANT, "disable_assistant_lora")
    if is_noise:
        foreign.carry_if_on("base.vae", "pretrained_vae_model_name_or_path")
        prediction = foreign.says("prediction_type")
        if prediction in ("epsilon", "v_prediction"):
            foreign.carry("base.prediction", "prediction_type", prediction)
        key = "rescale_betas_zero_snr"
        foreign.carry_if_on("objective.zero_terminal_snr", key, default=False)
    if foreign.says("lora_type") in ("", "standard"):
        foreign.carry_if_on("adapter.dropout", "lora_dropout", default=0.1, by="lora_type")
        foreign.carry_if_on("adapter.dora", "use_dora", True, by="lora_type")
    if foreign.settings.get("adapter.kind") == "lokr":
        foreign.carry_if_on("adapter.lokr_factor", "lycoris_config.factor")
    foreign.carry_if_on("train.init_from", "init_lora")
    foreign.carry_if_on("train.seed", "seed")
    if foreign.says("use_ema") in YES:
        foreign.carry_if_on("train.ema_decay", "ema_decay", default=0.995, by="use_ema")
    foreign.carry_if_on("objective.input_perturbation", "input_perturbation")
    _base_precision(foreign)
    if is_noise and foreign.says("offset_noise") in YES:
        by = "offset_noise"
        foreign.carry_if_on("objective.noise_offset", "noise_offset", default=0.1, by=by)
        key = "noise_offset_probability"
        share = foreign.get(key, 0.25)
        if str(share) not in ("1", "1.0"):
            foreign.named.update({by} & foreign.values.keys())
            foreign.is_nearest(key, f"{share}: all samples have the offset here")
    trackers = _TRACKERS.get(foreign.says("report_to", "none"))
    if trackers is None:
        foreign.lacks_if_on("report_to", "trackers are tensorboard and wandb")
    else:
        foreign.carry("logging.trackers", "report_to", trackers)
    if foreign.is_flow:
        mode_key = "flux_guidance_mode"
        if foreign.on(mode_key) and foreign.says(mode_key) != "constant":
            foreign.is_nearest_to(mode_key, "one guidance for all samples")
        foreign.carry_if_on("objective.guidance_scale", "flux_guidance_value", default=1.0)
    for key in ("lora_init_type", "lora_initialisation_style"):
        if foreign.says(key) not in ("default", "gaussian"):
            foreign.lacks_if_on(key, "an adapter starts at zero")
    _loss(foreign)
    _saves_and_samples(foreign)


def _base_precision(foreign: Foreign) -> None:
    key = "base_model_precision"
    word = foreign.says(key)
    if word in _PRECISIONS:
        foreign.carry("memory.base_precision", key, _PRECISIONS[word])
    elif word in _FEW_BITS:
        foreign.carry("memory.base_precision", key, "nf4")
        foreign.is_nearest_to(key, "memory.base_precision=nf4")
    elif word not in ("no_change", "bf16", "fp16", "fp32"):
        foreign.lacks_if_on(key, "a base is kept whole, or in int8, fp8 or nf4")


def _loss(foreign: Foreign) -> None:
    key = "loss_type"
    word = foreign.says(key, "l2")
    if word in _LOSSES:
        foreign.carry("objective.loss", key, _LOSSES[word])
    elif foreign.on(key):
        foreign.carry("objective.loss", key, "mse")
        foreign.is_nearest_to(key, "objective.loss=mse")
    if word in ("huber", "smooth_l1"):
        foreign.carry_if_on("objective.huber_schedule", "huber_schedule", default="snr", by=key)


def _saves_and_samples(foreign: Foreign) -> None:
    if not foreign.carry_if_on("output.save_every_steps", "checkpoint_step_interval"):
        foreign.carry_if_on("output.save_every_steps", "checkpointing_steps")
    foreign.carry_if_on("output.save_every_epochs", "checkpoint_epoch_interval")
    foreign.carry_if_on("output.folder", "output_dir")
    foreign.carry_if_on("output.keep_last", "checkpoints_total_limit")
    if foreign.says("push_to_hub") in YES:
        foreign.carry_if_on("output.hub_repo", "hub_model_id", by="push_to_hub")
    every = "sampling.every_steps"
    if not foreign.carry_if_on(every, "validation_disable", 0):
        for key in ("validation_step_interval", "validation_steps"):
            if foreign.carry_if_on(every, key):
                break
    foreign.carry_if_on("sampling.negative_prompt", "validation_negative_prompt")
    foreign.carry_if_on("sampling.steps", "validation_num_inference_steps")
    foreign.carry_if_on("sampling.guidance_scale", "validation_guidance")
    foreign.carry_if_on("sampling.seed", "validation_seed")


def _read_backends_alone(foreign: Foreign) -> None:
    """Read a file of data backends by itself."""
    read_backends(foreign)
    _single_keys(foreign)


TRAINERS = (
    Trainer("SimpleTuner", ("simpletuner",), flat, read),
    Trainer("SimpleTuner (data backends)", ("simpletuner",), flat_backends, _read_backends_alone),
)

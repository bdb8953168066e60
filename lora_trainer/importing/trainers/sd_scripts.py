"""sd-scripts (kohya-ss): TOML files of a training, of a dataset, and the options its GUIs save.

What its arguments mean together: the base's kind, adapter, optimizer and length. Its defaults are set where
the file leaves them out and they change the result. In dataset files, `[general]`, `[[datasets]]` and
`[[datasets.subsets]]`, the inner key wins; subsets become subfolders of the one folder they lie in, what they
have of their own `data.folders`. Where there is one subset only, its folder is the dataset.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import (
    THERE,
    Foreign,
    Sourced,
    Trainer,
    as_number,
    flattened,
    rules_of,
    table_of,
)

DEFAULT_STEPS = 1600
_TELLING = {"network_module", "pretrained_model_name_or_path", "train_data_dir", "dataset_config"}


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values = without_sections(data)
    known_keys = values.keys() & TRAINERS[1].keys.keys()
    is_one = len(known_keys) * 2 > len(values) or known_keys & _TELLING
    return values if is_one else None


def without_sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of all sections, and of none."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= value if isinstance(value, Mapping) else {name: value}
    return values


def read_training(foreign: Foreign) -> None:
    """Read the options of a training, and the dataset file that they name."""
    module = str(foreign.values.get("network_module", ""))
    if any(word in module for word in foreign.table["base"]["other_modules"]):
        raise RequestError(
            f"network_module={module} trains a model that is not trained here",
            fix="see docs/models.md for those that are",
        )
    is_flow = any(foreign.on(key) is not None for key in foreign.table["base"]["flow_keys"])
    is_flow |= module.rpartition("_")[2] in ("flux", "sd3", "lumina", "anima")
    foreign.is_flow, foreign.trains_text = is_flow, not is_flow
    read_adapter(foreign)
    _text_encoder(foreign, read_rates(foreign))
    _read_training_dataset(foreign)
    _objective(foreign)
    training.set_precision(foreign, "mixed_precision", missing="no")
    read_output(foreign)
    read_length(foreign)
    _single_keys(foreign)


def read_adapter(foreign: Foreign) -> None:
    """Set kind, rank, layers and dropouts of the adapter."""
    module = foreign.word("network_module", "networks.lora")
    arguments = training.expand(foreign, "network_args")
    key = "network_module" if "network_module" in foreign.values else "network_args.algo"
    is_lycoris = module.startswith("lycoris") or (key in foreign.values and key != "network_module")
    word = module.rpartition(".")[2].partition("_")[0]
    word = "lora_fa" if module.endswith("lora_fa") else word
    algorithm = str(arguments.get("algo", "lora")) if is_lycoris else word
    training.read_adapter(foreign, kind=(algorithm, key))
    # Which layers.
    preset = str(arguments.get("preset", "full")).lower()
    conv, key = arguments.get("conv_dim"), "network_args.conv_dim"
    if is_lycoris and preset.startswith("attn-only"):
        foreign.set("adapter.targets", "attention", "network_args.preset")
    elif conv not in (None, "", 0, "0") and not foreign.is_flow:
        is_whole = any(rank > training.FULL_RANK for rank in _numbers(conv))
        alpha, rank = arguments.get("conv_alpha", 1), training.FULL_RANK if is_whole else conv
        training.set_convolutions(foreign, rank, key, alpha, "network_args.conv_alpha")
    elif is_lycoris and conv is None and preset in ("full", "unet-only", "unet-convblock-only"):
        everything = "transformer" if foreign.is_flow else "all"
        foreign.set("adapter.targets", everything, "network_args.preset")
    else:
        foreign.set("adapter.targets", "transformer")


def read_rates(foreign: Foreign) -> float | None:
    """Set optimizer, rate and schedule; return the rate of the denoiser."""
    flags = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
    flag = foreign.first_on(*flags)
    name = flags[flag] if flag else foreign.word("optimizer_type", "AdamW")
    training.expand(foreign, "optimizer_args")
    rate = training.read_optimizer(foreign, name=(name, flag or "optimizer_type"))
    training.expand(foreign, "lr_scheduler_args")
    training.read_schedule(foreign, steps=_planned_steps(foreign))
    return rate


def _planned_steps(foreign: Foreign) -> float | None:
    if foreign.on("max_train_epochs"):
        return None
    return foreign.number("max_train_steps", DEFAULT_STEPS)


def _text_encoder(foreign: Foreign, rate: float | None) -> None:
    """There, text encoders are trained unless something says no."""
    key = "text_encoder_lr"
    rates = _numbers(foreign.values.get(key))
    off = foreign.first_on("network_train_unet_only", "cache_text_encoder_outputs")
    if off or (rates and not any(rates)):
        training.set_text_encoder(foreign, trained=False, key=off or key)
    else:
        rate_key, text_rate = (key, rates[0]) if rates else ("learning_rate", rate)
        source = key if rates else "network_train_unet_only"
        own_rates = [(rate_key, text_rate)] if text_rate else []
        training.set_text_encoder(foreign, trained=True, key=source, rates=own_rates)
        if len(set(rates)) > 1:
            foreign.lacks(key, rates[1:], "all text encoders have one rate, the first")
    stop, steps = foreign.number("stop_text_encoder_training"), _planned_steps(foreign)
    if stop and stop > 0 and steps and foreign.settings.get("adapter.text_encoder"):
        share = min(1.0, stop / steps)
        foreign.set("train.text_encoder_until", share, "stop_text_encoder_training")


def read_output(foreign: Foreign) -> None:
    """Set saves, samples, precision and words of the exported file."""
    for unit in ("epochs", "steps"):
        name, last_name = f"save_every_n_{unit}", f"save_last_n_{unit}"
        every, last = foreign.number(name), foreign.number(last_name)
        if last and every:
            foreign.set("output.keep_last", max(1, int(last // every)), last_name, name)
    every = foreign.number("validate_every_n_steps")
    if every and foreign.settings.get("data.validation_fraction"):
        foreign.carry("train.validate_every_steps", "validate_every_n_steps")


def read_length(foreign: Foreign) -> None:
    """Set the batch and the steps; call it when the dataset is read."""
    # The dataset file's batch stands in for the training's.
    size_key = foreign.sources.get("train.batch_size", "train_batch_size")
    training.set_batch(foreign, size_key, "gradient_accumulation_steps")
    folders.set_length(foreign, foreign.number("max_train_epochs"), "max_train_epochs")
    warmup_key = foreign.table["schedule"]["warmup"]
    if warmup_key in foreign.without_equivalent and "train.steps" in foreign.settings:
        # Of epochs the steps were not known when the schedule was read.
        del foreign.without_equivalent[warmup_key]
        warmup = foreign.nonzero(warmup_key, 0)
        training.set_warmup(foreign, warmup, warmup_key, foreign.settings["train.steps"])
    steps = foreign.number("max_train_steps")
    if foreign.on("max_train_epochs"):
        return
    if steps:
        foreign.carry("train.steps", "max_train_steps", int(steps))
    else:
        foreign.set("train.steps", DEFAULT_STEPS)


def _numbers(value: Any) -> list[float]:
    """Return the numbers of a list, or of a single number; other values are left out."""
    numbers = []
    for part in value if isinstance(value, list) else [value]:
        with suppress(ValueError):
            numbers.append(as_number(part))
    return numbers


def _objective(foreign: Foreign) -> None:
    """Set weights, loss and timesteps."""
    training.set_snr_weights(foreign, "min_snr_gamma")
    _huber(foreign)
    module = str(foreign.values.get("network_module"))
    is_sd3 = "training_shift" in foreign.values or module.endswith("sd3")
    if is_sd3 or not foreign.is_flow:
        training.set_timestep_range(foreign, "min_timestep", "max_timestep")
    if not foreign.is_flow:
        training.set_timesteps(foreign, "uniform", THERE)
        return
    if _is_lumina(foreign):
        _lumina(foreign)
    elif module.endswith("anima") or foreign.on("qwen3") is not None:
        _anima(foreign)
    elif is_sd3:
        set_density(foreign, sign=1, shift=foreign.sourced("training_shift", 1.0))
    else:
        _flux(foreign)
    if foreign.settings["objective.timestep_sampling"] == "mode":
        mode_scale = foreign.get("mode_scale", 1.29)
        foreign.carry("objective.mode_scale", "mode_scale", mode_scale)


def _huber(foreign: Foreign) -> None:
    """Set the threshold of a Huber loss."""
    if foreign.word("loss_type", "l2") not in ("huber", "smooth_l1"):
        return
    delta, scale = foreign.nonzero("huber_c", 0.1), foreign.number("huber_scale", 1.0)
    schedule = foreign.word("huber_schedule", "snr")
    if schedule == "constant":
        delta *= scale or 1.0
    elif schedule == "exponential" and scale not in (None, 1):
        foreign.lacks("huber_scale", scale, "the threshold without noise is 1")
    foreign.set("objective.huber_delta", min(1.0, delta), "huber_c", "huber_scale")


def set_density(foreign: Foreign, *, sign: float, shift: Sourced = (1.0, THERE)) -> None:
    """Set the timesteps that `weighting_scheme` draws.

    FLUX's sigmas are drawn at descending indices (`sign` -1): a mean above 0 is less noise there.
    """
    scheme = foreign.word("weighting_scheme", "none")
    drawn = "logit_normal" if scheme == "logit_normal" else "uniform"
    if scheme == "mode":
        drawn = "mode"
        if sign < 0:
            how = "mode: its ends are swapped there, which matters little"
            foreign.is_nearest("weighting_scheme", how)
    mean, std = foreign.nonzero("logit_mean", 0.0), foreign.sourced("logit_std", 1.0)
    training.set_timesteps(
        foreign, drawn, "weighting_scheme", mean=(sign * mean, "logit_mean"), std=std, shift=shift
    )


def set_sampling(foreign: Foreign, word: str, shift: Sourced) -> None:
    """Set the timesteps of a word of `timestep_sampling` that draws a sigmoid, or all alike."""
    drawn = "uniform" if word == "uniform" else "sigmoid"
    std = foreign.sourced("sigmoid_scale", 1.0)
    training.set_timesteps(foreign, drawn, "timestep_sampling", std=std, shift=shift)


def _flux(foreign: Foreign) -> None:
    sampling = foreign.word("timestep_sampling", "sigma")
    shift = foreign.sourced("discrete_flow_shift", 3.0)
    by_size = sampling.endswith("_shift")
    if sampling == "sigma":
        set_density(foreign, sign=-1, shift=shift)
    else:
        if sampling not in ("uniform", "sigmoid", "shift") and not by_size:
            foreign.is_nearest("timestep_sampling", f"{sampling}: sigmoid without a shift")
        if by_size and foreign.values.get("model_type") == "chroma":
            shift = training.shift_by_tokens(foreign, "timestep_sampling", sampling)
        elif sampling != "shift":
            shift = ("resolution" if by_size else 1.0, "timestep_sampling")
        set_sampling(foreign, sampling, shift)
    guidance = foreign.number("guidance_scale", 3.5)
    foreign.carry("objective.guidance_scale", "guidance_scale", guidance)
    kind = foreign.word("model_prediction_type", "sigma_scaled")
    if kind != "raw":
        foreign.is_nearest("model_prediction_type", f"{kind}: raw, the velocity as it is")


def _is_lumina(foreign: Foreign) -> bool:
    """Say whether it is a training of Lumina 2: by its module, or by its text encoder."""
    module = str(foreign.values.get("network_module", ""))
    return module.endswith("lumina") or foreign.on("gemma2") is not None


def _lumina(foreign: Foreign) -> None:
    """Set system prompt and timesteps; both differ from FLUX's trainer in their defaults."""
    prompt = foreign.get("system_prompt", "")
    foreign.set("base.system_prompt", str(prompt).strip(), "system_prompt")
    sampling = foreign.word("timestep_sampling", "shift")
    shift = foreign.sourced("discrete_flow_shift", 6.0)
    if sampling == "sigma":
        set_density(foreign, sign=-1, shift=shift)
    elif sampling == "nextdit_shift":
        set_sampling(foreign, "uniform", ("resolution", "timestep_sampling"))
    else:
        if sampling != "shift":
            by_size = sampling == "flux_shift"
            shift = ("resolution" if by_size else 1.0, "timestep_sampling")
        set_sampling(foreign, sampling, shift)
    kind = foreign.word("model_prediction_type", "raw")
    if kind != "raw":
        foreign.is_nearest("model_prediction_type", f"{kind}: raw, the velocity as it is")


def _anima(foreign: Foreign) -> None:
    """Set the timesteps of Anima's trainer, whose word is another and which has no shift unless it is asked for."""
    sampling = foreign.word("timestep_sampling", "sigmoid")
    shift = foreign.sourced("discrete_flow_shift", 1.0)
    if sampling == "sigma":
        set_density(foreign, sign=-1, shift=shift)
        return
    if sampling == "flux_shift":
        shift = training.shift_by_tokens(foreign, "timestep_sampling", sampling)
    elif sampling != "shift":
        shift = (1.0, "timestep_sampling")
    set_sampling(foreign, sampling, shift)


# ---- keys that count only where they are on, or for some bases or words

_LOSSES = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}


def _single_keys(foreign: Foreign) -> None:
    foreign.carry_if_on("base.prediction", "v_parameterization", "v_prediction")
    if not foreign.is_flow:
        foreign.carry_if_on("objective.zero_terminal_snr", "zero_terminal_snr", default=False)
        foreign.carry_if_on("base.clip_skip", "clip_skip")
    carry_network_options(foreign)
    _loss(foreign)
    if mask_key := foreign.first_on("alpha_mask", "masked_loss"):
        foreign.carry("data.masks", mask_key, "alpha" if mask_key == "alpha_mask" else "files")
        foreign.carry("data.mask_background", mask_key, 0.0)
    why = "masks belong in a folder masks/ beside the images, under their names"
    foreign.lacks_if_on("conditioning_data_dir", why)
    foreign.carry_if_on("objective.prior_weight", "prior_loss_weight")
    if not foreign.is_flow:
        foreign.carry_if_on("data.emphasis", "weighted_captions", True)
        key = "max_token_length"
        if not foreign.carry_if_on("data.caption_tokens", key):
            foreign.carry("data.caption_tokens", key, 75)
    carry_flow_weights(foreign)
    if not foreign.is_flow:
        key = "debiased_estimation_loss"
        foreign.carry_if_on("objective.weighting", key, "debiased")
        if foreign.on(key) and foreign.on("min_snr_gamma"):
            how = "these weights alone, there times those of min_snr_gamma"
            foreign.is_nearest_to(key, how)
    foreign.carry_if_on("optimizer.max_weight_norm", "scale_weight_norms")
    foreign.lacks_if_on("network_train_text_encoder_only", "the denoiser is always trained")
    carry_output(foreign)


def carry_network_options(foreign: Foreign) -> None:
    """Carry over the options of the adapter's network, some of them typed as text."""

    def carry(setting: str, option: str) -> bool:
        name = f"network_args.{option}"
        is_off = foreign.says(name) in ("0", "0.0", "false", "none")
        return not is_off and foreign.carry_if_on(setting, name)

    if foreign.settings["adapter.kind"] == "lokr":
        foreign.carry_if_on("adapter.lokr_factor", "network_args.factor")
    if not carry("adapter.dropout", "dropout"):
        foreign.carry_if_on("adapter.dropout", "network_dropout")
    carry("adapter.rank_dropout", "rank_dropout")
    carry("adapter.module_dropout", "module_dropout")
    if not carry("optimizer.lora_plus_ratio", "loraplus_unet_lr_ratio"):
        carry("optimizer.lora_plus_ratio", "loraplus_lr_ratio")
    carry("adapter.dora", "dora_wd")
    carry("adapter.rslora", "rs_lora")


def _loss(foreign: Foreign) -> None:
    key = "loss_type"
    word = foreign.says(key, "l2")
    if word in _LOSSES:
        foreign.carry("objective.loss", key, _LOSSES[word])
    elif foreign.on(key):
        foreign.carry("objective.loss", key, "smooth_l1")
        how = "smooth_l1 with objective.huber_delta=0.01, which is close"
        foreign.is_nearest_to(key, how)
        foreign.carry("objective.huber_delta", key, 0.01)
        foreign.carry("objective.huber_schedule", key, "constant")
    if word in ("huber", "smooth_l1"):
        foreign.carry_if_on("objective.huber_schedule", "huber_schedule", default="snr", by=key)


def carry_flow_weights(foreign: Foreign) -> None:
    """Carry over the weights of `weighting_scheme` that are the same here."""
    scheme = foreign.says("weighting_scheme")
    if foreign.is_flow and scheme in ("sigma_sqrt", "cosmap"):
        foreign.carry("objective.weighting", "weighting_scheme", scheme)


def carry_output(foreign: Foreign) -> None:
    """Carry over prompts, the precision of the base, saves, and words about the file."""
    foreign.lacks_if_on("sample_prompts", "write the prompts as sampling.prompts")
    if precision_key := foreign.first_on("fp8_base", "fp8_base_unet", "fp8_scaled"):
        foreign.carry("memory.base_precision", precision_key, "fp8")
    foreign.carry_if_on("output.save_every_epochs", "save_every_n_epochs")
    foreign.carry_if_on("output.save_every_steps", "save_every_n_steps")
    if not foreign.carry_if_on("output.description", "metadata_description"):
        foreign.carry_if_on("output.description", "training_comment")


# ---- the dataset

# Their key -> ours in `data` and in `data.folders.NAME`.
SUBSET_FIELDS: Mapping[str, str] = table_of("sd_scripts_dataset")["fields"]


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file of sd-scripts, as other trainers' do not name folders so."""
    datasets = folders.tables_of(data.get("datasets"))
    keys = {key for one in datasets for key in one}
    is_one = "subsets" in keys or (keys and keys <= _keys("datasets[]."))
    return flattened(data) if is_one else None


def _keys(prefix: str) -> set[str]:
    """Return the keys of the tables of a dataset file under a prefix."""
    rules = rules_of("sd_scripts_dataset")
    names = {key.removeprefix(prefix) for key in rules if key.startswith(prefix)}
    return {name for name in names if "." not in name}


def _read_training_dataset(foreign: Foreign) -> None:
    """Read a training file's options about the dataset, and the dataset file that it names."""
    values = folders.FolderTable((foreign.values, ""))
    has_file = foreign.on("dataset_config") is not None
    folders.named_file(foreign, "dataset_config", tomllib.loads, flat_dataset, read_dataset)
    folder = foreign.on("train_data_dir")
    if folder and foreign.dataset is None:
        foreign.dataset = str(folders.path_of(folder))
        foreign.stays(
            "train_data_dir",
            "is the folder with your images, which is chosen apart from the settings",
        )
    if not has_file and "data.buckets" not in foreign.settings:
        for field, (value, key) in caption_fields(foreign, values).items():
            if key == THERE or field == "caption_lines":
                foreign.set(f"data.{field}", value, key)
            else:
                foreign.carry(f"data.{field}", key, value)
        foreign.set("data.buckets", foreign.flag("enable_bucket"), "enable_bucket")
        if extension := foreign.first_on("caption_extension", "caption_extention"):
            folders.add_extension(foreign, values[extension], extension)
        _set_held_out(foreign, values)
    if folder := foreign.on("reg_data_dir"):
        foreign.set("data.regularisation_dir", str(folders.path_of(folder)), "reg_data_dir")
    size = foreign.on("resolution")
    if size and "data.resolution" not in foreign.settings:
        folders.set_sizes(foreign, [(size, "resolution")])


def read_dataset(foreign: Foreign) -> None:
    """Read a dataset file; raises RequestError where it names no folder of images."""
    tables = foreign.data
    subset_folders: list[folders.FolderTable] = []
    sizes: list[Sourced] = []
    general = folders.table_under(tables, "general")
    datasets = folders.tables_of(tables.get("datasets"))
    subsets = [folders.tables_of(dataset.get("subsets")) for dataset in datasets]
    image_dirs = [{str(subset.get("image_dir")) for subset in of_one} for of_one in subsets]
    dataset_keys, subset_keys = _keys("datasets[]."), _keys("datasets[].subsets[].")
    # sd-scripts' documentation has examples with keys above all tables.
    top = {key: value for key, value in tables.items() if key in dataset_keys}
    for number, dataset in enumerate(datasets):
        where = f"datasets[{number}]."
        layers = [(top, ""), (general, "general."), (dataset, where)]
        values = folders.FolderTable(*layers)
        is_same = image_dirs[number] == image_dirs[0]
        if "resolution" in (dataset if number else values) and is_same:
            sizes.append(values.sourced("resolution"))
        if number == 0:  # the keys that subsets do not have
            if values.get("batch_size") is not None:
                foreign.carry("train.batch_size", values.name("batch_size"), values["batch_size"])
            buckets = bool(values.get("enable_bucket", False))
            foreign.set("data.buckets", buckets, values.name("enable_bucket"))
            if values.get("prior_loss_weight"):
                weight, name = values.sourced("prior_loss_weight")
                foreign.carry("objective.prior_weight", name, weight)
            _set_held_out(foreign, values)
        own_keys = dataset.keys() & dataset_keys - subset_keys - {"subsets"} if number else set()
        for key in own_keys - ({"resolution"} if is_same else set()):
            if dataset[key] == datasets[0].get(key):
                foreign.stays(f"{where}{key}", "the first of the datasets says the same")
            else:
                why = "all images are trained as the first of the datasets says"
                foreign.lacks(f"{where}{key}", dataset[key], why)
        layers = [
            ({key: value for key, value in layer.items() if key in subset_keys}, prefix)
            for layer, prefix in layers
        ]
        for index, subset in enumerate(subsets[number]):
            inner = f"{where}subsets[{index}]."
            folder = _subset(foreign, folders.FolderTable(*layers, (subset, inner)), inner)
            subset_folders += [] if folder is None else [folder]
    if not subset_folders:
        raise RequestError(
            "the file names no subset to train", fix="give [[datasets.subsets]] an image_dir"
        )
    folders.set_sizes(foreign, sizes)
    folders.set_folders(foreign, subset_folders)


def caption_fields(foreign: Foreign, values: folders.FolderTable) -> dict[str, Sourced]:
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


def _set_held_out(foreign: Foreign, values: folders.FolderTable) -> None:
    share, name = values.sourced("validation_split")
    if share:
        foreign.carry("data.validation_fraction", name, share)


def _subset(
    foreign: Foreign, folder: folders.FolderTable, where: str
) -> folders.FolderTable | None:
    """Give a subset its path and settings; return None for one that is not trained on."""
    key = next((key for key in ("image_dir", "metadata_file") if folder.get(key)), "")
    if not isinstance(folder.get(key), str):
        raise RequestError(
            f"{where.removesuffix('.')} names no folder of images", fix="give it an image_dir"
        )
    path = folders.path_of(folder[key])
    folder.path, folder.key = path if key == "image_dir" else path.parent, folder.name(key)
    share, name = folder.sourced("validation_split")
    if name.startswith(where) and share == 1.0:
        why = (
            "is validated with only and not trained: keep it outside of the folder with your images"
        )
        foreign.lacks(folder.key, str(folder.path), why)
        foreign.stays(name, "the folder is not trained")
        return None
    # The name of a folder means nothing there beside a dataset file.
    folder.settings = {"repeats": (1, THERE), **caption_fields(foreign, folder)}
    if folder.get("alpha_mask"):
        name = folder.name("alpha_mask")
        folders.set_masks(foreign, "alpha", name, background=(0.0, name))
    folder.regularisation = bool(folder.get("is_reg"))
    folders.add_extension(foreign, *folder.sourced("caption_extension"))
    return folder


_DATASET = "sd_scripts_dataset"
TRAINERS = (
    Trainer("sd-scripts (a dataset file)", (_DATASET,), flat_dataset, read_dataset),
    Trainer("sd-scripts", (_DATASET, "sd_scripts"), flat, read_training),
)

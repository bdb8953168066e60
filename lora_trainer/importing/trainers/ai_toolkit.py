"""ai-toolkit (ostris): YAML jobs and those its interface writes, `sd_trainer` and `diffusion_trainer`.

The keys are those of the one process of a job, at 27a03a9. Its defaults are set where the job leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import (
    ImageFolder,
    path_of,
    read_size,
    set_folders,
    set_resolutions,
)
from lora_trainer.importing.foreign_optimizers import set_arguments, set_optimizer, set_schedule
from lora_trainer.importing.rules import THERE, Foreign, Trainer, carry, flattened
from lora_trainer.importing.trainers.ai_toolkit_keys import ARCHITECTURES, BITS, KEYS, OLD_FLAGS

_TYPES = ("sd_trainer", "diffusion_trainer", "ui_trainer")
_FIELDS = (
    "num_repeats", "flip_x", "caption_dropout_rate", "shuffle_tokens", "token_dropout_rate", "trigger_word",
    "keep_tokens", "is_reg", "prior_reg", "alpha_mask", "mask_path", "mask_min_value", "loss_multiplier",
    "caption_ext",
)  # fmt: skip


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a job's one process, and `config.` and `meta.` ones of the rest."""
    config = data.get("config")
    if not isinstance(config, Mapping) or not isinstance(config.get("process"), list):
        return None
    processes = [one for one in config["process"] if isinstance(one, Mapping)]
    if not processes:
        return None
    values = {name: value for name, value in data.items() if name != "config"}
    values["config"] = {name: value for name, value in config.items() if name != "process"}
    flat_values = flattened(values) | flattened(processes[0])
    for number, other in enumerate(processes[1:], start=1):
        flat_values |= flattened(other, f"process[{number}].")
    return flat_values


def read(foreign: Foreign) -> None:
    """Read what depends on several keys."""
    _model(foreign)
    _network(foreign)
    _optimizer(foreign)
    _objective(foreign)
    _datasets(foreign)
    _output(foreign)
    shared.settle(foreign)


def _model(foreign: Foreign) -> None:
    findings = foreign.findings
    kind = foreign.get("type", "sd_trainer")
    if (
        kind not in _TYPES
        or "network.type" not in foreign.values
        and "network.linear" not in foreign.values
    ):
        raise RequestError(
            f"type={kind} is a process that is not done here, or it has no network",
            fix="give a job of type sd_trainer or diffusion_trainer with a network",
        )
    findings.stays("type", "is what is trained here")
    name = foreign.get("model.arch", None)
    source = "model.arch"
    if name is None:
        source = next((flag for flag in OLD_FLAGS if foreign.on(flag)), "model.arch")
        name = OLD_FLAGS.get(source, "sd1")
    word = str(name).partition(":")[0].lower()
    if word not in ARCHITECTURES:
        raise RequestError(
            shared.refused_model(str(name), source), fix=f"use a job for {', '.join(ARCHITECTURES)}"
        )
    foreign.is_flow, foreign.trains_text = ARCHITECTURES[word]
    foreign.stay("the base's files say what it is", "model.arch", *OLD_FLAGS)
    if foreign.on("model.is_v_pred"):
        findings.set("base.prediction", "v_prediction", "model.is_v_pred")
    bits = str(foreign.get("model.qtype", "qfloat8")).partition("|")[0]
    if foreign.on("model.quantize"):
        precision = BITS.get(bits, "int8")
        findings.set("memory.base_precision", precision, "model.quantize")
        if (
            bits not in ("qfloat8", "float8", "int8", "qint8", "nf4")
            and "model.qtype" in foreign.values
        ):
            findings.is_nearest("model.qtype", f"{bits}: memory.base_precision={precision}")
    foreign.stay("is off there, or how the base is quantized", "model.quantize", "model.qtype")
    shared.set_precision(foreign, "train.dtype", missing="fp32")


def _network(foreign: Foreign) -> None:
    findings = foreign.findings
    source = "network.type"
    kind = shared.set_kind(foreign, str(foreign.get(source, "lora")), source)
    word = str(foreign.get(source, "lora")).lower()
    rank_name = "network.rank" if foreign.on("network.rank") else "network.linear"
    alpha_name = "network.linear_alpha" if foreign.on("network.linear_alpha") else "network.alpha"
    rank = foreign.number(rank_name)
    if kind == "lokr" and foreign.flag("network.lokr_full_rank", default=True):
        rank_name = "network.lokr_full_rank"
        rank = 1e10
        if rank_name not in foreign.values:
            findings.is_nearest(source, "whole matrices there by default, the highest rank here")
    shared.set_rank(foreign, rank=rank, source=rank_name, alpha=foreign.number(alpha_name),
                    alpha_source=alpha_name, default_rank=4, default_alpha=1)  # fmt: skip
    foreign.stay("another key says it", "network.rank", "network.linear", "network.alpha",
                 "network.linear_alpha", "network.lokr_full_rank")  # fmt: skip
    if word == "dora":
        findings.set("adapter.dora", True, source)
    if kind == "lokr" and foreign.on("network.lokr_factor"):
        carry(
            findings,
            "adapter.lokr_factor",
            "network.lokr_factor",
            foreign.values["network.lokr_factor"],
        )
    foreign.stay("is of LoKr", "network.lokr_factor")
    if foreign.on("network.dropout"):
        shared.set_dropout(
            foreign, "adapter.dropout", "network.dropout", foreign.values["network.dropout"]
        )
    foreign.stay("is off there", "network.dropout")
    conv = foreign.number("network.conv")
    if conv and not foreign.is_flow:
        findings.set("adapter.targets", "all", "network.conv")
        carry(findings, "adapter.conv_rank", "network.conv", int(min(1024, conv)))
        if kind != "oft":
            carry(
                findings,
                "adapter.conv_alpha",
                "network.conv_alpha",
                foreign.get("network.conv_alpha", conv),
            )
    else:
        findings.set("adapter.targets", "transformer", note=THERE)
    foreign.stay(
        "this base has no convolutions, or it is off", "network.conv", "network.conv_alpha"
    )
    for name in ("only_if_contains", "ignore_if_contains"):
        key = f"network.network_kwargs.{name}"
        if foreign.on(key):
            why = "choose adapter.targets; single layers are left out with optimizer.learning_rate_pattern"
            findings.lacks(key, foreign.values[key], why)
        foreign.stay("is off there", key)


def _optimizer(foreign: Foreign) -> None:
    findings = foreign.findings
    rate_source = "train.lr" if foreign.on("train.lr") else THERE
    rate = foreign.number(rate_source, 1e-6)
    foreign.stay("does nothing there for a network: all of it has the rate of train.lr",
                 "train.unet_lr", "train.text_encoder_lr")  # fmt: skip
    source = "train.optimizer" if "train.optimizer" in foreign.values else THERE
    name = str(foreign.get("train.optimizer", "adamw"))
    ours = set_optimizer(foreign, name, source, rate=rate, rate_source=rate_source)
    if ours in ("adamw", "adamw8bit", "prodigy"):
        findings.set("optimizer.epsilon", 1e-6, note=THERE)
    prefix = "train.optimizer_params."
    options = {
        key.removeprefix(prefix): value
        for key, value in foreign.values.items()
        if key.startswith(prefix)
    }
    set_arguments(foreign, prefix, options)
    foreign.stay("is not given", "train.optimizer_params")
    steps = foreign.number("train.steps", 1000)
    word = str(foreign.get("train.lr_scheduler", "constant"))
    warmup_key = "train.lr_scheduler_params.num_warmup_steps"
    default = 1000.0 if word == "constant_with_warmup" else 0.0
    set_schedule(
        foreign, word, "train.lr_scheduler" if "train.lr_scheduler" in foreign.values else THERE,
        warmup=foreign.number(warmup_key, default) or 0.0,
        warmup_source=warmup_key if warmup_key in foreign.values else THERE, steps=steps,
    )  # fmt: skip
    if word == "linear":
        findings.set("optimizer.schedule", "constant", "train.lr_scheduler")
        findings.is_nearest(
            "train.lr_scheduler", "linear rises there from a third of the rate: constant"
        )
    prefix = "train.lr_scheduler_params."
    for key in (key for key in foreign.values if key.startswith(prefix)):
        if key not in findings.named:
            findings.lacks(
                key, foreign.values[key], "is no option of schedules here", off=(0.0, 1.0)
            )
    if steps:
        carry(findings, "train.steps", "train.steps", int(steps))
        if "train.steps" not in foreign.values:
            findings.sources["train.steps"] = THERE
    trained = foreign.flag("train.train_text_encoder")
    shared.set_text_encoder(foreign, trained=trained, source="train.train_text_encoder",
                            rates=[(rate_source, rate or 0.0)] if trained else ())  # fmt: skip
    if foreign.flag("train.ema_config.use_ema"):
        decay = foreign.number("train.ema_config.ema_decay", 0.999)
        findings.set("train.ema_decay", decay, "train.ema_config.use_ema", *(
            n for n in ("train.ema_config.ema_decay",) if n in foreign.values))  # fmt: skip
    foreign.stay("is off there", "train.ema_config.use_ema", "train.ema_config.ema_decay")
    times = max(foreign.number("train.gradient_accumulation", 1) or 1,
                foreign.number("train.gradient_accumulation_steps", 1) or 1)  # fmt: skip
    name = "train.gradient_accumulation" if foreign.number("train.gradient_accumulation", 1) == times else (
        "train.gradient_accumulation_steps")  # fmt: skip
    shared.set_batch(foreign, size=foreign.number("train.batch_size"), source="train.batch_size",
                     times=times, times_source=name)  # fmt: skip
    foreign.stay(
        "every step is one batch",
        "train.gradient_accumulation",
        "train.gradient_accumulation_steps",
    )


def _objective(foreign: Foreign) -> None:
    findings = foreign.findings
    gamma = "train.snr_gamma" if foreign.on("train.snr_gamma") else "train.min_snr_gamma"
    shared.set_snr_weights(foreign, foreign.number(gamma), gamma)
    if gamma == "train.snr_gamma" and not foreign.is_flow:
        how = "min_snr: weights of gamma / SNR there grow without bound, here up to 1"
        findings.is_nearest(gamma, f"{foreign.values[gamma]}: {how}")
    foreign.stay("is off there", "train.min_snr_gamma", "train.snr_gamma")
    kind = str(foreign.get("train.loss_type", "mse"))
    ours = {"mse": "mse", "pseudo_huber": "smooth_l1", "mae": "smooth_l1"}.get(kind, "mse")
    findings.set("objective.loss", ours, *foreign.there("train.loss_type"))
    if kind != "mse":
        times = ", twice as large" if ours == "smooth_l1" else ""
        findings.is_nearest("train.loss_type", f"{kind}: objective.loss={ours}{times}")
    if ours != "mse":
        findings.set("objective.huber_delta", 0.01, note="what comes near to it")
        findings.set("objective.huber_schedule", "constant", note=THERE)
    low, high = (
        foreign.number("train.min_denoising_steps", 0),
        foreign.number("train.max_denoising_steps", 999),
    )
    # There they are places in a list of timesteps that begins with pure noise.
    if low and low > 0:
        carry(findings, "objective.max_timestep", "train.min_denoising_steps", 999 - int(low))
    if high is not None and 0 <= high < 999:
        carry(findings, "objective.min_timestep", "train.max_denoising_steps", 999 - int(high))
    if (
        foreign.is_flow
        and (low or high != 999)
        and foreign.get("train.timestep_type", "sigmoid") != "linear"
    ):
        name = foreign.there("train.max_denoising_steps", "train.min_denoising_steps")[0]
        how = "the drawn timesteps are squeezed into the range, there those outside are left out"
        findings.is_nearest(name, how)
    foreign.stay("is all of the range", "train.min_denoising_steps", "train.max_denoising_steps")
    _timesteps(foreign)
    _preservation(foreign)


def _timesteps(foreign: Foreign) -> None:
    findings, source = foreign.findings, "train.timestep_type"
    word = str(foreign.get(source, "sigmoid"))
    if not foreign.is_flow:
        foreign.stay("is for flow matching", source)
        shared.set_timesteps(foreign, "uniform", THERE)
    else:
        distribution: shared.Distribution = (
            "sigmoid" if word in ("sigmoid", "lognorm_blend") else "uniform"
        )
        by_size = word.endswith("shift")
        shared.set_timesteps(foreign, distribution, source, shift="resolution" if by_size else 1.0,
                             shift_source=source if by_size else THERE)  # fmt: skip
        if word not in ("sigmoid", "linear", "shift", "flux_shift", "lumina2_shift"):
            findings.is_nearest(source, f"{word}: {distribution}, without weights")
    bias = str(foreign.get("train.content_or_style", "balanced"))
    if bias != "balanced":
        mean = 0.7 if bias == "content" else -0.7
        shared.set_timesteps(foreign, "logit_normal", "train.content_or_style", mean=mean,
                             mean_source="train.content_or_style", std=1.0)  # fmt: skip
        findings.is_nearest(
            "train.content_or_style", f"{bias}: logit_normal with a mean of {mean:g}"
        )
    foreign.stay(
        "all timesteps count alike", "train.content_or_style", "train.content_or_style_reg"
    )


def _preservation(foreign: Foreign) -> None:
    findings = foreign.findings
    names = ("train.diff_output_preservation", "train.diff_output_preservation_multiplier",
             "train.diff_output_preservation_class")  # fmt: skip
    word = foreign.on("train.diff_output_preservation_class")
    if foreign.on(names[0]) and word is not None and foreign.on("trigger_word") is not None:
        weight = foreign.number(names[1], 1.0)
        findings.set("objective.preservation_weight", weight, names[0])
        carry(findings, "data.class_word", names[2], word)
    elif foreign.on(names[0]):
        findings.lacks(names[0], True, "needs a trigger word and a class")
    foreign.stay("is off there, or its multiplier", *names)


def _datasets(foreign: Foreign) -> None:
    findings = foreign.findings
    tables = _tables(foreign.data)
    folders, sizes = [], []
    for number, table in enumerate(tables):
        where = f"datasets[{number}]."
        folder_key = next((n for n in ("folder_path", "dataset_path") if table.get(n)), None)
        for size in _sizes(table):
            try:
                sizes.append((read_size(size), f"{where}resolution"))
            except ValueError as error:
                findings.lacks(f"{where}resolution", size, str(error))
        findings.named.add(f"{where}resolution")
        if folder_key is None:
            continue
        folder = ImageFolder(path=path_of(table[folder_key]), key=f"{where}{folder_key}")
        folder.regularisation = table.get("is_reg") is True
        _dataset_fields(foreign, folder, table, where)
        folders.append(folder)
    foreign.stay("is not given", "datasets")
    set_folders(foreign, folders)
    if sizes:
        unique = dict(sizes)
        set_resolutions(foreign, list(unique), sizes[0][1])
        per_folder = {str(table.get("resolution", 512)) for table in tables}
        if len(per_folder) > 1 and len({folder.path for folder in folders}) > 1:
            findings.is_nearest(sizes[0][1], "all folders are trained at all of these resolutions")
    buckets = [table.get("buckets", True) for table in tables]
    source = "datasets[0].buckets" if "datasets[0].buckets" in foreign.values else None
    findings.set(
        "data.buckets", all(buckets), *((source,) if source else ()), note="" if source else THERE
    )
    word = foreign.on("trigger_word")
    if word is not None:
        carry(findings, "data.trigger", "trigger_word", word)
    foreign.stay("is not given", "trigger_word")


def _tables(data: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    (first, *_) = (one for one in data["config"]["process"] if isinstance(one, Mapping))
    datasets = first.get("datasets")
    return (
        [one for one in datasets if isinstance(one, Mapping)] if isinstance(datasets, list) else []
    )


def _sizes(table: Mapping[str, Any]) -> list[Any]:
    """Return the sizes a folder is trained at: a side, or several; [512, 768] are two of them."""
    sizes = table.get("resolution", 512)
    return sizes if isinstance(sizes, list) else [sizes]


def _dataset_fields(
    foreign: Foreign, folder: ImageFolder, table: Mapping[str, Any], where: str
) -> None:
    findings, folder_settings = foreign.findings, folder.settings
    same = {"num_repeats": "repeats", "flip_x": "flip", "caption_dropout_rate": "caption_dropout",
            "shuffle_tokens": "shuffle_tags", "token_dropout_rate": "tag_dropout",
            "trigger_word": "trigger", "loss_multiplier": "weight"}  # fmt: skip
    for name, field in same.items():
        if table.get(name) not in (None, "", False) and not (
            name == "loss_multiplier" and table[name] == 1
        ):
            folder_settings[field] = (table[name], f"{where}{name}")
    folder_settings.setdefault("repeats", (1, THERE))
    if folder_settings.keys() & {"shuffle_tags", "tag_dropout"}:
        folder_settings["keep_tokens"] = (
            table.get("keep_tokens", 0),
            f"{where}keep_tokens" if "keep_tokens" in table else THERE,
        )
    extension = str(table.get("caption_ext", "txt"))
    if "caption_ext" in table:
        dotted = extension if extension.startswith(".") else f".{extension}"
        extensions = findings.values.get("data.caption_extensions", [])
        findings.set(
            "data.caption_extensions",
            list(dict.fromkeys([*extensions, dotted])),
            f"{where}caption_ext",
        )
    if folder.regularisation:
        findings.stays(f"{where}is_reg", "its images keep the class as it is")
        if table.get("prior_reg"):
            findings.set("objective.prior", "base", f"{where}prior_reg")
    if table.get("alpha_mask") or table.get("mask_path"):
        key = "alpha_mask" if table.get("alpha_mask") else "mask_path"
        findings.set("data.masks", "alpha" if key == "alpha_mask" else "files", f"{where}{key}")
        least = table.get("mask_min_value", 0.0)
        low = float(least) if isinstance(least, int | float) and 0 <= least < 1 else 0.0
        name = f"{where}mask_min_value"
        findings.set("data.mask_background", low, *((name,) if "mask_min_value" in table else ()),
                     note="" if "mask_min_value" in table else THERE)  # fmt: skip
        if key == "mask_path":
            findings.is_nearest(
                f"{where}{key}", "masks are looked for in a folder masks/ beside the images"
            )
    for name in _FIELDS:  # fmt: skip
        key = f"{where}{name}"
        if name in table and key not in findings.named and name not in {
            part.rpartition(".")[2] for _, part in folder_settings.values()
        }:  # fmt: skip
            findings.stays(key, "is off there, or as it is here")


def _output(foreign: Foreign) -> None:
    findings = foreign.findings
    shared.set_saves(
        foreign,
        every=foreign.number("save.save_every", 1000),
        source="save.save_every",
        unit="steps",
    )
    if "save.save_every" not in foreign.values:
        findings.sources["output.save_every_steps"] = THERE
    if foreign.flag("train.disable_sampling"):
        findings.set("sampling.every_steps", 0, "train.disable_sampling")
    elif foreign.number("sample.sample_every"):
        carry(
            findings,
            "sampling.every_steps",
            "sample.sample_every",
            foreign.values["sample.sample_every"],
        )
    foreign.stay("is off there", "train.disable_sampling", "sample.sample_every")
    prompts = foreign.on("sample.prompts")
    texts = [text for text in prompts if isinstance(text, str)] if isinstance(prompts, list) else []
    samples = [value for key, value in foreign.values.items()
               if key.startswith("sample.samples[") and key.endswith("].prompt") and value]  # fmt: skip
    if samples or texts:
        chosen = samples or texts
        word = str(foreign.get("trigger_word", ""))
        findings.set("sampling.prompts", [str(text).replace("[trigger]", word) for text in chosen],
                     "sample.samples" if samples else "sample.prompts")  # fmt: skip
    for key in foreign.values:
        if key.startswith("sample.samples[") and key not in findings.named:
            findings.stays(key, "is in sampling.prompts, or the same for all samples")
    foreign.stay("is not given", "sample.prompts", "sample.samples")
    repository = foreign.on("save.hf_repo_id")
    if repository is not None and foreign.on("save.push_to_hub"):
        carry(findings, "output.hub_repo", "save.hf_repo_id", repository)
        findings.set("output.hub_private", foreign.flag("save.hf_private"), "save.hf_private")
    foreign.stay("nothing is uploaded", "save.push_to_hub", "save.hf_repo_id", "save.hf_private")


AI_TOOLKIT = Trainer(name="ai-toolkit", flat=flat, keys=KEYS, read=read)

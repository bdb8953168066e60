"""Readers of the options about what is learned and how: adapter, optimizer, rates, loss, timesteps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lora_trainer.config import SCHEDULE_FREE
from lora_trainer.importing.options import DEFAULT, Options, is_true, pairs_of, set_read, words_of

_SCHEDULES = {"constant_with_warmup": "constant", "adafactor": None}
_OPTIMIZERS = {"adamwschedulefree": "schedulefree_adamw"}
_ADAPTERS = {"lora": "lora", "locon": "lora", "loha": "loha", "lokr": "lokr", "diag-oft": "oft"}


def adapter(options: Options) -> None:
    module = str(options.values["network_module"])
    arguments = pairs_of(options.values.get("network_args"))
    kind = module.removeprefix("networks.").partition("_")[0]
    if module.startswith("lycoris"):
        kind = _ADAPTERS.get(arguments.get("algo", "lora"), arguments.get("algo", "lora"))
    if kind in ("lora", "loha", "lokr", "oft"):
        options.set("network_module", "adapter.kind", kind)
    else:
        options.found.lacks("network_module", module, "adapters here are lora, loha, lokr and oft")


def adapter_arguments(options: Options) -> None:
    numbers: Mapping[str, tuple[str, Callable[[str], Any]]] = {
        "conv_dim": ("adapter.conv_rank", int),
        "conv_alpha": ("adapter.conv_alpha", float),
        "rank_dropout": ("adapter.rank_dropout", float),
        "module_dropout": ("adapter.module_dropout", float),
        "dropout": ("adapter.dropout", float),
        "factor": ("adapter.lokr_factor", int),
        "loraplus_lr_ratio": ("optimizer.lora_plus_ratio", float),
        "dora_wd": ("adapter.dora", is_true),
    }
    for name, text in pairs_of(options.values["network_args"]).items():
        told = f"network_args {name}"
        if name in numbers:
            key, kind = numbers[name]
            set_read(options, told, key, text, kind)
        elif name == "algo":
            options.found.stays(told, "says the kind of adapter")
        else:
            options.found.lacks(told, text, "is no option of adapters here")
    if "conv_dim" in pairs_of(options.values["network_args"]):
        options.set("network_args conv_dim", "adapter.targets", "all")


def alpha(options: Options) -> None:
    named = options.values.get("network_alpha")
    source = DEFAULT if named is None else "network_alpha"
    if options.found.values.get("adapter.kind") != "oft":
        options.found.set("adapter.alpha", 1 if named is None else named, source)


def text_encoder(options: Options) -> None:
    """There, text encoders are trained unless something says no."""
    flags = ("network_train_unet_only", "cache_text_encoder_outputs")
    off = next((name for name in flags if options.given(name)), None)
    rate = options.values.get("text_encoder_lr")
    rates = rate if isinstance(rate, list) else [rate]
    if off or rates[0] == 0:
        source = off or "text_encoder_lr"
        options.set(source, "adapter.text_encoder", False)
        for name in ("network_train_unet_only", "text_encoder_lr"):
            if name in options.values and name != source:
                options.found.stays(name, "text encoders are not trained")
        return
    if "network_train_unet_only" in options.values:
        options.found.stays("network_train_unet_only", "is off (false)")
    source = DEFAULT if rate is None else "text_encoder_lr"
    options.set(source, "adapter.text_encoder", True)
    rate = rates[0] or options.given("learning_rate")
    # Prodigy finds one rate for everything: both programs give it a factor, here there is one.
    if rate is not None and options.found.values.get("optimizer.name") != "prodigy":
        options.set(source, "optimizer.text_encoder_learning_rate", rate)
    if len(set(rates)) > 1:
        options.found.lacks("text_encoder_lr", rates[1:], "all text encoders have one rate")


def learning_rate(options: Options) -> None:
    name = "learning_rate" if options.given("unet_lr") is None else "unet_lr"
    rate = options.given(name)
    if rate is None:
        options.found.lacks("learning_rate", "missing", "it is what the preset says")
        return
    options.set(name, "optimizer.learning_rate", rate)
    if name == "unet_lr" and "learning_rate" in options.values:
        options.found.stays("learning_rate", "unet_lr and text_encoder_lr say more")
    elif "unet_lr" in options.values and name != "unet_lr":
        options.found.stays("unet_lr", "is not given")


def optimizer(options: Options) -> None:
    asked = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
    named = [options.given("optimizer_type"), *(asked[n] for n in asked if options.given(n))]
    name = next((one for one in named if one), None)
    for flag in asked:
        if flag in options.values and not options.given(flag):
            options.found.stays(flag, "is off (false)")
    if name is None:
        return
    sources = ("optimizer_type", *asked)
    source = next(one for one in sources if options.given(one))
    known = {str(word).replace("_", "").lower(): word for word in words_of("optimizer.name")}
    word = str(name).rpartition(".")[2].replace("_", "").lower()
    ours = _OPTIMIZERS.get(word) or known.get(word)
    if ours is None:
        options.found.lacks(
            source, name, f"optimizers here are {', '.join(map(str, known.values()))}"
        )
    else:
        options.set(source, "optimizer.name", ours)


def optimizer_arguments(options: Options) -> None:
    numbers = {
        "weight_decay": "optimizer.weight_decay",
        "eps": "optimizer.epsilon",
        "d_coef": "optimizer.prodigy_d_coef",
        "growth_rate": "optimizer.prodigy_growth_rate",
    }
    always = {"decouple", "safeguard_warmup", "use_bias_correction"}
    for name, text in pairs_of(options.values["optimizer_args"]).items():
        told = f"optimizer_args {name}"
        if name in numbers:
            set_read(options, told, numbers[name], text, float)
        elif name == "betas":
            first, _, second = text.strip("()[] ").partition(",")
            set_read(options, told, "optimizer.beta1", first, float)
            set_read(options, told, "optimizer.beta2", second, float)
        elif name in always and is_true(text):
            options.found.stays(told, "is always so")
        elif name in ("relative_step", "scale_parameter", "warmup_init") and not is_true(text):
            options.found.stays(told, "is never so")
        else:
            options.found.lacks(told, text, "is no option of optimizers here")


def schedule(options: Options) -> None:
    asked = options.values.get("lr_scheduler") or "constant"
    source = "lr_scheduler" if "lr_scheduler" in options.values else DEFAULT
    if options.found.values.get("optimizer.name") == SCHEDULE_FREE:
        asked = "constant_with_warmup"  # there it takes the place of any scheduler
    ours = _SCHEDULES.get(asked, asked)
    if ours in words_of("optimizer.schedule"):
        options.set(source, "optimizer.schedule", ours)
    else:
        shapes = ", ".join(map(str, words_of("optimizer.schedule")))
        options.found.lacks(source, asked, f"schedules here are {shapes}")
    warmup, steps = options.values.get("lr_warmup_steps") or 0, options.given("max_train_steps")
    source = "lr_warmup_steps" if "lr_warmup_steps" in options.values else DEFAULT
    if asked == "constant" or not warmup:
        options.set(source, "optimizer.warmup_fraction", 0.0)
    elif warmup < 1:
        options.set(source, "optimizer.warmup_fraction", warmup)
    elif steps:
        options.set(source, "optimizer.warmup_fraction", min(0.9, warmup / steps))
    else:
        options.found.lacks(source, warmup, "give optimizer.warmup_fraction, a share of the steps")


def weighting(options: Options) -> None:
    gamma, scheme = options.given("min_snr_gamma"), options.given("weighting_scheme")
    if gamma is not None:
        options.set("min_snr_gamma", "objective.weighting", "min_snr")
        options.set("min_snr_gamma", "objective.min_snr_gamma", gamma)
    elif options.given("debiased_estimation_loss"):
        options.set("debiased_estimation_loss", "objective.weighting", "debiased")
    elif scheme in ("sigma_sqrt", "cosmap"):
        options.set("weighting_scheme", "objective.weighting", scheme)
    else:
        options.set(DEFAULT, "objective.weighting", "none")
    for name in ("min_snr_gamma", "debiased_estimation_loss"):
        if name in options.values and options.given(name) is None:
            options.found.stays(name, "is off")
    if scheme in ("logit_normal", "mode"):
        options.set("weighting_scheme", "objective.timestep_sampling", scheme)
    elif scheme not in (None, "sigma_sqrt", "cosmap"):
        options.found.lacks(
            "weighting_scheme", None if scheme == "none" else scheme, "see objective.weighting"
        )


def timesteps(options: Options) -> None:
    asked = str(options.values.get("timestep_sampling", "sigma"))
    shift = options.given("discrete_flow_shift")
    if asked in ("uniform", "sigmoid"):
        options.set("timestep_sampling", "objective.timestep_sampling", asked)
    elif asked == "shift" or asked.endswith("_shift"):
        options.set("timestep_sampling", "objective.timestep_sampling", "sigmoid")
    elif asked == "sigma" and "timestep_sampling" in options.values:
        options.found.stays("timestep_sampling", "weighting_scheme says how they are drawn")
    elif asked != "sigma":
        options.found.lacks("timestep_sampling", asked, "see objective.timestep_sampling")
    if asked.endswith("_shift"):
        options.set("timestep_sampling", "objective.flow_shift", "resolution")
    elif shift is not None and asked in ("shift", "sigma"):
        options.set("discrete_flow_shift", "objective.flow_shift", shift)
    if "discrete_flow_shift" in options.values and asked not in ("shift", "sigma"):
        options.found.stays("discrete_flow_shift", f"means nothing with timestep_sampling {asked}")
    scale = options.values.get("sigmoid_scale", 1.0)
    if scale != 1.0:
        options.set("sigmoid_scale", "objective.timestep_sampling", "logit_normal")
        options.set("sigmoid_scale", "objective.logit_std", scale)
    elif "sigmoid_scale" in options.values:
        options.found.stays("sigmoid_scale", "1 is what sigmoid is")


def loss(options: Options) -> None:
    kind = options.values["loss_type"]
    ours = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}.get(str(kind))
    if ours is None:
        options.found.lacks("loss_type", kind, "losses here are mse, huber and smooth_l1")
    else:
        options.set("loss_type", "objective.loss", ours)

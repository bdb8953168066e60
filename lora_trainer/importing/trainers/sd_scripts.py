"""sd-scripts (kohya-ss): TOML files of a training, of a dataset, and the options its GUIs save.

What its arguments mean together: the base's kind, adapter, optimizer and length. Its defaults are set where
the file leaves them out and they change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.declare import CHUNK_TOKENS
from lora_trainer.importing import shared
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, as_number
from lora_trainer.importing.foreign_optimizers import read_optimizer, read_schedule
from lora_trainer.importing.rules import Trainer, table_of
from lora_trainer.importing.trainers import sd_scripts_dataset

NAME = "sd-scripts"
DEFAULT_STEPS = 1600
_FLOW_KEYS = ("ae", "clip_g", "t5xxl", "clip_l", "model_prediction_type", "timestep_sampling",
              "discrete_flow_shift", "training_shift", "guidance_scale", "sigmoid_scale")  # fmt: skip
_OTHER_MODULES = ("lumina", "hunyuan", "anima", "lllite", "leco")
_AS_TEXT_OFF = ("", "0", "0.0", "false", "none")


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values = without_sections(data)
    known_keys = values.keys() & SD_SCRIPTS.keys.keys()
    telling = {
        "network_module",
        "pretrained_model_name_or_path",
        "train_data_dir",
        "dataset_config",
    }
    return values if len(known_keys) * 2 > len(values) or telling & known_keys else None


def without_sections(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of all sections, and of none."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= value if isinstance(value, Mapping) else {name: value}
    return values


def read_training(foreign: Foreign) -> None:
    """Read the options of a training, and the dataset file that they name."""
    _base(foreign)
    read_adapter(foreign)
    _text_encoder(foreign, read_rates(foreign))
    _dataset(foreign)
    read_objective(foreign)
    shared.set_precision(foreign, "mixed_precision", missing="no")
    read_output(foreign)
    read_length(foreign)


def _base(foreign: Foreign) -> None:
    module = str(foreign.values.get("network_module", ""))
    if any(word in module for word in _OTHER_MODULES):
        raise RequestError(
            f"network_module={module} trains a model that is not trained here",
            fix="see docs/models.md for those that are",
        )
    is_flow = any(foreign.on(name) is not None for name in _FLOW_KEYS)
    is_flow |= module.rpartition("_")[2] in ("flux", "sd3")
    foreign.is_flow, foreign.trains_text = is_flow, not is_flow
    if "model_type" in foreign.values:
        kind = foreign.values["model_type"]
        foreign.refuse("model_type", kind, "is not trained here", off=("flux", "chroma"))


def read_adapter(foreign: Foreign) -> None:
    """Set kind, rank, layers and dropouts of the adapter."""
    module = foreign.word("network_module", "networks.lora")
    arguments = shared.expand(foreign, "network_args")
    is_lycoris = module.startswith("lycoris") or (
        "algo" in arguments and "network_module" not in foreign.values
    )
    word = module.rpartition(".")[2].partition("_")[0]
    word = "lora_fa" if module.endswith("lora_fa") else word
    algorithm = str(arguments.get("algo", "lora")) if is_lycoris else word
    key = "network_module" if "network_module" in foreign.values else "network_args.algo"
    shared.read_adapter(foreign, table_of("sd_scripts"), kind=(algorithm, key))
    foreign.carry_on("adapter.dropout", "network_dropout")  # the network's own argument wins
    for name, setting in table_of("sd_scripts")["of_adapter"].items():
        if name not in arguments:
            continue
        if str(arguments[name]).lower() in _AS_TEXT_OFF:
            foreign.stays(f"network_args.{name}", "is off there")
        else:
            foreign.carry(setting, f"network_args.{name}")
    _targets(foreign, arguments, is_lycoris=is_lycoris)


def _targets(foreign: Foreign, arguments: Mapping[str, Any], *, is_lycoris: bool) -> None:
    preset = str(arguments.get("preset", "full")).lower()
    conv, key = arguments.get("conv_dim"), "network_args.conv_dim"
    if is_lycoris and preset.startswith("attn-only"):
        foreign.set("adapter.targets", "attention", "network_args.preset")
    elif conv not in (None, "", 0, "0") and not foreign.is_flow:
        whole = _is_number(conv) and as_number(conv) > shared.FULL_RANK
        alpha, rank = arguments.get("conv_alpha", 1), shared.FULL_RANK if whole else conv
        shared.set_convolutions(foreign, rank, key, alpha, "network_args.conv_alpha")
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
    table = table_of("sd_scripts")
    shared.expand(foreign, "optimizer_args")
    rate = read_optimizer(foreign, table, name=(name, flag or "optimizer_type"))
    shared.expand(foreign, "lr_scheduler_args")
    warmup = foreign.nonzero("lr_warmup_steps", 0)
    read_schedule(foreign, table, warmup=warmup, steps=_planned_steps(foreign))
    return rate


def _planned_steps(foreign: Foreign) -> float | None:
    if foreign.on("max_train_epochs"):
        return None
    return foreign.number("max_train_steps", DEFAULT_STEPS)


def _text_encoder(foreign: Foreign, rate: float | None) -> None:
    """There, text encoders are trained unless something says no."""
    key = "text_encoder_lr"
    text_rates = foreign.values.get(key)
    parts = text_rates if isinstance(text_rates, list) else [text_rates]
    rates = [as_number(part) for part in parts if _is_number(part)]
    off = foreign.first_on("network_train_unet_only", "cache_text_encoder_outputs")
    if off or (rates and not any(rates)):
        shared.set_text_encoder(foreign, trained=False, key=off or key)
    else:
        text_rate = (key, rates[0]) if rates else ("learning_rate", rate)
        source = key if rates else "network_train_unet_only"
        own_rates = [(text_rate[0], text_rate[1])] if text_rate[1] else []
        shared.set_text_encoder(foreign, trained=True, key=source, rates=own_rates)
        if len(set(rates)) > 1:
            foreign.lacks(key, rates[1:], "all text encoders have one rate, the first")
    stop, steps = foreign.number("stop_text_encoder_training"), _planned_steps(foreign)
    if stop and stop > 0 and steps and foreign.settings.get("adapter.text_encoder"):
        share = min(1.0, stop / steps)
        foreign.set("train.text_encoder_until", share, "stop_text_encoder_training")


def _dataset(foreign: Foreign) -> None:
    sd_scripts_dataset.read_training_options(foreign)
    length = foreign.number("max_token_length")
    if length and not foreign.is_flow:
        foreign.carry("data.caption_tokens", "max_token_length", int(length))
    elif not foreign.is_flow:
        foreign.set("data.caption_tokens", CHUNK_TOKENS, "max_token_length")
    if foreign.on("resolution") and "data.resolution" not in foreign.settings:
        shared.set_sizes(foreign, [(foreign.values["resolution"], "resolution")])


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
    times_key = "gradient_accumulation_steps"
    size = foreign.settings.get("train.batch_size")
    if size is None:
        shared.set_batch(foreign, "train_batch_size", times_key)
    elif foreign.nonzero(times_key, 1) > 1:  # the dataset file's batch stands in for the training's
        source = foreign.sources["train.batch_size"]
        times = int(foreign.nonzero(times_key, 1))
        foreign.set("train.batch_size", int(size) * times, source, times_key)
        foreign.set("memory.micro_batch", int(size), source)
    shared.set_length(foreign, foreign.number("max_train_epochs"), "max_train_epochs")
    steps = foreign.number("max_train_steps")
    if foreign.on("max_train_epochs"):
        return
    if steps:
        foreign.carry("train.steps", "max_train_steps", int(steps))
    else:
        foreign.set("train.steps", DEFAULT_STEPS)


def _is_number(value: Any) -> bool:
    try:
        as_number(value)
    except ValueError:
        return False
    return True


def read_objective(foreign: Foreign) -> None:
    """Set weights, loss and timesteps."""
    shared.set_snr_weights(foreign, "min_snr_gamma")
    _loss(foreign)
    module = str(foreign.values.get("network_module"))
    is_sd3 = "training_shift" in foreign.values or module.endswith("sd3")
    if is_sd3 or not foreign.is_flow:
        shared.set_timestep_range(foreign, "min_timestep", "max_timestep")
    if not foreign.is_flow:
        shared.set_timesteps(foreign, "uniform", THERE)
        return
    if is_sd3:
        set_density(foreign, sign=1, shift=foreign.sourced("training_shift", 1.0))
    else:
        _flux(foreign)
    if foreign.settings["objective.timestep_sampling"] == "mode":
        mode_scale = foreign.get("mode_scale", 1.29)
        foreign.carry("objective.mode_scale", "mode_scale", mode_scale)


def _loss(foreign: Foreign) -> None:
    kind = foreign.word("loss_type", "l2")
    ours = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}.get(kind)
    foreign.set("objective.loss", ours or "smooth_l1", "loss_type")
    if ours is None:
        how = f"{kind}: smooth_l1 with objective.huber_delta=0.01, which is close"
        foreign.is_nearest("loss_type", how)
        shared.set_huber(foreign, 0.01, "loss_type")
    elif ours != "mse":
        delta, scale = foreign.nonzero("huber_c", 0.1), foreign.number("huber_scale", 1.0)
        schedule = foreign.word("huber_schedule", "snr")
        if schedule == "constant":
            delta *= scale or 1.0
        elif schedule == "exponential" and scale not in (None, 1):
            foreign.lacks("huber_scale", scale, "the threshold without noise is 1")
        foreign.set("objective.huber_delta", min(1.0, delta), "huber_c", "huber_scale")
        foreign.carry("objective.huber_schedule", "huber_schedule", schedule)


def set_density(foreign: Foreign, *, sign: float, shift: Sourced = (1.0, THERE)) -> None:
    """Set the timesteps that `weighting_scheme` draws.

    FLUX's sigmas are drawn at descending indices (`sign` -1): a mean above 0 is less noise there.
    """
    scheme = foreign.word("weighting_scheme", "none")
    drawn: shared.Distribution = "logit_normal" if scheme == "logit_normal" else "uniform"
    if scheme == "mode":
        drawn = "mode"
        if sign < 0:
            how = "mode: its ends are swapped there, which matters little"
            foreign.is_nearest("weighting_scheme", how)
    mean, std = foreign.nonzero("logit_mean", 0.0), foreign.sourced("logit_std", 1.0)
    shared.set_timesteps(
        foreign, drawn, "weighting_scheme", mean=(sign * mean, "logit_mean"), std=std, shift=shift
    )


def set_sampling(foreign: Foreign, word: str, shift: Sourced) -> None:
    """Set the timesteps of a word of `timestep_sampling` that draws a sigmoid, or all alike."""
    drawn: shared.Distribution = "uniform" if word == "uniform" else "sigmoid"
    std = foreign.sourced("sigmoid_scale", 1.0)
    shared.set_timesteps(foreign, drawn, "timestep_sampling", std=std, shift=shift)


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
            shift = shared.shift_by_tokens(foreign, "timestep_sampling", sampling)
        elif sampling != "shift":
            shift = ("resolution" if by_size else 1.0, "timestep_sampling")
        set_sampling(foreign, sampling, shift)
    guidance = foreign.number("guidance_scale", 3.5)
    foreign.carry("objective.guidance_scale", "guidance_scale", guidance)
    kind = foreign.word("model_prediction_type", "sigma_scaled")
    if kind != "raw":
        foreign.is_nearest("model_prediction_type", f"{kind}: raw, the velocity as it is")


SD_SCRIPTS = Trainer(NAME, ("sd_scripts_dataset", "sd_scripts"), flat, read_training)
SD_SCRIPTS_DATASET = Trainer(
    f"{NAME} (a dataset file)",
    ("sd_scripts_dataset",),
    sd_scripts_dataset.flat_dataset,
    sd_scripts_dataset.read_dataset,
)

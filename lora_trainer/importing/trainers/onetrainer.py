"""OneTrainer: JSON files of settings and presets, with their concepts and samples or the files that hold them.

What its keys mean together: the trained parts, adapter, loss, timesteps, and the concepts as folders. Its
defaults are set where a preset leaves them out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import read_size, set_length, set_resolutions, stem_of
from lora_trainer.importing.foreign_optimizers import set_arguments, set_optimizer, set_schedule
from lora_trainer.importing.rules import THERE, Foreign, Trainer, carry, flattened
from lora_trainer.importing.trainers.onetrainer_concepts import set_concepts, set_samples
from lora_trainer.importing.trainers.onetrainer_keys import (
    CARRIED_OPTIONS,
    KEYS,
    MODELS,
    OPTIMIZER_OPTIONS,
    PARTS,
    WEIGHTS,
)

_KINDS = {"LORA": "lora", "LOHA": "loha", "LOKR": "lokr", "OFT_2": "oft"}


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a settings file or a preset."""
    signs = {"training_method", "base_model_name", "model_type"}
    return flattened(data) if len(signs & set(data)) >= 2 else None


def read(foreign: Foreign) -> None:
    """Read what depends on several keys."""
    _model(foreign)
    _adapter(foreign)
    _optimizer(foreign)
    _loss(foreign)
    _timesteps(foreign)
    _data(foreign)
    _output(foreign)
    shared.settle(foreign)


def _model(foreign: Foreign) -> None:
    findings = foreign.findings
    method = foreign.get("training_method", "FINE_TUNE")
    if method != "LORA":
        raise RequestError(
            f"training_method={method}: only adapters are trained here",
            fix="choose LORA as training method",
        )
    findings.stays("training_method", "is what is trained here")
    model = str(foreign.get("model_type", "STABLE_DIFFUSION_15"))
    if model not in MODELS:
        raise RequestError(
            shared.refused_model(model, "model_type"), fix=f"use a file for {', '.join(MODELS)}"
        )
    foreign.is_flow, foreign.trains_text = MODELS[model]
    foreign.stay("the base's files say what it is", "model_type")
    default = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    if "base_model_name" in foreign.values:
        carry(findings, "base.model", "base_model_name", foreign.values["base_model_name"])
    else:
        findings.set("base.model", default, note=THERE)
    for name in ("unet", "transformer", "prior"):
        if foreign.on(f"{name}.model_name"):
            why = "a file of the base's own network stands in base.model, what it lacks in base.companion"
            findings.lacks(f"{name}.model_name", foreign.values[f"{name}.model_name"], why)
    if foreign.on("vae.model_name"):
        carry(findings, "base.vae", "vae.model_name", foreign.values["vae.model_name"])
    _precision(foreign)
    for kind, key in (
        ("v_prediction", "force_v_prediction"),
        ("epsilon", "force_epsilon_prediction"),
    ):
        if foreign.on(key) and not foreign.is_flow:
            findings.set("base.prediction", kind, key)
        foreign.stay("the base's files say what it predicts", key)
    name = "rescale_noise_scheduler_to_zero_terminal_snr"
    if not foreign.is_flow:
        findings.set("objective.zero_terminal_snr", foreign.flag(name), *foreign.there(name))
    foreign.stay("flow matching has no such schedule of noise", name)
    skip = foreign.number("text_encoder_layer_skip") or 0
    if skip and model.startswith(("STABLE_DIFFUSION_1", "STABLE_DIFFUSION_2")):
        carry(findings, "base.clip_skip", "text_encoder_layer_skip", int(skip) + 1)
    for other in ("text_encoder_layer_skip", "text_encoder_2_layer_skip"):
        if skip and other not in findings.named:
            findings.lacks(
                other, foreign.values.get(other), "texts are read as the base was trained"
            )
        foreign.stay("is off there", other)


def _precision(foreign: Foreign) -> None:
    findings = foreign.findings
    shared.set_precision(foreign, "train_dtype", missing="FLOAT_16")
    part = "unet" if not foreign.is_flow else "transformer"
    for name in (part, "prior"):
        key = f"{name}.weight_dtype"
        value = foreign.values.get(key)
        try:
            base_precision = WEIGHTS(value)
        except ValueError:
            continue
        findings.set("memory.base_precision", base_precision, key)
        if not str(value).endswith(("_8", "_4")):
            findings.is_nearest(key, f"{value}: memory.base_precision={base_precision}")
        break
    for name in PARTS:
        foreign.stay("is how a frozen part is kept: the plan chooses", f"{name}.weight_dtype")
    if str(foreign.values.get("attention_mechanism")).upper() == "XFORMERS":
        findings.set("memory.attention", "xformers", "attention_mechanism")
    foreign.stay("attention kernels are chosen by the plan", "attention_mechanism")


def _adapter(foreign: Foreign) -> None:
    findings = foreign.findings
    word = str(foreign.get("peft_type", "LORA"))
    kind = shared.set_kind(foreign, _KINDS.get(word, word), "peft_type")
    if "peft_type" not in foreign.values:
        findings.sources["adapter.kind"] = THERE
    rank = {"lokr": "lokr_dim", "oft": "oft_block_size"}.get(kind, "lora_rank")
    if kind == "lokr" and "lokr_dim" not in foreign.values and "lora_rank" in foreign.values:
        rank = "lora_rank"  # before LoKr had a width of its own
    chosen = foreign.number(rank)
    if kind == "lokr" and foreign.on("lokr_full_matrix"):
        chosen = 1e6
        findings.named.add("lokr_full_matrix")
        findings.is_nearest("lokr_full_matrix", "the highest rank stands for a whole matrix")
    shared.set_rank(
        foreign, rank=chosen, source=rank, alpha=foreign.number("lora_alpha"), alpha_source="lora_alpha",
        default_rank=32 if kind == "oft" else 16, default_alpha=1,
    )  # fmt: skip
    if kind == "lokr" and foreign.on("lokr_decompose_factor"):
        carry(
            findings,
            "adapter.lokr_factor",
            "lokr_decompose_factor",
            foreign.values["lokr_decompose_factor"],
        )
    if foreign.on("lora_decompose") and kind == "lora":
        findings.set("adapter.dora", True, "lora_decompose")
    if foreign.on("lokr_weight_decompose") and kind == "lokr":
        findings.lacks("lokr_weight_decompose", True, "adapter.dora is for LoRA only")
    why = f"is of another kind of adapter than {kind}, or off"
    foreign.stay(why, "lora_rank", "lora_decompose", "oft_block_size", "lokr_dim", "lokr_decompose_factor",
                 "lokr_weight_decompose", "lokr_full_matrix")  # fmt: skip
    if foreign.on("dropout_probability"):
        shared.set_dropout(
            foreign, "adapter.dropout", "dropout_probability", foreign.values["dropout_probability"]
        )
    foreign.stay("is off there", "dropout_probability")
    _targets(foreign)


def _targets(foreign: Foreign) -> None:
    findings = foreign.findings
    source = next(
        (n for n in ("layer_filter_preset", "lora_layer_preset") if n in foreign.values), ""
    )
    preset = str(foreign.get(source, "full")) if source else "full"
    filter_key = next((n for n in ("layer_filter", "lora_layers") if foreign.on(n)), None)
    targets = {"attn-only": "attention", "full": "transformer" if foreign.is_flow else "all"}
    chosen = targets.get(preset, "transformer")
    findings.set(
        "adapter.targets", chosen, *((source,) if source else ()), note="" if source else THERE
    )
    if preset not in ("full", "attn-only", "attn-mlp", "blocks") and filter_key:
        why = f"adapter.targets={chosen}; choose attention, transformer or all"
        findings.is_nearest(filter_key, f"{foreign.values[filter_key]}: {why}")
    names = ("layer_filter", "lora_layers", "layer_filter_regex", "lora_layers_regex")
    foreign.stay("layer_filter_preset says which layers there are", *names)


def _optimizer(foreign: Foreign) -> None:
    findings = foreign.findings
    part = "transformer" if foreign.is_flow else "unet"
    rate_keys = [
        f"{part}.learning_rate",
        "prior.learning_rate",
        "unet_learning_rate",
        "learning_rate",
    ]
    rate_source = next((key for key in rate_keys if foreign.on(key)), THERE)
    rate = foreign.number(rate_source, 3e-6)
    scaler = str(foreign.get("learning_rate_scaler", "NONE"))
    factor = _rate_factor(foreign, scaler)
    if factor != 1 and rate:
        rate = float(f"{rate * factor:.6g}")
        findings.is_nearest(
            "learning_rate_scaler", f"{scaler}: the rate is {rate:g}, {factor:g} times as high"
        )
    foreign.stay("the rate is not scaled", "learning_rate_scaler")
    name = str(foreign.get("optimizer.optimizer", "ADAMW"))
    source = "optimizer.optimizer" if "optimizer.optimizer" in foreign.values else THERE
    relative = foreign.flag("optimizer.relative_step")
    set_optimizer(foreign, name, source, rate=rate, rate_source=rate_source, relative_step=relative)
    options = {n: foreign.values.get(f"optimizer.{n}") for n in OPTIMIZER_OPTIONS}
    stated_options = {
        n: value for n, value in options.items() if f"optimizer.{n}" in foreign.values
    }
    set_arguments(
        foreign, "optimizer.", {n: v for n, v in stated_options.items() if n in CARRIED_OPTIONS}
    )
    foreign.stay(
        "says how an optimizer computes, or is of another",
        *(f"optimizer.{n}" for n in stated_options),
    )
    foreign.stay("the part's own rate says more", "learning_rate", *rate_keys)
    steps = None
    set_schedule(
        foreign,
        str(foreign.get("learning_rate_scheduler", "CONSTANT")),
        "learning_rate_scheduler" if "learning_rate_scheduler" in foreign.values else THERE,
        warmup=0.0, warmup_source=THERE, steps=steps,
        cycles=foreign.number("learning_rate_cycles", 1) or 1,
    )  # fmt: skip
    foreign.stay("is of schedules with restarts", "learning_rate_cycles")
    foreign.stay("is of a schedule of one's own", "custom_learning_rate_scheduler")
    _text_encoders(foreign, rate)
    if "clip_grad_norm" in foreign.values and foreign.values["clip_grad_norm"] is None:
        findings.set("train.max_grad_norm", 0.0, "clip_grad_norm")
    else:
        value = foreign.number("clip_grad_norm", 1.0)
        findings.set("train.max_grad_norm", value, *foreign.there("clip_grad_norm"))
    if str(foreign.get("ema", "OFF")).upper() in ("CPU", "GPU"):
        findings.set("train.ema_decay", foreign.number("ema_decay", 0.999), "ema", "ema_decay")
    foreign.stay("is off there", "ema", "ema_decay")


def _rate_factor(foreign: Foreign, scaler: str) -> float:
    batch, times = (
        foreign.number("batch_size", 1) or 1,
        foreign.number("gradient_accumulation_steps", 1) or 1,
    )
    scales = {"BATCH": batch, "GLOBAL_BATCH": batch, "GRADIENT_ACCUMULATION": times,
              "BOTH": batch * times, "GLOBAL_BOTH": batch * times}  # fmt: skip
    return math.sqrt(max(1.0, scales.get(scaler.upper(), 1.0)))


def _text_encoders(foreign: Foreign, rate: float | None) -> None:
    """There, every text encoder is trained unless it says no."""
    names = ["text_encoder"] if foreign.is_flow or foreign.get("model_type", "").find("_XL_") < 0 else [
        "text_encoder", "text_encoder_2",
    ]  # fmt: skip
    flags = {n: f"{n}.train" if f"{n}.train" in foreign.values else f"train_{n}" for n in names}
    trained = [n for n in names if foreign.flag(flags[n], default=True)]
    rates = []
    for n in trained:
        encoder_rate = foreign.number(f"{n}.learning_rate") or foreign.number(f"{n}_learning_rate")
        key = f"{n}.learning_rate" if f"{n}.learning_rate" in foreign.values else "learning_rate"
        if encoder_rate or rate:
            rates.append((key, encoder_rate or rate or 0.0))
    source = flags[(trained or names)[0]]
    shared.set_text_encoder(foreign, trained=bool(trained), source=source, rates=rates)
    if trained and len(trained) < len(names) and foreign.findings.values["adapter.text_encoder"]:
        other = next(n for n in names if n not in trained)
        foreign.findings.is_nearest(flags[other], "all text encoders are trained, or none")
    for n in PARTS:
        if foreign.on(f"{n}.dropout_probability"):
            carry(foreign.findings, "data.caption_dropout", f"{n}.dropout_probability",
                  foreign.values[f"{n}.dropout_probability"])  # fmt: skip
        if n in ("transformer", "unet", "prior") and foreign.values.get(f"{n}.train") is False:
            active = n == ("transformer" if foreign.is_flow else "unet")
            foreign.findings.lacks(
                f"{n}.train", "false" if active else None, "the denoiser is always trained"
            )
        keys = "train include learning_rate dropout_probability stop_training_after stop_training_after_unit"
        why = (
            "its part is trained, or not, as another key says"
            if n in names
            else "is no part that is trained"
        )
        foreign.stay(why, *(f"{n}.{key}" for key in keys.split()), f"{n}.model_name")


def _loss(foreign: Foreign) -> None:
    findings = foreign.findings
    defaults = {"mse": 1.0, "mae": 0.0, "log_cosh": 0.0, "huber": 0.0}
    strengths = {n: foreign.number(f"{n}_strength", value) or 0.0 for n, value in defaults.items()}
    main = max(strengths, key=lambda n: strengths[n])
    names = [f"{n}_strength" for n in defaults if f"{n}_strength" in foreign.values]
    kind = "smooth_l1" if main == "mae" else main
    source = f"{main}_strength"
    findings.set("objective.loss", kind, *((source,) if source in foreign.values else ()),
                 note="" if source in foreign.values else THERE)  # fmt: skip
    mixed = [n for n, value in strengths.items() if value]
    if len(mixed) > 1 or main == "mae":
        findings.is_nearest(source if source in foreign.values else names[0],
                            f"{' + '.join(mixed)}: objective.loss={kind}, the strongest alone")  # fmt: skip
    if kind in ("huber", "smooth_l1"):
        delta = foreign.number("huber_delta", 1.0) or 1.0
        findings.set(
            "objective.huber_delta", min(1.0, delta if main == "huber" else 0.1), "huber_delta"
        )
        findings.set("objective.huber_schedule", "constant", note=THERE)
        if main == "huber":
            how = "objective.loss=huber, twice as large and without a corner"
            findings.is_nearest("huber_strength", f"{strengths[main]:g}: {how}")
    foreign.stay("another loss is the strongest", *names)
    foreign.stay("is of Huber's loss", "huber_delta")
    weight = str(foreign.get("loss_weight_fn", "CONSTANT")).upper()
    strength = foreign.number("loss_weight_strength", 5.0) or 5.0
    if foreign.is_flow and weight == "SIGMA":
        findings.lacks("loss_weight_fn", weight, "a weight that grows with sigma has no equivalent")
        findings.set("objective.weighting", "none", note="no such weights here")
    elif weight == "MIN_SNR_GAMMA" or (foreign.on("min_snr_gamma") and weight == "CONSTANT"):
        source = "loss_weight_fn" if weight == "MIN_SNR_GAMMA" else "min_snr_gamma"
        gamma = strength if source == "loss_weight_fn" else foreign.number("min_snr_gamma")
        shared.set_snr_weights(foreign, gamma, source)
        foreign.stay("is the gamma", "loss_weight_strength")
    elif weight in ("P2", "DEBIASED_ESTIMATION") and not foreign.is_flow:
        kind = "p2" if weight == "P2" else "debiased"
        findings.set("objective.weighting", kind, "loss_weight_fn")
        if weight == "P2":
            carry(findings, "objective.p2_gamma", "loss_weight_strength", strength)
    else:
        findings.set("objective.weighting", "none", *foreign.there("loss_weight_fn"))
    foreign.stay(
        "is of weights that are off", "loss_weight_strength", "min_snr_gamma", "loss_weight_fn"
    )


def _timesteps(foreign: Foreign) -> None:
    findings, source = foreign.findings, "timestep_distribution"
    word = str(foreign.get(source, "UNIFORM")).upper()
    weight, bias = (
        foreign.number("noising_weight", 0.0) or 0.0,
        foreign.number("noising_bias", 0.0) or 0.0,
    )
    drawn: Mapping[str, shared.Distribution] = {
        "LOGIT_NORMAL": "logit_normal", "HEAVY_TAIL": "mode", "COS_MAP": "cosmap",
    }  # fmt: skip
    kind = drawn.get(word, "uniform")
    if word in ("INVERTED_PARABOLA", "BETA") or (word == "SIGMOID" and weight):
        kind = "logit_normal" if word == "INVERTED_PARABOLA" else "uniform"
        findings.is_nearest(source, f"{word}: {'sigmoid' if kind == 'logit_normal' else kind}")
        weight = bias = 0.0
    normal = kind == "logit_normal"
    dynamic = foreign.flag("dynamic_timestep_shifting")
    shift = foreign.number("timestep_shift", 1.0) or 1.0
    std = max(0.01, weight + 1.0) if normal else 1.0
    shared.set_timesteps(
        foreign, kind, source, mean=bias if normal else 0.0, mean_source="noising_bias",
        std=std, std_source="noising_weight", shift="resolution" if dynamic else shift,
        shift_source="dynamic_timestep_shifting" if dynamic else "timestep_shift",
    )  # fmt: skip
    if kind == "mode":
        carry(findings, "objective.mode_scale", "noising_weight", weight)
    foreign.stay("does nothing with this timestep_distribution", "noising_weight", "noising_bias")
    foreign.stay("the other shift counts", "timestep_shift", "dynamic_timestep_shifting")
    low, high = (
        foreign.number("min_noising_strength", 0.0),
        foreign.number("max_noising_strength", 1.0),
    )
    if low:
        findings.set(
            "objective.min_timestep", max(0, min(999, int(1000 * low))), "min_noising_strength"
        )
    if high is not None and high < 1:
        findings.set("objective.max_timestep", max(0, int(1000 * high) - 1), "max_noising_strength")
    foreign.stay("is all of the range", "min_noising_strength", "max_noising_strength")
    if foreign.is_flow:
        value = foreign.number("transformer.guidance_scale", 1.0)
        findings.set(
            "objective.guidance_scale", value, *foreign.there("transformer.guidance_scale")
        )
    foreign.stay(
        "is of bases with a guidance embedding", *(f"{part}.guidance_scale" for part in PARTS)
    )


def _data(foreign: Foreign) -> None:
    findings = foreign.findings
    sizes = []
    for part in str(foreign.get("resolution", "512")).split(","):
        try:
            sizes.append(read_size(part.strip()))
        except ValueError as error:
            findings.lacks("resolution", part, str(error))
    if sizes and "resolution" in foreign.values:
        set_resolutions(foreign, sizes, "resolution")
    elif sizes:
        findings.set("data.resolution", 512, note=THERE)
    if foreign.on("masked_training"):
        findings.set("data.masks", "files", "masked_training")
        weight = foreign.number("unmasked_weight", 0.1) or 0.0
        findings.set("data.mask_background", min(0.99, weight), *foreign.there("unmasked_weight"))
        findings.lacks("unmasked_probability", foreign.get("unmasked_probability", 0.1),
                       "all samples are masked")  # fmt: skip
        if foreign.on("normalize_masked_area_loss"):
            findings.lacks(
                "normalize_masked_area_loss", True, "the loss is the mean over the masked area"
            )
    foreign.stay("masks are not used", "masked_training", "unmasked_weight", "unmasked_probability",
                 "normalize_masked_area_loss")  # fmt: skip
    shared.set_batch(foreign, size=foreign.number("batch_size"), source="batch_size",
                     times=foreign.number("gradient_accumulation_steps"),
                     times_source="gradient_accumulation_steps")  # fmt: skip
    set_concepts(foreign)
    epochs = foreign.number("epochs", 100)
    set_length(foreign, epochs=epochs, source="epochs", whole_batches=True)
    _warmup(foreign)


def _warmup(foreign: Foreign) -> None:
    """Set the warm-up, 200 steps by default; the length is known by now, or it is left out and said."""
    findings, name = foreign.findings, "learning_rate_warmup_steps"
    warmup, steps = foreign.number(name, 200) or 0, findings.values.get("train.steps")
    names = foreign.there(name)
    if warmup > 1 and steps:
        findings.set("optimizer.warmup_fraction", float(f"{min(0.9, warmup / steps):.6g}"), *names)
    elif 0 < warmup <= 1:
        findings.set("optimizer.warmup_fraction", min(0.9, warmup), *names)
    elif warmup > 1:
        findings.lacks(name, warmup, "give optimizer.warmup_fraction, a share of the steps")
    foreign.stay("there is no warm-up", name)


def _output(foreign: Foreign) -> None:
    findings = foreign.findings
    destination = foreign.on("output_model_destination")
    if destination is not None:
        carry(findings, "output.name", "output_model_destination", stem_of(destination))
    formats = {"KOHYA_LORA": "kohya", "DIFFUSERS_LORA": "diffusers", "COMFY_LORA": "comfyui"}
    kind = str(foreign.values.get("output_model_format"))
    if kind in formats:
        findings.stays(
            "output_model_format", "output.format is what most programs read for this base"
        )
    foreign.stay("LoRA files are always .safetensors", "output_model_format")
    for every, unit in (("save_every", "save_every_unit"), ("save_after", "save_after_unit")):
        number, word = foreign.number(every), str(foreign.get(unit, "NEVER")).upper()
        if number and word in ("EPOCH", "STEP"):
            shared.set_saves(
                foreign, every=number, source=every, unit="epochs" if word == "EPOCH" else "steps"
            )
            findings.named.add(unit)
            findings.stays(unit, "is the unit of it")
        elif number and word in ("SECOND", "MINUTE", "HOUR"):
            findings.lacks(every, f"{number:g} {word}", "give output.save_every_steps")
        foreign.stay("there are no saves on the way", every, unit)
    number, word = (
        foreign.number("sample_after", 10),
        str(foreign.get("sample_after_unit", "MINUTE")).upper(),
    )
    if word == "STEP" and number:
        carry(findings, "sampling.every_steps", "sample_after", int(number))
    foreign.stay("give sampling.every_steps", "sample_after", "sample_after_unit")
    set_samples(foreign)


ONETRAINER = Trainer(name="OneTrainer", flat=flat, keys=KEYS, read=read)

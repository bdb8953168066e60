"""SimpleTuner (bghira): config.json with its data backends and LyCORIS file, and the backends by themselves.

Options are read with and without the dashes that older files have. Its defaults are set where the file
leaves them out, such as a dropout of 0.1 and timesteps shifted by 3.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.foreign_optimizers import set_arguments, set_optimizer, set_schedule
from lora_trainer.importing.rules import THERE, Foreign, Trainer, carry, flattened
from lora_trainer.importing.trainers.simpletuner_data import (
    LIST,
    read_backends,
    read_data,
    read_file,
)
from lora_trainer.importing.trainers.simpletuner_keys import KEYS, MODELS, QUANTIZED


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the options without dashes."""
    inner = data.get("config")
    options = inner if isinstance(inner, Mapping) and "_metadata" in data else data
    values = {name.lstrip("-"): value for name, value in options.items() if name != "_metadata"}
    signs = {"model_family", "data_backend_config", "dynamo_use_regional_compilation"}
    return values if signs & values.keys() else None


def flat_backends(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a file of data backends, which is a list."""
    tables = data.get(LIST)
    if not isinstance(tables, list) or not all(isinstance(one, Mapping) for one in tables):
        return None
    signs = {"instance_data_dir", "dataset_type", "caption_strategy"}
    return flattened({"data_backends": tables}) if any(signs & set(one) for one in tables) else None


def read(foreign: Foreign) -> None:
    """Read what depends on several options, and the files that are named."""
    _model(foreign)
    _adapter(foreign)
    _optimizer(foreign)
    _objective(foreign)
    read_data(foreign)
    _output(foreign)
    shared.settle(foreign)


def _model(foreign: Foreign) -> None:
    findings = foreign.findings
    family = str(foreign.get("model_family", ""))
    if family not in MODELS:
        raise RequestError(
            shared.refused_model(family, "model_family"), fix=f"use a file for {', '.join(MODELS)}"
        )
    kind = str(foreign.get("model_type", "full"))
    if kind != "lora":
        raise RequestError(
            f"model_type={kind}: whole models are not trained here",
            fix="give a file with model_type lora",
        )
    for name in ("controlnet", "control"):
        if foreign.flag(name):
            raise RequestError(
                f"{name}: control nets are not trained here", fix="give a file without it"
            )
        foreign.stay("is off there", name)
    is_flow, default, flavours = MODELS[family]
    foreign.is_flow, foreign.trains_text = is_flow, not is_flow
    flavour = str(foreign.get("model_flavour", default))
    path = foreign.on("pretrained_model_name_or_path")
    if path is not None:
        carry(findings, "base.model", "pretrained_model_name_or_path", path)
    elif flavour in flavours:
        findings.set(
            "base.model", flavours[flavour], *foreign.there("model_flavour", "model_family")
        )
    else:
        raise RequestError(
            shared.refused_model(flavour, "model_flavour"), fix=f"use one of {', '.join(flavours)}"
        )
    foreign.stay("the base says what it is", "model_family", "model_flavour", "model_type",
                 "pretrained_model_name_or_path")  # fmt: skip
    vae = foreign.on("pretrained_vae_model_name_or_path")
    if vae is not None and not is_flow:
        carry(findings, "base.vae", "pretrained_vae_model_name_or_path", vae)
    foreign.stay("the base has its own VAE", "pretrained_vae_model_name_or_path")
    assistant = foreign.on("assistant_lora_path")
    if assistant is not None:
        carry(findings, "base.assistant", "assistant_lora_path", assistant)
    foreign.stay("is not given", "assistant_lora_path")
    kept_as = str(foreign.get("base_model_precision", "no_change"))
    if kept_as in QUANTIZED:
        findings.set("memory.base_precision", QUANTIZED[kept_as], "base_model_precision")
        if kept_as.startswith(("int4", "int2", "uint4")):
            findings.is_nearest("base_model_precision", f"{kept_as}: memory.base_precision=nf4")
    elif kept_as not in ("no_change", "bf16", "fp16", "fp32"):
        findings.lacks(
            "base_model_precision", kept_as, "a base is kept whole, or in int8, fp8 or nf4"
        )
    foreign.stay("the base is kept as it is computed", "base_model_precision")
    precision = str(foreign.get("mixed_precision", "bf16"))
    if precision in ("no", "fp16", "bf16"):
        shared.set_precision(foreign, "mixed_precision", missing="bf16")
    elif "mixed_precision" in foreign.values:
        findings.lacks("mixed_precision", precision, "is fp32, bf16 or fp16 here")
    prediction = str(foreign.get("prediction_type", ""))
    if prediction in ("epsilon", "v_prediction") and not is_flow:
        findings.set("base.prediction", prediction, "prediction_type")
    foreign.stay("the base's files say what it predicts", "prediction_type")
    name = "rescale_betas_zero_snr"
    if not is_flow:
        findings.set("objective.zero_terminal_snr", foreign.flag(name), *foreign.there(name))
    foreign.stay("flow matching has no such schedule of noise", name)


def _adapter(foreign: Foreign) -> None:
    findings = foreign.findings
    lycoris = (
        read_file(foreign, "lycoris_config")
        if foreign.get("lora_type", "standard") == "lycoris"
        else None
    )
    if isinstance(lycoris, Mapping):
        options = flattened(lycoris, "lycoris_config.")
        foreign.values = {**foreign.values, **options}
        kind = shared.set_kind(foreign, str(lycoris.get("algo", "lora")), "lycoris_config.algo")
        rank: float | None = foreign.number("lycoris_config.linear_dim", 16)
        if lycoris.get("full_matrix"):
            rank = 1e6
        shared.set_rank(foreign, rank=rank, source="lycoris_config.linear_dim",
                        alpha=foreign.number("lycoris_config.linear_alpha"),
                        alpha_source="lycoris_config.linear_alpha", default_rank=16, default_alpha=1)  # fmt: skip
        if kind == "lokr" and foreign.on("lycoris_config.factor"):
            carry(findings, "adapter.lokr_factor", "lycoris_config.factor", lycoris["factor"])
        foreign.stay("choose adapter.targets", *options)
        findings.stays("lora_type", "says the kind of adapter")
        foreign.stay(
            "lycoris_config says more", "lora_rank", "lora_alpha", "lora_dropout", "use_dora"
        )
    else:
        findings.set("adapter.kind", "lora", *foreign.there("lora_type"))
        shared.set_rank(foreign, rank=foreign.number("lora_rank"), source="lora_rank",
                        alpha=foreign.number("lora_alpha"), alpha_source="lora_alpha", default_rank=16,
                        default_alpha=None)  # fmt: skip
        dropout = foreign.number("lora_dropout", 0.1)
        findings.set(
            "adapter.dropout", min(0.9, max(0.0, dropout or 0.0)), *foreign.there("lora_dropout")
        )
        if foreign.flag("use_dora"):
            findings.set("adapter.dora", True, "use_dora")
        foreign.stay("is off there", "use_dora")
    foreign.stay("is of LyCORIS", "lycoris_config")
    init = next((n for n in ("lora_init_type", "lora_initialisation_style") if foreign.on(n)), None)
    word = str(foreign.values[init]) if init else "default"
    if (
        word == "pissa"
        and "adapter.dora" not in findings.values
        and findings.values["adapter.kind"] == "lora"
    ):
        findings.set("adapter.init", "pissa", str(init))
    elif init:
        findings.lacks(
            init, word, "an adapter starts at zero, or with pissa", off=("default", "gaussian")
        )
    foreign.stay("is not given", "lora_init_type", "lora_initialisation_style")
    findings.set("adapter.targets", "transformer", note=THERE)
    if foreign.on("init_lora") is not None:
        carry(findings, "train.init_from", "init_lora", foreign.values["init_lora"])
    foreign.stay("is not given", "init_lora")


def _optimizer(foreign: Foreign) -> None:
    findings = foreign.findings
    rate_source = "learning_rate" if foreign.on("learning_rate") else THERE
    # SimpleTuner's own default, as are the batch of 4 and the single accumulation below.
    rate = foreign.number("learning_rate", 4e-7)
    batch, times = (
        foreign.number("train_batch_size", 4) or 4,
        foreign.number("gradient_accumulation_steps", 1) or 1,
    )
    for name, factor in (
        ("lr_scale", batch * times),
        ("lr_scale_sqrt", math.sqrt(max(1, batch * times))),
    ):
        if (
            foreign.flag(name)
            and rate
            and not (name == "lr_scale" and foreign.flag("lr_scale_sqrt"))
        ):
            rate = float(f"{rate * factor:.6g}")
            findings.is_nearest(name, f"the rate is {rate:g}, {factor:g} times as high")
        foreign.stay("the rate is not scaled, or by its square root", name)
    source = "optimizer" if "optimizer" in foreign.values else THERE
    ours = set_optimizer(foreign, str(foreign.get("optimizer", "adamw_bf16")), source, rate=rate,
                         rate_source=rate_source)  # fmt: skip
    options = {"optimizer_beta1": "beta1", "adam_beta1": "beta1", "optimizer_beta2": "beta2", "adam_beta2": "beta2",
               "adam_weight_decay": "weight_decay", "adam_epsilon": "eps"}  # fmt: skip
    if ours.startswith(("adamw", "paged")):
        for name, word in options.items():
            key = {"eps": "epsilon"}.get(word, word)
            if foreign.on(name) is not None and f"optimizer.{key}" not in findings.values or (
                word == "weight_decay" and foreign.on(name) is not None
            ):  # fmt: skip
                carry(findings, f"optimizer.{key}", name, foreign.values[name])
    foreign.stay("is of another optimizer, or said elsewhere", *options)
    text = foreign.on("optimizer_config")
    pairs = shared.as_pairs(str(text).replace(",", " ")) if isinstance(text, str) else {}
    set_arguments(foreign, "optimizer_config.", pairs)
    if pairs:
        findings.named.add("optimizer_config")
    foreign.stay("is not given", "optimizer_config")
    steps = foreign.number("max_train_steps", 0) or 0
    warmup = foreign.number("lr_warmup_steps", 0) or 0
    # There the warm-up's steps are the length of these schedules' waves, so none are left to warm up.
    if foreign.values.get("lr_scheduler") in ("cosine", "sine", "cosine_with_restarts"):
        how = f"one fall, there waves of lr_warmup_steps={warmup:g} steps without a warm-up"
        findings.is_nearest("lr_scheduler", f"{foreign.values['lr_scheduler']}: {how}")
        warmup = 0
    set_schedule(
        foreign, str(foreign.get("lr_scheduler", "constant_with_warmup")),
        "lr_scheduler" if "lr_scheduler" in foreign.values else THERE,
        warmup=warmup, warmup_source="lr_warmup_steps" if "lr_warmup_steps" in foreign.values else THERE,
        steps=steps, cycles=foreign.number("lr_num_cycles", 1) or 1, power=foreign.number("lr_power", 0.8) or 0.8,
        always_warms=False,
    )  # fmt: skip
    foreign.stay(
        "is of schedules that end above nothing, or have powers",
        "lr_num_cycles",
        "lr_power",
        "lr_end",
    )
    trained = foreign.flag("train_text_encoder")
    shared.set_text_encoder(foreign, trained=trained, source="train_text_encoder", rates=[
        ("text_encoder_lr" if foreign.on("text_encoder_lr") else rate_source,
         foreign.number("text_encoder_lr", rate) or 0.0)] if trained else ())  # fmt: skip
    foreign.stay("text encoders are not trained", "text_encoder_lr")
    _norm_and_average(foreign)
    if foreign.number("seed"):
        carry(findings, "train.seed", "seed", foreign.values["seed"])
    foreign.stay("is not given", "seed")


def _norm_and_average(foreign: Foreign) -> None:
    findings = foreign.findings
    norm = foreign.number("max_grad_norm", 2.0)
    if foreign.get("grad_clip_method", "value") == "norm":
        findings.set("train.max_grad_norm", norm, *foreign.there("max_grad_norm"))
    else:
        source = "grad_clip_method" if "grad_clip_method" in foreign.values else "max_grad_norm"
        findings.set("train.max_grad_norm", 0.0, *foreign.there(source))
        findings.is_nearest(
            source, f"single numbers are cut off at {norm:g} there, which is rare: nothing is"
        )
    foreign.stay("is of a cut off norm", "max_grad_norm")
    foreign.stay("the norm of all is cut off", "grad_clip_method")
    if foreign.flag("use_ema"):
        decay = min(0.9999, foreign.number("ema_decay", 0.995) or 0.995)
        names = [name for name in ("use_ema", "ema_decay") if name in foreign.values]
        findings.set("train.ema_decay", decay, *names)
    foreign.stay("is off there", "use_ema", "ema_decay")


def _objective(foreign: Foreign) -> None:
    findings = foreign.findings
    shared.set_snr_weights(foreign, foreign.number("snr_gamma"), "snr_gamma")
    foreign.stay(
        "is written on the model card there and does nothing to the loss", "use_soft_min_snr"
    )
    kind = str(foreign.get("loss_type", "l2"))
    ours = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}.get(kind, "mse")
    findings.set("objective.loss", ours, *foreign.there("loss_type"))
    if kind not in ("l2", "huber", "smooth_l1"):
        findings.is_nearest("loss_type", f"{kind}: objective.loss=mse")
    if ours != "mse":
        delta = min(1.0, foreign.number("huber_c", 0.1) or 0.1)
        findings.set("objective.huber_delta", delta, *foreign.there("huber_c"))
        schedule = foreign.get("huber_schedule", "snr")
        carry(findings, "objective.huber_schedule", "huber_schedule", schedule)
    foreign.stay("is of loss_type huber and smooth_l1", "huber_c", "huber_schedule")
    share = foreign.number("noise_offset_probability", 0.25)
    if foreign.flag("offset_noise") and not foreign.is_flow:
        strength = foreign.number("noise_offset", 0.1)
        names = [n for n in ("offset_noise", "noise_offset") if n in foreign.values]
        findings.set("objective.noise_offset", strength, *names)
        if share != 1:
            source = "noise_offset_probability"
            findings.is_nearest(source, f"{share:g}: all samples have the offset here")
    foreign.stay("is off there", "offset_noise", "noise_offset", "noise_offset_probability")
    if foreign.number("input_perturbation"):
        carry(
            findings,
            "objective.input_perturbation",
            "input_perturbation",
            foreign.values["input_perturbation"],
        )
    foreign.stay(
        "is off there, or from the first step", "input_perturbation", "input_perturbation_steps"
    )
    if foreign.on("timestep_bias_strategy") is not None:
        word = foreign.values["timestep_bias_strategy"]
        findings.lacks(
            "timestep_bias_strategy", word, "give objective.min_timestep and max_timestep"
        )
    foreign.stay("is off there", "timestep_bias_strategy")
    _timesteps(foreign)


def _timesteps(foreign: Foreign) -> None:
    findings = foreign.findings
    names = ("flow_schedule_shift", "flow_schedule_auto_shift", "flow_sigmoid_scale", "flow_use_uniform_schedule",
             "flow_use_beta_schedule", "flow_beta_schedule_alpha", "flow_beta_schedule_beta")  # fmt: skip
    guidance = (
        "flux_guidance_mode",
        "flux_guidance_value",
        "flux_guidance_min",
        "flux_guidance_max",
    )
    if not foreign.is_flow:
        shared.set_timesteps(foreign, "uniform", THERE)
        foreign.stay("is for flow matching", *names, *guidance)
        return
    uniform, beta = (
        foreign.flag("flow_use_uniform_schedule"),
        foreign.flag("flow_use_beta_schedule"),
    )
    scale, shift = (
        foreign.number("flow_sigmoid_scale", 1.0) or 1.0,
        foreign.number("flow_schedule_shift", 3.0),
    )
    by_size = foreign.flag("flow_schedule_auto_shift") and (shift or 0) <= 0
    source = "flow_use_uniform_schedule" if uniform or beta else "flow_sigmoid_scale"
    if beta and not uniform:
        findings.is_nearest("flow_use_beta_schedule", "sigmoid: both draw the middle more often")
    shared.set_timesteps(
        foreign, "uniform" if uniform else "sigmoid", source, std=1.0 if uniform or beta else scale,
        std_source="flow_sigmoid_scale", shift="resolution" if by_size else shift or 1.0,
        shift_source="flow_schedule_auto_shift" if by_size else "flow_schedule_shift",
    )  # fmt: skip
    foreign.stay("does nothing beside the others", *names)
    mode, value = (
        str(foreign.get("flux_guidance_mode", "constant")),
        foreign.number("flux_guidance_value", 1.0),
    )
    findings.set("objective.guidance_scale", value, *foreign.there("flux_guidance_value"))
    if mode != "constant":
        findings.is_nearest("flux_guidance_mode", f"{mode}: one guidance of {value:g}")
    foreign.stay("one guidance is told", *guidance)


def _output(foreign: Foreign) -> None:
    findings = foreign.findings
    if foreign.on("output_dir") is not None:
        carry(findings, "output.folder", "output_dir", foreign.values["output_dir"])
    every = next(
        (n for n in ("checkpoint_step_interval", "checkpointing_steps") if foreign.on(n)), None
    )
    if every:
        shared.set_saves(foreign, every=foreign.number(every), source=every, unit="steps")
    if foreign.on("checkpoint_epoch_interval"):
        shared.set_saves(foreign, every=foreign.number("checkpoint_epoch_interval"),
                         source="checkpoint_epoch_interval", unit="epochs")  # fmt: skip
    if foreign.on("checkpoints_total_limit"):
        carry(
            findings,
            "output.keep_last",
            "checkpoints_total_limit",
            foreign.values["checkpoints_total_limit"],
        )
    foreign.stay("is not given", "checkpoint_step_interval", "checkpointing_steps", "checkpoint_epoch_interval",
                 "checkpoints_total_limit", "output_dir")  # fmt: skip
    if foreign.flag("push_to_hub") and foreign.on("hub_model_id"):
        carry(findings, "output.hub_repo", "hub_model_id", foreign.values["hub_model_id"])
    foreign.stay("nothing is uploaded", "push_to_hub", "hub_model_id")
    trackers = {
        "tensorboard": ["tensorboard"],
        "wandb": ["wandb"],
        "all": ["tensorboard", "wandb"],
        "none": [],
    }
    word = str(foreign.get("report_to", "none"))
    if word in trackers:
        findings.set("logging.trackers", trackers[word], *foreign.there("report_to"))
    elif "report_to" in foreign.values:
        findings.lacks("report_to", word, "trackers are tensorboard and wandb")
    if foreign.flag("validation_disable"):
        findings.set("sampling.every_steps", 0, "validation_disable")
    else:
        name = next(
            (n for n in ("validation_step_interval", "validation_steps") if foreign.on(n)), None
        )
        if name:
            carry(findings, "sampling.every_steps", name, foreign.values[name])
    prompts = [foreign.values["validation_prompt"]] if foreign.on("validation_prompt") else []
    library = read_file(foreign, "user_prompt_library")
    more = (
        [one for one in library.values() if isinstance(one, str)]
        if isinstance(library, Mapping)
        else []
    )
    if prompts or more:
        texts = [str(text) for text in (*prompts, *more)]
        findings.set(
            "sampling.prompts",
            texts,
            *(["validation_prompt"] if prompts else ["user_prompt_library"]),
        )
    for name, key in (("validation_negative_prompt", "sampling.negative_prompt"),
                      ("validation_num_inference_steps", "sampling.steps"),
                      ("validation_guidance", "sampling.guidance_scale"),
                      ("validation_seed", "sampling.seed")):  # fmt: skip
        if foreign.on(name) is not None:
            carry(findings, key, name, foreign.values[name])
        foreign.stay("is not given", name)
    if foreign.flag("validation_prompt_library"):
        findings.lacks("validation_prompt_library", True, "write the prompts as sampling.prompts")
    foreign.stay("is not given", "validation_prompt", "user_prompt_library", "validation_prompt_library",
                 "validation_step_interval", "validation_steps", "validation_disable", "report_to")  # fmt: skip


SIMPLETUNER = Trainer(name="SimpleTuner", flat=flat, keys=KEYS, read=read)
SIMPLETUNER_BACKENDS = Trainer(
    name="SimpleTuner (data backends)", flat=flat_backends, keys=KEYS, read=read_backends
)

"""sd-scripts (kohya-ss): TOML files of a training, of a dataset, and the options its GUIs save.

What its arguments mean together: the base's kind, adapter, optimizer, noise and length. Its defaults are set
where the file leaves them out and they change the result.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import CHUNK_TOKENS
from lora_trainer.importing import shared
from lora_trainer.importing.folders import set_length
from lora_trainer.importing.foreign_optimizers import set_arguments, set_optimizer, set_schedule
from lora_trainer.importing.rules import (
    THERE,
    Foreign,
    Idle,
    Lacks,
    To,
    Trainer,
    as_number,
    carry,
    flattened,
    refuse_unless_off,
)
from lora_trainer.importing.trainers import sd_scripts_dataset
from lora_trainer.importing.trainers.sd_scripts_keys import KEYS, NETWORK_ARGUMENTS
from lora_trainer.importing.trainers.sd_scripts_objective import read_objective

NAME = "sd-scripts"
DEFAULT_STEPS = 1600
_FLOW_KEYS = ("ae", "clip_g", "t5xxl", "clip_l", "model_prediction_type", "timestep_sampling",
              "discrete_flow_shift", "training_shift", "guidance_scale", "sigmoid_scale")  # fmt: skip
_LAYERS = ("algo", "preset", "conv_dim", "conv_alpha", "enable_conv")
_OTHER_MODULES = ("lumina", "hunyuan", "anima", "lllite", "leco")


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= value if isinstance(value, Mapping) else {name: value}
    known = [name for name in values if name in KEYS]
    telling = {
        "network_module",
        "pretrained_model_name_or_path",
        "train_data_dir",
        "dataset_config",
    }
    return values if len(known) * 2 > len(values) or telling & set(known) else None


def _flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    return flattened(data) if sd_scripts_dataset.is_dataset(data) else None


def read_training(foreign: Foreign) -> None:
    """Read the options of a training, and the dataset file that they name."""
    _base(foreign)
    read_adapter(foreign)
    _text_encoder(foreign, read_optimizer(foreign))
    _dataset(foreign)
    read_objective(foreign)
    read_precision(foreign)
    read_output(foreign)
    read_length(foreign)
    shared.settle(foreign)


def read_length(foreign: Foreign) -> None:
    """Set the batch and the steps; call it when the dataset is read."""
    if "train.batch_size" in foreign.findings.values:
        _accumulate(foreign)
    else:
        shared.set_batch(
            foreign,
            size=foreign.number("train_batch_size"),
            source="train_batch_size",
            times=foreign.number("gradient_accumulation_steps"),
            times_source="gradient_accumulation_steps",
        )
    set_length(foreign, epochs=foreign.number("max_train_epochs"), source="max_train_epochs")
    _steps(foreign)


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
    kind = foreign.values.get("model_type")
    if kind is not None:
        refuse_unless_off(
            foreign.findings, "model_type", kind, "is not trained here", ("flux", "chroma")
        )
        foreign.findings.stays("model_type", "the base's files say what it is")
    if foreign.on("v_parameterization"):
        foreign.findings.set("base.prediction", "v_prediction", "v_parameterization")
    else:
        foreign.stay("the base's files say what it predicts", "v_parameterization")
    if is_flow:
        foreign.stay("flow matching has no such schedule of noise", "zero_terminal_snr")
        foreign.stay("CLIP is read as the base was trained", "clip_skip")
    else:
        on = foreign.flag("zero_terminal_snr")
        foreign.findings.set("objective.zero_terminal_snr", on, *foreign.there("zero_terminal_snr"))
        skip = foreign.number("clip_skip")
        if skip:
            carry(foreign.findings, "base.clip_skip", "clip_skip", skip)
        foreign.stay("is not given", "clip_skip")


def read_adapter(foreign: Foreign) -> None:
    """Set kind, rank, layers and dropouts of the adapter."""
    module = str(foreign.get("network_module", "networks.lora"))
    arguments = shared.as_pairs(foreign.values.get("network_args"))
    is_lycoris = module.startswith("lycoris") or (
        "algo" in arguments and "network_module" not in foreign.values
    )
    word = module.rpartition(".")[2].partition("_")[0]
    word = "lora_fa" if module.endswith("lora_fa") else word
    algorithm = str(arguments.get("algo", "lora")) if is_lycoris else word
    if "network_module" in foreign.values or is_lycoris:
        source = "network_module" if "network_module" in foreign.values else "network_args.algo"
        kind = shared.set_kind(foreign, algorithm, source)
    else:
        kind = "lora"
        foreign.findings.set("adapter.kind", kind, note=THERE)
    shared.set_rank(
        foreign,
        rank=foreign.number("network_dim"),
        source="network_dim",
        alpha=foreign.number("network_alpha"),
        alpha_source="network_alpha",
        default_rank=4,
        default_alpha=1,
    )
    if foreign.on("network_dropout"):
        shared.set_dropout(
            foreign, "adapter.dropout", "network_dropout", foreign.number("network_dropout")
        )
    foreign.stay("is off there", "network_dropout")
    for name, value in arguments.items():
        _network_argument(foreign, name, value, kind)
    _targets(foreign, arguments, is_lycoris=is_lycoris)
    for name in ("factor", *_LAYERS):
        if name in arguments and f"network_args.{name}" not in foreign.findings.named:
            foreign.findings.stays(
                f"network_args.{name}", "says the kind of adapter, or is of another kind"
            )
    norm = foreign.number("scale_weight_norms")
    if norm and (kind == "oft" or foreign.findings.values.get("adapter.dora")):
        foreign.findings.lacks("scale_weight_norms", norm, "is not for this kind of adapter")
    elif norm:
        carry(foreign.findings, "optimizer.max_weight_norm", "scale_weight_norms", norm)
    foreign.stay("is off there", "scale_weight_norms")


def _network_argument(foreign: Foreign, name: str, value: Any, kind: str) -> None:
    told, findings = f"network_args.{name}", foreign.findings
    findings.named.add("network_args")
    rule = NETWORK_ARGUMENTS.get(name)
    if rule is None:
        findings.unknown.append(told)
    elif name in ("rank_dropout", "module_dropout", "dropout"):
        number = as_number(value) if _is_number(value) else value
        if number:
            shared.set_dropout(foreign, f"adapter.{name}", told, number)
        else:
            findings.stays(told, "is off there")
    elif name == "factor" and kind == "lokr":
        carry(findings, "adapter.lokr_factor", told, value)
    elif name in ("factor", *_LAYERS):
        pass  # said when all of them are known
    elif isinstance(rule, To):
        if str(value).lower() in ("", "0", "0.0", "false", "none"):
            findings.stays(told, "is off there")
        elif kind != "lora":
            findings.lacks(told, value, f"is for adapter.kind=lora, not {kind}")
        else:
            carry(findings, rule.key, told, value)
    elif isinstance(rule, Idle):
        findings.stays(told, rule.why)
    elif isinstance(rule, Lacks):
        findings.lacks(told, value, rule.why, off=("False", "false", "0", "0.0", "None", "all"))


def _targets(foreign: Foreign, arguments: Mapping[str, Any], *, is_lycoris: bool) -> None:
    findings, preset = foreign.findings, str(arguments.get("preset", "full")).lower()
    conv = arguments.get("conv_dim")
    has_conv = conv not in (None, "", 0, "0") and not foreign.is_flow
    name = "network_args.conv_dim"
    if is_lycoris and preset.startswith("attn-only"):
        findings.set("adapter.targets", "attention", "network_args.preset")
    elif has_conv or (
        is_lycoris and conv is None and preset in ("full", "unet-only", "unet-convblock-only")
    ):
        everything = "transformer" if foreign.is_flow else "all"
        source = name if has_conv else "network_args.preset" if "preset" in arguments else ""
        findings.set("adapter.targets", everything, *((source,) if source else ()),
                     note="" if source else THERE)  # fmt: skip
        if has_conv:
            carry(findings, "adapter.conv_rank", name, _within(conv))
            alpha = arguments.get("conv_alpha", 1)
            if findings.values["adapter.kind"] != "oft":
                carry(findings, "adapter.conv_alpha", "network_args.conv_alpha", alpha)
    else:
        findings.set("adapter.targets", "transformer", note=THERE)


def _within(rank: Any) -> Any:
    """Return a rank as it is, the highest there is for one that stands for whole matrices."""
    return shared.FULL_RANK if _is_number(rank) and as_number(rank) > shared.FULL_RANK else rank


def read_optimizer(foreign: Foreign) -> float | None:
    """Set optimizer, rate and schedule; return the rate of the denoiser."""
    findings = foreign.findings
    flags = {"use_8bit_adam": "AdamW8bit", "use_lion_optimizer": "Lion"}
    flag = next((name for name in flags if foreign.on(name)), None)
    source = flag or ("optimizer_type" if "optimizer_type" in foreign.values else THERE)
    name = str(flags[flag] if flag else foreign.get("optimizer_type", "AdamW"))
    rate_source = next((key for key in ("unet_lr", "learning_rate") if foreign.on(key)), THERE)
    rate = foreign.number(rate_source) if rate_source != THERE else 2e-6
    arguments = shared.as_pairs(foreign.values.get("optimizer_args"))
    relative = str(arguments.get("relative_step", "true")).lower() == "true"
    set_optimizer(foreign, name, source, rate=rate, rate_source=rate_source, relative_step=relative)
    set_arguments(foreign, "optimizer_args.", arguments)
    findings.named.add("optimizer_args" if arguments else "")
    foreign.stay("is not given", "optimizer_args")
    foreign.stay("is off there", *flags)
    foreign.stay("unet_lr and text_encoder_lr say more", "learning_rate")
    foreign.stay("is not given", "unet_lr")
    named = foreign.on("lr_scheduler_type")
    schedule_source = "lr_scheduler_type" if named else "lr_scheduler"
    schedule = str(named or foreign.get("lr_scheduler", "constant"))
    set_schedule(
        foreign,
        schedule,
        schedule_source if schedule_source in foreign.values else THERE,
        warmup=_warmup(foreign),
        warmup_source="lr_warmup_steps" if "lr_warmup_steps" in foreign.values else THERE,
        steps=_planned_steps(foreign),
        cycles=foreign.number("lr_scheduler_num_cycles", 1) or 1,
        power=foreign.number("lr_scheduler_power", 1) or 1,
        always_warms=False,
    )
    foreign.stay(
        "is of schedules with restarts or powers", "lr_scheduler_num_cycles", "lr_scheduler_power"
    )
    foreign.stay("lr_scheduler_type says more", "lr_scheduler")
    foreign.stay("is not given", "lr_scheduler_type")
    for name, value in shared.as_pairs(foreign.values.get("lr_scheduler_args")).items():
        findings.lacks(f"lr_scheduler_args.{name}", value, "is no option of schedules here")
        findings.named.add("lr_scheduler_args")
    foreign.stay("is not given", "lr_scheduler_args")
    return rate


def _warmup(foreign: Foreign) -> float:
    return max(0.0, foreign.number("lr_warmup_steps", 0) or 0)


def _planned_steps(foreign: Foreign) -> float | None:
    if foreign.on("max_train_epochs"):
        return None
    return foreign.number("max_train_steps", DEFAULT_STEPS)


def _text_encoder(foreign: Foreign, rate: float | None) -> None:
    """There, text encoders are trained unless something says no."""
    given = foreign.values.get("text_encoder_lr")
    parts = given if isinstance(given, list) else [] if given in (None, "") else [given]
    rates = [as_number(part) for part in parts if _is_number(part)]
    flags = ("network_train_unet_only", "cache_text_encoder_outputs")
    off = next((name for name in flags if foreign.on(name)), None)
    if off or (rates and not any(rates)):
        source = off or "text_encoder_lr"
        shared.set_text_encoder(foreign, trained=False, source=source)
    else:
        source = "text_encoder_lr" if rates else "network_train_unet_only"
        own = [
            ("text_encoder_lr", number)
            for number in rates[:1] or ([rate] if rate else [])
            if number
        ]
        if not rates and own:
            own = [("learning_rate", own[0][1])]
        shared.set_text_encoder(foreign, trained=True, source=source, rates=own)
        if len(set(rates)) > 1:
            foreign.findings.lacks(
                "text_encoder_lr", rates[1:], "all text encoders have one rate, the first"
            )
    foreign.stay("text encoders are not trained", "text_encoder_lr", "network_train_unet_only")
    if foreign.on("network_train_text_encoder_only"):
        foreign.findings.lacks(
            "network_train_text_encoder_only", True, "the denoiser is always trained"
        )
    foreign.stay("is off there", "network_train_text_encoder_only")
    stop = foreign.number("stop_text_encoder_training")
    steps = _planned_steps(foreign)
    if stop and stop > 0 and steps and foreign.findings.values.get("adapter.text_encoder"):
        share = min(1.0, stop / steps)
        foreign.findings.set("train.text_encoder_until", share, "stop_text_encoder_training")
    foreign.stay("is off there", "stop_text_encoder_training")


def _dataset(foreign: Foreign) -> None:
    sd_scripts_dataset.read_training_options(foreign)
    length = foreign.number("max_token_length")
    if foreign.is_flow:
        foreign.stay("the base says how long prompts may be", "max_token_length")
    elif length:
        carry(foreign.findings, "data.caption_tokens", "max_token_length", int(length))
    else:
        foreign.findings.set(
            "data.caption_tokens", CHUNK_TOKENS, *foreign.there("max_token_length")
        )
    if "resolution" in foreign.values and "data.resolution" not in foreign.findings.values:
        if foreign.on("resolution"):
            sd_scripts_dataset.set_size(foreign, "resolution", foreign.values["resolution"])
        foreign.stay("is not given", "resolution")
    foreign.stay("the dataset file says more", "resolution")


def read_precision(foreign: Foreign) -> None:
    """Set the dtype and how the base is kept."""
    shared.set_precision(foreign, "mixed_precision", missing="no")
    for name in ("fp8_base", "fp8_base_unet", "fp8_scaled"):
        if foreign.on(name):
            foreign.findings.set("memory.base_precision", "fp8", name)
        foreign.stay("is off there", name)


def read_output(foreign: Foreign) -> None:
    """Set saves, samples, precision and words of the exported file."""
    findings = foreign.findings
    for unit in ("epochs", "steps"):
        name, last_name = f"save_every_n_{unit}", f"save_last_n_{unit}"
        every, last = foreign.number(name), foreign.number(last_name)
        shared.set_saves(
            foreign, every=every, source=name, unit="epochs" if unit == "epochs" else "steps"
        )
        if last and every:
            findings.set("output.keep_last", max(1, int(last // every)), last_name, name)
        foreign.stay("is not given", last_name)
    precision = foreign.get("save_precision", None)
    precision = None if precision is None else str(precision)
    kinds = {"float": "fp32", "fp16": "fp16", "bf16": "bf16"}
    if precision in kinds:
        findings.set("output.precision", kinds[precision], "save_precision")
    elif precision is not None:
        findings.lacks("save_precision", precision, "is fp32, bf16 or fp16 here")
    foreign.stay("is not given", "save_precision")
    words = [name for name in ("metadata_description", "training_comment") if foreign.on(name)]
    if words:
        carry(findings, "output.description", words[0], foreign.values[words[0]])
    foreign.stay(
        "is not given, or metadata_description is", "metadata_description", "training_comment"
    )
    prompts = foreign.values.get("sample_prompts")
    if isinstance(prompts, str) and prompts:
        findings.lacks("sample_prompts", prompts, "write the prompts as sampling.prompts")
    foreign.stay("is not given", "sample_prompts")
    every = foreign.number("validate_every_n_steps")
    if every and findings.values.get("data.validation_fraction"):
        carry(findings, "train.validate_every_steps", "validate_every_n_steps", every)
    foreign.stay("nothing is held out for it", "validate_every_n_steps")


def _accumulate(foreign: Foreign) -> None:
    """Multiply the dataset file's batch, which stands in for the training's, by the accumulation."""
    findings, name = foreign.findings, "gradient_accumulation_steps"
    times = int(foreign.number(name, 1) or 1)
    size = int(findings.values["train.batch_size"])
    if times > 1:
        source = findings.sources["train.batch_size"]
        findings.set("train.batch_size", size * times, source, name)
        findings.set("memory.micro_batch", size, source)
    foreign.stay("every step is one batch", name)
    foreign.stay("the dataset file says more", "train_batch_size")


def _steps(foreign: Foreign) -> None:
    findings = foreign.findings
    if foreign.on("max_train_epochs"):
        foreign.stay("max_train_epochs says more", "max_train_steps")
        return
    foreign.stay("is not given", "max_train_epochs")
    steps = foreign.number("max_train_steps")
    if steps:
        carry(findings, "train.steps", "max_train_steps", int(steps))
    else:
        findings.set("train.steps", DEFAULT_STEPS, note=THERE)
    foreign.stay("is not given", "max_train_steps")


def _is_number(value: Any) -> bool:
    try:
        as_number(value)
    except ValueError:
        return False
    return True


SD_SCRIPTS = Trainer(
    name=NAME, flat=flat, keys={**KEYS, **sd_scripts_dataset.KEYS}, read=read_training
)
SD_SCRIPTS_DATASET = Trainer(
    name=f"{NAME} (a dataset file)",
    flat=_flat_dataset,
    keys=sd_scripts_dataset.KEYS,
    read=sd_scripts_dataset.read_dataset,
)

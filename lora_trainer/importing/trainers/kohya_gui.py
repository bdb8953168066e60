"""kohya_ss (bmaltais): JSON files that its LoRA tab saves, which are sd-scripts' arguments in other words.

Keys at 45088f0 and those of older versions. They are put back into arguments, zeros and empty texts that
mean "not given" included, and read as sd-scripts' own.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing.rules import (
    TOGETHER,
    Foreign,
    Idle,
    Lacks,
    Refused,
    Rule,
    Trainer,
    each,
    flattened,
)
from lora_trainer.importing.trainers import sd_scripts
from lora_trainer.importing.trainers.sd_scripts_keys import KEYS as SD_SCRIPTS_KEYS

_PROGRAM = Idle("is about that program, not about the result")
_OTHER_TAB = Refused("is of a model that is not trained here")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
KINDS: Mapping[str, tuple[str, str]] = {
    "Standard": ("networks.lora", ""),
    "Kohya DyLoRA": ("networks.dylora", ""),
    "Kohya LoCon": ("networks.lora", ""),
    "LoRA-FA": ("networks.lora_fa", ""),
    "Flux1": ("networks.lora_flux", ""),
    "Flux1 OFT": ("networks.oft_flux", ""),
    "LyCORIS/LoCon": ("lycoris.kohya", "locon"),
    "LyCORIS/LoHa": ("lycoris.kohya", "loha"),
    "LyCORIS/LoKr": ("lycoris.kohya", "lokr"),
    "LyCORIS/iA3": ("lycoris.kohya", "ia3"),
    "LyCORIS/GLoRA": ("lycoris.kohya", "glora"),
    "LyCORIS/BOFT": ("lycoris.kohya", "boft"),
    "LyCORIS/Diag-OFT": ("lycoris.kohya", "diag-oft"),
    "LyCORIS/DyLoRA": ("lycoris.kohya", "dylora"),
    "LyCORIS/Native Fine-Tuning": ("lycoris.kohya", "full"),
}
"""The kinds of LoRA that the tab offers, as module and algorithm."""
_RENAMED: Mapping[str, str] = {
    "optimizer": "optimizer_type",
    "max_resolution": "resolution",
    "lora_network_weights": "network_weights",
    "sdxl_no_half_vae": "no_half_vae",
    "dynamo_use_fullgraph": "dynamo_fullgraph",
    "dynamo_use_dynamic": "dynamo_dynamic",
}
"""Their key -> sd-scripts' argument."""
_OF_MODEL: Mapping[str, Mapping[str, str]] = {
    "flux1_checkbox": {
        "flux1_cache_text_encoder_outputs": "cache_text_encoder_outputs",
        "flux1_cache_text_encoder_outputs_to_disk": "cache_text_encoder_outputs_to_disk",
        **{name: name for name in ("ae", "clip_l", "t5xxl", "discrete_flow_shift", "model_prediction_type",
                                   "timestep_sampling", "split_mode", "t5xxl_max_token_length",
                                   "guidance_scale", "mem_eff_save", "apply_t5_attn_mask")},
    },
    "sd3_checkbox": {
        "sd3_cache_text_encoder_outputs": "cache_text_encoder_outputs",
        "sd3_cache_text_encoder_outputs_to_disk": "cache_text_encoder_outputs_to_disk",
        "sd3_clip_l": "clip_l",
        "sd3_t5xxl": "t5xxl",
        "sd3_clip_l_dropout_rate": "clip_l_dropout_rate",
        "sd3_t5_dropout_rate": "t5_dropout_rate",
        "sd3_enable_scaled_pos_embed": "enable_scaled_pos_embed",
        "sd3_text_encoder_batch_size": "text_encoder_batch_size",
        **{name: name for name in ("clip_g", "clip_g_dropout_rate", "logit_mean", "logit_std", "mode_scale",
                                   "weighting_scheme", "pos_emb_random_crop_rate", "save_clip", "save_t5xxl",
                                   "t5xxl_device", "t5xxl_dtype")},
    },
    "sdxl": {
        "sdxl_cache_text_encoder_outputs": "cache_text_encoder_outputs",
        "sdxl_no_half_vae": "no_half_vae",
    },
}  # fmt: skip
"""What counts only while its box is ticked."""
_NETWORK = (
    "conv_dim", "conv_alpha", "rank_dropout", "module_dropout", "loraplus_lr_ratio", "block_dims",
    "loraplus_unet_lr_ratio", "loraplus_text_encoder_lr_ratio", "down_lr_weight", "mid_lr_weight",
    "up_lr_weight", "block_lr_zero_threshold", "block_alphas", "conv_block_dims", "conv_block_alphas",
    "img_attn_dim", "img_mlp_dim", "img_mod_dim", "single_dim", "txt_attn_dim", "txt_mlp_dim",
    "txt_mod_dim", "single_mod_dim", "in_dims", "train_double_block_indices", "train_single_block_indices",
    "train_blocks", "split_qkv", "train_t5xxl", "ggpo_sigma", "ggpo_beta", "enable_all_linear",
)  # fmt: skip
_LYCORIS = (
    "factor", "use_cp", "use_tucker", "use_scalar", "rank_dropout_scale", "constrain", "rescaled",
    "train_norm", "decompose_both", "train_on_input", "dora_wd", "bypass_mode", "unit",
)  # fmt: skip
_OWN: Mapping[str, Rule] = {
    **each("LoRA_type LyCORIS_preset additional_parameters epoch lr_warmup noise_offset_type t5xxl_lr "
           "sdxl flux1_checkbox sd3_checkbox sdxl_checkbox " + " ".join(
               key for table in _OF_MODEL.values() for key in table), TOGETHER),
    **each(" ".join((*_NETWORK, *_LYCORIS)), TOGETHER),
    **each("hunyuan_image_checkbox anima_checkbox lumina_checkbox train_inpainting", _OTHER_TAB),
    **each("save_as_bool file_path model_list num_cpu_threads_per_process num_processes num_machines "
           "multi_gpu gpu_ids main_process_port extra_accelerate_launch_args use_wandb "
           "show_timesteps show_timesteps_resolution", _PROGRAM),
    **each("lowvram sd3_fused_backward_pass flux_fused_backward_pass "
           "sd3_disable_mmap_load_safetensors", _MEMORY),
    "train_lora_ggpo": Lacks("gradients are not perturbed"),
    **each("conv_dims conv_alphas", _PROGRAM),
    "no_token_padding": Lacks("texts are padded as the base was trained"),
    **each("learning_rate_te learning_rate_te1 learning_rate_te2 stop_text_encoder_training_pct "
           "weights caption train_resolution create_caption create_buckets train_text_encoder", Idle(
               "is of another tab")),
}  # fmt: skip
KEYS: Mapping[str, Rule] = {**_OWN, **SD_SCRIPTS_KEYS}
_ZERO_IS_NONE = (
    "max_train_steps max_train_epochs save_last_n_steps save_last_n_epochs save_last_n_steps_state "
    "save_last_n_epochs_state min_snr_gamma v_pred_like_loss noise_offset adaptive_noise_scale "
    "multires_noise_iterations ip_noise_gamma seed vae_batch_size max_token_length lr_warmup_steps "
    "sample_every_n_steps sample_every_n_epochs save_every_n_steps save_every_n_epochs network_dropout "
    "scale_weight_norms stop_text_encoder_training min_timestep blocks_to_swap unet_lr t5xxl_max_token_length"
)
ZERO_IS_NONE = frozenset(_ZERO_IS_NONE.split())
_OTHERS = ("hunyuan_", "anima_", "lumina_")


_SIGNS = {
    "num_cpu_threads_per_process", "LoRA_type", "additional_parameters", "max_data_loader_n_workers",
    "create_caption", "create_buckets", "full_path", "lr_warmup",
}  # fmt: skip
"""Keys of which sd-scripts' own files have one at most."""


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return what the file holds; it is flat."""
    if {"folders", "accelerate_launch"} <= set(data):  # the defaults of the whole interface
        return flattened(data)
    is_one = len(_SIGNS & set(data)) >= 2
    return dict(data) if is_one or {"LoRA_type", "network_dim"} <= set(data) else None


def read(foreign: Foreign) -> None:
    """Put the file into sd-scripts' arguments and read those."""
    kind = foreign.values.get("LoRA_type")
    if kind is None:
        raise RequestError(
            "there is no LoRA_type: it is of the dreambooth, finetune or textual inversion tab",
            fix="give a file that the LoRA tab has saved",
        )
    values = {key: value for key, value in foreign.values.items() if not key.startswith(_OTHERS)}
    for key in foreign.values.keys() - values.keys():
        if key.endswith("_checkbox"):
            values[key] = foreign.values[key]
        else:
            foreign.findings.stays(key, "is of a model that is not chosen")
    arguments = _of_model(foreign, values)
    _network(foreign, str(kind), values, arguments)
    _rates_and_length(foreign, values, arguments)
    _rest(foreign, values, arguments)
    foreign.values = arguments | {key: values[key] for key in values if key not in SD_SCRIPTS_KEYS}
    sd_scripts.read_training(foreign)
    for name in ("network_args", "LoRA_type"):
        foreign.stay("says the kind of adapter", name)


def _of_model(foreign: Foreign, values: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the ticked model, and take all of such keys out of the values."""
    arguments: dict[str, Any] = {}
    for box, table in _OF_MODEL.items():
        ticked = bool(values.get(box))
        for key, argument in table.items():
            if key not in values:
                continue
            value = values.pop(key)
            if not ticked:
                foreign.findings.stays(key, f"is of {box}, which is not ticked")
            elif _given(argument, value):
                arguments[argument] = value
                foreign.called[argument] = key
            else:
                foreign.findings.stays(key, "is not given")
        if box in values:
            foreign.findings.stays(box, "the base's files say what it is")
            del values[box]
    return arguments


def _network(
    foreign: Foreign, kind: str, values: dict[str, Any], arguments: dict[str, Any]
) -> None:
    module, algorithm = KINDS.get(kind, ("networks.lora", ""))
    if kind not in KINDS:
        foreign.findings.is_nearest("LoRA_type", f"{kind}: adapter.kind=lora")
    arguments["network_module"] = module
    foreign.called["network_module"] = "LoRA_type"
    options: dict[str, Any] = {"algo": algorithm} if algorithm else {}
    has_conv = algorithm or kind in ("Kohya DyLoRA", "Kohya LoCon")
    for key in (*_NETWORK, *_LYCORIS):
        if key not in values:
            continue
        value = values.pop(key)
        if key == "train_on_input" and algorithm != "ia3":
            value = False
        used = has_conv if key.startswith("conv_") else algorithm or key not in _LYCORIS
        is_off = value in ("", 0, False, None, "all") and not (key == "conv_dim" and algorithm)
        if not used or is_off:
            foreign.findings.stays(key, "is off there, or of another kind of LoRA")
        else:
            options[key] = value
            foreign.called[f"network_args.{key}"] = key
    if "LyCORIS_preset" in values:
        preset = values.pop("LyCORIS_preset")
        if algorithm:
            options["preset"] = preset
            foreign.called["network_args.preset"] = "LyCORIS_preset"
        else:
            foreign.findings.stays("LyCORIS_preset", "is of LyCORIS")
    foreign.findings.named.add("LoRA_type")
    del values["LoRA_type"]
    if options:
        arguments["network_args"] = options


def _rates_and_length(foreign: Foreign, values: dict[str, Any], arguments: dict[str, Any]) -> None:
    """The warm-up is in percent; 0 as rate of the text encoder means that only the U-Net is trained."""
    findings = foreign.findings
    rate, unet = foreign.number("text_encoder_lr", 0) or 0, foreign.number("unet_lr", 0) or 0
    if "text_encoder_lr" in values:
        del values["text_encoder_lr"]
        if rate:
            arguments["text_encoder_lr"] = rate
        elif unet:
            arguments["network_train_unet_only"] = True
            foreign.called["network_train_unet_only"] = "text_encoder_lr"
        else:
            findings.stays("text_encoder_lr", "learning_rate is for it too")
    if "t5xxl_lr" in values:
        findings.stays("t5xxl_lr", "this text encoder is not trained here")
        del values["t5xxl_lr"]
    percent, steps = foreign.number("lr_warmup", 0) or 0, foreign.number("lr_warmup_steps", 0) or 0
    if "lr_warmup" in values:
        del values["lr_warmup"]
        if percent and not steps:
            arguments["lr_warmup_steps"] = percent / 100
            foreign.called["lr_warmup_steps"] = "lr_warmup"
            if values.pop("lr_warmup_steps", None) is not None:
                findings.stays("lr_warmup_steps", "lr_warmup says more")
        else:
            findings.stays("lr_warmup", "there is none, or lr_warmup_steps says more")
    epochs, most = (
        foreign.number("max_train_epochs", 0) or 0,
        foreign.number("max_train_steps", 0) or 0,
    )
    if "epoch" in values:
        epoch = foreign.number("epoch", 0) or 0
        del values["epoch"]
        if epoch and not epochs and not most:
            arguments["max_train_epochs"] = epoch
            foreign.called["max_train_epochs"] = "epoch"
            if values.pop("max_train_epochs", None) is not None:
                findings.stays("max_train_epochs", "is not given")
        else:
            findings.stays("epoch", "max_train_epochs or max_train_steps says more")


def _rest(foreign: Foreign, values: dict[str, Any], arguments: dict[str, Any]) -> None:
    findings = foreign.findings
    kind = str(values.pop("noise_offset_type", "Original"))
    unused = ("noise_offset", "adaptive_noise_scale") if kind == "Multires" else (
        "multires_noise_iterations", "multires_noise_discount")  # fmt: skip
    for key in unused:
        if key in values and "noise_offset_type" in foreign.values:
            findings.stays(key, f"noise_offset_type is {kind}")
            del values[key]
    foreign.stay("says which kind of noise counts", "noise_offset_type")
    attention = values.pop("xformers", None)
    if attention is not None:
        arguments["xformers"] = attention in (True, "xformers")
    prompts = values.pop("sample_prompts", "")
    texts = [line.partition(" --")[0].strip() for line in str(prompts or "").splitlines()]
    texts = [text for text in texts if text and not text.startswith("#")]
    if texts:
        findings.set("sampling.prompts", texts, "sample_prompts")
    else:
        foreign.stay("is not given", "sample_prompts")
    for key in list(values):
        argument = _RENAMED.get(key, key)
        if argument not in SD_SCRIPTS_KEYS or argument in arguments:
            continue
        value = values.pop(key)
        if argument != key:
            foreign.called[argument] = key
        if _given(argument, value):
            arguments[argument] = value
        else:
            findings.stays(key, "is not given")
    _more_words(foreign, str(values.pop("additional_parameters", "") or ""), arguments)


def _given(argument: str, value: Any) -> bool:
    return value not in ("", None) and not (argument in ZERO_IS_NONE and value in (0, "0", False))


def _more_words(foreign: Foreign, text: str, arguments: dict[str, Any]) -> None:
    """Add the arguments typed as text, which win."""
    try:
        parts = shlex.split(text)
    except ValueError:
        parts = text.split()
    name = ""
    for part in parts:
        if part.startswith("--"):
            name, equals, value = part[2:].partition("=")
            arguments[name] = value if equals else True
        elif name:
            arguments[name] = part if arguments[name] is True else f"{arguments[name]} {part}"
    if parts:
        foreign.findings.stays("additional_parameters", "its arguments are read with the others")
    foreign.stay("is not given", "additional_parameters")


KOHYA_GUI = Trainer(name="kohya_ss", flat=flat, keys=KEYS, read=read)

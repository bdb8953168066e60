"""diffusion-pipe (tdrussell): TOML files of a training, and of its dataset's directories.

Keys at 8f83dbf. It trains each image at every resolution of a list, and sets alpha to the rank.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import (
    ImageFolder,
    named_file,
    path_of,
    set_folders,
    set_length,
    set_sizes,
)
from lora_trainer.importing.foreign_optimizers import set_arguments, set_optimizer, set_schedule
from lora_trainer.importing.rules import (
    PRECISIONS,
    THERE,
    TOGETHER,
    Foreign,
    Idle,
    Lacks,
    Refused,
    Rule,
    To,
    Trainer,
    carry,
    each,
    flattened,
    under,
)

NAME = "diffusion-pipe"
MODELS: Mapping[str, bool] = {
    "sdxl": False,
    **dict.fromkeys(("flux", "flux2", "chroma", "sd3", "qwen_image", "z_image"), True),
}
"""Models that are trained here, and whether by flow matching."""
_NEAREST_LOSS = {
    "pseudo_huber_c": "objective.loss=huber, as earlier versions had it: today's does not read it",
    "huber_delta": "objective.loss=huber, twice as large and without a corner",
    "smooth_l1_beta": "objective.loss=smooth_l1, larger and without a corner",
}
_PROGRAM = Idle("is about that program, not about the result")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
_EVALUATION = Lacks(
    "give data.validation_fraction, a share of the images that is held out", off=(True, 1)
)
_BESIDE = Lacks(
    "parts of a base beside its file come from base.companion, a diffusers folder or Hub id"
)
_OTHER_MODEL = Idle("is of a model that is not trained here")
_VIDEO = Idle("is of videos")
_DIRECTORY: Mapping[str, Rule] = {
    **each("resolutions enable_ar_bucket min_ar max_ar shuffle_tags cache_shuffle_num caption_prefix "
           "num_repeats", TOGETHER),
    "cache_shuffle_delimiter": Lacks("tags are parted by commas", off=(", ", ",")),
    **each("num_ar_buckets ar_buckets", Idle("a bucket has the area of data.resolution")),
    "size_buckets": Lacks("a bucket has the area of data.resolution"),
    "frame_buckets": _VIDEO,
    "skip_empty_caption": Idle("images without a caption are named by `check`"),
    **each("online_captions shuffle_metadata", _PROGRAM),
    "subsample_ratio": Lacks("all images are trained", off=(1, 1.0)),
    "uncond_fraction": TOGETHER,
}  # fmt: skip
DATASET_KEYS: Mapping[str, Rule] = {
    **under("dataset.", _DIRECTORY),
    **under("dataset.directory[].", {
        **_DIRECTORY,
        **each("path mask_path", TOGETHER),
        "default_mask_file": Lacks("masks are files of single images"),
        "control_path": Refused("control images are not trained here"),
    }),
}  # fmt: skip
_MODEL: Mapping[str, Rule] = {
    **each("type diffusers_path checkpoint_path transformer_path diffusion_model transformer_dtype "
           "diffusion_model_dtype timestep_sample_method sigmoid_scale shift flux_shift min_t max_t "
           "unet_lr text_encoder_1_lr text_encoder_2_lr min_snr_gamma debiased_estimation_loss v_pred "
           "merge_adapters guidance", TOGETHER),
    "dtype": To("train.precision", PRECISIONS),
    **each("vae vae_path text_encoders text_encoder text_encoder_path clip_path t5_path llm_path byt5_path",
           _BESIDE),
    "text_encoders[].path": _BESIDE,
    "text_encoders[].type": Idle("is of a part beside the base"),
    **each("lumina_shift llama3_path llama3_4bit max_llama3_sequence_length ckpt_path single_file_path "
           "first_frame_conditioning_p self_attn_lr cross_attn_lr mlp_lr mod_lr llm_adapter_lr llm_adapter_path "
           "audio_vae image_shift cfg", _OTHER_MODEL),
    **each("text_encoder_fp8 text_encoder_nf4 cache_text_embeddings max_sequence_length", _MEMORY),
    "multiscale_loss_weight": Lacks("the loss is of one scale"),
    "bypass_guidance_embedding": Lacks("give objective.guidance_scale: it is told 1 otherwise"),
}  # fmt: skip
KEYS: Mapping[str, Rule] = {
    "output_dir": To("output.folder"),
    **each("dataset epochs max_steps micro_batch_size_per_gpu gradient_accumulation_steps warmup_steps "
           "lr_scheduler force_constant_lr pseudo_huber_c huber_delta smooth_l1_beta", TOGETHER),
    "gradient_clipping": To("train.max_grad_norm", missing=1.0),
    "save_every_n_epochs": To("output.save_every_epochs"),
    "save_every_n_steps": To("output.save_every_steps"),
    "save_every_n_examples": Lacks("give output.save_every_steps"),
    "save_dtype": To("output.precision", PRECISIONS),
    **each("checkpoint_every_n_epochs checkpoint_every_n_minutes", Idle("states for a resume are always saved")),
    **each("eval_datasets eval_every_n_epochs eval_every_n_steps eval_every_n_examples "
           "eval_before_first_step eval_micro_batch_size_per_gpu image_eval_micro_batch_size_per_gpu "
           "eval_image_micro_batch_size_per_gpu eval_gradient_accumulation_steps "
           "disable_block_swap_for_eval", _EVALUATION),
    **under("eval_datasets[].", each("name config", _EVALUATION)),
    **each("image_micro_batch_size_per_gpu video_clip_mode", _VIDEO),
    **each("blocks_to_swap activation_checkpointing reentrant_activation_checkpointing pipeline_stages "
           "partition_method partition_split compile caching_batch_size map_num_proc", _MEMORY),
    **each("steps_per_print logging_steps x_axis_examples regenerate_cache trust_cache", _PROGRAM),
    "resume_from_checkpoint": Idle("--resume goes on with a run of this program"),
    **under("model.", _MODEL),
    **under("adapter.", {
        **each("type rank dropout rank_dropout decompose_factor", TOGETHER),
        "alpha": Lacks("is the rank there too"),
        "init_from_existing": To("train.init_from"),
        "dtype": Idle("trained weights are kept in fp32"),
        "exclude_modules": Lacks("choose adapter.targets"),
        "fuse_adapters": Lacks("merge it into the base first: `lora-train merge LORA --into BASE`"),
        "fuse_adapters[].path": Lacks("merge it into the base first: `lora-train merge LORA --into BASE`"),
        "fuse_adapters[].weight": Idle("is of fuse_adapters"),
        "target_modules": Lacks("choose adapter.targets"),
    }),
    "monitoring.enable_wandb": To("logging.trackers", lambda on: ["wandb"] if on else ["tensorboard"]),
    **under("monitoring.", each("wandb_api_key wandb_tracker_name wandb_run_name wandb_project", Idle(
        "tokens stay in the environment, names of runs are this program's"))),
    **DATASET_KEYS,
}  # fmt: skip


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file."""
    model = data.get("model")
    is_one = (
        isinstance(model, Mapping)
        and "type" in model
        and ("dataset" in data or "optimizer" in data)
    )
    return flattened(data) if is_one else None


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file."""
    tables = data.get("directory")
    is_one = (
        isinstance(tables, list)
        and all(isinstance(one, Mapping) for one in tables)
        and bool(tables)
    )
    return flattened(data, "dataset.") if is_one else None


def read(foreign: Foreign) -> None:
    """Read what depends on several keys, and the dataset file that is named."""
    findings = foreign.findings
    model = str(foreign.get("model.type", ""))
    if model not in MODELS:
        raise RequestError(
            shared.refused_model(model, "model.type"), fix=f"use a file for {', '.join(MODELS)}"
        )
    if "adapter.type" not in foreign.values:
        raise RequestError(
            "there is no [adapter]: whole models are not trained here", fix="add [adapter]"
        )
    foreign.is_flow, foreign.trains_text = MODELS[model], not MODELS[model]
    foreign.stay("the base's files say what it is", "model.type")
    paths = ("checkpoint_path", "transformer_path", "diffusion_model", "diffusers_path")
    model_keys = [f"model.{name}" for name in paths if foreign.on(f"model.{name}") is not None]
    if model_keys:
        carry(findings, "base.model", model_keys[0], foreign.values[model_keys[0]])
    if len(model_keys) > 1 and model_keys[-1].endswith("diffusers_path"):
        carry(findings, "base.companion", model_keys[-1], foreign.values[model_keys[-1]])
    foreign.stay("is not given", *(f"model.{name}" for name in paths))
    for name in ("transformer_dtype", "diffusion_model_dtype"):
        if "float8" in str(foreign.values.get(f"model.{name}")):
            findings.set("memory.base_precision", "fp8", f"model.{name}")
        foreign.stay("is the dtype of the rest", f"model.{name}")
    adapters = foreign.on("model.merge_adapters")
    if isinstance(adapters, list) and len(adapters) == 1:
        carry(findings, "base.assistant", "model.merge_adapters", adapters[0])
    elif adapters is not None:
        why = "merge them into the base first: `lora-train merge LORA --into BASE`"
        findings.lacks("model.merge_adapters", adapters, why)
    _adapter(foreign)
    _optimizer(foreign)
    _dataset(foreign)
    _objective(foreign)
    _length(foreign)
    shared.settle(foreign)


def _adapter(foreign: Foreign) -> None:
    findings = foreign.findings
    kind = shared.set_kind(foreign, str(foreign.get("adapter.type", "lora")), "adapter.type")
    shared.set_rank(foreign, rank=foreign.number("adapter.rank"), source="adapter.rank", alpha=None,
                    alpha_source=THERE, default_rank=16, default_alpha=None)  # fmt: skip
    for name in ("dropout", "rank_dropout"):
        if foreign.on(f"adapter.{name}"):
            shared.set_dropout(
                foreign, f"adapter.{name}", f"adapter.{name}", foreign.values[f"adapter.{name}"]
            )
        foreign.stay("is off there", f"adapter.{name}")
    if kind == "lokr" and foreign.on("adapter.decompose_factor"):
        carry(
            findings,
            "adapter.lokr_factor",
            "adapter.decompose_factor",
            foreign.values["adapter.decompose_factor"],
        )
    foreign.stay("is of LoKr", "adapter.decompose_factor")
    findings.set("adapter.targets", "transformer", note=THERE)


def _optimizer(foreign: Foreign) -> None:
    findings = foreign.findings
    sources = [n for n in ("force_constant_lr", "model.unet_lr", "optimizer.lr") if foreign.on(n)]
    rate_source = sources[0] if sources else THERE
    rate = foreign.number(rate_source)
    prefix = "optimizer."
    options = {
        key.removeprefix(prefix): value
        for key, value in foreign.values.items()
        if key.startswith(prefix)
    }
    name = str(options.pop("type", "adamw_optimi"))
    options.pop("lr", None)
    set_optimizer(foreign, name, "optimizer.type", rate=rate, rate_source=rate_source)
    set_arguments(foreign, prefix, options)
    foreign.stay("another rate says more", "optimizer.lr", "model.unet_lr", "force_constant_lr")
    rates = [(n, foreign.number(n) or 0.0) for n in ("model.text_encoder_1_lr", "model.text_encoder_2_lr")
             if foreign.on(n)]  # fmt: skip
    flags = [
        n for n in ("model.text_encoder_1_lr", "model.text_encoder_2_lr") if n in foreign.values
    ]
    trained = not foreign.is_flow and (bool(rates) or not flags)
    if trained and not rates and rate:
        rates = [("optimizer.lr", rate)]
    shared.set_text_encoder(
        foreign, trained=trained, source=flags[0] if flags else THERE, rates=rates
    )
    foreign.stay("text encoders are not trained, or all are", *flags)
    if foreign.values.get("lr_scheduler") == "cosine":
        findings.is_nearest(
            "lr_scheduler", "cosine: over train.steps, there over all epochs down to 1e-6"
        )
    elif foreign.values.get("lr_scheduler") == "linear" and foreign.on("max_steps"):
        findings.is_nearest("lr_scheduler", "linear: over train.steps, there over all epochs")
    set_schedule(
        foreign, str(foreign.get("lr_scheduler", "constant")),
        "lr_scheduler" if "lr_scheduler" in foreign.values else THERE,
        warmup=0.0, warmup_source=THERE, steps=None,
    )  # fmt: skip


def _objective(foreign: Foreign) -> None:
    findings = foreign.findings
    shared.set_snr_weights(foreign, foreign.number("model.min_snr_gamma"), "model.min_snr_gamma")
    if foreign.on("model.debiased_estimation_loss") and not foreign.is_flow:
        findings.set("objective.weighting", "debiased", "model.debiased_estimation_loss")
    if foreign.on("model.v_pred"):
        findings.set("base.prediction", "v_prediction", "model.v_pred")
    foreign.stay("is off there", "model.debiased_estimation_loss", "model.v_pred")
    losses = {"pseudo_huber_c": "huber", "huber_delta": "huber", "smooth_l1_beta": "smooth_l1"}
    chosen = next((name for name in losses if foreign.on(name)), None)
    findings.set("objective.loss", losses[chosen] if chosen else "mse", *((chosen,) if chosen else ()),
                 note="" if chosen else THERE)  # fmt: skip
    if chosen:
        carry(findings, "objective.huber_delta", chosen, min(1.0, foreign.number(chosen) or 1.0))
        findings.set("objective.huber_schedule", "constant", note=THERE)
        findings.is_nearest(chosen, f"{foreign.values[chosen]}: {_NEAREST_LOSS[chosen]}")
    foreign.stay("is off there", *losses)
    method = str(foreign.get("model.timestep_sample_method", "logit_normal"))
    scale, shift = (
        foreign.number("model.sigmoid_scale", 1.0) or 1.0,
        foreign.number("model.shift", 1.0) or 1.0,
    )
    fixed = foreign.on("model.shift")
    by_size = foreign.flag("model.flux_shift") and not fixed
    resolution_shift: float | Literal["resolution"] = "resolution"
    if by_size and foreign.is_flow and foreign.values["model.type"] != "flux":
        resolution_shift = shared.shift_by_tokens(
            foreign, token_px=32 if foreign.values["model.type"] == "flux2" else 16
        )
        findings.is_nearest("model.flux_shift", f"{resolution_shift:g}, that of this resolution")
    drawn: shared.Distribution = (
        "logit_normal" if method == "logit_normal" and foreign.is_flow else "uniform"
    )
    shared.set_timesteps(
        foreign, drawn, "model.timestep_sample_method", std=scale if drawn == "logit_normal" else 1.0,
        std_source="model.sigmoid_scale", shift=resolution_shift if by_size else shift,
        shift_source="model.flux_shift" if by_size else "model.shift",
    )  # fmt: skip
    foreign.stay("is read for Wan alone, there too", "model.min_t", "model.max_t")
    if foreign.is_flow:
        guidance = foreign.number("model.guidance", 1.0)
        findings.set("objective.guidance_scale", guidance, *foreign.there("model.guidance"))
    foreign.stay("does nothing with these timesteps", "model.sigmoid_scale", "model.shift", "model.flux_shift",
                 "model.timestep_sample_method", "model.guidance")  # fmt: skip


def _dataset(foreign: Foreign) -> None:
    data = named_file(
        foreign, "dataset", tomllib.loads, lambda data: flat_dataset(data) is not None
    )
    if data is not None:
        foreign.extra |= flattened(data, "dataset.")
        _read_tables(foreign, data)


def read_dataset(foreign: Foreign) -> None:
    """Read a dataset file by itself."""
    _read_tables(foreign, foreign.data)


def _read_tables(foreign: Foreign, data: Mapping[str, Any]) -> None:
    findings = foreign.findings
    shared_values = {key: value for key, value in data.items() if key != "directory"}
    folders: list[ImageFolder] = []
    sizes: list[tuple[Any, str]] = []
    for number, table in enumerate(data["directory"]):
        where = f"dataset.directory[{number}]."
        values = {**shared_values, **table}
        names = {key: f"dataset.{key}" for key in shared_values} | {
            key: f"{where}{key}" for key in table
        }
        if not isinstance(values.get("path"), str):
            continue
        folder = ImageFolder(path=path_of(values["path"]), key=names["path"])
        folder.settings["repeats"] = (values.get("num_repeats", 1), names.get("num_repeats", THERE))
        for name, field in (("shuffle_tags", "shuffle_tags"), ("caption_prefix", "caption_prefix")):
            if values.get(name):
                folder.settings[field] = (values[name], names[name])
        if values.get("cache_shuffle_num") and "shuffle_tags" not in folder.settings:
            folder.settings["shuffle_tags"] = (True, names["cache_shuffle_num"])
        if "shuffle_tags" in folder.settings:
            folder.settings["keep_tokens"] = (0, THERE)
        if values.get("mask_path"):
            findings.set("data.masks", "files", names["mask_path"])
            findings.set("data.mask_background", 0.0, note=THERE)
            findings.is_nearest(
                names["mask_path"], "masks are looked for in a folder masks/ beside the images"
            )
        table_sizes = values.get("resolutions", [])
        sizes += (
            [(size, names["resolutions"]) for size in table_sizes]
            if isinstance(table_sizes, list)
            else []
        )
        folders.append(folder)
    set_folders(foreign, folders)
    set_sizes(foreign, sizes)
    first = {**shared_values, **(data["directory"][0] if data["directory"] else {})}
    keys = ("dataset.directory[0].enable_ar_bucket", "dataset.enable_ar_bucket")
    sources = [key for key in keys if key in {**foreign.values, **foreign.extra}][:1]
    on = bool(first.get("enable_ar_bucket"))
    findings.set("data.buckets", on, *sources, note="" if sources else THERE)
    limits = [
        key
        for key in ("min_ar", "max_ar")
        if isinstance(first.get(key), int | float) and first[key] > 0
    ]
    if limits and first.get("enable_ar_bucket"):
        # Here one limit holds for both orientations: the wider one of max_ar and 1 / min_ar.
        aspect = max(max(float(first[key]), 1 / float(first[key])) for key in limits)
        sources = [
            f"dataset.{key}" if key in shared_values else f"dataset.directory[0].{key}"
            for key in limits
        ]
        findings.set("data.max_aspect", float(f"{min(8.0, aspect):.4g}"), *sources)
        name = "dataset.num_ar_buckets" if "num_ar_buckets" in shared_values else (
            "dataset.directory[0].num_ar_buckets")  # fmt: skip
        if "num_ar_buckets" in first:
            how = "all shapes up to data.max_aspect in the base's own steps"
            findings.is_nearest(name, f"{first['num_ar_buckets']}: {how}")
    share = first.get("uncond_fraction")
    if isinstance(share, int | float) and 0 < share <= 1:
        findings.set("data.caption_dropout", float(share), "dataset.uncond_fraction")
    for key in {**foreign.values, **foreign.extra}:
        if key.startswith("dataset.") and key not in findings.named and DATASET_KEYS.get(
            _bare(key)
        ) is TOGETHER:  # fmt: skip
            findings.stays(key, "is off there, or the first directory says it for all")


def _bare(key: str) -> str:
    head, bracket, rest = key.partition("[")
    return head if not bracket else f"{head}[]{rest.partition(']')[2]}"


def _length(foreign: Foreign) -> None:
    findings = foreign.findings
    size: Any = foreign.values.get("micro_batch_size_per_gpu", 1)
    if isinstance(size, list):
        pairs = [pair for pair in size if isinstance(pair, list) and len(pair) == 2]
        size = pairs[0][1] if pairs else 1
        findings.is_nearest("micro_batch_size_per_gpu", f"{size} images, whatever their resolution")
    number = size if isinstance(size, int) and not isinstance(size, bool) else 1
    shared.set_batch(foreign, size=number, source="micro_batch_size_per_gpu",
                     times=foreign.number("gradient_accumulation_steps"),
                     times_source="gradient_accumulation_steps")  # fmt: skip
    sides = 1 + len(findings.values.get("data.more_resolutions", []))
    epochs, most = foreign.number("epochs", 0) or 0, foreign.number("max_steps")
    if most and not (epochs and findings.dataset and epochs < 100):
        carry(findings, "train.steps", "max_steps", int(most))
        foreign.stay("max_steps comes first", "epochs")
    else:
        set_length(foreign, epochs=epochs * sides, source="epochs")
        foreign.stay("epochs come first", "max_steps")
    warmup, steps = foreign.number("warmup_steps", 0) or 0, findings.values.get("train.steps")
    if warmup and steps:
        share = float(f"{min(0.9, warmup / steps):.6g}")
        findings.set("optimizer.warmup_fraction", share, "warmup_steps")
    elif warmup:
        findings.lacks(
            "warmup_steps", warmup, "give optimizer.warmup_fraction, a share of the steps"
        )
    foreign.stay("there is no warm-up", "warmup_steps")


DIFFUSION_PIPE = Trainer(name=NAME, flat=flat, keys=KEYS, read=read)
DIFFUSION_PIPE_DATASET = Trainer(
    name=f"{NAME} (a dataset file)", flat=flat_dataset, keys=DATASET_KEYS, read=read_dataset
)

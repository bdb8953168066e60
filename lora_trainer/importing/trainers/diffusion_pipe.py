"""diffusion-pipe (tdrussell): TOML files of a training, and of its dataset's directories.

Keys at 8f83dbf. It trains each image at every resolution of a list, and sets alpha to the rank.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, Trainer, flattened


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file."""
    model = data.get("model")
    is_one = isinstance(model, Mapping) and "type" in model and {"dataset", "optimizer"} & set(data)
    return flattened(data) if is_one else None


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file."""
    is_one = bool(folders.tables_of(data.get("directory")))
    return flattened(data, "dataset.") if is_one else None


def read(foreign: Foreign) -> None:
    """Read the settings that depend on several keys, and the named dataset file."""
    model = foreign.word("model.type", "")
    training.set_model(foreign, model, "model.type")
    if "adapter.type" not in foreign.values:
        raise RequestError(
            "[adapter] is missing: whole models are not trained here", fix="add [adapter]"
        )
    keys = [key for key in foreign.table["paths"]["keys"] if foreign.on(key) is not None]
    if keys:
        foreign.carry("base.model", keys[0])
    if len(keys) > 1 and keys[-1] == "model.diffusers_path":
        foreign.carry("base.companion", keys[-1])
    adapters = foreign.on("model.merge_adapters")
    if isinstance(adapters, list) and len(adapters) == 1:
        foreign.carry("base.assistant", "model.merge_adapters", adapters[0])
    elif adapters is not None:
        why = "merge them into the base first: `lora-train merge LORA --into BASE`"
        foreign.lacks("model.merge_adapters", adapters, why)
    training.read_adapter(foreign)
    foreign.set("adapter.targets", "transformer")
    _optimizer(foreign)
    folders.named_file(foreign, "dataset", tomllib.loads, flat_dataset, read_dataset)
    _objective(foreign)
    _timesteps(foreign, model)
    _length(foreign)
    _single_keys(foreign)


def _optimizer(foreign: Foreign) -> None:
    rate = training.read_optimizer(foreign)
    names = ("model.text_encoder_1_lr", "model.text_encoder_2_lr")
    flags = [key for key in names if key in foreign.values]
    rates = [(key, foreign.number(key) or 0.0) for key in flags if foreign.on(key)]
    trained = not foreign.is_flow and bool(rates or not flags)
    if not rates and rate:
        rates = [("optimizer.lr", rate)]
    key = flags[0] if flags else THERE
    training.set_text_encoder(foreign, trained=trained, key=key, rates=rates)
    training.read_schedule(foreign)


def _objective(foreign: Foreign) -> None:
    training.set_snr_weights(foreign, "model.min_snr_gamma")
    losses = foreign.table["losses"]
    key = foreign.first_on(*losses)
    if key is None:
        foreign.set("objective.loss", "mse")
        return
    loss, how = losses[key]
    foreign.set("objective.loss", loss, key)
    training.set_huber(foreign, foreign.nonzero(key, 1.0), key)
    foreign.is_nearest(key, f"{foreign.values[key]}: {how}")


def _timesteps(foreign: Foreign, model: str) -> None:
    method = foreign.word("model.timestep_sample_method", "logit_normal")
    normal = method == "logit_normal" and foreign.is_flow
    std = foreign.sourced("model.sigmoid_scale", 1.0) if normal else (1.0, THERE)
    shift = foreign.sourced("model.shift", 1.0)
    if foreign.flag("model.lumina_shift") and not foreign.on("model.shift"):
        shift = ("resolution", "model.lumina_shift")
    if foreign.flag("model.flux_shift") and not foreign.on("model.shift"):
        shift = ("resolution", "model.flux_shift")
        if foreign.is_flow and model != "flux":
            token_px = 32 if model in foreign.table["paths"]["latents_of_16_px"] else 16
            shift = training.shift_by_tokens(foreign, "model.flux_shift", token_px=token_px)
    drawn = "logit_normal" if normal else "uniform"
    training.set_timesteps(foreign, drawn, "model.timestep_sample_method", std=std, shift=shift)


def read_dataset(foreign: Foreign) -> None:
    """Read a dataset file, this one by itself or that of a training."""
    around = ({key: value for key, value in foreign.data.items() if key != "directory"}, "dataset.")
    tables, where = folders.tables_of(foreign.data["directory"]), "dataset.directory"
    sizes: list[Sourced] = []
    for folder in folders.read_folders(foreign, tables, where, around):
        folder.settings["repeats"] = folder.sourced("num_repeats", 1)
        if folder.get("cache_shuffle_num"):
            folder.settings.setdefault("shuffle_tags", (True, folder.name("cache_shuffle_num")))
            folder.settings["keep_tokens"] = (0, THERE)
        resolutions, key = folder.sourced("resolutions", [])
        sizes += [(size, key) for size in resolutions] if isinstance(resolutions, list) else []
    folders.set_sizes(foreign, sizes)
    first = folders.FolderTable(around, (tables[0], f"{where}[0]."))
    buckets = bool(first.get("enable_ar_bucket"))
    foreign.set("data.buckets", buckets, first.name("enable_ar_bucket"))
    limits = {
        first.name(key): float(first[key])
        for key in ("min_ar", "max_ar")
        if isinstance(first.get(key), int | float) and first[key] > 0
    }
    if limits and buckets:
        # Here one limit holds for both orientations: the wider one of max_ar and 1 / min_ar.
        aspect = max(max(limit, 1 / limit) for limit in limits.values())
        foreign.set("data.max_aspect", float(f"{min(8.0, aspect):.4g}"), *limits)
        if "num_ar_buckets" in first:
            how = "all shapes up to data.max_aspect in the base's own steps"
            number, key = first.sourced("num_ar_buckets")
            foreign.is_nearest(key, f"{number}: {how}")
    share, key = first.sourced("uncond_fraction")
    if isinstance(share, int | float) and 0 < share <= 1:
        foreign.set("data.caption_dropout", float(share), key)


def _length(foreign: Foreign) -> None:
    key = "micro_batch_size_per_gpu"
    size: Any = foreign.values.get(key, 1)
    if isinstance(size, list):
        pairs = [pair for pair in size if isinstance(pair, list) and len(pair) == 2]
        size = pairs[0][1] if pairs else 1
        foreign.is_nearest(key, f"{size} images, whatever their resolution")
    images = size if isinstance(size, int) and not isinstance(size, bool) else 1
    training.set_batch(foreign, key, "gradient_accumulation_steps", images=images)
    sides = 1 + len(foreign.settings.get("data.more_resolutions", []))
    epochs, most = foreign.nonzero("epochs", 0), foreign.number("max_steps")
    if most and not (epochs and foreign.dataset and epochs < 100):
        foreign.carry("train.steps", "max_steps", int(most))
    else:
        folders.set_length(foreign, epochs * sides, "epochs")
    warmup = foreign.nonzero("warmup_steps", 0)
    if warmup:
        training.set_warmup(foreign, warmup, "warmup_steps", foreign.settings.get("train.steps"))


def _single_keys(foreign: Foreign) -> None:
    """Carry over the keys that count only where they are on, or for some bases or words."""
    for name in ("model.transformer_dtype", "model.diffusion_model_dtype"):
        if foreign.says(name) in ("float8", "float8_e4m3fn", "float8_e5m2"):
            foreign.carry("memory.base_precision", name, "fp8")
            break
    foreign.carry_if_on("adapter.dropout", "adapter.dropout")
    foreign.carry_if_on("adapter.rank_dropout", "adapter.rank_dropout")
    if foreign.settings["adapter.kind"] == "lokr":
        foreign.carry_if_on("adapter.lokr_factor", "adapter.decompose_factor")
    foreign.carry_if_on("base.prediction", "model.v_pred", "v_prediction")
    schedule = foreign.says("lr_scheduler")
    if schedule == "cosine":
        how = "over train.steps, there over all epochs down to 1e-6"
        foreign.is_nearest_to("lr_scheduler", how)
    elif schedule == "linear" and foreign.on("max_steps"):
        foreign.is_nearest_to("lr_scheduler", "over train.steps, there over all epochs")
    if foreign.is_flow:
        foreign.carry_if_on("objective.guidance_scale", "model.guidance", default=1.0)
    else:
        foreign.carry_if_on("objective.weighting", "model.debiased_estimation_loss", "debiased")


_DATASET = "diffusion_pipe_dataset"
TRAINERS = (
    Trainer("diffusion-pipe", ("diffusion_pipe", _DATASET), flat, read),
    Trainer("diffusion-pipe (a dataset file)", (_DATASET,), flat_dataset, read_dataset),
)

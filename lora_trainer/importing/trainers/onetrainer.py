"""OneTrainer: JSON files of settings and presets, with their concepts and samples or the files that hold them.

What its keys mean together: the trained parts, adapter, loss and timesteps. Its defaults are set where a
preset leaves them out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import Foreign, Sourced, Trainer, flattened

# Each has a share of dropped captions of its own; here is one for all.
_PARTS_WITH_DROPOUT = (
    *("vae", "text_encoder_4", "text_encoder_3", "text_encoder_2", "text_encoder"),
    *("transformer", "prior", "unet"),
)


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a settings file or a preset."""
    signs = {"training_method", "base_model_name", "model_type"}
    return flattened(data) if len(signs & set(data)) >= 2 else None


def read(foreign: Foreign) -> None:
    """Read the settings that depend on several keys."""
    _model(foreign)
    _adapter(foreign)
    _text_encoders(foreign, _optimizer(foreign))
    _loss(foreign)
    _data(foreign)
    _timesteps(foreign)
    destination = foreign.on("output_model_destination")
    if destination is not None:
        foreign.carry("output.name", "output_model_destination", folders.path_of(destination).stem)
    _samples(foreign)
    _single_keys(foreign)


def _model(foreign: Foreign) -> None:
    method = foreign.get("training_method", "FINE_TUNE")
    if method != "LORA":
        raise RequestError(
            f"training_method={method}: only adapters are trained here",
            fix="choose LORA as training method",
        )
    model = foreign.word("model_type", "STABLE_DIFFUSION_15")
    training.set_model(foreign, model, "model_type")
    skip = int(foreign.nonzero("text_encoder_layer_skip", 0))
    if skip and model.startswith(("STABLE_DIFFUSION_1", "STABLE_DIFFUSION_2")):
        foreign.carry("base.clip_skip", "text_encoder_layer_skip", skip + 1)
    training.set_precision(foreign, "train_dtype", missing="FLOAT_16")
    for part in ("transformer" if foreign.is_flow else "unet", "prior"):
        key = f"{part}.weight_dtype"
        kept_as = str(foreign.values.get(key))
        precision = foreign.table["weights"].get(kept_as.upper())
        if precision:
            foreign.set("memory.base_precision", precision, key)
            if not kept_as.endswith(("_8", "_4")):
                foreign.is_nearest(key, f"{kept_as}: memory.base_precision={precision}")
            break


def _adapter(foreign: Foreign) -> None:
    word = foreign.word("peft_type", "LORA")
    kind = {"OFT_2": "oft"}.get(word, word.lower())
    rank_key = {"lokr": "lokr_dim", "oft": "oft_block_size"}.get(kind, "lora_rank")
    if kind == "lokr" and "lokr_dim" not in foreign.values and "lora_rank" in foreign.values:
        rank_key = "lora_rank"  # before LoKr had a width of its own
    default = 32 if kind == "oft" else 16
    rank: Sourced = (foreign.number(rank_key, default), rank_key)
    if kind == "lokr" and foreign.on("lokr_full_matrix"):
        rank = (training.WHOLE, rank_key)
        foreign.is_nearest("lokr_full_matrix", "the highest rank stands for a whole matrix")
    training.read_adapter(foreign, rank=rank)
    names = ("layer_filter_preset", "lora_layer_preset")
    preset_key = next((name for name in names if name in foreign.values), names[0])
    preset = foreign.word(preset_key, "full")
    targets = {"attn-only": "attention", "full": "transformer" if foreign.is_flow else "all"}
    chosen = targets.get(preset, "transformer")
    foreign.set("adapter.targets", chosen, preset_key)
    filter_key = foreign.first_on("layer_filter", "lora_layers")
    if preset not in ("full", "attn-only", "attn-mlp", "blocks") and filter_key:
        why = f"adapter.targets={chosen}; choose attention, transformer or all"
        foreign.is_nearest(filter_key, f"{foreign.values[filter_key]}: {why}")


def _optimizer(foreign: Foreign) -> float | None:
    """Set optimizer, rate and schedule; return the rate of the denoiser."""
    scaler = foreign.word("learning_rate_scaler", "NONE").upper()
    batch = foreign.nonzero("batch_size", 1) if "ACCUMULATION" not in scaler else 1
    times = foreign.nonzero("gradient_accumulation_steps", 1) if "BATCH" not in scaler else 1
    is_scaled = scaler in foreign.table["rate_scalers"]["names"]
    factor = math.sqrt(max(1.0, batch * times)) if is_scaled else 1
    part = "transformer" if foreign.is_flow else "unet"
    keys = (f"{part}.learning_rate", "prior.learning_rate", "unet_learning_rate", "learning_rate")
    rate = training.read_optimizer(foreign, rate_keys=keys, factor=factor)
    if factor != 1 and rate:
        how = f"{scaler}: the rate is {rate:g}, {factor:g} times as high"
        foreign.is_nearest("learning_rate_scaler", how)
    training.read_schedule(foreign)
    norm = foreign.number("clip_grad_norm", 1.0)
    if foreign.values.get("clip_grad_norm", norm) is None:
        norm = 0.0
    foreign.set("train.max_grad_norm", norm, "clip_grad_norm")
    return rate


def _text_encoders(foreign: Foreign, rate: float | None) -> None:
    """There, every text encoder is trained unless it says no."""
    is_xl = not foreign.is_flow and "_XL_" in foreign.word("model_type", "")
    names = ["text_encoder", "text_encoder_2"] if is_xl else ["text_encoder"]
    flags = {n: f"{n}.train" if f"{n}.train" in foreign.values else f"train_{n}" for n in names}
    trained = [n for n in names if foreign.flag(flags[n], default=True)]
    rates = []
    for n in trained:
        part_rate = foreign.number(f"{n}.learning_rate") or foreign.number(f"{n}_learning_rate")
        key = f"{n}.learning_rate" if f"{n}.learning_rate" in foreign.values else "learning_rate"
        if part_rate or rate:
            rates.append((key, part_rate or rate or 0.0))
    flag = flags[(trained or names)[0]]
    training.set_text_encoder(foreign, trained=bool(trained), key=flag, rates=rates)
    if trained and len(trained) < len(names) and foreign.settings["adapter.text_encoder"]:
        other = next(n for n in names if n not in trained)
        foreign.is_nearest(flags[other], "all text encoders are trained, or none")
    key = "transformer.train" if foreign.is_flow else "unet.train"
    if foreign.values.get(key) is False:
        foreign.lacks(key, "false", "the denoiser is always trained")


def _loss(foreign: Foreign) -> None:
    defaults = {"mse": 1.0, "mae": 0.0, "log_cosh": 0.0, "huber": 0.0}
    strengths = {n: foreign.number(f"{n}_strength", value) or 0.0 for n, value in defaults.items()}
    main = max(strengths, key=lambda n: strengths[n])
    key = f"{main}_strength"
    kind = "smooth_l1" if main == "mae" else main
    foreign.set("objective.loss", kind, key)
    mixed = [n for n, value in strengths.items() if value]
    if len(mixed) > 1 or main == "mae":
        strength_keys = [
            f"{n}_strength" for n in (main, *defaults) if f"{n}_strength" in foreign.values
        ]
        how = f"{' + '.join(mixed)}: objective.loss={kind}, the strongest alone"
        foreign.is_nearest(strength_keys[0], how)
    if main == "huber":
        training.set_huber(foreign, foreign.nonzero("huber_delta", 1.0), "huber_delta")
        how = "objective.loss=huber, twice as large and without a corner"
        foreign.is_nearest("huber_strength", f"{strengths[main]:g}: {how}")
    elif main == "mae":
        training.set_huber(foreign, 0.1, "huber_delta")
    # Its weights.
    key = "loss_weight_fn"
    weight = foreign.word(key, "CONSTANT").upper()
    if foreign.is_flow and weight == "SIGMA":
        foreign.lacks(key, weight, "a weight that grows with sigma has no equivalent")
        foreign.set("objective.weighting", "none", note="no such weights here")
    elif weight == "MIN_SNR_GAMMA":
        gamma = foreign.nonzero("loss_weight_strength", 5.0)
        training.set_snr_weights(foreign, key, gamma=gamma)
    elif foreign.on("min_snr_gamma") and weight == "CONSTANT":
        training.set_snr_weights(foreign, "min_snr_gamma")
    else:
        foreign.set("objective.weighting", "none", key)


def _timesteps(foreign: Foreign) -> None:
    key = "timestep_distribution"
    word = foreign.word(key, "UNIFORM").upper()
    weight, bias = foreign.nonzero("noising_weight", 0.0), foreign.nonzero("noising_bias", 0.0)
    drawn = foreign.table["distributions"].get(word, "uniform")
    if word in ("INVERTED_PARABOLA", "BETA") or (word == "SIGMOID" and weight):
        how = "sigmoid" if drawn == "logit_normal" else drawn
        foreign.is_nearest(key, f"{word}: {how}")
        weight = bias = 0.0
    normal = drawn == "logit_normal"
    shift: Sourced = (foreign.nonzero("timestep_shift", 1.0), "timestep_shift")
    model = foreign.word("model_type", "STABLE_DIFFUSION_15")
    if foreign.flag("dynamic_timestep_shifting"):
        shift = training.shift_by_size(foreign, model, "dynamic_timestep_shifting")
    training.set_timesteps(
        foreign,
        drawn,
        key,
        mean=(bias if normal else 0.0, "noising_bias"),
        std=(max(0.01, weight + 1.0) if normal else 1.0, "noising_weight"),
        shift=shift,
    )
    if drawn == "mode":
        foreign.carry("objective.mode_scale", "noising_weight", weight)
    low, high = foreign.number("min_noising_strength"), foreign.number("max_noising_strength")
    if low:
        first = min(999, int(1000 * min(1.0, max(0.0, low))))
        foreign.set("objective.min_timestep", first, "min_noising_strength")
    if high is not None and high < 1:
        last = max(0, int(1000 * max(0.0, high)) - 1)
        foreign.set("objective.max_timestep", last, "max_noising_strength")


def _data(foreign: Foreign) -> None:
    sizes = foreign.word("resolution", "").split(",") if foreign.on("resolution") else []
    if (
        not folders.set_sizes(foreign, [(part.strip(), "resolution") for part in sizes])
        and not sizes
    ):
        foreign.set("data.resolution", 512)
    if foreign.on("masked_training"):
        weight = foreign.number("unmasked_weight", 0.1) or 0.0
        background = (min(0.99, weight), "unmasked_weight")
        folders.set_masks(foreign, "files", "masked_training", background=background)
    training.set_batch(foreign, "batch_size", "gradient_accumulation_steps")
    concepts = map(flattened, _named_list(foreign, "concepts", "concept_file_name"))
    for folder in folders.read_folders(foreign, concepts, "concepts", skip=_not_trained):
        _read_concept(foreign, folder)
    folders.set_length(foreign, foreign.number("epochs", 100), "epochs", whole=True)
    key = "learning_rate_warmup_steps"
    warmup = foreign.number(key, 200) or 0
    if warmup > 0:
        share = 0.9 if warmup == 1 else warmup
        training.set_warmup(foreign, share, key, foreign.settings.get("train.steps"))


def _named_list(foreign: Foreign, list_key: str, file_key: str) -> list[Mapping[str, Any]]:
    """Return the tables that stand in the file, or in the file that it names."""
    tables = foreign.data.get(list_key)
    if isinstance(tables, list):
        return folders.tables_of(tables)
    tables = folders.named_file(
        foreign,
        file_key,
        json.loads,
        lambda data: isinstance(data, list) and data == folders.tables_of(data),
    )
    foreign.values |= flattened({list_key: tables}) if tables else {}
    return tables or []


def _type_of(concept: folders.FolderTable) -> str:
    return str(concept.get("type", "STANDARD")).upper()


def _not_trained(concept: folders.FolderTable) -> str:
    if _type_of(concept) == "VALIDATION":
        return "is validated with only: keep it outside of the folder with your images"
    return "is off there" if concept.get("enabled") is False else ""


def _read_concept(foreign: Foreign, values: folders.FolderTable) -> None:
    """Set what a concept says of its folder."""
    if _type_of(values) == "PRIOR_PREDICTION":
        values.regularisation = True
        foreign.set("objective.prior", "base", values.name("type"))
    times, name = values.sourced("balancing", 1.0)
    by_repeats = str(values.get("balancing_strategy", "REPEATS")).upper() == "REPEATS"
    if by_repeats and isinstance(times, int | float) and 1 <= times < math.inf:
        values.settings["repeats"] = (round(times), name)
        if times != round(times):
            foreign.is_nearest(name, f"{times:g}: {round(times)} repeats")
    elif times not in (1, 1.0):
        why = "give repeats: a share of an epoch or a number of samples has no equivalent"
        foreign.lacks(name, times, why)
    if values.get("loss_weight", 1.0) not in (1, 1.0):
        values.settings["weight"] = values.sourced("loss_weight")
    if values.get("image.enable_resolution_override"):
        size, _ = values.sourced("image.resolution_override")
        name = values.name("image.enable_resolution_override")
        name = name.replace("enable_resolution", "resolution")
        foreign.lacks(name, size, "all images are trained at data.resolution")
    if values.get("text.enable_tag_shuffling"):
        values.settings["keep_tokens"] = values.sourced("text.keep_tags_count", 1)
        mark, name = values.sourced("text.tag_delimiter", ",")
        if mark != ",":
            foreign.lacks(name, mark, "tags are parted by commas")
    if values.get("text.tag_dropout_enable"):
        mode = str(values.get("text.tag_dropout_mode", "FULL"))
        field = "caption_dropout" if mode == "FULL" else "tag_dropout"
        values.settings[field] = values.sourced("text.tag_dropout_probability", 0.0)
    source, name = values.sourced("text.prompt_source", "sample")
    if source == "filename":
        note = "an image with a caption file keeps that"
        foreign.set("data.caption_fallback", "file_name", name, note=note)
    elif source == "concept":
        why = "one text for all images: name the folder N_WORDS, or give data.trigger"
        path = name.replace("prompt_source", "prompt_path")
        foreign.lacks(path, values.get("text.prompt_path"), why)


def _samples(foreign: Foreign) -> None:
    """Set prompts, and for all of them the settings of the first sample."""
    samples = [
        (f"samples[{number}].", one)
        for number, one in enumerate(_named_list(foreign, "samples", "sample_definition_file_name"))
        if one.get("enabled", True) is not False and one.get("prompt")
    ]
    if not samples:
        return
    texts = [str(one["prompt"]) for _, one in samples]
    foreign.set("sampling.prompts", texts, *(f"{where}prompt" for where, _ in samples))
    where = samples[0][0]
    for name, setting in foreign.table["samples"].items():
        if foreign.get(f"{where}{name}", None) is not None:
            foreign.carry(setting, f"{where}{name}")


def _single_keys(foreign: Foreign) -> None:
    """Carry over the keys that count only where they are on, or for some bases or words."""
    default_base = "stable-diffusion-v1-5/stable-diffusion-v1-5"
    foreign.carry_if_on("base.model", "base_model_name", default=default_base)
    for part in ("unet", "transformer", "prior"):
        why = (
            "a file of the base's own network stands in base.model, what it lacks in base.companion"
        )
        foreign.lacks_if_on(f"{part}.model_name", why)
    foreign.carry_if_on("base.vae", "vae.model_name")
    if not foreign.is_flow:
        if not foreign.carry_if_on("base.prediction", "force_v_prediction", "v_prediction"):
            foreign.carry_if_on("base.prediction", "force_epsilon_prediction", "epsilon")
        key = "rescale_noise_scheduler_to_zero_terminal_snr"
        foreign.carry_if_on("objective.zero_terminal_snr", key, default=False)
    if foreign.says("attention_mechanism") == "xformers":
        foreign.carry("memory.attention", "attention_mechanism", "xformers")
    kind = foreign.settings["adapter.kind"]
    if kind == "lokr":
        foreign.carry_if_on("adapter.lokr_factor", "lokr_decompose_factor")
        foreign.lacks_if_on("lokr_weight_decompose", "adapter.dora is for LoRA only")
    if kind == "lora":
        foreign.carry_if_on("adapter.dora", "lora_decompose", True)
    foreign.carry_if_on("adapter.dropout", "dropout_probability")
    for part in _PARTS_WITH_DROPOUT:
        if foreign.carry_if_on("data.caption_dropout", f"{part}.dropout_probability"):
            break
    if foreign.says("ema") in ("cpu", "gpu"):
        foreign.carry_if_on("train.ema_decay", "ema_decay", default=0.999, by="ema")
    if foreign.is_flow:
        key = "transformer.guidance_scale"
        foreign.carry_if_on("objective.guidance_scale", key, default=1.0)
    else:
        _noise_weights(foreign)
    if foreign.on("masked_training"):
        key = "unmasked_probability"
        foreign.lacks(key, foreign.get(key, 0.1), "all samples are masked")
        why = "the loss is the mean over the masked area"
        foreign.lacks_if_on("normalize_masked_area_loss", why)
    _saves(foreign)


def _noise_weights(foreign: Foreign) -> None:
    """Set the weights that only bases that predict noise have."""
    key, strength_key = "loss_weight_fn", "loss_weight_strength"
    word = foreign.says(key)
    has_no_strength = foreign.says(strength_key) in ("0", "0.0")
    if word == "p2" and has_no_strength:
        foreign.carry_if_on("objective.weighting", key, "none", by=strength_key)
    elif word in ("p2", "debiased_estimation"):
        foreign.carry("objective.weighting", key, "p2" if word == "p2" else "debiased")
    if word == "p2" and not has_no_strength:
        foreign.carry_if_on("objective.p2_gamma", strength_key, default=5.0, by=key)


def _saves(foreign: Foreign) -> None:
    """Set how often to save and to sample; each has its number and its unit."""
    carried = set()
    for name in ("save_every", "save_after"):
        unit_key = f"{name}_unit"
        unit = foreign.says(unit_key)
        if unit in ("epoch", "step"):
            setting = f"output.save_every_{unit}s"
            if setting not in carried and foreign.carry_if_on(setting, name, by=unit_key):
                carried.add(setting)
        elif unit in ("second", "minute", "hour") and foreign.on(name):
            foreign.named.update({unit_key} & foreign.values.keys())
            foreign.lacks_if_on(name, "give output.save_every_steps")
    if foreign.says("sample_after_unit") == "step":
        by = "sample_after_unit"
        foreign.carry_if_on("sampling.every_steps", "sample_after", default=10, by=by)


TRAINERS = (Trainer("OneTrainer", ("onetrainer",), flat, read),)

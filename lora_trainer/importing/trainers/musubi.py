"""musubi-tuner (kohya-ss): TOML files of a training, and of a dataset of images.

Most arguments are those of sd-scripts, at 30c658c; what differs is the network it trains, how timesteps are
drawn, and the dataset. Text encoders are never trained there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import shared
from lora_trainer.importing.folders import (
    ImageFolder,
    named_file,
    path_of,
    set_folders,
    set_resolutions,
    set_sizes,
)
from lora_trainer.importing.rules import (
    THERE,
    TOGETHER,
    Foreign,
    Idle,
    Lacks,
    Refused,
    Rule,
    Trainer,
    carry,
    each,
    flattened,
    under,
)
from lora_trainer.importing.trainers import sd_scripts
from lora_trainer.importing.trainers.sd_scripts_keys import KEYS as SD_SCRIPTS_KEYS

NAME = "musubi-tuner"
NETWORKS = ("lora_qwen_image", "lora_zimage", "lora_flux_2")
"""Its modules for models that are trained here."""
_OWN_SHIFT = {"lora_qwen_image": "qwen_shift", "lora_flux_2": "flux2_shift"}
"""The shift by size that is that of the base's own sampler."""
_OTHER_NETWORKS = ("lora_wan", "lora_framepack", "lora_hv_1_5", "lora_kandinsky", "lora_hidream_o1",
                   "lora_ideogram4", "lora_krea2")  # fmt: skip
_VIDEO = Refused("is of videos or of a model that is not trained here")
_MEMORY = Idle("the plan fits the training into memory; that never changes the result")
_BESIDE = Lacks(
    "parts of a base beside its file come from base.companion, a diffusers folder or Hub id"
)
_SPECIFIC: Mapping[str, Rule] = {
    **each("dit model_version timestep_sampling flash_attn sage_attn flash3", TOGETHER),
    **each("vae text_encoder text_encoder1 text_encoder2", _BESIDE),
    **each("edit edit_plus dit_high_noise task t5 clip image_encoder one_frame f1 latent_window_size "
           "override_dit text_encoder_qwen text_encoder_clip byt5 is_layered remove_first_image_from_target "
           "bulk_decode i2v_mode timestep_boundary force_v2_1_time_embedding num_layers", _VIDEO),
    **each("dit_dtype dit_in_channels vae_dtype fp8_llm fp8_vl fp8_t5 fp8_text_encoder vae_tiling "
           "vae_chunk_size vae_spatial_tile_sample_min_size text_encoder_dtype compile compile_backend "
           "compile_mode compile_dynamic compile_fullgraph compile_cache_size_limit cuda_allow_tf32 "
           "cuda_cudnn_benchmark gradient_checkpointing_cpu_offload use_pinned_memory_for_block_swap "
           "block_swap_h2d_only block_swap_ring_size img_in_txt_in_offloading disable_numpy_memmap "
           "offload_inactive_dit vae_cache_cpu use_32bit_attention", _MEMORY),
    "preserve_distribution_shape": Lacks("timesteps are drawn as the settings of objective say"),
    "num_timestep_buckets": TOGETHER,
    "show_timesteps": Idle("is about that program, not about the result"),
    **each("dino_loss_backend dino_loss_every_n_steps dino_loss_feature_mode dino_loss_layer "
           "dino_loss_model_type dino_loss_resize dino_loss_use_gram dino_loss_use_norm dino_loss_weight "
           "force_nabla_attention ideogram4_timestep_mu ideogram4_timestep_std initial_sigma nabla_P "
           "nabla_add_sta nabla_method nabla_wH nabla_wT nabla_wW noise_clip_std noise_scale_end "
           "noise_scale_start sampler_preset scheduler_scale skip_t2i_visual_dummy turbo_dit turbo_dit_cache "
           "unconditional_dit use_unconditional_dit_for_lora_sampling validate_caption_structure "
           "warn_on_caption_issues", Idle("is of a model that is not trained here")),
    **each("no_vae_load offload_dit_during_sampling vae_enable_patch_conv vae_sample_size", _MEMORY),
    "log_loss_stats": Idle("is about that program, not about the result"),
    **each("metadata_reso metadata_arch", Idle("the exported file's metadata is made from the run")),
    "weighting_scheme": TOGETHER,
}  # fmt: skip
_INHERITED: Mapping[str, Rule] = {
    **each("caption_extension batch_size num_repeats resolution enable_bucket", TOGETHER),
    "bucket_no_upscale": Lacks("small images are enlarged to their bucket, and `check` names them"),
}
_DATASET: Mapping[str, Rule] = {
    **_INHERITED,
    **each("image_directory image_jsonl_file", TOGETHER),
    "cache_directory": Idle("caches lie in data.cache_dir"),
    **each("video_directory video_jsonl_file target_frames frame_extraction frame_stride frame_sample "
           "max_frames source_fps fp_latent_window_size fp_1f_clean_indices fp_1f_target_index fp_1f_no_post",
           _VIDEO),
    **each("control_directory control_resolution no_resize_control multiple_target", Refused(
        "control images are not trained here")),
}  # fmt: skip
DATASET_KEYS: Mapping[str, Rule] = {
    **under("general.", _INHERITED),
    **under("datasets[].", _DATASET),
    **each("general datasets", TOGETHER),
}
KEYS: Mapping[str, Rule] = {**SD_SCRIPTS_KEYS, **_SPECIFIC, **DATASET_KEYS}


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values: dict[str, Any] = {}
    for name, value in data.items():
        values |= value if isinstance(value, Mapping) else {name: value}
    module = str(values.get("network_module", "")).rpartition(".")[2]
    return values if "dit" in values or module in (*NETWORKS, *_OTHER_NETWORKS) else None


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file, which names folders as no other trainer's does."""
    datasets = data.get("datasets")
    if not isinstance(datasets, list) or not all(isinstance(one, Mapping) for one in datasets):
        return None
    signs = {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}
    return flattened(data) if any(signs & set(one) for one in datasets) else None


def read(foreign: Foreign) -> None:
    """Read what depends on several keys, and the dataset file that is named."""
    module = str(foreign.get("network_module", "networks.lora")).rpartition(".")[2]
    if module not in NETWORKS and not module.startswith(("loha", "lokr")):
        raise RequestError(
            f"network_module={module} trains a model that is not trained here",
            fix=f"give a file with {' or '.join(NETWORKS)}",
        )
    version = str(foreign.get("model_version", ""))
    if any(word in version for word in ("edit", "layered", "kontext")):
        raise RequestError(
            f"model_version={version} edits images", fix="give a file of a text-to-image model"
        )
    foreign.stay("the base's files say what it is", "model_version")
    foreign.is_flow, foreign.trains_text = True, False
    if foreign.on("dit") is not None:
        carry(foreign.findings, "base.model", "dit", foreign.values["dit"])
    foreign.stay("is not given", "dit")
    sd_scripts.read_adapter(foreign)
    sd_scripts.read_optimizer(foreign)
    shared.set_text_encoder(foreign, trained=False, source=THERE)
    foreign.findings.set("objective.weighting", "none", note=THERE)
    foreign.findings.set("objective.loss", "mse", note=THERE)
    _dataset(foreign)
    _timesteps(foreign)
    sd_scripts.read_precision(foreign)
    sd_scripts.read_output(foreign)
    sd_scripts.read_length(foreign)
    foreign.stay("attention kernels are chosen by the plan", "flash_attn", "sage_attn", "flash3")
    shared.settle(foreign)


def _timesteps(foreign: Foreign) -> None:
    """Sigmas drawn by density are drawn at descending indices: a mean above 0 is less noise there."""
    findings = foreign.findings
    word = str(foreign.get("timestep_sampling", "sigma"))
    shift = foreign.number("discrete_flow_shift", 1.0) or 1.0
    mean, std = foreign.number("logit_mean", 0.0) or 0.0, foreign.number("logit_std", 1.0) or 1.0
    scale = foreign.number("sigmoid_scale", 1.0) or 1.0
    scheme = str(foreign.get("weighting_scheme", "none"))
    if scheme in ("sigma_sqrt", "cosmap"):
        findings.set("objective.weighting", scheme, "weighting_scheme")
    if word == "sigma":
        drawn: shared.Distribution = "logit_normal" if scheme == "logit_normal" else "uniform"
        if scheme == "mode":
            drawn = "mode"
            findings.is_nearest(
                "weighting_scheme", "mode: its ends are swapped there, which matters little"
            )
        shared.set_timesteps(foreign, drawn, "weighting_scheme", mean=-mean, mean_source="logit_mean", std=std,
                             std_source="logit_std")  # fmt: skip
    elif word == "logsnr":
        shared.set_timesteps(foreign, "logit_normal", "timestep_sampling", mean=-mean / 2,
                             mean_source="logit_mean", std=std / 2, std_source="logit_std")  # fmt: skip
    else:
        drawn = "uniform" if word == "uniform" else "sigmoid"
        by_size = word.endswith("_shift") or word.startswith("qinglong")
        if word.startswith("qinglong"):
            findings.is_nearest("timestep_sampling", f"{word}: sigmoid with the base's own shift")
        fixed: float | Literal["resolution"] = shift if word == "shift" else 1.0
        module = str(foreign.get("network_module", "")).rpartition(".")[2]
        if by_size and _OWN_SHIFT.get(module) in (
            word,
            word.replace("qinglong_qwen", "qwen_shift"),
        ):
            fixed = "resolution"
        elif by_size:
            is_qwen = "qwen" in word
            fixed = shared.shift_by_tokens(
                foreign, high=0.9 if is_qwen else 1.15, most=8192 if is_qwen else 4096,
                token_px=32 if module == "lora_flux_2" else 16,
            )  # fmt: skip
            findings.is_nearest("timestep_sampling", f"{word}: {fixed:g}, that of this resolution")
        shared.set_timesteps(
            foreign, drawn, "timestep_sampling", std=scale, std_source="sigmoid_scale", shift=fixed,
            shift_source="discrete_flow_shift" if word == "shift" else "timestep_sampling",
        )  # fmt: skip
    shared.set_timestep_range(foreign, "min_timestep", "max_timestep")
    guidance = foreign.number("guidance_scale", 1.0)
    findings.set("objective.guidance_scale", guidance, *foreign.there("guidance_scale"))
    buckets = foreign.number("num_timestep_buckets")
    if buckets and buckets > 1:
        carry(findings, "objective.timestep_strata", "num_timestep_buckets", min(256, int(buckets)))
    foreign.stay(f"does nothing there with timestep_sampling={word}", "discrete_flow_shift", "sigmoid_scale",
                 "logit_mean", "logit_std", "mode_scale", "weighting_scheme", "timestep_sampling",
                 "num_timestep_buckets")  # fmt: skip


def _dataset(foreign: Foreign) -> None:
    data = named_file(
        foreign, "dataset_config", tomllib.loads, lambda data: flat_dataset(data) is not None
    )
    if data is not None:
        foreign.extra |= flattened(data)
        _read_tables(foreign, data)


def read_dataset(foreign: Foreign) -> None:
    """Read a dataset file by itself."""
    _read_tables(foreign, foreign.data)


def _read_tables(foreign: Foreign, data: Mapping[str, Any]) -> None:
    findings = foreign.findings
    general = data.get("general", {})
    general = general if isinstance(general, Mapping) else {}
    datasets: Sequence[Mapping[str, Any]] = data["datasets"]
    folders: list[ImageFolder] = []
    sizes: list[tuple[Any, str]] = []
    batches: list[tuple[Any, str]] = []
    buckets: list[tuple[Any, str]] = []
    for number, dataset in enumerate(datasets):
        where = f"datasets[{number}]"
        values = {**general, **{key: value for key, value in dataset.items() if value is not None}}
        names = {key: f"general.{key}" for key in general} | {
            key: f"{where}.{key}" for key in dataset
        }
        folder_key = next(
            (key for key in ("image_directory", "image_jsonl_file") if values.get(key)), None
        )
        if folder_key is None:
            continue
        path = path_of(values[folder_key])
        folder = ImageFolder(
            path=path if folder_key == "image_directory" else path.parent, key=names[folder_key]
        )
        if folder_key == "image_jsonl_file":
            why = "captions in metadata.jsonl of the images' folder are read"
            findings.is_nearest(names[folder_key], f"{path.name}: {why}")
        repeats = (
            (values["num_repeats"], names["num_repeats"]) if "num_repeats" in values else (1, THERE)
        )
        folder.settings["repeats"] = repeats
        folders.append(folder)
        for key, sizes_with_keys in (
            ("resolution", sizes),
            ("batch_size", batches),
            ("enable_bucket", buckets),
        ):
            if key in values:
                sizes_with_keys.append((values[key], names[key]))
        if values.get("caption_extension"):
            extensions = findings.values.get("data.caption_extensions", [])
            unique = list(dict.fromkeys([*extensions, str(values["caption_extension"])]))
            findings.set("data.caption_extensions", unique, names["caption_extension"])
    set_folders(foreign, folders)
    if not set_sizes(foreign, sizes):
        set_resolutions(foreign, [(960, 544)], "resolution, by default there")
    on = bool(buckets and buckets[0][0])
    findings.set(
        "data.buckets", on, *(name for _, name in buckets[:1]), note="" if buckets else THERE
    )
    if batches:
        carry(findings, "train.batch_size", batches[0][1], batches[0][0])
    for values_of, why in (
        (batches, "train.batch_size is for all folders"),
        (buckets, "data.buckets is"),
    ):
        for value, name in values_of[1:]:
            if name not in findings.named:
                findings.lacks(name, None if value == values_of[0][0] else value, why)
    foreign.stay(
        "its datasets say it", *(key for key in foreign.values if key.startswith("general."))
    )


MUSUBI = Trainer(name=NAME, flat=flat, keys=KEYS, read=read)
MUSUBI_DATASET = Trainer(
    name=f"{NAME} (a dataset file)", flat=flat_dataset, keys=DATASET_KEYS, read=read_dataset
)

"""What the header of an exported file tells: keys that A1111, Forge, ComfyUI and browsers read.

Input is an ExportInfo of plain values, output a mapping of strings: `ss_*` (kohya's names),
`modelspec.*` (ModelSpec 1.0.1) and `lora_train.*` (our version and the resolved settings). Files
are shared, so folders are reduced to names, and paths, tokens and machine settings left out.
"""

from __future__ import annotations

import base64
import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from lora_trainer import __version__
from lora_trainer.families.base import Prediction

MAX_TAGS = 1000
"""Tags listed per file, the most frequent first; ComfyUI ignores headers above 8 MiB."""
MAX_TAG_CHARACTERS = 300
MACHINE_SETTINGS = ("output.folder", "data.cache_dir")
"""Settings that say where things lie on this machine and nothing about the result."""

_PRECISIONS = {"fp32": "no", "bf16": "bf16", "fp16": "fp16"}
_PREDICTIONS: Mapping[Prediction, str] = {"epsilon": "epsilon", "v_prediction": "v"}
_START = r"(?:file:/+|/(?=[^/\s]+/)|~[\\/]|[A-Za-z]:[\\/](?!/)|\\\\|\.\.[\\/])"
_WHOLE_PATH = re.compile(_START)
_PATH_IN_TEXT = re.compile(rf"(?<![\w:/.~\\-]){_START}[^\s\"'<>|]*")
_SECRETS = (
    (re.compile(r"\bhf_\w{16,}"), "[token]"),
    (re.compile(r"(?<=://)[^/\s@]+@"), ""),
    (re.compile(r"(?i)([?&](?:token|access_token|api_?key|key)=)[^&\s]+"), r"\1[token]"),
)


@dataclass(frozen=True, kw_only=True)
class SubsetSummary:
    """One folder of training images: its name, repeats of each image, one caption per image."""

    folder: str
    repeats: int
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """What is known about a run when a file is exported; the same info gives the same bytes.

    `settings` is the planned configuration as `config.flatten` gives it (no `auto` left);
    `buckets` counts images per epoch by "WIDTHxHEIGHT"; times are Unix seconds.
    """

    title: str
    rank: int
    alpha: float
    base_name: str
    base_identity: str
    base_model_version: str
    architecture: str
    prediction: Prediction
    settings: Mapping[str, Any]
    subsets: tuple[SubsetSummary, ...]
    buckets: Mapping[str, int]
    step: int
    images_seen: int
    started_at_s: float
    saved_at_s: float
    trigger: str | None = None
    description: str = ""
    thumbnail_jpeg: bytes | None = None

    @property
    def images_per_epoch(self) -> int:
        """Images seen in one epoch, repeats included."""
        return sum(len(subset.captions) * subset.repeats for subset in self.subsets)


def metadata(info: ExportInfo) -> dict[str, str]:
    """Return all header entries but the hashes, which need the tensors; every value is text."""
    public: ExportInfo = _public(info)
    values = {
        **_network(public),
        **_schedule(public),
        **_options(public),
        **_dataset(public),
        **_modelspec(public),
        **_own(public),
    }
    return {
        key: value if isinstance(value, str) else str(value)
        for key, value in sorted(values.items())
    }


def _network(info: ExportInfo) -> dict[str, Any]:
    convolutions = {"conv_dim": str(info.rank), "conv_alpha": f"{info.alpha:g}"}
    return {
        "ss_base_model_version": info.base_model_version,
        "ss_v2": info.base_model_version.startswith("sd_v2"),
        "ss_sd_model_name": info.base_name,
        "ss_output_name": info.title,
        "ss_network_module": "networks.lora",
        "ss_network_dim": info.rank,
        "ss_network_alpha": float(info.alpha),
        "ss_network_args": _json(convolutions if info.settings["adapter.targets"] == "all" else {}),
    }


def _schedule(info: ExportInfo) -> dict[str, Any]:
    settings, images = info.settings, max(1, info.images_per_epoch)
    steps, batch = settings["train.steps"], settings["train.batch_size"]
    return {
        "ss_steps": info.step,
        "ss_max_train_steps": steps,
        "ss_epoch": _ceil_divide(info.images_seen, images),
        "ss_num_epochs": _ceil_divide(steps * batch, images),
        "ss_num_batches_per_epoch": _ceil_divide(images, batch),
        "ss_batch_size_per_device": batch,
        "ss_total_batch_size": batch,
        "ss_gradient_accumulation_steps": 1,
        "ss_training_started_at": float(info.started_at_s),
        "ss_training_finished_at": float(info.saved_at_s),
        "ss_learning_rate": settings["optimizer.learning_rate"],
        "ss_unet_lr": settings["optimizer.learning_rate"],
        "ss_text_encoder_lr": None,
        "ss_lr_scheduler": settings["optimizer.schedule"],
        "ss_lr_warmup_steps": round(settings["optimizer.warmup_fraction"] * steps),
        "ss_seed": settings["train.seed"],
    }


def _options(info: ExportInfo) -> dict[str, Any]:
    settings, name = info.settings, info.settings["optimizer.name"]
    betas = (settings["optimizer.beta1"], settings["optimizer.beta2"])
    decay, epsilon = settings["optimizer.weight_decay"], settings["optimizer.epsilon"]
    return {
        "ss_optimizer": f"{name}(weight_decay={decay},betas={betas},eps={epsilon})",
        "ss_mixed_precision": _PRECISIONS[settings["train.precision"]],
        "ss_gradient_checkpointing": settings["memory.gradient_checkpointing"],
        "ss_max_grad_norm": settings["train.max_grad_norm"],
        "ss_loss_type": "l2",
        "ss_min_snr_gamma": settings["objective.min_snr_gamma"],
        "ss_noise_offset": settings["objective.noise_offset"],
        "ss_multires_noise_iterations": settings["objective.multires_noise_iterations"],
        "ss_multires_noise_discount": settings["objective.multires_noise_discount"],
        "ss_caption_dropout_rate": settings["data.caption_dropout"],
        "ss_shuffle_caption": settings["data.shuffle_tags"],
        "ss_keep_tokens": settings["data.keep_tokens"],
        "ss_flip_aug": settings["data.flip"],
        "ss_enable_bucket": settings["data.buckets"],
        "ss_bucket_no_upscale": False,
        "ss_cache_latents": True,
    }


def _dataset(info: ExportInfo) -> dict[str, Any]:
    side = info.settings["data.resolution"]
    tags, buckets = _tag_frequency(info), _bucket_info(info.buckets)
    subsets = [
        {
            "image_dir": subset.folder,
            "img_count": len(subset.captions),
            "num_repeats": subset.repeats,
            "class_tokens": info.trigger,
            "is_reg": False,
        }
        for subset in info.subsets
    ]
    dataset = {
        "is_dreambooth": True,
        "batch_size_per_device": info.settings["train.batch_size"],
        "num_train_images": info.images_per_epoch,
        "num_reg_images": 0,
        "resolution": [side, side],
        "enable_bucket": info.settings["data.buckets"],
        "bucket_info": buckets,
        "tag_frequency": tags,
        "subsets": subsets,
    }
    folders = {
        s.folder: {"n_repeats": s.repeats, "img_count": len(s.captions)} for s in info.subsets
    }
    return {
        "ss_resolution": (side, side),
        "ss_num_train_images": info.images_per_epoch,
        "ss_num_reg_images": 0,
        "ss_dataset_dirs": _json(folders),
        "ss_reg_dataset_dirs": _json({}),
        "ss_tag_frequency": _json(tags),
        "ss_bucket_info": _json(buckets),
        "ss_datasets": _json([dataset]),
    }


def _modelspec(info: ExportInfo) -> dict[str, Any]:
    side, settings = info.settings["data.resolution"], info.settings
    low, high = settings["objective.min_timestep"], settings["objective.max_timestep"]
    required = {
        "sai_model_spec": "1.0.1",
        "architecture": info.architecture,
        "implementation": "diffusers",
        "title": info.title,
        "resolution": f"{side}x{side}",
        "date": datetime.fromtimestamp(info.saved_at_s, UTC).isoformat(timespec="seconds"),
        "prediction_type": _PREDICTIONS[info.prediction],
    }
    picture = info.thumbnail_jpeg
    optional = {
        "trigger_phrase": info.trigger,
        "description": info.description,
        "timestep_range": f"{low},{high}" if (low, high) != (0, 999) else None,
        "thumbnail": f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        if picture
        else None,
    }
    present = {**required, **{key: value for key, value in optional.items() if value}}
    return {f"modelspec.{key}": value for key, value in present.items()}


def _own(info: ExportInfo) -> dict[str, Any]:
    settings = {key: value for key, value in info.settings.items() if key not in MACHINE_SETTINGS}
    return {
        "lora_train.version": __version__,
        "lora_train.settings": _json(settings, sort_keys=True),
        "lora_train.base_identity": info.base_identity,
    }


def _tag_frequency(info: ExportInfo) -> dict[str, dict[str, int]]:
    """Count comma-separated tags per folder; the trigger leads, as browsers show the first tag."""
    limit = max(1, MAX_TAGS // max(1, len(info.subsets)))
    found: dict[str, dict[str, int]] = {}
    for subset in info.subsets:
        tags = (
            tag.strip()[:MAX_TAG_CHARACTERS]
            for caption in subset.captions
            for tag in caption.split(",")
        )
        counts = Counter(tag for tag in tags if tag)
        ordered = sorted(counts, key=lambda tag: (tag != info.trigger, -counts[tag], tag))
        found[subset.folder] = {tag: counts[tag] for tag in ordered[:limit]}
    return found


def _bucket_info(buckets: Mapping[str, int]) -> dict[str, Any]:
    rows = enumerate(sorted(buckets.items()))
    return {
        "buckets": {
            str(index): {"resolution": [int(side) for side in size.split("x")], "count": count}
            for index, (size, count) in rows
        }
    }


def _public(value: Any) -> Any:
    """Clean every text inside `value`, however nested, so that no field can be forgotten."""
    if isinstance(value, str):
        return _public_text(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_public(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, (ExportInfo, SubsetSummary)):
        return replace(
            value, **{field.name: _public(getattr(value, field.name)) for field in fields(value)}
        )
    return value


def _public_text(value: str) -> str:
    """Reduce a path to its last name, strike paths and tokens out of text, make it valid UTF-8."""
    text = value.encode("utf-8", "replace").decode("utf-8")
    for pattern, substitute in _SECRETS:
        text = pattern.sub(substitute, text)
    if _WHOLE_PATH.match(text):
        return re.split(r"[\\/]+", text.rstrip("\\/"))[-1]
    return _PATH_IN_TEXT.sub("[path]", text)


def _ceil_divide(total: int, part: int) -> int:
    return -(-total // part)


def _json(value: Any, *, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=False, sort_keys=sort_keys)

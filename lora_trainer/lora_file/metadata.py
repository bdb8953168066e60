"""The header of an exported LoRA, as A1111, Forge, ComfyUI and model browsers read it.

Input is an ExportInfo of plain values, output a mapping of strings: `ss_*` (kohya's names),
`modelspec.*` (ModelSpec 1.0.1) and `lora_train.*` (our version and the resolved settings). Files
are shared, so folders are reduced to names, and paths, tokens and machine settings left out.
"""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from lora_trainer import __version__
from lora_trainer.common.files import sha256_bytes
from lora_trainer.common.memo import HashMemo
from lora_trainer.common.whole_words import same_word, tags_of
from lora_trainer.common.wording import public_source, public_text
from lora_trainer.config.config import all_settings
from lora_trainer.config.declare import CHUNK_TOKENS, Auto
from lora_trainer.families.base.facts import Prediction
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora_file.tensor_file import json_object, packaged


@dataclass(frozen=True, kw_only=True)
class SubsetSummary:
    """One folder of training images: its name, repeats of each image, one caption per image."""

    folder: str
    repeats: int
    captions: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class FileHashes:
    """The hashes by which model browsers find a model file: SHA-256, and AUTOMATIC1111's first, of 64 KiB."""

    sha256: str
    short: str


def file_hashes(path: Path, memo: HashMemo) -> FileHashes | None:
    """Return the hashes of a model file as sd-scripts computes them, None for a folder; raises OSError.

    The short one is 8 hex digits of the SHA-256 of the 64 KiB at 1 MiB (`model_hash` in sd-scripts); of a
    smaller file it is the hash of no bytes there too.
    """
    if not path.is_file():
        return None
    with path.open("rb") as file:
        file.seek(_SHORT_HASH_OFFSET)
        part = file.read(_SHORT_HASH_BYTES)
    return FileHashes(sha256=memo.sha256(path), short=sha256_bytes(part)[:8])


@dataclass(frozen=True, kw_only=True)
class ExportInfo:
    """The facts about a run that an exported file states; the same info gives the same bytes."""

    title: str
    rank: int
    """The rank of most modules."""
    alpha: float
    """The alpha of most modules."""
    base_name: str
    base_identity: str
    base_model_version: str
    architecture: str
    prediction: Prediction
    settings: Mapping[str, Any]
    """The planned configuration as `config.flatten` gives it; `auto` is left only if a value follows the base."""
    subsets: tuple[SubsetSummary, ...]
    buckets: Mapping[str, int]
    """Images per epoch by "WIDTHxHEIGHT"."""
    step: int
    images_seen: int
    started_at_s: float
    """Unix time."""
    saved_at_s: float
    """Unix time."""
    trigger: str | None = None
    thumbnail_jpeg: bytes | None = None
    zero_terminal_snr: bool = False
    """The value that was used."""
    regularisation_per_epoch: int = 0
    slider: tuple[Mapping[str, Any], ...] = ()
    """Of a slider the prompts and the weight of each direction, or how many pairs of images it has."""
    reach: tuple[float, float] | None = None
    """Of a slider: which share of the way to their goals the strengths 1 and -1 go."""
    references: int = 0
    """Reference images of an image, the most; 0: it was trained from text alone."""
    base_hashes: FileHashes | None = None
    """Hashes of a base in one file; None for a folder."""
    vae_hashes: FileHashes | None = None
    """Hashes of a VAE in one file; None for a folder."""
    bucket_bounds_px: tuple[int, int] | None = None
    """The shortest and the longest side of all buckets; None without buckets."""
    mean_aspect_error: float | None = None
    """Mean over the images of |width / height - width / height of the bucket|."""

    @property
    def images_per_epoch(self) -> int:
        """Images seen in one epoch, repeats included."""
        return sum(len(subset.captions) * subset.repeats for subset in self.subsets)


_dumps = partial(json.dumps, ensure_ascii=False)
_dumps_sorted = partial(_dumps, sort_keys=True)
_SHORT_HASH_OFFSET, _SHORT_HASH_BYTES = 0x100000, 0x10000
# Tags listed per file, the most frequent first; ComfyUI ignores headers above 8 MiB.
MAX_TAGS = 1000
MAX_TAG_CHARACTERS = 300


# Kohya's entries for options that are not here, and the names of algorithms by kind of adapter; entries that are
# settings of ours stand with each setting (`Handling.kohya`).
KOHYA = "kohya_entries.json"
NETWORK_MODULE, NETWORK_ARGUMENTS = "ss_network_module", "ss_network_args"


def _network(info: ExportInfo) -> dict[str, Any]:
    kind, dora = info.settings["adapter.kind"], info.settings["adapter.dora"]
    vae = info.settings["base.vae"]
    hashes = {"sd_model": info.base_hashes, "vae": info.vae_hashes}
    stated_hashes = {name: each for name, each in hashes.items() if each is not None}
    # A number below 2^32 that all files of one training share, as sd-scripts draws one at its start. Computed
    # and not drawn, so that the same training gives the same bytes and a resume the same number.
    names = _dumps_sorted(
        [info.title, info.started_at_s, info.base_identity, info.settings["train.seed"]]
    )
    session = int(sha256_bytes(names.encode("utf-8", "backslashreplace"))[:8], 16)
    return {
        "ss_base_model_version": info.base_model_version,
        "ss_v2": info.base_model_version.startswith("sd_v2"),
        "ss_sd_model_name": info.base_name,
        "ss_output_name": info.title,
        **network_entries(kind, dora=dora, arguments=_network_arguments(info)),
        "ss_network_dim": info.rank,
        "ss_network_alpha": float(info.alpha),
        "ss_network_dropout": info.settings["adapter.dropout"] or None,
        "ss_session_id": session,
        **({"ss_vae_name": vae} if vae else {}),
        **{f"ss_{name}_hash": each.short for name, each in stated_hashes.items()},
        **{f"ss_new_{name}_hash": each.sha256 for name, each in stated_hashes.items()},
    }


def network_entries(
    kind: AdapterKind, *, dora: bool, arguments: Mapping[str, str] = MappingProxyType({})
) -> dict[str, str]:
    """Return which of kohya's networks reads an adapter: its own a plain LoRA, LyCORIS all else."""
    of_kind = dict[str, str]()
    if kind != "lora" or dora or "rs_lora" in arguments:
        of_kind["algo"] = packaged(KOHYA)["algorithms"][kind]
    if dora:
        of_kind |= {"dora_wd": "True", "wd_on_output": "True"}
    return {
        NETWORK_MODULE: "lycoris.kohya" if of_kind else "networks.lora",
        NETWORK_ARGUMENTS: _dumps({**of_kind, **arguments}),
    }


def _network_arguments(info: ExportInfo) -> dict[str, str]:
    """Return the arguments with which kohya's own network or LyCORIS would make this adapter, without its kind."""
    settings, arguments = info.settings, dict[str, str]()
    if settings["adapter.rslora"]:
        arguments["rs_lora"] = "True"
    for name in ("rank_dropout", "module_dropout"):
        if settings[f"adapter.{name}"]:
            arguments[name] = f"{settings[f'adapter.{name}']:g}"
    if (
        settings["adapter.noise_rank"] is not None
    ):  # LyCORIS's names: kohya's own network has no T-LoRA
        arguments["tlora_min_rank"] = str(settings["adapter.noise_rank"])
        arguments["tlora_alpha"] = f"{settings['adapter.noise_rank_power']:g}"
    if settings["adapter.kind"] == "lokr":
        arguments["factor"] = str(settings["adapter.lokr_factor"])
    # Only U-Nets have convolutions, and no U-Net is trained by flow matching.
    if settings["adapter.targets"] == "all" and info.prediction != "flow":
        rank, alpha = settings["adapter.conv_rank"], settings["adapter.conv_alpha"]
        arguments["conv_dim"] = str(info.rank if rank is None else rank)
        arguments["conv_alpha"] = f"{info.alpha if alpha is None else alpha:g}"
    for name, key in (("dims", "adapter.rank_pattern"), ("lrs", "optimizer.learning_rate_pattern")):
        if settings[key]:
            pairs = (f"{pattern}={value}" for pattern, value in settings[key].items())
            arguments[f"network_reg_{name}"] = ",".join(pairs)
    if settings["optimizer.lora_plus_ratio"] != 1:
        arguments["loraplus_lr_ratio"] = f"{settings['optimizer.lora_plus_ratio']:g}"
    return arguments


def _training(info: ExportInfo) -> dict[str, Any]:
    """Return schedules, the optimizer, the loss and its weights; soft_min_snr and p2 have no name in kohya's."""
    settings = info.settings
    images = max(1, info.images_per_epoch + info.regularisation_per_epoch)
    steps, batch = settings["train.steps"], settings["train.batch_size"]
    weighting, loss = settings["objective.weighting"], settings["objective.loss"]
    prior_weight = settings["objective.prior_weight"] if info.regularisation_per_epoch else None
    betas = (settings["optimizer.beta1"], settings["optimizer.beta2"])
    decay, epsilon = settings["optimizer.weight_decay"], settings["optimizer.epsilon"]
    optimizer = f"{settings['optimizer.name']}(weight_decay={decay},betas={betas},eps={epsilon})"
    text_rate = None
    if settings["adapter.text_encoder"]:
        text_rate = settings["optimizer.text_encoder_learning_rate"]
        if text_rate is None:
            share = 1 if settings["optimizer.name"] == "prodigy" else 2
            text_rate = settings["optimizer.learning_rate"] / share
    precision = settings["train.precision"]
    schedule = {"ss_zero_terminal_snr": info.zero_terminal_snr}
    if info.prediction == "flow":
        # kohya counts some densities of timesteps among the weightings.
        sampling = settings["objective.timestep_sampling"]
        is_scheme = weighting == "none" and sampling in ("logit_normal", "mode")
        schedule = {"ss_weighting_scheme": sampling if is_scheme else weighting}
    return {
        **schedule,
        "ss_steps": info.step,
        "ss_epoch": math.ceil(info.images_seen / images),
        "ss_num_epochs": math.ceil(steps * batch / images),
        "ss_num_batches_per_epoch": math.ceil(images / batch),
        "ss_training_started_at": float(info.started_at_s),
        "ss_training_finished_at": float(info.saved_at_s),
        "ss_text_encoder_lr": text_rate,
        "ss_lr_warmup_steps": round(settings["optimizer.warmup_fraction"] * steps),
        "ss_optimizer": optimizer,
        "ss_mixed_precision": "no" if precision == "fp32" else precision,
        "ss_gradient_checkpointing": settings["memory.gradient_checkpointing"] != "none",
        "ss_clip_skip": _beyond(settings["base.clip_skip"], 1),
        "ss_max_token_length": _beyond(settings["data.caption_tokens"], CHUNK_TOKENS),
        "ss_training_comment": settings["output.description"] or None,
        "ss_loss_type": "l2" if loss == "mse" else loss,
        "ss_min_snr_gamma": settings["objective.min_snr_gamma"] if weighting == "min_snr" else None,
        "ss_debiased_estimation": weighting == "debiased",
        "ss_prior_loss_weight": prior_weight,
        "ss_ip_noise_gamma": settings["objective.input_perturbation"] or None,
    }


def _beyond(value: int | Auto, usual: int) -> int | None:
    """Return a number as kohya's trainers note it: none where it is the usual one, or nothing was decided."""
    return None if value in (usual, "auto") else int(value)


def _dataset(info: ExportInfo) -> dict[str, Any]:
    side = info.settings["data.resolution"]
    tags, error = _tag_frequency(info), info.mean_aspect_error
    buckets = {
        "buckets": {
            str(index): {"resolution": [int(side) for side in size.split("x")], "count": count}
            for index, (size, count) in enumerate(sorted(info.buckets.items()))
        },
        **({} if error is None else {"mean_img_ar_error": error}),
    }
    shortest_px, longest_px = info.bucket_bounds_px or (None, None)
    subsets = [
        {
            "image_dir": subset.folder,
            "img_count": len(subset.captions),
            "num_repeats": subset.repeats,
            "class_tokens": info.trigger,
            "is_reg": False,
            "color_aug": False,
            "flip_aug": info.settings["data.flip"],
            "random_crop": False,
            "shuffle_caption": info.settings["data.shuffle_tags"],
            "keep_tokens": info.settings["data.keep_tokens"],
        }
        for subset in info.subsets
    ]
    dataset = {
        "is_dreambooth": True,
        "batch_size_per_device": info.settings["train.batch_size"],
        "num_train_images": info.images_per_epoch,
        "num_reg_images": info.regularisation_per_epoch,
        "resolution": [side, side],
        "enable_bucket": info.settings["data.buckets"],
        "min_bucket_reso": shortest_px,
        "max_bucket_reso": longest_px,
        "bucket_info": buckets,
        "tag_frequency": tags,
        "subsets": subsets,
    }
    counts = ("num_train_images", "num_reg_images", "min_bucket_reso", "max_bucket_reso")
    folders = {
        s.folder: {"n_repeats": s.repeats, "img_count": len(s.captions)} for s in info.subsets
    }
    return {
        "ss_resolution": (side, side),
        **{f"ss_{name}": dataset[name] for name in counts},
        "ss_dataset_dirs": _dumps(folders),
        "ss_reg_dataset_dirs": _dumps({}),
        "ss_tag_frequency": _dumps(tags),
        "ss_bucket_info": _dumps(buckets),
        "ss_datasets": _dumps([dataset]),
    }


def _tag_frequency(info: ExportInfo) -> dict[str, dict[str, int]]:
    """Count comma-separated tags per folder; the trigger leads, as browsers show the first tag."""
    limit = max(1, MAX_TAGS // max(1, len(info.subsets)))
    frequencies: dict[str, dict[str, int]] = {}
    trigger = same_word(info.trigger or "")
    for subset in info.subsets:
        tags = (tag[:MAX_TAG_CHARACTERS] for caption in subset.captions for tag in tags_of(caption))
        counts = Counter(tags)
        ordered = sorted(counts, key=lambda tag: (same_word(tag) != trigger, -counts[tag], tag))
        frequencies[subset.folder] = {tag: counts[tag] for tag in ordered[:limit]}
    return frequencies


SETTINGS_ENTRY = "lora_train.settings"
# Settings that say where things lie on this machine and nothing about the result.
MACHINE_SETTINGS = ("output.folder", "data.cache_dir")

# What tells of the user's folders and captions, and the setting that leaves it out.
DATASET_IN_HEADER = "output.dataset_in_header"
SLIDER_HINT = "A slider: strength 1 is more of it, -1 as much less, 0 the base. No word is needed in the prompt."
SLIDER_ENTRY, REACH_ENTRY = "lora_train.slider", "lora_train.slider_reach"
DATASET_ENTRIES = (
    *("ss_dataset_dirs", "ss_reg_dataset_dirs", "ss_tag_frequency", "ss_datasets"),
    SLIDER_ENTRY,
)
DATASET_SETTINGS = (
    *("data.folders", "data.regularisation_dir", "data.caption_prefix", "data.caption_suffix"),
    *("sampling.prompts", "sampling.negative_prompt", "output.hub_repo"),
)

_MAX_DIGITS = 15

# Settings that name a model: a Hub id is for everybody, a folder on this machine is not.
_SOURCES = ("base.model", "base.vae", "base.companion", "base.assistant", "train.init_from")


def metadata(info: ExportInfo) -> dict[str, str]:
    """Return all header entries but the hashes, which need the tensors; every value is text."""
    sources = {key: public_source(info.settings[key]) for key in _SOURCES if info.settings.get(key)}
    public: ExportInfo = _public(replace(info, settings={**info.settings, **sources}))
    settings, table = public.settings, packaged(KOHYA)
    # Kohya's entries that are settings of ours as they are, and those of options that are not here.
    values = dict(table["unused"])
    for each in all_settings():
        values |= dict.fromkeys(each.handling.kohya, settings[each.key])
    if info.prediction == "flow":
        values |= table["unused_with_flow"]
        for each in all_settings():
            values |= dict.fromkeys(each.handling.kohya_flow, settings[each.key])
    for section in (_network, _training, _dataset, _modelspec):
        values |= section(public)
    values |= {
        "lora_train.version": __version__,
        SETTINGS_ENTRY: _dumps_sorted(
            {key: value for key, value in settings.items() if key not in MACHINE_SETTINGS}
        ),
        "lora_train.base_identity": public.base_identity,
        **({SLIDER_ENTRY: _dumps(public.slider)} if public.slider else {}),
        **({REACH_ENTRY: _dumps(_rounded(public.reach))} if public.reach else {}),
        **({"lora_train.references": str(public.references)} if public.references else {}),
    }
    if not settings[DATASET_IN_HEADER]:
        values = {key: value for key, value in values.items() if key not in DATASET_ENTRIES}
        told = {*MACHINE_SETTINGS, *DATASET_SETTINGS}
        values[SETTINGS_ENTRY] = _dumps_sorted(
            {key: value for key, value in settings.items() if key not in told}
        )
    return {key: str(value) for key, value in sorted(values.items())}


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 3) for number in numbers]


def _modelspec(info: ExportInfo) -> dict[str, Any]:
    side, settings = info.settings["data.resolution"], info.settings
    low, high = settings["objective.min_timestep"], settings["objective.max_timestep"]
    required = {
        "sai_model_spec": "1.0.1",
        "architecture": info.architecture,
        "implementation": "diffusers",
        "implementation_version": f"lora-train/{__version__}",
        "title": info.title,
        "resolution": f"{side}x{side}",
        "date": datetime.fromtimestamp(info.saved_at_s, UTC).isoformat(timespec="seconds"),
        "prediction_type": "v" if info.prediction == "v_prediction" else info.prediction,
    }
    picture = info.thumbnail_jpeg
    optional = {
        "trigger_phrase": info.trigger,
        "usage_hint": SLIDER_HINT if info.slider else usage_hint(info.trigger or ""),
        **{name: settings[f"output.{name}"] for name in ("description", "author", "license")},
        "timestep_range": f"{low},{high}" if (low, high) != (0, 999) else None,
        "thumbnail": f"data:image/jpeg;base64,{base64.b64encode(picture).decode()}"
        if picture
        else None,
    }
    present = {**required, **{key: value for key, value in optional.items() if value}}
    return {f"modelspec.{key}": value for key, value in present.items()}


def header_settings(metadata: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the header of a file of ours, none where they cannot be read."""
    return json_object(metadata.get(SETTINGS_ENTRY, ""))


def steps_trained(metadata: Mapping[str, str]) -> int | None:
    """Return after how many steps a training wrote a file, None where its header does not say so."""
    text = metadata.get("ss_steps", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS else None


def tells_of_dataset(metadata: Mapping[str, str]) -> bool:
    """Say whether an export may tell of its folders and captions; a file of another program has no such wish."""
    return header_settings(metadata).get(DATASET_IN_HEADER, True) is not False


def stated_base(metadata: Mapping[str, str]) -> str | None:
    """Return the base model that the header of a file of ours names, None where it names none."""
    source = header_settings(metadata).get("base.model")
    return source if isinstance(source, str) else None


def made_for(base: str) -> str:
    """Return the entry of settings that names a base model, and nothing else."""
    return json.dumps({"base.model": base})


def usage_hint(trigger: str) -> str:
    """Return the sentence that tells how a trigger is used, an empty one for no trigger."""
    return f"Put '{trigger}' into the prompt." if trigger else ""


def _public(value: Any) -> Any:
    """Clean every text inside `value`, however nested, so that no field can be forgotten."""
    if isinstance(value, str):
        return public_text(value)
    if isinstance(value, (list, tuple)):
        return type(value)(_public(item) for item in value)
    if isinstance(value, Mapping):
        return {key: _public(item) for key, item in value.items()}
    if isinstance(value, (ExportInfo, FileHashes, SubsetSummary)):
        return replace(
            value, **{field.name: _public(getattr(value, field.name)) for field in fields(value)}
        )
    return value

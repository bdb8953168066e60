"""musubi-tuner (kohya-ss): TOML files of a training, and of a dataset of images.

Most arguments are those of sd-scripts, at 30c658c; what differs is the network it trains, how timesteps are
drawn, and the dataset. Text encoders are never trained there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.importing import folder_tables as folders
from lora_trainer.importing import training_options as training
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, Trainer, flattened
from lora_trainer.importing.trainers import sd_scripts

NAME = "musubi-tuner"
NETWORKS = ("lora_qwen_image", "lora_zimage", "lora_flux_2")
"""Its modules for models that are trained here."""
_OWN_SHIFT = {"lora_qwen_image": "qwen_shift", "lora_flux_2": "flux2_shift"}
"""The shift by size that is that of the base's own sampler."""
_OTHER_NETWORKS = ("lora_wan", "lora_framepack", "lora_hv_1_5", "lora_kandinsky", "lora_hidream_o1",
                   "lora_ideogram4", "lora_krea2")  # fmt: skip


def flat(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a training file, whose sections mean nothing."""
    values = sd_scripts.without_sections(data)
    module = str(values.get("network_module", "")).rpartition(".")[2]
    return values if "dit" in values or module in (*NETWORKS, *_OTHER_NETWORKS) else None


def flat_dataset(data: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return flat keys of a dataset file, which names folders as no other trainer's does."""
    datasets = folders.tables_of(data.get("datasets"))
    signs = {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}
    return flattened(data) if any(signs & set(one) for one in datasets) else None


def read(foreign: Foreign) -> None:
    """Read the settings that depend on several keys, and the named dataset file."""
    module = foreign.word("network_module", "networks.lora").rpartition(".")[2]
    if module not in NETWORKS and not module.startswith(("loha", "lokr")):
        raise RequestError(
            f"network_module={module} trains a model that is not trained here",
            fix=f"give a file with {' or '.join(NETWORKS)}",
        )
    version = foreign.word("model_version", "")
    if any(word in version for word in ("edit", "layered", "kontext")):
        raise RequestError(
            f"model_version={version} edits images", fix="give a file of a text-to-image model"
        )
    foreign.is_flow, foreign.trains_text = True, False
    sd_scripts.read_adapter(foreign)
    sd_scripts.read_rates(foreign)
    training.set_text_encoder(foreign, trained=False, key=THERE)
    foreign.set("objective.weighting", "none")
    foreign.set("objective.loss", "mse")
    folders.named_file(foreign, "dataset_config", tomllib.loads, flat_dataset, read_dataset)
    _timesteps(foreign, module)
    training.set_precision(foreign, "mixed_precision", missing="no")
    sd_scripts.read_output(foreign)
    sd_scripts.read_length(foreign)


def _timesteps(foreign: Foreign, module: str) -> None:
    word = foreign.word("timestep_sampling", "sigma")
    if word == "sigma":
        sd_scripts.set_density(foreign, sign=-1)
    elif word == "logsnr":
        mean = (-foreign.nonzero("logit_mean", 0.0) / 2, "logit_mean")
        std = (foreign.nonzero("logit_std", 1.0) / 2, "logit_std")
        training.set_timesteps(foreign, "logit_normal", "timestep_sampling", mean=mean, std=std)
    else:
        sd_scripts.set_sampling(foreign, word, _shift(foreign, word, module))
    training.set_timestep_range(foreign, "min_timestep", "max_timestep")
    buckets = foreign.number("num_timestep_buckets")
    if buckets and buckets > 1:
        strata = min(256, int(buckets))
        foreign.carry("objective.timestep_strata", "num_timestep_buckets", strata)


def _shift(foreign: Foreign, word: str, module: str) -> Sourced:
    key = "timestep_sampling"
    if word.startswith("qinglong"):
        foreign.is_nearest(key, f"{word}: sigmoid with the base's own shift")
    if _OWN_SHIFT.get(module) in (word, word.replace("qinglong_qwen", "qwen_shift")):
        return "resolution", key
    if word.endswith("_shift") or word.startswith("qinglong"):
        high, most = (0.9, 8192) if "qwen" in word else (1.15, 4096)
        token_px = 32 if module == "lora_flux_2" else 16
        return training.shift_by_tokens(foreign, key, word, high=high, most=most, token_px=token_px)
    if word == "shift":
        return foreign.sourced("discrete_flow_shift", 1.0)
    return 1.0, key


def read_dataset(foreign: Foreign) -> None:
    """Read a dataset file, this one by itself or that of a training."""
    general = foreign.data.get("general", {})
    around = (general if isinstance(general, Mapping) else {}, "general.")
    tables = [
        {key: value for key, value in dataset.items() if value is not None}
        for dataset in folders.tables_of(foreign.data["datasets"])
    ]
    shared_by_all: dict[str, list[Sourced]] = {
        name: [] for name in ("resolution", "batch_size", "enable_bucket")
    }
    for folder, table in folders.read_folders(foreign, tables, "datasets", around):
        folder.settings["repeats"] = table.sourced("num_repeats", 1)
        if folder.key.endswith("image_jsonl_file"):
            why = "captions in metadata.jsonl of the images' folder are read"
            foreign.is_nearest(folder.key, f"{folder.path.name}: {why}")
            folder.path = folder.path.parent
        for name, values in shared_by_all.items():
            values += [table.sourced(name)] if name in table else []
    if not folders.set_sizes(foreign, shared_by_all["resolution"]):
        folders.set_resolutions(foreign, [(960, 544)], "resolution, by default there")
    batches, buckets = shared_by_all["batch_size"], shared_by_all["enable_bucket"]
    on, name = buckets[0] if buckets else (False, THERE)
    foreign.set("data.buckets", bool(on), name)
    if batches:
        foreign.carry("train.batch_size", batches[0][1], batches[0][0])
    for sourced, why in (
        (batches, "train.batch_size is for all folders"),
        (buckets, "data.buckets is"),
    ):
        for value, name in sourced[1:]:
            if name not in foreign.named:
                foreign.lacks(name, None if value == sourced[0][0] else value, why)


MUSUBI = Trainer(NAME, ("sd_scripts", "musubi", "musubi_dataset"), flat, read)
MUSUBI_DATASET = Trainer(
    f"{NAME} (a dataset file)", ("musubi_dataset",), flat_dataset, read_dataset
)

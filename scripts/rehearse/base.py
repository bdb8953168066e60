"""A release's folder at its true size, in sparse files of zeros: it takes seconds and a few MB of disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from lora_trainer import families
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.text.transformers_encoder import load_tokenizer
from lora_trainer.families.files.base_parts import tokenizer_folder
from tests.fakes.networks_of_releases import VAES, texts, vae
from tests.fakes.tiny_base import write_base

SAVED_DTYPE = torch.bfloat16
_SHARD_BYTES = 5 * 10**9
"""As large as the files of releases: the system maps no file into memory that is larger than that."""
_NAMES = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64", torch.bool: "BOOL"}


def write_true_size(source: str, folder: Path) -> Path:
    """Write the diffusers folder of the release `source`: true configurations and shapes, a tiny base's tokenizers."""
    facts = families.known_base(source)
    if facts is None:
        raise SystemExit(f"{source} is not a release that is planned without its files")
    family = families.family(facts.family)
    write_base(facts.family, folder)
    denoiser = "unet" if (folder / "unet").is_dir() else "transformer"
    with torch.device("meta"):
        networks: dict[str, Any] = {
            denoiser: family.empty_denoiser(facts.release.architecture),
            "vae": vae(VAES[facts.family]),
        }
        whole = (network for network, _ in texts(facts.family, facts))
        networks |= dict(zip(family.text.networks, whole, strict=True))
        if family.pipeline.unguided:
            networks[family.pipeline.unguided] = family.empty_denoiser(facts.release.architecture)
    for name, network in networks.items():
        _replace(folder / name, network)
    scheduler = folder / "scheduler" / "scheduler_config.json"
    if scheduler.is_file():  # the blocks of some modular pipelines make it
        kind = type(facts.release.sampling_scheduler()).__name__
        scheduler.write_text(json.dumps({"_class_name": kind, **facts.release.scheduler}))
    return folder


def longest_caption(folder: Path) -> str:
    """Return a caption of about as many tokens as the base in `folder` reads, for which a plan has memory.

    "" where all texts have one length.
    """
    family = families.detect(folder)
    text = family.text
    if not text.masked:
        return ""
    tokenizers = {
        component: load_tokenizer(tokenizer_folder(folder, component, text), kind=network.kind)
        for component, network in text.networks.items()
    }
    facts = family.facts(Layout(folder=folder), source=str(folder))
    unused: dict[str, Any] = {name: SimpleNamespace() for name in tokenizers}
    encoder = text.encoder(networks=unused, tokenizers=tokenizers, facts=facts)
    room = encoder.prompt_room()
    words = " ".join(["thing"] * room)
    free = room - encoder.count_tokens(as_caption("", folder))
    return as_caption(" ".join(["thing"] * (free * room // encoder.count_tokens(words))), folder)


def as_caption(words: str, folder: Path) -> str:
    """Return a caption of these words in the form that the base in `folder` was trained with, words or JSON."""
    if families.detect(folder).text.json_captions is None:
        return words
    rest = {"background": "a table", "elements": []}
    return json.dumps({"high_level_description": words, "compositional_deconstruction": rest})


def _replace(folder: Path, network: Any) -> None:
    """Put this network's configuration and weights, all zeros, in the place of the tiny one's."""
    (weights,) = folder.glob("*.safetensors")
    if hasattr(network, "save_config"):
        network.save_config(folder)
    else:
        network.config.architectures = [type(network).__name__]
        network.config.save_pretrained(folder)
    _write_zeros(weights, network)


def _write_zeros(file: Path, network: nn.Module) -> None:
    tensors = network.state_dict()
    if isinstance(network, PreTrainedModel):
        for name in network.all_tied_weights_keys:  # those that this configuration ties
            tensors.pop(name)
        tensors = revert_weight_conversion(
            network, tensors
        )  # the names of files, which may be older
    shards: list[dict[str, Tensor]] = [{}]
    room_bytes = _SHARD_BYTES
    for name, tensor in tensors.items():
        room_bytes -= _saved_bytes(tensor)
        if room_bytes < 0 and shards[-1]:
            shards.append({})
            room_bytes = _SHARD_BYTES - _saved_bytes(tensor)
        shards[-1][name] = tensor
    if len(shards) == 1:
        _write_shard(file, tensors)
        return
    file.unlink()  # the tiny network's
    places: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        part = file.with_name(f"{file.stem}-{number:05}-of-{len(shards):05}.safetensors")
        _write_shard(part, shard)
        places |= dict.fromkeys(shard, part.name)
    index = file.with_name(f"{file.name}.index.json")
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")


def _saved_dtype(tensor: Tensor) -> torch.dtype:
    return SAVED_DTYPE if tensor.is_floating_point() else tensor.dtype


def _saved_bytes(tensor: Tensor) -> int:
    return prod(tensor.shape) * _saved_dtype(tensor).itemsize


def _write_shard(file: Path, tensors: Mapping[str, Tensor]) -> None:
    entries: dict[str, Any] = {}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + _saved_bytes(tensor)
        entries[name] = {
            "dtype": _NAMES[_saved_dtype(tensor)],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    header += b" " * (-len(header) % 8)
    with file.open("wb") as out:
        out.write(len(header).to_bytes(8, "little") + header)
        out.truncate(8 + len(header) + end)

"""Random bases as their releases lie on the Hub: the same files, names, configurations and dtypes, other numbers.

A folder holds exactly the files that `tests.hub_files` of its family's tiny.toml lists as read, with tensors under the
names of the released files. A single file has the layout of ComfyUI and A1111; what it lacks (configurations,
tokenizers) is a folder without weights, as a download of its companion leaves one.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.random_bases import CLIP_G, CLIP_L, ROOT, VAE, random_network

sys.path.insert(0, str(ROOT))

from lora_trainer import families  # noqa: E402 - after sys.path
from lora_trainer.families.files.locate import EMBEDDED_FOLDER  # noqa: E402 - after sys.path
from tests.fakes.ldm_file import write_checkpoint  # noqa: E402 - after sys.path
from tests.fakes.tiny_base import released_files  # noqa: E402 - after sys.path

FILES = released_files()
VOCABULARY = 49_408
_CPU = torch.device("cpu")
_CLIP = {
    "attention_dropout": 0.0,
    "bos_token_id": 0,
    "dropout": 0.0,
    "eos_token_id": 2,
    "initializer_factor": 1.0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 77,
    "model_type": "clip_text_model",
    "pad_token_id": 1,
    "vocab_size": VOCABULARY,
}
_VAE = {
    **VAE,
    "_class_name": "AutoencoderKL",
    "act_fn": "silu",
    "in_channels": 3,
    "out_channels": 3,
    "latent_channels": 4,
}
_OLD_ATTENTION = {
    "to_q": "query",
    "to_k": "key",
    "to_v": "value",
    "to_out.0": "proj_attn",
}
"""What the attention of VAEs saved before diffusers 0.13 is called in their files."""


@dataclass(frozen=True, kw_only=True)
class ReleasedBase:
    """A U-Net release: `texts` and `vae` are its config.json files, `pads` what each tokenizer pads with.

    Its folder is in float32, its single file in `file_dtype`; `old_attention`: the VAE's folder is from before
    diffusers 0.13.
    """

    source: str
    texts: Mapping[str, Mapping[str, Any]]
    vae: Mapping[str, Any]
    pads: Mapping[str, str]
    file_dtype: torch.dtype
    unet: Mapping[str, Any]
    vocabulary: int = VOCABULARY
    old_attention: bool = False


def _clip(kind: str, act: str, sizes: Mapping[str, Any], **entries: Any) -> dict[str, Any]:
    return {**_CLIP, "architectures": [kind], "hidden_act": act, **sizes, **entries}


def _architecture(source: str) -> Mapping[str, Any]:
    facts = families.known_base(source)
    assert facts is not None
    return facts.release.architecture


_SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"
_SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
BASES: Mapping[str, ReleasedBase] = {
    "sd15": ReleasedBase(
        source=_SD15,
        texts={"text_encoder": _clip("CLIPTextModel", "quick_gelu", CLIP_L)},
        vae={**_VAE, "sample_size": 512},
        pads={"tokenizer": "<|endoftext|>"},
        file_dtype=torch.float32,  # v1-5-pruned-emaonly.safetensors, 4.27 GB
        unet=_architecture(_SD15),
        old_attention=True,
    ),
    "sdxl": ReleasedBase(
        source=_SDXL,
        texts={
            "text_encoder": _clip("CLIPTextModel", "quick_gelu", CLIP_L),
            "text_encoder_2": _clip("CLIPTextModelWithProjection", "gelu", CLIP_G),
        },
        vae={**_VAE, "sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
        pads={"tokenizer": "<|endoftext|>", "tokenizer_2": "!"},
        file_dtype=torch.float16,  # sd_xl_base_1.0.safetensors, 6.94 GB
        unet=_architecture(_SDXL),
    ),
}


def tiny(base: ReleasedBase) -> ReleasedBase:
    """Return the same release with small networks, 64 px native: it tries the files, not the sizes."""
    width = {"hidden_size": 32, "intermediate_size": 64, "projection_dim": 32, "vocab_size": 1024}
    texts = {
        name: {**config, **width, "num_attention_heads": 2, "num_hidden_layers": 2}
        for name, config in base.texts.items()
    }
    levels = len(base.unet["block_out_channels"])
    unet = {
        **base.unet,
        "block_out_channels": [8 * 2 ** min(level, 2) for level in range(levels)],
        "cross_attention_dim": 32 * len(texts),
        "norm_num_groups": 4,
        "sample_size": 8,
    }
    if "projection_class_embeddings_input_dim" in unet:
        unet["addition_time_embed_dim"] = 4
        unet["projection_class_embeddings_input_dim"] = 32 + 6 * 4
        unet["attention_head_dim"] = [1, 2, 4]
    vae = {**base.vae, "block_out_channels": [8, 8, 8, 8], "norm_num_groups": 4, "sample_size": 64}
    return replace(base, texts=texts, unet=unet, vae=vae, vocabulary=1024)


def write_folder(base: ReleasedBase, folder: Path) -> Path:
    """Write the release's diffusers folder in float32; the same bits every time, the U-Net in memory once."""
    torch.manual_seed(0)
    write_texts(base, folder)
    diffusers, transformers = (importlib.import_module(n) for n in ("diffusers", "transformers"))
    for name, config in base.texts.items():
        (architecture,) = config["architectures"]
        kind = getattr(transformers, architecture)
        made = kind.config_class.from_dict(dict(config))
        network = random_network(partial(kind, made), _CPU, torch.float32)
        _save(dict(_text_tensors(network)), folder / name / "model.safetensors")
    vae = random_network(lambda: diffusers.AutoencoderKL.from_config(base.vae), _CPU, torch.float32)
    tensors = vae.state_dict()
    if base.old_attention:
        tensors = {_old_name(name): value for name, value in tensors.items()}
    _save(tensors, folder / "vae" / "diffusion_pytorch_model.safetensors")
    del vae, tensors
    unet = random_network(
        lambda: diffusers.UNet2DConditionModel.from_config(base.unet), _CPU, torch.float32
    )
    _save(unet.state_dict(), folder / "unet" / "diffusion_pytorch_model.safetensors")
    _check_files(base, folder)
    return folder


def write_file(base: ReleasedBase, folder: Path, file: Path) -> Path:
    """Write the single file of the release, and into `folder` what it lacks."""
    write_folder(replace(base, old_attention=False), folder)
    facts = families.known_base(base.source)
    assert facts is not None
    family: Any = families.family(facts.family)
    write_checkpoint(folder, file, family.text, dtype=base.file_dtype)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    return file


def write_texts(base: ReleasedBase, folder: Path) -> None:
    """Write everything of the folder but weights."""
    known = families.known_base(base.source)
    assert known is not None
    parts = {
        "unet": base.unet,
        "vae": base.vae,
        "scheduler": known.release.scheduler,
        **{name: config for name, config in base.texts.items()},
    }
    for name, config in parts.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        file = "scheduler_config.json" if name == "scheduler" else "config.json"
        _write_json(folder / name / file, config)
    for name, pad in base.pads.items():
        _write_tokenizer(folder / name, pad, size=base.vocabulary)
    _write_json(folder / "model_index.json", _index(base, known.release.scheduler["_class_name"]))


def _index(base: ReleasedBase, scheduler: str) -> dict[str, Any]:
    facts = families.known_base(base.source)
    assert facts is not None
    family: Any = families.family(facts.family)
    return {
        "_class_name": family.pipeline.class_name,
        "_diffusers_version": "0.19.0.dev0",
        "scheduler": ["diffusers", scheduler],
        **{n: ["transformers", config["architectures"][0]] for n, config in base.texts.items()},
        **{name: ["transformers", "CLIPTokenizer"] for name in base.pads},
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
    }


def _write_tokenizer(folder: Path, pad: str, *, size: int) -> None:
    """Write CLIP's files: bytes, bytes at the end of a word, merges, two markers; `size` tokens in all."""
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    symbols = list(bytes_to_unicode().values())
    vocabulary = [*symbols, *(f"{symbol}</w>" for symbol in symbols)]
    merges = []
    for left, right in _merges(symbols):
        if left + right not in vocabulary[: len(symbols)]:
            merges.append((left, right))
        if len(vocabulary) + len(merges) + 2 == size:
            break
    vocabulary += [left + right for left, right in merges]
    vocabulary += ["<|startoftext|>", "<|endoftext|>"]
    assert len(set(vocabulary)) == size
    folder.mkdir(parents=True, exist_ok=True)
    _write_json(folder / "vocab.json", {token: at for at, token in enumerate(vocabulary)})
    lines = ["#version: 0.2", *(f"{left} {right}" for left, right in merges), ""]
    (folder / "merges.txt").write_text("\n".join(lines), encoding="utf-8")
    named = {"bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "pad_token": pad}
    named["unk_token"] = "<|endoftext|>"
    _write_json(folder / "special_tokens_map.json", named)
    settings = {"do_lower_case": True, "model_max_length": 77, "tokenizer_class": "CLIPTokenizer"}
    _write_json(folder / "tokenizer_config.json", {**named, **settings, "errors": "replace"})


def _merges(symbols: list[str]) -> Iterator[tuple[str, str]]:
    """Yield the merges of the embedded base, then pairs and triples of bytes that English does not have."""
    model = json.loads((EMBEDDED_FOLDER / "tokenizer" / "tokenizer.json").read_text())["model"]
    yield from (tuple(pair) for pair in model["merges"])
    rare = [symbol for symbol in symbols if not symbol.isascii()]
    yield from product(rare, rare)
    pairs = [left + right for left, right in product(rare, rare)]
    yield from product(pairs, rare)


def _text_tensors(network: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, value in network.state_dict().items():
        # transformers 5 dropped the prefix, which files have.
        whole = name.startswith(("text_model.", "text_projection"))
        yield name if whole else f"text_model.{name}", value
    yield "text_model.embeddings.position_ids", torch.arange(77)[None]


def _old_name(name: str) -> str:
    if ".attentions." in name:
        for new, old in _OLD_ATTENTION.items():
            name = name.replace(f".{new}.", f".{old}.")
    return name


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    save_file(dict(tensors), file, {"format": "pt"})


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=1), encoding="utf-8")


def _check_files(base: ReleasedBase, folder: Path) -> None:
    """Raise where the folder is not, file for file, what the release's list says is read."""
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    listed = set(FILES[base.source]["read"])
    if here != listed:
        raise ValueError(f"{folder}: too many {here - listed}, too few {listed - here}")


def remove_base(folder: Path) -> None:
    """Remove a base; nothing to do where there is none."""
    shutil.rmtree(folder, ignore_errors=True)

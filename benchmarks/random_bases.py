"""Random base models of true size, written on this machine: what memory and speed are measured on.

Output is a diffusers folder: the denoiser and the VAE as released, CLIP as released, large language
encoders with their width and three layers. Weights are noise, which takes as much memory and time as
trained ones.
"""

from __future__ import annotations

import importlib
import json
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer import families  # noqa: E402 - after sys.path
from tests.fakes.tiny_base import write_base  # noqa: E402

CLIP_L = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "projection_dim": 768,
}
CLIP_G = {
    "hidden_size": 1280,
    "intermediate_size": 5120,
    "num_attention_heads": 20,
    "num_hidden_layers": 32,
    "projection_dim": 1280,
}
T5_XXL = {"d_model": 4096, "d_ff": 10240, "d_kv": 64, "num_heads": 64, "num_layers": 3}
QWEN3_4B = {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 3,
}
VAE = {
    "block_out_channels": [128, 256, 512, 512],
    "down_block_types": ["DownEncoderBlock2D"] * 4,
    "up_block_types": ["UpDecoderBlock2D"] * 4,
    "layers_per_block": 2,
    "norm_num_groups": 32,
    "mid_block_add_attention": True,
}


@dataclass(frozen=True, kw_only=True)
class Release:
    """A public release: its Hub id, the folder of its denoiser, its text encoders and VAE as config entries."""

    source: str
    denoiser: str
    texts: Mapping[str, Mapping[str, Any]]
    vae: Mapping[str, Any] = field(default_factory=dict)


RELEASES: Mapping[str, Release] = {
    "sd15": Release(
        source="stable-diffusion-v1-5/stable-diffusion-v1-5",
        denoiser="unet",
        texts={"text_encoder": CLIP_L},
    ),
    "sdxl": Release(
        source="stabilityai/stable-diffusion-xl-base-1.0",
        denoiser="unet",
        texts={"text_encoder": CLIP_L, "text_encoder_2": CLIP_G},
    ),
    "flux": Release(
        source="black-forest-labs/FLUX.1-dev",
        denoiser="transformer",
        texts={"text_encoder": CLIP_L, "text_encoder_2": T5_XXL},
    ),
    "zimage": Release(
        source="Tongyi-MAI/Z-Image",
        denoiser="transformer",
        texts={"text_encoder": QWEN3_4B},
        vae={"latent_channels": 16},
    ),
}


def write_true_size(name: str, folder: Path, *, device: torch.device) -> Path:
    """Write a random base of true size and return its folder; made on `device`, bf16 denoiser."""
    release = RELEASES[name]
    write_base(name, folder)
    replace_part(folder / "vae", {**VAE, **release.vae}, device=device, dtype=torch.float32)
    for part, entries in release.texts.items():
        replace_part(folder / part, entries, device=device, dtype=torch.bfloat16)
    facts = families.known_base(release.source)
    assert facts is not None
    target = folder / release.denoiser
    shutil.rmtree(target)
    family = families.family(facts.family)
    _save(random_network(lambda: family.empty_denoiser(facts.release.architecture), device), target)
    return folder


def replace_part(
    folder: Path, entries: Mapping[str, Any], *, device: torch.device, dtype: torch.dtype
) -> None:
    """Put a network of another size in the place of one of the same class: `entries` of its config change."""
    config = json.loads((folder / "config.json").read_text()) | dict(entries)
    shutil.rmtree(folder)
    if "_class_name" in config:
        kind = getattr(importlib.import_module("diffusers"), config["_class_name"])
        network = random_network(lambda: kind.from_config(config), device)
    else:
        transformers = importlib.import_module("transformers")
        (architecture,) = config["architectures"]
        kind = getattr(transformers, architecture)
        made = kind.config_class.from_dict(config)
        network = random_network(lambda: kind(made), device)
    _save(network.to(dtype), folder)


def random_network(
    build: Callable[[], Any], device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> nn.Module:
    """Build without memory, then fill with noise on the device."""
    with torch.device("meta"):
        network: nn.Module = build()
    network = network.to(dtype).to_empty(device=device)
    with torch.no_grad():
        for name, tensor in (*network.named_parameters(), *network.named_buffers()):
            if not tensor.is_floating_point():
                tensor.copy_(torch.arange(tensor.numel()).reshape(tensor.shape))  # position ids
            elif tensor.dim() > 1:
                tensor.normal_(std=tensor[0].numel() ** -0.5 / 2)  # of all inputs of an output
            else:
                tensor.fill_(1.0 if name.endswith("weight") else 0.0)
    return network


def _save(network: Any, folder: Path) -> None:
    network.save_pretrained(folder, max_shard_size="5GB")

"""A single-file checkpoint in the layout of ComfyUI and A1111, written from a tiny diffusers base.

Every name is made by rules of its own here, in the other direction than the library that reads them;
only the U-Net's block numbers come from `unet_names`, which has tests against published names.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.families.files.unet_file import ldm_module
from tests.fakes.original_names import RULES

PARTS = ("denoiser", "vae", "text_encoder")


def write_checkpoint(
    base: Path,
    file: Path,
    text: Any,
    *,
    parts: Iterable[str] = PARTS,
    dtype: torch.dtype = torch.float32,
    marks: Iterable[str] = (),
    ema: bool = False,
) -> Path:
    """Write the parts of a base into one file; `ema` adds averaged weights that differ."""
    found: dict[str, Tensor] = {}
    if "denoiser" in parts:
        found |= unet_tensors(base)
    if ema:
        found |= {f"model_ema.{name.replace('.', '')}": found[name] + 1 for name in [*found]}
    if "vae" in parts:
        found |= {f"first_stage_model.{name}": value for name, value in vae_tensors(base).items()}
    if "text_encoder" in parts:
        for component, prefix in text.prefixes.items():
            found |= text_tensors(base, component, prefix)
    found = {name: value.to(dtype).contiguous() for name, value in found.items()}
    found |= {name: torch.tensor([]) for name in marks}
    save_file(found, file)
    return file


def unet_tensors(base: Path) -> dict[str, Tensor]:
    """Return the U-Net's tensors by their names in a checkpoint."""
    architecture = json.loads((base / "unet/config.json").read_text())
    return {
        "model.diffusion_model." + _renamed(name, architecture): value
        for name, value in load_file(base / "unet/diffusion_pytorch_model.safetensors").items()
    }


def vae_tensors(base: Path) -> dict[str, Tensor]:
    """Return the VAE's tensors by their names in a file of a VAE alone."""
    levels = len(json.loads((base / "vae/config.json").read_text())["block_out_channels"])
    found = {}
    for name, value in load_file(base / "vae/diffusion_pytorch_model.safetensors").items():
        if "attentions" in name and value.dim() == 2:
            value = value[:, :, None, None]
        name = _replaced(name, "vae")
        found[re.sub(r"up\.(\d+)\.", lambda at: f"up.{levels - 1 - int(at[1])}.", name)] = value
    return found


def text_tensors(base: Path, component: str, prefix: str) -> dict[str, Tensor]:
    """Return a text encoder's tensors by their names in a checkpoint, with those nobody reads."""
    weights = {
        name.removeprefix("text_model."): value
        for name, value in load_file(base / component / "model.safetensors").items()
    }
    if not prefix.endswith(".model."):
        projection = weights.pop("text_projection.weight", None)
        found = {f"text_model.{name}": value for name, value in weights.items()}
        found["text_model.embeddings.position_ids"] = torch.arange(77)[None]
        if projection is not None:
            found["text_projection.weight"] = projection
    else:
        found = _open_clip(weights)
    return {prefix + name: value for name, value in found.items()}


def _open_clip(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    width = len(weights["final_layer_norm.weight"])
    found = {"logit_scale": torch.tensor(4.6), "text_projection": torch.eye(width)}
    for name, value in weights.items():
        if name == "text_projection.weight":
            found["text_projection"] = value.T
        elif "_proj." not in name or "out_proj" in name:
            found[_replaced(name, "open_clip")] = value
        elif ".q_proj." in name:
            fused = [weights[name.replace("q_proj", f"{each}_proj")] for each in "qkv"]
            at = _replaced(name.split(".self_attn")[0], "open_clip")
            found[f"{at}.attn.in_proj_{name.rpartition('.')[2]}"] = torch.cat(fused)
    return found


def _renamed(name: str, architecture: Mapping[str, object]) -> str:
    module, _, kind = name.rpartition(".")
    return f"{ldm_module(module, architecture=architecture)}.{kind}"


def _replaced(name: str, rules: str) -> str:
    for pattern, new in RULES[rules].items():
        name = re.sub(pattern, new, name)
    return name

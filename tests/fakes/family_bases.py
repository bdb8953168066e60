"""The tiny random base of each family, written once per test process into the tests' home folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.families.base.facts import BaseFacts, Conditioning, Geometry
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.sampling import plain_pipeline
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.training.loss import padded_alike
from tests.fakes.tiny_base import write_base

CPU = torch.device("cpu")


@cache
def base_of(name: str) -> Path:
    """Return the diffusers folder of a family's tiny base; its tiny.toml says what is in it."""
    return write_base(name, Path.home() / "bases" / name)


@cache
def facts_of(name: str) -> BaseFacts:
    """Return the facts of a family's tiny base."""
    return facts_at(base_of(name))


def facts_at(folder: Path, *, source: str = "tiny", family: str = "", **files: Path) -> BaseFacts:
    """Return the facts of a diffusers folder, with `files` in place of its parts (`vae=...`)."""
    chosen = families.family(family) if family else families.detect(folder)
    return chosen.facts(Layout(folder=folder, files=files), source=source)  # type: ignore[arg-type]  # names of parts


def copy_of(name: str, folder: Path) -> Path:
    """Copy a family's tiny base, for a test that changes it."""
    shutil.copytree(base_of(name), folder)
    return folder


def edit_json(file: Path, **changes: Any) -> None:
    """Set keys of a JSON object of a base; None removes a key."""
    values = {**json.loads(file.read_text(encoding="utf-8")), **changes}
    left = {key: value for key, value in values.items() if value is not None}
    file.write_text(json.dumps(left), encoding="utf-8")


def denoiser_of(name: str) -> nn.Module:
    """Load the denoiser of a family's tiny base in float32."""
    return network_of(facts_of(name))


def unet_that_edits(name: str, folder: Path) -> BaseFacts:
    """Return the facts of a U-Net family's tiny base with four more input channels, for a reference."""
    base = copy_of(name, folder)
    edit_json(base / "unet" / "config.json", in_channels=8)
    file = next((base / "unet").glob("*.safetensors"))
    weights = load_file(file)
    own = weights["conv_in.weight"]
    weights["conv_in.weight"] = torch.cat([own, draw(*own.shape, seed=1) * own.std()], dim=1)
    save_file(weights, file)
    return facts_at(base, family=name)


def network_of(facts: BaseFacts, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Load the denoiser of a base."""
    return families.family(facts.family).load_denoiser(facts, dtype=dtype, device=CPU)


def encoder_of(facts: BaseFacts) -> TextEncoder:
    """Load the text encoders of a base in float32."""
    return families.family(facts.family).load_text_encoder(facts, dtype=torch.float32, device=CPU)


def image_encoder_of(facts: BaseFacts) -> Any:
    """Load the VAE of a base for encoding."""
    return families.family(facts.family).latents.encoder(facts, device=CPU)


def pipeline_of(facts: BaseFacts, dtype: torch.dtype = torch.float32) -> Any:
    """Return diffusers' own pipeline of a base, which draws no bars."""
    pipeline = plain_pipeline(families.family(facts.family), facts, dtype=dtype, device=CPU)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def side_of(facts: BaseFacts) -> int:
    """Return the side in pixels of the images that tests train on: two bucket steps, at least 16."""
    return max(2 * facts.bucket_step_px, 16)


def conditioning_of(family: Family, facts: BaseFacts, prompts: Sequence[str]) -> Conditioning:
    """Return what a batch of these prompts is told, as the loader stacks it."""
    encoder = encoder_of(facts)
    side = side_of(facts)
    told = {
        **facts.release.geometry_conditioning(
            Geometry(original_px=(side, side), corner_px=(0, 0), target_px=(side, side))
        ),
        **facts.guidance.conditioning(1.0),
    }
    singles = [{**encoder.encode_prompts([prompt]), **told} for prompt in prompts]
    return {key: torch.cat(padded_alike([single[key] for single in singles])) for key in singles[0]}


@cache
def told_of(name: str, prompts: tuple[str, ...]) -> Conditioning:
    """Return what a batch of these prompts is told in a family's tiny base; no test may change it."""
    return conditioning_of(families.family(name), facts_of(name), prompts)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return standard normal float32 numbers that depend on `seed` alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))

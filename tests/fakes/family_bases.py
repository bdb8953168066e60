"""The tiny random base of each family, written once per test process into the tests' home folder."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import torch
from torch import nn

from lora_trainer import families
from lora_trainer.families.base import BaseFacts, Conditioning, Family, Geometry, Layout
from lora_trainer.training.batch import padded_alike

CPU = torch.device("cpu")


@cache
def base_of(name: str) -> Path:
    """Return the diffusers folder of a family's tiny base; a new family adds tests/fakes/bases/NAME.py."""
    written: Path = import_module(f"tests.fakes.bases.{name}").write_base(
        Path.home() / "bases" / name
    )
    return written


@cache
def facts_of(name: str) -> BaseFacts:
    """Return the facts of a family's tiny base."""
    return facts_at(base_of(name))


def facts_at(folder: Path) -> BaseFacts:
    """Return the facts of a diffusers folder."""
    layout = Layout(folder=folder)
    return families.detect(folder).facts(layout, source="tiny")


def copy_of(name: str, folder: Path) -> Path:
    """Copy a family's tiny base, for a test that changes it."""
    shutil.copytree(base_of(name), folder)
    return folder


def denoiser_of(name: str) -> nn.Module:
    """Load the denoiser of a family's tiny base in float32."""
    family = families.family(name)
    return family.load_denoiser(facts_of(name), dtype=torch.float32, device=CPU)


def side_of(facts: BaseFacts) -> int:
    """Return the side in pixels of the images that tests train on: two bucket steps, at least 16."""
    return max(2 * facts.bucket_step_px, 16)


def conditioning_of(family: Family, facts: BaseFacts, prompts: Sequence[str]) -> Conditioning:
    """Return what a batch of these prompts is told, as the loader stacks it."""
    encoder = family.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    side = side_of(facts)
    told = {
        **facts.geometry_conditioning(
            Geometry(original_px=(side, side), corner_px=(0, 0), target_px=(side, side))
        ),
        **facts.guidance.conditioning(1.0),
    }
    singles = [{**encoder.encode_prompts([prompt]), **told} for prompt in prompts]
    return {key: torch.cat(padded_alike([single[key] for single in singles])) for key in singles[0]}

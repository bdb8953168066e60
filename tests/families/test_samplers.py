"""Samplers of both kinds of families: the VAE is on the device for an image and never longer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.families.base import Sampler
from lora_trainer.families.images.flow_images import FlowSampler
from lora_trainer.families.images.unet_images import UNetSampler

DEVICE = torch.device("cpu", 0)
CPU = torch.device("cpu")


@dataclass
class Vae:
    """Remembers where it was moved; `error` is what decoding, or moving to the device, ends with."""

    decoding: Exception | None = None
    moving: Exception | None = None
    moves: list[str] = field(default_factory=list)

    @property
    def config(self) -> Any:
        return SimpleNamespace(scaling_factor=1.0)

    def to(self, device: Any) -> Vae:
        self.moves.append(str(device))
        if self.moving is not None and device == DEVICE:
            raise self.moving
        return self

    def decode(self, latents: Tensor, return_dict: bool = True) -> Any:
        if self.decoding is not None:
            raise self.decoding
        pixels = torch.zeros(1, 3, 8, 8)
        return SimpleNamespace(sample=pixels) if return_dict else (pixels,)


class Pipeline:
    """Draws empty latents."""

    unet = transformer = nn.Linear(1, 1)

    def __call__(self, **_: Any) -> Any:
        return SimpleNamespace(images=torch.zeros(1, 4, 2, 2))


def sampler(kind: str, vae: Vae) -> Sampler:
    if kind == "unet":
        return UNetSampler(
            pipeline=Pipeline(),
            vae=vae,
            device=CPU,
            decode_on=DEVICE,
            arguments=lambda *_: {"guidance": 1},
        )
    painter: Any = SimpleNamespace(
        sampler_arguments=lambda *_, **__: {}, latents_to_decode=lambda *parts: parts[2]
    )
    return FlowSampler(pipeline=Pipeline(), vae=vae, device=CPU, decode_on=DEVICE, family=painter)


def draw(kind: str, vae: Vae) -> Any:
    return sampler(kind, vae).image({}, {}, seed=1, size_px=(8, 8), steps=1, guidance_scale=1.0)


KINDS = pytest.mark.parametrize("kind", ["unet", "flow"])


@KINDS
def test_the_vae_is_on_the_device_for_an_image(kind: str) -> None:
    vae = Vae()
    assert draw(kind, vae).size == (8, 8)
    assert vae.moves == ["cpu:0", "cpu"]


@KINDS
@pytest.mark.parametrize("where", ["decoding", "moving"])
def test_it_leaves_the_device_when_that_is_full(kind: str, where: str) -> None:
    """On a full GPU a VAE that stayed would make every later step run out of memory too."""
    full = torch.OutOfMemoryError("CUDA out of memory")
    vae = Vae(decoding=full) if where == "decoding" else Vae(moving=full)
    with pytest.raises(torch.OutOfMemoryError):
        draw(kind, vae)
    assert vae.moves[-1] == "cpu"

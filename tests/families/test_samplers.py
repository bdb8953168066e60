"""Samplers of both kinds of families: the VAE is on the device for an image and never longer."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.families.base import Sampler

DEVICE = torch.device("cpu", 0)
CPU = torch.device("cpu")


@dataclass
class Vae:
    """Remembers where it was moved; `error` is what decoding, or moving to the device, ends with."""

    decoding: Exception | None = None
    moving: Exception | None = None
    moves: list[str] = field(default_factory=list)

    def to(self, device: Any) -> Vae:
        self.moves.append(str(device))
        if self.moving is not None and device == DEVICE:
            raise self.moving
        return self

    def decode(self, latents: Tensor, return_dict: bool = True) -> Any:
        if self.decoding is not None:
            raise self.decoding
        return (torch.zeros(1, 3, 8, 8),)


class Pipeline:
    """Draws empty latents."""

    def __call__(self, **_: Any) -> Any:
        return SimpleNamespace(images=torch.zeros(1, 4, 2, 2))


def draw(vae: Vae) -> Any:
    family: Any = SimpleNamespace(
        sampler_arguments=lambda *_, **__: {},
        latents_to_decode=lambda *parts: parts[1],
        video_vae=False,
    )
    sampler = Sampler(
        pipeline=Pipeline(),
        denoiser=nn.Linear(1, 1),
        vae=vae,
        device=DEVICE,
        family=family,
    )
    return sampler.image({}, {}, seed=1, size_px=(8, 8), steps=1, guidance_scale=1.0)


def test_the_vae_is_on_the_device_for_an_image_also_when_that_is_full() -> None:
    """On a full GPU a VAE that stayed would make every later step run out of memory too."""
    vae = Vae()
    assert draw(vae).size == (8, 8)
    assert vae.moves == ["cpu:0", "cpu"]
    full = torch.OutOfMemoryError("CUDA out of memory")
    for vae in (Vae(decoding=full), Vae(moving=full)):
        with pytest.raises(torch.OutOfMemoryError):
            draw(vae)
        assert vae.moves[-1] == "cpu"

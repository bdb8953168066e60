"""Encoders that cost nothing: what they make has the right shapes, for measuring all that is done beside encoding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lora_trainer.families.base.facts import BaseFacts, Conditioning
from lora_trainer.families.base.latents import ImageEncoder, Latents
from lora_trainer.families.base.texts import TextEncoder


@dataclass(frozen=True, kw_only=True)
class Pictures(ImageEncoder):
    """Stands where the VAE would be: its latents have the right shape."""

    facts: BaseFacts

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        factor, channels = self.facts.vae_factor, self.facts.latent_channels
        size = (pixels.shape[-2] // factor, pixels.shape[-1] // factor)
        # Latents of one value are refused as those of a damaged VAE.
        mean = torch.linspace(-1, 1, channels * size[0] * size[1]).view(channels, *size)
        return [Latents(mean=mean + pixels.mean(), std=torch.ones_like(mean))]


class Texts(TextEncoder):
    """Stands where the text encoders would be; tokens are the letters."""

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        (prompt,) = prompts
        return {"text": torch.tensor([list(prompt.encode())])}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        ramp = torch.linspace(-1, 1, 77 * 256).view(1, 77, 256)
        return {"text": ramp + tokens["text"].shape[-1]}

    def count_tokens(self, prompt: str) -> int:
        return 0

    def prompt_room(self) -> int:
        return 75

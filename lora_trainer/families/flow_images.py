"""Encoding and sampling images for flow-matching families: the VAE's posterior, the base's own pipeline.

A family says how latents are normalised, what its pipeline takes, and what its VAE decodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lora_trainer.errors import InputError
from lora_trainer.families.base import Conditioning, ImageEncoder, Latents, Sampler

if TYPE_CHECKING:
    import torch
    from diffusers import DiffusionPipeline
    from PIL import Image
    from torch import Tensor, nn


class Painter(Protocol):
    """What of a family encoding and sampling need."""

    def normalised(self, vae: nn.Module, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
        """Return a posterior as the denoiser wants it."""

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]:
        """Return the pipeline's arguments for texts that are encoded."""

    def decodable(
        self, pipeline: DiffusionPipeline, vae: nn.Module, latents: Tensor, size_px: tuple[int, int]
    ) -> Tensor:
        """Return what the VAE decodes."""


@dataclass(frozen=True, kw_only=True)
class FlowImageEncoder(ImageEncoder):
    """A VAE whose posterior the family normalises."""

    vae: Any
    family: Painter

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        import torch

        with torch.no_grad():
            posterior = self.vae.encode(pixels.to(self.vae.device)).latent_dist
            means, stds = self.family.normalised(self.vae, posterior.mean, posterior.std)
        means, stds = means.float().cpu(), stds.float().cpu()
        if not (means.isfinite().all() and stds.isfinite().all()):
            raise InputError(
                "the VAE gave latents that are not finite numbers",
                fix="use the base model's original VAE, or another with --set base.vae=FILE",
            )
        return [Latents(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class FlowSampler(Sampler):
    """The base's own pipeline with the denoiser in training; decoding is done in float32."""

    pipeline: Any
    vae: Any
    device: torch.device
    decode_on: torch.device
    family: Painter

    def image(
        self,
        conditioning: Conditioning,
        negative: Conditioning,
        *,
        seed: int,
        size_px: tuple[int, int],
        steps: int,
        guidance_scale: float,
    ) -> Image.Image:
        import torch
        from diffusers.image_processor import VaeImageProcessor

        latents = self.pipeline(
            **self.family.sampler_arguments(
                self._moved(conditioning), self._moved(negative), guidance_scale=guidance_scale
            ),
            generator=torch.Generator().manual_seed(seed),
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=steps,
            output_type="latent",
        ).images.to(self.decode_on)
        try:
            vae = self.vae.to(self.decode_on)
            with torch.no_grad():
                ready = self.family.decodable(self.pipeline, vae, latents, size_px)
                pixels = vae.decode(ready.float(), return_dict=False)[0]
        finally:
            self.vae.to("cpu")  # training needs the room, most of all where decoding had too little
        if pixels.dim() == 5:  # a video VAE: one frame
            pixels = pixels[:, :, 0]
        image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
        return image

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(self.pipeline.transformer.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in conditioning.items()
        }

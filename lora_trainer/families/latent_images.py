"""Images and latents: the VAE's posterior, samples from a denoiser in training, latents as tokens.

Transformers like FLUX.1 read 2x2 squares of latents as tokens: float [B, C, H, W] to [B, H/2 W/2, 4 C] and
back, channels before rows before columns. A family normalises latents, names the arguments of its pipeline
and prepares latents for its VAE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lora_trainer.common.errors import InputError
from lora_trainer.common.processes import give_back_heap
from lora_trainer.families.facts import Conditioning

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor, nn


def pack(latents: Tensor) -> Tensor:
    """Return [B, H/2 W/2, 4 C] of [B, C, H, W]; height and width are even."""
    batch, channels, height, width = latents.shape
    squares = latents.reshape(batch, channels, height // 2, 2, width // 2, 2)
    # The order of FluxPipeline._pack_latents.
    return squares.permute(0, 2, 4, 1, 3, 5).reshape(batch, -1, channels * 4)


def unpack(tokens: Tensor, *, height: int, width: int) -> Tensor:
    """Return [B, C, height, width] in latents of [B, height/2 width/2, 4 C]."""
    batch, _, channels = tokens.shape
    squares = tokens.reshape(batch, height // 2, width // 2, channels // 4, 2, 2)
    return squares.permute(0, 3, 1, 4, 2, 5).reshape(batch, channels // 4, height, width)


def position_ids(latents: Tensor) -> Tensor:
    """Return float32 [H/2 W/2, 3]: 0, row, column of each token of [B, C, H, W]."""
    import torch

    rows = torch.arange(latents.shape[-2] // 2, device=latents.device)
    columns = torch.arange(latents.shape[-1] // 2, device=latents.device)
    grid = torch.cartesian_prod(rows, columns).reshape(-1, 2).float()
    # The first of the three axes is 0 for every token of a single image.
    return torch.nn.functional.pad(grid, (1, 0))


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Posterior of one image: `mean` and `std`, float32 [channels, height, width], already scaled for the denoiser."""

    mean: Tensor
    std: Tensor


class LatentConventions(Protocol):
    """How a family scales latents and calls its pipeline; its methods are described in base.py."""

    video_vae: bool

    def normalised(self, vae: Any, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]: ...

    def latents_to_decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor: ...

    def sampler_arguments(
        self, conditioning: Conditioning, negative: Conditioning, *, guidance_scale: float
    ) -> Mapping[str, Any]: ...


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """A VAE whose posterior the family normalises; only caching uses it."""

    vae: Any
    family: LatentConventions

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        """Encode float32 [B, 3, H, W] in [-1, 1]; raises InputError when a latent is not finite."""
        import torch

        if self.family.video_vae:
            pixels = pixels.unsqueeze(2)
        with torch.no_grad():
            posterior = self.vae.encode(pixels.to(self.vae.device)).latent_dist
            # The whole posterior, no sample of it: the cache keeps both, and each step draws its own latents.
            means, stds = self.family.normalised(self.vae, posterior.mean, posterior.std)
        means, stds = means.float().cpu(), stds.float().cpu()
        if not (means.isfinite().all() and stds.isfinite().all()):
            raise InputError(
                "the VAE gave latents that are not finite numbers",
                fix="use the base model's original VAE, or another with --set base.vae=FILE",
            )
        return [Latents(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """The base's own pipeline with the denoiser in training, on encoded prompts; the VAE decodes in float32."""

    pipeline: Any
    denoiser: nn.Module
    vae: Any
    device: torch.device
    decode_on: torch.device
    family: LatentConventions

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
        """Return one RGB image of (width, height); equal to the plain pipeline's with a CPU generator of `seed`."""
        import torch
        from diffusers.image_processor import VaeImageProcessor

        latents = self.pipeline(
            **self.family.sampler_arguments(
                self._moved(conditioning), self._moved(negative), guidance_scale=guidance_scale
            ),
            # On the CPU, so that a seed gives the same noise on every device.
            generator=torch.Generator().manual_seed(seed),
            width=size_px[0],
            height=size_px[1],
            num_inference_steps=steps,
            output_type="latent",
        ).images.to(self.decode_on)
        give_back_heap()  # decoding makes far larger tensors than a denoising step leaves
        try:
            vae = self.vae.to(self.decode_on)
            with torch.no_grad():
                ready = self.family.latents_to_decode(vae, latents, size_px)
                pixels = vae.decode(ready, return_dict=False)[0]
        finally:
            # Also after an error: training needs the memory, most of all when decoding ran out of it.
            self.vae.to("cpu")
        if self.family.video_vae:  # [B, C, 1, H, W]
            pixels = pixels[:, :, 0]
        image: Image.Image = VaeImageProcessor().postprocess(pixels, output_type="pil")[0]
        return image

    def _moved(self, conditioning: Conditioning) -> Conditioning:
        dtype = next(self.denoiser.parameters()).dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else None)
            for name, tensor in conditioning.items()
        }

"""How a family's denoiser sees its VAE's latents: shapes, scaling before training, decoding of samples.

Torch-free to import. A family with other latents has a subclass of `VaeLatents` (flux2.py, qwen.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.layout import Header
from lora_trainer.families.files.base_parts import (
    VAE_PREFIXES,
    config_value,
    holds_vae,
    load_base_vae,
    part_names,
    vae_names,
)
from lora_trainer.families.files.recognise import fits, signature_tables

if TYPE_CHECKING:
    import torch
    from torch import Tensor


# What a class of latents may have otherwise without another entry in the cache: which of an image's latents are
# trained, how they become pixels, and how files are told.
DECODING = frozenset(
    {"are_drawn", "decode", "is_in", "names", "native_side", "unpacked", "vae_peak"}
)


@dataclass(frozen=True, kw_only=True)
class Latents:
    """Posterior of one image: `mean` and `std`, float32 [channels, height, width], already scaled for the denoiser."""

    mean: Tensor
    std: Tensor


class VaeLatents:
    """Latents of an image VAE, [B, C, H, W], scaled by one shift and one factor."""

    reading = ""  # as in the entries of releases before readings had names

    native_side = 128
    """Side of an image of the native resolution, in latents: 128 for 1024 px at 8 px per latent."""
    are_drawn = True
    """Whether each epoch draws an image's latents from the VAE's posterior, as the family's references do.

    A draw in the training of SD 1, 2 and 3, SDXL, FLUX.1 and Lumina 2 (diffusers' training scripts, sd-scripts, and
    FLUX.1's own autoencoder, which Chroma and Lumina 2 share); the mean where a family says so.
    """

    def encoder(self, facts: BaseFacts, *, device: torch.device) -> ImageEncoder:
        """Load the VAE in float32, frozen; in fp16 some overflow."""
        return ImageEncoder(vae=load_base_vae(facts.located).to(device), latents=self)

    def shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        """Return (channels, pixels per latent) of `predict`'s latents, from the VAE's configuration."""
        levels = len(config_value(config, "block_out_channels", list))
        return config_value(config, "latent_channels", int), 2 ** (levels - 1)

    def is_in(self, header: Header, *, channels: int, alone: bool) -> bool:
        """Return whether a single file holds this VAE, with `alone` nothing else."""
        return holds_vae(header, latent_channels=channels, alone=alone)

    def names(self, header: Header) -> Iterable[str]:
        """Return the names of the VAE's tensors in a single file."""
        return vae_names(header).values()

    def posterior(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation [B, C, H, W] of float32 pixels [B, 3, H, W], scaled for the denoiser."""
        shift, scale = vae.config.shift_factor or 0.0, vae.config.scaling_factor
        latents = vae.encode(pixels).latent_dist
        # An offset moves the mean of a distribution and not its deviation.
        return (latents.mean - shift) * scale, latents.std * scale

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        """Return float32 pixels [B, 3, H, W] of the pipeline's output with `output_type="latent"`."""
        scaled = latents.float() / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
        pixels: Tensor = vae.decode(scaled, return_dict=False)[0]
        return pixels


class MeanLatents(VaeLatents):
    """Latents that are the mean of the posterior and no draw.

    Z-Image: `latent_dist.mode()` in diffusers' train_dreambooth_lora_z_image.py and musubi-tuner's cache.
    """

    are_drawn = False


class PackedLatents(VaeLatents):
    """Latents that the pipeline holds as tokens, squares of latents as `pack` makes them."""

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        return super().decode(vae, self.unpacked(vae, latents, size_px), size_px)

    def unpacked(self, vae: Any, tokens: Tensor, size_px: tuple[int, int]) -> Tensor:
        """Return [B, C, H, W] of the pipeline's tokens of an image of (width, height)."""
        _, factor = self.shape(vae.config)
        width, height = (side // factor for side in size_px)
        return unpack(tokens, height=height, width=width)


class VideoLatents(VaeLatents):
    """Latents of Wan's video VAE and Qwen-Image's, standardised by channel; an image is a video of one frame.

    The denoiser in training has them without the frame, [B, C, H, W], the pipeline's output is [B, C, 1, H, W].
    """

    # As Wan's own code and the editing pipelines of Qwen-Image encode an image ("argmax"), diffusion-pipe,
    # musubi-tuner and sd-scripts a dataset (`mode()`). diffusers' training script and ai-toolkit draw.
    are_drawn = False

    def shape(self, config: Mapping[str, Any]) -> tuple[int, int]:
        # diffusers spells the key so. It has an entry for each halving of the image's
        # sides, True where the number of frames is halved too.
        return int(config["z_dim"]), 2 ** len(config["temperal_downsample"])

    def is_in(self, header: Header, *, channels: int, alone: bool) -> bool:
        names = part_names(header, *VAE_PREFIXES).items()
        tensors = {name: header[full] for name, full in names}
        return any(fits(tensors, marks) for marks in signature_tables()["video_vaes"])

    def names(self, header: Header) -> Iterable[str]:
        # All: in Wan's names (`conv1`, `conv2`) those of AutoencoderKL would be a part of them.
        return part_names(header, *VAE_PREFIXES).values()

    def posterior(self, vae: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
        latents = vae.encode(pixels.unsqueeze(2)).latent_dist
        shift, scale = statistics(vae, like=latents.mean)
        return ((latents.mean - shift) / scale).squeeze(2), (latents.std / scale).squeeze(2)

    def decode(self, vae: Any, latents: Tensor, size_px: tuple[int, int]) -> Tensor:
        frame = latents.float()
        shift, scale = statistics(vae, like=frame)
        pixels: Tensor = vae.decode(frame * scale + shift, return_dict=False)[0]
        return pixels[:, :, 0]


def statistics(vae: Any, *, like: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and deviation of the latents by channel, [1, C, 1, 1, 1]."""
    mean, std = like.new_tensor(vae.config.latents_mean), like.new_tensor(vae.config.latents_std)
    return mean.view(1, -1, 1, 1, 1), std.view(1, -1, 1, 1, 1)


@dataclass(frozen=True, kw_only=True)
class ImageEncoder:
    """A VAE whose posterior is scaled for the denoiser; only caching uses it."""

    vae: Any
    latents: VaeLatents

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        """Encode float32 [B, 3, H, W] in [-1, 1]; raises InputError when a latent is not finite."""
        import torch

        with torch.no_grad():
            # The whole posterior, no sample of it: the cache keeps both, and each step draws its own latents.
            scaled = self.latents.posterior(self.vae, pixels.to(self.vae.device))
        means, stds = (values.float().cpu() for values in scaled)
        if not (means.isfinite().all() and stds.isfinite().all()):
            raise InputError(
                "the VAE gave latents that are not finite numbers",
                fix="use the base model's original VAE, or another with --set base.vae=FILE",
            )
        return [Latents(mean=mean, std=std) for mean, std in zip(means, stds, strict=True)]


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

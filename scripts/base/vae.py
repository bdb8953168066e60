"""The autoencoder of the embedded base: 4x down, 4 channels, trained on clutter and scenes.

Loss: L1 + 2 L2 + 3e-4 KL (mean over latent elements). Then the decoder alone is polished for squared
error with the encoder frozen, which leaves all latents as they are.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from scenes import clutter, scene
from torch import Tensor, nn
from training import Stage, train

BATCH = 16
KL_WEIGHT = 3e-4
SHAPES_PX = ((64, 64), (64, 64), (72, 56), (56, 72))


def build_vae() -> AutoencoderKL:
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(32, 64, 64),
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=8,
        sample_size=64,
        mid_block_add_attention=False,
    )


def pixels(images: list[Image.Image]) -> Tensor:
    """RGB images of one size -> float [B, 3, H, W] in [-1, 1]."""
    stack = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(stack).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_vae(folder: Path, steps: int, seed: int) -> AutoencoderKL:
    """Train (or resume) and return the autoencoder with its EMA weights, in eval mode."""
    torch.manual_seed(seed)
    vae = build_vae()

    def loss(step: int) -> Tensor:
        target = _batch(seed, step)
        with torch.autocast("cpu", torch.bfloat16):
            posterior = vae.encode(target).latent_dist
            restored = vae.decode(posterior.sample()).sample.float()
        difference = restored - target
        mean, logvar = posterior.mean.float(), posterior.logvar.float()
        kl = 0.5 * (mean.square() + logvar.exp() - 1 - logvar).mean()
        return difference.abs().mean() + 2 * difference.square().mean() + KL_WEIGHT * kl

    stage = Stage(
        name="vae",
        modules=nn.ModuleDict({"vae": vae}),
        loss=loss,
        steps=steps,
        learning_rate=2e-3,
        seed=seed,
    )
    ema = train(stage, folder)
    vae.load_state_dict({name.removeprefix("vae."): value for name, value in ema.items()})
    return vae.eval().requires_grad_(False)


def polish_decoder(vae: AutoencoderKL, folder: Path, steps: int, seed: int) -> AutoencoderKL:
    """Train (or resume) the decoder alone on squared error and return the autoencoder with it."""
    vae.decoder.requires_grad_(True)
    vae.post_quant_conv.requires_grad_(True)

    def loss(step: int) -> Tensor:
        target = _batch(seed + 1, step)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                posterior = vae.encode(target).latent_dist
            restored = vae.decode(posterior.mean).sample.float()
        difference = restored - target
        return 8 * difference.square().mean() + 0.1 * difference.abs().mean()

    modules = nn.ModuleDict({"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv})
    stage = Stage(
        name="decoder", modules=modules, loss=loss, steps=steps, learning_rate=1e-3, seed=seed
    )
    vae.load_state_dict(train(stage, folder), strict=False)
    return vae.eval().requires_grad_(False)


def _batch(seed: int, step: int) -> Tensor:
    width_px, height_px = SHAPES_PX[step % len(SHAPES_PX)]
    draw = [clutter] * (BATCH * 3 // 4) + [scene] * (BATCH // 4)
    return pixels(
        [one(seed, step * BATCH + k, width_px, height_px).image for k, one in enumerate(draw)]
    )


@torch.no_grad()
def psnr_db(vae: AutoencoderKL, images: list[Image.Image]) -> float:
    """Peak signal to noise ratio, in dB over [0, 1] pixels, of images of one size decoded from posterior means."""
    target = pixels(images)
    restored = vae.decode(vae.encode(target).latent_dist.mode()).sample.clamp(-1, 1)
    return float(-10 * torch.log10((restored - target).div(2).square().mean()))

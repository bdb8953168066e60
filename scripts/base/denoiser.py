"""The denoiser and the text model of the embedded base, trained together on cached scene latents.

Epsilon prediction on Stable Diffusion 1.x' noise schedule, min-SNR gamma 5 (Hang et al. 2023), one
caption in ten dropped for classifier-free guidance (Ho & Salimans 2022), EMA weights shipped.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, DDIMScheduler, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from rich.progress import track
from safetensors.torch import load_file, save_file
from scenes import scene
from tokenizer import END, MAX_TOKENS, START
from torch import Tensor, nn
from training import Stage, train
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer
from vae import pixels

BATCH = 32
SHAPES_PX = ((64, 64), (64, 64), (64, 64), (72, 56), (56, 72))
SCENES_PER_SHAPE = 9_600
CAPTION_DROPOUT = 0.1
MIN_SNR_GAMMA = 5.0
SCENE_SEED_OFFSET = 1_000  # the autoencoder's scenes are other scenes


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    vocabulary = tokenizer.get_vocab()
    return CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(vocabulary),
            hidden_size=128,
            intermediate_size=256,
            projection_dim=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=MAX_TOKENS,
            bos_token_id=vocabulary[START],
            eos_token_id=vocabulary[END],
            pad_token_id=vocabulary[END],
        )
    )


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=16,
        down_block_types=("CrossAttnDownBlock2D",) * 2,
        up_block_types=("CrossAttnUpBlock2D",) * 2,
        block_out_channels=(64, 128),
        layers_per_block=1,
        cross_attention_dim=128,
        attention_head_dim=(2, 4),  # the number of heads, by diffusers' own naming slip
        norm_num_groups=16,
    )


def build_scheduler() -> DDIMScheduler:
    """Stable Diffusion 1.x' schedule: 1,000 timesteps, scaled linear betas, epsilon."""
    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LatentSet:
    """Scene latents by image shape, scaled to unit variance, and their token ids."""

    latents: dict[tuple[int, int], Tensor]
    tokens: dict[tuple[int, int], Tensor]
    scaling_factor: float


@torch.no_grad()
def cache_latents(vae: AutoencoderKL, tokenizer: CLIPTokenizer, file: Path, seed: int) -> LatentSet:
    """Draw, encode and tokenize all scenes once; later calls read `file`."""
    if not file.exists():
        tensors: dict[str, Tensor] = {}
        for shape in dict.fromkeys(SHAPES_PX):
            count = SCENES_PER_SHAPE * SHAPES_PX.count(shape)
            parts, ids = [], []
            for first in track(range(0, count, 64), description=f"latents {shape[0]}x{shape[1]}"):
                drawn = [
                    scene(seed + SCENE_SEED_OFFSET + shape[0], k, *shape)
                    for k in range(first, first + 64)
                ]
                with torch.autocast("cpu", torch.bfloat16):
                    posterior = vae.encode(pixels([one.image for one in drawn])).latent_dist
                parts.append(posterior.mean.half().contiguous())
                ids.append(tokenize(tokenizer, [one.caption for one in drawn]).short())
            tensors |= {
                f"latents/{shape[0]}x{shape[1]}": torch.cat(parts).contiguous(),
                f"tokens/{shape[0]}x{shape[1]}": torch.cat(ids),
            }
        save_file(tensors, file)
    tensors = load_file(file)
    shapes = {shape: f"{shape[0]}x{shape[1]}" for shape in dict.fromkeys(SHAPES_PX)}
    deviation = float(tensors["latents/64x64"][:4096].float().std())
    return LatentSet(
        latents={shape: tensors[f"latents/{name}"] for shape, name in shapes.items()},
        tokens={shape: tensors[f"tokens/{name}"] for shape, name in shapes.items()},
        scaling_factor=round(1 / deviation, 5),
    )


def tokenize(tokenizer: CLIPTokenizer, captions: list[str]) -> Tensor:
    """Return int64 token ids [B, 77], truncated and padded as Stable Diffusion does."""
    encoded = tokenizer(
        captions, padding="max_length", max_length=MAX_TOKENS, truncation=True, return_tensors="pt"
    )
    return encoded.input_ids


def train_denoiser(
    folder: Path, data: LatentSet, tokenizer: CLIPTokenizer, *, steps: int, seed: int
) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Train (or resume) and return the denoiser and the text model with their EMA weights."""
    torch.manual_seed(seed)
    unet, text_encoder = build_unet(), build_text_encoder(tokenizer)
    scheduler = build_scheduler()
    snr_table = compute_snr(scheduler, torch.arange(1000))
    empty = tokenize(tokenizer, [""])

    def loss(step: int) -> Tensor:
        shape = SHAPES_PX[step % len(SHAPES_PX)]
        rows = torch.randint(len(data.latents[shape]), (BATCH,))
        clean = data.latents[shape][rows].float() * data.scaling_factor
        dropped = torch.rand(BATCH, 1) < CAPTION_DROPOUT
        tokens = torch.where(dropped, empty, data.tokens[shape][rows].long())
        timesteps, noise = torch.randint(1000, (BATCH,)), torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        with torch.autocast("cpu", torch.bfloat16):
            context = text_encoder(tokens)[0]
            prediction = unet(noisy, timesteps, context).sample
        snr = snr_table[timesteps]
        weight = snr.clamp(max=MIN_SNR_GAMMA) / snr
        return (weight * (prediction.float() - noise).square().mean(dim=(1, 2, 3))).mean()

    stage = Stage(
        name="denoiser",
        modules=nn.ModuleDict({"unet": unet, "text_encoder": text_encoder}),
        loss=loss,
        steps=steps,
        learning_rate=1e-3,
        seed=seed,
    )
    ema = train(stage, folder)
    for name, module in stage.modules.items():
        own = {
            key.removeprefix(f"{name}."): value
            for key, value in ema.items()
            if key.startswith(f"{name}.")
        }
        module.load_state_dict(own, strict=False)
    return unet.eval(), text_encoder.eval()

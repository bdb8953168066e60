"""The denoiser and the text model of the embedded base, trained together on cached scene latents.

Epsilon prediction on Stable Diffusion 1.x' noise schedule, min-SNR gamma 5 (Hang et al. 2023), one
caption in ten dropped for classifier-free guidance (Ho & Salimans 2022), EMA weights shipped.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    stage = _stage("denoiser", unet, text_encoder, data, tokenizer, unfamiliar=0.0)
    return _trained(replace(stage, steps=steps, learning_rate=1e-3, seed=seed), folder)


def widen_captions(
    folder: Path,
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    data: LatentSet,
    tokenizer: CLIPTokenizer,
    *,
    steps: int,
    seed: int,
) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    """Go on with captions that hold words the base does not know, as a user's captions will.

    Scene captions are short and of few words; without this, anything before "on a red background"
    that the base has not read makes it forget the background.
    """
    stage = _stage("captions", unet.train(), text_encoder.train(), data, tokenizer, unfamiliar=0.6)
    return _trained(replace(stage, steps=steps, learning_rate=4e-4, seed=seed + 1), folder)


def _trained(stage: Stage, folder: Path) -> tuple[UNet2DConditionModel, CLIPTextModel]:
    ema = train(stage, folder)
    for name, module in stage.modules.items():
        start = f"{name}."
        own = {
            key.removeprefix(start): value for key, value in ema.items() if key.startswith(start)
        }
        module.load_state_dict(own, strict=False)
    return stage.modules["unet"].eval(), stage.modules["text_encoder"].eval()


def _stage(
    name: str,
    unet: UNet2DConditionModel,
    text_encoder: CLIPTextModel,
    data: LatentSet,
    tokenizer: CLIPTokenizer,
    *,
    unfamiliar: float,
) -> Stage:
    """Return the stage whose loss draws its own scenes, timesteps and noise; a share has unfamiliar words."""
    scheduler = build_scheduler()
    snr_table = compute_snr(scheduler, torch.arange(1000))
    empty = tokenize(tokenizer, [""])
    letters = _letter_tokens(tokenizer)

    def loss(step: int) -> Tensor:
        shape = SHAPES_PX[step % len(SHAPES_PX)]
        rows = torch.randint(len(data.latents[shape]), (BATCH,))
        clean = data.latents[shape][rows].float() * data.scaling_factor
        dropped = torch.rand(BATCH, 1) < CAPTION_DROPOUT
        captions = data.tokens[shape][rows].long()
        if unfamiliar:
            captions = with_unfamiliar_words(captions, letters, share=unfamiliar)
        tokens = torch.where(dropped, empty, captions)
        timesteps, noise = torch.randint(1000, (BATCH,)), torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        with torch.autocast("cpu", torch.bfloat16):
            context = text_encoder(tokens)[0]
            prediction = unet(noisy, timesteps, context).sample
        snr = snr_table[timesteps]
        weight = snr.clamp(max=MIN_SNR_GAMMA) / snr
        return (weight * (prediction.float() - noise).square().mean(dim=(1, 2, 3))).mean()

    modules = nn.ModuleDict({"unet": unet, "text_encoder": text_encoder})
    return Stage(name=name, modules=modules, loss=loss, steps=0, learning_rate=0.0, seed=0)


def with_unfamiliar_words(captions: Tensor, letters: Tensor, *, share: float) -> Tensor:
    """Put 1 to 28 random letter tokens into a share of the captions, int64 [B, 77].

    They go to the front, before the last four words ("on a red background"), or in place of all that
    comes before those.
    """
    result = captions.clone()
    for row, tokens in enumerate(captions.tolist()):
        if float(torch.rand(())) >= share:
            continue
        count, where = int(torch.randint(1, 29, ())), int(torch.randint(3, ()))
        words = letters[torch.randint(len(letters), (count,))].tolist()
        end = tokens.index(tokens[-1])  # padding is the end token
        head, tail = tokens[1 : end - 4], tokens[end - 4 : end]
        body = {0: [*words, *head, *tail], 1: [*head, *words, *tail], 2: [*words, *tail]}[where]
        line = [tokens[0], *body, *([tokens[-1]] * len(tokens))]
        result[row] = torch.tensor(line[: len(tokens)])
    return result


def _letter_tokens(tokenizer: CLIPTokenizer) -> Tensor:
    """Return the ids of single letters, inside a word and at its end, and of the comma."""
    vocabulary = tokenizer.get_vocab()
    alphabet = "abcdefghijklmnopqrstuvwxyz"
    names = [*alphabet, *(f"{letter}</w>" for letter in alphabet), *([",</w>"] * 6)]
    return torch.tensor([vocabulary[name] for name in names])

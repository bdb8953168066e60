"""Train the embedded editing base from the embedded base: `python scripts/base/train_edits.py`.

A U-Net that reads a reference as InstructPix2Pix does (Brooks et al. 2023, arXiv 2211.09800): four more channels of
`conv_in`, small random numbers at first, take the latents of the reference, unscaled as its pipeline gives them.
Autoencoder and text model stay the embedded base's. Pairs are drawn (`edits.learned_edit`) and read in both
directions; 5 % of their samples lose the instruction, 5 % the reference, 5 % both. Seeded; killed and started again, it
goes on from its last save. `evaluate_edits.py` beside it checks the result.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

import torch
from denoiser import MIN_SNR_GAMMA, SHAPES_PX, build_scheduler, tokenize
from diffusers import StableDiffusionPipeline, UNet2DConditionModel
from diffusers.training_utils import compute_snr
from edits import learned_edit
from rich.progress import track
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from training import Stage, train
from vae import pixels

ROOT = Path(__file__).resolve().parents[2]
PAIRS_PER_SHAPE = 1_216
PARTS = ("before", "after", "tokens", "back", "two_ways")
BATCH = 16
DROPOUT = 0.05
# The spread of the new weights at first, about that of the weights beside them. Zeros, as InstructPix2Pix has them,
# would grow by at most the rate in a step.
NEW_WEIGHTS_STD = 0.08
# An error counts by what it does to the image: at high noise a small error of the predicted noise is a large one of the
# colour, which is decided there. Bounded, so that not only the highest timesteps count.
LARGEST_WEIGHT = 20.0
SEED = 11


def widen(unet: UNet2DConditionModel) -> UNet2DConditionModel:
    """Return a U-Net with the same weights that reads four more channels, with small random weights."""
    # Without the names that begin with _: one of them is where the U-Net was read from.
    plain = {name: value for name, value in unet.config.items() if not name.startswith("_")}
    wide = UNet2DConditionModel.from_config(plain, in_channels=8)
    weights = unet.state_dict()
    name = "conv_in.weight"
    weights[name] = torch.cat(
        [weights[name], torch.randn_like(weights[name]) * NEW_WEIGHTS_STD], dim=1
    )
    wide.load_state_dict(weights)
    return wide


@torch.no_grad()
def cache_pairs(pipeline: StableDiffusionPipeline, file: Path) -> dict[str, Tensor]:
    """Draw, encode and tokenize all pairs once: unscaled latents by shape; later calls read `file`."""
    if not file.exists():
        tensors: dict[str, Tensor] = {}
        for shape in dict.fromkeys(SHAPES_PX):
            name, count = f"{shape[0]}x{shape[1]}", PAIRS_PER_SHAPE * SHAPES_PX.count(shape)
            parts: dict[str, list[Tensor]] = {"before": [], "after": [], "tokens": []}
            for first in track(range(0, count, 64), description=f"pairs {name}"):
                drawn = [learned_edit(SEED + shape[0], k, *shape) for k in range(first, first + 64)]
                for side in ("before", "after"):
                    stack = pixels([getattr(one, side) for one in drawn])
                    with torch.autocast("cpu", torch.bfloat16):
                        parts[side].append(pipeline.vae.encode(stack).latent_dist.mode().half())
                sentences = [one.instruction for one in drawn]
                parts["tokens"].append(tokenize(pipeline.tokenizer, sentences).short())
                sentences = [one.way_back or "" for one in drawn]
                parts["back"].append(tokenize(pipeline.tokenizer, sentences).short())
                has_way = [one.way_back is not None for one in drawn]
                parts["two_ways"].append(torch.tensor(has_way))
            tensors |= {
                f"{side}/{name}": torch.cat(each).contiguous() for side, each in parts.items()
            }
        save_file(tensors, file)
    return load_file(file)


def stage_of(
    pipeline: StableDiffusionPipeline, unet: UNet2DConditionModel, pairs: dict[str, Tensor]
) -> Stage:
    """Return the stage whose loss draws its own pairs, timesteps and noise."""
    scheduler = build_scheduler()
    snr_table = compute_snr(scheduler, torch.arange(1000))
    empty = tokenize(pipeline.tokenizer, [""])
    scale = pipeline.vae.config.scaling_factor

    def loss(step: int) -> Tensor:
        width, height = SHAPES_PX[step % len(SHAPES_PX)]
        before, after, tokens, back, two_ways = (
            pairs[f"{part}/{width}x{height}"] for part in PARTS
        )
        rows = torch.randint(len(after), (BATCH,))
        # A pair that can be said the other way round is two.
        turned = two_ways[rows] & (torch.rand(BATCH) < 0.5)
        sides = torch.stack([before[rows], after[rows]])
        sides = torch.where(turned[:, None, None, None], sides.flip(0), sides).float()
        reference, clean = sides[0], sides[1] * scale
        instructions = torch.where(turned[:, None], back[rows], tokens[rows]).long()
        chance = torch.rand(BATCH)
        no_text = (chance < 2 * DROPOUT)[:, None]
        no_reference = ((chance > DROPOUT) & (chance < 3 * DROPOUT))[:, None, None, None]
        reference = torch.where(no_reference, torch.zeros(()), reference)
        words = torch.where(no_text, empty, instructions)
        # More often high noise, where an edit is decided; below it an image that the base knows is finished.
        timesteps, noise = (torch.rand(BATCH).sqrt() * 1000).long(), torch.randn_like(clean)
        noisy = scheduler.add_noise(clean, noise, timesteps)
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                context = pipeline.text_encoder(words)[0]
            prediction = unet(torch.cat([noisy, reference], 1), timesteps, context).sample
        snr = snr_table[timesteps]
        weight = snr.clamp(max=MIN_SNR_GAMMA) / snr * (1 + (1 / snr).clamp(max=LARGEST_WEIGHT)) / 4
        return (weight * (prediction.float() - noise).square().mean(dim=(1, 2, 3))).mean()

    return Stage(
        name="edits", modules=nn.ModuleDict({"unet": unet}), loss=loss, steps=0,
        learning_rate=1e-3, seed=SEED, ema_decay=0.995, warmup_steps=30, save_every_steps=100,
    )  # fmt: skip


def main() -> None:
    """Read the command line, train, write the denoiser."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, default=ROOT / "lora_trainer" / "embedded")
    parser.add_argument("--work", type=Path, default=ROOT / "build" / "edits")
    parser.add_argument("--output", type=Path, default=ROOT / "build" / "edits" / "unet")
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    pipeline = StableDiffusionPipeline.from_pretrained(options.base, dtype=torch.float32)
    pairs = cache_pairs(pipeline, options.work / "pairs.safetensors")
    torch.manual_seed(SEED)
    unet = widen(pipeline.unet).train()
    ema = train(replace(stage_of(pipeline, unet, pairs), steps=options.steps), options.work)
    unet.load_state_dict({name.removeprefix("unet."): value for name, value in ema.items()})
    unet.half().save_pretrained(options.output, safe_serialization=True)


if __name__ == "__main__":
    main()

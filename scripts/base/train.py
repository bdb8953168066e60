"""Train the embedded miniature base model from nothing: `python scripts/base/train.py`.

Stages: tokenizer, autoencoder, cached latents, denoiser with text model, export in diffusers layout,
fp16. Seeded; killed and started again, it goes on from its last save (every 250 steps) in
build/base. About 25 minutes for the autoencoder and 90 for the denoiser on two CPU cores with
bfloat16 units. `evaluate.py` beside it checks the result.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from denoiser import build_scheduler, cache_latents, train_denoiser, widen_captions
from diffusers import StableDiffusionPipeline
from tokenizer import build_tokenizer
from vae import polish_decoder, train_vae

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--work", type=Path, default=ROOT / "build" / "base", help="where the resumable state lives"
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=ROOT / "lora_trainer" / "embedded",
        help="where the model goes",
    )
    parser.add_argument("--vae-steps", type=int, default=7_000)
    parser.add_argument("--steps", type=int, default=3_800, help="denoiser steps")
    parser.add_argument(
        "--polish-steps", type=int, default=1_500, help="steps of the decoder alone"
    )
    parser.add_argument(
        "--caption-steps", type=int, default=700, help="steps with unfamiliar words in captions"
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.work.mkdir(parents=True, exist_ok=True)
    tokenizer = build_tokenizer(options.work / "tokenizer", seed=options.seed)
    vae = train_vae(options.work, options.vae_steps, options.seed)
    data = cache_latents(vae, tokenizer, options.work / "latents.safetensors", options.seed)
    vae.register_to_config(scaling_factor=data.scaling_factor)
    unet, text_encoder = train_denoiser(
        options.work, data, tokenizer, steps=options.steps, seed=options.seed
    )
    unet, text_encoder = widen_captions(
        options.work,
        unet,
        text_encoder,
        data,
        tokenizer,
        steps=options.caption_steps,
        seed=options.seed,
    )
    vae = polish_decoder(vae, options.work, options.polish_steps, options.seed)
    pipeline = StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=build_scheduler(),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.to(torch.float16).save_pretrained(options.output, safe_serialization=True)
    # transformers loads in the dtype its config names, diffusers in float32: make both agree for
    # whoever loads the folder without saying a dtype.
    config = options.output / "text_encoder" / "config.json"
    config.write_text(config.read_text().replace('"dtype": "float16"', '"dtype": "float32"'))


if __name__ == "__main__":
    main()

"""What `scaling` trains: a random denoiser of middling size, its LoRA, and a cache to feed it.

Output: a Stable Diffusion 1.x denoiser that takes about half a second a step on a processor core or
two, and a feeder over a real cache in a folder.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import DDPMScheduler, UNet2DConditionModel
from torch import nn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer import families  # noqa: E402
from lora_trainer.config import Config  # noqa: E402
from lora_trainer.data.buckets import buckets_for, place  # noqa: E402
from lora_trainer.data.cache import Cache  # noqa: E402
from lora_trainer.data.cache_keys import latent_key, text_key  # noqa: E402
from lora_trainer.data.loader import Feeder  # noqa: E402
from lora_trainer.data.sources import Entries, Source  # noqa: E402
from lora_trainer.events import EventStream  # noqa: E402
from lora_trainer.families.base import DENOISER  # noqa: E402
from lora_trainer.files import CappedFolder  # noqa: E402
from lora_trainer.model.adapters import Adapter, inject  # noqa: E402
from lora_trainer.train.levels import table_levels  # noqa: E402

CPU = torch.device("cpu")
CHANNELS = (64, 128, 256)
LATENT_SIDE, TEXT_TOKENS, TEXT_WIDTH = 32, 77, 256
IMAGES = 16
SEED = 3
FAMILY = families.family(families.DEFAULT_FAMILY)


def build_denoiser() -> nn.Module:
    """Return a frozen random denoiser."""
    torch.manual_seed(SEED)
    unet = UNet2DConditionModel(
        sample_size=LATENT_SIDE,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=CHANNELS,
        layers_per_block=2,
        cross_attention_dim=TEXT_WIDTH,
        attention_head_dim=8,
    )
    denoiser: nn.Module = unet.requires_grad_(False)
    return denoiser


def build_adapter(denoiser: nn.Module, config: Config) -> Adapter:
    """Inject the LoRA once, for both sides; a random second half, so that all gradients count."""
    modules = FAMILY.lora_targets(denoiser, config.adapter.targets)
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: modules},
        settings=config.adapter,
        alpha=float(config.adapter.rank),
        seed=SEED,
    )
    with torch.no_grad():
        for name, tensor in adapter.state().items():
            if name.endswith(".up"):
                tensor.normal_(std=0.01)
    return adapter


def build_feeder(folder: Path, config: Config, events: EventStream, *, batch: int) -> Feeder:
    """Write a cache of random entries, all of one bucket, and return a feeder over it."""
    root = CappedFolder(root=folder / "cache", limit_bytes=1 << 30)
    root.create()
    cache = Cache(folder=root, on_problem=events.problem)
    side_px = LATENT_SIDE * 8
    buckets = buckets_for(resolution_px=side_px, step_px=64, max_aspect=1.0)
    rng = np.random.default_rng(SEED)

    def normal(*shape: int) -> np.ndarray[Any, np.dtype[np.float32]]:
        return rng.standard_normal(shape, dtype=np.float32)

    empty = text_key(text="", encoder_identity="none", max_tokens=TEXT_TOKENS, content="fp32")
    cache.write(empty, {"text": normal(1, TEXT_TOKENS, TEXT_WIDTH)})
    sources = {}
    for index in range(IMAGES):
        plain = latent_key(
            content_hash=str(index),
            encoder_identity="none",
            placement=place(side_px, side_px, buckets=buckets),
            flip=False,
            alpha_background=None,
        )
        shape = (4, LATENT_SIDE, LATENT_SIDE)
        cache.write(plain, {"mean": normal(*shape), "std": np.full(shape, 0.1, np.float32)})
        text = text_key(
            text=str(index), encoder_identity="none", max_tokens=TEXT_TOKENS, content="fp32"
        )
        cache.write(text, {"text": normal(1, TEXT_TOKENS, TEXT_WIDTH)})
        sources[str(index)] = Source(
            plain=plain,
            mirrored=None,
            texts=(text,),
            size_px=(side_px, side_px),
            geometry={},
            mirrored_geometry={},
        )
    schedule = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
    return Feeder(
        sources=sources,
        empty_text=empty,
        entries=Entries(cache=cache),
        levels=table_levels(schedule.alphas_cumprod.double().tolist(), config.objective),
        prediction="epsilon",
        told={},
        data=config.data,
        objective=config.objective,
        batch_size=batch,
        seed=SEED,
    )

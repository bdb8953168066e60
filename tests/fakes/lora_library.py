"""Run folders with small adapter files, for the pages that list them; no torch, no training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from safetensors.numpy import save_file

from tests.fakes.live_runs import write_status
from tests.fakes.run_folder import fake_run

MODULE = "lora_unet_down_blocks_0_attentions_0_transformer_blocks_0_attn1_to_q"


def lora(path: Path, *, rank: int = 8, width: int = 320, **metadata: str) -> Path:
    """Write a LoRA of one module; `metadata` are entries, `modelspec__title` for `modelspec.title`."""
    random = np.random.default_rng(rank)
    tensors: dict[str, Any] = {
        f"{MODULE}.alpha": np.array(rank / 2, dtype=np.float32),
        f"{MODULE}.lora_down.weight": random.normal(size=(rank, width)).astype(np.float16),
        f"{MODULE}.lora_up.weight": random.normal(size=(width, rank)).astype(np.float16),
    }
    entries = {key.replace("__", "."): value for key, value in metadata.items()}
    save_file(tensors, path, metadata=entries)
    return path


def finished_run(folder: Path, *, saves: tuple[int, ...] = (10, 20), **metadata: Any) -> Path:
    """Write a run of 30 steps named zorble, with its result and some of its saves."""
    fake_run(folder, steps=30, sample_px=16).write()
    write_status(folder, state="finished", step=30, steps=30, exit_code=0)
    lora(folder / "zorble.safetensors", **metadata)
    for step in saves:
        lora(folder / f"zorble-step{step:08d}.safetensors", **metadata)
    return folder


def picture(path: Path, *, colour: str = "red", px: int = 16) -> Path:
    """Write an image of one colour, and its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", (px, px), colour).save(path)
    return path

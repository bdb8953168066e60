"""A tiny random Stable Diffusion 1.x base: epsilon prediction, 16 px native, VAE 2x down."""

from __future__ import annotations

from pathlib import Path

from tests.fakes.tiny_base import write_tiny_base


def write_base(folder: Path, *, seed: int = 0) -> Path:
    """Write the base into `folder` and return it."""
    return write_tiny_base(folder, seed=seed)

"""A sample image as a run writes it, prompt and all."""

from __future__ import annotations

from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo


def sample(path: Path, prompt: str = "a hat", *, size: tuple[int, int] = (8, 8)) -> Path:
    """Write a red image that carries `prompt` and return its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    info = PngInfo()
    info.add_text("parameters", f"{prompt}\nNegative prompt: \nSteps: 4, CFG scale: 5, Seed: 1")
    Image.new("RGB", size, "red").save(path, pnginfo=info)
    return path

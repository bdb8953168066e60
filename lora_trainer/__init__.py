"""lora-train: a diffusion LoRA trainer that fits the GPU it finds and never loses work."""

from pathlib import Path

__version__ = "0.2.0"

# In a source checkout gui/ and presets/ lie beside this package; in a wheel they are inside it.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file() and (_root / "presets").is_dir():
    __path__.append(str(_root))

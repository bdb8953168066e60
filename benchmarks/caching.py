"""How much of a caching pass is spent in the encoders: the rest should be hidden behind them.

Usage: python benchmarks/caching.py [--images 16] [--threads 1] [--json FILE]

Images of 1024 to 2048 px, JPEG and PNG in turn, are decoded, scaled and encoded at 512 px by a random VAE
of the structure of Stable Diffusion's with a quarter of its channels, and their captions by a random CLIP
of its true size, on the processor. Prints for both the share of time inside the encoder, without that of
building it; asked are 97 %. With more threads than the machine has cores to spare nothing can be hidden.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.cache.encode import fill  # noqa: E402 - after sys.path
from lora_trainer.common.events import EventStream  # noqa: E402 - after sys.path
from lora_trainer.common.processes import made_to_stay  # noqa: E402 - after sys.path
from lora_trainer.families.base.facts import Conditioning  # noqa: E402 - after sys.path
from lora_trainer.families.base.latents import ImageEncoder, Latents  # noqa: E402 - after sys.path
from lora_trainer.families.base.texts import TextEncoder  # noqa: E402 - after sys.path
from lora_trainer.run.build import open_cache, plan_cache, texts_as  # noqa: E402 - after sys.path
from lora_trainer.run.prepare import Prepared, Request, prepare  # noqa: E402 - after sys.path

ASKED_SHARE = 0.97
SIZES_PX = ((1024, 1024), (1536, 1024), (1024, 1536), (2048, 1536), (1600, 2048))
CHANNELS = (32, 64, 128, 128)
TOKENS = 77
SETTINGS: Mapping[str, Any] = {
    "base.model": "embedded",
    "data.validation_fraction": 0,
    "hardware.device": "cpu",
}


@dataclass(kw_only=True)
class Clock:
    """How long an encoder took to be made, and how long it worked."""

    build_s: float = 0.0
    inside_s: float = 0.0
    calls: int = 0

    def timed(self, work: Callable[[], Tensor]) -> Tensor:
        """Return what `work` makes, without gradients."""
        began = time.perf_counter()
        with torch.no_grad():
            made = work()
        self.inside_s += time.perf_counter() - began
        self.calls += 1
        return made


@dataclass(frozen=True, kw_only=True)
class Pictures(ImageEncoder):
    """A VAE: [1, 3, H, W] to the mean and deviation of latents."""

    clock: Clock

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        moments = self.clock.timed(lambda: self.vae.encode(pixels).latent_dist.parameters)
        mean, log_variance = moments.chunk(2, dim=1)
        return [Latents(mean=mean[0], std=(0.5 * log_variance[0]).exp())]


@dataclass(kw_only=True, eq=False)
class Texts(TextEncoder):
    """A CLIP text encoder; its tokens are bytes."""

    clock: Clock

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        (prompt,) = prompts
        return {"text": torch.tensor([list(prompt.encode()[:TOKENS].ljust(TOKENS, b"\0"))])}

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        network = self.networks["text_encoder"]
        return {"text": self.clock.timed(lambda: network(tokens["text"])[0])}

    def count_tokens(self, prompt: str) -> int:
        return len(prompt)

    def prompt_room(self) -> int:
        return 10 * TOKENS


def random_pictures(prepared: Prepared, clock: Clock) -> Pictures:
    """Return a random VAE of the structure of Stable Diffusion's."""
    began = time.perf_counter()
    torch.manual_seed(1)
    vae = AutoencoderKL(
        block_out_channels=CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        layers_per_block=2,
        latent_channels=4,
    )
    clock.build_s = time.perf_counter() - began
    return Pictures(vae=vae, latents=prepared.family.latents, clock=clock)


def random_texts(prepared: Prepared, clock: Clock) -> Texts:
    """Return a random CLIP of true size."""
    began = time.perf_counter()
    torch.manual_seed(2)
    network = CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072))
    clock.build_s = time.perf_counter() - began
    return Texts(
        networks={"text_encoder": network}, tokenizers={}, facts=prepared.facts, clock=clock
    )


def main() -> None:
    asked = _arguments()
    with made_to_stay():  # as the command does with what it imported
        pass
    torch.set_num_threads(asked.threads)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _make_dataset(folder / "dataset", count=asked.images)
        overrides = {
            **SETTINGS,
            "data.resolution": asked.resolution,
            "data.cache_dir": str(folder / "cache"),
            "hardware.threads": asked.threads,
        }
        prepared = prepare(Request(dataset=folder / "dataset", overrides=overrides))
        found = {
            "pictures": _measured(prepared, texts=False),
            "captions": _measured(prepared, texts=True),
        }
    for kind, row in found.items():
        print(
            f"{kind}: {row['calls']} encoded in {row['total_s']:.2f} s, "
            f"{row['inside_s']:.2f} s of it in the encoder: {row['share']:.1%}"
        )
    if asked.json:
        about = {"images": asked.images, "threads": asked.threads, "asked_share": ASKED_SHARE}
        asked.json.write_text(json.dumps(about | found, indent=1) + "\n")


def _make_dataset(folder: Path, *, count: int) -> None:
    folder.mkdir()
    for index in range(count):
        draw = np.random.default_rng(index)
        small = Image.fromarray(draw.integers(0, 256, (96, 96, 3), dtype=np.uint8))
        picture = small.resize(SIZES_PX[index % len(SIZES_PX)], Image.Resampling.BICUBIC)
        if index % 2:
            picture.save(folder / f"{index:03d}.png", compress_level=3)
        else:
            picture.save(folder / f"{index:03d}.jpg", quality=92)
        (folder / f"{index:03d}.txt").write_text(f"image number {index}\n")


def _measured(prepared: Prepared, *, texts: bool) -> dict[str, float]:
    clock, events = Clock(), EventStream()
    more = [f"prompt number {index}" for index in range(2 * len(prepared.trained))]
    wanted = plan_cache(prepared, prompts=more)
    wanted = replace(wanted, images={}) if texts else replace(wanted, texts={})
    began = time.perf_counter()
    fill(
        wanted,
        open_cache(prepared, events),
        settings=prepared.config.data,
        load_image_encoder=lambda _: random_pictures(prepared, clock),
        load_text_encoder=lambda _: random_texts(prepared, clock),
        devices=(torch.device("cpu"),),
        texts_as=texts_as(prepared),
        events=events,
    )
    total_s = time.perf_counter() - began - clock.build_s
    return {
        "calls": clock.calls,
        "inside_s": clock.inside_s,
        "total_s": total_s,
        "build_s": clock.build_s,
        "share": clock.inside_s / total_s,
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--resolution", type=int, default=512, help="pixels a side")
    parser.add_argument("--threads", type=int, default=1, help="threads of the encoders")
    parser.add_argument("--json", type=Path, help="where the measurements are written")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""What masks and priors do on the embedded base: a few short trainings of each, on one thread.

Masks: the example's images with a stamp on each that is masked out. Printed is what was learned of
the rest and of the stamp, and how much of its place in new images has its colour; the same of a training
on images that have no stamp. Priors: what was learned of the images, and how far a caption without the
trigger has drifted from the base. Learned is 1 - loss / base loss; drift is the mean squared change of
the prediction over the mean square of the base's, both with the same noise at eight noise levels.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer import families  # noqa: E402 - after sys.path
from lora_trainer.config.inputs import BaseSettings  # noqa: E402 - after sys.path
from lora_trainer.families.base.sampling import plain_pipeline  # noqa: E402 - after sys.path
from lora_trainer.families.files.locate import locate  # noqa: E402 - after sys.path
from lora_trainer.training.loss import add_noise, target  # noqa: E402 - after sys.path

EXAMPLE = ROOT / "datasets" / "example"
TRIGGER, CLASS = "zibbo", "creature"
STAMP = 0.4
"""Side of the stamp over that of the image."""
LEVELS = 8
STAMP_RGB = (255, 0, 255)
NO_STAMP = "no stamp"
MASKS: Mapping[str, Mapping[str, Any]] = {
    NO_STAMP: {},
    "no mask": {"data.masks": "none"},
    "mask, background 0.1": {"data.masks": "files"},
    "mask, background 0": {"data.masks": "files", "data.mask_background": 0.0},
}
PRIORS: Mapping[str, Mapping[str, Any]] = {
    "none": {},
    "images": {"objective.prior": "images"},
    "base": {"objective.prior": "base"},
    "class word": {"objective.preservation_weight": 1.0, "data.class_word": CLASS},
    "class word and base": {
        "objective.prior": "base",
        "objective.preservation_weight": 1.0,
        "data.class_word": CLASS,
    },
}
ALL_RUNS: Mapping[str, Any] = {
    "data.trigger": TRIGGER,
    "data.validation_fraction": 0.0,
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "logging.trackers": [],
    "optimizer.learning_rate": 2e-3,
    "output.save_every_steps": 0,
    "sampling.every_steps": 0,
    "train.batch_size": 2,
}


@dataclass(frozen=True, kw_only=True)
class Judge:
    """The base with an adapter that can be switched off, and images with their captions."""

    family: Any
    facts: Any
    pipeline: Any

    def latents(self, picture: Path) -> Tensor:
        """Return [1, C, H, W] of an image cut square."""
        side = self.facts.resolution_px
        image = Image.open(picture).convert("RGB").resize((side, side))
        pixels = torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)[None]
        encoder = self.family.latents.encoder(self.facts, device=torch.device("cpu"))
        latents: Tensor = encoder.encode_images(pixels / 127.5 - 1)[0].mean[None]
        return latents

    def predictions(self, latents: Tensor, text: str, *, seed: int) -> Iterator[tuple[Tensor, ...]]:
        """Yield what is wanted, what the base says and what the adapter says, at each level."""
        encoder = self.family.load_text_encoder(
            self.facts, dtype=torch.float32, device=torch.device("cpu")
        )
        told = encoder.encode_prompts([text])
        signal = self.facts.release.alphas_cumprod().float()
        for level in range(LEVELS):
            timestep = torch.tensor([(2 * level + 1) * len(signal) // (2 * LEVELS)])
            alpha, sigma = signal[timestep].sqrt(), (1 - signal[timestep]).sqrt()
            generator = torch.Generator().manual_seed(seed * LEVELS + level)
            noise = torch.randn(latents.shape, generator=generator)
            noisy = add_noise(latents, noise, alpha, sigma)
            said = []
            for switch in (self.pipeline.disable_lora, self.pipeline.enable_lora):
                switch()
                said.append(self.family.predict(self.pipeline.unet, noisy, timestep, told))
            yield target(latents, noise, alpha, sigma, self.facts.release.prediction), *said


def judge(run: Path) -> Judge:
    """Return the base with the adapter of a run."""
    facts = locate(BaseSettings(model="embedded"))
    family = families.family(facts.family)
    pipeline: Any = plain_pipeline(family, facts, dtype=torch.float32, device=torch.device("cpu"))
    pipeline.load_lora_weights(str(run), weight_name=f"{run.name}.safetensors")
    return Judge(family=family, facts=facts, pipeline=pipeline)


@torch.no_grad()
def learned(run: Path, dataset: Path, *, stamped: bool) -> tuple[float, float]:
    """Return in percent what was learned of the images but for the stamp, and of the stamp."""
    tried, sums = judge(run), np.zeros((2, 2))
    for seed, picture in enumerate(_pictures(dataset)[:8]):
        latents = tried.latents(picture)
        stamp = torch.zeros(latents.shape[-2:], dtype=torch.bool)
        if stamped:
            edge = round(latents.shape[-1] * (1 - STAMP))
            stamp[edge:, edge:] = True
        text = picture.with_suffix(".txt").read_text()
        for wanted, base, said in tried.predictions(latents, text, seed=seed):
            for column, network in enumerate((base, said)):
                errors = (network - wanted).square()[0].mean(0)
                sums[0, column] += float(errors[~stamp].mean())
                sums[1, column] += float(errors[stamp].mean()) if stamped else 1.0
    rest, stamp_gain = 100 * (1 - sums[:, 1] / sums[:, 0])
    return float(rest), float(stamp_gain)


def drawn(run: Path, *, count: int = 6) -> float:
    """Return in percent how much of the stamp's place in images drawn with the adapter has its colour."""
    pipeline, shares = judge(run).pipeline, []
    pipeline.set_progress_bar_config(disable=True)
    for seed, picture in enumerate(_pictures(EXAMPLE)[:count]):
        generator = torch.Generator().manual_seed(seed)
        text = picture.with_suffix(".txt").read_text()
        image = pipeline(text, generator=generator, num_inference_steps=20).images[0]
        pixels = np.asarray(image.convert("RGB"), dtype=np.float32)
        edge = round(pixels.shape[0] * (1 - STAMP))
        distance = np.abs(pixels[edge:, edge:] - np.array(STAMP_RGB)).max(axis=-1)
        shares.append(float((distance < 80).mean()))
    return 100 * float(np.mean(shares))


@torch.no_grad()
def drift(run: Path, pictures: Path) -> float:
    """Return in percent how far captions of the class have drifted from the base."""
    tried, change, size = judge(run), 0.0, 0.0
    for seed, picture in enumerate(_pictures(pictures)):
        text = picture.with_suffix(".txt").read_text()
        for _, base, said in tried.predictions(tried.latents(picture), text, seed=100 + seed):
            change += float((said - base).square().mean())
            size += float(base.square().mean())
    return 100 * change / size


def draw_class(folder: Path, *, count: int, first: int) -> None:
    """Let the base draw images of the class: the example's captions without the trigger."""
    if folder.exists():
        return
    facts = locate(BaseSettings(model="embedded"))
    family = families.family(facts.family)
    pipeline: Any = plain_pipeline(family, facts, dtype=torch.float32, device=torch.device("cpu"))
    pipeline.set_progress_bar_config(disable=True)
    folder.mkdir(parents=True)
    captions = [path.read_text() for path in sorted(EXAMPLE.glob("zibbo_*.txt"))]
    for index in range(count):
        text = captions[(first + index) % len(captions)].replace(f"{TRIGGER}, ", "")
        generator = torch.Generator().manual_seed(first + index)
        image = pipeline(text, generator=generator, num_inference_steps=20).images[0]
        image.save(folder / f"class_{index}.png")
        (folder / f"class_{index}.txt").write_text(text)


def stamp_pictures(folder: Path) -> None:
    """Write the example's images with a stamp on each, and masks without it."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    for picture in _pictures(EXAMPLE):
        image = Image.open(picture).convert("RGB")
        width, height = image.size
        corner = (round(width * (1 - STAMP)), round(height * (1 - STAMP)))
        image.paste(STAMP_RGB, (*corner, width, height))
        image.save(folder / f"{picture.stem}.png")
        mask = Image.new("L", image.size, 255)
        mask.paste(0, (*corner, width, height))
        mask.save(folder / f"{picture.stem}-masklabel.png")
        (folder / f"{picture.stem}.txt").write_text(picture.with_suffix(".txt").read_text())


def train(run: Path, dataset: Path, settings: Mapping[str, Any], *, steps: int) -> None:
    """Train unless it was done."""
    if (run / f"{run.name}.safetensors").exists():
        return
    line = [sys.executable, "-m", "lora_trainer", str(dataset), "--base", "embedded"]
    line += ["--output", str(run.parent), "--name", run.name, "--steps", str(steps)]
    for key, value in {**ALL_RUNS, **settings}.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    subprocess.run(line, env=environment, check=True, stdout=subprocess.DEVNULL)


def _pictures(folder: Path) -> list[Path]:
    found = (path for path in folder.iterdir() if path.suffix in (".png", ".jpg", ".webp"))
    return sorted(path for path in found if not path.stem.endswith("-masklabel"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where everything is made")
    parser.add_argument("--steps", type=int, default=150, help="of 2 images of the dataset each")
    parser.add_argument("--seeds", type=int, default=1)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    stamped, prior, unseen = (asked.folder / name for name in ("stamped", "prior", "unseen"))
    stamp_pictures(stamped)
    draw_class(prior, count=8, first=0)
    draw_class(unseen, count=6, first=8)
    for seed in range(asked.seeds):
        for name, settings in MASKS.items():
            run = asked.folder / "runs" / f"{name} {seed}"
            dataset = EXAMPLE if name == NO_STAMP else stamped
            train(run, dataset, {**settings, "train.seed": seed}, steps=asked.steps)
            rest, stamp = learned(run, stamped, stamped=True)
            columns = (name, seed, f"{rest:.1f}", f"{stamp:.1f}", f"{drawn(run):.1f}")
            print(f"| {' | '.join(map(str, columns))} |", flush=True)
        for name, settings in PRIORS.items():
            run = asked.folder / "runs" / f"prior {name} {seed}"
            more: dict[str, Any] = {"train.seed": seed}
            with_images = "objective.prior" in settings
            if with_images:  # as many images of the dataset as without
                more |= {"data.regularisation_dir": str(prior), "train.batch_size": 4}
            train(run, EXAMPLE, {**settings, **more}, steps=asked.steps)
            gain, _ = learned(run, EXAMPLE, stamped=False)
            print(f"| {name} | {seed} | {gain:.1f} | {drift(run, unseen):.2f} |", flush=True)


if __name__ == "__main__":
    main()

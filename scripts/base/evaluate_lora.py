"""Check a finished run on the example dataset: is it our character that the LoRA draws?

Usage: python scripts/base/evaluate_lora.py runs/example [--seeds 32] [--plain-check] [--json FILE]

For fixed seeds, with the LoRA and with the bare base: a training caption is sampled at the size it was
trained in, and its nearest neighbour, by the distance of VAE latents (posterior means), is looked for
among all training images and 100 drawings of other characters cut and drawn at that size.
Beside it the run's validation loss, and on request whether diffusers' plain pipeline
with the exported file gives the trainer's own last samples.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from characters import draw, other_character, random_pose
from colour_measure import look
from diffusers import StableDiffusionPipeline
from evaluate import (
    RESOLUTION_PX,
    ROOT,
    load_pipeline,
    share,
    write_json,
    write_sheet,
)
from PIL import Image
from scenes import COLOURS
from torch import Tensor
from vae import pixels

sys.path.insert(0, str(ROOT))

from lora_trainer.common.events import read_jsonl  # noqa: E402 - after sys.path
from lora_trainer.common.memo import HashMemo  # noqa: E402 - after sys.path
from lora_trainer.config.config import build_config  # noqa: E402 - after sys.path
from lora_trainer.dataset.buckets import (  # noqa: E402 - after sys.path
    Bucket,
    buckets_for,
    cut,
    place,
)
from lora_trainer.dataset.images import decode  # noqa: E402 - after sys.path
from lora_trainer.dataset.scan import scan  # noqa: E402 - after sys.path
from lora_trainer.families.files.locate import identified, locate  # noqa: E402 - after sys.path
from lora_trainer.lora_file.write import final_export_name  # noqa: E402 - after sys.path
from lora_trainer.reporting.run_record import RunRecord  # noqa: E402 - after sys.path
from lora_trainer.run.run_folder import EVENTS_FILE, read_run  # noqa: E402 - after sys.path

OTHERS = 100
FIRST_SEED = 40_000


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """The nearest drawing to a sample: its name, and whether it is one of the training images."""

    seed: int
    background: str
    name: str
    ours: bool


@dataclass(frozen=True, kw_only=True)
class Run:
    """A finished run: its folder, what run.json says, its events and where its base is."""

    folder: Path
    record: RunRecord
    events: list[dict[str, Any]]
    base: Path

    @property
    def adapter(self) -> str:
        return final_export_name(self.record.name)

    def setting(self, key: str) -> Any:
        return self.record.settings[key]

    def pipeline(self, *, adapted: bool) -> StableDiffusionPipeline:
        """Load the plain pipeline, with the exported file if `adapted`."""
        pipeline = load_pipeline(self.base)
        if adapted:
            pipeline.load_lora_weights(str(self.folder), weight_name=self.adapter)
        return pipeline


def open_run(folder: Path, *, base: Path | None) -> Run:
    """Read a run folder; its own base unless another is named. Exits when the base is not the same."""
    record = read_run(folder)
    facts = locate(build_config(record.settings).base)
    if base is None:
        parts = identified(facts, HashMemo()).parts
        trained_on = record.base.identities
        changed = [name for name, part in parts.items() if part.identity != trained_on[name]]
        if changed:
            sys.exit(
                f"{facts.source} has another {', '.join(changed)} than {folder} was trained on"
            )
    events = read_jsonl(folder / EVENTS_FILE)
    return Run(folder=folder, record=record, events=events, base=base or facts.located.folder)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A training image as decoded, its caption, and the bucket it was trained in."""

    image: Image.Image
    caption: str
    bucket: Bucket


def training_images(run: Run, dataset: Path) -> dict[str, Trained]:
    """Return the images the run was trained on by name, none of those held out."""
    settings = build_config(run.record.settings).data
    held_out = set(run.record.dataset.held_out)
    buckets = buckets_for(resolution_px=RESOLUTION_PX, step_px=8, max_aspect=settings.max_aspect)
    found = {}
    for record in scan(dataset, settings=settings).records:
        if record.name not in held_out:
            image = decode(record.path, settings=settings).image
            bucket = place(*image.size, buckets=buckets).bucket
            found[record.name] = Trained(image=image, caption=record.caption, bucket=bucket)
    return found


def drawings_at(bucket: Bucket, trained: Mapping[str, Trained]) -> dict[str, Image.Image]:
    """Return all training images and 100 other characters, in random poses on random backgrounds, at one size."""
    rng = random.Random("evaluate/others")
    found = {
        name: cut(one.image, place(*one.image.size, buckets=(bucket,)), flip=False)
        for name, one in trained.items()
    }
    for index in range(OTHERS):
        character = other_character(index)
        background = rng.choice([name for name in COLOURS if name != character.colour])
        found[f"other {index}: {character.words}, {background}"] = draw(
            character,
            random_pose(rng),
            width_px=bucket.width_px,
            height_px=bucket.height_px,
            background=COLOURS[background],
        )
    return found


@torch.no_grad()
def latents(pipeline: StableDiffusionPipeline, images: Sequence[Image.Image]) -> Tensor:
    """Return posterior means as float32 [N, D]."""
    means: Tensor = pipeline.vae.encode(pixels(list(images))).latent_dist.mean
    return means.flatten(1)


def nearest_drawings(
    run: Run, trained: Mapping[str, Trained], *, adapted: bool, seeds: int
) -> list[tuple[Image.Image, Nearest]]:
    """Sample each training caption in turn at the size it was trained in; return sample and nearest drawing."""
    pipeline = run.pipeline(adapted=adapted)
    names = list(trained)
    wanted = [(FIRST_SEED + k, trained[names[k % len(names)]]) for k in range(seeds)]
    found: dict[int, tuple[Image.Image, Nearest]] = {}
    for bucket in dict.fromkeys(one.bucket for _, one in wanted):
        group = [(seed, one.caption) for seed, one in wanted if one.bucket == bucket]
        samples = pipeline(
            [caption for _, caption in group],
            generator=[torch.Generator().manual_seed(seed) for seed, _ in group],
            num_inference_steps=run.setting("sampling.steps"),
            guidance_scale=run.setting("sampling.guidance_scale"),
            width=bucket.width_px,
            height=bucket.height_px,
        ).images
        drawings = drawings_at(bucket, trained)
        distances = torch.cdist(
            latents(pipeline, samples), latents(pipeline, list(drawings.values()))
        )
        for (seed, caption), sample, index in zip(
            group, samples, distances.argmin(dim=1).tolist(), strict=True
        ):
            name = list(drawings)[index]
            background = caption.split()[-2]
            nearest = Nearest(seed=seed, background=background, name=name, ours=name in trained)
            found[seed] = (sample, nearest)
    return [found[seed] for seed in sorted(found)]


def validation(run: Run) -> dict[str, float]:
    """Return the validation loss of the base and the last one, and the gain as a share of the first."""
    rows = [row for row in run.events if row["event"] == "validation"]
    if not rows or rows[0]["step"] != 0:
        raise SystemExit(f"{run.folder} has no validation loss of the base in {EVENTS_FILE}")
    base, final = float(rows[0]["loss"]), float(rows[-1]["loss"])
    return {"base": base, "final": final, "gain": 1 - final / base}


def plain_check(run: Run) -> list[dict[str, Any]]:
    """Make the trainer's last samples again with the plain pipeline; return the differences, 0..255."""
    last = [row for row in run.events if row["event"] == "sample"][-1]
    pipeline = run.pipeline(adapted=True)
    rows = []
    for sample in last["images"]:
        own = Image.open(run.folder / sample["file"])
        plain = pipeline(
            sample["prompt"],
            negative_prompt=run.setting("sampling.negative_prompt"),
            generator=torch.Generator().manual_seed(sample["seed"]),
            num_inference_steps=run.setting("sampling.steps"),
            guidance_scale=run.setting("sampling.guidance_scale"),
            width=own.width,
            height=own.height,
        ).images[0]
        difference = np.abs(np.asarray(plain, dtype=int) - np.asarray(own.convert("RGB")))
        rows.append({"file": sample["file"], "max_difference": int(difference.max())})
    return rows


def print_plain_check(rows: Sequence[dict[str, Any]], precision: str) -> None:
    """Print the differences; a bfloat16 training samples in bfloat16, so these are then larger."""
    for row in rows:
        print(f"plain pipeline, {row['file']}: max difference {row['max_difference']}/255")
    worst = max(row["max_difference"] for row in rows)
    print(f"plain pipeline: worst {worst}/255, allowed 2 (trained in {precision}, checked in fp32)")


def main() -> None:
    """Read the command line, generate, compare, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a finished run")
    parser.add_argument("--dataset", type=Path, default=ROOT / "datasets" / "example")
    parser.add_argument("--base", type=Path, help="another base than the run's own")
    parser.add_argument("--seeds", type=int, default=32)
    parser.add_argument("--plain-check", action="store_true", help="repeat the last samples")
    parser.add_argument("--sheet", type=Path, default=ROOT / "build" / "base" / "lora_sheet.png")
    parser.add_argument("--json", type=Path, help="where to write the numbers")
    options = parser.parse_args()
    run = open_run(options.run, base=options.base)
    loss = validation(run)
    print(f"validation loss {loss['base']:.4f} -> {loss['final']:.4f}: {loss['gain']:.1%} lower")
    content: dict[str, Any] = {"validation_loss": loss}
    if options.plain_check:
        content["plain_check"] = plain_check(run)
        print_plain_check(content["plain_check"], run.setting("train.precision"))
    if options.seeds:
        content |= compare(run, options)
    write_json(options.json, content)


def compare(run: Run, options: argparse.Namespace) -> dict[str, Any]:
    """Look for the nearest neighbours of LoRA and base samples; print and return the shares."""
    trained = training_images(run, options.dataset)
    chance = len(trained) / (len(trained) + OTHERS)
    content: dict[str, Any] = {"ours": len(trained), "others": OTHERS, "chance": chance}
    tiles: list[tuple[Image.Image, str, bool]] = []
    for kind in ("lora", "base"):
        found = nearest_drawings(run, trained, adapted=kind == "lora", seeds=options.seeds)
        rate = share([one.ours for _, one in found])
        print(f"{kind}: nearest is ours for {rate:.1%} of {len(found)} seeds (chance {chance:.1%})")
        obeyed = share([look(image).background_colour == one.background for image, one in found])
        print(f"{kind}: background as prompted for {obeyed:.1%}")
        content[kind] = {
            "share": rate,
            "background_as_prompted": obeyed,
            "nearest": [asdict(one) for _, one in found],
        }
        tiles += [
            (
                image.resize((RESOLUTION_PX, RESOLUTION_PX)),
                f"{kind} {one.seed}\n{one.background}",
                one.ours,
            )
            for image, one in found
        ]
    write_sheet(options.sheet, tiles, columns=16)
    print(f"contact sheet: {options.sheet}")
    return content


if __name__ == "__main__":
    main()

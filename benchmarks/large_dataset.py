"""How long a training of very many images takes to come to its first step when everything is cached.

Usage: python benchmarks/large_dataset.py --folder DIR [--images 100000] [--json FILE]

Makes a dataset of small, distinct images with captions and fills its cache with entries of the right
names and shapes, as an encoder would have (both are kept in DIR and used again). Then a fresh process
does what a training does before it loads a network: scan, plan, verify every entry, prune the cache, and
the order of one epoch with its micro-batches. The first warm round remembers nothing of the entries and
reads them all. Prints seconds, processor seconds and the highest resident memory after each part.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.plots import bars  # noqa: E402 - after sys.path
from lora_trainer.common.memo import MEMO_FILE  # noqa: E402 - after sys.path

if TYPE_CHECKING:  # what importing them takes is measured
    from lora_trainer.cache.cache_plan import Needs
    from lora_trainer.cache.store import Cache
    from lora_trainer.run.prepare import Prepared

SIZES_PX = ((64, 64), (80, 48), (48, 80), (72, 56), (56, 72))
WORDS = ("red", "old", "small", "stone", "garden", "window", "river", "cat", "house", "lamp")
SETTINGS: Mapping[str, Any] = {
    "base.model": "embedded",
    "data.resolution": 64,
    "data.validation_fraction": 0.0005,
    "hardware.device": "cpu",
    "hardware.threads": 1,
}


def main() -> None:
    asked = _arguments()
    if asked.measure:
        print(json.dumps(_measured(asked.folder, may_encode=asked.may_encode)))
        return
    began = time.monotonic()
    _make_dataset(asked.folder / "dataset", count=asked.images)
    print(f"dataset: {time.monotonic() - began:.1f} s", flush=True)
    cold = _child(asked.folder, "--may-encode")
    print(f"first time, entries written included: {cold}", flush=True)
    (asked.folder / "cache" / MEMO_FILE).unlink(missing_ok=True)
    read_again = _child(asked.folder)
    print(f"every entry read: {read_again}", flush=True)
    warm = [_child(asked.folder) for _ in range(asked.rounds)]
    for row in warm:
        print(f"warm: {row}", flush=True)
    if asked.json:
        found = {"images": asked.images, "cold": cold, "read_again": read_again, "warm": warm}
        asked.json.write_text(json.dumps(found, indent=1) + "\n")
    if asked.plot:
        times = {name: part["seconds"] for name, part in warm[-1]["parts"].items()}
        title = f"{warm[-1]['images']:,} images, everything cached"
        asked.plot.write_text(bars({title: times}, unit="s") + "\n")


def _make_dataset(folder: Path, *, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    there = {entry.name for entry in folder.iterdir()}
    for index in range(count):
        if f"{index:06d}.txt" in there:
            continue
        draw = np.random.default_rng(index)
        width_px, height_px = SIZES_PX[index % len(SIZES_PX)]
        coarse = Image.fromarray(draw.integers(0, 256, (6, 6, 3), dtype=np.uint8))
        coarse.resize((width_px, height_px), Image.Resampling.BICUBIC).save(
            folder / f"{index:06d}.png", compress_level=1
        )
        caption = ", ".join(draw.choice(WORDS, 4))
        (folder / f"{index:06d}.txt").write_text(f"{caption}, number {index}\n")


def _child(folder: Path, *more: str) -> dict[str, Any]:
    """Measure in a process of its own, whose memory is that of the work alone."""
    line = [sys.executable, __file__, "--folder", str(folder), "--measure", *more]
    done = subprocess.run(line, check=True, capture_output=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def _measured(folder: Path, *, may_encode: bool) -> dict[str, Any]:
    parts: dict[str, dict[str, float]] = {}

    @contextmanager
    def part(name: str) -> Iterator[None]:
        began, cpu_began = time.monotonic(), time.process_time()
        yield
        parts[name] = {
            "seconds": round(time.monotonic() - began, 2),
            "cpu_s": round(time.process_time() - cpu_began, 2),
            "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        }

    with part("imports"):
        import torch

        from benchmarks.stand_in_encoders import Pictures, Texts
        from lora_trainer.cache.encode import fill
        from lora_trainer.common.events import EventStream
        from lora_trainer.run.build import open_cache, plan_cache, refuse_small_cache, texts_as
        from lora_trainer.run.prepare import Request, prepare
    with part("scan and plan"):
        cache_dir = {"data.cache_dir": str(folder / "cache")}
        prepared = prepare(Request(dataset=folder / "dataset", overrides={**SETTINGS, **cache_dir}))
    with part("names of entries"):
        wanted = plan_cache(prepared, prompts=("",))
    cache = open_cache(prepared, EventStream())

    def pictures(_: torch.device) -> Pictures:
        _refuse_unless(may_encode)
        return Pictures(vae=None, latents=prepared.family.latents, facts=prepared.facts)

    def texts(_: torch.device) -> Texts:
        _refuse_unless(may_encode)
        return Texts(networks={}, tokenizers={}, facts=prepared.facts)

    with part("room in the cache"):
        refuse_small_cache(prepared, wanted)
    with part("verify every entry"):
        done = fill(
            wanted,
            cache,
            settings=prepared.config.data,
            load_image_encoder=pictures,
            load_text_encoder=texts,
            devices=(torch.device("cpu"),),
            texts_as=texts_as(prepared),
            events=EventStream(),
        )
    with part("prune"):
        cache.prune(wanted.keys())
    with part("order of an epoch"):
        steps = _epoch(prepared, wanted, cache)
    return {
        "images": len(prepared.trained),
        "steps": steps,
        "entries": done["found"] + done["latents"] + done["texts"],
        "encoded": done["latents"] + done["texts"],
        "parts": parts,
        "total_s": round(sum(part["seconds"] for part in parts.values()), 2),
        "total_cpu_s": round(sum(part["cpu_s"] for part in parts.values()), 2),
        "peak_mib": max(part["peak_mib"] for part in parts.values()),
    }


def _refuse_unless(may_encode: bool) -> None:
    if not may_encode:
        raise SystemExit("the cache is not warm")


def _epoch(prepared: Prepared, wanted: Needs, cache: Cache) -> int:
    """Find which samples each step of an epoch takes and in what micro-batches; return the steps."""
    from lora_trainer.cache.cache_plan import Entries
    from lora_trainer.families.base.noise_levels import table_levels
    from lora_trainer.run.build import texts_as
    from lora_trainer.training.dataloader import TrainingDataLoader

    config = prepared.config
    samples = [sample for record in prepared.trained for sample in record.sample_ids()]
    feeder = TrainingDataLoader(
        sources={sample: wanted.sources[sample] for sample in samples},
        empty_text=texts_as(prepared).key(""),
        entries=Entries(cache=cache),
        levels=table_levels(prepared.facts.release.alphas_cumprod().tolist(), config.objective),
        prediction=prepared.facts.release.prediction,
        draws_latents=prepared.family.latents.are_drawn,
        shared_conditioning={},
        data=config.data,
        objective=config.objective,
        batch_size=config.train.batch_size,
        seed=config.train.seed,
    )
    steps = len(samples) // config.train.batch_size
    seen = {sample for step in range(steps) for _, sample in feeder.share(step)}
    assert len(seen) == steps * config.train.batch_size
    return steps


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where dataset and cache are")
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=3, help="measurements with a warm cache")
    parser.add_argument("--json", type=Path, help="where the measurements are written")
    parser.add_argument("--plot", type=Path, help="where the last of them is drawn, an .svg")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--may-encode", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

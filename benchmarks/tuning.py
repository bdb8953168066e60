"""Whether `tune` beats the planned settings, and trials at random, on images that neither training nor choice has seen.

Three data sets of the embedded base: the example's character, another character, and a style (scenes with their
edges drawn and their colours inverted). For each, seed and sampler a study of so many trials of so many steps; then the
LoRA of the plan and the best one are judged on 24 fresh drawings, by the gain over the base in percent. Output: a
table and a JSON file. Trials run in this process, one after another, so that importing torch is not counted again
and again; everything else is the command `lora-train tune`. A study that was begun goes on.

Usage: python benchmarks/tuning.py --folder WORK --json gains.json [--trials 10] [--steps 40] [--seeds 2]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from PIL import Image, ImageChops, ImageFilter, ImageOps

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "base")]

from characters import ZIBBO, Character, draw, other_character, random_pose  # noqa: E402 - after sys.path
from scenes import COLOURS, scene  # noqa: E402 - after sys.path

from benchmarks.holding_out import gain_on  # noqa: E402 - after sys.path
from lora_trainer.cli import main as command_line  # noqa: E402 - after sys.path
from lora_trainer.common.files import read_json_object  # noqa: E402 - after sys.path
from lora_trainer.queue import commands, worker  # noqa: E402 - after sys.path
from lora_trainer.reporting.status import read_status  # noqa: E402 - after sys.path
from lora_trainer.tuning import tune  # noqa: E402 - after sys.path

TRAINED_IMAGES, FRESH_IMAGES, SIDE_PX = 16, 24, 256
SETTINGS: Mapping[str, Any] = {
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "train.batch_size": 4,
}


def main() -> None:
    asked = _arguments()
    worker.ensure_worker = train_here  # type: ignore[assignment] # it has no other words to pass on
    tune.POLL_S = 0.0
    rows = []
    for name in asked.data:
        dataset, fresh = asked.folder / name, asked.folder / f"{name}-fresh"
        for folder, first, count in ((dataset, 0, TRAINED_IMAGES), (fresh, 1000, FRESH_IMAGES)):
            if not folder.exists():
                _write(name, folder, first=first, count=count)
        for seed in range(asked.seeds):
            for sampler in ("tpe", "random"):
                rows.append(_study(asked, dataset, fresh, sampler=sampler, seed=seed))
                print(json.dumps(rows[-1]), flush=True)
                asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print("\n" + "\n".join(_table(rows)))


def train_here(runs: Path) -> None:
    """Do what the queue's worker does, in this process."""
    for item in commands.in_order(commands.items(runs)):
        started_s = time.time()
        code = command_line.run(list(item.argv))
        name = json.loads(next(w for w in item.argv if w.startswith("output.name="))[12:])
        state: commands.State = "finished"
        if code != 0:
            state = "stopped" if read_status(runs / name).state == "stopped" else "failed"
        ended = replace(
            item,
            state=state,
            run=name,
            started_s=started_s,
            ended_s=time.time(),
        )
        with commands.changing(runs):
            commands.write(runs, ended)


def _study(
    asked: argparse.Namespace, dataset: Path, fresh: Path, *, sampler: str, seed: int
) -> dict[str, Any]:
    """Tune, and return what the plan and the best trial gained."""
    runs = asked.folder / f"{dataset.name}-{sampler}-{seed}"
    words = ["tune", str(dataset), "--base", "embedded", "--output", str(runs), "--hours", "100"]
    words += ["--trials", str(asked.trials), "--sampler", sampler, "--seed", str(seed), "--json"]
    for key, value in {**SETTINGS, "train.steps": asked.steps}.items():
        words += ["--set", f"{key}={json.dumps(value)}"]
    study = runs / f"{dataset.name}-tune"
    with Path(os.devnull).open("w") as nowhere:
        shown, sys.stdout = sys.stdout, nowhere
        try:
            code = command_line.run([*words, "--resume"] if study.exists() else words)
        finally:
            sys.stdout = shown
    if code:
        raise SystemExit(code)
    best = read_json_object(study / "best.json")
    trials = sorted(
        runs.glob(f"{study.name}-trial-*"), key=lambda path: int(path.name.rsplit("-")[-1])
    )
    found = next(run for run in trials if _settings(run).items() >= best.items())
    return {
        "data": dataset.name,
        "seed": seed,
        "sampler": sampler,
        "trials": len(trials),
        "planned": gain_on(trials[0] / f"{trials[0].name}.safetensors", fresh),
        "best": gain_on(found / f"{found.name}.safetensors", fresh),
        "best trial": found.name,
        "settings": best,
    }


def _settings(run: Path) -> Mapping[str, Any]:
    settings: Mapping[str, Any] = read_json_object(run / "run.json")["settings"]
    return settings


# ---- the data sets


def _write(name: str, folder: Path, *, first: int, count: int) -> None:
    folder.mkdir(parents=True)
    if name == "zibbo" and not first:
        for file in (ROOT / "datasets" / "example").glob("zibbo_*"):
            shutil.copy(file, folder)
        return
    for index in range(first, first + count):
        image, caption = _style(index) if name == "style" else _portrait(name, index)
        image.save(folder / f"{index:04}.png")
        (folder / f"{index:04}.txt").write_text(caption + "\n", encoding="utf-8")


def _portrait(name: str, index: int) -> tuple[Image.Image, str]:
    who: Character = ZIBBO if name == "zibbo" else other_character(407)
    rng = random.Random(f"{name}/{index}")
    pose, background = random_pose(rng), rng.choice([*COLOURS])
    image = draw(who, pose, width_px=SIDE_PX, height_px=SIDE_PX, background=COLOURS[background])
    article = "an" if background == "orange" else "a"
    words = "zibbo" if name == "zibbo" else "mudd"
    return image, f"{words}, {who.words}, {pose.words}, on {article} {background} background"


def _style(index: int) -> tuple[Image.Image, str]:
    drawn = scene(7, index, SIDE_PX, SIDE_PX)
    edges = drawn.image.filter(ImageFilter.FIND_EDGES).convert("L").point(lambda v: 255 * (v > 24))
    inverted = ImageOps.invert(drawn.image)
    return ImageChops.lighter(inverted, edges.convert("RGB")), f"negativa style, {drawn.caption}"


# ---- the table


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| data | as planned | random search | `tune` | `tune` better than planned |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for name in dict.fromkeys(row["data"] for row in rows):
        mine = [row for row in rows if row["data"] == name]
        planned = [row["planned"] for row in mine if row["sampler"] == "tpe"]
        random_best = [row["best"] for row in mine if row["sampler"] == "random"]
        best = [row["best"] for row in mine if row["sampler"] == "tpe"]
        gained = [after - before for before, after in zip(planned, best, strict=True)]
        cells = (", ".join(f"{gain:.1f}" for gain in each) for each in (planned, random_best, best))
        yield f"| {name} | {' | '.join(cells)} | {statistics.mean(gained):+.1f} |"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="where everything is made")
    parser.add_argument("--json", type=Path, required=True, help="where the gains are written")
    parser.add_argument("--data", nargs="*", default=["zibbo", "mudd", "style"])
    parser.add_argument("--trials", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=2)
    asked = parser.parse_args()
    asked.folder = asked.folder.resolve()
    return asked


if __name__ == "__main__":
    main()

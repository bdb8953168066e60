"""Whether the scores order what they should: prepared datasets and prepared LoRAs, on several seeds.

Input: the example's images and the embedded base. Output: a table and a JSON file of scores with their
parts, and exit code 1 where the order or a margin is missed. Datasets: the good one is to be above each
of three that are worse in a named way. LoRAs: good > under-trained > over-trained > broken, as a LoRA
that does little spoils nothing, and one that is broken can do nothing. Everything is drawn from the
seed; trainings are processes of one thread, done once, and gone on with where they were interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageFilter

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.common.event_kinds import Finished  # noqa: E402 - after sys.path
from lora_trainer.common.events import read_events  # noqa: E402 - after sys.path
from lora_trainer.common.files import read_json_object  # noqa: E402 - after sys.path
from lora_trainer.reporting.run_record import RUN_FILE  # noqa: E402 - after sys.path
from lora_trainer.run.run_folder import EVENTS_FILE  # noqa: E402 - after sys.path

EXAMPLE = ROOT / "datasets" / "example"
TRIGGER = "zibbo"
MARGIN = 0.1
PICTURES = 8
"""Images the LoRAs are trained on and validated with: few, so that one can be trained too long."""
ALL_RUNS: Mapping[str, Any] = {
    "data.trigger": TRIGGER,
    "data.validation_fraction": 0.375,
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "logging.trackers": [],
    "optimizer.learning_rate": 2e-3,
    "output.save_every_steps": 0,
    "sampling.every_steps": 0,
    "train.batch_size": 4,
    "train.validate_every_steps": 100,
}
LORAS: Mapping[str, Mapping[str, Any]] = {
    "good": {"train.steps": 100},
    "under-trained": {"train.steps": 4, "optimizer.learning_rate": 5e-4},
    "over-trained": {
        "train.steps": 600,
        "output.save_every_steps": 200,
        "train.batch_size": 2,
        "adapter.rank": 32,
        "optimizer.schedule": "constant",
    },
    "broken": {
        "train.steps": 30,
        "optimizer.learning_rate": 0.1,
        "optimizer.schedule": "constant",
    },
}
"""In the intended order; what is not named is as the preset of the embedded base has it."""
Scores = dict[str, list[dict[str, Any]]]
"""By name, one report a seed, with at least "score" and "parts"."""


def main() -> int:
    asked = _arguments()
    found: dict[str, Scores] = {}
    if "datasets" in asked.only:
        found["datasets"] = _datasets(asked)
    if "loras" in asked.only:
        found["loras"] = _loras(asked)
    missed = []
    for kind, scores in found.items():
        print(f"\n{kind}")
        for name, reports in scores.items():
            values = ", ".join(f"{report['score']:.3f}" for report in reports)
            print(f"{name}: {values}")
        missed += _missed(kind, scores)
    asked.json.write_text(json.dumps({**found, "missed": missed}, indent=1) + "\n")
    print("\n" + ("\n".join(missed) or f"in order, by at least {MARGIN:g}"))
    return 1 if missed else 0


def _missed(kind: str, scores: Scores) -> list[str]:
    """Return what is not at least the margin above what it is to be above."""
    names = list(scores)
    pairs = (
        list(zip(names, names[1:], strict=False))
        if kind == "loras"
        else [(names[0], name) for name in names[1:]]
    )
    found = []
    for higher, lower in pairs:
        for seed, (one, other) in enumerate(zip(scores[higher], scores[lower], strict=True)):
            margin = one["score"] - other["score"]
            if margin < MARGIN:
                found.append(f"seed {seed}: {higher} is above {lower} by {margin:.3f} only")
    return found


# ---- datasets


def _datasets(asked: argparse.Namespace) -> Scores:
    found: Scores = {}
    for name, make in DATASETS.items():
        found[name] = []
        for seed in range(asked.seeds):
            folder = asked.folder / "datasets" / f"{name}-{seed}"
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            make(folder, random.Random(f"{name} {seed}"))
            line = ["check", str(folder), "--json", "--base", "embedded"]
            found[name].append(json.loads(_run([*line, "--set", f"data.trigger={TRIGGER}"])))
    return found


def _good(folder: Path, draw: random.Random) -> None:
    """Twelve of the example's images with their captions."""
    for picture in sorted(draw.sample(_pictures(), 12)):
        _copy(picture, folder)


def _blurred(folder: Path, draw: random.Random) -> None:
    """The same, a few dozen pixels wide and out of focus."""
    for picture in sorted(draw.sample(_pictures(), 12)):
        side_px = draw.randint(24, 40)
        image = Image.open(picture).convert("RGB")
        image.thumbnail((side_px, side_px))
        image = image.filter(ImageFilter.GaussianBlur(draw.uniform(1.0, 2.0)))
        image.save(folder / f"{picture.stem}.png")
        shutil.copy(picture.with_suffix(".txt"), folder)


def _duplicates(folder: Path, draw: random.Random) -> None:
    """Three of the images four times each: saved again a little brighter or darker."""
    for picture in sorted(draw.sample(_pictures(), 3)):
        for copy in range(4):
            image = Image.open(picture).convert("RGB")
            factor = draw.uniform(0.98, 1.02)
            image = image.point([min(255, round(value * factor)) for value in range(256)] * 3)
            image.save(folder / f"{picture.stem}-{copy}.png")
            text = picture.with_suffix(".txt").read_text(encoding="utf-8")
            (folder / f"{picture.stem}-{copy}.txt").write_text(text, encoding="utf-8")


def _uncaptioned(folder: Path, draw: random.Random) -> None:
    """Twelve of the images, and not a word about them."""
    for picture in sorted(draw.sample(_pictures(), 12)):
        shutil.copy(picture, folder)


DATASETS: Mapping[str, Callable[[Path, random.Random], None]] = {
    "good": _good,
    "uncaptioned": _uncaptioned,
    "duplicates": _duplicates,
    "blurred": _blurred,
}


def _pictures() -> list[Path]:
    return sorted(path for path in EXAMPLE.iterdir() if path.suffix in (".png", ".jpg", ".webp"))


def _copy(picture: Path, folder: Path) -> None:
    shutil.copy(picture, folder)
    shutil.copy(picture.with_suffix(".txt"), folder)


# ---- LoRAs


def _loras(asked: argparse.Namespace) -> Scores:
    dataset = asked.folder / "eight"
    dataset.mkdir(parents=True, exist_ok=True)
    for picture in _pictures()[:PICTURES]:
        if not (dataset / picture.name).exists():
            _copy(picture, dataset)
    found: Scores = {name: [] for name in LORAS}
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for name, settings in LORAS.items():
            run = asked.folder / f"{name}-{seed}"
            if not _is_finished(run):
                _train(run, dataset, {**ALL_RUNS, **settings, "train.seed": seed})
            file = run / "validation.json"
            if not file.exists() or not read_json_object(file)["complete"]:
                _run(["validate", str(run), str(dataset), "--json"])
            found[name].append(read_json_object(file))
            report = found[name][-1]
            print(f"{run.name}: {report['score']} {report['parts']}", flush=True)
    return found


def _train(run: Path, dataset: Path, settings: Mapping[str, Any]) -> None:
    line = [str(dataset), "--base", "embedded", "--output", str(run.parent), "--name", run.name]
    for key, value in settings.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    _run([*line, "--resume"] if (run / RUN_FILE).exists() else line)


def _is_finished(run: Path) -> bool:
    file = run / EVENTS_FILE
    return file.exists() and any(isinstance(event, Finished) for event in read_events(file))


def _run(arguments: Sequence[str]) -> str:
    """Run the command line in a process of its own; return what it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "lora_trainer", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        words = done.stderr.strip().splitlines() or ["no words"]
        sys.exit(f"{' '.join(arguments[:3])} failed: {words[-1]}")
    return done.stdout


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where everything is made")
    parser.add_argument("--json", type=Path, required=True, help="where the scores are written")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0, help="of the LoRAs")
    parser.add_argument("--only", nargs="*", default=["datasets", "loras"])
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

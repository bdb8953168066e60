"""What holding images out costs and what it buys, judged by images that no training has seen.

Input: the example's images, all or the first few of them, and the embedded base with its own recipe.
Output: a table and a JSON file. Each seed trains twice: with the share held out that is asked for, and
with nothing held out. 24 fresh drawings of the example's character, which no training sees, then judge each saved
step: the gain over the base in percent, 1 - loss / base loss, at fixed noise. So both trainings are
judged by the same images, and so is the step that each way of validating would choose: the step of the
lowest loss on the held-out images, or on the trained images at fixed noise. Trainings are processes of one
thread, done once, and gone on with where they were interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts" / "base")]

from characters import ZIBBO, draw, random_pose  # noqa: E402 - after sys.path
from scenes import COLOURS  # noqa: E402 - after sys.path

from lora_trainer.common.event_kinds import Event, Finished, Validation  # noqa: E402 - after sys.path
from lora_trainer.common.events import EventStream, read_events  # noqa: E402 - after sys.path
from lora_trainer.common.files import read_json_object  # noqa: E402 - after sys.path
from lora_trainer.evaluate.evaluation import (  # noqa: E402 - after sys.path
    build_evaluation,
    evaluated_lora_of,
    prepare_again,
)
from lora_trainer.reporting.run_record import RUN_FILE  # noqa: E402 - after sys.path
from lora_trainer.run.run_folder import EVENTS_FILE  # noqa: E402 - after sys.path

EXAMPLE = ROOT / "datasets" / "example"
FRESH_IMAGES = 24
QUANTILES = 8
ALL_RUNS: Mapping[str, Any] = {
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "logging.trackers": [],
    "output.keep_last": 1000,
    "sampling.every_steps": 0,
}


def main() -> None:
    asked = _arguments()
    dataset, fresh = asked.folder / f"dataset-{asked.images}", asked.folder / "fresh"
    _copy_example(dataset, count=asked.images)
    _draw_fresh(fresh)
    rows = []
    for seed in range(asked.first_seed, asked.first_seed + asked.seeds):
        for name, share in (("held-out", asked.share), ("nothing", 0.0)):
            run = asked.folder / f"{name}-{asked.images}-{seed}"
            _train(run, dataset, share=share, seed=seed, every=asked.every_steps)
            file = run / "judged.json"
            if not file.exists():
                file.write_text(json.dumps(_judged(run, dataset, fresh)))
            rows.append({"seed": seed, "arm": name, **read_json_object(file)})
            print(_line(rows[-1]), flush=True)
    asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    print("\n" + "\n".join(_table(rows)))


def _copy_example(folder: Path, *, count: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in sorted(EXAMPLE.glob("zibbo_*")):
        if int(file.stem.removeprefix("zibbo_")) <= count:
            shutil.copy(file, folder)


def _draw_fresh(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random("fresh drawings")
    for number in range(FRESH_IMAGES):
        pose, background = random_pose(rng), rng.choice([*COLOURS])
        image = draw(ZIBBO, pose, width_px=256, height_px=256, background=COLOURS[background])
        image.save(folder / f"fresh_{number:02}.png")
        article = "an" if background == "orange" else "a"
        words = f"zibbo, {ZIBBO.words}, {pose.words}, on {article} {background} background"
        (folder / f"fresh_{number:02}.txt").write_text(words + "\n", encoding="utf-8")


def _train(run: Path, dataset: Path, *, share: float, seed: int, every: int) -> None:
    """Train one run to its end, going on with it where it was begun."""
    if any(isinstance(event, Finished) for event in _events(run)):
        return
    settings = {
        **ALL_RUNS,
        "data.validation_fraction": share,
        "output.save_every_steps": every,
        "train.seed": seed,
        "train.validate_every_steps": every,
    }
    line = [sys.executable, "-m", "lora_trainer", str(dataset), "--base", "embedded"]
    line += ["--output", str(run.parent), "--name", run.name]
    for key, value in settings.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    if (run / RUN_FILE).exists():
        line.append("--resume")
    subprocess.run(
        line,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        stdout=subprocess.DEVNULL,
    )


def _judged(run: Path, dataset: Path, fresh: Path) -> dict[str, Any]:
    """Return the gains in percent by step on the fresh images and on the dataset's, and the held-out ones."""
    by_step = {file: gain_on(file, fresh) for file in _files(run)}
    validations = [event for event in _events(run) if isinstance(event, Validation)]
    losses = [(event.step, event.loss) for event in validations]
    base_loss = losses[0][1] if losses else 1.0
    return {
        "fresh": {_step(file): gain for file, gain in by_step.items()},
        "trained": {_step(file): gain_on(file, dataset) for file in by_step},
        "held_out": {step: 100 * (1 - loss / base_loss) for step, loss in losses if step},
    }


def gain_on(file: Path, images: Path) -> float:
    """Return by how many percent a LoRA of the embedded base lowers its loss on images, at fixed noise."""
    subject = evaluated_lora_of(
        file,
        base="embedded",
        overrides={"data.validation_fraction": 0.0, "train.seed": 0, "hardware.threads": 1},
    )
    prepared = prepare_again(subject, images)
    scene = build_evaluation(subject, prepared, prompts=(), events=EventStream(listeners=[]))
    names = [record.sample_ids()[0] for record in prepared.trained]
    keys = [(name, scene.sources[name]) for name in names]
    batches = scene.feeder.validation(keys, quantiles=QUANTILES)
    before, after = (
        statistics.mean(scene.losses(batches, strength=strength)) for strength in (0.0, 1.0)
    )
    return 100 * (1 - after / before)


def _files(run: Path) -> list[Path]:
    """Return the LoRA files of a run in the order of their steps."""
    return sorted(run.glob("*.safetensors"))


def _step(file: Path) -> int:
    """Return the step in the name of a file that was saved on the way, else that of the run's end."""
    _, between, step = file.stem.rpartition("-step")
    if between:
        return int(step)
    return next(event.step for event in _events(file.parent) if isinstance(event, Finished))


def _events(run: Path) -> Iterator[Event]:
    if (run / EVENTS_FILE).exists():
        yield from read_events(run / EVENTS_FILE)


def _line(row: Mapping[str, Any]) -> str:
    fresh = {int(step): gain for step, gain in row["fresh"].items()}
    words = " ".join(f"{step}:{gain:.1f}" for step, gain in fresh.items())
    return f"seed {row['seed']} {row['arm']}: {words}"


def _table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield, for each seed and arm, the gain on fresh images at the last, best and chosen steps."""
    yield "| seed | arm | last step | best step | chosen by held-out images | chosen by trained images |"
    yield "| --- | --- | ---: | ---: | ---: | ---: |"
    for row in rows:
        fresh = row["fresh"]
        by_held_out = max(row["held_out"], key=row["held_out"].get) if row["held_out"] else None
        by_trained = max(row["trained"], key=row["trained"].get)
        last = max(fresh, key=int)
        yield (
            f"| {row['seed']} | {row['arm']} | {fresh[last]:.2f} | {max(fresh.values()):.2f} | "
            f"{f'{fresh[by_held_out]:.2f}' if by_held_out else '-'} | {fresh[by_trained]:.2f} |"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where everything is made")
    parser.add_argument("--json", type=Path, required=True, help="where the gains are written")
    parser.add_argument("--images", type=int, default=16, help="how many of the example's images")
    parser.add_argument("--share", type=float, default=0.15, help="held out in the first arm")
    parser.add_argument("--every-steps", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()

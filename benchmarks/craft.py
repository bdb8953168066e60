"""A short training for every option of how a LoRA is learned, and what each does to the held-out loss.

Input: a dataset (the example's pictures), a base (the embedded one), a number of steps and seeds; each
option is one training of its own process, in sequence, on one thread. Output: a table and a JSON file
of the gain over the base, 1 - loss / base loss, in percent; the loss is that of squared errors,
unweighted, whatever an option trains with. Runs that are finished are not done again; one that was
interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.common.events import read_events  # noqa: E402
from lora_trainer.planning.optimizer_facts import OPTIMIZERS  # noqa: E402
from lora_trainer.run.run_folder import EVENTS_FILE, RUN_FILE  # noqa: E402

ALL_RUNS: Mapping[str, Any] = {
    "hardware.device": "cpu",
    "hardware.threads": 1,
    "logging.trackers": [],
    "output.save_every_steps": 0,
    "sampling.every_steps": 0,
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"objective.weighting": "none"},
    "min_snr": {"objective.weighting": "min_snr"},
    "soft_min_snr": {"objective.weighting": "soft_min_snr"},
    "debiased": {"objective.weighting": "debiased"},
    "p2": {"objective.weighting": "p2"},
    "huber-snr": {"objective.loss": "huber"},
    "huber-exponential": {"objective.loss": "huber", "objective.huber_schedule": "exponential"},
    "huber-constant": {"objective.loss": "huber", "objective.huber_schedule": "constant"},
    "smooth_l1-snr": {"objective.loss": "smooth_l1"},
    "noise_offset": {"objective.noise_offset": 0.05},
    "multires_noise": {"objective.multires_noise_iterations": 6},
    "input_perturbation": {"objective.input_perturbation": 0.1},
    "timesteps-logit_normal": {"objective.timestep_sampling": "logit_normal"},
    "timesteps-mode": {"objective.timestep_sampling": "mode"},
    "timesteps-cosmap": {"objective.timestep_sampling": "cosmap"},
    "timesteps-strata": {"objective.timestep_strata": 8},
    "max_weight_norm": {"optimizer.max_weight_norm": 0.3},
    "dropout": {"adapter.dropout": 0.1},
    "rank_dropout": {"adapter.rank_dropout": 0.1},
    "module_dropout": {"adapter.module_dropout": 0.1},
    "ema": {"train.ema_decay": 0.95},
    "lora-plus": {"optimizer.lora_plus_ratio": 4.0},
    **{f"optimizer-{name}": {"optimizer.name": name} for name in OPTIMIZERS if name != "adamw"},
}
"""By name; what an option does not name is as the preset has it, whose weighting is min_snr."""
REFERENCE = "min_snr"
_RATE = 2e-3
"""The rate of the embedded base's preset, for batches of 8."""


def _recipe(*, batch: int, images: int, rate: float, **more: Any) -> Mapping[str, Any]:
    return {
        "train.batch_size": batch,
        "train.steps": round(images / batch),
        "optimizer.learning_rate": rate,
        **{key.replace("__", "."): value for key, value in more.items()},
    }


_SPEED = _recipe(batch=8, images=300, rate=_RATE * 2**0.5, data__caption_dropout=0.0)
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "balanced": _recipe(batch=8, images=600, rate=_RATE),
    "balanced-twice-as-long": _recipe(batch=8, images=1200, rate=_RATE),
    "balanced-twice-as-long-batch-1": _recipe(batch=1, images=1200, rate=_RATE / 8**0.5),
    "balanced-batch-4-at-the-rate-of-1": _recipe(batch=4, images=600, rate=_RATE / 8**0.5),
    "speed": _SPEED,
    "speed-twice-as-long": _recipe(
        batch=8, images=600, rate=_RATE * 2**0.5, data__caption_dropout=0.0
    ),
    "speed-adamw8bit": {**_SPEED, "optimizer.name": "adamw8bit"},
    "speed-nf4": {**_SPEED, "memory.base_precision": "nf4"},
    "quality": _recipe(
        batch=8,
        images=1000,
        rate=_RATE,
        data__caption_dropout=0.1,
        train__lower_on_plateau=True,
        train__tighten_on_spike=True,
        train__validate_every_steps=25,
    ),
}
"""What priorities and tiers make of a recipe, on a quarter of the images of the embedded base's own."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option: its gain over the base in percent by seed; `failure` where a training did not finish."""

    option: str
    settings: Mapping[str, Any]
    gains_percent: Sequence[float]
    seconds: float
    failure: str = ""


def main() -> None:
    asked = _arguments()
    options = RECIPES if asked.recipes else OPTIONS
    chosen = {name: options[name] for name in asked.only or options}
    rows = []
    for name, settings in chosen.items():
        rows.append(_row(name, settings, asked))
        asked.json.write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
        print(_line(rows[-1]), flush=True)
    print("\n" + "\n".join(_table(rows)))


def _row(name: str, settings: Mapping[str, Any], asked: argparse.Namespace) -> Row:
    """Train one option with every seed."""
    gains, seconds = [], 0.0
    for seed in range(asked.seeds):
        run = asked.folder / f"{name}-{seed}"
        found = _finished(run)
        if found is None:
            failure = _train(run, {**ALL_RUNS, **settings, "train.seed": seed}, asked)
            found = _finished(run)
            if found is None:
                return Row(
                    option=name,
                    settings=settings,
                    gains_percent=gains,
                    seconds=seconds,
                    failure=failure,
                )
        gains.append(100 * (1 - found["validation_loss"] / found["base_validation_loss"]))
        seconds += found["seconds"]
    return Row(option=name, settings=settings, gains_percent=gains, seconds=seconds)


def _train(run: Path, settings: Mapping[str, Any], asked: argparse.Namespace) -> str:
    """Train one run to its end, going on with it where it was begun; return its last words."""
    line = [sys.executable, "-m", "lora_trainer", str(asked.dataset), "--base", asked.base]
    line += ["--output", str(asked.folder), "--name", run.name]
    for key, value in {"train.steps": asked.steps, **settings}.items():
        line += ["--set", f"{key}={json.dumps(value)}"]
    if (run / RUN_FILE).exists():
        line.append("--resume")
    done = subprocess.run(
        line,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    return "" if done.returncode == 0 else (done.stderr.strip().splitlines() or ["no words"])[-1]


def _finished(run: Path) -> Mapping[str, Any] | None:
    """Return the last event of a run that has ended well."""
    if not (run / EVENTS_FILE).exists():
        return None
    return next((row for row in read_events(run / EVENTS_FILE) if row["event"] == "finished"), None)


def _table(rows: Sequence[Row]) -> Iterator[str]:
    """Yield the best first; seeds hold out other pictures, so options are compared seed by seed."""
    yield f"| option | gain % | beyond {REFERENCE}, least | mean | most |"
    yield "|---|---|---|---|---|"
    whole = [row for row in rows if row.gains_percent and not row.failure]
    reference = next((row.gains_percent for row in whole if row.option == REFERENCE), None)
    for row in sorted(whole, key=lambda row: -statistics.mean(row.gains_percent)):
        beyond = "| | |"
        if reference is not None:
            more = [own - its for own, its in zip(row.gains_percent, reference, strict=True)]
            beyond = f"{min(more):+.2f} | {statistics.mean(more):+.2f} | {max(more):+.2f} |"
        yield f"| {row.option} | {statistics.mean(row.gains_percent):.2f} | {beyond}"
    for row in rows:
        if row.failure:
            yield f"| {row.option} | {row.failure} | | | |"


def _line(row: Row) -> str:
    gains = ", ".join(f"{gain:.2f}" for gain in row.gains_percent)
    return f"{row.option}: {row.failure or gains} ({row.seconds:.0f} s)"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the run folders are made")
    parser.add_argument("--json", type=Path, required=True, help="where the gains are written")
    parser.add_argument("--dataset", type=Path, default=ROOT / "datasets" / "example")
    parser.add_argument("--base", default="embedded")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--recipes",
        action="store_true",
        help="updates, batch and rate by priority and tier, each with its own steps (docs/presets.md)",
    )
    parser.add_argument(
        "--only", nargs="*", choices={**OPTIONS, **RECIPES}, help="options to train; all of them"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""A short training for every option of how a LoRA is learned, and what each does to the held-out loss.

Input: a dataset (the example's images), a base (the embedded one), a number of steps and seeds; each
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
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.common.event_kinds import Event, Finished, Validation  # noqa: E402 - after sys.path
from lora_trainer.common.events import read_events  # noqa: E402 - after sys.path
from lora_trainer.config.optimizers import OPTIMIZERS  # noqa: E402 - after sys.path
from lora_trainer.reporting.run_record import RUN_FILE  # noqa: E402 - after sys.path
from lora_trainer.run.run_folder import EVENTS_FILE  # noqa: E402 - after sys.path

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
RECIPE_REFERENCE = "balanced"
PRIORITY = "priority"
"""Key of an option's priority, which is not a setting."""
_TIERS: Mapping[str, Mapping[str, Any]] = {
    "6-8": {"memory.base_precision": "nf4", "optimizer.name": "adamw8bit"},
    "10-12": {"memory.base_precision": "int8", "optimizer.name": "adamw8bit"},
    "16-24": {"train.precision": "bf16"},
}
"""How a tier's own cells differ from the embedded base's, in what can change what is learned."""
RECIPES: Mapping[str, Mapping[str, Any]] = {
    "balanced": {PRIORITY: "balanced"},
    "speed": {PRIORITY: "speed"},
    "quality": {PRIORITY: "quality"},
    **{f"balanced-{tier}": {PRIORITY: "balanced", **more} for tier, more in _TIERS.items()},
    "balanced-batch-1": {
        PRIORITY: "balanced",
        "train.batch_size": 1,
        "train.steps": 2400,
        "optimizer.learning_rate": 2e-3 / 8**0.5,
    },
}
"""The whole recipes of the embedded base, as a user gets them, and what tiers and another batch make of them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One option: its gain over the base in percent by seed; `failure` where a training did not finish.

    The best gain is that of the validated step with the lowest loss: a longer run may go past it.
    """

    option: str
    settings: Mapping[str, Any]
    gains_percent: Sequence[float]
    best_gains_percent: Sequence[float]
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
    reference = RECIPE_REFERENCE if asked.recipes else REFERENCE
    print("\n" + "\n".join(_table(rows, reference=reference)))


def _row(name: str, settings: Mapping[str, Any], asked: argparse.Namespace) -> Row:
    """Train one option with every seed."""
    gains: list[float] = []
    best_gains: list[float] = []
    seconds = 0.0
    for seed in range(asked.seeds):
        run = asked.folder / f"{name}-{seed}"
        finished = _finished(run)
        if finished is None:
            failure = _train(run, {**ALL_RUNS, **settings, "train.seed": seed}, asked)
            finished = _finished(run)
            if finished is None:
                return Row(
                    option=name,
                    settings=settings,
                    gains_percent=gains,
                    best_gains_percent=best_gains,
                    seconds=seconds,
                    failure=failure,
                )
        base_loss = finished.base_validation_loss
        lowest = min(event.loss for event in _events(run, Validation) if event.step > 0)
        gains.append(100 * (1 - finished.validation_loss / base_loss))
        best_gains.append(100 * (1 - lowest / base_loss))
        seconds += finished.seconds
    return Row(
        option=name,
        settings=settings,
        gains_percent=gains,
        best_gains_percent=best_gains,
        seconds=seconds,
    )


def _train(run: Path, settings: Mapping[str, Any], asked: argparse.Namespace) -> str:
    """Train one run to its end, going on with it where it was begun; return its last words."""
    line = [sys.executable, "-m", "lora_trainer", str(asked.dataset), "--base", asked.base]
    line += ["--output", str(asked.folder), "--name", run.name]
    if PRIORITY in settings:
        line += ["--priority", settings[PRIORITY]]
    else:
        line += ["--steps", str(asked.steps)]
    for key, value in settings.items():
        if key != PRIORITY:
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


Kind = TypeVar("Kind", bound=Event)


def _finished(run: Path) -> Finished | None:
    """Return the last event of a run that has ended well."""
    return next(_events(run, Finished), None)


def _events(run: Path, kind: type[Kind]) -> Iterator[Kind]:
    if (run / EVENTS_FILE).exists():
        yield from (event for event in read_events(run / EVENTS_FILE) if isinstance(event, kind))


def _table(rows: Sequence[Row], *, reference: str) -> Iterator[str]:
    """Yield the best first; seeds hold out other images, so options are compared seed by seed."""
    yield f"| option | gain % | at the best step | beyond {reference}, least | mean | most |"
    yield "|---|---|---|---|---|---|"
    whole = [row for row in rows if row.gains_percent and not row.failure]
    compared = next((row.gains_percent for row in whole if row.option == reference), None)
    for row in sorted(whole, key=lambda row: -statistics.mean(row.gains_percent)):
        beyond = "| | |"
        if compared is not None:
            more = [own - its for own, its in zip(row.gains_percent, compared, strict=True)]
            beyond = f"{min(more):+.2f} | {statistics.mean(more):+.2f} | {max(more):+.2f} |"
        last, best = statistics.mean(row.gains_percent), statistics.mean(row.best_gains_percent)
        yield f"| {row.option} | {last:.2f} | {best:.2f} | {beyond}"
    for row in rows:
        if row.failure:
            yield f"| {row.option} | {row.failure} | | | | |"


def _line(row: Row) -> str:
    gains = ", ".join(f"{gain:.2f}" for gain in row.gains_percent)
    best = ", ".join(f"{gain:.2f}" for gain in row.best_gains_percent)
    words = row.failure or f"{gains}; at the best step {best}"
    return f"{row.option}: {words} ({row.seconds:.0f} s)"


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
        help="whole recipes by priority and tier, each with its own steps (docs/presets.md)",
    )
    parser.add_argument(
        "--only", nargs="*", choices={**OPTIONS, **RECIPES}, help="options to train; all of them"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

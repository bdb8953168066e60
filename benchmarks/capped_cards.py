"""Predicted against measured peak memory on capped cards: balanced presets on bases of true size.

Usage: python benchmarks/capped_cards.py [--bases sd15 sdxl zimage] [--gib 8 12 24] [--steps 20]
                                         [--folder FOLDER] [--json FILE] [--tiny]

Each row is `lora-train` itself in a process of its own, with `hardware.vram_limit_gib` capping the
allocator, on a random base of true size and 12 pictures. Prints one JSON object per row and a table.
Needs a CUDA device and disk for the bases (SDXL 6 GB, Z-Image 13 GB, FLUX.1 25 GB); `--tiny` tries
the script itself on a CPU with tiny bases, where nothing is capped.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from PIL import Image
from random_bases import RELEASES, ROOT, write_true_size

from lora_trainer.common.events import read_jsonl
from lora_trainer.common.files import read_json_object

GIB = 1 << 30
WARMUP_STEPS = 5
TIERS = {8: "6-8", 12: "10-12", 24: "16-24"}
SIZES_PX = ((1024, 1024), (1216, 832), (832, 1216))
CONTEXT = "runtime"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One training; sizes in GiB, measured is what the allocator reserved and the context's share.

    `failure` is the program's last line where it did not finish.
    """

    base: str
    card_gib: int
    predicted_gib: float | None = None
    measured_gib: float | None = None
    over_percent: float | None = None
    allocated_gib: float | None = None
    whole_card_gib: float | None = None
    seconds_per_step: float | None = None
    out_of_memory: int = 0
    settings: dict[str, object] | None = None
    failure: str | None = None


def main() -> None:
    options = _options()
    with tempfile.TemporaryDirectory(prefix="capped-cards-") as temporary:
        folder = Path(options.folder or temporary)
        folder.mkdir(parents=True, exist_ok=True)
        dataset = _dataset(folder / "pictures")
        rows = []
        for name in options.bases:
            base = _base(name, folder / name, tiny=options.tiny)
            for card_gib in options.gib:
                row = measure(name, base, dataset, folder / "runs", card_gib, options)
                print(json.dumps(asdict(row)), flush=True)
                rows.append(row)
    print(table(rows))
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(row) for row in rows], indent=1))


def measure(
    name: str,
    base: Path,
    dataset: Path,
    runs: Path,
    card_gib: int,
    options: argparse.Namespace,
) -> Row:
    """Train and read off what the run folder tells."""
    run = f"{name}-{card_gib}"
    settings = {
        "hardware.vram_limit_gib": card_gib,
        "data.cache_dir": str(runs / "cache"),
        "data.validation_fraction": 0,
        "output.folder": str(runs),
        "output.name": run,
        "output.save_every_steps": 0,
        "sampling.every_steps": options.steps,
        "sampling.prompts": ["a picture"],
        "sampling.steps": 4,
        "train.steps": options.steps,
        "logging.trackers": [],
    }
    command = [sys.executable, "-m", "lora_trainer", str(dataset), "--base", str(base)]
    command += ["--priority", "balanced"]
    command += [] if options.tiny else ["--preset", TIERS[card_gib]]
    for key, value in settings.items():
        command += ["--set", f"{key}={json.dumps(value)}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        return Row(base=name, card_gib=card_gib, failure=said[-1] if said else "no word")
    return _row(name, card_gib, runs / run)


def _row(name: str, card_gib: int, run: Path) -> Row:
    record, events = read_json_object(run / "run.json"), read_jsonl(run / "events.jsonl")
    steps = [row for row in events if row["event"] == "step"]
    plan, settings = record["plan"]["memory"], record["settings"]
    context = sum(item["bytes"] for item in plan["items"] if item["name"] == CONTEXT)
    reserved = max(row["vram_reserved_bytes"] for row in steps)
    measured = reserved + context if reserved else max(row["host_bytes"] for row in steps)
    changes = [row for row in events if row["event"] == "change"]
    return Row(
        base=name,
        card_gib=card_gib,
        predicted_gib=plan["peak_bytes"] / GIB,
        measured_gib=measured / GIB,
        over_percent=100 * (plan["peak_bytes"] / measured - 1),
        allocated_gib=max(row["vram_bytes"] for row in steps) / GIB,
        whole_card_gib=max(row["vram_used_bytes"] for row in steps) / GIB,
        seconds_per_step=statistics.median(
            row["seconds"] for row in steps if row["step"] > min(WARMUP_STEPS, len(steps) - 1)
        ),
        out_of_memory=sum("memory" in str(row["key"]) for row in changes),
        settings={
            key: value for key, value in settings.items() if key.startswith(("memory.", "train."))
        },
    )


def table(rows: Sequence[Row]) -> str:
    """Return the rows as a Markdown table."""
    lines = [
        "| base | card | predicted | measured | over | s a step | OOM | how |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        if row.settings is None:
            lines.append(f"| {row.base} | {row.card_gib} GiB | | | | | | {row.failure} |")
            continue
        how = ", ".join(
            f"{key.removeprefix('memory.')} {row.settings[key]}"
            for key in (
                "memory.micro_batch",
                "memory.gradient_checkpointing",
                "memory.base_precision",
                "memory.streamed_blocks",
            )
        )
        lines.append(
            f"| {row.base} | {row.card_gib} GiB | {row.predicted_gib:.2f} | {row.measured_gib:.2f} "
            f"| {row.over_percent:+.1f} % | {row.seconds_per_step:.3f} | {row.out_of_memory} | {how} |"
        )
    return "\n".join(lines)


def _base(name: str, folder: Path, *, tiny: bool) -> Path:
    if (folder / "model_index.json").is_file():
        return folder
    if tiny:
        from importlib import import_module

        return Path(import_module(f"tests.fakes.bases.{name}").write_base(folder))
    return write_true_size(name, folder, device=torch.device("cuda"))


def _dataset(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    for index in range(12):
        size = SIZES_PX[index % len(SIZES_PX)]
        picture = Image.effect_noise(size, 60).convert("RGB")
        picture.save(folder / f"{index:02}.png", compress_level=1)
        (folder / f"{index:02}.txt").write_text(f"picture number {index}")
    return folder


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--bases", nargs="+", choices=list(RELEASES), default=["sd15", "sdxl", "zimage"]
    )
    parser.add_argument("--gib", nargs="+", type=int, choices=list(TIERS), default=list(TIERS))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--folder", help="where bases and runs stay [default: thrown away]")
    parser.add_argument("--json")
    parser.add_argument("--tiny", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()

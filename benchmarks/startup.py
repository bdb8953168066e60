"""How long it takes from the command to the end of the first step, against a script that does only that.

Usage: python benchmarks/startup.py [--rounds 7] [--model NAME ...] [--json FILE]

Ours is the command line as anybody types it, with every image and caption cached; the first step
ends when it is in events.jsonl. The bare script imports torch, diffusers and peft, loads the same
denoiser, puts peft's LoRA on it, reads one batch from a file and does one step. Both are fresh
processes with one thread, in turns. `cold` is the first command ever: it encodes everything. Seconds
of the processor, beside those of the clock, tell how it is where other work is done at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
BATCH = 2
RANK = 16
DEADLINE_S = 600.0


class Took(NamedTuple):
    """Seconds of the clock, and of the processor."""

    wall_s: float
    cpu_s: float


def main() -> None:
    asked = _arguments()
    if asked.bare:
        _bare(asked.bare)
        return
    from benchmarks.mid_size_base import NAMES

    rows = [_measured(name, rounds=asked.rounds) for name in asked.model or NAMES]
    _show(rows)
    if asked.json:
        asked.json.write_text(json.dumps(rows, indent=1) + "\n")
    if asked.plot:
        from benchmarks.plots import bars

        times = {
            f"{row['model']}, to the end of the first step": {
                side: row[f"{side}_median_wall_s"] for side in ("bare", "ours")
            }
            for row in rows
        }
        asked.plot.write_text(bars(times, unit="s") + "\n")


def _measured(name: str, *, rounds: int) -> dict[str, Any]:
    """Start both sides `rounds` times, in turns, and compare their medians."""
    with tempfile.TemporaryDirectory(prefix="startup-") as place:
        folder = Path(place)
        _prepare(name, folder)
        cold = _ours(folder)
        _ours(folder)  # what is remembered about files is only written once they are old enough
        ours: list[Took] = []
        bare: list[Took] = []
        for turn in range(rounds):
            for side in (_ours, _bare_start) if turn % 2 else (_bare_start, _ours):
                (ours if side is _ours else bare).append(side(folder))
    row = {"model": name, "rounds": rounds, "cold_s": cold.wall_s}
    for kind in Took._fields:
        own, other = ([getattr(took, kind) for took in side] for side in (ours, bare))
        row |= {
            f"ours_{kind}": own,
            f"bare_{kind}": other,
            f"ours_median_{kind}": statistics.median(own),
            f"bare_median_{kind}": statistics.median(other),
            f"ratio_{kind}": statistics.median(own) / statistics.median(other),
        }
    return row


def _prepare(name: str, folder: Path) -> None:
    """Write the base, and the batch of the bare script, in a process of its own."""
    line = [sys.executable, "-c", _PREPARE, name, str(folder), str(BATCH)]
    subprocess.run(line, check=True, env=_environment())


_PREPARE = """
import sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from benchmarks.mid_size_base import write_mid_size
name, folder, batch = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
write_mid_size(name, folder / "base")
import json
config = json.loads((folder / "base" / "unet" / "config.json").read_text())
side, width = config["sample_size"], config["cross_attention_dim"]
tensors = {
    "latents": torch.randn(batch, 4, side, side), "noise": torch.randn(batch, 4, side, side),
    "timesteps": torch.tensor([500.0] * batch), "text": torch.randn(batch, 77, width),
}
if config.get("addition_embed_type"):
    pooled = config["projection_class_embeddings_input_dim"] - 6 * config["addition_time_embed_dim"]
    tensors |= {"pooled": torch.randn(batch, pooled), "time_ids": torch.rand(batch, 6)}
save_file(tensors, folder / "batch.safetensors")
"""


def _ours(folder: Path) -> Took:
    """Start the command, kill it after its first step, and return what it took to the end of that."""
    runs = folder / "runs"
    count = len(list(runs.iterdir())) if runs.is_dir() else 0
    settings: Mapping[str, Any] = {
        "hardware.device": "cpu",
        "hardware.threads": 1,
        "train.batch_size": BATCH,
        "adapter.rank": RANK,
        "data.resolution": 64,
        "data.max_aspect": 1.0,  # as in the bare script, the images of a batch have one shape
        "data.cache_dir": folder / "cache",
        "sampling.every_steps": 0,
        "train.validate_every_steps": 0,
        "output.name": f"run{count}",
    }
    line = [sys.executable, "-m", "lora_trainer", str(ROOT / "datasets" / "example")]
    line += ["--base", str(folder / "base"), "--output", str(runs), "--steps", "1000"]
    for key, value in settings.items():
        line += ["--set", f"{key}={value}"]
    began_s = time.time()
    with (folder / "ours.log").open("w") as log:
        process = subprocess.Popen(line, env=_environment(), stdout=log, stderr=log)
    try:
        ended_s = _first_step(runs / f"run{count}" / "events.jsonl", process)
    finally:
        used = _killed(process)
    if ended_s is None:
        raise SystemExit(f"no step was taken: {(folder / 'ours.log').read_text()}")
    return Took(ended_s - began_s, used)


def _first_step(events: Path, process: subprocess.Popen[Any]) -> float | None:
    """Return the Unix time of the first step's event; None if the process ends without one."""
    deadline_s = time.time() + DEADLINE_S
    while time.time() < deadline_s and process.poll() is None:
        lines = events.read_text().split("\n") if events.exists() else []
        for row in map(json.loads, lines[:-1]):  # the last is empty, or half written
            if row["event"] == "step":
                return float(row["time"])
        time.sleep(0.02)
    return None


def _killed(process: subprocess.Popen[Any]) -> float:
    """End a process and return the processor's seconds it took."""
    process.send_signal(signal.SIGKILL)
    _, _, usage = os.wait4(process.pid, 0)
    process.returncode = -signal.SIGKILL
    return usage.ru_utime + usage.ru_stime


def _bare_start(folder: Path) -> Took:
    """Start the bare script and return what it took to the end of its step."""
    line = [sys.executable, __file__, "--bare", str(folder)]
    began_s = time.time()
    done = subprocess.run(line, env=_environment(), check=True, capture_output=True, text=True)
    ended_s, used = map(float, done.stdout.splitlines()[-1].split())
    return Took(ended_s - began_s, used)


def _bare(folder: Path) -> None:
    """Do one step as anybody would write it first, and print the Unix time of its end."""
    import torch
    from diffusers import UNet2DConditionModel
    from peft import LoraConfig, inject_adapter_in_model
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    unet = UNet2DConditionModel.from_pretrained(folder / "base" / "unet")
    unet.requires_grad_(False)
    targets = r".*attentions.*\.(to_q|to_k|to_v|to_out\.0|proj_in|proj_out|net\.0\.proj|net\.2)"
    inject_adapter_in_model(LoraConfig(r=RANK, target_modules=targets), unet)
    trained = [parameter for parameter in unet.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, fused=True)
    batch = load_file(folder / "batch.safetensors")
    told = {}
    if "pooled" in batch:
        told = {"text_embeds": batch["pooled"], "time_ids": batch["time_ids"]}
    noisy = 0.7 * batch["latents"] + 0.7 * batch["noise"]
    predicted = unet(noisy, batch["timesteps"], batch["text"], added_cond_kwargs=told).sample
    loss = (predicted - batch["noise"]).square().mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(trained, 1.0)
    optimizer.step()
    print(time.time(), time.process_time())


def _environment() -> dict[str, str]:
    # An installation has the package's bytecode; with this variable, of containers, it is compiled each time.
    kept = {name: each for name, each in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def _show(rows: Sequence[Mapping[str, Any]]) -> None:
    print(
        "| model | cold s | warm s | bare s | warm / bare | of the processor: warm | bare | ratio |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        cells = [row["model"], f"{row['cold_s']:.2f}"]
        for kind in Took._fields:
            cells += [f"{row[f'{side}_median_{kind}']:.2f}" for side in ("ours", "bare")]
            cells += [f"{row[f'ratio_{kind}']:.3f}"]
        print(f"| {' | '.join(cells)} |")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", nargs="+", help="of the names in mid_size_base.py")
    parser.add_argument("--json", type=Path, help="where the measurements are written")
    parser.add_argument("--plot", type=Path, help="where to draw them, an .svg")
    parser.add_argument("--bare", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()

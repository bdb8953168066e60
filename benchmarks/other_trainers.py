"""A step of ours beside a step of other trainers: the same base, images, layers, rank, batch and optimizer.

Usage: python benchmarks/other_trainers.py --folder FOLDER --trainer NAME=CHECKOUT[,PYTHON] ... [--rounds 3]
           [--steps 5] [--side-px 128] [--batch 2] [--precision fp32] [--targets transformer] [--json FILE] [--tiny]

Each run is a whole process of the trainer's own command with the interpreter given for it, one thread, and takes
one step more than `--steps`; the first is not counted. A step is what the processor does from the end of one call of
torch's AdamW to the end of the next, told by a hook that `sitecustomize.py` registers in that process; after the
last one the process ends at once. Ours and theirs take turns. What a trainer computes again in each step although it
could be cached counts as its own: `CACHES` says what. The checkouts and their packages are to be there already;
nothing is downloaded. The base is random with the files of its release, 4.1 GB, and stays in FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

RANK, LEARNING_RATE, IMAGES = 16, 1e-4, 4
OURS = "ours"
CACHES: Mapping[str, str] = {
    OURS: "latents, texts",
    "sd-scripts": "latents",
    "OneTrainer": "latents, texts",
    "diffusers": "nothing",
}
"""What is computed once and not in each step."""
LIMIT_S = 1800.0

CLOCK = '''"""Write the processor's time at the end of each optimizer step, and end the process after the last."""

import os
import time

from torch.optim.optimizer import register_optimizer_step_post_hook

FILE, STEPS = os.environ["STEP_CLOCK_FILE"], int(os.environ["STEP_CLOCK_STEPS"])
taken = 0


def stepped(optimizer, *_):
    global taken
    taken += 1
    values = sum(each.numel() for group in optimizer.param_groups for each in group["params"])
    with open(FILE, "a") as file:
        file.write(f"{time.process_time()} {time.time()} {values}\\n")
    if taken == STEPS:
        os._exit(0)


register_optimizer_step_post_hook(stepped)
'''
"""sitecustomize.py of each trainer's process."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all trainers are asked for."""

    folder: Path
    steps: int
    side_px: int
    batch: int
    precision: str
    targets: str

    @property
    def base(self) -> Path:
        return self.folder / "base"

    @property
    def images(self) -> Path:
        """Folder with one folder of images and captions; sd-scripts reads the repeats in its name."""
        return self.folder / f"images-{self.side_px}"

    @property
    def subject(self) -> Path:
        return self.images / "1_subject"


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """A trainer's checkout, and the interpreter that has its packages."""

    name: str
    checkout: Path
    python: str

    @property
    def commit(self) -> str:
        """The commit of the checkout; empty where it is not a repository."""
        line = ["git", "-C", str(self.checkout), "rev-parse", "HEAD"]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
        return done.stdout.strip() if (self.checkout / ".git").exists() else ""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one process took: seconds of the processor and of the clock of each counted step."""

    cpu_s: Sequence[float]
    wall_s: Sequence[float]
    trained_values: int


def ours(work: Work, place: Path) -> list[str]:
    """Return the words after the interpreter."""
    settings: Mapping[str, Any] = {
        "hardware.device": "cpu",
        "hardware.threads": 1,
        "train.batch_size": work.batch,
        "memory.micro_batch": work.batch,
        "train.precision": work.precision,
        "memory.base_precision": work.precision,
        "memory.gradient_checkpointing": "none",
        "train.validate_every_steps": 0,
        "adapter.rank": RANK,
        "adapter.alpha": RANK,
        "adapter.targets": work.targets,
        "optimizer.learning_rate": LEARNING_RATE,
        "optimizer.schedule": "constant",
        "objective.weighting": "none",
        "data.resolution": work.side_px,
        "data.max_aspect": 1.0,
        "data.validation_fraction": 0,
        "data.cache_dir": work.folder / "cache",
        "sampling.every_steps": 0,
        "output.save_every_steps": 0,
    }
    line = ["-m", "lora_trainer", str(work.subject), "--base", str(work.base)]
    line += ["--output", str(place), "--steps", str(work.steps + 1)]
    return line + [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def sd_scripts(work: Work, place: Path) -> list[str]:
    """Return the words after the interpreter; its LoRA's layers are those of the transformer blocks."""
    tokenizers = work.folder / "tokenizers"
    own = tokenizers / "openai_clip-vit-large-patch14"  # where it looks before it asks the Hub
    if not own.is_dir():
        shutil.copytree(work.base / "tokenizer", own)
    options: Mapping[str, Any] = {
        "pretrained_model_name_or_path": work.base,
        "tokenizer_cache_dir": tokenizers,
        "train_data_dir": work.images,
        "output_dir": place,
        "network_module": "networks.lora",
        "network_dim": RANK,
        "network_alpha": RANK,
        "optimizer_type": "AdamW",
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "max_train_steps": work.steps + 1,
        "train_batch_size": work.batch,
        "resolution": f"{work.side_px},{work.side_px}",
        "mixed_precision": {"fp32": "no"}.get(work.precision, work.precision),
        "caption_extension": ".txt",
        "max_data_loader_n_workers": 0,
        "seed": 0,
    }
    switches = ["--network_train_unet_only", "--cache_latents", "--sdpa"]
    return ["train_network.py", *_words(options), *switches]


def onetrainer(work: Work, place: Path) -> list[str]:
    """Return the words after the interpreter; writes its settings."""
    dtype = {"fp32": "FLOAT_32", "bf16": "BFLOAT_16"}[work.precision]
    frozen = {"train": False, "weight_dtype": dtype}
    concept: dict[str, Any] = {"__version": 2, "name": "subject", "path": str(work.subject)}
    concept["text"] = {"prompt_source": "sample"}
    concept["image"] = {"enable_crop_jitter": False}
    optimizer: dict[str, Any] = {"optimizer": "ADAMW", "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
    optimizer |= {"weight_decay": 0.01, "fused": True, "stochastic_rounding": False}
    settings = {
        "__version": 11,  # of the settings' format; without it they are taken for old ones and converted
        "training_method": "LORA",
        "model_type": "STABLE_DIFFUSION_15",
        "base_model_name": str(work.base),
        "workspace_dir": str(place / "workspace"),
        "cache_dir": str(work.folder / f"onetrainer-cache-{work.side_px}"),
        "clear_cache_before_training": False,
        "tensorboard": False,
        "concepts": [concept],
        "aspect_ratio_bucketing": False,
        "learning_rate": LEARNING_RATE,
        "learning_rate_warmup_steps": 0,
        "epochs": 1 + (work.steps + 1) * work.batch // IMAGES,
        "batch_size": work.batch,
        "dataloader_threads": 1,
        "train_device": "cpu",
        "temp_device": "cpu",
        "train_dtype": dtype,
        "fallback_train_dtype": dtype,
        "resolution": str(work.side_px),
        "unet": {"train": True, "weight_dtype": dtype, "gradient_checkpointing": False},
        "text_encoder": {**frozen, "gradient_checkpointing": False},
        "vae": {"weight_dtype": "FLOAT_32"},
        "layer_filter_preset": "attn-mlp" if work.targets == "transformer" else "attn-only",
        "layer_filter": "attentions" if work.targets == "transformer" else "attn",
        "lora_rank": RANK,
        "lora_alpha": RANK,
        "optimizer": optimizer,
        "output_model_destination": str(place / "lora.safetensors"),
        "output_model_format": "SAFETENSORS",
        "samples": [],
        "sample_after_unit": "NEVER",
        "backup_after_unit": "NEVER",
    }
    file = place / "settings.json"
    file.write_text(json.dumps(settings, indent=1))
    return ["scripts/train.py", "--config-path", str(file)]


def diffusers_script(work: Work, place: Path) -> list[str]:
    """Return the words after the interpreter; its layers are those of attention, and it caches nothing."""
    rows = [
        {"file_name": file.name, "text": file.with_suffix(".txt").read_text()}
        for file in sorted(work.subject.glob("*.png"))
    ]
    listed = place / "images"
    shutil.copytree(work.subject, listed, ignore=shutil.ignore_patterns("*.txt"))
    (listed / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    options: Mapping[str, Any] = {
        "pretrained_model_name_or_path": work.base,
        "train_data_dir": listed,
        "caption_column": "text",
        "cache_dir": place / "datasets",
        "output_dir": place / "out",
        "resolution": work.side_px,
        "train_batch_size": work.batch,
        "max_train_steps": work.steps + 1,
        "rank": RANK,
        "learning_rate": LEARNING_RATE,
        "lr_scheduler": "constant",
        "lr_warmup_steps": 0,
        "dataloader_num_workers": 0,
        "mixed_precision": {"fp32": "no"}.get(work.precision, work.precision),
        "seed": 0,
    }
    return ["examples/text_to_image/train_text_to_image_lora.py", *_words(options)]


COMMANDS: Mapping[str, Callable[[Work, Path], list[str]]] = {
    OURS: ours,
    "sd-scripts": sd_scripts,
    "OneTrainer": onetrainer,
    "diffusers": diffusers_script,
}


def main() -> None:
    asked = _arguments()
    work = Work(
        folder=asked.folder.resolve(),
        steps=asked.steps,
        side_px=asked.side_px,
        batch=asked.batch,
        precision=asked.precision,
        targets=asked.targets,
    )
    prepare(work, tiny=asked.tiny)
    own = Trainer(name=OURS, checkout=ROOT, python=asked.python)
    trainers = [own, *asked.trainer]
    runs: dict[str, list[Run]] = {each.name: [] for each in trainers}
    for turn in range(asked.rounds):
        for trainer in trainers if turn % 2 == 0 else reversed(trainers):
            run = measured(trainer, work)
            runs[trainer.name].append(run)
            print(trainer.name, " ".join(f"{s:.2f}" for s in run.cpu_s), flush=True)
    rows = [row(trainer, runs) for trainer in trainers]
    print(table(rows))
    if asked.json:
        facts = {"processor": platform.processor(), "work": {**vars(work), "folder": None}}
        asked.json.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")


def prepare(work: Work, *, tiny: bool) -> None:
    """Write base and images where they are not there yet."""
    from benchmarks import released_bases

    whole = work.folder / "base-is-whole"
    if not whole.is_file():
        base = released_bases.BASES["sd15"]
        released_bases.write_folder(released_bases.tiny(base) if tiny else base, work.base)
        whole.touch()
    work.subject.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for number in range(IMAGES):
        pixels = rng.integers(0, 256, (work.side_px, work.side_px, 3), np.uint8)
        file = work.subject / f"{number}.png"
        Image.fromarray(pixels).save(file)
        file.with_suffix(".txt").write_text(f"a photo of subject number {number}")


def measured(trainer: Trainer, work: Work) -> Run:
    """Run the trainer once; ends the program where it takes fewer steps than it was asked for."""
    place = work.folder / "runs" / trainer.name
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    (place / "clock").mkdir()
    (place / "clock" / "sitecustomize.py").write_text(CLOCK)
    times, log = place / "times", place / "log"
    paths = [place / "clock", ROOT] if trainer.name == OURS else [place / "clock"]
    told = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "STEP_CLOCK_FILE": str(times),
        "STEP_CLOCK_STEPS": str(work.steps + 1),
    }
    line = [trainer.python, *COMMANDS[trainer.name](work, place)]
    with log.open("w") as out:
        subprocess.run(
            line,
            env={**os.environ, **told},
            cwd=trainer.checkout,
            stdout=out,
            stderr=subprocess.STDOUT,
            timeout=LIMIT_S,
            check=False,
        )
    if not times.is_file() or len(times.read_text().splitlines()) != work.steps + 1:
        sys.exit(f"{trainer.name} took fewer steps than asked; the end of {log}:\n{_end(log)}")
    return read_times(times)


def read_times(file: Path) -> Run:
    """Read what the hook wrote: of each step the processor's time, the clock's, and the values trained."""
    rows = [line.split() for line in file.read_text().splitlines()]
    cpu, wall = (np.diff([float(each[column]) for each in rows]).tolist() for column in (0, 1))
    return Run(cpu_s=cpu, wall_s=wall, trained_values=int(rows[0][2]))


def row(trainer: Trainer, runs: Mapping[str, Sequence[Run]]) -> dict[str, Any]:
    """Sum up a trainer's runs: medians of their steps, and their ratio to ours of the same round."""
    own, theirs = (
        [statistics.median(run.cpu_s) for run in runs[name]] for name in (OURS, trainer.name)
    )
    ratios = [other / mine for mine, other in zip(own, theirs, strict=True)]
    return {
        "trainer": trainer.name,
        "commit": trainer.commit,
        "cpu_s": statistics.median(theirs),
        "rounds_cpu_s": theirs,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "trained_values": runs[trainer.name][0].trained_values,
        "caches": CACHES[trainer.name],
        "steps_cpu_s": [list(run.cpu_s) for run in runs[trainer.name]],
        "steps_wall_s": [list(run.wall_s) for run in runs[trainer.name]],
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows as a table in Markdown."""
    lines = [
        "| trainer | commit | s of the processor | of ours | rounds | values trained | caches |",
        "|---|---|---|---|---|---|---|",
    ]
    for each in rows:
        spread = f"{min(each['ratios']):.3f} to {max(each['ratios']):.3f}"
        cells = [
            each["trainer"],
            each["commit"][:8],
            f"{each['cpu_s']:.2f}",
            f"{each['ratio']:.3f}",
        ]
        cells += [spread, f"{each['trained_values']:,}", each["caches"]]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _words(options: Mapping[str, Any]) -> list[str]:
    return [f"--{name}={value}" for name, value in options.items()]


def _end(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-25:])


def _trainer(text: str) -> Trainer:
    name, _, where = text.partition("=")
    checkout, _, python = where.partition(",")
    if name not in COMMANDS or name == OURS or not Path(checkout).is_dir():
        known = ", ".join(each for each in COMMANDS if each != OURS)
        raise argparse.ArgumentTypeError(f"{text}: NAME=CHECKOUT[,PYTHON], NAME one of {known}")
    return Trainer(name=name, checkout=Path(checkout).resolve(), python=python or sys.executable)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--folder", type=Path, required=True, help="base, images, caches and runs")
    parser.add_argument("--trainer", type=_trainer, action="append", default=[])
    parser.add_argument("--python", default=sys.executable, help="the interpreter of our side")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--side-px", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--targets", choices=["attention", "transformer"], default="transformer")
    parser.add_argument("--json", type=Path)
    parser.add_argument(
        "--tiny", action="store_true", help="with tiny networks: a try of the script"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()

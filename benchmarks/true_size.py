"""Whole trainings at true sizes on this processor: SD1.5 at 512 px, SDXL at 1024 px, as folder and single file.

Usage: python benchmarks/true_size.py --results FOLDER [--only NAME ...] [--short] [--keep-bases] [--tiny]

Each case makes a random base with the files, names and configurations of its release, then runs the command
`lora-train` three times with a fresh install's defaults, but for what the size forces (bf16, three steps, four
images, one prompt): whole; killed with SIGKILL in the third step; resumed. It compares both results bit by
bit, and the predicted memory of the machine with what the kernel measured, phase by phase. A case that was
interrupted goes on with the part that is missing; FOLDER/true_size.json and a table are written after each.
`--short` leaves the whole run out: four steps in place of seven, memory measured over the run that is killed
and resumed, no bits compared. Needs 14 GB (SD1.5) or 32 GB (SDXL) of disk, and 24 GB of memory. `--tiny` tries the
script with tiny networks.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from PIL import Image
from safetensors.numpy import load_file

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.host_watch import HostWatch  # noqa: E402 - after sys.path
from benchmarks.released_bases import (  # noqa: E402 - after sys.path
    BASES,
    remove_base,
    tiny,
    write_file,
    write_folder,
)
from lora_trainer.common.events import read_jsonl  # noqa: E402 - after sys.path
from lora_trainer.common.files import read_json_object  # noqa: E402 - after sys.path
from lora_trainer.reporting.run_record import RUN_FILE, read  # noqa: E402 - after sys.path

GIB = 1 << 30
STEPS, SAVED_STEP = 3, 2
SIZES_PX = ((1280, 1280), (1536, 1024), (1024, 1536), (1280, 1280))
BOUND = 0.1
PREDICTED_BY = {
    "caching images": "images",
    "caching texts": "texts",
    "loading": "loading",
    "training": "training",
    "sampling": "sampling",
}
"""Measured phase -> the plan's."""
TEXT_MESSAGES = ("loading the text encoders", "captions")
EXIT_CODES = {"whole": 0, "killed": -signal.SIGKILL, "resumed": 0}
PASSES: Mapping[str, Mapping[str, float]] = {
    "sd15": {"data.validation_fraction": 0.25, "sampling.steps": 2},
    "sdxl": {"data.validation_fraction": 0, "sampling.steps": 1},
}
"""How often the denoiser runs beside the steps: a validation of SDXL is 8 passes of most of a minute."""
STATE_FILES = ("adapter.safetensors", "optim.safetensors", "optim.json", "state.json")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One base in one layout."""

    base: str
    as_file: bool

    @property
    def name(self) -> str:
        return f"{self.base}-{'file' if self.as_file else 'folder'}"


CASES = {
    case.name: case
    for case in (Case(base=base, as_file=as_file) for base in BASES for as_file in (False, True))
}


def main() -> None:
    options = _options()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    results: Path = options.results.resolve()
    results.mkdir(parents=True, exist_ok=True)
    dataset = _dataset(results / "pictures")
    for name in options.only or CASES:
        work = _Work(
            case=CASES[name],
            folder=results / name,
            tiny=options.tiny,
            short=options.short,
            dataset=dataset,
        )
        work.do()
        if not options.keep_bases:
            remove_base(work.base_folder)
            work.base_file.unlink(missing_ok=True)
        _write_results(results)
    print(_write_results(results))
    reports = [read_json_object(results / f"{name}.json") for name in options.only or CASES]
    sys.exit(0 if all(report["problems"] == [] for report in reports) else 1)


def _write_results(results: Path) -> str:
    """Sum up all cases that are done, in true_size.json and as the table that is returned."""
    reports = [
        read_json_object(file) for name in CASES if (file := results / f"{name}.json").is_file()
    ]
    (results / "true_size.json").write_text(json.dumps(reports, indent=1) + "\n")
    return table(reports)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The parts of one case; what is done is in FOLDER.json."""

    case: Case
    folder: Path
    dataset: Path
    tiny: bool
    short: bool

    @property
    def base_folder(self) -> Path:
        return self.folder / "base"

    @property
    def base_file(self) -> Path:
        return self.folder / "base.safetensors"

    @property
    def runs(self) -> Path:
        return self.folder / "runs"

    @property
    def record(self) -> Path:
        return self.folder.with_suffix(".json")

    def do(self) -> None:
        """Do what is not done yet, in the order of a person: train; train, lose the machine, go on."""
        self.folder.mkdir(parents=True, exist_ok=True)
        parts = {"killed": self._killed, "resumed": self._resumed}
        if not self.short:
            parts = {"whole": self._whole, **parts}
        for part, how in parts.items():
            done = self._done()
            if done["parts"].get(part, {}).get("exit_code") == EXIT_CODES[part]:
                continue
            self._make_base()
            done["parts"][part] = how()
            self._write(done)
            if done["parts"][part]["exit_code"] != EXIT_CODES[part]:
                break
        done = self._done()
        done["phases"] = self._phases(done)
        done["problems"] = self._problems(done)
        self._write(done)

    def _done(self) -> dict[str, Any]:
        if self.record.is_file():
            return dict(read_json_object(self.record))
        return {"case": self.case.name, "parts": {}, **_machine()}

    def _write(self, done: Mapping[str, Any]) -> None:
        self.record.write_text(json.dumps(done, indent=1) + "\n")

    def _make_base(self) -> None:
        """Write the base in a process of its own, so that this one stays small."""
        whole = self.base_folder / "whole"
        if whole.is_file():
            return
        remove_base(self.base_folder)
        maker = multiprocessing.get_context("spawn").Process(target=_write_base, args=(self,))
        maker.start()
        maker.join()
        if maker.exitcode:
            sys.exit(f"the base of {self.case.name} could not be written")
        whole.touch()

    # ---- the three runs

    def _whole(self) -> dict[str, Any]:
        for made in (self.runs, self.folder / "cache"):  # by an attempt that failed
            shutil.rmtree(made, ignore_errors=True)
        return self._run("whole", "whole")

    def _killed(self) -> dict[str, Any]:
        shutil.rmtree(self.runs / "broken", ignore_errors=True)
        state = self.runs / "broken" / "states" / f"step-{SAVED_STEP:08d}"
        return self._run("broken", "killed", kill_when=state.is_dir)

    def _resumed(self) -> dict[str, Any]:
        return self._run("broken", "resumed", "--resume")

    def _run(
        self, name: str, part: str, *more: str, kill_when: Callable[[], bool] | None = None
    ) -> dict[str, Any]:
        """Run `lora-train` and return its exit code, time and memory; its words go to a log file."""
        run, began_s = self.runs / name, time.monotonic()
        (run / "status.json").unlink(missing_ok=True)
        with (self.folder / f"{part}.log").open("w") as log:
            process = subprocess.Popen(
                [*self._command(name), *more], stdout=log, stderr=subprocess.STDOUT, cwd=self.folder
            )
            with HostWatch(
                process=psutil.Process(process.pid), run_folder=run, phase_of=_phase
            ) as watch:
                try:
                    while kill_when is not None and process.poll() is None and not kill_when():
                        time.sleep(0.05)
                    if kill_when is not None:
                        process.kill()
                    code = process.wait()
                finally:  # a training must not go on in a folder that the next attempt clears
                    process.kill()
        return {
            "exit_code": code,
            "seconds": time.monotonic() - began_s,
            "peaks": watch.as_json(),
            "command": " ".join(self._command(name)[1:]),
        }

    def _command(self, name: str) -> list[str]:
        settings = {
            "train.precision": "bf16",
            "train.validate_every_steps": STEPS,
            "output.save_every_steps": SAVED_STEP,
            "data.cache_dir": str(self.folder / "cache"),
            "sampling.every_steps": STEPS,
            "sampling.prompts_from_captions": 1,
            "hardware.device": "cpu",
            **PASSES[self.case.base],
        }
        base = self.base_folder
        if self.case.as_file:
            base, settings["base.companion"] = self.base_file, str(self.base_folder)
        command = [str(Path(sys.executable).with_name("lora-train")), str(self.dataset)]
        command += ["--base", str(base), "--steps", str(STEPS), "--output", str(self.runs)]
        command += ["--name", name]
        for key, value in settings.items():
            command += ["--set", f"{key}={value}"]
        return command

    # ---- what they came to

    def _phases(self, done: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return for each phase of the whole run, or of the killed and resumed one, the two sizes."""
        names = ("killed", "resumed") if self.short else ("whole",)
        run = self.runs / ("broken" if self.short else "whole")
        if not (run / RUN_FILE).is_file() or not all(name in done["parts"] for name in names):
            return []
        predicted = read(run).plan.memory.phases
        rows: list[dict[str, Any]] = []
        for name, peak in _highest([done["parts"][name]["peaks"] for name in names]).items():
            size = predicted.get(PREDICTED_BY.get(name, ""))
            measured = peak["resident_bytes"]
            rows.append(
                {
                    "phase": name,
                    "seconds": peak["seconds"],
                    "predicted_bytes": size,
                    "measured_bytes": measured,
                    "without_files_bytes": peak["own_bytes"],
                    "deviation": None if size is None else size / measured - 1,
                }
            )
        rows.append(
            {
                "phase": "peak of all",
                "seconds": sum(done["parts"][name]["seconds"] for name in names),
                "predicted_bytes": max(predicted.values()),
                "measured_bytes": max(row["measured_bytes"] for row in rows),
                "without_files_bytes": max(row["without_files_bytes"] for row in rows),
            }
        )
        rows[-1]["deviation"] = rows[-1]["predicted_bytes"] / rows[-1]["measured_bytes"] - 1
        return rows

    def _differences(self) -> list[str]:
        """Return what of the resumed run is not, bit by bit, what the whole one has."""
        whole, broken = self.runs / "whole", self.runs / "broken"
        state = Path("states") / f"step-{STEPS:08d}"
        files = [state / name for name in STATE_FILES]
        files += [file.relative_to(whole) for file in sorted((whole / "samples").rglob("*.png"))]
        unequal = [
            str(file) for file in files if not _same(whole / file, broken / file, Path.read_bytes)
        ]
        if not _same(whole / "whole.safetensors", broken / "broken.safetensors", _tensors):
            unequal.append("the exported file's tensors")
        if not _same(whole, broken, _losses):
            unequal.append("the losses of steps and validations")
        return unequal

    def _problems(self, done: Mapping[str, Any]) -> list[str]:
        for part, result in done["parts"].items():
            if result["exit_code"] != EXIT_CODES[part]:
                said = (self.folder / f"{part}.log").read_text().strip().splitlines()
                return [f"{part} ended with {result['exit_code']}: {said[-1] if said else ''}"]
        problems = [
            f"after the resume: {difference}"
            for difference in (() if self.short else self._differences())
        ]
        resumed = [row for row in _events(self.runs / "broken") if row["event"] == "resumed"]
        if [(row["step"], row["exactness"]) for row in resumed] != [(SAVED_STEP, "EXACT")]:
            problems.append(f"resumed as {resumed}")
        peak = done["phases"][-1]
        if not self.tiny and abs(peak["deviation"]) > BOUND:
            problems.append(f"the predicted peak is {peak['deviation']:+.1%} off")
        return problems


def _write_base(work: _Work) -> None:
    base = BASES[work.case.base]
    if work.tiny:
        base = tiny(base)
    if work.case.as_file:
        write_file(base, work.base_folder, work.base_file)
    else:
        write_folder(base, work.base_folder)


def _phase(status: Mapping[str, Any]) -> str:
    """Name the phase that status.json is in."""
    phase = str(status["phase"])
    if phase == "cache":
        return f"caching {'texts' if status['message'] in TEXT_MESSAGES else 'images'}"
    names = {"load": "loading", "train": "training", "sample": "sampling", "export": "exporting"}
    return names.get(phase, phase or "start")


def _highest(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return each phase's highest sizes over several runs, and the sum of its seconds."""
    highest: dict[str, dict[str, float]] = {}
    for name, peak in ((name, peak) for run in runs for name, peak in run.items()):
        before = highest.get(name, dict.fromkeys(peak, 0.0))
        highest[name] = {
            key: value + before[key] if key == "seconds" else max(value, before[key])
            for key, value in peak.items()
        }
    return highest


def _same(one: Path, other: Path, read: Callable[[Path], Any]) -> bool:
    try:
        return bool(read(one) == read(other))
    except FileNotFoundError:
        return False


def _tensors(file: Path) -> dict[str, tuple[Any, bytes]]:
    return {name: (value.shape, value.tobytes()) for name, value in load_file(file).items()}


def _events(run: Path) -> list[dict[str, Any]]:
    return read_jsonl(run / "events.jsonl")


def _losses(run: Path) -> list[tuple[Any, ...]]:
    rows = [row for row in _events(run) if row["event"] in ("step", "validation")]
    return [(row["event"], row["step"], row["loss"], row.get("grad_norm")) for row in rows]


def _dataset(folder: Path) -> Path:
    """Write four images that fill the largest bucket, with captions, made from the example's."""
    if folder.is_dir():
        return folder
    folder.mkdir(parents=True)
    names = sorted(path.stem for path in (ROOT / "datasets" / "example").glob("*.txt"))
    for number, (name, size) in enumerate(zip(names, SIZES_PX, strict=False)):
        (example,) = (path for path in (ROOT / "datasets" / "example").glob(f"{name}.*[gp]"))
        Image.open(example).convert("RGB").resize(size).save(folder / f"{number}.jpg", quality=95)
        text = (ROOT / "datasets" / "example" / f"{name}.txt").read_text(encoding="utf-8")
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    return folder


def _machine() -> dict[str, Any]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "commit": commit.stdout.strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
    }


def table(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return all phases of all cases as Markdown, sizes in GiB."""
    lines = [
        "| case | phase | predicted | measured | without mapped files | deviation | seconds |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for report in reports:
        for row in report.get("phases", ()):
            guess, off = row["predicted_bytes"], row["deviation"]
            cells = [
                report["case"],
                row["phase"],
                "" if guess is None else f"{guess / GIB:.2f}",
                f"{row['measured_bytes'] / GIB:.2f}",
                f"{row['without_files_bytes'] / GIB:.2f}",
                "" if off is None else f"{off:+.1%}",
                f"{row['seconds']:.0f}",
            ]
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for report in reports:
        said = "; ".join(report.get("problems", ["not done yet"])) or (
            f"killed after step {SAVED_STEP} and resumed"
            + (": the same bits" if "whole" in report["parts"] else "; no bits compared")
        )
        lines.append(f"{report['case']}: {said}")
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--results", type=Path, required=True, help="folder for bases, runs, figures"
    )
    parser.add_argument("--only", nargs="+", choices=CASES, help="cases [default: all]")
    parser.add_argument(
        "--keep-bases", action="store_true", help="do not remove bases that are done"
    )
    parser.add_argument("--short", action="store_true", help="only the run that is killed, resumed")
    parser.add_argument("--tiny", action="store_true", help="tiny networks: tries the script")
    return parser.parse_args()


if __name__ == "__main__":
    main()

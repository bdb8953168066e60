"""Take a training's terminal away at ten moments: is anything lost, and is status.json true?

Usage: python scripts/reliability/terminal.py [MOMENT or WAY ...] [--command lora-train] [--json FILE]

Each of the ten moments (importing torch, planning, caching, the first step, mid-run, inside a save, samples, export,
report, the last lines) is met in three ways: `pty`, a terminal that is closed; `pipe`, a reader that ends, as
`| head` does; `disk`, a log on a disk that is full from then on (a small tmpfs, so this way needs root). The
training is the real command on the embedded base, which waits at the moment (moments/sitecustomize.py) until the
deed is done.

A closed terminal sends SIGHUP, which is a stop: the last whole step must be saved, and exit code and status must say
so; before the run folder exists nothing can be lost. A pipe or a full log must end nothing: exit code 0, and the LoRA
is there.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HOOK = Path(__file__).resolve().parent / "moments"
MOMENTS = (
    *("import", "planning", "caching", "first step", "mid-run"),
    *("inside a save", "samples", "export", "report", "end"),
)
WAYS = ("pty", "pipe", "disk")
PICTURES = ("01", "04", "07", "11")
SETTINGS = (
    'sampling.every_steps=8', 'sampling.prompts=["a toy"]', "sampling.steps=2", "train.batch_size=1",
    "output.save_every_steps=4", "data.resolution=64", "train.validate_every_steps=0", "hardware.threads=1",
    'logging.trackers=["tensorboard"]',
)  # fmt: skip
REACHED_WITHIN_S, POLL_S, LOG_DISK = 240.0, 0.02, "64k"
STOPPED = 128 + signal.SIGTERM  # as whatever asks a run to end


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How one training ended: `wrong` says what is lost or untrue, and is empty if all is well."""

    moment: str
    way: str
    exit_code: int
    state: str | None
    step: int | None
    wrong: str


@dataclass(kw_only=True)
class Terminal:
    """A training and what it writes to: `take_away` closes that, `wait` returns the exit code."""

    wait: Callable[[], int]
    take_away: Callable[[], None]
    errors: Path | None = None


def read_until(descriptor: int, enough: threading.Event) -> None:
    """Read what is written to a terminal or pipe, as somebody who looks at it."""
    os.set_blocking(descriptor, False)
    while not enough.is_set():
        try:
            if not os.read(descriptor, 1 << 16):
                return
        except BlockingIOError:
            time.sleep(POLL_S)
        except OSError:
            return


def read_by_a_thread(descriptor: int) -> Callable[[], None]:
    """Read from now on; return what ends that and closes the descriptor."""
    enough = threading.Event()
    thread = threading.Thread(target=read_until, args=(descriptor, enough), daemon=True)
    thread.start()

    def close() -> None:
        enough.set()
        thread.join()
        os.close(descriptor)

    return close


def on_a_pty(command: Sequence[str], work: Path, environment: dict[str, str]) -> Terminal:
    """Start a command on a terminal of its own."""
    pid, descriptor = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # where this script itself runs under nohup
        os.chdir(work)
        os.execvpe(command[0], list(command), environment)  # noqa: S606 - no shell is wanted
    return Terminal(
        wait=lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]),
        take_away=read_by_a_thread(descriptor),
    )


def on_a_pipe(
    command: Sequence[str], work: Path, environment: dict[str, str], errors: Path
) -> Terminal:
    """Start a command whose output is read by a pipe; its errors go to a file."""
    reader, writer = os.pipe()
    with errors.open("wb") as file:
        process = subprocess.Popen(command, stdout=writer, stderr=file, cwd=work, env=environment)
    os.close(writer)
    return Terminal(wait=process.wait, take_away=read_by_a_thread(reader), errors=errors)


def on_a_disk(
    command: Sequence[str], work: Path, environment: dict[str, str], disk: Path
) -> Terminal:
    """Start a command whose output goes to a log on a small disk."""
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={LOG_DISK}", "tmpfs", str(disk)]
    subprocess.run(mount, check=True)
    with (disk / "log").open("wb") as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=work, env=environment
        )

    def fill() -> None:
        with suppress(OSError), (disk / "fill").open("wb", buffering=0) as file:
            while file.write(bytes(1024)):
                pass

    def wait() -> int:
        code = process.wait()
        subprocess.run(["umount", str(disk)], check=True)
        return code

    return Terminal(wait=wait, take_away=fill)


def attempt(moment: str, way: str, *, work: Path, lora_train: str) -> Outcome:
    """Train once, take the terminal away at the moment, and judge what is left."""
    name = f"{moment.replace(' ', '_')}-{way}"
    mark = work / f"{name}.reached"
    settings = [part for setting in SETTINGS for part in ("--set", setting)]
    command = [lora_train, "data", "--base", "embedded", "--steps", "10", "--output", "runs", "--name", name,
               *settings, "--set", f"data.cache_dir=cache-{name}"]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HOOK), os.environ.get("PYTHONPATH", "")]).strip(
            os.pathsep
        ),
        "MOMENT": moment,
        "MOMENT_FILE": str(mark),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if way == "pty":
        terminal = on_a_pty(command, work, environment)
    elif way == "pipe":
        terminal = on_a_pipe(command, work, environment, work / f"{name}.errors")
    else:
        terminal = on_a_disk(command, work, environment, work / f"{name}.disk")
    end_s = time.monotonic() + REACHED_WITHIN_S
    while not mark.exists() and time.monotonic() < end_s:
        time.sleep(POLL_S)
    was_reached = mark.exists()
    terminal.take_away()
    Path(f"{mark}.go").touch()
    code = terminal.wait()
    status = status_of(work / "runs" / name)
    wrong = "" if was_reached else "the moment was never reached"
    if terminal.errors is not None and "Traceback" in terminal.errors.read_text(errors="replace"):
        wrong = "a traceback on the terminal"
    return Outcome(
        moment=moment,
        way=way,
        exit_code=code,
        state=status and status["state"],
        step=status and status["step"],
        wrong=wrong or lost(work / "runs" / name, status, moment=moment, way=way, code=code),
    )


def status_of(run: Path) -> dict[str, Any] | None:
    """Return what status.json says, None without one."""
    try:
        status: dict[str, Any] = json.loads((run / "status.json").read_bytes())
    except (OSError, ValueError):
        return None
    return status


def lost(run: Path, status: dict[str, Any] | None, *, moment: str, way: str, code: int) -> str:
    """Say what a training has lost or told wrongly, "" for nothing."""
    is_stop = way == "pty"
    if status is None:
        before_the_run = is_stop and moment in ("import", "planning")
        expected = (-signal.SIGHUP, 128 + signal.SIGHUP, STOPPED)
        return "" if before_the_run and code in expected else "status.json is missing"
    if status["exit_code"] != code:
        return f"status.json names the exit code {status['exit_code']}"
    if status["state"] == "finished":
        file = run / f"{run.name}.safetensors"
        return "" if code == 0 and file.is_file() else "finished without its LoRA"
    if not is_stop or status["state"] != "stopped" or code != STOPPED:
        return "the training did not go on"
    states = sorted(path.name for path in (run / "states").glob("step-*"))
    last = f"step-{status['step']:08d}"
    if status["step"] == 0:
        return "" if moment == "caching" else "no step was saved"
    return "" if states[-1:] == [last] else f"{last} is not saved"


def main() -> None:
    """Try all moments in all ways, or those that are named; exit code 1 if anything was lost."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("only", nargs="*", choices=[*MOMENTS, *WAYS, []], help="all without any")
    parser.add_argument("--command", default=str(Path(sys.executable).with_name("lora-train")))
    parser.add_argument("--json", type=Path, help="also written there")
    options = parser.parse_args()
    moments = [each for each in MOMENTS if each in options.only] or list(MOMENTS)
    ways = [each for each in WAYS if each in options.only] or list(WAYS)
    outcomes = list[Outcome]()
    work = Path(tempfile.mkdtemp(prefix="terminal-"))
    try:
        (work / "data").mkdir()
        for number in PICTURES:
            for file in (ROOT / "datasets" / "example").glob(f"*_{number}.*"):
                shutil.copy(file, work / "data")
        for moment in moments:
            for way in ways:
                outcome = attempt(moment, way, work=work, lora_train=options.command)
                outcomes.append(outcome)
                status = f"exit code {outcome.exit_code}, {outcome.state} at step {outcome.step}"
                print(f"{moment:14} {way:5} {outcome.wrong or 'ok'}: {status}", flush=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    good = sum(not outcome.wrong for outcome in outcomes)
    print(f"{good} of {len(outcomes)}: nothing lost, status true")
    if options.json is not None:
        found = {"tried": len(outcomes), "held": good, "outcomes": [*map(asdict, outcomes)]}
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    raise SystemExit(0 if good == len(outcomes) else 1)


if __name__ == "__main__":
    main()

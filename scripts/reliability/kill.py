"""Random `kill -9` of whole trainings, each resumed and compared bit for bit with an uninterrupted one.

Usage: python scripts/reliability/kill.py --kills 500 [--processes 1] [--seed 0] [--work DIR] [--json FILE]

One process loads everything that is slow to import and forks for every start, so that a start costs
a fraction of a second. A chain is one run, killed one to three times and then left to finish; a kill
comes at a random time from the start on (one in five), at a random moment after a random step, or
at one after a state began to be written. A kill counts as inside a save when it left a state
half-written, half-removed or not yet logged. With several --processes one of them, drawn at random,
is killed; the others have to end by themselves, soon and not with success. With --work, chains are
recorded there and an interrupted campaign goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from lora_trainer.common.events import read_jsonl  # noqa: E402 - after sys.path
from lora_trainer.common.processes import made_to_stay  # noqa: E402 - after sys.path
from tests.fakes.runs import MEASURES, Toy, last_state, toy  # noqa: E402 - after sys.path

STEPS = 10
# Packages of extras: the 8-bit optimizer of a scenario, and the log that every start loads once.
NEEDED = ("bitsandbytes", "tensorboard")
TIMEOUT_S = 300.0
POLL_S = 0.002
SCENARIOS: Mapping[str, Mapping[str, Any]] = {
    "adamw": {"optimizer__name": "adamw", "output__save_every_steps": 1},
    "8 bit, batches": {
        "optimizer__name": "adamw8bit",
        "train__batch_size": 3,
        "memory__micro_batch": 2,
        "output__save_every_steps": 2,
        "data__caption_dropout": 0.3,
    },
    "guards, flips": {
        "train__validate_every_steps": 2,
        "data__flip": True,
        "data__shuffle_tags": True,
        "data__tag_dropout": 0.2,
        "data__wildcards": True,
        "data__emphasis": True,
        "data__caption_suffix": ", {old|new} (toy:1.3)",
        "data__caption_dropout_every_epochs": 2,
        "data__folders": {".": {"weight": 1.5, "trigger": "zibbo"}},
        "output__save_every_steps": 1,
        "output__keep_states": 3,
    },
}
QUIET: Mapping[str, Any] = {
    "logging__trackers": [],
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
    "hardware__process_timeout_s": 10,
}


@dataclass(frozen=True, kw_only=True)
class Kill:
    """One kill: the newest state it left, the last step logged, and whether it hit a save."""

    left: int
    reached: int
    inside_save: bool
    while_caching: bool
    rank: int = 0
    left_s: float = 0.0
    """What the other processes took to end."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """One run, its kills, and in what it differs from the uninterrupted one (nothing, if all is well)."""

    scenario: str
    kills: tuple[Kill, ...]
    differences: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a campaign of kills showed."""

    kills: int
    inside_save: int
    while_caching: int
    chains: int
    differing_chains: int
    most_steps_lost: int
    most_steps_lost_by_scenario: Mapping[str, int]
    most_seconds_left: float
    processes: int
    seed: int
    seconds: float


# ---- starting and killing


def start(arguments: Sequence[str], log: Path, *, processes: int = 1) -> list[int]:
    """Fork a training; return its pids. The parent never computes, so that forking stays safe."""
    port = free_port()
    return [_started(arguments, log, rank, processes, port) for rank in range(processes)]


def free_port() -> int:
    """Return a port of this machine that nobody uses now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _started(arguments: Sequence[str], log: Path, rank: int, count: int, port: int) -> int:
    child = os.fork()
    if child:
        return child
    if count > 1:  # what a launcher tells
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(count)),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
    os.dup2(output, 1)
    os.dup2(output, 2)
    from lora_trainer.cli import main

    code = 1
    try:
        code = main.run(list(arguments))
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(children: Sequence[int]) -> list[int]:
    """Return the exit codes of children; if one hangs all are killed, and it is a TimeoutError."""
    deadline_s, codes = time.monotonic() + TIMEOUT_S, dict[int, int]()
    while time.monotonic() < deadline_s:
        for child in set(children) - codes.keys():
            if (code := ended(child)) is not None:
                codes[child] = code
        if len(codes) == len(children):
            return [codes[child] for child in children]
        time.sleep(POLL_S)
    for child in set(children) - codes.keys():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    raise TimeoutError(f"a training hung for {TIMEOUT_S:g} s")


def ended(child: int) -> int | None:
    """Return the exit code of a child, None while it runs."""
    pid, status = os.waitpid(child, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def kill_somewhere(child: int, run: Path, draw: random.Random, *, from_start: bool = True) -> bool:
    """Kill a child at a random moment; return False when it had ended before.

    Not `from_start`: not before there is a run. The others would wait for the first of several
    processes as long as they do for a machine that is still starting.
    """
    aim, moment_s = draw.random(), time.monotonic() + draw.uniform(0.0, 2.0)
    step = draw.randint(logged(run), STEPS)
    while not from_start and not (run / "run.json").is_file():
        if ended(child) is not None:
            return False
        time.sleep(POLL_S)

    def reached() -> bool:
        if aim < 0.2:
            return time.monotonic() >= moment_s
        return logged(run) >= step and (aim < 0.5 or is_saving(run))

    while not reached():
        if ended(child) is not None:
            return False
        time.sleep(POLL_S)
    time.sleep(draw.uniform(0.0, 0.08 if aim < 0.5 else 0.03))
    if ended(child) is not None:
        return False
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return True


# ---- looking at what is left


def logged(run: Path) -> int:
    """Return the last step that was logged."""
    rows = read_jsonl(run / "events.jsonl")
    return max((row["step"] for row in rows if row["event"] == "step"), default=0)


def is_saving(run: Path) -> bool:
    """Whether a state is being written."""
    states = run / "states"
    return states.is_dir() and any(states.glob(".tmp-*"))


def post_mortem(run: Path) -> Kill:
    """Look at what a kill left."""
    states = run / "states"
    names = [path.name for path in states.iterdir()] if states.is_dir() else []
    published = [int(name.removeprefix("step-")) for name in names if name.startswith("step-")]
    half_done = [name for name in names if name.startswith((".tmp-", ".del-"))]
    rows = read_jsonl(run / "events.jsonl")
    recorded = {row["step"] for row in rows if row["event"] == "saved"}
    return Kill(
        left=max(published, default=0),
        reached=logged(run),
        inside_save=bool(half_done or set(published) - recorded),
        while_caching=not any(row["event"] == "cached" for row in rows),
    )


def fingerprint(run: Path) -> dict[str, Any]:
    """Return all that must be equal: last state, exported tensors, every logged figure."""
    state = last_state(run)
    files = ("adapter.safetensors", "optim.safetensors", "optim.json", "state.json")
    found: dict[str, Any] = {name: _sha256(state / name) for name in files}
    found["state"] = state.name
    found["export"] = _tensor_bytes(run / f"{run.name}.safetensors")
    rows = read_jsonl(run / "events.jsonl")
    found["losses"] = [[row[name] for name in MEASURES] for row in rows if row["event"] == "step"]
    found["validations"] = [
        [row["step"], row["loss"]] for row in rows if row["event"] == "validation"
    ]
    found["leftovers"] = sorted(path.name for path in run.rglob(".*") if path.name != ".lock")
    return found


def differences(run: Path, expected: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the names of what differs from the uninterrupted run."""
    found = fingerprint(run)
    return tuple(name for name in expected if found[name] != expected[name])


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _tensor_bytes(file: Path) -> str:
    """Hash a safetensors file without its header, which holds the time and the name of the run."""
    data = file.read_bytes()
    return hashlib.sha256(data[8 + int.from_bytes(data[:8], "little") :]).hexdigest()


# ---- campaigns


def command(place: Toy, scenario: str, name: str, *, cache: Path | None = None) -> list[str]:
    """Return the command line of a run of a scenario."""
    settings = {**QUIET, **SCENARIOS[scenario]}
    if cache is not None:
        settings["data__cache_dir"] = str(cache)
    return place.arguments("--name", name, steps=STEPS, **settings)


def reference(place: Toy, scenario: str, *, processes: int) -> dict[str, Any]:
    """Train a scenario without interruption and return its fingerprint."""
    name = f"whole-{list(SCENARIOS).index(scenario)}"
    log = place.folder / f"{name}.log"
    codes = wait(start(command(place, scenario, name), log, processes=processes))
    if any(codes):
        raise RuntimeError(f"the uninterrupted run ended with {codes}: {log.read_text()[-2000:]}")
    return fingerprint(place.runs / name)


def chain(
    place: Toy,
    scenario: str,
    name: str,
    expected: Mapping[str, Any],
    draw: random.Random,
    *,
    processes: int,
) -> Chain:
    """Start a run, kill it one to three times, let it finish, compare."""
    run, log = place.runs / name, place.folder / f"{name}.log"
    # Every fourth run has a cache of its own, so that kills hit caching too.
    cache = place.folder / f"{name}-cache" if draw.random() < 0.25 else None
    line, kills = command(place, scenario, name, cache=cache), []
    for _ in range(draw.randint(1, 3)):
        going_on = [*line, "--resume"] if run.is_dir() else line
        children = start(going_on, log, processes=processes)
        rank = draw.randrange(processes)
        others = [child for child in children if child != children[rank]]
        if not kill_somewhere(children[rank], run, draw, from_start=processes == 1 or rank > 0):
            wait(others)
            break
        began = time.monotonic()
        codes = wait(others)
        left_s = round(time.monotonic() - began, 2)
        kills.append(replace(post_mortem(run), rank=rank, left_s=left_s))
        if 0 in codes and not is_finished(run):
            return Chain(
                scenario=scenario,
                kills=tuple(kills),
                differences=(f"the others ended with {codes}",),
            )
    going_on = [*line, "--resume"] if run.is_dir() else line
    codes = wait(start(going_on, log, processes=processes))
    wrong: tuple[str, ...] = (f"exit codes {codes}: {log.read_text()[-500:]}",)
    if not any(codes):
        wrong = differences(run, expected)
    return Chain(scenario=scenario, kills=tuple(kills), differences=wrong)


def is_finished(run: Path) -> bool:
    """Whether the run's work was done before the kill: then the others end well."""
    return any(row["event"] == "finished" for row in read_jsonl(run / "events.jsonl"))


def campaign(
    folder: Path, *, kills: int, seed: int, processes: int = 1, quiet: bool = False
) -> Iterator[Chain]:
    """Yield chains until that many kills have been survived or not; goes on with what is in `folder`."""
    done = read_jsonl(folder / "chains.jsonl")
    count = sum(len(row["kills"]) for row in done)
    place = prepare(folder)
    expected = {name: reference(place, name, processes=processes) for name in SCENARIOS}
    number = len(done)
    while count < kills:
        draw = random.Random(f"{seed}-{number}")
        scenario = list(SCENARIOS)[number % len(SCENARIOS)]
        name = f"chain-{number}"
        found = chain(place, scenario, name, expected[scenario], draw, processes=processes)
        with (folder / "chains.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(found)) + "\n")
        count += len(found.kills)
        number += 1
        if not found.differences:
            _remove(place, f"chain-{number - 1}")
        if not quiet:
            mark = "; ".join(found.differences) or "equal"
            print(f"{count}/{kills} kills, chain {number}: {mark}", flush=True)
        yield found


def prepare(folder: Path) -> Toy:
    """Write dataset and base into `folder`, in another process: this one only forks."""
    place = Toy(folder=folder)
    for stale in (place.runs, place.dataset):
        shutil.rmtree(stale, ignore_errors=True)
    toy(folder)
    child = os.fork()
    if child == 0:
        place.with_base()
        os._exit(0)
    wait([child])
    return place


def _remove(place: Toy, name: str) -> None:
    shutil.rmtree(place.runs / name)
    shutil.rmtree(place.folder / f"{name}-cache", ignore_errors=True)
    (place.folder / f"{name}.log").unlink(missing_ok=True)


def summary(
    rows: Sequence[Mapping[str, Any]], *, seed: int, seconds: float, processes: int = 1
) -> Summary:
    """Return the figures of recorded chains."""
    kills = [(row["scenario"], kill) for row in rows for kill in row["kills"]]
    lost = [(name, max(0, kill["reached"] - kill["left"])) for name, kill in kills]
    return Summary(
        kills=len(kills),
        inside_save=sum(kill["inside_save"] for _, kill in kills),
        while_caching=sum(kill["while_caching"] for _, kill in kills),
        chains=len(rows),
        differing_chains=sum(bool(row["differences"]) for row in rows),
        most_steps_lost=max((count for _, count in lost), default=0),
        most_steps_lost_by_scenario={
            name: max((count for own, count in lost if own == name), default=0)
            for name in SCENARIOS
        },
        most_seconds_left=max((kill.get("left_s", 0.0) for _, kill in kills), default=0.0),
        processes=processes,
        seed=seed,
        seconds=round(seconds, 1),
    )


def load_everything() -> None:
    """Import all that is slow, once for all forks: made to stay, else collecting copies every page in every child."""
    with made_to_stay():
        import diffusers
        import torch.utils.tensorboard  # noqa: F401 - loaded for the forks
        import transformers

        import lora_trainer.run.lead  # noqa: F401 - loaded for the forks

        for library, names in (
            (diffusers, ("AutoencoderKL", "StableDiffusionPipeline", "UNet2DConditionModel")),
            (transformers, ("CLIPTextModel", "CLIPTokenizer")),
        ):
            for name in names:
                getattr(library, name)


def main() -> int:
    """Run a campaign; return 0 when every chain ended with the same bits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=25)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="folder that keeps the campaign")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    options = parser.parse_args()
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        parser.exit(
            4, f"error: this needs {' and '.join(missing)}. Fix: pip install {' '.join(missing)}.\n"
        )
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    load_everything()
    with tempfile.TemporaryDirectory(prefix="lora-train-kill-") as temporary:
        folder = options.work or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        for _ in campaign(
            folder, kills=options.kills, seed=options.seed, processes=options.processes
        ):
            pass
        rows = read_jsonl(folder / "chains.jsonl")
        found = summary(
            rows,
            seed=options.seed,
            seconds=time.monotonic() - began,
            processes=options.processes,
        )
    print(json.dumps(asdict(found), indent=2))
    if options.json:
        options.json.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    return 1 if found.differing_chains else 0


if __name__ == "__main__":
    sys.exit(main())

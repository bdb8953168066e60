"""Promise 2: SIGKILL at any instant, then the same command with --resume, gives the same bits.

The killed runs happen in another process, which loads everything once and forks for each of them;
it kills itself at the k-th call of a function. They are resumed here, by the same command.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from lora_trainer.lora_file.write import final_export_name
from tests.fakes.runs import Toy, contents, events, last_state, python, run_cli, toy, trajectory

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure

DRIVER = """
import gc, importlib, json, os, signal, sys
import lora_trainer.run.train  # this and the next two: all that is slow to import, once for all
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from transformers import CLIPTextModel, CLIPTokenizer
from lora_trainer.cli.main import run


def kill_at(module, name, call, after):
    owner = importlib.import_module(module)
    *path, last = name.split(".")
    for part in path:
        owner = getattr(owner, part)
    real, calls = getattr(owner, last), 0

    def killing(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == call and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **kwargs)
        if calls == call:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, last, killing)


gc.freeze()  # else collecting copies every page in every child
for arguments, where in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        kill_at(*where)
        os._exit(run(arguments))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), file=sys.stderr)
"""


@dataclass(frozen=True)
class Kill:
    """Where a run is killed: before (or after) the k-th call; `left` is the newest state then."""

    where: str
    call: int
    left: int | None
    after: bool = False

    @property
    def point(self) -> tuple[str, str, int, bool]:
        module, _, name = self.where.partition(":")
        return f"lora_trainer.{module}", name, self.call, self.after


# A run saves at steps 2, 4 and 6; a state is five files, a rename, a line of the log, and a prune.
KILLS = {
    "while caching": Kill("cache.store:Cache.write", 5, None),
    "before the first save": Kill("training.loop:judge_step", 1, None, after=True),
    # A save waits for the one before, which is written beside the training; the first copy is of the start.
    "between saves": Kill("checkpoint.writer:freeze", 3, 2),
    "in the first state": Kill("checkpoint.codec:write_file", 4, None),
    "in a state's files": Kill("checkpoint.codec:write_file", 8, 2),
    "before a state's rename": Kill("checkpoint.states:rename_durably", 2, 2),
    "after a state's rename": Kill("checkpoint.states:append_durably", 2, 4),
    "before pruning": Kill("checkpoint.states:_prune", 3, 6),
    "in pruning": Kill("checkpoint.states:remove_tree", 5, 6, after=True),
    "before the final export": Kill("run.saving:write_export", 3, 6),
    "in the report": Kill("run.train:write_report", 1, 6),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """The uninterrupted run."""
    place = toy(tmp_path_factory.mktemp("kill")).with_base()
    assert place.train(logging__trackers=[]) == 0
    return place


def command(place: Toy, name: str) -> list[str]:
    """Return the command of a run of that name; the one killed while caching has its own cache."""
    cache = place.folder / "cache of its own" if name == "while caching" else place.cache
    named = ("--name", name.replace(" ", "-"))
    return place.arguments(*named, data__cache_dir=str(cache), logging__trackers=[])


@pytest.fixture(scope="module")
def killed(place: Toy) -> Toy:
    """All killed runs, each in the folder of its name; "twice" was killed and resumed and killed."""
    work = [(command(place, name), kill.point) for name, kill in KILLS.items()]
    line = command(place, "twice")
    work.append((line, KILLS["between saves"].point))
    work.append(([*line, "--resume"], KILLS["before a state's rename"].point))
    done = python(DRIVER, json.dumps(work), timeout_s=280)
    codes = [line for line in done.stderr.split() if line.lstrip("-").isdigit()]
    assert (done.returncode, codes) == (0, ["-9"] * len(work)), done.stderr[-2000:]
    return place


def published(run: Path) -> list[int]:
    states = run / "states"
    return sorted(int(path.name[5:]) for path in states.glob("step-*")) if states.is_dir() else []


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy, killed: Toy) -> None:
    run, whole = killed.runs / name.replace(" ", "-"), place.run
    left = KILLS[name].left
    assert max(published(run), default=None) == left, "the kill came when it should"
    assert not (run / final_export_name(run.name)).exists() or name == "in the report"

    assert run_cli([*command(place, name), "--resume"]) == 0

    (resumed,) = events(run, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", left or 0), resumed["differences"]
    state, expected = last_state(run), last_state(whole)
    assert state.name == expected.name
    for file in ("adapter.safetensors", "optim.safetensors", "optim.json", "state.json"):
        assert (state / file).read_bytes() == (expected / file).read_bytes()
    assert trajectory(run) == trajectory(whole)
    assert validations(run) == validations(whole)
    assert contents(run / "samples") == contents(whole / "samples")
    assert [row["step"] for row in events(run, "sample")] == [0, 3, 6]
    assert_same_tensors(run / f"{run.name}.safetensors", whole / "toy.safetensors")
    assert len(published(run)) in (2, 3), "one more where the kill came before pruning"
    assert not list((run / "states").glob(".*")), "leftovers are cleaned up"
    assert len(events(run, "finished")) == 1


def test_a_kill_in_a_resumed_run_is_survived_too(place: Toy, killed: Toy) -> None:
    run = killed.runs / "twice"
    assert published(run) == [2, 4]
    assert run_cli([*command(place, "twice"), "--resume"]) == 0
    assert [(row["exactness"], row["step"]) for row in events(run, "resumed")] == [
        ("EXACT", 2),
        ("EXACT", 4),
    ]
    assert trajectory(run) == trajectory(place.run)
    assert contents(last_state(run)) == contents(last_state(place.run))


def validations(run: Path) -> list[tuple[int, float]]:
    return [(row["step"], row["loss"]) for row in events(run, "validation")]


def assert_same_tensors(file: Path, expected: Path) -> None:
    found, wanted = load_file(file), load_file(expected)
    assert found.keys() == wanted.keys()
    assert all((found[key] == wanted[key]).all() for key in wanted)

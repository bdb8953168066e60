"""Promise 2: SIGKILL at any instant, then the same command with --resume, gives the same bits.

The killed runs happen in another process (`run_killed`); they are resumed here, by the same command.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fakes.runs import (
    BETWEEN_SAVES,
    Point,
    Toy,
    assert_same_run,
    events,
    run_cli,
    run_killed,
    toy,
)

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure


@dataclass(frozen=True)
class Kill:
    """Where a run is killed: before (or after) the k-th call; `left` is the newest state then."""

    where: str
    call: int
    left: int | None
    after: bool = False

    @property
    def point(self) -> Point:
        module, _, name = self.where.partition(":")
        return f"lora_trainer.{module}", name, self.call, self.after


# A run saves at steps 2, 4 and 6; a state is five files, a rename, a line of the log, and a prune. Every operation
# of a save is in tests/reliability/test_ckp_sweep.py.
KILLS = {
    "while caching": Kill("cache.store:Cache.write", 5, None),
    "before the first save": Kill("training.loop:judge_step", 1, None, after=True),
    "in a state's files": Kill("checkpoint.codec:write_file", 8, 2),
    "after a state's rename": Kill("checkpoint.states:append_durably", 2, 4),
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
    work.append((line, BETWEEN_SAVES))
    before_a_rename = Kill("checkpoint.states:rename_durably", 2, 2)
    work.append(([*line, "--resume"], before_a_rename.point))
    run_killed(work)
    return place


def published(run: Path) -> list[int]:
    states = run / "states"
    return sorted(int(path.name[5:]) for path in states.glob("step-*")) if states.is_dir() else []


@pytest.mark.parametrize("name", KILLS)
def test_a_killed_run_goes_on_to_the_same_bits(name: str, place: Toy, killed: Toy) -> None:
    run, whole = killed.runs / name.replace(" ", "-"), place.run
    left = KILLS[name].left
    assert max(published(run), default=None) == left, "the kill came when it should"
    assert not (run / f"{run.name}.safetensors").exists() or name == "in the report"

    assert run_cli([*command(place, name), "--resume"]) == 0

    (resumed,) = events(run, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", left or 0), resumed["differences"]
    assert_same_run(run, whole)
    assert [row["step"] for row in events(run, "sample")] == [0, 3, 6]
    assert len(published(run)) == 2
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
    assert_same_run(run, place.run)

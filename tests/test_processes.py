"""Several processes, one trajectory: equal to one process, also when a process fails, freezes or is killed.

One fork of this process runs all trainings (tests/fakes/many.py); what is asserted here is what they left.
MPR-01 to 03 of the fault list.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer.checkpoint.states import ADAPTER
from lora_trainer.common.events import read_jsonl
from lora_trainer.reporting.run_record import read as read_record
from scripts.reliability.kill import free_port
from tests.fakes import many
from tests.fakes.many import ALONE, CONFIG, HANGING_STARTS, SETTINGS, SPOILT, STEPS
from tests.fakes.runs import ROOT, Toy, code_of_fork, events, last_state, trajectory
from tests.fakes.training import distance

SPLITS = ("of 2", "of 5", "cold")
"""One of five processes has no sample; of the two of `cold`, without a cache, one runs out of memory."""
FAILED = {
    "bug": "process 1: ValueError: a bug in this process",
    "killed 0": "the process that kept the launcher's store ended",
    "killed 1": "process 1 of 2 was killed or crashed",
    "frozen": "process 1 of 2 has been silent for",
    "apart": "process 1 of 2 has different weights from process 0 at step 4",
    "absent": "process 1 of 2 never came within hardware.process_timeout_s=20",
    "leader hangs": "process 0: did nothing for",
    "follower hangs": "process 1: did nothing for",
    "unconnected": "connecting to the other processes takes longer than hardware.process_timeout_s=20",
    "leader refuses": "process 0: the dataset is not readable here",
    "follower refuses": "process 1: the dataset is not readable here",
}
"""Run -> the reason that all its processes give."""


pytestmark = pytest.mark.timeout(1500)  # the first test waits for all trainings


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    folder = tmp_path_factory.mktemp("many")
    gc.freeze()  # else collecting copies every page in every child
    assert code_of_fork(partial(many.main, folder)) == 0
    return Toy(folder=folder)


@pytest.fixture(scope="module")
def results(place: Toy) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place.folder / "results.json").read_text())
    return found


def adapter(place: Toy, name: str) -> list[Tensor]:
    found = load_file(last_state(place.runs / name) / ADAPTER)
    return [found[key] for key in sorted(found)]


def gradients(place: Toy, name: str) -> list[Tensor]:
    """Return what the first step's gradients are, after their sum over all processes."""
    by_number = load_file(place.folder / f"notes-{name}" / "gradients.safetensors")
    return [by_number[key] for key in sorted(by_number, key=int)]


def draws(place: Toy, name: str) -> Counter[str]:
    """Return every (step, sample, hash of latents, noise and timestep) that any process prepared."""
    files = (place.folder / f"notes-{name}").glob("draws-*.txt")
    return Counter(line for file in files for line in file.read_text().splitlines())


def encoded(place: Toy, name: str) -> list[list[str]]:
    files = sorted((place.folder / f"notes-{name}").glob("encoded-*.txt"))
    return [file.read_text().splitlines() for file in files]


def assert_close(place: Toy, name: str) -> None:
    """Assert that a run has the weights that one process has, up to rounding, all in all and tensor by tensor."""
    ours, one = adapter(place, name), adapter(place, "one")
    assert distance(ours, one) < 5e-5
    assert max(distance([a], [b]) for a, b in zip(ours, one, strict=True)) < 1e-3


# ---- the same trajectory


@pytest.mark.parametrize("name", SPLITS)
def test_any_number_of_processes_is_one_training(
    name: str, place: Toy, results: dict[str, Any]
) -> None:
    assert set(results[name]["codes"]) == {0}, results[name]["output"]
    assert draws(place, name) == draws(place, "one")
    assert distance(gradients(place, name), gradients(place, "one")) < 1e-5
    assert_close(place, name)
    ours, one = (events(place.runs / run, "step") for run in (name, "one"))
    assert [row["step"] for row in ours] == list(range(1, STEPS + 1))
    assert [row["images"] for row in ours] == [row["images"] for row in one]
    skipped = [row["step"] for row in ours if row["loss"] is None]
    assert skipped == [row["step"] for row in one if row["loss"] is None] == [SPOILT + 1]
    for mine, others in zip(ours, one, strict=True):
        if mine["step"] != SPOILT + 1:
            assert mine["loss"] == pytest.approx(others["loss"], rel=1e-4)
            # AdamW hides the scale of gradients.
            assert mine["grad_norm"] == pytest.approx(others["grad_norm"], rel=1e-4)
    problems = read_jsonl(place.runs / name / "problems.jsonl")
    (skip,) = (row["what"] for row in problems if row["code"] == "TRN-01")
    assert "was skipped" in skip
    validations = [
        [row["loss"] for row in events(place.runs / run, "validation")] for run in (name, "one")
    ]
    assert validations[0] == pytest.approx(validations[1], rel=1e-4)
    assert len(validations[0]) == 1 + STEPS // 5


def test_what_stops_half_way_stops_in_all(place: Toy, results: dict[str, Any]) -> None:
    before, after = (
        load_file(path / ADAPTER)
        for path in sorted((place.runs / "of 5" / "states").glob("step-*"))[-2:]
    )
    moved = {key.partition(".")[0] for key in after if not before[key].equal(after[key])}
    assert {"new_tokens", "text_encoder", "best"} <= {key.partition(".")[0] for key in after}
    assert not moved & {"new_tokens", "text_encoder"} and "denoiser" in moved


def test_each_process_has_a_share_and_nobody_twice(place: Toy, results: dict[str, Any]) -> None:
    shares = [
        set((place.folder / "notes-of 5" / f"draws-{rank}.txt").read_text().splitlines())
        for rank in range(5)
    ]
    assert sorted(map(bool, shares)) == [False, True, True, True, True]
    assert sum(map(len, shares)) == len(set().union(*shares)) == len(draws(place, "one"))


def test_out_of_memory_in_one_process_stays_there_and_is_recorded(
    place: Toy, results: dict[str, Any]
) -> None:
    run = place.runs / "cold"
    (accident,) = events(run, "out_of_memory")
    assert accident["reason"].startswith("process 1: CUDA out of memory")
    changes = [row for row in events(run, "change") if row["key"] == "memory.micro_batch"]
    assert [(row["old"], row["new"]) for row in changes] == [(4, 1)]
    assert events(place.runs / "of 2", "out_of_memory") == []


# ---- what a user gets


def test_several_processes_leave_what_one_leaves(place: Toy, results: dict[str, Any]) -> None:
    """With TensorBoard, samples, validation, saves and the report on, as they are by default."""
    for name in SPLITS:
        run = place.runs / name
        assert list((run / "tensorboard").glob("events.out.tfevents.*"))
        assert {row["step"] for row in events(run, "sample")} >= {0, 10, STEPS}
        assert list(run.glob(f"{name}-step*.safetensors"))
        assert (run / "report.html").is_file() and (run / f"{name}.safetensors").is_file()
        rows = read_jsonl(run / "problems.jsonl")
        assert [row["what"] for row in rows if row["code"] == "TRN-05"] == []
        assert [row["file"] for row in rows if row["severity"] == "error"] == ["cut.png"]
        remarks = [row["what"] for row in rows if "is not divisible by 5 processes" in row["what"]]
        assert [remark.partition(": ")[2] for remark in remarks] == (
            ["only 4 have work"] if name == "of 5" else []
        )


def test_a_run_goes_on_with_other_numbers_of_processes(place: Toy, results: dict[str, Any]) -> None:
    assert results["moved"]["codes"] == [0], results["moved"]["output"]
    of_two, of_three = events(place.runs / "moved", "resumed")
    assert of_two["exactness"] == of_three["exactness"] == "SAME-STREAM"
    assert of_two["step"] < of_three["step"], "each state is of another number of processes"
    assert_close(place, "moved")


# ---- caches


def test_each_entry_is_encoded_once_by_one_process(place: Toy, results: dict[str, Any]) -> None:
    shares = encoded(place, "cold")
    assert all(shares), "both had work"
    assert sorted(shares[0] + shares[1]) == sorted(encoded(place, "one")[0]), "none of them twice"
    assert encoded(place, "of 2") == [[], []], "a warm cache is not encoded again"


# ---- failures


@pytest.mark.parametrize("name", FAILED)
def test_mpr_01_02_03_a_process_that_fails_ends_all_with_the_reason(
    name: str, place: Toy, results: dict[str, Any]
) -> None:
    codes, text = results[name]["codes"], "".join(results[name]["output"])
    assert 0 not in codes and 1000 not in codes, "none went on, none hung"
    assert FAILED[name] in text
    if name.endswith("hangs"):
        where = r"it waits in \w+\.py:\d+ \(\w+\), called by \S*(lead|follow)\.py:\d+"
        assert re.search(where, text) and codes == [4, 4], text
    if name.endswith("refuses"):
        assert codes == ([3, 4] if name.startswith("leader") else [4, 3])
    if name in ("frozen", "follower refuses", *HANGING_STARTS):
        status = json.loads((place.runs / name / "status.json").read_bytes())
        assert (status["state"], status["exit_code"]) == ("failed", 4)
        assert FAILED[name] in status["message"]
    if name == "frozen":
        assert len(events(place.runs / name, "stopped")) == 1


def test_mpr_03_states_that_differ_are_never_saved(place: Toy, results: dict[str, Any]) -> None:
    assert results["apart"]["codes"] == [5, 5]
    assert not list((place.runs / "apart").glob("states/step-*"))


def test_mpr_01_a_resume_of_all_processes_comes_to_the_same_bits(
    place: Toy, results: dict[str, Any]
) -> None:
    assert results["stopped resumed"]["codes"] == [0, 0], results["stopped resumed"]["output"]
    run, whole = place.runs / "stopped", place.runs / "of 2"
    for file in (ADAPTER, "optim.safetensors", "state.json"):
        assert (last_state(run) / file).read_bytes() == (last_state(whole) / file).read_bytes()
    assert trajectory(run) == trajectory(whole)
    assert events(run, "resumed")[0]["exactness"] == "EXACT"


def test_a_signal_to_one_process_stops_all_after_the_same_step(
    place: Toy, results: dict[str, Any]
) -> None:
    assert results["stopped"]["codes"] == [143, 143]
    text = "".join(results["stopped"]["output"])
    assert len(set(re.findall(r"stopped after step (\d+)", text))) == 1, "both name the same step"


# ---- between machines

ADDRESSES = ("10.77.0.1", "10.77.0.2")
TWO_HOSTS = (ROOT / "tests" / "fakes" / "two_hosts.sh").read_text(encoding="utf-8")


def isolated(script: str) -> list[str]:
    """Return what runs a script on a machine of two hosts with a cable, which end with the last of its processes."""
    user = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    namespaces = ("--mount", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
    return ["unshare", *user, *namespaces, "sh", "-c", f"{TWO_HOSTS}\n{script}\nexit ${{code:-0}}"]


def test_accelerate_launch_over_two_machines(place: Toy, results: dict[str, Any]) -> None:
    """Two network namespaces with a cable, where the system permits them; else two launchers by the loopback."""
    can_ask = shutil.which("ip") and shutil.which("unshare")
    ping = isolated("ip netns exec host0 unshare --uts true")
    permitted = can_ask and subprocess.run(ping, capture_output=True, check=False).returncode == 0
    settings = {**SETTINGS, **results["priors"], **ALONE}
    line = place.arguments("--name", "machines", *CONFIG, steps=STEPS, **settings)
    address, port = (ADDRESSES[0], 29500) if permitted else ("127.0.0.1", free_port())
    # Not `--cpu`: accelerate would start one process on each that knows nothing of the other.
    launch = [sys.executable, "-m", "accelerate.commands.launch"]
    launch += ["--config_file", str(ROOT / "launch" / "two-machines.yaml"), "--num_processes", "2"]
    launch += ["--main_process_ip", address, "--main_process_port", str(port)]
    programs = [
        [*launch, "--machine_rank", str(rank), "-m", "lora_trainer", *line] for rank in range(2)
    ]
    # gloo is told which interface to use: neither host's name resolves to an address.
    words = "GLOO_SOCKET_IFNAME=cable{n} ip netns exec host{n} unshare --uts sh -c {name} start {program}"
    hosts = [
        words.format(
            n=n,
            name=shlex.quote(f'echo host{n} > /proc/sys/kernel/hostname; exec "$@"'),
            program=shlex.join(program),
        )
        for n, program in enumerate(programs)
    ]
    by_loopback = [f"GLOO_SOCKET_IFNAME=lo {shlex.join(program)}" for program in programs]
    script = "\n".join(
        f"{each} & pid{n}=$!" for n, each in enumerate(hosts if permitted else by_loopback)
    )
    script += "\ncode=0\nwait $pid0 || code=$?\nwait $pid1 || code=$?"
    done = subprocess.run(
        isolated(script) if permitted else ["sh", "-c", f"{script}\nexit $code"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    record = read_record(place.runs / "machines")
    assert record.environment.exactness["processes"] == 2
    assert not list(place.runs.glob("machines-*")), "a run each"
    ours, one = (trajectory(place.runs / name)[:SPOILT] for name in ("machines", "one"))
    assert len(ours) == SPOILT and [row[1] for row in ours] == pytest.approx(
        [row[1] for row in one], rel=1e-4
    )

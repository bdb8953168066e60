"""The files of launch/: accelerate knows every key, the scripts start, resume and stop, the image is lean.

The scripts run here with programs of the same names that only note how they were called.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import config_args
from accelerate.utils import DistributedType

from tests.fakes.runs import ROOT

LAUNCH = ROOT / "launch"
SCRIPTS = ("slurm.sh", "spot.sh")
# File -> processes in all, machines, whether accelerate starts several.
CONFIGS = {
    "cpu.yaml": (2, 1, True),
    "eight-gpus.yaml": (8, 1, True),
    "one-gpu.yaml": (1, 1, False),
    "two-gpus.yaml": (2, 1, True),
    "two-machines.yaml": (16, 2, True),
}


# ---- configurations of accelerate


def test_accelerate_reads_a_configuration_as_meant() -> None:
    assert {path.name for path in LAUNCH.glob("*.yaml")} == set(CONFIGS)
    for name, meant in CONFIGS.items():
        config = config_args.load_config_from_file(str(LAUNCH / name))
        several = config.distributed_type == DistributedType.MULTI_GPU
        assert (config.num_processes, config.num_machines, several) == meant, name
        assert config.use_cpu == (name == "cpu.yaml")
        written = yaml.safe_load((LAUNCH / name).read_text(encoding="utf-8"))
        assert set(written) <= set(config_args.ClusterConfig.__dataclass_fields__)
        assert written["mixed_precision"] == "no", "unquoted, YAML reads it as false"


# ---- scripts, with programs that only note how they were called


class Machine:
    """A folder with programs of given behaviour in front of the real ones, and what they noted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()

    def program(self, name: str, body: str) -> None:
        """Put a program in place that notes its arguments and then does what `body` says."""
        file = self.programs / name
        note = f'printf "%s\\n" "$*" >> "{self.folder}/{name}.calls"'
        file.write_text(f"#!/usr/bin/env bash\n{note}\n{body}\n", encoding="utf-8")
        file.chmod(0o755)

    def calls(self, name: str) -> list[str]:
        file = self.folder / f"{name}.calls"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    def run(self, script: str, *arguments: str, **environment: str) -> int:
        return subprocess.run(
            [LAUNCH / script, *arguments],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{self.programs}:{os.environ['PATH']}",
                "PAUSE_S": "0",
                **environment,
            },
            capture_output=True,
            check=False,
            timeout=60,
        ).returncode


LAUNCHED = """
run=runs/cat
n=$(wc -l < accelerate.calls)
mkdir -p $run/states; touch $run/run.json
end() { [ -z "$1" ] || printf '{\\n  "state": "x",\\n  "exit_code": %s\\n}' "$1" > $run/status.json; exit $2; }
"""
"""What an `accelerate` begins with here; `n` counts its calls, `end CODE STATUS` is how a run ends."""


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.program("python", "exit 0")
    # The scripts look every half second.
    made.program("sleep", f"exec {shutil.which('sleep')} 0.02")
    return made


def spot(machine: Machine, launched: str, **environment: str) -> int:
    machine.program("accelerate", LAUNCHED + launched)
    return machine.run("spot.sh", "two.yaml", "cats", "cat", "--steps", "9", **environment)


def test_spot_refuses_before_anything_is_launched_and_goes_on_until_the_run_is_finished(
    machine: Machine,
) -> None:
    killed = 'mkdir $run/states/step-$n; [ "$n" = 5 ] && end 0 0; kill -KILL $$'
    assert spot(machine, killed) == 0
    first, *others = machine.calls("accelerate")
    assert first.startswith("launch --config_file two.yaml -m lora_trainer cats --name cat")
    assert first.endswith("--output runs --steps 9"), "--resume without a run is refused"
    assert [call == f"{first} --resume" for call in others] == [True] * 4
    (machine.folder / "accelerate.calls").unlink()
    (machine.folder / "python.calls").unlink()
    machine.program("python", "exit 3")
    assert spot(machine, "end 0 0") == 3
    dry = "-m lora_trainer cats --name cat --output runs --steps 9 --dry-run"
    assert (machine.calls("python"), machine.calls("accelerate")) == ([dry], [])


@pytest.mark.parametrize(
    ("launched", "environment", "code", "launches"),
    [
        ("end 3 1", {}, 3, 1),
        ("end 143 1", {}, 143, 1),
        ('mkdir $run/states/step-$n; [ "$n" = 4 ] && end 0 0; end 4 1', {}, 0, 4),
        ('[ "$n" = 1 ] && mkdir $run/states/step-1; end "" 1', {"TRIES": "2"}, 4, 3),
    ],
    ids=["another launch would not help", "told to end", "it may pass", "nothing comes of it"],
)
def test_spot_launches_again_after_what_may_pass(
    launched: str, environment: dict[str, str], code: int, launches: int, machine: Machine
) -> None:
    status = machine.folder / "runs" / "cat" / "status.json"
    status.parent.mkdir(parents=True)
    status.write_text('{\n  "exit_code": 3\n}', encoding="utf-8")
    os.utime(status, (1, 1))  # that of an earlier launch is not taken for a new one
    assert spot(machine, launched, **environment) == code
    assert len(machine.calls("accelerate")) == launches


def test_spot_asks_the_run_to_save_when_the_machine_goes(machine: Machine) -> None:
    """Not by a signal: torch's launcher would kill its processes after 30 seconds."""
    wait = "until [ -e $run/control/stop ]; do sleep 0.05; done"
    assert spot(machine, f'kill -TERM $PPID; {wait}; end "" 1') == 143
    assert len(machine.calls("accelerate")) == 1
    assert spot(machine, "[ -e $run/control/stop ] || end 0 0; end 5 1") == 0, "asked once"


SLURM = {
    "SLURM_JOB_ID": "70001",
    "SLURM_JOB_NODELIST": "node[1-2]",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_GPUS_ON_NODE": "8",
    "RUNS": "runs",
}
SRUN = 'shift; export SLURM_NODEID=1 SCRIPT=$PPID; "$@"'


def slurm(machine: Machine, launched: str) -> int:
    machine.program("scontrol", '[ "$1" = requeue ] || printf "node1\\nnode2\\n"')
    machine.program("srun", SRUN)
    machine.program("accelerate", LAUNCHED + launched)
    return machine.run("slurm.sh", "cats", "cat", "--set", "data.trigger=a b", **SLURM)


def test_slurm_starts_one_launcher_per_machine_and_then_resumes(machine: Machine) -> None:
    assert slurm(machine, "exit 0") == 0
    assert slurm(machine, "exit 0") == 0
    first, second = machine.calls("accelerate")
    assert first == (
        "launch --config_file launch/two-machines.yaml --num_machines 2 --num_processes 16 "
        "--machine_rank 1 --main_process_ip node1 --main_process_port 30001 "
        "-m lora_trainer cats --name cat --output runs --set data.trigger=a b"
    )
    assert second == f"{first} --resume"
    assert machine.calls("srun")[0].startswith("--kill-on-bad-exit=1 bash -c")


def test_slurm_saves_and_queues_again_before_its_time_is_over(machine: Machine) -> None:
    wait = "until [ -e $run/control/stop ]; do sleep 0.05; done"
    assert slurm(machine, "exit 1") == 1
    assert "requeue" not in " ".join(machine.calls("scontrol")), "a failure is not queued again"
    assert slurm(machine, f"kill -USR1 $SCRIPT; {wait}; exit 1") == 0
    assert machine.calls("scontrol")[-1] == "requeue 70001"
    assert slurm(machine, "[ -e $run/control/stop ] && exit 9; exit 0") == 0
    assert [machine.run(script) for script in SCRIPTS] == [2, 2], "called without words"


@pytest.mark.parametrize(
    ("linter", "files"),
    [
        ("shellcheck", ["install/install.sh", "scripts/release", "scripts/dependency_sets"]),
        ("hadolint", ["launch/Dockerfile"]),
    ],
)
def test_linters_find_nothing(linter: str, files: list[str]) -> None:
    if shutil.which(linter) is None:
        pytest.skip(f"{linter} is not installed: extra `test` has it where its wheel exists")
    scripts = LAUNCH.rglob("*.sh") if linter == "shellcheck" else ()
    subprocess.run([linter, *(ROOT / file for file in files), *scripts], check=True)


# ---- the image


def test_image_is_made_of_what_it_may_see_and_runs_as_nobody_special() -> None:
    text = (LAUNCH / "Dockerfile").read_text(encoding="utf-8")
    seen = (LAUNCH / "Dockerfile.dockerignore").read_text(encoding="utf-8").split("\n")
    copied = [
        name
        for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE)
        for name in line.split()[:-1]
    ]
    bound = re.findall(r"source=([\w.]+)", text)
    assert set(copied) | set(bound) == {line[1:] for line in seen if line.startswith("!")}
    assert all((ROOT / name).exists() for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    packaged = project["tool"]["setuptools"]["package-dir"].values()
    assert {folder.partition("/")[0] for folder in packaged} <= set(copied), "pip install fails"
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000:1000"]
    assert not re.search(r"^(ARG|ENV).*(TOKEN|SECRET|PASSWORD|KEY)", text, re.MULTILINE)
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (torch,) = re.findall(r'pip install ("torch==[\d.]+")', text)
    assert f"pip install {torch} &&" in readme

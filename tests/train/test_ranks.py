"""What keeps a start of several processes from hanging, without starting several."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_trainer.common import processes
from lora_trainer.config.layers import read_settings_file
from lora_trainer.run import prepare
from lora_trainer.run.lead import lead
from lora_trainer.training.distributed import process_group
from lora_trainer.training.distributed.heartbeat import PeerMonitor
from tests.fakes.runs import python

_PARTIAL_STATE = """
import torch.distributed as dist

def refused(*args, **options):
    raise RuntimeError("the process group is started in one process alone")

dist.init_process_group = dist.distributed_c10d.init_process_group = refused

from accelerate.tracking import PartialState  # as trackers and log lines of accelerate make it
from lora_trainer.run import lead

def first_thing_after():
    print(PartialState().num_processes)
    raise SystemExit

lead.read_dist_env = first_thing_after
lead.lead(None)
"""


def test_nothing_of_accelerate_waits_for_other_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trackers would, which only the first process has; the variables are of several launchers."""
    for variable in ("ACCELERATE_USE_CPU=true", "PMI_RANK=0", "PMI_SIZE=2"):
        monkeypatch.setenv(*variable.split("="))
    for name, value in {"RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setenv(f"LOCAL_{name}", value)
    done = python(_PARTIAL_STATE)
    assert done.stdout.split()[-1:] == ["1"], done.stderr[-3000:]


class MetError(Exception):
    """The processes would meet now."""


@pytest.fixture
def limits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Collects the time limit that a start of several processes gets."""
    collected: list[float] = []

    @contextmanager
    def joined(place: processes.DistEnv, *, timeout_s: float) -> Iterator[Any]:
        collected.append(timeout_s)
        raise MetError
        yield

    monkeypatch.setattr("lora_trainer.run.lead.joined", joined)
    return collected


def _start(tmp_path: Path, *, resume: bool = False, **more: Any) -> None:
    overrides = {"output.folder": str(tmp_path), "output.name": "cat", **more.pop("overrides", {})}
    request = prepare.Request(dataset=tmp_path / "cats", overrides=overrides, resume=resume, **more)
    with pytest.raises(MetError):
        lead(request)


def test_processes_meet_within_the_time_that_the_user_set(
    tmp_path: Path, limits: list[float]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"hardware": {"process_timeout_s": 33}}), encoding="utf-8")
    typed = {"hardware.process_timeout_s": 44}
    _start(tmp_path)
    _start(tmp_path, settings_file=read_settings_file(file))
    _start(tmp_path, settings_file=read_settings_file(file), overrides=typed)
    _start(tmp_path, resume=True)  # no run to resume: the leader says so
    run = {
        "name": "cat",
        "started_at_s": 1,
        "settings": {"hardware.process_timeout_s": 55},
        "base": {"source": "x", "identities": {}},
        "environment": {"exactness": {}},
        "plan": {"memory": {"images_at_once": {}}},
        "dataset": {"fingerprint": ""},
    }
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "run.json").write_text(json.dumps(run), encoding="utf-8")
    _start(tmp_path, resume=True)
    _start(tmp_path, resume=True, overrides=typed)
    assert limits == [120, 33, 44, 120, 55, 44]


# ---- whether a process does anything


def test_a_process_that_computes_reads_or_writes_is_not_idle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s, processor_s, stored = 0.0, 0.0, 0
    module, store = "lora_trainer.training.distributed.heartbeat", torch.distributed.HashStore()
    monkeypatch.setattr(f"{module}.time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(f"{module}.work_so_far", lambda: (processor_s, stored))
    idle_s = PeerMonitor(dist_env=processes.DistEnv(), store=store, timeout_s=120).idle_s
    assert idle_s() == 0
    now_s = 100.0
    assert idle_s() == 100
    processor_s = 1.0  # polls of a thread that waits
    assert idle_s() == 100
    processor_s = 1.3
    assert idle_s() == 0
    now_s = 220.0
    assert idle_s() == 120
    stored = 2_000_000
    assert idle_s() == 0


@pytest.mark.parametrize(
    ("other", "has_nccl", "backend"),
    [("GPU-b", True, "nccl"), ("GPU-a", True, "gloo"), ("GPU-b", False, "gloo")],
    ids=["a GPU each", "one GPU for both", "built without NCCL"],
)
def test_nccl_joins_processes_only_where_each_has_a_gpu(
    other: str, has_nccl: bool, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL ends a start with "Duplicate GPU detected"."""
    monkeypatch.setattr(
        "lora_trainer.training.distributed.process_group.gpu_identity", lambda device: "GPU-a"
    )
    monkeypatch.setattr(
        process_group.dist, "is_backend_available", lambda name: has_nccl or name != "nccl"
    )
    store, env = torch.distributed.HashStore(), processes.DistEnv(rank=0, count=2, local_count=2)
    store.set("gpu/1", other)
    monitor = PeerMonitor(dist_env=env, store=store, timeout_s=9)
    mine = process_group.ProcessGroup(dist_env=env, monitor=monitor)
    assert mine._backend(torch.device("cuda", 0)) == backend
    assert mine.share_gpus == (other == "GPU-a")
    assert mine._backend(torch.device("cpu")) == "gloo"


_REDUCED = """
import os, sys
import torch
import torch.distributed as dist
from lora_trainer.common.processes import DistEnv
from lora_trainer.training.distributed.process_group import ProcessGroup

rank = 0 if os.fork() else 1
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
for reduced_as in ("fp32", "bf16", "fp16"):
    env = DistEnv(rank=rank, count=2, local_rank=rank, local_count=2)
    group = ProcessGroup(dist_env=env, reduced_as=reduced_as)
    weights = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2))]
    for step in range(2):
        weights[0].grad = torch.tensor([1.0, 1 + 2**-10, -3e-6]) * (rank + 1)
        weights[1].grad = None
        loss = group.reduce(weights, torch.tensor(1 / 3), ask=lambda: 15 if rank and step else None)
    if rank == 0:
        print(reduced_as, *weights[0].grad.tolist(), weights[1].grad, loss.item(), group.stop_asked(None))
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows cannot fork")
def test_gradients_travel_in_16_bits_and_loss_and_stops_as_they_are(tmp_path: Path) -> None:
    rows = [line.split() for line in python(_REDUCED, tmp_path / "store").stdout.splitlines()]
    found = {name: [float(one) for one in rest[:3]] for name, *rest in rows}
    exact = [3.0, 3 + 3 * 2**-10, -9e-6]
    assert found["fp32"] == pytest.approx(exact, rel=1e-6)
    assert found["bf16"] == [3.0, 3.0, pytest.approx(-9e-6, rel=2**-7)], "8 bits of mantissa"
    assert found["fp16"][1] == pytest.approx(exact[1], rel=2**-10) and found["fp16"][1] != 3
    for _, *rest in rows:
        assert rest[3:] == ["None", str(rest[4]), "15"], "no gradient stays none, a stop is heard"
        assert float(rest[4]) == pytest.approx(2 / 3, rel=1e-6)
    assert len(rows) == 3

"""Several processes: the first one plans and sends its decisions to the others, which follow.

The decisions travel as JSON through the launcher's store, because no collective is possible yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from lora_trainer.cache.store import in_use
from lora_trainer.common.errors import InputError
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import flatten
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run.build import plan_cache, sample_texts
from lora_trainer.run.device import pinning, planned_device, setup_torch
from lora_trainer.run.prepare import Prepared, Request, prepare_with_base
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.run.run_job import run_job
from lora_trainer.training.cores import shared_cores
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.loop import report_lag


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the leader has decided for all processes of a training."""

    settings: Mapping[str, Any]
    """The planned settings, by key."""
    at_once: Mapping[str, int]
    """The micro-batch by "WIDTHxHEIGHT" of the bucket."""
    sharing: int
    """The processes on the leader's machine."""
    hardware: Hardware
    """The leader's machine; its GPUs are not the followers'."""
    fingerprint: str
    """Of the dataset, which all processes must have."""
    identities: Mapping[str, str]
    """The checksum of each part of the base, which all processes must have."""
    folder: str
    """The run folder."""

    @property
    def timeout_s(self) -> float:
        """How long a process waits for the others."""
        return float(self.settings["hardware.process_timeout_s"])


def send_orders(ranks: ProcessGroup, prepared: Prepared, folder: Path, events: EventStream) -> None:
    """Send the leader's decisions to the other processes, and connect to them."""
    if ranks.monitor is None:
        return
    ranks.monitor.timeout_s = prepared.config.hardware.process_timeout_s
    ranks.monitor.events = events
    orders = Orders(
        settings=flatten(prepared.config),
        at_once=prepared.at_once_by_size,
        sharing=ranks.dist_env.local_count,
        hardware=prepared.hardware,
        fingerprint=prepared.dataset.fingerprint,
        identities=prepared.identities,
        folder=str(folder),
    )
    ranks.monitor.store.set("orders", json.dumps(asdict(orders)))
    connect(ranks, prepared)
    if ranks.share_gpus:
        events.problem(
            "several processes compute on one GPU: their gradients are added in host memory",
            fix="nothing; one process for each GPU is faster",
            severity="note",
        )


def follow(request_here: Request, ranks: ProcessGroup) -> Path:
    """Do a share of a training that another process leads: same settings, data and base; writes no files."""
    assert ranks.monitor is not None
    orders = TypeAdapter(Orders).validate_python(json.loads(ranks.monitor.take("orders")))
    ranks.monitor.timeout_s = orders.timeout_s
    request = Request(
        dataset=request_here.dataset,
        run_settings=orders.settings,
        run_at_once=orders.at_once,
        processes=request_here.processes,
        sharing=orders.sharing,
        fetches=True,
    )
    # GPUs are detected here, as this process may be on another machine than the leader.
    hardware = replace(orders.hardware, gpus=detect().gpus)
    prepared = prepare_with_base(request, hardware=hardware)
    same_base = prepared.identities == orders.identities
    if not (same_base and prepared.dataset.fingerprint == orders.fingerprint):
        part = "dataset" if same_base else "base"
        raise InputError(
            f"process {ranks.dist_env.rank} finds another {part} under the same name as process 0",
            fix="give all machines the same files",
        )
    setup_torch(prepared)
    connect(ranks, prepared)
    events, folder = EventStream(), Path(orders.folder)
    events.subscribe(ranks.monitor.tell)
    stop = StopFlag()
    with (
        taking_signals(stop),
        in_use(prepared.cache_root),
        shared_cores(events),
        pinning(prepared, events),
    ):
        return run_job(
            TrainingJob(
                prepared=prepared,
                folder=folder,
                cache_needs=plan_cache(
                    prepared, prepared.sample_texts, seeing=sample_texts(prepared)
                ),
                state=None,
                events=events,
                stop=stop,
                started_at_s=time.time(),
                ranks=ranks,
            )
        )


def connect(ranks: ProcessGroup, prepared: Prepared) -> None:
    device = planned_device(prepared)
    reduced_as = prepared.config.hardware.reduced_as
    ranks.connect(device, lag=report_lag(device), reduced_as=reduced_as)
    ranks.layers_vary = prepared.facts.has_reference_layers

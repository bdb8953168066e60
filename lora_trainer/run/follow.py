"""Several processes, one training: the first plans and tells the others what was decided; they obey.

What goes between them is JSON in the launcher's store, before any collective is possible.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from lora_trainer.cache.lease import in_use
from lora_trainer.common.errors import InputError
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import HashMemo
from lora_trainer.config.config import flatten
from lora_trainer.families.locate import identified, locate, with_choices
from lora_trainer.hardware.machine import Hardware, detect, hardware_from
from lora_trainer.run.device import pinning, planned_device, setup_torch
from lora_trainer.run.job import TrainingJob
from lora_trainer.run.prepare import Prepared, Request, prepare
from lora_trainer.run.run_folder import RunFolder
from lora_trainer.run.session import follow_job
from lora_trainer.run.stop import StopFlag, taking_signals
from lora_trainer.training.cores import SharedCores
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.loop import report_lag


@dataclass(frozen=True, kw_only=True)
class Orders:
    """What the leader has decided, as JSON for the others."""

    settings: dict[str, Any]
    at_once: dict[str, int]
    sharing: int
    hardware: dict[str, Any]
    fingerprint: str
    identities: dict[str, str]
    prompts: list[str]
    folder: str


def gather(
    ranks: ProcessGroup,
    prepared: Prepared,
    folder: RunFolder,
    events: EventStream,
    *,
    prompts: Sequence[str],
) -> None:
    """Tell the other processes what was decided, and wait for them."""
    if ranks.monitor is None:
        return
    ranks.monitor.timeout_s = prepared.config.hardware.process_timeout_s
    ranks.monitor.record(events)
    orders = Orders(
        settings=flatten(prepared.config),
        at_once={
            f"{width}x{height}": count
            for (width, height), count in prepared.plan.images_at_once.items()
        },
        sharing=ranks.dist_env.local_count,
        hardware=asdict(prepared.hardware),
        fingerprint=prepared.dataset.fingerprint,
        identities={name: part.identity for name, part in prepared.facts.parts.items()},
        prompts=list(prompts),
        folder=str(folder.path),
    )
    ranks.monitor.give("orders", json.dumps(asdict(orders)))
    _connect(ranks, prepared)


def follow(asked: Request, ranks: ProcessGroup) -> Path:
    """Do a share of what another process leads: same settings, same data, same base, nothing written."""
    assert ranks.monitor is not None
    orders = Orders(**json.loads(ranks.monitor.take("orders")))
    ranks.monitor.timeout_s = float(orders.settings["hardware.process_timeout_s"])
    request = Request(
        dataset=asked.dataset,
        run_settings=orders.settings,
        run_at_once=orders.at_once,
        processes=asked.processes,
        sharing=orders.sharing,
        fetches=True,
    )
    # Cards are those of this machine, which may be another one than the leader's.
    hardware = replace(hardware_from(orders.hardware), gpus=detect().gpus)
    prepared = prepare_with_base(request, hardware=hardware)
    identities = {name: part.identity for name, part in prepared.facts.parts.items()}
    if (prepared.dataset.fingerprint, identities) != (orders.fingerprint, orders.identities):
        what = "base" if identities != orders.identities else "dataset"
        raise InputError(
            f"process {ranks.dist_env.rank} finds another {what} under the same name than process 0",
            fix="give all machines the same files",
        )
    setup_torch(prepared)
    _connect(ranks, prepared)
    events, folder = EventStream(), Path(orders.folder)
    events.subscribe(ranks.monitor.tell)
    stop = StopFlag()
    with (
        taking_signals(stop),
        in_use(prepared.cache_root),
        SharedCores(events=events),
        pinning(prepared, events),
    ):
        follow_job(
            TrainingJob(
                prepared=prepared,
                folder=RunFolder(path=folder, lock=FileLock(folder / ".not-ours")),
                prompts=orders.prompts,
                state=None,
                events=events,
                stop=stop,
                started_at_s=time.time(),
                ranks=ranks,
            )
        )
    return folder


def _connect(ranks: ProcessGroup, prepared: Prepared) -> None:
    device = planned_device(prepared)
    ranks.connect(device, lag=report_lag(device))


def prepare_with_base(request: Request, *, hardware: Hardware | None = None) -> Prepared:
    """Plan a run with its base on this machine, downloaded where it was not.

    What is known of a base by name is less than its files say: captions are counted with its tokenizer.
    """
    prepared = prepare(request, hardware=hardware)
    if prepared.facts.layout is None:
        locate(prepared.config.base)
        prepared = prepare(request, hardware=hardware)
    return _with_base(prepared)


def _with_base(prepared: Prepared) -> Prepared:
    """Return `prepared` with the base on this machine and its parts identified by content."""
    config = prepared.config
    facts = with_choices(
        locate(config.base), config.base, zero_terminal_snr=prepared.facts.zero_terminal_snr
    )
    facts = replace(facts, chunks=prepared.facts.chunks)
    memo = HashMemo.load(prepared.cache_root / ".hashes.json")
    facts = identified(facts, memo)
    memo.save()
    return replace(prepared, facts=facts)

"""One training in several processes: the first one plans and sends its decisions to the others.

They travel as JSON through the launcher's store, because no collective is possible yet.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from lora_trainer.cache.store import in_use
from lora_trainer.common.errors import InputError
from lora_trainer.common.events import EventStream
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.config import flatten
from lora_trainer.families.locate import identified, locate, with_choices
from lora_trainer.hardware.machine import Hardware, detect, hardware_from
from lora_trainer.reporting.control import StopFlag, taking_signals
from lora_trainer.run.device import pinning, planned_device, setup_torch
from lora_trainer.run.prepare import Prepared, Request, prepare
from lora_trainer.run.run_folder import RunFolder, TrainingJob
from lora_trainer.run.session import follow_job
from lora_trainer.training.cores import shared_cores
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.loop import report_lag


def gather(
    ranks: ProcessGroup,
    prepared: Prepared,
    folder: RunFolder,
    events: EventStream,
    *,
    prompts: Sequence[str],
) -> None:
    """Send the leader's decisions to the other processes, and connect to them."""
    if ranks.monitor is None:
        return
    ranks.monitor.timeout_s = prepared.config.hardware.process_timeout_s
    ranks.monitor.record(events)
    orders = {
        "settings": flatten(prepared.config),
        "at_once": {
            f"{width}x{height}": count
            for (width, height), count in prepared.plan.images_at_once.items()
        },
        "sharing": ranks.dist_env.local_count,
        "hardware": asdict(prepared.hardware),
        "fingerprint": prepared.dataset.fingerprint,
        "identities": _identities(prepared),
        "prompts": list(prompts),
        "folder": str(folder.path),
    }
    ranks.monitor.give("orders", json.dumps(orders))
    _connect(ranks, prepared)
    if ranks.share_gpus:
        events.problem(
            "several processes compute on one GPU: their gradients are added in host memory",
            fix="nothing; one process for each GPU is faster",
            severity="note",
        )


def follow(request_here: Request, ranks: ProcessGroup) -> Path:
    """Do a share of a training that another process leads: same settings, data and base; writes no files."""
    assert ranks.monitor is not None
    orders = json.loads(ranks.monitor.take("orders"))
    ranks.monitor.timeout_s = float(orders["settings"]["hardware.process_timeout_s"])
    request = Request(
        dataset=request_here.dataset,
        run_settings=orders["settings"],
        run_at_once=orders["at_once"],
        processes=request_here.processes,
        sharing=orders["sharing"],
        fetches=True,
    )
    # GPUs are detected here, as this process may be on another machine than the leader.
    hardware = replace(hardware_from(orders["hardware"]), gpus=detect().gpus)
    prepared = prepare_with_base(request, hardware=hardware)
    identities = _identities(prepared)
    if (prepared.dataset.fingerprint, identities) != (orders["fingerprint"], orders["identities"]):
        part = "base" if identities != orders["identities"] else "dataset"
        raise InputError(
            f"process {ranks.dist_env.rank} finds another {part} under the same name than process 0",
            fix="give all machines the same files",
        )
    setup_torch(prepared)
    _connect(ranks, prepared)
    events, folder = EventStream(), Path(orders["folder"])
    events.subscribe(ranks.monitor.tell)
    stop = StopFlag()
    with (
        taking_signals(stop),
        in_use(prepared.cache_root),
        shared_cores(events),
        pinning(prepared, events),
    ):
        follow_job(
            TrainingJob(
                prepared=prepared,
                folder=RunFolder(path=folder),
                prompts=orders["prompts"],
                state=None,
                events=events,
                stop=stop,
                started_at_s=time.time(),
                ranks=ranks,
            )
        )
    return folder


def _identities(prepared: Prepared) -> dict[str, str]:
    return {name: part.identity for name, part in prepared.facts.parts.items()}


def _connect(ranks: ProcessGroup, prepared: Prepared) -> None:
    device = planned_device(prepared)
    ranks.connect(device, lag=report_lag(device))


def prepare_with_base(request: Request, *, hardware: Hardware | None = None) -> Prepared:
    """Plan a run with its base on this machine, its parts identified by content, downloading it if needed.

    After a download the run is planned again, because the files tell more than the base's name: captions
    are counted with its tokenizer.
    """
    prepared = prepare(request, hardware=hardware)
    if prepared.facts.layout is None:
        locate(prepared.config.base, on_bytes=request.on_bytes)
        prepared = prepare(request, hardware=hardware)
    config = prepared.config
    facts = with_choices(
        locate(config.base, on_bytes=request.on_bytes),
        config.base,
        zero_terminal_snr=prepared.facts.zero_terminal_snr,
    )
    memo = HashMemo.load(prepared.cache_root)
    facts = identified(replace(facts, chunks=prepared.facts.chunks), memo)
    memo.save()
    return replace(prepared, facts=facts)

"""The context of a training beside its plan: `TrainingJob`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from lora_trainer.cache.cache_plan import Needs
from lora_trainer.checkpoint.states import TrainingState
from lora_trainer.common.events import EventStream
from lora_trainer.run.prepare import Prepared
from lora_trainer.run.run_folder import RunFolder
from lora_trainer.training.distributed.process_group import ProcessGroup
from lora_trainer.training.training import Action


@dataclass(frozen=True, kw_only=True)
class TrainingJob:
    """The context of a training beside its plan: run folder, events, stop signal, processes.

    `state` is the resume state, None for a new run; `watchers` are actions that run between steps;
    `ranks` are the processes that share the work; `cache_needs` are the cache entries to read, None to
    compute them.
    """

    prepared: Prepared
    folder: RunFolder
    prompts: Sequence[str]
    state: TrainingState | None
    events: EventStream
    stop: Callable[[], int | None]
    started_at_s: float
    ranks: ProcessGroup = field(default_factory=ProcessGroup)
    watchers: Sequence[Action] = ()
    cache_needs: Needs | None = None

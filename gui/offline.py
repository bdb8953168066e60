"""Whether the interface and all that it starts may download: the switch on the page Machine.

Input: the rules of the queue, in which it is kept, because the queue starts trainings without the interface. Output:
the environment of this process, which those that it starts inherit, and huggingface_hub's own record of it.
"""

from __future__ import annotations

import os
import sys

from lora_trainer.queue.rules import (
    OFFLINE_VARIABLES,
    environment_of,
    is_offline,
    read_rules,
    switch_offline,
)

from .workplace import Workplace


def switch(work: Workplace, *, offline: bool) -> None:
    """Forbid or allow downloads from now on; what is under way goes on. Raises MachineError."""
    switch_offline(work.runs, offline=offline)
    apply(work)


def apply(work: Workplace) -> None:
    """Do in this process as the switch says."""
    wanted = environment_of(read_rules(work.runs), os.environ)
    for variable in OFFLINE_VARIABLES:
        if variable in wanted:
            os.environ[variable] = wanted[variable]
        else:
            os.environ.pop(variable, None)
    # It reads its variable once, when it is imported.
    constants = sys.modules.get("huggingface_hub.constants")
    if constants is not None:
        constants.HF_HUB_OFFLINE = is_offline(os.environ)  # type: ignore[attr-defined]  # looked up by its name

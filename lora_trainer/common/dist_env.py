"""Rank of this process among those that a launcher (`accelerate launch`, torchrun, Slurm through them) started.

Input is the environment that launchers set, output a `DistEnv`. Without a launcher there is one process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass

from lora_trainer.common.errors import MachineError

_READ_BY_LIBRARIES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    *("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    *(
        f"{launcher}_COMM_WORLD_{name}"
        for launcher in ("OMPI", "MV2")
        for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")
    ),
    "ACCELERATE_CPU_AFFINITY",
)
"""Variables of launchers and of MPI by which accelerate recognises that it is one process of several."""


@dataclass(frozen=True, kw_only=True)
class DistEnv:
    """This process is number `rank` of `count`, and `local_rank` of the `local_count` on its machine.

    The processes connect at `address` and `port`; rank 0 runs the store there unless the launcher does.
    `attempt` counts the launcher's restarts.
    """

    rank: int = 0
    count: int = 1
    local_rank: int = 0
    local_count: int = 1
    address: str = ""
    port: int = 0
    launcher_keeps_store: bool = False
    attempt: int = 0

    @property
    def is_main(self) -> bool:
        """Whether this is the main process, which plans, writes files and prints."""
        return self.rank == 0


def read_dist_env(environment: Mapping[str, str] = os.environ) -> DistEnv:
    """Return the place of this process; raises MachineError for missing or contradictory variables."""
    names = {
        "rank": "RANK",
        "count": "WORLD_SIZE",
        "local_rank": "LOCAL_RANK",
        "local_count": "LOCAL_WORLD_SIZE",
        "address": "MASTER_ADDR",
        "port": "MASTER_PORT",
    }
    variables = {field: environment[name] for field, name in names.items() if environment.get(name)}
    # A launcher may also start a single process, which needs no group.
    if variables.get("count", "1") == "1":
        return DistEnv()
    if missing := names.keys() - variables.keys():
        raise _contradiction(variables | dict.fromkeys(missing, "nothing"))
    try:
        process = DistEnv(
            **{field: int(value) for field, value in variables.items() if field != "address"},
            address=variables["address"],
            launcher_keeps_store=environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
            attempt=int(environment.get("TORCHELASTIC_RESTART_COUNT", "0")),
        )
    except ValueError:
        raise _contradiction(variables) from None
    if not (0 <= process.rank < process.count and 0 <= process.local_rank < process.local_count):
        raise _contradiction(variables)
    return process


@contextmanager
def without_launcher(environment: MutableMapping[str, str] = os.environ) -> Iterator[None]:
    """Hide from libraries, while the block runs, that a launcher started this process."""
    hidden = {name: environment.pop(name) for name in _READ_BY_LIBRARIES if name in environment}
    try:
        yield
    finally:
        environment.update(hidden)


def share(total: int, *, rank: int, count: int) -> range:
    """Return the indices out of `total` that process `rank` of `count` works on; shares differ by one at most."""
    return range(total * rank // count, total * (rank + 1) // count)


def full_batch(batch_size: int, *, count: int) -> int:
    """Round `batch_size` up to a multiple of `count` processes."""
    return -(-batch_size // count) * count


def _contradiction(variables: Mapping[str, str]) -> MachineError:
    assignments = ", ".join(f"{name} {value}" for name, value in variables.items())
    return MachineError(
        f"the launcher sets {assignments}, which describes no process of a group",
        fix="start it with `accelerate launch -m lora_trainer ...`, or without a launcher",
    )

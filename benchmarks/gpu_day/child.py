"""Measures cases of one slice, one after the other, in a process of its own; started by `runner.py`.

Its one argument is JSON (`Order`). Each result is written at once. What is being measured stands in a
file meanwhile, so that it is known if this process does not survive it.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
LOST = 3
"""Exit code after an error that leaves no device to this process; the case has its result."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """Cases of a slice to measure, until when (`time.time()`), and where results and other files are."""

    slice: str
    cases: list[str]
    results: str
    folder: str
    until_s: float
    origin: dict[str, Any]

    @property
    def running(self) -> Path:
        """The file that names the case being measured."""
        return Path(self.folder) / "running.json"

    def to_json(self) -> str:
        """Return what `from_json` reads."""
        return json.dumps(asdict(self))


def main() -> int:
    """Measure; return the exit code."""
    order = Order(**json.loads(sys.argv[1]))
    sys.path[:0] = [str(ROOT)]
    import torch

    from benchmarks.gpu_day.cases import SLICES
    from benchmarks.gpu_day.device import Here
    from benchmarks.gpu_day.results import Origin, Results
    from lora_trainer.common.errors import first_line
    from lora_trainer.network.out_of_memory import free_memory, is_lost

    origin = Origin(**order.origin)
    device = (
        torch.device("cuda", origin.index) if origin.device_type == "cuda" else torch.device("cpu")
    )
    if device.type == "cuda" and not torch.cuda.is_available():
        sys.exit(f"torch {torch.__version__} cannot use {origin.device}")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    here = Here(device=device, tiny=origin.tiny, folder=Path(order.folder))
    results = Results(folder=Path(order.results), origin=origin)
    (piece,) = (piece for piece in SLICES if piece.name == order.slice)
    measure = import_module(f"benchmarks.gpu_day.{piece.module}").measure
    cases = {case.name: case for case in piece.of(tiny=origin.tiny)}
    for case in (cases[name] for name in order.cases):
        if time.time() + case.seconds > order.until_s:
            continue  # a shorter one may still fit
        order.running.write_text(json.dumps({"case": case.name, "began_s": time.time()}))
        began, lost = time.monotonic(), False
        try:
            fields = {"status": "done", "result": measure(dict(case.values), here)}
        except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the result of this case
            fields = {"status": "failed", "error": f"{type(error).__name__}: {first_line(error)}"}
            lost = is_lost(error)
        seconds = time.monotonic() - began
        results.write(order.slice, case.name, seconds=seconds, **fields)
        order.running.unlink()
        ending = fields.get("error") or _held(fields["result"])
        print(
            f"  {case.name}: {fields['status']} in {seconds:.1f} s{ending and ', '}{ending}",
            flush=True,
        )
        if lost:
            return LOST
        free_memory()  # outside the except block: its traceback keeps tensors alive
    return 0


def _held(result: dict[str, Any]) -> str:
    """Say where what was promised of a way did not hold."""
    return "" if result.get("holds", True) else "NOT the same"


if __name__ == "__main__":
    sys.exit(main())

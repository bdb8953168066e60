"""Lets a process measure the cases of a slice within a time, and writes down what it did not survive. No torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from benchmarks.gpu_day.cases import Case, Slice
from benchmarks.gpu_day.child import LOST, ROOT, Order
from benchmarks.gpu_day.results import Results
from lora_trainer.hardware.devices import use_expandable_segments

NO_MORE_THAN_S = 5.0
"""Of the time that is left nothing is begun in so little."""
WHOLE_SHARE = 0.8
"""What a case had of the command's time when not finishing in it is its own failure."""
GRACE_S = 10.0
CHILD = ("-m", "benchmarks.gpu_day.child")
ERROR_LINES = 4


@dataclass(frozen=True, kw_only=True)
class Runner:
    """Where results and the files that cases share are, and the end of the command's time (`time.time()`)."""

    results: Results
    folder: Path
    until_s: float
    limit_s: float
    child: Sequence[str] = CHILD

    @property
    def left_s(self) -> float:
        """What is left of the time."""
        return self.until_s - time.time()

    def measure(self, piece: Slice, cases: Sequence[Case]) -> None:
        """Measure as many of these cases as there is time for."""
        self.folder.mkdir(parents=True, exist_ok=True)
        todo = self._without_gpu(piece, cases)
        while todo and self.left_s > NO_MORE_THAN_S:
            before = self._written(piece)
            order = self._order(piece, todo)
            order.running.unlink(missing_ok=True)
            code, output = self._run(piece, order)
            written = self._written(piece)
            done = {name for name, at in written.items() if before.get(name) != at}
            todo = [case for case in todo if case.name not in done]
            if code == 0:
                return
            failed = self._broken_off(order, code)
            if code is None and failed is None:
                return  # it goes on next time
            if failed is not None:
                seconds, reason = failed[1], failed[2] or output
                self._fail(piece, failed[0], reason, seconds=seconds)
                todo = [case for case in todo if case.name != failed[0]]
            elif code != LOST:  # it did not come as far as a case
                for case in todo:
                    self._fail(piece, case.name, output, seconds=0.0)
                return

    def _without_gpu(self, piece: Slice, cases: Sequence[Case]) -> list[Case]:
        """Write down what this machine cannot measure; return the rest."""
        if self.results.origin.device_type == "cuda":
            return list(cases)
        for case in cases:
            if case.needs_gpu:
                self.results.write(
                    piece.name, case.name, "needs a GPU", seconds=0.0, reason=case.needs_gpu
                )
                print(f"  {case.name}: needs a GPU, {case.needs_gpu}", flush=True)
        return [case for case in cases if not case.needs_gpu]

    def _order(self, piece: Slice, cases: Sequence[Case]) -> Order:
        return Order(
            slice=piece.name,
            cases=[case.name for case in cases],
            results=str(self.results.folder.resolve()),
            folder=str(self.folder.resolve()),
            until_s=self.until_s,
            origin=asdict(self.results.origin),
        )

    def _written(self, piece: Slice) -> dict[str, Any]:
        """Return when each case was measured."""
        rows = self.results.read(piece.name)["rows"]
        return {name: row["at"] for name, row in rows.items()}

    def _run(self, piece: Slice, order: Order) -> tuple[int | None, str]:
        """Start the process; return its exit code, None where time ended, and the end of what it said."""
        environment = {**os.environ, **piece.environment, "PYTHONUNBUFFERED": "1"}
        use_expandable_segments(environment)  # read when torch is imported
        paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        for variable, name in (
            ("TORCHINDUCTOR_CACHE_DIR", "inductor"),
            ("TRITON_CACHE_DIR", "triton"),
        ):
            environment.setdefault(variable, str(self.folder.resolve() / name))
        log = self.folder / f"{piece.name}.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [sys.executable, *self.child, order.to_json()],
                cwd=ROOT,
                env=environment,
                stderr=file,
            )
            try:
                code: int | None = process.wait(timeout=max(0.0, self.left_s))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                if process.poll() is None:
                    end(process.pid)
                    process.wait()
        lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
        return code, " / ".join(lines[-ERROR_LINES:]) or f"exit code {code}"

    def _broken_off(self, order: Order, code: int | None) -> tuple[str, float, str] | None:
        """Return the case that a process did not survive, its seconds, and why if that is known.

        None: there was none, or it had less than most of the time and is to be tried again.
        """
        with suppress(OSError, ValueError):
            running = json.loads(order.running.read_text())
            order.running.unlink()
            began_s = float(running["began_s"])
            seconds = time.time() - began_s
            if code is not None:
                return running["case"], seconds, ""
            if self.until_s - began_s >= WHOLE_SHARE * self.limit_s:
                return running["case"], seconds, f"not done in {self.until_s - began_s:.0f} s"
        return None

    def _fail(self, piece: Slice, case: str, reason: str, *, seconds: float) -> None:
        self.results.write(piece.name, case, "failed", seconds=seconds, error=reason)
        print(f"  {case}: failed, {reason}", flush=True)


def end(pid: int) -> None:
    """End a process and all that it has started; launchers give theirs groups of their own."""
    with suppress(psutil.NoSuchProcess):
        top = psutil.Process(pid)
        family = [top, *top.children(recursive=True)]
        for process in family:
            with suppress(psutil.NoSuchProcess):
                process.terminate()
        _, alive = psutil.wait_procs(family, timeout=GRACE_S)
        for process in alive:
            with suppress(psutil.NoSuchProcess):
                process.kill()

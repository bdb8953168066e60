"""Draws what the page of a LoRA asks for, with the code of `lora-train sample`, and keeps the base loaded (drawing.py).

Input: the runs folder, with the jobs that wait. Outputs: pictures in the folders that the jobs name, and for each job
its runner, its log with the reason of a failure, and its result.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from lora_trainer.common.errors import LoraTrainError, MachineError, RequestError
from lora_trainer.common.events import shown
from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.common.processes import is_alive, quiet_network_libraries
from lora_trainer.common.wording import without_secrets
from lora_trainer.config.prompt_line import read_prompt
from lora_trainer.hardware.kept_memory import keep, taken_by
from lora_trainer.hardware.machine import detect

from . import jobs, runs
from .drawing import (
    FAR_FILE,
    GAVE_WAY,
    KEPT_S,
    STOP_FILE,
    STOPPED,
    Far,
    Folder,
    far,
    start_process,
)
from .jobs import LOG_FILE, Job
from .workplace import Workplace

_LOOK_S = 0.05
# While it waits for the end of a training.
_WAITING_S = 1.0
# A page asks each second.
_TOLD_EACH_S = 0.5
# An older process needs so long to end.
_ENDS_WITHIN_S = 30.0


class _Stopped(Exception):
    """Somebody wants no more pictures of the job."""


@dataclass(kw_only=True)
class Drawer:
    """Takes one job after another until there is none for a while."""

    work: Workplace
    kept_s: float = KEPT_S
    # The `Bench` of run/samples.py; importing it takes seconds, so it is made with the first job.
    _bench: Any = None
    _job: Job | None = None
    _gpu_uuid: str = ""
    _record: dict[str, Any] = field(default_factory=dict)
    # Of the job: its whole pictures, the steps begun of the one that is being drawn, the timestep of the last of them.
    _pictures: int = 0
    _steps: int = 0
    _timestep: float = math.nan
    _began_s: float = 0.0
    _told_s: float = 0.0

    def serve(self) -> None:
        """Draw what waits; return when nothing was drawn for `kept_s`, or something is being trained."""
        signal.signal(signal.SIGTERM, lambda *_: self._give_way())
        folder = Folder.of(self.work)
        me = psutil.Process()
        self._record = {"pid": me.pid, "started_s": me.create_time()}
        folder.tell(self._record)
        until_s = time.monotonic() + self.kept_s
        while True:
            if (job := self._next()) is not None:
                self._do(job)
                until_s = time.monotonic() + (0 if runs.trains(self.work.runs) else self.kept_s)
            elif time.monotonic() >= until_s:
                with folder.changing():
                    if not any(folder.asked.iterdir()):
                        folder.leave()
                        return
            else:
                time.sleep(_LOOK_S)

    def _next(self) -> Job | None:
        """Return the next job that waits and still counts as begun."""
        for file in sorted(Folder.of(self.work).asked.iterdir()):
            file.unlink(missing_ok=True)
            try:
                job = jobs.read(self.work, file.name)
            except RequestError:  # forgotten meanwhile
                continue
            if job.state == "running":
                return job
        return None

    def _do(self, job: Job) -> None:
        """Draw a job; its result says how it ended."""
        jobs.take(job.folder)
        self._job = job
        try:
            self._draw(job)
            code = 0
        except _Stopped:
            code = STOPPED
        except LoraTrainError as error:
            code = self._failed(job, str(error), error.exit_code)
        except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, and the next job may go well
            traceback.print_exc()
            # Nobody knows what is left in its networks.
            self._bench.empty()
            code = self._failed(job, f"{type(error).__name__}: {error}", 1)
        self._job = None
        self._tell()
        jobs.end(job.folder, code)

    def _failed(self, job: Job, why: str, code: int) -> int:
        line = f"error: {shown(without_secrets(why))}\n"
        (job.folder / LOG_FILE).write_bytes(line.encode())
        return code

    def _draw(self, job: Job) -> None:
        if self._bench is None:
            quiet_network_libraries()
            from lora_trainer.run.samples import Bench

            self._bench = Bench(before_pass=self._before_pass)
            gpu = detect().accelerator()[0]
            self._gpu_uuid = "" if gpu is None else gpu.uuid
        from lora_trainer.run.samples import make_images

        about = job.about
        self._pictures, self._steps, self._timestep = 0, 0, math.nan
        self._began_s = math.nan
        for each in about["files"]:
            for _ in make_images(
                Path(each["path"]),
                prompts=about["prompts"],
                base=each["base"] or None,
                output=Path(each["folder"]),
                seed=about["seed"],
                strengths=about["strengths"],
                bench=self._bench,
                go_on=True,
            ):
                self._pictures, self._steps, self._timestep = self._pictures + 1, 0, math.nan
                self._tell()
                self._refuse_stopped()

    def _before_pass(self, timestep: float) -> None:
        if math.isnan(self._began_s):
            before = None if self._job is None else far(self._job)  # it gave way, and goes on
            self._began_s = time.monotonic() - (0.0 if before is None else before.seconds)
        if timestep != self._timestep:  # a step may take several passes
            self._tell_far()
            self._steps += 1
            self._timestep = timestep
        if self._bench.base != self._record.get("base"):
            self._tell()
        self._refuse_stopped()

    def _tell_far(self) -> None:
        """Say how far the job is, with the whole steps of the picture that is being drawn."""
        now_s = time.monotonic()
        if self._job is None or now_s - self._told_s < _TOLD_EACH_S:
            return
        self._told_s = now_s
        told = Far(
            pictures=self._pictures,
            step=self._steps,
            steps=max(self._steps + 1, self._wished_steps(self._job)),
            seconds=now_s - self._began_s,
        )
        write_atomic(self._job.folder / FAR_FILE, json_bytes(asdict(told)), durable=False)

    def _wished_steps(self, job: Job) -> int:
        """Return the steps of the picture that is being drawn: as its prompt says, else the usual ones."""
        prompts = job.about["prompts"]
        row = self._pictures // len(job.about["strengths"]) % len(prompts)
        usual: int = self._bench.steps
        return read_prompt(prompts[row]).steps or usual

    def _refuse_stopped(self) -> None:
        if self._job is not None and (self._job.folder / STOP_FILE).exists():
            raise _Stopped

    def _tell(self) -> None:
        """Say what is loaded, and how much of a GPU it takes."""
        bench = self._bench
        base = "" if bench is None else bench.base
        if base:
            keep(gpu_uuid=self._gpu_uuid, gpu_bytes=bench.gpu_bytes())
        if base != self._record.get("base"):
            self._record["base"] = base
            Folder.of(self.work).tell(self._record)

    def _give_way(self) -> None:
        """End at once, because a training or another program needs the memory; what is being drawn goes on after it."""
        folder, taker = Folder.of(self.work), taken_by()
        if self._job is not None and taker is not None:
            (folder.asked / self._job.id).touch()
            waiting = start_process(self.work, folder, str(taker.pid), repr(taker.started_s))
            jobs.take(self._job.folder, pid=waiting.pid)
        elif self._job is not None:
            jobs.end(self._job.folder, GAVE_WAY)
        folder.leave()
        os._exit(GAVE_WAY)

    def wait_for(self, pid: int, started_s: float) -> bool:
        """Wait until a process has ended and nothing is trained; return whether there is still something to draw."""
        folder, me = Folder.of(self.work), psutil.Process()
        folder.tell({"pid": me.pid, "started_s": me.create_time(), "waits_for": pid})
        while is_alive(pid=pid, started_s=started_s) or runs.trains(self.work.runs):
            for file in list(folder.asked.iterdir()):
                with suppress(RequestError):  # forgotten meanwhile
                    job = jobs.read(self.work, file.name)
                    if (job.folder / STOP_FILE).exists():
                        file.unlink(missing_ok=True)
                        jobs.end(job.folder, STOPPED)
            if not any(folder.asked.iterdir()):
                folder.leave()
                return False
            time.sleep(_WAITING_S)
        return True


def main(runs_folder: Path, after: tuple[int, float] | None = None) -> None:
    """Draw until nothing is asked for, unless another process does; first wait for the end of the process `after`."""
    work = Workplace(runs=runs_folder)
    try:
        with Folder.of(work).living(within_s=_ENDS_WITHIN_S):
            drawer = Drawer(work=work)
            if after is None or drawer.wait_for(*after):
                drawer.serve()
    except MachineError as error:  # another one draws
        sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), (int(sys.argv[2]), float(sys.argv[3])) if len(sys.argv) > 3 else None)

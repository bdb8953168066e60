"""What was measured: a file for each slice, written after every case; and what it was measured with. No torch.

A case counts as done for the code it was measured with. Where git is there its commit is written too: the
code alone decides, because a machine with a GPU may have a copy of the files without the repository.
"""

from __future__ import annotations

import hashlib
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu_day.cases import SLICES, Case, Slice
from lora_trainer.common.files import json_bytes, read_json_object, write_atomic
from lora_trainer.hardware.devices import torch_build
from lora_trainer.hardware.machine import detect

ROOT = Path(__file__).resolve().parents[2]
CODE = ("lora_trainer", "presets", "benchmarks", "tests/fakes")
"""What a result depends on."""
STATUS = Literal["done", "failed", "needs a GPU"]


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What something is measured with: code, torch, device."""

    commit: str
    code: str
    torch: str
    device: str
    device_type: Literal["cuda", "cpu"]
    tiny: bool
    index: int = 0
    """Of the GPU, as CUDA counts."""

    @property
    def machine(self) -> dict[str, Any]:
        """What a file of results is about; another one is put aside."""
        return {"torch": self.torch, "device": self.device, "tiny": self.tiny}


def origin(*, tiny: bool, device: str, commit: str | None, measures: bool) -> Origin:
    """Look at the code and the machine; `device` is auto, cuda or cpu.

    Raises SystemExit where something is to be measured and there is no GPU for it.
    """
    hardware = detect()
    card, reason = hardware.accelerator()
    gpu = card if device != "cpu" else None
    if gpu is None and measures and (device == "cuda" or not tiny):
        raise SystemExit(f"no GPU to measure on: {reason}; --tiny tries every slice on a processor")
    build = torch_build()
    return Origin(
        commit=commit or _commit(),
        code=_code_digest(),
        torch=build.version if build else "none",
        device=gpu.name if gpu else hardware.cpu_name,
        device_type="cuda" if gpu else "cpu",
        tiny=tiny,
        index=gpu.index if gpu else 0,
    )


def recorded_origin(folder: Path, *, tiny: bool) -> Origin:
    """Return what the results in a folder were measured with; raises SystemExit without any, or with several."""
    start = "tiny-" if tiny else ""
    names = [piece.name for piece in SLICES]
    files = [path for name in names if (path := folder / f"{start}{name}.json").is_file()]
    found = {(file["torch"], file["device"]) for file in map(read_json_object, files)}
    if len(found) != 1:
        said = "; ".join(f"{device}, torch {torch}" for torch, device in sorted(found))
        raise SystemExit(f"{folder} has to have results of one machine, and has {said or 'none'}")
    ((torch, device),) = found
    return Origin(
        commit="unknown",
        code=_code_digest(),
        torch=torch,
        device=device,
        device_type="cpu",
        tiny=tiny,
    )


def _code_digest() -> str:
    """Return a digest of all that a result depends on."""
    digest = hashlib.sha256()
    files = [path for folder in CODE for path in (ROOT / folder).rglob("*")]
    for path in sorted(path for path in files if path.suffix in (".py", ".json")):
        digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


def _commit() -> str:
    """Return the commit that is checked out, and whether files have changed since; "unknown" without git."""

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=ROOT, capture_output=True, text=True, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        commit = git("rev-parse", "--short=10", "HEAD")
        changed = git("status", "--porcelain", "--", *CODE)
    except OSError:  # there is no git
        return "unknown"
    return f"{commit or 'unknown'}{' with changes' if changed else ''}"


@dataclass(frozen=True, kw_only=True)
class Results:
    """The results in a folder; `again`: failures do not count, `other_code`: what was done with other code does."""

    folder: Path
    origin: Origin
    again: bool = False
    other_code: bool = False

    def path(self, name: str) -> Path:
        """Return the file of a slice."""
        return self.folder / f"{'tiny-' if self.origin.tiny else ''}{name}.json"

    def read(self, name: str) -> dict[str, Any]:
        """Return the file of a slice, an empty one where there is none of this machine; puts others aside."""
        empty: dict[str, Any] = {"slice": name, **self.origin.machine, "rows": {}}
        path = self.path(name)
        if not path.is_file():
            return empty
        found = read_json_object(path)
        if {key: found.get(key) for key in self.origin.machine} == self.origin.machine:
            return found
        aside = self.folder / "older"
        aside.mkdir(exist_ok=True)
        path.rename(aside / f"{path.stem}-{time.time_ns()}.json")
        return empty

    def missing(self, piece: Slice) -> list[Case]:
        """Return the cases of a slice that have no result that counts."""
        rows = self.read(piece.name)["rows"]
        cases = piece.of(tiny=self.origin.tiny)
        return [case for case in cases if not self._counts(rows.get(case.name))]

    def _counts(self, row: Mapping[str, Any] | None) -> bool:
        if row is None or (row["status"] == "failed" and self.again):
            return False
        same = row["code"] == self.origin.code
        return bool(same or (self.other_code and row["status"] == "done"))

    def write(self, name: str, case: str, status: STATUS, *, seconds: float, **fields: Any) -> None:
        """Add the result of a case, or put it in the place of an older one."""
        found = self.read(name)
        found["rows"][case] = {
            "status": status,
            "commit": self.origin.commit,
            "code": self.origin.code,
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "seconds": round(seconds, 1),
            **fields,
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomic(self.path(name), json_bytes(found), durable=False)

    def rows(self, piece: Slice) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the cases of a slice that have a result, with it."""
        rows = self.read(piece.name)["rows"]
        for case in piece.of(tiny=self.origin.tiny):
            if case.name in rows:
                yield case.name, rows[case.name]

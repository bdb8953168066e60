"""A pretended NVIDIA card: the driver built from driver.c and nvml.c, and the environment of a process that sees it.

The **CUDA build of torch** runs on it as it is: dispatcher, caching allocator, out-of-memory errors, pinned memory,
autograd's threads, choice of attention kernels, bitsandbytes' CUDA library. Memory of the card is reserved address
space, so true sizes cost nothing; kernels do nothing; copies of at most 64 KiB are real; launches, copies and waits
are counted. It cannot see values (losses, NaN), races, the speed of kernels, cuDNN, NCCL, Windows or the bus:
what ran on it has been **rehearsed** and has not run on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
LIBRARIES = (
    "torch/lib/libtorch_cuda.so",
    "torch/lib/libc10_cuda.so",
    "torch/lib/libtorch_cuda_linalg.so",
    "torch/lib/libcaffe2_nvrtc.so",
)
"""Libraries whose calls of the runtime, the driver and cuBLAS are answered, beside those of bitsandbytes."""
_CALL = re.compile(r"(?:__cuda|cu)(?!sparseLt|file|File|dnn|pti)\w+")
_FIELDS = re.compile(r"typedef struct \{\s+long ([^}]*)\} Counts;")


def _counted() -> tuple[str, ...]:
    declared = _FIELDS.search((HERE / "driver.c").read_text(encoding="utf-8"))
    assert declared is not None, "driver.c has no struct of that form"
    return tuple(name for name in re.findall(r"\w+", declared[1]) if name != "long")


COUNTED = _counted()
"""Fields of `Counts` in driver.c; those from `used` on are bytes now, the others grow."""


class NoCudaTorch(Exception):
    """This environment has a torch without CUDA, or lacks the headers or the compiler for the driver."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the driver says of itself; `pinned_limit_bytes` is how much the system lets a program pin."""

    vram_gib: float
    capability: str = "8.9"
    name: str = "NVIDIA GeForce RTX 4060"
    gpus: int = 1
    multiprocessors: int = 24
    pinned_limit_bytes: int | None = None

    def environment(self, built: Path) -> dict[str, str]:
        """Return the variables for a process that sees this card through the libraries in `built`."""
        variables = {
            **os.environ,
            "LD_PRELOAD": str(built / "libcuda.so.1"),
            "LD_LIBRARY_PATH": f"{built}:{os.environ.get('LD_LIBRARY_PATH', '')}",
            "PRETENDED_VRAM_GIB": str(self.vram_gib),
            "PRETENDED_CAPABILITY": self.capability,
            "PRETENDED_NAME": self.name,
            "PRETENDED_GPUS": str(self.gpus),
            "PRETENDED_MULTIPROCESSORS": str(self.multiprocessors),
        }
        if self.pinned_limit_bytes is not None:
            variables["PRETENDED_PINNED_MIB"] = str(self.pinned_limit_bytes >> 20)
        return variables


def build(folder: Path) -> Path:
    """Compile both libraries into `folder` unless they are newer than their sources, and return it.

    Needs gcc, nm and the CUDA wheels of this environment: torch, bitsandbytes and triton, whose headers are used.
    """
    site = Path(sysconfig.get_paths()["purelib"])
    headers = sorted(site.glob("nvidia/cu*/include"))
    if not (site / LIBRARIES[0]).is_file() or not headers:
        raise NoCudaTorch(
            "torch here is not a CUDA build: pip install torch==2.13.0 from PyPI has one"
        )
    made = [folder / "libcuda.so.1", folder / "libnvidia-ml.so.1"]
    sources = [HERE / "driver.c", HERE / "nvml.c", Path(__file__)]
    newest = max(source.stat().st_mtime for source in sources)
    if all(library.is_file() and library.stat().st_mtime > newest for library in made):
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    crt = site / "triton" / "backends" / "nvidia" / "include"
    include = [f"-I{path}" for path in (*headers, crt)]
    first = folder / "answered.so"
    _compile(include, first, HERE / "driver.c")
    answered = _symbols(first, "--defined-only")
    asked: set[str] = set()
    libraries = [site / name for name in LIBRARIES]
    libraries += sorted((site / "bitsandbytes").glob("libbitsandbytes_cuda*.so"))
    for library in libraries:
        if library.is_file():
            asked |= {
                name for name in _symbols(library, "--undefined-only") if _CALL.fullmatch(name)
            }
    rest = folder / "rest.c"
    # A call that nothing here depends on is answered with 0, success.
    rest.write_text("".join(f"int {name}() {{ return 0; }}\n" for name in sorted(asked - answered)))
    _compile(include, made[0], HERE / "driver.c", rest)
    _compile(include, made[1], HERE / "nvml.c")
    return folder


def _compile(include: list[str], library: Path, *sources: Path) -> None:
    command = ["gcc", "-O1", "-shared", "-fPIC", "-w", f"-Wl,-soname,{library.name}", *include]
    try:
        subprocess.run(
            [*command, *map(str, sources), "-o", str(library), "-ldl", "-lpthread"], check=True
        )
    except FileNotFoundError as error:
        raise NoCudaTorch("gcc is not installed") from error


def _symbols(library: Path, which: str) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", which, str(library)], check=True, capture_output=True, text=True
    ).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()}


class _Counts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_long) for name in COUNTED]


class Counter:
    """Counts of the driver that this process was started with."""

    def __init__(self) -> None:
        library = ctypes.CDLL("libcuda.so.1")
        library.pretended_counts.restype = ctypes.POINTER(_Counts)
        self._library = library

    @property
    def _counts(self) -> _Counts:
        counts: _Counts = self._library.pretended_counts().contents
        return counts

    def now(self) -> dict[str, int]:
        return {name: getattr(self._counts, name) for name in COUNTED}

    def forget_peaks(self) -> None:
        """Let the peaks begin at what is in use now."""
        self._counts.peak_used = self._counts.used
        self._counts.peak_pinned = self._counts.pinned

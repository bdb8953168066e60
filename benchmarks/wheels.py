"""Gathers what the trainer needs beside torch as wheels, for a machine with a GPU and no network.

Usage: python benchmarks/wheels.py FOLDER [--python 3.12] [--installed FILE] [--cuda 13.0] [--machine x86_64]

Run it where everything is installed; versions are those of here. FILE is what `python -m pip list
--format=freeze` says on the other machine: what it has in a version that will do is left out. With
--cuda, which is what torch there is built for (`torch.version.cuda`), bitsandbytes comes along with the
kernels for that alone, 3 MB instead of 43. There, from the checkout:

    python -m pip install --no-index --no-deps --target .site FOLDER/*.whl
    PYTHONPATH=.site python -m benchmarks.gpu_day

torch and what it brings are left to the other machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
GLIBC = (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)
"""Of manylinux platforms; pip matches each by its own number."""
KERNELS = "bitsandbytes"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    parser.add_argument("--python", default=here, help="the other machine's")
    parser.add_argument("--machine", default="x86_64", help="the other machine's `uname -m`")
    parser.add_argument("--installed", type=Path, help="what is there: name==version, one a line")
    parser.add_argument("--cuda", help="torch.version.cuda there; brings bitsandbytes")
    asked = parser.parse_args()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    if asked.cuda:
        extra = project["optional-dependencies"]["cuda"]
        wanted += [text for text in extra if Requirement(text).name == KERNELS]
    installed = _installed(asked.installed.read_text()) if asked.installed else {}
    needed = closure(wanted, without=closure(["torch"], without={}), installed=installed)
    pins = [f"{name}=={version}" for name, version in sorted(needed.items())]
    _download(pins, asked.folder, python=asked.python, machine=asked.machine)
    if asked.cuda:
        for wheel in asked.folder.glob(f"{KERNELS}-*.whl"):
            keep_kernels(wheel, cuda=asked.cuda)
    size_bytes = sum(file.stat().st_size for file in asked.folder.glob("*.whl"))
    print(f"{len(pins)} wheels, {size_bytes / 2**20:.0f} MiB in {asked.folder}")


def _installed(text: str) -> dict[str, str]:
    pairs = (line.strip().partition("==") for line in text.splitlines() if "==" in line)
    return {canonicalize_name(name): version for name, _, version in pairs}


def closure(
    requirements: Sequence[str],
    *,
    without: Mapping[str, str],
    installed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Return the version here of each package that these need, by name, but what is `installed` elsewhere.

    An installed one is left out where its version satisfies everybody that needs it.
    """
    needed: dict[str, str] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in needed or name in without or (wanted.marker and not wanted.marker.evaluate()):
            continue
        there = (installed or {}).get(name)
        if there is not None and wanted.specifier.contains(there, prereleases=True):
            continue
        try:
            own = distribution(name)
        except PackageNotFoundError:
            continue  # for another extra or platform
        needed[name] = own.version
        waiting += [Requirement(text) for text in own.requires or ()]
    return needed


def _download(pins: Sequence[str], folder: Path, *, python: str, machine: str) -> None:
    platforms = [f"manylinux_2_{number}_{machine}" for number in GLIBC]
    platforms += [f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    line += ["--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    for platform in platforms:
        line += ["--platform", platform]
    subprocess.run([*line, "--dest", str(folder), *pins], check=True)


def keep_kernels(wheel: Path, *, cuda: str) -> None:
    """Take the libraries for other versions of CUDA, and other devices, out of a wheel of bitsandbytes.

    Raises SystemExit where it has none for this one.
    """
    own = f"cuda{cuda.replace('.', '')}.so"
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as whole:
        libraries = [name for name in whole.namelist() if name.endswith(".so")]
        kept = [name for name in libraries if name.endswith((own, "_cpu.so"))]
        if not any(name.endswith(own) for name in kept):
            raise SystemExit(f"{wheel.name} has no kernels for CUDA {cuda}: {', '.join(libraries)}")
        gone = set(libraries) - set(kept)
        with zipfile.ZipFile(slim, "w", zipfile.ZIP_DEFLATED) as file:
            for entry in whole.infolist():
                data = whole.read(entry)
                if entry.filename.endswith("RECORD"):
                    lines = data.decode().splitlines(keepends=True)
                    data = "".join(
                        line for line in lines if line.partition(",")[0] not in gone
                    ).encode()
                if entry.filename not in gone:
                    file.writestr(entry, data)
    slim.replace(wheel)


if __name__ == "__main__":
    main()

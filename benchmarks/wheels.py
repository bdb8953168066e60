"""Gathers what the benchmarks need beside torch as wheels, for a machine with a card and no network.

Usage: python benchmarks/wheels.py FOLDER, where everything is installed; there, from the checkout:

    python -m pip install --no-index --no-deps --target .site FOLDER/*.whl
    PYTHONPATH=.site python benchmarks/step_ladder.py --true-size --block 10 --json ladder.json

Wheels are those of the versions installed here, for this Python and platform; torch and what it brings
are left to the other machine.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = closure(project["dependencies"], without=closure(["torch"], without={}))
    pins = [f"{name}=={version}" for name, version in sorted(needed.items())]
    line = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    subprocess.run([*line, "--only-binary=:all:", "--dest", str(folder), *pins], check=True)
    size_bytes = sum(file.stat().st_size for file in folder.glob("*.whl"))
    print(f"{len(pins)} wheels, {size_bytes / 2**20:.0f} MiB in {folder}")


def closure(requirements: list[str], *, without: dict[str, str]) -> dict[str, str]:
    """Return the installed version of each package that these need here, by name."""
    found: dict[str, str] = {}
    waiting = [Requirement(text) for text in requirements]
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        if name in found or name in without or (wanted.marker and not wanted.marker.evaluate()):
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            continue  # for another extra or platform
        found[name] = installed.version
        waiting += [Requirement(text) for text in installed.requires or ()]
    return found


if __name__ == "__main__":
    main()

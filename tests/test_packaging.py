"""What is installed is what is in the tree: the wheel, made by way of the sdist, is compared.

An editable install finds a data file that pyproject.toml does not list; a wheel lacks it. The
sources are built from a copy, because setuptools keeps stale files in `build/`.
"""

from __future__ import annotations

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TEXTS = ("pyproject.toml", "setup.py", "README.md", "LICENSE")
SOURCES = ("lora_trainer", "datasets", "gui", "presets", *TEXTS)
# Folder in the tree -> folder in the wheel.
INSTALLED_AS = {
    "lora_trainer": "lora_trainer",
    "gui": "lora_trainer/gui",
    "presets": "lora_trainer/presets",
    "datasets/example": "lora_trainer/example",
}
PACKAGE_OF = {"PIL": "pillow", "pynvml": "nvidia_ml_py", "yaml": "pyyaml"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Build sdist, and the wheel from it, with the tools of this environment."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(ROOT / name, copy / name)
    out = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return zipfile.ZipFile(path)


def test_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    expected = {
        f"{INSTALLED_AS[folder]}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder in INSTALLED_AS
        for path in (ROOT / folder).rglob("[!.]*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    found = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert found == expected
    weights = [name for name in found if name.endswith(".safetensors")]
    assert len(weights) == 4, "text encoder, autoencoder and both denoisers of the embedded bases"
    for name in found:
        if name.endswith("config.json"):
            assert b"_name_or_path" not in wheel.read(name), "it says where it was made"
    for name in weights:
        assert wheel.read(name) == (ROOT / name).read_bytes(), "it is whole"


def test_console_scripts_lead_to_functions_and_licence_and_version_are_stated(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = (name for name in wheel.namelist() if name.endswith("/entry_points.txt"))
    entry_points = configparser.ConfigParser()
    entry_points.read_string(wheel.read(name).decode())
    scripts = dict(entry_points["console_scripts"])
    assert set(scripts) == {"lora-train", "lora-train-gui"}
    for target in scripts.values():
        module, _, function = target.partition(":")
        source = wheel.read(module.replace(".", "/") + ".py").decode()
        defined = {
            node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)
        }
        assert function in defined, target
    source = wheel.read("lora_trainer/__init__.py").decode()
    (version,) = re.findall(r'^__version__ = "(.+)"$', source, re.MULTILINE)
    info = f"lora_train-{version}.dist-info"
    metadata = wheel.read(f"{info}/METADATA").decode()
    assert f"\nVersion: {version}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert wheel.read(f"{info}/licenses/LICENSE") == (ROOT / "LICENSE").read_bytes()


def test_every_imported_package_is_declared() -> None:
    """What this environment happens to hold must not hide a missing dependency."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    extras = [
        line
        for name in (
            "caption",
            "cuda",
            "gguf",
            "gui",
            "heic",
            "log",
            "mcp",
            "optim",
            "parquet",
            "phone",
            "tune",
            "xformers",
        )
        for line in optional[name]
    ]
    lines = [*project["dependencies"], *extras]
    declared = {re.split(r"[^\w.-]", line)[0].replace("-", "_").lower() for line in lines}
    imported: set[str] = set()
    for path in (path for folder in INSTALLED_AS for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.add(node.module.partition(".")[0])
    own = sys.stdlib_module_names | {"lora_trainer", "gui", "presets"}
    assert {PACKAGE_OF.get(name, name).lower() for name in imported - own} <= declared


def test_folders_are_no_packages() -> None:
    """An `__init__.py` in datasets/ would win over the Hugging Face package of that name."""
    assert not [*(ROOT / "datasets").rglob("__init__.py"), *(ROOT / "tests").rglob("__init__.py")]

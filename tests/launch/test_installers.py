"""The installers: the build of PyTorch for each machine, refusals, and a whole offline installation and removal.

Drivers are stand-ins on PATH; packages come from a folder instead of an index. install.ps1 only finds a
Python and is not run here (no PowerShell): `os.name` is Windows' in one test of install.py.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]
INSTALLER = ROOT / "install" / "install.py"
NVIDIA, KFD = "nvidia-smi", Path("/dev/kfd")
AS_ROOT = "LORA_TRAIN_INSTALL_AS_ROOT"
INDEX = "--index-url https://download.pytorch.org/whl/"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("installer_of_lora_train", INSTALLER)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


installer = load()


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run install.sh, in a home of its own."""
    return subprocess.run(
        ["sh", str(ROOT / "install" / "install.sh"), *arguments],
        env={**os.environ, AS_ROOT: "1", **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )


def program(folder: Path, name: str, answer: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\ncat <<'END'\n{answer}\nEND\n")
    (folder / name).chmod(0o755)


def disk(free_bytes: int) -> SimpleNamespace:
    return SimpleNamespace(total=10**13, used=10**13 - free_bytes, free=free_bytes)


@pytest.fixture(autouse=True)
def roomy_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installer.shutil, "disk_usage", lambda _: disk(10**12))
    monkeypatch.setenv(AS_ROOT, "1")


def dry_run(
    patch: pytest.MonkeyPatch, folder: Path, programs: Mapping[str, str], *, system: str = "linux"
) -> int:
    """Say what would be installed on a machine whose drivers' programs give these answers."""
    # `shutil.which` looks for other names where the system is Windows, so only the choice of the build knows it.
    patch.setattr(installer.sys, "platform", "linux" if system == "win32" else system)
    arm = "arm64" if system == "darwin" else "x86_64"
    patch.setattr(installer.platform, "machine", lambda: arm)
    choose = partial(installer.builds.choose_cuda, system=system)
    patch.setattr(installer.builds, "choose_cuda", choose)
    is_amd, exists = "rocminfo" in programs, Path.exists
    patch.setattr(Path, "exists", lambda path: is_amd if path == KFD else exists(path))
    for name, answer in programs.items():
        program(folder / "programs", name, answer)
    patch.setenv("PATH", str(folder / "programs"), prepend=os.pathsep)
    code: int = installer.main(["--dry-run", "--prefix", str(folder / "prefix")])
    assert not exists(folder / "prefix"), "a dry run writes nothing"
    return code


@pytest.mark.parametrize(
    ("programs", "system", "builds"),
    [
        ({NVIDIA: "NVIDIA GeForce RTX 4060, 560.94, 8.9"}, "linux", ["cu129"]),
        ({NVIDIA: "NVIDIA GeForce RTX 4060, 560.94, 8.9"}, "win32", ["cu126"]),
        ({NVIDIA: "NVIDIA GeForce RTX 5090, 580.65, 12.0"}, "linux", ["cu130"]),
        ({NVIDIA: "NVIDIA GeForce RTX 5090, [N/A], [N/A]"}, "linux", ["cu130"]),
        ({NVIDIA: "NVIDIA RTX A6000, 535.1, 8.6\nTesla P40, 535.1, 6.1"}, "linux", ["cu126"]),
        ({"rocminfo": "  Name: gfx1100"}, "linux", ["rocm7.2", "rocm7.1"]),
        ({"xpu-smi": "Device Name: Intel(R) Arc(TM) A770"}, "linux", ["xpu"]),
        ({}, "linux", ["cpu"]),
        ({}, "darwin", []),  # the ordinary torch is Apple's
    ],
    ids=["new", "windows", "newest", "not told", "oldest of two", "amd", "intel", "none", "apple"],
)
def test_each_gpu_gets_the_builds_of_torch_that_have_its_kernels(
    programs: Mapping[str, str],
    system: str,
    builds: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert dry_run(monkeypatch, tmp_path, programs, system=system) == 0
    shown = capsys.readouterr().out
    assert re.findall(rf"{INDEX}(\S+)", shown) == builds
    assert f"install --upgrade torch==2.13.0{' --index' if builds else chr(10)}" in shown
    assert ("[cuda,gui,log]" if NVIDIA in programs else "[gui,log]") in shown


def test_a_driver_that_cannot_work_a_small_disk_root_and_an_old_python_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer, sentence in (
        (
            "NVIDIA GeForce GTX 970, 470.82, 5.2",
            "driver 470.82 is too old: torch==2.13.0 for this GPU needs 525",
        ),
        (
            "Tesla K80, 470.82, 3.7",
            "no build of torch==2.13.0 has kernels for compute capability 3.7",
        ),
        ("no devices", "names no GPU"),
    ):
        assert dry_run(monkeypatch, tmp_path, {NVIDIA: answer}) == 1
        said = capsys.readouterr().err
        assert sentence in said and "--gpu cpu" in said and said.count("\n") == 1, "the remedy"
    monkeypatch.setattr(installer.sys, "platform", "linux")
    with monkeypatch.context() as patch:
        patch.setattr(installer.shutil, "disk_usage", lambda _: disk(10**9))
        assert installer.main(["--gpu", "rocm", "--prefix", str(tmp_path)]) == 1
    assert "has 0.9 GiB free, PyTorch and its packages need 22" in capsys.readouterr().err
    with monkeypatch.context() as patch:
        patch.delenv(AS_ROOT)
        patch.setattr(installer.os, "geteuid", lambda: 0, raising=False)
        assert installer.main(["--yes", "--prefix", str(tmp_path)]) == 1
    assert "do not run this as root" in capsys.readouterr().err
    monkeypatch.setattr(installer.sys, "version_info", (3, 10, 4))
    assert installer.main(["--prefix", str(tmp_path)]) == 1
    assert "Python 3.10, lora-train needs 3.11 to 3.13" in capsys.readouterr().err


@pytest.mark.parametrize("text", [None, "C:\\\\Tools;%USERPROFILE%\\\\bin;"])
def test_the_command_is_below_localappdata_and_on_the_path_of_a_windows_user_until_taken_off(
    text: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Path("C:/Users/ann/AppData/Local/lora-train")
    monkeypatch.setenv("LOCALAPPDATA", str(home.parent))
    monkeypatch.setattr(installer, "WINDOWS", True)
    paths = installer.locations(None)
    assert paths.python == home / "environment" / "Scripts" / "python.exe"
    assert paths.command == home / "bin" / "lora-train.cmd"
    registry = {} if text is None else {"Path": (text, "REG_EXPAND_SZ")}
    told: list[tuple[object, ...]] = []

    def read(key: object, name: str) -> tuple[str, str]:
        if name not in registry:
            raise FileNotFoundError(name)
        return registry[name]

    winreg = SimpleNamespace(
        KEY_READ=1,
        KEY_WRITE=2,
        HKEY_CURRENT_USER="user",
        REG_EXPAND_SZ="REG_EXPAND_SZ",
        OpenKey=lambda *_: nullcontext("key"),
        QueryValueEx=read,
        SetValueEx=lambda key, name, _, kind, value: registry.update({name: (value, kind)}),
    )
    monkeypatch.setitem(sys.modules, "winreg", winreg)
    windows = SimpleNamespace(user32=SimpleNamespace(SendMessageTimeoutW=lambda *a: told.append(a)))
    monkeypatch.setitem(sys.modules, "ctypes", SimpleNamespace(windll=windows))
    folder = home / "bin"
    for _ in range(2):
        installer.add_to_windows_path(folder)
    assert registry["Path"] == (";".join([*([text] if text else []), str(folder)]), "REG_EXPAND_SZ")
    assert len(told) == 1, "windows are told of a change, and only of one"
    installer.remove_from_windows_path(folder)
    assert registry["Path"][0] == (text or "")


@pytest.mark.parametrize(
    ("shell", "system", "file"),
    [
        ("/bin/bash", "darwin", ".bash_profile"),
        ("/usr/bin/bash", "linux", ".bashrc"),
        ("/usr/bin/fish", "linux", ".config/fish/conf.d/lora-train.fish"),
    ],
)
def test_each_shell_reads_the_folder_of_the_command_from_its_own_file(
    shell: str, system: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHELL", shell)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.setattr(installer.sys, "platform", system)
    other = b"\xe9 = latin\r\nexport PATH=/a/bin2:$PATH\n"
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_bytes(other)
    found = installer.shell_file()
    assert found == tmp_path / file
    for _ in range(2):
        installer.add_to_shell(tmp_path / "a 'bin", found)
    assert found.read_bytes().startswith(other) and found.read_bytes().count(b"bin") == 2
    installer.remove_from_shell(tmp_path / "a 'bin", found)
    assert found.read_bytes() == other


def test_a_mac_user_keeps_the_file_that_bash_reads_and_a_shell_that_is_not_known_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("ZDOTDIR", raising=False)
    monkeypatch.setenv("SHELL", "/bin/bash")
    monkeypatch.setattr(installer.sys, "platform", "darwin")
    (tmp_path / ".profile").touch()
    assert installer.shell_file() == tmp_path / ".profile"
    monkeypatch.setenv("SHELL", "/bin/tcsh")
    assert installer.shell_file() is None
    assert installer.main(["--dry-run"]) == 0
    assert "  5. " not in capsys.readouterr().out
    monkeypatch.setenv("SHELL", "/bin/zsh")
    (tmp_path / ".zshrc").mkdir()  # a file that cannot be written leaves the installation whole
    assert not installer._tell_terminals(installer.locations(None))
    assert "add " in capsys.readouterr().out


def wheel(folder: Path, name: str, version: str, files: Mapping[str, str], extra: str = "") -> Path:
    """Write a wheel of a package with these files."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    every = {
        **files,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{extra}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in every.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in every))
    return path


def test_installs_offline_runs_goes_on_and_is_removed_without_a_trace(tmp_path: Path) -> None:
    """From install.sh to the command that runs, with stand-ins for the two packages."""
    packages = tmp_path / "packages"
    packages.mkdir()
    wheel(packages, "torch", "2.13.0", {"torch/__init__.py": "__version__ = '2.13.0'\n"})
    main = "import torch\n\ndef main():\n    print('trains with', torch.__version__)\n"
    trainer = wheel(
        packages,
        "lora_train",
        "9.9",
        {
            "lora_trainer_stand_in.py": main,
            "lora_train-9.9.dist-info/entry_points.txt": "[console_scripts]\nlora-train = lora_trainer_stand_in:main\n",
        },
        "Provides-Extra: gui\nProvides-Extra: log\n",
    )
    home = tmp_path / "home"
    home.mkdir()
    (home / "precious").write_text("a run")
    (home / ".bashrc").write_text("alias ll='ls -l'")  # without a last line end
    environment = {
        "HOME": str(home),
        "SHELL": "/bin/bash",
        "XDG_DATA_HOME": "",
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(packages),
    }
    line = ["--gpu", "cpu", "--source", str(trainer)]
    unanswered = run(*line, **environment)
    assert unanswered.returncode == 1 and "--yes" in unanswered.stdout
    assert sorted(path.name for path in home.iterdir()) == [".bashrc", "precious"]
    for _ in range(2):
        done = run(*line, "--yes", **environment)
        assert done.returncode == 0, done.stdout + done.stderr
    command = home / ".local" / "bin" / "lora-train"
    assert done.stdout.endswith(
        f"Open a new terminal and start it with: lora-train gui\nIn this terminal: {command} gui\n"
    )
    for words in ([command], ["bash", "-ic", "lora-train"]):  # here, and in a new terminal
        answer = subprocess.run(
            words, env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        assert answer.stdout == "trains with 2.13.0\n"
    removed = run("--uninstall", "--yes", **environment)
    assert removed.returncode == 0, removed.stderr
    left = [
        path for path in (home / ".local").rglob("*") if not path.is_dir() or "lora" in path.name
    ]
    assert left == [] and (home / "precious").exists()
    assert (home / ".bashrc").read_text() == "alias ll='ls -l'\n"
    again = run("--uninstall", "--yes", **environment)
    assert again.returncode == 1 and "nothing to remove" in again.stderr


def test_what_others_put_there_and_a_place_that_the_user_chose_on_path_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = tmp_path / "prefix"
    (prefix / "bin").mkdir(parents=True)
    (prefix / "bin" / "lora-train").write_text("mine")
    refused = run("--gpu", "cpu", "--yes", "--prefix", str(prefix))
    assert refused.returncode == 1 and "is not this installer's" in refused.stderr
    (prefix / "bin" / "lora-train").unlink()
    (prefix / "environment").mkdir()
    (prefix / "environment" / "thesis.txt").write_text("mine")
    for arguments in (["--gpu", "cpu"], ["--uninstall"]):
        refused = run(*arguments, "--yes", "--prefix", str(prefix))
        assert refused.returncode == 1
    assert (prefix / "environment" / "thesis.txt").read_text() == "mine"

    def refuse(*_: object, **options: object) -> None:
        raise AssertionError("PATH was changed")

    monkeypatch.setattr(installer, "change_path", refuse)
    (prefix / "environment" / installer.MARKER).touch()
    assert installer.main(["--uninstall", "--yes", "--prefix", str(prefix)]) == 0
    assert not (prefix / "environment").exists()

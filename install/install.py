#!/usr/bin/env python3
"""Installs lora-train into an environment of its own, with the build of PyTorch for the GPU of this machine.

Started by install.sh (Linux, macOS) or install.ps1 (Windows); needs nothing but Python 3.11 to 3.13. It says
every step before it does the first, asks, never wants administrator's rights, and writes in three places only:
one folder with the environment, one link (Windows: a .cmd file) to the command, and, where terminals do not know
that link's folder yet, PATH of this user. `--uninstall` removes all three and nothing else: runs, caches and
datasets stay.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

CHECKOUT = Path(__file__).resolve().parent.parent


def _builds_of_torch() -> ModuleType:
    """Load the table of PyTorch's builds from the checkout, without the package, which needs packages."""
    file = CHECKOUT / "lora_trainer" / "hardware" / "torch_builds.py"
    if not file.exists():
        raise SystemExit(f"install: {file} is missing; download the whole folder of lora-train")
    spec = importlib.util.spec_from_file_location("torch_builds_of_lora_train", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


builds = _builds_of_torch()
GIB = 2**30
WINDOWS = os.name == "nt"
PYTHONS = ((3, 11), (3, 13))
"""The oldest and the newest Python that lora-train is tested with."""
OLD_CUDA = "cu126"
"""The build for `--gpu cuda-old`: it has kernels for all GPUs from Maxwell to Hopper."""
CHOICES = ("cuda", "cuda-old", *builds.FOLDERS)
NEEDED_BYTES = {"cuda": 9 * GIB, "cuda-old": 9 * GIB, "rocm": 22 * GIB, "xpu": 8 * GIB}
NEEDED_WITHOUT_GPU_BYTES = 3 * GIB
EXTRAS = {"cuda": "cuda,gui,log", "cuda-old": "cuda,gui,log"}
EXTRAS_ELSEWHERE = "gui,log"
MARKER = "installed-by-lora-train"
"""A file in the environment's folder: a folder without it is never removed."""
PATH_REMARK = "# written by lora-train's installer"
"""Ends the line that puts the command on PATH: no other line of a shell's file is ever removed."""


class Refused(Exception):
    """The installation cannot go on; the text is one line with the remedy."""


@dataclass(frozen=True)
class Gpu:
    """Which build of PyTorch this machine needs, and what was seen that says so."""

    build: str
    reason: str
    folders: tuple[str, ...] = ()
    """The folders of PyTorch's indexes that may have the build, the best first."""


@dataclass(frozen=True)
class Paths:
    """Where the environment and the command are put."""

    environment: Path
    command: Path
    chosen: bool = False  # with --prefix: whoever chooses a place sees to PATH

    @property
    def python(self) -> Path:
        return _in_environment(self.environment, "python")

    @property
    def is_on_path(self) -> bool:
        """Whether this terminal finds the command by its name."""
        return str(self.command.parent) in os.environ.get("PATH", "").split(os.pathsep)

    @property
    def path_home(self) -> str:
        """Where new terminals are told of the command; empty where it is left to the user."""
        if self.is_on_path or self.chosen:
            return ""
        return "your user's Path" if WINDOWS else str(shell_file() or "")


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    paths = locations(options.prefix)
    try:
        _refuse_administrator()
        if options.uninstall:
            return uninstall(paths, yes=options.yes)
        return install(options, paths)
    except Refused as refusal:
        print(f"install: {refusal}", file=sys.stderr)
        return 1


def install(options: argparse.Namespace, paths: Paths) -> int:
    """Say what will be done, ask, and do it; returns the exit code."""
    _refuse_python()
    gpu = find_gpu() if options.gpu == "auto" else chosen_gpu(options.gpu)
    refuse_small_disk(paths.environment, gpu.build)
    _refuse_foreign(paths)
    torch, trainer = torch_commands(gpu, paths), trainer_command(gpu, paths, source=options.source)
    print(f"GPU: {gpu.reason}")
    print("This will")
    print(f"  1. make a Python environment in {paths.environment}")
    print(f"  2. run {_words(torch[0])}")
    for other in torch[1:]:
        print(f"     or, where that has no {builds.TORCH}, {_words(other)}")
    print(f"  3. run {_words(trainer)}")
    print(f"  4. put the command lora-train at {paths.command}")
    if paths.path_home:
        print(f"  5. add {paths.command.parent} to PATH in {paths.path_home}, for new terminals")
    if options.dry_run:
        return 0
    if not (options.yes or _agreed("Go on?")):
        print("Nothing was changed.")
        return 1
    _make_environment(paths.environment)
    if not any(_succeeds(command) for command in torch) or not _succeeds(trainer):
        raise Refused(
            "pip failed, see above; run the installer again to go on, or with --uninstall to undo"
        )
    _link(paths)
    whole = f'& "{paths.command}"' if WINDOWS else shlex.quote(str(paths.command))
    if paths.is_on_path:
        print("Done. Start it with: lora-train gui")
    elif paths.path_home and _tell_terminals(paths):
        print("Done. Open a new terminal and start it with: lora-train gui")
        print(f"In this terminal: {whole} gui")
    else:
        print(f"Done. Start it with: {whole} gui")
    return 0


def _tell_terminals(paths: Paths) -> bool:
    """Put the command's folder on PATH; False, with a line to say so, where that cannot be written."""
    folder = paths.command.parent
    try:
        change_path(folder, add=True)
    except OSError as error:
        print(
            f"{paths.path_home} cannot be written ({error.strerror}); add {folder} to PATH yourself."
        )
        return False
    return True


def uninstall(paths: Paths, *, yes: bool) -> int:
    """Remove the environment and the command, after asking; returns the exit code."""
    if not (paths.environment / MARKER).exists():
        raise Refused(f"nothing to remove: lora-train is not installed in {paths.environment}")
    from_path = "" if paths.chosen else f", and takes {paths.command.parent} off PATH"
    print(f"This removes {paths.environment} and {paths.command}{from_path}.")
    print("Runs, caches and datasets stay.")
    if not (yes or _agreed("Go on?")):
        print("Nothing was changed.")
        return 1
    _refuse_foreign(paths)
    paths.command.unlink(missing_ok=True)
    shutil.rmtree(paths.environment)
    if not any(paths.environment.parent.iterdir()):
        paths.environment.parent.rmdir()
    if not paths.chosen:
        folder = paths.command.parent
        try:
            change_path(folder, add=False)
        except OSError as error:
            print(f"{folder} is still on PATH: {error}")
    print("Removed.")
    return 0


def torch_commands(gpu: Gpu, paths: Paths) -> list[list[str]]:
    """Return the pip commands that install PyTorch, one for each index that may have the build, the best first."""
    # PyTorch's own builds, one folder for each toolkit, or a mirror of them.
    indexes = os.environ.get("LORA_TRAIN_TORCH_INDEXES", builds.INDEXES).rstrip("/")
    sources = [["--index-url", f"{indexes}/{folder}"] for folder in gpu.folders]
    return [[*_pip(paths), builds.TORCH, *source] for source in sources or [[]]]


def trainer_command(gpu: Gpu, paths: Paths, *, source: str) -> list[str]:
    """Return the pip command that installs lora-train, which keeps the PyTorch that is there."""
    return [*_pip(paths), f"{source}[{EXTRAS.get(gpu.build, EXTRAS_ELSEWHERE)}]"]


def _pip(paths: Paths) -> list[str]:
    return [str(paths.python), "-m", "pip", "install", "--upgrade"]


def _words(command: list[str]) -> str:
    return " ".join(["python", *command[1:]])


def _succeeds(command: list[str]) -> bool:
    return subprocess.run(command, check=False).returncode == 0


# ---- the machine


def chosen_gpu(build: str) -> Gpu:
    """Return the build that the user names; `cuda` is the best that the driver here runs."""
    if build == "cuda" and shutil.which("nvidia-smi"):
        return _nvidia(_nvidia_answers())
    reason = "chosen with --gpu"
    if build == "cuda":
        return Gpu(build, reason, (builds.cuda_builds()[0].folder,))
    if build == "cuda-old":
        return Gpu(build, reason, (OLD_CUDA,))
    return Gpu(build, reason, builds.FOLDERS[build])


def find_gpu() -> Gpu:
    """Return the build for the GPU of this machine, judged by drivers and without any package."""
    if sys.platform == "darwin":
        if platform.machine() == "arm64":
            return _other("mps", "an Apple GPU")
        return _other(
            "cpu", "none that PyTorch can use on an Intel Mac; training runs on the processor"
        )
    if shutil.which("nvidia-smi"):
        return _nvidia(_nvidia_answers())
    if sys.platform == "linux":
        if Path("/dev/kfd").exists() and "gfx" in _ask("rocminfo"):
            return _other("rocm", "an AMD GPU with the ROCm driver")
        if Path("/dev/kfd").exists():
            raise Refused(
                "an AMD GPU was found, but not rocminfo; install AMD's ROCm packages, or use --gpu rocm or --gpu cpu"
            )
    if "Device Name" in _ask("xpu-smi", "discovery"):
        return _other("xpu", "an Intel GPU (xpu-smi)")
    return _other(
        "cpu", "none found (no nvidia-smi, ROCm or xpu-smi); training runs on the processor"
    )


def _other(build: str, reason: str) -> Gpu:
    return Gpu(build, reason, builds.FOLDERS[build])


def _nvidia_answers() -> str:
    """Return a line for each GPU of NVIDIA: name, driver, and the compute capability where it is told."""
    fields = "name,driver_version"
    # Old drivers do not know the field compute_cap, and then answer nothing at all.
    return _nvidia_table(f"{fields},compute_cap") or _nvidia_table(fields)


def _nvidia_table(fields: str) -> str:
    return _ask("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader")


def _nvidia(table: str) -> Gpu:
    """Choose by the GPUs and the driver; `table` has a line `name, driver, compute capability` for each."""
    rows = [[field.strip() for field in line.split(",")] for line in table.splitlines()]
    rows = [row for row in rows if len(row) >= 2]
    if not rows:
        raise Refused(
            "nvidia-smi is here, but names no GPU; reinstall NVIDIA's driver, or use --gpu cpu"
        )
    name, driver = rows[0][0], rows[0][1]
    known = [row[2].split(".") for row in rows if len(row) > 2 and row[2][:1].isdigit()]
    capabilities = [(int(major), int(minor)) for major, minor in known]
    build, problem = builds.choose_cuda(capabilities, driver)
    if build is None:
        raise Refused(f"{name}: {problem}; update NVIDIA's driver, or use --gpu cpu")
    told = ", ".join(sorted({"{}.{}".format(*each) for each in capabilities})) or "not told"
    reason = f"{name}, driver {driver}, compute capability {told}"
    return Gpu("cuda", f"{reason}: PyTorch for CUDA {build.toolkit}", (build.folder,))


def refuse_small_disk(environment: Path, build: str) -> None:
    """Raise Refused where the disk of the environment has less room than PyTorch and the packages need."""
    existing = next(folder for folder in (environment, *environment.parents) if folder.exists())
    free, needed = (
        shutil.disk_usage(existing).free,
        NEEDED_BYTES.get(build, NEEDED_WITHOUT_GPU_BYTES),
    )
    if free < needed:
        raise Refused(
            f"{existing} has {free / GIB:.1f} GiB free, PyTorch and its packages need {needed / GIB:.0f}; "
            "make room, or choose another disk with --prefix"
        )


def locations(prefix: Path | None) -> Paths:
    """Return the folders of this system, or those below `prefix`."""
    name = "lora-train.cmd" if WINDOWS else "lora-train"
    if prefix is not None:
        return Paths(
            prefix.expanduser().absolute() / "environment",
            prefix.expanduser().absolute() / "bin" / name,
            chosen=True,
        )
    if WINDOWS:
        local = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
        return Paths(local / "lora-train" / "environment", local / "lora-train" / "bin" / name)
    data = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    return Paths(data / "lora-train" / "environment", Path.home() / ".local" / "bin" / name)


def _make_environment(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    # First the marker: an installation that was interrupted can be taken up again, or removed.
    (folder / MARKER).touch()
    if subprocess.run([sys.executable, "-m", "venv", str(folder)], check=False).returncode != 0:
        raise Refused(
            "python cannot make environments; on Debian and Ubuntu: apt install python3-venv"
        )


def _link(paths: Paths) -> None:
    """Put the command in place of an older one."""
    target = _in_environment(paths.environment, "lora-train")
    paths.command.parent.mkdir(parents=True, exist_ok=True)
    if WINDOWS:
        paths.command.write_text(f'@"{target}" %*\n', encoding="utf-8")
        return
    paths.command.unlink(missing_ok=True)
    paths.command.symlink_to(target)


def _refuse_foreign(paths: Paths) -> None:
    """Raise Refused where something that this installer did not make stands in its two places."""
    environment, command = paths.environment, paths.command
    if environment.exists() and not (environment / MARKER).exists():
        raise Refused(
            f"{environment} exists and is not lora-train's; choose another place with --prefix"
        )
    if not (command.is_symlink() or command.exists()):
        return
    if WINDOWS:
        own = str(environment) in command.read_text(encoding="utf-8", errors="replace")
    else:
        own = command.is_symlink() and environment in command.readlink().parents
    if not own:
        raise Refused(
            f"{command} exists and is not this installer's; move it away, or use --prefix"
        )


# ---- PATH


def change_path(folder: Path, *, add: bool) -> None:
    """Put `folder` on the PATH of new terminals, or take it off; may raise OSError."""
    file = shell_file()
    if WINDOWS:
        (add_to_windows_path if add else remove_from_windows_path)(folder)
    elif file is not None:
        (add_to_shell if add else remove_from_shell)(folder, file)


def shell_file() -> Path | None:
    """Return the file that each new terminal of this user's shell reads; None for a shell that is not known."""
    home = Path.home()
    match Path(os.environ.get("SHELL", "")).name:
        case "zsh":
            return Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
        case "fish":
            config = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config")
            return config / "fish" / "conf.d" / "lora-train.fish"
        case "bash" if sys.platform != "darwin":
            return home / ".bashrc"
        case "bash":
            # macOS opens login shells, which read the first of these that is there, and no other.
            files = [home / name for name in (".bash_profile", ".bash_login", ".profile")]
            return next((file for file in files if file.exists()), files[0])
        case "sh" | "dash" | "ksh":
            return home / ".profile"
    return None


def add_to_shell(folder: Path, file: Path) -> None:
    """Put `folder` first on PATH in the shell's file, once however often it is called; may raise OSError."""
    line, data = _path_line(folder, file), file.read_bytes() if file.exists() else b""
    if line in data.splitlines(keepends=True):
        return
    file.parent.mkdir(parents=True, exist_ok=True)
    new_line = b"" if not data or data.endswith(b"\n") else b"\n"
    with file.open("ab") as opened:  # appended: a link to the user's own place stays one
        opened.write(new_line + line)


def remove_from_shell(folder: Path, file: Path) -> None:
    """Remove the line that `add_to_shell` wrote, and no other; may raise OSError."""
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    left = [line for line in lines if line != _path_line(folder, file)]
    if left != lines:
        file.write_bytes(b"".join(left))


def _path_line(folder: Path, file: Path) -> bytes:
    quoted = shlex.quote(str(folder))
    command = (
        f"fish_add_path --path {quoted}"  # without --path it would outlive this file
        if file.suffix == ".fish"
        else f'export PATH={quoted}:"$PATH"'
    )
    return f"{command}  {PATH_REMARK}\n".encode()


def add_to_windows_path(folder: Path) -> None:
    """Put `folder` last on this user's Path, once however often it is called."""
    _write_windows_path(
        lambda folders: folders if str(folder) in folders else [*folders, str(folder)]
    )


def remove_from_windows_path(folder: Path) -> None:
    """Take `folder` off this user's Path; the other folders stay as they are written."""
    _write_windows_path(lambda folders: [each for each in folders if each != str(folder)])


def _write_windows_path(change: Callable[[list[str]], list[str]]) -> None:
    import ctypes
    import winreg

    access = winreg.KEY_READ | winreg.KEY_WRITE
    with winreg.OpenKey(winreg.HKEY_CURRENT_USER, "Environment", 0, access) as key:
        try:
            text, kind = winreg.QueryValueEx(key, "Path")
        except FileNotFoundError:
            text, kind = "", winreg.REG_EXPAND_SZ
        folders = text.split(";") if text else []
        changed = change(folders)
        if changed == folders:
            return
        winreg.SetValueEx(key, "Path", 0, kind, ";".join(changed))
    # Without this message (WM_SETTINGCHANGE to every window, 5 s at most) new terminals get the old Path until
    # the user logs in again.
    ctypes.windll.user32.SendMessageTimeoutW(0xFFFF, 0x1A, 0, "Environment", 2, 5000, None)


def _in_environment(folder: Path, name: str) -> Path:
    return folder / "Scripts" / f"{name}.exe" if WINDOWS else folder / "bin" / name


def _refuse_administrator() -> None:
    if not WINDOWS and os.geteuid() == 0 and "LORA_TRAIN_INSTALL_AS_ROOT" not in os.environ:
        raise Refused(
            "do not run this as root: lora-train needs no rights of the system; "
            "in a container set LORA_TRAIN_INSTALL_AS_ROOT=1"
        )


def _refuse_python() -> None:
    here, (oldest, newest) = sys.version_info[:2], PYTHONS
    if not oldest <= here <= newest:
        raise Refused(
            f"this is Python {here[0]}.{here[1]}, lora-train needs 3.{oldest[1]} to 3.{newest[1]}; "
            "install one from python.org"
        )


def _agreed(question: str) -> bool:
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # started by a pipe: without an answer nothing is done
        print("\nNo terminal to ask; run it again with --yes.")
        return False


def _ask(*command: str) -> str:
    """Return the output of a program, empty where it is not there or fails."""
    program = shutil.which(command[0])
    if program is None:
        return ""
    try:
        answer = subprocess.run(
            [program, *command[1:]], capture_output=True, text=True, timeout=30, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="install", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--gpu",
        choices=("auto", *CHOICES),
        default="auto",
        help="build of PyTorch; auto: by what is found",
    )
    parser.add_argument("--prefix", type=Path, help="folder for the environment and the command")
    parser.add_argument(
        "--source",
        default=str(CHECKOUT),
        help="what pip installs: a folder, a wheel or `lora-train`",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--dry-run", action="store_true", help="say what would be done, and do nothing"
    )
    parser.add_argument("--uninstall", action="store_true", help="remove what this installer made")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())

"""`lora-train-gui`: serves the pages to this machine and opens the browser.

Inputs: the command line and, for a server that others may reach, LORA_TRAIN_GUI_PASSWORD. Output: a
line with the link, until Ctrl-C. Nothing is sent to anybody. Ending it ends no training.
"""

from __future__ import annotations

import argparse
import importlib.util
import socket
import sys
import threading
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.errors import (
    InputError,
    LoraTrainError,
    MachineError,
    RequestError,
)
from lora_trainer.common.files import disk_error

from . import offline
from .programs import Tools
from .server.access import (
    KEY_PARAMETER,
    LOOPBACK,
    KeyAccess,
    PasswordAccess,
    hosts_of_this_machine,
    is_loopback,
    listening_password,
    read_key,
)
from .server.guard import Access
from .workplace import Workplace

ADDRESS = "127.0.0.1"
LOOPBACK_ADDRESSES = (ADDRESS, "::1")
EVERYWHERE = ("0.0.0.0", "::")


@dataclass(frozen=True, kw_only=True)
class Options:
    """The command line; see `--help`."""

    runs: Path
    listen: str
    port: int | None
    browser: bool
    datasets: tuple[Path, ...]
    host_names: tuple[str, ...]
    mcp: Tools


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C; exits with the code of the error, told in one line."""
    try:
        serve(parsed(arguments))
    except LoraTrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(0)


def serve(options: Options) -> None:
    """Build the pages and serve them; raises RequestError, InputError, MachineError."""
    require_packages(options)
    from .server import serve as server

    work = workplace(options)
    access = access_for(options, work)
    server.quiet_gradio(work)
    offline.apply(work)
    pages = server.application(work, access=access, tools=options.mcp)
    # The host name of the pages leads to either loopback address: nobody else may listen on the other.
    others = LOOPBACK_ADDRESSES if isinstance(access, KeyAccess) else ()
    listening = server.listen((options.listen, *others), options.port)
    home = address_of(options.listen, listening[0].getsockname()[1])
    key = f"?{KEY_PARAMETER}={access.key}" if isinstance(access, KeyAccess) else ""
    sys.stdout.write(f"lora-train: {home}{key} (Ctrl-C ends these pages, not the trainings)\n")
    sys.stdout.flush()
    if options.browser and isinstance(access, KeyAccess):
        # In a thread: a browser in the terminal would keep the server from starting.
        once = f"{home}?{KEY_PARAMETER}={access.ticket()}"
        threading.Thread(target=webbrowser.open, args=(once,), daemon=True).start()
    server.run(pages, listening)


def workplace(options: Options) -> Workplace:
    """Return the folders to work in; raises RequestError, InputError, MachineError."""
    runs = options.runs.expanduser().resolve()
    try:
        runs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(runs, error) from error
    roots = tuple(folder.expanduser().resolve() for folder in options.datasets)
    for root in roots:
        if not root.is_dir():
            raise InputError(
                f"the folder {root} does not exist", fix="give --datasets an existing one"
            )
    if not roots and not is_loopback(options.listen):
        raise RequestError(
            "with --listen others choose folders of this machine, and none is named for them",
            fix="add --datasets FOLDER, as often as needed",
        )
    return Workplace(runs=runs, roots=roots or None)


def access_for(options: Options, work: Workplace) -> Access:
    """Return who may come in; raises RequestError, MachineError."""
    if is_loopback(options.listen):
        if options.host_names:
            raise RequestError(
                "--host-name is for a server that others reach", fix="add --listen, or leave it out"
            )
        hosts = LOOPBACK | {options.listen}
        return KeyAccess.of(read_key(work.own), hosts=hosts)
    return PasswordAccess(
        password=listening_password(),
        hosts=hosts_of_this_machine(options.listen, options.host_names),
    )


def address_of(address: str, port: int) -> str:
    """Return the address of the home page as a browser takes it."""
    name = socket.gethostname() if address in EVERYWHERE else address
    return f"http://{f'[{name}]' if ':' in name else name}:{port}/"


def require_packages(options: Options) -> None:
    """Raise MachineError when a package of the interface, or of what it shall do, is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise MachineError(
            "the graphical interface needs gradio, which is not installed",
            fix='pip install "lora-train[gui]"',
        )
    if options.mcp != "off" and importlib.util.find_spec("mcp") is None:
        raise MachineError(
            "--mcp needs the package mcp, which is not installed",
            fix='pip install "lora-train[gui,mcp]"',
        )


def parsed(arguments: Sequence[str] | None) -> Options:
    """Return the options of a command line; argparse ends the program for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="lora-train-gui", description=__doc__.partition("\n")[0], allow_abbrev=False
    )
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), metavar="FOLDER", help="with the runs [runs]"
    )
    parser.add_argument("--port", type=int, help="[the first free one from 7860]")
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="do not open the browser"
    )
    parser.add_argument(
        "--datasets",
        type=Path,
        action="append",
        default=[],
        metavar="FOLDER",
        help="a folder whose images the pages may use, repeatable [all of this machine; with"
        " --listen none]",
    )
    parser.add_argument(
        "--listen",
        default=ADDRESS,
        metavar="ADDRESS",
        help="serve others too, such as 0.0.0.0; asks for the password in"
        f" LORA_TRAIN_GUI_PASSWORD, without encryption [{ADDRESS}]",
    )
    parser.add_argument(
        "--host-name",
        dest="host_names",
        action="append",
        default=[],
        metavar="NAME",
        help="a further name of this machine that browsers may use with --listen, repeatable",
    )
    parser.add_argument(
        "--mcp",
        nargs="?",
        const="read",
        default="off",
        choices=("read", "write"),
        help="tools for assistants at /mcp: those that change nothing, with `write` also those that"
        " start, stop and change trainings [off]",
    )
    words = parser.parse_args(arguments)
    return Options(
        runs=words.runs,
        listen=words.listen,
        port=words.port,
        browser=words.browser,
        datasets=tuple(words.datasets),
        host_names=tuple(words.host_names),
        mcp=words.mcp,
    )

"""`lora-train-gui`: serves the page to this machine, 127.0.0.1 only, and opens the browser.

Inputs: --runs, --port, --no-browser. Files are served from the runs folder alone; nothing is sent
to anybody. Ending it ends no training.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lora_trainer.errors import LoraTrainError, MachineError, exit_code
from lora_trainer.files import disk_error

from .asset_files import style_sheets
from .guard import LoopbackOnly
from .workplace import Workplace

ADDRESS = "127.0.0.1"


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve until Ctrl-C; exits with the code of the error, told in one line."""
    try:
        serve(_parsed(arguments))
    except LoraTrainError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(exit_code(error))


def serve(options: argparse.Namespace) -> None:
    """Build the page and serve it; raises MachineError."""
    require_gradio()
    root: Path = options.runs.expanduser().resolve()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(root, error) from error
    quiet_gradio()
    from .site import build_site

    page = build_site(Workplace(runs=root))
    try:
        _, url, _ = page.launch(
            **launch_options(root), server_port=options.port, inbrowser=options.browser
        )
    except OSError as error:
        raise MachineError(
            f"cannot serve on {ADDRESS}: {error}", fix="give a free port with --port"
        ) from error
    sys.stdout.write(f"lora-train: {url} (Ctrl-C ends this page, not the trainings)\n")
    sys.stdout.flush()
    page.block_thread()


def require_gradio() -> None:
    """Raise MachineError when the package of the interface is not installed."""
    if importlib.util.find_spec("gradio") is None:
        raise MachineError(
            "the graphical interface needs gradio, which is not installed",
            fix='pip install "lora-train[gui]"',
        )


def quiet_gradio() -> None:
    """Turn off what gradio sends out; it reads this when it is imported."""
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"


def launch_options(root: Path) -> dict[str, Any]:
    """Return the options that keep the server on this machine and its files to `root`."""
    from gradio.themes import Default
    from starlette.middleware import Middleware

    return {
        "server_name": ADDRESS,
        "share": False,
        "allowed_paths": [str(root)],
        "app_kwargs": {"middleware": [Middleware(LoopbackOnly)]},
        "theme": Default(primary_hue="blue"),
        "css_paths": style_sheets(),
        "footer_links": ["settings"],
        "run_history": False,
        "enable_monitoring": False,
        "ssr_mode": False,
        "mcp_server": False,
        "pwa": False,
        "quiet": True,
        "prevent_thread_lock": True,
    }


def _parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="lora-train-gui", description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--runs", type=Path, default=Path("runs"), help="folder with the runs [runs]"
    )
    parser.add_argument("--port", type=int, help="port [the first free one from 7860]")
    parser.add_argument(
        "--no-browser", dest="browser", action="store_false", help="do not open the browser"
    )
    return parser.parse_args(arguments)

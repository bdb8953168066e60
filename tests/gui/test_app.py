"""The program of the interface; what needs gradio is skipped where it is not installed."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import app

from lora_trainer.cli import main
from tests.gui.conftest import answered

ROOT = Path(__file__).resolve().parents[2]


def test_without_gradio_there_is_one_line_and_exit_code_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as ended:
        app.main([])
    assert ended.value.code == 4
    assert capsys.readouterr().err == (
        "error: the graphical interface needs gradio, which is not installed."
        ' Fix: pip install "lora-train[gui]".\n'
    )


@pytest.mark.parametrize(("command", "words"), [(main.run, ["gui"]), (app.main, [])])
def test_both_commands_lead_here(
    command: Callable[[list[str]], None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(app, "serve", served.append)
    command([*words, "--port", "7999", "--no-browser"])
    (options,) = served
    assert (options.runs, options.port, options.browser) == (Path("runs"), 7999, False)


@pytest.mark.parametrize("word", ["--share", "--password=x", "--key=x", "--auth=a:b"])
def test_what_would_open_the_server_is_no_option(
    word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        app.parsed([word])
    assert ended.value.code == 2
    assert "unrecognized arguments" in capsys.readouterr().err


def test_an_address_is_written_as_browsers_take_it() -> None:
    assert app.address_of("127.0.0.1", 7860) == "http://127.0.0.1:7860/"
    assert app.address_of("::1", 7860) == "http://[::1]:7860/"
    for everywhere in ("0.0.0.0", "::"):
        assert app.address_of(everywhere, 7860) == f"http://{socket.gethostname()}:7860/"


def test_a_server_for_others_is_behind_the_password_and_prints_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
    from lora_trainer.gui import server

    served: list[tuple[Any, socket.socket]] = []
    monkeypatch.setenv("LORA_TRAIN_GUI_PASSWORD", "correct horse")
    monkeypatch.setattr(server, "quiet_gradio", lambda _: None)
    monkeypatch.setattr(server, "run", lambda *both: served.append(both))
    words = [f"--runs={tmp_path / 'runs'}", f"--datasets={tmp_path}", "--listen=0.0.0.0"]
    app.serve(app.parsed(words))
    ((pages, listening),) = served
    with listening:
        assert listening.getsockname()[0] == "0.0.0.0"
    assert answered(pages, "/config")[0] == 401
    printed = capsys.readouterr().out
    assert "http://" in printed and "correct horse" not in printed and "key=" not in printed


PROGRAM = """
import json, sys
from pathlib import Path
from lora_trainer.gui import access, server
from lora_trainer.gui.workplace import Workplace
work = Workplace(runs=Path(sys.argv[1]))
server.quiet_gradio(work)
front = server.application(work, access=access.KeyAccess(key="k" * 43)).app
before = [name for name in ("gradio", "torch") if name in sys.modules]
outer = server.pages(work)
(mount,) = [route for route in outer.routes if route.path == ""]
blocks = mount.app.get_blocks()
print(json.dumps({
    "pages": [path for path, *_ in blocks.config["pages"]],
    "loaded": [name for name in ("torch", "diffusers", "transformers") if name in sys.modules],
    "before": before,
    "routes": [route.path for route in front.own.routes],
    "allowed_paths": blocks.allowed_paths,
    "uploads": mount.app.uploaded_file_dir,
    "off": [blocks.analytics_enabled, blocks.run_history, blocks.enable_monitoring, blocks.share],
}))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Build the pages in a new interpreter and return what is in them."""
    pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")
    runs = tmp_path_factory.mktemp("gui") / "runs"
    command = [sys.executable, "-c", PROGRAM, str(runs)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "UserWarning" not in done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result | {"runs": str(runs)}


def test_the_pages_build_without_torch_behind_our_routes_and_share_nothing(
    served: dict[str, Any],
) -> None:
    assert served["loaded"] == [] and served["before"] == [], "the first page waits for no import"
    pages = "compare datasets doctor library queue run settings train trash"
    assert sorted(served["pages"]) == ["", *pages.split()]
    assert served["routes"] == [
        "/live",
        "/ready",
        "/ui/{name}",
        "/ui/example/{name}",
        "/ui/language/{code}.js",
        "/upload/{batch}/{number}",
        "/upload/{batch}",
        "/media/run/{name}/{file:path}",
        "/media/samples/{name}.zip",
        "/media/own/tries/{folder}/{name}",
        "/media/thumb",
    ]
    assert served["allowed_paths"] == [] and served["off"] == [False] * 4
    assert served["uploads"] == f"{served['runs']}/.gui/incoming"

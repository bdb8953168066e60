"""The program of the interface; what needs gradio is skipped where it is not installed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import app

from lora_trainer import cli

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


@pytest.mark.parametrize(("command", "words"), [(cli.run, ["gui"]), (app.main, [])])
def test_both_commands_lead_here(
    command: Callable[[list[str]], None], words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[Any] = []
    monkeypatch.setattr(app, "serve", served.append)
    command([*words, "--port", "7999", "--no-browser"])
    (options,) = served
    assert (options.runs, options.port, options.browser) == (Path("runs"), 7999, False)


PROGRAM = """
import json, sys
from pathlib import Path
from lora_trainer.gui import app
app.quiet_gradio()
from fastapi.testclient import TestClient
from gradio.routes import App
from lora_trainer.gui.site import build_site
from lora_trainer.gui.workplace import Workplace
root = Path(sys.argv[1])
options = app.launch_options(root)
page = build_site(Workplace(runs=root))
page.allowed_paths, page.blocked_paths = options["allowed_paths"], []
server = App.create_app(page, app_kwargs=options["app_kwargs"])
answers = {}
for host in ("127.0.0.1:7860", "localhost", "evil.example"):
    client = TestClient(server, base_url=f"http://{host}")
    answers[host] = client.get("/config").status_code
client = TestClient(server, base_url="http://127.0.0.1:7860")
files = {"inside": root / "run" / "run.json", "outside": root.parent / "secret.txt"}
for name, path in files.items():
    answers[name] = client.get(f"/gradio_api/file={path}").status_code
answers["climbing"] = client.get(f"/gradio_api/file={root}/../secret.txt").status_code
upload = {"files": ("x.txt", b"x", "text/plain")}
foreign = {"origin": "http://evil.example"}
answers["upload"] = client.post("/gradio_api/upload", files=upload, headers=foreign).status_code
config = client.get("/config").json()
pages = [path for path, *_ in config["pages"]]
loaded = sorted(name for name in ("torch", "diffusers", "transformers") if name in sys.modules)
print(json.dumps({"answers": answers, "pages": pages, "loaded": loaded, "options": {
    name: value for name, value in options.items() if isinstance(value, bool | str)}}))
"""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Build the page in a new interpreter and ask its server a few things."""
    pytest.importorskip("gradio", reason="gradio is not installed (extra `gui`)")
    root = tmp_path_factory.mktemp("gui") / "runs"
    (root / "run").mkdir(parents=True)
    (root / "run" / "run.json").write_text("{}")
    (root.parent / "secret.txt").write_text("secret")
    command = [sys.executable, "-c", PROGRAM, str(root)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_all_pages_build_without_torch(served: dict[str, Any]) -> None:
    assert served["loaded"] == []
    assert served["pages"] == [
        "",
        "train",
        "run",
        "datasets",
        "queue",
        "library",
        "settings",
        "doctor",
    ]


def test_only_this_machine_is_answered(served: dict[str, Any]) -> None:
    answers = served["answers"]
    assert (answers["127.0.0.1:7860"], answers["localhost"]) == (200, 200)
    assert answers["evil.example"] == 400
    assert answers["upload"] == 403


def test_files_outside_of_the_runs_folder_are_not_served(served: dict[str, Any]) -> None:
    answers = served["answers"]
    assert answers["inside"] == 200
    assert answers["outside"] == 403
    assert answers["climbing"] in (403, 404)


def test_nothing_is_shared(served: dict[str, Any]) -> None:
    options = served["options"]
    assert options["server_name"] == "127.0.0.1"
    assert not any(options[name] for name in ("share", "run_history", "enable_monitoring"))

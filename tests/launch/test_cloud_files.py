"""The files of launch/cloud: schemas and linters accept them, and what they start starts again where it was.

No provider is asked. The linters come with the extra `test`.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from gui.app import parsed
from tests.fakes.runs import ROOT

CLOUD = ROOT / "launch" / "cloud"
COMPOSE = sorted(CLOUD.glob("compose*.yaml"))
NOTEBOOKS = sorted(CLOUD.glob("*.ipynb"))


def read(name: str) -> Any:
    return yaml.safe_load((CLOUD / name).read_text(encoding="utf-8"))


def test_every_file_is_looked_at_and_documented() -> None:
    page = (ROOT / "docs" / "cloud.md").read_text(encoding="utf-8")
    looked_at = {path.name for path in (*COMPOSE, *NOTEBOOKS)}
    looked_at |= {"kubernetes.yaml", "skypilot.yaml", "runpod.json", "vast.sh"}
    assert {path.name for path in CLOUD.iterdir()} == looked_at
    assert [name for name in sorted(looked_at) if f"`{name}`" not in page] == []


def test_compose_follows_its_specification_and_serves_the_gui_with_a_password() -> None:
    gui = read("compose.yaml")["services"]["gui"]
    assert gui["user"] == "1000:1000"
    assert ":?" in gui["environment"]["LORA_TRAIN_GUI_PASSWORD"], "unset, compose refuses to start"
    assert all(port.startswith("127.0.0.1:") for port in gui["ports"])
    program, *words = gui["command"]
    options = parsed(words)
    assert program == "lora-train-gui" and options.port == 7860 and not options.browser
    compile(gui["healthcheck"]["test"][-1], "healthcheck", "exec")
    recipe = (ROOT / "launch" / "Dockerfile").read_text(encoding="utf-8")
    for file in COMPOSE:
        assert set(read(file.name)["services"]["gui"]["build"]["args"]) <= set(
            re.findall(r"^ARG (\w+)=", recipe, re.MULTILINE)
        )
    pytest.importorskip("check_jsonschema")
    words = ["-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", *COMPOSE]
    subprocess.run([sys.executable, *words], check=True)


def test_kubernetes_knows_every_field_and_replaces_a_pod_where_that_may_help() -> None:
    spec = read("kubernetes.yaml")["spec"]
    failing, ignored = spec["podFailurePolicy"]["rules"]
    script = (ROOT / "launch" / "spot.sh").read_text(encoding="utf-8")
    codes = " | ".join(str(code) for code in failing["onExitCodes"]["values"])
    assert f"case $ended in {codes} |" in script
    assert ignored["action"] == "Ignore"
    pod = spec["template"]["spec"]
    assert pod["restartPolicy"] == "Never", "the policy needs it"
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    kubernetes_validate.validate(
        read("kubernetes.yaml"), kubernetes_validate.latest_version(), strict=True
    )


def test_examples_for_spot_machines_start_the_script_that_goes_on() -> None:
    container = read("kubernetes.yaml")["spec"]["template"]["spec"]["containers"][0]
    lines = [
        " ".join(container["command"]),
        read("skypilot.yaml")["run"],
        (CLOUD / "vast.sh").read_text(encoding="utf-8"),
    ]
    for line in lines:
        named = re.findall(r"launch/[\w-]+\.\w+", line)
        assert {"launch/spot.sh", "launch/one-gpu.yaml"} <= set(named)
        assert all((ROOT / name).is_file() for name in named)
    assert container["env"][0] == {"name": "RUNS", "value": "/data/runs"}
    for line in (read("skypilot.yaml")["setup"], read("skypilot.yaml")["run"]):
        subprocess.run(["bash", "-n", "-c", line], check=True)


def test_runpod_starts_the_gui_behind_its_proxy() -> None:
    template = json.loads((CLOUD / "runpod.json").read_text(encoding="utf-8"))
    line = template["dockerStartCmd"][-1]
    words = line.partition("lora-train-gui ")[2].split()
    options = parsed(words)
    assert f"{options.port}/http" in template["ports"]
    assert options.host_names == (f"$RUNPOD_POD_ID-{options.port}.proxy.runpod.net",)
    assert str(options.runs).startswith(template["volumeMountPath"])
    assert "RUNPOD_SECRET" in template["env"]["LORA_TRAIN_GUI_PASSWORD"], (
        "no password in a template"
    )


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_run_again_after_a_disconnect_resumes(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its cells, with a Python that only notes how it was called and begins or ends a run."""
    nbformat = pytest.importorskip("nbformat")
    nbformat.validate(nbformat.read(file, as_version=4))
    mounted = tmp_path / "mounted" / "lora"
    (mounted / "my-images").mkdir(parents=True)
    (mounted / "lora_train-0.2.0-py3-none-any.whl").touch()
    run = (mounted if file.stem == "colab" else tmp_path / "working") / "runs" / "my-images"
    program = tmp_path / "python"
    program.write_text(
        f'#!/bin/sh\necho "$*" >> {tmp_path}/calls\n'
        f'[ "$2" = pip ] || {{ mkdir -p {run}; touch {run}/run.json; }}\n'
    )
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    drive = ModuleType("google.colab.drive")
    monkeypatch.setattr(drive, "mount", lambda _: None, raising=False)
    for name in ("google", "google.colab"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["google.colab"], "drive", drive, raising=False)
    places = {
        "/content/drive/MyDrive": tmp_path / "mounted",
        "/kaggle/input": tmp_path / "mounted",
        "/kaggle/working": tmp_path / "working",
    }
    cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") for cell in cells)
    sources = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    compile(sources[-1], file.name, "exec")  # it shows images, and needs IPython

    def run_all() -> list[str]:
        names: dict[str, Any] = {}
        for source in sources[:-1]:
            for place, folder in places.items():
                source = source.replace(place, str(folder))
            exec(compile(source, file.name, "exec"), names)
        return (tmp_path / "calls").read_text().splitlines()

    installed, trained = run_all()
    assert installed.endswith("lora_train-0.2.0-py3-none-any.whl[cuda,log]")
    assert trained == f"-m lora_trainer {mounted}/my-images --name my-images --output {run.parent}"
    assert run_all()[-1] == f"{trained} --resume"
    (run / "my-images.safetensors").touch()
    assert run_all()[-1] == installed, "a finished run is not started again"
    assert f"finished: {run}" in capsys.readouterr().out

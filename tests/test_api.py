"""The Python interface: docs/api.md runs as it is written; a loop that is left stops the run."""

from __future__ import annotations

import re
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from lora_trainer import api
from lora_trainer.checkpoint.states import load_newest
from lora_trainer.common.errors import RequestError
from lora_trainer.common.events import EventStream

ROOT = Path(__file__).resolve().parents[1]
BLOCKS = re.findall(
    r"^```python\n(.*?)^```",
    (ROOT / "docs" / "api.md").read_text("utf-8"),
    re.DOTALL | re.MULTILINE,
)


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in a folder that holds the first images of the example, where the page expects them."""
    folder = tmp_path / "datasets" / "example"
    folder.mkdir(parents=True)
    for image in sorted((ROOT / "datasets" / "example").glob("*.png"))[:4]:
        for file in (image, image.with_suffix(".txt")):
            shutil.copy(file, folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder


def test_the_page_runs_as_it_is_written(
    example: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(run: Path, dataset: Path, **options: object) -> SimpleNamespace:
        assert run.is_dir() and dataset.is_dir() and options["base"] is None
        return SimpleNamespace(score=0.5, parts={})

    # Measuring takes minutes; tests/validation does it, through the same function.
    monkeypatch.setattr("lora_trainer.evaluate.validate.validate", measured)
    names: dict[str, object] = {}
    said = []
    for block in BLOCKS:
        exec(compile(block, "docs/api.md", "exec"), names)
        said.append(capsys.readouterr().out)
    planned, steps, _, score = said
    assert score.split()[0] == "0.5"
    assert planned.split()[1] == "4" and int(planned.split()[0]) > 2**20
    assert [line.split()[0] for line in steps.splitlines()] == ["1", "2", "3", "4"]
    assert Path("runs/mine/mine.safetensors").is_file() and Path("cube.png").is_file()


def test_a_loop_that_is_left_stops_the_run_which_goes_on_later(example: Path) -> None:
    settings = {"train.steps": 200, "sampling.every_steps": 0, "output.measure": False}
    for event in api.train_events(example, settings=settings):
        if event.kind == "step":
            break
    assert not [each for each in threading.enumerate() if each.name == "lora-train"]
    state = load_newest(Path("runs/example/states"), events=EventStream())
    assert state is not None and 1 <= state.step < 200


@pytest.mark.parametrize("name", ["CON", "a/b", "trailing."])
def test_a_plan_refuses_the_name_that_the_run_would_refuse(example: Path, name: str) -> None:
    with pytest.raises(RequestError, match="cannot be the name of a run"):
        api.plan(example, settings={"output.name": name})


def test_an_error_reaches_the_loop(example: Path) -> None:
    with pytest.raises(api.LoraTrainError, match="unknown preset"):
        list(api.train_events(example, preset="no-such"))

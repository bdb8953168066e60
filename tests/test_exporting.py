"""What a run puts into its files beyond the adapter: nothing there keeps the file from being written."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from lora_trainer.common.events import read_jsonl
from lora_trainer.run import saving
from tests.fakes.runs import Toy, toy
from tests.fakes.sample_image import sample

THUMBNAIL = "modelspec.thumbnail"
SETTINGS = {
    "output__save_every_steps": 0,
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("exporting"), images=3).with_base()


@pytest.mark.parametrize("damage", ["none", "cut short", "no image", "gone"])
def test_a_sample_that_cannot_be_read_costs_the_thumbnail_only(
    damage: str, place: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = sample(tmp_path / "step-00000001" / "00.png")
    whole = image.read_bytes()
    match damage:
        case "cut short":
            image.write_bytes(whole[: len(whole) // 2])
        case "no image":
            image.write_bytes(b"nothing")
        case "gone":
            image.unlink()
    monkeypatch.setattr(saving, "last_samples", lambda _: [image])
    name = damage.replace(" ", "-")
    assert place.train("--name", name, steps=1, **SETTINGS) == 0
    run = place.runs / name
    with safe_open(run / f"{name}.safetensors", framework="np") as file:
        assert file.keys()
        assert (THUMBNAIL in file.metadata()) is (damage == "none")
    rows = [row for row in read_jsonl(run / "problems.jsonl") if "thumbnail" in row["what"]]
    assert len(rows) == (damage != "none")
    for row in rows:
        assert row["severity"] == "note" and "step-00000001/00.png" in row["what"]
        assert str(tmp_path) not in row["what"], "no path of this machine"

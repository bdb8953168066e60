"""Files for other programs: what is missing is said, what is there is never replaced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import lora_files, sharing
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.lora_file.inspect import inspect_file
from tests.fakes.lora_library import finished_run, lora, picture
from tests.fakes.runs import contents

TOLD = {
    "modelspec__title": "Zorble",
    "modelspec__description": "A blue creature",
    "modelspec__trigger_phrase": "zorble",
    "modelspec__license": "CC0",
    "ss_base_model_version": "sdxl_base_v1-0",
}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    finished_run(tmp_path / "runs" / "a", saves=(), **TOLD)
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def file(work: Workplace) -> lora_files.LoraFile:
    return lora_files.find(work, "a/zorble.safetensors")


CARD: dict[str, Any] = {"description": "x", "preferred weight": 0.8}


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_the_card_has_the_names_that_a1111_reads(file: lora_files.LoraFile) -> None:
    card = sharing.card(inspect_file(file.path), weight=0.8, notes=" made at /home/me/x ")
    assert card == {
        "description": "A blue creature",
        "sd version": "SD1",
        "activation text": "zorble",
        "preferred weight": 0.8,
        "notes": "made at [path]",
    }
    for weight in (-0.1, 2.1, float("nan")):
        with pytest.raises(RequestError):
            sharing.card(inspect_file(file.path), weight=weight, notes="")


def test_file_preview_and_card_share_a_name(file: lora_files.LoraFile, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "loras"
    preview = picture(tmp_path / "x.jpg", px=2000)
    done = sharing.export(file, out, preview=preview, card=CARD)
    assert names(out) == {"zorble.safetensors", "zorble.preview.png", "zorble.json"}
    assert {path.name for path in done.files} == names(out)
    assert (out / "zorble.safetensors").read_bytes() == file.path.read_bytes()
    assert json.loads((out / "zorble.json").read_bytes()) == CARD
    with Image.open(out / "zorble.preview.png") as shown:
        assert (shown.format, shown.size) == ("PNG", (1536, 1536))
    before = contents(out)
    again = sharing.export(file, out, preview=preview, card=CARD)
    assert again.was_there and not done.was_there
    assert contents(out) == before


def test_what_is_there_is_never_replaced(file: lora_files.LoraFile, tmp_path: Path) -> None:
    out = tmp_path / "loras"
    out.mkdir()
    lora(out / "zorble.safetensors", rank=4)
    (out / "zorble-002.json").write_text("my notes")
    before = contents(out)
    done = sharing.export(file, out, preview=None, card=CARD)
    assert done.files[0].name == "zorble-003.safetensors"
    assert contents(out).items() > before.items()


def test_nothing_half_written_stays(file: lora_files.LoraFile, tmp_path: Path) -> None:
    out = tmp_path / "loras"
    with pytest.raises(InputError, match="no picture"):
        sharing.export(file, out, preview=file.path, card=CARD)
    assert not out.exists()
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(MachineError):
        sharing.export(file, blocked / "x", preview=None, card=CARD)


def test_what_others_will_miss_is_said_gravest_first(tmp_path: Path) -> None:
    bare = inspect_file(lora(tmp_path / "bare.safetensors", ss_network_dim="99"))
    found = sharing.remarks(bare, preview=None)
    order = ["error", "warning", "note"]
    severities = [order.index(remark.severity) for remark in found]
    assert severities == sorted(severities)
    said = " ".join(remark.what for remark in found)
    for missing in ("title", "trigger", "description", "license", "preview", "which base model"):
        assert missing in said
    full = inspect_file(lora(tmp_path / "full.safetensors", width=320, **TOLD))
    assert "title" not in " ".join(r.what for r in sharing.remarks(full, preview=Path("x.png")))


def test_only_exports_to_the_run_are_linked(
    work: Workplace, file: lora_files.LoraFile, tmp_path: Path
) -> None:
    inside = sharing.export(file, file.path.parent / "export", preview=None, card=CARD)
    assert "/media/run/a/export/zorble.safetensors" in sharing.exported_html(file, inside)
    outside = sharing.export(file, tmp_path / "<b>", preview=None, card=CARD)
    markup = sharing.exported_html(file, outside)
    assert "href" not in markup
    assert "&lt;b&gt;" in markup


def test_it_is_copied_to_a_program_that_is_remembered(
    work: Workplace, file: lora_files.LoraFile, tmp_path: Path
) -> None:
    comfy = tmp_path / "ComfyUI"
    loras = comfy / "models" / "loras"
    loras.mkdir(parents=True)
    (loras / file.path.name).write_bytes(b"of somebody else")
    assert sharing.remembered_folder(work) == ""
    done = sharing.copy_to_program(work, file, str(comfy))
    assert done.files[0] == loras / "zorble-002.safetensors"
    assert (loras / file.path.name).read_bytes() == b"of somebody else"
    assert sharing.remembered_folder(work) == str(loras)
    assert sharing.copy_to_program(work, file, str(loras)).was_there
    with pytest.raises(InputError, match="no folder of LoRAs"):
        sharing.copy_to_program(work, file, str(tmp_path / "runs"))
    assert sharing.remembered_folder(work) == str(loras)

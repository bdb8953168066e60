"""The sample sheet, the files, and marking a step as the best."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from lora_trainer.gui.run_best import exports, mark_best, read_best
from lora_trainer.gui.run_files import files_html
from lora_trainer.gui.run_samples import sample_sheet

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.write import prune_exports
from lora_trainer.reporting.history import read_history
from tests.fakes.run_folder import HOSTILE_CAPTION, PROMPTS, fake_run


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A finished run of 30 steps with exports of 20 and 30; that of 10 was pruned."""
    folder = fake_run(tmp_path / "runs" / "my <run>", steps=30).write()
    (folder / "zorble-step00000020.safetensors").write_bytes(b"twenty")
    return folder


def test_sheet_is_prompts_by_steps_with_the_base_first(folder: Path) -> None:
    history = read_history(folder)
    sheet = sample_sheet(folder, history, exported=exports(folder, history), best=None)
    assert [prompt["text"] for prompt in sheet["prompts"]] == list(PROMPTS)
    assert [step["name"] for step in sheet["steps"]] == ["base", "step 10", "step 20", "step 30"]
    assert [bool(step["file"]) for step in sheet["steps"]] == [False, False, True, True]
    assert [step["best"] for step in sheet["steps"]] == [False, False, False, True]
    assert sheet["images"][1][2].startswith(
        "/media/run/my%20%3Crun%3E/samples/step-00000020/01.png?v="
    )
    assert HOSTILE_CAPTION in json.dumps(sheet, ensure_ascii=False).replace('\\"', '"')


def test_an_image_that_is_made_again_has_another_address(folder: Path) -> None:
    def address() -> str:
        return str(sample_sheet(folder, read_history(folder), exported={}, best=None)["images"][0])

    before = address()
    os.utime(folder / "samples/step-00000010/00.png", (1.0, 1.0))
    assert address() != before


@pytest.mark.parametrize(
    "file",
    ["../secret.png", "/etc/hosts", "samples/step-00000010/../../run.json", "run.json", ""]
    + ["samples/step-00000010/99.png"],
)
def test_records_cannot_make_the_sheet_lead_elsewhere(folder: Path, file: str) -> None:
    (folder.parent / "secret.png").write_bytes(b"secret")
    rows = [json.loads(line) for line in (folder / "events.jsonl").read_text("utf-8").splitlines()]
    for row in rows:
        for image in row.get("images", ()) if row["event"] == "sample" else ():
            image["file"] = file
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")
    sheet = sample_sheet(folder, read_history(folder), exported={}, best=None)
    assert {image for row in sheet["images"] for image in row} == {None}


def test_the_new_tokens_of_the_best_step_are_kept_with_it(folder: Path) -> None:
    (folder / "embeddings").mkdir()
    embedding_path(folder / "zorble-step00000020.safetensors").write_bytes(b"vectors")
    best = mark_best(folder, read_history(folder), 20)
    assert embedding_path(folder / best.file).read_bytes() == b"vectors"


def test_the_best_step_is_a_copy_that_pruning_leaves_alone(folder: Path) -> None:
    history = read_history(folder)
    assert read_best(folder) is None
    best = mark_best(folder, history, 20)
    assert best.file == "my <run>-best.safetensors"
    assert (folder / best.file).read_bytes() == b"twenty"
    prune_exports(folder, name="zorble", keep_last=0)
    prune_exports(folder, name=folder.name, keep_last=0)
    assert read_best(folder) == best
    assert set(exports(folder, history)) == {30}
    assert mark_best(folder, history, 30).step == 30
    assert (folder / best.file).stat().st_size == 3_288_000
    assert not list(folder.glob(".tmp-*"))


def test_a_step_without_a_file_cannot_be_marked(folder: Path) -> None:
    with pytest.raises(RequestError, match=r"no LoRA file of step 10 is there, only of: 20, 30"):
        mark_best(folder, read_history(folder), 10)
    assert read_best(folder) is None


def test_a_copy_that_the_disk_refuses_leaves_the_best_one_as_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = read_history(folder)
    best = mark_best(folder, history, 20)

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("shutil.copyfile", refuse)
    with pytest.raises(MachineError, match="No space left"):
        mark_best(folder, history, 30)
    assert read_best(folder) == best
    assert (folder / best.file).read_bytes() == b"twenty"


@pytest.mark.parametrize("name", ["../other.safetensors", "run.json", "a\nb.safetensors", "link"])
def test_only_lora_files_of_the_folder_are_exports(folder: Path, name: str) -> None:
    (folder.parent / "other.safetensors").write_bytes(b"other")
    (folder / "link.safetensors").symlink_to(folder.parent / "other.safetensors")
    name = "link.safetensors" if name == "link" else name
    (folder / "events.jsonl").write_text(
        json.dumps({"event": "saved", "step": 3, "export": name}) + "\n"
    )
    assert exports(folder, read_history(folder)) == {}


def test_files_have_downloads_a_report_and_say_which_is_the_best(folder: Path) -> None:
    history = read_history(folder)
    page = files_html(folder, exported=exports(folder, history), best=None)
    assert 'href="/media/run/my%20%3Crun%3E/zorble.safetensors"' in page
    assert page.index("step 30") < page.index("step 20")
    assert page.count("Mark this as the best") == 2
    assert "when the training ends" in page
    (folder / "report.html").write_text("x")
    best = mark_best(folder, history, 20)
    page = files_html(folder, exported=exports(folder, history), best=best)
    assert "the best: step 20" in page
    assert page.count("Mark this as the best") == 1
    assert "/report.html" in page
    assert "<run>" not in page
    assert "No LoRA file yet" in files_html(folder, exported={}, best=None)

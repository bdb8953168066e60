"""LoRA files that somebody brings: taken in whole, or refused with the reason; what their pages offer."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from lora_trainer.gui import brought, lora_files, media
from lora_trainer.gui.library import describe, routes, tools, try_prompts, view
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.trash import store as trash
from lora_trainer.gui.workplace import Workplace
from PIL import Image
from safetensors.numpy import save_file

from lora_trainer.common.errors import InputError, RequestError
from tests.fakes.lora_library import finished_run, lora, picture
from tests.gui.conftest import tree
from tests.lora_files.trainers import CASES, build

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")

ENGLISH = words("en")


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    finished_run(tmp_path / "runs" / "a", saves=())
    return Workplace(runs=tmp_path / "runs")


def sent(work: Workplace, data: bytes, batch: str = "0123456789abcdef") -> str:
    """Put a file where an upload waits."""
    folder = work.own / "incoming" / batch
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "0").write_bytes(data)
    return batch


def bring(work: Workplace, data: bytes, name: str) -> Any:
    asked = routes.Bring(batch=sent(work, data), name=name)
    return routes.bring(work, asked, ENGLISH)


def test_a_brought_file_has_a_card_and_a_page_and_stays_as_it_is(
    work: Workplace, tmp_path: Path
) -> None:
    data = lora(tmp_path / "x", ss_sd_model_name="sd_xl_base_1.0.safetensors").read_bytes()
    answer = bring(work, data, r"C:\loras\My style.safetensors")
    assert answer == {
        "to": "/library?file=.loras%2FMy+style.safetensors",
        "done": "My style is added.",
    }
    kept = work.runs / ".loras" / "My style.safetensors"
    assert kept.read_bytes() == data and (tmp_path / "x").read_bytes() == data
    assert not list((work.own / "incoming").iterdir()), "what was sent is not kept twice"
    assert bring(work, data, "again.safetensors")["done"] == "My style is here already."
    other = lora(tmp_path / "y", rank=4).read_bytes()
    assert "My+style-2" in bring(work, other, "My style.SAFETENSORS")["to"]
    refs = [entry.file.ref for entry in lora_files.entries(work)]
    assert refs[:2] == [".loras/My style-2.safetensors", ".loras/My style.safetensors"]
    shelf = view.grid(lora_files.entries(work), of=3, said=ENGLISH)
    assert "Added from a file" in shelf and "sd_xl_base_1.0<" in shelf
    file = lora_files.find(work, refs[1])
    head = view.head_html(file, ENGLISH)
    assert "Added from a file, for sd_xl_base_1.0." in head
    assert "/run?run=" not in head and "again=" not in head, "no training of here made it"
    assert media.served_file(work, ".loras", "My style.safetensors").download
    with pytest.raises(RequestError):
        media.served_file(work, ".loras", "../a/zorble.safetensors")
    form = try_prompts.form(file, lora_files.read_header(file), [])
    assert form["typed_base"] == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    saves, more = try_prompts.others(work, file, lora_files.read_header(file))
    assert not saves, "files that were brought are not steps of one training"
    assert {each.label for each in more} == {"My style-2", "a/zorble"}


def test_it_is_renamed_described_and_thrown_away_like_any_other(
    work: Workplace, tmp_path: Path
) -> None:
    bring(work, lora(tmp_path / "x").read_bytes(), "x.safetensors")
    file = lora_files.rename(work, ".loras/x.safetensors", "new name")
    assert file.ref == ".loras/new name.safetensors"
    assert lora_files.take_note(work, file.ref, "from a friend").note == "from a friend"
    describe.save_texts(file, {"title": "Blue"})
    assert lora_files.read_header(lora_files.find(work, file.ref)).title == "Blue"
    before = tree(work.runs / ".loras")
    thrown = trash.throw_away(work, kind="lora", ref=file.ref)
    assert [entry.file.run for entry in lora_files.entries(work)] == ["a"]
    assert trash.holding(work, file.ref) == thrown
    trash.put_back(work, thrown.id)
    assert tree(work.runs / ".loras") == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("x.ckpt", "pickle"),
        ("x.pt", "pickle"),
        ("x.txt", "is not a .safetensors file"),
        ("x", "is not a .safetensors file"),
        ("", "is not a .safetensors file"),
        ("..", "is not a .safetensors file"),
        ("../../evil.zip", "is not a .safetensors file"),
    ],
)
def test_a_name_of_another_kind_is_refused(
    work: Workplace, tmp_path: Path, name: str, said: str
) -> None:
    before = tree(tmp_path)
    with pytest.raises(InputError, match=said):
        brought.checked_name(name)
    with pytest.raises(InputError, match=said):
        bring(work, b"x", name)
    assert {k: v for k, v in tree(tmp_path).items() if "incoming" not in str(k)} == before


def test_names_lead_nowhere_else(work: Workplace, tmp_path: Path) -> None:
    outside = tree(tmp_path / "runs" / "a")
    for number, name in enumerate(
        (
            "../../evil.safetensors",
            "/etc/x.safetensors",
            "..\\..\\up.safetensors",
            "-rf.safetensors",
        )
    ):
        bring(work, lora(tmp_path / "z", rank=number + 1).read_bytes(), name)
    there = {path.name for path in (work.runs / ".loras").iterdir()}
    assert there == {"evil.safetensors", "x.safetensors", "up.safetensors", "rf.safetensors"}
    assert tree(tmp_path / "runs" / "a") == outside


def test_what_is_not_a_whole_lora_is_refused_by_its_name(work: Workplace, tmp_path: Path) -> None:
    whole = lora(tmp_path / "x").read_bytes()
    save_file({"model.diffusion_model.a.weight": np.zeros((2, 2), np.float32)}, tmp_path / "base")
    save_file({"clip_l": np.zeros((2, 768), np.float32)}, tmp_path / "word")
    huge = json.dumps(
        {"a.lora_up.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 9**18]}}
    )
    cases = {
        "cut": (whole[:-100], "is not a safetensors file, or is cut off"),
        "text": (b"Entry not found", "not weights"),
        "empty": (b"", "is empty"),
        "length": (struct.pack("<Q", 2**62) + b"{}", "is a file of another kind, not weights"),
        "offsets": (struct.pack("<Q", len(huge)) + huge.encode(), "is not a safetensors file"),
        "base": ((tmp_path / "base").read_bytes(), "a model or a part of one"),
        "word": ((tmp_path / "word").read_bytes(), "is an embedding"),
    }
    for name, (data, said) in cases.items():
        with pytest.raises(InputError, match=said) as refused:
            bring(work, data, f"{name}.safetensors")
        assert str(refused.value).startswith(f"{name}.safetensors "), "and not by where it waits"
        assert "incoming" not in str(refused.value)
    assert not [path for path in tree(work.runs / ".loras") if str(path).endswith(".safetensors")]
    with pytest.raises(RequestError, match="names no upload"):
        routes.bring(work, routes.Bring(batch="../../a", name="x.safetensors"), ENGLISH)


@pytest.mark.parametrize("case", [case for case in CASES if not case.refused][::12], ids=str)
def test_files_of_other_trainers_are_recognised(work: Workplace, tmp_path: Path, case: Any) -> None:
    build(case, tmp_path / "theirs.safetensors")
    answer = bring(work, (tmp_path / "theirs.safetensors").read_bytes(), "theirs.safetensors")
    assert "is added" in answer["done"]
    (entry,) = [entry for entry in lora_files.entries(work) if entry.file.is_brought]
    assert entry.header.family == case.family
    assert entry.header.base and not entry.header.problem


def test_each_way_to_convert_says_why_it_is_not_there(work: Workplace, tmp_path: Path) -> None:
    kohya = lora(tmp_path / "x", ss_sd_model_name="embedded")
    bring(work, kohya.read_bytes(), "mini.safetensors")
    header = lora_files.read_header(lora_files.find(work, ".loras/mini.safetensors"))
    found = {each["name"]: each for each in tools.formats(header, ENGLISH)}
    assert "already" in found["kohya"]["reason"]
    assert "miniature" in found["comfyui"]["reason"]
    assert found["diffusers"]["chosen"] and not found["diffusers"]["reason"]


def test_the_picture_that_is_shown_is_marked_among_the_choices(work: Workplace) -> None:
    file = lora_files.find(work, "a/zorble.safetensors")
    assert [each["chosen"] for each in describe.shown_choices(work, file)].count(True) >= 1
    choices = describe.preview_choices(work, file)
    name, image = next(iter(choices.items()))
    Image.new("RGB", (16, 16), "blue").save(image)
    describe.write_preview(file, image)
    chosen = [each["name"] for each in describe.shown_choices(work, file) if each["chosen"]]
    assert chosen == [name]
    describe.write_preview(file, picture(work.own / "mine.png", colour="green"))
    first, *rest = describe.shown_choices(work, file)
    assert (first["name"], first["chosen"]) == ("", True)
    assert not any(each["chosen"] for each in rest)


def test_a_gain_within_the_noise_of_a_few_images_is_not_told_and_few_images_are_named(
    work: Workplace,
) -> None:
    run = work.runs / "a"
    (entry,) = lora_files.entries(work)
    assert entry.validation and not entry.is_sure, "the record names few images"
    rows = (run / "events.jsonl").read_text().splitlines()
    read = [json.loads(row) for row in rows]
    base = next(row["loss"] for row in read if row["event"] == "validation" and not row["step"])
    flat = [
        json.dumps(
            row | ({"loss": base * 0.99} if row["event"] == "validation" and row["step"] else {})
        )
        for row in read
    ]
    (run / "events.jsonl").write_text("\n".join(flat) + "\n")
    (entry,) = lora_files.entries(work)
    assert entry.validation == ""

"""The page LoRAs: which files there are, what their pages show; the trash: what goes there, what may not."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import lora_files
from lora_trainer.gui.library import describe, try_prompts, view
from lora_trainer.gui.library.preview import preview_of, samples_of
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.trash import routes as trash_page
from lora_trainer.gui.trash import store as trash
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.queue import commands
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run, lora, picture
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import contents

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")

ENGLISH = words("en")


def test_a_card_links_to_file_run_report_and_saves(work: Workplace) -> None:
    assert "/train" in view.grid((), of=0, said=ENGLISH), "no LoRAs say how to get one"
    assert "None of the 3 LoRAs" in view.grid((), of=3, said=ENGLISH)
    run = finished_run(work.runs / "a b")
    assert "Report" not in view.grid(lora_files.entries(work), of=1, said=ENGLISH)
    (run / "report.html").write_text("")
    markup = view.grid(lora_files.entries(work), of=1, said=ENGLISH)
    assert "/library?file=a+b%2Fzorble.safetensors" in markup
    assert "/run?run=a%20b" in markup
    assert "/media/run/a%20b/report.html" in markup
    assert "2 other steps of it" in markup


def test_the_card_of_a_file_for_the_miniature_is_marked_as_a_try_out(work: Workplace) -> None:
    finished_run(work.runs / "a", saves=(), ss_sd_model_name="sdxl.safetensors")
    assert "A try-out" not in view.grid(lora_files.entries(work), of=1, said=ENGLISH)
    finished_run(work.runs / "b", saves=(), ss_sd_model_name="embedded")
    assert view.grid(lora_files.entries(work), of=2, said=ENGLISH).count("A try-out") == 1


def test_the_preview_is_the_file_beside_it_or_the_chosen_picture_or_the_sample_of_its_step(
    work: Workplace,
) -> None:
    run = finished_run(work.runs / "a")
    lora(run / "other.safetensors")
    result = lora_files.find(work, "a/zorble.safetensors")
    save = lora_files.find(work, "a/zorble-step00000010.safetensors")
    other = lora_files.find(work, "a/other.safetensors")
    samples = run / "samples"
    assert preview_of(result) == samples / "step-00000030" / "00.png"
    assert preview_of(save) == samples / "step-00000010" / "00.png"
    assert preview_of(other) is None, "a merge looks like neither of its parts"
    of_result, of_save = samples_of(result), samples_of(save)
    assert of_result is not None and of_save is not None and samples_of(other) is None
    assert (of_result.step, of_save.step) == ("30", "10") and len(of_result.images) == 3
    assert "/samples/step-00000010/00.png?v=" in of_save.images[0]["url"]
    shutil.move(samples / "step-00000020", work.own / "kept" / "step-00000020")
    between = lora_files.find(work, "a/zorble-step00000020.safetensors")
    drawn_before = samples_of(between)
    assert preview_of(between) == samples / "step-00000010" / "00.png", "not what a later step drew"
    assert drawn_before is not None and drawn_before.step == "10"
    assert "samples/step-00000030" not in "".join(describe.preview_choices(work, between))
    head = view.head_html(between, ENGLISH)
    assert "picture of step 10" in head and "picture of step" not in view.head_html(save, ENGLISH)
    for drawn in sorted(samples.glob("step-*"))[1:]:
        shutil.move(drawn, work.own / "kept" / drawn.name)
    assert preview_of(result) is None, "the base's picture shows nothing of the LoRA"
    previews = [picture(run / "previews" / f"step-{step:08d}.jpg") for step in (0, 6, 24)]
    assert [preview_of(result), preview_of(save)] == [previews[2], previews[1]]
    shutil.copytree(work.own / "kept", samples, dirs_exist_ok=True)
    beside = picture(run / "zorble.preview.png")
    assert preview_of(result) == beside
    beside.unlink()
    beside.symlink_to(picture(work.runs.parent / "secret.png"))
    assert preview_of(result) != beside
    beside.unlink()
    name = next(iter(describe.preview_choices(work, result)))
    written = describe.write_preview(result, describe.chosen_preview(work, result, name))
    assert written == run / "zorble.preview.png"
    assert preview_of(result) == written
    for wrong in ("../../secret.png", "", "sample step-00000030/99.png"):
        with pytest.raises(RequestError):
            describe.chosen_preview(work, result, wrong)
    before = written.read_bytes()
    (run / "notes.txt").write_text("no picture")
    with pytest.raises(InputError, match="is not a picture"):
        describe.write_preview(result, run / "notes.txt")
    assert written.read_bytes() == before


def test_a_run_shows_the_file_to_take_with_the_saves_behind_it(work: Workplace) -> None:
    run = finished_run(work.runs / "a", modelspec__trigger_phrase="blip")
    (entry,) = lora_files.entries(work)
    assert entry.file.ref == "a/zorble.safetensors"
    assert [save.step for save in entry.saves] == [20, 10]
    assert (entry.header.rank, entry.header.trigger) == (8, "blip")
    assert "better than the base" in entry.validation and not entry.training
    (run / "samples" / "step-00000030" / "00.png").write_bytes(b"torn")
    assert try_prompts.example_prompt(entry.file, entry.header) == "blip", "else that of the sample"
    lora(run / "a-best.safetensors")
    (run / "best.json").write_text('{"step": 20}')
    (entry,) = lora_files.entries(work)
    assert (entry.file.path.name, entry.file.step) == ("a-best.safetensors", 20)
    assert [save.step for save in entry.saves] == [30, 20, 10]
    for name in ("a-best", "zorble"):
        (run / f"{name}.safetensors").unlink()
    (entry,) = lora_files.entries(work)
    assert entry.file.step == 20, "without a result the newest save"


def test_files_that_tools_made_stand_for_themselves_and_a_base_is_where_the_run_says(
    work: Workplace,
) -> None:
    run = finished_run(work.runs / "a")
    for name in ("zorble-merged", "other-step00000010"):
        lora(run / f"{name}.safetensors", ss_network_dim="8")
    found = lora_files.entries(work)
    assert {entry.file.ref for entry in found} == {
        "a/zorble.safetensors",
        "a/zorble-merged.safetensors",
        "a/other-step00000010.safetensors",
    }
    assert {entry.file.trained for entry in found if entry.saves} == {True}
    (run / "zorble.safetensors").unlink()
    run = finished_run(work.runs / "b", saves=())
    record = json.loads((run / "run.json").read_text())
    record["base"]["source"] = "/models/mine.safetensors"
    (run / "run.json").write_text(json.dumps(record))
    lora(run / "converted.safetensors", ss_sd_model_name="mine.safetensors")
    lora(run / "foreign.safetensors", ss_sd_model_name="other.safetensors")
    for name, base in (
        ("zorble", "/models/mine.safetensors"),
        ("converted", "/models/mine.safetensors"),
        ("foreign", ""),
    ):
        file = lora_files.find(work, f"b/{name}.safetensors")
        assert lora_files.recorded_base(file) == base


def test_a_changed_broken_or_hostile_file_is_read_again_and_says_why(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=(), modelspec__title="one")
    assert lora_files.entries(work)[0].header.title == "one"
    lora(run / "zorble.safetensors", modelspec__title="another")
    assert lora_files.entries(work)[0].header.title == "another"
    for content, said in (
        (b"", "is empty, not weights"),
        (b"\x08" + b"\0" * 7 + b"{}      ", "holds no LoRA"),
    ):
        (run / "zorble.safetensors").write_bytes(content)
        (entry,) = lora_files.entries(work)
        assert entry.header.problem.startswith(said)
        assert str(work.runs) not in entry.header.problem
    for settings in ("{", "[1]", "[" * 100_000, "5", '{"base.model": 5}'):
        entries = {"lora_train__settings": settings, "ss_steps": "9" * 99}
        lora(run / "zorble.safetensors", **entries)
        (entry,) = lora_files.entries(work)
        assert entry.header.steps is None and isinstance(entry.header.base, str)
    for text, shown in (
        ("data:image/jpeg;base64,/9j/4A==", True),
        ("javascript:alert(1)", False),
        ("data:text/html;base64,PHNjcmlwdD4=", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        ('data:image/png;base64,A"onerror="x', False),
    ):
        header = lora_files.Header(metadata={"modelspec.thumbnail": text})
        assert bool(header.thumbnail) == shown


def test_a_name_leads_to_a_listed_file_or_nowhere(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    (run / "link.safetensors").symlink_to(lora(work.runs.parent / "secret.safetensors"))
    for folder in ("folder.safetensors", "sub"):
        (run / folder).mkdir()
    for path in (run / ".hidden.safetensors", run / "sub" / "zorble.safetensors"):
        lora(path)
    assert {entry.file.ref for entry in lora_files.entries(work)} == {"a/zorble.safetensors"}
    for ref in (
        *("", "a/", "/", "../a/zorble.safetensors", "a/../a/zorble.safetensors", "a/run.json"),
        *("a/.hidden.safetensors", "a/link.safetensors", "a//zorble.safetensors", "a/\0"),
        *("b/zorble.safetensors", "a/sub/zorble.safetensors", "a/folder.safetensors", ".gui/x"),
    ):
        with pytest.raises(RequestError):
            lora_files.find(work, ref)
    assert lora_files.find(work, "a/zorble-step00000010.safetensors").step == 10


def test_search_wants_every_word_somewhere(work: Workplace) -> None:
    told = {"modelspec__title": "Blue Owl", "modelspec__tags": "bird, night"}
    finished_run(work.runs / "owl", saves=(), **told)
    finished_run(work.runs / "cat", saves=(), ss_sd_model_name="sdxl.safetensors")
    then = time.time() - 60
    os.utime(work.runs / "cat" / "zorble.safetensors", (then, then))
    found = lora_files.entries(work)
    assert [entry.file.run for entry in found] == ["owl", "cat"], "the newest comes first"
    for text, base, runs in (
        ("", "", {"owl", "cat"}),
        ("blue NIGHT", "", {"owl"}),
        ("blue day", "", set()),
        ("", "sdxl.safetensors", {"cat"}),
        ("owl", "sdxl.safetensors", set()),
    ):
        assert {e.file.run for e in lora_files.matching(found, text, base)} == runs, (text, base)


def test_the_page_of_a_file_offers_that_file_first(work: Workplace) -> None:
    finished_run(work.runs / "a")
    best = "Download step 30 (best)"
    for name, labels in (
        ("zorble-step00000010", ["Download step 10", best]),
        ("zorble", [best]),
    ):
        file = lora_files.find(work, f"a/{name}.safetensors")
        shown = view.head(file, lora_files.read_header(file), words("en"))["downloads"]
        assert [link.label for link in shown] == labels
        assert [link.kind for link in shown] == ["primary", ""][: len(labels)]
        assert shown[0].url.endswith(f"/{name}.safetensors")


def test_a_renamed_lora_is_still_the_result_of_its_run(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    picture(run / "zorble.preview.png")
    lora_files.rename(work, "a/zorble.safetensors", "first")
    lora_files.take_note(work, "a/first.safetensors", "good with hats\n")
    file = lora_files.rename(work, "a/first.safetensors", "Blue creature.safetensors")
    for before in ("a/zorble.safetensors", "a/first.safetensors"):
        assert lora_files.find(work, before).path == file.path, "as a bookmark has it"
    assert file.ref == "a/Blue creature.safetensors"
    assert (run / "Blue creature.preview.png").is_file() and not (
        run / "zorble.safetensors"
    ).exists()
    (entry,) = lora_files.entries(work)
    assert (entry.file.ref, len(entry.saves)) == (file.ref, 2)
    assert lora_files.matching((entry,), "hats BLUE", "") == (entry,)
    assert file.was("a/zorble.safetensors") and file.was("a/first.safetensors")
    for name, why in (
        ("zorble-step00000010", "already"),
        ("../x", "cannot be"),
        ("", "cannot be"),
        ("x" * 101, "101 letters"),
    ):
        with pytest.raises(RequestError, match=why):
            lora_files.rename(work, file.ref, name)
    assert lora_files.rename(work, file.ref, "zorble").earlier == (
        "first.safetensors",
        "Blue creature.safetensors",
    )
    assert lora_files.entries(work)[0].saves[0].step == 20
    assert lora_files.take_note(work, "a/zorble.safetensors", " ").note == ""


# ---- what the page's scripts ask


@pytest.fixture
def pages(work: Workplace) -> Any:
    """Return a client of the routes of the page and of what it sends files with."""
    applications = pytest.importorskip("starlette.applications")
    client = pytest.importorskip("starlette.testclient")
    from lora_trainer.gui import uploads
    from lora_trainer.gui.library import routes
    from lora_trainer.gui.share import routes as share

    served = [*routes.routes(work), *uploads.routes(work), *share.routes(work)]
    return client.TestClient(applications.Starlette(routes=served))


def test_a_search_stands_in_the_address_and_a_file_that_is_not_there_or_broken_is_a_page(
    work: Workplace, pages: Any
) -> None:
    finished_run(work.runs / "owl", saves=(), modelspec__title="Blue Owl")
    finished_run(work.runs / "cat", saves=(), ss_sd_model_name="sdxl.safetensors")
    asked = {"text": "blue", "base": ""}
    assert "1 of 2" in pages.post("/library/search", json=asked).json()["html"]
    shown = pages.get("/library?search=blue").text
    assert "1 of 2" in shown and 'value="blue"' in shown and "Training cat" not in shown
    by_name = [
        pages.get("/library?order=name").text,
        pages.post("/library/search", json={"text": "", "base": "", "order": "name"}).json()[
            "html"
        ],
    ]
    for shown in by_name:
        assert shown.index("run=cat") < shown.index("run=owl")
    assert '<option value="name" selected>' in by_name[0]
    shown = pages.get("/library?base=sdxl.safetensors").text
    assert '<option value="sdxl.safetensors" selected' in shown and "Training owl" not in shown
    lora(
        work.runs / "owl" / "zorble.safetensors",
        modelspec__title="Blue Owl",
        ss_sd_model_name="embedded",
    )
    status = work.runs / "owl" / "status.json"
    ended = status.read_bytes()
    write_status(work.runs / "owl")
    shown = pages.get("/library").text
    assert '<option value="embedded" translate="no">Miniature</option>' in shown, (
        "as the cards have it"
    )
    assert "better than the base" in shown and "It still trains." in shown
    status.write_bytes(ended)
    german = {"accept-language": "de"}
    for name in ("owl/none.safetensors", "none/x.safetensors", "../owl/zorble.safetensors"):
        assert (
            "Dieses LoRA gibt es nicht" in pages.get(f"/library?file={name}", headers=german).text
        )
    for kind, ref in (("lora", "owl/zorble.safetensors"), ("run", "cat")):
        thrown = trash.throw_away(work, kind=kind, ref=ref)
        address = f"/library?file={ref.partition('/')[0]}/zorble.safetensors"
        gone = pages.get(address, headers=german).text
        assert "ist im Papierkorb" in gone and f'data-back="{thrown.id}"' in gone
        assert "Dieses LoRA gibt es nicht" not in gone and 'href="/trash"' in gone
        trash.put_back(work, thrown.id)
    (work.runs / "owl" / "zorble.safetensors").write_bytes(b"")
    shown = pages.get("/library?file=owl/zorble.safetensors").text
    assert "is empty, not weights" in shown and 'role="tab"' not in shown, "it can be deleted"
    assert "data-share" not in shown and "data-trash" in shown


def test_name_note_texts_and_a_picture_of_ones_own_are_kept_and_shown_at_the_top(
    work: Workplace, pages: Any, tmp_path: Path
) -> None:
    run = finished_run(work.runs / "a", saves=())
    file = {"file": "a/zorble.safetensors"}
    texts = dict.fromkeys(("description", "author", "license", "trigger", "tags"), "")

    def asked(path: str, /, **body: Any) -> Any:
        return pages.post(f"/library/{path}", json={**file, **body}).json()

    done = asked("texts", **texts, title="<b>")
    assert done["done"] == "Saved: title." and "&lt;b&gt;" in done["head"]
    assert asked("texts", **texts, title="<b>")["done"] == "Nothing was changed."
    assert "for hats" in asked("note", text="for hats")["head"]
    sent, batch = picture(tmp_path / "mine.jpg").read_bytes(), "0123456789abcdef"
    incoming = work.own / "incoming" / batch
    for content, said in ((sent, "zorble.preview.png"), (b"x", "mine.jpg is not a picture")):
        assert pages.put(f"/upload/{batch}/0", content=content).status_code == 204
        done = asked("preview", batch=batch, name="../mine.jpg")
        assert said in done.get("done", done.get("error"))
        assert not incoming.exists()
    assert (run / "zorble.preview.png").is_file()
    assert "did not arrive" in asked("preview", batch=batch, name="mine.jpg")["error"]
    assert "names no upload" in asked("preview", batch="../../a")["error"]
    assert "not there any more" in asked("preview", choice="../../secret.png")["error"]
    address = asked("rename", name="blue one")["to"]
    assert address == "/library?file=a%2Fblue+one.safetensors"
    assert 'value="blue one"' in pages.get(address).text
    assert "cannot be" in asked("rename", name="../x")["error"]


def test_what_is_exported_is_linked_and_what_a_file_holds_is_said_in_the_language(
    work: Workplace, pages: Any, tmp_path: Path
) -> None:
    finished_run(work.runs / "a", saves=())
    file = {"file": "a/zorble.safetensors"}
    german = {"accept-language": "de"}
    wish = {**file, "weight": 1, "notes": "", "folder": ""}
    html = pages.post("/library/export", json=wish, headers=german).json()["html"]
    assert "Geschrieben, in" in html and 'href="/media/run/a/export/zorble.json"' in html
    html = pages.post("/library/export", json=wish).json()["html"]
    assert "There already, in" in html and "It has no title." in html
    assert "try-out" not in html
    zipped = pages.post("/share/civitai", json={**file, "weight": 0.8}).json()
    assert zipped["url"] == "/media/run/a/export/zorble.zip" and zipped["name"] == "zorble.zip"
    assert (work.runs / "a/export/zorble.zip").is_file()
    assert any(said.startswith("It has no title. ") for said in zipped["missing"])
    lora(work.runs / "a" / "zorble.safetensors", ss_sd_model_name="embedded")
    for checked in (
        pages.post("/library/check", json=file),
        pages.post("/library/export", json=wish),
    ):
        assert "A1111, Forge and ComfyUI do not have" in checked.json()["html"]
    assert "For A1111, Forge" not in pages.get("/library?file=a/zorble.safetensors").text
    (tmp_path / "loras").mkdir()
    wish["folder"] = str(tmp_path / "loras")
    assert "href" not in pages.post("/library/export", json=wish).json()["html"]
    assert (
        "is not a weight"
        in pages.post("/library/export", json={**wish, "weight": 9}).json()["error"]
    )
    assert "It has no preview." not in pages.post("/library/check", json=file).json()["html"]
    html = pages.post("/library/inside", json=file, headers=german).json()["html"]
    assert "gemacht f\u00fcr" in html and "<dd>Miniatur</dd>" in html, "not a folder's name"
    shown = pages.get("/library?file=a/zorble.safetensors", headers=german).text
    assert "</span>0,8<span" in shown and 'data-strength="0.8"' in shown
    lora(work.runs / "a" / "other.safetensors")
    other = {"file": "a/other.safetensors"}
    html = pages.post("/library/inside", json=other).json()["html"]
    assert "<dd>Stable Diffusion 1.x</dd>" in html, "not the name of a folder"


# ---- the trash


def test_each_kind_comes_back_from_the_trash_as_it_was_and_takes_the_place_of_nothing_else(
    work: Workplace,
) -> None:
    run = finished_run(work.runs / "done")
    picture(run / "zorble.preview.png")
    dataset = work.own / "uploads" / "cats"
    picture(dataset / "a.png")

    def files() -> list[Any]:
        return [contents(folder) if folder.exists() else None for folder in (run, dataset)]

    before = files()
    for kind, ref in (("lora", "done/zorble.safetensors"), ("run", "done"), ("dataset", dataset)):
        thrown = trash.throw_away(work, kind=kind, ref=str(ref))
        assert trash.picture(work, thrown) is not None, "by which it is known"
        assert [each.id for each in trash.contents(work)] == [thrown.id]
        assert thrown.kind == kind and trash.size_bytes(work) > 0
        assert files() != before
        trash.put_back(work, thrown.id)
        assert files() == before
        assert trash.contents(work) == []
    thrown = trash.throw_away(work, kind="lora", ref="done/zorble.safetensors")
    lora(run / "zorble.safetensors", rank=3)
    new = contents(run)
    with pytest.raises(RequestError, match="another zorble"):
        trash.put_back(work, thrown.id)
    assert contents(run) == new and trash.contents(work) == [thrown]
    trash.empty(work)
    with pytest.raises(RequestError, match="not in the trash"):
        trash.put_back(work, thrown.id)


def test_a_deleted_training_that_drew_only_with_its_base_is_known_by_that_picture(
    work: Workplace,
) -> None:
    picture(work.runs / "no-effect" / "samples" / "step-00000000" / "00.png")
    write_status(work.runs / "no-effect", state="failed")
    thrown = trash.throw_away(work, kind="run", ref="no-effect")
    shown = trash.picture(work, thrown)
    assert shown is not None and shown.parent.name == "step-00000000"


def test_images_in_the_trash_are_called_as_their_page_called_them(work: Workplace) -> None:
    """Loose photos lie in a folder that no name was given: "dataset" says nothing to who deleted them."""
    heap = work.own / "uploads" / "dataset"
    for name in ("IMG_1.png", "IMG_2.png", "IMG_3.png"):
        picture(heap / name)
    thrown = trash.throw_away(work, kind="dataset", ref=str(heap))
    assert (thrown.name, thrown.others) == ("IMG_1", 2)
    assert trash.contents(work) == [thrown]
    (shown,) = trash_page.listed(work, ENGLISH)["things"]
    assert shown["name"] == "IMG_1 and 2 more"


def test_what_is_in_use_or_not_ours_stays(work: Workplace, tmp_path: Path) -> None:
    write_status(until(fake_run(work.runs / "live", steps=30), 12))
    waits = finished_run(work.runs / "waits")
    write_status(waits, state="stopped", exit_code=0)
    commands.add(work.runs, [f"--resume-from={waits.resolve()}"], label="waits")
    own = tmp_path / "photos"
    for folder in (own, work.own):
        folder.mkdir()
    before = contents(work.runs)
    for kind, ref, why in (
        ("run", "live", "is being trained"),
        ("lora", "live/zorble.safetensors", "is being trained"),
        ("run", "waits", "in the queue"),
        ("run", "../photos", "no run"),
        ("lora", "waits/../live/zorble.safetensors", "no file"),
        ("dataset", str(own), "of your own"),
        ("dataset", str(work.own), "of your own"),
        ("disk", "/", "nothing to delete"),
    ):
        with pytest.raises(RequestError, match=why):
            trash.throw_away(work, kind=kind, ref=ref)
    after = contents(work.runs)
    assert {name: data for name, data in after.items() if not name.endswith("trash.lock")} == before

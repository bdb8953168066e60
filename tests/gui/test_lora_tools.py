"""What is done with a LoRA: converted, cut, merged, tried, exported, published."""

from __future__ import annotations

import json
import os
import zipfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import drawing, jobs, lora_files, sharing
from lora_trainer.gui.library import tools, try_prompts, view
from lora_trainer.gui.library.preview import preview_of
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.cli import main
from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.lora_file.inspect import inspect_file
from tests.fakes.hub_server import TOKEN, hub_server
from tests.fakes.lora_library import finished_run, lora, picture
from tests.fakes.queues import until
from tests.fakes.runs import contents
from tests.gui.conftest import tree

ENGLISH = words("en")
TOLD = {
    "modelspec__title": "Zorble",
    "modelspec__description": "A blue creature",
    "modelspec__trigger_phrase": "zorble",
    "modelspec__license": "CC0",
    "ss_base_model_version": "sdxl_base_v1-0",
}


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    for name in ("a", "b"):
        finished_run(tmp_path / "runs" / name, saves=(), **TOLD)
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def file(work: Workplace) -> lora_files.LoraFile:
    return lora_files.find(work, "a/zorble.safetensors")


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, work: Workplace) -> list[jobs.Job]:
    """Take jobs instead of starting them, also those for the process that draws; `login` lets them start."""
    found: list[jobs.Job] = []

    def start(work: Workplace, *, kind: str, argv: list[str], about: Mapping[str, Any]) -> jobs.Job:
        number = str(len(found))
        more = {"kind": kind, "argv": tuple(argv), "about": about, "exit_code": None}
        folder = work.own / "jobs" / number
        job = jobs.Job(id=number, folder=folder, state="running", **more)
        found.insert(0, job)
        return job

    def hand_over(work: Workplace, *, kind: str, about: Mapping[str, Any]) -> jobs.Job:
        return start(work, kind=kind, argv=[], about=about)

    monkeypatch.setattr(jobs, "start", start)
    monkeypatch.setattr(jobs, "hand_over", hand_over)
    monkeypatch.setattr(drawing, "ask", lambda work, job: None)
    monkeypatch.setattr(jobs, "find", lambda work, kind: [job for job in found if job.kind == kind])
    return found


def parsed(job: jobs.Job) -> tuple[str, dict[str, Any]]:
    words = list(job.argv)
    words = words[words.index("lora_trainer") + 1 :]
    command, bound, _ = main.app.parse_args(words, exit_on_error=False, print_error=False)
    return command.__name__, dict(bound.arguments)


def test_a_try_out_is_offered_to_diffusers_alone_and_without_invokeai(work: Workplace) -> None:
    finished_run(work.runs / "mini", saves=(), ss_sd_model_name="embedded")
    header = lora_files.read_header(lora_files.find(work, "mini/zorble.safetensors"))
    offered = [each for each in tools.formats(header, ENGLISH) if not each["reason"]]
    assert [(each["label"], each["chosen"]) for each in offered] == [("diffusers", True)]
    assert "InvokeAI does not have it" in offered[0]["note"]
    edits = replace(header, metadata={**header.metadata, "ss_sd_model_name": "embedded-edit"})
    assert all(each["reason"] for each in tools.formats(edits, ENGLISH)), "a denoiser alone"


def test_convert_goes_beside_the_file_replaces_none_and_is_linked_while_it_is_there(
    work: Workplace, file: lora_files.LoraFile
) -> None:
    job = tools.convert(work, file, format="diffusers", name="")
    output = file.path.with_name("zorble-diffusers.safetensors")
    command, arguments = parsed(job)
    assert vars(arguments.pop("options")) == {"base": "embedded", "precision": None, "force": False}
    expected = {"file": file.path, "format": "diffusers", "output": output}
    assert (command, arguments) == ("convert", expected)
    assert job.about["result"] == "a/zorble-diffusers.safetensors"
    for name, stem in (("zorble", "zorble-002"), ("x.safetensors", "x"), ("", "zorble-kohya")):
        _, arguments = parsed(tools.convert(work, file, format="kohya", name=name))
        assert arguments["output"].name == f"{stem}.safetensors"
        assert not arguments["options"].force
    job = tools.convert(work, file, format="kohya", name="new")
    assert "working" in tools.shown(work, [job], ENGLISH)
    done = replace(job, state="finished", exit_code=0)
    assert "not there any more" in tools.shown(work, [done], ENGLISH)
    lora(file.path.with_name("new.safetensors"))
    assert "/library?file=a%2Fnew.safetensors" in tools.shown(work, [done], ENGLISH)
    job.folder.mkdir(parents=True)
    (job.folder / jobs.LOG_FILE).write_text("error: <b>no</b>. Fix: do.\n")
    failed = replace(job, state="failed", exit_code=2)
    assert "error: &lt;b&gt;no&lt;/b&gt;. Fix: do." in tools.shown(work, [failed], ENGLISH)


def test_resize_by_rank_or_share_and_merge_with_weights(
    work: Workplace, file: lora_files.LoraFile
) -> None:
    job = tools.resize(work, file, rank=" 4 ", energy_percent="95", name="")
    _, arguments = parsed(job)
    assert (arguments["rank"], arguments["energy"]) == (4, 0.95)
    assert arguments["output"].name == "zorble-r4-e95.safetensors"
    job = tools.resize(work, file, rank="", energy_percent="90", name="")
    assert "rank" not in parsed(job)[1]
    others = [("b/zorble.safetensors", -0.5), ("", 1.0), (None, None)]
    job = tools.merge(work, file, weight=0.25, others=others, rank="8", name="")
    command, arguments = parsed(job)
    other = lora_files.find(work, "b/zorble.safetensors").path
    assert (command, arguments["rank"]) == ("merge", 8)
    assert arguments["files"] == [f"{file.path}:0.25", f"{other}:-0.5"]


def test_what_cannot_be_is_refused_before_anything_starts(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    def refused(tool: Any, *asked: Any, **more: Any) -> None:
        with pytest.raises(RequestError):
            tool(*asked, **more)

    refused(tools.convert, work, file, format="--force", name="")
    for name in ("../../x", "--force", ".hidden"):
        refused(tools.convert, work, file, format="kohya", name=name)
    ranks = [(rank, "") for rank in ("0", "2.5", "inf", "--force")]
    for rank, percent in (*ranks, ("", " "), ("", "100"), ("", "nan")):
        refused(tools.resize, work, file, rank=rank, energy_percent=percent, name="")
    other = ("b/zorble.safetensors", 1.0)
    for weight, others in ((1.0, []), (0.0, [other]), (1.0, [("../secret", 1.0)])):
        refused(tools.merge, work, file, weight=weight, others=others, rank="", name="")
    fine: dict[str, Any] = {"prompts": "x", "strengths": "1", "seed": 1, "base": ""}
    for key, values in {
        "prompts": (" \n ", "\n".join(map(str, range(13))), "a cat --ar 16:9", "a cat --s 0"),
        "strengths": ("", "a", "nan", "1e9"),
        "seed": (-1.0, 0.5, 1e30, float("nan")),
    }.items():
        for value in values:
            refused(try_prompts.wish, **{**fine, key: value})
    wish = try_prompts.wish(prompts="x", strengths="1", seed=1, base=str(work.runs.parent))
    with pytest.raises(InputError, match="outside of the folders"):
        try_prompts.start(replace(work, roots=()), file, wish)
    assert started == []


def test_texts_of_the_form_arrive_as_values_and_the_grid_fills_as_images_come(
    work: Workplace, file: lora_files.LoraFile, started: list[jobs.Job]
) -> None:
    prompts = "-output=/tmp/x\n\n; touch marker\n$(touch marker)\n  a, (b:1.2)  "
    wish = try_prompts.wish(prompts=prompts, strengths="1,0.4 -0.5", seed=7, base="me/model")
    about = try_prompts.start(work, file, wish).about
    assert about["prompts"] == ["-output=/tmp/x", "; touch marker", "$(touch marker)", "a, (b:1.2)"]
    assert (about["strengths"], about["seed"]) == ([-0.5, 0.4, 1.0], 7)
    (draws,) = about["files"]
    assert (draws["file"], draws["path"], draws["base"]) == (file.ref, str(file.path), "me/model")
    assert Path(draws["folder"]).parent == work.own / "tries"
    started.clear()
    wish = try_prompts.wish(prompts="one\ntwo <b>", strengths="0.4 1", seed=5, base="")
    job = try_prompts.start(work, file, wish)
    stamps = [try_prompts.stamp(work, [job])]
    assert "loading the base model" in try_prompts.shown(work, [job], ENGLISH)
    for name in ("zorble-5-x0.4.png", "zorble-6-x1.png", "other.png", ".tmp-1-zorble-5-x1.png"):
        picture(work.own / "tries" / str(job.about["folder"]) / name)
    stamps.append(try_prompts.stamp(work, [job]))
    assert {place: path.name for place, path in try_prompts.images(work, job).items()} == {
        try_prompts.Place(row=0, file=0, strength=0.4): "zorble-5-x0.4.png",
        try_prompts.Place(row=1, file=0, strength=1.0): "zorble-6-x1.png",
    }
    markup = try_prompts.shown(work, [job], ENGLISH)
    assert "2 of 4 images" in markup
    assert markup.count("<img") == 2
    assert "two &lt;b&gt;" in markup
    assert f"/media/own/tries/{job.about['folder']}/zorble-5-x0.4.png" in markup
    assert " left" not in markup and " %" not in markup, "before anything tells"
    far = {"pictures": 2, "step": 5, "steps": 20, "seconds": 180.0}
    job.folder.mkdir(parents=True)
    (job.folder / drawing.FAR_FILE).write_text(json.dumps(far))
    stamps.append(try_prompts.stamp(work, [job]))
    markup = try_prompts.shown(work, [job], ENGLISH)
    assert "about 2 min 20 s left" in markup and markup.count("<span>5 of 20 steps</span>") == 1
    assert markup.index("5 of 20 steps") < markup.index("two &lt;b&gt;"), "of the next one"
    for other in ({"pictures": 1, "step": 19}, {"pictures": 0, "step": 0}):
        (job.folder / drawing.FAR_FILE).write_text(json.dumps(far | other))
        markup = try_prompts.shown(work, [job], ENGLISH)
        assert " steps" not in markup, "of a picture that is drawn already"
        assert (" left" in markup) == bool(other["step"]), "before the first step nothing tells"
    done = replace(job, state="finished", exit_code=0)
    stamps.append(try_prompts.stamp(work, [done]))
    assert len(set(stamps)) == 4
    assert "4 images, seed 5" in try_prompts.shown(work, [done], ENGLISH)


def test_the_form_begins_with_what_was_drawn_last_and_a_clock_says_for_how_long(
    work: Workplace, file: lora_files.LoraFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = lora_files.read_header(file)
    assert try_prompts.form(file, header, [])["strengths"] == "0.4 0.6 0.8 1 1.2"
    wish = try_prompts.wish(
        prompts="one\ntwo",
        strengths="0.5 -1",
        seed=7,
        base="me/model",
        others=["b/zorble.safetensors"],
    )
    monkeypatch.setattr(try_prompts.time, "time", lambda: 1000.0)
    job = try_prompts.start(work, file, wish)
    assert try_prompts.form(file, header, [job]) == {
        "first_prompt": "one\ntwo",
        "strengths": "-1 0.5",
        "seed": 7,
        "typed_base": "me/model",
        "beside": ["b/zorble.safetensors"],
    }
    monkeypatch.setattr(try_prompts.time, "time", lambda: 1075.5)
    assert 'data-since="75"' in try_prompts.shown(work, [job], ENGLISH)
    ended = replace(job, state="failed", exit_code=drawing.GAVE_WAY)
    assert "data-since" not in try_prompts.shown(work, [ended], ENGLISH)


def test_a_refusal_is_one_line_a_stop_is_no_error_and_a_changed_record_leads_nowhere(
    work: Workplace, file: lora_files.LoraFile
) -> None:
    wish = try_prompts.wish(prompts="x", strengths="1", seed=5, base="")
    job = try_prompts.start(work, file, wish)
    with pytest.raises(RequestError, match="already"):
        try_prompts.start(work, file, wish)
    job.folder.mkdir(parents=True)
    (job.folder / jobs.LOG_FILE).write_text("loading\nerror: no <base>. Fix: --base.\n")
    markup = try_prompts.shown(work, [replace(job, state="failed", exit_code=3)], ENGLISH)
    assert "error: no &lt;base&gt;. Fix: --base." in markup
    markup = try_prompts.shown(work, [replace(job, state="failed", exit_code=-15)], ENGLISH)
    assert "Stopped after 0 of 1" in markup and "error" not in markup
    picture(work.own / "tries" / str(job.about["folder"]) / "zorble-5.png")
    one = try_prompts.Place(row=0, file=0, strength=1.0)
    assert list(try_prompts.images(work, job)) == [one], "one strength is not in the name"
    picture(work.runs.parent / "zorble-5.png")
    for about in (
        {"files": [{"folder": "../../.."}]}, {"files": [5, {}]}, {"files": None, "folder": "../../.."},
        {"folder": 5, "files": 7, "prompts": 3, "strengths": ["x"], "seed": "y"}, {},
    ):  # fmt: skip
        changed = replace(job, about={**job.about, **about} if about else {})
        assert try_prompts.images(work, changed) == {}
        try_prompts.shown(work, [changed], ENGLISH)


def test_files_stand_beside_each_other_and_the_best_picture_is_kept_with_the_file_it_was_drawn_with(
    work: Workplace, file: lora_files.LoraFile
) -> None:
    lora(file.path.with_name("zorble-step00000010.safetensors"), **TOLD)
    save = "a/zorble-step00000010.safetensors"
    steps, more = try_prompts.others(work, file, lora_files.read_header(file))
    assert [each.ref for each in steps] == [save]
    assert [each.ref for each in more] == ["b/zorble.safetensors"]
    wish = try_prompts.wish(
        prompts="a cat\na dog --d 9", strengths="0.5 1", seed=5, base="", others=[save]
    )
    job = try_prompts.start(work, file, wish)
    place = try_prompts.Place(row=1, file=1, strength=0.5)
    with pytest.raises(RequestError, match="not there any more"):
        try_prompts.mark(work, file, job.id, place)
    first, second = (Path(draws["folder"]) for draws in job.about["files"])
    assert first != second, "files of different trainings may have one name"
    content = picture(second / "zorble-step00000010-9-x0.5.png").read_bytes()
    assert try_prompts.images(work, job) == {place: second / "zorble-step00000010-9-x0.5.png"}
    stamp = try_prompts.stamp(work, [job])
    try_prompts.mark(work, file, job.id, place)
    assert stamp != try_prompts.stamp(work, [job])
    assert try_prompts.best(work, job) == {place}
    kept = lora_files.find(work, save)
    assert vars(kept.picture) == {"prompt": "a dog --d 9", "seed": 9, "strength": 0.5}
    beside = file.path.with_name("zorble-step00000010.best.png")
    assert beside.read_bytes() == content
    assert preview_of(kept) == beside
    assert lora_files.find(work, file.ref).picture is None
    markup = try_prompts.shown(work, [job], ENGLISH)
    assert markup.count('aria-pressed="true"') == 1
    assert "a dog --d 9 at strength 0.5" in view.head_html(kept, ENGLISH)
    lora_files.rename(work, save, "fine")
    renamed = lora_files.find(work, "a/fine.safetensors")
    assert renamed.picture == kept.picture
    assert preview_of(renamed) == file.path.with_name("fine.best.png")
    try_prompts.mark(work, file, job.id, place)  # once more: no longer
    assert lora_files.find(work, "a/fine.safetensors").picture is None
    assert not file.path.with_name("fine.best.png").exists()
    many = "\n".join(map(str, range(12)))
    with pytest.raises(RequestError, match="288 images"):
        try_prompts.wish(
            prompts=many,
            strengths=" ".join(map(str, range(-4, 4))),
            seed=1,
            base="",
            others=["a", "b"],
        )


CARD: dict[str, Any] = {"description": "x", "preferred weight": 0.8}


def test_file_preview_and_card_share_a_name_and_the_card_has_the_names_that_a1111_reads(
    file: lora_files.LoraFile, tmp_path: Path
) -> None:
    out = tmp_path / "deep" / "loras"
    preview = picture(tmp_path / "x.jpg", px=2000)
    done = sharing.export(file, out, preview=preview, card=CARD)
    assert set(contents(out)) == {"zorble.safetensors", "zorble.preview.png", "zorble.json"}
    assert {path.name for path in done.files} == set(contents(out))
    assert (out / "zorble.safetensors").read_bytes() == file.path.read_bytes()
    assert json.loads((out / "zorble.json").read_bytes()) == CARD
    with Image.open(out / "zorble.preview.png") as shown:
        assert (shown.format, shown.size) == ("PNG", (1536, 1536))
    before = contents(out)
    again = sharing.export(file, out, preview=preview, card=CARD)
    assert again.was_there and not done.was_there
    assert contents(out) == before
    lora(out / "zorble.safetensors", rank=4)
    (out / "zorble-002.json").write_text("my notes")
    before = contents(out)
    done = sharing.export(file, out, preview=None, card=CARD)
    assert done.files[0].name == "zorble-003.safetensors"
    assert contents(out).items() > before.items(), "what is there is never replaced"
    none, blocked = tmp_path / "none", tmp_path / "file"
    with pytest.raises(InputError, match="is not a picture"):
        sharing.export(file, none, preview=file.path, card=CARD)
    assert not none.exists(), "nothing half written stays"
    blocked.write_text("")
    with pytest.raises(MachineError):
        sharing.export(file, blocked / "x", preview=None, card=CARD)
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


def test_a_zip_has_the_lora_its_samples_and_what_a_form_asks(tmp_path: Path) -> None:
    work = Workplace(runs=tmp_path / "runs")
    finished_run(work.runs / "zorble", saves=(), **TOLD)
    file = lora_files.find(work, "zorble/zorble.safetensors")
    out = tmp_path / "out"
    done, _ = sharing.export_checked(file, out, weight=0.8, notes="by day", zipped=True)
    again, _ = sharing.export_checked(file, out, zipped=True)
    assert [path.name for path in (*done.files, *again.files)] == ["zorble.zip", "zorble-002.zip"]
    assert sorted(path.name for path in out.iterdir()) == ["zorble-002.zip", "zorble.zip"]
    with zipfile.ZipFile(out / "zorble.zip") as archive:
        names = set(archive.namelist())
        assert {"zorble.safetensors", "zorble.json", "zorble.preview.png"} <= names
        assert {"samples/00.png", "ABOUT.txt"} <= names
        assert archive.read("zorble.safetensors") == file.path.read_bytes()
        about = archive.read("ABOUT.txt").decode().splitlines()
    assert {"Name: Zorble", "Trigger words: zorble", "Strength: 0.8", "Notes: by day"} <= set(about)


def test_a_lora_is_published_privately_with_its_card_and_the_token_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workplace(runs=tmp_path / "runs")
    finished_run(work.runs / "zorble", modelspec__title="Zorble", modelspec__trigger_phrase="zorb")
    file = lora_files.find(work, "zorble/zorble.safetensors")
    monkeypatch.undo()  # so that jobs are started
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)

    def published(work: Workplace, **how: Any) -> jobs.Job:
        job = sharing.publish(work, file, **how)
        until(lambda: jobs.read(work, job.id).state != "running")
        return jobs.read(work, job.id)

    with hub_server() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        done = published(work, repository="zorble", private=True)
        assert done.state == "finished", done.log_tail()
        assert hub.private == {"jane/zorble": True}
        files = hub.files["jane/zorble"]
        lora = (work.runs / "zorble" / "zorble.safetensors").read_bytes()
        assert files["zorble.safetensors"] == lora
        assert {"README.md", "samples/00.png"} <= files.keys()
        card = files["README.md"].decode()
        assert "# Zorble" in card and "instance_prompt: zorb" in card
        assert done.log_tail(1) == [f"published at {hub.address}/jane/zorble"]
        assert TOKEN in hub.tokens
        assert published(work, repository="club/zorble", private=False).state == "finished"
        assert hub.private["club/zorble"] is False
        hub.refuses = 403
        refused = published(work, repository="club/zorble", private=False)
        assert "the Hub answers 403" in refused.error() and "hf auth login" in refused.error()
        assert sharing.may_only_read(refused) and not sharing.may_only_read(done)
        told = tree(work.own)
        assert told and not any(TOKEN.encode() in content for content in told.values())
    with pytest.raises(RequestError, match="no name"):
        sharing.publish(work, file, repository=" ", private=True)

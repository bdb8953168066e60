"""The page LoRAs: which files there are, what their pages show, what is served; texts of a header stay text."""

from __future__ import annotations

import json
import os
import re
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lora_trainer.gui import library, lora_files, media, previews, sharing, tries
from lora_trainer.gui.run_best import exports
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.reporting.history import read_history
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run, lora, picture

pytest.importorskip("starlette", reason="starlette comes with gradio (extra `gui`)")
HOSTILE = [
    "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "' onmouseover='alert(1)",
    "</p><svg onload=alert(1)>", "javascript:alert(1)", "<iframe src=javascript:alert(1)>",
    "${alert(1)}", "{{alert(1)}}", "{{{alert(1)}}}", "`+alert(1)+`", "<a href=javascript:alert(1)>x</a>",
    "<style>*{display:none}</style>", "<base href=//evil.example>", "<form action=//evil.example>",
    "<math><mi//xlink:href='data:x,<script>alert(1)</script>'>", "<!--<img src=x onerror=alert(1)>-->",
    "<img\nsrc=x\nonerror=alert(1)>", "&lt;script&gt;alert(1)&lt;/script&gt;", "&#60;script&#62;",
    "<svg><script>alert(1)</script></svg>", "<details open ontoggle=alert(1)>",
    "<video><source onerror=alert(1)>", "<input autofocus onfocus=alert(1)>", "\\u003cscript\\u003e",
    "<marquee onstart=alert(1)>", "<object data=javascript:alert(1)>", "<embed src=javascript:alert(1)>",
    "<link rel=stylesheet href=//evil.example>", "<meta http-equiv=refresh content=0>", "]]><script>",
    "</title><script>alert(1)</script>", "</textarea><script>alert(1)</script>", "<ScRiPt>alert(1)",
    "<script/src=//evil.example>", "<body onload=alert(1)>", "\u202egnp.exe", "a\x00b", "\ud800",
    "<img src='x' onerror='alert(1)'", "<<script>alert(1)//<</script>",
]  # fmt: skip
TAGS = {
    "a", "article", "b", "button", "code", "dd", "details", "div", "dl", "dt", "h1", "h2", "img", "li",
    "p", "small", "span", "summary", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul", "use",
}  # fmt: skip
ATTRIBUTES = {
    "alt", "aria-label", "class", "data-choose", "data-copy", "data-next", "data-ref", "data-share", "data-trash",
    "download", "href", "aria-hidden", "loading", "role", "scope", "src", "translate",
    "style", "tabindex", "target", "type",
}  # fmt: skip


class Checked(HTMLParser):
    """Takes markup apart and keeps what our pages never write."""

    def __init__(self) -> None:
        super().__init__()
        self.strange: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.strange += [tag] if tag not in TAGS else []
        for name, value in attrs:
            address = (value or "") if name in ("href", "src") else "/"
            fine = name in ATTRIBUTES and address.startswith(("/", "data:image/"))
            self.strange += [] if fine and not address.startswith("//") else [f"{name}={value}"]


def strange(markup: str) -> list[str]:
    parser = Checked()
    parser.feed(markup)
    parser.close()
    return parser.strange


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    (tmp_path / "runs").mkdir()
    return Workplace(runs=tmp_path / "runs")


def shown(work: Workplace) -> str:
    found = lora_files.entries(work)
    return library.grid(found, of=len(found))


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_texts_of_a_header_are_shown_as_text(work: Workplace, text: str) -> None:
    stored = text.encode("utf-8", "replace").decode()
    keys = ("title", "trigger_phrase", "description", "tags", "author", "license", "thumbnail")
    told = {f"modelspec__{key}": stored for key in keys}
    told |= {"ss_sd_model_name": stored, "ss_base_model_version": stored, stored: stored}
    run = finished_run(work.runs / "a", saves=(10,), **told)
    if "/" not in text and "\x00" not in text and text.isprintable():
        lora(run / f"{text}.safetensors", **told)
    file = lora_files.find(work, "a/zorble.safetensors")
    inspection = inspect_file(file.path)
    markup = shown(work)
    markup += library.head(file, lora_files.read_header(file)) + library.inside(inspection)
    markup += sharing.remarks_html(sharing.remarks(inspection, preview=None))
    markup += library.missing(stored) + previews.choices_html(work, file)
    assert strange(markup) == []


def test_the_parser_of_this_test_finds_what_is_strange() -> None:
    assert strange("<p onclick=x><script>") == ["onclick=x", "script"]
    assert strange('<a href="javascript:x">') == ["href=javascript:x"]
    assert strange('<a href="//evil.example">') == ["href=//evil.example"]


def test_no_loras_say_how_to_get_one(work: Workplace) -> None:
    assert "/train" in shown(work)
    assert "None of the 3 LoRAs" in library.grid((), of=3)


def test_a_card_links_to_file_run_report_and_saves(work: Workplace) -> None:
    run = finished_run(work.runs / "a b")
    assert "Report" not in shown(work)
    (run / "report.html").write_text("")
    markup = shown(work)
    assert "/library?file=a+b%2Fzorble.safetensors" in markup
    assert "/run?run=a%20b" in markup
    assert "/media/run/a%20b/report.html" in markup
    assert "2 other steps of it" in markup


def test_the_page_of_a_lora_has_its_trigger_word_to_copy(work: Workplace) -> None:
    finished_run(work.runs / "a", modelspec__trigger_phrase="blip")
    finished_run(work.runs / "b", modelspec__trigger_phrase="")

    def page(run: str) -> str:
        file = lora_files.find(work, f"{run}/zorble.safetensors")
        return library.head(file, lora_files.read_header(file))

    assert re.search(r"<dt>trigger word</dt><dd><code>blip</code> <button[^>]*data-copy", page("a"))
    assert "none; write words of its captions" in page("b") and "data-copy" not in page("b")
    assert "data-copy" not in shown(work)


def test_the_preview_is_the_file_beside_it_then_the_sample_of_its_step(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    lora(run / "other.safetensors")
    result = lora_files.find(work, "a/zorble.safetensors")
    save = lora_files.find(work, "a/zorble-step00000010.safetensors")
    other = lora_files.find(work, "a/other.safetensors")
    samples = run / "samples"
    assert library.preview_of(result) == samples / "step-00000030" / "00.png"
    assert library.preview_of(save) == samples / "step-00000010" / "00.png"
    assert library.preview_of(other) is None, "a merge looks like neither of its parts"
    beside = picture(run / "zorble.preview.png")
    assert library.preview_of(result) == beside
    beside.unlink()
    beside.symlink_to(picture(work.runs.parent / "secret.png"))
    assert library.preview_of(result) != beside


def test_a_chosen_picture_becomes_the_preview(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    file = lora_files.find(work, "a/zorble.safetensors")
    name = next(iter(previews.choices(work, file)))
    written = previews.write(file, previews.chosen(work, file, name))
    assert written == run / "zorble.preview.png"
    assert library.preview_of(file) == written
    for wrong in ("../../secret.png", "", "sample step-00000030/99.png"):
        with pytest.raises(RequestError):
            previews.chosen(work, file, wrong)
    before = written.read_bytes()
    (run / "notes.txt").write_text("no picture")
    with pytest.raises(InputError, match="no picture"):
        previews.write(file, run / "notes.txt")
    assert written.read_bytes() == before


def test_problems_come_before_facts_and_raw_entries(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=(), ss_network_dim="999", long="x" * 5_000)
    markup = library.inside(inspect_file(run / "zorble.safetensors"))
    places = [
        markup.index(text) for text in ("ss_network_dim says 999", "made for", "All 2 entries")
    ]
    assert places == sorted(places)
    assert "3,000 characters" in markup


def test_a_first_prompt_is_that_of_the_last_sample_else_the_trigger(work: Workplace) -> None:
    run = finished_run(work.runs / "a", modelspec__trigger_phrase="blip")
    file = lora_files.find(work, "a/zorble.safetensors")
    header = lora_files.read_header(file)
    (run / "samples" / "step-00000030" / "00.png").write_bytes(b"torn")
    assert tries.example_prompt(file, header) == "blip"


def refs(found: tuple[lora_files.Entry, ...]) -> set[str]:
    return {entry.file.ref for entry in found}


def test_a_run_shows_its_result_with_the_saves_behind_it(work: Workplace) -> None:
    finished_run(work.runs / "a", modelspec__trigger_phrase="zorble")
    (entry,) = lora_files.entries(work)
    assert entry.file.ref == "a/zorble.safetensors"
    assert [save.step for save in entry.saves] == [20, 10]
    assert (entry.header.rank, entry.header.trigger) == (8, "zorble")
    assert "below the base's" in entry.validation
    assert not entry.training


def test_the_file_marked_best_comes_before_the_result(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    lora(run / "a-best.safetensors")
    (run / "best.json").write_text('{"step": 20}')
    (entry,) = lora_files.entries(work)
    assert (entry.file.path.name, entry.file.step) == ("a-best.safetensors", 20)
    assert [save.step for save in entry.saves] == [None, 20, 10]


def test_a_run_without_a_result_shows_its_newest_save(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    (run / "zorble.safetensors").unlink()
    (entry,) = lora_files.entries(work)
    assert entry.file.step == 20


def test_files_that_tools_made_stand_for_themselves(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    for name in ("zorble-merged", "other-step00000010"):
        lora(run / f"{name}.safetensors", ss_network_dim="8")
    found = lora_files.entries(work)
    assert refs(found) == {
        "a/zorble.safetensors",
        "a/zorble-merged.safetensors",
        "a/other-step00000010.safetensors",
    }
    assert {entry.file.trained for entry in found if entry.saves} == {True}


def test_the_newest_file_comes_first(work: Workplace) -> None:
    for age, name in enumerate(("new", "old")):
        run = finished_run(work.runs / name, saves=())
        then = time.time() - 60 * age
        os.utime(run / "zorble.safetensors", (then, then))
    assert [entry.file.run for entry in lora_files.entries(work)] == ["new", "old"]


def test_a_changed_file_is_read_again(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=(), modelspec__title="one")
    assert lora_files.entries(work)[0].header.title == "one"
    lora(run / "zorble.safetensors", modelspec__title="another")
    assert lora_files.entries(work)[0].header.title == "another"


@pytest.mark.parametrize(
    ("content", "said"),
    [(b"", "is not a safetensors file"), (b"\x08" + b"\0" * 7 + b"{}      ", "holds no LoRA")],
)
def test_a_broken_file_is_listed_with_the_reason_and_no_folder(
    work: Workplace, content: bytes, said: str
) -> None:
    run = finished_run(work.runs / "a", saves=())
    (run / "zorble.safetensors").write_bytes(content)
    (entry,) = lora_files.entries(work)
    assert entry.header.problem.startswith(said)
    assert str(work.runs) not in entry.header.problem


@pytest.mark.parametrize(
    "ref",
    [
        "", "a", "a/", "/", "../a/zorble.safetensors", "a/../a/zorble.safetensors", "a/run.json",
        "a/.hidden.safetensors", "a/link.safetensors", "a//zorble.safetensors", "b/zorble.safetensors",
        "a/sub/zorble.safetensors", "a/folder.safetensors", "a/\0", ".gui/x.safetensors",
    ],
)  # fmt: skip
def test_a_name_leads_to_a_listed_file_or_nowhere(work: Workplace, ref: str) -> None:
    run = finished_run(work.runs / "a")
    outside = lora(work.runs.parent / "secret.safetensors")
    (run / "link.safetensors").symlink_to(outside)
    (run / "folder.safetensors").mkdir()
    (run / "sub").mkdir()
    for path in (run / ".hidden.safetensors", run / "sub" / "zorble.safetensors"):
        lora(path)
    assert refs(lora_files.entries(work)) == {"a/zorble.safetensors"}
    with pytest.raises(RequestError):
        lora_files.find(work, ref)
    assert lora_files.find(work, "a/zorble-step00000010.safetensors").step == 10


def test_search_wants_every_word_somewhere(work: Workplace) -> None:
    finished_run(
        work.runs / "owl", saves=(), modelspec__title="Blue Owl", modelspec__tags="bird, night"
    )
    finished_run(work.runs / "cat", saves=(), ss_sd_model_name="sdxl.safetensors")
    found = lora_files.entries(work)
    for text, base, runs in (
        ("", "", {"owl", "cat"}),
        ("blue NIGHT", "", {"owl"}),
        ("blue day", "", set()),
        ("", "sdxl.safetensors", {"cat"}),
        ("owl", "sdxl.safetensors", set()),
    ):
        assert {e.file.run for e in lora_files.matching(found, text, base)} == runs, (text, base)


def test_a_base_is_where_the_run_says_if_the_file_is_for_it(work: Workplace) -> None:
    run = finished_run(work.runs / "a", saves=())
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
        file = lora_files.find(work, f"a/{name}.safetensors")
        assert lora_files.recorded_base(file) == base


@pytest.mark.parametrize("settings", ["{", "[1]", "[" * 100_000, "5", "null", '{"base.model": 5}'])
def test_hostile_settings_in_a_header_are_no_error(work: Workplace, settings: str) -> None:
    finished_run(work.runs / "a", saves=(), lora_train__settings=settings, ss_steps="9" * 99)
    (entry,) = lora_files.entries(work)
    assert entry.header.steps is None
    assert isinstance(entry.header.base, str)


def test_a_picture_in_a_header_is_a_picture_or_nothing() -> None:
    for text, shown in (
        ("data:image/jpeg;base64,/9j/4A==", True),
        ("javascript:alert(1)", False),
        ("data:text/html;base64,PHNjcmlwdD4=", False),
        ("data:image/svg+xml;base64,PHN2Zz4=", False),
        ('data:image/png;base64,A"onerror="x', False),
    ):
        header = lora_files.Header(metadata={"modelspec.thumbnail": text})
        assert bool(header.thumbnail) == shown


def test_a_name_that_is_taken_gets_a_number(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    assert lora_files.unused(path) == path
    for name in ("a.safetensors", "a-002.safetensors"):
        (tmp_path / name).touch()
    assert lora_files.unused(path).name == "a-003.safetensors"


def test_a_renamed_lora_is_still_the_result_of_its_run(work: Workplace) -> None:
    run = finished_run(work.runs / "a")
    write_status(run, state="finished", exit_code=0)
    picture(run / "zorble.preview.png")
    lora_files.rename(work, "a/zorble.safetensors", "first")
    lora_files.take_note(work, "a/first.safetensors", "good with hats\n")
    file = lora_files.rename(work, "a/first.safetensors", "Blue creature.safetensors")
    assert file.ref == "a/Blue creature.safetensors"
    assert (run / "Blue creature.preview.png").is_file() and not (
        run / "zorble.safetensors"
    ).exists()
    (entry,) = lora_files.entries(work)
    assert (entry.file.ref, len(entry.saves)) == (file.ref, 2)
    assert lora_files.matching((entry,), "hats BLUE", "") == (entry,)
    assert file.was("a/zorble.safetensors") and file.was("a/first.safetensors")
    assert exports(run, read_history(run))[30] == "Blue creature.safetensors"
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


@pytest.fixture
def with_exports(tmp_path: Path) -> Workplace:
    with_exports = Workplace(runs=tmp_path / "runs")
    run = finished_run(with_exports.runs / "a", saves=())
    for folder in (run / "export", run / "export" / "deep", with_exports.own / "tries" / "1"):
        folder.mkdir(parents=True)
    for name in ("export/x.safetensors", "export/deep/x.safetensors"):
        lora(run / name)
    (run / "export" / "x.json").write_text("{}")
    (run / "export" / "x.html").write_text("<p>")
    picture(with_exports.own / "tries" / "1" / "x.png")
    (with_exports.own / "tries" / "1" / "log.txt").write_text("x")
    (with_exports.own / "key").write_text("secret")
    picture(with_exports.own / "secret.png")
    (with_exports.own / "tries" / "1" / "out.png").symlink_to(with_exports.own / "secret.png")
    return with_exports


def test_a_picture_of_a_try_is_served(with_exports: Workplace) -> None:
    served = media.try_file(with_exports, "1", "x.png")
    assert (served.path.name, served.kind, served.download) == ("x.png", "image/png", False)
    assert media.try_url("1", "a b/?.png") == "/media/own/tries/1/a%20b%2F%3F.png"


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("..", "key"), ("..", "secret.png"), ("1", "log.txt"), ("1", "out.png"), ("1", "../../secret.png"),
        ("", "x.png"), ("1", ""), (".", "x.png"), ("1", "absent.png"), ("1/..", "1/x.png"), ("1", "\0.png"),
        ("1\\..", "x.png"), ("/", "x.png"),
    ],
)  # fmt: skip
def test_nothing_else_of_the_interface_is(with_exports: Workplace, folder: str, name: str) -> None:
    with pytest.raises(RequestError):
        media.try_file(with_exports, folder, name)


def test_an_export_is_downloaded(with_exports: Workplace) -> None:
    for name in ("x.safetensors", "x.json"):
        assert media.served_file(with_exports, "a", f"export/{name}").download
    for name in ("x.html", "deep/x.safetensors", "../../.gui/key"):
        with pytest.raises(RequestError):
            media.served_file(with_exports, "a", f"export/{name}")

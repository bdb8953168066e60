"""The grid and the page of one LoRA as markup; what a header holds stays text."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from lora_trainer.gui import library, lora_files, previews, sharing, tries
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.lora_file.inspect import inspect_file
from tests.fakes.lora_library import finished_run, lora, picture

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

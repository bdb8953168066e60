"""No text of a page stays English in German: each page is drawn with every translation in marks, and what is left
outside of them, in an element that is neither code nor of the user, has no entry.

What is English in every language says so (`lang="en"`): the reasons that the planner has written into a run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from urllib.parse import quote

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.datasets import spoken
from lora_trainer.gui.server import language, startup, translation
from lora_trainer.gui.settings import view as settings_view
from lora_trainer.gui.workplace import Workplace
from starlette.requests import Request
from starlette.routing import Router

from scripts import gui_texts
from tests.fakes.live_runs import until as cut_at
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import ROOT
from tests.gui.conftest import answered

# What keeps texts of a language.
REMEMBERED = (translation.words, settings_view.form, spoken._message, language.languages)
BEGIN, END = "\u27e6", "\u27e7"
VOID = frozenset({"br", "hr", "img", "input", "link", "meta", "wbr"})
SAID = ("title", "aria-label", "alt", "placeholder")
# Units and names, which are the same in German.
SAME = re.compile(r"lora-train|\b(LoRAs?|ComfyUI|px|GiB|MiB|KiB|min|ms|GPU|CPU|VAE|MP)\b")
EXAMPLE = ROOT / "datasets" / "example"
PAGES = (
    "/",
    "/train?draft={draft}",
    "/train?draft={draft}&example=1",
    f"/datasets?folder={quote(str(EXAMPLE))}",
    "/queue",
    "/library",
    "/library?file=done/zorble.safetensors",
    "/run?run=done",
    "/run?run=failed",
    "/run?run=live",
    "/run?run=none",
    "/compare?a=done",
    "/series",
    "/trash",
    "/settings?draft={draft}",
    "/doctor",
)


class Texts(HTMLParser):
    """Collects the texts of a page, those of attributes too, that are not code, of the user or English on purpose."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.kept = [False]
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        own = values.get("translate") == "no" or (tag != "html" and values.get("lang") == "en")
        kept = self.kept[-1] or own or tag in ("code", "pre", "kbd", "script", "style", "svg")
        if not kept:
            self.found += [values[name] or "" for name in SAID if values.get(name)]
        if tag not in VOID:
            self.kept.append(kept)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            self.kept.pop()

    def handle_data(self, data: str) -> None:
        if not self.kept[-1]:
            self.found.append(" ".join(data.split()))


def english_in(html: str) -> list[str]:
    """Return the texts of a page of which some part has no entry; an entry may hold others, and go over elements."""
    page = Texts()
    page.feed(html)
    found, depth = [], 0
    for text in page.found:
        left = ""
        for letter in text:
            depth += (letter == BEGIN) - (letter == END)
            left += letter if depth == 0 else " "
        if re.search(r"[A-Za-z]{2,}", SAME.sub("", left)):
            found.append(text)
    assert depth == 0, "an entry was cut"
    return list(dict.fromkeys(found))


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have German say each English text in marks."""
    real = language.words
    monkeypatch.setattr(
        language, "words", lambda code: {text: f"{BEGIN}{text}{END}" for text in real(code)}
    )
    for cached in REMEMBERED:
        cached.cache_clear()
    yield
    for cached in REMEMBERED:
        cached.cache_clear()


@pytest.fixture
def application(work: Workplace) -> Router:
    """Return the pages of a workplace with runs of each kind."""
    finished_run(work.runs / "done")
    fake_run(work.runs / "failed", steps=6).write()
    write_status(
        work.runs / "failed", state="failed", exit_code=3, step=3, steps=6, pid=0, message=""
    )
    write_status(cut_at(fake_run(work.runs / "live", steps=30), 12))
    return Router(routes=startup._page_routes(work))


def test_no_page_has_a_text_without_an_entry(
    marked: None, work: Workplace, application: Router
) -> None:
    draft = drafts.new(work, dataset=str(EXAMPLE)).id
    english = {}
    for page in PAGES:
        path, _, query = page.format(draft=draft).partition("?")
        status, _, body = answered(application, path, query=query, accept_language="de")
        assert status == 200, page
        if left := english_in(body.decode()):
            english[page] = left
    assert english == {}


def test_a_wrong_address_leads_on_in_each_language(marked: None) -> None:
    scope = {"type": "http", "method": "GET", "path": "/none", "query_string": b""}
    heads = [(b"accept", b"text/html"), (b"accept-language", b"de")]
    answer = startup._no_page(Request({**scope, "headers": heads}))
    body = bytes(answer.body).decode()
    assert answer.status_code == 404 and english_in(body) == []
    assert 'href="/"' in body.partition("<main")[2] and "error" not in body.partition("<main")[2]


def said_in_python(source: str) -> Iterator[str]:
    """Yield the texts that a module of the pages says in the language of the reader: `said("...")`, `_("...")`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name | ast.Attribute):
            name = node.func.id if isinstance(node.func, ast.Name) else node.func.attr
            first = node.args[0] if node.args else None
            if name in ("said", "_") and isinstance(first, ast.Constant):
                yield str(first.value)


def shown_by_script(source: str) -> Iterator[str]:
    """Yield the sentences of a script that do not go through `say`: two words or more, the first with a capital."""
    code = re.sub(r"(?m)^\s*(//|\*|/\*).*$|\s//\s.*$", "", source)
    for found in re.finditer(
        r"""(\bsay\(\s*|\bsay\(\S+ [?:] |[?:] say\()?(["`])([A-Z][a-z]+ [^"`\n]*)\2""", code
    ):
        if not found[1]:
            yield found[3]


@pytest.mark.parametrize("code", [each.stem for each in gui_texts.LANGUAGES.glob("*.json")])
def test_every_text_of_a_module_and_a_script_is_said_with_an_entry(code: str) -> None:
    known = gui_texts.known(code)
    lacking = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted(ROOT.glob("gui/**/*.py"))
        for text in said_in_python(path.read_text(encoding="utf-8"))
        if text not in known and re.search("[A-Za-z]{2,}", text)
    ]
    lacking += [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted(ROOT.glob("gui/**/*.js"))
        for text in shown_by_script(path.read_text(encoding="utf-8"))
        if text not in {*known, "Apache 2.0"}  # a name
    ]
    assert lacking == []


def test_a_text_of_a_module_and_of_a_script_without_an_entry_is_found() -> None:
    assert [*said_in_python('said("Of Python"); _("Of {}", 1); other("no")')] == [
        "Of Python",
        "Of {}",
    ]
    script = 'button("Press this", act); say("Said well"); // "Not of code"\nnode.textContent = `Two words`;'
    assert [*shown_by_script(script)] == ["Press this", "Two words"]


@pytest.mark.parametrize(
    "html",
    [
        "<p>A word that a template says without its function</p>",
        '<button title="Something of an attribute"></button>',
        f"<p>{BEGIN}An entry{END} with a rest</p>",
        f"<p>{BEGIN}An entry <code>of code</code> goes on{END}</p><p>and then a rest</p>",
        '<p translate="no">a name</p><p>and a sentence of Python</p>',
    ],
)
def test_each_kind_of_untranslated_text_is_found(html: str) -> None:
    assert english_in(html)


@pytest.mark.parametrize(
    "html",
    [
        f"<p>{BEGIN}{{#}} of {BEGIN}these{END}{END} 12 GiB</p>",
        '<p translate="no">my name</p><code>word</code>',
        '<span lang="en">CPUs train in fp32</span>',
        f'<img alt="{BEGIN}a picture{END}"><br>',
        f"<p>{BEGIN}An entry with <code>code</code> in it{END}</p>",
    ],
)
def test_names_code_units_and_entries_are_none(html: str) -> None:
    assert not english_in(html)


# What is said in a terminal, to a program, or at an address that no page leads to.
NOT_ON_PAGES = ("app.py", "media.py", "programs/", "server/")
REFUSALS = frozenset({"InputError", "MachineError", "RequestError"})


def written_in(node: ast.expr) -> Iterator[str]:
    """Yield the texts that an expression may be, with `{}` for what is put in."""
    if isinstance(node, ast.IfExp):
        yield from written_in(node.body)
        yield from written_in(node.orelse)
    elif isinstance(node, ast.JoinedStr):
        parts = (
            str(part.value) if isinstance(part, ast.Constant) else "{}" for part in node.values
        )
        yield "".join(parts)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value


def test_what_is_found_about_a_dataset_is_said_in_each_language() -> None:
    found = set(gui_texts.literals(gui_texts.FINDINGS)) - {"", "{}"}
    assert "looks the same as {}" in found
    for code in language.languages():
        if code != language.ENGLISH:
            entries = {gui_texts.normal(english) for english in gui_texts.known(code)}
            assert found - entries == set()
    said = translation.words("de").message
    assert said("21 of 22 images have no caption but the trigger, if one is set: a.jpg") == (
        "21 von 22 Bildern haben keine Caption außer dem Triggerwort, falls eines gesetzt ist: a.jpg"
    )


def test_an_entry_has_the_placeholders_of_its_text_else_it_is_never_used() -> None:
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "gui").rglob("*.py")]
    constants = (
        node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)
    )
    asked = {
        text for text in constants if isinstance(text, str) and re.search(r"\{(#|text)\}", text)
    }
    assert "{#} images have no caption" in asked
    for entries in (gui_texts.known(code) for code in language.languages() if code != "en"):
        forms = {gui_texts.normal(english) for english in entries}
        assert {text for text in asked - set(entries) if gui_texts.normal(text) in forms} == set()


def test_what_would_be_half_translated_stays_whole() -> None:
    texts = {
        "{text} of {text}": "{text} von {text}",
        "a file of it": "eine Datei davon",
        "{text}, the best": "{text}, der beste",
        "it is torn": "sie ist zerrissen",
        "Fix: {text}": "Abhilfe: {text}",
    }
    said = translation.Words("de", texts).message
    for english in (
        "21 of 21 images have nothing of it",
        "it is torn. Fix: use another machine.",
        "this run needs more. Fix: a file of it.",
    ):
        assert said(english) == english
    assert said("it is torn. Fix: a file of it.") == "sie ist zerrissen. Abhilfe: eine Datei davon."
    assert said("it is torn, the best") == "sie ist zerrissen, der beste"


def test_what_a_page_refuses_is_said_in_each_language_and_so_is_what_to_do() -> None:
    known = {gui_texts.normal(english) for english in gui_texts.known("de")}
    lacking = []
    for path in sorted((ROOT / "gui").rglob("*.py")):
        name = path.relative_to(ROOT / "gui").as_posix()
        if name.startswith(NOT_ON_PAGES):
            continue
        for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") in REFUSALS:
                said = [
                    *call.args[:1],
                    *(each.value for each in call.keywords if each.arg == "fix"),
                ]
                texts = (gui_texts.normal(text) for node in said for text in written_in(node))
                lacking += [
                    f"{name}: {text}"
                    for text in texts
                    if re.search("[a-z]{2}", text) and text not in known
                ]
    assert lacking == []
    german = translation.words("de")
    told = german.message("'x' is not a seed. Fix: type a whole number from 0.")
    assert told == "'x' ist kein Seed. Abhilfe: gib eine ganze Zahl ab 0 ein."

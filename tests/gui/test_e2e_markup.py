"""Texts on the pages in a real browser: markup shows as text (SEC-03), and the pages in German.

Beside scripts these are the templates of gradio's own HTML widget, which fills `${...}` and `{{...}}`.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from PIL import Image

from tests.fakes.attacks import COMMANDS, MARKER, MARKUP, as_names
from tests.fakes.gui_server import GuiServer
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run, lora
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import ROOT
from tests.gui.conftest import NewPage, StartGui
from tests.gui.test_e2e_every_page import Shown

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

NAMES = as_names(MARKUP)
OPENED = (26, 31, 35)
"""Of the names: an attribute, and both kinds of templates."""
TYPED = "Stop"
"""The name of a run and of a LoRA, and the caption of an image: a word of a button too."""
CHECKED = (
    "nav a, h1, h2, h3, legend, dt, [role=tab], summary, .drop .what, button:not(.base-card, .cell)"
)
"""The elements of which no text may stay English."""
TEXTS = """selector => [...document.querySelectorAll(selector)].flatMap((element) => {
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT), found = [];
  while (walker.nextNode()) {
    const { data, parentElement } = walker.currentNode;
    const kept = parentElement.closest("[translate=no]") || !parentElement.checkVisibility();
    if (!kept && /[a-z]{2}/i.test(data)) found.push(data.trim());
  }
  return found;
})"""
SAID_IN_BOTH = {"LoRAs", "Samples", "Loss"}
HOME = Shown(name="home", path="/", ready=".home img")
TRAIN = Shown(name="train", path="/train?draft=new&example=1", ready="text=Passt:")
RUN = Shown(name="run", path="/run?run=live", ready="table.sheet img")


def hostile_run(folder: Path) -> None:
    """Write a run all of whose texts are markup."""
    run = fake_run(folder, steps=6)
    for row in run.events:
        if row["event"] == "sample":
            first = row["images"][0]
            row["images"] = [{**first, "prompt": text, "seed": n} for n, text in enumerate(MARKUP)]
    for text in MARKUP:
        run.emit("problem", severity="warning", file=text, what=text, fix=text)
        run.emit("change", key=text, old=text, new=text, reason=text)
    run.write()
    record = json.loads((folder / "run.json").read_text())
    record["dataset"] = {"name": MARKUP[0], "trigger": MARKUP[1]}
    record["command"] = list(MARKUP)
    (folder / "run.json").write_text(json.dumps(record))
    keys = ("title", "trigger_phrase", "description", "tags", "author", "license")
    header = {f"modelspec__{key}": " ".join(MARKUP) for key in keys}
    lora(folder / "zorble.safetensors", **header, ss_sd_model_name=MARKUP[1])
    status = {"state": "failed", "exit_code": 3, "step": 3, "steps": 6, "pid": 0}
    message = " ".join(MARKUP)
    (folder / "status.json").write_text(json.dumps({**status, "message": message}))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("markup")
    for name in [*NAMES, *as_names(COMMANDS)]:
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "run.json").write_text("{}")
    for index in OPENED:
        hostile_run(root / "runs" / NAMES[index])
    dataset = root / MARKUP[1].replace("/", "")
    dataset.mkdir()
    for number, (name, text) in enumerate(zip(NAMES, MARKUP, strict=False)):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(dataset / f"{name[:100]}.png")
        (dataset / f"{name[:100]}.txt").write_text(text, encoding="utf-8")
    done = finished_run(root / "runs" / TYPED)
    write_status(done, state="finished", step=30, steps=30, exit_code=0)
    write_status(until(fake_run(root / "runs" / "live", steps=30), 12))
    return root


@pytest.fixture(scope="module")
def server(place: Path, gui_server: StartGui) -> GuiServer:
    return gui_server(place / "runs")


_IMAGE_FAILED = """() => new Promise((done) => {
  const image = new Image();
  image.onerror = () => requestAnimationFrame(done);
  image.src = "data:image/png,none";
})"""


def assert_untouched(page: Any) -> None:
    """No text has done what it would as markup; alerts and foreign requests fail by themselves."""
    page.evaluate(_IMAGE_FAILED)  # by then an image of a text would have failed, too
    assert page.evaluate("window.__xss") is None
    assert page.locator("iframe, object, embed, base[href*=evil], form[action*=evil]").count() == 0


def test_runs_show_their_names_as_text(page: Any, server: GuiServer) -> None:
    assert len(NAMES) >= 40
    page.goto(server.link)
    page.get_by_text("window.__xss").first.wait_for()
    shown = page.locator("body").inner_text()
    missing = [name for name in NAMES if visible(name) not in plain(shown)]
    assert missing == []
    assert_untouched(page)


def test_a_run_shows_its_texts_as_text(page: Any, server: GuiServer, place: Path) -> None:
    page.goto(server.link)
    for index in OPENED:
        page.goto(server.url(f"/run?run={quote(NAMES[index], safe='')}"))
        page.locator(".run-samples").get_by_text(MARKUP[1]).first.wait_for()
        for tab in page.get_by_role("tab").all():
            tab.click()
        shown = plain(page.locator("body").inner_text())
        assert visible(NAMES[index]) in shown
        assert_untouched(page)
    assert not list(place.rglob(MARKER)), "no text was run as a command"


def test_a_dataset_shows_names_and_captions_as_text(
    page: Any, server: GuiServer, place: Path
) -> None:
    (dataset,) = [path for path in place.iterdir() if path.name != "runs"]
    page.goto(server.link)
    for address in ("datasets", "train"):
        page.goto(server.url(f"/{address}?folder={quote(str(dataset), safe='')}"))
        page.locator("img[src*='/media/thumb']").first.wait_for()
        assert_untouched(page)
        assert page.locator("img[src='x']").count() == 0


def test_a_lora_shows_its_header_as_text(page: Any, server: GuiServer) -> None:
    page.goto(server.link)
    for query in ("", f"?file={quote(NAMES[OPENED[0]], safe='')}/zorble.safetensors"):
        page.goto(server.url(f"/library{query}"))
        page.get_by_text(MARKUP[1]).first.wait_for()
        for tab in page.get_by_role("tab").all():
            tab.click()
        assert_untouched(page)


def plain(text: str) -> str:
    return " ".join(text.split())


def visible(text: str) -> str:
    """Return a text as the pages show it: what turns the direction of others is replaced."""
    return plain("".join("\ufffd" if c in "\u202e" else c for c in text))


# ---- in German


@pytest.fixture(scope="module")
def german_profile(open_profile: NewPage) -> Any:
    return open_profile(locale="de-DE")


@pytest.fixture
def german(german_profile: Any, new_page: NewPage, server: GuiServer) -> Any:
    page = new_page(german_profile)
    page.goto(server.link)
    return page


def texts(page: Any, server: GuiServer, shown: Shown) -> set[str]:
    """Return the texts of the checked elements of a page."""
    page.goto(shown.address(server))
    page.locator(shown.ready).first.wait_for()
    return set(page.evaluate(TEXTS, CHECKED))


def test_no_text_of_home_train_and_a_run_stays_english(
    german: Any, page: Any, server: GuiServer
) -> None:
    page.goto(server.link)
    for shown in (HOME, TRAIN, RUN):
        as_written = replace(shown, ready=shown.ready.replace("Passt:", "Fits:"))
        same = texts(german, server, shown) & texts(page, server, as_written)
        assert same - SAID_IN_BOTH == set(), shown.name
    german.get_by_role("button", name="Anhalten", exact=True).wait_for()
    german.goto(TRAIN.address(server))
    german.wait_for_function("document.title === '40 % · live – lora-train'")
    german.get_by_role("button", name="Versuch in die Warteschlange", exact=True).wait_for()
    assert german.locator("html").get_attribute("lang") == "de"


def test_what_somebody_typed_stays(german: Any, server: GuiServer, tmp_path: Path) -> None:
    folder = tmp_path / TYPED
    folder.mkdir()
    for image in ("zibbo_01.png", "zibbo_14.png"):
        (folder / image).write_bytes((ROOT / "datasets" / "example" / image).read_bytes())
        (folder / image).with_suffix(".txt").write_text(TYPED)
    german.goto(server.url(f"/datasets?folder={folder}"))
    caption = german.locator(".ds-card textarea").first
    caption.wait_for()
    assert caption.input_value() == TYPED
    german.get_by_text("Tags (1)").click()
    assert german.locator(".ds-tags button").all_inner_texts() == [f"{TYPED} 2"]
    german.goto(server.url("/library"))
    german.get_by_role("link", name=f"Training {TYPED}", exact=True).first.wait_for()
    german.goto(server.url(f"/compare?a={TYPED}"))
    german.locator(".pairs img").first.wait_for()
    assert TYPED in german.get_by_label("Training").first.locator("option").all_inner_texts()
    german.goto(server.url(f"/run?run={TYPED}"))
    german.locator("table.sheet img").first.wait_for()
    assert german.get_by_role("heading", level=1).inner_text() == TYPED


def test_the_choice_leads_to_english_and_back(german: Any, server: GuiServer) -> None:
    german.get_by_label("Sprache").select_option("English")
    german.get_by_role("heading", name="Your trainings").wait_for()
    german.wait_for_function("document.documentElement.lang === 'en'")
    assert german.locator("script[src*=language]").count() == 0
    german.goto(server.url("/queue"))
    german.get_by_label("Language").select_option("Deutsch")
    german.get_by_role("link", name="Warteschlange").wait_for()

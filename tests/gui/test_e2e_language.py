"""The pages in German: what they say, what stays as somebody typed it, and the way back to English."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gui_server import GuiServer
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import ROOT
from tests.gui.conftest import NewPage, StartGui
from tests.gui.test_e2e_every_page import Shown

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

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


@pytest.fixture(scope="module")
def server(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> GuiServer:
    runs = tmp_path_factory.mktemp("german") / "runs"
    done = finished_run(runs / TYPED)
    write_status(done, state="finished", step=30, steps=30, exit_code=0)
    write_status(until(fake_run(runs / "live", steps=30), 12))
    return gui_server(runs)


@pytest.fixture
def german(new_page: NewPage, server: GuiServer) -> Any:
    page = new_page(locale="de-DE")
    page.goto(server.link)
    return page


def texts(page: Any, server: GuiServer, shown: Shown) -> set[str]:
    """Return the texts of the checked elements of a page."""
    page.goto(shown.address(server))
    page.locator(shown.ready).first.wait_for()
    return set(page.evaluate(TEXTS, CHECKED))


def test_no_text_of_home_train_and_a_run_stays_english(
    german: Any, new_page: NewPage, server: GuiServer
) -> None:
    english = new_page()
    english.goto(server.link)
    for shown in (HOME, TRAIN, RUN):
        as_written = replace(shown, ready=shown.ready.replace("Passt:", "Fits:"))
        same = texts(german, server, shown) & texts(english, server, as_written)
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

"""The page of a run in a real browser, until its end: samples by mouse and keyboard, the buttons in order, copy,
publish, compare, train again, delete with undo; and the page of a LoRA: found, tried, described, converted, exported.

The runs are fakes; this test writes what a trainer would, so that every moment can be looked at. One LoRA is trained.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_trainer.reporting.control import Control
from tests.fakes.gui_server import GuiServer
from tests.fakes.hub_server import TOKEN, HubServer, hub_server
from tests.fakes.live_runs import until, write_status
from tests.fakes.lora_library import finished_run, lora
from tests.fakes.queues import until as eventually
from tests.fakes.run_folder import HOSTILE_CAPTION, PROMPTS, fake_run
from tests.fakes.runs import ROOT, Toy, toy
from tests.gui.conftest import NO_SERVER, StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

OLD = quote("old & <b>")
HOSTILE = '"><img src=x onerror=alert(1)>${alert(2)}{{alert(3)}}`'


@dataclass(frozen=True)
class Place:
    """The runs folder of this module, its server, the Hub it publishes to, and a trained run of a tiny base."""

    runs: Path
    server: GuiServer
    hub: HubServer
    toy: Toy

    def delete(self, page: Any, path: str, name: str) -> None:
        self.server.open(page, path)
        page.locator(".trash[data-ready]").wait_for(state="attached")
        button = page.get_by_role("button", name=f"Delete {name}")
        if not path.startswith("/run"):  # in a menu
            page.get_by_label(f"More for {name}", exact=True).click()
        button.click()
        page.get_by_text(f"{name} is in the trash.").wait_for()


@pytest.fixture(scope="module")
def place(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    trained = toy(tmp_path_factory.mktemp("run-page")).with_base()
    runs = trained.runs
    assert trained.train(logging__trackers=[], data__trigger="toy") == 0
    evil = finished_run(runs / "evil", saves=(), modelspec__title=HOSTILE, ss_sd_model_name=HOSTILE)
    lora(evil / f"{HOSTILE.replace('/', '')}.safetensors", modelspec__trigger_phrase=HOSTILE)
    old = fake_run(runs / "old & <b>", steps=30).write()
    (old / "zorble-step00000020.safetensors").write_bytes(b"twenty")
    write_status(old, state="finished", step=30, steps=30, exit_code=0)
    write_status(until(fake_run(runs / "live", steps=30), 12))
    with hub_server() as hub:
        home = str(runs.parent / "hub")
        env = {"HF_ENDPOINT": hub.address, "HF_HOME": home, "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}
        yield Place(runs=runs, server=gui_server(runs, env=env), hub=hub, toy=trained)


def test_samples_are_enlarged_walked_through_compared_and_the_best_is_kept(
    page: Any, place: Place
) -> None:
    place.server.open(page, f"/run?run={OLD}")
    names, prompts = (
        page.locator(".run-film figcaption"),
        page.locator(".run-beside .others button"),
    )
    prompts.first.wait_for()
    assert prompts.count() == 3, "each prompt is beside the film"
    prompts.nth(1).click()
    assert page.locator(".run-beside .prompt").inner_text() == PROMPTS[1]
    assert names.all_inner_texts() == ["base", "step 30"], "of what has ended: what came of it"
    assert "step-00000030/01.png" in page.locator(".run-film .enlarge img").get_attribute("src")
    page.locator(".run-film .enlarge").click()
    page.get_by_text("step 30, prompt 2 of 3", exact=True).wait_for()
    page.keyboard.press("Escape")
    page.get_by_role("button", name=f"step 10: {PROMPTS[1]}", exact=True).click()
    viewer = page.get_by_role("dialog", name="sample image")
    caption, large = viewer.locator(".caption"), viewer.locator("> img")

    def at(step: str, prompt: int) -> None:
        viewer.get_by_text(f"{step}, prompt {prompt} of 3", exact=True).wait_for()
        assert large.evaluate("image => image.decode().then(() => image.naturalWidth)") == 64
        assert caption.inner_text() == f"{step}, prompt {prompt} of 3"

    at("step 10", 2)
    for key, step, prompt in (
        ("ArrowRight", "step 10", 3),
        ("ArrowRight", "step 10", 3),
        ("ArrowUp", "step 20", 3),
        ("ArrowLeft", "step 20", 2),
        ("ArrowDown", "step 10", 2),
        ("ArrowDown", "base", 2),
        ("ArrowUp", "step 10", 2),
    ):
        page.keyboard.press(key)
        at(step, prompt)
    page.keyboard.press("ArrowRight")
    assert viewer.locator(".prompt").inner_text() == HOSTILE_CAPTION
    viewer.get_by_role("button", name="Compare with the base").click()
    viewer.wait_for(state="hidden")
    compare = page.get_by_role("dialog", name="compare two pictures")
    slider, upper = compare.get_by_role("slider"), compare.locator("img.b")
    assert "step-00000000/02.png" in compare.locator("img.a").get_attribute("src")
    assert "step-00000010/02.png" in upper.get_attribute("src")

    def clipped() -> str:
        return str(upper.evaluate("image => getComputedStyle(image).clipPath"))

    assert clipped() == "inset(0px 0px 0px 50%)"
    for _ in range(3):
        page.keyboard.press("ArrowRight")  # the slider is chosen when the dialog opens
    assert slider.input_value() == "53"
    assert clipped() == "inset(0px 0px 0px 53%)"
    compare.get_by_label("step of B").select_option("step 30")
    compare.get_by_label("prompt of A").select_option(index=0)
    assert "step-00000030/02.png" in upper.get_attribute("src")
    assert "step-00000000/00.png" in compare.locator("img.a").get_attribute("src")
    page.keyboard.press("Escape")
    compare.wait_for(state="hidden")
    assert page.get_by_role("link", name="Download the LoRA of step 10").count() == 0, "no file"
    page.get_by_role("button", name=f"step 20: {PROMPTS[1]}").first.click()
    page.get_by_role("button", name="Mark this step as the best").click()
    page.get_by_role("button", name="Marked as the best").first.wait_for()
    page.keyboard.press("Escape")
    page.locator("table.sheet th", has_text="step 20").get_by_text("best").wait_for()
    best = place.runs / "old & <b>" / "old & <b>-best.safetensors"
    assert best.read_bytes() == b"twenty"
    page.get_by_role("tab", name="Files and report").click()
    page.get_by_role("button", name="Mark step 30 as the best").click()
    page.get_by_text("the best: step 30").wait_for()
    with page.expect_download() as download:
        page.get_by_role("link", name=best.name).click()
    assert Path(download.value.path()).stat().st_size == 3_288_000


def test_on_a_phone_no_prompt_covers_a_sample(page: Any, place: Place) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    place.server.open(page, f"/run?run={OLD}")
    row = page.locator("table.sheet tbody tr").first
    row.locator("img").last.wait_for()
    sheet = "document.querySelector('.sheet-scroll')"
    assert page.evaluate(f"{sheet}.scrollLeft") == 0, "the column of the base is not cut"
    page.evaluate(f"{sheet}.scrollLeft = 9999")
    assert page.evaluate(f"{sheet}.scrollLeft") > 0, "all steps fit"
    prompt, sample = row.locator("th").bounding_box(), row.locator("td").first.bounding_box()
    assert prompt["y"] + prompt["height"] <= sample["y"] + 1
    shown = page.locator(".sheet-scroll").bounding_box()
    assert prompt["x"] >= shown["x"] - 1
    assert prompt["x"] + prompt["width"] <= shown["x"] + shown["width"] + 1


def ask_for_samples(page: Any, live: Path) -> None:
    """Press Draw samples now, ask for a prompt, and draw it as the training would: at one step only."""
    page.get_by_role("button", name="Draw samples now").click()
    asking = page.get_by_role("dialog", name="Draw samples now")
    prompt = asking.get_by_label("Prompt")
    prompt.wait_for()
    assert prompt.input_value() == PROMPTS[0]
    prompt.fill("a zorble in the fog")
    asking.get_by_role("button", name="Make samples").click()
    page.get_by_text("Asked to make sample images").wait_for()
    assert Control(live).take_samples() == "a zorble in the fog"
    file = "samples/step-00000011/asked-00.png"
    (live / file).parent.mkdir()
    shutil.copyfile(live / "samples" / "step-00000010" / "00.png", live / file)
    image = {"prompt": "a zorble in the fog", "seed": 42, "file": file}
    row = {"event": "sample", "step": 11, "images": [image], "seconds": 1.0, "asked": True}
    with (live / "events.jsonl").open("a", encoding="utf-8") as events:
        events.write(json.dumps({**row, "time": time.time()}) + "\n")
    page.get_by_role("button", name="step 11: a zorble in the fog").wait_for()
    page.get_by_role("button", name="Compare two pictures").click()
    compare = page.get_by_role("dialog", name="compare two pictures")
    assert "step-00000010/00.png" in compare.locator("img.b").get_attribute("src")
    page.keyboard.press("Escape")
    page.get_by_role("button", name="step 11: a zorble in the fog").click()
    viewer = page.get_by_role("dialog", name="sample image")
    assert viewer.get_by_role("button", name="Compare with the base").is_disabled()
    page.keyboard.press("Escape")


def test_a_run_is_asked_to_stop_and_the_page_follows_its_files(page: Any, place: Place) -> None:
    live = place.runs / "live"
    place.server.open(page, "/run?run=live")
    page.get_by_text("Training.", exact=True).wait_for()
    ask_for_samples(page, live)
    page.get_by_role("button", name="Stop").click()
    eventually(lambda: Control(live).pending() == {"stop"})
    page.get_by_text("Asked to stop: the step that runs is finished").wait_for()
    write_status(live, phase="stop")
    Control(live).done("stop")
    page.get_by_text("Saving the state, step 12.").wait_for()
    page.get_by_role("button", name="Force stop").wait_for()
    second = page.context.new_page()
    place.server.open(second, "/run?run=live")
    second.get_by_text("Saving the state, step 12.").wait_for()
    write_status(live, state="stopped", exit_code=143)
    for tab in (page, second):
        tab.get_by_text("Stopped at step 12 of 30").wait_for()
        tab.get_by_role("button", name="Resume").wait_for()
        tab.get_by_role("button", name="Force stop").wait_for(state="detached")
    page.get_by_role("button", name="Resume").click()
    page.get_by_text("does not say where its images are").wait_for()


def test_an_answer_that_comes_late_shows_no_button_that_is_over(page: Any, place: Place) -> None:
    """What is asked goes out one after another: a look that began before a press ends before it."""
    run = until(fake_run(place.runs / "late", steps=30), 12)
    write_status(run)
    place.server.open(page, "/run?run=late")
    page.get_by_text("12 of 30").wait_for()
    held: list[Any] = []
    page.route("**/run/look", lambda route: held.append(route), times=1)
    eventually(lambda: bool(page.wait_for_timeout(20) or held))
    page.get_by_role("button", name="Stop", exact=True).click()
    assert Control(run).pending() == set(), "it waits for the answer before"
    held[0].continue_()
    page.get_by_role("button", name="Force stop").wait_for()
    assert page.get_by_role("button", name="Stop", exact=True).count() == 0
    write_status(run, state="stopped", exit_code=143)
    page.get_by_role("button", name="Resume").wait_for()
    shutil.rmtree(run)
    page.reload()
    page.get_by_role("heading", name="No such run").wait_for()


def test_nothing_moves_on_a_page_that_learns_again_what_trains(page: Any, place: Place) -> None:
    """Somebody presses what is there; the figures of the machine come later and find their room."""
    write_status(until(fake_run(place.runs / "steady", steps=30), 12))
    where = "() => [...document.querySelectorAll('main, .bar nav a')].map((each) => each.getBoundingClientRect().y)"
    figures = page.locator(".cockpit b").first
    held: list[Any] = []
    for path in ("/library", "/run?run=steady"):
        place.server.open(page, path)
        figures.wait_for()
        page.route("**/live", lambda route: held.append(route), times=1)
        page.reload()
        eventually(lambda: bool(page.wait_for_timeout(20) or held))
        before = page.evaluate(where)
        assert not figures.is_visible()
        held.pop().continue_()
        figures.wait_for()
        assert page.evaluate(where) == before


def test_the_chart_is_looked_at_more_closely_by_mouse_and_by_keyboard(
    place: Place, page: Any
) -> None:
    """A drag shows a stretch of steps, fields do the same; how it is drawn is remembered for all runs."""
    place.server.open(page, f"/run?run={OLD}")
    chart = page.locator(".run-chart")
    svg = chart.locator("svg:visible")
    svg.wait_for()
    assert svg.get_attribute("data-x-range") == "1 30"
    svg.scroll_into_view_if_needed()
    box = svg.bounding_box()
    page.mouse.move(box["x"] + box["width"] * 0.4, box["y"] + 60)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] * 0.7, box["y"] + 80, steps=4)
    page.mouse.up()
    chart.get_by_role("button", name="Whole run").wait_for()
    first, last = (chart.get_by_label(name) for name in ("Steps", "to"))
    low, high = int(first.input_value()), int(last.input_value())
    assert 8 <= low <= 14 and 18 <= high <= 24
    shown = f"{low} {high}"
    eventually(lambda: svg.get_attribute("data-x-range") == shown)
    first.fill("5")
    first.press("Tab")
    eventually(lambda: svg.get_attribute("data-x-range") == f"5 {high}")
    chart.get_by_role("button", name="Whole run").press("Enter")
    eventually(lambda: svg.get_attribute("data-x-range") == "1 30")
    legend = chart.locator(".legend")
    assert "mean of about" in legend.inner_text()
    chart.get_by_label("Smoothing").select_option("none")
    eventually(lambda: "mean of about" not in legend.inner_text())
    before = svg.inner_html()
    chart.get_by_label("Logarithmic").check()
    eventually(lambda: svg.inner_html() != before)
    place.server.open(page, "/run?run=live")
    svg.wait_for()
    assert chart.get_by_label("Logarithmic").is_checked()
    eventually(lambda: "mean of about" not in legend.inner_text())


# ---- the end


@pytest.fixture
def run(place: Place) -> Path:
    """A finished run named done, of the example."""
    folder = finished_run(place.runs / "done")
    record = json.loads((folder / "run.json").read_text())
    record["dataset"]["name"] = "example"
    record["command"][1] = str(ROOT / "datasets" / "example")
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_finished_lora_is_copied_and_published(
    place: Place, page: Any, run: Path, expected: list[str]
) -> None:
    record = json.loads((run / "run.json").read_text())
    record["base"]["source"] = "owner/model"  # one that ComfyUI has
    (run / "run.json").write_text(json.dumps(record))
    loras = place.runs.parent / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True)
    place.server.open(page, "/run?run=done")
    page.locator("p", has_text="did best on the images kept aside").wait_for()
    page.get_by_role("button", name="Copy to ComfyUI or Forge").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("The program, or its folder of LoRAs").fill(str(place.runs))
    page.keyboard.press("Enter")
    dialog.get_by_text("is not a folder of LoRAs").wait_for()
    dialog.get_by_label("The program, or its folder of LoRAs").fill(str(loras.parents[1]))
    dialog.get_by_role("button", name="Copy").click()
    dialog.get_by_text("zorble.safetensors is now there").wait_for()
    assert (loras / "zorble.safetensors").read_bytes() == (run / "zorble.safetensors").read_bytes()
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Copy to ComfyUI or Forge").click()
    assert dialog.get_by_label("The program, or").input_value() == str(loras)
    page.keyboard.press("Escape")
    dialog.wait_for(state="detached")
    page.get_by_role("button", name="Publish to").click()
    dialog.get_by_text("Make a token that may write").wait_for()
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    assert dialog.get_by_label("Private").is_checked()
    assert dialog.get_by_label("Name of its page there").input_value() == "zorble"
    dialog.get_by_label("Name of its page there").fill("club/zorble")
    place.hub.refuses = 403  # as for a token that may only read
    dialog.get_by_role("button", name="Publish").click()
    dialog.get_by_text("The token that is signed in may only read").wait_for()
    tokens = dialog.get_by_role("link", name="your page of tokens").get_attribute("href")
    assert tokens == "https://huggingface.co/settings/tokens"
    place.hub.refuses = 0
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    assert dialog.get_by_label("Name of its page there").input_value() == "club/zorble"
    dialog.get_by_label("Name of its page there").fill("zorble")

    def lose(route: Any) -> None:  # the first answer of how far it is
        route.abort()

    expected.extend(NO_SERVER)
    page.route("**/share/published", lose, times=1)
    dialog.get_by_role("button", name="Publish").click()
    dialog.get_by_role("link", name=f"{place.hub.address}/jane/zorble").wait_for()
    assert place.hub.private == {"jane/zorble": True}


def test_a_run_is_compared_and_trained_again_with_changes(
    place: Place, page: Any, run: Path
) -> None:
    finished_run(place.runs / "other <b>")
    place.server.open(page, "/run?run=done")
    page.get_by_role("link", name="Compare with another training").click()
    page.locator(".pairs img").nth(5).wait_for()
    second = page.get_by_role("group", name="Second")
    assert page.get_by_role("group", name="First").get_by_label("Training").input_value() == "done"
    second.get_by_label("Training").select_option("other <b>")
    second.get_by_label("Step").select_option("step 10")
    page.get_by_role("group", name="First").get_by_label("Step").select_option("3")  # 30
    held: list[Any] = []
    page.route("**/compare/sheet", lambda route: held.append(route))
    page.reload()
    eventually(lambda: bool(page.wait_for_timeout(20) or len(held) == 2))
    page.get_by_role("group", name="First").get_by_label("Training").select_option("other <b>")
    for number in (0, 1, 2):  # the sheets: of the third nobody knows when the first two come
        eventually(lambda number=number: bool(page.wait_for_timeout(300) or len(held) > number))
        held[number].continue_()
    page.unroute_all()
    page.locator(".pairs img").nth(5).wait_for()
    page.get_by_role("group", name="First").get_by_label("Training").select_option("done")
    page.get_by_role("img", name=f"done, step 30: {PROMPTS[2]}").wait_for()
    page.get_by_role("img", name=f"other <b>, step 10: {PROMPTS[0]}").wait_for()
    assert page.evaluate("[...document.querySelectorAll('.pairs img')].length") == 6
    picture = page.get_by_role("button", name=f"done, step 30: {PROMPTS[1]}")
    picture.click()
    compare = page.get_by_role("dialog", name="compare two pictures")
    assert "step-00000030/01.png" in compare.locator("img.a").get_attribute("src")
    assert "step-00000010/01.png" in compare.locator("img.b").get_attribute("src")
    assert compare.locator(".prompt").inner_text() == PROMPTS[1]
    page.keyboard.press("ArrowRight")
    assert compare.get_by_role("slider").input_value() == "51"
    page.keyboard.press("Escape")
    compare.wait_for(state="hidden")
    assert picture.evaluate("button => button === document.activeElement")
    # Of runs without a common step neither shows the base, which would be the same picture twice.
    fake_run(place.runs / "odd", steps=21, sample_px=16).write()
    place.server.open(page, "/compare?a=done&b=odd", ".pairs img")
    assert page.locator(".pairs img[alt*='base:']").count() == 0
    assert page.locator(".pairs img[alt*='odd, step 21']").count() == 3
    place.server.open(page, "/run?run=done")
    page.get_by_role("link", name="Train again with changes").click()
    page.locator(".plan-line", has_text="Fits:").wait_for()
    assert page.get_by_label("Trigger word").input_value() == "zorble thing"
    page.get_by_role("button", name="Back to the images").click()
    # Folded, as the images are there.
    assert page.get_by_label("Folder with your images").input_value().endswith("/example")
    page.wait_for_function("() => new URL(location.href).searchParams.get('draft')")
    assert "again=" not in page.url, "else each reload makes another draft"


def test_what_is_deleted_comes_back_until_the_trash_is_emptied(
    place: Place, page: Any, run: Path, expected: list[str]
) -> None:
    expected.append("/media/run/done/")  # Home may still ask for a picture of what is deleted
    place.delete(page, "/library?file=done/zorble.safetensors", "zorble")
    page.wait_for_url("**/library")
    assert not (run / "zorble.safetensors").exists()
    with page.expect_navigation():  # the page is loaded again once the file is back
        page.get_by_role("button", name="Undo").click()
    page.locator(".lora a[href*='file=done%2Fzorble.safetensors']").first.wait_for()
    assert (run / "zorble.safetensors").is_file()
    place.delete(page, "/", "done")
    assert not run.exists()
    page.get_by_role("link", name="Trash", exact=True).click()
    page.get_by_role("button", name="Put back done").click()
    page.get_by_text("The trash is empty").wait_for()
    assert (run / "run.json").is_file()
    place.delete(page, "/", "done")
    page.route(
        "**/ui/trash/script.js",
        lambda route: page.wait_for_timeout(500) or route.continue_(),
        times=1,  # the last page may close while it loads the script again
    )
    page.get_by_role("link", name="Trash", exact=True).click()  # no button before its script
    page.get_by_role("button", name="Empty the trash").dblclick()
    page.get_by_role("button", name="Really delete all of it for good?").click()
    page.get_by_text("The trash is empty").wait_for()
    assert not run.exists()


# ---- a LoRA


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name="Try").wait_for()
    page.get_by_role("tab", name=name).click()


def test_a_lora_is_found_tried_described_exported_and_converted(page: Any, place: Place) -> None:
    file = place.toy.run / "toy.safetensors"
    before = {name: value.tobytes() for name, value in load_file(file).items()}
    place.server.open(page, "/library")
    page.locator(".lora").nth(2).wait_for()
    assert page.locator(".lora").get_by_text(HOSTILE).first.is_visible(), (
        "a hostile title is shown as text"
    )
    page.get_by_label("Search").fill("toy")
    page.get_by_text(re.compile("^1 of ")).wait_for()
    page.get_by_role("link", name="toy", exact=True).click()
    page.locator(".lora-head").wait_for()
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "toy"
    page.get_by_label("Prompts").fill(f"a toy\n{HOSTILE}")
    page.get_by_role("button", name="Remove 0.4").focus()
    for key in (
        "Enter",
        "Enter",
        "Enter",
        "Tab",
        "Enter",
    ):  # whichever goes, the next one has the keyboard
        page.keyboard.press(key)
    page.keyboard.type("0")
    page.keyboard.press("Enter")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("4 images, seed 1234").wait_for()
    images = page.locator(".try-grid img")
    assert images.count() == 4
    page.wait_for_function(
        "() => [...document.querySelectorAll('.try-grid img')]"
        ".every(image => image.complete && image.naturalWidth)"
    )
    best = page.locator("[data-mark]").nth(1)
    best.click()
    page.locator(".lora-head").get_by_text("a toy at strength 1").wait_for()
    assert best.get_attribute("aria-pressed") == "true"
    assert (place.toy.run / "toy.best.png").is_file()
    page.reload()
    page.get_by_text("4 images, seed 1234").wait_for()
    page.locator("[data-mark][aria-pressed=true]").wait_for()
    page.get_by_label("Strengths").fill("much")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("'much' are not strengths").wait_for()
    tab(page, "Describe")
    page.get_by_label("Title").fill(HOSTILE)
    page.get_by_role("button", name="Save into the file").click()
    page.get_by_text("Saved: title.").wait_for()
    page.locator(".lora-head").get_by_text(HOSTILE).wait_for()
    with safe_open(file, framework="np") as opened_file:
        assert opened_file.metadata()["modelspec.title"] == HOSTILE
    assert {name: value.tobytes() for name, value in load_file(file).items()} == before
    page.locator(".choices button").first.click()
    page.get_by_text("The preview is now toy.preview.png").wait_for()
    assert (place.toy.run / "toy.preview.png").is_file()
    tab(page, "Export")
    page.get_by_role("button", name="Check and export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="toy.safetensors").click()
    exported = place.toy.run / "export"
    content = Path(download.value.path()).read_bytes()
    assert content == (exported / "toy.safetensors").read_bytes()
    assert json.loads((exported / "toy.json").read_bytes())["activation text"] == "toy"
    tab(page, "Tools")
    page.get_by_text("Make it smaller").click()
    page.get_by_role("button", name="Make smaller").click()
    page.get_by_text("nothing says how far to cut").wait_for()
    page.get_by_label("diffusers, InvokeAI").click()
    page.get_by_role("button", name="Convert", exact=True).click()
    page.get_by_role("link", name="toy-diffusers.safetensors").click()
    page.get_by_role("heading", name="toy-diffusers").wait_for()
    assert (place.toy.run / "toy-diffusers.safetensors").is_file()
    page.get_by_role("link", name="All LoRAs").click()
    page.locator(".lora").nth(2).wait_for()


def test_it_gets_a_name_and_a_note_by_which_it_is_found(page: Any, place: Place) -> None:
    query = urlencode({"file": "evil/zorble.safetensors"})
    place.server.open(page, f"/library?{query}", ".lora-head")
    tab(page, "Describe")
    held: list[Any] = []
    page.route("**/library/note", lambda route: held.append(route), times=1)
    for text in ("an older note", HOSTILE):  # the first is answered once the second is typed
        page.get_by_role("textbox", name="Notes").fill(text)
        page.get_by_label("Title").focus()
        eventually(lambda: bool(page.wait_for_timeout(20) or held))
    held[0].continue_()
    page.locator(".lora-head .note").get_by_text(HOSTILE).wait_for()
    page.get_by_label("Name of the file").fill("blue one")
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("heading", name="blue one").wait_for()
    page.get_by_role("link", name="All LoRAs").click()
    page.get_by_label("Search").fill("alert(3)}} blue")
    page.locator(".lora").get_by_role("link", name="blue one", exact=True).wait_for()

"""Trainings in a real browser: three clicks, keys alone, stop and resume, a killed interface, a queue.

The trainer is the real one, on the embedded base; only the number of steps is set beforehand, in the
draft that the page keeps.
"""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace
from PIL import ExifTags, Image

from lora_trainer.dataset.slider_file import read_sliders
from lora_trainer.families.files.locate import EMBEDDED_FOLDER
from lora_trainer.queue import commands, rules
from lora_trainer.reporting.status import read_status
from tests.fakes.captioners import tiny_captioner
from tests.fakes.gui_server import ROOT, GuiServer
from tests.fakes.hub_server import TOKEN, HubServer, hub_server
from tests.fakes.live_runs import write_status
from tests.fakes.queues import until
from tests.fakes.runs import write_dataset
from tests.gui.conftest import NO_SERVER, WITHIN_MS, NewPage, StartGui, page_script, tree

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(420)]

DRAFTS = tomllib.loads(Path(__file__).with_name("drafts.toml").read_text(encoding="utf-8"))
SHORT, LONG = DRAFTS["short"], DRAFTS["long"]
SMALL_CAPTIONER = "florence-community/Florence-2-base"
SD15 = "stable-diffusion-v1-5/stable-diffusion-v1-5"
TABS_AT_MOST = 80


THERE = "Images that are already on the computer that trains"
ON = re.compile("Looks good|Continue anyway")
STARTS = re.compile("^(Train a try-out|Add try-out to queue)$")


@dataclass(frozen=True)
class Place:
    """A home with nothing in it, images elsewhere, the server and the Hub that it asks."""

    runs: Path
    images: Path
    hub: HubServer
    env: dict[str, str]
    server: GuiServer


@pytest.fixture(scope="module")
def place(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    folder = tmp_path_factory.mktemp("training")
    runs, images = folder / "runs", folder / "my <b> images"
    shutil.copytree(ROOT / "datasets" / "example", images)
    with hub_server() as hub:
        env = {"HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0", "HF_TOKEN": ""}
        env["HF_HOME"] = str(folder / "hub")
        yield Place(runs=runs, images=images, hub=hub, env=env, server=gui_server(runs, env=env))
    end_trainings(runs)


def end_trainings(runs: Path) -> None:
    """Kill what still trains: a test that failed half-way leaves a training of hours, which outlives the pages."""
    for folder in runs.iterdir() if runs.is_dir() else ():
        status = read_status(folder)
        if status.state == "running" and status.pid not in (None, os.getpid()):
            with suppress(psutil.NoSuchProcess):
                psutil.Process(status.pid).kill()


def fill(page: Any, place: Place, *, name: str, settings: dict[str, Any]) -> None:
    """Go through the first two steps: images, check."""
    place.server.open(page, "/train?draft=new")
    # The draft has its id in the address once the page is filled from it.
    page.wait_for_function("() => /draft=[0-9a-f]{12}/.test(location.search)")
    page.get_by_text(THERE).click()
    page.get_by_label("Folder with your images").fill(str(place.images))
    page.get_by_role("button", name="Look at the images").click()
    page.get_by_role("button", name=ON).click()
    page.locator(".plan-line", has_text="Fits:").wait_for()
    page.get_by_label("Name (optional)").fill(name)
    page.get_by_label("Name (optional)").blur()
    newest = max((place.runs / ".gui" / "drafts").glob("*.json"))
    until(lambda: json.loads(newest.read_text())["name"] == name, what="the name is kept")
    set_in_draft(place, settings)


def set_in_draft(place: Place, settings: dict[str, Any]) -> None:
    newest = max((place.runs / ".gui" / "drafts").glob("*.json"))
    change_draft(place.runs, newest.stem, lambda before: settings)


def change_draft(
    runs: Path, draft_id: str, change: Callable[[Mapping[str, Any]], Mapping[str, Any]]
) -> None:
    """Change the settings of a draft while no page writes it."""
    work = Workplace(runs=runs)
    with drafts.changing(work):
        draft = drafts.read(work, draft_id)
        drafts.save(work, replace(draft, settings=change(draft.settings)))


def test_a_new_home_trains_its_example_by_keys_alone_and_dropped_images_as_typed(
    page: Any, place: Place
) -> None:
    page.goto(place.server.link)
    page.get_by_role("link", name="Try it with 16 example images").wait_for()
    press(page, "A", "Try it with 16 example images")
    page.locator(".plan-line", has_text="Fits:").wait_for()
    set_in_draft(place, SHORT | {"output.measure": True})  # as it is by itself
    press(page, "BUTTON", "Train a try-out")
    page.wait_for_url("**/run?run=*")
    page.get_by_text("Finished after 4 steps").first.wait_for()
    page.get_by_role("link", name="Download step 4").first.wait_for()
    with page.expect_download() as download:
        press(page, "A", "Download step 4")
    (lora,) = place.runs.glob(f"*/{download.value.suggested_filename}")
    assert Path(download.value.path()).read_bytes() == lora.read_bytes()
    uploads = place.runs / ".gui" / "uploads"
    known = set(uploads.iterdir())
    write_status(
        lora.parent
    )  # the queue waits for what trains outside of it: nothing more is trained
    images = sorted((ROOT / "datasets" / "example").glob("zibbo_0*"))
    page.goto(place.server.url("/train?draft=new"))
    page.get_by_text("Drop your images here").wait_for()
    page.locator("input[name=files]").set_input_files(images)  # 1: the files of "Choose images"
    page.get_by_role("button", name=ON).click()  # 2
    page.locator(".plan-line", has_text="Fits:").wait_for()
    type_length_and_samples(page)
    page.get_by_role("button", name="Add try-out to queue").click()  # 3
    page.get_by_text("Starting: ").wait_for()
    (folder,) = set(uploads.iterdir()) - known
    assert len(list(folder.iterdir())) == len(images)
    (queued,) = [item for item in commands.items(place.runs) if item.state == "waiting"]
    assert queued.argv[0] == str(folder)
    assert {
        '--set=train.concept="style"',
        "--set=adapter.rank=4",
        '--set=sampling.prompts=["zibbo, on a <b> moon"]',
        "--set=train.steps=5",
    } <= set(queued.argv)
    for item in commands.items(place.runs):
        commands.remove(place.runs, item.id)
    write_status(lora.parent, state="finished", step=4, steps=4, exit_code=0)


def type_length_and_samples(page: Any) -> None:
    """Look at the proposed steps and prompts, go back to them, and type others."""
    steps, prompts = page.get_by_label("Steps", exact=True), page.get_by_label("What the samples")
    steps.wait_for()  # it is filled in after the plan is shown
    proposed = steps.input_value()
    assert int(proposed) > 4
    assert len(prompts.input_value().splitlines()) == 4
    page.get_by_role("radio", name="A style").focus()
    page.keyboard.press("Space")
    chosen = '[name="train.concept"]:checked'
    page.wait_for_function(f"() => document.querySelector('{chosen}').value === 'style'")
    steps.fill("4")
    page.get_by_text("4 steps of ").wait_for()
    page.keyboard.press("Tab")
    page.locator(".beside-train").get_by_text(", 4 steps").wait_for()
    page.get_by_role("button", name="Choose for me").first.click()
    page.locator(".beside-train").get_by_text(f", {int(proposed):,} steps").wait_for()
    until(lambda: steps.input_value() == proposed)
    page.get_by_label("Rank: how much it can learn", exact=True).fill("4")
    prompts.fill("zibbo, on a <b> moon")
    steps.fill("5")  # and the button takes it along, without a wait for the plan


def press(page: Any, tag: str, name: str) -> None:
    """Walk to a link (A) or a button by the Tab key and press Enter; it is seen where the keyboard is."""
    page.locator("main:not([inert])").wait_for()  # a page takes no keys before its script is there
    passed = []
    for _ in range(TABS_AT_MOST):
        page.keyboard.press("Tab")
        focused = page.evaluate(page_script("focused"))
        if (focused["tag"], focused["name"]) == (tag, name):
            assert focused["seen"], f"nothing shows that {name} has the keyboard"
            page.keyboard.press("Enter")
            return
        passed.append(focused["name"])
    raise AssertionError(f"the Tab key does not lead to {name}, only to {passed}")


def test_a_slider_is_trained_from_words_alone(page: Any, place: Place) -> None:
    place.server.open(page, "/train?draft=new&kind=slider")
    page.wait_for_function("() => /draft=[0-9a-f]{12}/.test(location.search)")
    assert page.get_by_role("radio", name="A slider, from words").is_checked()
    assert not page.get_by_text("Drop your images here").is_visible()
    for label, text in (("What it acts on", "a house"), ("More of", "a red house")):
        page.get_by_label(label).fill(text)
    page.get_by_label("Less of").fill("a blue house")
    # Pressed from the last field, which is left by it, as a hand does: without a look whether the button is enabled.
    place_of_next = page.get_by_role("button", name="Next step").bounding_box()
    page.mouse.click(place_of_next["x"] + 20, place_of_next["y"] + 10, delay=80)
    page.locator(".plan-line", has_text="Fits:").wait_for()
    assert not page.get_by_text("What do your images show?").is_visible()
    small = {"train.steps": 1, "slider.denoising_steps": 1, "sampling.every_steps": 0}
    set_in_draft(place, small | {"sampling.steps": 1, "hardware.threads": 1})
    page.locator("#train:enabled").click()
    page.wait_for_url("**/run?run=*")
    page.get_by_role("heading", name="a red house").wait_for()
    (item,) = [each for each in commands.items(place.runs) if not each.has_ended]
    assert read_sliders(Path(item.argv[0])).directions[0].less == "a blue house"
    # What it comes to is not asked here, and it is half a minute of drawing.
    end_trainings(place.runs)
    until(lambda: all(each.has_ended for each in commands.items(place.runs)), what="its end")
    commands.remove(place.runs, item.id)


def test_two_ranks_in_one_press_are_a_series_that_waits_on_its_page(
    page: Any, place: Place
) -> None:
    rules.pause(place.runs, stop=False)  # what the trainings come to is not asked here
    try:
        place.server.open(page, "/train?draft=new&example=1")
        page.locator(".plan-line", has_text="Fits:").wait_for()
        # What was refused is forgotten with the earlier value, which is not sent again.
        rank = page.locator("[data-field='adapter.rank']")
        refused = page.locator("[data-refused='adapter.rank']")
        before = rank.input_value()
        rank.fill("0")
        rank.blur()
        refused.get_by_text("0 is not possible, only a whole number from 1 to 1,024").wait_for()
        rank.fill(before)
        rank.blur()
        refused.wait_for(state="hidden")
        also = page.locator("[data-field='also:adapter.rank']")
        also.fill("4")
        also.blur()
        page.get_by_role("button", name="Queue 2 trainings").click()
        page.wait_for_url("**/series?id=*")
        page.get_by_text("they start as soon as the queue goes on").wait_for()
        cards = page.locator(".trainings li").all_inner_texts()
        assert len(cards) == 2 and "Rank 4" in cards[0] and "number 1 in the queue" in cards[0]
        page.get_by_role("link", name="All series").click()
        page.locator(".series-rows li", has_text="Rank 4 16").wait_for()
    finally:
        for item in commands.items(place.runs):
            if not item.has_ended:
                commands.remove(place.runs, item.id)
        rules.go_on(place.runs)


# Whether this browser has kept the instruction of the pairs.
KEPT = """() => new Promise((resolve) => {
  const asked = indexedDB.open("lora-train-pairs", 1);
  asked.onsuccess = () => {
    const all = asked.result.transaction("heaps").objectStore("heaps").getAll();
    all.onsuccess = () => { asked.result.close(); resolve(all.result.some((each) => each.instruction)); };
  };
})"""


def test_two_heaps_of_images_become_pairs(page: Any, place: Place, tmp_path: Path) -> None:
    for name in ("in1", "in10", "in2", "out1", "out2", "out10"):
        Image.new("RGB", (64, 64), (int(name.strip("inout")) * 20, 0, 0)).save(
            tmp_path / f"{name}.png"
        )
    place.server.open(page, "/train?draft=new&kind=pairs")
    page.wait_for_function("() => /draft=[0-9a-f]{12}/.test(location.search)")
    for heap, names in (("before", "in*.png"), ("after", "out*.png")):
        page.locator(f"[data-heap={heap}] input").set_input_files(sorted(tmp_path.glob(names)))

    def wait_for_pairs(*names: str) -> None:
        page.wait_for_function(
            "(names) => [...document.querySelectorAll('.matched img')].map(({ alt }) => alt).join() === names",
            arg=",".join(f"{name}.png" for name in names),
        )

    wait_for_pairs("in1", "out1", "in2", "out2", "in10", "out10")
    pictures = page.locator(".matched img")
    pictures.nth(0).drag_to(pictures.nth(2))
    wait_for_pairs("in2", "out1", "in1", "out2", "in10", "out10")
    page.get_by_label("What changes from before to after?").fill("make it red")
    page.get_by_label("What changes from before to after?").blur()
    page.wait_for_function(KEPT)
    page.reload()  # loses none of it
    wait_for_pairs("in2", "out1", "in1", "out2", "in10", "out10")
    # The bar that stays in sight leads on, and to nothing else.
    assert page.locator(".go-on:visible button:visible").all_inner_texts() == ["Take these 3 pairs"]
    assert (
        not page.locator("#lacks").is_visible() and not page.locator(".pairs-example").is_visible()
    )
    page.get_by_role("button", name="Take these 3 pairs").click()
    page.locator(".ds-card .ds-before img").nth(2).wait_for()
    assert page.locator(".ds-card textarea").first.input_value() == "make it red"
    (folder,) = (place.runs / ".gui" / "uploads").glob("*/references")
    assert (folder / "out1.png").read_bytes() == (tmp_path / "in2.png").read_bytes()
    page.get_by_role("button", name=ON).click()
    assert page.get_by_label("Edits images").is_checked()
    page.locator(".base-card", has_text="Qwen-Image-Edit-2511").wait_for()
    assert not page.locator(".base-card", has_text="Stable Diffusion XL base").is_visible()


def test_a_caption_that_is_typed_is_counted_and_a_start_without_any_offers_a_trigger_word(
    page: Any, place: Place, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "set", images=3)
    for caption in (tmp_path / "set").glob("*.txt"):
        caption.unlink()
    place.server.open(page, f"/train?draft=new&folder={tmp_path / 'set'}")
    page.get_by_text("3 images have no caption").wait_for()
    caption = page.locator(".ds-card textarea").first
    for text, count in (("a dog", 2), ("", 3)):
        caption.fill(text)
        caption.blur()
        page.get_by_text(f"{count} images have no caption").wait_for()
    page.get_by_role("button", name=ON).click()
    bar = page.locator(".go-on:visible")
    bar.get_by_text("None of the 3 images has a caption").wait_for()
    bar.get_by_role("button", name=re.compile("Set the trigger word")).click()
    bar.get_by_text("None of the").wait_for(state="detached")
    assert page.get_by_label("Trigger word (optional)").input_value()


@pytest.mark.parametrize("is_online", [True, False], ids=["online", "offline"])
def test_twenty_photos_of_a_phone_train_with_captions_after_four_clicks(
    new_page: NewPage,
    place: Place,
    gui_server: StartGui,
    tmp_path_factory: pytest.TempPathFactory,
    is_online: bool,
    request: pytest.FixtureRequest,
) -> None:
    """Online a model comes from the Hub and writes the captions, offline they are what the photographs say."""
    runs, server = place.runs, place.server
    captioner = tiny_captioner("florence2", tmp_path_factory.mktemp("captioner"), is_brief=True)
    place.hub.folders[SMALL_CAPTIONER] = captioner
    if not is_online:
        runs = tmp_path_factory.mktemp("offline") / "runs"
        request.addfinalizer(lambda: end_trainings(runs))
        env = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(runs.with_name("hub"))}
        server = gui_server(runs, env=env)
    page = new_page()
    page.add_init_script(page_script("count_clicks"))
    server.open(page, "/", "main:not([inert])")
    page.evaluate(page_script("dropped_files"), photographs(tmp_path_factory.mktemp("photos")))
    page.get_by_role("button", name="Write captions", exact=True).click()
    if is_online:
        page.get_by_text(re.compile("^20 captions written")).wait_for(timeout=2 * WITHIN_MS)
    else:
        page.get_by_text("10 captions were taken from the images' own descriptions").wait_for()
    captions = page.locator(".ds-card textarea")
    captions.last.wait_for()
    # The sentence comes before the cards, which the page asks for then.
    page.wait_for_function(
        "count => [...document.querySelectorAll('.ds-card textarea')].filter((box) => box.value).length === count",
        arg=20 if is_online else 10,
    )
    written = [caption.input_value() for caption in captions.all()]
    assert len(written) == 20
    page.get_by_role("button", name=ON).click()
    # Far down among the images as it was pressed: the next step begins at its top all the same.
    page.wait_for_function("() => scrollY === 0 && document.activeElement.localName === 'h1'")
    page.locator(".plan-line", has_text="Fits:").wait_for()
    page.get_by_label("Trigger word").click()
    page.keyboard.type("zwx")
    page.keyboard.press("Tab")
    # An older draft that nobody started may be the one that the page has taken.
    (draft_id,) = re.findall(r"draft=([0-9a-f]+)", page.url)
    work = Workplace(runs=runs)
    until(
        lambda: "data.trigger" in drafts.read(work, draft_id).settings, what="the trigger is kept"
    )
    change_draft(runs, draft_id, lambda before: {**before, **SHORT})
    page.get_by_role("button", name="Train a try-out").click()
    page.wait_for_url("**/run?run=*")
    assert page.evaluate("Number(sessionStorage.clicks)") <= 4
    if is_online:
        page.get_by_text("Finished after 4 steps").first.wait_for()
    else:  # what it comes to does not depend on the Hub: the base is here
        end_trainings(runs)
    until(lambda: commands.items(runs)[0].has_ended, what="the queue sees the end")
    item = commands.items(runs)[0]  # what ended last stands first
    assert not is_online or item.state == "finished"
    assert '--set=data.trigger="zwx"' in item.argv
    assert len([*Path(item.argv[0]).glob("*.txt")]) == len(list(filter(None, written)))


def photographs(folder: Path) -> list[tuple[str, str]]:
    """Return 20 files of a phone, each as its name and its bytes in base64: half HEIC, half described in its data."""
    heif = pytest.importorskip("pillow_heif", reason="pillow-heif is not installed (extra `phone`)")
    files = []
    for number in range(20):
        noise = np.random.default_rng(number).integers(0, 256, (12, 16, 3), dtype=np.uint8)
        image = Image.fromarray(noise).resize((320, 240))
        path = folder / f"IMG_{1000 + number}.{'HEIC' if number % 2 else 'JPG'}"
        exif = Image.Exif()
        if number % 4 in (0, 1):
            exif[ExifTags.Base.ImageDescription] = f"a dog at the lake, {number}"
        save = heif.from_pillow(image).save if number % 2 else image.save
        save(path, exif=exif.tobytes())
        files.append((path.name, base64.b64encode(path.read_bytes()).decode()))
    return files


def no_card_is_of_the_steps_before(page: Any) -> None:
    """Change the steps: no card keeps its time, and none is estimated before the server has what was typed."""
    others = page.locator(".base-card:not([data-source=auto])")
    others.locator(":is(.verdict.good, .verdict.slow, .verdict.bad)").first.wait_for()
    awaited = page.locator(".base-card .verdict.awaited")
    awaited.first.wait_for(state="detached")
    steps = page.locator("[data-field='train.steps']")
    fits, looks, order = list[Any](), list[Any](), list[str]()

    def is_typed(asked: Any) -> bool:
        return asked.url.endswith("/train/look") and '"31"' in (asked.post_data or "")

    def look(route: Any) -> None:
        looks.append(route) if is_typed(route.request) else route.continue_()

    page.route("**/train/fits", lambda route: fits.append(route))
    page.route("**/train/look", look)
    with page.expect_request("**/train/fits"):
        steps.fill("30")
        steps.blur()
    assert awaited.first.inner_text() == "Estimating \u2026"
    assert others.locator("strong:visible", has_text=re.compile("about")).count() == 0
    with page.expect_request(is_typed):
        steps.fill("31")
        steps.blur()
    page.on("request", lambda asked: order.append(asked.url.rpartition("/")[2]))
    page.on("response", lambda answer: order.append("typed") if is_typed(answer.request) else None)
    with page.expect_response("**/train/fits"):
        fits.pop().continue_()
    with page.expect_response(lambda answer: is_typed(answer.request)):
        looks.pop().continue_()
    assert "fits" not in order[: order.index("typed")], "it would be of the steps before"
    while fits:
        fits.pop().continue_()
    for address in ("**/train/look", "**/train/fits"):
        page.unroute(address)  # which lets go on what it held
    steps.fill("")
    steps.blur()


def test_bases_lead_to_a_sign_in_back_to_one_that_fits_and_from_a_try_out_to_a_real_one(
    page: Any, place: Place
) -> None:
    with page.expect_response("**/train/bases") as answer:
        place.server.open(page, "/train?draft=new&example=1")
    page.locator(".plan-line", has_text="Fits:").wait_for()
    no_card_is_of_the_steps_before(page)
    cards = page.locator(".bases:not(.found) .base-card")
    shown = cards.evaluate_all("cards => cards.map((card) => card.dataset.source)")
    offered = [row["source"] for row in answer.value.json()["cards"]]
    assert shown == ["auto", *offered, "", "embedded", "embedded-edit"], "a card keeps its place"
    gated = page.locator(".base").filter(has_text="Accept its terms on Hugging Face first")
    page.get_by_role("button", name="Show all base models").click()
    gated.filter(has_text="Does not fit").first.locator(".base-card").click()
    page.get_by_role("button", name="Sign in to Hugging Face").click()
    page.get_by_label("Token").fill("password")
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_text("this is not a token of Hugging Face").wait_for()
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_text("You are signed in as jane.").wait_for()
    page.get_by_role("button", name="Close").click()
    page.get_by_text("You are signed in on this machine.").wait_for()
    assert Path(place.env["HF_HOME"], "token").read_text() == TOKEN
    told = tree(place.runs)
    assert told and not any(TOKEN.encode() in content for content in told.values())
    assert TOKEN not in place.server.said()
    go = page.get_by_role("button", name="Train", exact=True)
    page.get_by_text("Train waits for a plan that works: ").wait_for()
    until(go.is_disabled)
    page.get_by_role("button", name="Choose a base for this machine").click()
    page.locator("button:enabled", has_text="Train a try-out").wait_for()
    page.get_by_text("Train waits for a plan").wait_for(state="detached")
    bar = page.locator(".go-on")
    bar.get_by_text("Only a try-out, in 64 px: its file is not for ComfyUI.").wait_for()
    # No base is done in a night on a usual processor, so none is urged; a person may choose one all the same.
    plan = page.locator("#plan")
    leads_on = plan.get_by_role("button", name=re.compile("^Take "))
    leads_on.or_(plan.get_by_text("For ComfyUI this machine is too slow")).wait_for()
    slow = page.locator(".base-card").filter(has_text=re.compile("slow"))
    (leads_on if leads_on.count() else slow.first).click()
    bar.get_by_text("Only a try-out").wait_for(state="detached")
    # The images are small for it: they are shown where they can be left out, judged for this base.
    plan.get_by_role("button", name="Show them").click()
    page.locator(".images-bar").get_by_text(re.compile(" of 16 shown")).wait_for()


def test_a_base_that_is_not_here_comes_in_bytes_before_the_training(
    page: Any, place: Place
) -> None:
    """The Hub offers the embedded base under the name of a release; half of a file is held back."""
    hub = place.hub
    hub.folders[SD15] = EMBEDDED_FOLDER
    hub.held_from = 100_000
    place.server.open(page, "/train?draft=new&example=1")
    page.locator(".plan-line", has_text="Fits:").wait_for()
    set_in_draft(place, SHORT | {"base.model": SD15})
    page.get_by_role("button", name="Train a try-out").click()
    stage = page.locator(".stages .now")
    stage.get_by_text(f"Download the base model {SD15}").wait_for()
    stage.get_by_text(re.compile(r"^[0-9.]+ ([KM]i)?B of 10\.7 MiB$")).wait_for()
    tab = page.context.new_page()
    tab.goto(place.server.url("/queue"))
    tab.get_by_text(f"downloading the base model {SD15}: ").wait_for()
    tab.get_by_role("button", name="Stop example").click()
    tab.get_by_text("The download ends here; the next training goes on with it.").wait_for()
    tab.get_by_role("button", name="Train again example").wait_for()
    hub.held_from = None
    hub.go_on.set()
    tab.get_by_role("button", name="Train again example").click()
    until(
        lambda: all(item.state == "finished" for item in commands.items(place.runs)),
        what="the training after the download",
    )


def test_a_killed_interface_loses_nothing_tabs_show_the_same_and_a_second_training_waits(
    page: Any, place: Place, gui_server: StartGui, expected: list[str]
) -> None:
    """One training outlives the interface, is stopped from another tab, and goes on."""
    expected.extend(NO_SERVER)
    fill(page, place, name="one", settings=LONG)
    page.reload()
    page.locator(".plan-line", has_text="Fits:").wait_for()
    assert page.get_by_label("Name (optional)").input_value() == "one", "what was filled in is kept"
    page.get_by_role("button", name="Back").click()
    page.get_by_role("button", name="Change, or take other images").click()
    page.get_by_text(THERE).click()
    box = page.get_by_label("Folder with your images")
    box.wait_for()
    assert box.input_value() == str(place.images)
    look = page.get_by_role("button", name="Look at the images")
    box.fill("/no/such/folder")
    look.click()
    report = page.locator("#report")
    report.get_by_text("the folder /no/such/folder does not exist").wait_for()
    assert box.input_value() == "/no/such/folder"
    box.fill(str(place.images))
    look.click()
    page.get_by_role("button", name=ON).click()
    page.locator(".plan-line", has_text="Fits:").wait_for()
    page.get_by_role("button", name=STARTS).click()
    page.wait_for_url("**/run?run=*")
    run = place.runs / "one"
    until(lambda: read_status(run).step > 0, what="the first step")
    pid = read_status(run).pid
    assert pid is not None
    address = page.url
    page.goto("about:blank")  # what it was still loading would fail, as it does for anybody
    place.server.kill()
    at = read_status(run).step
    until(lambda: read_status(run).step > at, what="a step without the interface")
    trainer = psutil.Process(pid)
    trainer.suspend()  # else it takes a core from all tests while these pages are filled in
    gui_server(place.runs, port=place.server.port, env=place.env)  # with the same link
    page.goto(address)
    page.reload()
    page.get_by_role("button", name="Stop", exact=True).wait_for()
    tabs = [page.context.new_page() for _ in range(2)]
    for tab in tabs:
        tab.goto(address)
    page.bring_to_front()
    fill(page, place, name="two", settings=SHORT)
    page.get_by_role("button", name="Add try-out to queue").click()
    page.get_by_text("1 before it").wait_for()
    (second,) = [item for item in commands.items(place.runs) if item.state == "waiting"]
    commands.remove(place.runs, second.id)
    trainer.resume()
    tabs[0].get_by_role("button", name="Stop", exact=True).click()
    until(lambda: read_status(run).state == "stopped", what="stopped")
    for tab in tabs:
        tab.get_by_role("button", name="Resume", exact=True).wait_for()
    until(lambda: not psutil.pid_exists(pid), what="no process is left")
    at = read_status(run).step
    tabs[1].get_by_role("button", name="Resume", exact=True).click()
    until(lambda: read_status(run).step > at, what="a step after the resume")
    tabs[1].get_by_role("button", name="Stop", exact=True).click()
    until(lambda: read_status(run).state == "stopped", what="stopped again")

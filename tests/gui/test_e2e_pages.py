"""Every page but that of a run in a real browser: a cache cleared after a question, folders chosen without typing,
captions saved by themselves and undone, settings found, refused, reset, in two tabs; markup shows as text (SEC-03);
the pages in German.

Beside scripts markup is the templates of gradio's own HTML widget, which fills `${...}` and `{{...}}`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace
from PIL import Image

from lora_trainer.common.files import CappedFolder
from lora_trainer.config.config import all_settings
from tests.fakes.gui_server import GuiServer
from tests.fakes.live_runs import until as cut_at
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run, lora
from tests.fakes.queues import until
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import ROOT, write_dataset
from tests.gui.conftest import (
    COMMANDS,
    MARKER,
    MARKUP,
    NO_SERVER,
    NewPage,
    StartGui,
    as_names,
    page_script,
)

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]

ODD = "q'\"<b>x<&\U0001f600 ${value}.png"
CHUNK = 60
SCRIPT = "<img src=x onerror=alert(1)> {{value}}"
NAMES = as_names(MARKUP)
OPENED = (26, 31, 35)
"""Of the names: an attribute, and both kinds of templates."""
HOSTILE_SET = MARKUP[1].replace("/", "")
TYPED = "Stop"
"""The name of a run and of a LoRA, and the caption of an image: a word of a button too."""
CHECKED = (
    "nav a, h1, h2, h3, legend, dt, [role=tab], summary, .drop .what, button:not(.base-card, .cell)"
)
"""The elements of which no text may stay English."""
SAID_IN_BOTH = {"Export", "LoRAs", "Loss", "Rank", "Samples"}


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
    root = tmp_path_factory.mktemp("pages").resolve()
    for name in [*NAMES, *as_names(COMMANDS)]:
        (root / "runs" / name).mkdir(parents=True)
        (root / "runs" / name / "run.json").write_text("{}")
    for index in OPENED:
        hostile_run(root / "runs" / NAMES[index])
    dataset = root / HOSTILE_SET
    dataset.mkdir()
    for number, (name, text) in enumerate(zip(NAMES, MARKUP, strict=False)):
        Image.new("RGB", (64, 64), (number, 0, 0)).save(dataset / f"{name[:100]}.png")
        (dataset / f"{name[:100]}.txt").write_text(text, encoding="utf-8")
    finished_run(root / "runs" / TYPED)
    write_status(cut_at(fake_run(root / "runs" / "live", steps=30), 12))
    return root


@pytest.fixture(scope="module")
def server(place: Path, gui_server: StartGui) -> GuiServer:
    return gui_server(place / "runs", env={"XDG_CACHE_HOME": str(place / "cache")})


def assert_untouched(page: Any) -> None:
    """No text has done what it would as markup; alerts and foreign requests fail by themselves."""
    page.evaluate(page_script("image_failed"))
    assert page.evaluate("window.__xss") is None
    assert page.locator("iframe, object, embed, base[href*=evil], form[action*=evil]").count() == 0
    assert page.locator("img[src='x']").count() == 0


def shown_text(page: Any) -> str:
    """Return the text of a page and of all its tabs."""
    for tab in page.get_by_role("tab").all():
        tab.click()
    return " ".join(page.locator("body").inner_text().split())


def visible(text: str) -> str:
    """Return a text as the pages show it: what turns the direction of others is replaced."""
    return " ".join(text.replace("\u202e", "\ufffd").split())


def test_names_and_texts_of_runs_datasets_and_loras_are_shown_as_text(
    page: Any, server: GuiServer, place: Path
) -> None:
    assert len(NAMES) >= 40
    shown = shown_text(server.open(page, "/", "text=window.__xss"))
    assert [name for name in NAMES if visible(name) not in shown] == []
    assert_untouched(page)
    for name in (NAMES[index] for index in OPENED):
        server.open(page, f"/run?run={quote(name, safe='')}")
        page.locator(".run-samples").get_by_text(MARKUP[1]).first.wait_for()
        assert visible(name) in shown_text(page)
        assert_untouched(page)
    dataset = quote(str(place / HOSTILE_SET), safe="")
    for path in (f"/datasets?folder={dataset}", f"/train?folder={dataset}"):
        assert_untouched(server.open(page, path, "img[src*='/media/thumb']"))
    for query in ("", f"?file={quote(NAMES[OPENED[0]], safe='')}/zorble.safetensors"):
        shown = server.open(page, f"/library{query}").locator(".lora, .lora-head")
        shown.get_by_text(MARKUP[1]).first.wait_for()
        shown_text(page)
        assert_untouched(page)
    assert not list(place.rglob(MARKER)), "no text was run as a command"


# ---- in German


@pytest.fixture(scope="module")
def german_profile(open_profile: NewPage) -> Any:
    return open_profile(locale="de-DE")


@pytest.fixture
def german(german_profile: Any, new_page: NewPage) -> Any:
    return new_page(german_profile)


LINES = """elements => elements.map((element) => {
    const text = document.createRange();
    text.selectNodeContents(element);
    return text.getClientRects().length;
})"""


def test_no_text_of_home_train_a_run_and_a_lora_stays_english(
    german: Any, page: Any, server: GuiServer
) -> None:
    for path, *ready in (
        ("/", ".home img", ".home img"),
        ("/train?draft=new&example=1", ".plan-line", ".plan-line"),
        ("/library", ".lora", ".lora"),
        (f"/library?file={TYPED}/zorble.safetensors", ".lora-head", ".lora-head"),
        ("/run?run=live", "table.sheet img", "table.sheet img"),
    ):
        texts, as_written = (
            set(server.open(tab, path, mark).evaluate(page_script("texts"), CHECKED))
            for tab, mark in zip((german, page), ready, strict=True)
        )
        assert texts & as_written - SAID_IN_BOTH == set(), path
    german.get_by_role("button", name="Anhalten", exact=True).wait_for()
    server.open(german, "/train?draft=new&example=1")
    german.wait_for_function("() => document.title === '40 % · live – lora-train'")
    german.get_by_role("button", name="Probelauf einreihen", exact=True).wait_for()
    assert german.locator("html").get_attribute("lang") == "de"


def test_what_somebody_typed_stays_and_the_choice_leads_to_english_and_back(
    german: Any, server: GuiServer, tmp_path: Path
) -> None:
    folder = tmp_path / TYPED
    folder.mkdir()
    for image in ("zibbo_01.png", "zibbo_14.png"):
        (folder / image).write_bytes((ROOT / "datasets" / "example" / image).read_bytes())
        (folder / image).with_suffix(".txt").write_text(TYPED)
    server.open(german, f"/datasets?folder={folder}", ".ds-card textarea")
    assert german.locator(".ds-card textarea").first.input_value() == TYPED
    german.get_by_role("button", name=re.compile("Tags \u2026$")).click()
    german.locator(".ds-tags button").first.wait_for()
    assert german.locator(".ds-tags button").all_inner_texts() == [f"{TYPED} 2"]
    server.open(german, "/library")
    german.locator(".lora .menu a", has_text=f"Training {TYPED}").first.wait_for(state="attached")
    server.open(german, f"/compare?a={TYPED}", ".pairs img")
    assert (
        TYPED
        in german.get_by_role("combobox", name="Training").first.locator("option").all_inner_texts()
    )
    server.open(german, f"/run?run={TYPED}", "table.sheet img")
    assert german.get_by_role("heading", level=1).inner_text() == TYPED
    server.open(german, "/").get_by_label("Sprache").select_option("English")
    german.get_by_role("heading", name="Your trainings").wait_for()
    german.wait_for_function("() => document.documentElement.lang === 'en'")
    assert german.locator("script[src*=language]").count() == 0
    server.open(german, "/queue").get_by_label("Language").select_option("Deutsch")
    german.get_by_role("link", name="Warteschlange").wait_for()
    sections = server.open(german, "/settings", ".jumps a").locator(".jumps a > span")
    assert set(sections.evaluate_all(LINES)) == {1}, "no word is broken inside"


# ---- doctor, train


def test_the_cache_is_cleared_after_a_question(page: Any, server: GuiServer, place: Path) -> None:
    folder = CappedFolder(root=place / "cache" / "lora-train", limit_bytes=1)
    folder.create()
    entry = folder.root / "text" / "aa" / f"{'a' * 64}.safetensors"
    entry.parent.mkdir(parents=True)
    entry.write_bytes(b"x" * 2048)
    live = place / "runs" / "live"
    write_status(live, state="stopped", exit_code=0)  # else it may be reading from the cache
    server.open(page, "/doctor")
    page.locator("#folders summary", has_text="2.0 KiB in 1 entries").click()
    page.get_by_role("button", name="Clear the cache").click()
    page.get_by_role("button", name="Keep it").click()
    page.get_by_role("button", name="Keep it").wait_for(state="hidden")
    assert entry.exists()
    page.get_by_role("button", name="Clear the cache").click()
    page.get_by_role("button", name="Clear it").click()
    page.get_by_text("Removed 1 entries").wait_for()
    page.get_by_text("0 B in 0 entries").first.wait_for()
    assert not entry.exists()
    write_status(live)


def test_folder_and_model_are_chosen_by_clicks_and_keys(
    page: Any, server: GuiServer, place: Path, tmp_path: Path, expected: list[str]
) -> None:
    from playwright.sync_api import expect  # the tests are skipped where it is not installed

    write_dataset(tmp_path / "data" / "toys", images=3)
    model = tmp_path / "data" / "mine.safetensors"
    model.write_bytes(b"no model")
    server.open(page, "/train?draft=new")
    page.get_by_text("Images that are already").click()
    page.get_by_role("button", name="Browse").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("Folder").fill(str(tmp_path))
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="data", exact=True).press("Enter")
    dialog.get_by_role("button", name="toys", exact=True).click()
    dialog.get_by_text("3 images here").wait_for()
    dialog.get_by_role("button", name="Up").click()
    dialog.get_by_role("button", name="toys", exact=True).click()
    dialog.get_by_text("3 images here").wait_for()
    dialog.get_by_role("button", name="Choose this folder").click()
    images = tmp_path / "data" / "toys"
    # Chromium's own style of a page that is an image; a picture of what is excluded meanwhile.
    expected += ["default-src 'none'", "p2.png&size="]
    with page.context.expect_page() as large:
        page.get_by_role("link", name="Enlarge p1.png").click(modifiers=["Control"])
    large.value.close()
    page.get_by_role("button", name="Exclude p2.png").click()
    page.get_by_role("heading", name="2 images").wait_for()
    assert not (images / "p2.png").exists()
    page.get_by_label("Caption of p1.png", exact=True).fill("a toy on a shelf")
    page.get_by_label("Caption of p0.png", exact=True).click()
    # The card says so for six seconds, or until the check of the images that are left draws the cards anew.
    caption = images / "p1.txt"
    until(lambda: caption.is_file() and caption.read_text() == "a toy on a shelf")
    page.get_by_role("button", name="Undo").click()
    page.get_by_role("heading", name="3 images").wait_for()
    assert (images / "p2.png").is_file()
    assert (images / "p1.txt").read_text() == "a toy on a shelf", "Undo is of the exclusion"
    write_dataset(tmp_path / "other", images=5)
    page.get_by_role("button", name="Change, or take other images").click()
    page.get_by_text("Images that are already").click()
    with late(page, str(tmp_path / "other")) as wait:
        for chosen in (tmp_path / "other", images):
            page.get_by_label("Folder with your images").fill(str(chosen))
            press(page, "Look at the images")
        wait()
    page.get_by_role("heading", name="3 images").wait_for()
    page.get_by_role("button", name=re.compile("Looks good|Continue anyway")).click()
    page.locator(".plan-line").wait_for()
    page.locator(".base-card[data-source=auto]").click()
    page.locator(".base-card[data-source^=stabilityai]:visible").first.click()
    draft = page.evaluate("new URL(location.href).searchParams.get('draft')")
    until(lambda: drafts.read(Workplace(runs=place / "runs"), draft).base.startswith("stab"))
    with late(page, "/browse/look") as wait:
        page.locator(".base-card", has_text="Your own model").click()
        wait()
        dialog.get_by_role("button", name="Choose", exact=True).click()
        dialog.get_by_label("Folder").focus()
    expect(dialog.get_by_label("Folder")).not_to_have_value("")
    dialog.get_by_text("Choose one of the model files").wait_for()
    page.keyboard.insert_text(str(model.parent))
    page.keyboard.press("Enter")
    dialog.get_by_role("button", name="mine.safetensors").click()
    dialog.get_by_role("button", name="Choose", exact=True).click()
    dialog.wait_for(state="detached")
    page.locator(".base-card[aria-pressed=true]", has_text=model.name).wait_for()
    page.get_by_role("button", name="Show all base models").click()
    expect(page.get_by_label("Or another one")).to_have_value(str(model))


# ---- datasets


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "set"
    root.mkdir()
    for index, name in enumerate(("a.png", "b.png", "c.png", ODD)):
        Image.effect_noise((96, 64 + 16 * index), 60).convert("RGB").save(root / name)
    (root / "a.txt").write_text("a cat, big")
    (root / "b.txt").write_text("\u05d7\u05ea\u05d5\u05dc")
    (root / ODD).with_suffix(".txt").write_text(SCRIPT)
    return root


def open_folder(page: Any, server: GuiServer, folder: Path) -> None:
    server.open(page, f"/datasets?folder={quote(str(folder))}")
    caption(page, "a.png").wait_for()


def caption(page: Any, name: str) -> Any:
    return page.get_by_label(f"Caption of {name}", exact=True)


def shows(page: Any, name: str, text: str) -> None:
    """Wait until the caption of a card is that text."""
    page.wait_for_function(
        "([label, text]) => [...document.querySelectorAll('textarea')].some("
        "(area) => area.getAttribute('aria-label') === label && area.value === text)",
        arg=[f"Caption of {name}", text],
    )


def said(page: Any, text: str) -> None:
    page.locator(".ds-message", has_text=text).wait_for()


def press(page: Any, name: str) -> None:
    page.get_by_role("button", name=name, exact=True).click()


def arrived(page: Any, title: str) -> None:
    """Wait for a page in the shell; CSP lets no test wait for an expression."""
    page.locator("#arrived", has_text=f"{title} – lora-train").wait_for(state="attached")
    page.locator("main:not([inert]) h1").wait_for()


def test_pages_come_into_one_shell_and_none_stays_behind(
    page: Any, server: GuiServer, folder: Path, expected: list[str]
) -> None:
    server.open(page, "/queue", "main:not([inert])")
    page.evaluate("window.shell = true")
    bar = page.locator(".bar")
    for name in ("Machine", "LoRAs", "Datasets", "All settings", "Train", "Trash", "Queue"):
        bar.get_by_role("link", name=name, exact=True).click()
        arrived(page, name)
        assert bar.locator("[aria-current]").all_inner_texts() == [name]
        assert page.evaluate("document.activeElement.tagName") == "BODY", "Tab begins on top"
    sheets = page.locator("link[rel=stylesheet]").evaluate_all(
        "links => links.map(link => new URL(link.href).pathname)"
    )
    assert sheets == ["/ui/site.css", "/ui/queue/style.css"], "none of another page is left"
    asked: list[str] = []
    page.on("request", lambda request: asked.append(urlsplit(request.url).path))
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    until(lambda: bool(page.wait_for_timeout(20) or {"/live", "/queue/look"} <= set(asked)))
    assert set(asked) == {"/live", "/queue/look"}, "only the page that is shown looks for news"
    page.go_back()
    arrived(page, "Trash")
    page.go_forward()
    arrived(page, "Queue")
    # What is typed and not saved asks before it is left, as it does before a load.
    bar.get_by_role("link", name="Datasets", exact=True).click()
    arrived(page, "Datasets")
    page.get_by_label("Folder on this machine").fill(str(folder))
    press(page, "Open")
    caption(page, "a.png").fill("kept")
    expected.append("an alert opened: What you typed is not saved yet.")
    with late(page, '"kept"') as held:
        caption(page, "a.png").blur()
        held()
        bar.get_by_role("link", name="Queue", exact=True).click()
        assert urlsplit(page.url).path == "/datasets"
        assert caption(page, "a.png").input_value() == "kept"
    page.locator(".ds-state", has_text="Saved in").first.wait_for()
    # Settings of another trainer are dropped on any page.
    bar.get_by_role("link", name="Trash", exact=True).click()
    arrived(page, "Trash")
    kohya = 'network_module = "networks.lora"\nnetwork_dim = 24'
    for name, text in (("broken.toml", "network_dim ="), ("kohya.toml", kohya)):
        page.evaluate(page_script("dropped"), [name, text])
        if name == "broken.toml":
            page.locator(".toast", has_text="not TOML").get_by_role("button", name="Close").click()
    page.locator(".brought", has_text="Settings of kohya.toml").wait_for()
    page.get_by_text("What comes over").click()
    rank = page.locator(".brought tr", has_text=re.compile("Rank.*adapter.rank.*24.*network_dim"))
    rank.wait_for()
    assert page.evaluate("window.shell"), "no page was loaded"
    # A page that cannot be fetched is loaded.
    expected.extend(NO_SERVER)
    page.route("**/trash", lambda route: route.abort(), times=1)
    bar.get_by_role("link", name="Trash").click()
    page.locator("h1", has_text="Trash").wait_for()
    assert page.evaluate("window.shell") is None
    # So is one whose words are others than those of the shell.
    page.evaluate("window.shell = true")
    page.get_by_label("Language").select_option("de")
    page.locator("h1", has_text="Papierkorb").wait_for()
    assert page.evaluate("window.shell") is None
    page.get_by_label("Sprache").select_option("en")
    page.locator("h1", has_text="Trash").wait_for()
    # Who is signed in gets to the pages by the address of this machine too, which is another site.
    page.goto(server.link)
    # The door that leads there has no bar, and would still be leaving.
    page.locator(".bar").wait_for()
    page.locator("main:not([inert])").wait_for()
    expected.append("the server responded with a status of 403")
    page.goto(f"http://127.0.0.1:{server.port}/trash")
    page.locator("h1", has_text="Trash").wait_for()
    assert urlsplit(page.url)[1:3] == (server.host, "/trash")


def test_edit_undo_reload_bulk_exclude(
    page: Any, server: GuiServer, folder: Path, expected: list[str]
) -> None:
    expected.append("a.png&size=")  # it may be asked for while its image is moved
    open_folder(page, server, folder)
    assert caption(page, ODD).input_value() == SCRIPT
    caption(page, "c.png").focus()
    page.locator(".ds-state", has_text="Saves itself").wait_for()
    # Saved after a pause, without a button and without leaving the field.
    caption(page, "c.png").fill("a bird")
    saved = page.locator(".ds-state", has_text="Saved in")
    saved.wait_for()
    assert saved.bounding_box()["height"] < 40, "a line or two, not a letter a line"
    assert (folder / "c.txt").read_text() == "a bird"
    caption(page, "a.png").fill("a dog, big")
    caption(page, "a.png").press("Tab")  # or at once when the field is left
    page.locator(".ds-card", has_text="a.png").get_by_text("Saved in a.txt").wait_for()
    assert (folder / "a.txt").read_text() == "a dog, big"
    saved.first.wait_for(state="detached")  # it fades, and the card is as high as before
    # The history is that of the folder: a page that is opened again goes on with it.
    open_folder(page, server, folder)
    page.locator("h1").click()
    page.keyboard.press("Control+z")
    shows(page, "a.png", "a cat, big")
    page.keyboard.press("Control+y")
    shows(page, "a.png", "a dog, big")
    page.locator(".ds-size", has_text="→").first.wait_for()
    page.locator(".findings li", has_text="4 images are small").get_by_role("button").click()
    page.get_by_role("button", name="small 4", pressed=True).click()  # shown by it, and all again
    assert page.locator(".ds-frame").first.is_hidden()
    press(page, "Show crop")
    assert page.locator(".ds-frame").first.is_visible()
    # A bulk edit shows what it will do before it does it.
    page.get_by_label("Select a.png", exact=True).check()
    page.get_by_label("Select c.png", exact=True).check()
    page.get_by_text("Change many captions").click()
    page.get_by_label("Words", exact=True).fill("zibbo")
    press(page, "Preview")
    rows = page.locator(".ds-rows tbody tr")
    rows.nth(1).wait_for()
    assert rows.all_inner_texts() == [
        "a.png\tzibbo, a dog, big",
        "c.png\tzibbo, a bird",
    ]
    assert (folder / "a.txt").read_text() == "a dog, big"
    press(page, "Apply to 2 captions")
    shows(page, "c.png", "zibbo, a bird")
    assert (folder / "a.txt").read_text() == "zibbo, a dog, big"
    # Excluding moves; putting back brings the caption along.
    press(page, "Exclude a.png")
    said(page, "exclude a.png")
    assert (folder / "_excluded" / "a.txt").read_text() == "zibbo, a dog, big"
    press(page, "excluded 1")
    press(page, "Put a.png back")
    said(page, "put a.png back")
    assert (folder / "a.txt").read_text() == "zibbo, a dog, big"
    for step in ("put a.png back", "exclude a.png", "put \u201czibbo\u201d in front"):
        press(page, "Undo")
        said(page, f"Undone: {step}")
    shows(page, "c.png", "a bird")
    with late(page, "/datasets/save") as wait:  # the look after Undo may not show theirs
        caption(page, "a.png").fill("mine")
        wait()
        (folder / "a.txt").write_text("theirs")
    page.locator(".ds-state", has_text="Changed on the disk meanwhile").wait_for()
    page.locator("blockquote", has_text="theirs").wait_for()
    assert (folder / "a.txt").read_text() == "theirs"
    assert caption(page, "a.png").input_value() == "mine"
    press(page, "Keep mine")
    page.locator(".ds-state", has_text="Saved in").first.wait_for()
    until(lambda: (folder / "a.txt").read_text() == "mine")
    # One image, large: Enter saves and goes to the next; a tag is added and taken away by a press.
    page.get_by_label("Enlarge a.png").click()
    bench = page.locator(".workbench")
    bench.locator("textarea").press("Control+End")
    page.keyboard.type(", zib")
    page.keyboard.press("Enter")
    bench.locator("h3", has_text="a.png").wait_for(state="detached")
    until(lambda: (folder / "a.txt").read_text() == "mine, zib")
    page.keyboard.press("PageUp")
    bench.get_by_text("Before:").wait_for()
    bench.get_by_label("Take away zib", exact=True).click()
    page.keyboard.press("Escape")
    bench.wait_for(state="detached")
    until(lambda: (folder / "a.txt").read_text() == "mine")


def test_a_file_dropped_before_the_page_takes_any_is_not_opened_in_its_place(
    page: Any, server: GuiServer
) -> None:
    held: list[Any] = []
    server.open(page, "/trash")
    page.route("**/ui/shared/shell.js", lambda route: held.append(route))
    page.goto(server.url("/"), wait_until="commit")  # the script is part of what a load waits for
    page.locator("main[inert] h1").wait_for()
    assert page.evaluate(page_script("dropped_files"), [["a.png", ""]]) == [False, False]
    until(lambda: bool(page.wait_for_timeout(20) or held))
    for route in held:
        route.continue_()
    page.locator("main:not([inert])").wait_for()


def fetched(route: Any) -> Any:
    """Return the answer to a request; unlike browsers, playwright asks a name server for *.localhost."""
    parts = urlsplit(route.request.url)
    address = parts._replace(netloc=f"127.0.0.1:{parts.port}").geturl()
    return route.fetch(url=address, headers={**route.request.all_headers(), "host": parts.netloc})


@contextmanager
def late(page: Any, word: str, count: int = 1, *, answers: bool = False) -> Iterator[Any]:
    """Hold the next requests with a word in them, or their answers, to the end; yield what waits for them."""
    held: list[tuple[Any, Any]] = []

    def hold(route: Any) -> None:
        if len(held) < count and word in f"{route.request.url} {route.request.post_data}":
            held.append((route, fetched(route) if answers else None))
        else:
            route.fallback()

    asked = re.compile("/datasets/|/browse/|/settings/|/train/")
    page.route(asked, hold)
    yield lambda: until(lambda: bool(page.wait_for_timeout(20) or len(held) == count))
    for route, answer in held:
        route.fulfill(response=answer) if answer else route.continue_()
    page.unroute(asked, hold)


def test_an_answer_that_comes_late_changes_no_caption_folder_or_trigger(
    page: Any, server: GuiServer, folder: Path, tmp_path: Path
) -> None:
    job = {"said": "done", "done": 4, "count": 4, "problems": [], "models": []}
    states = ["running", "", "finished"]

    def state_of_captioning(route: Any) -> None:
        if states:
            state = states.pop(0)  # "": the answer is lost
            route.fulfill(json={**job, "state": state} if state else None)
        else:
            route.fallback()

    page.route("**/datasets/caption_state", state_of_captioning)
    with late(page, "/datasets/check", answers=True) as wait:
        open_folder(page, server, folder)
        wait()
        caption(page, "c.png").fill("a bird")
        page.locator(".ds-state", has_text="Saved in").wait_for()
    page.locator(".ds-size", has_text="→").first.wait_for()
    assert caption(page, "c.png").input_value() == "a bird"
    until(lambda: bool(page.wait_for_timeout(20) or not states))
    page.get_by_text("4 images are small").wait_for()  # above the button, which moves
    page.get_by_text("Size and trigger word").click()
    trigger = page.get_by_label("Trigger word for the check")
    with late(page, "/datasets/save") as wait:
        caption(page, "c.png").fill("birds")
        trigger.fill("zibbo")
        wait()
        trigger.press("Tab")
    page.get_by_text("Change many captions").click()
    words = page.get_by_label("Words", exact=True)
    words.fill("first")
    with late(page, "/datasets/preview") as wait:
        press(page, "Preview")
        wait()
        words.fill("second")
    press(page, "Preview")
    press(page, "Apply to 4 captions")
    shows(page, "c.png", "second, birds")
    assert trigger.input_value() == "zibbo"
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    with late(page, str(other)) as wait:
        press(page, "Open another one")
        page.get_by_label("Folder on this machine").fill(str(other))
        page.keyboard.press("Enter")
        page.keyboard.press("Enter")
        wait()
        caption(page, "c.png").fill("typed here")
    page.locator(f".ds-card img[src*='{quote(str(other), safe='')}']").first.wait_for()
    until(lambda: (folder / "c.txt").read_text() == "typed here")
    page.get_by_text("Opening the folder").wait_for(state="hidden")
    assert (other / "c.txt").read_text() == "second, birds"


def test_ten_thousand_images_are_a_few_cards_at_a_time(
    page: Any, server: GuiServer, tmp_path: Path
) -> None:
    root = tmp_path / "many"
    root.mkdir()
    Image.new("RGB", (16, 16)).save(root / "p0000.png")
    for index in range(1, 10_000):
        (root / f"p{index:04}.png").hardlink_to(root / "p0000.png")
    server.open(page, f"/datasets?folder={quote(str(root))}")
    page.get_by_text("all 10000 shown", exact=True).wait_for()
    for name in ("p5000.png", "p9999.png", "p0000.png"):
        scroll_to(page, int(name[1:5]) / 9_999)
        caption(page, name).wait_for()
        assert page.locator(".ds-card").count() <= 4 * CHUNK
        assert page.evaluate("document.querySelectorAll('*').length") < 8_000
    # A caption that is typed stays where it is when its card leaves the screen and comes back.
    caption(page, "p0000.png").fill("typed")
    scroll_to(page, 1)
    caption(page, "p9999.png").wait_for()
    scroll_to(page, 0)
    shows(page, "p0000.png", "typed")
    page.get_by_label("Find", exact=True).fill("p9998")
    page.get_by_text("1 of 10000 shown").wait_for()
    caption(page, "p9998.png").wait_for()
    assert page.locator(".ds-card").count() == 1


def scroll_to(page: Any, share: float) -> None:
    """Scroll to a share of the list of cards; of parts that come on the way, heights change."""
    page.evaluate("share => scrollTo(0, share * document.documentElement.scrollHeight)", share)


def test_a_mask_is_painted_and_a_crop_dragged_on_the_picture_both_saved_and_undone(
    page: Any, server: GuiServer, folder: Path
) -> None:
    open_folder(page, server, folder)
    mask, crops = folder / "a-masklabel.png", folder / "crops.json"
    page.get_by_role("button", name="Mask and crop of a.png").click()
    dialog = page.get_by_role("dialog")
    canvas = dialog.get_by_role("img", name="Mask of a.png")
    canvas.focus()
    dialog.get_by_role("button", name="Save the mask").click()
    dialog.get_by_text("nothing is painted").wait_for()
    drag(page, canvas, (0.2, 0.5), (0.4, 0.5))
    # Only Save and Cancel end it: nothing else takes away what is painted.
    for key in ("Escape", "Escape", "PageDown"):
        page.keyboard.press(key)
        dialog.get_by_text("The mask is not saved: save it, or press Cancel.").wait_for()
    for button in ("Close", "Next", "Crop"):
        dialog.get_by_role("button", name=button, exact=True).click()
    assert canvas.is_visible()
    dialog.get_by_role("button", name="Save the mask").click()
    canvas.wait_for(state="detached")
    said(page, "the mask of a.png")
    with Image.open(mask) as drawn:
        assert drawn.size == (96, 64)
        assert drawn.getpixel((28, 32)) == 255 and drawn.getpixel((80, 32)) == 0
    written = mask.read_bytes()
    dialog.locator(".wb-masked img").wait_for()  # what counts little is seen on the image
    paints = dialog.get_by_role("button", name="Mask", exact=True)
    place = paints.bounding_box()
    paints.click()
    canvas.focus()
    assert paints.bounding_box() == place, "a second press there would be on another button"
    page.keyboard.press("ArrowRight")
    page.keyboard.press("Space")
    dialog.locator(".brush").wait_for()  # who paints with keys sees where
    page.keyboard.press("+")
    dialog.get_by_role("button", name="150 %").wait_for()
    at = painted_beside_the_middle(page, dialog)
    size = dialog.get_by_role("slider", name="Brush")
    width = int(size.input_value())
    size.press("ArrowRight")  # of the brush, not to the next image
    assert int(size.input_value()) == width + 1
    dialog.get_by_role("button", name="Save, then the next image").click()
    dialog.get_by_role("img", name="Mask of b.png").wait_for()
    dialog.get_by_role("button", name="Previous").click()
    dialog.locator("h3", has_text="a.png").wait_for()
    with Image.open(mask) as drawn:
        assert drawn.getpixel((28, 32)) == 255 and drawn.getpixel((53, 32)) == 255
        assert drawn.getpixel(at) == 255 and drawn.getpixel((90, 60)) == 0
    dialog.get_by_role("button", name="Crop", exact=True).click()
    box = dialog.get_by_role("img", name="Crop of a.png")
    box.wait_for()
    page.keyboard.press("Escape")
    box.wait_for(state="detached")
    assert dialog.is_visible(), "what Escape left is the crop"
    dialog.get_by_role("button", name="Crop", exact=True).click()
    drag(page, box, (0.995, 0.99), (0.5, 0.75))  # the handle at the lower right
    dialog.get_by_text(re.compile("^4[789] \u00d7 4[789] px$")).wait_for()
    page.keyboard.press("ArrowRight")  # by a hundredth of the width
    dialog.get_by_role("button", name="Save the crop").click()
    box.wait_for(state="detached")
    said(page, "the crop of a.png")
    left, top, right, bottom = json.loads(crops.read_text())["a.png"]
    assert (left, top) == (1, 0) and abs(right - 49) <= 2 and abs(bottom - 48) <= 2
    dialog.locator(".wb-kept").wait_for()  # what is trained is seen on the picture
    dialog.get_by_role("button", name="Crop", exact=True).click()
    dialog.get_by_role("button", name="square").click()
    page.keyboard.press("Tab")
    dialog.get_by_role("button", name="The whole image").click()
    box.wait_for(state="detached")
    assert not crops.exists()
    dialog.get_by_role("button", name="Next", exact=True).click()
    page.keyboard.press("Escape")
    page.wait_for_function(
        "() => document.activeElement.getAttribute('aria-label') === 'Enlarge b.png'"
    )
    press(page, "Undo")
    until(crops.exists, what="the crop is back")
    press(page, "Undo")
    until(lambda: not crops.exists(), what="the crop is gone")
    press(page, "Undo")
    until(lambda: mask.read_bytes() == written, what="the mask is as it was")


def painted_beside_the_middle(page: Any, dialog: Any) -> tuple[int, int]:
    """Enlarge the image with the wheel, paint where the mouse is, and return the pixel, of 96 x 64, that is there."""
    view = dialog.locator(".wb-view").bounding_box()
    place = (view["x"] + 0.6 * view["width"], view["y"] + 0.3 * view["height"])
    page.mouse.move(*place)

    def pixel() -> tuple[int, int]:
        stage = dialog.locator(".wb-stage").bounding_box()
        across = (place[0] - stage["x"]) / stage["width"]
        return int(96 * across), int(64 * (place[1] - stage["y"]) / stage["height"])

    before = pixel()
    page.mouse.wheel(0, -300)
    dialog.get_by_role("button", name="273 %").wait_for()
    assert all(abs(one - other) <= 1 for one, other in zip(before, pixel(), strict=True))
    page.mouse.click(*place)
    return pixel()


def drag(page: Any, node: Any, start: tuple[float, float], end: tuple[float, float]) -> None:
    """Drag with the mouse from one place of an element to another, both as shares of its sides."""
    box = node.bounding_box()
    places = [(box["x"] + box["width"] * x, box["y"] + box["height"] * y) for x, y in (start, end)]
    page.mouse.move(*places[0])
    page.mouse.down()
    page.mouse.move(*places[1], steps=4)
    page.mouse.up()


# ---- all settings


def field(page: Any, key: str) -> Any:
    return page.locator(f'[id="set-{key}"]')


def row(page: Any, key: str) -> Any:
    return page.locator(f'[id="{key}"]')


def saved(page: Any, work: Workplace, draft: drafts.Draft, settings: dict[str, Any]) -> None:
    """Wait until the draft's file says so: the page shows what the file has."""
    shown = json.dumps(json.dumps(settings))
    page.wait_for_function(
        "() => JSON.stringify(JSON.parse(document.getElementById('json').value || 'null'))"
        f" === JSON.stringify(JSON.parse({shown}))"
    )
    assert drafts.read(work, draft.id).settings == settings


def test_settings_are_found_changed_refused_reset_and_the_same_in_two_tabs_and_a_file(
    page: Any, server: GuiServer, place: Path, tmp_path: Path
) -> None:
    work = Workplace(runs=place / "runs")
    write_dataset(tmp_path / "toy", images=6)
    draft = drafts.new(work, dataset=str(tmp_path / "toy"))
    settings = server.open(page, f"/settings?draft={draft.id}", "[id='set-adapter.rank']")
    keys = settings.locator(".field").evaluate_all("fields => fields.map((field) => field.id)")
    assert sorted(keys) == sorted(info.key for info in all_settings())
    settings.locator(".memory .fit").wait_for()
    factor = row(settings, "adapter.lokr_factor")
    assert not factor.is_visible()
    settings.locator("#search").fill("lokr_factor")
    factor.get_by_text("needs \u201cKind\u201d = lokr, but it is lora").wait_for()
    settings.locator("#search").fill("")
    settings.locator("body").click(position={"x": 3, "y": 300})
    settings.keyboard.press("/")
    settings.keyboard.type("rank update")
    settings.wait_for_function("() => !document.getElementById('train.steps').checkVisibility()")
    assert row(settings, "adapter.rank").is_visible()

    rank = field(settings, "adapter.rank")
    rank.fill("8")
    saved(settings, work, draft, {"adapter.rank": 8})
    settings.locator(".memory .fit").wait_for()
    row(settings, "adapter.rank").get_by_role("button", name="Back to 16").wait_for()

    rank.fill("many")
    row(settings, "adapter.rank").get_by_text("\u201cRank\u201d = 'many'").wait_for()
    assert rank.get_attribute("aria-invalid") == "true"
    settings.reload()
    settings.wait_for_function(
        "() => document.getElementById('set-adapter.rank')?.value === 'many'"
    )
    row(settings, "adapter.rank").get_by_text("\u201cRank\u201d = 'many'").wait_for()
    saved(settings, work, draft, {"adapter.rank": 8})

    seed = field(settings, "train.seed")
    for pressed, word, typed in (
        (row(settings, "adapter.rank").get_by_role("button"), "reset", 427),
        (settings.get_by_role("button", name="Reset all"), "replace", 4277),
    ):
        with late(settings, f"/settings/{word}") as wait:
            pressed.click()
            wait()
            seed.press("End")
            seed.press("7")
        saved(settings, work, draft, {"train.seed": typed})
        assert settings.evaluate("document.activeElement.id") == "set-train.seed"
    row(settings, "train.seed").get_by_role("button").click()
    saved(settings, work, draft, {})
    settings.wait_for_function("() => document.getElementById('set-adapter.rank').value === '16'")
    settings.reload()
    field(settings, "adapter.rank").wait_for()
    settings.wait_for_function("() => document.getElementById('set-adapter.rank').value === '16'")
    settings.get_by_text("Changed settings as JSON").click()
    other = settings.context.new_page()
    server.open(other, f"/settings?draft={draft.id}", "[id='set-train.seed']")
    typing = field(settings, "train.steps")
    typing.fill("x")
    row(settings, "train.steps").get_by_text("\u201cTrain: Steps\u201d = 'x'").wait_for()
    other.bring_to_front()
    other.get_by_text("Changed settings as JSON").click()
    other.locator("#json").fill('{"train": {"seed": 7}}')
    other.wait_for_function("() => document.getElementById('set-train.seed').value === '7'")
    settings.bring_to_front()
    settings.wait_for_function("() => document.getElementById('set-train.seed').value === '7'")
    assert typing.input_value() == "x", "what is being typed stays"
    settings.locator("#json").fill('{"train.seed": 7,\n "adapter.rang": 1}')
    settings.get_by_text("unknown setting 'adapter.rang'").wait_for()
    settings.locator("#json").press("Escape")
    saved(settings, work, draft, {"train.seed": 7})
    settings.locator(".jumps a", has_text="Objective").click()  # hidden until then
    offset = field(settings, "objective.noise_offset")
    offset.fill("0.00")  # a pause here, on the way to 0.001
    saved(settings, work, draft, {"train.seed": 7, "objective.noise_offset": 0.0})
    offset.press("End")
    settings.keyboard.type("1")
    saved(settings, work, draft, {"train.seed": 7, "objective.noise_offset": 0.001})
    with settings.expect_download() as downloading:
        settings.get_by_role("button", name="Download").click()
    file = tmp_path / "mine.json"
    downloading.value.save_as(file)
    both = {"train.seed": 7, "objective.noise_offset": 0.001}
    assert json.loads(file.read_text()) == both
    settings.get_by_role("button", name="Reset all").click()
    saved(settings, work, draft, {})
    settings.get_by_role("button", name="Undo").click()
    saved(settings, work, draft, both)
    file.write_text('{"train": {"seed": 3}}')
    settings.locator("#file").set_input_files(file)
    saved(settings, work, draft, {"train.seed": 3})
    kohya = tmp_path / "kohya.toml"
    kohya.write_text('network_module = "networks.lora"\nnetwork_dim = 24\n')
    settings.locator("#file").set_input_files(kohya)
    settings.get_by_text("A settings file of ").wait_for()
    settings.wait_for_function("() => document.getElementById('set-adapter.rank').value === '24'")

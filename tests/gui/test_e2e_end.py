"""The end of a run in a real browser: copy, publish, train again, compare with another run, delete with undo."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.gui_server import GuiServer
from tests.fakes.hub_server import TOKEN, HubServer, hub_server
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run
from tests.fakes.run_folder import PROMPTS
from tests.fakes.runs import ROOT
from tests.gui.conftest import StartGui

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Place:
    """The runs folder of this module, its server, and the Hub it publishes to."""

    runs: Path
    server: GuiServer
    hub: HubServer

    def open(self, page: Any, path: str) -> Any:
        page.goto(self.server.link)
        page.goto(self.server.url(path))
        return page

    def delete(self, page: Any, path: str, name: str) -> None:
        page.goto(self.server.url(path))
        page.locator(".trash[data-ready]").wait_for(state="attached")
        page.get_by_role("button", name=f"Delete {name}").click()
        page.get_by_text(f"{name} is in the trash.").wait_for()


@pytest.fixture(scope="module")
def place(gui_server: StartGui, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    runs = tmp_path_factory.mktemp("end") / "runs"
    with hub_server() as hub:
        home = str(runs.parent / "hub")
        env = {"HF_ENDPOINT": hub.address, "HF_HOME": home, "HF_TOKEN": "", "HF_HUB_OFFLINE": "0"}
        yield Place(runs=runs, server=gui_server(runs, env=env), hub=hub)


@pytest.fixture
def run(place: Place) -> Path:
    """A finished run named done, of the example."""
    folder = finished_run(place.runs / "done", saves=(10, 20))
    write_status(folder, state="finished", step=30, steps=30, exit_code=0)
    record = json.loads((folder / "run.json").read_text())
    record["dataset"]["name"] = "example"
    record["command"][1] = str(ROOT / "datasets" / "example")
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_a_finished_lora_is_copied_and_published(place: Place, page: Any, run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    record["base"]["source"] = "owner/model"  # one that ComfyUI has
    (run / "run.json").write_text(json.dumps(record))
    loras = place.runs.parent / "ComfyUI" / "models" / "loras"
    loras.mkdir(parents=True)
    place.open(page, "/run?run=done")
    page.get_by_text("on the images kept aside").wait_for()
    page.get_by_role("button", name="Copy to ComfyUI or Forge").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_label("The program, or its folder of LoRAs").fill(str(place.runs))
    page.keyboard.press("Enter")
    dialog.get_by_text("is no folder of LoRAs").wait_for()
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
    dialog.get_by_label("Name of its page there").wait_for()
    assert dialog.get_by_label("Private").is_checked()
    assert dialog.get_by_label("Name of its page there").input_value() == "zorble"
    dialog.get_by_label("Name of its page there").fill("club/zorble")
    place.hub.refuses = True  # as for a token that may only read
    dialog.get_by_role("button", name="Publish").click()
    dialog.get_by_text("The token that is signed in may only read").wait_for()
    tokens = dialog.get_by_role("link", name="your page of tokens").get_attribute("href")
    assert tokens == "https://huggingface.co/settings/tokens"
    place.hub.refuses = False
    dialog.get_by_label("Token").fill(TOKEN)
    page.keyboard.press("Enter")
    dialog.get_by_label("Name of its page there").wait_for()
    assert dialog.get_by_label("Name of its page there").input_value() == "club/zorble"
    dialog.get_by_label("Name of its page there").fill("zorble")
    dialog.get_by_role("button", name="Publish").click()
    dialog.get_by_role("link", name=f"{place.hub.address}/jane/zorble").wait_for()
    assert place.hub.private == {"jane/zorble": True}


def test_a_run_is_compared_and_trained_again_with_changes(
    place: Place, page: Any, run: Path
) -> None:
    other = finished_run(place.runs / "other <b>")
    write_status(other, state="finished", step=30, steps=30, exit_code=0)
    place.open(page, "/run?run=done")
    page.get_by_role("link", name="Compare with another training").click()
    page.get_by_text("Prompts that both have, with the same seed: 3.").wait_for()
    second = page.get_by_role("group", name="Second")
    assert page.get_by_role("group", name="First").get_by_label("Training").input_value() == "done"
    assert second.get_by_label("Training").input_value() == "other <b>"
    second.get_by_label("Step").select_option("step 10")
    page.reload()
    page.get_by_role("img", name=f"other <b>, step 10: {PROMPTS[0]}").wait_for()
    page.get_by_role("img", name=f"done, step 30: {PROMPTS[2]}").wait_for()
    assert page.evaluate("[...document.querySelectorAll('.pairs img')].length") == 6
    page.goto(place.server.url("/run?run=done"))
    page.get_by_role("link", name="Train again with changes").click()
    page.locator(".plan-line", has_text="Fits:").wait_for()
    assert page.get_by_label("Trigger word").input_value() == "zorble thing"
    page.get_by_role("button", name="Back to the images").click()
    page.get_by_role("button", name="Images that are already").click()
    assert page.get_by_label("Folder with your images").input_value().endswith("/example")
    page.wait_for_function("new URL(location.href).searchParams.get('draft')")
    assert "again=" not in page.url, "else each reload makes another draft"


def test_what_is_deleted_comes_back_until_the_trash_is_emptied(
    place: Place, page: Any, run: Path
) -> None:
    page.goto(place.server.link)
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
    page.get_by_text("The trash is empty.").wait_for()
    assert (run / "run.json").is_file()
    place.delete(page, "/", "done")
    page.get_by_role("link", name="Trash", exact=True).click()
    page.get_by_role("button", name="Empty the trash").click()
    page.get_by_role("button", name="Really delete all of it for good?").click()
    page.get_by_text("The trash is empty.").wait_for()
    assert not run.exists()

"""The page LoRAs in a real browser, on the result of a real training of a tiny base."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from safetensors.numpy import load_file

from lora_trainer.lora_file.tensor_file import open_checked
from tests.fakes.lora_library import finished_run, lora
from tests.fakes.runs import Toy, toy

pytestmark = pytest.mark.e2e
PROCESS_MS = 100_000
"""A command that imports torch on a machine that does much else besides."""
HOSTILE = '"><img src=x onerror=alert(1)>${alert(2)}{{alert(3)}}`'


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A trained toy, and a run of somebody else's."""
    place = toy(tmp_path_factory.mktemp("library")).with_base()
    assert place.train(logging__trackers=[], data__trigger="toy") == 0
    run = finished_run(
        place.runs / "evil", saves=(), modelspec__title=HOSTILE, ss_sd_model_name=HOSTILE
    )
    lora(run / f"{HOSTILE.replace('/', '')}.safetensors", modelspec__trigger_phrase=HOSTILE)
    return place


@pytest.fixture(scope="module")
def server(gui_server: Any, place: Toy) -> Any:
    return gui_server(place.runs)


def opened(page: Any, server: Any, ref: str = "toy/toy.safetensors") -> Any:
    server.open(page, f"/library?{urlencode({'file': ref})}")
    page.locator(".lora-head").wait_for()
    return page


def tab(page: Any, name: str) -> None:
    page.get_by_role("tab", name="Try").wait_for()
    page.get_by_role("tab", name=name).click()


def test_the_grid_filters_and_leads_to_one(page: Any, server: Any) -> None:
    server.open(page, "/library")
    page.locator(".lora").nth(2).wait_for()
    assert page.get_by_text(HOSTILE).first.is_visible(), "a hostile title is shown as text"
    page.get_by_label("Search").fill("toy")
    page.get_by_text("1 of 3").wait_for()
    page.get_by_role("link", name="toy", exact=True).click()
    page.locator(".lora-head").wait_for()
    page.get_by_role("link", name="All LoRAs").click()
    page.locator(".lora").nth(2).wait_for()


def test_prompts_are_drawn_at_each_strength(page: Any, server: Any, place: Toy) -> None:
    opened(page, server)
    page.get_by_label("Prompts").fill(f"a toy\n{HOSTILE}")
    page.get_by_label("Strengths").fill("0 1")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("4 images, seed 1234").wait_for(timeout=PROCESS_MS)
    images = page.locator(".try-grid img")
    assert images.count() == 4
    page.wait_for_function(
        "[...document.querySelectorAll('.try-grid img')].every(i => i.complete && i.naturalWidth)"
    )
    page.reload()
    page.get_by_text("4 images, seed 1234").wait_for()
    page.get_by_label("Strengths").fill("much")
    page.get_by_role("button", name="Draw", exact=True).click()
    page.get_by_text("'much' are no strengths").wait_for()


def test_a_text_is_saved_into_the_file_and_the_tensors_stay(
    page: Any, server: Any, place: Toy
) -> None:
    file = place.run / "toy.safetensors"
    before = {name: value.tobytes() for name, value in load_file(file).items()}
    page.context.grant_permissions(["clipboard-read", "clipboard-write"])
    opened(page, server)
    page.get_by_role("button", name="Copy", exact=True).click()
    page.get_by_role("button", name="Copied").wait_for()
    assert page.evaluate("navigator.clipboard.readText()") == "toy"
    tab(page, "Describe")
    page.get_by_label("Title").fill(HOSTILE)
    page.get_by_role("button", name="Save into the file").click()
    page.get_by_text("Saved: title.").wait_for()
    page.locator(".lora-head").get_by_text(HOSTILE).wait_for()
    with open_checked(file) as found:
        assert found.metadata["modelspec.title"] == HOSTILE
    assert {name: value.tobytes() for name, value in load_file(file).items()} == before
    page.locator(".choices button").first.click()
    page.get_by_text("The preview is now toy.preview.png").wait_for()
    assert (place.run / "toy.preview.png").is_file()


def test_convert_makes_a_new_file_of_the_list(page: Any, server: Any, place: Toy) -> None:
    opened(page, server)
    tab(page, "Tools")
    page.get_by_text("Make it smaller").click()
    page.get_by_role("button", name="Make smaller").click()
    page.get_by_text("nothing says how far to cut").wait_for()
    page.get_by_label("diffusers, InvokeAI").click()
    page.get_by_role("button", name="Convert", exact=True).click()
    page.get_by_role("link", name="toy-diffusers.safetensors").click(timeout=PROCESS_MS)
    page.get_by_role("heading", name="toy-diffusers").wait_for()
    assert (place.run / "toy-diffusers.safetensors").is_file()


def test_an_export_can_be_downloaded(page: Any, server: Any, place: Toy) -> None:
    opened(page, server)
    tab(page, "Export")
    page.get_by_role("button", name="Check and export").click()
    with page.expect_download() as download:
        page.get_by_role("link", name="toy.safetensors").click()
    exported = place.run / "export"
    content = Path(download.value.path()).read_bytes()
    assert content == (exported / "toy.safetensors").read_bytes()
    assert json.loads((exported / "toy.json").read_bytes())["activation text"] == "toy"


def test_it_gets_a_name_and_a_note_by_which_it_is_found(page: Any, server: Any) -> None:
    opened(page, server, "evil/zorble.safetensors")
    tab(page, "Describe")
    page.get_by_label("Notes").fill(HOSTILE)
    page.get_by_label("Title").focus()
    page.locator(".lora-head .note").get_by_text(HOSTILE).wait_for()
    page.get_by_label("Name of the file").fill("blue one")
    page.get_by_role("button", name="Rename").click()
    page.get_by_role("heading", name="blue one").wait_for()
    page.get_by_role("link", name="All LoRAs").click()
    page.get_by_label("Search").fill("alert(3)}} blue")
    page.locator(".lora").get_by_role("link", name="blue one", exact=True).wait_for()

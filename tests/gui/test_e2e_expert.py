"""The page of all settings in a real browser: find, change, be refused, reset, reload, two tabs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import drafts
from lora_trainer.gui.workplace import Workplace

from lora_trainer.config.config import all_settings
from tests.fakes.runs import write_dataset

pytestmark = pytest.mark.e2e
PLANNED_WITHIN_MS = 60_000


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Workplace:
    folder = tmp_path_factory.mktemp("expert").resolve()
    write_dataset(folder / "toy", images=6)
    (folder / "runs").mkdir()
    return Workplace(runs=folder / "runs")


@pytest.fixture(scope="module")
def server(work: Workplace, gui_server: Any) -> Any:
    return gui_server(work.runs)


@pytest.fixture
def draft(work: Workplace) -> drafts.Draft:
    return drafts.new(work, dataset=str(work.runs.parent / "toy"))


@pytest.fixture
def settings(page: Any, server: Any, draft: drafts.Draft) -> Any:
    page.goto(server.link)
    page.goto(server.url(f"/settings?draft={draft.id}"))
    field(page, "adapter.rank").wait_for()
    return page


def field(page: Any, key: str) -> Any:
    return page.locator(f'[id="set-{key}"]')


def row(page: Any, key: str) -> Any:
    return page.locator(f'[id="{key}"]')


def until(page: Any, script: str) -> None:
    page.wait_for_function(script)


def saved(page: Any, work: Workplace, draft: drafts.Draft, settings: dict[str, Any]) -> None:
    """Wait until the draft's file says so: the page shows what the file has."""
    shown = json.dumps(json.dumps(settings))
    until(
        page,
        "() => JSON.stringify(JSON.parse(document.getElementById('expert-json').value || 'null'))"
        f" === JSON.stringify(JSON.parse({shown}))",
    )
    assert drafts.read(work, draft.id).settings == settings


IN_THE_PAGE = """() => Object.fromEntries([...document.querySelectorAll(".field")].map((row) => {
  const control = row.querySelector("input, select, textarea");
  const help = document.getElementById(control.getAttribute("aria-describedby").split(" ")[0]);
  const code = row.querySelector("code").textContent;
  return [code, [control.id, control.labels[0].textContent, help.textContent]];
}))"""


def test_fold_search_change_refusal_reset(
    settings: Any, work: Workplace, draft: drafts.Draft
) -> None:
    fields = settings.evaluate(IN_THE_PAGE)
    infos = {info.key: info for info in all_settings()}
    assert set(fields) == set(infos)
    for key, (control, label, help_text) in fields.items():
        assert (control, label) == (f"set-{key}", infos[key].label)
        assert help_text
    settings.locator(".memory .fit").wait_for(timeout=PLANNED_WITHIN_MS)
    factor = row(settings, "adapter.lokr_factor")
    assert not factor.is_visible()
    settings.locator("#expert-search").fill("lokr_factor")
    factor.get_by_text("needs \u201cKind\u201d = lokr, but it is lora").wait_for()
    settings.locator("#expert-search").fill("")
    settings.locator("body").click(position={"x": 3, "y": 300})
    settings.keyboard.press("/")
    settings.keyboard.type("rank update")
    until(settings, "() => !document.getElementById('train.steps').checkVisibility()")
    assert row(settings, "adapter.rank").is_visible()

    rank = field(settings, "adapter.rank")
    rank.fill("8")
    saved(settings, work, draft, {"adapter.rank": 8})
    settings.locator(".memory .fit").wait_for(timeout=PLANNED_WITHIN_MS)
    row(settings, "adapter.rank").get_by_text("without it 16").wait_for()

    rank.fill("many")
    row(settings, "adapter.rank").get_by_text("\u201cRank\u201d = 'many'").wait_for()
    assert rank.get_attribute("aria-invalid") == "true"
    settings.reload()
    until(settings, "() => document.getElementById('set-adapter.rank')?.value === 'many'")
    row(settings, "adapter.rank").get_by_text("\u201cRank\u201d = 'many'").wait_for()
    saved(settings, work, draft, {"adapter.rank": 8})

    row(settings, "adapter.rank").get_by_role("button").click()
    saved(settings, work, draft, {})
    until(settings, "() => document.getElementById('set-adapter.rank').value === '16'")
    settings.reload()
    field(settings, "adapter.rank").wait_for()
    until(settings, "() => document.getElementById('set-adapter.rank').value === '16'")


def test_two_tabs_a_number_under_the_cursor_and_a_file_out_and_in(
    settings: Any, server: Any, work: Workplace, draft: drafts.Draft, tmp_path: Path
) -> None:
    other = settings.context.new_page()
    other.goto(server.url(f"/settings?draft={draft.id}"))
    field(other, "train.seed").wait_for()
    typing = field(settings, "train.steps")
    typing.fill("x")
    row(settings, "train.steps").get_by_text("\u201cTrain: Steps\u201d = 'x'").wait_for()
    other.bring_to_front()
    other.locator("#expert-json").fill('{"train": {"seed": 7}}')
    until(other, "() => document.getElementById('set-train.seed').value === '7'")
    settings.bring_to_front()
    until(settings, "() => document.getElementById('set-train.seed').value === '7'")
    assert typing.input_value() == "x", "what is being typed stays"
    settings.locator("#expert-json").fill('{"train.seed": 7,\n "adapter.rang": 1}')
    settings.get_by_text("line 2, column 2: unknown setting").wait_for()
    settings.locator("#expert-json").press("Escape")
    saved(settings, work, draft, {"train.seed": 7})
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
    settings.locator("#expert-file").set_input_files(file)
    saved(settings, work, draft, {"train.seed": 3})

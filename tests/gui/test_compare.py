"""The page Compare: which two it opens with; prompts as people say them; plain words as addresses."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui.compare import routes
from lora_trainer.gui.held_out_chart import Learned
from lora_trainer.gui.markup import PLACES, place_named
from lora_trainer.gui.prompt_text import spoken_prompt
from lora_trainer.gui.run.parts import sample_sheet
from lora_trainer.gui.server import startup
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.workplace import Workplace
from starlette.requests import Request

from lora_trainer.reporting.history import read_history
from tests.fakes.live_runs import write_status
from tests.fakes.lora_library import finished_run

ENGLISH = words("en")


@pytest.fixture
def work(tmp_path: Path) -> Workplace:
    return Workplace(runs=tmp_path / "runs")


def run(work: Workplace, name: str, *, images: str = "", prompt: str = "") -> Path:
    """Write a finished run of some images, its first prompts replaced by one of its own."""
    folder = finished_run(work.runs / name, saves=())
    record = json.loads((folder / "run.json").read_text())
    record["dataset"]["fingerprint"] = images or name
    (folder / "run.json").write_text(json.dumps(record))
    if prompt:
        rows = [json.loads(row) for row in (folder / "events.jsonl").read_text().splitlines()]
        for row in rows:
            for index, image in enumerate(row.get("images") if row["event"] == "sample" else []):
                image["prompt"] = f"{prompt} {index}"
        (folder / "events.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return folder


def test_one_training_that_learned_is_shown_beside_its_own_base(work: Workplace) -> None:
    run(work, "good")
    failed = run(work, "failed")
    write_status(failed, state="failed", step=3, steps=30)
    only_base = run(work, "fresh")
    for step in sorted((only_base / "samples").iterdir())[1:]:
        shutil.rmtree(step)
    names = ["failed", "good", "fresh"]
    assert tuple(routes.first_pair(work, names)) == ("good", "good")
    assert tuple(routes.first_pair(work, ["failed"])) == ("failed", "failed")
    assert tuple(routes.first_pair(work, [])) == ()


def test_two_with_the_same_images_or_a_prompt_in_common_come_first(work: Workplace) -> None:
    run(work, "slider", prompt="a circle")
    run(work, "one")
    run(work, "two")
    assert tuple(routes.first_pair(work, ["slider", "one", "two"])) == ("one", "two")
    run(work, "three", images="slider")
    assert tuple(routes.first_pair(work, ["slider", "one", "two", "three"])) == ("slider", "three")
    assert tuple(routes.first_pair(work, ["slider", "one"])) == ("slider", "slider")


def test_two_lines_that_are_seen_as_one_are_said_to_coincide() -> None:
    def learned(name: str, *losses: float, base: float = 1.0) -> Learned:
        return Learned(label=name, losses=dict(enumerate(losses, start=1)), base_loss=base)

    one = learned("one", 0.9, 0.8)
    assert routes.coincide([one, learned("same", 0.9, 0.8)])
    assert routes.coincide([one, learned("close", 0.9, 0.8001)])
    for other in (
        learned("apart", 0.9, 0.81),
        learned("longer", 0.9, 0.8, 0.7),
        learned("unmeasured"),
        learned("no base", 0.9, 0.8, base=math.nan),
    ):
        assert not routes.coincide([one, other]), other.label
    assert not routes.coincide([learned("none"), learned("none either")])
    assert not routes.coincide([one]), "one training twice is one line anyway"
    # A chart with one line of two says why.
    assert routes.remark([one, learned("short")], ENGLISH) == (
        "No held-out images were measured while short trained."
    )
    assert not routes.remark([one, learned("apart", 0.9, 0.81)], ENGLISH)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a cat", "a cat"),
        ("a large circle on white --m -2", "a large circle on white, strength \u22122"),
        ("a cat --s 20 --w 512 --h 768", "a cat, 20 steps, 512 px wide, 768 px high"),
        (
            "a cat --n blurry, dark --g 7.5 --d 3",
            "a cat, without: blurry, dark, guidance 7.5, seed 3",
        ),
        ("a cat --zz 4", "a cat --zz 4"),
        ("", ""),
    ],
)
def test_options_of_a_prompt_are_said_in_words(line: str, said: str) -> None:
    assert spoken_prompt(line, ENGLISH) == said


def test_a_sheet_of_samples_has_no_letters_of_options(work: Workplace) -> None:
    folder = run(work, "a", prompt="a circle --m -2 --d")
    sheet: Any = sample_sheet(folder, read_history(folder), exported={}, best=None, _=ENGLISH)
    assert sheet["prompts"][1]["text"] == "a circle, strength \u22122, seed 1"


def test_plain_words_typed_as_an_address_lead_to_their_page() -> None:
    for typed, path in {
        "/loras": "/library",
        "/LoRAs/": "/library",
        "/machine": "/doctor",
        "/home": "/",
        "/all-settings": "/settings",
        "/queue/": "/queue",
    }.items():
        assert place_named(typed) == path
    for typed in ("/nothing", "/library/x", "//evil.example", "/..%2f"):
        assert place_named(typed) is None
    words_of = [word for place in PLACES for word in (place.name.casefold(), *place.also)]
    assert len(words_of) == len(set(words_of))
    scope = {"type": "http", "method": "GET", "path": "/machine", "query_string": b""}
    answer = startup._no_page(Request({**scope, "headers": [(b"accept", b"text/html")]}))
    assert (answer.status_code, answer.headers["location"]) == (307, "/doctor")

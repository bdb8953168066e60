"""Captions in JSON: read whole, given the trigger, never taken for tags, checked for bases that expect them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lora_trainer import families
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.caption_rules import plain_text, variants
from lora_trainer.dataset.captions import read_caption_file
from tests.fakes.family_bases import base_of
from tests.fakes.runs import run_cli, toy

CAPTION = {
    "high_level_description": "a red  bike, {old|new}",
    "style_description": {"photo": "35mm", "color_palette": ["#C8102E"]},
    "compositional_deconstruction": {
        "background": "a wall, é",
        "elements": [{"type": "obj", "bbox": [0, 1, 2, 1000], "desc": "a bike"}],
    },
}
COMPACT = json.dumps(CAPTION, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("indent", [None, 2])
def test_an_object_is_read_whole_on_one_line(indent: int | None) -> None:
    found = read_caption_file("a.txt", json.dumps(CAPTION, indent=indent).encode())
    assert found.text == COMPACT and not found.lines and not found.problems
    words = "{red|blue} bike, wall"
    assert read_caption_file("a.txt", words.encode()).text == words


def test_no_rule_but_the_trigger_changes_it() -> None:
    rules = {"shuffle_tags": True, "tag_dropout": 0.5, "wildcards": True, "caption_prefix": "x"}
    plain = DataSettings(**rules)
    assert set(variants([COMPACT], settings=plain, seed=1)) == {COMPACT}
    named = DataSettings(**rules, trigger='kez"o')
    assert set(variants([COMPACT], settings=named, seed=1)) == {
        plain_text([COMPACT], settings=named)
    }
    value = json.loads(plain_text([COMPACT], settings=named))
    assert value.pop("high_level_description") == f'kez"o, {CAPTION["high_level_description"]}'
    assert value == {key: CAPTION[key] for key in value} and len(value) == 2
    placed = COMPACT.replace("a wall", "a [trigger]")
    value = json.loads(plain_text([placed], settings=named))
    assert value["compositional_deconstruction"]["background"] == 'a kez"o, é'
    assert value["high_level_description"] == CAPTION["high_level_description"]


def test_check_names_what_a_base_that_expects_json_will_not_understand(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Broken JSON with file and line, another form, plain text once; nothing of this for other bases."""
    folder = toy(tmp_path, images=4).dataset
    images = sorted(folder.glob("*.png"))
    strange = {**CAPTION, "compositional_deconstruction": {"background": "a wall"}}
    texts = [COMPACT, '{\n  "a": "bike"\n  "b": 1\n}', json.dumps(strange), "a bike"]
    for image, text in zip(images, texts, strict=True):
        image.with_suffix(".txt").write_text(text, encoding="utf-8")
    names = [image.with_suffix(".txt").name for image in images]
    assert run_cli(["check", str(folder), "--base", str(base_of("ideogram4")), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["findings"]
    found = {each["kind"]: each for each in listed if "json" in each["kind"]}
    assert found.keys() == {"caption-broken-json", "caption-json-schema", "caption-not-json"}
    assert found["caption-broken-json"]["file"] == names[1]
    assert "line 3, column 3" in found["caption-broken-json"]["what"]
    assert found["caption-json-schema"]["file"] == names[2]
    assert "elements is missing" in found["caption-json-schema"]["what"]
    assert images[3].name in found["caption-not-json"]["what"]
    assert run_cli(["check", str(folder), "--base", str(base_of("flux2")), "--json"]) == 0
    others = json.loads(capsys.readouterr().out)["findings"]
    assert not [each for each in others if "json" in each["kind"]]


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"style_description": {"photo": "a", "art_style": "b"}}, "one of the two"),
        ({"style_description": {"photo": "a", "color_palette": ["#c8102e"]}}, "capitals"),
        ({"mood": "calm"}, "unknown are mood"),
        ({"elements": [{"type": "obj", "desc": "a", "bbox": [9, 0, 1, 5]}]}, "bbox"),
        ({"elements": [{"type": "text", "desc": "a"}]}, "text is missing"),
        ({"elements": [{"type": "box"}]}, "obj or text"),
        ({"elements": "none"}, "elements is missing"),
    ],
)
def test_faults_of_the_form_are_named(change: dict[str, object], fault: str) -> None:
    form = families.family("ideogram4").text.json_captions
    assert form is not None and not list(form.faults(CAPTION))
    layout = {"background": "a", "elements": change.pop("elements", [])}
    value = {**CAPTION, "compositional_deconstruction": layout, **change}
    (found,) = form.faults(value)
    assert fault in found

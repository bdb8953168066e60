"""`lora-train caption --json-for`: answers become captions in a family's form, or none is written."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from lora_trainer import families
from lora_trainer.captioning import captioners, describer
from lora_trainer.captioning.json_answers import MAX_TOKENS, NotACaption, caption_in, form_of
from tests.fakes.captioners import tiny_captioner, tiny_tagger
from tests.fakes.family_bases import base_of
from tests.fakes.runs import run_cli

FORM = form_of("ideogram4")
ANSWER: dict[str, Any] = {
    "high_level_description": "A red bike against a wall.",
    "style_description": {
        "aesthetics": "quiet",
        "lighting": "noon",
        "photo": "35mm",
        "medium": "photograph",
        "color_palette": ["#C8102E"],
    },
    "compositional_deconstruction": {
        "background": "a white wall, é",
        "elements": [
            {"type": "obj", "bbox": [200, 420, 800, 980], "desc": "a red bike"},
            {"type": "text", "bbox": [300, 60, 700, 200], "text": "OPEN", "desc": "a sign"},
        ],
    },
}


def changed(path: str, value: Any) -> dict[str, Any]:
    """Return the answer with another value at a path of keys and numbers."""
    answer = copy.deepcopy(ANSWER)
    *parents, last = path.split(".")
    place: Any = answer
    for key in parents:
        place = place[int(key) if isinstance(place, list) else key]
    place[int(last) if isinstance(place, list) else last] = value
    return answer


def read(answer: object) -> Any:
    text = answer if isinstance(answer, str) else json.dumps(answer)
    return json.loads(caption_in(text, FORM, trigger=None))


def test_the_object_within_an_answer_is_the_caption_in_the_order_of_the_guide() -> None:
    text = json.dumps(ANSWER, ensure_ascii=False)
    expected = copy.deepcopy(ANSWER)
    # Asked for from left to right first, kept from top to bottom first.
    bike, sign = expected["compositional_deconstruction"]["elements"]
    bike["bbox"], sign["bbox"] = [420, 200, 980, 800], [60, 300, 200, 700]
    compact = json.dumps(expected, ensure_ascii=False, separators=(",", ":"))
    backwards = {key: ANSWER[key] for key in reversed(ANSWER)}
    for answer in (
        text,
        f"```json\n{json.dumps(ANSWER, indent=2)}\n```",
        f"Here it is:\n{text}\nShall I go on?",
        text.replace("}]", "},]").replace('"35mm",', '"35mm" ,'),
        json.dumps(backwards),
    ):
        assert caption_in(answer, FORM, trigger=None) == compact
    named = json.loads(caption_in(text, FORM, trigger='kez"o'))
    assert named["high_level_description"] == 'kez"o, A red bike against a wall.'


STYLE, ELEMENTS = "style_description", "compositional_deconstruction.elements"


@pytest.mark.parametrize(
    ("path", "value", "kept"),
    [
        (f"{STYLE}.color_palette", ["#c8102e", "red", "#C8102E", 3], ["#C8102E"]),
        (f"{STYLE}.color_palette", ["red"], None),
        (f"{STYLE}.color_palette", [f"#0000{n:02X}" for n in range(20)], 16),
        (f"{STYLE}.art_style", "flat", None),
        (f"{STYLE}.mood", "calm", None),
        (f"{ELEMENTS}.0.bbox", [800.4, 980, 200, 1420], [980, 200, 1000, 800]),
        (f"{ELEMENTS}.0.bbox", [10, 10, 10, 90], None),
        (f"{ELEMENTS}.0.bbox", "everywhere", None),
        (f"{ELEMENTS}.0.text", "none", None),
        (f"{ELEMENTS}.0.confidence", 0.9, None),
        ("aspect_ratio", "1:1", None),
        ("high_level_description", "two\nlines", "two\nlines"),
    ],
)
def test_what_can_only_be_meant_one_way_is_put_right(path: str, value: Any, kept: Any) -> None:
    found = read(changed(path, value))
    for key in path.split("."):
        found = found[int(key)] if isinstance(found, list) else found.get(key)
    assert (len(found) if isinstance(kept, int) else found) == kept


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("A red bike.", "has no JSON object"),
        (json.dumps(ANSWER)[:-30], "has JSON that breaks"),
        ("{" * 4000, "has JSON that breaks"),
        ({"elements": []}, "compositional_deconstruction is missing"),
        (changed("compositional_deconstruction.background", 3), "background is missing"),
        (changed(ELEMENTS, "a bike"), "elements is missing"),
        (changed(f"{ELEMENTS}.0.type", "thing"), "type obj or text"),
        (changed(f"{ELEMENTS}.1.text", None), "text is missing"),
        (changed(STYLE, "photo"), "is not an object"),
        (changed("high_level_description", "a" * 10_000), "characters, at most 10,000"),
    ],
)
def test_any_other_answer_is_none(answer: object, why: str) -> None:
    with pytest.raises(NotACaption, match=why):
        read(answer)


ODD: tuple[Any, ...] = (
    None,
    True,
    0,
    -3.5,
    1e400,
    "",
    "#12",
    [],
    [None],
    {},
    {"type": "obj"},
    [1, 2, 3, "4"],
)


def test_whatever_a_model_answers_a_caption_is_in_the_form_or_none() -> None:
    draw, written = random.Random(5), 0
    places = [
        *("high_level_description", STYLE, f"{STYLE}.photo", f"{STYLE}.color_palette"),
        *("compositional_deconstruction", "compositional_deconstruction.background", ELEMENTS),
        *(f"{ELEMENTS}.0", f"{ELEMENTS}.0.bbox", f"{ELEMENTS}.1.text", f"{ELEMENTS}.1.desc"),
    ]
    for _ in range(300):
        answer = changed(draw.choice(places), draw.choice(ODD))
        try:
            value = read(answer)
        except NotACaption:
            continue
        written += 1
        assert not list(FORM.faults(value)), answer
    assert 50 < written < 290


def test_what_the_release_asks_for_is_itself_in_the_form() -> None:
    """The example of the request, with its two kinds of element."""
    example = FORM.request[FORM.request.index("{") : FORM.request.index("An image that")]
    example = example.replace("[x1, y1, x2, y2]", "[1, 2, 3, 4]").replace("#RRGGBB", "#AABBCC")
    assert {each["type"] for each in read(example)["compositional_deconstruction"]["elements"]} == {
        "obj",
        "text",
    }


# ---- the command


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    place.mkdir()
    for name in ("a", "b", "c"):
        Image.new("RGB", (64, 64), "red").save(place / f"{name}.png")
    return place


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_captioner("qwen3-vl", tmp_path_factory.mktemp("model") / "m")


def test_files_are_whole_or_not_there_and_check_has_nothing_to_say(
    folder: Path, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = iter(
        [(json.dumps(ANSWER, indent=1), False), ("No.", False), (json.dumps(ANSWER)[:99], True)]
    )
    monkeypatch.setattr(
        describer.Describer, "describe", lambda _, pictures: [next(answers) for _ in pictures]
    )
    line = ["caption", str(folder), "--model", str(model), "--json-for", "ideogram4"]
    assert run_cli([*line, "--trigger", "zibbo", "--json"]) == 0
    rows = [json.loads(row) for row in capsys.readouterr().out.splitlines()]
    problems = {row["file"]: row for row in rows if row["event"] == "problem"}
    assert "has no JSON object" in problems["b.png"]["what"]
    assert "is cut and has JSON that breaks" in problems["c.png"]["what"]
    assert "--max-tokens" in problems["c.png"]["fix"]
    assert [file.name for file in folder.glob("*.txt")] == ["a.txt"]
    assert json.loads((folder / "a.txt").read_text())["high_level_description"].startswith("zibbo")
    (folder / "b.png").unlink()
    (folder / "c.png").unlink()
    assert run_cli(["check", str(folder), "--base", str(base_of("ideogram4")), "--json"]) == 0
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert not [each for each in findings if "json" in each["kind"]]


def test_a_model_that_never_answers_in_the_form_ends_with_a_reason(
    folder: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the model's own noise; nothing is written."""
    line = ["caption", str(folder), "--model", str(model), "--json-for", "ideogram4"]
    assert run_cli([*line, "--max-tokens", "3"]) == 3
    assert "no image could be captioned (3 tried)" in capsys.readouterr().err
    assert not [*folder.glob("*.txt")]


def test_the_request_is_the_family_s_and_what_does_not_fit_is_refused(
    folder: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = captioners.CaptionRequest(
        model=str(model), json_for="ideogram4", prompt="The bike is called Kez.", device="cpu"
    )
    loaded = describer.load_describer(model, request)
    assert loaded.text is not None and loaded.max_tokens == MAX_TOKENS
    assert loaded.text.index(FORM.request) < loaded.text.index("The bike is called Kez.")
    tagger = tiny_tagger(tmp_path / "tagger", tags=[("blue", "0"), ("green", "0"), ("red", "0")])
    blip = tiny_captioner("blip", tmp_path / "blip")
    for words, said in (
        (["--json-for", "ideogram"], "Did you mean 'ideogram4'?"),
        (["--json-for", "flux"], "not a family that is trained with captions in JSON"),
        (["--json-for", "ideogram4", "--prefix", "a"], "outside of the JSON object"),
        (["--json-for", "ideogram4", "--model", str(tagger)], "which writes tags"),
        (["--json-for", "ideogram4", "--model", str(blip)], "cannot be asked for JSON"),
    ):
        line = ["caption", str(folder), *([] if "--model" in words else ["--model", str(model)])]
        assert run_cli([*line, *words]) == 2, words
        assert said in capsys.readouterr().err
    having = [name for name in families.NAMES if families.family(name).text.json_captions]
    assert having == ["ideogram4"], "each has a form that this file tests"

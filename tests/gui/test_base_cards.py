"""The cards of base models: one picture, one verdict, and the models that are on this machine already."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from lora_trainer.gui import bases, command_lines, drafts
from lora_trainer.gui.plan_view import span
from lora_trainer.gui.server.language import ENGLISH
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.train import base_cards
from lora_trainer.gui.train.emblem import emblem
from lora_trainer.gui.workplace import Workplace

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base.tables import family_names, family_table
from tests.fakes.run_folder import fake_run
from tests.fakes.runs import write_dataset

SAID = words(ENGLISH)
SUBJECTS = {"people", "anime", "photos", "text"}


def test_each_release_on_a_card_says_what_it_is_for_and_who_may_use_it() -> None:
    for name in families.NAMES:
        shown = family_table(name)["releases"]
        for row, release in zip(shown, families.family(name).published, strict=True):
            subjects = row.get("subjects", [])
            assert set(subjects) <= SUBJECTS and bool(subjects) == ("good_for" in row), name
            if release.licence and "non-commercial" in release.licence.allows:
                assert release.licence.companies == "no", release.licence.name


def test_a_card_has_the_best_sample_of_the_own_run_and_else_an_emblem(
    work: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run(work.runs / "mine")
    run.write()
    record = json.loads((work.runs / "mine/run.json").read_text())
    record["base"]["source"] = bases.RECOMMENDED
    (work.runs / "mine/run.json").write_text(json.dumps(record))
    releases = sorted(bases.releases(), key=lambda row: row["offered"])
    assert next(row for row in releases if row["edits"])["source"] == bases.RECOMMENDED_FOR_PAIRS
    cards = {card["source"]: card for card in base_cards.cards(work, releases, SAID)}
    offered = {
        shown["ids"][0]
        for name in family_names()
        for shown in family_table(name)["releases"]
        if "offered" in shown
    }
    assert offered <= set(cards), "also one that is computed as another is"
    card = cards[bases.RECOMMENDED]
    assert card["own"] and card["picture"].startswith("/media/run/mine/samples/step-00000300/")
    assert card["licence_word"] == "Free for companies"
    assert card["download"] == "offline: 12.9 GiB missing"  # tests are offline
    monkeypatch.delenv("HF_HUB_OFFLINE")
    (again,) = (
        each
        for each in base_cards.cards(work, bases.releases(), SAID)
        if each["source"] == bases.RECOMMENDED
    )
    assert again["download"] == "12.9 GiB to download"
    others = [each for each in cards.values() if each is not card]
    assert all(each["picture"].startswith("/train/emblem.svg?family=") for each in others)
    (work.runs / "mine/mine-best.safetensors").write_bytes(b"best")
    (work.runs / "mine/best.json").write_text('{"step": 100}')
    assert "/step-00000100/" in base_cards.own_samples(work)[bases.RECOMMENDED]
    (work.runs / "mine/run.json").write_text("{")
    assert base_cards.own_samples(work) == {}


@pytest.mark.parametrize("subject", [*sorted(SUBJECTS), "", "<script>"])
def test_an_emblem_is_the_same_drawing_each_time_and_holds_nothing_that_was_asked(
    subject: str,
) -> None:
    drawing = emblem("<sdxl>", subject)
    assert drawing == emblem("<sdxl>", subject) != emblem("flux", subject)
    assert ElementTree.fromstring(drawing).tag.endswith("svg") and "script" not in drawing


def test_a_verdict_is_a_light_a_word_and_a_time_and_says_what_is_small(
    work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "set", images=2)
    plan: dict[str, Any] = {
        "base": "owner/name",
        "memory": {"items": [], "peak_bytes": 1, "limit_bytes": 2, "fits": True, "phase": "x"},
        "time": {"run_s": [3500, 4100], "steps": 5, "epochs": 1, "note": ""},
        "images": {"all": 2, "low-resolution": 2},
    }

    def verdict(**changes: Any) -> Any:
        answer = command_lines.Answer(values={**plan, **changes})
        plans = command_lines.Plans(work, ask=lambda _: answer)
        return base_cards.verdict(
            plans, drafts.Draft(id="0" * 12, dataset=str(tmp_path / "set")), SAID
        )

    good = verdict()
    assert (good["fits"], good["said"], good["time"]) == ("good", "Fits", "about 58 to 68 min")
    assert good["images"] == ["2 of 2 images are small"]
    one = verdict(images={"all": 2, "blurred": 1})
    assert one["images"] == ["1 of 2 images look blurred in it"]
    slow = verdict(time={**plan["time"], "run_s": [3e5, 9e5]})
    assert (slow["fits"], slow["said"]) == ("slow", "Too slow")
    assert slow["time"] == "about a week"
    # The word is about the time beside it, which is from now on.
    busy = verdict(time={**plan["time"], "run_s": [3e4, 6e4], "beside_others": 20.0})
    assert (busy["time"], busy["said"]) == ("about a week", "Too slow")
    assert verdict(memory={**plan["memory"], "fits": False})["fits"] == "bad"
    assert verdict(base="embedded")["said"] == "A try-out"


@pytest.mark.parametrize(
    ("hours", "english", "german"),
    [
        ((2.9, 11.5), "about 3 to 12 h", "etwa 3 bis 12 h"),
        ((0.7, 1.9), "about 42 min to 1.9 h", "etwa 42 min bis 1,9 h"),
        ((1.2, 4.8), "about 1.2 to 4.8 h", "etwa 1,2 bis 4,8 h"),
        ((0.02, 0.04), "about 1 to 2 min", "etwa 1 bis 2 min"),
        ((38.2, 6 * 24), "about 2 to 6 days", "etwa 2 bis 6 Tage"),
        ((60, 60), "about 2 days", "etwa 2 Tage"),
        ((4 * 24, 15 * 24), "about a week", "etwa eine Woche"),
        ((14 * 24, 55 * 24), "several weeks", "mehrere Wochen"),
        ((100 * 24, 400 * 24), "several months", "mehrere Monate"),
    ],
)
def test_a_time_to_choose_by_has_one_unit_and_is_the_coarser_the_longer(
    hours: tuple[float, float], english: str, german: str
) -> None:
    low_s, high_s = (3600.0 * each for each in hours)
    assert span((low_s, high_s), SAID) == english
    assert span((low_s, high_s), words("de")) == german


def test_a_try_out_leads_to_the_first_base_that_fits_and_to_none_where_none_does(
    work: Workplace, tmp_path: Path
) -> None:
    write_dataset(tmp_path / "set", images=2)
    # Steps and size were chosen for the try-out: no LoRA is learned in so few on another base.
    of_try_out = {"train.steps": 24, "data.resolution": 64, "adapter.rank": 8}
    draft = drafts.Draft(id="0" * 12, dataset=str(tmp_path / "set"), settings=of_try_out)
    releases = [
        {"source": source, "offered": place, "edits": source == "of/d"}
        for place, source in enumerate(("of/a", "of/b", "of/c", "of/d"))
    ]
    too_large, too_slow = {"of/a"}, set[str]()

    def ask(words: command_lines.Words) -> command_lines.Answer:
        if words == command_lines.BASES:
            return command_lines.Answer(values={"releases": releases})
        assert "--set=adapter.rank=8" in words and not any("train.steps" in word for word in words)
        (base,) = (word.removeprefix("--base=") for word in words if word.startswith("--base="))
        hours = 100.0 if base in too_slow else 1.0
        memory = {"memory": {"fits": base not in too_large}}
        return command_lines.Answer(values={**memory, "time": {"run_s": [60, hours * 3600]}})

    assert base_cards.that_fits(command_lines.Plans(work, ask=ask), draft, SAID) == "of/b"
    too_slow.add("of/b")
    plans = command_lines.Plans(work, ask=ask)
    assert base_cards.that_fits(plans, draft, SAID) == "of/c", "nobody is urged to wait for days"
    too_large |= {"of/b", "of/c"}
    plans = command_lines.Plans(work, ask=ask)
    assert base_cards.that_fits(plans, draft, SAID) == "", "of/d is seldom used"
    of_pairs = replace(draft, kind=drafts.PAIRS)
    assert base_cards.that_fits(plans, of_pairs, SAID) == "of/d", "but it is the one that edits"


def test_found_models_are_those_that_may_be_named_and_a_folder_is_remembered(
    work: Workplace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = tmp_path / "inside"
    inside.mkdir()
    fenced = Workplace(runs=work.runs, roots=(inside,))
    plain = {
        "program": "",
        "size_bytes": 5,
        "kind": "SDXL",
        "family": "sdxl",
        "like": "",
        "why": "torn",
    }
    rows = [
        {**plain, "name": "mine", "source": str(inside / "mine.safetensors"), "verdict": "base"},
        {**plain, "name": "base", "source": "owner/base", "verdict": "base"},
        {**plain, "name": "secret", "source": "/etc/secret.safetensors", "verdict": "base"},
        {**plain, "name": "half", "source": str(inside / "half.safetensors"), "verdict": "broken"},
        {**plain, "name": "lora", "source": str(inside / "lora.safetensors"), "verdict": "other"},
    ]
    asked: list[command_lines.Words] = []

    def ask(words: command_lines.Words) -> command_lines.Answer:
        asked.append(words)
        return command_lines.Answer(values={"models": rows})

    monkeypatch.setattr(command_lines, "ask", ask)
    found = base_cards.found_models(fenced, SAID, named=str(inside))
    assert [row["name"] for row in found["models"]] == ["mine", "base"]
    assert found["broken"] == [{"name": "half", "why": "torn"}]
    assert found["others"].startswith("1 other file")
    base_cards.found_models(fenced, SAID)
    assert asked == 2 * [("models", str(inside), "--json")]
    with pytest.raises(InputError, match="outside of the folders"):
        base_cards.found_models(fenced, SAID, named="/etc")

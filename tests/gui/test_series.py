"""Several trainings from one press: their values, their plan together, the queue, and the page of all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import command_lines, drafts, run_state, variants
from lora_trainer.gui.library.view import page_url as library_url
from lora_trainer.gui.lora_files import result_of
from lora_trainer.gui.own_load import Beside
from lora_trainer.gui.run.head import take
from lora_trainer.gui.series import routes, view
from lora_trainer.gui.server.translation import words
from lora_trainer.gui.train import fields
from lora_trainer.gui.train import view as train
from lora_trainer.gui.workplace import Workplace
from starlette.routing import Router
from starlette.testclient import TestClient

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import json_bytes
from lora_trainer.queue import commands, rules, worker
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.status import read_status
from tests.fakes.live_runs import write_status
from tests.fakes.run_folder import PROMPTS, fake_run
from tests.fakes.runs import write_dataset

SAID = words("en")
RANK, RATE = "adapter.rank", "optimizer.learning_rate"


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workplace:
    """A workplace whose queue starts nothing."""
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    (tmp_path / "runs").mkdir()
    return Workplace(runs=tmp_path / "runs")


@pytest.fixture
def draft(work: Workplace, tmp_path: Path) -> drafts.Draft:
    """A draft of two ranks and three rates, one of each being its own."""
    write_dataset(tmp_path / "cats", images=3)
    draft = drafts.new(work, dataset=str(tmp_path / "cats"))
    draft = fields.changed(draft, key=RATE, text="0.001")
    for key, text in ((RANK, "8"), (RATE, "1e-4, 0.0002 0.0001")):
        draft = fields.changed(draft, key=fields.ALSO + key, text=text)
    drafts.save(work, draft)
    return draft


def planned(
    *, rank: int = 16, beside_others: float = 1.0, answer: Callable[[str], str] = lambda _: ""
) -> Any:
    """Return what answers for `lora-train plan`; `answer` is an error for a command line, or nothing."""

    def ask(asked: tuple[str, ...]) -> command_lines.Answer:
        line = " ".join(asked)
        if error := answer(line):
            return command_lines.Answer(values=None, error=error)
        time = {"steps": 60, "epochs": 2.0, "run_s": [600, 1200], "note": "", "source": ""}
        time["beside_others"] = beside_others
        settings = {
            key: {"value": value, "origin": "planner", "reason": ""}
            for key, value in {
                RANK: rank, RATE: 0.001, "data.resolution": 64, "train.batch_size": 8,
                "train.seed": 42, "optimizer.name": "adamw",
            }.items()
        }  # fmt: skip
        memory = {"items": [], "peak_bytes": 2**30, "limit_bytes": 2**31, "fits": True}
        values = {
            "base": "owner/name",
            "time": time,
            "settings": settings,
            "memory": memory,
            "disk": {"cache": 2**30, "states": 2**29, "exports": 2**29},
            "sampling": {"prompts": ["a cat", "a cat, at night"]},
        }
        return command_lines.Answer(values=values)

    return ask


def test_all_combinations_are_trained_the_drafts_own_first(draft: drafts.Draft) -> None:
    assert draft.also == {RANK: [8], RATE: [0.0001, 0.0002]}, "a value that is typed twice is one"
    found = variants.variants(draft)
    assert [dict(each.values) for each in found] == [
        {RATE: 0.001},
        {RATE: 0.0001},
        {RATE: 0.0002},
        {RANK: 8, RATE: 0.001},
        {RANK: 8, RATE: 0.0001},
        {RANK: 8, RATE: 0.0002},
    ]
    assert found[4].draft.settings == {RANK: 8, RATE: 0.0001}
    assert not found[4].draft.also
    assert fields.texts(draft)["also:adapter.rank"] == "8"
    with pytest.raises(RequestError, match="18 trainings"):
        fields.changed(draft, key="also:train.seed", text="1 2")
    with pytest.raises(RequestError):
        fields.changed(draft, key="also:adapter.rank", text="8, many")
    cleared = fields.changed(draft, key="also:adapter.rank", text="")
    assert list(cleared.also) == [RATE]
    assert variants.variants(replace(draft, also={}))[0].draft == replace(draft, also={})


def test_the_time_and_the_disk_of_all_of_them_stand_beside_the_button(
    work: Workplace, draft: drafts.Draft
) -> None:
    shown = train.plan_part(work, draft, SAID, command_lines.Plans(work, ask=planned()))
    assert shown.button == "Queue 6 trainings" and shown.works
    # Six times 10 to 20 minutes; the cache is made once, six times 1 GiB of states and exports.
    assert "6 trainings, one after another: about 1.0 to 2.0 h together, 7.0 GiB" in shown.beside
    # Each of them says how long it takes beside other programs, so all together are not shorter.
    busy = replace(work, beside=Beside())  # nobody has looked at other programs yet
    slowed = command_lines.Plans(busy, ask=planned(beside_others=3.0))
    shown = train.plan_part(busy, draft, SAID, slowed)
    assert "one after another: about 3.0 to 6.0 h together" in shown.beside
    assert "Each of them, beside the programs that run now:" in shown.beside
    shown = train.plan_part(work, draft, SAID, command_lines.Plans(work, ask=planned(rank=8)))
    assert not shown.works and "8 is what it has already" in shown.beside
    refuses = planned(answer=lambda line: "error: no room. Fix: x." if "rank=8" in line else "")
    shown = train.plan_part(work, draft, SAID, command_lines.Plans(work, ask=refuses))
    assert not shown.works and "One of the trainings cannot be: No room" in shown.beside


def test_one_press_queues_all_of_them_once_under_names_that_no_run_has(
    work: Workplace, draft: drafts.Draft
) -> None:
    (work.runs / "cats-learning_rate0.001").mkdir()
    started = train.start(work, draft.id)
    assert train.start(work, draft.id) == started, "a double click"
    queued = commands.items(work.runs)
    series = variants.read(work, started.series)
    assert [member.item for member in series.members] == [item.id for item in queued]
    assert [member.name for member in series.members][:2] == [
        "cats-learning_rate0.001-002",
        "cats-learning_rate0.0001",
    ]
    for item, member in zip(queued, series.members, strict=True):
        assert f"--name={member.name}" in item.argv
    assert [each.id for each in variants.find(work)] == [series.id]
    with pytest.raises(RequestError, match="does not exist"):
        variants.read(work, "../" + series.id)


def test_of_what_cannot_be_queued_nothing_is(
    work: Workplace, draft: drafts.Draft, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = commands.add

    def full(runs: Path, argv: Any, *, label: str) -> commands.Item:
        if len(commands.items(runs)) == 3:
            raise RequestError("no more", fix="stop")
        return add(runs, argv, label=label)

    monkeypatch.setattr(commands, "add", full)
    with pytest.raises(RequestError, match="no more"):
        train.start(work, draft.id)
    assert commands.items(work.runs) == ()
    assert not drafts.read(work, draft.id).started_as


@pytest.fixture
def page(work: Workplace) -> TestClient:
    """The page's routes, without a browser."""
    return TestClient(Router(routes=routes.routes(work)))


def trained(work: Workplace, name: str, *, gain: float, state: str = "finished") -> None:
    """Write a run of 30 steps whose last validation has so much gain, the others less."""
    run = fake_run(work.runs / name, steps=30, sample_px=16)
    base_loss = next(row["loss"] for row in run.events if row["event"] == "validation")
    for row in run.events:
        if row["event"] == "validation" and row["step"]:
            share = 1 - gain * row["step"] / 30
            row["by_timestep"] = [[at, share * 40 / at] for at, _ in row["by_timestep"]]
            # The ratio of the means is not the mean of the ratios.
            row["loss"] = (2 * share - 1) * base_loss
    run.write()
    write_status(run.folder, state=state, step=30, steps=30, exit_code=0)


def test_the_page_says_which_did_best_and_shows_their_pictures_by_prompt(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    draft = fields.changed(draft, key=fields.ALSO + RATE, text="")
    drafts.save(work, draft)
    series = variants.read(work, train.start(work, draft.id).series)
    names = [member.name for member in series.members]
    address = view.page_url(series.id)
    waits = page.get(address).text
    assert (
        re.findall(r"number (\d) in the queue", waits) == ["1", "2"]
        and "So far the best" not in waits
    )
    items = [item.id for item in commands.in_order(commands.items(work.runs))]
    assert f'data-remove="{items[0]}"' in waits and f'data-remove="{" ".join(items)}"' in waits
    press = {"id": series.id, "study": "", "stamp": ""}
    taken_off = page.post("/series/look", json={**press, "remove": items}).json()
    assert "in the queue" not in taken_off["html"] and not commands.items(work.runs)
    assert "None of its trainings is left" in taken_off["html"]
    one_left = page.post("/series/look", json={**press, "back": items[1:]}).json()["html"]
    assert one_left.count("<h2>") == 1 and "number 1 in the queue" in one_left
    page.post("/series/look", json={**press, "remove": items[1:]})
    twice = page.post("/series/look", json={**press, "remove": items[:1]}).json()
    assert "has no item" in twice["error"]
    back = page.post("/series/look", json={**press, "back": items}).json()
    assert re.findall(r"number (\d) in the queue", back["html"]) == ["1", "2"]
    assert "the first one starts by itself in a moment" in waits
    rules.pause(work.runs, stop=False)
    assert "they start as soon as the queue goes on" in page.get(address).text
    rules.go_on(work.runs)
    trained(work, names[0], gain=0.2)
    alone = page.get(address).text
    assert "40 % better than the base" in alone and "So far the best" not in alone
    trained(work, names[1], gain=-0.1)
    for item in commands.items(work.runs):
        commands.remove(work.runs, item.id)  # as somebody clears the queue
    shown = page.get(address).text
    assert "The best on held-out images: Rank 16." in shown
    # What is said of a training is what its own page and the list of LoRAs say of it.
    for name, said in (
        (names[0], "40 % better than the base"),
        (names[1], "20 % worse than the base"),
    ):
        assert said in shown
        folder = work.runs / name
        taken = take(run_state.look(folder, read_status(folder), now_s=0.0), read_history(folder))
        assert taken is not None and said in taken.learned
        entry = result_of(folder)
        assert entry is not None and entry.validation == said
    assert shown.count('<th scope="row" translate="no">') == len(PROMPTS)
    assert f"/media/run/{names[0]}/samples/step-00000030/00.png" in shown
    assert f"/media/run/{names[1]}/samples/step-00000030/00.png" in shown, "of the step to take"
    assert f"/train?again={names[0]}" in shown
    # What the base draws of each prompt stands before what the trainings do.
    base = re.findall(
        r'/media/run/[^"]*/samples/step-00000000/\d\d.png" alt="without a LoRA', shown
    )
    assert len(base) == len(PROMPTS)
    for name in names:
        file = result_of(work.runs / name)
        assert file is not None
        assert f'href="/media/run/{name}/{file.file.path.name}" download' in shown
        assert f'href="{library_url(file.file)}"' in shown
    assert "<script>alert" not in shown
    look = {"id": series.id, "study": "", "stamp": ""}
    answer = page.post("/series/look", json=look).json()
    assert answer["goes"] is False
    again = page.post("/series/look", json={**look, "stamp": answer["stamp"]}).json()
    assert again == {"goes": False}, "of what has not changed nothing is sent"
    shelf = page.get("/series").text
    assert draft.dataset and series.label in shelf
    assert "2 trainings, all have ended" in shelf
    assert '<span class="chip best">16</span> <span class="chip">8</span>' in shelf
    assert "the best: Rank 16" in shelf and "40 % better than the base" in shelf
    for name in names:
        assert f"/media/run/{name}/samples/step-00000030/00.png" in shelf, "of the step to take"
    write_status(work.runs / names[1], left_s=60.0)
    assert "so far the best: Rank 16" in page.get("/series").text


def test_those_that_did_practically_as_well_are_not_called_worse(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    draft = fields.changed(draft, key=fields.ALSO + RATE, text="")
    drafts.save(work, draft)
    series = variants.read(work, train.start(work, draft.id).series)
    for member, gain in zip(series.members, (0.2, 0.201), strict=True):
        trained(work, member.name, gain=gain)
    for item in commands.items(work.runs):
        commands.remove(work.runs, item.id)
    shown = page.get(view.page_url(series.id)).text
    assert "Practically equal on held-out images: Rank 16, Rank 8. Choose by eye." in shown
    assert "The best on held-out images" not in shown and "<b>the best</b>" not in shown
    assert "practically equal: Rank 16, Rank 8" in page.get("/series").text


def test_trainings_that_wait_say_when_the_first_one_starts(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    address = view.page_url(train.start(work, draft.id).series)
    before = commands.add(work.runs, ("cats",), label="before")
    (work.runs / "before").mkdir()
    write_status(work.runs / "before", left_s=3600.0)
    commands.write(work.runs, replace(before, state="running", run="before"))
    assert re.search(r"starts when before ends, at about [\d:-]+", page.get(address).text)
    write_status(work.runs / "before", left_s=None)
    assert "the first one starts when before ends." in page.get(address).text
    first = next(item for item in commands.items(work.runs) if item.label != "before")
    commands.write(work.runs, replace(first, state="running"))
    shown = page.get(address).text
    assert "None has begun yet" not in shown and "starting</p>" in shown, "as the header says"
    assert f'translate="no">{first.label}</p>' in shown, "under the name that the header has"
    fake_run(work.runs / first.label, steps=30).write()
    write_status(work.runs / first.label, left_s=180.0)
    commands.write(work.runs, replace(first, state="running", run=first.label))
    shown = page.get(address).text
    assert 'role="progressbar"' in shown and "about 3 min left" in shown
    write_status(work.runs / first.label, left_s=0.0)
    assert "running, finishing</p>" in page.get(address).text


def test_what_the_plan_chose_names_a_training_before_it_begins(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    plans = command_lines.Plans(work, ask=planned(rank=16, beside_others=3.0))
    train.plan_part(work, draft, SAID, plans)
    address = view.page_url(train.start(work, draft.id, plans=plans).series)
    kept = drafts.read(work, draft.id).planned
    assert kept == {"base": "owner/name", "steps": 60, "range_s": [1800, 3600]}, "as the bar says"
    for shown in (page.get(address).text, page.get("/series").text):
        assert "as planned" not in shown
    assert "Rank 16, Learning rate 0.001" in page.get(address).text
    assert "Rank 8, Learning rate 0.001" in page.get(address).text


def test_all_draw_the_prompts_that_were_shown_whatever_is_done_to_the_captions_meanwhile(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    plans = command_lines.Plans(work, ask=planned())
    train.plan_part(work, draft, SAID, plans)
    series = variants.read(work, train.start(work, draft.id, plans=plans).series)
    queued = commands.items(work.runs)
    assert len(queued) > 2
    for item in queued:
        assert '--set=sampling.prompts=["a cat", "a cat, at night"]' in item.argv
    assert fields.PROMPTS not in drafts.read(work, draft.id).settings, "nobody typed them"
    names = [member.name for member in series.members]
    for name in names[:2]:
        trained(work, name, gain=0.2)
    for item in queued:
        commands.remove(work.runs, item.id)
    address = view.page_url(series.id)
    assert "were changed between these trainings" not in page.get(address).text
    record = work.runs / names[1] / "run.json"
    values = json.loads(record.read_text())
    values["dataset"]["fingerprint"] = "another"
    record.write_text(json.dumps(values))
    assert "were changed between these trainings" in page.get(address).text


def test_trainings_stand_in_the_order_of_their_values(
    work: Workplace, draft: drafts.Draft, page: TestClient
) -> None:
    draft = fields.changed(draft, key=fields.ALSO + RATE, text="")
    drafts.save(work, fields.changed(draft, key=fields.ALSO + "adapter.rank", text="32 4, 8"))
    plans = command_lines.Plans(work, ask=planned(rank=16))
    train.plan_part(work, drafts.read(work, draft.id), SAID, plans)
    shown = page.get(view.page_url(train.start(work, draft.id, plans=plans).series)).text
    headings = re.findall(r"<h2>([^<]+)</h2>", shown)
    assert headings == ["Rank 4", "Rank 8", "Rank 16", "Rank 32"]
    assert re.findall(r"number (\d) in the queue", shown) == ["1", "2", "3", "4"], (
        "and are trained in it"
    )


def test_a_series_of_an_earlier_version_is_read(work: Workplace, draft: drafts.Draft) -> None:
    series = train.start(work, draft.id).series
    file = work.own / "series" / f"{series}.json"
    record = json.loads(file.read_text())
    del record["planned"]
    file.write_text(json.dumps(record))
    assert variants.read(work, series).planned == {}


def test_the_trials_of_a_study_have_the_same_page(work: Workplace, page: TestClient) -> None:
    span = {"name": RATE, "low": 1e-5, "high": 1e-3}
    record: dict[str, Any] = {
        "words": [], "settings": {}, "folder": "/", "name": "cats-tune", "seed": 1, "sampler": "tpe",
        "space": [span], "planned": {}, "fixed": {}, "steps": 30, "run_s": 60.0,
    }  # fmt: skip
    study = work.runs / "cats-tune"
    study.mkdir()
    (study / "study.json").write_bytes(json_bytes(record))
    for number, gain in ((0, 0.1), (10, 0.3), (2, 0.2)):
        trained(work, f"cats-tune-trial-{number}", gain=gain)
        file = work.runs / f"cats-tune-trial-{number}" / "run.json"
        run = json.loads(file.read_text())
        run["settings"][RATE] = gain / 1000
        file.write_text(json.dumps(run))
    trained(work, "other-cats-tune-trial-1", gain=0.9)
    shown = page.get(view.study_url("cats-tune")).text
    assert "The best on held-out images: Learning rate 0.0003." in shown
    assert "gain, as tune compares: 30.00%" in shown
    assert shown.index("trial-0") < shown.index("trial-2") < shown.index("trial-10")
    assert "other-cats-tune" not in shown
    assert "cats-tune" in page.get("/series").text
    assert "no study is named" in page.get(view.study_url("../x")).text

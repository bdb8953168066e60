"""The report: what it says of every kind of run; nothing in a run folder can take it over."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting.history import read_history
from lora_trainer.reporting.report import write_report
from tests.fakes.run_folder import HOSTILE_CAPTION, PROMPTS, FakeRun, fake_run
from tests.fakes.runs import contents

VOID = {"meta", "img"}


class Page(HTMLParser):
    """A parsed page: tags with attributes in order, visible text by tag path, unclosed tags."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(source)
        self.close()
        self.text = " ".join(self.texts)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style" and data.strip():
            self.texts.append(data)

    def all(self, name: str, **wanted: str) -> list[dict[str, str | None]]:
        found = [attributes for tag, attributes in self.tags if tag == name]
        return [one for one in found if wanted.items() <= one.items()]


def page_of(run: FakeRun) -> Page:
    return Page(write_report(run.write()).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Page:
    return page_of(fake_run(tmp_path_factory.mktemp("runs") / "zorble"))


def test_needs_nothing_but_itself(finished: Page) -> None:
    assert not finished.open
    assert not {"script", "link", "iframe", "object", "base", "form", "a"} & {
        t for t, _ in finished.tags
    }
    for _, attributes in finished.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "href"]
        assert (attributes.get("src") or "data:").startswith("data:")
        assert "url(" not in (attributes.get("style") or "")
    (policy,) = finished.all("meta", **{"http-equiv": "Content-Security-Policy"})
    assert policy["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def test_a_finished_run_is_told_in_order(finished: Page) -> None:
    order = ["58 % below", "Training loss", "Samples", "Curves", "Problems", "Dataset", "Settings"]
    places = [finished.text.index(words) for words in (*order, "Timings", "Environment")]
    assert places == sorted(places)
    figures = finished.text[: finished.text.index("Samples")]
    for words in ("zorble.safetensors", "3.1 MiB", "batch 8, 2 held out", "base 0.1337", "0.0555"):
        assert words in figures
    assert "started 2026-11-18 11:06 UTC" in figures
    for words in ("overall", "0.81", "near duplicates", "64 \u00d7 64", "keep one of the two"):
        assert words in finished.texts
    assert "held out for validation: zorble_04.png, zorble_11.png" in finished.text
    assert "7.8 GiB" in finished.texts  # ram_total_bytes
    assert "lora-train datasets/zorble --steps 300 --set 'data.trigger=zorble thing'" in (
        finished.text
    )
    # Settings that differ come first, the rest is folded.
    shown, folded = finished.text.split("settings at their default", 1)
    for key in ("train.batch_size", "adapter.alpha", "sampling.prompts"):
        assert key in shown.split() and key not in folded.split()
    for key in ("optimizer.beta2", "output.keep_last"):
        assert key in folded.split() and key not in shown.split()
    assert "the whole batch fits: 1.2 GiB of 5.9 GiB free" in shown and "64 px" in shown

    # Equal problems are one row, the worst first, and texts are shown as texts.
    assert "gradient norm 41.2 was clipped to 1 (\u00d73)" in finished.texts
    assert finished.text.index("export it again") < finished.text.index("lower optimizer")
    findings = ("93 tokens", "looks like zorble_03", "no caption file")  # of one severity by file
    places = [finished.text.index(words) for words in findings]
    assert places == sorted(places)
    assert finished.texts.count(HOSTILE_CAPTION) == 1
    assert "broken/owl <b>17</b>.jpg" in finished.texts
    assert "<b onmouseover=alert(2)>.png" in finished.texts


# Fields whose texts come from outside, and names from outside that stand elsewhere.
OUTSIDE = (
    "what|fix|file|export|reason|key|old|base|device|prompt|advice|name|python|layer|data.trigger"
)
NAMES = ("zorble_04.png", "64x64", "sharpness", "datasets/zorble")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose texts from outside are all the word PLACE."""
    folder = fake_run(tmp_path_factory.mktemp("runs") / "zorble", steps=3).write()
    for file in (*folder.glob("*.json"), *folder.glob("*.jsonl")):
        text = file.read_text(encoding="utf-8")
        text = re.sub(rf'("(?:{OUTSIDE})": )"(?!samples/)(?:[^"\\]|\\.)*"', r'\1"PLACE"', text)
        text = re.sub(r'("seed": )(\d+)', r'\1"PLACE\2"', text)
        file.write_text(re.sub("|".join(NAMES), "PLACE", text), encoding="utf-8")
    return folder


def tags_with(words: str, template: Path, folder: Path) -> list[str]:
    shutil.copytree(template, folder, dirs_exist_ok=True)
    quoted = json.dumps(words)[1:-1]
    for name in ("run.json", "events.jsonl", "problems.jsonl"):
        file = folder / name
        file.write_text(file.read_text(encoding="utf-8").replace("PLACE", quoted), encoding="utf-8")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert not page.open
    return [name for name, _ in page.tags]


@pytest.fixture(scope="module")
def plain_tags(template: Path, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return tags_with("b", template, tmp_path_factory.mktemp("plain"))


@settings(max_examples=25)
@given(hostile=st.text(min_size=1, max_size=40))
@example(hostile='"><i>')
@example(hostile="{{ 7 * 7 }}{% raw %}")
@example(hostile="\ud800<s>")
def test_no_text_changes_the_structure(
    hostile: str, template: Path, plain_tags: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    assert tags_with(f"a{hostile}", template, tmp_path_factory.mktemp("x")) == plain_tags


def test_the_same_folder_gives_the_same_bytes_and_no_other_file(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "one", steps=12).write()
    shutil.copytree(folder, tmp_path / "two")
    before = contents(folder)
    written = [write_report(each).read_bytes() for each in (folder, folder, tmp_path / "two")]
    assert len(set(written)) == 1
    after = contents(folder)
    assert after.pop("report.html") and after == before


@pytest.mark.parametrize(
    ("reason", "exit_code", "kind", "sentence"),
    [
        ("", 0, "finished", "Finished: {below}."),
        ("stopped by Ctrl-C. Fix: mend it.", 130, "stopped",
         "Stopped at step 20 of 20: stopped by Ctrl-C; {below}."),
        ("stopped after step 20 of 20; the state is saved. Fix: mend it.", 143, "stopped",
         "Stopped after step 20 of 20; the state is saved; {below}."),
        ("the disk is full. Fix: mend it.", 4, "failed",
         "Failed at step 20 of 20: the disk is full; {below}."),
        ("", None, "unfinished", "Not finished: the record ends at step 20 of 20; {below}."),
    ],
)  # fmt: skip
def test_verdict(
    tmp_path: Path, reason: str, exit_code: int | None, kind: str, sentence: str
) -> None:
    run = fake_run(tmp_path / "run", steps=20)
    if exit_code != 0:
        del run.events[-1]
    if reason:
        run.emit("stopped", step=run.steps, reason=reason, exit_code=exit_code)
    page = page_of(run)
    assert sentence.format(below="the validation loss is 58 % below the base's") in page.texts
    assert page.all("p", **{"class": f"verdict {kind}"})
    assert ("What to do: mend it." in page.texts) == bool(reason)


def test_what_speaks_against_a_lora_stands_beside_its_loss(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=20)
    run.events[-1]["doubt"] = "training went back <once>"
    page = page_of(run)
    below = "the validation loss is 58 % below the base's"
    assert f"Finished: {below}; but training went back <once>." in page.texts


def test_validations_are_told_of_as_they_were(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "none", steps=12, validation=False)
    run.events = [event for event in run.events if event["event"] != "problem"]
    page = page_of(run)
    assert "nothing was validated" in page.text
    assert "%" not in page.text[: page.text.index("Samples")]
    assert "Nothing was skipped, clamped or retried." in page.texts
    run = fake_run(tmp_path / "run", steps=100)
    losses = [event for event in run.events if event["event"] == "validation"]
    losses[4]["loss"], losses[5]["loss"] = 0.04, 7.0
    page = page_of(run)
    lowest = "lowest 0.0400 at step 40, of which no file was kept"
    assert f"base 0.1337; {lowest}" in page.texts
    # A step whose file is there is the one to take, as on the page of the run.
    (run.folder / "zorble-step00000090.safetensors").touch()
    losses[9]["loss"] = 0.05
    saved = run.events[-2] | {
        "event": "saved",
        "step": 90,
        "export": "zorble-step00000090.safetensors",
    }
    run.events.insert(-1, saved)
    page = page_of(run)
    below = "the validation loss is 63 % below the base's at step 90, the best of the saved steps"
    assert f"Finished: {below}." in page.texts
    assert f"base 0.1337; best saved 0.0500 at step 90; {lowest}" in page.texts
    assert "step 90, the best of the saved steps" in page.text
    assert "Steps whose loss lies above" not in page.text
    assert {"6", "8"} <= set(page.texts), "the axis shows every validation"


def test_the_score_and_the_parts_that_are_missing(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=3).write()
    score = {"file": "z.safetensors", "score": 0.7, "weight_left_out": 0.3, "notes": ["<a note>"]}
    score |= {"parts": {"gain": 0.9}, "left_out": {"drift": "needs samples"}}
    (folder / "validation.json").write_text(json.dumps(score), encoding="utf-8")
    texts = Page(write_report(folder).read_text(encoding="utf-8")).texts
    assert "z.safetensors: 0.70 of 1 from its parts so far, without 30% of their weight" in texts
    assert {"gain", "0.90", "needs samples", "<a note>"} <= set(texts)
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    record["dataset"] |= {"images": float("inf"), "score": float("inf")}
    record["dataset"]["findings"] *= 2
    text = json.dumps(record).replace("Infinity", "1e999")
    (folder / "run.json").write_text(text, encoding="utf-8")
    page = Page(write_report(folder).read_text(encoding="utf-8"))
    assert "looks like zorble_03.png (distance 3 of 64) (\u00d72)" in page.texts
    assert "not measured" in page.texts and "an unknown number of images in" in page.text


def test_grid_has_a_row_per_prompt_and_a_column_per_step_base_first(
    finished: Page, tmp_path: Path
) -> None:
    images = finished.all("img")
    columns = ("base", "step 100", "step 200", "step 300")
    assert [image["alt"] for image in images] == [
        f"{column}: {prompt}" for prompt in PROMPTS for column in columns
    ]
    # Small images are shown as they are, large ones are reduced.
    first = images[0]
    run = fake_run(tmp_path / "run", steps=3)
    data = base64.b64decode(str(first["src"]).removeprefix("data:image/png;base64,"))
    assert data == (run.write() / "samples/step-00000000/00.png").read_bytes()
    image = page_of(fake_run(tmp_path / "large", steps=3, sample_px=768)).all("img")[0]
    data = base64.b64decode(str(image["src"]).removeprefix("data:image/jpeg;base64,"))
    assert Image.open(io.BytesIO(data)).size == (384, 384)
    assert image.get("class") is None


def test_columns_left_out_are_counted(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=12)
    first = next(event for event in run.events if event["event"] == "sample")
    run.events[-1:-1] = [{**first, "step": step} for step in range(13, 33)]
    page = page_of(run)
    assert "12 of 24 sampled steps are not shown; all images are in samples/." in page.texts
    columns = [str(image["alt"]).partition(":")[0] for image in page.all("img")]
    assert len(columns) == 12 * len(PROMPTS)
    assert (columns[0], columns[11]) == ("base", "step 32")
    assert columns[:12] == list(dict.fromkeys(columns))


def test_unusable_sample_files_are_cells_not_errors(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "secret.png")
    run = fake_run(tmp_path / "run", steps=3)
    whole = (run.write() / "samples/step-00000003/01.png").read_bytes()
    (run.folder / "torn.png").write_bytes(whole[:60])
    first = next(event for event in run.events if event["event"] == "sample")
    for image, file in zip(first["images"], ("../secret.png", "a\x00b", "torn.png"), strict=True):
        image["file"] = file
    lines = "".join(json.dumps(event) + "\n" for event in run.events)
    (run.folder / "events.jsonl").write_text(lines, encoding="utf-8")
    page = Page(write_report(run.folder).read_text(encoding="utf-8"))
    assert page.texts.count("unreadable") == 3
    assert len(page.all("img")) == 3 * len(PROMPTS)


def test_steps_trained_again_count_once_and_the_pause_is_no_time(tmp_path: Path) -> None:
    """Of a run killed after step 16, its last state at step 10, resumed to its end 1,000 s later."""
    run = fake_run(tmp_path / "run", steps=20)
    at = {event.get("step"): n for n, event in enumerate(run.events) if event["event"] == "step"}
    before = [{**event, "loss": 9.0} for event in run.events[: at[16] + 1]]
    rest = [
        {"event": "resumed", "step": 10, "exactness": "EXACT", "differences": []},
        {**run.events[0], "resumed_from": 10},  # in the order in which a trainer writes them
        *run.events[at[10] + 1 :],
    ]
    began_s = run.events[0]["time"]
    run.events = [*before, *({**row, "time": row.get("time", began_s) + 1000} for row in rest)]
    history = read_history(run.write())
    assert [row.step for row in history.steps] == list(range(1, 21))
    assert all((row.loss == 9.0) == (row.step <= 10) for row in history.steps)
    assert history.sessions == 2
    assert [row.step for row in history.validations] == list(range(0, 21, 2))
    assert 20 < history.seconds < 60
    assert len(history.samples) == len({image.file for image in history.samples})
    assert [saved.step for saved in history.saves] == [6, 12, 18]
    page = page_of(run)
    assert "in 2 sessions" in page.text and "resumed, EXACT" in page.text
    run.events = run.events[: len(before) + 2]  # the start of the session comes after the resume
    history = read_history(run.write())
    assert history.steps[-1].step == 10 and history.end is None
    assert max(row.step for row in history.validations) == 10


def test_times_are_those_of_the_events_and_torn_lines_are_counted(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", steps=4)
    for event in run.events:
        if event["event"] == "step":
            event.update(seconds=0.5, data_wait_s=0.1 if event["step"] == 2 else 0.0)
    run.emit("problem", what="the last and the worst", severity="error")
    texts = page_of(run).texts
    assert texts.index("error") < texts.index("warning")
    assert {"5.0 %", "0.50 s"} <= set(texts)  # share of waiting, median step
    whole_s = run.events[-1]["time"] - run.events[0]["time"]
    assert read_history(run.folder).seconds == pytest.approx(whole_s)
    with (run.folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"event": "step", "loss": 1}\n[1]\n{"event": "step", "step": 5, "lo')
    texts = Page(write_report(run.folder).read_text(encoding="utf-8")).texts
    assert any(words.startswith("3 lines of events.jsonl") for words in texts)


def test_empty_folder_still_gets_a_report_and_a_damaged_record_is_named(tmp_path: Path) -> None:
    page = Page(write_report(tmp_path).read_text(encoding="utf-8"))
    assert not page.open
    assert "Not finished: the record ends at step 0 of an unknown number." in page.texts
    assert "No settings were recorded." in page.texts
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(RequestError, match=r"run\.json"):
        write_report(tmp_path)

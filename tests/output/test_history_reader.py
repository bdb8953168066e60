"""A reader that is kept tells the same of a run folder as one that reads it all, whatever happens."""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.reporting.history import HistoryReader, read_history
from tests.fakes.run_folder import fake_run

STEPS = st.integers(min_value=0, max_value=6)
KINDS = (
    "step",
    "validation",
    "sample",
    "saved",
    "run_started",
    "change",
    "problem",
    "finished",
    "x",
)
ROWS = st.fixed_dictionaries(
    {"event": st.sampled_from(KINDS)},
    optional={
        "step": STEPS,
        "loss": st.sampled_from([0.1, 0.2, None]),
        "time": st.integers(min_value=0, max_value=100),
        "resumed_from": st.one_of(st.none(), STEPS),
        "images": st.just([{"prompt": "\u2028", "seed": 1}]),
    },
) | st.sampled_from([{"no": "event"}, [1]])
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row, ensure_ascii=False).encode() + b"\n"),
    st.sampled_from([b"\n", b" \r\n", b'{"event": "st', b"\xff\xc3\n", b"[\n", b'{"event": "x"}']),
)
# How a file changes, how many of its bytes stay, and what comes after them.
DEEDS = st.tuples(
    st.sampled_from(["written", "replaced", "removed"]),
    st.one_of(st.integers(0, 300), st.just(10**6)),
    st.lists(LINES, max_size=8).map(b"".join),
)
FILES = st.sampled_from(["events.jsonl", "problems.jsonl"])


def replace(file: Path, data: bytes) -> None:
    new = file.with_name("new")
    new.write_bytes(data)
    new.replace(file)


def do(file: Path, deed: str, size: int, data: bytes) -> None:
    content = (file.read_bytes() if file.exists() else b"")[:size] + data
    if deed == "written":
        file.write_bytes(content)
    elif deed == "replaced":
        replace(file, content)
    else:
        file.unlink(missing_ok=True)


@given(deeds=st.lists(st.tuples(FILES, DEEDS), max_size=12))
def test_whatever_happens_to_the_files_a_kept_reader_is_right(
    deeds: list[tuple[str, tuple[str, int, bytes]]],
) -> None:
    with TemporaryDirectory() as name:
        folder = Path(name)
        kept = HistoryReader(folder)
        for file, deed in deeds:
            do(folder / file, *deed)
            fresh = HistoryReader(folder)
            # repr: a figure that is not a number equals itself there
            assert repr(kept.read()) == repr(fresh.read())
            assert kept.recent() == fresh.recent()


def test_only_what_is_new_is_parsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_run(tmp_path / "run", steps=50).write()
    (folder / "run.json").unlink()  # is read again each time
    reader = HistoryReader(folder)
    reader.read()
    parsed: list[str] = []
    loads = json.loads
    monkeypatch.setattr(
        json, "loads", lambda line, **options: (parsed.append(line), loads(line, **options))[1]
    )
    reader.read()
    assert parsed == []
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'{"event": "step", "step": 51, "loss": 0.5}\n{"event": "st')
    history = reader.read()
    assert (history.steps[-1].loss, history.unreadable_lines) == (0.5, 1)
    assert len(parsed) == 1, "what has no end yet is left for later"
    with (folder / "events.jsonl").open("ab") as file:
        file.write(b'ep", "step": 52, "loss": 0.25}\n')
    history = reader.read()
    assert (history.steps[-1].loss, history.unreadable_lines) == (0.25, 0)
    ends = {"events": {"event": "step", "step": 53}, "problems": {"event": "problem", "what": "w"}}
    for name, row in ends.items():
        with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(row))
    assert reader.read().unreadable_lines == 2
    history = read_history(folder)
    assert (history.steps[-1].step, history.problems[-1].what) == (53, "w"), "as a resume reads"
    assert history.unreadable_lines == 0


def test_another_file_of_the_same_length_and_end_is_read_anew(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", steps=60).write()
    reader, file = HistoryReader(folder), folder / "events.jsonl"
    assert reader.read().steps[0].vram_bytes == 0
    replace(file, file.read_bytes().replace(b'"vram_bytes": 0', b'"vram_bytes": 7', 1))
    assert reader.read().steps[0].vram_bytes == 7


def test_recent_rows_are_the_newest_without_steps_and_in_order_of_time(tmp_path: Path) -> None:
    folder = tmp_path
    events = [{"event": "step", "step": n, "time": n} for n in range(300)]
    events += [{"event": "cached", "n": n, "time": 2 * n} for n in range(300)]
    problems = [{"event": "problem", "what": str(n), "time": 2 * n + 1} for n in range(300)]
    for name, rows in (("events.jsonl", events), ("problems.jsonl", problems)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    reader = HistoryReader(folder)
    reader.read()
    times = [event.time_s for event in reader.recent()]
    assert len(times) == 200
    assert times == sorted(times)
    assert (times[-1], reader.recent()[-1].kind) == (599, "problem")

"""`lora-train caption` as people and scripts call it: what is written, what is left alone, the way back."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from PIL import Image

from lora_trainer.captioning import captioners, describer
from lora_trainer.common import files
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.scan import scan
from tests.fakes.captioners import tiny_captioner, tiny_tagger
from tests.fakes.runs import contents, run_cli

Command = Callable[..., tuple[int, str, str]]
FOLDER = ".captions-before"
COLOURS = {"a": "red", "b": "blue", "c": "lime", "d": "white"}
TAGS = {"a": "red", "b": "blue", "c": "green", "d": "blue, green, red"}
"""What the tagger says of each colour."""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tags = [("blue", "0"), ("green", "0"), ("red", "0")]
    return tiny_tagger(tmp_path_factory.mktemp("tagger"), tags=tags)


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Return a folder of four images without captions."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for name, colour in COLOURS.items():
        Image.new("RGB", (20, 20), colour).save(folder / f"{name}.png")
    return folder


@pytest.fixture
def command(dataset: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> Command:
    """Return a function that runs the command on the dataset; it returns code, stdout and stderr."""

    def run(*words: str, model: Path = model_folder) -> tuple[int, str, str]:
        capsys.readouterr()
        undo = "--undo" in words
        line = ["caption", str(dataset), *words, *([] if undo else ["--model", str(model)])]
        return run_cli(line), *capsys.readouterr()

    return run


def texts(folder: Path) -> dict[str, str]:
    """Return the caption files of a folder by name without extension."""
    return {file.stem: file.read_text().rstrip("\n") for file in sorted(folder.glob("*.txt"))}


def trained(folder: Path, **settings: Any) -> dict[str, str]:
    """Return the captions that `check` and training read."""
    found = scan(folder, settings=DataSettings(**settings))
    return {record.name: record.caption for record in found.records}


# ---- what is written


def test_each_image_gets_a_caption_that_training_reads(
    command: Command, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, err = command()
    assert (code, texts(dataset)) == (0, TAGS)
    assert out.splitlines() == [
        "1/4 a.png: red",
        "2/4 b.png: blue",
        "3/4 c.png: green",
        "4/4 d.png: blue, green, red",
        "captions written: 4; --undo removes the new captions",
    ]
    assert err.startswith("captions to write: 4; ") and err.rstrip().endswith(" on cpu")
    assert trained(dataset) == {f"{name}.png": text for name, text in TAGS.items()}
    before = contents(dataset)
    monkeypatch.delattr("lora_trainer.captioning.caption_dataset._load")
    code, out, _ = command()
    assert (code, contents(dataset)) == (0, before)
    assert out.startswith("nothing to do, images with a caption: 4;")


def test_json_is_one_object_a_line(command: Command, dataset: Path) -> None:
    (dataset / "b.png").write_bytes(b"nothing")
    code, out, err = command("--json")
    rows = [json.loads(line) for line in out.splitlines()]
    assert (code, err) == (0, "")
    assert [row["event"] for row in rows] == [
        "captioning", "caption", "problem", "caption", "caption", "captioned"
    ]  # fmt: skip
    described = {"index": 1, "count": 4, "image": "a.png", "file": str(dataset / "a.txt")}
    assert rows[1].items() >= {**described, "caption": "red", "cut": False}.items()
    assert rows[2]["file"] == "b.png" and rows[2]["fix"]
    assert (rows[-1]["written"], rows[-1]["failed"]) == (3, 1)


@pytest.mark.parametrize(
    ("said", "around", "written"),
    [
        (" a cat.\n\x1b[1m ", "", "a cat. [1m"),
        ("a cat", "--prefix=photo of|--suffix=by night", "photo of a cat by night"),
        ("cat, hat", "--prefix= score_9,  best,|--suffix=, sky ", "score_9, best, cat, hat, sky"),
        ("A cat. It sleeps.", "--suffix=, 35 mm", "A cat. It sleeps, 35 mm"),
        ("a cat", "--trigger=mimi|--prefix=photo,", "mimi, photo, a cat"),
        ("x" * 20_000, "--trigger=mimi", f"mimi, {'x' * 9_994}"),
    ],
)
def test_what_goes_around_a_caption(
    said: str, around: str, written: str, command: Command, dataset: Path, tmp_path: Path
) -> None:
    """The model says one thing of images with blue in them."""
    model = tiny_tagger(tmp_path / "sayer", tags=[(f'"{said}"', "0")])
    words = [word for word in around.split("|") if word]
    assert command("--images", "b.png", *words, model=model)[0] == 0
    assert texts(dataset) == {"b": written}


def test_any_name_of_a_file_gets_its_caption(command: Command, dataset: Path) -> None:
    stems = ("[odd] {x|y} Zoë.final", "a" * 200, os.fsdecode(b"\xff\xfe"))
    for name, stem in zip("abc", stems, strict=True):
        (dataset / f"{name}.png").rename(dataset / f"{stem}.png")
    assert command()[0] == 0
    written = [(dataset / f"{stem}.txt").read_text() for stem in stems]
    assert written == ["red\n", "blue\n", "green\n"]
    assert {*trained(dataset).values()} == {*TAGS.values()}


# ---- what is left alone


def test_captions_that_are_there_stay(command: Command, dataset: Path) -> None:
    (dataset / "a.txt").write_text("by hand")
    (dataset / "b.caption").write_text("by hand too")
    (dataset / "c.txt").write_text("  \n")  # holds no word: as good as none
    (dataset / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "described"}\n')
    (dataset / "5_hat").mkdir()
    Image.new("RGB", (20, 20), "red").save(dataset / "5_hat" / "e.png")
    code, out, _ = command()
    assert (code, texts(dataset)) == (0, {"a": "by hand", "c": "green"})
    assert (
        out.splitlines()[-1]
        == "captions written: 1; had a caption already: 4; --undo removes the new captions"
    )
    assert trained(dataset)["d.png"] == "described"
    assert trained(dataset)["5_hat/e.png"] == "hat", "the name of a folder is a caption"


def on_image(monkeypatch: pytest.MonkeyPatch, act: Callable[[int], None]) -> None:
    """Let `act` do something while the tagger is at an image; it gets how many there were before."""
    real, count = captioners.Tagger.describe, itertools.count()

    def describe(self: captioners.Tagger, pictures: Sequence[captioners.Shown]) -> Any:
        act(next(count))
        return real(self, pictures)

    monkeypatch.setattr(captioners.Tagger, "describe", describe)


@pytest.mark.parametrize("words", [(), ("--overwrite",)])
def test_a_caption_written_by_hand_meanwhile_wins(
    words: tuple[str, ...], command: Command, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dataset / "metadata.jsonl").write_text("")

    def write(number: int) -> None:
        if number == 1:
            (dataset / "b.txt").write_text("by hand")

    on_image(monkeypatch, write)
    code, _, err = command(*words)
    assert (code, texts(dataset)) == (0, TAGS | {"b": "by hand"})
    assert "b.png got another caption meanwhile" in err


def test_neither_a_link_nor_a_shared_file_is_written(
    command: Command, dataset: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (20, 20), "blue").save(dataset / "b.webp", lossless=True)
    (tmp_path / "elsewhere.txt").write_text("")
    (dataset / "a.txt").symlink_to(tmp_path / "elsewhere.txt")
    (dataset / "c.json").write_text('{"caption": "kept"}')
    _, _, err = command("--overwrite")
    assert (dataset / "c.json").read_text() == '{"caption": "kept"}'
    assert texts(dataset)["c"] == "green", "beside the fields, and read first"
    assert (tmp_path / "elsewhere.txt").read_text() == "" and (dataset / "a.txt").is_symlink()
    assert "a.png has a.txt, which is a link to elsewhere" in err
    assert "b.webp would share the caption file of b.png. rename one of the two" in err


def test_only_the_pictures_that_are_named(command: Command, dataset: Path) -> None:
    assert command("--images", "b.png", str(dataset / "c.png"))[0] == 0
    assert texts(dataset) == {"b": "blue", "c": "green"}
    code, _, err = command("--images", "d.jpg")
    assert code == 2 and "Did you mean 'd.png'?" in err


def test_output_leaves_the_dataset_as_it_is(
    command: Command, dataset: Path, tmp_path: Path
) -> None:
    (dataset / "sub").mkdir()
    (dataset / "a.png").rename(dataset / "sub" / "a.png")
    (dataset / "b.txt").write_text("by hand")
    before = contents(dataset)
    out = tmp_path / "new"
    assert command("--output", str(out))[0] == 0
    assert contents(dataset) == before
    assert texts(out) == {"c": "green", "d": TAGS["d"]} and texts(out / "sub") == {"a": "red"}
    _, said, _ = command("--output", str(out))
    assert said.startswith("nothing to do")
    command("--output", str(out), "--overwrite")
    assert texts(out)["b"] == "blue" and contents(dataset) == before


def test_a_dry_run_says_what_and_writes_nothing(command: Command, dataset: Path) -> None:
    (dataset / "a.txt").write_text("by hand")
    before = sorted(dataset.rglob("*"))
    program = "import sys; from lora_trainer.cli.main import run; run(sys.argv[1:]); "
    program += "sys.exit(bool({'torch', 'transformers', 'onnxruntime'} & set(sys.modules)))"
    line = [sys.executable, "-c", program, "caption", str(dataset), "--dry-run"]
    assert subprocess.run(line, capture_output=True).returncode == 0, "it loads no torch"
    code, out, _ = command("--dry-run")
    assert (
        code == 0 and "has a caption: a.png (a.txt)" in out and "would get a caption: b.png" in out
    )
    row = json.loads(command("--dry-run", "--json")[1])
    assert (row["pictures"], row["captioned"]) == (["b.png", "c.png", "d.png"], {"a.png": "a.txt"})
    assert (row["writes"], row["on_this_machine"]) == ("tags", True)
    assert sorted(dataset.rglob("*")) == before


# ---- the way back


def test_undo_takes_back_call_after_call_and_leaves_what_was_edited(
    command: Command, dataset: Path
) -> None:
    (dataset / "a.txt").write_bytes(b"caf\xe9\r\n")  # Windows-1252
    (dataset / "B.TXT").write_text("two\nlines")
    before = contents(dataset)
    command("--overwrite", "--prefix", "first,")
    command("--overwrite", "--prefix", "second,")
    assert trained(dataset)["a.png"] == "second, red"
    assert trained(dataset)["b.png"] == "second, blue"
    assert command("--undo")[:2] == (0, "captions removed: 0, put back: 4\n")
    assert trained(dataset) == {f"{name}.png": f"first, {text}" for name, text in TAGS.items()}
    (dataset / "c.txt").write_text("better by hand")
    code, out, _ = command("--undo")
    assert code == 0 and out.splitlines() == [
        "captions removed: 1, put back: 2",
        "not touched, because it was edited since: c.txt",
    ]
    after = {name: digest for name, digest in contents(dataset).items() if FOLDER not in name}
    assert after.pop("c.txt") and after == before, "every byte is put back"
    assert command("--undo")[0] == 3, "there is nothing more to take back"


def test_a_record_that_came_with_a_dataset_reaches_nothing_outside(
    command: Command, dataset: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.txt"
    outside.write_text("mine")
    folder = dataset / FOLDER / "0001"
    (folder / "old").mkdir(parents=True)
    digest = contents(tmp_path)["outside.txt"]
    for name in ("sub/../../outside.txt", str(outside)):
        row = {"file": name, "sha256": digest, "old": None}
        (folder / "journal.jsonl").write_text(json.dumps(row))
        code, _, err = command("--undo")
        assert code == 3 and outside.read_text() == "mine" and "names" in err


def test_two_at_a_time_are_refused_and_a_dataset_that_may_not_be_written_is_not_called_busy(
    command: Command, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As some releases of filelock do, which take "access denied" for a lock that is held."""
    (dataset / FOLDER).mkdir()
    with FileLock(dataset / FOLDER / ".lock"):
        code, _, err = command()
        assert code == 4 and "is being captioned by another process" in err

        def denied(*_: object, **options: object) -> None:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "touch", denied)
        code, _, err = command()
        assert code == 4 and "Permission denied" in err
        assert [path.name for path in (dataset / FOLDER).iterdir()] == [".lock"]


# ---- interrupted, and on


def test_replacing_goes_on_where_it_was_and_is_one_thing_to_undo(
    command: Command, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    described: list[int] = []

    def interrupt(number: int) -> None:
        described.append(number)
        if len(described) == 2:
            os.kill(os.getpid(), signal.SIGINT)

    on_image(monkeypatch, interrupt)
    by_hand = {name: f"hand {name}" for name in COLOURS}
    for name, text in by_hand.items():
        (dataset / f"{name}.txt").write_text(text)
    code, out, err = command("--overwrite")
    assert (code, len(out.splitlines())) == (130, 2)
    assert "stopped with 2 of 4 captions written. Fix: run the same command again" in err
    with (dataset / FOLDER / "0001" / "journal.jsonl").open("a") as torn:
        torn.write('{"file": "c.t')  # what a kill leaves of a last line
    (dataset / "a.txt").write_text("edited between")
    code, out, _ = command("--overwrite")
    assert (code, texts(dataset)) == (0, TAGS)
    assert len(described) == 5, "b was done, a was edited since"
    assert (dataset / FOLDER / "0001" / "old" / "a.txt").read_text() == "hand a"
    assert out.splitlines()[-1].startswith("captions written: 4;")
    command("--undo")
    assert texts(dataset) == by_hand | {"a": "edited between"}
    described.clear()
    assert command("--overwrite")[0] == 130
    assert command("--overwrite", "--prefix", "best,")[0] == 0
    assert texts(dataset) == {name: f"best, {text}" for name, text in TAGS.items()}, "another call"


def test_a_full_disk_is_one_line_and_costs_no_caption(
    command: Command, dataset: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (dataset / "a.txt").write_text("by hand")

    def full(path: Path, data: bytes, *, durable: bool = True) -> None:
        if path.name == "b.txt" or "0002" in path.parts:
            raise files.disk_error(path, OSError(28, "No space left on device"))
        files.write_atomic(path, data, durable=durable)

    monkeypatch.setattr("lora_trainer.captioning.caption_files.write_atomic", full)
    code, _, err = command("--overwrite")
    assert code == 4 and "No space left on device" in err and err.count("error:") == 1
    assert texts(dataset) == {"a": "red"}
    assert command("--overwrite", "--prefix", "best,")[0] == 4
    journal = (dataset / FOLDER / "0002" / "journal.jsonl").read_text()
    assert '"request"' in journal and '"file"' not in journal, "it died before its first caption"
    assert command("--undo")[0] == 0 and texts(dataset) == {"a": "by hand"}


# ---- what goes wrong


def test_none_at_all_is_an_error(command: Command, dataset: Path) -> None:
    Image.new("RGB", (20, 20), "black").save(dataset / "a.png")
    code, _, err = command("--trigger", "mimi", "--images", "a.png")
    assert code == 3 and "a.png is one that the model says nothing about" in err
    for name in COLOURS:
        (dataset / f"{name}.png").write_bytes(b"nothing")
    code, _, err = command()
    assert code == 3 and "no image could be captioned (4 tried)" in err
    assert not (dataset / FOLDER).exists()


def out_of_memory_above(limit: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Let a language model take four images at a time, with memory for `limit`; return what it got."""
    given: list[int] = []
    real = describer.Describer._described

    def described(self: describer.Describer, pictures: Sequence[captioners.Shown]) -> Any:
        given.append(len(pictures))
        if len(pictures) > limit:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(self, pictures)

    monkeypatch.setattr(describer.Describer, "_described", described)
    monkeypatch.setattr(describer.Describer, "batch_size", 4)
    return given


def test_out_of_memory_halves_the_pictures_at_a_time(
    command: Command, dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_captioner("blip", tmp_path / "model")
    code, out, _ = command("--max-tokens", "4", model=model)
    alone = texts(dataset)
    assert code == 0 and len(out.splitlines()) == 5
    assert set(alone) == set(COLOURS) and len(set(alone.values())) > 1
    command("--undo")
    given = out_of_memory_above(2, monkeypatch)
    code, _, err = command("--max-tokens", "4", model=model)
    assert (code, texts(dataset), given) == (0, alone, [4, 2, 2])
    assert "out of memory with 4 images at a time; continuing with 2" in err
    given = out_of_memory_above(0, monkeypatch)
    code, _, err = command("--overwrite", model=model)
    assert (code, texts(dataset), given) == (4, alone, [4, 2, 1])
    assert "not enough memory for one image" in err and "--device cpu" in err


def test_what_does_not_go_together_is_refused_at_once(command: Command, dataset: Path) -> None:
    before = sorted(dataset.rglob("*"))
    for words, said in (
        (("--prompt", "hello"), "--prompt is not for"),
        (("--threshold", "35"), "--threshold 35 is not a probability"),
        (("--overwrite", "--only-missing"), "contradict each other"),
        (("--device", "tpu"), "tpu"),
    ):
        code, out, err = command(*words)
        assert (code, out) == (2, "") and said in err and err.count("\n") == 1
    assert sorted(dataset.rglob("*")) == before

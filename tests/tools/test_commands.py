"""The tools as people and scripts call them: what they say, one line for what is wrong, nothing left behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer.cli import main
from tests.fakes.adapters import adapter_of, checkpoint, saved
from tests.fakes.family_bases import base_of, copy_of
from tests.fakes.runs import contents

Hostile = Callable[[Path], Any]
"""Spoils a good file."""


def adapter(path: Path, name: str = "sd15", **options: Any) -> Path:
    return saved(path, name, adapter_of(name, every=9, **options), format="kohya")


def commands(file: Path, output: Path) -> dict[str, list[str]]:
    """Return a command line of each tool that reads an adapter."""
    base, out = str(base_of("sd15")), str(output)
    return {
        "convert": ["convert", str(file), "--format", "diffusers", "--output", out, "--base", base],
        "merge": ["merge", f"{file}:0.5", "--output", out, "--base", base],
        "cut": ["merge", str(file), "--rank", "1", "--output", out, "--base", base],
        "into": ["merge", str(file), "--output", out.removesuffix(".safetensors"), "--into", base],
        "resize": ["resize", str(file), "--rank", "1", "--output", out, "--base", base],
    }


TOOLS = ("convert", "merge", "cut", "into", "resize")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return adapter(tmp_path / "a.safetensors")


def said(capsys: pytest.CaptureFixture[str], *line: str) -> str:
    """Return what a command that succeeds prints; nothing goes to stderr."""
    capsys.readouterr()
    code = main.run(list(line))
    out, error = capsys.readouterr()
    assert (code, error) == (0, "")
    return str(out)


def refusal(capsys: pytest.CaptureFixture[str], line: list[str], folder: Path, *, code: int) -> str:
    """Return the one line of a command that fails with a code and changes nothing."""
    before = contents(folder)
    capsys.readouterr()  # what making the files has said
    assert main.run(line) == code
    out, error = capsys.readouterr()
    assert out == ""
    assert error.startswith("error: ") and error.count("\n") == 1, error
    assert contents(folder) == before
    assert not list(folder.rglob(".tmp-*")), "no temporary file stays"
    return str(error)


# ---- what they say


@pytest.mark.parametrize("tool", TOOLS)
def test_each_tool_names_what_it_wrote_and_replaces_it_when_told_to(
    tool: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An output that cannot be is refused before any work: the input is not even looked for."""
    line = commands(file, tmp_path / "out.safetensors")[tool]
    shown = said(capsys, *line)
    written = line[line.index("--output") + 1]
    assert shown.splitlines()[0] == f"wrote {written}"
    assert Path(written).exists()
    assert "sd15" in shown
    absent = tmp_path / "absent.safetensors"
    again = commands(absent, tmp_path / "out.safetensors")[tool]
    assert f"{written} exists already" in refusal(capsys, again, tmp_path, code=2)
    assert "absent.safetensors" in refusal(capsys, [*again, "--force"], tmp_path, code=3)
    nowhere = commands(absent, tmp_path / "absent" / "out.safetensors")[tool]
    assert "does not exist" in refusal(capsys, nowhere, tmp_path, code=2)
    found = json.loads(said(capsys, *line, "--json", "--force"))
    assert (found["file"], found["family"]) == (written, "sd15")
    assert isinstance(found["notes"], list)
    if tool == "resize":
        assert "rank 4 -> 1" in shown and f"kept {100 * found['energy']:.4g} %" in shown
        least = min(found["cuts"], key=lambda key: found["cuts"][key]["energy"])
        assert least in shown
        assert found["cuts"][least].keys() == {"old_rank", "new_rank", "energy"}


# ---- files that cannot be used


def change(spoil: Callable[[dict[str, Tensor], str], dict[str, Tensor]]) -> Hostile:
    """Return what spoils the tensors of a file, by the name of a factor."""

    def change_file(file: Path) -> None:
        tensors = load_file(file)
        save_file(spoil(tensors, next(key for key in tensors if ".lora_up" in key)), file)

    return change_file


HOSTILE: dict[str, Hostile] = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "absent": Path.unlink,
    "of another family": lambda file: adapter(file, "sdxl"),
    "without a factor": change(lambda tensors, up: {k: tensors[k] for k in tensors if k != up}),
    "NaN": change(lambda tensors, up: tensors | {up: tensors[up] * float("nan")}),
}


@pytest.mark.parametrize(("fault", "tool"), list(zip(HOSTILE, cycle(TOOLS))))  # noqa: B905 - a cycle has no end
def test_a_file_that_cannot_be_used_is_one_line_and_exit_code_3(
    fault: str, tool: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    HOSTILE[fault](file)
    line = commands(file, tmp_path / "out.safetensors")[tool]
    assert "a.safetensors" in refusal(capsys, line, tmp_path, code=3)


def test_a_missing_shard_and_a_pickled_base_are_named(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = copy_of("sd15", tmp_path / "base")
    (base / "unet/diffusion_pytorch_model.safetensors").unlink()
    (tmp_path / "old.ckpt").write_bytes(b"PK")
    cut = checkpoint(tmp_path / "b.safetensors", "sd15")
    cut.write_bytes(cut.read_bytes()[:-100])
    for wrong, said in (
        (base, "unet"),
        (tmp_path / "old.ckpt", "pickle"),
        (file, "is a LoRA"),
        (cut, "b.safetensors"),
    ):
        line = ["merge", str(file), "--into", str(wrong), "--output", str(tmp_path / "out")]
        if wrong.suffix == ".safetensors":
            line[-1] += ".safetensors"
        assert said in refusal(capsys, line, tmp_path, code=3)


# ---- outputs that cannot be


def test_what_does_not_go_with_into_is_refused(
    file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--rank=2", "--format=kohya", "--precision=fp16", "--base=x"):
        line = [*commands(file, tmp_path / "out.safetensors")["into"], option]
        error = refusal(capsys, line, tmp_path, code=2)
        assert option.partition("=")[0] in error and "--into" in error


# ---- a disk that is full, a person who is in a hurry


@pytest.mark.parametrize("tool", ["convert", "into"])
def test_a_full_disk_or_ctrl_c_at_the_end_leaves_what_was_there(
    tool: str,
    file: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    line = [*commands(file, tmp_path / "out.safetensors")[tool], "--force"]
    there = Path(line[line.index("--output") + 1])
    if tool == "into":
        copy_of("sd15", there)
    else:
        there.write_bytes(b"mine")
    # Read back last: all is written then but for its name.
    read_back = "lora_trainer.lora_file.tensor_file.file_digest"
    for place, error, code, reason in (
        ("os.fsync", OSError(28, "No space left on device"), 4, "No space left"),
        (read_back, KeyboardInterrupt(), 130, "nothing was written"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error))
            assert reason in refusal(capsys, line, tmp_path, code=code)

"""Paths as people type and paste them, in every setting and argument that names a file or folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.cli import main
from lora_trainer.common import processes
from lora_trainer.common.errors import InputError, LoraTrainError, MachineError, RequestError
from lora_trainer.common.files import user_path
from lora_trainer.config.config import all_settings, build_config, flatten
from lora_trainer.run.prepare import Request, prepare
from lora_trainer.run.run_folder import compare
from tests.fakes.lora_library import lora
from tests.fakes.runs import ROOT

TYPED = {
    "a/b": "a/b", "~/a": "HOME/a", " a/b ": "a/b", "a\n": "a", '"C:\\a b\\c"': "C:\\a b\\c", "'a b'": "a b",
    "~nobody-there/a": "~nobody-there/a",
    "\u201ca\u201d": "a", '" ~/a "': "HOME/a", "$HOME/a": "$HOME/a", '"': '"', "it's": "it's", "": "",
}  # fmt: skip


@pytest.mark.parametrize("typed", TYPED)
def test_what_is_not_part_of_a_path_is_taken_off(typed: str) -> None:
    assert user_path(typed) == TYPED[typed].replace("HOME", str(Path.home()), 1 - typed.count("$"))


def test_every_setting_that_names_a_file_takes_them() -> None:
    paths = [info for info in all_settings() if info.path]
    known = {"output.folder", "data.cache_dir", "train.init_from", "base.text_encoders"}
    assert known <= {info.key for info in paths}
    for info in paths:
        many = isinstance(info.default, tuple)
        value: Any = ['"~/x"'] if many else '"~/x"'
        found = flatten(build_config({info.key: value}))[info.key]
        wanted = str(Path.home() / "x")
        assert list(found) == [wanted] if many else found == wanted, info.key


def test_a_run_that_recorded_the_tilde_goes_on() -> None:
    now = flatten(build_config({"base.model": "~/base"}))
    before = {**now, "base.model": "~/base"}
    environment = {"deterministic": True}
    assert compare(before, now, environment=environment, environment_now=environment)[0] == "EXACT"


def test_arguments_take_them_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    lora(tmp_path / "a b.safetensors")
    name = f"{tmp_path}/a b.safetensors"
    for word in ("~/a b.safetensors", f'"{name}"', f" {name}"):
        assert main.run(["inspect", word]) == 0, word


def test_an_empty_path_is_not_the_folder_that_the_program_runs_in(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`lora-train "$IMAGES" --base "$BASE"` where a variable is not set: this folder was read in its place."""
    for info in (each for each in all_settings() if each.path):
        many = isinstance(info.default, tuple)
        with pytest.raises(RequestError, match=f"{info.key} is empty"):
            build_config({info.key: ["a", " "] if many else " "})
    example = ROOT / "datasets" / "example"
    monkeypatch.chdir(example)
    for words in (["plan", ""], ["check", " "], ["plan", str(example), "--base="], ["inspect", ""]):
        assert main.run(words) == RequestError.exit_code, words
        (line,) = capsys.readouterr().err.splitlines()
        assert "is empty" in line
    for this_folder in (".", "./", " . "):  # meant, beside a text that is empty
        assert main.run(["check", this_folder, "--set", "data.caption_prefix="]) == 0


@pytest.mark.parametrize("base", ['"models/no base"', "no such/base", "a/b/c", "x" * 300, "a\nb"])
def test_a_base_that_is_no_name_on_the_hub_is_one_line(
    base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["plan", str(ROOT / "datasets" / "example"), "--base", base]) in (3, 4)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")


def test_python_without_docstrings_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flags:
        optimize = 2

    with monkeypatch.context() as patch:
        patch.setattr(sys, "flags", Flags)
        with pytest.raises(MachineError, match="without docstrings"):
            processes.quiet_libraries()


def asked(settings: dict[str, Any]) -> Request:
    return Request.of(
        ROOT / "datasets" / "example",
        preset="auto",
        priority="balanced",
        config_file=None,
        settings=settings,
    )


@pytest.mark.parametrize("name", ["missing", "folder", "text", "another family"])
def test_what_the_header_of_a_start_tells_is_refused_by_the_plan(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no weights", "utf-8", newline="\n")
    lora(tmp_path / "another family", width=3072)
    settings = {"base.model": "embedded", "train.init_from": str(tmp_path / name)}
    request = asked(settings)
    if name == "another family":
        request = asked(settings | {"adapter.rank": 3})
    with pytest.raises(LoraTrainError, match="init_from") as caught:
        prepare(request)
    assert caught.value.exit_code in (InputError.exit_code, 2)


@pytest.mark.parametrize("key", ["base.vae", "base.model", "data.regularisation_dir"])
def test_the_home_of_nobody_is_no_traceback(key: str) -> None:
    request = Request(
        dataset=ROOT / "datasets" / "example",
        overrides={"base.model": "embedded", key: "~nobody-there/x"},
    )
    with pytest.raises(LoraTrainError, match="~nobody-there/x"):
        prepare(request)

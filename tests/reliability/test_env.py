"""ENV-01, 02 and 03: odd names and encodings, folders that are not there, packages that are not or do not work.

Windows' own names (CON, a dot at the end) need Windows; they are not tried here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer.common.errors import MachineError
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.hardware import machine
from lora_trainer.network.compiling import apply_attention
from lora_trainer.training.optimizers import build_optimizer
from tests.fakes.runs import STEPS, Toy, events, listing, run_cli, start, toy

ODD = "sp ace äöü 猫 😀 'q\" $HOME; %s {x} -"
QUIET: dict[str, Any] = {
    "logging__trackers": [],
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("env")).with_base()


def elsewhere(arguments: list[str], **environment: str) -> tuple[int, str, str]:
    """Run the command in another process; return its exit code and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        process = start(*arguments)
    out, err = process.communicate(timeout=80)
    return process.returncode, out, err


def test_env_01_02_a_run_among_odd_names_in_an_odd_locale_without_a_home(tmp_path: Path) -> None:
    """The C locale, a terminal that can show ASCII only, names of all kinds; home and temporary folder are files,
    which stops root too.
    """
    folder = tmp_path / ODD
    folder.mkdir()
    place = toy(folder).with_base()
    for index, name in enumerate((ODD, "größe", "x" * 240)):
        for suffix in (".png", ".txt"):
            (place.dataset / f"p{index}{suffix}").rename(place.dataset / f"{name}{suffix}")
    (place.dataset / "größe.txt").write_text("ein Mädchen, 猫", encoding="utf-8")
    before = listing(place.dataset)
    nowhere = tmp_path / "a file"
    nowhere.touch()
    names = ("HOME", "XDG_CACHE_HOME", "HF_HOME", "TMPDIR", "TMP", "TEMP")
    name = ODD.replace('"', "")  # a run's name may hold nothing that Windows forbids
    line = place.arguments("--name", name, **QUIET)
    gone = dict.fromkeys(names, str(nowhere / "x"))
    code, out, err = elsewhere(line, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="1", **gone)
    assert code == 0, err
    assert (out + err).isascii()
    run = place.runs / name
    assert len(events(run, "step")) == STEPS
    assert (run / f"{name}.safetensors").exists()
    assert listing(place.dataset) == before


def test_env_01_a_terminal_that_cannot_show_a_name_shows_it_escaped(tmp_path: Path) -> None:
    place = toy(tmp_path)
    (place.dataset / "größe 猫.png").write_bytes(b"")
    line = ["check", str(place.dataset), "--set", f"data.cache_dir={place.cache}"]
    code, out, err = elsewhere(line, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "gr\\xf6\\xdfe \\u732b.png" in out


def test_env_01_names_that_this_locale_cannot_write_are_one_line(tmp_path: Path) -> None:
    line = ["check", str(toy(tmp_path).dataset), "--set", f"data.cache_dir={tmp_path / 'größe'}"]
    code, _, err = elsewhere(line, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert code == 2, err
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert "ascii" in err and "set PYTHONUTF8=1" in err


def test_env_01_the_longest_name_is_borne_and_others_are_refused_before_anything_is_made(
    place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "😀" * 45
    assert place.train("--name", name, steps=1, **QUIET, output__save_every_steps=0) == 0
    assert (place.runs / name / f"{name}.safetensors").exists()
    before = set(place.folder.iterdir())
    for name, problem in (
        ("x" * 181, "is 181 bytes long, and 180 are allowed"),
        ("猫" * 61, "is 183 bytes long"),
        ("a/b", "is not a plain folder name"),
        ("a\\b", "is not a plain folder name"),
        (" a", "is not a plain folder name"),
        ("\x1b[31m", "cannot be shown"),
    ):
        capsys.readouterr()
        assert place.train("--name", name, **QUIET) == 2
        said = capsys.readouterr().err.strip()
        assert problem in said and said.isprintable()
    assert set(place.folder.iterdir()) == before
    endless = toy(tmp_path).with_base()
    folder = endless.dataset.rename(tmp_path / ("x" * 250))
    assert run_cli([str(folder), *endless.arguments(**QUIET)[1:]]) == 2


# ---- ENV-02


def test_env_02_a_home_that_cannot_hold_the_cache_is_named_and_none_is_needed(
    place: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = place.folder / "no folder"
    nowhere.touch()
    monkeypatch.setenv("HOME", str(nowhere))
    monkeypatch.setenv("XDG_CACHE_HOME", str(nowhere / ".cache"))
    assert run_cli(["check", str(place.dataset)]) == 4
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert str(nowhere) in err and "--set data.cache_dir=FOLDER" in err
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert run_cli(["check", str(place.dataset), "--set", f"data.cache_dir={place.cache}"]) == 0


# ---- ENV-03


def test_env_03_a_broken_bitsandbytes_is_named_with_what_helps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its native part fails while it is imported, as after an update of the driver."""
    broken = OSError("libcudart.so.13: version not found")

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name.partition(".")[0] == "bitsandbytes":
                raise broken

    built_on_it = "lora_trainer.training.queued_adamw8bit"
    for name in [
        n for n in sys.modules if n.partition(".")[0] == "bitsandbytes" or n == built_on_it
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    groups = [{"params": [nn.Parameter(torch.zeros(3))], "lr_scale": 1.0}]
    with pytest.raises(MachineError) as told:
        build_optimizer(groups, OptimizerSettings(name="adamw8bit"))
    assert "optimizer.name=adamw8bit needs bitsandbytes" in told.value.found
    assert "optimizer.name=adamw" in told.value.fix
    assert "pip install -U bitsandbytes" in told.value.fix
    assert str(broken) in told.value.found


def test_env_03_a_broken_xformers_is_named_with_what_helps() -> None:
    class Denoiser(nn.Module):
        attn_processors: Mapping[str, object] = {}

        def enable_xformers_memory_efficient_attention(self) -> None:
            raise OSError("libcudart.so.13: cannot open shared object file")

    with pytest.raises(MachineError, match=r"libcudart.so.13.*memory.attention=sdpa"):
        apply_attention(Denoiser(), "xformers")


def test_env_03_doctor_says_what_is_wrong_with_each_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requirements = [
        "torch<2.14,>=2.10",
        "peft<0.22,>=0.21",
        'bitsandbytes<0.51,>=0.49; sys_platform != "darwin" and extra == "cuda"',
    ]
    versions = {
        "torch": "2.5.1+cu124",
        "peft": "0.22.0",
        "bitsandbytes": "0.51.0",
        "xformers": None,
    }
    monkeypatch.setattr("importlib.metadata.requires", lambda name: requirements)
    assert machine.package_notes({**versions, "gradio": "6.31.0"}) == {
        "torch": '<2.14,>=2.10 is needed: pip install "torch<2.14,>=2.10"',
        "peft": '<0.22,>=0.21 is needed: pip install "peft<0.22,>=0.21"',
        "bitsandbytes": '<0.51,>=0.49 is needed: pip install "bitsandbytes<0.51,>=0.49"',
        "xformers": "not installed: pip install xformers",
    }
    later = {"torch": "2.13.0+cpu", "peft": "0.21.2.dev0"}
    assert machine.package_notes(later) == {}

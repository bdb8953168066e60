"""ENV-01, 02 and 03: odd names and encodings, folders that are not there, packages that are not or do not work.

Windows' own names (CON, a dot at the end) need Windows; they are not tried here.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.config.learning import OptimizerSettings
from lora_trainer.hardware import machine
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.machine import assume_card, detect, package_notes
from lora_trainer.network.compiling import apply_attention
from lora_trainer.run.run_folder import MAX_NAME_BYTES, checked_name
from lora_trainer.training.optimizers import build_optimizer
from tests.fakes.runs import STEPS, Toy, events, listing, run_cli, start, toy

ODD = "sp ace äöü 猫 😀 'q\" $HOME; %s {x} -"
QUIET: dict[str, Any] = {
    "logging__trackers": [],
    "sampling__every_steps": 0,
    "train__validate_every_steps": 0,
}


@pytest.fixture(autouse=True)
def _no_hang() -> Iterator[None]:
    signal.alarm(90)
    yield
    signal.alarm(0)


def elsewhere(
    arguments: list[str], *, unset: tuple[str, ...] = (), **environment: str
) -> tuple[int, str, str]:
    """Run the command in another process; return its exit code and what it said."""
    with pytest.MonkeyPatch.context() as patch:
        for name in unset:
            patch.delenv(name, raising=False)
        for name, value in environment.items():
            patch.setenv(name, value)
        process = start(*arguments)
    out, err = process.communicate(timeout=80)
    return process.returncode, out, err


def cache_flag(place: Toy) -> list[str]:
    return ["--set", f"data.cache_dir={place.cache}"]


# ---- ENV-01


def test_env_01_a_run_among_odd_names_in_an_odd_locale(tmp_path: Path) -> None:
    """The C locale, a terminal that can show ASCII only, and names of all kinds."""
    folder = tmp_path / ODD
    folder.mkdir()
    place = toy(folder).with_base()
    for index, name in enumerate((ODD, "größe", "x" * 240)):
        for suffix in (".png", ".txt"):
            (place.dataset / f"p{index}{suffix}").rename(place.dataset / f"{name}{suffix}")
    (place.dataset / "größe.txt").write_text("ein Mädchen, 猫", encoding="utf-8")
    before = listing(place.dataset)
    line = place.arguments("--name", ODD, **QUIET)
    code, out, err = elsewhere(line, LC_ALL="C", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert code == 0, err
    assert (out + err).isascii()
    run = place.runs / ODD
    assert len(events(run, "step")) == STEPS
    assert (run / f"{ODD}.safetensors").exists()
    assert listing(place.dataset) == before


def test_env_01_a_terminal_that_cannot_show_a_name_shows_it_escaped(tmp_path: Path) -> None:
    place = toy(tmp_path)
    (place.dataset / "größe 猫.png").write_bytes(b"")
    line = ["check", str(place.dataset), *cache_flag(place)]
    code, out, err = elsewhere(line, PYTHONIOENCODING="ascii")
    assert (code, err) == (0, "")
    assert "gr\\xf6\\xdfe \\u732b.png" in out


@pytest.mark.parametrize("how", ["typed", "in a settings file"])
def test_env_01_names_that_this_locale_cannot_write_are_one_line(how: str, tmp_path: Path) -> None:
    place = toy(tmp_path)
    odd = tmp_path / "größe"
    line = ["check", str(place.dataset), "--set", f"data.cache_dir={odd}"]
    if how == "in a settings file":
        settings = tmp_path / "settings.json"
        settings.write_text(f'{{"data": {{"cache_dir": "{odd}"}}}}', encoding="utf-8")
        line = ["plan", str(place.dataset), "--config", str(settings)]
    code, _, err = elsewhere(line, LC_ALL="C", PYTHONUTF8="0", PYTHONCOERCECLOCALE="0")
    assert code == 2, err
    assert "Traceback" not in err
    assert err.count("\n") == 1
    assert "ascii" in err and "set PYTHONUTF8=1" in err


@pytest.mark.parametrize(
    "name",
    ["x" * MAX_NAME_BYTES, "ü" * 90, "😀" * 45, "a.b -_(1)", "猫 'q\""],
    ids=["longest", "two bytes", "four bytes", "signs", "quotes"],
)
def test_env_01_names_of_runs_that_files_can_bear(name: str, place: Toy) -> None:
    assert place.train("--name", name, **QUIET) == 0
    assert (place.runs / name / f"{name}.safetensors").exists()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("x" * 181, "is 181 bytes long, and 180 are allowed"),
        ("猫" * 61, "is 183 bytes long"),
        ("a/b", "is no plain folder name"),
        ("a\\b", "is no plain folder name"),
        ("..", "is no plain folder name"),
        (" a", "is no plain folder name"),
        ("", "is no plain folder name"),
        ("a\nb", "cannot be shown"),
        ("\x1b[31m", "cannot be shown"),
        ("caf\udce9", "cannot be shown"),
    ],
)
def test_env_01_other_names_are_refused_before_anything_is_made(
    name: str, problem: str, place: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(RequestError, match=problem) as told:
        checked_name(name)
    assert str(told.value).isprintable()
    place.cache.mkdir(exist_ok=True)  # of memos, which looking at a dataset may write
    before = set(place.folder.iterdir())
    if name.isprintable() and name:
        assert place.train("--name", name, **QUIET) == 2
        assert problem in capsys.readouterr().err
    assert set(place.folder.iterdir()) == before


def test_env_01_a_dataset_folder_with_an_endless_name_needs_another_name(tmp_path: Path) -> None:
    place = toy(tmp_path).with_base()
    long = place.dataset.rename(tmp_path / ("x" * 250))
    line = place.arguments(**QUIET)
    assert run_cli([str(long), *line[1:]]) == 2
    assert run_cli([str(long), *line[1:], "--name", "short"]) == 0


# ---- ENV-02


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("env")).with_base()


def test_env_02_a_run_needs_no_home_and_no_temporary_folder(place: Toy) -> None:
    """Both are files here, which stops root too; the cache and the runs are elsewhere."""
    nowhere = place.folder / "a file"
    nowhere.touch()
    homes = {name: str(nowhere / "x") for name in ("HOME", "XDG_CACHE_HOME", "HF_HOME")}
    folders = {name: str(nowhere / "y") for name in ("TMPDIR", "TMP", "TEMP")}
    line = place.arguments("--name", "homeless", **QUIET)
    code, _, err = elsewhere(line, **homes, **folders)
    assert code == 0, err
    assert (place.runs / "homeless" / "homeless.safetensors").exists()


def test_env_02_a_home_that_cannot_hold_the_cache_is_named(place: Toy) -> None:
    nowhere = place.folder / "no folder"
    nowhere.touch()
    homes = {"HOME": str(nowhere), "XDG_CACHE_HOME": str(nowhere / ".cache")}
    code, _, err = elsewhere(["check", str(place.dataset)], **homes)
    assert code == 4
    assert err.count("\n") == 1
    assert str(nowhere) in err and "--set data.cache_dir=FOLDER" in err


def test_env_02_without_a_home_the_system_s_own_is_taken(place: Toy) -> None:
    line = ["check", str(place.dataset), *cache_flag(place)]
    code, _, err = elsewhere(line, unset=("HOME", "XDG_CACHE_HOME"))
    assert code == 0, err


# ---- ENV-03


class Broken:
    """A package whose native part fails while it is imported, as after an update of the driver."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def find_spec(self, name: str, *_: object) -> None:
        if name.partition(".")[0] in ("bitsandbytes", "xformers"):
            raise self.error


@pytest.fixture(params=[ImportError("libcudart.so.13: cannot open shared object file"),
                        OSError("libcudart.so.13: version not found"),
                        RuntimeError("CUDA Setup failed despite GPU being available")],
                ids=lambda error: type(error).__name__)  # fmt: skip
def broken(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> BaseException:
    for name in [
        name for name in sys.modules if name.partition(".")[0] in ("bitsandbytes", "xformers")
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [Broken(request.param), *sys.meta_path])
    return request.param


def test_env_03_a_broken_bitsandbytes_is_named_with_what_helps(broken: BaseException) -> None:
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


REQUIREMENTS = [
    "torch<2.14,>=2.10",
    "diffusers<0.43,>=0.42",
    "peft<0.22,>=0.21",
    'bitsandbytes<0.51,>=0.49; sys_platform != "darwin" and extra == "cuda"',
]


def test_env_03_doctor_says_what_is_wrong_with_each_package() -> None:
    versions = {
        "torch": "2.5.1+cu124",
        "diffusers": "0.42.1",
        "peft": "0.22.0",
        "bitsandbytes": "0.51.0",
        "xformers": None,
        "gradio": "6.31.0",
    }
    assert package_notes(versions, requirements=REQUIREMENTS) == {
        "torch": '<2.14,>=2.10 is needed: pip install "torch<2.14,>=2.10"',
        "peft": '<0.22,>=0.21 is needed: pip install "peft<0.22,>=0.21"',
        "bitsandbytes": '<0.51,>=0.49 is needed: pip install "bitsandbytes<0.51,>=0.49"',
        "xformers": "not installed: pip install xformers",
    }
    later = {"torch": "2.13.0+cpu", "diffusers": "0.42.1.dev0"}
    assert package_notes(later, requirements=REQUIREMENTS) == {}


def test_env_03_doctor_shows_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "_version", {"torch": "2.5.1"}.get)
    monkeypatch.setattr(machine, "_requirements", lambda: REQUIREMENTS)
    assert run_cli(["doctor"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "torch 2.5.1 (computes everything): <2.14,>=2.10 is needed. Fix: pip install" in shown
    assert "bitsandbytes is not installed" in shown and "pip install bitsandbytes" in shown


def test_env_03_a_torch_without_cuda_beside_a_card_is_named() -> None:
    found = assume_card(detect(), vram_gib=12)
    card = replace(found.gpus[0], assumed=False, name="RTX 4070")
    build = TorchBuild(version="2.13.0+cpu", kind="cpu")
    machine = replace(found, gpus=(card,), torch=build)
    fact = machine.accelerator()
    assert fact.value is None
    assert "built without CUDA, so RTX 4070 cannot be used" in fact.reason
    assert "pip install torch" in fact.reason

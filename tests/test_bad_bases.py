"""What is wrong with a base is one clear line and the right exit code, before anything is cached."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.family_bases import base_of
from tests.fakes.runs import Toy, run_cli, toy

BadBase = Callable[[Path], list[str]]
"""Makes a bad base in a folder and returns the command line's words that name it."""


def a_lora(folder: Path) -> list[str]:
    file = folder / "style.safetensors"
    save_file({"lora_unet_x.lora_down.weight": torch.zeros(4, 8)}, file)
    return ["--base", str(file)]


def nothing(folder: Path) -> list[str]:
    return ["--base", str(folder / "nowhere")]


def an_empty_folder(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["--base", str(folder / "empty")]


def copied(folder: Path, name: str = "sd15") -> Path:
    return Path(shutil.copytree(base_of(name), folder / "base"))


def a_missing_shard(folder: Path) -> list[str]:
    file = copied(folder, "flux") / "transformer" / "diffusion_pytorch_model.safetensors"
    names = list(load_file(file))
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    file.rename(file.with_name("part-0.safetensors"))
    return ["--base", str(folder / "base")]


def another_architecture_in_the_file(folder: Path) -> list[str]:
    """The configuration of one base beside the weights of another."""
    base = copied(folder)
    config = json.loads((base / "unet" / "config.json").read_text())
    config["in_channels"] = 9
    (base / "unet" / "config.json").write_text(json.dumps(config))
    return ["--base", str(base)]


BAD: dict[BadBase, str] = {
    a_lora: "is a LoRA, not a base model",
    nothing: "does not exist",
    an_empty_folder: "it holds nothing",
    a_missing_shard: "lacks 1 of 2 shards, first part-1.safetensors",
    another_architecture_in_the_file: "not a base model of a supported family",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bad"), images=2)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_it_is_said_before_anything_is_cached(
    bad: BadBase, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cache = tmp_path / "cache"
    line = [str(place.dataset), *bad(tmp_path), "--output", str(tmp_path / "runs")]
    line += ["--set", f"data.cache_dir={cache}", "--set", "data.validation_fraction=0"]
    assert run_cli(line) == 3
    err = capsys.readouterr().err.strip()
    errors = [row for row in err.splitlines() if row.startswith("error:")]
    assert len(errors) == 1 and BAD[bad] in errors[0] and "Fix: " in errors[0]
    assert "Traceback" not in err
    assert not list(cache.rglob("*.safetensors")), "nothing was encoded"
    assert not (tmp_path / "runs").exists(), "no run was begun"

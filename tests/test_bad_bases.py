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


def noise(folder: Path) -> list[str]:
    (folder / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    return ["--base", str(folder / "model.safetensors")]


def a_header_of_exabytes(folder: Path) -> list[str]:
    (folder / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    return ["--base", str(folder / "model.safetensors")]


def a_web_page(folder: Path) -> list[str]:
    (folder / "model.safetensors").write_text("<!DOCTYPE html><html>please log in</html>" * 10)
    return ["--base", str(folder / "model.safetensors")]


def a_pickle(folder: Path) -> list[str]:
    (folder / "model.ckpt").write_bytes(b"PK\x03\x04")
    return ["--base", str(folder / "model.ckpt")]


def nothing(folder: Path) -> list[str]:
    return ["--base", str(folder / "nowhere")]


def an_empty_folder(folder: Path) -> list[str]:
    (folder / "empty").mkdir()
    return ["--base", str(folder / "empty")]


def copied(folder: Path, name: str = "sd15") -> Path:
    return Path(shutil.copytree(base_of(name), folder / "base"))


def a_truncated_part(folder: Path) -> list[str]:
    file = copied(folder) / "vae" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:-4])
    return ["--base", str(folder / "base")]


def a_missing_shard(folder: Path) -> list[str]:
    file = copied(folder, "flux") / "transformer" / "diffusion_pytorch_model.safetensors"
    names = list(load_file(file))
    weight_map = {name: f"part-{index % 2}.safetensors" for index, name in enumerate(names)}
    file.with_name(f"{file.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    file.rename(file.with_name("part-0.safetensors"))
    return ["--base", str(folder / "base")]


def only_pickles(folder: Path) -> list[str]:
    file = copied(folder) / "unet" / "diffusion_pytorch_model.safetensors"
    file.rename(file.with_suffix(".bin"))
    return ["--base", str(folder / "base")]


def sd15_given_as_sdxl(_: Path) -> list[str]:
    return ["--base", str(base_of("sd15")), "--preset", "sdxl/10-12"]


def flux_with_a_unet_s_objective(_: Path) -> list[str]:
    return ["--base", str(base_of("flux")), "--set", "base.prediction=epsilon"]


def text_training_that_is_not_there(_: Path) -> list[str]:
    return ["--base", str(base_of("flux")), "--set", "adapter.text_encoder=true"]


def a_format_that_cannot_be(_: Path) -> list[str]:
    return ["--base", str(base_of("flux")), "--set", "output.format=kohya"]


def a_kind_that_no_format_holds(_: Path) -> list[str]:
    kind = ["--set", "adapter.kind=oft", "--set", "output.format=diffusers"]
    return ["--base", str(base_of("sd15")), *kind]


def another_architecture_in_the_file(folder: Path) -> list[str]:
    """The configuration of one base beside the weights of another."""
    base = copied(folder)
    config = json.loads((base / "unet" / "config.json").read_text())
    config["in_channels"] = 9
    (base / "unet" / "config.json").write_text(json.dumps(config))
    return ["--base", str(base)]


BAD: dict[BadBase, tuple[int, str]] = {
    a_lora: (3, "is a LoRA, not a base model"),
    noise: (3, "model.safetensors is not a whole safetensors file"),
    a_header_of_exabytes: (3, "model.safetensors is not a whole safetensors file"),
    a_web_page: (3, "model.safetensors is not a whole safetensors file"),
    a_pickle: (3, "is a pickle, which can run code"),
    nothing: (3, "does not exist"),
    an_empty_folder: (3, "it holds nothing"),
    a_truncated_part: (3, "vae"),
    a_missing_shard: (3, "lacks 1 of 2 shards, first part-1.safetensors"),
    only_pickles: (3, "a pickle that can run code"),
    another_architecture_in_the_file: (3, "not a base model of a supported family"),
    sd15_given_as_sdxl: (2, "preset sdxl/10-12 is for sdxl, the base model is sd15"),
    flux_with_a_unet_s_objective: (2, "base.prediction=epsilon"),
    text_training_that_is_not_there: (2, "adapter.text_encoder=true"),
    a_format_that_cannot_be: (2, "output.format=kohya is not possible for flux"),
    a_kind_that_no_format_holds: (2, "OFT is not written in it"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bad"), images=2)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.__name__)
def test_it_is_said_before_anything_is_cached(
    bad: BadBase, place: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = BAD[bad]
    cache = tmp_path / "cache"
    line = [str(place.dataset), *bad(tmp_path), "--output", str(tmp_path / "runs")]
    line += ["--set", f"data.cache_dir={cache}", "--set", "data.validation_fraction=0"]
    assert run_cli(line) == code
    err = capsys.readouterr().err.strip()
    errors = [row for row in err.splitlines() if row.startswith("error:")]
    assert len(errors) == 1 and said in errors[0] and "Fix: " in errors[0]
    assert "Traceback" not in err
    assert not list(cache.rglob("*.safetensors")), "nothing was encoded"
    assert not (tmp_path / "runs").exists(), "no run was begun"

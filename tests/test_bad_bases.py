"""What is wrong with a base is one clear line and the right exit code, before anything is cached."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.family_bases import base_of, copy_of, edit_json
from tests.fakes.runs import Toy, run_cli, toy

BAD: dict[str, tuple[str, str, int, str]] = {
    "4-bit whole numbers": ("int4.safetensors", "", 3, "of a type that is not read; readable are fp32, bf16"),
    "another architecture": ("other", "", 3, "not a base model of a supported family"),
    "a preset of another family": (
        "sd15", "preset=sdxl/10-12", 2, "preset sdxl/10-12 is for sdxl, the base model is sd15"
    ),
    "no text encoder to train": ("flux", "adapter.text_encoder=true", 2, "adapter.text_encoder=true"),
    "a format of no reader": ("flux", "output.format=kohya", 2, "is not possible for flux: its names fuse q, k and v"),
}  # fmt: skip
"""Case -> base, setting, exit code, what the error says."""


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bases")
    header = b'{"a.weight":{"dtype":"I4","shape":[4,4],"data_offsets":[0,8]}}'
    int4 = len(header).to_bytes(8, "little") + header + bytes(8)
    (folder / "int4.safetensors").write_bytes(int4)
    edit_json(copy_of("sd15", folder / "other") / "unet" / "config.json", in_channels=9)
    return folder


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    return toy(tmp_path_factory.mktemp("bad"), images=2)


@pytest.mark.parametrize("case", BAD)
def test_it_is_said_before_anything_is_cached(
    case: str, place: Toy, bases: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, setting, code, message = BAD[case]
    cache = tmp_path / "cache"
    source = base_of(base) if base in ("sd15", "flux") else bases / base
    line = [str(place.dataset), "--base", str(source), "--output", str(tmp_path / "runs")]
    line += ["--set", f"data.cache_dir={cache}", "--set", "data.validation_fraction=0"]
    if setting.startswith("preset="):
        line += ["--preset", setting.removeprefix("preset=")]
    elif setting:
        line += ["--set", setting]
    assert run_cli(line) == code
    err = capsys.readouterr().err.strip()
    errors = [row for row in err.splitlines() if row.startswith("error:")]
    assert len(errors) == 1 and message in errors[0] and "Fix: " in errors[0]
    assert "Traceback" not in err
    assert not list(cache.rglob("*.safetensors")), "nothing was encoded"
    assert not (tmp_path / "runs").exists(), "no run was begun"

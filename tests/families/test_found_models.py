"""Base models of other programs are found where these keep them, and told from other files by their headers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer import families
from lora_trainer.common.memo import MemoTable
from lora_trainer.families.files import found_models as finder
from lora_trainer.families.files.found_models import FoundModel, found_models
from lora_trainer.families.files.model_folders import Machine, model_folders
from tests.fakes.family_bases import base_of, copy_of
from tests.fakes.ldm_file import write_checkpoint

PLACES = {
    "linux": {
        "ComfyUI/models/checkpoints": "ComfyUI",
        "stable-diffusion-webui-forge/models/Stable-diffusion": "Forge",
        "stable-diffusion-webui/models/Stable-diffusion": "A1111",
        "Documents/StabilityMatrix/Data/Models/StableDiffusion": "StabilityMatrix",
        "library/Models/DiffusionModels": "StabilityMatrix",
        ".cache/lm-studio/models": "LM Studio",
        "drive/more/unets": "ComfyUI",
    },
    "darwin": {
        "Documents/ComfyUI/models/diffusion_models": "ComfyUI",
        "library/Models/StableDiffusion": "StabilityMatrix",
        "drive/more/unets": "ComfyUI",
        ".lmstudio/models": "LM Studio",
    },
    "win32": {
        "Desktop/ComfyUI_windows_portable/ComfyUI/models/unet": "ComfyUI",
        "Downloads/webui_forge_cu121_torch231/webui/models/Stable-diffusion": "Forge",
        "library/Models/StableDiffusion": "StabilityMatrix",
        "drive/more/unets": "ComfyUI",
    },
}
SETTINGS = {
    "linux": ".config",
    "darwin": "Library/Application Support",
    "win32": "AppData/Roaming",
}


@pytest.mark.parametrize("platform", PLACES)
def test_folders_of_other_programs_are_found_on_each_system(platform: str, tmp_path: Path) -> None:
    for place in PLACES[platform]:
        (tmp_path / place).mkdir(parents=True)
    settings = tmp_path / SETTINGS[platform]
    (settings / "StabilityMatrix").mkdir(parents=True)
    (settings / "ComfyUI").mkdir()
    library = json.dumps({"LibraryPath": str(tmp_path / "library")})
    (settings / "StabilityMatrix/library.json").write_text(library)
    extra = f"mine:\n  base_path: {tmp_path / 'drive'}\n  loras: more/loras\n  unet: |\n    more/unets\n"
    (settings / "ComfyUI/extra_models_config.yaml").write_text(extra)
    environment = {"APPDATA": str(settings)} if platform == "win32" else {}
    machine = Machine(platform=platform, home=tmp_path, environment=environment)
    found = {
        each.path.relative_to(tmp_path).as_posix(): each.program
        for each in model_folders(machine=machine)
        if each.path.is_relative_to(tmp_path)
    }
    assert found == PLACES[platform]


def test_a_folder_of_loras_leads_to_the_checkpoints_beside_it(tmp_path: Path) -> None:
    nowhere = Machine(platform="linux", home=tmp_path / "empty", environment={})
    for name in ("checkpoints", "unet", "loras", "vae"):
        (tmp_path / "comfy/models" / name).mkdir(parents=True)
    wanted = [tmp_path / "comfy/models/checkpoints", tmp_path / "comfy/models/unet"]
    for named in ("comfy", "comfy/models", "comfy/models/loras"):
        assert [each.path for each in model_folders([tmp_path / named], machine=nowhere)] == wanted
    other = tmp_path / "somewhere"
    other.mkdir()
    assert [each.path for each in model_folders([other], machine=nowhere)] == [other]


def test_settings_of_other_programs_that_cannot_be_read_are_passed_over(tmp_path: Path) -> None:
    for name, text in {
        "ComfyUI/extra_models_config.yaml": "a: [",
        "StabilityMatrix/library.json": '{"LibraryPath": 5}',
    }.items():
        file = tmp_path / ".config" / name
        file.parent.mkdir(parents=True)
        file.write_text(text)
    machine = Machine(platform="linux", home=tmp_path, environment={})
    assert not [each for each in model_folders(machine=machine) if tmp_path in each.path.parents]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder as ComfyUI's checkpoints may be: bases, and what somebody has put beside them."""
    folder = tmp_path_factory.mktemp("checkpoints")
    (folder / "anime").mkdir()
    for name, file in {"sd15": "dream.safetensors", "sdxl": "anime/pony.safetensors"}.items():
        write_checkpoint(base_of(name), folder / file, families.family(name).text)
    copy_of("flux", folder / "whole")
    save_file({"lora_unet_a.lora_down.weight": torch.zeros(1, 4)}, folder / "style.safetensors")
    (folder / "half.safetensors").write_bytes((folder / "dream.safetensors").read_bytes()[:-9])
    (folder / "old.ckpt").write_bytes(b"\x80\x02")
    (folder / "notes.txt").write_text("mine")
    (folder / "again").symlink_to(folder / "anime", target_is_directory=True)
    (folder / "circle").symlink_to(folder, target_is_directory=True)
    return folder


def found_in(folder: Path, memo: MemoTable, **options: int) -> dict[str, FoundModel]:
    places = model_folders(
        [folder], machine=Machine(platform="linux", home=folder / "none", environment={})
    )
    found = found_models([each for each in places if each.path == folder], memo=memo, **options)
    assert found.is_cut == ("max_files" in options)
    return {each.name: each for each in found.models}


def test_each_file_is_what_its_header_says(models: Path) -> None:
    found = found_in(models, MemoTable(name="models"))
    kinds = {name: (each.verdict, each.family) for name, each in found.items()}
    assert kinds == {
        "dream": ("base", "sd15"),
        "pony": ("base", "sdxl"),
        "whole": ("base", "flux"),
        "style": ("other", ""),
        "old": ("other", ""),
        "half": ("broken", ""),
    }
    assert found["pony"].kind == "SDXL" and found["pony"].source.endswith("anime/pony.safetensors")
    assert "LoRA" in found["style"].why and "pickle" in found["old"].why
    assert "not a whole safetensors file" in found["half"].why
    few = found_in(models, MemoTable(name="models"), max_files=3)
    assert len(few) == 3


def test_a_header_is_read_once_until_its_file_changes(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = found_in(models, MemoTable.load(tmp_path, "models"))

    def refuse(path: Path) -> object:
        raise AssertionError(f"{path} is read again")

    for name in ("_file", "_folder"):
        monkeypatch.setattr(finder, name, refuse)
    assert found_in(models, MemoTable.load(tmp_path, "models")) == before
    (models / "new.safetensors").write_bytes(b"new")
    with pytest.raises(AssertionError, match=r"new\.safetensors is read again"):
        found_in(models, MemoTable.load(tmp_path, "models"))
    (models / "new.safetensors").unlink()


def test_the_hub_s_cache_gives_ids(models: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "models--owner--base/snapshots/abc"
    snapshot.parent.mkdir(parents=True)
    copy_of("sd15", snapshot)
    (tmp_path / "models--owner--captioner/snapshots/abc").mkdir(parents=True)
    found = found_models([], hub_cache=tmp_path, memo=MemoTable(name="models"))
    assert [(each.source, each.program, each.family) for each in found.models] == [
        ("owner/base", "Hugging Face", "sd15")
    ]

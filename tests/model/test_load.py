"""From what the user wrote to a layout, its facts and identities; refusals say what to do."""

from __future__ import annotations

from pathlib import Path
from shutil import copytree
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError, MachineError, RequestError
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.files.locate import describe, identified, locate, with_choices
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.fakes.family_bases import base_of, copy_of, edit_json, image_encoder_of
from tests.fakes.training import tiny_base


def base(model: str | Path, **settings: Any) -> BaseSettings:
    return BaseSettings(model=str(model), **settings)


# ---- folders and Hub ids


def test_a_folder_is_found_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = describe(base(tiny_base())).located
    assert whole.folder == tiny_base() and not whole.files and not whole.text
    embedded = describe(base("embedded")).located.folder
    assert embedded == Path(families.__file__).parents[1] / "embedded"
    copytree(tiny_base(), tmp_path / "owner" / "name")
    monkeypatch.chdir(tmp_path)
    relative = describe(base("owner/name")).located.folder
    assert relative == Path("owner/name"), "a folder wins over a Hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert describe(base("~/owner/name")).located.folder == tmp_path / "owner" / "name"


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "word"])
def test_a_path_that_is_not_there_is_named(source: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        describe(base(source))


@pytest.mark.filterwarnings("ignore")
def test_without_a_connection_the_download_says_so() -> None:
    with pytest.raises(MachineError, match="offline mode forbids downloads"):
        locate(base("nobody/nothing"))


# ---- single files


def test_a_file_that_is_not_there_or_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        describe(base(tmp_path / "no.safetensors"))
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(InputError, match="model.gguf is not a whole GGUF file"):
        describe(base(file))


@pytest.fixture
def single(tmp_path: Path) -> Path:
    """A checkpoint of sd15 with denoiser and VAE."""
    unet = layouts.prefixed(layouts.UNET, layouts.network("sd15"))
    shapes = unet | layouts.prefixed(layouts.VAE, layouts.vae())
    return write(Case("single", shapes, file="single.safetensors"), tmp_path)


def test_without_its_companion_a_single_file_is_described_by_its_family(
    single: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = describe(base(single))
    assert (facts.family, facts.source, facts.layout) == ("sd15", str(single), None)
    asked = list[Any]()

    def fetch(source: str, *, choose: Any, **_: Any) -> Path:
        names = [
            "unet/config.json",
            *(f"{part}/model.safetensors" for part in ("unet", "vae", "text_encoder")),
        ]
        asked.append((source, choose(names)))
        raise MachineError("no connection", fix="connect")

    monkeypatch.setattr("lora_trainer.families.files.locate.fetch", fetch)
    with pytest.raises(MachineError):
        locate(base(single))
    default = next(iter(families.family("sd15").releases))
    lacking = ["text_encoder/model.safetensors", "unet/config.json"]
    assert asked == [(default, lacking)], "only what the file lacks"


def test_a_companion_of_another_family_is_refused(single: Path) -> None:
    with pytest.raises(InputError, match="is of family sdxl, single.safetensors is sd15"):
        describe(base(single, companion=str(base_of("sdxl"))))


# ---- another VAE


def test_another_vae_folder_stands_in_for_the_base_s(tmp_path: Path) -> None:
    other = copy_of("sd15", tmp_path / "other") / "vae"
    edit_json(other / "config.json", scaling_factor=0.5 * 1.0002)
    plain = identified(describe(base(tiny_base())), HashMemo())
    for named in (other, other.parent):
        changed = identified(describe(base(tiny_base(), vae=str(named))), HashMemo())
        assert changed.located.files == {"vae": other}
        assert image_encoder_of(changed).vae.config.scaling_factor == 0.5 * 1.0002
        different = [part for part in plain.parts if plain.parts[part] != changed.parts[part]]
        assert different == ["vae"]
    for change in ({"scaling_factor": 0.7}, {"latent_channels": 16}):
        edit_json(other / "config.json", **change)
        with pytest.raises(InputError, match="the VAE in .* the base model's"):
            describe(base(tiny_base(), vae=str(other)))


def test_a_vae_that_is_none_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "thing.safetensors"
    save_file({"some.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(InputError, match="thing.safetensors holds no VAE of family sd15"):
        describe(base(tiny_base(), vae=str(file)))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="has no config.json"):
        describe(base(tiny_base(), vae=str(tmp_path / "empty")))


# ---- what the user knows better


@pytest.mark.parametrize(
    ("name", "settings", "zero", "said"),
    [
        ("sd15", {}, True, "pure noise says nothing"),
        ("sd15", {"prediction": "flow"}, "auto", "base.prediction=flow"),
        ("flux", {"prediction": "epsilon"}, "auto", "base.prediction=epsilon"),
        ("flux", {}, True, "flow matching starts at pure noise"),
    ],
)
def test_impossible_choices_are_refused(
    name: str, settings: dict[str, Any], zero: Any, said: str
) -> None:
    facts = describe(base(base_of(name)))
    with pytest.raises(RequestError, match=said):
        with_choices(facts, base("x", **settings), zero_terminal_snr=zero)


# ---- identities


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("unet/config.json", "denoiser"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("text_encoder/config.json", "text_encoder"),
        ("tokenizer/tokenizer.json", "text_encoder"),
        # R1: captions cached with one template were taken for those of another.
        ("tokenizer/chat_template.jinja", "text_encoder"),
        ("scheduler/scheduler_config.json", None),
    ],
)
def test_any_change_of_a_part_changes_its_identity_alone(
    tmp_path: Path, file: str, part: str | None
) -> None:
    before = identified(describe(base(tiny_base())), HashMemo()).parts
    assert len({part.identity for part in before.values()}) == 3
    copied = copytree(tiny_base(), tmp_path / "changed")
    same = identified(describe(base(copied)), HashMemo()).parts
    assert same == before, "where a base lies does not matter"
    (copied / file).touch()
    data = bytearray((copied / file).read_bytes())
    # The last value of a weight, or white space before the end of a JSON object.
    (copied / file).write_bytes(
        data[:-1] + bytes([data[-1] ^ 1]) if file.endswith("tensors") else b" " + data
    )
    new = identified(describe(base(copied)), HashMemo()).parts
    assert [name for name in new if before[name] != new[name]] == ([part] if part else [])

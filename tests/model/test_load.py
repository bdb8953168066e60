"""From what the user wrote to a folder, its facts and identities; refusals say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from lora_trainer.errors import InputError, MachineError
from lora_trainer.files import HashMemo
from lora_trainer.model.load import (
    EMBEDDED,
    EMBEDDED_FOLDER,
    describe,
    find_local,
    identified,
    locate,
)
from tests.fakes.tiny_base import copy_base
from tests.fakes.training import tiny_base

HUB_ID = "stable-diffusion-v1-5/stable-diffusion-v1-5"


def memo() -> HashMemo:
    return HashMemo(file=Path("unused.json"), entries={})


def test_a_folder_is_found_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_local(str(tiny_base())) == tiny_base()
    assert find_local(EMBEDDED) == EMBEDDED_FOLDER
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert find_local("owner/name") == Path("owner/name"), "a folder wins over a Hub id"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert find_local("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("suffix", [".ckpt", ".pt", ".pth", ".bin"])
def test_a_pickle_is_refused(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"model{suffix}"
    file.write_bytes(b"x")
    with pytest.raises(InputError, match=f"model{suffix} is a pickle"):
        find_local(str(file))


def test_a_single_file_is_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(InputError, match="model.safetensors is a single file"):
        find_local(str(file))


@pytest.mark.parametrize("source", ["/no/such/folder", "./nowhere", "~/nowhere", "a/b/c", "word"])
def test_a_path_that_is_not_there_is_named(source: str) -> None:
    with pytest.raises(InputError, match="does not exist"):
        find_local(source)


def test_a_known_hub_id_is_described_without_a_download() -> None:
    assert find_local(HUB_ID) is None
    facts = describe(HUB_ID)
    assert (facts.family, facts.path, facts.resolution_px) == ("sd15", None, 512)
    assert facts.download_bytes > 1e9


def test_an_unknown_hub_id_cannot_be_described_here() -> None:
    with pytest.raises(MachineError, match="not on this machine"):
        describe("nobody/nothing")


@pytest.mark.filterwarnings("ignore")
def test_without_a_connection_the_download_says_so() -> None:
    with pytest.raises(MachineError, match="no connection, or offline mode"):
        locate("nobody/nothing", revision=None)


def test_a_local_base_is_described_without_hashing() -> None:
    facts = describe(str(tiny_base()))
    assert (facts.family, facts.path, facts.source) == ("sd15", tiny_base(), str(tiny_base()))
    assert {part.identity for part in facts.parts.values()} == {""}


def test_identities_are_per_part_and_by_content(tmp_path: Path) -> None:
    facts = identified(describe(str(tiny_base())), memo())
    copied = copy_base(tiny_base(), tmp_path / "copy")
    same = identified(describe(str(copied)), memo())
    assert len({part.identity for part in facts.parts.values()}) == 3
    assert all(len(part.identity) == 64 for part in facts.parts.values())
    assert same.parts == facts.parts, "where a base lies does not matter"


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("unet/config.json", "denoiser"),
        ("unet/diffusion_pytorch_model.safetensors", "denoiser"),
        ("vae/config.json", "vae"),
        ("vae/diffusion_pytorch_model.safetensors", "vae"),
        ("text_encoder/config.json", "text_encoder"),
        ("text_encoder/model.safetensors", "text_encoder"),
        ("tokenizer/tokenizer.json", "text_encoder"),
        ("scheduler/scheduler_config.json", None),
    ],
)
def test_any_change_of_a_part_changes_its_identity_alone(
    tmp_path: Path, file: str, part: str | None
) -> None:
    before = describe(str(tiny_base()))
    copied = copy_base(tiny_base(), tmp_path / "changed")
    data = bytearray((copied / file).read_bytes())
    # The last value of a weight, or white space before the end of a JSON object.
    (copied / file).write_bytes(
        data[:-1] + bytes([data[-1] ^ 1]) if file.endswith("tensors") else b" " + data
    )
    old, new = identified(before, memo()).parts, identified(describe(str(copied)), memo()).parts
    assert [name for name in old if old[name] != new[name]] == ([part] if part else [])

"""Single files of every transformer family: the release's names, other precisions, parts that do not fit."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header
from tests.fakes.family_bases import CPU, base_of, denoiser_of, facts_of
from tests.fakes.ldm_file import vae_tensors
from tests.fakes.original_names import NORMS, original_names, split_at

TRANSFORMERS = pytest.mark.parametrize("name", NORMS)
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def tiny_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    split_at(monkeypatch, inner=32)


def facts_with(name: str, part: str, tensors: dict[str, Tensor], folder: Path) -> BaseFacts:
    """Write a part into a file and return the facts of the tiny base with it."""
    file = folder / f"{name}-base.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    layout = Layout(folder=base_of(name), files={part: file})  # type: ignore[dict-item]  # a part
    return families.family(name).facts(layout, source=str(file))


@pytest.mark.parametrize(
    ("prefix", "dtype"), [("", torch.float8_e4m3fn), (PREFIX, torch.float32)], ids=["fp8", "all"]
)
@TRANSFORMERS
def test_a_file_of_the_release_holds_the_same_denoiser(
    name: str, prefix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A file of the denoiser alone, and one that has parts of other encoders too."""
    wanted = denoiser_of(name).state_dict()
    tensors = {prefix + key: t.to(dtype) for key, t in original_names(name, wanted).items()}
    if prefix:
        tensors["text_encoders.t5xxl.shared.weight"] = torch.zeros(9, 9)
    facts = facts_with(name, "denoiser", tensors, tmp_path)
    (file,) = tmp_path.iterdir()
    family = families.family(name)
    assert families.detect_file(read_header(file)) == (family, {"denoiser"})
    assert facts.parts == facts_of(name).parts
    if name == "lumina2":
        return  # diffusers' conversion of it knows the release's width only
    network = family.load_denoiser(facts, dtype=torch.bfloat16, device=CPU)
    assert not network.training and not any(p.requires_grad for p in network.parameters())
    loaded = network.state_dict()
    assert loaded.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(loaded[key], tensor.to(dtype).bfloat16()), key


@TRANSFORMERS
def test_a_file_that_lacks_a_tensor_names_the_companion(name: str, tmp_path: Path) -> None:
    tensors = original_names(name, denoiser_of(name).state_dict())
    lost = next(key for key in reversed(tensors) if re.search(r"(blocks|layers)\.0\..*weight", key))
    del tensors[lost]
    with pytest.raises(InputError, match="companion's configuration") as caught:
        facts = facts_with(name, "denoiser", tensors, tmp_path)
        families.family(name).load_denoiser(facts, dtype=torch.float32, device=CPU)
    assert "base.companion" in caught.value.fix


@pytest.mark.parametrize(
    ("name", "width", "blocks"),
    [("flux2", "txt_in.weight", "single_blocks"), ("zimage", "cap_embedder.1.weight", "layers")],
)
def test_a_file_of_another_size_names_the_companion(
    name: str, width: str, blocks: str, tmp_path: Path
) -> None:
    tensors = original_names(name, denoiser_of(name).state_dict())
    shallower = {key: t for key, t in tensors.items() if not key.startswith(f"{blocks}.1.")}
    for wrong, other in ((width, {**tensors, width: torch.zeros(8, 96)}), (blocks, shallower)):
        with pytest.raises(InputError, match=wrong) as caught:
            facts_with(name, "denoiser", other, tmp_path)
        assert "base.companion" in caught.value.fix


@pytest.mark.parametrize("prefix", ["", "vae.", "first_stage_model."])
@pytest.mark.parametrize("name", ["flux", "chroma", "sd3"])
def test_a_vae_file_replaces_the_folder_s(name: str, prefix: str, tmp_path: Path) -> None:
    family, own = families.family(name), families.family(name).load_vae(facts_of(name).located)
    tensors = {prefix + key: tensor + 1 for key, tensor in vae_tensors(base_of(name)).items()}
    facts = facts_with(name, "vae", tensors, tmp_path)
    (file,) = tmp_path.iterdir()
    assert family.detect_file(read_header(file)) == {"vae"}
    assert facts.parts == facts_of(name).parts
    loaded = family.load_vae(facts.located).state_dict()
    for key, tensor in own.state_dict().items():
        assert torch.equal(loaded[key], tensor + 1), key


def test_flux2_s_vae_is_in_a_folder(tmp_path: Path) -> None:
    """Its statistics are in no file that others write."""
    with pytest.raises(InputError, match="VAE"):
        facts_with("flux2", "vae", vae_tensors(base_of("flux2")), tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("lumina2", "cap_pad_token"),  # Z-Image's
        ("qwen", "__index_timestep_zero__"),  # an editing model
        ("qwen", "time_text_embed.addition_t_embedding.weight"),  # a layered one
    ],
)
def test_relatives_are_not_taken(name: str, tensor: str, tmp_path: Path) -> None:
    own = original_names(name, denoiser_of(name).state_dict())
    save_file({**own, tensor: torch.zeros(1, 16)}, tmp_path / "relative.safetensors")
    assert not families.family(name).detect_file(read_header(tmp_path / "relative.safetensors"))

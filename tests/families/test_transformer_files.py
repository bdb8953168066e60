"""Single files of every transformer family: the release's names, other precisions, parts that do not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, TensorInfo
from lora_trainer.families.base_files.base_folder import read_header
from tests.fakes.family_bases import (
    base_of,
    copy_of,
    denoiser_of,
    draw,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
)
from tests.fakes.json_files import edit_json
from tests.fakes.ldm_file import vae_tensors
from tests.fakes.original_names import NORMS, original_names, split_at

TRANSFORMERS = pytest.mark.parametrize("name", NORMS)
PREFIX = "model.diffusion_model."


@pytest.fixture(autouse=True)
def tiny_flux(monkeypatch: pytest.MonkeyPatch) -> None:
    split_at(monkeypatch, inner=32)


def original(name: str) -> dict[str, Tensor]:
    return original_names(name, denoiser_of(name).state_dict())


def facts_with(name: str, part: str, tensors: Mapping[str, Tensor], folder: Path) -> BaseFacts:
    """Write a part into a file and return the facts of the tiny base with it."""
    file = folder / f"{name}-base.safetensors"
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, file)
    return facts_at(base_of(name), source=str(file), family=name, **{part: file})


# ---- a denoiser


@pytest.mark.parametrize(
    ("prefix", "dtype"),
    [("", torch.float8_e4m3fn), (PREFIX, torch.float32), ("diffusion_model.", torch.float32)],
    ids=["fp8", "all", "short"],
)
@TRANSFORMERS
def test_a_file_of_the_release_holds_the_same_denoiser(
    name: str, prefix: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    """A file of the denoiser alone, and those that have parts of other encoders too."""
    wanted = denoiser_of(name).state_dict()
    tensors = {prefix + key: t.to(dtype) for key, t in original_names(name, wanted).items()}
    if prefix:
        tensors["text_encoders.t5xxl.shared.weight"] = torch.zeros(9, 9)
    facts = facts_with(name, "denoiser", tensors, tmp_path)
    (file,) = tmp_path.iterdir()
    assert families.detect_file(read_header(file)) == (families.family(name), {"denoiser"})
    assert facts.parts == facts_of(name).parts
    if name == "lumina2":
        return  # diffusers' conversion of it knows the release's width only
    network = network_of(facts, torch.bfloat16)
    assert not network.training and not any(p.requires_grad for p in network.parameters())
    loaded = network.state_dict()
    assert loaded.keys() == wanted.keys()
    for key, tensor in wanted.items():
        assert torch.equal(loaded[key], tensor.to(dtype).bfloat16()), key


def test_a_file_of_another_size_names_the_companion(tmp_path: Path) -> None:
    """Before anything is loaded where the companion is a release, else while loading."""
    tensors = original("flux2") | {"txt_in.weight": torch.zeros(8, 96)}
    facts = facts_with("flux2", "denoiser", tensors, tmp_path)
    with pytest.raises(InputError, match="not that of its companion") as caught:
        network_of(facts)
    assert "base.companion" in caught.value.fix
    (file,) = tmp_path.glob("*.safetensors")
    folder = copy_of("flux2", tmp_path / "base")
    edit_json(
        folder / "transformer" / "config.json", **families.family("flux2").published[2].architecture
    )
    edit_json(folder / "text_encoder" / "config.json", hidden_size=4096)
    with pytest.raises(InputError, match="parameters, the companion 9,078,581,248"):
        facts_at(folder, denoiser=file)


def test_a_pruned_file_is_as_deep_as_it_is(tmp_path: Path) -> None:
    tensors = denoiser_of("qwen").state_dict()
    kept = {key: t for key, t in tensors.items() if not key.startswith("transformer_blocks.1.")}
    facts = facts_with("qwen", "denoiser", kept, tmp_path)
    assert facts.architecture["num_layers"] == 1
    assert network_of(facts).state_dict().keys() == kept.keys()


# ---- a VAE


@pytest.mark.parametrize(
    ("name", "prefix"), [("flux", ""), ("flux", "vae."), ("sd3", "first_stage_model.")]
)
def test_a_vae_file_replaces_the_folder_s(name: str, prefix: str, tmp_path: Path) -> None:
    family, own = families.family(name), image_encoder_of(facts_of(name)).vae
    tensors = {prefix + key: tensor + 1 for key, tensor in vae_tensors(base_of(name)).items()}
    facts = facts_with(name, "vae", tensors, tmp_path)
    (file,) = tmp_path.iterdir()
    assert family.detect_file(read_header(file)) == {"vae"}
    assert facts.parts == facts_of(name).parts
    loaded = image_encoder_of(facts).vae.state_dict()
    for key, tensor in own.state_dict().items():
        assert torch.equal(loaded[key], tensor + 1), key


def test_flux2_s_vae_is_in_a_folder(tmp_path: Path) -> None:
    """Its statistics are in no file that others write."""
    with pytest.raises(InputError, match="VAE"):
        facts_with("flux2", "vae", vae_tensors(base_of("flux2")), tmp_path)


WAN = (
    (r"^post_quant_conv\.", "conv2."),
    (r"^quant_conv\.", "conv1."),
    (r"((?:resnets|down_blocks)\..*)norm1\.", r"\1residual.0."),
    (r"((?:resnets|down_blocks)\..*)conv1\.", r"\1residual.2."),
    (r"((?:resnets|down_blocks)\..*)norm2\.", r"\1residual.3."),
    (r"((?:resnets|down_blocks)\..*)conv2\.", r"\1residual.6."),
    (r"coder\.conv_in\.", "coder.conv1."),
    (r"norm_out\.", "head.0."),
    (r"conv_out\.", "head.2."),
    (r"mid_block\.resnets\.0\.", "middle.0."),
    (r"mid_block\.attentions\.0\.", "middle.1."),
    (r"mid_block\.resnets\.1\.", "middle.2."),
    (r"encoder\.down_blocks\.", "encoder.downsamples."),
    (r"conv_shortcut\.", "shortcut."),
)
"""diffusers' names -> those of Wan, the video model that Qwen-Image's VAE comes from."""


def wan_name(name: str) -> str:
    """Return Wan's name of a tensor; levels of the decoder have four layers."""
    for pattern, new in WAN:
        name = re.sub(pattern, new, name)
    if up := re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", name):
        level, kind, index, rest = up.groups()
        layer = 4 * int(level) + (3 if kind == "upsamplers" else int(index))
        return f"decoder.upsamples.{layer}.{rest}"
    return name


@pytest.mark.parametrize("renamed", [str, wan_name], ids=["diffusers", "wan"])
def test_a_video_vae_in_a_file_gives_what_its_folder_gives(renamed: Any, tmp_path: Path) -> None:
    """The VAE has the release's depth: the other names depend on it."""
    folder, file = copy_of("qwen", tmp_path / "base"), tmp_path / "vae.safetensors"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(base_dim=4)
    vae.save_pretrained(folder / "vae")
    save_file({renamed(name): tensor for name, tensor in vae.state_dict().items()}, file)
    assert families.family("qwen").detect_file(read_header(file)) == {"vae"}
    whole, facts = facts_at(folder), facts_at(folder, vae=file)
    assert facts.parts["vae"] == whole.parts["vae"] and facts.vae_factor == 8
    loaded = image_encoder_of(facts).vae.state_dict()
    assert loaded.keys() == vae.state_dict().keys()
    assert all(torch.equal(loaded[key], tensor) for key, tensor in vae.state_dict().items())


# ---- all parts in one file


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An all-in-one checkpoint of the tiny Stable Diffusion 3; CLIP-L's projection is in no such file."""
    base = base_of("sd3")
    tensors = {PREFIX + name: tensor for name, tensor in original("sd3").items()}
    tensors |= {f"first_stage_model.{key}": tensor for key, tensor in vae_tensors(base).items()}
    roles = {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}
    for folder, role in roles.items():
        for name, tensor in load_file(base / folder / "model.safetensors").items():
            tensors[f"text_encoders.{role}.transformer.{name}"] = tensor
    del tensors["text_encoders.clip_l.transformer.text_projection.weight"]
    file = tmp_path_factory.mktemp("files") / "all.safetensors"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file)
    return file


def test_a_checkpoint_gives_what_its_folder_gives(checkpoint: Path, tmp_path: Path) -> None:
    """Its companion has configurations only."""
    parts = families.family("sd3").detect_file(read_header(checkpoint))
    assert parts == {"denoiser", "vae", "text_encoder"}
    companion, own = copy_of("sd3", tmp_path / "companion"), facts_of("sd3")
    for weight in companion.rglob("*.safetensors"):
        weight.unlink()
    facts = facts_at(companion, **dict.fromkeys(parts, checkpoint))
    assert facts.variant == "medium" and facts.max_tokens == 256
    assert facts.parts["denoiser"] == own.parts["denoiser"]
    assert facts.parts["vae"] == own.parts["vae"]
    loaded = network_of(facts).state_dict()
    for name, tensor in denoiser_of("sd3").state_dict().items():
        assert torch.equal(loaded[name], tensor)
    prompts, pixels = ["a red square", "many words " * 60, ""], draw(1, 3, 32, 32, seed=3)
    wanted = encoder_of(own).encode_prompts(prompts)
    for name, tensor in encoder_of(facts).encode_prompts(prompts).items():
        torch.testing.assert_close(tensor, wanted[name])
    mean, expected = (image_encoder_of(f).encode_images(pixels)[0].mean for f in (facts, own))
    torch.testing.assert_close(mean, expected)
    assert pipeline_of(facts).text_encoder_3 is not None


def test_other_files_are_not_taken_for_a_base(checkpoint: Path) -> None:
    whole, detect = read_header(checkpoint), families.family("sd3").detect_file

    def without(part: str) -> dict[str, TensorInfo]:
        return {name: info for name, info in whole.items() if part not in name}

    # With two of three text encoders it takes those of its companion.
    assert detect(without("t5xxl")) == {"denoiser", "vae"}
    assert detect(without("text_encoders.")) == {"denoiser", "vae"}
    assert detect(without("first_stage")) == {"denoiser", "text_encoder"}
    vae = {name: info for name, info in whole.items() if name.startswith("first_stage_model.")}
    assert detect(vae) == {"vae"}
    # Another family's checkpoint has a VAE of the same shape, with other weights.
    other = TensorInfo(dtype="F32", shape=(8, 8))
    assert not detect({**vae, f"{PREFIX}double_blocks.0.weight": other})
    inpainting = TensorInfo(dtype="F32", shape=(16, 33, 2, 2))
    assert "denoiser" not in detect({**whole, f"{PREFIX}x_embedder.proj.weight": inpainting})
    assert not detect({"joint_blocks.0.context_block.adaLN_modulation.1.lora_A.weight": other})

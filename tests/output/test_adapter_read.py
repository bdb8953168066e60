"""Adapter files of other trainers: modules, kinds and strength, as their own readers take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file.base_layers import LayerNames
from lora_trainer.lora_file.read import Contents
from lora_trainer.lora_file.read_tensors import read_tensors
from lora_trainer.tools.adapters import open_source
from tests.fakes.adapters import Draws, tool

BLOCK = "unet.down_blocks.0.attentions.0.transformer_blocks.0.attn1"
Q, V, OUT = f"{BLOCK}.to_q", f"{BLOCK}.to_v", f"{BLOCK}.to_out.0"
TEXT = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
draw = Draws()
DOWN, UP = draw(4, 320), draw(320, 4)


def pair(module: str, **more: Tensor) -> dict[str, Tensor]:
    """Return a LoRA in peft's names; more tensors by the end of their keys, `.` written `__`."""
    down, up = (draw(4, 768), draw(3072, 4)) if module == TEXT else (DOWN, UP)
    others = {f"{module}.{name.replace('__', '.')}": each for name, each in more.items()}
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up, **others}


def write(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> Path:
    copies = {key: tensor.clone() for key, tensor in tensors.items()}
    path.write_bytes(save(copies, metadata={"ss_base_model_version": "sd_v1", **metadata}))
    return path


def only(path: Path, tensors: Mapping[str, Tensor], **metadata: str) -> ModuleTensors:
    with open_source(write(path, tensors, **metadata)) as source:
        (module,) = source.values()
    return module


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "a.safetensors"


# ---- strength


STATED = {
    "unet.r": 4,
    "unet.lora_alpha": 2,
    "unet.alpha_pattern": {f"^{OUT.partition('.')[2]}".replace(".", "\\."): 8, "to_v": 1},
    "text_encoder.lora_alpha": 12,
}
EVIL = {"unet.lora_alpha": 2, "unet.alpha_pattern": {"(a|a)*" * 20 + "$": 1, "(.+)+x": 3}}
UNREADABLE = ("[1", "[]", '{"unet.lora_alpha": "2"}', '{"unet.lora_alpha": NaN}')


@pytest.mark.timeout(20)
def test_alphas_that_diffusers_states_in_the_header(file: Path) -> None:
    """A hostile pattern does not hang, and what cannot be read is not stated."""
    stated = json.dumps(STATED)
    for module, text, scale in (
        *((Q, stated, 0.5), (OUT, stated, 2.0), (V, stated, 0.25), (TEXT, stated, 3.0)),
        (Q, json.dumps(EVIL), 0.5),
        *((Q, odd, 1.0) for odd in UNREADABLE),
    ):
        assert only(file, pair(module), lora_adapter_metadata=text).scale == scale


def test_numbers_that_were_computed_are_not_rounded_to_the_dtype_of_the_file(file: Path) -> None:
    blocks = {f"{Q}.oft_blocks": draw(160, 2, 2).half()}
    for limit, dtype in ((0.0, torch.float16), (1e-5, torch.float64)):
        module = only(file, {**blocks, f"{Q}.alpha": torch.tensor(limit)})
        assert module.tensors["blocks"].dtype == dtype


# ---- layers that no release has, or that transformers calls by another name today


def test_layers_of_this_base_are_found_by_every_spelling() -> None:
    deep, clip = "down_blocks.7.resnets.0.conv1", "text_model.encoder.layers.3.self_attn.q_proj"
    sd15 = families.family("sd15")
    assert not LayerNames(sd15, {"denoiser": []}).find(f"unet.{deep}")
    assert LayerNames(sd15, {"denoiser": [deep]}).find(f"unet.{deep}")
    for layer in (clip, clip.removeprefix("text_model.")):
        names = LayerNames(sd15, {"text_encoder": [layer], "text_encoder_2": [layer]})
        for component, spelling in (
            ("text_encoder", f"lora_te_{clip}".replace(".", "_")),
            ("text_encoder", "lora_te1_encoder_layers_3_self_attn_q_proj"),
            ("text_encoder_2", f"lora_te2_{clip}".replace(".", "_")),
            ("text_encoder_2", f"text_encoder_2.{clip}".replace("q_proj", "to_q")),
        ):
            assert [each.key for each in names.find(spelling)] == [f"{component}.{layer}"]
        assert not names.find("encoder.layers.3.self_attn.q_proj"), "of either"
    block = "transformer_blocks.0.attn.to_q"  # and as a replacement gone wrong has it
    names = LayerNames(families.family("flux"), {"denoiser": [block]})
    assert [each.key for each in names.find("lora_sformer_blocks_0_attn_to_q")] == [
        f"denoiser.{block}"
    ]


def test_parts_of_a_joined_layer_share_the_alpha_beside_it(file: Path) -> None:
    """As sd-scripts' split_qkv writes q, k and v of one layer."""
    qkv, sides = "lora_unet_double_blocks_0_img_attn_qkv", {"down": (2, 4), "up": (4, 2)}
    tensors = {
        f"{qkv}.lora_{side}.{number}.weight": torch.ones(shape)
        for number in range(3)
        for side, shape in sides.items()
    }
    layers = {f"transformer_blocks.0.attn.to_{name}": (4, 4) for name in "qkv"}
    names = LayerNames(families.family("flux"), {"denoiser": layers})
    read = read_tensors(write(file, {**tensors, f"{qkv}.alpha": torch.tensor(1.0)}), names=names)
    assert {key: each.scale for key, each in read.items()} == {f"denoiser.{n}": 0.5 for n in layers}


def test_that_a_file_has_a_layer_is_said_without_reading_it(file: Path) -> None:
    with open_source(write(file, pair(Q))) as source:
        (key,) = source
        with patch.object(Contents, "array") as read:
            assert key in source and "denoiser.other" not in source
            assert not read.called


# ---- refused


def test_rows_that_a_joined_layer_does_not_have_are_refused(file: Path) -> None:
    layers = [f"transformer_blocks.0.attn.to_{name}" for name in "qkv"]
    qkv = "lora_unet_double_blocks_0_img_attn_qkv.lora"
    write(file, {f"{qkv}_down.weight": torch.ones(1, 4), f"{qkv}_up.weight": torch.ones(8, 1)})
    for modules, reason in (
        (layers, "the layers that it joins have unknown sizes"),
        (dict.fromkeys(layers, (4, 4)), "has 8 outputs in .*, the layers that it joins have 12"),
    ):
        with pytest.raises(InputError, match=reason):
            read_tensors(file, names=LayerNames(families.family("flux"), {"denoiser": modules}))


def test_an_alpha_that_is_no_number_is_refused(file: Path) -> None:
    with pytest.raises(InputError, match="alpha of nan"):
        only(file, pair(Q, alpha=torch.tensor(float("nan"))))


def test_a_length_of_the_header_that_begins_as_a_pickle_does_is_read(file: Path) -> None:
    """Of headers, whose lengths are multiples of 8, one in 32 has a length that begins with 0x80, as a pickle does."""
    for padding in range(0, 512, 8):
        if write(file, pair(Q), note="x" * padding).read_bytes().startswith(b"\x80"):
            break
    assert file.read_bytes().startswith(b"\x80")
    assert tool("inspect", file)["modules"] == 1

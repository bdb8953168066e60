"""Adapter files of other trainers: modules, kinds and strength, as their own readers take them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.families import family
from lora_trainer.lora.tensors import ModuleTensors
from lora_trainer.lora_file import read as reading
from lora_trainer.lora_file.names import file_names
from lora_trainer.lora_file.read_tensors import open_adapter, read_tensors
from tests.fakes.adapters import Draws, exported, small_adapter

FAMILY = family("sd15")
BLOCK = "down_blocks.0.attentions.0.transformer_blocks.0"
Q, OUT, CONV = f"{BLOCK}.attn1.to_q", f"{BLOCK}.attn1.to_out.0", "mid_block.resnets.0.conv1"
TEXT = "text_model.encoder.layers.0.mlp.fc1"
MODULES = {"denoiser": [Q, OUT, CONV], "text_encoder": [TEXT]}
NAMES = file_names(FAMILY, MODULES)
FLAT = "lora_unet_" + Q.replace(".", "_")
draw = Draws()
DOWN, UP = draw(4, 8), draw(6, 4)
KEY = f"denoiser.{Q}"


def pair(down: str, up: str, **extra: Tensor) -> dict[str, Tensor]:
    return {down: DOWN, up: UP, **extra}


def read(tensors: Mapping[str, Tensor], **metadata: str) -> dict[str, ModuleTensors]:
    return read_tensors(save(dict(tensors), metadata=metadata or None), names=NAMES)


def only(tensors: Mapping[str, Tensor], **metadata: str) -> ModuleTensors:
    (module,) = read(tensors, **metadata).values()
    return module


# ---- spellings and strength


STATED = {
    "unet.r": 4,
    "unet.lora_alpha": 2,
    "unet.alpha_pattern": {f"^{OUT}".replace(".", "\\."): 8, "conv1": 1},
    "text_encoder.lora_alpha": 12,
}


def test_alphas_that_diffusers_states_in_the_header() -> None:
    for module, scale in (
        (f"unet.{Q}", 0.5),
        (f"unet.{OUT}", 2.0),
        (f"unet.{CONV}", 0.25),
        (f"text_encoder.{TEXT}", 3.0),
    ):
        tensors = pair(f"{module}.lora_A.weight", f"{module}.lora_B.weight")
        assert only(tensors, lora_adapter_metadata=json.dumps(STATED)).scale == scale


def test_what_the_header_states_unreadably_is_not_stated() -> None:
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    for odd in ("[1", "[]", '{"unet.lora_alpha": "2"}', '{"unet.lora_alpha": NaN}'):
        assert only(tensors, lora_adapter_metadata=odd).scale == 1.0


@pytest.mark.timeout(20)
def test_a_hostile_pattern_does_not_hang() -> None:
    evil = {"unet.lora_alpha": 2, "unet.alpha_pattern": {"(a|a)*" * 20 + "$": 1, "(.+)+x": 3}}
    tensors = pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight")
    assert only(tensors, lora_adapter_metadata=json.dumps(evil)).scale == 0.5


# ---- layers that no release has, or that transformers calls by another name today


def test_layers_of_this_base_are_found_by_every_spelling() -> None:
    deep, clip = "down_blocks.7.resnets.0.conv1", "text_model.encoder.layers.3.self_attn.q_proj"
    assert not file_names(FAMILY, {"denoiser": []}).find(f"unet.{deep}")
    assert file_names(FAMILY, {"denoiser": [deep]}).find(f"unet.{deep}")
    for layer in (clip, clip.removeprefix("text_model.")):
        names = file_names(FAMILY, {"text_encoder": [layer], "text_encoder_2": [layer]})
        for component, spelling in (
            ("text_encoder", f"lora_te_{clip}".replace(".", "_")),
            ("text_encoder", "lora_te1_encoder_layers_3_self_attn_q_proj"),
            ("text_encoder_2", f"lora_te2_{clip}".replace(".", "_")),
            ("text_encoder_2", f"text_encoder_2.{clip}".replace("q_proj", "to_q")),
        ):
            assert [each.key for each in names.find(spelling)] == [f"{component}.{layer}"]


# ---- our own files come back as they went


def test_modules_are_read_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(
        exported(
            small_adapter(), family=FAMILY, format="kohya", precision="fp16", metadata={"a": "b"}
        )
    )
    modules = [key.partition(".")[2] for key in small_adapter()]
    with open_adapter(file, names=file_names(FAMILY, {"denoiser": modules})) as adapter:
        assert (len(adapter), adapter.metadata["a"]) == (3, "b")
        assert list(adapter) == sorted(small_adapter())
        assert f"denoiser.{modules[0]}" in adapter and "denoiser.other" not in adapter
        read: list[str] = []
        real = reading.Contents.array

        def counting(spelt: Any, entry: Any) -> Any:
            read.append(entry.key)
            return real(spelt, entry)

        monkeypatch.setattr(reading.Contents, "array", counting)
        iterator = iter(adapter.items())
        assert f"denoiser.{modules[0]}" in adapter
        assert read == [], "nothing before it is asked for"
        _, module = next(iterator)
        assert len(read) == 3 and module.tensors["down"].dtype == torch.float16


# ---- refused


def spoilt(**changes: Any) -> dict[str, Tensor]:
    return {**pair(f"unet.{Q}.lora_A.weight", f"unet.{Q}.lora_B.weight"), **changes}


REFUSED: Sequence[tuple[Mapping[str, Tensor], str]] = [
    (
        spoilt(**{"unet.other.lora_A.weight": DOWN, "unet.other.lora_B.weight": UP}),
        "1 of 2 modules that the base model lacks, first 'unet.other'",
    ),
    ({f"unet.{Q}.lora_A.weight": DOWN}, "lacks tensors"),
    (spoilt(**{f"unet.{Q}.lora_B.bias": torch.ones(5)}), "5 numbers of bias for 6 outputs"),
    (
        spoilt(**{f"{FLAT}.lora_down.weight": DOWN, f"{FLAT}.lora_up.weight": UP}),
        "names one module twice",
    ),
    (
        spoilt(**{f"unet.{Q}.lora_A.default.weight": DOWN}),
        "two tensors for the down",
    ),
    (spoilt(**{f"unet.{Q}.lora_B.weight": draw(6, 5)}), "different rank"),
    (spoilt(**{f"unet.{Q}.dora_scale": torch.ones(1, 6)}), "6 magnitudes for 8 inputs"),
    (spoilt(**{f"unet.{Q}.dora_scale": torch.ones(8, 1)}), "8 magnitudes for 6 outputs"),
    (spoilt(**{f"unet.{Q}.alpha": torch.tensor(float("nan"))}), "alpha of nan"),
    ({f"unet.{Q}.oft_blocks": torch.ones(9, 3, 2, 2)}, "is a BOFT of 9 rounds"),
    ({}, "holds no adapter"),
]


def test_what_cannot_be_used_is_refused_in_one_line() -> None:
    for tensors, reason in REFUSED:
        file = save({key: tensor.clone() for key, tensor in tensors.items()})
        with pytest.raises(InputError, match=reason) as raised:
            read_tensors(file, names=NAMES)
        assert "\n" not in str(raised.value)


def test_a_length_of_the_header_that_begins_as_a_pickle_does_is_read(tmp_path: Path) -> None:
    """Of headers, whose lengths are multiples of 8, one in 32 has a length that begins with 0x80, as a pickle does."""
    file = tmp_path / "a.safetensors"
    tensors = {f"unet.{Q}.lora_A.weight": DOWN, f"unet.{Q}.lora_B.weight": UP}
    padding = next(
        n for n in range(0, 512, 8) if save(tensors, metadata={"note": "x" * n}).startswith(b"\x80")
    )
    file.write_bytes(save(tensors, metadata={"note": "x" * padding}))
    assert read_tensors(file, names=NAMES)

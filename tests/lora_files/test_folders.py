"""Folders as peft saves them: every tool reads them to the update that peft's own merge gives."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.lora.tensors import update
from lora_trainer.tools.adapters import open_source
from tests.fakes.adapters import tool
from tests.fakes.family_bases import base_of, denoiser_of

BASE = "flux"
LAYERS = ["attn.to_q", "attn.to_k"]
PLAIN: Mapping[str, Any] = {"r": 2, "lora_alpha": 5, "init_lora_weights": False}
LYCORIS: Mapping[str, Any] = {"alpha": 5, "init_weights": False}
KINDS: Mapping[str, tuple[type[peft.PeftConfig], Mapping[str, Any]]] = {
    "LoRA": (peft.LoraConfig, PLAIN),
    "rsLoRA": (peft.LoraConfig, {**PLAIN, "use_rslora": True}),
    "patterns": (
        peft.LoraConfig, {**PLAIN, "alpha_pattern": {"to_q": 3}, "rank_pattern": {"to_k": 1}}
    ),
    "DoRA": (peft.LoraConfig, {**PLAIN, "use_dora": True}),
    "LoHa": (peft.LoHaConfig, {"r": 2, **LYCORIS}),
    "LoKr": (peft.LoKrConfig, {"r": 1, **LYCORIS}),
    "LoKr of whole factors": (peft.LoKrConfig, {"r": 40, **LYCORIS}),
    "OFT": (peft.OFTConfig, {"r": 0, "oft_block_size": 4, "init_weights": False}),
}  # fmt: skip


def saved(kind: str, folder: Path) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """Save a random adapter; return the base's weights and those that peft merges it into, by layer."""
    torch.manual_seed(0)
    network = denoiser_of(BASE)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    config, options = KINDS[kind]
    model: Any = peft.get_peft_model(network, config(target_modules=LAYERS, **options))
    model.save_pretrained(folder)
    after = model.merge_and_unload().state_dict()
    names = [name for name in before if not torch.equal(before[name], after[name])]
    return (
        {f"denoiser.{name.removesuffix('.weight')}": before[name] for name in names},
        {f"denoiser.{name.removesuffix('.weight')}": after[name] for name in names},
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_is_read_to_what_peft_makes_of_it(kind: str, tmp_path: Path) -> None:
    before, after = saved(kind, tmp_path)
    problems = tool("inspect", tmp_path)["problems"]
    assert not [each for each in problems if each["severity"] == "error"]
    with open_source(tmp_path, base=str(base_of(BASE))) as source:
        assert set(source) == before.keys()
        for key in before:
            wanted = after[key].double() - before[key].double()
            change = update(source[key], before[key].double())
            assert float((change - wanted).norm() / wanted.norm()) < 1e-5, key


def test_every_tool_takes_a_folder(tmp_path: Path) -> None:
    base, folder = str(base_of(BASE)), tmp_path / "mine:0.5"
    saved("LoRA", folder)
    written = [
        tool("convert", folder, format="comfyui", base=base),
        tool("convert", folder, format="comfyui", base=base, output=tmp_path / "a.safetensors"),
        tool("merge", f"{folder}:1.0", output=tmp_path / "b.safetensors", base=base),
        tool("resize", folder, rank=1, output=tmp_path / "c.safetensors", base=base),
    ]
    files = [Path(each["file"]) for each in written]
    assert files[0].parent == folder and all(file.is_file() for file in files)
    baked = tool("merge", folder, into=base, output=tmp_path / "baked")
    assert baked["layers"] == tool("inspect", folder)["modules"]


def test_other_kinds_of_peft_are_refused_with_the_reason(tmp_path: Path) -> None:
    saved("LoRA", tmp_path)
    stated = tmp_path / "adapter_config.json"
    plain = json.loads(stated.read_text())
    for settings, reason in (
        ({"peft_type": "BOFT"}, "peft's kind BOFT"),
        ({"peft_type": "OFT", "num_cayley_neumann_terms": 9}, "settings of its own"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
    ):
        stated.write_text(json.dumps({**plain, **settings}))
        with pytest.raises(InputError, match=reason):
            tool("inspect", tmp_path)


def test_a_folder_without_an_adapter_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is a folder without adapter_model.safetensors"):
        tool("inspect", tmp_path)
    (tmp_path / "pytorch_lora_weights.bin").write_bytes(b"PK")
    with pytest.raises(InputError, match="as a pickle only"):
        tool("inspect", tmp_path)

"""Layers that are one weight in a reader's names: written as one, changed as each was trained, read back apart.

The oracle is what ComfyUI computes of such a file: up x down (no alpha is stated), added to the weight that has
the rows of q, k and v below each other.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.lora.adapter import denoiser_layers
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.base_layers import LayerNames
from lora_trainer.lora_file.key_formats import (
    AdapterContents,
    format_for,
    format_notes,
    planned_contents,
)
from lora_trainer.lora_file.read_tensors import read_tensors
from tests.fakes.adapters import adapter_for, adapter_of, denoiser_of, export, tool
from tests.fakes.family_bases import base_of, facts_of

FAMILY = families.family("lumina2")
QKV = ("to_q", "to_k", "to_v")


def layers() -> dict[str, tuple[int, ...]]:
    return denoiser_layers(FAMILY, facts_of("lumina2").release.architecture)


def trained(kind: str = "lora") -> dict[str, ModuleTensors]:
    """Return an adapter as trainings leave it: ranks with no effect yet, ranks and alphas of their own."""
    network, found = denoiser_of("lumina2"), dict[str, ModuleTensors]()
    for number, key in enumerate(adapter_of("lumina2")):
        layer = key.partition(".")[2]
        ranks = 2 if "layers.0" in key else 1 + number % 3
        options: dict[str, Any] = {"rank": ranks, "scale": 0.25 * (1 + number % 3), "kind": kind}
        found |= adapter_for("denoiser", network, [layer], seed=number, **options)
    factor = "up" if kind == "lora" else "w1_a"
    found["denoiser.layers.0.attn.to_k"].tensors[factor].zero_()
    found["denoiser.layers.0.attn.to_v"].tensors[factor][:, 1] = 0
    return found


def written(tensors: dict[str, ModuleTensors], file: Path, **options: Any) -> dict[str, Tensor]:
    export(file, tensors, name="lumina2", format="comfyui", **options)
    return load_file(file)


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_a_joined_layer_changes_the_rows_of_each_as_it_was_trained(
    kind: str, tmp_path: Path
) -> None:
    live = trained(kind)
    named = written(live, tmp_path / "a.safetensors")
    assert not any("alpha" in name or "to_q" in name for name in named)
    own_code = FAMILY.layer_names(layers()).layers
    ends = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b") if kind == "loha" else (
        "lora_B.weight", "lora_A.weight"
    )  # fmt: skip
    modules = {name.removesuffix(f".{ends[0]}") for name in named if name.endswith(ends[0])}
    assert len(modules) * len(ends) == len(named)
    reached = set()
    for module in modules:
        parts = own_code[module.removeprefix("diffusion_model.")]
        factors = [named[f"{module}.{end}"].double() for end in ends]
        change = factors[0] @ factors[1]
        if kind == "loha":
            change = change * (factors[2] @ factors[3])
        each = torch.cat([update(live[f"denoiser.{part}"]).double() for part in parts])
        torch.testing.assert_close(change, each, rtol=1e-6, atol=1e-7)
        reached |= {f"denoiser.{part}" for part in parts}
    assert reached == live.keys()


@pytest.mark.parametrize("kind", ["lora", "loha"])
def test_each_layer_comes_back_with_its_own_rank(kind: str, tmp_path: Path) -> None:
    """As `train.init_from` and the tools need them: also a rank without an effect yet."""
    live = trained(kind)
    written(live, tmp_path / "a.safetensors")
    found = read_tensors(
        tmp_path / "a.safetensors", names=LayerNames(FAMILY, {"denoiser": layers()})
    )
    assert found.keys() == live.keys()
    for key, module in live.items():
        assert found[key].rank == module.rank or "layers.0" not in key
        torch.testing.assert_close(update(found[key]), update(module), rtol=1e-6, atol=1e-7)


def test_rows_nobody_trained_stay_as_they_are_and_ranks_that_are_shared_are_written_once(
    tmp_path: Path,
) -> None:
    """Files of others train the whole layer by one factor: they get no ranks by going through another format."""
    file, base = tmp_path / "other.safetensors", base_of("lumina2")
    shapes = layers()
    rows = [shapes[f"layers.0.attn.{part}"][0] for part in QKV]
    down, up = torch.randn(3, shapes["layers.0.attn.to_q"][1]), torch.randn(sum(rows), 3)
    stem = "lora_unet_layers_0_attention_qkv"
    keys = {"lora_down.weight": down, "lora_up.weight": up, "alpha": torch.tensor(6.0)}
    save_file({f"{stem}.{end}": tensor for end, tensor in keys.items()}, file)
    for format in ("diffusers", "comfyui"):
        output = tmp_path / f"{format}.safetensors"
        tool("convert", file, format=format, base=base, output=output, precision="fp32")
        file = output
    named = load_file(file)
    assert {len(tensor) for name, tensor in named.items() if "lora_A" in name} == {3}
    joined = [named[f"diffusion_model.layers.0.attention.qkv.lora_{end}.weight"] for end in "BA"]
    torch.testing.assert_close(joined[0] @ joined[1], 2 * up @ down)
    live = {key: each for key, each in trained().items() if "to_q" in key or "to_out" in key}
    named = written(live, tmp_path / "q.safetensors")
    up = named["diffusion_model.layers.0.attention.qkv.lora_B.weight"]
    assert up.shape[0] == sum(rows) and not up[rows[0] :].any() and up[: rows[0]].any()


def test_kinds_that_cannot_be_made_one_are_refused_before_training(tmp_path: Path) -> None:
    for kind in ("lokr", "oft"):
        with pytest.raises(RequestError, match=r"q, k and v are one layer"):
            format_for(FAMILY, "comfyui", planned_contents(AdapterSettings(kind=kind)))
    live = adapter_of("lumina2", dora=True)
    assert written(live, tmp_path / "dora.safetensors")
    plain = dict(live["denoiser.layers.0.attn.to_q"].tensors)
    del plain["magnitude"]
    live["denoiser.layers.0.attn.to_q"] = replace(
        live["denoiser.layers.0.attn.to_q"], tensors=plain
    )
    with pytest.raises(InputError, match=r"attention\.qkv is one layer.*DoRA"):
        written(live, tmp_path / "mixed.safetensors")


# Of docs/formats.md: the formats of which a program that knows the family reads less than all.
UNREAD = {
    **{(name, "diffusers"): "ComfyUI and Forge lose all attention" for name in ("sd15", "sd2", "sdxl")},
    **{("sd3", each): "Forge reads nothing" for each in ("diffusers", "comfyui")},
    **{("chroma", each): "Forge reads nothing" for each in ("diffusers", "comfyui")},
    ("qwen", "comfyui"): "InvokeAI does not recognise",
    ("krea2", "kohya"): "diffusers does not read these names",
    ("lumina2", "diffusers"): "ComfyUI finds no layer",
    ("anima", "diffusers"): "ComfyUI finds no layer",
    ("qwen21", "comfyui"): "diffusers reads the attention layers only",
    ("qwen21", "diffusers"): "ComfyUI reads the attention layers only",
    ("ideogram4", "diffusers"): "ComfyUI finds no layer",
    ("lumina2", "comfyui"): "diffusers loads these names only",
}  # fmt: skip


@pytest.mark.parametrize("name", families.NAMES)
def test_what_a_program_loses_of_a_format_is_said(name: str) -> None:
    family = families.family(name)
    plain = AdapterContents(kinds=frozenset({"lora"}), dora=False, text=False)
    for format in family.formats.written:
        notes = format_notes(family, format, plain)
        expected = UNREAD.get((name, format))
        assert len(notes) == (expected is not None)
        assert expected is None or expected in notes[0]

"""Exported files: names, strength, refusals, what is read back before publishing, what diffusers makes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.families.base.sampling import plain_pipeline
from lora_trainer.lora.tensors import ModuleTensors, update
from lora_trainer.lora_file.write import prune_exports
from tests.fakes.adapters import (
    ALPHA,
    adapter_for,
    adapter_of,
    draw_lokr,
    draw_module,
    export,
    exported,
    networks_of,
    small_adapter,
    with_magnitude,
)
from tests.fakes.family_bases import CPU, facts_of

CONV = "denoiser.mid_block.resnets.0.conv1"
LINEAR = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
STEM = "lora_unet_mid_block_resnets_0_conv1"
Write = Callable[[ModuleTensors], dict[str, Tensor]]
"""Returns the tensors that the file has of a module."""
Fault = Callable[[Write, str, ModuleTensors], dict[str, Tensor]]
"""Returns what a faulty writer puts into the file of a module, by its key."""


def ends(named: dict[str, Tensor], stem: str) -> set[str]:
    return {name.removeprefix(f"{stem}.") for name in named if name.startswith(stem)}


# ---- names and strength


def test_kohya_names_and_one_alpha_whatever_the_modules_have() -> None:
    """diffusers 0.42 gives the attention layers of a U-Net the most frequent alpha of the file."""
    tensors = small_adapter()
    tensors[CONV] = replace(tensors[CONV], scale=4.0)
    named = load(exported(tensors, precision="fp16"))
    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    assert ends(named, stem) == {"alpha", "lora_down.weight", "lora_up.weight"}
    alphas = [tensor for name, tensor in named.items() if name.endswith(".alpha")]
    assert len(alphas) == 3
    assert {(each.shape, each.dtype, each.item()) for each in alphas} == {
        ((), torch.float32, ALPHA)
    }
    assert named[f"{stem}.lora_down.weight"].dtype == torch.float16
    assert named[f"{STEM}.lora_up.weight"].shape == (4, 4, 1, 1)


def test_dora_in_each_format() -> None:
    """[out, 1, ...] is how LyCORIS and ComfyUI tell norms by output from norms by input."""
    tensors = {CONV: with_magnitude(small_adapter()[CONV], torch.ones(4, 6, 3, 3))}
    magnitude = tensors[CONV].tensors["magnitude"]
    kohya = load(exported(tensors, precision="bf16"))[f"{STEM}.dora_scale"]
    assert (kohya.shape, kohya.dtype) == ((4, 1, 1, 1), torch.float32)
    assert torch.equal(kohya.flatten(), magnitude)
    data = exported(tensors, format="diffusers", precision="bf16")
    peft = load(data)["unet.mid_block.resnets.0.conv1.lora_magnitude_vector"]
    assert (peft.shape, peft.dtype) == ((1, 4, 1, 1), torch.float16)
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert list(header)[1].endswith("lora_A.weight"), "diffusers judges a file by its first tensor"
    to_q = {
        "denoiser.layers.0.attention.to_q": with_magnitude(draw_module((8, 8)), torch.ones(8, 8))
    }
    comfy = load(exported(to_q, name="zimage", format="comfyui"))
    assert "diffusion_model.layers.0.attention.to_q.dora_scale" in comfy


def test_lycoris_names_and_matrices() -> None:
    """ComfyUI multiplies the factors as matrices: kernels are flattened into the rows."""
    loha, lokr, oft = (
        load(exported(small_adapter(kind=kind, rank=2))) for kind in ("loha", "lokr", "oft")
    )
    factors = {"hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"}
    assert ends(loha, STEM) == {"alpha", *factors}
    assert loha[f"{STEM}.hada_w1_b"].shape == (2, 54)
    assert float(loha[f"{STEM}.alpha"]) == 2, "its rank: readers disagree about any other"
    assert ends(lokr, STEM) == {"alpha", "lokr_w1", "lokr_w2_a", "lokr_w2_b"}
    assert float(lokr[f"{STEM}.alpha"]) == 2
    assert oft[f"{STEM}.oft_blocks"].shape == (2, 2, 2)
    assert float(oft[f"{STEM}.alpha"]) == 0.0, "a limit, and none is set"
    to_q = {"denoiser.layers.0.attention.to_q": draw_module((8, 8), kind="lokr", rank=2)}
    comfy = load(exported(to_q, name="zimage", format="comfyui"))
    stem = "diffusion_model.layers.0.attention.to_q"
    assert ends(comfy, stem) == {"lokr_w1", "lokr_w2_a", "lokr_w2_b"}, "diffusers refuses an alpha"


def test_two_modules_may_not_share_a_name() -> None:
    module = small_adapter()[CONV]
    with pytest.raises(ValueError, match="share one name"):
        exported({"denoiser.a.b_c": module, "denoiser.a_b.c": module})


# ---- what must not be exported


@pytest.mark.parametrize(
    ("factor", "value", "reason"),
    [
        ("down", float("nan"), r"mid_block\.resnets\.0\.conv1.*finite"),
        ("magnitude", -float("inf"), r"mid_block\.resnets\.0\.conv1.*finite"),
        ("up", 7e4, r"7e\+04.*output\.precision=fp32"),
    ],
)
def test_values_that_are_not_finite_in_the_file_are_refused(
    factor: str, value: float, reason: str
) -> None:
    tensors = small_adapter(rank=2)
    if factor == "magnitude":
        tensors[CONV] = with_magnitude(tensors[CONV], torch.ones(4, 6, 3, 3))
    tensors[CONV].tensors[factor].view(-1)[-1] = value
    with pytest.raises(TrainingStopped, match=reason):
        exported(tensors, precision="fp16")
    if value == 7e4:
        assert exported(tensors, precision="bf16")


# ---- read-back


def spoil(patch: pytest.MonkeyPatch, fault: Fault) -> None:
    """Let the writer put something else into the file than the tensors of each module."""
    form = resolve_name("lora_trainer.lora_file.write:FileForm")
    honest = form.tensors

    def faulty(self: Any, part: Any, modules: Any) -> dict[str, Tensor]:
        ((key, _),) = part.layers
        return fault(lambda each: honest(self, part, {key: each}), key, modules[key])

    patch.setattr(form, "tensors", faulty)


def one_number(end: str, factor: float) -> Fault:
    """Change a single number of one layer."""

    def fault(write: Write, key: str, module: ModuleTensors) -> dict[str, Tensor]:
        tensors = write(module)
        for name, tensor in tensors.items():
            if key == LINEAR and name.endswith(end):
                tensor.view(-1)[-1] *= factor
        return tensors

    return fault


def other(shape: tuple[int, ...], **options: Any) -> Fault:
    return lambda write, key, live: write(draw_module(shape, **options) if key == CONV else live)


SMALL = {**small_adapter(), LINEAR: with_magnitude(small_adapter()[LINEAR], torch.ones(10, 12))}
ZERO = {
    key: replace(module, tensors={**module.tensors, "up": module.tensors["up"] * 0})
    for key, module in small_adapter().items()
}
FAULTS: dict[str, tuple[dict[str, ModuleTensors], Fault, str]] = {
    **{
        f"a lost alpha of {kind}": (
            small_adapter(kind=kind, rank=2, scale=0.25),
            lambda write, key, live: write(replace(live, scale=1.0)),
            "would differ",
        )
        for kind in ("lora", "lokr")
    },
    "a zero that moves": (
        ZERO, lambda write, key, live: write(small_adapter()[key]), "would differ"
    ),
    "a layer left out": (
        SMALL, lambda write, key, live: {} if key == CONV else write(live), f"{CONV} is missing"
    ),
    "a layer too many": (
        SMALL,
        lambda write, key, live: write(live)
        | {name.replace("mid_block", "mid"): each for name, each in write(live).items()},
        "2 of 5 modules that the base model lacks",
    ),
    "another shape": (SMALL, other((4, 6, 3, 3), rank=2), "other tensors or shapes"),
    "another kind": (SMALL, other((4, 6, 3, 3), kind="loha"), "other tensors or shapes"),
    "another alpha": (SMALL, one_number("alpha", 1.02), f"{LINEAR} would differ"),
    "an alpha of zero": (SMALL, one_number("alpha", 0), f"{LINEAR} would differ"),
    "one number of up": (SMALL, one_number("lora_up.weight", 0), f"{LINEAR} would differ"),
    "one magnitude": (SMALL, one_number("dora_scale", 1.01), f"{LINEAR} would differ"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_file_that_does_not_hold_the_adapter_is_not_published(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    live, spoilt, reason = FAULTS[fault]
    path = tmp_path / "zibbo.safetensors"
    export(path, live, precision="fp16")
    path.unlink()
    spoil(monkeypatch, spoilt)
    with pytest.raises(TrainingStopped, match=reason):
        export(path, live, precision="fp16")
    assert list(tmp_path.iterdir()) == []


def test_an_fp32_file_may_differ_by_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, lambda write, key, live: write(replace(live, scale=live.scale * (1 + 1e-5))))
    path = tmp_path / "a.safetensors"
    with pytest.raises(TrainingStopped, match="would differ"):
        export(path, small_adapter())
    export(path, small_adapter(), precision="fp16")
    with pytest.raises(MachineError, match="does not exist"):  # the run's folder is gone
        export(tmp_path / "gone" / "a", small_adapter(), precision="fp16")


def test_the_numbers_of_a_module_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(write: Write, key: str, live: ModuleTensors) -> dict[str, Tensor]:
        made.append(key)
        return write(live)

    spoil(monkeypatch, counted)
    export(tmp_path / "a.safetensors", small_adapter(), precision="fp16")
    assert sorted(made) == sorted(small_adapter())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 100.0]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    format=st.sampled_from(["kohya", "diffusers"]),
)
def test_rounding_alone_never_stops_an_export(seed: int, size: float, **options: Any) -> None:
    """Tiny weights, as after one step of warm-up, lose digits in fp16; no reason to stop."""
    assert exported(small_adapter(seed, size=size), **options)


# ---- rolling names


def test_prune_keeps_the_newest_steps_and_everything_else(tmp_path: Path) -> None:
    """By the step in the name, not by time or by the order of names."""
    stale = [f"zi+bo-step{step}.safetensors" for step in ("00000050", "00000999")]
    newest = [f"zi+bo-step{step}.safetensors" for step in ("99999999", "100000000")]
    others = [
        "zi+bo.safetensors",
        "zi+bo-step00000001.png",
        "ziibo-step00000002.safetensors",
        "my-zi+bo-step00000003.safetensors",
        "zi+bo-step0000000x.safetensors",
        "zi+bo-step00000004.safetensors.bak",
    ]
    words = tmp_path / "embeddings"
    words.mkdir()
    for number, name in enumerate([newest[0], *stale, newest[1], *others]):
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (number, number))
        (words / f"{Path(name).stem}_emb.safetensors").touch()
    before = set(words.iterdir())
    removed = prune_exports(tmp_path, name="zi+bo", keep_last=2)
    assert removed == [tmp_path / name for name in stale]
    assert {path.name for path in tmp_path.iterdir()} == {*others, *newest, words.name}
    assert before - set(words.iterdir()) == {
        words / f"{path.stem}_emb.safetensors" for path in removed
    }
    assert prune_exports(tmp_path, name="zi+bo", keep_last=2) == []
    (tmp_path / newest[0]).unlink()
    (tmp_path / newest[0]).mkdir()
    with pytest.raises(MachineError, match="zi.bo-step99999999"):
        prune_exports(tmp_path, name="zi+bo", keep_last=1)


@pytest.mark.parametrize(
    ("name", "kind", "format"),
    [
        ("sd15", "lora", "kohya"),
        ("sd15", "dora", "diffusers"),
        ("flux", "dora", "diffusers"),  # loaded by another mixin, with the prefix `transformer`
        ("zimage", "lokr", "comfyui"),  # an alpha beside it would be refused
    ],
)
def test_diffusers_gives_each_layer_the_update_that_was_trained(
    name: str, kind: str, format: str, tmp_path: Path
) -> None:
    """As LoCon and rank patterns make them: every module has its own rank and its own alpha."""
    file, tensors = tmp_path / "a.safetensors", dict[str, ModuleTensors]()
    for number, key in enumerate(adapter_of(name, text=True, every=1 if kind == "lora" else 4)):
        component, _, layer = key.partition(".")
        network = networks_of(name)[component]
        if kind == "lokr":
            shape = tuple(network.get_parameter(f"{layer}.weight").shape)
            tensors[key] = draw_lokr(shape, rank=1, scale=3.0, seed=number)
        else:
            options: dict[str, Any] = {"rank": 1 + number % 5, "scale": 0.3 + number % 3}
            tensors |= adapter_for(component, network, [layer], dora=kind == "dora", **options)
    file.write_bytes(exported(tensors, name=name, format=format))
    pipeline: Any = plain_pipeline(
        families.family(name), facts_of(name), dtype=torch.float32, device=CPU
    )
    pipeline.load_lora_weights(tmp_path, weight_name=file.name)
    for key, module in tensors.items():
        component, _, path = key.partition(".")
        own = {"denoiser": "unet" if name == "sd15" else "transformer"}.get(component, component)
        layer = getattr(pipeline, own).get_submodule(path)
        layer.merge()
        weight = networks_of(name)[component].get_parameter(f"{path}.weight")
        change = update(module, weight).reshape(weight.shape)
        assert change.abs().max() > 0.001
        merged = layer.get_base_layer().weight
        torch.testing.assert_close(merged, weight + change, rtol=1e-5, atol=1e-5)


def test_names_are_those_that_readers_were_seen_to_take() -> None:
    """As docs/formats.md has them."""
    resnet, to_q = "mid_block.resnets.0.conv1", "attn.to_q"
    names: dict[tuple[str, Any, str], str] = {
        ("sd15", "kohya", resnet): "lora_unet_mid_block_resnets_0_conv1",
        ("sd15", "diffusers", resnet): f"unet.{resnet}",
        ("sdxl", "kohya", "up_blocks.0.attentions.1.proj_in"): "lora_unet_output_blocks_1_1_proj_in",
        ("qwen", "kohya", "img_mlp.net.2"): "lora_unet_img_mlp_net_2",
        ("zimage", "comfyui", to_q): f"diffusion_model.{to_q}",
        ("zimage", "diffusers", to_q): f"transformer.{to_q}",
        ("flux", "diffusers", to_q): f"transformer.{to_q}",
    } | {(name, "comfyui", to_q): f"transformer.{to_q}" for name in ("sd3", "flux", "flux2", "chroma")}  # fmt: skip
    for (name, format, layer), expected in names.items():
        assert families.family(name).lora_key_name(format, "denoiser", layer) == expected

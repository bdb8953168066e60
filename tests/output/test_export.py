"""Exported bytes: names, strength, hashes, what is refused, what is read back before publishing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load

from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.families import family
from lora_trainer.families.base import AdapterFormats, FileFormat, OtherNames
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.lora_file.metadata import metadata
from lora_trainer.lora_file.write import (
    FileForm,
    check_written,
    prune_exports,
    step_export_name,
    write_export,
)
from tests.fakes.adapters import (
    ALPHA,
    RANK,
    draw_module,
    export_info,
    exported,
    small_adapter,
    with_magnitude,
)

FAMILY = family("sd15")
CONV = "denoiser.mid_block.resnets.0.conv1"
LINEAR = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
FORMATS: tuple[FileFormat, ...] = ("kohya", "diffusers")


class ComfyUINames:
    """A family whose files are in ComfyUI's names too."""

    name = "fake"
    formats = AdapterFormats(written=("kohya", "diffusers", "comfyui"), refused={})

    def lora_key_name(self, format: FileFormat, component: str, module: str) -> str:
        if format == "comfyui":
            return f"diffusion_model.{module}"
        return FAMILY.lora_key_name(format, component, module)

    def layer_names(self, shapes: Mapping[str, tuple[int, ...]]) -> OtherNames:
        return FAMILY.layer_names(shapes)


ANY: Any = ComfyUINames()


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


def export(tensors: AdapterTensors, *, format: FileFormat = "kohya", **changes: Any) -> bytes:
    options = {"family": ANY, "metadata": metadata(export_info()), **changes}
    return exported(tensors, format=format, **options)


def form(precision: Any = "fp32", format: FileFormat = "kohya") -> FileForm:
    return FileForm(family=ANY, format=format, precision=precision, lora_alpha=ALPHA)


def of_kind(kind: AdapterKind, *, seed: int = 0, scale: float = 0.3) -> dict[str, ModuleTensors]:
    """Return an adapter on a linear layer, a 1x1 and a 3x3 convolution."""
    shapes = {
        "denoiser.down_blocks.0.attentions.0.proj_in": (6, 8, 1, 1),
        LINEAR: (10, 12),
        CONV: (4, 6, 3, 3),
    }
    return {
        key: draw_module(shape, kind=kind, rank=2, scale=scale, seed=10 * seed + number)
        for number, (key, shape) in enumerate(shapes.items())
    }


# ---- names and strength


def test_kohya_names_and_alpha() -> None:
    named = load(export(small_adapter(), precision="fp16"))
    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    assert {name for name in named if name.startswith(stem)} == {
        f"{stem}.alpha",
        f"{stem}.lora_down.weight",
        f"{stem}.lora_up.weight",
    }
    assert named[f"{stem}.alpha"].shape == ()
    assert named[f"{stem}.alpha"].dtype == torch.float32
    assert named[f"{stem}.alpha"].item() == ALPHA
    assert named[f"{stem}.lora_down.weight"].dtype == torch.float16
    assert named["lora_unet_mid_block_resnets_0_conv1.lora_up.weight"].shape == (5, 4, 1, 1)


def test_a_kohya_file_has_one_alpha_whatever_the_modules_have() -> None:
    """diffusers 0.42 gives the attention layers of a U-Net the most frequent alpha of the file."""
    tensors = small_adapter()
    tensors[CONV] = replace(tensors[CONV], scale=4.0)
    named = load(export(tensors))
    assert {float(value) for name, value in named.items() if name.endswith(".alpha")} == {ALPHA}


def test_dora_in_each_format() -> None:
    """[out, 1, ...] is how LyCORIS and ComfyUI tell norms by output from norms by input."""
    plain = small_adapter()[CONV]
    tensors = {CONV: with_magnitude(plain, torch.ones(5, 3, 3, 3))}
    magnitude = tensors[CONV].tensors["magnitude"]
    kohya = load(export(tensors, precision="bf16"))[
        "lora_unet_mid_block_resnets_0_conv1.dora_scale"
    ]
    assert (kohya.shape, kohya.dtype) == ((5, 1, 1, 1), torch.float32)
    assert torch.equal(kohya.flatten(), magnitude)
    data = export(tensors, format="diffusers", precision="bf16")
    named = load(data)
    peft = named["unet.mid_block.resnets.0.conv1.lora_magnitude_vector"]
    assert (peft.shape, peft.dtype) == ((1, 5, 1, 1), torch.float16)
    first = list(header_of(data))[1]
    assert first.endswith("lora_A.weight"), "diffusers judges a file by its first tensor"
    assert "diffusion_model.mid_block.resnets.0.conv1.dora_scale" in load(
        export(tensors, format="comfyui")
    )


def test_lycoris_names_and_matrices() -> None:
    """ComfyUI multiplies the factors as matrices: kernels are flattened into the rows."""
    stem = "lora_unet_mid_block_resnets_0_conv1"
    loha = load(export(of_kind("loha")))
    assert {name.removeprefix(f"{stem}.") for name in loha if name.startswith(stem)} == {
        *("alpha", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    }
    assert loha[f"{stem}.hada_w1_b"].shape == (2, 54)
    assert float(loha[f"{stem}.alpha"]) == 2, "its rank: readers disagree about any other"
    lokr = load(export(of_kind("lokr"), format="comfyui"))
    stem = "diffusion_model.mid_block.resnets.0.conv1"
    assert {name.removeprefix(f"{stem}.") for name in lokr if name.startswith(stem)} == {
        *("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    }, "diffusers refuses an alpha in these names"
    oft = load(export(of_kind("oft")))
    assert oft["lora_unet_mid_block_resnets_0_conv1.oft_blocks"].shape == (2, 2, 2)
    assert float(oft["lora_unet_mid_block_resnets_0_conv1.alpha"]) == 0.0, (
        "a limit, and none is set"
    )


def test_our_own_inspection_finds_nothing_wrong(tmp_path: Path) -> None:
    path, info = tmp_path / "zibbo.safetensors", export_info()
    for format in FORMATS:
        options: dict[str, Any] = {"format": format, "precision": "fp16"}
        write_export(path, small_adapter(), family=FAMILY, info=info, **options)
        seen = inspect_file(path)
        assert seen.metadata.keys() >= metadata(info).keys()
        assert (seen.format, seen.modules, seen.problems) == (format, 3, ())
        assert seen.rank is not None and seen.rank.to_json() == RANK
        assert (seen.alpha and seen.alpha.to_json()) == (ALPHA if format == "kohya" else None)


def test_two_modules_may_not_share_a_name() -> None:
    module = small_adapter()[CONV]
    with pytest.raises(ValueError, match="share one name"):
        export({"denoiser.a.b_c": module, "denoiser.a_b.c": module})


# ---- what must not be exported


@pytest.mark.parametrize(
    ("factor", "value"),
    [("down", float("nan")), ("up", float("inf")), ("magnitude", -float("inf"))],
)
def test_not_finite_values_are_refused(factor: str, value: float) -> None:
    tensors = small_adapter()
    tensors[CONV] = with_magnitude(tensors[CONV], torch.ones(5, 3, 3, 3))
    tensors[CONV].tensors[factor].view(-1)[-1] = value
    with pytest.raises(TrainingStopped, match=r"mid_block\.resnets\.0\.conv1.*finite"):
        export(tensors)


@pytest.mark.parametrize(("kind", "factor"), [("lora", "up"), ("loha", "w1_b"), ("oft", "blocks")])
def test_values_too_large_for_the_precision_are_refused(kind: AdapterKind, factor: str) -> None:
    tensors = of_kind(kind)
    tensors[CONV].tensors[factor].view(-1)[0] = 7e4
    with pytest.raises(TrainingStopped, match=r"7e\+04.*output\.precision=fp32"):
        export(tensors, precision="fp16")
    assert export(tensors, precision="bf16")


# ---- read-back


@pytest.mark.parametrize(
    ("kind", "format"),
    [("lora", "kohya"), ("lora", "comfyui"), ("loha", "kohya"), ("lokr", "comfyui")],
)
def test_a_lost_alpha_is_seen(kind: AdapterKind, format: FileFormat) -> None:
    live = of_kind(kind, scale=0.25)
    data = export(of_kind(kind, scale=1.0), format=format)
    with pytest.raises(TrainingStopped, match="would differ"):
        check_written(data, live, form("bf16"))


def test_zero_update_must_stay_zero() -> None:
    zero = {
        key: replace(module, tensors={**module.tensors, "up": module.tensors["up"] * 0})
        for key, module in small_adapter().items()
    }
    check_written(export(zero, precision="fp16"), zero, form("fp16"))
    with pytest.raises(TrainingStopped, match="would differ"):
        check_written(export(small_adapter()), zero, form("fp16"))


def test_missing_unknown_and_misshapen_modules_are_refused() -> None:
    tensors = small_adapter()
    fewer = dict(list(tensors.items())[1:])
    narrower = {**tensors, CONV: draw_module((5, 3, 3, 3), rank=2)}
    loha = {**tensors, CONV: draw_module((5, 3, 3, 3), kind="loha")}
    for written, live, reason in (
        (fewer, tensors, r"down_blocks\.0\.attentions\.0\.proj_in is missing"),
        (tensors, fewer, "1 of 3 modules that the base model lacks"),
        (narrower, tensors, "other tensors or shapes"),
        (loha, tensors, "other tensors or shapes"),
    ):
        with pytest.raises(TrainingStopped, match=reason):
            check_written(export(written), live, form())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 100.0]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    format=st.sampled_from(FORMATS),
)
def test_rounding_alone_never_stops_an_export(seed: int, size: float, **options: Any) -> None:
    """Tiny weights, as after one step of warm-up, lose digits in fp16; no reason to stop."""
    tensors = small_adapter(seed, size=size)
    assert export(tensors, **options)


@pytest.mark.parametrize(
    ("end", "change"), [("alpha", 1.02), ("lora_up.weight", 0), ("dora_scale", 1.01)]
)
def test_a_file_that_differs_by_more_than_rounding_is_not_published(
    end: str, change: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FileForm.tensors

    def faulty(form: FileForm, key: str, module: ModuleTensors) -> dict[str, torch.Tensor]:
        tensors = honest(form, key, module)
        for name, tensor in tensors.items():
            if key == LINEAR and name.endswith(end):
                tensor.view(-1)[-1] *= change  # one number
        return tensors

    monkeypatch.setattr(FileForm, "tensors", faulty)
    tensors = small_adapter()
    tensors[LINEAR] = with_magnitude(tensors[LINEAR], torch.ones(10, 12))
    options: dict[str, Any] = {"info": export_info(), "format": "kohya", "precision": "fp16"}
    with pytest.raises(TrainingStopped, match=f"{LINEAR} would differ"):
        write_export(tmp_path / "zibbo.safetensors", tensors, family=FAMILY, **options)
    assert list(tmp_path.iterdir()) == []


def test_an_fp32_file_may_differ_by_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = FileForm.tensors

    def faulty(form: FileForm, key: str, module: ModuleTensors) -> dict[str, torch.Tensor]:
        return honest(form, key, replace(module, scale=module.scale * (1 + 1e-5)))

    monkeypatch.setattr(FileForm, "tensors", faulty)
    path = tmp_path / "a.safetensors"
    options: dict[str, Any] = {"family": FAMILY, "info": export_info(), "format": "kohya"}
    with pytest.raises(TrainingStopped, match="would differ"):
        write_export(path, small_adapter(), precision="fp32", **options)
    write_export(path, small_adapter(), precision="fp16", **options)
    with pytest.raises(MachineError, match="does not exist"):  # the run's folder is gone
        write_export(tmp_path / "gone" / "a", small_adapter(), precision="fp16", **options)


# ---- rolling names


def test_prune_keeps_the_newest_steps_and_everything_else(tmp_path: Path) -> None:
    steps = (99_999_999, 50, 100_000_000, 999)
    rolling = {step: tmp_path / step_export_name("zi+bo", step=step) for step in steps}
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
    for number, path in enumerate([*rolling.values(), *(tmp_path / name for name in others)]):
        path.write_bytes(b"x")
        os.utime(path, (number, number))
        embedding_path(path).write_bytes(b"x")
    assert prune_exports(tmp_path, name="zi+bo", keep_last=2) == [rolling[50], rolling[999]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, rolling[99_999_999].name, rolling[100_000_000].name, words.name}
    removed = {embedding_path(rolling[step]) for step in (50, 999)}
    assert not removed & set(words.iterdir())
    assert embedding_path(rolling[99_999_999]).exists()
    assert prune_exports(tmp_path, name="zi+bo", keep_last=2) == []
    rolling[99_999_999].unlink()
    rolling[99_999_999].mkdir()
    with pytest.raises(MachineError, match="zi.bo-step99999999"):
        prune_exports(tmp_path, name="zi+bo", keep_last=1)

"""Exported bytes: names, strength, hashes, what is refused, what is read back before publishing."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save

from lora_trainer.common.errors import MachineError, TrainingStopped
from lora_trainer.families import family
from lora_trainer.families.base import AdapterFormats, FileFormat, OtherNames
from lora_trainer.lora.adapter_size import AdapterKind
from lora_trainer.lora.tensors import AdapterTensors, ModuleTensors, update
from lora_trainer.lora_file import write
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.lora_file.metadata import metadata
from lora_trainer.lora_file.write import (
    check_written,
    export_bytes,
    prune_exports,
    step_export_name,
    write_export,
)
from tests.fakes.adapters import (
    ALPHA,
    RANK,
    draw_module,
    export_info,
    read_back,
    small_adapter,
    with_magnitude,
)

FAMILY = family("sd15")
CONV = "denoiser.mid_block.resnets.0.conv1"
LINEAR = "denoiser.mid_block.attentions.0.transformer_blocks.0.attn2.to_k"
FORMATS: tuple[FileFormat, ...] = ("kohya", "diffusers")
KINDS: tuple[AdapterKind, ...] = ("lora", "loha", "lokr", "oft")


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


def exported(tensors: AdapterTensors, *, format: FileFormat = "kohya", **changes: Any) -> bytes:
    options = {
        "family": ANY,
        "precision": "fp32",
        "metadata": metadata(export_info()),
        **changes,
    }
    return export_bytes(tensors, format=format, **options)


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
    named = load(exported(small_adapter(), precision="fp16"))
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


@pytest.mark.parametrize(
    ("format", "prefix"), [("diffusers", "unet."), ("comfyui", "diffusion_model.")]
)
def test_dotted_formats_have_the_strength_in_up_and_state_none(
    format: FileFormat, prefix: str
) -> None:
    tensors = small_adapter()
    data = exported(tensors, format=format)
    named, stem = load(data), prefix + LINEAR.partition(".")[2]
    assert not [name for name in named if name.endswith("alpha")]
    assert "lora_adapter_metadata" not in header_of(data)["__metadata__"]
    module = tensors[LINEAR]
    assert torch.equal(named[f"{stem}.lora_A.weight"], module.tensors["down"])
    torch.testing.assert_close(
        named[f"{stem}.lora_B.weight"], module.tensors["up"] * ALPHA / RANK, rtol=1e-6, atol=0
    )


def test_a_kohya_file_has_one_alpha_whatever_the_modules_have() -> None:
    """diffusers 0.42 gives the attention layers of a U-Net the most frequent alpha of the file."""
    tensors = small_adapter()
    tensors[CONV] = replace(tensors[CONV], scale=4.0)
    named = load(exported(tensors))
    assert {float(value) for name, value in named.items() if name.endswith(".alpha")} == {ALPHA}
    assert read_back(exported(tensors), tensors, family=FAMILY) < 1e-7


def test_dora_in_each_format() -> None:
    """[out, 1, ...] is how LyCORIS and ComfyUI tell norms by output from norms by input."""
    plain = small_adapter()[CONV]
    tensors = {CONV: with_magnitude(plain, torch.ones(5, 3, 3, 3))}
    magnitude = tensors[CONV].tensors["magnitude"]
    kohya = load(exported(tensors, precision="bf16"))[
        "lora_unet_mid_block_resnets_0_conv1.dora_scale"
    ]
    assert (kohya.shape, kohya.dtype) == ((5, 1, 1, 1), torch.float32)
    assert torch.equal(kohya.flatten(), magnitude)
    data = exported(tensors, format="diffusers", precision="bf16")
    named = load(data)
    peft = named["unet.mid_block.resnets.0.conv1.lora_magnitude_vector"]
    assert (peft.shape, peft.dtype) == ((1, 5, 1, 1), torch.float16)
    first = list(header_of(data))[1]
    assert first.endswith("lora_A.weight"), "diffusers judges a file by its first tensor"
    assert "diffusion_model.mid_block.resnets.0.conv1.dora_scale" in load(
        exported(tensors, format="comfyui")
    )


def test_dora_of_a_text_encoder_is_named_as_transformers_wants_it() -> None:
    key = "text_encoder.text_model.encoder.layers.0.mlp.fc1"
    tensors = {key: with_magnitude(draw_module((6, 8)), torch.ones(6, 8))}
    named = load(exported(tensors, format="diffusers"))
    assert f"{key}.lora_magnitude_vector.weight" in named


def test_lycoris_names_and_matrices() -> None:
    """ComfyUI multiplies the factors as matrices: kernels are flattened into the rows."""
    stem = "lora_unet_mid_block_resnets_0_conv1"
    loha = load(exported(of_kind("loha")))
    assert {name.removeprefix(f"{stem}.") for name in loha if name.startswith(stem)} == {
        *("alpha", "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"),
    }
    assert loha[f"{stem}.hada_w1_b"].shape == (2, 54)
    assert float(loha[f"{stem}.alpha"]) == 2, "its rank: readers disagree about any other"
    lokr = load(exported(of_kind("lokr"), format="comfyui"))
    stem = "diffusion_model.mid_block.resnets.0.conv1"
    assert {name.removeprefix(f"{stem}.") for name in lokr if name.startswith(stem)} == {
        *("lokr_w1", "lokr_w2_a", "lokr_w2_b"),
    }, "diffusers refuses an alpha in these names"
    oft = load(exported(of_kind("oft")))
    assert oft["lora_unet_mid_block_resnets_0_conv1.oft_blocks"].shape == (2, 2, 2)
    assert float(oft["lora_unet_mid_block_resnets_0_conv1.alpha"]) == 0.0, (
        "a limit, and none is set"
    )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_readers_of_raw_keys_compute_the_update(kind: AdapterKind, format: FileFormat) -> None:
    """Their formulas (LyCORIS's, which ComfyUI and Forge follow), on the file's tensors alone."""
    tensors = of_kind(kind)
    named = load(exported(tensors, format=format))
    for key, (out, *inputs) in ((LINEAR, (10, 12)), (CONV, (4, 6, 3, 3))):
        weight = torch.randn(out, *inputs, generator=torch.Generator().manual_seed(5))
        stem = ANY.lora_key_name(format, "denoiser", key.partition(".")[2])
        at = {n.removeprefix(f"{stem}."): t for n, t in named.items() if n.startswith(f"{stem}.")}
        torch.testing.assert_close(
            as_lycoris(at, weight), update(tensors[key], weight), rtol=1e-5, atol=1e-6
        )


def as_lycoris(at: Mapping[str, torch.Tensor], weight: torch.Tensor) -> torch.Tensor:
    alpha = at["alpha"].item() if "alpha" in at else None
    if "hada_w1_a" in at:
        change = (at["hada_w1_a"] @ at["hada_w1_b"]) * (at["hada_w2_a"] @ at["hada_w2_b"])
        rank = at["hada_w1_b"].shape[0]
    elif "lokr_w1" in at:
        change = torch.kron(at["lokr_w1"], at["lokr_w2_a"] @ at["lokr_w2_b"])
        rank = at["lokr_w2_b"].shape[0]
    elif "oft_blocks" in at:
        assert alpha == 0, "a limit on the rotation"
        blocks = at["oft_blocks"]
        skew, unit = blocks - blocks.transpose(1, 2), torch.eye(blocks.shape[1])
        turn = (unit + skew) @ (unit - skew).inverse() - unit
        grouped = weight.view(blocks.shape[0], blocks.shape[1], *weight.shape[1:])
        return torch.einsum("knm,kn...->km...", turn, grouped).reshape(weight.shape)
    else:
        up, down = (
            at[a] if a in at else at[b]
            for a, b in (("lora_up.weight", "lora_B.weight"), ("lora_down.weight", "lora_A.weight"))
        )
        change, rank = up.flatten(1) @ down.flatten(1), down.shape[0]
    return change.reshape(weight.shape) * (1.0 if alpha is None else alpha / rank)


@pytest.mark.parametrize("format", FORMATS)
def test_our_own_inspection_finds_nothing_wrong(format: FileFormat, tmp_path: Path) -> None:
    path = tmp_path / "zibbo.safetensors"
    write_export(
        path,
        small_adapter(),
        family=FAMILY,
        info=export_info(),
        format=format,
        precision="fp16",
    )
    seen = inspect_file(path)
    assert seen.metadata.keys() >= metadata(export_info()).keys()
    assert (seen.format, seen.modules, seen.problems) == (format, 3, ())
    assert seen.rank is not None and seen.rank.to_json() == RANK
    assert (seen.alpha.to_json() if seen.alpha else None) == (ALPHA if format == "kohya" else None)


def test_two_modules_may_not_share_a_name() -> None:
    module = small_adapter()[CONV]
    with pytest.raises(ValueError, match="share one name"):
        exported({"denoiser.a.b_c": module, "denoiser.a_b.c": module})


def test_no_second_strength_gets_into_the_header() -> None:
    with pytest.raises(ValueError, match="lora_adapter_metadata"):
        exported(small_adapter(), metadata={"lora_adapter_metadata": "{}"})


# ---- the bytes


# ---- what must not be exported


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("factor", ["down", "up", "magnitude"])
def test_not_finite_values_are_refused(value: float, factor: str) -> None:
    tensors = small_adapter()
    tensors[CONV] = with_magnitude(tensors[CONV], torch.ones(5, 3, 3, 3))
    tensors[CONV].tensors[factor].view(-1)[-1] = value
    with pytest.raises(TrainingStopped, match=r"mid_block\.resnets\.0\.conv1.*finite"):
        exported(tensors)


@pytest.mark.parametrize(("kind", "factor"), [("lora", "up"), ("loha", "w1_b"), ("oft", "blocks")])
def test_values_too_large_for_the_precision_are_refused(kind: AdapterKind, factor: str) -> None:
    tensors = of_kind(kind)
    tensors[CONV].tensors[factor].view(-1)[0] = 7e4
    with pytest.raises(TrainingStopped, match=r"7e\+04.*output\.precision=fp32"):
        exported(tensors, precision="fp16")
    assert exported(tensors, precision="bf16")


# ---- read-back


@pytest.mark.parametrize("kind", ["lora", "loha", "lokr"])
@pytest.mark.parametrize("format", ["kohya", "comfyui"])
def test_a_lost_alpha_is_seen(kind: AdapterKind, format: FileFormat) -> None:
    live = of_kind(kind, scale=0.25)
    data = exported(of_kind(kind, scale=1.0), format=format)
    assert read_back(data, live, family=ANY) == pytest.approx(3.0)
    with pytest.raises(TrainingStopped, match="would differ"):
        check_written(data, live, family=ANY, precision="bf16")


def test_zero_update_must_stay_zero() -> None:
    zero = {
        key: replace(module, tensors={**module.tensors, "up": module.tensors["up"] * 0})
        for key, module in small_adapter().items()
    }
    check_written(exported(zero, precision="fp16"), zero, family=FAMILY, precision="fp16")
    with pytest.raises(TrainingStopped, match="would differ"):
        check_written(exported(small_adapter()), zero, family=FAMILY, precision="fp16")


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
            check_written(exported(written), live, family=FAMILY, precision="fp32")


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 100.0]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
    format=st.sampled_from(FORMATS),
)
def test_rounding_alone_never_stops_an_export(
    seed: int,
    size: float,
    precision: Any,
    format: FileFormat,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Tiny weights, as after one step of warm-up, lose digits in fp16; no reason to stop."""
    path = tmp_path_factory.getbasetemp() / "rounded.safetensors"
    write_export(
        path,
        small_adapter(seed, size=size),
        family=FAMILY,
        info=export_info(),
        format=format,
        precision=precision,
    )


Spoil = Callable[[dict[str, torch.Tensor], str], None]


def _lose_alpha(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.alpha"] *= 1.02


def _lose_element(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.lora_up.weight"].view(-1)[3] += 0.2


def _swap_rows(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.lora_down.weight"] = named[f"{stem}.lora_down.weight"].flip(0)


def _lose_magnitude(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.dora_scale"].view(-1)[2] *= 1.01


@pytest.mark.parametrize("spoil", [_lose_alpha, _lose_element, _swap_rows, _lose_magnitude])
def test_a_file_that_differs_by_more_than_rounding_is_not_published(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = write.export_bytes

    def faulty(tensors: AdapterTensors, **options: Any) -> bytes:
        named = load(honest(tensors, **options))
        spoil(named, "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k")
        return save(named, metadata={"ss_v2": "False"})

    monkeypatch.setattr(write, "export_bytes", faulty)
    path = tmp_path / "zibbo.safetensors"
    tensors = small_adapter()
    tensors[LINEAR] = with_magnitude(tensors[LINEAR], torch.ones(10, 12))
    with pytest.raises(
        TrainingStopped,
        match=r"denoiser\.mid_block\.attentions.* would differ",
    ):
        write_export(
            path, tensors, family=FAMILY, info=export_info(), format="kohya", precision="fp16"
        )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["loha", "lokr", "oft"])
def test_one_wrong_element_of_other_kinds_is_seen(kind: AdapterKind) -> None:
    live, other = of_kind(kind), of_kind(kind)
    factor = {"loha": "w2_b", "lokr": "w2_a", "oft": "blocks"}[kind]
    other[LINEAR].tensors[factor].view(-1)[1] += 0.01
    data = exported(other, precision="fp16")
    with pytest.raises(TrainingStopped, match=f"{LINEAR} would differ"):
        check_written(data, live, family=ANY, precision="fp16")


def test_an_fp32_file_may_differ_by_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = write.export_bytes

    def faulty(tensors: AdapterTensors, **options: Any) -> bytes:
        moved = {key: replace(m, scale=m.scale * (1 + 1e-5)) for key, m in tensors.items()}
        return honest(moved, **options)

    monkeypatch.setattr(write, "export_bytes", faulty)
    path = tmp_path / "a.safetensors"
    options: dict[str, Any] = {"family": FAMILY, "info": export_info(), "format": "kohya"}
    with pytest.raises(TrainingStopped, match="would differ"):
        write_export(path, small_adapter(), precision="fp32", **options)
    write_export(path, small_adapter(), precision="fp16", **options)


def test_bytes_that_the_disk_changed_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying_disk(path: Path, data: bytes) -> None:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(write, "write_atomic", lying_disk)
    with pytest.raises(MachineError, match="other bytes"):
        write_export(
            tmp_path / "a.safetensors",
            small_adapter(),
            family=FAMILY,
            info=export_info(),
            format="kohya",
            precision="fp32",
        )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_other_users_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    options: dict[str, Any] = {"info": export_info(), "format": "kohya", "precision": "fp32"}
    before = os.umask(0o022)
    try:
        write_export(path, small_adapter(), family=FAMILY, **options)
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


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
        "zi+bo-000004.safetensors",
    ]
    for number, path in enumerate([*rolling.values(), *(tmp_path / name for name in others)]):
        path.write_bytes(b"x")
        os.utime(path, (number, number))
    assert prune_exports(tmp_path, name="zi+bo", keep_last=2) == [rolling[50], rolling[999]]
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {*others, rolling[99_999_999].name, rolling[100_000_000].name}
    assert prune_exports(tmp_path, name="zi+bo", keep_last=1) == [rolling[99_999_999]]
    assert prune_exports(tmp_path, name="zi+bo", keep_last=1) == []


def test_what_belongs_to_an_export_goes_with_it(tmp_path: Path) -> None:
    exports = [tmp_path / step_export_name("a", step=step) for step in (1, 2)]
    (tmp_path / "embeddings").mkdir()
    for path in (*exports, *map(embedding_path, exports)):
        path.write_bytes(b"x")
    assert prune_exports(tmp_path, name="a", keep_last=1) == exports[:1]
    assert list((tmp_path / "embeddings").iterdir()) == [embedding_path(exports[1])]


def test_prune_says_what_the_disk_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / step_export_name("a", step=step)).mkdir()
    with pytest.raises(MachineError, match="a-step00000001"):
        prune_exports(tmp_path, name="a", keep_last=1)

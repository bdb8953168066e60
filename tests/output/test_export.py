"""Exported files: strength, names and metadata as diffusers, other readers and people see them."""

from __future__ import annotations

import copy
import json
import os
import random
import struct
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora import LoraLayer
from safetensors.torch import load, save
from transformers import CLIPTextConfig, CLIPTextModel

from lora_trainer.config import Config, flatten
from lora_trainer.errors import MachineError, TrainingStopped
from lora_trainer.families import family
from lora_trainer.output import export
from lora_trainer.output.export import (
    AdapterTensors,
    ExportInfo,
    Format,
    LoraPair,
    SubsetSummary,
    export_bytes,
    final_export_name,
    metadata,
    prune_exports,
    read_back,
    step_export_name,
    write_export,
)
from lora_trainer.output.inspect import inspect_file

FAMILY = family("sd15")
RANK, ALPHA = 4, 1.5
TARGETS = [
    *("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2", "proj_in", "proj_out"),
    *(
        "conv1",
        "conv2",
        "conv_shortcut",
        "time_emb_proj",
        "downsamplers.0.conv",
        "upsamplers.0.conv",
    ),
]


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def base() -> UNet2DConditionModel:
    torch.manual_seed(0)
    return UNet2DConditionModel(
        sample_size=8,
        block_out_channels=(32, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=1,
        cross_attention_dim=32,
        attention_head_dim=2,
        norm_num_groups=8,
    ).requires_grad_(False)


def adapted(base: UNet2DConditionModel, **options: Any) -> UNet2DConditionModel:
    """Return a copy of `base` with a peft adapter whose random weights matter to the output."""
    unet = copy.deepcopy(base)
    strength: dict[str, Any] = {"r": RANK, "lora_alpha": ALPHA, "target_modules": TARGETS}
    unet.add_adapter(LoraConfig(**strength, **options))
    generator = torch.Generator().manual_seed(1)
    for layer in lora_layers(unet).values():
        for weight in weights_of(layer):
            weight.data = torch.randn(weight.shape, generator=generator) * 0.15
    return unet


def lora_layers(unet: UNet2DConditionModel) -> dict[str, LoraLayer]:
    return {name: module for name, module in unet.named_modules() if isinstance(module, LoraLayer)}


def weights_of(layer: LoraLayer) -> tuple[torch.nn.Parameter, torch.nn.Parameter]:
    down, up = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert isinstance(down, torch.nn.Parameter)
    assert isinstance(up, torch.nn.Parameter)
    return down, up


def pairs_of(unet: UNet2DConditionModel) -> dict[str, LoraPair]:
    weights = {name: weights_of(layer) for name, layer in lora_layers(unet).items()}
    return {name: LoraPair(down=down, up=up) for name, (down, up) in weights.items()}


def output(unet: UNet2DConditionModel) -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    noisy = torch.randn(2, 4, 8, 8, generator=generator)
    text = torch.randn(2, 7, 32, generator=generator)
    with torch.no_grad():
        predicted: torch.Tensor = unet(
            noisy, torch.tensor([10, 700]), encoder_hidden_states=text
        ).sample
    return predicted


def loaded_by_diffusers(base: UNet2DConditionModel, path: Path) -> UNet2DConditionModel:
    """Load `path` with plain `load_lora_weights` into a whole pipeline; return its U-Net."""
    text_config = CLIPTextConfig(
        hidden_size=32,
        intermediate_size=32,
        num_attention_heads=2,
        num_hidden_layers=1,
        vocab_size=50,
    )
    pipeline = StableDiffusionPipeline(
        vae=AutoencoderKL(block_out_channels=(8,), norm_num_groups=4),
        text_encoder=CLIPTextModel(text_config),
        tokenizer=None,
        unet=copy.deepcopy(base),
        scheduler=DDIMScheduler(steps_offset=1, clip_sample=False),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )
    pipeline.load_lora_weights(path)
    return pipeline.unet


@pytest.fixture(scope="module")
def live(base: UNet2DConditionModel) -> UNet2DConditionModel:
    return adapted(base)


@pytest.fixture(scope="module")
def tensors(live: UNet2DConditionModel) -> AdapterTensors:
    return pairs_of(live)


def small_tensors(seed: int = 0, *, size: float = 1.0) -> dict[str, LoraPair]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * size

    return {
        "down_blocks.0.attentions.0.proj_in": LoraPair(down=draw(4, 8, 1, 1), up=draw(6, 4, 1, 1)),
        "mid_block.attentions.0.transformer_blocks.0.attn2.to_k": LoraPair(
            down=draw(4, 12), up=draw(10, 4)
        ),
        "mid_block.resnets.0.conv1": LoraPair(down=draw(4, 3, 3, 3), up=draw(5, 4, 1, 1)),
    }


def info(**changes: Any) -> ExportInfo:
    planned = {
        **flatten(Config()),
        "train.steps": 300,
        "train.batch_size": 4,
        "train.precision": "fp32",
        "data.resolution": 512,
        "memory.gradient_checkpointing": False,
        "adapter.rank": RANK,
        "adapter.alpha": ALPHA,
    }
    plain = ExportInfo(
        title="zibbo",
        rank=RANK,
        alpha=ALPHA,
        base_name="stable-diffusion-v1-5/stable-diffusion-v1-5",
        base_identity="ab" * 32,
        base_model_version="sd_v1",
        architecture="stable-diffusion-v1/lora",
        prediction="epsilon",
        settings=planned,
        subsets=(
            SubsetSummary(
                folder="10_zibbo",
                repeats=10,
                captions=("smiling, zibbo", "zibbo, smiling, red hat"),
            ),
            SubsetSummary(folder="extra", repeats=1, captions=("zibbo",)),
        ),
        buckets={"512x512": 20, "448x576": 1},
        step=250,
        images_seen=1000,
        started_at_s=1_700_000_000.0,
        saved_at_s=1_700_003_600.0,
        trigger="zibbo",
        description="a round blue creature",
    )
    return replace(plain, **changes)


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


def exported(tensors: AdapterTensors, *, format: Format = "kohya", **changes: Any) -> bytes:
    options = {
        "alpha": ALPHA,
        "family": FAMILY,
        "precision": "fp32",
        "metadata": metadata(info()),
        **changes,
    }
    return export_bytes(tensors, format=format, **options)


# ---- other programs get the adapter that was trained


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_diffusers_loads_the_same_network(
    format: Format,
    base: UNet2DConditionModel,
    live: UNet2DConditionModel,
    tensors: AdapterTensors,
    tmp_path: Path,
) -> None:
    path = tmp_path / "zibbo.safetensors"
    write_export(path, tensors, family=FAMILY, info=info(), format=format, precision="fp32")
    loaded = loaded_by_diffusers(base, path)
    assert lora_layers(loaded).keys() == lora_layers(live).keys()
    assert (output(base) - output(live)).abs().max() > 0.05, (
        "the adapter must matter for this test to mean anything"
    )
    assert (output(loaded) - output(live)).abs().max() <= 1e-5


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_rounded_files_stay_close(
    format: Format,
    base: UNet2DConditionModel,
    live: UNet2DConditionModel,
    tensors: AdapterTensors,
    tmp_path: Path,
) -> None:
    path = tmp_path / "zibbo.safetensors"
    error = write_export(path, tensors, family=FAMILY, info=info(), format=format, precision="fp16")
    effect = (output(base) - output(live)).abs().max()
    assert 0 < error < 2e-3
    assert (output(loaded_by_diffusers(base, path)) - output(live)).abs().max() < 0.01 * effect


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_modules_of_another_rank_keep_their_strength(
    format: Format, base: UNet2DConditionModel, tmp_path: Path
) -> None:
    wide = "mid_block.attentions.0.transformer_blocks.0.attn1.to_q"
    live = adapted(base, rank_pattern={f"^{wide}": 7})
    path = tmp_path / "mixed.safetensors"
    write_export(path, pairs_of(live), family=FAMILY, info=info(), format=format, precision="fp32")
    loaded = loaded_by_diffusers(base, path)
    assert lora_layers(loaded)[wide].r["default_0"] == 7
    assert (output(loaded) - output(live)).abs().max() <= 1e-5


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_our_own_inspection_finds_nothing_wrong(
    format: Format, tensors: AdapterTensors, tmp_path: Path
) -> None:
    path = tmp_path / "zibbo.safetensors"
    write_export(path, tensors, family=FAMILY, info=info(), format=format, precision="fp16")
    found = inspect_file(path).to_json()
    assert found.pop("metadata").keys() >= metadata(info()).keys()
    assert found == {
        "family": "sd15",
        "format": format,
        "rank": RANK,
        "alpha": ALPHA,
        "modules": len(tensors),
        "problems": [],
    }


def test_kohya_names_and_alpha() -> None:
    named = load(exported(small_tensors(), precision="fp16"))
    stem = "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k"
    assert {name for name in named if name.startswith(stem)} == {
        f"{stem}.alpha",
        f"{stem}.lora_down.weight",
        f"{stem}.lora_up.weight",
    }
    assert named[f"{stem}.alpha"].shape == ()
    assert named[f"{stem}.alpha"].item() == ALPHA
    assert named[f"{stem}.lora_down.weight"].dtype == torch.float16
    assert named["lora_unet_mid_block_resnets_0_conv1.lora_up.weight"].shape == (5, 4, 1, 1)


def test_only_diffusers_files_carry_the_peft_metadata() -> None:
    kohya, diffusers = exported(small_tensors()), exported(small_tensors(), format="diffusers")
    assert "lora_adapter_metadata" not in header_of(kohya)["__metadata__"]
    config = json.loads(header_of(diffusers)["__metadata__"]["lora_adapter_metadata"])
    assert (config["unet.r"], config["unet.lora_alpha"]) == (RANK, ALPHA)
    assert config["unet.target_modules"] == sorted(small_tensors())
    with pytest.raises(ValueError, match="lora_adapter_metadata"):
        exported(small_tensors(), metadata={"lora_adapter_metadata": "{}"})


def test_two_modules_may_not_share_a_name() -> None:
    pair = small_tensors()["mid_block.resnets.0.conv1"]
    with pytest.raises(ValueError, match="share one name"):
        exported({"a.b_c": pair, "a_b.c": pair})


# ---- the bytes


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_same_input_same_bytes(format: Format) -> None:
    tensors = small_tensors()
    shuffled = list(metadata(info()).items())
    random.Random(0).shuffle(shuffled)
    assert exported(tensors, format=format) == exported(
        tensors, format=format, metadata=dict(shuffled)
    )


def test_header_is_aligned_and_valid_for_the_library() -> None:
    data = exported(small_tensors())
    assert struct.unpack("<Q", data[:8])[0] % 8 == 0
    assert len(load(data)) == 9


def test_hashes_are_of_the_tensor_bytes_and_survive_a_change_of_metadata() -> None:
    data = exported(small_tensors())
    body = data[8 + struct.unpack("<Q", data[:8])[0] :]
    entries = header_of(data)["__metadata__"]
    assert entries["modelspec.hash_sha256"] == "0x" + sha256(body).hexdigest()
    assert entries["sshs_model_hash"] == sha256(body).hexdigest()
    renamed = metadata(info(description="another"))
    assert (
        header_of(exported(small_tensors(), metadata=renamed))["__metadata__"]["sshs_model_hash"]
        == (entries["sshs_model_hash"])
    )


def test_legacy_hash_covers_64_kib_at_1_mib_with_ss_entries_only() -> None:
    tensors = {
        "mid_block.conv": LoraPair(
            down=torch.arange(4.0 * 90_000).reshape(4, -1), up=torch.ones(8, 4)
        )
    }
    bare = exported(tensors, metadata={"ss_v2": "False"})
    body = bare[8 + struct.unpack("<Q", bare[:8])[0] :]
    layout = {name: entry for name, entry in header_of(bare).items() if name != "__metadata__"}
    text = json.dumps({"__metadata__": {"ss_v2": "False"}, **layout}).encode()
    text += b" " * (-len(text) % 8)
    expected = sha256((struct.pack("<Q", len(text)) + text + body)[0x100000:0x110000]).hexdigest()[
        :8
    ]
    assert header_of(bare)["__metadata__"]["sshs_legacy_hash"] == expected
    assert expected != sha256(b"").hexdigest()[:8]
    described = exported(tensors, metadata={"ss_v2": "False", "modelspec.description": "x" * 5000})
    assert header_of(described)["__metadata__"]["sshs_legacy_hash"] == expected


# ---- what must not be exported


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("factor", ["down", "up"])
def test_not_finite_values_are_refused(value: float, factor: str) -> None:
    tensors = small_tensors()
    spoilt = getattr(tensors["mid_block.resnets.0.conv1"], factor)
    spoilt.view(-1)[-1] = value
    with pytest.raises(TrainingStopped, match=r"mid_block\.resnets\.0\.conv1.*finite"):
        exported(tensors)


def test_values_too_large_for_the_precision_are_refused() -> None:
    tensors = small_tensors()
    tensors["mid_block.resnets.0.conv1"].up.view(-1)[0] = 7e4
    with pytest.raises(TrainingStopped, match=r"7e\+04.*output\.precision=fp32"):
        exported(tensors, precision="fp16")
    assert exported(tensors, precision="bf16")


# ---- read-back


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_an_exact_file_reads_back_with_no_error(format: Format, tmp_path: Path) -> None:
    data = exported(small_tensors(), format=format)
    path = tmp_path / "a.safetensors"
    path.write_bytes(data)
    assert read_back(data, small_tensors(), alpha=ALPHA, family=FAMILY) == 0.0
    assert read_back(path, small_tensors(), alpha=ALPHA, family=FAMILY) == 0.0


def test_read_back_error_is_that_of_the_merged_update() -> None:
    """Compare with the plain definition, up @ down * alpha / rank in float64."""
    live, other = small_tensors(0), small_tensors(1)
    expected = max(
        float(
            (merged(other[module]) * 3.0 - merged(live[module])).norm()
            / merged(live[module]).norm()
        )
        for module in live
    )
    found = read_back(exported(other, alpha=3.0 * ALPHA), live, alpha=ALPHA, family=FAMILY)
    assert found == pytest.approx(expected, rel=1e-9)


def merged(pair: LoraPair) -> torch.Tensor:
    return pair.up.double().flatten(1) @ pair.down.double().flatten(1)


@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_a_lost_alpha_is_seen(format: Format) -> None:
    data = exported(small_tensors(), format=format, alpha=float(RANK))
    assert read_back(data, small_tensors(), alpha=ALPHA, family=FAMILY) == pytest.approx(
        RANK / ALPHA - 1
    )


def test_zero_update_has_no_error_and_must_stay_zero() -> None:
    zero = {
        name: LoraPair(down=pair.down, up=pair.up * 0) for name, pair in small_tensors().items()
    }
    assert read_back(exported(zero, precision="fp16"), zero, alpha=ALPHA, family=FAMILY) == 0.0
    assert read_back(exported(small_tensors()), zero, alpha=ALPHA, family=FAMILY) == float("inf")


def test_missing_unknown_and_misshapen_modules_are_refused() -> None:
    tensors = small_tensors()
    fewer = dict(list(tensors.items())[1:])
    with pytest.raises(TrainingStopped, match=r"down_blocks\.0\.attentions\.0\.proj_in lacks"):
        read_back(exported(fewer), tensors, alpha=ALPHA, family=FAMILY)
    with pytest.raises(TrainingStopped, match="belongs to no module"):
        read_back(exported(tensors), fewer, alpha=ALPHA, family=FAMILY)
    name = "mid_block.resnets.0.conv1"
    thinner = {**tensors, name: LoraPair(down=tensors[name].down[:2], up=tensors[name].up[:, :2])}
    with pytest.raises(TrainingStopped, match="other shapes"):
        read_back(exported(thinner), tensors, alpha=ALPHA, family=FAMILY)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    size=st.sampled_from([1e-9, 1e-6, 1e-4, 1.0, 100.0]),
    precision=st.sampled_from(["fp32", "bf16", "fp16"]),
)
def test_rounding_alone_never_stops_an_export(
    seed: int, size: float, precision: Any, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Tiny weights, as after one step of warm-up, lose digits in fp16; no reason to stop."""
    path = tmp_path_factory.getbasetemp() / "rounded.safetensors"
    tensors = small_tensors(seed, size=size)
    error = write_export(
        path, tensors, family=FAMILY, info=info(), format="kohya", precision=precision
    )
    assert (error == 0.0) == (precision == "fp32")


Spoil = Callable[[dict[str, torch.Tensor], str], None]


def _lose_alpha(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.alpha"] *= 1.02


def _lose_element(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.lora_up.weight"].view(-1)[3] += 0.2


def _swap_rows(named: dict[str, torch.Tensor], stem: str) -> None:
    named[f"{stem}.lora_down.weight"] = named[f"{stem}.lora_down.weight"].flip(0)


@pytest.mark.parametrize("spoil", [_lose_alpha, _lose_element, _swap_rows])
def test_a_file_that_differs_by_more_than_rounding_is_not_published(
    spoil: Spoil, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = export.export_bytes

    def faulty(tensors: AdapterTensors, **options: Any) -> bytes:
        named = load(honest(tensors, **options))
        spoil(named, "lora_unet_mid_block_attentions_0_transformer_blocks_0_attn2_to_k")
        return save(named, metadata={"ss_v2": "False"})

    monkeypatch.setattr(export, "export_bytes", faulty)
    path = tmp_path / "zibbo.safetensors"
    with pytest.raises(
        TrainingStopped, match=r"zibbo\.safetensors would differ .* in mid_block\.attentions"
    ):
        write_export(
            path, small_tensors(), family=FAMILY, info=info(), format="kohya", precision="fp16"
        )
    assert list(tmp_path.iterdir()) == []


def test_an_fp32_file_may_differ_by_next_to_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = export.export_bytes

    def faulty(tensors: AdapterTensors, *, alpha: float, **options: Any) -> bytes:
        return honest(tensors, alpha=alpha * (1 + 1e-5), **options)

    monkeypatch.setattr(export, "export_bytes", faulty)
    path = tmp_path / "a.safetensors"
    options: dict[str, Any] = {"family": FAMILY, "info": info(), "format": "kohya"}
    with pytest.raises(TrainingStopped, match="would differ"):
        write_export(path, small_tensors(), precision="fp32", **options)
    write_export(path, small_tensors(), precision="fp16", **options)


def test_bytes_that_the_disk_changed_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lying_disk(path: Path, data: bytes) -> None:
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    monkeypatch.setattr(export, "write_atomic", lying_disk)
    with pytest.raises(MachineError, match="other bytes"):
        write_export(
            tmp_path / "a.safetensors",
            small_tensors(),
            family=FAMILY,
            info=info(),
            format="kohya",
            precision="fp32",
        )


@pytest.mark.skipif(os.name == "nt", reason="Windows has no umask")
def test_other_users_can_read_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    before = os.umask(0o022)
    try:
        write_export(
            path, small_tensors(), family=FAMILY, info=info(), format="kohya", precision="fp32"
        )
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.safetensors"]


# ---- metadata


def test_metadata_that_readers_use() -> None:
    found = metadata(info())
    expected = {
        "ss_base_model_version": "sd_v1",
        "ss_v2": "False",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "4",
        "ss_network_alpha": "1.5",
        "ss_network_args": "{}",
        "ss_resolution": "(512, 512)",
        "ss_num_train_images": "21",
        "ss_epoch": "48",
        "ss_num_epochs": "58",
        "ss_steps": "250",
        "ss_max_train_steps": "300",
        "ss_learning_rate": "0.0001",
        "ss_seed": "42",
        "ss_output_name": "zibbo",
        "ss_sd_model_name": "stable-diffusion-v1-5/stable-diffusion-v1-5",
        "ss_training_started_at": "1700000000.0",
        "ss_mixed_precision": "no",
        "ss_min_snr_gamma": "5.0",
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": "stable-diffusion-v1/lora",
        "modelspec.implementation": "diffusers",
        "modelspec.title": "zibbo",
        "modelspec.resolution": "512x512",
        "modelspec.date": "2023-11-14T23:13:20+00:00",
        "modelspec.prediction_type": "epsilon",
        "modelspec.trigger_phrase": "zibbo",
        "modelspec.description": "a round blue creature",
    }
    assert {key: found[key] for key in expected} == expected
    assert all(isinstance(value, str) for value in found.values())
    assert "modelspec.thumbnail" not in found
    assert "modelspec.timestep_range" not in found


def test_metadata_of_the_dataset_is_json_with_the_trigger_first() -> None:
    found = metadata(info())
    tags = json.loads(found["ss_tag_frequency"])
    assert tags == {"10_zibbo": {"zibbo": 2, "smiling": 2, "red hat": 1}, "extra": {"zibbo": 1}}
    assert list(tags["10_zibbo"]) == ["zibbo", "smiling", "red hat"]
    assert json.loads(found["ss_dataset_dirs"])["10_zibbo"] == {"n_repeats": 10, "img_count": 2}
    buckets = json.loads(found["ss_bucket_info"])["buckets"]
    assert buckets == {
        "0": {"resolution": [448, 576], "count": 1},
        "1": {"resolution": [512, 512], "count": 20},
    }
    (dataset,) = json.loads(found["ss_datasets"])
    assert dataset["subsets"][0]["class_tokens"] == "zibbo"
    assert dataset["num_train_images"] == 21


def test_metadata_follows_the_settings() -> None:
    changed = {
        **info().settings,
        "adapter.targets": "all",
        "train.precision": "bf16",
        "objective.max_timestep": 500,
    }
    found = metadata(
        info(settings=changed, prediction="v_prediction", thumbnail_jpeg=b"\xff\xd8/9j/x")
    )
    assert json.loads(found["ss_network_args"]) == {"conv_dim": "4", "conv_alpha": "1.5"}
    assert found["ss_mixed_precision"] == "bf16"
    assert found["modelspec.timestep_range"] == "0,500"
    assert found["modelspec.prediction_type"] == "v"
    assert found["modelspec.thumbnail"] == "data:image/jpeg;base64,/9gvOWoveA=="
    stored = json.loads(found["lora_train.settings"])
    assert stored["train.batch_size"] == 4
    assert not {"output.folder", "data.cache_dir"} & stored.keys()
    assert found["lora_train.version"]


def test_a_large_vocabulary_is_cut_to_the_most_frequent_tags() -> None:
    long = ("common, " + "x" * 9000,) * 2  # twice, so that it is among the most frequent
    captions = (*long, *(f"common, tag {number}" for number in range(3000)))
    crowded = info(subsets=(SubsetSummary(folder="all", repeats=1, captions=captions),))
    found = json.loads(metadata(crowded)["ss_tag_frequency"])["all"]
    assert len(found) == 1000
    assert found["common"] == 3002
    assert max(map(len, found)) == 300
    assert len(exported(small_tensors(), metadata=metadata(crowded))) < 2**20


PRIVATE = [
    "/home/jane doe/lora",
    "C:\\Users\\jane\\lora",
    "~/jane/lora",
    "\\\\nas\\jane\\lora",
    "../../jane/lora",
]


def _planted(secret: str) -> ExportInfo:
    """Return an info with `secret` in every text field and every setting that takes text."""
    plain = info()
    texts = [field.name for field in fields(plain) if isinstance(getattr(plain, field.name), str)]
    planted: dict[str, Any] = {name: secret for name in texts if name != "prediction"}
    keys = ("base.model", "output.folder", "data.cache_dir", "output.name", "data.trigger")
    settings_ = {
        **plain.settings,
        **dict.fromkeys(keys, secret),
        "sampling.prompts": [f"like {secret}", secret],
    }
    subset = SubsetSummary(folder=secret, repeats=1, captions=(secret, f"zibbo, from {secret}"))
    return replace(plain, **planted, settings=settings_, subsets=(subset,))


@pytest.mark.parametrize("path", PRIVATE)
def test_no_path_reaches_the_file(path: str) -> None:
    data = exported(small_tensors(), metadata=metadata(_planted(path)))
    text = data[: 8 + struct.unpack("<Q", data[:8])[0]].decode("utf-8", "replace")
    assert "jane" not in text
    assert metadata(_planted(path))["modelspec.title"] == "lora"


@pytest.mark.parametrize(
    ("planted", "secret"),
    [
        ("hf_abcdefghijklmnopqrstuvwxyz", "abcdefghij"),
        ("https://jane:pa55@host/x", "pa55"),
        ("https://civitai.com/api?token=5ecret&a=1", "5ecret"),
    ],
)
def test_no_token_reaches_the_file(planted: str, secret: str) -> None:
    data = exported(small_tensors(), metadata=metadata(_planted(planted)))
    assert secret.encode() not in data


@pytest.mark.parametrize(
    "caption",
    [
        "a hat, and/or a scarf, 1/2 body, w/ stick",
        "see https://example.com/a/b",
        "smile :/ wide",
        "16:9, c: drive",
    ],
)
def test_ordinary_text_is_left_alone(caption: str) -> None:
    found = metadata(info(description=caption))
    assert found["modelspec.description"] == caption


def test_names_that_are_not_utf8_do_not_break_the_file() -> None:
    odd = SubsetSummary(folder="10_z\udce9", repeats=1, captions=("zibbo, \ud800 café 😀",))
    data = exported(small_tensors(), metadata=metadata(info(subsets=(odd,))))
    assert len(load(data)) == 9
    assert "café 😀" in header_of(data)["__metadata__"]["ss_tag_frequency"]


# ---- rolling names


def test_names_are_those_of_kohya() -> None:
    assert final_export_name("zibbo") == "zibbo.safetensors"
    assert step_export_name("zibbo", step=250) == "zibbo-step00000250.safetensors"


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


def test_prune_says_what_the_disk_refused(tmp_path: Path) -> None:
    for step in (1, 2):
        (tmp_path / step_export_name("a", step=step)).mkdir()
    with pytest.raises(MachineError, match="a-step00000001"):
        prune_exports(tmp_path, name="a", keep_last=1)

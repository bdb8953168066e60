"""What the header of an exported file tells, and what it must not tell."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load

from lora_trainer.common.memo import HashMemo
from lora_trainer.families import family
from lora_trainer.lora_file.metadata import ExportInfo, SubsetSummary, file_hashes, metadata
from lora_trainer.lora_file.write import write_export
from tests.fakes.adapters import export_info, exported, small_adapter


def exported_with(entries: Mapping[str, str]) -> bytes:
    return exported(small_adapter(), family=family("sd15"), format="kohya", metadata=entries)


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


def test_metadata_that_readers_use() -> None:
    found = metadata(export_info())
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
    found = metadata(export_info())
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


def test_one_training_has_one_session_and_the_hashes_of_its_models(tmp_path: Path) -> None:
    base, vae = tmp_path / "base.safetensors", tmp_path / "vae.safetensors"
    base.write_bytes(bytes(0x100000) + b"a" * 0x10000 + b"rest")
    vae.write_bytes(b"small")
    memo = HashMemo()
    hashes = {"base_hashes": file_hashes(base, memo), "vae_hashes": file_hashes(vae, memo)}
    found = metadata(export_info(**hashes, bucket_bounds_px=(384, 704), mean_aspect_error=0.25))
    expected = {
        "ss_sd_model_hash": hashlib.sha256(b"a" * 0x10000).hexdigest()[:8],
        "ss_new_sd_model_hash": hashlib.sha256(base.read_bytes()).hexdigest(),
        "ss_vae_hash": "e3b0c442",  # of no bytes: the file ends before 1 MiB
        "ss_new_vae_hash": hashlib.sha256(b"small").hexdigest(),
        "ss_min_bucket_reso": "384",
        "ss_max_bucket_reso": "704",
    }
    assert {key: found[key] for key in expected} == expected
    assert json.loads(found["ss_bucket_info"])["mean_img_ar_error"] == 0.25
    assert file_hashes(tmp_path, memo) is None
    later = metadata(export_info(step=300, saved_at_s=1_700_009_999.0))
    assert 0 <= int(found["ss_session_id"]) == int(later["ss_session_id"]) < 2**32
    assert later["ss_session_id"] != metadata(export_info(started_at_s=1.0))["ss_session_id"]
    assert not {"ss_sd_model_hash", "ss_new_vae_hash"} & later.keys()


def test_the_header_comes_back_from_the_file(tmp_path: Path) -> None:
    """As a model browser reads it: texts, of which some are JSON."""
    info = export_info(bucket_bounds_px=(384, 704), trigger="zibbo")
    file, tensors, sd15 = tmp_path / "lora.safetensors", small_adapter(), family("sd15")
    write_export(file, tensors, family=sd15, info=info, format="kohya", precision="fp32")
    stored = header_of(file.read_bytes())["__metadata__"]
    entries = metadata(info)
    assert {key: stored[key] for key in entries} == entries


def test_metadata_follows_the_settings() -> None:
    changed = {
        **export_info().settings,
        "adapter.targets": "all",
        "train.precision": "bf16",
        "objective.max_timestep": 500,
    }
    found = metadata(
        export_info(settings=changed, prediction="v_prediction", thumbnail_jpeg=b"\xff\xd8/9j/x")
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
    crowded = export_info(subsets=(SubsetSummary(folder="all", repeats=1, captions=captions),))
    found = json.loads(metadata(crowded)["ss_tag_frequency"])["all"]
    assert len(found) == 1000
    assert found["common"] == 3002
    assert max(map(len, found)) == 300
    assert len(exported_with(metadata(crowded))) < 2**20


def _planted(secret: str) -> ExportInfo:
    """Return an info with `secret` in every text field and every setting that takes text."""
    plain = export_info()
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


def test_no_path_and_no_token_reaches_the_file() -> None:
    for planted, secret in (
        ("/home/jane doe/lora", "jane"),
        ("C:\\Users\\jane\\lora", "jane"),
        ("../../jane/lora", "jane"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "abcdefghij"),
        ("https://civitai.com/api?token=5ecret&a=1", "5ecret"),
    ):
        entries = metadata(_planted(planted))
        assert secret.encode() not in exported_with(entries)
        assert secret != "jane" or entries["modelspec.title"] == "lora"
    caption = "see https://example.com/a/b, and/or 1/2 body :/ 16:9, c: drive"
    assert metadata(export_info(description=caption))["modelspec.description"] == caption


def test_models_are_named_without_their_folders() -> None:
    keys = ("base.model", "base.vae", "base.companion", "base.assistant", "train.init_from")
    for written, stored in (
        ("owner/model", "owner/model"),
        ("owner/model.safetensors", "model.safetensors"),
        ("models\\jane\\old.safetensors", "old.safetensors"),
        ("/home/jane/base/", "base"),
    ):
        settings = {**export_info().settings, **dict.fromkeys(keys, written)}
        entries = metadata(export_info(settings=settings))
        settings = json.loads(entries["lora_train.settings"])
        assert {settings[key] for key in keys} == {stored} == {entries["ss_vae_name"]}


def test_names_that_are_not_utf8_do_not_break_the_file() -> None:
    odd = SubsetSummary(folder="10_z\udce9", repeats=1, captions=("zibbo, \ud800 café 😀",))
    data = exported_with(metadata(export_info(subsets=(odd,))))
    assert len(load(data)) == 9
    assert "café 😀" in header_of(data)["__metadata__"]["ss_tag_frequency"]


LYCORIS = "lycoris.kohya"
FLOW = {
    "objective.timestep_sampling": "logit_normal",
    "objective.logit_mean": 0.5,
    "objective.flow_shift": 3.0,
    "objective.guidance_scale": 1.0,
}
FOLLOWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"ss_network_dropout": "None", "ss_gradient_checkpointing": "False"}),
    ({"memory.gradient_checkpointing": "selective"}, {"ss_gradient_checkpointing": "True"}),
    (
        {"adapter.dropout": 0.1, "adapter.rank_dropout": 0.2, "adapter.module_dropout": 0.3},
        {"ss_network_dropout": "0.1", "args": {"rank_dropout": "0.2", "module_dropout": "0.3"}},
    ),
    (
        {"adapter.kind": "lokr"},
        {"ss_network_module": LYCORIS, "args": {"algo": "lokr", "factor": "-1"}},
    ),
    ({"adapter.kind": "oft"}, {"ss_network_module": LYCORIS, "args": {"algo": "diag-oft"}}),
    ({"adapter.dora": True}, {"args": {"algo": "lora", "dora_wd": "True", "wd_on_output": "True"}}),
    ({"adapter.rslora": True}, {"args": {"algo": "lora", "rs_lora": "True"}}),
    (
        {"adapter.targets": "all", "adapter.conv_rank": 2, "adapter.conv_alpha": 0.5},
        {"ss_network_module": "networks.lora", "args": {"conv_dim": "2", "conv_alpha": "0.5"}},
    ),
    (
        {"adapter.rank_pattern": {"attn1": 8, "ff": 2}, "optimizer.lora_plus_ratio": 16.0},
        {"args": {"network_reg_dims": "attn1=8,ff=2", "loraplus_lr_ratio": "16"}},
    ),
    ({"adapter.text_encoder": True}, {"ss_text_encoder_lr": "5e-05", "ss_unet_lr": "0.0001"}),
    (
        {"adapter.text_encoder": True, "optimizer.text_encoder_learning_rate": 3e-6},
        {"ss_text_encoder_lr": "3e-06"},
    ),
    ({"optimizer.max_weight_norm": 1.5}, {"ss_scale_weight_norms": "1.5"}),
    (
        {
            "objective.loss": "huber",
            "objective.huber_delta": 0.2,
            "objective.weighting": "debiased",
            "objective.input_perturbation": 0.1,
        },
        {
            "ss_loss_type": "huber",
            "ss_huber_c": "0.2",
            "ss_debiased_estimation": "True",
            "ss_min_snr_gamma": "None",
            "ss_ip_noise_gamma": "0.1",
        },
    ),
    (
        {"prediction": "flow", "adapter.targets": "all", "objective.weighting": "none", **FLOW},
        {
            "ss_timestep_sampling": "logit_normal",
            "ss_weighting_scheme": "logit_normal",
            "ss_logit_mean": "0.5",
            "ss_discrete_flow_shift": "3.0",
            "ss_guidance_scale": "1.0",
            "modelspec.prediction_type": "flow",
            "args": {},  # transformers have no convolutions
        },
    ),
    (
        {"prediction": "flow", **FLOW, "objective.weighting": "sigma_sqrt"},
        {"ss_weighting_scheme": "sigma_sqrt"},
    ),
]


@pytest.mark.parametrize(("changes", "expected"), FOLLOWS)
def test_entries_follow_the_settings_in_the_words_of_kohya_and_lycoris(
    changes: dict[str, Any], expected: dict[str, Any]
) -> None:
    prediction = changes.get("prediction", "epsilon")
    settings = {**export_info().settings, **changes}
    entries: dict[str, Any] = dict(metadata(export_info(settings=settings, prediction=prediction)))
    entries["args"] = json.loads(entries["ss_network_args"])
    assert {key: entries[key] for key in expected} == expected
    assert ("ss_zero_terminal_snr" in entries) == (prediction != "flow")
    assert ("ss_discrete_flow_shift" in entries) == (prediction == "flow")


def test_what_people_say_about_their_adapter() -> None:
    found = metadata(export_info(author="A. Person", license="mit", merged_from=("one", "two")))
    assert found["modelspec.author"] == "A. Person"
    assert found["modelspec.license"] == "mit"
    assert found["modelspec.merged_from"] == "one, two"
    assert "zibbo" in found["modelspec.usage_hint"]
    bare = metadata(export_info(trigger=None, description=""))
    empty = ("author", "license", "merged_from", "usage_hint", "trigger_phrase", "description")
    assert not {f"modelspec.{name}" for name in empty} & bare.keys()

"""What the header of an exported file tells, and what it must not tell."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.memo import HashMemo
from lora_trainer.lora_file.metadata import file_hashes
from tests.fakes.adapters import entries_of, export, export_info, small_adapter

Header = Callable[..., dict[str, str]]
"""Returns the entries of an exported file, by changes of `export_info`."""
PLAIN = export_info()


@pytest.fixture
def header(tmp_path: Path) -> Header:
    def written(settings: dict[str, Any] | None = None, **changes: Any) -> dict[str, str]:
        settings = {**PLAIN.settings, **(settings or {})}
        export(tmp_path / "lora.safetensors", small_adapter(), settings=settings, **changes)
        return entries_of(tmp_path / "lora.safetensors")

    return written


def test_metadata_that_readers_use(header: Header) -> None:
    found = header()
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
        "ss_lowram": "False",
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
    assert "modelspec.thumbnail" not in found
    assert "modelspec.timestep_range" not in found
    tags = json.loads(found["ss_tag_frequency"])
    assert tags == {"10_zibbo": {"zibbo": 2, "smiling": 2, "red hat": 1}, "extra": {"zibbo": 1}}
    assert list(tags["10_zibbo"]) == ["zibbo", "smiling", "red hat"], "the trigger is first"
    assert json.loads(found["ss_dataset_dirs"])["10_zibbo"] == {"n_repeats": 10, "img_count": 2}
    buckets = json.loads(found["ss_bucket_info"])["buckets"]
    assert buckets == {
        "0": {"resolution": [448, 576], "count": 1},
        "1": {"resolution": [512, 512], "count": 20},
    }
    (dataset,) = json.loads(found["ss_datasets"])
    assert dataset["subsets"][0]["class_tokens"] == "zibbo"
    assert dataset["num_train_images"] == 21


def test_one_training_has_one_session_and_the_hashes_of_its_models(
    tmp_path: Path, header: Header
) -> None:
    base, vae = tmp_path / "base.safetensors", tmp_path / "vae.safetensors"
    base.write_bytes(bytes(0x100000) + b"a" * 0x10000 + b"rest")
    vae.write_bytes(b"small")
    memo = HashMemo()
    hashes = {"base_hashes": file_hashes(base, memo), "vae_hashes": file_hashes(vae, memo)}
    found = header(**hashes, bucket_bounds_px=(384, 704), mean_aspect_error=0.25)
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
    later = header(step=300, saved_at_s=1_700_009_999.0)
    assert 0 <= int(found["ss_session_id"]) == int(later["ss_session_id"]) < 2**32
    assert later["ss_session_id"] != header(started_at_s=1.0)["ss_session_id"]
    assert not {"ss_sd_model_hash", "ss_new_vae_hash"} & later.keys()


def test_a_large_vocabulary_is_cut_to_the_most_frequent_tags(
    header: Header, tmp_path: Path
) -> None:
    long = ("common, " + "x" * 9000,) * 2  # twice, so that it is among the most frequent
    captions = (*long, *(f"common, tag {number}" for number in range(3000)))
    crowded = replace(PLAIN.subsets[0], folder="all", captions=captions)
    found = json.loads(header(subsets=(crowded,))["ss_tag_frequency"])["all"]
    assert len(found) == 1000
    assert found["common"] == 3002
    assert max(map(len, found)) == 300
    assert (tmp_path / "lora.safetensors").stat().st_size < 2**20


def test_no_path_and_no_token_reaches_the_file(header: Header, tmp_path: Path) -> None:
    texts = [field.name for field in fields(PLAIN) if isinstance(getattr(PLAIN, field.name), str)]
    keys = ("base.model", "output.folder", "data.cache_dir", "output.name", "data.trigger")
    keys += ("output.description", "output.author", "output.license")
    for planted, secret in (
        ("/home/jane doe/lora", "jane"),
        ("C:\\Users\\jane\\lora", "jane"),
        ("../../jane/lora", "jane"),
        ("hf_abcdefghijklmnopqrstuvwxyz", "abcdefghij"),
        ("https://civitai.com/api?token=5ecret&a=1", "5ecret"),
    ):
        # In every text field and in settings that take text, however nested.
        settings = {
            **dict.fromkeys(keys, planted),
            "sampling.prompts": [f"like {planted}", planted],
        }
        captions = (planted, f"zibbo, from {planted}")
        subset = replace(PLAIN.subsets[0], folder=planted, captions=captions)
        fields_ = {name: planted for name in texts if name != "prediction"}
        entries = header(settings, subsets=(subset,), **fields_)
        assert secret.encode() not in (tmp_path / "lora.safetensors").read_bytes()
        assert secret != "jane" or entries["modelspec.title"] == "lora"
    caption = "see https://example.com/a/b, and/or 1/2 body :/ 16:9, c: drive"
    assert header({"output.description": caption})["modelspec.description"] == caption


def test_models_are_named_without_their_folders(header: Header) -> None:
    keys = ("base.model", "base.vae", "base.companion", "base.assistant", "train.init_from")
    for written, stored in (
        ("owner/model", "owner/model"),
        ("owner/model.safetensors", "model.safetensors"),
        ("models\\jane\\old.safetensors", "old.safetensors"),
        ("/home/jane/base/", "base"),
    ):
        entries = header(dict.fromkeys(keys, written))
        settings = json.loads(entries["lora_train.settings"])
        assert {settings[key] for key in keys} == {stored} == {entries["ss_vae_name"]}


def test_names_that_are_not_utf8_do_not_break_the_file(header: Header) -> None:
    odd = ("zibbo, \ud800 caf\u00e9 \U0001f600",)
    subset = replace(PLAIN.subsets[0], folder="10_z\udce9", captions=odd)
    assert "caf\u00e9 \U0001f600" in header(subsets=(subset,))["ss_tag_frequency"]


FLOW = {
    "objective.timestep_sampling": "logit_normal",
    "objective.logit_mean": 0.5,
    "objective.flow_shift": 3.0,
    "objective.guidance_scale": 1.0,
}
FOLLOWS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (
        {"adapter.targets": "all", "base.clip_skip": 1, "data.caption_tokens": 75},
        {
            "ss_clip_skip": "None",
            "ss_max_token_length": "None",
            "args": {"conv_dim": "4", "conv_alpha": "1.5"},
            "ss_network_module": "networks.lora",
            "ss_network_dropout": "None",
            "ss_gradient_checkpointing": "False",
        },
    ),
    (
        {
            "adapter.dropout": 0.1, "adapter.rank_dropout": 0.2, "adapter.module_dropout": 0.3,
            "adapter.targets": "all", "adapter.conv_rank": 2, "adapter.conv_alpha": 0.5,
            "adapter.rank_pattern": {"attn1": 8, "ff": 2}, "adapter.text_encoder": True,
            "base.clip_skip": 2, "data.caption_tokens": 225,
            "memory.gradient_checkpointing": "selective", "objective.max_timestep": 500,
            "optimizer.lora_plus_ratio": 16.0, "optimizer.max_weight_norm": 1.5,
            "prediction": "v_prediction", "train.precision": "bf16",
        },
        {
            "args": {
                "rank_dropout": "0.2", "module_dropout": "0.3", "conv_dim": "2", "conv_alpha": "0.5",
                "network_reg_dims": "attn1=8,ff=2", "loraplus_lr_ratio": "16",
            },
            "ss_clip_skip": "2", "ss_max_token_length": "225",
            "ss_network_dropout": "0.1", "ss_text_encoder_lr": "5e-05", "ss_unet_lr": "0.0001",
            "ss_gradient_checkpointing": "True", "ss_mixed_precision": "bf16",
            "ss_scale_weight_norms": "1.5", "modelspec.timestep_range": "0,500",
            "modelspec.prediction_type": "v",
        },
    ),
    (
        {
            "adapter.kind": "lokr", "adapter.text_encoder": True, "objective.huber_delta": 0.2,
            "objective.loss": "huber", "objective.weighting": "debiased",
            "objective.input_perturbation": 0.1, "optimizer.text_encoder_learning_rate": 3e-6,
        },
        {
            "args": {"algo": "lokr", "factor": "-1"}, "ss_network_module": "lycoris.kohya",
            "ss_text_encoder_lr": "3e-06", "ss_loss_type": "huber", "ss_huber_c": "0.2",
            "ss_debiased_estimation": "True", "ss_min_snr_gamma": "None",
            "ss_ip_noise_gamma": "0.1",
        },
    ),
    (
        {"adapter.kind": "oft", "adapter.text_encoder": True, "optimizer.name": "prodigy"},
        {"args": {"algo": "diag-oft"}, "ss_text_encoder_lr": "0.0001"},
    ),
    ({"adapter.dora": True}, {"args": {"algo": "lora", "dora_wd": "True", "wd_on_output": "True"}}),
    ({"adapter.rslora": True}, {"args": {"algo": "lora", "rs_lora": "True"}}),
    (
        {"prediction": "flow", "adapter.targets": "all", "objective.weighting": "none", **FLOW},
        {
            "ss_timestep_sampling": "logit_normal", "ss_weighting_scheme": "logit_normal",
            "ss_logit_mean": "0.5", "ss_discrete_flow_shift": "3.0", "ss_guidance_scale": "1.0",
            "modelspec.prediction_type": "flow",
            "args": {},  # transformers have no convolutions
        },
    ),
    (
        {"prediction": "flow", **FLOW, "objective.weighting": "sigma_sqrt"},
        {"ss_weighting_scheme": "sigma_sqrt"},
    ),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "expected"), FOLLOWS)
def test_entries_follow_the_settings_in_the_words_of_kohya_and_lycoris(
    changes: dict[str, Any], expected: dict[str, Any], header: Header
) -> None:
    prediction = changes.pop("prediction", "epsilon")
    entries: dict[str, Any] = dict(header(changes, prediction=prediction))
    entries["args"] = json.loads(entries["ss_network_args"])
    assert {key: entries[key] for key in expected} == expected
    assert ("ss_zero_terminal_snr" in entries) == (prediction != "flow")
    assert ("ss_discrete_flow_shift" in entries) == (prediction == "flow")
    stored = json.loads(entries["lora_train.settings"])
    assert {key: stored[key] for key in changes} == changes
    assert not {"output.folder", "data.cache_dir"} & stored.keys()


def test_what_people_say_about_their_adapter(header: Header) -> None:
    people = {"output.author": "A. Person", "output.license": "mit"}
    found = header(people, thumbnail_jpeg=b"\xff\xd8/9j/x")
    assert found["modelspec.author"] == "A. Person"
    assert found["modelspec.license"] == "mit"
    assert found["modelspec.thumbnail"] == "data:image/jpeg;base64,/9gvOWoveA=="
    assert "zibbo" in found["modelspec.usage_hint"]
    bare = header({"output.description": ""}, trigger=None)
    empty = ("author", "license", "usage_hint", "trigger_phrase", "description")
    assert not {f"modelspec.{name}" for name in empty} & bare.keys()

"""What the header of an exported file tells, and what it must not tell."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_args

import pytest
from safetensors.torch import load

from lora_trainer.common.memo import HashMemo
from lora_trainer.families import family
from lora_trainer.families.base import FileFormat
from lora_trainer.lora_file.metadata import ExportInfo, SubsetSummary, file_hashes, metadata
from lora_trainer.lora_file.write import export_bytes, write_export
from tests.fakes.adapters import export_info, read_back, small_adapter


def exported(entries: Mapping[str, str]) -> bytes:
    return export_bytes(
        small_adapter(), family=family("sd15"), format="kohya", precision="fp32", metadata=entries
    )


def header_of(data: bytes) -> dict[str, Any]:
    header: dict[str, Any] = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
    return header


@pytest.mark.parametrize(
    ("kind", "said"),
    [("none", "False"), ("selective", "True"), ("full", "True"), ("offloaded", "True")],
)
def test_checkpointing_is_a_truth_value_to_others(kind: str, said: str) -> None:
    info = export_info()
    settings = {**info.settings, "memory.gradient_checkpointing": kind}
    assert metadata(replace(info, settings=settings))["ss_gradient_checkpointing"] == said


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


@pytest.mark.parametrize("format", get_args(FileFormat))
def test_the_header_comes_back_from_every_format(format: FileFormat, tmp_path: Path) -> None:
    """As a model browser reads it: texts, of which some are JSON; and no format loses an entry."""
    info = export_info(bucket_bounds_px=(384, 704), trigger="zibbo")
    file = tmp_path / "lora.safetensors"
    tensors = small_adapter()
    write_export(file, tensors, family=family("sd15"), info=info, format=format, precision="fp32")
    stored = header_of(file.read_bytes())["__metadata__"]
    entries = metadata(info)
    assert {key: stored[key] for key in entries} == entries
    counts = [row["count"] for row in json.loads(stored["ss_bucket_info"])["buckets"].values()]
    images = [row["img_count"] for row in json.loads(stored["ss_dataset_dirs"]).values()]
    assert (sum(counts), sum(images)) == (21, 3)
    assert read_back(file, tensors, family=family("sd15")) == pytest.approx(0, abs=1e-6)


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


def test_dropout_is_told_in_kohyas_names() -> None:
    assert metadata(export_info())["ss_network_dropout"] == "None"
    dropping = {"adapter.dropout": 0.1, "adapter.rank_dropout": 0.2, "adapter.module_dropout": 0.3}
    found = metadata(export_info(settings={**export_info().settings, **dropping}))
    assert found["ss_network_dropout"] == "0.1"
    assert json.loads(found["ss_network_args"]) == {"rank_dropout": "0.2", "module_dropout": "0.3"}


def test_a_large_vocabulary_is_cut_to_the_most_frequent_tags() -> None:
    long = ("common, " + "x" * 9000,) * 2  # twice, so that it is among the most frequent
    captions = (*long, *(f"common, tag {number}" for number in range(3000)))
    crowded = export_info(subsets=(SubsetSummary(folder="all", repeats=1, captions=captions),))
    found = json.loads(metadata(crowded)["ss_tag_frequency"])["all"]
    assert len(found) == 1000
    assert found["common"] == 3002
    assert max(map(len, found)) == 300
    assert len(exported(metadata(crowded))) < 2**20


PRIVATE = [
    "/home/jane doe/lora",
    "C:\\Users\\jane\\lora",
    "~/jane/lora",
    "\\\\nas\\jane\\lora",
    "../../jane/lora",
]


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


@pytest.mark.parametrize("path", PRIVATE)
def test_no_path_reaches_the_file(path: str) -> None:
    data = exported(metadata(_planted(path)))
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
    data = exported(metadata(_planted(planted)))
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
    found = metadata(export_info(description=caption))
    assert found["modelspec.description"] == caption


def test_names_that_are_not_utf8_do_not_break_the_file() -> None:
    odd = SubsetSummary(folder="10_z\udce9", repeats=1, captions=("zibbo, \ud800 café 😀",))
    data = exported(metadata(export_info(subsets=(odd,))))
    assert len(load(data)) == 9
    assert "café 😀" in header_of(data)["__metadata__"]["ss_tag_frequency"]


# ---- what kind of adapter it is, in kohya's and LyCORIS's words


@pytest.mark.parametrize(
    ("changes", "module", "arguments"),
    [
        ({}, "networks.lora", {}),
        ({"adapter.kind": "loha"}, "lycoris.kohya", {"algo": "loha"}),
        ({"adapter.kind": "lokr"}, "lycoris.kohya", {"algo": "lokr", "factor": "-1"}),
        ({"adapter.kind": "oft"}, "lycoris.kohya", {"algo": "diag-oft"}),
        (
            {"adapter.dora": True},
            "lycoris.kohya",
            {"algo": "lora", "dora_wd": "True", "wd_on_output": "True"},
        ),
        ({"adapter.rslora": True}, "lycoris.kohya", {"algo": "lora", "rs_lora": "True"}),
        (
            {"adapter.targets": "all", "adapter.conv_rank": 2, "adapter.conv_alpha": 0.5},
            "networks.lora",
            {"conv_dim": "2", "conv_alpha": "0.5"},
        ),
        (
            {"adapter.rank_pattern": {"attn1": 8, "ff": 2}, "optimizer.lora_plus_ratio": 16.0},
            "networks.lora",
            {"network_reg_dims": "attn1=8,ff=2", "loraplus_lr_ratio": "16"},
        ),
    ],
)
def test_network_module_and_arguments(
    changes: Mapping[str, Any], module: str, arguments: Mapping[str, str]
) -> None:
    found = metadata(export_info(settings={**export_info().settings, **changes}))
    assert found["ss_network_module"] == module
    assert json.loads(found["ss_network_args"]) == arguments


def test_transformers_have_no_convolutions() -> None:
    settings = {**export_info().settings, "adapter.targets": "all"}
    found = metadata(export_info(settings=settings, prediction="flow"))
    assert json.loads(found["ss_network_args"]) == {}


def test_how_flow_matching_drew_its_timesteps() -> None:
    settings = {
        **export_info().settings,
        "objective.weighting": "none",
        "objective.timestep_sampling": "logit_normal",
        "objective.logit_mean": 0.5,
        "objective.flow_shift": 3.0,
        "objective.guidance_scale": 1.0,
    }
    found = metadata(export_info(settings=settings, prediction="flow"))
    expected = {
        "ss_timestep_sampling": "logit_normal",
        "ss_weighting_scheme": "logit_normal",
        "ss_logit_mean": "0.5",
        "ss_logit_std": "1.0",
        "ss_discrete_flow_shift": "3.0",
        "ss_guidance_scale": "1.0",
        "ss_model_prediction_type": "raw",
        "modelspec.prediction_type": "flow",
    }
    assert {key: found[key] for key in expected} == expected
    assert "ss_zero_terminal_snr" not in found
    plain = metadata(export_info(zero_terminal_snr=True))
    assert plain["ss_zero_terminal_snr"] == "True"
    assert not [key for key in plain if "timestep_sampling" in key or "flow_shift" in key]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "None"),
        ({"adapter.text_encoder": True}, "5e-05"),
        (
            {"adapter.text_encoder": True, "optimizer.text_encoder_learning_rate": 3e-6},
            "3e-06",
        ),
    ],
)
def test_learning_rate_of_text_encoders(changes: Mapping[str, Any], expected: str) -> None:
    found = metadata(export_info(settings={**export_info().settings, **changes}))
    assert found["ss_text_encoder_lr"] == expected
    assert found["ss_unet_lr"] == "0.0001"


def test_what_people_say_about_their_adapter() -> None:
    found = metadata(export_info(author="A. Person", license="mit", merged_from=("one", "two")))
    assert found["modelspec.author"] == "A. Person"
    assert found["modelspec.license"] == "mit"
    assert found["modelspec.merged_from"] == "one, two"
    assert "zibbo" in found["modelspec.usage_hint"]
    bare = metadata(export_info(trigger=None, description=""))
    empty = ("author", "license", "merged_from", "usage_hint", "trigger_phrase", "description")
    assert not {f"modelspec.{name}" for name in empty} & bare.keys()


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("owner/model", "owner/model"),
        ("owner/model.safetensors", "model.safetensors"),
        ("models/jane/old.safetensors", "old.safetensors"),
        ("models\\jane\\old.safetensors", "old.safetensors"),
        ("./jane/base", "base"),
        ("/home/jane/base/", "base"),
    ],
)
@pytest.mark.parametrize(
    "key", ["base.model", "base.vae", "base.companion", "base.assistant", "train.init_from"]
)
def test_models_are_named_without_their_folders(key: str, written: str, stored: str) -> None:
    found = metadata(export_info(settings={**export_info().settings, key: written}))
    assert json.loads(found["lora_train.settings"])[key] == stored
    if key == "base.vae":
        assert found["ss_vae_name"] == stored


def told(prediction: Any = "epsilon", **objective: object) -> dict[str, str]:
    settings = {f"objective.{name}": value for name, value in objective.items()}
    info = export_info(prediction=prediction)
    return dict(metadata(replace(info, settings={**info.settings, **settings})))


def test_the_objective_is_told_in_kohyas_names() -> None:
    plain = told()
    assert (plain["ss_loss_type"], plain["ss_debiased_estimation"]) == ("l2", "False")
    assert plain["ss_ip_noise_gamma"] == "None"
    assert plain["ss_scale_weight_norms"] == "None"
    limited = {**export_info().settings, "optimizer.max_weight_norm": 1.5}
    assert metadata(export_info(settings=limited))["ss_scale_weight_norms"] == "1.5"
    rich = told(loss="huber", huber_delta=0.2, weighting="debiased", input_perturbation=0.1)
    expected = {
        "ss_loss_type": "huber",
        "ss_huber_c": "0.2",
        "ss_huber_schedule": "snr",
        "ss_debiased_estimation": "True",
        "ss_min_snr_gamma": "None",
        "ss_ip_noise_gamma": "0.1",
    }
    assert {key: rich[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("sampling", "weighting", "scheme"),
    [
        ("uniform", "none", "none"),
        ("mode", "none", "mode"),
        ("logit_normal", "none", "logit_normal"),
        ("sigmoid", "cosmap", "cosmap"),
        ("mode", "sigma_sqrt", "sigma_sqrt"),
    ],
)
def test_a_weighting_scheme_is_a_weight_or_a_density(
    sampling: str, weighting: str, scheme: str
) -> None:
    found = told("flow", timestep_sampling=sampling, weighting=weighting)
    assert found["ss_weighting_scheme"] == scheme
    assert found["ss_timestep_sampling"] == sampling

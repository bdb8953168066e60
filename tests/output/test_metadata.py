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
from lora_trainer.lora_file.metadata import file_hashes, tells_of_dataset
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


CASES = json.loads(Path(__file__).with_name("headers.json").read_text(encoding="utf-8"))
"""The whole header of `export_info`, then what other settings, and other facts of the run, change in it."""
DECODED = ("args", "dataset_dirs", "reg_dataset_dirs", "tag_frequency", "bucket_info", "datasets")
NOT_COMPARED = ("lora_train.settings", "lora_train.version", "modelspec.implementation_version")
HASHES = ("modelspec.hash_sha256", "sshs_model_hash", "sshs_legacy_hash")


@pytest.mark.parametrize("case", CASES, ids=lambda case: " ".join(case["settings"]) or "plain")
def test_entries_follow_the_run_in_the_words_of_kohya_and_lycoris(
    case: dict[str, Any], header: Header
) -> None:
    """The trigger is the first tag, and transformers have no convolutions."""
    entries: dict[str, Any] = header(case["settings"], **case.get("info", {}))
    stored = json.loads(entries["lora_train.settings"])
    assert stored == stored | case["settings"]
    assert not {"output.folder", "data.cache_dir"} & stored.keys()
    for key in (*NOT_COMPARED, *HASHES):
        assert entries.pop(key)
    wanted = CASES[0]["entries"] | case["entries"]
    for key in wanted:
        if key.endswith(DECODED) and wanted[key] is not None:
            wanted[key] = json.dumps(wanted[key], ensure_ascii=False)  # the order counts
    assert entries == {key: value for key, value in wanted.items() if value is not None}


def test_one_training_has_one_session_and_the_hashes_of_its_models(
    tmp_path: Path, header: Header
) -> None:
    base, vae = tmp_path / "base.safetensors", tmp_path / "vae.safetensors"
    base.write_bytes(bytes(0x100000) + b"a" * 0x10000 + b"rest")
    vae.write_bytes(b"small")
    memo = HashMemo()
    hashes = {"base_hashes": file_hashes(base, memo), "vae_hashes": file_hashes(vae, memo)}
    found = header(**hashes)
    expected = {
        "ss_sd_model_hash": hashlib.sha256(b"a" * 0x10000).hexdigest()[:8],
        "ss_new_sd_model_hash": hashlib.sha256(base.read_bytes()).hexdigest(),
        "ss_vae_hash": "e3b0c442",  # of no bytes: the file ends before 1 MiB
        "ss_new_vae_hash": hashlib.sha256(b"small").hexdigest(),
    }
    assert {key: found[key] for key in expected} == expected
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


def test_a_thumbnail_stands_in_the_header_as_a_browser_takes_it(header: Header) -> None:
    shown = header(thumbnail_jpeg=b"\xff\xd8/9j/x")["modelspec.thumbnail"]
    assert shown == "data:image/jpeg;base64,/9gvOWoveA=="


def test_nothing_of_folders_and_captions_is_told_where_that_is_asked_for(header: Header) -> None:
    told = {
        "data.folders": {"10_zibbo": {"repeats": 3}},
        "data.regularisation_dir": "my_family",
        "data.caption_prefix": "a private prefix",
        "sampling.prompts": ["a private prompt"],
        "sampling.negative_prompt": "a private negative",
    }
    plain, private = header(told), header({**told, "output.dataset_in_header": False})
    words = ("10_zibbo", "red hat", "my_family", "a private")
    assert all(word in str(plain) for word in words)
    assert not [word for word in words if word in str(private)]
    gone = {"ss_dataset_dirs", "ss_reg_dataset_dirs", "ss_tag_frequency", "ss_datasets"}
    assert plain.keys() - private.keys() == gone
    assert json.loads(private["lora_train.settings"])["output.dataset_in_header"] is False
    assert tells_of_dataset(plain) and not tells_of_dataset(private) and tells_of_dataset({})

"""What is fetched from the Hub, and what is said when it cannot be: with a Hub that answers from memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from lora_trainer.common.errors import InputError, LoraTrainError, MachineError
from lora_trainer.families.hub_files import ALL_ENCODERS, cached_snapshot, download, wanted
from tests.fakes.hub_server import hub_server

SD_REPOSITORY = [
    "README.md",
    "model_index.json",
    "v1-5-pruned-emaonly.ckpt",
    "v1-5-pruned-emaonly.safetensors",
    "feature_extractor/preprocessor_config.json",
    "safety_checker/model.safetensors",
    "scheduler/scheduler_config.json",
    "text_encoder/config.json",
    "text_encoder/model.fp16.safetensors",
    "text_encoder/model.safetensors",
    "text_encoder/pytorch_model.bin",
    "tokenizer/merges.txt",
    "tokenizer/vocab.json",
    "unet/config.json",
    "unet/diffusion_pytorch_model.bin",
    "unet/diffusion_pytorch_model.fp16.safetensors",
    "unet/diffusion_pytorch_model.non_ema.safetensors",
    "unet/diffusion_pytorch_model.safetensors",
    "vae/config.json",
    "vae/diffusion_pytorch_model.fp16.safetensors",
]


def test_one_precision_of_each_part_and_nothing_else() -> None:
    assert wanted(SD_REPOSITORY, without=frozenset()) == [
        "model_index.json",
        "scheduler/scheduler_config.json",
        "text_encoder/config.json",
        "text_encoder/model.safetensors",
        "tokenizer/merges.txt",
        "tokenizer/vocab.json",
        "unet/config.json",
        "unet/diffusion_pytorch_model.safetensors",
        "vae/config.json",
        "vae/diffusion_pytorch_model.fp16.safetensors",
    ]


def test_parts_that_a_checkpoint_brings_are_not_fetched() -> None:
    everything = frozenset({"denoiser", "vae", ALL_ENCODERS})
    found = wanted(SD_REPOSITORY, without=everything)
    assert found and not any(name.endswith(".safetensors") for name in found)
    left = wanted(SD_REPOSITORY, without=frozenset({"denoiser"}))
    assert "text_encoder/model.safetensors" in left
    assert not any(name.startswith("unet/") and "safetensors" in name for name in left)


def test_shards_come_with_their_index_and_second_encoders_too() -> None:
    names = [
        "transformer/diffusion_pytorch_model-00001-of-00002.safetensors",
        "transformer/diffusion_pytorch_model-00002-of-00002.safetensors",
        "transformer/diffusion_pytorch_model.safetensors.index.json",
        "text_encoder_2/model.safetensors",
        "tokenizer_2/spiece.model",
    ]
    assert wanted(names, without=frozenset()) == sorted(names)
    without = wanted(names, without=frozenset({"denoiser", ALL_ENCODERS}))
    assert without == [names[4], names[2]]


def test_one_encoder_of_the_user_s_leaves_the_other_to_be_fetched() -> None:
    names = ["text_encoder/model.safetensors", "text_encoder_2/model.safetensors"]
    assert wanted(names, without=frozenset({"text_encoder"})) == names[1:]


def test_a_repository_that_is_one_part_gives_its_top_files() -> None:
    names = ["config.json", "diffusion_pytorch_model.safetensors", "sdxl.vae.pt"]
    assert wanted(names, without=frozenset()) == names[:2]


@dataclass
class FakeHub:
    """Answers the two calls of a download; `error` is raised by the first."""

    folder: Path
    error: Exception | None = None
    asked: list[tuple[str, Any]] = field(default_factory=list)

    def model_info(self, _api: Any, source: str, *, revision: str | None) -> Any:
        self.asked.append((source, revision))
        if self.error is not None:
            raise self.error
        rows = [SimpleNamespace(rfilename=name, size=1) for name in SD_REPOSITORY]
        return SimpleNamespace(siblings=rows, sha="1" * 40)

    def snapshot_download(
        self, source: str, *, revision: str | None, allow_patterns: list[str], tqdm_class: type[Any]
    ) -> str:
        self.asked.append((source, allow_patterns))
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    fake = FakeHub(folder=tmp_path)
    monkeypatch.setattr(
        huggingface_hub.HfApi,
        "model_info",
        lambda api, source, *, revision, files_metadata: fake.model_info(
            api, source, revision=revision
        ),
    )
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


def test_a_download_asks_for_the_revision_and_the_wanted_files(hub: FakeHub) -> None:
    found = download("owner/name", revision="v2", without=frozenset())
    assert found == hub.folder
    files = wanted(SD_REPOSITORY, without=frozenset())
    assert hub.asked == [("owner/name", "v2"), ("owner/name", files)]


def refused(kind: type[HfHubHTTPError]) -> HfHubHTTPError:
    answer = SimpleNamespace(headers={}, request=None, status_code=403)
    return kind("no", response=answer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "kind", "said", "fix"),
    [
        (refused(GatedRepoError), MachineError, "gated", "hf auth login"),
        (refused(RepositoryNotFoundError), InputError, "there is no model", "local folder"),
        (refused(RevisionNotFoundError), InputError, "no revision 'v9'", "base.revision"),
        (OfflineModeIsEnabled("off"), MachineError, "offline mode", "connect once"),
        (LocalEntryNotFoundError("gone"), MachineError, "could not be downloaded", "embedded"),
        (refused(HfHubHTTPError), MachineError, "could not be downloaded", "connect once"),
        (ConnectionError("cut"), MachineError, "ConnectionError", "connect once"),
    ],
)
def test_what_goes_wrong_is_one_line_with_a_remedy(
    hub: FakeHub, error: Exception, kind: type[LoraTrainError], said: str, fix: str
) -> None:
    hub.error = error
    with pytest.raises(kind, match=said) as caught:
        download("owner/name", revision="v9", without=frozenset())
    assert fix in caught.value.fix and "\n" not in str(caught.value)


def test_nothing_is_cached_of_a_repository_never_seen() -> None:
    assert cached_snapshot("nobody/nothing", revision=None) is None


def test_a_cached_snapshot_is_found_by_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "models--owner--name"
    snapshot = store / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "model_index.json").write_text("{}")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("a" * 40)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.constants.HF_HUB_CACHE", str(tmp_path))
    assert cached_snapshot("owner/name", revision=None) == snapshot
    assert cached_snapshot("owner/name", revision="other") is None


_DOWNLOADS = """
import json
import huggingface_hub
from lora_trainer.families.hub_files import download

huggingface_hub.hf_hub_download("owner/name", "unet/config.json")
for _ in range(2):
    told = []
    folder = download(
        "owner/name", revision=None, without=frozenset(), on_bytes=lambda *row: told.append(row)
    )
    print(json.dumps([str(folder), told]))
"""


def test_a_download_is_counted_in_bytes_of_the_files_that_are_missing(tmp_path: Path) -> None:
    """By the Hub's own library, from a server: one of the files is here already."""
    sizes = {"model_index.json": 20, "vae/config.json": 30, "unet/config.json": 40}
    weights = {"vae/diffusion_pytorch_model.safetensors": 15_000_000, "left_out.ckpt": 7}
    for name, size in (sizes | weights).items():
        (tmp_path / "offered" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "offered" / name).write_bytes(b"%c" % len(name) * size)
    with hub_server() as hub:
        hub.folders["owner/name"] = tmp_path / "offered"
        environment = {**os.environ, "HF_ENDPOINT": hub.address, "HF_HUB_OFFLINE": "0"}
        environment |= {"HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_XET": "1"}
        child = subprocess.run(
            [sys.executable, "-c", _DOWNLOADS], env=environment, capture_output=True, text=True
        )
    assert child.returncode == 0, child.stderr
    (folder, told), (_, again) = map(json.loads, child.stdout.splitlines())
    counts = [here_bytes for _, here_bytes, _ in told]
    assert {(source, all_bytes) for source, _, all_bytes in told} == {("owner/name", 15_000_050)}
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 15_000_050)
    assert len(set(counts)) > 3
    assert (Path(folder) / "vae" / "config.json").is_file()
    assert not (Path(folder) / "left_out.ckpt").exists()
    assert again == [], "all is here"

"""Runs, caches and settings of earlier releases stay readable (docs/releases.md): `fakes/release_N`.

`run.tar.xz` is a run of that release of which the newest state is lost: the first images of the example, 4 steps
with an adapter of rank 1, saved every 2; its cache; its settings in `run.json`. Beside the state of step 2 it holds
the log of all four steps, as the release computed them: 0.1 with four images in batches of 2, 0.2 (commit 06a15245)
with two images, one by one, and attention's layers alone.
"""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path

import pytest

from tests.fakes.runs import events, run_cli, settings_of

RELEASES = sorted((Path(__file__).parent / "fakes").glob("release_*"))
pytestmark = pytest.mark.parametrize("release", RELEASES, ids=lambda folder: folder.name)


@pytest.fixture
def home(release: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the dataset, the cache and the run of that release, and the current folder."""
    with tarfile.open(release / "run.tar.xz") as archive:
        if hasattr(tarfile, "data_filter"):  # Python before 3.11.4 has none; the archive is our own
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


ENCODED = {"release_0_1": 9, "release_0_2": 5}
"""Release -> latents and texts in its cache."""


def losses(home: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in events(home / "runs" / "kept", "step")}


def test_a_run_goes_on_from_its_state_and_finds_its_cache(
    home: Path, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = losses(home)
    settings = settings_of(home / "runs/kept")
    chosen = ["adapter.rank", "adapter.targets", "train.batch_size", "output.save_every_steps"]
    chosen += ["sampling.steps", "sampling.every_steps"]
    line = ["dataset", "--name", "kept", "--steps", "4", "--resume"]
    line += ["--set", "data.cache_dir=cache"]
    for key in chosen:
        line += ["--set", f"{key}={json.dumps(settings[key])}"]
    assert run_cli(line) == 0
    printed = capsys.readouterr().out
    assert "resumed at step 2" in printed
    assert f"encoding: {ENCODED[release.name]} cached, 0 to encode" in printed
    after = losses(home)
    assert sorted(after) == [1, 2, 3, 4]
    for step in (3, 4):
        assert after[step] == pytest.approx(before[step], rel=1e-4)
    assert (home / "runs/kept/kept.safetensors").is_file()


def test_every_setting_of_it_is_read_from_a_settings_file(home: Path) -> None:
    """Each is accepted with the value that the release planned; a setting that is gone would be an error."""
    every = settings_of(home / "runs/kept").items()
    settings = {key: value for key, value in every if value is not None}
    (home / "old.json").write_text(json.dumps(settings))
    shutil.rmtree(home / "runs")
    assert run_cli(["plan", "dataset", "--config", "old.json"]) == 0


def test_its_exported_file_is_read(
    home: Path, release: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = release.name.removeprefix("release_").replace("_", ".") + ".0"
    (file,) = (home / "runs" / "kept").glob("*.safetensors")
    assert run_cli(["inspect", str(file)]) == 0
    printed = capsys.readouterr().out
    for name, value in (("family", "sd15"), ("rank", "1"), ("lora_train.version", version)):
        assert [name, value] in [line.split() for line in printed.splitlines()]

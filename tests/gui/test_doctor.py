"""The page Doctor in plain words: what is missing with its command, no token, a cache cleared safely."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from lora_trainer.gui import doctor
from lora_trainer.gui.workplace import Workplace

from lora_trainer.cache.store import in_use
from lora_trainer.common.errors import MachineError
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.machine import Hardware, detect
from lora_trainer.hardware.nvml import Gpu
from tests.fakes.live_runs import write_status
from tests.fakes.nvml import GIB
from tests.fakes.run_folder import fake_run

SECRET = "hf_" + "abcDEF0123" * 4
NAME = f"{'0123456789abcdef' * 4}.safetensors"
CARD = Gpu(
    index=0,
    name="<b>RTX 4090</b>",
    total_bytes=24 * GIB,
    free_bytes=23 * GIB,
    compute_capability=(8, 9),
    driver="580.1",
)


@pytest.fixture
def here() -> Hardware:
    return replace(detect(), gpus=(), gpu_reason="no driver")


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An entry of a cache of our own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = doctor.cache_state().folder
    folder.create()
    path = folder.root / "latents" / "01" / NAME
    path.parent.mkdir(parents=True)
    path.write_bytes(b"x" * 2048)
    return path


def test_the_machine_is_told_in_words(here: Hardware) -> None:
    assert "Trains on the processor" in doctor.machine(here)
    assert "no driver" in doctor.machine(here)
    build = TorchBuild(version="2.13.0+cu130", kind="cuda", toolkit="13.0")
    markup = doctor.machine(replace(here, gpus=(CARD,), torch=build))
    assert "Trains on &lt;b&gt;RTX 4090&lt;/b&gt;." in markup
    assert "23.0 GiB free of 24.0 GiB" in markup


def test_a_missing_package_comes_with_its_command(here: Hardware) -> None:
    needed = replace(here, packages={**here.packages, "peft": None})
    assert "1 to be mended" in doctor.packages(needed)
    assert "<code>pip install peft</code>" in doctor.packages(needed)
    optional = replace(here, packages={**here.packages, "prodigyopt": None})
    assert "All that is needed is installed" in doctor.packages(optional)
    assert "<code>pip install prodigyopt</code>" in doctor.packages(optional)


def test_folders_network_and_login_are_told_and_no_token(
    work: Workplace, entry: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", SECRET)
    off = doctor.hub()  # tests are offline
    assert off.token and SECRET not in f"{off} {doctor.network(off)}"
    assert "nothing is downloaded" in doctor.network(off) and "Signed in" in doctor.network(off)
    on = replace(off, offline=False, token=False, folder=work.runs / "not" / "there")
    assert "are downloaded when" in doctor.network(on) and "page Train" in doctor.network(on)
    markup = doctor.folders(work, doctor.cache_state(), on)
    assert "2.0 KiB in 1 entries" in markup and str(work.runs) in markup
    assert markup.count("GiB") + markup.count("MiB") >= 3


def test_the_cache_stays_while_a_run_here_or_elsewhere_uses_it(
    work: Workplace, entry: Path
) -> None:
    live = fake_run(work.runs / "live", steps=30).write()
    write_status(live)
    with pytest.raises(MachineError, match="while live trains"):
        doctor.clear_cache(work)
    write_status(live, state="finished")
    with in_use(entry.parents[2]), pytest.raises(MachineError, match="a training uses"):
        doctor.clear_cache(work)
    assert entry.exists()

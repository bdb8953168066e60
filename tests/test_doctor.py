"""`doctor` speaks in sentences: what the machine is, what trains on it and why, what to mend and how."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lora_trainer.cache.store import Cache, CacheKey, in_use
from lora_trainer.common.files import CappedFolder
from lora_trainer.hardware.devices import TorchBuild
from lora_trainer.hardware.machine import Hardware
from lora_trainer.run import run_folder
from tests.fakes.nvml import GIB, FakeCard
from tests.fakes.runs import run_cli
from tests.hardware.test_machine import BUSY, CARD, LARGE, MPS, OLD, with_cards

Doctor = Callable[..., list[dict[str, str]]]


@pytest.fixture
def doctor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Doctor:
    """Return the checks that the command prints of a machine, or what `--fix` mended."""
    folders = [f"data.cache_dir={tmp_path / 'cache'}", f"output.folder={tmp_path / 'runs'}"]
    words = [word for setting in folders for word in ("--set", setting)]

    def doctor(here: Hardware | None = None, offline: str = "") -> list[dict[str, str]]:
        if here is not None:
            monkeypatch.setattr("lora_trainer.hardware.machine.detect", lambda: here)
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        capsys.readouterr()
        assert run_cli(["doctor", "--json", "--fix", *words]) == 0
        report: dict[str, Any] = json.loads(capsys.readouterr().out)
        found: list[dict[str, str]] = report["repairs" if here is None else "checks"]
        return found

    return doctor


def test_doctor_prints_marked_sentences_and_no_fields(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_cli(["doctor", "--fix", "--set", f"data.cache_dir={tmp_path / 'a => b'}"]) == 0
    *lines, last = capsys.readouterr().out.rstrip().split("\n")
    assert len(lines) > 4
    for line in lines:
        assert line.startswith(("ok    ", "warn  ")) and line.endswith("."), line
        assert not any(raw in line for raw in ("gpus", "_bytes", "cpu_threads", "()")), line
    assert "ok    Nothing had to be mended." in lines
    assert any(f"{tmp_path / 'a => b'}, where" in line for line in lines)
    warnings = sum(line.startswith("warn") for line in lines)
    plural = "" if warnings == 1 else "s"
    assert last == (f"{warnings} warning{plural}, marked warn." if warnings else "No problems.")


LACKING = with_cards(CARD)
LACKING = replace(LACKING, packages={**LACKING.packages, "peft": None, "xformers": None})
CU128 = TorchBuild(version="2.10.0+cu128", kind="cuda", toolkit="12.8")
FITTING = replace(LACKING, torch=CU128)
UNFIT = replace(
    with_cards(CARD),
    packages={**LACKING.packages, "peft": "0.21.2", "xformers": "0.0.35"},
    unfit={"xformers": "it was built for torch 2.10 and CUDA 12.8, and this is torch 2.13.0+cu130"},
)
BOUND = replace(
    with_cards(CARD),
    pinnable_bytes=GIB // 2,
    reasons={"cpu_threads": "all", "pinnable_bytes": "WSL2 refuses more"},
)
T4 = FakeCard(name="Tesla T4", total_bytes=16 * GIB, capability=(7, 5))
GTX = FakeCard(name="GTX 1650", total_bytes=4 * GIB, capability=(7, 5))
WHEEL = (
    "pip install torch==2.13.0 --force-reinstall --index-url https://download.pytorch.org/whl/cu126"
)


CHECKS = [
    (with_cards(CARD, LARGE), 0, "ok", "on NVIDIA GeForce RTX 3090, the best of 2 for this torch"),
    (with_cards(CARD, LARGE), 0, "ok", "in bf16, with the presets for 16-24 GiB."),
    (with_cards(T4), 0, "ok", "in fp16, as it does not compute bf16 itself"),
    (with_cards(OLD), 0, "warn", "torch can use none of the GPUs"),
    (with_cards(OLD), 1, "warn", "1080 Ti has compute capability 6.1"),
    (with_cards(OLD), 1, "warn", WHEEL),
    (with_cards(BUSY), None, "warn", "2.00 GiB of 24.00 GiB free"),
    (with_cards(GTX), None, "warn", "lower data.resolution"),
    (LACKING, None, "warn", "pip install peft"),
    (FITTING, None, "ok", "to install it: pip install xformers"),
    (UNFIT, None, "warn", "built for torch 2.10 and CUDA 12.8, and this is torch 2.13.0+cu130"),
    (UNFIT, None, "warn", "pip uninstall xformers"),
    (MPS, None, "ok", "no adamw8bit"),
    (BOUND, None, "ok", "0.50 GiB may be pinned for copies to it (WSL2 refuses more)"),
    (LACKING, None, "ok", "HF_HUB_OFFLINE is set"),
]
"""Machine, place of the sentence (None for anywhere), mark, words."""


@pytest.mark.parametrize(("here", "place", "mark", "words"), CHECKS)
def test_each_fact_is_a_sentence_with_its_reason_or_its_cure(
    here: Hardware, place: int | None, mark: str, words: str, doctor: Doctor
) -> None:
    """What trains comes first."""
    found = doctor(here, offline="1")
    chosen = found if place is None else [found[place]]
    assert any(one["mark"] == mark and words in f"{one['sentence']} {one['fix']}" for one in chosen)


def test_a_machine_without_faults_has_no_warning(
    doctor: Doctor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Hardware, "disk_free_bytes", lambda self, path: 99 * GIB)
    found = doctor(with_cards(CARD))
    assert {one["mark"] for one in found} == {"ok"}
    assert not any("pinned" in one["sentence"] or "HF_HUB" in one["sentence"] for one in found)


def test_fix_removes_what_killed_trainings_left_and_nothing_that_is_in_use(
    tmp_path: Path, doctor: Doctor
) -> None:
    cache = CappedFolder(root=tmp_path / "cache", limit_bytes=2**30)
    store = Cache(folder=cache, on_problem=lambda what, *, fix, file=None, code="": None)
    keys = [CacheKey.of("text", text=text) for text in "abc"]
    for key in keys:
        store.write(key, {"a": np.ones(4, np.float32)})
    whole, spoilt, aside = map(store.path, keys)
    spoilt.write_bytes(spoilt.read_bytes()[:-1] + b"!")
    (cache.root / "damaged").mkdir()
    aside.rename(cache.root / "damaged" / aside.name)
    run, begun, image = (
        tmp_path / name for name in ("runs/cat", "runs/dog", "my-images/.tmp-1.png")
    )
    # The names that a save killed at any moment leaves: not published yet, or being replaced.
    unfinished, replaced = (run / "states" / f".{kind}-step-00000001.1" for kind in ("tmp", "del"))
    leftovers = [
        whole.with_name(".tmp-1-2-entry"),
        cache.root / ".in-use-elsewhere-1.lock",
        unfinished / "state.json",
        begun / "events.jsonl",
    ]
    others = [replaced / "state.json", run / "run.json", run / "events.jsonl", image]
    for file in (*leftovers, *others, begun / ".lock"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("{}\n")
    with in_use(cache.root), run_folder.claim(run), run_folder.claim(begun):
        (run / ".tmp-1-2-x").write_bytes(b"being written")
        repair, *left = doctor()
        in_place = (*leftovers, spoilt, run / ".tmp-1-2-x")
        assert all(path.exists() for path in in_place if path.suffix != ".lock")
    assert repair["mark"] == "warn" and "a training uses the cache" in repair["sentence"]
    assert repair["fix"] == "wait for it, or stop it first"
    assert [run.name in one["sentence"] for one in left] == [True, False]
    (cache.root / ".in-use-elsewhere-1.lock").touch()

    assert [repair["mark"] for repair in doctor()] == ["ok"] * 5
    gone = (*leftovers, spoilt, unfinished, begun, run / ".tmp-1-2-x")
    assert not [path for path in gone if path.exists()]
    assert not list((cache.root / "damaged").iterdir())
    assert store.read(keys[0]) is not None and all(path.is_file() for path in others)
    assert [repair["sentence"] for repair in doctor()] == ["Nothing had to be mended."]

"""`doctor` speaks in sentences: what the machine is, what trains on it and why."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from lora_trainer.hardware.machine import Hardware
from tests.fakes.nvml import GIB, FakeCard
from tests.fakes.runs import run_cli
from tests.hardware.test_machine import BUSY, CARD, LARGE, MPS, OLD, with_cards

Doctor = Callable[..., list[dict[str, str]]]


@pytest.fixture
def doctor(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Doctor:
    """Return the checks that the command prints of a machine."""

    def doctor(here: Hardware, offline: str = "") -> list[dict[str, str]]:
        monkeypatch.setattr("lora_trainer.hardware.machine.detect", lambda: here)
        monkeypatch.setenv("HF_HUB_OFFLINE", offline)
        capsys.readouterr()
        assert run_cli(["doctor", "--json"]) == 0
        checks: list[dict[str, str]] = json.loads(capsys.readouterr().out)["checks"]
        return checks

    return doctor


def test_doctor_prints_marked_sentences_and_no_fields(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_cli(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.rstrip().split("\n")
    assert len(lines) > 4
    for line in lines:
        assert line.startswith(("ok    ", "warn  ")) and line.endswith("."), line
        assert not any(raw in line for raw in ("gpus", "_bytes", "cpu_threads", "()")), line
    warnings = sum(line.startswith("warn") for line in lines)
    plural = "" if warnings == 1 else "s"
    assert last == (f"{warnings} warning{plural}, marked warn." if warnings else "No problems.")


LACKING = with_cards(CARD)
LACKING = replace(LACKING, packages={**LACKING.packages, "peft": None, "xformers": None})
BOUND = replace(
    with_cards(CARD),
    pinnable_bytes=GIB // 2,
    reasons={"cpu_threads": "all", "pinnable_bytes": "WSL2 refuses more"},
)
T4 = FakeCard(name="Tesla T4", total_bytes=16 * GIB, capability=(7, 5))
GTX = FakeCard(name="GTX 1650", total_bytes=4 * GIB, capability=(7, 5))
WHEEL = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"


@pytest.mark.parametrize(
    ("here", "place", "mark", "words"),
    [
        (
            with_cards(CARD, LARGE),
            0,
            "ok",
            "on NVIDIA GeForce RTX 3090, the best of 2 for this torch",
        ),
        (with_cards(CARD, LARGE), 0, "ok", "in bf16, with the presets for 16-24 GiB."),
        (with_cards(T4), 0, "ok", "in fp16, as it does not compute bf16 itself"),
        (with_cards(OLD), 0, "warn", "torch can use none of the GPUs"),
        (with_cards(OLD), 1, "warn", "1080 Ti has compute capability 6.1"),
        (with_cards(OLD), 1, "warn", WHEEL),
        (with_cards(BUSY), None, "warn", "2.00 GiB of 24.00 GiB free"),
        (with_cards(GTX), None, "warn", "lower data.resolution"),
        (LACKING, None, "warn", "pip install peft"),
        (LACKING, None, "ok", "to install it: pip install xformers"),
        (MPS, None, "ok", "no adamw8bit"),
        (BOUND, None, "ok", "0.50 GiB may be pinned for copies to it (WSL2 refuses more)"),
        (LACKING, None, "ok", "HF_HUB_OFFLINE is set"),
    ],
)
def test_each_fact_is_a_sentence_with_its_reason_or_its_cure(
    here: Hardware, place: int | None, mark: str, words: str, doctor: Doctor
) -> None:
    """What trains comes first; `place` is where the sentence stands, None for anywhere."""
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

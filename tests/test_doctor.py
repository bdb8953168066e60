"""`doctor` speaks in sentences: what the machine is, what trains on it and why, what to mend and how."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lora_trainer.hardware.machine import GIB, Hardware
from lora_trainer.run.machine_report import MachineCheck, checks
from tests.fakes.nvml import FakeCard
from tests.test_devices import BUSY, LARGE, MPS, OLD, ROCM, SMALL, with_cards

ALL = dict.fromkeys(
    ("torch", "diffusers", "transformers", "accelerate", "peft", "safetensors"), "1"
)


def said(
    here: Hardware, cache: Path = Path(), environment: dict[str, str] | None = None
) -> list[MachineCheck]:
    return checks(here, cache=cache, environment=environment or {})


def warnings(here: Hardware) -> list[str]:
    return [f"{check.sentence} {check.fix}" for check in said(here) if check.mark == "warn"]


def first(here: Hardware) -> str:
    return said(here)[0].sentence


def test_doctor_prints_marked_sentences_and_no_fields(capsys: pytest.CaptureFixture[str]) -> None:
    from tests.fakes.runs import run_cli

    assert run_cli(["doctor"]) == 0
    *lines, last = capsys.readouterr().out.rstrip().split("\n")
    assert len(lines) > 4
    for line in lines:
        assert line.startswith(("ok    ", "warn  ")) and line.endswith("."), line
        assert not any(raw in line for raw in ("gpus", "_bytes", "cpu_threads", "()")), line
    warnings = sum(line.startswith("warn") for line in lines)
    plural = "" if warnings == 1 else "s"
    assert last == (f"{warnings} warning{plural}, marked warn." if warnings else "No problems.")


def test_what_trains_is_said_first_with_the_reason() -> None:
    assert first(with_cards(SMALL, LARGE)) == (
        "Trainings run on NVIDIA GeForce RTX 3090, the best of 2 for this torch, in bf16, with the "
        "presets for 16-24 GiB."
    )
    assert "in fp16, as it does not compute bf16 itself" in first(
        with_cards(FakeCard(name="Tesla T4", total_bytes=16 * GIB, capability=(7, 5)))
    )
    assert first(MPS).startswith("Trainings run on Apple M3 Max, in bf16")
    assert "RX 7900 XTX" in first(ROCM)


def test_a_card_that_torch_cannot_use_comes_with_the_command() -> None:
    found = warnings(with_cards(OLD))
    assert "torch can use none of the GPUs" in found[0]
    assert "1080 Ti has compute capability 6.1" in found[1]
    assert found[1].endswith(
        "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
    )


def test_a_card_that_others_fill_is_warned_of() -> None:
    (found,) = (line for line in warnings(with_cards(BUSY)) if line.startswith("GPU 0"))
    assert "2.00 GiB of 24.00 GiB free" in found and "close other programs" in found


def test_what_is_missing_is_named_with_its_command() -> None:
    here = with_cards(SMALL)
    here = replace(here, packages={**here.packages, "peft": None, "xformers": None})
    assert any("peft" in line and "pip install peft" in line for line in warnings(here))
    optional = next(check for check in said(here) if check.sentence.startswith("xformers"))
    assert (optional.mark, optional.fix) == ("ok", "to install it: pip install xformers")


def test_what_a_gpu_lacks_is_said() -> None:
    assert any("no adamw8bit" in check.sentence for check in said(MPS))


def test_how_much_memory_may_be_pinned_is_said_where_it_is_bounded() -> None:
    bound = with_cards(SMALL)
    bound = replace(
        bound,
        pinnable_bytes=GIB // 2,
        reasons={**bound.reasons, "pinnable_bytes": "WSL2 refuses more"},
    )
    (found,) = (check.sentence for check in said(bound) if "pinned" in check.sentence)
    assert "0.50 GiB may be pinned for copies to it (WSL2 refuses more)" in found
    assert not any("pinned" in check.sentence for check in said(with_cards(SMALL)))


def test_a_network_that_is_switched_off_is_said() -> None:
    found = said(with_cards(SMALL), environment={"HF_HUB_OFFLINE": "1"})
    assert any("HF_HUB_OFFLINE is set" in check.sentence for check in found)

"""The miniature base that edits, as it is shipped: it changes what an instruction names and keeps the rest."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.config.inputs import EMBEDDED, EMBEDDED_EDIT, BaseSettings
from lora_trainer.families.base.sampling import build_sampler
from lora_trainer.families.files.locate import describe
from lora_trainer.reporting.run_record import read
from lora_trainer.run.prepare import Request, prepare
from tests.fakes.family_bases import CPU, encoder_of, network_of
from tests.fakes.runs import run_cli

ROOT = Path(__file__).resolve().parents[1]
PAIRS, SEED = 5, 2
SIZE_PX = (64, 64)


def test_it_is_the_miniature_with_another_denoiser_and_needs_one_reference() -> None:
    plain, edits = (describe(BaseSettings(model=name)) for name in (EMBEDDED, EMBEDDED_EDIT))
    assert plain.references is None and edits.references is not None
    assert (edits.references.least, edits.references.most) == (1, 1)
    assert plain.family == edits.family and plain.resolution_px == edits.resolution_px


def test_without_a_base_and_a_gpu_pairs_are_trained_on_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "base")
    pairs: Any = importlib.import_module("edits")
    pairs.write_pairs(tmp_path / "pairs", 3)
    words = ["--name", "night", "--output", str(tmp_path / "runs"), "--steps", "1"]
    words += ["--set", "hardware.device=cpu", "--set", f"data.cache_dir={tmp_path / 'cache'}"]
    words += ["--set", "output.measure=false", "--set", "sampling.steps=1"]
    assert run_cli([str(tmp_path / "pairs"), *words]) == 0
    run = tmp_path / "runs" / "night"
    assert read(run).base.source == EMBEDDED_EDIT
    assert (run / "night.safetensors").is_file() and list(run.glob("samples/step-00000001/*.png"))
    # The images alone are what the other miniature is for.
    request = Request(
        dataset=tmp_path / "pairs",
        overrides={"data.references": "none", "hardware.device": "cpu"},
    )
    assert prepare(request).facts.source == EMBEDDED


def test_it_edits_what_it_is_told_and_keeps_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts" / "base")
    pairs: Any = importlib.import_module("edits")
    measure: Any = importlib.import_module("colour_measure")
    facts = describe(BaseSettings(model=EMBEDDED_EDIT))
    sampler = build_sampler(
        families.family(facts.family), facts, denoiser=network_of(facts), device=CPU
    )
    encoder = encoder_of(facts)
    nothing = encoder.encode_prompts([""])
    right = 0
    for index in range(PAIRS):
        pair = pairs.learned_edit(SEED, index)
        image = sampler.image(
            encoder.encode_prompts([pair.instruction]), nothing, seed=index, size_px=SIZE_PX, steps=10,
            guidance_scale=4.0, references=[pair.before],
        )  # fmt: skip
        seen = measure.look(image)
        wanted = (pair.object_colour, pair.background_colour)
        right += (seen.object_colour, seen.background_colour) == wanted
    assert right >= PAIRS - 1, "both colours by chance: one in 132"

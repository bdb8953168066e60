"""Files of real trainings through the tools: PiSSA, LoCon, DoRA and text encoders, as they are exported."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from lora_trainer import families
from lora_trainer.lora_file.inspect import inspect_file
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.tools.adapters import Weighted
from lora_trainer.tools.convert import convert
from lora_trainer.tools.extract import extract
from lora_trainer.tools.merge import merge
from lora_trainer.tools.merge_base import bake
from lora_trainer.tools.resize import ResizeLimits, resize
from tests.fakes.family_bases import CPU, base_of, facts_at, facts_of
from tests.fakes.runs import run_cli, toy
from tests.fakes.tool_files import deltas, distance, energy

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
RANK, ALPHA = 4, 3
CASES: Mapping[str, Mapping[str, Any]] = {
    "pissa": {"adapter__init": "pissa"},
    "locon": {"adapter__targets": "all", "adapter__conv_rank": 2, "adapter__conv_alpha": 1},
    "text": {"adapter__text_encoder": True, "adapter__rslora": True},
    "dora": {"adapter__dora": True},
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Train each case for two steps; return the files, in kohya's format and fp16 as by default."""
    place = toy(tmp_path_factory.mktemp("trained"), images=2)
    found = {}
    for case, settings in CASES.items():
        line = place.arguments(
            "--name",
            case,
            steps=2,
            adapter__rank=RANK,
            adapter__alpha=ALPHA,
            data__validation_fraction=0,
            logging__trackers=[],
            optimizer__learning_rate=0.03,
            sampling__every_steps=0,
            train__batch_size=2,
            train__validate_every_steps=0,
            **settings,
        )
        line[line.index("--base") + 1] = str(base_of("sd15"))
        assert run_cli(line) == 0, case
        found[case] = place.runs / case / final_export_name(case)
    return found


def base() -> str:
    return str(base_of("sd15"))


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_without_a_loss(
    case: str, files: Mapping[str, Path], tmp_path: Path
) -> None:
    live = deltas(files[case], base())
    there = convert(files[case], format="diffusers", output=tmp_path / "d.safetensors", base=base())
    back = convert(there.file, format="kohya", output=tmp_path / "k.safetensors", base=base())
    for each in (there.file, back.file):
        assert distance(deltas(each, base()), live) < 1e-6
        with safe_open(files[case], framework="pt") as old, safe_open(each, framework="pt") as new:
            kept = old.metadata()["lora_train.settings"]
            assert json.loads(new.metadata()["lora_train.settings"]) == json.loads(kept)
        assert not [p for p in inspect_file(each).problems if p.severity == "error"]


def test_pissa_is_of_twice_the_rank_and_a_resize_gives_back_what_was_trained(
    files: Mapping[str, Path], tmp_path: Path
) -> None:
    """What it began with is subtracted in the file, so that the file fits the original base."""
    found = inspect_file(files["pissa"]).rank
    assert found is not None and found.high == 2 * RANK
    done = resize(
        files["pissa"], ResizeLimits(energy=0.99), output=tmp_path / "r.safetensors", base=base()
    )
    before, after = deltas(files["pissa"], base()), deltas(done.file, base())
    assert done.energy == pytest.approx(energy(after) / energy(before), rel=1e-3)
    assert done.energy >= 0.99
    assert all(cut.new_rank <= cut.old_rank == 2 * RANK for cut in done.cuts.values())


def test_a_merge_of_trained_files_is_their_sum(files: Mapping[str, Path], tmp_path: Path) -> None:
    asked = {"pissa": 0.6, "locon": -0.4, "text": 1.0}
    done = merge(
        [Weighted(file=files[case], weight=weight) for case, weight in asked.items()],
        output=tmp_path / "sum.safetensors",
        base=base(),
    )
    wanted: dict[str, torch.Tensor] = {}
    for case, weight in asked.items():
        for key, value in deltas(files[case], base()).items():
            wanted[key] = wanted.get(key, 0) + weight * value
    assert distance(deltas(done.file, base()), wanted) < 1e-6


def test_all_kinds_are_baked_together_and_extracted_again(
    files: Mapping[str, Path], tmp_path: Path
) -> None:
    done = bake(
        [Weighted(file=file, weight=0.5) for file in files.values()],
        base=base(),
        output=tmp_path / "baked",
    )
    family = families.family("sd15")
    plain, tuned = (
        family.load_denoiser(facts, dtype=torch.float32, device=CPU).state_dict()
        for facts in (facts_of("sd15"), facts_at(done.file))
    )
    wanted: dict[str, torch.Tensor] = {}
    for file in files.values():
        for key, value in deltas(file, base()).items():
            wanted[key] = wanted.get(key, 0) + 0.5 * value
    for key, value in wanted.items():
        component, _, module = key.partition(".")
        if component == "denoiser":
            moved = tuned[f"{module}.weight"].double() - plain[f"{module}.weight"].double()
            assert float((moved - value).norm()) < 1e-6 * float(plain[f"{module}.weight"].norm())
    found = extract(
        str(done.file), base(), output=tmp_path / "e.safetensors", energy=1.0, precision="fp32"
    )
    assert found.cuts.keys() == wanted.keys()
    moved_most = {key: value for key, value in wanted.items() if float(value.norm()) > 1e-3}
    extracted = {
        key: value for key, value in deltas(found.file, base()).items() if key in moved_most
    }
    assert distance(extracted, moved_most) < 1e-3

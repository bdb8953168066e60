"""Every kind of adapter and every source through whole runs: killed, resumed, exported, drawn elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import load_file

from lora_trainer import families
from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS
from lora_trainer.lora_file.write import final_export_name
from tests.fakes.family_bases import CPU, base_of, facts_of
from tests.fakes.ldm_file import write_checkpoint
from tests.fakes.runs import Toy, events, last_state, python, run_cli, toy, trajectory
from tests.test_resume_kill import DRIVER

pytestmark = pytest.mark.timeout(300)  # a loaded machine is no failure
CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "loha": ("sd15", {"adapter__kind": "loha"}),
    "lokr": ("sd15", {"adapter__kind": "lokr", "adapter__lokr_factor": 2}),
    "oft": ("sd15", {"adapter__kind": "oft"}),
    "dora": ("sd15", {"adapter__dora": True, "output__format": "diffusers"}),
    "rslora": ("sd15", {"adapter__rslora": True, "adapter__alpha": 2}),
    "locon": ("sd15", {"adapter__targets": "all", "adapter__conv_rank": 2, "adapter__alpha": 8}),
    "patterns": (
        "sd15",
        {
            "adapter__rank_pattern": {"attn2": 2, "ff": 6},
            "optimizer__learning_rate_pattern": {"attn1": 0, "proj_": 0.5},
            "optimizer__lora_plus_ratio": 4,
        },
    ),
    "text": (
        "sd15",
        {
            "adapter__text_encoder": True,
            "adapter__alpha": 2,
            "optimizer__text_encoder_learning_rate": 0.01,
        },
    ),
    "text-sdxl": ("sdxl", {"adapter__text_encoder": True, "adapter__alpha": 2}),
    "dit-dora": ("flux", {"adapter__dora": True, "adapter__alpha": 2}),
}
ELSEWHERE = [name for name in CASES if name not in ("loha", "lokr", "oft")]
"""What diffusers loads; the others are for ComfyUI and Forge, see tests/output."""


@dataclass(frozen=True, kw_only=True)
class Place(Toy):
    """A toy dataset whose runs name their own base."""

    def command(self, case: str, run: str, *more: str, **changes: Any) -> list[str]:
        family, settings = CASES[case]
        side = max(2 * facts_of(family).bucket_step_px, 16)
        chosen: dict[str, Any] = {
            "adapter__rank": 4,
            "data__resolution": side,
            "data__validation_fraction": 0.34,
            "logging__trackers": [],
            "optimizer__learning_rate": 0.03,
            "optimizer__schedule": "constant",
            "output__precision": "fp32",
            "sampling__every_steps": 3,
            "sampling__guidance_scale": 3,
            "train__batch_size": 2,
            "train__validate_every_steps": 3,
        }
        line = self.arguments("--name", run, *more, steps=3, **{**chosen, **settings, **changes})
        line[line.index("--base") + 1] = str(base_of(family))
        return line


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Uninterrupted runs under the name of their case, and killed ones beside them."""
    place = Place(folder=toy(tmp_path_factory.mktemp("adapters"), images=3).folder)
    for case in CASES:
        assert run_cli(place.command(case, case)) == 0, case
    point = ("lora_trainer.training.loop", "judge_step", 3, True)
    work = [(place.command(case, f"{case}-killed"), point) for case in CASES]
    done = python(DRIVER, json.dumps(work), timeout_s=280)
    codes = [line for line in done.stderr.split() if line.lstrip("-").isdigit()]
    assert (done.returncode, codes) == (0, ["-9"] * len(work)), done.stderr[-2000:]
    return place


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_to_the_same_bits(case: str, place: Place) -> None:
    whole, killed = place.runs / case, place.runs / f"{case}-killed"
    assert run_cli(place.command(case, killed.name, "--resume")) == 0
    assert trajectory(killed) == trajectory(whole)
    for file in (ADAPTER, OPTIMIZER_TENSORS):
        one, other = load_file(last_state(whole) / file), load_file(last_state(killed) / file)
        assert one.keys() == other.keys()
        assert all(np.array_equal(one[key], other[key]) for key in one), file


@pytest.mark.parametrize("case", CASES)
def test_training_changes_what_is_drawn_and_the_loss(case: str, place: Place) -> None:
    rows = events(place.runs / case, "validation")
    assert rows[0]["step"] == 0 and rows[-1]["step"] == 3
    assert all(np.isfinite(row["loss"]) for row in rows)
    assert rows[0]["loss"] != rows[-1]["loss"]
    before, after = (shown(place.runs / case, step) for step in (0, 3))
    assert np.abs(after - before).max() > 5


@pytest.mark.parametrize("case", ELSEWHERE)
def test_a_fresh_diffusers_pipeline_draws_the_last_sample(case: str, place: Place) -> None:
    """Also with trained text encoders, convolutions, DoRA and alpha other than the rank."""
    assert np.abs(drawn(case, place.runs / case) - shown(place.runs / case, 3)).max() <= 2


def test_all_cases_start_at_the_base(place: Place) -> None:
    """The first validation loss is the base's, whatever will be trained."""
    found = {
        case: events(place.runs / case, "validation")[0]["loss"]
        for case, (family, _) in CASES.items()
        if family == "sd15"
    }
    reference = found["rslora"]
    assert all(loss == pytest.approx(reference, rel=1e-5) for loss in found.values()), found


def shown(run: Path, step: int) -> np.ndarray[Any, np.dtype[np.int16]]:
    (row,) = (row for row in events(run, "sample") if row["step"] == step)
    return np.asarray(Image.open(run / row["images"][0]["file"]), dtype=np.int16)


def drawn(case: str, run: Path) -> np.ndarray[Any, np.dtype[np.int16]]:
    """Return what a program that knows only diffusers draws with a run's file."""
    name = CASES[case][0]
    family, facts = families.family(name), facts_of(name)
    pipeline = family.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    pipeline.load_lora_weights(str(run), weight_name=final_export_name(run.name))
    pipeline.set_progress_bar_config(disable=True)
    side = max(2 * facts.bucket_step_px, 16)
    image = pipeline(
        **family.pipeline_arguments(pipeline, facts, "a toy", "", guidance_scale=3.0),
        generator=torch.Generator().manual_seed(1234),
        num_inference_steps=2,
        width=side,
        height=side,
    ).images[0]
    return np.asarray(image, dtype=np.int16)


# ---- beginning elsewhere than at zero


@pytest.mark.parametrize("case", ["rslora", "loha", "text", "dit-dora"])
def test_a_run_goes_on_from_a_finished_file(case: str, place: Place) -> None:
    """Step 0 draws what the file's own run drew last."""
    file = place.runs / case / final_export_name(case)
    assert run_cli(place.command(case, f"{case}-from", train__init_from=str(file))) == 0
    first = shown(place.runs / f"{case}-from", 0)
    assert np.abs(first - shown(place.runs / case, 3)).max() <= 1


def test_a_file_of_another_rank_or_kind_is_refused(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place.runs / "rslora" / final_export_name("rslora")
    wide = place.command("rslora", "wide", train__init_from=str(file), adapter__rank=8)
    assert run_cli(wide) == 2
    assert run_cli(place.command("loha", "other", train__init_from=str(file))) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_an_assistant_is_trained_with_and_never_drawn_or_exported(place: Place) -> None:
    assistant = place.runs / "rslora" / final_export_name("rslora")
    assert run_cli(place.command("patterns", "helped", base__assistant=str(assistant))) == 0
    alone, helped = place.runs / "patterns", place.runs / "helped"
    assert np.array_equal(shown(alone, 0), shown(helped, 0))
    assert trajectory(alone)[0] != trajectory(helped)[0]
    assert np.abs(drawn("patterns", helped) - shown(helped, 3)).max() <= 2


# ---- other sources of the same base


def test_a_single_file_trains_as_the_folder_it_was_made_from(place: Place, tmp_path: Path) -> None:
    family = families.family("sd15")
    file = write_checkpoint(base_of("sd15"), tmp_path / "single.safetensors", family.texts)
    line = place.command("rslora", "single", base__companion=str(base_of("sd15")))
    line[line.index("--base") + 1] = str(file)
    assert run_cli(line) == 0
    folder = trajectory(place.runs / "rslora")
    # Up to rounding: products on a CPU depend on where in a file, and so in memory, the weights begin.
    for one, other in zip(trajectory(place.runs / "single"), folder, strict=True):
        assert one == pytest.approx(other, rel=1e-5)
    assert np.abs(shown(place.runs / "single", 3) - shown(place.runs / "rslora", 3)).max() <= 1
    assert run_cli([*line, "--resume"]) == 0


def test_another_vae_encodes_images_again_and_texts_not(place: Place, tmp_path: Path) -> None:
    from tests.fakes.tiny_base import write_tiny_base

    other = write_tiny_base(tmp_path / "other", seed=5) / "vae"
    assert run_cli(place.command("rslora", "revae", base__vae=str(other))) == 0
    (cached,) = events(place.runs / "revae", "cached")
    assert (cached["latents"], cached["texts"]) == (3, 0)
    settings = json.loads((place.runs / "revae" / "run.json").read_text())["settings"]
    assert settings["base.vae"] == str(other)


def test_no_folder_of_this_machine_is_in_a_file(place: Place) -> None:
    for file in place.runs.glob("*/*.safetensors"):
        header = file.read_bytes()[: 1 << 16].decode("latin-1")
        assert str(place.folder) not in header and str(Path.home()) not in header, file

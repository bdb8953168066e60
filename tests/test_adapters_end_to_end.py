"""Every kind of adapter, optimizer and quantised base in whole runs: killed, resumed, exported, drawn elsewhere.

A case joins an adapter, an optimizer and a precision of the base: whatever a resume did not restore shows in
the bits of the steps after it.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from lora_trainer import families
from lora_trainer.checkpoint.states import ADAPTER, OPTIMIZER_TENSORS
from lora_trainer.config.optimizers import OPTIMIZERS
from tests.fakes.family_bases import base_of, facts_of
from tests.fakes.ldm_file import write_checkpoint
from tests.fakes.runs import (
    BETWEEN_SAVES,
    ROOT,
    Toy,
    apart,
    assert_same_run,
    events,
    last_state,
    run_cli,
    run_killed,
    same_tensors,
    settings_of,
    toy,
    trajectory,
)
from tests.fakes.tiny_base import write_base

pytestmark = pytest.mark.timeout(400)  # a loaded machine is not a failure
CASES: dict[str, dict[str, Any]] = tomllib.loads(
    (ROOT / "tests/fakes/adapter_cases.toml").read_text(encoding="utf-8")
)
BASES = {case: settings.pop("base") for case, settings in CASES.items()}
QUANTISED = ("loha", "lokr", "oft")
"""No other program draws what these show: its base has all its bits."""


@dataclass(frozen=True, kw_only=True)
class Place(Toy):
    """A toy dataset whose runs name their own base."""

    def command(self, case: str, run: str, *more: str, **changes: Any) -> list[str]:
        family = BASES[case]
        settings = {key.replace(".", "__"): value for key, value in CASES[case].items()}
        chosen: dict[str, Any] = {
            "adapter__rank": 4,
            "data__resolution": max(2 * facts_of(family).bucket_step_px, 16),
            "data__validation_fraction": 0.34,
            "logging__trackers": [],
            "optimizer__learning_rate": 0.03,
            "optimizer__schedule": "constant",
            "output__measure": run == case,
            "output__precision": "fp32",
            "output__save_every_steps": 2,
            "sampling__every_steps": 5,
            "sampling__guidance_scale": 3,
            "train__batch_size": 2,
            "train__validate_every_steps": 5,
        }
        line = self.arguments("--name", run, *more, steps=5, **{**chosen, **settings, **changes})
        line[line.index("--base") + 1] = str(base_of(family))
        return line

    def file(self, case: str) -> Path:
        """The exported file of a case's run."""
        return self.runs / case / f"{case}.safetensors"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Uninterrupted runs under the name of their case, and killed ones beside them."""
    place = Place(folder=toy(tmp_path_factory.mktemp("adapters"), images=3).folder)
    for case in CASES:
        assert run_cli(place.command(case, case)) == 0, case
    run_killed([(place.command(case, f"{case}-killed"), BETWEEN_SAVES) for case in CASES])
    return place


def shown(run: Path, step: int) -> Path:
    return run / "samples" / f"step-{step:08d}" / "00.png"


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_goes_on_to_the_same_bits_and_the_file_draws_in_diffusers_what_was_shown(
    case: str, place: Place, tmp_path: Path
) -> None:
    run, killed = place.runs / case, place.runs / f"{case}-killed"
    assert not (killed / f"{killed.name}.safetensors").exists()
    assert run_cli(place.command(case, killed.name, "--resume")) == 0
    (resumed,) = events(killed, "resumed")
    assert (resumed["exactness"], resumed["step"]) == ("EXACT", 2), resumed["differences"]
    assert_same_run(killed, run)
    first, last = events(run, "validation")
    assert (first["step"], last["step"]) == (0, 5) and first["loss"] != last["loss"]
    if case != "oft":  # prodigy begins with a tiny rate
        assert apart(shown(run, 0), shown(run, 5)) > 5
    if case not in QUANTISED:
        assert run_cli(["sample", str(run), "--prompt", "a toy", "--output", str(tmp_path)]) == 0
        assert apart(tmp_path / f"{case}-1234.png", shown(run, 5)) <= 2


def test_all_cases_start_at_their_base_and_few_bits_change_it_a_little(place: Place) -> None:
    losses = {
        case: events(place.runs / case, "validation")[0]["loss"]
        for case, family in BASES.items()
        if family == "sd15"
    }
    whole = losses["plain"]
    for case, loss in losses.items():
        assert loss == pytest.approx(whole, rel=0.02 if case in QUANTISED else 1e-5), case
    assert len({losses[case] for case in QUANTISED} | {whole}) == 4, "each in its own way"


def test_optimizers_of_every_library_are_here_and_their_files_say_so(place: Place) -> None:
    """Every optimizer by itself is in train/test_optimizers.py."""
    names = {settings["optimizer.name"] for settings in CASES.values()}
    libraries = {row.package for row in OPTIMIZERS.values() if row.package}
    assert {OPTIMIZERS[name].package for name in names} == libraries
    for case in CASES:
        optimizer = settings_of(place.runs / case)["optimizer.name"]
        with safe_open(place.file(case), framework="np") as file:
            assert file.metadata()["ss_optimizer"].startswith(f"{optimizer}(")
    rates = [row["lr"] for row in events(place.runs / "oft", "step")]
    assert 0 < max(rates) < 0.5, "the rate that prodigy has found, of which 1 is the factor"


def test_new_tokens_are_trained_beside_text_encoders(place: Place) -> None:
    """peft freezes all of a text encoder that it adapts, and the vectors of the new word with it."""
    states = sorted((place.runs / "text-sdxl" / "states").glob("step-*"))
    before, after = (load_file(state / ADAPTER) for state in states[-2:])
    moved = {key.partition(".")[0] for key in after if not np.array_equal(before[key], after[key])}
    assert moved == {"denoiser", "text_encoder", "text_encoder_2", "new_tokens"}


def test_schedule_free_exports_its_average_and_looking_at_it_changes_no_bit(place: Place) -> None:
    run, file = place.runs / "locon", load_file(place.file("locon"))
    trained = load_file(last_state(run) / ADAPTER)
    pairs = [
        (file[f"lora_unet_{name[9:-3].replace('.', '_')}.lora_up.weight"].ravel(), up.ravel())
        for name, up in trained.items()
        if name.startswith("denoiser.") and name.endswith(".up") and up.any()
    ]
    assert len(pairs) > 10
    assert not any(np.array_equal(average, up) for average, up in pairs)
    losses = {row["step"]: row["loss"] for row in events(run, "validation")}
    assert losses[5] < losses[0]
    assert same_tensors(load_file(run / "locon-best.safetensors"), file), "the best is the last"
    often = {"sampling__every_steps": 1, "output__keep_best": False}
    assert run_cli(place.command("locon", "often", **often)) == 0
    for name in ("denoiser.", OPTIMIZER_TENSORS):
        file_name = ADAPTER if name == "denoiser." else name
        one, other = (
            load_file(last_state(each) / file_name) for each in (place.runs / "often", run)
        )
        keys = [key for key in one if key.startswith(name) or file_name == name]
        assert keys and all(np.array_equal(one[key], other[key]) for key in keys), file_name


# ---- beginning elsewhere than at zero


@pytest.mark.parametrize("case", ["loha", "dit-dora"])
def test_a_run_goes_on_from_a_finished_file(case: str, place: Place) -> None:
    """Step 0 draws what the file's own run drew last."""
    name, start = f"{case}-from", {"train__init_from": str(place.file(case))}
    assert run_cli(place.command(case, name, **start, output__save_every_steps=0)) == 0
    assert apart(shown(place.runs / name, 0), shown(place.runs / case, 5)) <= 1


def test_an_assistant_is_trained_with_and_never_drawn_or_exported(
    place: Place, tmp_path: Path
) -> None:
    assistant = {"base__assistant": str(place.file("locon"))}
    assert run_cli(place.command("plain", "helped", **assistant)) == 0
    alone, helped = place.runs / "plain", place.runs / "helped"
    assert apart(shown(alone, 0), shown(helped, 0)) == 0
    assert trajectory(alone)[0] != trajectory(helped)[0]
    assert run_cli(["sample", str(helped), "--prompt", "a toy", "--output", str(tmp_path)]) == 0
    assert apart(tmp_path / "helped-1234.png", shown(helped, 5)) <= 2


# ---- other sources of the same base


def test_a_single_file_trains_as_the_folder_it_was_made_from(place: Place, tmp_path: Path) -> None:
    texts = families.family("sd15").text
    file = write_checkpoint(base_of("sd15"), tmp_path / "single.safetensors", texts)
    line = place.command("plain", "single", base__companion=str(base_of("sd15")))
    line[line.index("--base") + 1] = str(file)
    assert run_cli(line) == 0
    # Up to rounding: products on a CPU depend on where in a file, and so in memory, the weights begin.
    ours, folder = trajectory(place.runs / "single"), trajectory(place.runs / "plain")
    for one, other in zip(ours, folder, strict=True):
        assert one == pytest.approx(other, rel=1e-4)
    assert apart(shown(place.runs / "single", 5), shown(place.runs / "plain", 5)) <= 1


def test_another_vae_encodes_images_again_and_texts_not(place: Place, tmp_path: Path) -> None:
    run, other = place.runs / "revae", str(write_base("sd15", tmp_path / "other", seed=5) / "vae")
    short = {"output__save_every_steps": 0, "sampling__every_steps": 0}
    assert run_cli(place.command("plain", "revae", **short, base__vae=other)) == 0
    (cached,) = events(run, "cached")
    assert (cached["latents"], cached["texts"]) == (3, 0)
    assert trajectory(run)[0] != trajectory(place.runs / "plain")[0]
    assert settings_of(run)["base.vae"] == other


def test_no_folder_of_this_machine_is_in_a_file(place: Place) -> None:
    for file in place.runs.glob("*/*.safetensors"):
        header = file.read_bytes()[: 1 << 16].decode("latin-1")
        assert str(place.folder) not in header and str(Path.home()) not in header, file

"""Files under the names that people have: every fact of the release is read in them, or a remark names its setting.

The rows are `tests.files` of each family's tiny.toml, by the names that files have on the Hub and on Civitai.
`release`: of a release other than the first, its number among the `layers` of tables.json. `adds`: tensors beside
these, `metadata` the texts of their header. Wanted are `variant`, `prediction`, `zero_snr`, `kind` of distillation,
the `recipe` of samples [steps, guidance], and `asks`, the settings that a remark names because nothing in the file
decides them; or `refused`, a part of the sentence. `tests.defaults` are those that a row leaves out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.files.locate import describe, with_choices
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import network
from tests.fakes.tiny_base import tiny_table

ROWS = {name: tiny_table(name)["tests"] for name in families.NAMES}
FILES: Mapping[str, Mapping[str, Any]] = {
    file: {"family": name, **row}
    for name, said in ROWS.items()
    for file, row in said["files"].items()
}
READ = [name for name, row in FILES.items() if "refused" not in row]
ASKED = [name for name in READ if "base.distilled" in FILES[name].get("asks", ())]


def file_of(name: str, folder: Path) -> Path:
    """Write the file of a row; its body is a hole."""
    row = FILES[name]
    adds = {key: tuple(shape) for key, shape in row.get("adds", {}).items()}
    shapes = network(row["family"], row.get("release", 0)) | adds
    dtype = "Q8_0" if name.endswith(".gguf") else "BF16"
    case = Case(name, shapes, dtype=dtype, file=name, metadata=row.get("metadata", {}))
    return write(case, folder)


def test_the_table_has_files_of_every_family() -> None:
    assert len(FILES) >= 80
    assert {row["family"] for row in FILES.values()} == set(families.NAMES)


@pytest.mark.parametrize("name", READ)
def test_a_release_is_read_in_a_file_or_asked_for(name: str, tmp_path: Path) -> None:
    """Nothing but the file is on this machine, as before a download."""
    row = FILES[name]
    family = row["family"]
    wanted = {"prediction": "flow", **ROWS[family]["defaults"], **row}
    facts = describe(BaseSettings(model=str(file_of(name, tmp_path))))
    assert facts.layout is None and facts.family == family
    assert facts.release.variant == wanted.get("variant", "")
    assert facts.release.prediction == wanted["prediction"]
    assert facts.release.zero_terminal_snr == wanted.get("zero_snr", False)
    assert (facts.release.distilled, facts.release.distillation) == (
        "kind" in row,
        row.get("kind", ""),
    )
    own = families.family(family).text.system_prompt
    assert facts.system_prompt == wanted.get("system_prompt", own)
    recipe = facts.release.drawing
    assert [recipe.steps, recipe.guidance_scale] == wanted["recipe"]
    if facts.release.prediction != "flow":
        sampler = facts.release.sampling_scheduler()
        assert sampler.config.prediction_type == facts.release.prediction
        spacing = recipe.scheduler.get("timestep_spacing", sampler.config.timestep_spacing)
        assert sampler.config.timestep_spacing == spacing
    if facts.release.distilled and not facts.guidance.embedded:
        assert recipe.guidance_scale == 1, "guidance is distilled away"
    if "shift" in row:
        assert facts.release.scheduler["shift"] == row["shift"]
    assert [each.key for each in facts.release.assumed] == wanted.get("asks", [])
    for each in facts.release.assumed:
        assert name in each.sentence and f"--set {each.key}=" in each.advice


@pytest.mark.parametrize("name", [name for name in FILES if name not in READ])
def test_a_relative_is_refused_under_its_own_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=FILES[name]["refused"]):
        describe(BaseSettings(model=str(file_of(name, tmp_path))))


@pytest.mark.parametrize("name", ASKED[::3])
def test_what_a_remark_names_decides(name: str, tmp_path: Path) -> None:
    settings = BaseSettings(model=str(file_of(name, tmp_path)), distilled=True)
    facts = with_choices(describe(settings), settings, zero_terminal_snr="auto")
    assert facts.release.distilled and facts.release.drawing.steps <= 16
    assert "base.distilled" not in [each.key for each in facts.release.assumed]
    denied = settings.model_copy(update={"distilled": False})
    facts = with_choices(describe(denied), denied, zero_terminal_snr="auto")
    assert not facts.release.distilled and facts.release.drawing.steps > 16
    assert "base.distilled" not in [each.key for each in facts.release.assumed]


def test_a_z_image_that_is_said_to_be_a_turbo_has_its_shift(tmp_path: Path) -> None:
    settings = BaseSettings(model=str(file_of("intorealism_zimage_v3.safetensors", tmp_path)))
    facts = describe(settings)
    assert (facts.release.variant, facts.flow_shift(width_px=1024, height_px=1024)) == ("base", 6.0)
    said = settings.model_copy(update={"distilled": True})
    facts = with_choices(facts, said, zero_terminal_snr="auto")
    assert (facts.release.variant, facts.flow_shift(width_px=1024, height_px=1024)) == (
        "turbo",
        3.0,
    )


def test_a_klein_that_is_said_to_be_distilled_is_drawn_in_one_pass_a_step(tmp_path: Path) -> None:
    settings = BaseSettings(
        model=str(file_of("moody_mix_v3.safetensors", tmp_path)), distilled=True
    )
    plain = describe(settings)
    facts = with_choices(plain, settings, zero_terminal_snr="auto")
    assert plain.guidance.two_passes and not facts.guidance.two_passes
    assert facts.release.variant == "klein-4b"

"""Checkpoints of others: described by what stands in the file, or refused as what they are."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.files.locate import describe
from tests.checkpoint_files.cases import CASES, Case
from tests.checkpoint_files.files import write
from tests.checkpoint_files.layouts import UNET
from tests.fakes.runs import python

READ = [case for case in CASES if not case.refused]


def ids(case: Case) -> str:
    return case.name


def denoiser_parameters(case: Case) -> int:
    """Count the tensors of the denoiser: with its prefix where the file has several parts."""
    starts = UNET if any(name.startswith(UNET) for name in case.shapes) else ""
    others = ("model_ema.", "v_pred", "ztsnr")
    return sum(
        math.prod(shape)
        for name, shape in case.shapes.items()
        if name.startswith(starts) and not name.startswith(others)
    )


@pytest.mark.parametrize("case", READ, ids=ids)
def test_a_checkpoint_is_described_from_its_header(case: Case, tmp_path: Path) -> None:
    """Nothing but the file is on this machine: what it lacks is named, with the size of that download."""
    facts = describe(BaseSettings(model=str(write(case, tmp_path))))
    assert (facts.family, facts.release.variant, facts.release.prediction) == (
        case.family,
        case.variant,
        case.prediction,
    )
    assert facts.layout is None and facts.source.endswith(case.file)
    assert facts.missing.startswith((case.missing, f"the {case.missing}"))
    assert facts.parts["denoiser"].parameters == denoiser_parameters(case)
    whole = case.missing == "configurations"
    assert (facts.download_bytes == 0) == whole
    # A text encoder is the largest part that a file can lack: of FLUX.2 dev it has 48 GB, of the others 20 at most.
    most = 50e9 if case.family == "flux2dev" else 30e9
    assert facts.download_bytes < most, "the denoiser is not counted"


@pytest.mark.parametrize("case", [case for case in CASES if case.refused], ids=ids)
def test_what_is_no_base_is_refused_as_what_it_is(case: Case, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=case.refused) as raised:
        describe(BaseSettings(model=str(write(case, tmp_path))))
    assert "\n" not in str(raised.value) and raised.value.fix
    assert re.search("allowed are|readable are|is a LoRA", str(raised.value))


DESCRIBE = """
import sys
from lora_trainer.common.errors import InputError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.files.locate import describe
for file in sys.argv[1:]:
    try:
        print(describe(BaseSettings(model=file)).family)
    except InputError:
        print("refused")
sys.exit("torch" in sys.modules)
"""


def test_describing_and_refusing_do_not_import_torch(tmp_path: Path) -> None:
    chosen = {"flux1-dev", "city96 dev Q8_0", "flux1-fill-dev", "flux2-vae"}
    files = list[str]()
    for case in (case for case in CASES if case.name in chosen):
        (folder := tmp_path / case.name).mkdir()
        files.append(str(write(case, folder)))
    done = python(DESCRIBE, *files)
    assert sorted(done.stdout.split()) == ["flux", "flux", "refused", "refused"]
    assert done.returncode == 0, "torch was imported"

"""SimpleTuner's `config.env` reads as its `config.json` with the same options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.importing import reading
from lora_trainer.importing.foreign import table_of
from tests.importing.corpus import ALL

USUAL = next(case for case in ALL if (case.trainer, case.name) == ("SimpleTuner", "usual"))
VARIABLE_OF = {option: name for name, option in table_of("simpletuner")["environment"].items()}


def written(options: dict[str, Any]) -> str:
    """Return the file: a variable for each option that has one, the others as extra arguments."""
    lines, extra = ["# Configure these values."], []
    for option, value in options.items():
        text = str(value).lower() if isinstance(value, bool) else str(value)
        if option in VARIABLE_OF:
            lines.append(f'export {VARIABLE_OF[option]}="{text}"   # a comment')
        elif value is True:
            extra.append(f"--{option}")
        elif value is not False:
            extra.append(f"--{option}={text}")
    lines.append('export TRAINER_EXTRA_ARGS=""')
    lines += [f'export TRAINER_EXTRA_ARGS="${{TRAINER_EXTRA_ARGS}} {one}"' for one in extra]
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", ["config.env", "flux-env.sh"])
def test_variables_read_as_the_file_with_their_options(name: str, tmp_path: Path) -> None:
    usual = reading.import_file(USUAL.write(tmp_path))
    file = tmp_path / name
    file.write_text(written(USUAL.data), encoding="utf-8")
    read = reading.import_file(file)
    assert (read.settings, read.trainer) == (usual.settings, usual.trainer)
    assert not read.unknown
    sent = (
        reading.import_bytes(file.read_bytes(), name),
        reading.import_bytes(json.dumps(USUAL.data).encode(), "config.json"),
    )
    assert sent[0].settings == sent[1].settings, "without the files beside it"


OLD = """\
export MODEL_TYPE='lora'
export STABLE_DIFFUSION_3=false
export FLUX=false
export USE_DORA=false
export LEARNING_RATE=8e-5 #@param {type:"number"}
#export MODEL_NAME="/datasets/models/pipeline"
export MODEL_NAME="stabilityai/stable-diffusion-xl-base-1.0"
export DEBUG_EXTRA_ARGS="--report_to=wandb"
export TRACKER_PROJECT_NAME="${MODEL_TYPE}-training"
export MAX_NUM_STEPS=300
export RESOLUTION=768
export RESOLUTION_TYPE="pixel"
export VALIDATION_RESOLUTION=$RESOLUTION
export VALIDATION_PROMPT="a teddy bear at a picnic"
export VALIDATION_NUM_INFERENCE_STEPS=$SOMEWHERE_ELSE
export MIN_SNR_GAMMA=5
export LR_WARMUP_STEPS=$((MAX_NUM_STEPS / 10))
export TRAINER_EXTRA_ARGS="--lora_rank=8 --offset_noise --noise_offset=0.02"
"""


def test_an_older_file_says_its_model_by_a_variable(tmp_path: Path) -> None:
    file = tmp_path / "config.env"
    file.write_text(OLD, encoding="utf-8")
    read = reading.import_file(file)
    expected = {
        "base.model": "stabilityai/stable-diffusion-xl-base-1.0",
        "optimizer.learning_rate": 8e-5,
        "train.steps": 300,
        "data.resolution": 768,
        "adapter.rank": 8,
        "objective.min_snr_gamma": 5,
        "sampling.prompts": ["a teddy bear at a picnic"],
        "logging.trackers": ["wandb"],
    }
    assert {key: read.settings.get(key) for key in expected} == expected
    assert "SOMEWHERE_ELSE" in read.without_equivalent["validation_num_inference_steps"]
    flux = OLD.replace("FLUX=false", "FLUX=true").replace("MIN_SNR", "#")
    file.write_text(flux.replace("stabilityai/stable-diffusion-xl-base-1.0", "flux"), "utf-8")
    assert reading.import_file(file).is_flow


def test_what_is_not_trained_here_or_is_no_such_file_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config.env"
    for change, said in (
        (("FLUX=false", "KOLORS=true"), "KOLORS"),
        (("'lora'", "'full'"), "model_type=full"),
    ):
        file.write_text(OLD.replace(*change), encoding="utf-8")
        with pytest.raises(RequestError, match=said):
            reading.import_file(file)
    file.write_text("HOME=/root\nSECRET=1\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"config\.env"):
        reading.import_file(file)

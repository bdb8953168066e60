"""Scripts that start a trainer are read as its settings file would be; what only a shell could know is named."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.importing import reading
from lora_trainer.importing.command_lines import read_commands
from lora_trainer.importing.trainers.sd_scripts import without_sections
from tests.importing.corpus import ALL, Case

SCRIPTS = {
    "sd-scripts": "sdxl_train_network.py",
    "musubi-tuner": "src/musubi_tuner/x_train_network.py",
}
CASES = [
    case
    for case in ALL
    if case.trainer in SCRIPTS and case.version not in ("sections", "tables", "few")
    and not case.refused and "datasets" not in case.data
]  # fmt: skip
SHELLS = {".sh": " \\", ".bat": " ^", ".ps1": " `"}


def written(case: Case, shell: str) -> str:
    """Return the command line with the options of a settings file."""
    words = []
    for key, value in without_sections(case.data).items():
        values = value if isinstance(value, list) else [value]
        if value is True:
            words.append(f"--{key}")
        elif value is not False:
            quoted = (shlex.quote(str(one)) if shell == ".sh" else f'"{one}"' for one in values)
            words.append(f"--{key} {' '.join(quoted)}")
    start = f"accelerate launch --num_cpu_threads_per_process 1 {SCRIPTS[case.trainer]}"
    return f"{SHELLS[shell]}\n  ".join([start, *words]) + "\n"


@pytest.mark.parametrize("shell", SHELLS)
@pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])
def test_a_command_line_reads_as_the_file_with_its_options(
    case: Case, shell: str, tmp_path: Path
) -> None:
    usual = reading.import_file(case.write(tmp_path))
    script = tmp_path / f"train{shell}"
    script.write_text(written(case, shell), encoding="utf-8")
    assert reading.import_file(script).settings == usual.settings


SH = r"""#!/usr/bin/env bash
set -e
# --network_dim 1 is a comment
MODEL="/models/my model.safetensors"   # the base
export RANK=16
EXTRA=(
  --network_alpha 8   # half
  --optimizer_args "weight_decay=0.02" 'betas=(0.9,0.99)'
)
FLAGS="--cache_latents"
FLAGS+=" --gradient_checkpointing"
if [ "$1" = "fast" ]; then
  STEPS=100
fi
python prepare.py --network_dim 2 && pip install -r requirements.txt
CUDA_VISIBLE_DEVICES=0 accelerate launch --mixed_precision bf16 sdxl_train_network.py \
  --pretrained_model_name_or_path="$MODEL" \
  --network_module=networks.lora --network_dim=${RANK} "${EXTRA[@]}" $FLAGS \
  --learning_rate ${LR:-2e-4} --output_name 'a #1 name' --max_train_steps $STEPS \
  --train_data_dir "$(pwd)/images" "$@" > log.txt 2>&1; echo done
"""
BAT = r"""@echo off
rem --network_dim 1
set MODEL=C:\models\my model.safetensors
set "RANK=16"
call venv\Scripts\activate.bat
accelerate launch ^
  --mixed_precision bf16 ^
  "C:\sd-scripts\sdxl_train_network.py" ^
  --pretrained_model_name_or_path="%MODEL%" ^
  --network_module networks.lora --network_dim %rank% --network_alpha 8 ^
  --optimizer_args "weight_decay=0.02" "betas=(0.9,0.99)" --cache_latents --gradient_checkpointing ^
  --learning_rate 2e-4 --output_name "a #1 name" --max_train_steps %STEPS% ^
  --train_data_dir "%~dp0images"
pause
"""
PS1 = r"""<# --network_dim 1 #>
<#
$model = "another"
#>
$lists = [System.Collections.ArrayList]::new()
$model = "C:\models\my model.safetensors" # the base
$Env:RANK = 16
$extra = @(
  "--network_alpha=8",
  "--optimizer_args", "weight_decay=0.02", "betas=(0.9,0.99)"
)
if ($fast) {
  $steps = 100
}
accelerate launch --mixed_precision bf16 .\sd-scripts\sdxl_train_network.py `
  --pretrained_model_name_or_path="$model" `
  --network_module=networks.lora --network_dim=$env:rank $extra --cache_latents --gradient_checkpointing `
  --learning_rate 2e-4 --output_name "a #1 name" --max_train_steps $steps `
  --train_data_dir "$PSScriptRoot\images" $lists
"""


@pytest.mark.parametrize(("name", "text"), [("a.sh", SH), ("A.BAT", BAT), ("a.ps1", PS1)])
def test_variables_comments_and_quotes_are_those_of_the_shell(name: str, text: str) -> None:
    read = read_commands(text, name)
    base = read.options.pop("pretrained_model_name_or_path")
    assert base.replace("C:", "").replace("\\", "/") == "/models/my model.safetensors"
    expected: dict[str, Any] = {
        "network_module": "networks.lora", "network_dim": 16, "network_alpha": 8,
        "optimizer_args": ["weight_decay=0.02", "betas=(0.9,0.99)"], "cache_latents": True,
        "gradient_checkpointing": True, "learning_rate": 2e-4, "output_name": "a #1 name",
    }  # fmt: skip
    assert read.options == expected
    assert {"max_train_steps", "train_data_dir"} <= read.open.keys(), "what is not known is named"
    imported = reading.import_bytes(text.encode(), name)
    assert imported.settings["adapter.rank"] == 16
    assert "this variable is not set" in imported.without_equivalent["max_train_steps"]


def test_of_several_commands_the_one_that_trains_is_read_and_others_are_refused() -> None:
    train = "python train_network.py --network_dim 4"
    several = read_commands(f"{train} && python flux_train_network.py --network_dim 8", "a.sh")
    assert several.options == {"network_dim": 4} and "the first" in several.open["command line"]
    assert read_commands("python fine_tune.py\npython train_network.py --a 1", "a.sh").options == {
        "a": 1
    }
    assert read_commands(f"{train} > log.txt 2>&1", "a.cmd").options == {"network_dim": 4}
    with pytest.raises(RequestError, match="sdxl_train.py, which does not train a LoRA"):
        read_commands("accelerate launch sdxl_train.py --a 1", "a.sh")
    with pytest.raises(InputError, match="starts no training"):
        read_commands("echo hello", "a.bat")
    with pytest.raises(InputError, match="no closing quotation"):
        read_commands('python train_network.py --a "b', "a.sh")


def test_a_settings_file_that_the_command_names_lies_beneath_its_options(tmp_path: Path) -> None:
    (tmp_path / "conf.toml").write_text('[a]\nnetwork_module = "networks.lora"\nnetwork_dim = 4\n')
    script = tmp_path / "a.sh"
    script.write_text("python train_network.py --config_file conf --network_alpha 2\n")
    settings = reading.import_file(script).settings
    assert (settings["adapter.rank"], settings["adapter.alpha"]) == (4, 2)


def test_a_script_made_to_take_long_is_read_or_refused_soon() -> None:
    train = "python train_network.py --b $a\n"
    doubled = "a=xx\n" + "a=$a$a$a$a$a$a$a$a\n" * 50 + train
    assert "b" in read_commands(doubled, "a.sh").open
    for text in ("A=(\n" * 8_000, "<#" * 100_000, "x" * 300_000):
        for name in ("a.sh", "a.ps1"):
            with pytest.raises(InputError):
                read_commands(text, name)

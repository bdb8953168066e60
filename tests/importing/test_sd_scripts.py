"""Kohya's TOML files as settings: every key is set, explained or named, and the result is a settings file."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from lora_trainer.common.errors import RequestError
from lora_trainer.config.config import build_config
from lora_trainer.config.layers import read_settings_file
from lora_trainer.importing.reading import TRAINERS, import_file
from tests.fakes.runs import python, run_cli, write_dataset

TRAINING = """
[model_arguments]
pretrained_model_name_or_path = "someone/base"
v2 = false
v_parameterization = false
[training]
train_data_dir = "images"
output_dir = "out"
output_name = "zibbo"
network_module = "lycoris.kohya"
network_dim = 16
network_alpha = 8
network_args = ["algo=locon", "conv_dim=4", "conv_alpha=2", "preset=full"]
learning_rate = 1e-4
unet_lr = 2e-4
text_encoder_lr = 5e-5
optimizer_type = "AdamW8bit"
optimizer_args = ["weight_decay=0.1", "betas=(0.9, 0.99)", "odd=1"]
lr_scheduler = "cosine"
lr_warmup_steps = 100
max_train_epochs = 10
train_batch_size = 2
gradient_accumulation_steps = 2
min_snr_gamma = 5
noise_offset = 0.05
seed = 7
resolution = "512,768"
enable_bucket = true
max_bucket_reso = 1024
mixed_precision = "bf16"
save_precision = "fp16"
save_every_n_epochs = 2
save_last_n_epochs = 6
shuffle_caption = true
keep_tokens = 2
caption_extension = ".txt"
caption_dropout_rate = 0.1
flip_aug = false
max_token_length = 75
clip_skip = 2
cache_latents = true
xformers = true
gradient_checkpointing = true
loss_type = "smooth_l1"
max_timestep = 1000
color_aug = false
huggingface_token = "hf_abcdefghijklmnopqrstuvwxyzabcdefgh"
some_new_option = 3
"""
DATASET = """
[general]
shuffle_caption = true
keep_tokens_separator = "|||"
caption_extension = ".txt"
enable_bucket = true
[[datasets]]
resolution = 512
batch_size = 4
bucket_no_upscale = true
[[datasets.subsets]]
image_dir = "/data/cat/10_zibbo"
num_repeats = 3
caption_prefix = "photo of"
[[datasets.subsets]]
image_dir = "/data/cat/others"
shuffle_caption = false
class_tokens = "a cat"
flip_aug = true
caption_tag_dropout_rate = 0.1
odd = 1
"""


def write(folder: Path, text: str, name: str = "their.toml") -> Path:
    (folder / name).write_text(text, encoding="utf-8")
    return folder / name


def named(found: Any) -> str:
    """Return everything that says what became of keys."""
    rows = (*found.sources.values(), *found.nearest, *found.nothing_to_set)
    return "\n".join((*rows, *found.without_equivalent, *found.unknown))


def test_a_training_file(tmp_path: Path) -> None:
    write_dataset(tmp_path / "images" / "3_zibbo", images=4)
    found = import_file(write(tmp_path, TRAINING))
    assert found.dataset == "images"
    assert found.values == {
        "base.model": "someone/base",
        "base.clip_skip": 2,
        "data.caption_tokens": 75,
        "output.folder": "out",
        "output.name": "zibbo",
        "adapter.kind": "lora",
        "adapter.targets": "all",
        "adapter.conv_rank": 4,
        "adapter.conv_alpha": 2.0,
        "adapter.rank": 16,
        "adapter.alpha": 8,
        "adapter.text_encoder": True,
        "optimizer.text_encoder_learning_rate": 5e-5,
        "optimizer.learning_rate": 2e-4,
        "optimizer.name": "adamw8bit",
        "optimizer.weight_decay": 0.1,
        "optimizer.beta1": 0.9,
        "optimizer.beta2": 0.99,
        "optimizer.schedule": "cosine",
        "optimizer.warmup_fraction": 0.0,
        "train.batch_size": 4,
        "memory.micro_batch": 2,
        "train.steps": 30,
        "train.seed": 7,
        "train.precision": "bf16",
        "objective.weighting": "min_snr",
        "objective.min_snr_gamma": 5,
        "objective.noise_offset": 0.05,
        "objective.loss": "smooth_l1",
        "objective.huber_delta": 0.1,
        "objective.huber_schedule": "snr",
        "objective.timestep_sampling": "uniform",
        "objective.zero_terminal_snr": False,
        "objective.max_timestep": 999,
        "train.max_grad_norm": 1.0,
        "train.lower_on_plateau": False,
        "data.resolution": 640,
        "data.buckets": True,
        "data.shuffle_tags": True,
        "data.keep_tokens": 2,
        "data.caption_extensions": [".txt"],
        "data.caption_dropout": 0.1,
        "data.flip": False,
        "data.validation_fraction": 0.0,
        "output.precision": "fp16",
        "output.save_every_epochs": 2,
        "output.keep_last": 3,
        "memory.attention": "xformers",
    }
    assert sorted(found.without_equivalent) == [
        "lr_warmup_steps",
        "optimizer_args.odd",
    ]
    assert list(found.nearest) == ["resolution"]
    assert found.trainer == "sd-scripts"
    assert found.unknown == ("some_new_option",)
    assert found.nothing_to_set["color_aug"] == "is off there (false)"
    assert "hf_abcdef" not in json.dumps(found.to_json()), "a token is nobody's setting"


def test_a_dataset_file(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, DATASET))
    assert found.dataset == str(Path("/data/cat"))
    assert found.values == {
        "data.resolution": 512,
        "data.buckets": True,
        "data.caption_extensions": [".txt"],
        "train.batch_size": 4,
        "data.validation_fraction": 0.0,
        "data.folders": {
            "10_zibbo": {
                "repeats": 3,
                "shuffle_tags": True,
                "keep_tokens": 0,
                "keep_tokens_separator": "|||",
                "caption_prefix": "photo of",
            },
            "others": {
                "repeats": 1,
                "flip": True,
                "shuffle_tags": False,
                "keep_tokens": 0,
                "keep_tokens_separator": "|||",
                "tag_dropout": 0.1,
            },
        },
    }
    assert found.sources["data.folders.10_zibbo.shuffle_tags"] == "general.shuffle_caption"
    assert found.sources["data.folders.others.shuffle_tags"].startswith("datasets[0].subsets[1].")
    assert sorted(found.without_equivalent) == [
        "datasets[0].bucket_no_upscale",
        "datasets[0].subsets[1].class_tokens",
    ]
    assert list(found.nearest) == ["datasets[0].subsets[0].caption_prefix"]
    assert found.unknown == ("datasets[0].subsets[1].odd",)


def test_one_subset_is_the_dataset(tmp_path: Path) -> None:
    text = '[[datasets]]\n[[datasets.subsets]]\nimage_dir = "/data/10_cat"\nflip_aug = true\n'
    found = import_file(write(tmp_path, text))
    assert found.dataset == str(Path("/data/10_cat"))
    assert (found.values["data.flip"], found.values["data.repeats"]) == (True, 1)
    assert "data.folders" not in found.values


def test_the_same_pictures_in_two_datasets_are_trained_at_two_resolutions(tmp_path: Path) -> None:
    text = "".join(
        f"[[datasets]]\nresolution = {side}\nbatch_size = 2\n"
        f'[[datasets.subsets]]\nimage_dir = "/data/{folder}"\n'
        for side, folder in ((1024, "cat"), (768, "cat"), (512, "dog"))
    )
    found = import_file(write(tmp_path, text))
    assert found.values["data.resolution"] == 1024
    assert found.values["data.more_resolutions"] == [768]
    assert sorted(found.without_equivalent) == [
        "datasets[2].resolution",
    ]  # fmt: skip
    assert "datasets[1].subsets[0].image_dir" in found.nothing_to_set


def test_regularisation_and_masks_are_carried_over(tmp_path: Path) -> None:
    text = "[[datasets]]\n" + "".join(
        f'[[datasets.subsets]]\nimage_dir = "/data/cat/{folder}"\nnum_repeats = 1\n{more}\n'
        for folder, more in (("own", "alpha_mask = true"), ("others", "is_reg = true"))
    )
    found = import_file(write(tmp_path, text)).values
    assert found["data.folders"] == {
        "own": {"repeats": 1},
        "others": {"repeats": 1, "regularisation": True},
    }
    assert (found["data.masks"], found["data.mask_background"]) == ("alpha", 0.0)

    training = 'reg_data_dir = "/others"\nprior_loss_weight = 0.5\nmasked_loss = true\n'
    found = import_file(write(tmp_path, training)).values
    assert found["data.regularisation_dir"] == "/others"
    assert (found["objective.prior_weight"], found["data.masks"]) == (0.5, "files")

    off = 'reg_data_dir = ""\nprior_loss_weight = 0.0\nmasked_loss = false\nseed = 1\n'
    nothing = import_file(write(tmp_path, off))
    assert "data.masks" not in nothing.values and "data.regularisation_dir" not in nothing.values
    assert not nothing.without_equivalent


def test_pictures_beside_a_subfolder_are_called_by_a_dot(tmp_path: Path) -> None:
    text = "[[datasets]]\n" + "".join(
        f'[[datasets.subsets]]\nimage_dir = "{folder}"\nnum_repeats = {repeats}\n'
        for folder, repeats in (("/data/cat/more", 2), ("/data/cat", 5))
    )
    found = import_file(write(tmp_path, text))
    assert found.dataset == str(Path("/data/cat"))
    assert found.values["data.folders"] == {"more": {"repeats": 2}, ".": {"repeats": 5}}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[datasets]]\n[[datasets.subsets]]\nnum_repeats = 2\n", "names no folder of images"),
        ("[[datasets]]\nresolution = 512\n", "names no subset"),
        ("general = 3\n[[datasets]]\n[[datasets.subsets]]\nimage_dir = 'a'\n", "is no table"),
        ("seed = 1\ngemma2 = 'g'\nnetwork_module = 'networks.lora'\n", "is of a model that is not"),
    ],
)
def test_what_cannot_be_done_is_refused(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError) as caught:
        import_file(write(tmp_path, text))
    assert message in caught.value.found


def test_missing_options_are_what_they_are_there_by_default(tmp_path: Path) -> None:
    found = import_file(write(tmp_path, "network_dim = 4\n")).values
    assert found["adapter.alpha"] == 1
    assert found["objective.weighting"] == "none"
    assert (found["optimizer.schedule"], found["optimizer.warmup_fraction"]) == ("constant", 0.0)
    assert (found["train.steps"], found["train.batch_size"]) == (1600, 1)
    assert (found["data.buckets"], found["data.validation_fraction"]) == (False, 0.0)
    assert found["adapter.text_encoder"] is True


def test_a_training_file_brings_its_dataset_file(tmp_path: Path) -> None:
    write(tmp_path, DATASET.replace("/data/cat", "cat"), "data.toml")
    for folder in ("10_zibbo", "others"):
        write_dataset(tmp_path / "cat" / folder, images=3)
    text = 'dataset_config = "data.toml"\nmax_train_epochs = 2\nnetwork_train_unet_only = true\n'
    found = import_file(write(tmp_path, text))
    assert found.dataset == "cat"
    assert found.values["train.steps"] == 2 * 3  # 3 x 3 + 3 samples, 4 a step
    assert found.values["adapter.text_encoder"] is False
    assert found.unknown == ("datasets[0].subsets[1].odd",), "its keys are named too"
    lost = import_file(write(tmp_path, 'dataset_config = "gone.toml"\nmax_train_epochs = 2\n'))
    assert sorted(lost.without_equivalent) == [
        "dataset_config",
        "max_train_epochs",
    ]
    assert lost.values["optimizer.learning_rate"] == 2e-6


VALUES: tuple[Any, ...] = ("x", 0.5, True, 2, ["a=b"], 0, False, "", "odd_shift", "sigma_sqrt")
OF = {trainer.name: trainer.keys for trainer in TRAINERS}


def tried(text: str, name: str, folder: Path) -> None:
    """Read a file with a key; assert that it is named, or refused with the reason."""
    try:
        found = import_file(write(folder, text))
    except RequestError as error:
        assert "cannot be done here" in error.found
        return
    assert name in named(found) and name not in found.unknown, text


@pytest.mark.parametrize("name", sorted(key for key in OF["sd-scripts"] if "." not in key))
def test_no_option_is_lost(name: str, tmp_path: Path) -> None:
    """Each one alone in a file, with values of every sort."""
    for value in VALUES:
        tried(f"seed = 1\n{name} = {json.dumps(value)}\n" if name != "seed" else
              f"seed = {json.dumps(value)}\n", name, tmp_path)  # fmt: skip


SUBSET = "datasets[].subsets[]."


@pytest.mark.parametrize(
    "name",
    sorted(key.removeprefix(SUBSET) for key in OF["sd-scripts"] if key.startswith(SUBSET)),
)
def test_no_key_of_a_subset_is_lost(name: str, tmp_path: Path) -> None:
    """In each of the three tables in which it may stand."""
    heads = ["[general]", "[[datasets]]", '[[datasets.subsets]]\nimage_dir = "a"']
    for place in range(3 if name != "image_dir" else 0):
        for value in ("x", True, 1, 0.2):
            lines = list(heads)
            lines.insert(place + 1, f"{name} = {json.dumps(value)}")
            tried("\n".join(lines), name, tmp_path)


@pytest.mark.parametrize("suffix", [".toml", ".json"])
def test_the_command_writes_a_settings_file(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, ours = write(tmp_path, DATASET), tmp_path / f"ours{suffix}"
    assert run_cli(["import", str(theirs), "--output", str(ours)]) == 0
    said = capsys.readouterr().out
    assert "Train on: " in said and "class_tokens" in said and "Not known: " in said
    values = read_settings_file(ours).values
    assert values == import_file(theirs).values
    assert build_config(values).data.of_folder("10_zibbo").repeats == 3
    assert run_cli(["import", str(theirs), "--output", str(ours)]) == 2, "it exists"
    assert run_cli(["import", str(theirs), "--output", str(ours), "--force"]) == 0
    assert run_cli(["import", str(theirs), "--output", str(tmp_path / "a.txt")]) == 2


def test_printed_settings_are_a_file_with_all_that_was_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = write(tmp_path, DATASET.replace("10_zibbo", "10_my.zibbo \u732b"))
    assert run_cli(["import", str(theirs)]) == 0
    text = capsys.readouterr().out
    assert "# general.shuffle_caption" in text and "class_tokens" in text
    data = tomllib.loads(text)
    assert data["data"]["folders"]["10_my.zibbo \u732b"]["repeats"] == 3
    assert run_cli(["import", str(theirs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == import_file(theirs).to_json()


def test_importing_needs_no_torch(tmp_path: Path) -> None:
    theirs = write(tmp_path, TRAINING)
    script = "import sys; from lora_trainer.cli.main import run; run(sys.argv[1:]); print('torch' in sys.modules)"
    done = python(script, "import", str(theirs))
    assert done.stdout.strip().endswith("False"), done.stderr

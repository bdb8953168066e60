"""Settings as kohya_ss resolves them: `python -m scripts.trainers.kohya_ss --checkout DIR --commit SHA`.

Its button for training makes arguments of the LoRA tab's fields; sd-scripts, beside the checkout as
`sd-scripts`, makes the numbers of those. A field that a file lacks is empty.
"""

from __future__ import annotations

import inspect
import json
import os
import shlex
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

from scripts.trainers import sd_scripts
from scripts.trainers.measured import Numbers, arguments, mocked, run

_EMPTY: dict[str, Any] = {
    "additional_parameters": "",
    "lr_scheduler_args": "",
    "optimizer_args": "",
    "network_weights": "",
    "lr_scheduler_type": "",
    "reg_data_dir": "",
    "unit": 1,
    "extra_accelerate_launch_args": "",
    "LyCORIS_preset": "full",
    "bucket_reso_steps": 64,
    "network_dim": 8,
    "min_bucket_reso": 256,
    "max_bucket_reso": 2048,
    "network_alpha": 1,
    "epoch": 1,
    "train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "lr_scheduler_num_cycles": 1,
    "lr_scheduler_power": 1,
    "loss_type": "l2",
    "optimizer": "AdamW8bit",
    "lr_scheduler": "cosine",
    "max_grad_norm": 1,
    "lr_warmup": 10,
    "learning_rate": 0.0001,
    "text_encoder_lr": 0.0001,
    "unet_lr": 0.0001,
    "huber_schedule": "snr",
    "huber_c": 0.1,
    "huber_scale": 1,
    "enable_bucket": True,
    "max_resolution": "512,512",
}
"""Fields as the tab shows them before anything is loaded, where that is not empty."""


def resolve(file: Path) -> Numbers:
    """Return the numbers of a file that the LoRA tab has saved."""
    from kohya_gui import lora_gui

    data = json.loads(file.read_text(encoding="utf-8"))
    made: list[dict[str, Any]] = []
    for name in ("validate_args_setting", "validate_file_path", "validate_folder_path", "validate_model_path",
                 "validate_toml_file", "require_writable_directory", "verify_image_folder_pattern"):  # fmt: skip
        setattr(lora_gui, name, lambda *_, **__: True)
    lora_gui.write_toml_config = lambda _name, values, **_: made.append(values) or False
    lora_gui.get_executable_path = lambda _name: "accelerate"
    lora_gui.executor = SimpleNamespace(is_running=lambda: False)
    lora_gui.train_state_value = 0
    folder = file.parent / "images"
    (folder / "1_all").mkdir(exist_ok=True)
    for image in folder.glob("*.png"):
        image.rename(folder / "1_all" / image.name)
    fields = {
        name: data.get(name, _EMPTY.get(name, 0))
        for name in inspect.signature(lora_gui.train_model).parameters
    }
    fields |= {"headless": True, "print_only": True, "train_data_dir": str(folder)}
    fields["dataset_config"] = data.get("dataset_config") or ""
    lora_gui.train_model(**fields)
    (values,) = made
    import toml

    config = file.parent / "arguments.toml"
    config.write_text(toml.dumps(values), encoding="utf-8")
    kind = "flux" if data.get("flux1_checkbox") else "sd3" if data.get("sd3_checkbox") else "sdxl"
    more = shlex.split(data.get("additional_parameters") or "")
    numbers = sd_scripts.numbers_of(sd_scripts.arguments_of(config, kind, more), kind)
    if "conv_dim" not in data:
        numbers = {name: value for name, value in numbers.items() if not name.startswith("conv_")}
    if kind == "sdxl" and not data.get("sdxl"):
        numbers["family"] = "sd2" if data.get("v2") else "sd15"
    for image in (folder / "1_all").glob("*.png"):
        image.rename(folder / image.name)
    (folder / "1_all").rmdir()
    if not data.get("max_train_steps"):
        del numbers["steps"]  # its folders are named with repeats, and it counts their images
    return numbers


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    mocked("torchvision", "pytorch_lightning", "gradio", "easygui", *sd_scripts.PIPELINES)
    sys.path[:0] = [str(given.checkout), str(given.checkout.parent / "sd-scripts")]
    os.chdir(mkdtemp())  # it writes a log and prompts into the folder it is started from
    sys.argv = sys.argv[:1]
    run(resolve, name="kohya_ss", commit=given.commit, files=given.files, write=given.write)

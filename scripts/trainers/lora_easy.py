"""Settings as LoRA_Easy_Training_Scripts has them: `python -m scripts.trainers.lora_easy --checkout DIR --commit SHA`.

The checkout is of its backend (LoRA_Easy_Training_scripts_Backend), which checks the pages and writes them as
sd-scripts' arguments and dataset file; sd-scripts, beside the checkout as `sd-scripts`, makes the numbers.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from scripts.trainers import sd_scripts
from scripts.trainers.measured import Numbers, arguments, mocked, run

_BUCKETS = (
    "enable_bucket",
    "min_bucket_reso",
    "max_bucket_reso",
    "bucket_reso_steps",
    "bucket_no_upscale",
)


def resolve(file: Path) -> Numbers:
    """Return the numbers of a file that its pages have saved."""
    import toml
    from utils.process import process_args
    from utils.validation import validate

    pages, folder = toml.load(file), file.parent
    images = str(folder / "images")
    arguments_by_page: dict[str, Any] = {}
    dataset: dict[str, Any] = {}
    for name, page in pages.items():
        if name.endswith("_args") and isinstance(page, dict):
            arguments_by_page |= {name: page["args"]} if page.get("args") else {}
            dataset |= {name: page["dataset"]} if page.get("dataset") else {}
    # Its pages have a field for each; a file of the corpus names only some, with folders of another machine.
    general = {"pretrained_model_name_or_path": images, "output_dir": str(folder)}
    arguments_by_page["general_args"] = {**arguments_by_page.get("general_args", {}), **general}
    saving = arguments_by_page.get("saving_args", {})
    for page in (saving, arguments_by_page.get("logging_args", {})):
        for name in ("output_dir", "logging_dir", "sample_prompts"):
            page.pop(name, None)
    arguments_by_page = {name: page for name, page in arguments_by_page.items() if page}
    subsets = pages.get("subsets", [])
    dataset["subsets"] = [
        {"num_repeats": 1, "caption_extension": ".txt", **table, "image_dir": images}
        for table in subsets
    ]
    passed, sdxl, errors, args, data, _ = validate({"args": arguments_by_page, "dataset": dataset})
    if not passed:
        raise ValueError("; ".join(errors))
    Path("runtime_store").mkdir(exist_ok=True)
    config = process_args(args)[1]
    kind = "flux" if "guidance_scale" in args else "sdxl"
    parsed = sd_scripts.arguments_of(config, kind)
    options = data["general"]
    side = options.get("resolution", 512)
    parsed.resolution = ",".join(map(str, side)) if isinstance(side, list) else str(side)
    parsed.train_batch_size = options.get("batch_size", 1)
    for name in _BUCKETS:
        if name in options:
            setattr(parsed, name, options[name])
    numbers = sd_scripts.numbers_of(parsed, kind)
    if kind == "sdxl" and not sdxl:
        numbers["family"] = "sd2" if args.get("v2") else "sd15"
    if "max_train_steps" not in args:
        numbers.pop("steps", None)  # it counts the images of epochs
    return numbers


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    mocked("torchvision", "pytorch_lightning", *sd_scripts.PIPELINES)
    beside = given.checkout.parent / "sd-scripts"
    sys.path[:0] = [str(given.checkout), str(given.checkout / "custom_scheduler"), str(beside)]
    os.chdir(mkdtemp())  # it writes what it makes into the folder it is started from
    Path("config.json").write_text(json.dumps({}), encoding="utf-8")
    sys.argv = sys.argv[:1]
    run(
        resolve,
        name="LoRA_Easy_Training_Scripts",
        commit=given.commit,
        files=given.files,
        write=given.write,
    )

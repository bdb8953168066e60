"""Settings as SimpleTuner resolves them: `python -m scripts.trainers.simpletuner --checkout DIR --commit SHA`.

Its parser of settings, its schedules, and the methods of its models that draw timesteps and weigh the loss.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from tempfile import mkdtemp
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scripts.trainers.measured import (
    DIFFERENCES,
    DRAWS,
    LEVELS,
    SIZES,
    Numbers,
    arguments,
    mocked,
    quantiles,
    run,
    walked,
)

FAMILIES = {
    "flux": "flux",
    "flux2": "flux2",
    "sdxl": "sdxl",
    "sd3": "sd3",
    "chroma": "chroma",
    "qwen_image": "qwen",
    "z_image": "zimage",
    "sd1x": "sd15",
}


def resolve(file: Path) -> Numbers:
    """Return the numbers of a config.json and of the data backends that it names."""
    from simpletuner.helpers.configuration import cmd_args
    from simpletuner.helpers.configuration.cli_utils import mapping_to_cli_args
    from simpletuner.helpers.training.custom_schedule import get_lr_scheduler

    data = {
        name.removeprefix("--"): value
        for name, value in json.loads(file.read_text(encoding="utf-8")).items()
    }
    data.setdefault("model_flavour", None)
    data = {name: value for name, value in data.items() if value is not None}
    args = cmd_args.parse_cmdline_args(mapping_to_cli_args(data))
    if args is None:
        raise ValueError("its parser refuses the file")
    family = FAMILIES[args.model_family]
    backends = json.loads(
        (file.parent / Path(args.data_backend_config).name).read_text(encoding="utf-8")
    )
    is_flow = family not in ("sdxl", "sd15")
    numbers: Numbers = {
        "family": family,
        "rate": args.learning_rate,
        "text_encoder_rate": None,
        "batch": [args.train_batch_size, args.gradient_accumulation_steps],
        "buckets": _buckets(backends[0], args),
        **_noise_and_errors(args, is_flow=is_flow),
    }
    if args.lora_type == "standard":
        numbers |= {"rank": args.lora_rank, "alpha": args.lora_alpha or args.lora_rank}
    if args.max_train_steps:
        optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
        one = SimpleNamespace(num_processes=1)
        schedule = get_lr_scheduler(
            args, optimizer, one, logging.getLogger("simpletuner"), global_step=0
        )
        numbers |= {
            "steps": args.max_train_steps,
            "curve": walked(optimizer, schedule, args.max_train_steps),
        }
    return numbers


def _noise_and_errors(args: Any, *, is_flow: bool) -> Numbers:
    from diffusers import DDPMScheduler
    from simpletuner.helpers.models import common

    torch.manual_seed(0)
    owner: Any = common.ModelFoundation.__new__(
        type(
            "Any",
            (common.ModelFoundation,),
            dict.fromkeys(common.ModelFoundation.__abstractmethods__),
        )
    )
    kinds = common.PredictionTypes
    object.__setattr__(
        owner,
        "__dict__",
        {
            "config": args,
            "accelerator": SimpleNamespace(device=torch.device("cpu")),
            "PREDICTION_TYPE": kinds.FLOW_MATCHING if is_flow else kinds.EPSILON,
            "noise_schedule": SimpleNamespace(
                config=SimpleNamespace(
                    patch_size=2,
                    base_image_seq_len=256,
                    max_image_seq_len=4096,
                    base_shift=0.5,
                    max_shift=1.15,
                )
            )
            if is_flow
            else DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear"),
        },
    )
    if not is_flow:
        from simpletuner.helpers.training.custom_schedule import (
            generate_timestep_weights,
            segmented_timestep_selection,
        )

        weights = generate_timestep_weights(args, 1000)
        drawn = [
            segmented_timestep_selection(
                actual_num_timesteps=1000,
                bsz=4,
                weights=weights,
                config=args,
                use_refiner_range=False,
            )
            for _ in range(DRAWS // 8)
        ]
        steps = torch.cat(drawn).tolist()
    else:
        side = int(args.resolution) // 8
        batch = {
            "latents": torch.zeros(1).expand(DRAWS, 1),
            "noise": torch.zeros(1, 16, side, side),
        }
        steps = owner.sample_flow_sigmas(batch, {})[1].tolist()
    errors = []
    for level in LEVELS:
        for difference in DIFFERENCES:
            step = torch.tensor([1000 * level]) if is_flow else torch.tensor([int(1000 * level)])
            owner.get_prediction_target = lambda _batch: torch.zeros(1, 4, 1, 1)
            prepared = {
                "timesteps": step,
                "latents": torch.zeros(1, 4, 1, 1),
                "noise": torch.zeros(1, 4, 1, 1),
            }
            output = {"model_prediction": torch.full((1, 4, 1, 1), difference)}
            errors.append(float(owner.loss(prepared, output, apply_conditioning_mask=False)))
    return {"noise": quantiles(steps), "errors": errors}


def _buckets(backend: dict[str, Any], args: Any) -> list[list[int]]:
    from simpletuner.helpers.multiaspect.image import MultiaspectImage
    from simpletuner.helpers.training.state_tracker import StateTracker

    StateTracker.set_args(args)
    area = float(backend.get("resolution", args.resolution))
    kind = backend.get("resolution_type", args.resolution_type)
    megapixels = area if kind == "area" else (area / 1000) ** 2
    if backend.get("crop", True) and backend.get("crop_aspect", "square") == "square":
        side = MultiaspectImage._round_to_nearest_multiple(int((megapixels * 1e6) ** 0.5))
        return [[side, side] for _ in SIZES]
    placed = []
    for width, height in SIZES:
        aspect = MultiaspectImage.calculate_image_aspect_ratio((width, height))
        size, _, _ = MultiaspectImage.calculate_new_size_by_pixel_area(
            float(aspect), megapixels, (width, height)
        )
        placed.append([int(size[0]), int(size[1])])
    return placed


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    # Its parser imports all of its models for the names of their kinds; flux has a formula that is asked for.
    models = given.checkout / "simpletuner" / "helpers" / "models"
    folders = [
        folder.name
        for folder in models.iterdir()
        if folder.is_dir() and folder.name not in ("flux", "field_registry")
    ]
    mocked(*(f"simpletuner.helpers.models.{name}" for name in folders))
    mocked(
        "torchvision",
        "bs4",
        "trainingsample",
        "kernels",
        "torchaudio",
        "py3langid",
        "pypinyin",
        "hangul_romanize",
        "num2words",
        "spacy",
        "librosa",
        "loguru",
        "wcwidth",
    )
    sys.path.insert(0, str(given.checkout))
    os.chdir(mkdtemp())  # it writes what it knows of sizes into the folder it is started from
    sys.argv = sys.argv[:1]
    run(resolve, name="SimpleTuner", commit=given.commit, files=given.files, write=given.write)

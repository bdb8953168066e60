"""Settings as OneTrainer resolves them: `python -m scripts.trainers.onetrainer --checkout DIR --commit SHA`.

Its configuration class with its migrations, its schedules, draws of timesteps, losses, parameter groups, and
the buckets of mgds (its package of data pipelines, beside the checkout as `mgds`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scripts.trainers.measured import (
    DIFFERENCES,
    DRAWS,
    IMAGES,
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
    "STABLE_DIFFUSION_XL_10_BASE": "sdxl",
    "STABLE_DIFFUSION_15": "sd15",
    "FLUX_DEV_1": "flux",
    "FLUX_2": "flux2",
    "CHROMA_1": "chroma",
    "QWEN": "qwen",
    "Z_IMAGE": "zimage",
    "STABLE_DIFFUSION_35": "sd3",
    "STABLE_DIFFUSION_3": "sd3",
    "STABLE_DIFFUSION_21": "sd2",
    "STABLE_DIFFUSION_20": "sd2",
}
STEPS = {"sdxl": 64, "sd15": 8, "sd2": 8}
"""`aspect_bucketing_quantization` of its data loaders where it is not 64."""


def resolve(file: Path) -> Numbers:
    """Return the numbers of a settings file or preset."""
    from modules.util.config.TrainConfig import TrainConfig
    from modules.util.enum.ModelType import PeftType

    data = json.loads(file.read_text(encoding="utf-8"))
    config = TrainConfig.default_values()
    data.setdefault("__version", config.config_version)  # as its loader does for built-in presets
    config = config.from_dict(data)
    config.masked_training = False  # it weighs positions, not noise levels
    family = FAMILIES[str(config.model_type)]
    rank = {PeftType.LOKR: config.lokr_dim, PeftType.OFT_2: config.oft_block_size}
    denoiser = config.unet if family in ("sdxl", "sd15", "sd2") else config.transformer
    text = [part for part in (config.text_encoder, config.text_encoder_2) if part.train]
    numbers: Numbers = {
        "family": family,
        "rank": rank.get(config.peft_type, config.lora_rank),
        "rate": _rate(config, denoiser),
        "batch": [config.batch_size, config.gradient_accumulation_steps],
        **_noise_and_errors(config, family),
        **_length(config, data, file),
    }
    if config.peft_type != PeftType.OFT_2:
        numbers["alpha"] = config.lora_alpha
    if family in ("sdxl", "sd15", "sd2"):
        numbers["text_encoder_rate"] = _rate(config, text[0]) if text else None
    if (
        config.aspect_ratio_bucketing
        and "," not in config.resolution
        and "x" not in config.resolution
    ):
        numbers["buckets"] = _buckets(config, STEPS.get(family, 64))
    return numbers


def _rate(config: Any, part: Any) -> float:
    from modules.util.NamedParameterGroup import NamedParameterGroup, NamedParameterGroupCollection

    groups = NamedParameterGroupCollection()
    groups.add_group(
        NamedParameterGroup("part", [nn.Parameter(torch.zeros(1))], part.learning_rate)
    )
    return float(groups.parameters_for_optimizer(config)[0]["lr"])


def _length(config: Any, data: dict[str, Any], file: Path) -> Numbers:
    from modules.util.create import create_lr_scheduler

    concepts = data.get("concepts") or []
    if [concept.get("path") for concept in concepts] != ["images"] or not (
        file.parent / "images"
    ).is_dir():
        return {}
    batches = (
        int(IMAGES * concepts[0].get("balancing", 1.0)) // config.batch_size
    )  # MGDS.approximate_length
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = create_lr_scheduler(
        config=config,
        optimizer=optimizer,
        learning_rate_scheduler=config.learning_rate_scheduler,
        warmup_steps=config.learning_rate_warmup_steps,
        num_cycles=config.learning_rate_cycles,
        min_factor=config.learning_rate_min_factor,
        num_epochs=config.epochs,
        batch_size=config.batch_size,
        approximate_epoch_length=batches,
        gradient_accumulation_steps=config.gradient_accumulation_steps,
    )
    steps = int(batches * config.epochs / config.gradient_accumulation_steps)
    return {"steps": steps, "curve": walked(optimizer, schedule, steps)}


def _noise_and_errors(config: Any, family: str) -> Numbers:
    from diffusers import DDPMScheduler
    from modules.modelSetup.mixin.ModelSetupDiffusionLossMixin import ModelSetupDiffusionLossMixin
    from modules.modelSetup.mixin.ModelSetupNoiseMixin import ModelSetupNoiseMixin

    class Noise(ModelSetupNoiseMixin): ...

    class Loss(ModelSetupDiffusionLossMixin): ...

    is_flow = family not in ("sdxl", "sd15", "sd2")
    shift = config.timestep_shift
    if is_flow and config.dynamic_timestep_shifting:
        shift = _dynamic_shift(config, family)
    drawn = Noise()._get_timestep_discrete(
        1000, False, torch.Generator().manual_seed(0), DRAWS, config, shift=shift
    )
    betas = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear").betas
    errors = []
    for level in LEVELS:
        for difference in DIFFERENCES:
            batch = {"loss_weight": torch.ones(1)}
            step = torch.tensor([int(1000 * level)])
            data = {
                "loss_type": "target",
                "predicted": torch.full((1, 1, 1, 1), difference),
                "target": torch.zeros(1, 1, 1, 1),
                "timestep": step,
                "prediction_type": "epsilon",
            }
            loss = Loss()
            if is_flow:
                losses = loss._flow_matching_losses(
                    batch, data, config, torch.device("cpu"), torch.linspace(0, 1, 1000)
                )
            else:
                losses = loss._diffusion_losses(batch, data, config, torch.device("cpu"), betas)
            errors.append(float(losses.mean()))
    return {"noise": quantiles(drawn.float().tolist()), "errors": errors}


def _dynamic_shift(config: Any, family: str) -> float:
    """Its formula on the facts of the release's own scheduler."""
    import importlib

    from scripts.trainers.measured import facts_of

    names = {
        "flux": "Flux",
        "flux2": "Flux2",
        "chroma": "Chroma",
        "qwen": "Qwen",
        "zimage": "ZImage",
    }
    module = importlib.import_module(f"modules.model.{names[family]}Model")
    model = getattr(module, f"{names[family]}Model")
    scheduler = SimpleNamespace(config=SimpleNamespace(**facts_of(family).release.scheduler))
    side = int(config.resolution) // 8
    return float(
        model.calculate_timestep_shift(SimpleNamespace(noise_scheduler=scheduler), side, side)
    )


def _buckets(config: Any, step: int) -> list[list[int]]:
    from mgds.pipelineModules.AspectBucketing import AspectBucketing

    bucketing = AspectBucketing(
        quantization=step,
        resolution_in_name="in",
        target_resolution_in_name="target",
        enable_target_resolutions_override_in_name=None,
        target_resolutions_override_in_name=None,
        target_frames_in_name="frames",
        frame_dim_enabled=False,
        scale_resolution_out_name="scale",
        crop_resolution_out_name="crop",
        possible_resolutions_out_name="possible",
    )
    items = {"target": config.resolution, "frames": "1"}
    bucketing._get_previous_length = lambda _name: 1
    bucketing._get_rand = lambda *_: None
    placed = []
    for width, height in SIZES:
        items["in"] = (height, width)
        bucketing._get_previous_item = lambda _variation, name, _index: items[name]
        bucketing.start(0)
        choice = SimpleNamespace(choice=lambda several: several[0])
        bucketing._get_rand = lambda *_, one=choice: one
        high, wide = bucketing.get_item(0, 0)["crop"]
        placed.append([int(wide), int(high)])
    return placed


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    mocked("torchvision", "av", "nvidia", "parse")
    sys.path[:0] = [str(given.checkout), str(given.checkout.parent / "mgds" / "src")]
    sys.argv = sys.argv[:1]
    run(resolve, name="OneTrainer", commit=given.commit, files=given.files, write=given.write)

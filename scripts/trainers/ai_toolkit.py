"""Settings as ai-toolkit resolves them: `python -m scripts.trainers.ai_toolkit --checkout DIR --commit SHA`.

Its configuration classes, its schedules, its scheduler of timesteps, its buckets, and, as its training step is one
long method, the statements of that method that draw timesteps and that weigh the loss, taken from its source.
"""

from __future__ import annotations

import copy
import random
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from scripts.trainers.measured import (
    DIFFERENCES,
    LEVELS,
    SIZES,
    Numbers,
    arguments,
    mocked,
    quantiles,
    run,
    statements,
    walked,
)

FAMILIES = {
    "flux": "flux",
    "qwen_image": "qwen",
    "zimage": "zimage",
    "sdxl": "sdxl",
    "sd3": "sd3",
    "chroma": "chroma",
}
STEPS = {"flux": 16, "qwen": 32, "zimage": 16, "chroma": 32, "sd3": 16, "sdxl": 8}
"""`get_bucket_divisibility` of its model classes, which load too much to be imported."""
BATCH = 20_000


def resolve(file: Path) -> Numbers:
    """Return the numbers of a job's one process."""
    import yaml
    from toolkit import buckets
    from toolkit.config_modules import (
        DatasetConfig,
        ModelConfig,
        NetworkConfig,
        TrainConfig,
        preprocess_dataset_raw_config,
    )
    from toolkit.scheduler import get_lr_scheduler

    process = yaml.safe_load(file.read_text(encoding="utf-8"))["config"]["process"][0]
    train_config = TrainConfig(**copy.deepcopy(process["train"]))
    model = ModelConfig(**copy.deepcopy(process["model"]))
    family = FAMILIES[str(model.arch).partition(":")[0]]
    network = NetworkConfig(**copy.deepcopy(process["network"]))
    dataset = DatasetConfig(**preprocess_dataset_raw_config(process["datasets"])[0])
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    parameters = {"total_iters": train_config.steps, **train_config.lr_scheduler_params}
    schedule = get_lr_scheduler(train_config.lr_scheduler, optimizer, **parameters)
    rate = float(train_config.lr)
    placed = [
        buckets.get_bucket_for_image_size(
            *size, resolution=dataset.resolution, divisibility=STEPS[family]
        )
        for size in SIZES
    ]
    numbers: Numbers = {
        "family": family,
        "rank": network.linear,
        "alpha": network.linear_alpha,
        "rate": rate,  # networks take `lr` alone: BaseSDTrainProcess, prepare_optimizer_params
        "text_encoder_rate": rate if train_config.train_text_encoder and family == "sdxl" else None,
        "batch": [
            train_config.batch_size,
            max(train_config.gradient_accumulation, train_config.gradient_accumulation_steps),
        ],
        "steps": train_config.steps,
        "curve": walked(optimizer, schedule, train_config.steps),
        "buckets": [[bucket["width"], bucket["height"]] for bucket in placed],
        **_noise_and_errors(train_config, model, family, dataset.resolution),
    }
    if family == "sdxl":
        numbers |= {"conv_rank": network.conv, "conv_alpha": network.conv_alpha}
    return numbers


def _noise_and_errors(config: Any, model: Any, family: str, side: int) -> Numbers:
    from toolkit.sampler import get_sampler
    from toolkit.train_tools import apply_snr_weight

    torch.manual_seed(0)
    is_flow = family != "sdxl"
    kind = {"flux": "flux", "sdxl": "sd"}.get(family, "sd")
    scheduler = get_sampler("flowmatch" if is_flow else "ddpm", {}, kind)
    timesteps: list[float] = []
    for _ in range(20):  # a sigmoid's 1,000 timesteps are drawn anew for every batch
        place = _draw(config, model, scheduler, side, is_flow=is_flow)
        timesteps += place["timesteps"].tolist()
    weigh, loss_of = _losses()
    errors = []
    for level in LEVELS:
        for difference in DIFFERENCES:
            step = scheduler.timesteps[
                (scheduler.timesteps.float() - 1000 * level).abs().argmin()
            ].view(1)
            scope = {
                "self": SimpleNamespace(
                    train_config=config,
                    snr_gos=None,
                    sd=SimpleNamespace(
                        noise_scheduler=scheduler, is_flow_matching=is_flow, scale_loss=lambda x: x
                    ),
                ),
                "pred": torch.full((1, 1, 1, 1), difference),
                "target": torch.zeros(1, 1, 1, 1),
                "torch": torch,
                "timesteps": step,
                "local_loss_scale": 1.0,
                "ignore_snr": is_flow,
                "prior_loss": None,
                "apply_snr_weight": apply_snr_weight,
            }
            exec(loss_of, scope)  # the trainer's own statements, at the commit that was asked for
            exec(weigh, scope)
            errors.append(float(scope["loss"].mean()))  # type: ignore[attr-defined] # set by what was run
    return {"noise": quantiles(timesteps), "errors": errors}


def _draw(config: Any, model: Any, scheduler: Any, side: int, *, is_flow: bool) -> dict[str, Any]:
    from toolkit.basic import value_map

    sd = SimpleNamespace(
        noise_scheduler=scheduler,
        is_flux=model.is_flux,
        arch=str(model.arch),
        is_multistage=False,
        unet=SimpleNamespace(config=SimpleNamespace(patch_size=2)),
    )
    settings = copy.copy(config)
    settings.noise_scheduler = "flowmatch" if is_flow else "ddpm"
    owner = SimpleNamespace(
        train_config=settings,
        model_config=model,
        sd=sd,
        device_torch=torch.device("cpu"),
        timer=lambda _name: nullcontext(),
        current_boundary_index=0,
    )
    scope: dict[str, Any] = {
        "self": owner,
        "torch": torch,
        "random": random,
        "value_map": value_map,
        "is_reg": False,
        "batch": SimpleNamespace(file_items=[None] * 1000),
        "latents": torch.zeros(1, 16, side // 8, side // 8),
    }
    exec(_drawing(), scope)
    return scope


def _drawing() -> Any:
    return statements(
        CHECKOUT,
        "jobs/process/BaseSDTrainProcess.py",
        lambda text: text.startswith("with self.timer('prepare_scheduler')"),
        lambda text: text.startswith("with self.timer('convert_timestep_indices_to_timesteps')"),
    )


def _losses() -> tuple[Any, Any]:
    file = "extensions_built_in/sd_trainer/SDTrainer.py"
    loss = statements(
        CHECKOUT,
        file,
        lambda text: text.startswith("if self.train_config.loss_type == 'pseudo_huber'"),
        lambda text: text.startswith("if do_weighted_timesteps"),
    )
    weigh = statements(
        CHECKOUT,
        file,
        lambda text: text.startswith("if self.train_config.learnable_snr_gos"),
        lambda text: text.startswith("if self.train_config.learnable_snr_gos"),
    )
    return weigh, loss


CHECKOUT = Path()
if __name__ == "__main__":
    given = arguments(__doc__ or "")
    CHECKOUT = given.checkout
    mocked(
        "torchvision",
        "torchao",
        "av",
        "torchaudio",
        "toolkit.prompt_utils",
        "toolkit.pipelines",
        "toolkit.stable_diffusion_model",
        "k_diffusion",
    )
    sys.path.insert(0, str(given.checkout))
    sys.argv = sys.argv[:1]
    run(resolve, name="ai-toolkit", commit=given.commit, files=given.files, write=given.write)

"""Settings as diffusion-pipe resolves them: `python -m scripts.trainers.diffusion_pipe --checkout DIR --commit SHA`.

Its defaults, parameter groups, schedules, draws of timesteps, losses and buckets, taken from its source: its
modules need DeepSpeed and ComfyUI.
"""

from __future__ import annotations

import tomllib
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from scripts.trainers.measured import (
    DIFFERENCES,
    DRAWS,
    IMAGES,
    LEVELS,
    SIZES,
    Numbers,
    arguments,
    function,
    quantiles,
    run,
    statements,
    walked,
)

FAMILIES = {
    "sdxl": "sdxl",
    "flux": "flux",
    "flux2": "flux2",
    "chroma": "chroma",
    "sd3": "sd3",
    "qwen_image": "qwen",
    "z_image": "zimage",
}
CHECKOUT = Path()


def resolve(file: Path) -> Numbers:
    """Return the numbers of a training file and of the dataset file that it names."""
    config = tomllib.loads(file.read_text(encoding="utf-8"))
    scope: dict[str, Any] = {"DTYPE_MAP": defaultdict(lambda: torch.float32)}
    function(CHECKOUT, "train.py", "set_config_defaults", scope)(config)
    dataset = tomllib.loads((file.parent / config["dataset"]).read_text(encoding="utf-8"))
    kind = config["model"]["type"]
    rates = _rates(config, kind)
    numbers: Numbers = {
        "family": FAMILIES[kind],
        "rank": config["adapter"]["rank"],
        "alpha": config["adapter"]["alpha"],
        "text_encoder_rate": rates[1] if kind == "sdxl" and rates[1] else None,
        "batch": [
            config.get("micro_batch_size_per_gpu", 1),
            config.get("gradient_accumulation_steps", 1),
        ],
        "buckets": _buckets(dataset),
        **_noise_and_errors(config, kind, dataset),
        **_length(config, dataset, file),
    }
    return numbers if rates[0] is None else {**numbers, "rate": rates[0]}


def _rates(config: dict[str, Any], kind: str) -> list[Any]:
    if kind != "sdxl":
        return [config["optimizer"].get("lr"), None]
    grouped = function(
        CHECKOUT, "models/sdxl.py", "get_param_groups", {"is_main_process": lambda: False}
    )
    owner = SimpleNamespace(config=config, model_config=config["model"])
    names = ("unet.", "text_encoder.", "text_encoder_2.")
    groups = grouped(owner, [SimpleNamespace(original_name=name) for name in names])
    return [group.get("lr") for group in groups]


def _length(config: dict[str, Any], dataset: dict[str, Any], file: Path) -> Numbers:
    scheduling = statements(
        CHECKOUT,
        "train.py",
        lambda text: text.startswith("scheduler_type = config.get"),
        lambda text: text.startswith("if config['warmup_steps'] > 0"),
    )
    (directory,) = dataset["directory"][:1]
    sides = len(directory.get("resolutions", dataset.get("resolutions", [1])))
    images = IMAGES * directory.get("num_repeats", 1) * sides
    if not (file.parent / directory["path"]).is_dir():
        images = 0
    together = config.get("micro_batch_size_per_gpu", 1) * config.get(
        "gradient_accumulation_steps", 1
    )
    per_epoch = images // together
    steps = (
        config.get("max_steps")
        if not images
        else min(config["epochs"] * per_epoch, config.get("max_steps", 10**9))
    )
    if not steps:
        return {}
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scope = {"config": config, "torch": torch, "optimizer": optimizer, "steps_per_epoch": per_epoch}
    constant = config.get("lr_scheduler", "constant") == "constant"
    if not constant and not per_epoch:
        return {"steps": steps}
    exec(scheduling, scope)  # the trainer's own statements, at the commit that was asked for
    return {"steps": steps, "curve": walked(optimizer, scope["lr_scheduler"], steps)}


def _noise_and_errors(config: dict[str, Any], kind: str, dataset: dict[str, Any]) -> Numbers:
    torch.manual_seed(0)
    side = (dataset.get("resolutions") or [1024])[0] // (16 if kind == "flux2" else 8)
    common: dict[str, Any] = {"math": __import__("math"), "torch": torch}
    scope: dict[str, Any] = {
        "torch": torch,
        "self": SimpleNamespace(
            model_config=config["model"],
            scheduler=SimpleNamespace(config=SimpleNamespace(num_train_timesteps=1000)),
        ),
        "latents": torch.zeros(1),
        "device": torch.device("cpu"),
        "bs": DRAWS,
        "h": side,
        "w": side,
        "timestep_quantile": None,
        "get_lin_function": function(CHECKOUT, "utils/common.py", "get_lin_function", common),
        "time_shift": function(CHECKOUT, "utils/common.py", "time_shift", common),
    }
    first, last = ("timestep_sample_method =", "if (shift :=")
    if kind == "sdxl":
        first, last = "min_timestep =", "if timestep_quantile"
    code = statements(
        CHECKOUT,
        f"models/{kind}.py",
        lambda text: text.startswith(first),
        lambda text: text.startswith(last),
    )
    exec(code, scope)
    drawn = scope["timesteps"] if kind == "sdxl" else 1000 * scope["t"]
    return {"noise": quantiles(drawn.tolist()), "errors": _errors(config, kind)}


def _errors(config: dict[str, Any], kind: str) -> list[float]:
    from diffusers import DDPMScheduler

    scope: dict[str, Any] = {"torch": torch, "F": F}
    owner = SimpleNamespace(config=config)
    if kind == "sdxl":
        scheduler = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")
        function(CHECKOUT, "models/sdxl.py", "prepare_scheduler_for_custom_training", scope)(
            scheduler
        )
        for name in ("apply_snr_weight", "apply_debiased_estimation"):
            function(CHECKOUT, "models/sdxl.py", name, scope)
        model = config["model"]
        owner = SimpleNamespace(
            config=config,
            scheduler=scheduler,
            v_pred=model.get("v_pred", False),
            min_snr_gamma=model.get("min_snr_gamma"),
            debiased_estimation_loss=model.get("debiased_estimation_loss"),
        )
    file = "models/sdxl.py" if kind == "sdxl" else "models/base.py"
    loss = function(CHECKOUT, file, "get_loss_fn", scope)(owner)
    errors = []
    for level in LEVELS:
        for difference in DIFFERENCES:
            output: Any = torch.full((1, 1, 1, 1), difference)
            output = (output, torch.tensor([int(1000 * level)])) if kind == "sdxl" else output
            errors.append(float(loss(output, (torch.zeros(1, 1, 1, 1), torch.zeros(0)))))
    return errors


def _buckets(dataset: dict[str, Any]) -> list[list[int]]:
    directory = {
        **{key: value for key, value in dataset.items() if key != "directory"},
        **dataset["directory"][0],
    }
    common: dict[str, Any] = {"math": __import__("math"), "np": np}
    code = statements(
        CHECKOUT,
        "utils/dataset.py",
        lambda text: text.startswith("area = res"),
        lambda text: text.startswith("h = round_to_nearest_multiple"),
    )
    rounded = function(CHECKOUT, "utils/common.py", "round_to_nearest_multiple", common)
    closest = function(CHECKOUT, "utils/dataset.py", "_find_closest_ar_bucket", common)
    ars = np.array([1.0])
    if directory.get("enable_ar_bucket"):
        ars = np.geomspace(
            directory["min_ar"], directory["max_ar"], num=directory["num_ar_buckets"]
        )
    owner = SimpleNamespace(ars=ars, log_ars=np.log(ars), frame_buckets=np.array([1]))
    placed = []
    for width, height in SIZES:
        ar_frames = closest(owner, np.log(width / height), 1, False)
        scope = {
            "res": directory["resolutions"][0],
            "math": common["math"],
            "round_to_nearest_multiple": rounded,
            "self": SimpleNamespace(ar_frames=ar_frames, round_to_multiple=STEP),
        }
        exec(code, scope)
        placed.append([int(scope["w"]), int(scope["h"])])
    return placed


STEP = 32
"""`round_to_multiple` of its datasets."""
if __name__ == "__main__":
    given = arguments(__doc__ or "")
    CHECKOUT = given.checkout
    run(resolve, name="diffusion-pipe", commit=given.commit, files=given.files, write=given.write)

"""Settings as sd-scripts resolves them: `python -m scripts.trainers.sd_scripts --checkout DIR --commit SHA`.

Its parsers, its networks on a small U-Net with its class names, its schedules, its draws of timesteps, its
losses and its bucket manager. Needs toml, imagesize, voluptuous and opencv besides what is installed here.
"""

from __future__ import annotations

import importlib
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
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

PIPELINES = ("library.lpw_stable_diffusion", "library.sdxl_lpw_stable_diffusion")
"""Import names for sample images that transformers 5 no longer has."""


def resolve(file: Path) -> Numbers:
    """Return the numbers of a training file."""
    import toml

    named = toml.load(file)
    flat = {
        key
        for name, value in named.items()
        for key in (value if isinstance(value, dict) else {name: 0})
    }
    if "datasets" in named:
        raise ValueError("is a dataset file")
    kind = (
        "sd3"
        if "training_shift" in flat or "sd3" in str(named)
        else "flux"
        if flat & {"ae", "t5xxl", "guidance_scale"}
        else "sdxl"
    )
    return numbers_of(arguments_of(file, kind), kind)


def arguments_of(file: Path, kind: str, more: Sequence[str] = ()) -> Namespace:
    """Return the arguments of a file, and more of its command, for a base of flux, sd3 or sdxl."""
    from library import train_util

    parser = importlib.import_module(f"{kind}_train_network").setup_parser()
    sys.argv = ["train", "--config_file", str(file), *more]
    args: Namespace = train_util.read_config_from_file(parser.parse_args(), parser)
    return args


def numbers_of(args: Namespace, kind: str) -> Numbers:
    """Return the numbers of parsed arguments for a base of flux, sd3 or sdxl."""
    size = [int(part) for part in str(args.resolution or 512).split(",")]
    width, height = size[0], size[-1]
    numbers: Numbers = {
        "family": kind,
        **_network(args, kind),
        "batch": [args.train_batch_size, args.gradient_accumulation_steps],
        **_noise_and_errors(args, kind, width, height),
    }
    if args.dataset_config is None and args.resolution is not None:
        numbers["buckets"] = _buckets(args, width, height)
    if args.max_train_epochs is None:
        numbers["steps"] = args.max_train_steps
        if not (args.lr_scheduler == "constant" and args.lr_warmup_steps):  # is refused there
            numbers["curve"] = _curve(args)
    return numbers


class Transformer2DModel(nn.Module):
    """A module in which its networks look for Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(640, 640)


class ResnetBlock2D(nn.Module):
    """A module in which its networks look for convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(640, 640, 3)


class CLIPAttention(nn.Module):
    """A module in which its networks look for the text encoder's layers."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(640, 640)


def _network(args: Namespace, kind: str) -> Numbers:
    import networks.lora as lora

    name = args.network_module or "networks.lora"
    options = dict(part.split("=", 1) for part in args.network_args or [])
    unet, text = (
        nn.Sequential(Transformer2DModel(), ResnetBlock2D()),
        nn.Sequential(CLIPAttention()),
    )
    if kind == "sdxl" and name.startswith("lycoris"):
        lora = importlib.import_module(name)
    options.setdefault("dropout", args.network_dropout) if "dropout" not in options else None
    if kind != "sdxl" or name not in ("networks.lora", "lycoris.kohya"):
        lora = importlib.import_module("networks.lora")
        options = {
            key: value
            for key, value in options.items()
            if key in ("conv_dim", "conv_alpha") and kind == "sdxl"
        }
    if lora.__name__ == "networks.lora":
        options["neuron_dropout"] = args.network_dropout
        options.pop("dropout", None)
    network = lora.create_network(
        1.0, args.network_dim, args.network_alpha, None, text, unet, **options
    )
    layers = list(network.unet_loras)
    linear = next(layer for layer in layers if layer.lora_name.endswith("proj"))
    convolution = next((layer for layer in layers if layer.lora_name.endswith("conv")), None)
    trains_text = not args.network_train_unet_only
    network.apply_to(text, unet, trains_text, True)
    rates = args.text_encoder_lr
    text_rate = (rates[0] if rates else None) if isinstance(rates, list) else rates
    groups = network.prepare_optimizer_params(text_rate, args.unet_lr, args.learning_rate)
    groups = groups[0] if isinstance(groups, tuple) else groups
    owner = {id(p): "text" for layer in network.text_encoder_loras for p in layer.parameters()}
    found: dict[str, float] = {}
    for group in groups:
        params = group["params"] if isinstance(group, dict) else [group]
        for parameter in params:
            rate = (
                group.get("lr", args.learning_rate)
                if isinstance(group, dict)
                else args.learning_rate
            )
            found[owner.get(id(parameter), "unet")] = args.learning_rate if rate is None else rate

    def rank(layer: Any) -> Any:
        return None if layer is None else layer.lora_dim

    def alpha(layer: Any) -> Any:
        return None if layer is None else float(layer.scale) * layer.lora_dim

    has_rank = hasattr(linear, "lora_dim")  # a rotation has blocks, IA3 has factors
    dims = {"rank": rank(linear), "alpha": alpha(linear)} if has_rank else {}
    if kind == "sdxl" and has_rank:
        dims |= {"conv_rank": rank(convolution), "conv_alpha": alpha(convolution)}
    text_trained = kind == "sdxl" and trains_text and bool(found.get("text"))
    return {
        **dims,
        "rate": found["unet"],
        "text_encoder_rate": found["text"] if text_trained else None,
    }


def _curve(args: Namespace) -> list[float]:
    from library import train_util

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = train_util.get_scheduler_fix(args, optimizer, 1)
    return walked(optimizer, schedule, args.max_train_steps)


def _noise_and_errors(args: Namespace, kind: str, width: int, height: int) -> Numbers:
    torch.manual_seed(0)
    if kind == "sdxl":
        return _table(args)
    from library import flux_train_utils, sd3_train_utils
    from library.train_util import conditional_loss

    shift = args.training_shift if kind == "sd3" else args.discrete_flow_shift
    scheduler = sd3_train_utils.FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000, shift=shift
    )
    util: Any = sd3_train_utils if kind == "sd3" else flux_train_utils
    latents = torch.zeros(1, 16, height // 8, width // 8)
    sigmas: list[float] = []
    if kind == "flux" and args.timestep_sampling != "flux_shift" or kind == "sd3":
        latents = torch.zeros(DRAWS, 1, 2, 2)
    else:
        latents = torch.zeros(1, 1, height // 8, width // 8).expand(DRAWS, -1, -1, -1)
        latents = _Shaped(DRAWS, height // 8, width // 8)  # type: ignore[assignment] # only its shape is read
    drawn = util.get_noisy_model_input_and_timesteps(
        args, scheduler, latents, torch.zeros(1, 1, 1, 1), torch.device("cpu"), torch.float32
    )
    sigmas = drawn[2].flatten().tolist()
    errors = []
    for sigma in LEVELS:
        level = torch.tensor([sigma]).view(1, 1, 1, 1)
        weight = (
            sd3_train_utils.compute_loss_weighting_for_sd3(args.weighting_scheme, level)
            if kind == "sd3"
            else None
        )
        for difference in DIFFERENCES:
            predicted = torch.full((1, 1, 1, 1), difference)
            if kind == "flux":
                predicted, weight = flux_train_utils.apply_model_prediction_type(
                    args, predicted, torch.zeros(1, 1, 1, 1), level
                )
            from library.train_util import get_huber_threshold_if_needed

            delta = get_huber_threshold_if_needed(args, torch.tensor([sigma * 1000]), scheduler)
            loss = conditional_loss(
                predicted, torch.zeros(1, 1, 1, 1), args.loss_type, "none", delta
            )
            errors.append(float(loss * (1 if weight is None else weight)))
    return {"noise": quantiles([1000 * sigma for sigma in sigmas]), "errors": errors}


class _Shaped(torch.Tensor):
    """A tensor of one number that says it is a batch of latents, of which only the shape is read."""

    def __new__(cls, count: int, height: int, width: int) -> Any:
        return torch.zeros(1).expand(count, 1, height, width)


def _table(args: Namespace) -> Numbers:
    from diffusers import DDPMScheduler
    from library import custom_train_functions as weights
    from library import train_util

    scheduler = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", num_train_timesteps=1000
    )
    weights.prepare_scheduler_for_custom_training(scheduler, torch.device("cpu"))
    plain = Namespace(
        **{
            **vars(args),
            "noise_offset": None,
            "multires_noise_iterations": None,
            "ip_noise_gamma": None,
        }
    )
    timesteps = train_util.get_noise_noisy_latents_and_timesteps(
        plain, scheduler, torch.zeros(DRAWS, 1, 1, 1)
    )[2]
    errors = []
    for level in LEVELS:
        step = torch.tensor([int(1000 * level)])
        delta = train_util.get_huber_threshold_if_needed(args, step, scheduler)
        for difference in DIFFERENCES:
            loss = train_util.conditional_loss(
                torch.full((1, 1), difference), torch.zeros(1, 1), args.loss_type, "none", delta
            )
            if args.min_snr_gamma:
                loss = weights.apply_snr_weight(
                    loss, step, scheduler, args.min_snr_gamma, args.v_parameterization
                )
            if args.debiased_estimation_loss:
                loss = weights.apply_debiased_estimation(
                    loss, step, scheduler, args.v_parameterization
                )
            errors.append(float(loss))
    return {"noise": quantiles(timesteps.tolist()), "errors": errors}


def _buckets(args: Namespace, width: int, height: int) -> list[list[int]]:
    from library.train_util import BucketManager

    if not args.enable_bucket:
        return [[width, height] for _ in SIZES]
    manager = BucketManager(
        args.bucket_no_upscale,
        (width, height),
        args.min_bucket_reso,
        args.max_bucket_reso,
        args.bucket_reso_steps,
    )
    if not args.bucket_no_upscale:
        manager.make_buckets()
    return [list(manager.select_bucket(*size)[0]) for size in SIZES]


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    mocked("torchvision", "pytorch_lightning", *PIPELINES)
    sys.path.insert(0, str(given.checkout))
    sys.argv = sys.argv[:1]
    run(resolve, name="sd-scripts", commit=given.commit, files=given.files, write=given.write)

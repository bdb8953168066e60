"""Settings as musubi-tuner resolves them: `python -m scripts.trainers.musubi --checkout DIR --commit SHA`.

Its parser, its network, its schedules, its draws of timesteps, its loss weights and its buckets.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

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

FAMILIES = {"lora_qwen_image": "qwen", "lora_zimage": "zimage", "lora_flux_2": "flux2"}


class Block(nn.Module):
    """A module in which its networks look for Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(8, 8)


def resolve(file: Path) -> Numbers:
    """Return the numbers of a training file and of the dataset file that it names."""
    import toml
    from musubi_tuner.networks import lora
    from musubi_tuner.training import parser_common

    parser = parser_common.setup_parser_common()
    for name in ("--dit_dtype", "--text_encoder", "--model_version"):
        parser.add_argument(name)
    for name in ("--fp8_scaled", "--fp8_vl", "--edit", "--edit_plus"):
        parser.add_argument(name, action="store_true")
    sys.argv = ["train", "--config_file", str(file)]
    args = parser_common.read_config_from_file(parser.parse_args(), parser)
    network = lora.create_network(
        ["Block"],
        "lora_unet",
        1.0,
        args.network_dim,
        args.network_alpha,
        None,
        [],
        nn.Sequential(Block()),
    )
    layer = network.unet_loras[0]
    groups, _ = network.prepare_optimizer_params(unet_lr=args.learning_rate)
    data = toml.load(file.parent / args.dataset_config)
    dataset = {**data.get("general", {}), **data["datasets"][0]}
    return {
        "family": FAMILIES[args.network_module.rpartition(".")[2]],
        "rank": layer.lora_dim,
        "alpha": float(layer.scale) * layer.lora_dim,
        "rate": groups[0]["lr"],
        "text_encoder_rate": None,
        "batch": [dataset.get("batch_size", 1), args.gradient_accumulation_steps],
        "steps": args.max_train_steps,
        "curve": _curve(args),
        "buckets": _buckets(dataset, args.network_module),
        **_noise_and_errors(args, dataset),
    }


def _size(dataset: dict[str, object]) -> tuple[int, int]:
    size = dataset.get("resolution", (960, 544))
    return (size, size) if isinstance(size, int) else tuple(size)  # type: ignore[arg-type,return-value] # as its files have it


def _curve(args: Namespace) -> list[float]:
    from musubi_tuner.training.trainer_base import NetworkTrainer

    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = NetworkTrainer().get_lr_scheduler(args, optimizer, 1)
    return walked(optimizer, schedule, args.max_train_steps)


def _noise_and_errors(args: Namespace, dataset: dict[str, object]) -> Numbers:
    from musubi_tuner.modules.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
    from musubi_tuner.training.timesteps import compute_loss_weighting_for_sd3
    from musubi_tuner.training.trainer_base import NetworkTrainer

    torch.manual_seed(0)
    width, height = _size(dataset)
    side = 16 if args.network_module.endswith("flux_2") else 8  # the size of one of its latents
    scheduler = FlowMatchDiscreteScheduler(
        shift=args.discrete_flow_shift, reverse=True, solver="euler"
    )
    levels: list[float] = []
    for _ in range(DRAWS // 1000):
        latents = torch.zeros(1, 1, height // side, width // side).expand(1000, -1, -1, -1)
        noisy, _ = NetworkTrainer().get_noisy_model_input_and_timesteps(
            args,
            torch.ones(1000, 1, 1, 1),
            latents,
            None,
            scheduler,
            torch.device("cpu"),
            torch.float32,
        )
        levels += (1000 * noisy[:, 0, 0, 0]).tolist()
    errors = []
    for level in LEVELS:
        step = torch.tensor([1000.0 * level])
        nearest = scheduler.timesteps[(scheduler.timesteps - step).abs().argmin()].view(1)
        weight = compute_loss_weighting_for_sd3(
            args.weighting_scheme, scheduler, nearest, torch.device("cpu"), torch.float32
        )
        errors += [
            d * d * (1.0 if weight is None else float(weight.flatten()[0])) for d in DIFFERENCES
        ]
    return {"noise": quantiles(levels), "errors": errors}


def _buckets(dataset: dict[str, object], module: str) -> list[list[int]]:
    from musubi_tuner.dataset import architectures, bucket

    name = {"lora_qwen_image": "QWEN_IMAGE", "lora_zimage": "Z_IMAGE", "lora_flux_2": "FLUX_2_DEV"}
    architecture = getattr(architectures, f"ARCHITECTURE_{name[module.rpartition('.')[2]]}")
    selector = bucket.BucketSelector(
        _size(dataset),
        bool(dataset.get("enable_bucket")),
        bool(dataset.get("bucket_no_upscale")),
        architecture,
    )
    return [list(map(int, selector.get_bucket_resolution(size))) for size in SIZES]


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    mocked("torchvision", "av", "decord")
    sys.path.insert(0, str(given.checkout / "src"))
    sys.argv = sys.argv[:1]
    run(resolve, name="musubi-tuner", commit=given.commit, files=given.files, write=given.write)

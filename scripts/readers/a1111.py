"""What A1111's web UI makes of exported files: `python -m scripts.readers.a1111 --checkout DIR --commit SHA`.

Runs its built-in Lora extension on the CPU: its name conversion, its modules, its weight patching.
"""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from scripts.readers.cases import Reading, arguments, run
from scripts.readers.networks import Base
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name

OPEN_CLIP = {"sd2": ("text_encoder", ""), "sdxl": ("text_encoder_2", "1_")}
CLIP = {"sd15": "text_encoder", "sdxl": "text_encoder"}


def read(file: Path, base: Base) -> Reading:
    """Patch a base as a prompt with <lora:...> does."""
    import networks  # type: ignore[import-not-found]
    from modules import shared  # type: ignore[import-not-found]

    if base.family.name not in ("sd15", "sd2", "sdxl"):
        return Reading(refused="A1111 has no such model")
    shared.sd_model = model = _model(base)
    networks.assign_network_names_to_compvis_modules(model)
    errors = _Failures()
    networks.extra_network_lora = SimpleNamespace(errors=errors)
    on_disk = SimpleNamespace(filename=str(file), metadata={}, name="a")
    failures = _Log()
    logging.getLogger().addHandler(failures)
    logging.getLogger().setLevel(logging.DEBUG)
    try:
        loaded: Any = networks.load_network("a", on_disk)
        networks.loaded_networks[:] = [loaded]
        for module in {*model.network_layer_mapping.values()}:
            kinds = (nn.Linear, nn.Conv2d, nn.MultiheadAttention)
            if isinstance(module, kinds) and not isinstance(
                module, nn.modules.linear.NonDynamicallyQuantizableLinear
            ):
                networks.network_apply_weights(module)
    except AssertionError as error:
        return Reading(refused=str(error))
    finally:
        logging.getLogger().removeHandler(failures)
    return Reading(unread=failures.messages, weights=_weights(base, model))


class _Failures(dict[str, int]):
    """Counts by network, as the extension keeps them."""


class _Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__(level=logging.DEBUG)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if (text := record.getMessage()).startswith("Network "):
            self.messages.append(text)


def _model(base: Base) -> Any:
    denoiser = Tree().hold(
        {f"diffusion_model.{name}": tensor for name, tensor in base.original().items()}
    )
    name = base.family.name
    clip: nn.Module = nn.Module()
    if name in CLIP:
        network = base.texts[CLIP[name]]
        clip = Tree().hold(
            {f"transformer.{clip_name(key)}": value for key, value in network.state_dict().items()}
        )
    if name == "sdxl":
        embedders = [_wrapped(clip), _wrapped(_open_clip(base.texts["text_encoder_2"]))]
        return SimpleNamespace(
            is_sdxl=True, model=denoiser, conditioner=SimpleNamespace(embedders=embedders)
        )
    if name == "sd2":
        clip = _open_clip(base.texts["text_encoder"])
    return SimpleNamespace(is_sdxl=False, model=denoiser, cond_stage_model=clip)


def _wrapped(network: nn.Module) -> Any:
    return SimpleNamespace(wrapped=network)


def _open_clip(clip: nn.Module) -> nn.Module:
    """OpenCLIP's text network: attention is torch's, with q, k and v in one matrix."""
    root = Tree()
    blocks = nn.ModuleList()
    state = {clip_name(name): tensor for name, tensor in clip.state_dict().items()}
    for number in range(clip.config.num_hidden_layers):
        at = f"text_model.encoder.layers.{number}."
        width = state[f"{at}self_attn.q_proj.weight"].shape[0]
        block = Tree()
        block.attn = nn.MultiheadAttention(width, 2)
        fused = [state[f"{at}self_attn.{part}_proj.weight"] for part in "qkv"]
        block.attn.in_proj_weight.data = torch.cat(fused)
        block.attn.out_proj.weight.data = state[f"{at}self_attn.out_proj.weight"].clone()
        block.mlp = Tree().hold(
            {
                "c_fc.weight": state[f"{at}mlp.fc1.weight"],
                "c_proj.weight": state[f"{at}mlp.fc2.weight"],
            }
        )
        blocks.append(block.requires_grad_(False))
    root.model = nn.Module()
    root.model.transformer = nn.Module()
    root.model.transformer.resblocks = blocks
    return root


def _weights(base: Base, model: Any) -> dict[str, Tensor]:
    patched = model.model.state_dict()
    found = {}
    for name, place in base.places.items():
        if name.endswith(".weight"):
            found[f"denoiser.{name.removesuffix('.weight')}"] = patched[
                f"diffusion_model.{place.name}"
            ]
    name = base.family.name
    if name in CLIP:
        clip = model.conditioner.embedders[0].wrapped if name == "sdxl" else model.cond_stage_model
        state = clip.state_dict()
        for key, _ in base.texts[CLIP[name]].named_parameters():
            if key.endswith(".weight"):
                found[f"{CLIP[name]}.{key.removesuffix('.weight')}"] = state[
                    f"transformer.{clip_name(key)}"
                ]
    if name in OPEN_CLIP:
        component = OPEN_CLIP[name][0]
        clip = model.conditioner.embedders[1].wrapped if name == "sdxl" else model.cond_stage_model
        names = [name for name, _ in base.texts[component].named_parameters()]
        prefix = next(name for name in names if "encoder.layers.0." in name).split(".0.")[0]
        for number, block in enumerate(clip.model.transformer.resblocks):
            at = f"{component}.{prefix}.{number}."
            for part, weight in zip("qkv", block.attn.in_proj_weight.chunk(3), strict=True):
                found[f"{at}self_attn.{part}_proj"] = weight
            found[f"{at}self_attn.out_proj"] = block.attn.out_proj.weight
            found[f"{at}mlp.fc1"] = block.mlp.c_fc.weight
            found[f"{at}mlp.fc2"] = block.mlp.c_proj.weight
    return {key: weight.detach() for key, weight in found.items()}


if __name__ == "__main__":
    given = arguments(__doc__ or "")
    stand_in("modules", "gradio")
    sys.path.insert(0, str(given.checkout / "extensions-builtin" / "Lora"))
    import modules.devices  # type: ignore[import-not-found]
    import modules.models.sd3.mmdit  # type: ignore[import-not-found]
    import modules.sd_models  # type: ignore[import-not-found]
    import modules.shared  # type: ignore[import-not-found]

    modules.models.sd3.mmdit.QkvLinear = type("QkvLinear", (), {})
    modules.devices.cpu, modules.devices.dtype = torch.device("cpu"), torch.float32
    modules.sd_models.read_state_dict = load_file
    modules.shared.walk_files = lambda *arguments, **options: []
    with TemporaryDirectory() as empty:
        modules.shared.cmd_opts = SimpleNamespace(lora_dir=empty, lyco_dir_backcompat=empty)
        run(read, name="A1111", commit=given.commit, only=given.family)

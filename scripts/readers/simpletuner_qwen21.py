"""Whether SimpleTuner's network of Qwen-Image 2.1 predicts what the trainer's predicts, alone and with a LoRA.

`python -m scripts.readers.simpletuner_qwen21 --checkout DIR --commit VERSION` with the unpacked wheel of SimpleTuner:
narrow random networks at several sizes and seeds, texts of unequal length in one batch here and one by one there, and a
random LoRA of every layer in diffusers' names, read by SimpleTuner's network. Its network began as diffusers' and has a
path of its own for texts without pictures. Printed is the largest difference relative to the largest prediction.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import (
    add_updates,
    batch_prediction,
    compare,
    start_simpletuner,
    training_network,
)
from scripts.readers.cases import arguments
from tests.fakes.adapters import adapter_for, export

NAME = "qwen21"
FAMILY = families.family(NAME)
CHANNELS, TEXT = 8, 24
SIZES = ((8, 8, (7, 12)), (12, 6, (1, 40)), (4, 10, (33, 33)))
"""Rows and columns of the image, and the lengths of two texts."""


def main() -> None:
    given = arguments(__doc__ or "")
    start_simpletuner(given)
    for seed, (rows, columns, lengths) in enumerate(SIZES):
        ours, theirs = _networks(seed)
        texts = [torch.randn(1, length, TEXT) for length in lengths]
        noisy, sigma = torch.randn(2, CHANNELS, rows, columns), torch.rand(2)
        title = f"{rows}x{columns}, texts of {lengths}"
        plain = batch_prediction(FAMILY, ours, noisy, sigma, texts)
        compare(title, plain, _theirs(theirs, noisy, sigma, texts))
        modules = FAMILY.lora_targets(ours, "all")
        tensors: AdapterTensors = adapter_for("denoiser", ours, modules, seed=seed)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "a.safetensors"
            export(file, tensors, name=NAME, format="diffusers", layers=layer_shapes(ours))
            theirs.load_lora_adapter(load_file(file), prefix="transformer")
        loaded = sum("lora_A" in name for name, _ in theirs.named_parameters())
        print(f"SimpleTuner's network loads {loaded} of {len(tensors)} layers")
        add_updates(tensors, ours)
        adapted = batch_prediction(FAMILY, ours, noisy, sigma, texts)
        compare(f"LoRA, {title}", adapted, _theirs(theirs, noisy, sigma, texts))
        change = float((adapted - plain).abs().max() / adapted.abs().max())
        print(f"the LoRA changes the prediction by up to {change:.2f} of the largest")


def _networks(seed: int) -> tuple[Any, Any]:
    """Return a random network of the trainer, and SimpleTuner's with its weights."""
    from simpletuner.helpers.models.qwen_image.transformer_21 import (  # type: ignore[import-not-found]  # the checkout's
        QwenImage21Transformer2DModel,
    )

    sizes = {
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "num_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "context_in_dim": TEXT,
        "axes_dims_rope": (4, 6, 6),
    }
    ours = training_network(FAMILY, sizes, seed=seed)
    theirs = QwenImage21Transformer2DModel(**sizes).eval()
    theirs.load_state_dict(ours.state_dict(), strict=True)
    return ours, theirs.requires_grad_(False)


def _theirs(network: Any, noisy: Tensor, sigma: Tensor, texts: list[Tensor]) -> Tensor:
    """Return SimpleTuner's velocity, with the inputs that its `_model_predict_21` gives."""
    answers = []
    for latents, level, text in zip(noisy, sigma, texts, strict=True):
        _, rows, columns = latents.shape
        with torch.no_grad():
            velocity = network(
                hidden_states=latents.flatten(1).T[None],
                encoder_hidden_states=text,
                timestep=level[None],
                img_shapes=[[(1, rows, columns)]],
                img_mask=torch.zeros(1, text.shape[1], dtype=torch.bool),
                return_dict=False,
            )[0]
        answers.append(velocity[0, -rows * columns :].T.unflatten(1, (rows, columns)))
    return torch.stack(answers)


if __name__ == "__main__":
    main()

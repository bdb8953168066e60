"""Whether SimpleTuner's own network of FLUX.3 Image Klein predicts what the trainer's predicts, base and distilled.

`python -m scripts.readers.simpletuner_flux3 --checkout DIR --commit VERSION` with the unpacked wheel of SimpleTuner (no
mirror has its source of that time) and the package einops: texts as it encodes them, narrow random networks at several
sizes and seeds, up to two reference images, texts of unequal windows in one batch here and one by one there, and a
random LoRA of every layer that is trained, in each format, by SimpleTuner's network or by diffusers' loader. Printed
is the largest difference relative to the largest value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer

from lora_trainer import families
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.tensors import AdapterTensors
from scripts.readers.beside import batch_prediction, compare, start_simpletuner, training_network
from scripts.readers.cases import arguments
from tests.fakes.adapters import adapter_for, export
from tests.fakes.family_bases import base_of, encoder_of, facts_of

NAME = "flux3"
FAMILY = families.family(NAME)
CHANNELS, TEXT = 8, 24
SIZES = ((8, 8, (80, 160)), (12, 6, (240, 80)), (4, 10, (80, 80)))
"""Rows and columns of the image, and the windows of two texts."""
REFERENCES: Sequence[tuple[tuple[int, int], ...]] = ((), ((6, 10),), ((6, 10), (12, 4)))
"""Rows and columns of reference images."""
PROMPTS = ("a red square", "", "a photo of the blue one, on the left, with a green roof " * 3)


def main() -> None:
    given = arguments(__doc__ or "")
    start_simpletuner(given)
    _compare_texts()
    for flow_map in (False, True):
        for seed, (rows, columns, windows) in enumerate(SIZES):
            for sizes in REFERENCES:
                ours, theirs = _networks(flow_map=flow_map, seed=seed, references=bool(sizes))
                told = _told(rows, columns, windows, sizes)
                title = (
                    f"{'distilled' if flow_map else 'base'}, {rows}x{columns}, texts of {windows}"
                )
                title += f", references of {sizes}" if sizes else ""
                compare(title, batch_prediction(FAMILY, ours, *told), _theirs(theirs, *told))
        _compare_adapters(flow_map=flow_map)


def _compare_texts() -> None:
    from simpletuner.helpers.models.flux3_image.text import (  # type: ignore[import-not-found]  # the checkout's
        encode_prompts,
    )

    encoder = encoder_of(facts_of(NAME))
    tokenizer = AutoTokenizer.from_pretrained(base_of(NAME) / "tokenizer")
    for prompt in PROMPTS:
        network = encoder.networks["text_encoder"]
        theirs, mask = encode_prompts(tokenizer, network, [prompt], torch.device("cpu"))
        assert mask.all()
        compare(f"text of {len(prompt)} letters", encoder.encode_prompts([prompt])["text"], theirs)


def _compare_adapters(*, flow_map: bool) -> None:
    """Print what SimpleTuner's network and diffusers' loader make of an exported LoRA."""
    told = _told(*SIZES[0])
    plain, theirs = _networks(flow_map=flow_map, seed=7)
    layers = layer_shapes(plain)
    modules = FAMILY.lora_targets(plain, "all")
    tensors: AdapterTensors = adapter_for("denoiser", plain, modules, seed=3)
    for format in FAMILY.formats.written:
        ours, _ = _networks(flow_map=flow_map, seed=7)
        with TemporaryDirectory() as folder:
            file = Path(folder) / "a.safetensors"
            export(file, tensors, name=NAME, format=format, layers=layers)
            state = load_file(file)
            assert len(state) == 2 * len(tensors)
            pipeline: Any = diffusers.Flux3AutoBlocks().init_pipeline()
            pipeline.update_components(transformer=ours)
            pipeline.load_lora_weights(str(folder), weight_name=file.name)
        loaded = sum("lora_A" in name for name, _ in ours.named_parameters())
        print(f"{format}: diffusers loads {loaded} of {len(tensors)} layers")
        predicted = batch_prediction(FAMILY, ours, *told)
        if format == "diffusers":
            theirs.load_lora_adapter(state, prefix="transformer")
            compare("LoRA in SimpleTuner's network", predicted, _theirs(theirs, *told))
            wanted = predicted
    compare("LoRA in both formats", wanted, predicted)
    change = float(
        (wanted - batch_prediction(FAMILY, plain, *told)).abs().max() / wanted.abs().max()
    )
    print(f"the LoRA changes the prediction by up to {change:.2f} of the largest")


def _networks(*, flow_map: bool, seed: int, references: bool = False) -> tuple[Any, Any]:
    """Return a random network of the trainer, without what it does not read, and SimpleTuner's with its weights."""
    from simpletuner.helpers.models.flux3_image.transformer import (  # type: ignore[import-not-found]  # the checkout's
        Flux3ImageTransformer2DModel,
    )

    sizes: Mapping[str, Any] = {
        "in_channels": CHANNELS,
        "cond_in_channels": CHANNELS,
        "num_layers": 2,
        "num_single_layers": 3,
        "attention_head_dim": 16,
        "num_attention_heads": 2,
        "joint_attention_dim": TEXT,
        "axes_dims_rope": (4, 4, 4, 4),
        "flow_map": flow_map,
    }
    ours = training_network(FAMILY, sizes, seed=seed, references=references)
    theirs = Flux3ImageTransformer2DModel(**sizes).eval()
    missing, unexpected = theirs.load_state_dict(ours.state_dict(), strict=False)
    assert not unexpected and all("image_cond" in name for name in missing)
    return ours, theirs.requires_grad_(False)


def _told(
    rows: int,
    columns: int,
    windows: Sequence[int],
    references: Sequence[tuple[int, int]] = (),
) -> tuple[Tensor, Tensor, list[Tensor], list[Tensor]]:
    texts = [torch.randn(1, length, TEXT) for length in windows]
    latents = [torch.randn(2, CHANNELS, *size) for size in references]
    return torch.randn(2, CHANNELS, rows, columns), torch.rand(2), texts, latents


def _theirs(
    network: Any, noisy: Tensor, sigma: Tensor, texts: list[Tensor], references: list[Tensor]
) -> Tensor:
    """Return SimpleTuner's velocity, with the inputs that its `model_predict` gives."""
    from simpletuner.helpers.models.flux3_image import image_ids

    answers = []
    for at, (latents, level, text) in enumerate(zip(noisy, sigma, texts, strict=True)):
        _, rows, columns = latents.shape
        conditions = {}
        if references:
            device = torch.device("cpu")
            places = [
                image_ids(*each.shape[2:], device, reference_index=number)
                for number, each in enumerate(references)
            ]
            tokens = [each[at].flatten(1).T for each in references]
            conditions = {
                "conditioning_hidden_states": torch.cat(tokens)[None],
                "conditioning_ids": torch.cat(places),
            }
        time = level.reshape(1, 1)
        velocity = network(
            hidden_states=latents.flatten(1).T[None],
            encoder_hidden_states=text,
            encoder_attention_mask=torch.ones(1, text.shape[1], dtype=torch.bool),
            timestep=time,
            target_timestep=time if network.config.flow_map else None,
            img_ids=image_ids(rows, columns, torch.device("cpu")),
            return_dict=False,
            **conditions,
        )[0]
        answers.append(velocity[0].T.unflatten(1, (rows, columns)))
    return torch.stack(answers)


if __name__ == "__main__":
    main()

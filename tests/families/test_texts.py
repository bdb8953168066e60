"""Prompts of every family beside diffusers' own pipelines, alone and in a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from lora_trainer import families
from lora_trainer.families.texts import TextEncoder
from lora_trainer.training.loss import padded_alike
from tests.fakes.family_bases import CPU, base_of, facts_of
from tests.fakes.family_bases import encoder_of as tiny_encoder

FAMILIES = pytest.mark.parametrize("name", families.MODULES)
SHORT, LONGER, TOO_LONG = "a red square", "a photo of the blue one, on the left", "a word " * 300


def pooled(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    text, _, pooled, _ = pipeline.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False
    )
    return {"text": text, "pooled": pooled}


def flux(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    text, pooled, _ = pipeline.encode_prompt(prompt, None, device=CPU)
    return {"text": text, "pooled": pooled}


def chroma(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The network sees the text, its end and one token of padding."""
    text, _, mask, *_ = pipeline.encode_prompt(prompt, device=CPU)
    length = int(mask.sum())
    return {"text": text[:, :length]}


def lumina2(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """An empty text is encoded as the pipeline's negative prompt, without a system prompt."""
    text, mask, negative, negative_mask = pipeline.encode_prompt([prompt or SHORT])
    if not prompt:
        text, mask = negative, negative_mask
    return {"text": text[:, : int(mask.sum())]}


def one_clip(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    return {"text": pipeline.encode_prompt(prompt, CPU, 1, False)[0]}


IN_PIPELINE: Mapping[str, Callable[[Any, str], Mapping[str, Tensor]]] = {
    "sd15": one_clip,
    "sd2": one_clip,
    "sdxl": pooled,
    "sd3": pooled,
    "flux": flux,
    "flux2": lambda pipeline, prompt: {"text": pipeline.encode_prompt(prompt)[0]},
    "chroma": chroma,
    "zimage": lambda pipeline, prompt: {
        "text": pipeline.encode_prompt([prompt], do_classifier_free_guidance=False)[0][0][None]
    },
    "qwen": lambda pipeline, prompt: {
        "text": pipeline.encode_prompt(prompt, max_sequence_length=512)[0]
    },
    "lumina2": lumina2,
}


@cache
def encoder_of(name: str) -> TextEncoder:
    return tiny_encoder(facts_of(name))


@cache
def pipeline_of(name: str) -> Any:
    """Return the pipeline as diffusers itself loads the base's folder."""
    return getattr(diffusers, families.family(name).pipeline.class_name).from_pretrained(
        base_of(name)
    )


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("prompt", [SHORT, "", TOO_LONG], ids=["short", "empty", "too long"])
@FAMILIES
def test_a_prompt_is_encoded_as_the_pipeline_does(name: str, prompt: str) -> None:
    ours = encoder_of(name).encode_prompts([prompt])
    with torch.no_grad():
        theirs = IN_PIPELINE[name](pipeline_of(name), prompt)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-5, rtol=1e-5)
    length = ours["text"].shape[1]
    shapes = families.family(name).text.shapes(facts_of(name).architecture, text_tokens=length)
    assert {key: tuple(tensor.shape) for key, tensor in ours.items()} == shapes
    assert "text_mask" not in ours or ours["text_mask"].tolist() == [[1] * length]


@FAMILIES
def test_a_prompt_is_the_same_in_a_batch(name: str) -> None:
    """Longer neighbours add zeros behind it, and zeros to its mask."""
    together = encoder_of(name).encode_prompts([SHORT, LONGER])
    alone = [encoder_of(name).encode_prompts([prompt]) for prompt in (SHORT, LONGER)]
    for key, tensor in together.items():
        both = torch.cat(padded_alike([each[key] for each in alone]))
        torch.testing.assert_close(tensor, both, atol=1e-5, rtol=1e-5)
        assert not torch.equal(tensor[0], tensor[1])

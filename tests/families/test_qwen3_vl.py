"""Qwen3-VL's language model as a text encoder, beside the whole network of transformers."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from torch import Tensor

from lora_trainer.families.base.text.qwen3_vl import QWEN3_VL_INNER, Qwen3VLEncoder
from tests.fakes.tiny_base import TOKENIZERS, make_part

PROMPTS = ("a red square", "a photo of the blue one, on the left")


class Chosen(Qwen3VLEncoder):
    """Four states in any order; the word `system` before a prompt is read and dropped."""

    layers = (2, 0, 36, 17)
    free_tokens = 1
    ending = "<|im_end|>\n"

    def template(self, prompt: str) -> str:
        return f"system{prompt}"


class LeftWithoutNorm(Chosen):
    last_norm = False
    padding_side: ClassVar[str | None] = "left"


@cache
def whole() -> Any:
    """Return the network with its vision tower, whose norms are not ones."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = make_part({"like": "qwen3_vl"}).eval()
        for weights in network.parameters():
            torch.nn.init.normal_(weights, std=0.3)
    return network


def encoder(kind: type[Qwen3VLEncoder], *, max_tokens: int = 60) -> Qwen3VLEncoder:
    inner = deepcopy(whole()).get_submodule(QWEN3_VL_INNER)  # an encoder may change its norm
    facts = SimpleNamespace(release=SimpleNamespace(max_tokens=max_tokens))
    return kind(
        networks={"text_encoder": inner},
        tokenizers={"text_encoder": TOKENIZERS["qwen3 vl"]()},
        facts=cast(Any, facts),
    )


def states_alone(prompt: str) -> Sequence[Tensor]:
    """Return the states of all blocks of a text that stands alone; the last one before the norm."""
    ids = TOKENIZERS["qwen3 vl"]()(f"system{prompt}<|im_end|>\n", return_tensors="pt").input_ids
    kept: list[Tensor] = []
    text = whole().get_submodule(QWEN3_VL_INNER)
    hook = text.layers[-1].register_forward_hook(lambda module, args, output: kept.append(output))
    with torch.no_grad():
        outputs = whole()(input_ids=ids, output_hidden_states=True)
    hook.remove()
    return [*outputs.hidden_states[:-1], kept[0], outputs.hidden_states[-1]]


@pytest.mark.parametrize("kind", [Chosen, LeftWithoutNorm])
def test_chosen_states_are_those_of_a_text_alone(kind: type[Qwen3VLEncoder]) -> None:
    """In a batch too, whichever side is padded; the last block's before or behind the norm."""
    read = encoder(kind).encode_prompts(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        states = states_alone(prompt)
        last = states[-2 if kind is LeftWithoutNorm else -1]
        expected = torch.cat([states[2], states[0], last, states[17]], dim=-1)[0, 1:]
        length = int(read["text_mask"][row].sum())
        torch.testing.assert_close(read["text"][row, :length], expected, rtol=1e-4, atol=1e-5)
        assert not read["text"][row, length:].any()
    assert not torch.allclose(states[-1], states[-2], atol=0.1)


def test_a_long_prompt_is_cut_before_the_ending() -> None:
    short = encoder(Chosen, max_tokens=12)
    tokens = short.tokenize(["a red square " * 9])
    ending = short.tokenizers["text_encoder"]("<|im_end|>\n").input_ids
    assert tokens["ids"].shape == (1, 13) and tokens["ids"][0, -len(ending) :].tolist() == ending
    assert short.prompt_room() == 12 - len(ending)
    assert short.encode_prompts(["a red square " * 9])["text"].shape == (1, 12, 4 * 16)

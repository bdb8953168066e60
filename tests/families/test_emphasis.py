"""Weights of words: of every family that takes them, against the formula written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.caption_markup import weighted_parts
from lora_trainer.families.base import WEIGHTS, NewWord, TextEncoder
from lora_trainer.families.text.clip import emphasised
from tests.fakes.family_bases import CPU, facts_of

WEIGHING = [name for name in families.MODULES if families.family(name).text.prompt_weights]
TEXT = "a (red:1.5) fox, [blurred] (old hat)"
WORDS = "a red fox, blurred old hat"


@pytest.fixture(scope="module", params=WEIGHING)
def encoder(request: pytest.FixtureRequest) -> TextEncoder:
    """Return encoders whose outputs have a mean, as trained ones' do and a fresh layer norm's do not."""
    family = families.family(request.param)
    found = family.load_text_encoder(facts_of(request.param), dtype=torch.float32, device=CPU)
    for network in found.networks.values():
        for name, parameter in network.named_parameters():
            if name.endswith(("fc2.bias", "final_layer_norm.bias")):
                parameter.fill_(0.3)
    return found


def encoded(encoder: TextEncoder, text: str) -> dict[str, Tensor]:
    return dict(encoder.encode_tokens(encoder.tokenize_weighted(weighted_parts(text))))


def test_the_words_are_tokenized_without_the_marks(encoder: TextEncoder) -> None:
    weighted = encoder.tokenize_weighted(weighted_parts(TEXT))
    for name, tokens in encoder.tokenize([WORDS]).items():
        assert torch.equal(weighted[name], tokens)
        weights = weighted[name + WEIGHTS]
        assert weights.shape == tokens.shape
        found = sorted({round(float(weight), 4) for weight in weights.flatten()})
        assert found == [round(1 / 1.1, 4), 1.0, 1.1, 1.5]
        assert float(weights[0, 0]) == float(weights[0, -1]) == 1.0


def test_a_new_word_has_the_weight_of_its_place(encoder: TextEncoder) -> None:
    encoder.learn(NewWord(text="zibbo", tokens=2))
    try:
        tokens = encoder.tokenize_weighted(weighted_parts("a (Zibbo fox:1.5) by zibbo"))
    finally:
        encoder.word = None
    for name in encoder.networks:
        numbers, weights = tokens[name][0].tolist(), tokens[name + WEIGHTS][0].tolist()
        first, second = (place for place, number in enumerate(numbers) if number == -1)
        assert weights[first : first + 2] == [1.5, 1.5]
        assert weights[second : second + 2] == [1.0, 1.0]
        assert set(weights[first + 2 : second - 2]) == {1.5}
        assert len(weights) == len(numbers)


def test_tokens_are_multiplied_and_the_mean_is_restored(encoder: TextEncoder) -> None:
    plain, found = encoder.encode_prompts([WORDS]), encoded(encoder, TEXT)
    tokens = encoder.tokenize_weighted(weighted_parts(TEXT))
    first = 0
    for name in encoder.networks:
        width = encoder.networks[name].config.hidden_size  # type: ignore[union-attr]  # transformers' own
        states = plain["text"][..., first : first + width]
        weighted = states * tokens[name + WEIGHTS][..., None]
        wanted = weighted * (states.mean() / weighted.mean())
        torch.testing.assert_close(found["text"][..., first : first + width], wanted)
        first += width
    assert first == plain["text"].shape[-1]
    assert not torch.allclose(found["text"], plain["text"], atol=1e-3)
    if "pooled" in plain:
        assert torch.equal(found["pooled"], plain["pooled"])


def test_a_mean_of_nothing_restores_nothing() -> None:
    states = torch.tensor([[[1.0, -1.0], [2.0, -2.0]], [[1.0, 1.0], [-2.0, 0.0]]])
    weights = torch.tensor([[1.0, 3.0], [3.0, 1.0]])
    assert torch.equal(emphasised(states, weights), states * weights[..., None])
    learned = states.clone().requires_grad_()
    emphasised(learned, weights).square().sum().backward()
    assert learned.grad is not None and torch.isfinite(learned.grad).all()
    half = torch.tensor([[[1.0, 1.0], [2.0, 0.0]]])
    assert torch.equal(emphasised(half, torch.tensor([[3.0, 1.0]])).mean(), half.mean())

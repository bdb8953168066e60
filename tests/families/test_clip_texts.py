"""Captions in chunks, clip skip and weights of words, as kohya, A1111 and diffusers have them, chunk by chunk."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.common import caption_markup
from lora_trainer.common.caption_markup import NewWord
from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.files.locate import describe
from tests.fakes.family_bases import CPU, copy_of, edit_json, facts_at, pipeline_of
from tests.fakes.family_bases import encoder_of as tiny_encoder
from tests.fakes.family_bases import facts_of as facts_of_tiny
from tests.fakes.tiny_base import clip_tokenizer

CHUNKED = [name for name in families.NAMES if families.family(name).text.chunks]
SKIPPING = ["embedded", "sd2"]
"""With two layers; the embedded base is a Stable Diffusion 1."""
ROOM = 75
TAGS = ", ".join(f"tag {number}" for number in range(10))
TEXTS = ("", "a toy", "a" * ROOM, "a b " * 40, TAGS * 2, "one, two, " * 60)
"""Of less than a chunk, of exactly one, of a few more, of more than three."""


def family_of(name: str) -> Any:
    return families.family("sd15" if name == "embedded" else name)


def facts_of(name: str) -> BaseFacts:
    return describe(BaseSettings(model="embedded")) if name == "embedded" else facts_of_tiny(name)


def encoder_of(name: str, *, other_padding: bool = False, **changes: Any) -> Any:
    found: Any = tiny_encoder(replace(facts_of(name), **changes))
    for tokenizer in found.tokenizers.values():
        if other_padding:  # as the second encoder of SDXL and that of Stable Diffusion 2
            tokenizer.pad_token = "!"
    return found


def network_of(name: str, facts: BaseFacts, component: str) -> Any:
    """Return a network as transformers loads it, whole."""
    kind = getattr(transformers, family_of(name).text.networks[component].network)
    return kind.from_pretrained(facts.located.folder / component).eval()


def rows_of(tokenizer: Any, text: str, chunks: int) -> list[list[int]]:
    """Tokenize and cut as sd-scripts' `_get_input_ids` does: one long padded row, then its thirds.

    Each third gets the row's first and last token around it; where that leaves a third without an end
    (its last token is a word) or without a beginning (it is all padding), the end is put there.
    """
    whole = tokenizer(
        text, padding="max_length", truncation=True, max_length=chunks * ROOM + 2
    ).input_ids
    end, padding, found = tokenizer.eos_token_id, tokenizer.pad_token_id, []
    for first in range(1, chunks * ROOM, ROOM):
        row = [whole[0], *whole[first : first + ROOM], whole[-1]]
        if end != padding and row[-2] not in (end, padding):
            row[-1] = end
        if end != padding and row[1] == padding:
            row[1] = end
        found.append(row)
    return found


def reference(
    name: str,
    encoder: Any,
    text: str,
    *,
    chunks: int,
    clip_skip: int = 1,
    weights: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """Encode each chunk by itself; keep the first begin, what is between, and the last end.

    Weights [chunks, 77] by component multiply the states of a chunk, and the mean of the chunk is restored.
    """
    facts, states, pooled = facts_of(name), [], None
    pair = len(encoder.networks) == 2
    for component, tokenizer in encoder.tokenizers.items():
        network = encoder.networks[component]
        if clip_skip > 1:
            network = network_of(name, facts, component)
        parts = []
        for number, row in enumerate(rows_of(tokenizer, text, chunks)):
            with torch.no_grad():
                output = network(torch.tensor([row]), output_hidden_states=True)
            if pair:
                parts.append(output.hidden_states[-2])
                if number == 0 and "text_embeds" in output:
                    pooled = output.text_embeds
            else:
                norm = network.get_submodule("final_layer_norm")
                parts.append(norm(output.hidden_states[-clip_skip]))
        for number, row in enumerate(() if weights is None else weights[component]):
            weighted = parts[number] * row[:, None]
            parts[number] = weighted * (parts[number].mean() / weighted.mean())
        inner = [part[:, 1:-1] for part in parts]
        states.append(torch.cat([parts[0][:, :1], *inner, parts[-1][:, -1:]], dim=1))
    found = {"text": torch.cat(states, dim=-1).detach()}
    return found if pooled is None else {**found, "pooled": pooled}


@pytest.mark.parametrize(("chunks", "other_padding"), [(1, False), (3, False), (3, True)])
@pytest.mark.parametrize("name", CHUNKED)
def test_chunks_are_what_encoding_one_by_one_gives(
    name: str, chunks: int, other_padding: bool
) -> None:
    encoder = encoder_of(name, chunks=chunks, other_padding=other_padding)
    together = encoder.encode_prompts(TEXTS)
    assert together["text"].shape[1] == replace(facts_of(name), chunks=chunks).text_tokens
    assert together["text"].shape[1] == 77 + 75 * (chunks - 1)
    for row, text in enumerate(TEXTS):
        wanted = reference(name, encoder, text, chunks=chunks)
        assert set(wanted) == set(together)
        for key, tensor in wanted.items():
            torch.testing.assert_close(together[key][row : row + 1], tensor, rtol=0, atol=1e-5)
    assert encoder.prompt_room() == ROOM * chunks


@pytest.mark.parametrize("clip_skip", [1, 2])
@pytest.mark.parametrize("name", SKIPPING)
def test_clip_skip_counts_from_the_last_layer(name: str, clip_skip: int) -> None:
    """As sd-scripts and A1111: 1 is the last layer; diffusers' `clip_skip` is one less."""
    facts = facts_of(name).with_clip_skip(clip_skip)
    encoder = encoder_of(name, chunks=2, clip_skip=facts.clip_skip)
    for text in TEXTS:
        found = encoder.encode_prompts([text])["text"]
        wanted = reference(name, encoder, text, chunks=2, clip_skip=clip_skip)
        torch.testing.assert_close(found, wanted["text"], rtol=0, atol=1e-5)
    pipeline = pipeline_of(facts_of(name))
    # diffusers 0.42 looks for the norm where transformers 5 has it no more.
    object.__setattr__(pipeline.text_encoder, "text_model", pipeline.text_encoder)
    with torch.no_grad():
        theirs, _ = pipeline.encode_prompt("a toy", CPU, 1, False, clip_skip=clip_skip - 1)
    found = encoder_of(name, clip_skip=facts.clip_skip).encode_prompts(["a toy"])["text"]
    torch.testing.assert_close(found, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SKIPPING)
def test_what_is_skipped_is_not_trained(name: str) -> None:
    family, facts = family_of(name), facts_of(name).with_clip_skip(2)
    ((component, network),) = encoder_of(name, clip_skip=2).networks.items()
    targets = family.lora_targets(network, "text_encoder")
    assert set(family.text_adapter_shapes(facts)[component]) == set(targets)
    whole = family.text_adapter_shapes(facts_of(name))[component]
    assert set(whole) - set(targets) == {key for key in whole if "layers.1." in key} != set()


def test_other_layers_are_refused_where_there_are_none() -> None:
    for name in SKIPPING:
        with pytest.raises(RequestError, match=r"base\.clip_skip=3.* allows is 2"):
            facts_of(name).with_clip_skip(3)
    for clip_skip in (1, 2):
        assert facts_of("sdxl").with_clip_skip(clip_skip).clip_skip == 1
    for name, most in (("sdxl", 2), ("flux", 1)):
        with pytest.raises(RequestError, match=f"allows is {most}") as raised:
            facts_of(name).with_clip_skip(most + 1)
        assert raised.value.fix == f"use at most {most}, or leave base.clip_skip out"


# ---- weights of words, and new words


@pytest.mark.parametrize("name", CHUNKED)
def test_words_are_weighed_in_every_chunk_by_itself(name: str) -> None:
    """As A1111 does: the mean that is restored is a chunk's, and one without weights stays as it is."""
    encoder = encoder_of(name, chunks=3)
    for network in encoder.networks.values():
        for key, parameter in network.named_parameters():
            # Outputs with a mean, as trained ones have and those of a fresh layer norm have not.
            if key.endswith(("fc2.bias", "final_layer_norm.bias")):
                parameter.fill_(3.0)
    text = "a " * 80 + "{} fox, {} {} " + "b " * 20
    marked = text.format("a (red:1.5)", "[blurred]", "(old hat)")
    words = text.format("a red", "blurred", "old hat")
    tokens = encoder.tokenize_weighted(caption_markup.weighted_parts(marked))
    weights = {each: tokens[f"{each}.weights"].reshape(3, 77) for each in encoder.networks}
    for component, ids in encoder.tokenize([words]).items():
        assert torch.equal(tokens[component], ids) and ids.shape == (1, 3 * 77)
        rows = weights[component]
        levels = sorted({round(float(weight), 4) for weight in rows.flatten()})
        assert levels == [round(1 / 1.1, 4), 1.0, 1.1, 1.5]
        assert [bool((row != 1).any()) for row in rows] == [False, True, False]
        assert rows[:, 0].tolist() == rows[:, -1].tolist() == [1.0] * 3
    found, plain = encoder.encode_tokens(tokens), encoder.encode_prompts([words])
    wanted = reference(name, encoder, words, chunks=3, weights=weights)
    assert set(found) == set(wanted)
    for key, tensor in wanted.items():
        torch.testing.assert_close(found[key], tensor, rtol=0, atol=1e-4)
    assert not torch.allclose(found["text"], plain["text"], atol=1e-3)
    assert "pooled" not in plain or torch.equal(found["pooled"], plain["pooled"])


@pytest.mark.parametrize("written", ["zibbo", "zi\u0301bbo"])
@pytest.mark.parametrize("name", CHUNKED)
def test_a_new_word_has_its_place_and_weight_also_where_chunks_meet(
    name: str, written: str
) -> None:
    encoder = encoder_of(name, chunks=2)
    alone = encoder.count_tokens("a")
    encoder.learn(NewWord(text=unicodedata.normalize("NFC", written), tokens=4))
    tokens = encoder.tokenize_weighted(
        caption_markup.weighted_parts(
            "a " * (73 // alone) + f"({written.title()} fox:1.5) by {written}"
        )
    )
    for component in encoder.networks:
        first, second = tokens[component].reshape(2, 77).tolist()
        before, after = tokens[f"{component}.weights"].reshape(2, 77).tolist()
        assert first[-3:-1] == [-1, -2] and second[1:3] == [-3, -4]
        again = second.index(-1)
        assert second[again : again + 4] == [-1, -2, -3, -4]
        assert before[-3:-1] == after[1:3] == [1.5, 1.5] and after[3] == 1.5
        assert {*before[:-3], *after[again - 1 :]} == {1.0}


class GivenStates(nn.Module):
    """A text network that returns the same hidden states for all tokens."""

    def __init__(self, states: Tensor) -> None:
        super().__init__()
        self.states = nn.Parameter(states)

    def forward(self, _: Tensor, **options: Any) -> tuple[Tensor]:
        return (self.states,)


def test_a_mean_of_nothing_restores_nothing() -> None:
    encoder = encoder_of("sd15")
    release = replace(encoder.facts.release, max_tokens=2)
    encoder.facts = replace(encoder.facts, release=release)

    def weighed(states: list[Any], weights: list[Any]) -> tuple[GivenStates, Tensor]:
        network = GivenStates(torch.tensor(states))
        encoder.networks = {"text_encoder": network}
        tokens = {"text_encoder": torch.zeros(len(weights), 2, dtype=torch.int64)}
        return network, encoder.embed({**tokens, "text_encoder.weights": torch.tensor(weights)})[
            "text"
        ]

    weights = [[1.0, 3.0], [3.0, 1.0]]
    network, found = weighed([[[1.0, -1.0], [2.0, -2.0]], [[1.0, 1.0], [-2.0, 0.0]]], weights)
    assert torch.equal(found, network.states * torch.tensor(weights)[..., None])
    found.square().sum().backward()
    assert network.states.grad is not None and torch.isfinite(network.states.grad).all()
    network, found = weighed([[[1.0, 1.0], [2.0, 0.0]]], [[3.0, 1.0]])
    assert torch.equal(found.mean(), network.states.mean())


# ---- tokenizers that pad with "!", as the releases configure theirs


BANG = {"content": "!", "special": True} | dict.fromkeys(
    ("lstrip", "normalized", "rstrip", "single_word"), False
)


@pytest.mark.parametrize(
    ("name", "tokenizer"), [("sd2", "tokenizer"), ("sdxl", "tokenizer_2"), ("sd3", "tokenizer_2")]
)
def test_a_padding_character_in_a_caption_is_text(
    tmp_path: Path, name: str, tokenizer: str
) -> None:
    """It was read as padding, 0, where every other program but diffusers reads 256 (OpenCLIP's numbers)."""
    base = copy_of(name, tmp_path / "base")
    folder = base / tokenizer
    whole = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    added = {str(token.pop("id")): token for token in whole["added_tokens"]}
    edit_json(
        folder / "tokenizer_config.json",
        pad_token="!",
        added_tokens_decoder={"0": BANG, **added},
        tokenizer_class="CLIPTokenizer",
    )
    encoder, plain = tiny_encoder(facts_at(base)), clip_tokenizer()  # pads with the end of a text
    for caption in ("wow! a red square!", "!", "red !! blue", "a square"):
        numbers = encoder.tokenize([caption])[tokenizer.replace("tokenizer", "text_encoder")][0]
        expected = plain(caption).input_ids
        assert numbers.tolist() == expected + [0] * (77 - len(expected)), caption
    assert plain.convert_tokens_to_ids("!") == 0

"""Captions in chunks and clip skip, against kohya's and diffusers' ways of computing them, one chunk at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.caption_markup import weighted_parts
from lora_trainer.common.errors import RequestError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import WEIGHTS, BaseFacts, NewWord
from lora_trainer.families.locate import EMBEDDED, describe
from tests.fakes.family_bases import CPU
from tests.fakes.family_bases import facts_of as facts_of_tiny

CHUNKED = [name for name in families.MODULES if families.family(name).text.chunks]
SKIPPING = ["embedded", "sd2"]
"""With two layers; the embedded base is a Stable Diffusion 1."""
ROOM = 75
TAGS = ", ".join(f"tag {number}" for number in range(10))
TEXTS = ("", "a toy", "a" * ROOM, "a b " * 40, TAGS * 2, "one, two, " * 60)
"""Of less than a chunk, of exactly one, of a few more, of more than three."""


def family_of(name: str) -> Any:
    return families.family("sd15" if name == "embedded" else name)


def facts_of(name: str) -> BaseFacts:
    return describe(BaseSettings(model=EMBEDDED)) if name == "embedded" else facts_of_tiny(name)


def encoder_of(name: str, *, other_padding: bool = False, **changes: Any) -> Any:
    facts = replace(facts_of(name), **changes)
    found = family_of(name).load_text_encoder(facts, dtype=torch.float32, device=CPU)
    for tokenizer in found.tokenizers.values():
        if other_padding:  # as the second encoder of SDXL and that of Stable Diffusion 2
            tokenizer.pad_token = "!"
    return found


def network_of(name: str, facts: BaseFacts, component: str) -> Any:
    """Return a network as transformers loads it, whole."""
    part = next(part for part in family_of(name).texts if part.component == component)
    kind = getattr(transformers, part.network)
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
    name: str, encoder: Any, text: str, *, chunks: int, clip_skip: int = 1
) -> dict[str, Tensor]:
    """Encode each chunk by itself; keep the first begin, what is between, and the last end."""
    facts, states, pooled = facts_of(name), [], None
    pair = len(encoder.networks) == 2
    for component, tokenizer in encoder.tokenizers.items():
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
    pipeline: Any = family_of(name).plain_pipeline(facts_of(name), dtype=torch.float32, device=CPU)
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
        with pytest.raises(RequestError, match="has 2 layers"):
            facts_of(name).with_clip_skip(3)
    for clip_skip in (1, 2):
        assert facts_of("sdxl").with_clip_skip(clip_skip).clip_skip == 1
    with pytest.raises(RequestError, match=r"base\.clip_skip=3"):
        facts_of("sdxl").with_clip_skip(3)
    with pytest.raises(RequestError, match=r"leave base\.clip_skip out|base\.clip_skip=2"):
        facts_of("flux").with_clip_skip(2)


@pytest.mark.parametrize("name", CHUNKED)
def test_words_are_weighed_in_every_chunk_by_itself(name: str) -> None:
    """As A1111 does: the mean that is restored is a chunk's, and one without weights stays as it is."""
    encoder = encoder_of(name, chunks=3)
    text = "a " * 80 + "(red fox:1.5), " + "b " * 20
    tokens = encoder.tokenize_weighted(weighted_parts(text))
    for component in encoder.networks:
        weights = tokens[component + WEIGHTS].reshape(3, 77)
        assert [bool((row != 1).any()) for row in weights] == [False, True, False]
        assert tokens[component].shape == (1, 3 * 77)
    plain = encoder.encode_prompts(["a " * 80 + "red fox, " + "b " * 20])["text"]
    found = encoder.encode_tokens(tokens)["text"]
    second = slice(1 + ROOM, 1 + 2 * ROOM)
    assert torch.equal(found[:, : second.start], plain[:, : second.start])
    assert torch.equal(found[:, second.stop :], plain[:, second.stop :])
    assert not torch.allclose(found[:, second], plain[:, second], atol=1e-3)


@pytest.mark.parametrize("name", CHUNKED)
def test_a_new_word_may_stand_where_chunks_meet(name: str) -> None:
    encoder = encoder_of(name, chunks=2)
    alone = encoder.count_tokens("a")
    encoder.learn(NewWord(text="zibbo", tokens=4))
    tokens = encoder.tokenize(["a " * (73 // alone) + "zibbo end"])
    for component in encoder.networks:
        first, second = tokens[component].reshape(2, 77).tolist()
        assert first[-3:-1] == [-1, -2] and second[1:3] == [-3, -4]

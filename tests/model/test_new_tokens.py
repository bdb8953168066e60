"""New tokens: where they stand in a text, what they are at first, and what diffusers makes of their file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from lora_trainer import families
from lora_trainer.common.caption_markup import NewWord
from lora_trainer.common.errors import InputError, RequestError, TrainingStopped
from lora_trainer.families.base.sampling import plain_pipeline
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.lora.adapter import add_new_tokens
from lora_trainer.lora_file.embedding import embedding_path, read_embedding, write_embedding
from tests.fakes.family_bases import CPU, facts_of

TEACHABLE = ("sd15", "sd2", "sdxl")
WORD = NewWord(text="toy", tokens=2)


def encoder_of(
    name: str, word: NewWord | None = WORD, *, dtype: torch.dtype = torch.float32
) -> TextEncoder:
    found = families.family(name).load_text_encoder(facts_of(name), dtype=dtype, device=CPU)
    if word is not None:
        found.learn(word)
    return found


def numbers(text: TextEncoder, prompt: str) -> list[list[int]]:
    return [tensor[0].tolist() for tensor in text.tokenize([prompt]).values()]


# ---- the texts


@pytest.mark.parametrize("name", TEACHABLE)
def test_the_word_becomes_its_tokens_and_the_rest_stays(name: str) -> None:
    taught, plain = encoder_of(name), encoder_of(name, None)
    for with_word, without in zip(
        numbers(taught, "a red Toy, on a table, toy"),
        numbers(plain, "a red, on a table,"),
        strict=True,
    ):
        places = [index for index, number in enumerate(with_word) if number < 0]
        assert [with_word[place] for place in places] == [-1, -2, -1, -2]
        assert places[1] == places[0] + 1
        rest = [number for number in with_word if number >= 0]
        assert rest == without[: len(rest)], "the others, begin, end and padding"
        assert len(with_word) == len(without) == facts_of(name).release.max_tokens
    for prompt in ("", "a cat", "toys and a toyshop", "nontoy"):
        assert numbers(taught, prompt) == numbers(plain, prompt), "read as ever"
    counted = plain.count_tokens("a") + plain.count_tokens("on a table")
    assert taught.count_tokens("a toy on a table") == counted + WORD.tokens
    # What is too long is cut with its end in place.
    for row, other in zip(numbers(taught, "toy " * 100), numbers(plain, "a " * 100), strict=True):
        assert (len(row), row[0], row[-1]) == (len(other), other[0], other[-1])
        assert all(number < 0 for number in row[1:-1])


# ---- the vectors


def test_they_start_at_a_word_or_at_random() -> None:
    text = encoder_of("sdxl", NewWord(text="toy", tokens=3))
    tables = [network.get_input_embeddings().weight for network in text.networks.values()]
    wanted = text.numbers("table on")
    started = add_new_tokens(text, 3, start="table on", seed=1)
    for (component, vectors), table in zip(started.items(), tables, strict=True):
        first, *others = wanted[component]
        chosen = [first, *others, first, *others][:3]
        assert torch.equal(vectors, table[chosen])
    random = [
        add_new_tokens(encoder_of("sdxl"), 2, start=None, seed=seed)["text_encoder"]
        for seed in (1, 1, 2)
    ]
    assert torch.equal(random[0], random[1]) and not torch.equal(random[0], random[2])
    assert 0.3 < random[0].std() / tables[0].std() < 3
    with pytest.raises(RequestError, match="has no tokens"):
        add_new_tokens(encoder_of("sd15"), 2, start=" ", seed=1)


def test_the_table_is_read_in_its_own_dtype() -> None:
    text = encoder_of("sd15", dtype=torch.bfloat16)
    (network,) = text.networks.values()
    known = network.get_input_embeddings().weight
    (vectors,) = add_new_tokens(text, 2, start=None, seed=1).values()
    found = network.get_input_embeddings()(torch.tensor([[0, -2, 4, -1]]))
    assert found.dtype is torch.bfloat16 and vectors.dtype is torch.float32
    assert torch.equal(found[0, [0, 2]], known[[0, 4]])
    assert torch.equal(found[0, [3, 1]], vectors.to(torch.bfloat16))


# ---- the file


@pytest.mark.parametrize("name", TEACHABLE)
def test_diffusers_reads_the_file_as_it_was_trained(name: str, tmp_path: Path) -> None:
    family, text, arrays = families.family(name), encoder_of(name), {}
    for component, vectors in add_new_tokens(text, 2, start=None, seed=3).items():
        arrays[family.text.new_token_keys[component]] = vectors.detach().numpy()
    path = embedding_path(tmp_path / "x.safetensors")
    write_embedding(path, arrays, metadata={"modelspec.title": "x"})
    pipeline: Any = plain_pipeline(family, facts_of(name), dtype=torch.float32, device=CPU)
    if len(family.text.new_token_keys) == 1:
        pipeline.load_textual_inversion(str(path.parent), weight_name=path.name, token="<t>")
    else:
        tensors = load_file(path)
        for component, key in family.text.new_token_keys.items():
            pipeline.load_textual_inversion(
                tensors[key],
                token="<t>",
                text_encoder=getattr(pipeline, component),
                tokenizer=getattr(pipeline, component.replace("text_encoder", "tokenizer")),
            )
    for prompt in ("a toy, on a table", "toy"):
        ours = text.encode_prompts([prompt])
        with torch.no_grad():  # the hidden states, and the pooled ones where there are two encoders
            encoded = pipeline.encode_prompt(
                prompt.replace("toy", "<t>"),
                device=CPU,
                num_images_per_prompt=1,
                do_classifier_free_guidance=False,
            )
        theirs = [encoded[0], encoded[2]] if len(encoded) == 4 else [encoded[0]]
        for mine, other in zip(ours.values(), theirs, strict=True):
            torch.testing.assert_close(mine, other)
    assert not torch.equal(ours["text"], encoder_of(name, None).encode_prompts(["toy"])["text"])


def test_the_end_of_a_text_is_found_where_the_release_says_two(tmp_path: Path) -> None:
    """SDXL's own configuration has a wrong end of text, so CLIP looks for the largest number."""
    text = encoder_of("sdxl")
    add_new_tokens(text, 2, start="a", seed=1)
    right = text.encode_prompts(["a toy"])["pooled"]
    for network in text.networks.values():
        for module in network.modules():
            if hasattr(module, "eos_token_id"):
                module.eos_token_id = 2
    assert torch.equal(text.encode_prompts(["a toy"])["pooled"], right)


def test_what_is_no_number_or_no_embedding_is_refused(tmp_path: Path) -> None:
    spoilt = {"emb_params": np.full((1, 4), np.nan, dtype=np.float32)}
    with pytest.raises(TrainingStopped, match="not finite"):
        write_embedding(tmp_path / "x.safetensors", spoilt, metadata={})
    (tmp_path / "y.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is a file of another kind.*export it again"):
        read_embedding(tmp_path / "y.safetensors")

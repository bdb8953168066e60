"""The system prompt before prompts: which one, and that training, its cache and plain pipelines have the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lora_trainer import families
from lora_trainer.cache.cache_plan import TextEntries
from lora_trainer.common.errors import RequestError
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.sampling import build_sampler, pipeline_arguments
from lora_trainer.families.lumina2.family import SYSTEM_PROMPT, before_prompts
from tests.fakes.family_bases import (
    CPU,
    copy_of,
    denoiser_of,
    encoder_of,
    facts_at,
    facts_of,
    pipeline_of,
    side_of,
)

NETA = "You are an assistant designed to generate anime images based on textual prompts."
YUME = NETA.replace("anime", "high quality anime")


@pytest.mark.parametrize(
    ("name", "prompt"),
    {
        "Lumina-Image-2.0": SYSTEM_PROMPT,
        "lumina_2_model_bf16": SYSTEM_PROMPT,
        "illuminated-monetary": SYSTEM_PROMPT,
        "neta-art/Neta-Lumina": NETA,
        "neta-lumina-v1.0": NETA,
        "NetaLumina_Alpha": NETA,
        "duongve/NetaYume-Lumina-Image-2.0": YUME,
        "NetaYumev35_pretrained_all_in_one": YUME,
        "netayumeLuminaNetaLumina_v35Pretrained": YUME,
    }.items(),
)
def test_the_name_of_a_fine_tune_says_its_system_prompt(
    name: str, prompt: str, tmp_path: Path
) -> None:
    folder = copy_of("lumina2", tmp_path / "base")
    assert facts_at(folder, source=name).with_system_prompt("auto").system_prompt == prompt
    assert facts_at(folder, source=name).with_system_prompt("").system_prompt == ""


def with_prompt(prompt: str) -> BaseFacts:
    return facts_of("lumina2").with_system_prompt(prompt)


def entry(facts: BaseFacts, text: str = "a toy") -> Any:
    return TextEntries(
        encoder_identity="0" * 64,
        reading=facts.readings["text_encoder"],
        text_tokens=facts.text_tokens,
        precision="fp32",
        tokens_only=False,
        system_prompt=facts.system_prompt,
    ).key(text)


def test_another_system_prompt_is_another_text_in_another_entry_of_the_cache() -> None:
    prompts = ("auto", "Be brief.", "")
    texts = [encoder_of(with_prompt(each)).encode_prompts(["a toy"])["text"] for each in prompts]
    assert len({text.shape for text in texts}) == 3
    assert len({entry(with_prompt(each)) for each in prompts}) == 3
    assert entry(with_prompt("auto")) == entry(with_prompt(SYSTEM_PROMPT))
    # Without one the text is the words alone; an empty text is encoded alone with any.
    pipeline = pipeline_of(facts_of("lumina2"))
    plain = pipeline.encode_prompt(["x"], negative_prompt=["a toy"])
    length = int(plain[3].sum())
    torch.testing.assert_close(texts[2], plain[2][:, :length].float(), atol=1e-5, rtol=1e-4)
    theirs = pipeline.encode_prompt(["a toy"], system_prompt="Be brief.")
    length = int(theirs[1].sum())
    torch.testing.assert_close(texts[1], theirs[0][:, :length].float(), atol=1e-5, rtol=1e-4)


def test_the_mark_after_it_may_be_copied_with_it() -> None:
    assert before_prompts("Be brief. <Prompt Start> ") == before_prompts("Be brief.")
    assert before_prompts("Be brief.") == "Be brief. <Prompt Start> "
    assert before_prompts(" ") == ""


@pytest.mark.parametrize("prompt", ["Be brief.", ""])
def test_an_adapter_s_image_is_drawn_after_the_system_prompt_of_its_training(prompt: str) -> None:
    family, facts = families.family("lumina2"), with_prompt(prompt)
    texts = encoder_of(facts)
    conditionings = [texts.encode_prompts([text]) for text in ("a toy", "a blur")]
    sampler = build_sampler(family, facts, denoiser=denoiser_of("lumina2"), device=CPU)
    pipeline, side = pipeline_of(facts), side_of(facts)
    ours = sampler.image(*conditionings, seed=3, size_px=(side, side), steps=3, guidance_scale=9.0)
    plain = pipeline(
        **pipeline_arguments(
            family, pipeline, facts, "a toy", "a blur", guidance_scale=9.0, steps=3
        )[0],
        generator=torch.Generator().manual_seed(3),
        num_inference_steps=3,
        width=side,
        height=side,
    ).images[0]
    difference = np.abs(np.asarray(ours, dtype=int) - np.asarray(plain, dtype=int))
    assert difference.max() <= 1


def test_a_family_without_one_refuses_it() -> None:
    facts = replace(facts_of("flux"), source="a base")
    assert facts.with_system_prompt("auto").with_system_prompt("").system_prompt is None
    with pytest.raises(RequestError, match=r"a base \(family flux\) have no system prompt"):
        facts.with_system_prompt("Be brief.")

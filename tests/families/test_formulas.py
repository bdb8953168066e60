"""The loss of every transformer family beside its published training code, every family's prompts beside diffusers'."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer

from lora_trainer import families
from lora_trainer.families.base.text.qwen3_vl import text_processor
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.training.loss import add_noise, padded_alike, sample_losses, target
from tests.fakes.family_bases import (
    CPU,
    base_of,
    conditioning_of,
    draw,
    encoder_of,
    facts_at,
    facts_of,
    network_of,
)
from tests.fakes.tiny_base import write_base

SHORT = "a red square"
LONGER = "a photo of the blue one, on the left, with a green roof and three small windows"
PROMPTS = (SHORT, LONGER)
HEIGHT, WIDTH = 12, 8  # in latents, unequal: rows and columns cannot be taken for one another
Told = Mapping[str, Tensor]


def places(rows: int, columns: int) -> Tensor:
    return torch.tensor([[0.0, row, column] for row in range(rows) for column in range(columns)])


def squares(latents: Tensor) -> Tensor:
    return F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2)


def image(tokens: Tensor) -> Tensor:
    whole = tokens.transpose(1, 2).unflatten(2, (HEIGHT // 2, WIDTH // 2))
    return F.pixel_shuffle(whole, 2)


def flux(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    tokens = network(
        hidden_states=squares(noisy),
        timestep=sigma,
        guidance=told["guidance"],
        pooled_projections=told["pooled"],
        encoder_hidden_states=told["text"],
        txt_ids=torch.zeros(512, 3),
        img_ids=places(HEIGHT // 2, WIDTH // 2),
        return_dict=False,
    )[0]
    return image(tokens)


def chroma(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """With a mask over padded text, which is not zero."""
    text = F.pad(told["text"], (0, 0, 0, 5), value=3.0)
    mask = F.pad(F.pad(told["text_mask"], (0, 5)), (0, HEIGHT * WIDTH // 4), value=1)
    tokens = network(
        hidden_states=squares(noisy),
        timestep=sigma,
        encoder_hidden_states=text,
        txt_ids=torch.zeros(text.shape[1], 3),
        img_ids=places(HEIGHT // 2, WIDTH // 2),
        attention_mask=mask.bool(),
        return_dict=False,
    )[0]
    return image(tokens)


def sd3(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """diffusers/examples/dreambooth/train_dreambooth_lora_sd3.py, without preconditioned outputs."""
    answer: Tensor = network(
        noisy,
        timestep=sigma * 1000,
        encoder_hidden_states=told["text"],
        pooled_projections=told["pooled"],
    ).sample
    return answer


def flux2(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """Ids (0, row, column, 0) of the image and (0, 0, 0, place) of the text; klein's and dev's."""
    text = told["text"]
    tokens = network(
        hidden_states=noisy.flatten(2).transpose(1, 2),
        timestep=sigma,
        guidance=told.get("guidance"),
        encoder_hidden_states=text,
        txt_ids=torch.tensor([[0, 0, 0, place] for place in range(text.shape[1])]),
        img_ids=F.pad(places(HEIGHT, WIDTH), (0, 1)).long(),
        return_dict=False,
    )[0]
    answer: Tensor = tokens.transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))
    return answer


def qwen(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """diffusers/examples/dreambooth/train_dreambooth_lora_qwen_image.py."""
    tokens = network(
        hidden_states=diffusers.QwenImagePipeline._pack_latents(
            noisy[:, None], 2, 16, HEIGHT, WIDTH
        ),
        encoder_hidden_states=told["text"],
        encoder_hidden_states_mask=told["text_mask"],
        timestep=sigma,
        img_shapes=[[(1, HEIGHT // 2, WIDTH // 2)]] * 2,
        return_dict=False,
    )[0]
    answer: Tensor = diffusers.QwenImagePipeline._unpack_latents(tokens, 2 * HEIGHT, 2 * WIDTH, 2)[
        :, :, 0
    ]
    return answer


def texts(told: Told) -> list[Tensor]:
    lengths = told["text_mask"].sum(1).tolist()
    return [text[:length] for text, length in zip(told["text"], lengths, strict=True)]


def zimage(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """Time (1000 - t) / 1000, the answer negated; one by one, without padding."""
    answers = [
        network([latents[:, None]], 1 - level[None], [text], return_dict=False)[0][0][:, 0]
        for latents, level, text in zip(noisy, sigma, texts(told), strict=True)
    ]
    return -torch.stack(answers)


def lumina2(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """The pipeline gives 1 - t and negates the answer; one by one, without padding."""
    answers = [
        network(
            latents[None],
            1 - level[None],
            text[None],
            torch.ones(1, len(text), dtype=torch.int64),
            return_dict=False,
        )[0][0]
        for latents, level, text in zip(noisy, sigma, texts(told), strict=True)
    ]
    return -torch.stack(answers)


def auraflow(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """SimpleTuner's and diffusion-pipe's: time from image (0) to noise (1), no mask over the padded text."""
    answer: Tensor = network(noisy, encoder_hidden_states=told["text"], timestep=sigma).sample
    return answer


def anima(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """diffusion-pipe's: time from image (0) to noise (1), the text filled up to 512 rows of zeros without a mask."""
    text = torch.zeros(len(noisy), 512, told["text"].shape[2])
    text[:, : told["text"].shape[1]] = told["text"]
    answer: Tensor = network(
        noisy[:, :, None],
        timestep=sigma,
        encoder_hidden_states=text,
        padding_mask=torch.zeros(1, 1, 8 * HEIGHT, 8 * WIDTH),
    ).sample[:, :, 0]
    return answer


def krea2(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """diffusers/examples/dreambooth/train_dreambooth_lora_krea2.py; one by one, without padding."""
    answers = []
    for latents, level, text in zip(noisy, sigma, texts(told), strict=True):
        ids = diffusers.Krea2Pipeline.prepare_position_ids(len(text), HEIGHT // 2, WIDTH // 2, CPU)
        answers += network(
            hidden_states=squares(latents[None]),
            encoder_hidden_states=text.reshape(1, len(text), 12, -1),
            timestep=level[None],
            position_ids=ids,
            return_dict=False,
        )[0]
    return image(torch.stack(answers))


def qwen21(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """SimpleTuner's: a slot of the mask for each 2x2 latents; one by one, as the text's length places the image."""
    answers = []
    for latents, level, text in zip(noisy, sigma, texts(told), strict=True):
        slots = torch.zeros(1, len(text), dtype=torch.bool), torch.ones(1, HEIGHT * WIDTH // 4)
        answers += network(
            hidden_states=latents.flatten(1).T[None],
            encoder_hidden_states=text[None],
            timestep=level[None],
            img_shapes=[[(1, HEIGHT, WIDTH)]],
            img_mask=torch.cat(slots, dim=1).bool(),
            return_dict=False,
        )[0][:, -HEIGHT * WIDTH :]
    return torch.stack(answers).transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))


def flux3(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """SimpleTuner's: rows and columns halved, a flow map told its own time; one by one, each text in its own window."""
    answers = []
    for latents, level, text in zip(noisy, sigma, texts(told), strict=True):
        assert len(text) in (80, 160)
        places = [[0, row / 2, column / 2, 0] for row in range(HEIGHT) for column in range(WIDTH)]
        answers += network(
            hidden_states=latents.flatten(1).T[None],
            encoder_hidden_states=text[None],
            timestep=level[None],
            target_timestep=level[None] if network.config.flow_map else None,
            img_ids=torch.tensor(places),
            txt_ids=torch.tensor([[0.0, 0.0, 0.0, place] for place in range(len(text))]),
            return_dict=False,
        )[0]
    return torch.stack(answers).transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))


def ernie(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """ai-toolkit's and SimpleTuner's: time from image (0) to noise (1000); one by one, without padding."""
    answers = [
        network(latents[None], 1000 * level[None], text[None], torch.tensor([len(text)])).sample
        for latents, level, text in zip(noisy, sigma, texts(told), strict=True)
    ]
    return torch.cat(answers)


def ideogram4(network: Any, noisy: Tensor, sigma: Tensor, told: Told) -> Tensor:
    """diffusers/examples/dreambooth/train_dreambooth_lora_ideogram4.py: time 1 - sigma, padded at the left."""
    lengths, most = told["text_mask"].sum(1).tolist(), told["text_mask"].shape[1] + 3
    ids = diffusers.Ideogram4Pipeline._prepare_ids(lengths, HEIGHT, WIDTH, most, CPU)
    text = torch.zeros(2, most + HEIGHT * WIDTH, told["text"].shape[2])
    for row, own in zip(text, texts(told), strict=True):
        row[most - len(own) : most] = own
    tokens = network(
        hidden_states=F.pad(noisy.flatten(2).transpose(1, 2), (0, 0, most, 0)),
        timestep=1 - sigma,
        encoder_hidden_states=text,
        **dict(zip(("position_ids", "segment_ids", "indicator"), ids, strict=True)),
        return_dict=False,
    )[0]
    return -tokens[:, most:].transpose(1, 2).unflatten(2, (HEIGHT, WIDTH))


VELOCITIES: Mapping[str, Callable[[Any, Tensor, Tensor, Told], Tensor]] = {
    "flux": flux,
    "chroma": chroma,
    "sd3": sd3,
    "flux2": flux2,
    "flux2dev": flux2,
    "qwen": qwen,
    "zimage": zimage,
    "lumina2": lumina2,
    "auraflow": auraflow,
    "anima": anima,
    "krea2": krea2,
    "qwen21": qwen21,
    "flux3": flux3,
    "ernie": ernie,
    "ideogram4": ideogram4,
}
"""Family -> velocity [2, C, H, W] from image to noise, of its raw network; a new family adds its own."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in VELOCITIES),
        ("flux2", {"transformer": {"guidance_embeds": True}}),
        ("flux3", {"transformer": {"flow_map": True}}),
    ],
    ids=[*VELOCITIES, "flux2 that reads a guidance scale", "flux3 that is a flow map"],
)
def test_the_loss_is_that_of_the_training_script(
    name: str, options: Mapping[str, Any], tmp_path: Path
) -> None:
    """The network's velocity at (1 - sigma) x + sigma noise, against noise - x; neither batch nor padding counts."""
    facts = facts_at(write_base(name, tmp_path / "base", **options))
    family, network = families.family(name), network_of(facts)
    told = dict(conditioning_of(family, facts, PROMPTS))
    embedded = facts.guidance.embedded
    assert (
        ("guidance" in told)
        == embedded
        == (name in {"flux", "flux2dev"} or "embeds" in str(options))
    )
    if "guidance" in told:
        told["guidance"] = torch.full([2], 3.5)
    assert {*families.NAMES} == VELOCITIES.keys() | {"sd15", "sd2", "sdxl"}
    shape = (2, facts.latent_channels, HEIGHT, WIDTH)
    latents, noise, sigma = draw(*shape), draw(*shape, seed=1), torch.tensor([0.31, 0.87])
    with torch.no_grad():
        noisy = add_noise(latents, noise, 1 - sigma, sigma)
        predicted = family.predict(network, noisy, 1000 * sigma, told)
        level = sigma[:, None, None, None]
        velocity = VELOCITIES[name](network, (1 - level) * latents + level * noise, sigma, told)
    ours = sample_losses(predicted, target(latents, noise, 1 - sigma, sigma, "flow"))
    theirs = (velocity - (noise - latents)).square().flatten(1).mean(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert theirs[0] != pytest.approx(float(theirs[1]), rel=1e-3)


# ---- prompts, alone and in a batch


FAMILIES = pytest.mark.parametrize("name", families.NAMES)
TOO_LONG = "a word " * 300


def pooled(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    text, _, pooled, _ = pipeline.encode_prompt(
        prompt, None, None, do_classifier_free_guidance=False
    )
    return {"text": text, "pooled": pooled}


def flux_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    text, pooled, _ = pipeline.encode_prompt(prompt, None, device=CPU)
    return {"text": text, "pooled": pooled}


def chroma_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The network sees the text, its end and one token of padding."""
    text, _, mask, *_ = pipeline.encode_prompt(prompt, device=CPU)
    length = int(mask.sum())
    return {"text": text[:, :length]}


def lumina2_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """An empty text is encoded as the pipeline's negative prompt, without a system prompt."""
    text, mask, negative, negative_mask = pipeline.encode_prompt([prompt or SHORT])
    if not prompt:
        text, mask = negative, negative_mask
    return {"text": text[:, : int(mask.sum())]}


def krea2_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The pipeline pads before the end of the template; the network sees no padding and text has no positions."""
    text, mask = pipeline.encode_prompt([prompt])
    assert not mask.all() or "word" in prompt
    return {"text": text[mask].flatten(-2)[None]}


def qwen21_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The pipeline has no limit: it gets as much as there is room for."""
    tokenizer, room = pipeline.processor.tokenizer, encoder("qwen21").prompt_room()
    kept = tokenizer.decode(tokenizer(prompt).input_ids[:room])
    return {"text": pipeline.encode_prompt(kept)[0]}


def ernie_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The pipeline has no limit: it gets as much as there is room for."""
    room = encoder("ernie").prompt_room()
    kept = pipeline.tokenizer.decode(pipeline.tokenizer(prompt).input_ids[1 : room + 1])
    return {"text": pipeline.encode_prompt(kept, CPU)[0][None]}


def ideogram4_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """The pipeline raises for a prompt that is too long: it gets as much as there is room for."""
    tokenizer, room = pipeline.tokenizer, encoder("ideogram4").prompt_room()
    kept = tokenizer.decode(tokenizer(prompt).input_ids[:room])
    text, _, _, kind = pipeline.encode_prompt(kept, 1, 2, 2048, CPU)
    return {"text": text[kind == 3][None]}


def one_clip(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    return {"text": pipeline.encode_prompt(prompt, CPU, 1, False)[0]}


def anima_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """What the blocks of the modular pipeline give the network, without the zeros behind T5's tokens."""
    states = diffusers.modular_pipelines.anima.encoders.AnimaTextEncoderStep.encode_prompt(
        pipeline, prompt, prepare_unconditional_embeds=False
    )
    text = pipeline.text_conditioner(
        source_hidden_states=states["qwen_prompt_embeds"],
        target_input_ids=states["t5_input_ids"],
        target_attention_mask=states["t5_attention_mask"],
        source_attention_mask=states["qwen_attention_mask"],
    )
    length = states["t5_input_ids"].shape[1]
    assert text.shape[1] == 512 and not text[:, length:].any()
    return {"text": text[:, :length]}


def flux3_text(pipeline: Any, prompt: str) -> Mapping[str, Tensor]:
    """Of Qwen3-VL the pipeline's class in transformers; its processor needs torchvision."""
    step = diffusers.modular_pipelines.flux3.encoders.Flux3TextEncoderStep
    tokenizer = AutoTokenizer.from_pretrained(base_of("flux3") / "tokenizer")
    text = step._get_qwen3_vl_prompt_embeds(
        pipeline.text_encoder, text_processor(tokenizer), prompt, max_sequence_length=640
    )
    return {"text": text}


IN_PIPELINE: Mapping[str, Callable[[Any, str], Mapping[str, Tensor]]] = {
    "sd15": one_clip,
    "sd2": one_clip,
    "sdxl": pooled,
    "sd3": pooled,
    "flux": flux_text,
    "flux2": lambda pipeline, prompt: {"text": pipeline.encode_prompt(prompt)[0]},
    "flux2dev": lambda pipeline, prompt: {"text": pipeline.encode_prompt(prompt)[0]},
    "chroma": chroma_text,
    "zimage": lambda pipeline, prompt: {
        "text": pipeline.encode_prompt([prompt], do_classifier_free_guidance=False)[0][0][None]
    },
    "qwen": lambda pipeline, prompt: {
        "text": pipeline.encode_prompt(prompt, max_sequence_length=512)[0]
    },
    "lumina2": lumina2_text,
    "auraflow": lambda pipeline, prompt: {
        "text": pipeline.encode_prompt(prompt, do_classifier_free_guidance=False)[0]
    },
    "anima": anima_text,
    "krea2": krea2_text,
    "qwen21": qwen21_text,
    "flux3": flux3_text,
    "ernie": ernie_text,
    "ideogram4": ideogram4_text,
}


@cache
def encoder(name: str) -> TextEncoder:
    return encoder_of(facts_of(name))


@cache
def pipeline_of(name: str) -> Any:
    """Return the pipeline as diffusers itself loads the base's folder."""
    if families.family(name).pipeline.blocks is not None:
        modular: Any = diffusers.ModularPipeline.from_pretrained(base_of(name))
        modular.load_components()
        return modular
    traits, own = families.family(name).pipeline, dict[str, Any]()
    if traits.processor is not None:  # the release's needs torchvision
        own["processor"] = traits.processor(
            AutoTokenizer.from_pretrained(base_of(name) / "processor")
        )
    return getattr(diffusers, traits.class_name).from_pretrained(base_of(name), **own)


@pytest.mark.filterwarnings("ignore:`FluxPosEmbed` is deprecated:FutureWarning")  # diffusers' own
@pytest.mark.parametrize("prompt", [SHORT, "", TOO_LONG], ids=["short", "empty", "too long"])
@FAMILIES
def test_a_prompt_is_encoded_as_the_pipeline_does(name: str, prompt: str) -> None:
    ours = encoder(name).encode_prompts([prompt])
    with torch.no_grad():
        theirs = IN_PIPELINE[name](pipeline_of(name), prompt)
    for key, tensor in theirs.items():
        torch.testing.assert_close(ours[key], tensor, atol=1e-5, rtol=1e-5)
    length = ours["text"].shape[1]
    shapes = families.family(name).text.shapes(
        facts_of(name).release.architecture, text_tokens=length
    )
    assert {key: tuple(tensor.shape) for key, tensor in ours.items()} == shapes
    assert "text_mask" not in ours or ours["text_mask"].tolist() == [[1] * length]


@FAMILIES
def test_a_prompt_is_the_same_in_a_batch(name: str) -> None:
    """Longer neighbours add zeros behind it, and zeros to its mask."""
    together = encoder(name).encode_prompts([SHORT, LONGER])
    alone = [encoder(name).encode_prompts([prompt]) for prompt in (SHORT, LONGER)]
    for key, tensor in together.items():
        both = torch.cat(padded_alike([each[key] for each in alone]))
        torch.testing.assert_close(tensor, both, atol=1e-5, rtol=1e-5)
        assert not torch.equal(tensor[0], tensor[1])

"""The U-Net families with one or two CLIP encoders, against diffusers' own pipelines and formulas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.families.base.facts import Geometry
from lora_trainer.families.base.sampling import build_sampler
from lora_trainer.families.base.stated import stated_in
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.family_bases import (
    CPU,
    base_of,
    conditioning_of,
    copy_of,
    denoiser_of,
    draw,
    edit_json,
    encoder_of,
    facts_at,
    facts_of,
    network_of,
    pipeline_of,
    side_of,
)
from tests.fakes.ldm_file import write_checkpoint

LEVELS = [
    ("sd15", "epsilon", False),
    ("sd2", "v_prediction", False),
    ("sdxl", "v_prediction", True),
    ("sdxl", "epsilon", False),
]
GEOMETRY = Geometry(original_px=(900, 700), corner_px=(3, 5), target_px=(16, 24))
TELLING_WEIGHT = (
    "model.diffusion_model.output_blocks.11.1.transformer_blocks.0.norm1.bias"  # ComfyUI's too
)


# ---- facts


@pytest.mark.parametrize("stated", ["epsilon", "v_prediction", "sample", None])
def test_prediction_and_terminal_noise_are_those_of_the_scheduler(
    stated: str | None, tmp_path: Path
) -> None:
    base = copy_of("sd15", tmp_path / "base")
    assert not facts_at(base).release.zero_terminal_snr
    edit_json(
        base / "scheduler/scheduler_config.json",
        prediction_type=stated,
        rescale_betas_zero_snr=True,
    )
    if stated == "sample":
        with pytest.raises(InputError, match="prediction_type='sample'"):
            facts_at(base)
        return
    facts = facts_at(base)
    assert facts.release.prediction == (stated or "epsilon") and facts.release.zero_terminal_snr
    assert (
        float(facts.release.alphas_cumprod()[-1]) == 0 < float(facts.release.alphas_cumprod()[-2])
    )


def test_a_fine_tune_known_to_predict_velocity_does() -> None:
    """Whatever the scheduler beside it says."""
    source = "Laxhar/noobai-XL-Vpred-1.0"
    for facts in (
        families.family("sdxl").releases[source],
        facts_at(base_of("sdxl"), source=source),
    ):
        assert facts.release.prediction == "v_prediction" and facts.release.zero_terminal_snr


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own
@pytest.mark.parametrize(
    "kind", ["DDIMScheduler", "EulerDiscreteScheduler", "PNDMScheduler", "Nobody"]
)
def test_samplers_follow_the_facts(kind: str) -> None:
    """One that knows no terminal noise (PNDM) is only replaced when there is some, one of a later version always."""
    release = facts_of("sd15").release
    scheduler = {**release.scheduler, "_class_name": kind}
    release = replace(release, prediction="v_prediction", scheduler=scheduler)
    plain = release.sampling_scheduler()
    assert type(plain).__name__ == ("DDIMScheduler" if kind == "Nobody" else kind)
    assert plain.config.prediction_type == "v_prediction"
    assert plain.config.timestep_spacing == "leading"
    terminal = replace(release, zero_terminal_snr=True).sampling_scheduler()
    replaced = kind.startswith(("PNDM", "Nobody"))
    assert type(terminal).__name__ == ("DDIMScheduler" if replaced else kind)
    assert terminal.config.timestep_spacing == "trailing"
    assert terminal.config.prediction_type == "v_prediction"
    assert float(terminal.alphas_cumprod[-1]) < 1e-7 < 1e-3 < float(plain.alphas_cumprod[-1])
    terminal.set_timesteps(3)
    assert float(terminal.timesteps[0]) == 999, "sampling starts at pure noise"


# diffusers' Euler makes arrays of tensors in a way that numpy will drop.
@pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")
@pytest.mark.parametrize(
    ("name", "kind", "sampler", "spacing"),
    [
        ("sdxl", "lightning", "EulerDiscreteScheduler", "trailing"),
        ("sdxl", "dmd", "LCMScheduler", None),
        ("sdxl", "", "", None),
        ("sd15", "hyper", "DDIMScheduler", "trailing"),
        ("sd15", "turbo", "EulerDiscreteScheduler", "trailing"),
    ],
)
def test_a_few_step_base_is_drawn_with_its_own_sampler(
    name: str, kind: str, sampler: str, spacing: str | None
) -> None:
    """Euler's usual spacing leaves noise in four steps; training has the noise levels of the base."""
    family, plain = families.family(name), facts_of(name)
    facts = replace(plain, release=family.as_distilled(plain.release, kind))
    drawn: Any = build_sampler(family, facts, denoiser=network_of(facts), device=CPU)
    scheduler = drawn.pipeline.scheduler
    own = plain.release.sampling_scheduler()
    assert type(scheduler).__name__ == (sampler or type(own).__name__)
    assert scheduler.config.timestep_spacing == (spacing or own.config.timestep_spacing)
    assert torch.equal(facts.release.alphas_cumprod(), plain.release.alphas_cumprod())
    prompt, negative = (encoder_of(facts).encode_prompts([words]) for words in ("a toy", ""))
    image = drawn.image(
        prompt,
        negative,
        seed=1,
        size_px=(side_of(facts), side_of(facts)),
        steps=facts.release.drawing.steps,
        guidance_scale=facts.release.drawing.guidance_scale,
    )
    assert np.asarray(image).std() > 0


# ---- what a checkpoint of Stable Diffusion 2 predicts


@pytest.mark.parametrize(
    ("dtype", "deviation", "prediction", "side_px"),
    [
        (torch.float16, 0.13, "v_prediction", 16),
        (torch.bfloat16, 0.06, "epsilon", 128),
        (torch.float32, 0.06, "epsilon", 128),
        (torch.float64, 0.13, "v_prediction", 16),
        (None, None, "v_prediction", 16),
    ],
)
def test_a_checkpoint_s_prediction_is_told_from_a_weight(
    dtype: Any, deviation: float | None, prediction: str, side_px: int, tmp_path: Path
) -> None:
    """It wins over the companion's scheduler, whose native size is then of the other kind too."""
    family, file = families.family("sd2"), tmp_path / "file.safetensors"
    write_checkpoint(base_of("sd2"), file, family.text)
    tensors, bare = load_file(file), TELLING_WEIGHT.removeprefix("model.diffusion_model.")
    if deviation is not None:
        values = draw(320)
        tensors[TELLING_WEIGHT] = (5 + deviation * values / values.std()).to(dtype)
    save_file(tensors, file)
    facts = facts_at(base_of("sd2"), denoiser=file)
    assert (facts.release.prediction, facts.resolution_px) == (prediction, side_px)
    asked = [each.key for each in facts.release.assumed]
    assert ("base.prediction" in asked) == (deviation is None)
    if deviation is not None:
        save_file({bare: tensors[TELLING_WEIGHT]}, file)
        alone = family.as_stated(family.file_release(file, {}), stated_in(file))
        assert (alone.prediction, [each.key for each in alone.assumed]) == (prediction, asked)


# ---- conditioning and loss


def test_the_network_is_told_height_before_width_in_exact_numbers() -> None:
    """bf16 would make 1027 of 1024: integers are not cast."""
    facts = facts_of("sdxl")
    told = facts.release.geometry_conditioning(GEOMETRY)["time_ids"]
    assert told.tolist() == [[700, 900, 5, 3, 24, 16]] and not told.is_floating_point()
    wanted = pipeline_of(facts)._get_add_time_ids(
        (700, 900), (5, 3), (24, 16), torch.float32, text_encoder_projection_dim=16
    )
    assert told.tolist() == wanted.tolist()


@pytest.mark.parametrize(("name", "prediction", "terminal"), LEVELS)
def test_the_loss_is_that_of_diffusers_training_script(
    name: str, prediction: Any, terminal: bool
) -> None:
    """train_text_to_image_lora(_sdxl): DDPM's add_noise, noise or velocity as target, mean of squares."""
    facts = facts_of(name)
    release = replace(facts.release, prediction=prediction, zero_terminal_snr=terminal)
    facts = replace(facts, release=release)
    latents, noise = draw(4, 4, 8, 12, seed=3), draw(4, 4, 8, 12, seed=4)
    timesteps, family = torch.tensor([0, 10, 500, 999]), families.family(name)
    told = conditioning_of(family, facts, ["a", "b", "c", "d"])
    signal = facts.release.alphas_cumprod()[timesteps]
    level = signal.sqrt().float(), (1 - signal).sqrt().float()
    scheduler = DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        rescale_betas_zero_snr=terminal,
    )
    added = {"text_embeds": told.get("pooled"), "time_ids": told.get("time_ids")}
    with torch.no_grad():
        noisy = add_noise(latents, noise, *level)
        predicted = family.predict(network_of(facts), noisy, timesteps, told)
        ours = sample_losses(predicted, target(latents, noise, *level, prediction))
        velocity = scheduler.get_velocity(latents, noise, timesteps)
        raw = pipeline_of(facts).unet(
            scheduler.add_noise(latents, noise, timesteps),
            timesteps,
            told["text"],
            added_cond_kwargs=added if name == "sdxl" else None,
        )
        theirs = (raw.sample - (noise if prediction == "epsilon" else velocity)) ** 2
    torch.testing.assert_close(ours, theirs.mean(dim=(1, 2, 3)), rtol=1e-5, atol=1e-6)


# ---- text encoders


@pytest.mark.parametrize("name", ["sd15", "sd2", "sdxl"])
def test_every_trained_text_layer_is_planned_and_gets_a_gradient(name: str) -> None:
    """SDXL's U-Net reads the layer before the last; only the second encoder's last one makes `pooled`."""
    family, facts = families.family(name), facts_of(name)
    encoder, planned = encoder_of(facts), family.text_adapter_shapes(facts)
    assert planned.keys() == encoder.networks.keys()
    trained: list[Any] = []
    for component, network in encoder.networks.items():
        assert not any(p.requires_grad for p in network.parameters()) and not network.training
        targets = family.lora_targets(network, "text_encoder")
        layers = network.config.num_hidden_layers  # type: ignore[union-attr]  # transformers' own
        unread = (name, component) == ("sdxl", "text_encoder")
        assert len(targets) == 6 * (layers - unread)
        weights: list[Any] = [network.get_submodule(module).weight for module in targets]
        named = [module.removeprefix("text_model.") for module in targets]
        shapes = [(weight.shape[1], weight.shape[0]) for weight in weights]
        assert planned[component] == dict(zip(named, shapes, strict=True))
        trained += weights
    for weight in trained:
        weight.requires_grad_(True)
    tokens = encoder.tokenize(["one blue toy", "two"])
    assert all(ids.shape == (2, 77) and ids.dtype == torch.int64 for ids in tokens.values())
    torch.stack([value.square().sum() for value in encoder.embed(tokens).values()]).sum().backward()
    assert all(weight.grad is not None and weight.grad.abs().max() > 0 for weight in trained)


# ---- samples


def test_the_sampler_is_where_the_denoiser_is() -> None:
    """diffusers takes a pipeline's device from its first module, which must not be a VAE on the CPU."""
    facts, meta = facts_of("sdxl"), torch.device("meta")
    sampler: Any = build_sampler(
        families.family("sdxl"), facts, denoiser=denoiser_of("sdxl").to("meta"), device=meta
    )
    assert sampler.pipeline.device.type == "meta" and sampler.vae.device == CPU
    assert sampler.pipeline.vae_scale_factor == facts.vae_factor


def test_the_vae_is_on_the_device_for_an_image_also_when_that_is_full(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a full GPU a VAE that stayed would make every later step run out of memory too."""
    facts, device, moves = facts_of("sd15"), torch.device("cpu", 0), list[str]()
    sampler = build_sampler(
        families.family("sd15"), facts, denoiser=denoiser_of("sd15"), device=device
    )
    prompt, vae, to = encoder_of(facts).encode_prompts(["a toy"]), sampler.vae, sampler.vae.to
    full = set[str]()

    def moved(place: Any) -> Any:
        moves.append(str(place))
        if moves[-1] in full:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to(place)

    def no_room(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def draw_one() -> Any:
        return sampler.image(prompt, prompt, seed=1, size_px=(16, 16), steps=1, guidance_scale=1.0)

    monkeypatch.setattr(vae, "to", moved)
    assert draw_one().size == (16, 16) and moves == ["cpu:0", "cpu"]
    monkeypatch.setattr(vae, "decode", no_room)
    for place in ("", "cpu:0"):
        full.add(place)
        with pytest.raises(torch.OutOfMemoryError):
            draw_one()
        assert moves[-1] == "cpu"


def test_a_plain_pipeline_in_half_precision_keeps_its_vae_in_full() -> None:
    pipeline = pipeline_of(facts_of("sd15"), torch.bfloat16)
    assert pipeline.unet.dtype == pipeline.text_encoder.dtype == torch.bfloat16
    assert pipeline.vae.dtype == torch.float32
    image = pipeline("a toy", num_inference_steps=3, width=24, height=16, output_type="np").images[
        0
    ]
    assert image.shape == (16, 24, 3) and image.std() > 0


# ---- files


def test_a_release_sized_file_of_sdxl_has_sd_scripts_names() -> None:
    family = families.family("sdxl")
    for module, name in (
        ("down_blocks.1.attentions.0.{}.0.attn1.to_q", "input_blocks_4_1_{}_0_attn1_to_q"),
        ("mid_block.attentions.0.{}.9.attn2.to_out.0", "middle_block_1_{}_9_attn2_to_out_0"),
        ("up_blocks.1.attentions.2.proj_out", "output_blocks_5_1_proj_out"),
        ("up_blocks.0.upsamplers.0.conv", "output_blocks_2_2_conv"),
    ):
        layer = module.format("transformer_blocks")
        expected = f"lora_unet_{name.format('transformer_blocks')}"
        assert family.lora_key_name("kohya", "denoiser", layer) == expected
    # transformers 5 left `text_model` out of its names; files have it, whatever it calls the module.
    layer, named = "encoder.layers.0.self_attn.q_proj", families.family("sd15").lora_key_name
    for module in (layer, f"text_model.{layer}"):
        kohya = "lora_te_text_model_encoder_layers_0_self_attn_q_proj"
        assert named("kohya", "text_encoder", module) == kohya
        assert named("diffusers", "text_encoder", module) == f"text_encoder.text_model.{layer}"
    encoders = (("text_encoder", "lora_te1_"), ("text_encoder_2", "lora_te2_"))
    for component, prefix in encoders:
        assert family.lora_key_name("kohya", component, "layers.0").startswith(prefix)

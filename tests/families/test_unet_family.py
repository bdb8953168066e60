"""The U-Net families with one or two CLIP encoders, against diffusers' own pipelines and formulas."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.costs.cost_table import adapter_shapes
from lora_trainer.families.base import DENOISER, BaseFacts, FileFormat, Layout, Prediction
from lora_trainer.families.unet import UNetFamily, sampling_scheduler
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.family_bases import CPU, base_of, copy_of, facts_of
from tests.fakes.json_files import edit_json

ONE_ENCODER = pytest.mark.parametrize("name", ["sd15", "sd2"])
PROMPTS = ["one blue toy", "two"]
LEVELS: tuple[tuple[Prediction, bool], ...] = (
    ("epsilon", False),
    ("v_prediction", False),
    ("v_prediction", True),
)


def of(name: str, **changes: Any) -> tuple[UNetFamily, BaseFacts]:
    family = families.family(name)
    assert isinstance(family, UNetFamily)
    return family, replace(facts_of(name), **changes)


def facts_at(name: str, folder: Path) -> BaseFacts:
    return families.family(name).facts(Layout(folder=folder), source="x")


def pipeline_of(name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    family, facts = of(name, **changes)
    pipeline = family.plain_pipeline(facts, dtype=dtype, device=CPU)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


# ---- facts


@ONE_ENCODER
@pytest.mark.parametrize("found", ["epsilon", "v_prediction", "sample", None])
def test_the_prediction_is_that_of_the_scheduler(
    name: str, found: str | None, tmp_path: Path
) -> None:
    base = copy_of(name, tmp_path / "base")
    edit_json(base / "scheduler/scheduler_config.json", prediction_type=found)
    if found == "sample":
        with pytest.raises(InputError, match="prediction_type='sample'"):
            facts_at(name, base)
    else:
        assert facts_at(name, base).prediction == (found or "epsilon")


@ONE_ENCODER
def test_terminal_noise_is_that_of_the_scheduler(name: str, tmp_path: Path) -> None:
    base = copy_of(name, tmp_path / "base")
    assert not facts_at(name, base).zero_terminal_snr
    edit_json(base / "scheduler/scheduler_config.json", rescale_betas_zero_snr=True)
    facts = facts_at(name, base)
    assert facts.zero_terminal_snr
    levels = facts.alphas_cumprod()
    assert float(levels[-1]) == 0 < float(levels[-2])


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # diffusers' own
@pytest.mark.parametrize("kind", ["DDIMScheduler", "EulerDiscreteScheduler", "PNDMScheduler"])
def test_samplers_follow_the_facts(kind: str) -> None:
    """A sampler that knows no terminal noise (PNDM) is only replaced when there is some."""
    _, facts = of("sd15", prediction="v_prediction")
    facts = replace(facts, scheduler={**facts.scheduler, "_class_name": kind})
    plain = sampling_scheduler(facts)
    assert type(plain).__name__ == kind
    assert plain.config.prediction_type == "v_prediction"
    assert plain.config.timestep_spacing == "leading"
    terminal = sampling_scheduler(replace(facts, zero_terminal_snr=True))
    assert type(terminal).__name__ == ("DDIMScheduler" if kind.startswith("PNDM") else kind)
    assert terminal.config.timestep_spacing == "trailing"
    assert terminal.config.prediction_type == "v_prediction"
    assert float(terminal.alphas_cumprod[-1]) < 1e-7 < 1e-3 < float(plain.alphas_cumprod[-1])
    terminal.set_timesteps(3)
    assert float(terminal.timesteps[0]) == 999, "sampling starts at pure noise"


def test_an_unknown_sampler_is_replaced() -> None:
    _, facts = of("sd15")
    unknown = replace(facts, scheduler={**facts.scheduler, "_class_name": "Nobody"})
    assert type(sampling_scheduler(unknown)).__name__ == "DDIMScheduler"


@pytest.mark.parametrize(
    ("name", "file", "key"),
    [
        ("sd15", "unet/config.json", "sample_size"),
        ("sd2", "unet/config.json", "block_out_channels"),
        ("sd15", "vae/config.json", "latent_channels"),
        ("flux", "vae/config.json", "latent_channels"),
        ("flux", "vae/config.json", "block_out_channels"),
        ("sd2", "text_encoder/config.json", "max_position_embeddings"),
    ],
)
def test_a_hostile_config_is_one_line(name: str, file: str, key: str, tmp_path: Path) -> None:
    base = copy_of(name, tmp_path / "base")
    for value in (None, "8", {}, []):
        edit_json(base / file, **{key: value})
        with pytest.raises(InputError, match=f"{key}="):
            facts_at(name, base)


@ONE_ENCODER
@pytest.mark.parametrize(
    "change", [{"in_channels": 9}, {"cross_attention_dim": "16"}, {"in_channels": "4"}]
)
def test_other_networks_are_not_detected(
    name: str, change: Mapping[str, Any], tmp_path: Path
) -> None:
    base, family = copy_of(name, tmp_path / "base"), families.family(name)
    assert family.detect(base)
    edit_json(base / "unet/config.json", **change)
    assert not family.detect(base)


# ---- another VAE


@ONE_ENCODER
def test_a_vae_folder_replaces_the_base_s_own(name: str, tmp_path: Path) -> None:
    own, other = base_of(name), copy_of(name, tmp_path / "other")
    edit_json(other / "vae/config.json", scaling_factor=0.5001)
    family = families.family(name)
    layout = Layout(folder=own, files={"vae": other / "vae"})
    facts = family.facts(layout, source="x")
    assert family.parts(layout)["vae"][0].is_relative_to(other)
    encoder: Any = family.load_image_encoder(facts, device=CPU)
    assert encoder.vae.config.scaling_factor == 0.5001
    for change in ({"scaling_factor": 0.13025}, {"latent_channels": 16}):
        edit_json(other / "vae/config.json", **change)
        with pytest.raises(InputError, match="the VAE in .* the base model's"):
            family.facts(layout, source="x")


# ---- what is cached


@ONE_ENCODER
def test_latents_are_those_of_the_pipeline_bit_for_bit(name: str) -> None:
    family, facts = of(name)
    pixels = torch.rand(2, 3, 16, 24) * 2 - 1
    vae = pipeline_of(name).vae
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
    for index, found in enumerate(
        family.load_image_encoder(facts, device=CPU).encode_images(pixels)
    ):
        assert torch.equal(found.mean, posterior.mean[index] * vae.config.scaling_factor)
        assert torch.equal(found.std, posterior.std[index] * vae.config.scaling_factor)


@ONE_ENCODER
def test_gradients_reach_the_text_encoder(name: str) -> None:
    family, facts = of(name)
    encoder = family.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    ((component, network),) = encoder.networks.items()
    assert component == "text_encoder"
    assert not any(p.requires_grad for p in network.parameters()) and not network.training
    targets = family.lora_targets(network, "text_encoder")
    assert len(targets) == 6 * network.config.num_hidden_layers
    for module in targets:
        network.get_submodule(module).weight.requires_grad_(True)
    tokens = encoder.tokenize(PROMPTS)
    assert tokens[component].shape == (2, 77) and tokens[component].dtype == torch.int64
    encoder.embed(tokens)["text"].square().sum().backward()
    for module in targets:
        assert float(network.get_submodule(module).weight.grad.abs().max()) > 0, module


# ---- the loss


@ONE_ENCODER
@pytest.mark.parametrize(("prediction", "terminal"), LEVELS)
def test_the_loss_is_that_of_diffusers_training_script(
    name: str, prediction: Prediction, terminal: bool
) -> None:
    """train_text_to_image_lora: DDPM's add_noise, noise or velocity as target, mean of squares."""
    family, facts = of(name, prediction=prediction, zero_terminal_snr=terminal)
    generator = torch.Generator().manual_seed(3)
    latents, noise = (torch.randn(4, 4, 6, 8, generator=generator) for _ in range(2))
    timesteps = torch.tensor([0, 10, 500, 999])
    text = family.load_text_encoder(facts, dtype=torch.float32, device=CPU).encode_prompts(
        ["a", "b", "c", "d"]
    )
    denoiser = family.load_denoiser(facts, dtype=torch.float32, device=CPU)
    signal = facts.alphas_cumprod()[timesteps]
    alpha, sigma = signal.sqrt().float(), (1 - signal).sqrt().float()

    scheduler = DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        rescale_betas_zero_snr=terminal,
    )
    with torch.no_grad():
        noisy = add_noise(latents, noise, alpha, sigma)
        ours = sample_losses(
            family.predict(denoiser, noisy, timesteps, text),
            target(latents, noise, alpha, sigma, prediction),
        )
        theirs_noisy = scheduler.add_noise(latents, noise, timesteps)
        wanted = (
            noise if prediction == "epsilon" else scheduler.get_velocity(latents, noise, timesteps)
        )
        raw = pipeline_of(name).unet(theirs_noisy, timesteps, text["text"]).sample
        theirs = torch.nn.functional.mse_loss(raw, wanted, reduction="none").mean(dim=(1, 2, 3))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# ---- samples


@ONE_ENCODER
@pytest.mark.parametrize(("prediction", "terminal"), LEVELS)
def test_a_sample_is_the_image_of_the_plain_pipeline(
    name: str, prediction: Prediction, terminal: bool
) -> None:
    changes = {"prediction": prediction, "zero_terminal_snr": terminal}
    family, facts = of(name, **changes)
    encoder = family.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    denoiser = family.load_denoiser(facts, dtype=torch.float32, device=CPU)
    sampler = family.build_sampler(facts, denoiser=denoiser, device=CPU)
    ours = sampler.image(
        encoder.encode_prompts(["a toy"]),
        encoder.encode_prompts(["bad"]),
        seed=5,
        size_px=(24, 16),
        steps=3,
        guidance_scale=4.0,
    )
    theirs = drawn(pipeline_of(name, **changes))
    assert ours.size == theirs.size == (24, 16)
    assert apart(ours, theirs) <= 1
    if terminal:
        assert apart(ours, drawn(pipeline_of(name, prediction=prediction))) > 1
    elif prediction != facts_of(name).prediction:
        assert apart(ours, drawn(pipeline_of(name))) > 1


def drawn(pipeline: Any) -> Image.Image:
    image: Image.Image = pipeline(
        "a toy",
        negative_prompt="bad",
        generator=torch.Generator().manual_seed(5),
        width=24,
        height=16,
        num_inference_steps=3,
        guidance_scale=4.0,
    ).images[0]
    return image


def apart(one: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(one, dtype=np.int16) - np.asarray(other, dtype=np.int16)).max())


@ONE_ENCODER
def test_the_sampler_is_where_the_denoiser_is(name: str) -> None:
    """diffusers takes a pipeline's device from its first module, which must not be a VAE on the CPU."""
    family, facts = of(name)
    denoiser = family.load_denoiser(facts, dtype=torch.float32, device=CPU).to("meta")
    sampler: Any = family.build_sampler(facts, denoiser=denoiser, device=torch.device("meta"))
    assert sampler.pipeline.device.type == "meta" and sampler.vae.device == CPU
    assert sampler.pipeline.vae_scale_factor == facts.vae_factor


@ONE_ENCODER
def test_a_plain_pipeline_in_half_precision_keeps_its_vae_in_full(name: str) -> None:
    pipeline = pipeline_of(name, torch.bfloat16)
    assert pipeline.unet.dtype == pipeline.text_encoder.dtype == torch.bfloat16
    assert pipeline.vae.dtype == torch.float32
    assert apart(drawn(pipeline), drawn(pipeline_of(name))) < 60


# ---- files


@ONE_ENCODER
@pytest.mark.parametrize("format", ["kohya", "diffusers"])
def test_files_are_read_by_the_pipeline(name: str, format: FileFormat, tmp_path: Path) -> None:
    """Every target of both networks, convolutions too, under the names of the format."""
    family, _ = of(name)
    changed, pipeline = pipeline_of(name), pipeline_of(name)
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(1)
    for component, network, modules in (
        (DENOISER, changed.unet, family.lora_targets(changed.unet, "all")),
        (
            "text_encoder",
            changed.text_encoder,
            family.lora_targets(changed.text_encoder, "text_encoder"),
        ),
    ):
        for module in modules:
            down, up = factors(network.get_submodule(module), generator)
            tensors |= written(family.lora_key_name(format, component, module), format, down, up)
    before = outputs(pipeline)
    save_file(tensors, tmp_path / "adapter.safetensors")
    pipeline.load_lora_weights(tmp_path, weight_name="adapter.safetensors")
    for found, wanted, plain in zip(outputs(pipeline), outputs(changed), before, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        assert float((wanted - plain).abs().max()) > 0.05, "or a file that does nothing would pass"


def factors(layer: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Add a random update of rank 2 to a layer and return its factors."""
    shape = layer.weight.shape
    down = 0.2 * torch.randn(2, *shape[1:], generator=generator)
    up = 0.2 * torch.randn(shape[0], 2, *[1] * (len(shape) - 2), generator=generator)
    with torch.no_grad():
        layer.weight += (up.flatten(1) @ down.flatten(1)).view(shape)
    return down, up


def written(name: str, format: FileFormat, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    if format == "diffusers":
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    alpha = {f"{name}.alpha": torch.tensor(1.0)}  # of rank 2: half the scale
    return {f"{name}.lora_down.weight": 2 * down, f"{name}.lora_up.weight": up, **alpha}


def outputs(pipeline: Any) -> tuple[Tensor, Tensor]:
    width, side = pipeline.unet.config.cross_attention_dim, pipeline.unet.config.sample_size
    with torch.no_grad():
        text = pipeline.text_encoder(torch.arange(77)[None])[0]
        image = pipeline.unet(
            torch.linspace(-1, 1, 4 * side * side).view(1, 4, side, side),
            torch.tensor([300]),
            encoder_hidden_states=torch.linspace(-1, 1, 77 * width).view(1, 77, width),
        ).sample
    return text, image


@ONE_ENCODER
def test_shapes_for_the_plan_are_in_the_order_of_the_modules(name: str) -> None:
    family, facts = of(name)
    denoiser: nn.Module = family.load_denoiser(facts, dtype=torch.float32, device=CPU)
    for targets in ("attention", "transformer", "all"):
        shapes = adapter_shapes(family, facts, targets=targets)
        assert list(shapes) == family.lora_targets(denoiser, targets)
        for module, (fan_in, out, *rest) in shapes.items():
            weight: Any = denoiser.get_submodule(module).weight
            assert (weight[0].numel(), len(weight)) == (fan_in, out), module
            kernel = weight[0, 0].numel()
            assert rest == ([kernel] if kernel > 1 else []), module

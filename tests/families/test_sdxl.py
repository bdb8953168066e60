"""SDXL against diffusers: conditioning, loss, images, adapter files, checkpoints, refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import UNet2DConditionModel
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Conditioning, Geometry, Layout
from lora_trainer.families.sdxl import ARCHITECTURE, FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.sdxl import write_base

CPU = torch.device("cpu")
PROMPTS = ["a red fox", "two birds on a wire, ink"]
GEOMETRY = Geometry(original_px=(900, 700), corner_px=(3, 5), target_px=(16, 24))
RANK, ALPHA = 4, 3.0


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("sdxl") / "base")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return facts_of(base)


@pytest.fixture(scope="module")
def texts(facts: BaseFacts) -> Conditioning:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    return encoder.encode_prompts(PROMPTS)


@pytest.fixture
def copy(base: Path, tmp_path: Path) -> Path:
    shutil.copytree(base, tmp_path / "copy")
    return tmp_path / "copy"


def facts_of(folder: Path, **files: Path) -> BaseFacts:
    layout = Layout(folder=folder, files=files)  # type: ignore[arg-type]
    return FAMILY.facts(layout, source="tiny")


def unet_of(facts: BaseFacts) -> nn.Module:
    return FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)


def pipeline_of(facts: BaseFacts) -> Any:
    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def conditioning(texts: Conditioning, facts: BaseFacts) -> dict[str, Tensor]:
    told = facts.geometry_conditioning(GEOMETRY)["time_ids"]
    return {**texts, "time_ids": told.expand(len(PROMPTS), -1)}


def change(file: Path, **values: Any) -> None:
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **values}))


# ---- facts


def test_identity_covers_both_encoders_and_both_tokenizers(base: Path) -> None:
    files = FAMILY.parts(Layout(folder=base))["text_encoder"]
    assert {file.parent.name for file in files} == {
        "text_encoder",
        "text_encoder_2",
        "tokenizer",
        "tokenizer_2",
    }


def test_a_fine_tune_known_to_predict_velocity_does(base: Path) -> None:
    """Whatever the scheduler beside it says."""
    source = "Laxhar/noobai-XL-Vpred-1.0"
    known, found = (
        FAMILY.releases.get(source),
        FAMILY.facts(Layout(folder=base), source=source),
    )
    assert known is not None and known.prediction == found.prediction == "v_prediction"
    assert known.zero_terminal_snr and found.zero_terminal_snr


# ---- conditioning


def test_the_network_is_told_height_before_width(facts: BaseFacts) -> None:
    told = facts.geometry_conditioning(GEOMETRY)["time_ids"]
    assert told.tolist() == [[700, 900, 5, 3, 24, 16]]
    wanted = pipeline_of(facts)._get_add_time_ids(
        (700, 900), (5, 3), (24, 16), torch.float32, text_encoder_projection_dim=16
    )
    assert told.tolist() == wanted.tolist()


def test_sizes_stay_exact_in_half_precision(facts: BaseFacts, texts: Conditioning) -> None:
    """bf16 would make 1027 of 1024: integers are not cast."""
    told = replace(GEOMETRY, original_px=(1027, 1027))
    assert not facts.geometry_conditioning(told)["time_ids"].is_floating_point()


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_losses_are_those_of_diffusers_training_script(
    copy: Path, texts: Conditioning, prediction: str
) -> None:
    """train_text_to_image_lora_sdxl.py: DDPM levels, noise or velocity, mean squared error, time ids."""
    change(copy / "scheduler" / "scheduler_config.json", prediction_type=prediction)
    facts = facts_of(copy)
    generator = torch.Generator().manual_seed(3)
    latents, noise = (torch.randn(2, 4, 12, 8, generator=generator) for _ in range(2))
    timesteps = torch.tensor([17, 801])
    unet = unet_of(facts)

    levels = facts.alphas_cumprod()[timesteps].float()
    alpha, sigma = levels.sqrt(), (1 - levels).sqrt()
    with torch.no_grad():
        noisy = add_noise(latents, noise, alpha, sigma)
        predicted = FAMILY.predict(unet, noisy, timesteps, conditioning(texts, facts))
        wanted = target(latents, noise, alpha, sigma, facts.prediction)
        ours = sample_losses(predicted, wanted)

    betas = torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2
    signal = torch.cumprod(1 - betas, dim=0)[timesteps].view(-1, 1, 1, 1)
    time_ids = torch.tensor([[700.0, 900.0, 5.0, 3.0, 24.0, 16.0]]).repeat(2, 1)
    with torch.no_grad():
        theirs = unet(
            signal.sqrt() * latents + (1 - signal).sqrt() * noise,
            timesteps,
            texts["text"],
            added_cond_kwargs={"text_embeds": texts["pooled"], "time_ids": time_ids},
        ).sample
    velocity = signal.sqrt() * noise - (1 - signal).sqrt() * latents
    loss = (theirs - (noise if prediction == "epsilon" else velocity)) ** 2
    torch.testing.assert_close(ours, loss.mean(dim=[1, 2, 3]), rtol=1e-5, atol=1e-5)


# ---- images


def test_a_vae_that_overflows_in_fp16_gives_finite_latents(copy: Path) -> None:
    """SDXL's own VAE does: activations beyond 65,504 in float32 weights that fp16 can hold."""
    file = copy / "vae" / "diffusion_pytorch_model.safetensors"
    tensors = load_file(file)
    first = tensors["encoder.conv_in.weight"]
    tensors["encoder.conv_in.weight"] = first * (6e4 / first.abs().max())
    save_file(tensors, file, metadata={"format": "pt"})
    pixels = torch.ones(1, 3, 16, 16)
    pixels[..., ::2, :] = -1
    encoder = FAMILY.load_image_encoder(facts_of(copy), device=CPU)
    (latents,) = encoder.encode_images(pixels)
    assert latents.mean.isfinite().all() and latents.mean.abs().max() < 100
    half = pipeline_of(facts_of(copy)).vae.half()
    with torch.no_grad():
        assert not half.encode(pixels.half()).latent_dist.mean.isfinite().all()


# ---- adapters


def adapted(network: nn.Module, modules: list[str], seed: int) -> dict[str, Tensor]:
    """Put a live adapter with alpha / rank = 0.75 into a network; return its factors by module."""
    generator = torch.Generator().manual_seed(seed)
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=modules)
    network.add_adapter(config)  # type: ignore[operator]
    factors = {name: p for name, p in network.named_parameters() if "lora_" in name}
    for parameter in factors.values():
        parameter.data = 0.3 * torch.randn(parameter.shape, generator=generator)
    return {name: parameter.data.clone() for name, parameter in factors.items()}


def kohya_tensors(component: str, factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name, tensor in factors.items():
        module, _, factor = name.rpartition(".lora_")
        key = FAMILY.lora_key_name("kohya", component, module)
        kind = "lora_down" if factor.startswith("A") else "lora_up"
        tensors[f"{key}.{kind}.weight"] = tensor
        tensors[f"{key}.alpha"] = torch.tensor(ALPHA)
    return tensors


def test_trained_text_encoders_give_the_live_output_in_diffusers(
    facts: BaseFacts, texts: Conditioning, tmp_path: Path
) -> None:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    tensors: dict[str, Tensor] = {}
    for seed, (component, network) in enumerate(encoder.networks.items()):
        tensors |= kohya_tensors(
            component, adapted(network, FAMILY.lora_targets(network, "text_encoder"), seed)
        )
    live = encoder.encode_prompts(PROMPTS)
    save_file(tensors, tmp_path / "a.safetensors")
    pipeline = pipeline_of(facts)
    pipeline.load_lora_weights(tmp_path / "a.safetensors")
    text, _, pooled, _ = pipeline.encode_prompt(PROMPTS, do_classifier_free_guidance=False)
    for found, name in ((text, "text"), (pooled, "pooled")):
        assert (live[name] - texts[name]).abs().max() > 0.05, name
        torch.testing.assert_close(found, live[name], rtol=0, atol=1e-4)
    prefixes = {key.partition("_text_model_encoder_layers_")[0] for key in tensors}
    assert prefixes == {"lora_te1", "lora_te2"}


def test_every_trained_text_layer_gets_a_gradient(facts: BaseFacts) -> None:
    """The U-Net reads the layer before the last; only the second encoder's last one makes `pooled`."""
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    for component, network in encoder.networks.items():
        modules = FAMILY.lora_targets(network, "text_encoder")
        last = [name for name in modules if "layers.1." in name]
        assert len(last) == (0 if component == "text_encoder" else 6)
        adapted(network, modules, 0)
    found = encoder.embed(encoder.tokenize(PROMPTS))
    (found["text"].square().sum() + found["pooled"].square().sum()).backward()
    for network in encoder.networks.values():
        for name, parameter in network.named_parameters():
            if parameter.requires_grad:
                assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_a_release_sized_file_has_sd_scripts_names() -> None:
    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(dict(ARCHITECTURE))
    names = [
        FAMILY.lora_key_name("kohya", "denoiser", module)
        for module in FAMILY.lora_targets(unet, "transformer")
    ]
    assert len(set(names)) == len(names) == 722
    assert "lora_unet_input_blocks_4_1_transformer_blocks_0_attn1_to_q" in names
    assert "lora_unet_middle_block_1_transformer_blocks_9_attn2_to_out_0" in names
    assert "lora_unet_output_blocks_5_1_proj_out" in names
    name = FAMILY.lora_key_name("diffusers", "denoiser", "mid_block.attentions.0.proj_in")
    assert name == "unet.mid_block.attentions.0.proj_in"


# ---- refusals


def test_the_refiner_is_named(copy: Path) -> None:
    change(copy / "model_index.json", text_encoder=[None, None], tokenizer=[None, None])
    assert FAMILY.detect(copy)
    with pytest.raises(InputError, match="is a refiner"):
        facts_of(copy)


def test_a_unet_whose_modules_files_cannot_name_is_refused(copy: Path) -> None:
    change(copy / "unet" / "config.json", layers_per_block=1)
    with pytest.raises(InputError, match=r"resnets \(1, 1, 1\)"):
        facts_of(copy)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"_class_name": "EDMDPMSolverMultistepScheduler"}, "EDM's noise levels"),
        ({"prediction_type": "sample"}, "prediction_type='sample'"),
    ],
)
def test_other_noise_levels_are_refused(copy: Path, values: dict[str, str], said: str) -> None:
    change(copy / "scheduler" / "scheduler_config.json", **values)
    with pytest.raises(InputError, match=said):
        facts_of(copy)

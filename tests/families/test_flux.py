"""FLUX.1 against diffusers: facts, conditioning, losses, images, adapters, checkpoints of one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Conditioning, Layout, TensorInfo
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.flux import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.flux import WIDTH, write_base
from tests.fakes.bases.flux_original import original_layout, split_at
from tests.fakes.low_rank import draw

CPU = torch.device("cpu")
PROMPTS = ("a red square", "a photo of the blue one, on the left")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=base), source="tiny")


@pytest.fixture(scope="module")
def schnell(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux") / "schnell", seed=1, guidance_embeds=False)


@pytest.fixture(scope="module")
def conditioning(facts: BaseFacts) -> Conditioning:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    return encoder.encode_prompts(PROMPTS)


@pytest.fixture
def denoiser(facts: BaseFacts) -> nn.Module:
    return FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)


def folder_facts(folder: Path, **files: Path) -> BaseFacts:
    layout = Layout(folder=folder, files=files)  # type: ignore[arg-type]  # names of parts
    return FAMILY.facts(layout, source="tiny")


# ---- facts


def test_schnell_is_told_from_dev_by_its_guidance(facts: BaseFacts, schnell: Path) -> None:
    fast = folder_facts(schnell)
    assert (fast.variant, fast.distilled, fast.max_tokens) == ("schnell", True, 256)
    assert (facts.variant, facts.distilled, facts.max_tokens) == ("dev", False, 512)
    assert FAMILY.adapter_names(fast).modelspec == "flux-1-schnell/lora"
    assert FAMILY.adapter_names(facts).modelspec == "flux-1-dev/lora"
    assert FAMILY.adapter_names(fast).kohya == "flux1"
    assert fast.guidance.conditioning(3.5) == {}
    told = facts.guidance.conditioning(3.5)["guidance"]
    assert told.dtype == torch.float32
    assert told.tolist() == [3.5]


# ---- what diffusers computes


def test_texts_are_encoded_as_the_pipeline_does(
    facts: BaseFacts, conditioning: Conditioning
) -> None:
    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    with torch.no_grad():  # attention with gradients is another kernel, 1e-5 away
        text, pooled, _ = pipeline.encode_prompt(list(PROMPTS), None, device=CPU)
    assert conditioning["text"].shape == (2, 512, WIDTH)
    torch.testing.assert_close(conditioning["text"], text, atol=1e-6, rtol=0)
    torch.testing.assert_close(conditioning["pooled"], pooled, atol=1e-6, rtol=0)


@pytest.mark.parametrize("guidance_scale", [1.0, 3.5])
def test_the_loss_is_that_of_diffusers_training_script(
    facts: BaseFacts, denoiser: nn.Module, conditioning: Conditioning, guidance_scale: float
) -> None:
    latents, noise = draw(2, 16, 6, 10), draw(2, 16, 6, 10, seed=1)
    sigma = torch.tensor([0.2, 0.85])
    told = facts.guidance.conditioning(guidance_scale)["guidance"]

    noisy = add_noise(latents, noise, 1 - sigma, sigma)
    predicted = FAMILY.predict(
        denoiser, noisy, 1000 * sigma, {**conditioning, "guidance": told.expand(2)}
    )
    losses = sample_losses(predicted, target(latents, noise, 1 - sigma, sigma, "flow"))

    mixed = (1 - sigma[:, None, None, None]) * latents + sigma[:, None, None, None] * noise
    rows = [[0.0, row, column] for row in range(3) for column in range(5)]
    velocity = denoiser(
        hidden_states=F.pixel_unshuffle(mixed, 2).flatten(2).transpose(1, 2),
        timestep=sigma,
        guidance=torch.full([1], guidance_scale).expand(2),
        pooled_projections=conditioning["pooled"],
        encoder_hidden_states=conditioning["text"],
        txt_ids=torch.zeros(512, 3),
        img_ids=torch.tensor(rows),
        return_dict=False,
    )[0]
    velocity = F.pixel_shuffle(velocity.transpose(1, 2).unflatten(2, (3, 5)), 2)
    expected = ((velocity - (noise - latents)) ** 2).reshape(2, -1).mean(1)
    torch.testing.assert_close(losses, expected, atol=1e-5, rtol=0)


# ---- adapters


def test_wider_targets_stay_inside_the_blocks(denoiser: nn.Module) -> None:
    linear = {name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear)}
    inside = {name for name in linear if "_blocks." in name}
    everything = FAMILY.lora_targets(denoiser, "all")
    assert set(everything) == inside
    layers = FAMILY.lora_targets(denoiser, "transformer")
    assert set(everything) - set(layers) == {
        "transformer_blocks.0.norm1.linear",
        "transformer_blocks.0.norm1_context.linear",
        "single_transformer_blocks.0.norm.linear",
        "single_transformer_blocks.1.norm.linear",
    }
    assert "proj_out" in linear
    assert "proj_out" not in everything


# ---- checkpoints of one file


def write_file(file: Path, denoiser: nn.Module, *, prefix: str = "", **more: Tensor) -> Path:
    state = {
        f"{prefix}{name}": tensor for name, tensor in original_layout(denoiser.state_dict()).items()
    }
    save_file({name: tensor.contiguous() for name, tensor in {**state, **more}.items()}, file)
    return file


@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_a_checkpoint_of_one_file_is_the_network_it_was_made_from(
    base: Path,
    facts: BaseFacts,
    denoiser: nn.Module,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    prefix: str,
) -> None:
    file = write_file(tmp_path / "dev.safetensors", denoiser, prefix=prefix)
    assert FAMILY.detect_file(read_header(file)) == {"denoiser"}
    found = folder_facts(base, denoiser=file)
    assert found.parts["denoiser"].parameters == facts.parts["denoiser"].parameters
    assert found.variant == "dev"
    split_at(monkeypatch, inner=32)
    loaded = FAMILY.load_denoiser(found, dtype=torch.float32, device=CPU)
    expected = denoiser.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    assert loaded.training is denoiser.training is False
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_a_dev_file_beside_a_schnell_folder_is_dev_and_the_reverse(
    base: Path, schnell: Path, facts: BaseFacts, denoiser: nn.Module, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    dev = folder_facts(schnell, denoiser=write_file(tmp_path / "dev.safetensors", denoiser))
    assert (dev.variant, dev.max_tokens, dev.distilled) == ("dev", 512, False)
    assert dev.scheduler["use_dynamic_shifting"] is True
    other = FAMILY.load_denoiser(folder_facts(schnell), dtype=torch.float32, device=CPU)
    fast = folder_facts(base, denoiser=write_file(tmp_path / "schnell.safetensors", other))
    assert (fast.variant, fast.max_tokens, fast.distilled) == ("schnell", 256, True)
    assert fast.scheduler["use_dynamic_shifting"] is False
    split_at(monkeypatch, inner=32)
    loaded = FAMILY.load_denoiser(dev, dtype=torch.float32, device=CPU)
    assert loaded.state_dict().keys() == denoiser.state_dict().keys()
    sampler = FAMILY.build_sampler(fast, denoiser=other, device=CPU)
    assert sampler.pipeline.scheduler.config.shift == 1.0  # type: ignore[attr-defined]  # FlowSampler


def test_an_all_in_one_file_gives_the_denoiser_and_the_vae(
    base: Path, facts: BaseFacts, denoiser: nn.Module, tmp_path: Path
) -> None:
    vae = FAMILY.load_vae(facts.located)
    more = {f"vae.{name}": tensor for name, tensor in original_vae(vae.state_dict()).items()}
    more["text_encoders.t5xxl.shared.weight"] = torch.zeros(3, 5)
    file = write_file(
        tmp_path / "all.safetensors", denoiser, prefix="model.diffusion_model.", **more
    )
    assert FAMILY.detect_file(read_header(file)) == {"denoiser", "vae"}
    found = folder_facts(base, denoiser=file, vae=file)
    for part in ("denoiser", "vae"):
        assert found.parts[part].parameters == facts.parts[part].parameters
    loaded = FAMILY.load_vae(found.located)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, vae.state_dict()[name]), name


@pytest.mark.parametrize("original", [True, False])
def test_a_separate_vae_file_is_used(
    base: Path, facts: BaseFacts, tmp_path: Path, original: bool
) -> None:
    vae = FAMILY.load_vae(facts.located)
    state = {name: tensor + 1 for name, tensor in vae.state_dict().items()}
    save_file(original_vae(state) if original else state, tmp_path / "ae.safetensors")
    assert FAMILY.detect_file(read_header(tmp_path / "ae.safetensors")) == {"vae"}
    found = folder_facts(base, vae=tmp_path / "ae.safetensors")
    assert found.parts["vae"] == facts.parts["vae"]
    loaded = FAMILY.load_vae(found.located)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def original_vae(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tiny VAE's tensors as the latent diffusion code names them."""
    renamed = {}
    for name, tensor in state.items():
        changed = (
            name.replace("encoder.down_blocks.", "encoder.down.")
            .replace("decoder.up_blocks.0", "decoder.up.1")
            .replace("decoder.up_blocks.1", "decoder.up.0")
            .replace("mid_block.resnets.0", "mid.block_1")
            .replace("mid_block.resnets.1", "mid.block_2")
            .replace(".resnets.", ".block.")
            .replace("downsamplers.0", "downsample")
            .replace("upsamplers.0", "upsample")
            .replace("conv_shortcut", "nin_shortcut")
            .replace("conv_norm_out", "norm_out")
        )
        renamed[changed] = tensor
    return renamed


def test_fp8_is_cast(
    base: Path, denoiser: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = {
        name: tensor.to(torch.float8_e4m3fn)
        for name, tensor in original_layout(denoiser.state_dict()).items()
    }
    save_file(small, tmp_path / "fp8.safetensors")
    split_at(monkeypatch, inner=32)
    loaded = FAMILY.load_denoiser(
        folder_facts(base, denoiser=tmp_path / "fp8.safetensors"), dtype=torch.bfloat16, device=CPU
    )
    for name, tensor in loaded.state_dict().items():
        expected = denoiser.state_dict()[name].to(torch.float8_e4m3fn).bfloat16()
        assert torch.equal(tensor, expected), name


def test_a_file_of_another_size_is_refused(
    base: Path, denoiser: nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = original_layout(denoiser.state_dict())
    del state["double_blocks.0.img_mlp.0.bias"]
    save_file(state, tmp_path / "cut.safetensors")
    split_at(monkeypatch, inner=32)
    found = folder_facts(base, denoiser=tmp_path / "cut.safetensors")
    with pytest.raises(InputError, match="img_mlp"):
        FAMILY.load_denoiser(found, dtype=torch.float32, device=CPU)


def test_other_files_are_not_flux(denoiser: nn.Module, base: Path) -> None:
    others: tuple[dict[str, Any], ...] = (
        {},
        {"model.diffusion_model.input_blocks.0.0.weight": (320, 4, 3, 3)},
        {"double_blocks.0.img_attn.qkv.weight": (9, 3), "img_in.weight": (3, 64)},
    )
    for shapes in others:
        header = {name: TensorInfo(dtype="F16", shape=shape) for name, shape in shapes.items()}
        assert FAMILY.detect_file(header) == frozenset()

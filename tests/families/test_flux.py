"""FLUX.1 against diffusers: facts, conditioning, losses, images, adapters, checkpoints of one file."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
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
from tests.fakes.low_rank import draw, merge, random_update

CPU = torch.device("cpu")
PROMPTS = ("a red square", "a photo of the blue one, on the left")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux") / "dev")


@pytest.fixture(scope="module")
def facts(base: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=base), source="tiny", identities={})


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
    return FAMILY.facts(layout, source="tiny", identities={})


# ---- facts


def test_facts_are_those_of_the_pipeline(facts: BaseFacts) -> None:
    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    sizes = {part: found.parameters for part, found in facts.parts.items()}
    assert sizes == {
        "denoiser": pipeline.transformer.num_parameters(),
        "vae": pipeline.vae.num_parameters(),
        "text_encoder": pipeline.text_encoder.num_parameters()
        + pipeline.text_encoder_2.num_parameters(),
    }
    assert facts.resolution_px == pipeline.default_sample_size * pipeline.vae_scale_factor
    assert 4 * facts.latent_channels == pipeline.transformer.config.in_channels
    assert facts.vae_factor == pipeline.vae_scale_factor
    assert dict(facts.scheduler) == dict(pipeline.scheduler.config)
    assert (facts.prediction, facts.variant, facts.distilled) == ("flow", "dev", False)
    assert FAMILY.detect(facts.located.folder)


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


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("black-forest-labs/FLUX.1-dev", 11_901_408_320),
        ("black-forest-labs/FLUX.1-schnell", 11_891_178_560),
    ],
)
def test_the_public_releases_have_the_sizes_of_their_networks(source: str, parameters: int) -> None:
    from diffusers import AutoencoderKL
    from transformers import CLIPTextConfig, CLIPTextModel, T5Config, T5EncoderModel

    found = FAMILY.releases.get(source)
    assert found is not None
    with torch.device("meta"):
        networks = {
            "denoiser": [FAMILY.empty_denoiser(found.architecture)],
            "vae": [
                AutoencoderKL(
                    down_block_types=("DownEncoderBlock2D",) * 4,
                    up_block_types=("UpDecoderBlock2D",) * 4,
                    block_out_channels=(128, 256, 512, 512),
                    layers_per_block=2,
                    latent_channels=16,
                    use_quant_conv=False,
                    use_post_quant_conv=False,
                )
            ],
            "text_encoder": [
                CLIPTextModel(CLIPTextConfig(hidden_size=768, intermediate_size=3072)),
                T5EncoderModel(
                    T5Config(
                        d_model=4096,
                        d_kv=64,
                        d_ff=10240,
                        num_layers=24,
                        num_heads=64,
                        feed_forward_proj="gated-gelu",
                    )
                ),
            ],
        }
    sizes = {
        part: sum(weight.numel() for network in built for weight in network.parameters())
        for part, built in networks.items()
    }
    assert sizes == {part: known.parameters for part, known in found.parts.items()}
    assert sizes["denoiser"] == parameters
    assert sizes["vae"] == 83_819_683
    assert (found.resolution_px, found.bucket_step_px, found.vae_factor) == (1024, 64, 8)
    assert FAMILY.releases.get("somebody/else") is None


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


def test_tokens_are_counted_without_the_special_ones(facts: BaseFacts) -> None:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    assert encoder.count_tokens("a photo of the red square") == 6
    assert encoder.count_tokens("") == 0
    long = "a " * 600
    assert encoder.count_tokens(long) == 600
    assert encoder.tokenize([long])["text_encoder_2"].shape == (1, 512)


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


def test_text_pooled_text_guidance_and_time_all_matter(
    denoiser: nn.Module, conditioning: Conditioning
) -> None:
    noisy = draw(1, 16, 4, 6)
    told = {name: tensor[:1] for name, tensor in conditioning.items()}
    told["guidance"] = torch.tensor([1.0])
    other: Mapping[str, Tensor] = {
        "text": conditioning["text"][1:],
        "pooled": conditioning["pooled"][1:],
        "guidance": torch.tensor([4.0]),
    }
    plain = FAMILY.predict(denoiser, noisy, torch.tensor([500.0]), told)
    assert plain.shape == noisy.shape
    for name, tensor in other.items():
        changed = FAMILY.predict(denoiser, noisy, torch.tensor([500.0]), {**told, name: tensor})
        assert (changed - plain).abs().max() > 1e-4, name
    later = FAMILY.predict(denoiser, noisy, torch.tensor([501.0]), told)
    assert (later - plain).abs().max() > 1e-5


@pytest.mark.parametrize("which", ["dev", "schnell"])
def test_samples_are_the_pipelines_images(base: Path, schnell: Path, which: str) -> None:
    facts = folder_facts(base if which == "dev" else schnell)
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    ours = FAMILY.build_sampler(facts, denoiser=denoiser, device=CPU).image(
        encoder.encode_prompts([PROMPTS[0]]),
        encoder.encode_prompts([""]),
        seed=5,
        size_px=(24, 16),
        steps=3,
        guidance_scale=3.5,
    )
    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    theirs = pipeline(
        PROMPTS[0],
        generator=torch.Generator().manual_seed(5),
        width=24,
        height=16,
        num_inference_steps=3,
        guidance_scale=3.5,
        max_sequence_length=facts.max_tokens,
    ).images[0]
    ours_pixels, theirs_pixels = (np.asarray(image, dtype=int) for image in (ours, theirs))
    assert np.abs(ours_pixels - theirs_pixels).max() <= 1
    assert ours_pixels.std() > 5
    assert denoiser.training is False


# ---- adapters


def test_attention_targets_are_the_attention_of_all_blocks(denoiser: nn.Module) -> None:
    names = FAMILY.lora_targets(denoiser, "attention")
    both = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj")
    expected = {f"transformer_blocks.0.attn.{name}" for name in (*both, "to_add_out")}
    expected |= {
        f"single_transformer_blocks.{block}.attn.{name}" for block in (0, 1) for name in both[:3]
    }
    assert len(names) == len(expected)
    assert set(names) == expected


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


def test_diffusers_reads_the_names_of_a_file(
    facts: BaseFacts, denoiser: nn.Module, conditioning: Conditioning, tmp_path: Path
) -> None:
    update = random_update(FAMILY.lora_targets(denoiser, "all"), denoiser)
    tensors = {
        f"{FAMILY.lora_key_name('diffusers', 'denoiser', name)}.{key}.weight": tensor
        for name, pair in update.items()
        for key, tensor in zip(("lora_A", "lora_B"), pair, strict=True)
    }
    save_file(tensors, tmp_path / "adapter.safetensors")
    told = {**conditioning, "guidance": torch.ones(2)}
    at = (draw(2, 16, 4, 6), torch.tensor([300.0, 700.0]), told)
    plain = FAMILY.predict(denoiser, *at)
    merge(denoiser, update)
    merged = FAMILY.predict(denoiser, *at)

    pipeline = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    pipeline.load_lora_weights(tmp_path, weight_name="adapter.safetensors")
    read = FAMILY.predict(pipeline.transformer, *at)
    torch.testing.assert_close(read, merged, atol=1e-4, rtol=0)
    assert (merged - plain).abs().max() > 1e-2


def test_fused_names_are_refused_with_a_reason() -> None:
    assert FAMILY.formats.written == ("diffusers", "comfyui")
    assert set(FAMILY.formats.refused) == {"kohya"}
    assert all("diffusers format" in reason for reason in FAMILY.formats.refused.values())


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


@pytest.mark.parametrize(
    ("missing", "named"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", "transformer"),
        ("text_encoder_2/model.safetensors", "text_encoder_2"),
        ("tokenizer_2/tokenizer.json", "tokenizer_2"),
        ("vae/config.json", "vae"),
        ("scheduler/scheduler_config.json", "scheduler"),
    ],
)
def test_a_missing_part_is_named(tmp_path: Path, missing: str, named: str) -> None:
    folder = write_base(tmp_path / "base")
    (folder / missing).unlink()
    with pytest.raises(InputError, match=named):
        folder_facts(folder)

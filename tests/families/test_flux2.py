"""FLUX.2 klein against diffusers: facts, text, latents, loss of the training script, images, files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.flux2 import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.flux2 import write_base

CPU = torch.device("cpu")
PROMPT = "a red square"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("flux2"))


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    loaded = Flux2KleinPipeline.from_pretrained(base)
    loaded.set_progress_bar_config(disable=True)
    return loaded


def facts_of(folder: Path, **files: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=folder, files=files), source="tiny", identities={})  # type: ignore[arg-type]  # names of parts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- facts


def test_facts_are_what_the_pipeline_says(base: Path, pipeline: Any) -> None:
    facts = facts_of(base)
    networks = {
        "denoiser": pipeline.transformer,
        "vae": pipeline.vae,
        "text_encoder": pipeline.text_encoder,
    }
    assert {part: found.parameters for part, found in facts.parts.items()} == {
        part: sum(weights.numel() for weights in network.parameters())
        for part, network in networks.items()
    }
    assert facts.latent_channels == pipeline.transformer.config.in_channels
    assert facts.vae_factor == 2 * pipeline.vae_scale_factor
    assert facts.max_tokens == pipeline.tokenizer_max_length
    assert (facts.variant, facts.distilled) == ("klein-base", False)


def test_the_index_says_what_is_distilled(tmp_path: Path) -> None:
    facts = facts_of(write_base(tmp_path, distilled=True))
    assert (facts.variant, facts.distilled) == ("klein", True)


@pytest.mark.parametrize(
    ("source", "variant", "distilled", "version", "architecture"),
    [
        ("FLUX.2-klein-4B", "klein-4b", True, "flux2_klein_4b", "Flux.2-klein-4b/lora"),
        ("FLUX.2-klein-base-4B", "klein-base-4b", False, "flux2_klein_4b", "Flux.2-klein-4b/lora"),
        ("FLUX.2-klein-9B", "klein-9b", True, "flux2_klein_9b", "Flux.2-klein-9b/lora"),
        ("FLUX.2-klein-base-9B", "klein-base-9b", False, "flux2_klein_9b", "Flux.2-klein-9b/lora"),
    ],
)
def test_public_releases_have_the_sizes_of_their_configurations(
    source: str, variant: str, distilled: bool, version: str, architecture: str
) -> None:
    facts = FAMILY.releases.get(f"black-forest-labs/{source}")
    assert facts is not None and (facts.variant, facts.distilled) == (variant, distilled)
    assert (facts.resolution_px, facts.bucket_step_px, facts.vae_factor) == (1024, 64, 16)
    assert FAMILY.adapter_names(facts).kohya == version
    assert FAMILY.adapter_names(facts).modelspec == architecture
    width = facts.architecture["joint_attention_dim"] // 3
    with torch.device("meta"):
        built = {
            "denoiser": FAMILY.empty_denoiser(facts.architecture),
            "vae": AutoencoderKLFlux2(up_block_types=("UpDecoderBlock2D",) * 4),
            "text_encoder": Qwen3ForCausalLM(_qwen3(width)),
        }
    published = {part: _numbers(network) for part, network in built.items()}
    assert facts.download_bytes == 2 * sum(published.values())
    loaded = {**published, "text_encoder": _numbers(built["text_encoder"].model)}
    assert {part: found.parameters for part, found in facts.parts.items()} == loaded


def _numbers(network: nn.Module) -> int:
    return sum(weights.numel() for weights in network.parameters())


def _qwen3(width: int) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=width,
        intermediate_size={2560: 9728, 4096: 12_288}[width],
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        tie_word_embeddings=width == 2560,
    )


@pytest.mark.parametrize("size_px", [(1024, 1024), (768, 1344), (512, 512)])
def test_the_timestep_shift_is_the_samplers_for_many_steps(size_px: tuple[int, int]) -> None:
    facts = FAMILY.releases.get(next(iter(FAMILY.releases)))
    assert facts is not None
    width, height = size_px
    mu = compute_empirical_mu(width // 16 * (height // 16), 200)
    shift = facts.flow_shift(width_px=width, height_px=height)
    assert shift == pytest.approx(math.exp(mu), rel=1e-3)


# ---- encoding


def test_texts_are_encoded_as_the_pipeline_does(base: Path, pipeline: Any) -> None:
    encoder = FAMILY.load_text_encoder(facts_of(base), dtype=torch.float32, device=CPU)
    prompts = [PROMPT, "", "a " * 600]
    ours = encoder.encode_prompts(prompts)
    with torch.no_grad():
        theirs = pipeline.encode_prompt(prompts)[0]
    assert ours.keys() == {"text"} and ours["text"].shape == (3, 512, 48)
    torch.testing.assert_close(ours["text"], theirs, atol=1e-5, rtol=1e-5)
    shapes = FAMILY.prompt_shapes(facts_of(base).architecture, text_tokens=512)
    assert {name: tuple(tensor[:1].shape) for name, tensor in ours.items()} == shapes
    assert encoder.count_tokens("ab") == 2


def test_latents_are_squares_normalised_per_channel(base: Path, pipeline: Any) -> None:
    pixels = draw(2, 3, 32, 24).clamp(-1, 1)
    encoder = FAMILY.load_image_encoder(facts_of(base), device=CPU)
    ours = encoder.encode_images(pixels)
    with torch.no_grad():
        raw = pipeline.vae.encode(pixels).latent_dist
    norm = pipeline.vae.bn
    deviation = (norm.running_var + pipeline.vae.config.batch_norm_eps).sqrt().view(1, -1, 1, 1)

    def normalised(latents: Tensor) -> Tensor:
        squares = Flux2KleinPipeline._patchify_latents(latents)
        found: Tensor = (squares - norm.running_mean.view(1, -1, 1, 1)) / deviation
        return found

    drawn = draw(*raw.mean.shape, seed=1)
    drawn_squares = Flux2KleinPipeline._patchify_latents(drawn)
    for index, latents in enumerate(ours):
        torch.testing.assert_close(latents.mean, normalised(raw.mode())[index])
        torch.testing.assert_close(
            latents.mean + latents.std * drawn_squares[index],
            normalised(raw.mean + raw.std * drawn)[index],
        )


# ---- training


@pytest.mark.parametrize("guidance", [False, True])
def test_loss_is_that_of_the_training_script(tmp_path: Path, guidance: bool) -> None:
    """The formula: packed tokens, ids (0, row, column, 0) and (0, 0, 0, place), t / 1000, noise - x."""
    facts = facts_of(write_base(tmp_path, guidance=guidance))
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    told = facts.guidance.conditioning(3.5)
    assert bool(told) is guidance
    x, noise, text = draw(2, 8, 4, 6), draw(2, 8, 4, 6, seed=1), draw(2, 20, 48, seed=2)
    sigma = torch.tensor([0.31, 0.87])
    with torch.no_grad():
        predicted = FAMILY.predict(
            denoiser,
            add_noise(x, noise, 1 - sigma, sigma),
            1000 * sigma,
            {"text": text, **{name: value.expand(2) for name, value in told.items()}},
        )
    ours = sample_losses(predicted, target(x, noise, 1 - sigma, sigma, "flow"))

    level = sigma[:, None, None, None]
    noisy = (1 - level) * x + level * noise
    tokens = torch.stack([noisy[:, :, row, column] for row in range(4) for column in range(6)], 1)
    with torch.no_grad():
        answer = denoiser(
            hidden_states=tokens,
            timestep=sigma,
            guidance=torch.full([2], 3.5) if guidance else None,
            encoder_hidden_states=text,
            txt_ids=torch.tensor([[0, 0, 0, place] for place in range(20)]),
            img_ids=torch.tensor([[0, row, column, 0] for row in range(4) for column in range(6)]),
            return_dict=False,
        )[0]
    wanted = torch.stack(
        [(noise - x)[:, :, row, column] for row in range(4) for column in range(6)], 1
    )
    theirs = ((answer - wanted) ** 2).mean(dim=(1, 2))
    assert theirs[0] != pytest.approx(float(theirs[1]), rel=1e-3)
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_targets_are_layers_of_blocks(pipeline: Any) -> None:
    found = {
        kind: FAMILY.lora_targets(pipeline.transformer, kind)
        for kind in ("attention", "transformer", "all")
    }
    assert set(found["attention"]) < set(found["transformer"]) == set(found["all"])
    assert len(found["attention"]) == 8 + 2 * 2
    for name in found["all"]:
        assert isinstance(pipeline.transformer.get_submodule(name), nn.Linear)
        assert name.startswith(("transformer_blocks.", "single_transformer_blocks."))
    linear = {
        name
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, nn.Linear) and "transformer_blocks." in name
    }
    assert set(found["all"]) == linear


# ---- images and files


@pytest.mark.parametrize("distilled", [False, True])
def test_images_are_the_plain_pipelines(tmp_path: Path, distilled: bool) -> None:
    folder = write_base(tmp_path, distilled=distilled)
    facts = facts_of(folder)
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    ours = FAMILY.build_sampler(facts, denoiser=denoiser, device=CPU).image(
        encoder.encode_prompts([PROMPT]),
        encoder.encode_prompts([""]),
        seed=3,
        size_px=(32, 48),
        steps=3,
        guidance_scale=4.0,
    )
    plain = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    plain.set_progress_bar_config(disable=True)
    theirs = plain(
        prompt=PROMPT,
        width=32,
        height=48,
        num_inference_steps=3,
        guidance_scale=4.0,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    assert ours.size == (32, 48) and np.asarray(theirs).std() > 5
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


@pytest.mark.parametrize("format", FAMILY.formats.written)
def test_written_names_are_read_by_the_pipeline(base: Path, tmp_path: Path, format: Any) -> None:
    facts, alpha, rank = facts_of(base), 8, 2
    denoiser: Any = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    names = FAMILY.lora_targets(denoiser, "all")
    inputs = (draw(1, 8, 4, 4), torch.tensor([400.0]), {"text": draw(1, 20, 48, seed=2)})
    with torch.no_grad():
        bare = FAMILY.predict(denoiser, *inputs)
        denoiser.add_adapter(LoraConfig(r=rank, lora_alpha=alpha, target_modules=names))
        tensors = dict(denoiser.named_parameters())
        file: dict[str, Tensor] = {}
        for index, name in enumerate(names):
            down = tensors[f"{name}.lora_A.default.weight"]
            up = tensors[f"{name}.lora_B.default.weight"]
            up.copy_(0.1 * draw(*up.shape, seed=index))
            spelt = FAMILY.lora_key_name(format, "denoiser", name)
            file[f"{spelt}.lora_A.weight"] = down.clone()
            file[f"{spelt}.lora_B.weight"] = up * (alpha / rank)
        live = FAMILY.predict(denoiser, *inputs)
    save_file(file, tmp_path / "lora.safetensors")
    plain: Any = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    plain.load_lora_weights(tmp_path, weight_name="lora.safetensors")
    with torch.no_grad():
        read = FAMILY.predict(plain.transformer, *inputs)
    assert (live - bare).abs().max() > 0.01
    assert (live - read).abs().max() < 1e-4


# ---- single files and refusals


def as_comfyui(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what FLUX.2's own code calls diffusers' tensors: q, k and v are one matrix."""
    renamed = {
        "x_embedder.": "img_in.",
        "context_embedder.": "txt_in.",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "modulation.linear": "modulation.lin",
        "modulation_img.linear": "modulation_img.lin",
        "modulation_txt.linear": "modulation_txt.lin",
        "proj_out": "final_layer.linear",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "attn.to_qkv_mlp_proj": "linear1",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "attn.to_out.0": "img_attn.proj",
        "attn.to_add_out": "txt_attn.proj",
        "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
        "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    }
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        single = name.startswith("single_")
        for theirs, own in renamed.items():
            name = name.replace(theirs, own)
        norm = "norm" if single else "img_attn.norm"
        name = name.replace("attn.norm_q.weight", f"{norm}.query_norm.scale")
        name = name.replace("attn.norm_k.weight", f"{norm}.key_norm.scale")
        name = name.replace("attn.to_out.weight", "linear2.weight")
        name = name.replace("single_transformer_blocks.", "single_blocks.")
        name = name.replace("transformer_blocks.", "double_blocks.")
        if name.startswith("final_layer.adaLN"):
            tensor = torch.cat(tensor.chunk(2)[::-1])
        found[name] = tensor.contiguous()
    for block in {name.split(".")[1] for name in found if name.startswith("double_blocks.")}:
        for stream, parts in {
            "img": ("attn.to_q", "attn.to_k", "attn.to_v"),
            "txt": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
        }.items():
            fused = [found.pop(f"double_blocks.{block}.{part}.weight") for part in parts]
            found[f"double_blocks.{block}.{stream}_attn.qkv.weight"] = torch.cat(fused)
    return found


def denoiser_state(base: Path) -> dict[str, Tensor]:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("layout", ["bare", "all in one", "diffusers"])
def test_a_single_file_holds_the_same_denoiser(base: Path, tmp_path: Path, layout: str) -> None:
    wanted = denoiser_state(base)
    own = as_comfyui(wanted)
    assert not own.keys() & wanted.keys()
    file = tmp_path / "denoiser.safetensors"
    if layout == "all in one":
        others = {"vae.bn.running_mean": torch.ones(8), "text_encoders.qwen3.x": torch.ones(1)}
        save_file({**{f"model.diffusion_model.{name}": own[name] for name in own}, **others}, file)
    else:
        save_file(own if layout == "bare" else wanted, file)
    assert FAMILY.detect_file(read_header(file)) == {"denoiser"}
    facts = facts_of(base, denoiser=file)
    assert facts.parts["denoiser"].parameters == sum(map(Tensor.numel, wanted.values()))
    read = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU).state_dict()
    assert read.keys() == wanted.keys()
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("name", "distilled"),
    [("flux-2-klein-4b", True), ("flux-2-klein-base-4b", False), ("other", False)],
)
def test_the_name_of_a_single_file_says_what_is_distilled(
    base: Path, tmp_path: Path, name: str, distilled: bool
) -> None:
    save_file(as_comfyui(denoiser_state(base)), tmp_path / f"{name}.safetensors")
    facts = facts_of(base, denoiser=tmp_path / f"{name}.safetensors")
    assert facts.distilled is distilled


def test_a_file_of_another_size_names_the_companion(base: Path, tmp_path: Path) -> None:
    state = as_comfyui(denoiser_state(base))
    file = tmp_path / "denoiser.safetensors"
    save_file({**state, "txt_in.weight": torch.zeros(32, 96)}, file)
    with pytest.raises(InputError, match="txt_in") as caught:
        facts_of(base, denoiser=file)
    assert "base.companion" in str(caught.value.fix)
    save_file({n: t for n, t in state.items() if "single_blocks.1." not in n}, file)
    with pytest.raises(InputError, match="single_blocks"):
        facts_of(base, denoiser=file)
    save_file({n: t for n, t in state.items() if "linear2" not in n}, file)
    with pytest.raises(InputError, match="companion"):
        FAMILY.load_denoiser(facts_of(base, denoiser=file), dtype=torch.float32, device=CPU)


def test_a_vae_file_is_refused(base: Path) -> None:
    vae = base / "vae" / "diffusion_pytorch_model.safetensors"
    with pytest.raises(InputError, match="VAE"):
        facts_of(base, vae=vae)


def test_the_other_text_encoders_are_refused(tmp_path: Path) -> None:
    folder = write_base(tmp_path)
    config = folder / "text_encoder" / "config.json"
    found = json.loads(config.read_text())
    config.write_text(json.dumps({**found, "hidden_size": 24}))
    with pytest.raises(InputError, match="72 channels"):
        facts_of(folder)
    config.write_text(json.dumps({**found, "model_type": "mistral3"}))
    assert FAMILY.detect(folder)
    with pytest.raises(InputError, match="mistral3"):
        facts_of(folder)


def test_other_transformers_are_not_of_the_family(base: Path) -> None:
    header = read_header(base / "transformer" / "diffusion_pytorch_model.safetensors")
    assert FAMILY.detect_file(
        {"double_blocks.0.img_mod.lin.weight": header[next(iter(header))]}
    ) == (frozenset())
    assert Flux2Transformer2DModel.__name__ == FAMILY.denoiser_class

"""FLUX.2 klein against diffusers: facts, text, latents, loss of the training script, images, files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2_klein import compute_empirical_mu
from safetensors.torch import load_file, save_file
from torch import Tensor

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
    return FAMILY.facts(Layout(folder=folder, files=files), source="tiny")  # type: ignore[arg-type]  # names of parts


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# ---- facts


def test_the_index_says_what_is_distilled(tmp_path: Path) -> None:
    facts = facts_of(write_base(tmp_path, distilled=True))
    assert (facts.variant, facts.distilled) == ("klein", True)


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


# ---- images and files


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

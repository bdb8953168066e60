"""What is special to single families: releases told apart, latents, encoders, relatives that are refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from diffusers.pipelines.flux2.pipeline_flux2_klein import Flux2KleinPipeline
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.layers import AskedFor, resolve
from lora_trainer.config.running import Config
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.base.sampling import build_sampler, plain_pipeline
from lora_trainer.families.files.deferred import settled
from lora_trainer.planning.run_time import middle
from lora_trainer.run.plan_text import run_warnings
from lora_trainer.run.prepare import Request, prepare
from tests.checkpoint_files import layouts
from tests.checkpoint_files.cases import Case
from tests.checkpoint_files.files import write
from tests.fakes.family_bases import (
    CPU,
    base_of,
    copy_of,
    denoiser_of,
    draw,
    edit_json,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
)
from tests.fakes.original_names import original_names, split_at
from tests.fakes.plans import machine, planned
from tests.fakes.runs import toy
from tests.fakes.tiny_base import write_base

PROMPTS = ("a red square", "a photo of the blue one, on the left")
FLUX_DEV = "black-forest-labs/FLUX.1-dev"
WEIGHTS = "transformer/diffusion_pytorch_model.safetensors"
SHIFTS: Mapping[str, Mapping[str, Any]] = {
    "dynamic": {"use_dynamic_shifting": True, "shift": 3.0},
    "dynamic, other ends": {
        "use_dynamic_shifting": True,
        "base_shift": 0.25,
        "max_shift": 0.9,
        "base_image_seq_len": 64,
        "max_image_seq_len": 8192,
    },
    "dynamic and linear": {"use_dynamic_shifting": True, "time_shift_type": "linear"},
    "fixed": {"use_dynamic_shifting": False, "shift": 3.0},
    "none": {"use_dynamic_shifting": False, "shift": 1.0},
    "diffusers' defaults": {},
}


def file_of(name: str, file: Path) -> Path:
    """Write the tiny base's denoiser as its release has it."""
    save_file(original_names(name, load_file(base_of(name) / WEIGHTS)), file)
    return file


def preset(family: str) -> Config:
    """Return what a run on a 12 GiB GPU has without a setting of the user's."""
    return resolve(AskedFor(), family=family, tier="10-12", priority="balanced").config


# ---- the base's own shift


@pytest.mark.parametrize("name", SHIFTS)
def test_the_shift_is_that_of_the_pipelines_scheduler(name: str) -> None:
    dev = families.family("flux").releases[FLUX_DEV]
    facts = replace(dev, release=replace(dev.release, scheduler=SHIFTS[name]))
    width, height = 1344, 768
    shift = facts.flow_shift(width_px=width, height_px=height)
    scheduler = FlowMatchEulerDiscreteScheduler(**SHIFTS[name])
    mu = calculate_shift(
        (width // 16) * (height // 16),
        scheduler.config.base_image_seq_len,
        scheduler.config.max_image_seq_len,
        scheduler.config.base_shift,
        scheduler.config.max_shift,
    )
    even = np.linspace(1.0, 1 / 20, 20)
    scheduler.set_timesteps(sigmas=even, mu=mu)
    expected = scheduler.sigmas[:-1].numpy()
    np.testing.assert_allclose(shift * even / (1 + (shift - 1) * even), expected, atol=1e-6)


def test_trainers_of_lumina_2_shift_by_size_though_its_sampler_does_not() -> None:
    """mu from 0.5 at 256 tokens to 1.15 at 4096, as sd-scripts, ai-toolkit and diffusion-pipe have it."""
    facts = next(iter(families.family("lumina2").releases.values()))
    assert facts.release.scheduler["shift"] == 6.0
    for side_px, shift in ((256, 1.649), (768, 2.332), (1024, 3.158)):
        found = facts.flow_shift(width_px=side_px, height_px=side_px)
        assert found == pytest.approx(shift, abs=1e-3)
    settings = preset("lumina2").objective
    assert (settings.timestep_sampling, settings.flow_shift) == ("sigmoid", "resolution")


@pytest.mark.parametrize(("name", "trained"), [("zimage", False), ("lumina2", True)])
def test_refiners_are_left_out_as_the_peers_of_each_family_do(name: str, trained: bool) -> None:
    """musubi-tuner's exclude patterns for Z-Image; sd-scripts' `train_blocks` for Lumina 2."""
    family, settings = families.family(name), preset(name).adapter
    assert settings.refiners is trained
    costs = BaseCosts(family=family, facts=next(iter(family.releases.values())))
    sizes = {
        refiners: costs.adapted(settings.model_copy(update={"refiners": refiners}))
        for refiners in (False, True)
    }
    left_out = sizes[True].keys() - sizes[False].keys()
    assert len(left_out) == 28 and all("_refiner." in layer for layer in left_out)
    assert not any("_refiner." in layer for layer in sizes[False])


# ---- latents: as each pipeline undoes them


def normalised(name: str, vae: Any, latents: Tensor, *, is_mean: bool) -> Tensor:
    config, shift = vae.config, float(is_mean)
    if name in ("sdxl", "flux"):
        return (latents - 0.1159 * shift) * 0.3611 if name == "flux" else latents * 0.13025
    if name == "qwen":
        mean, std = (
            torch.tensor(v).view(1, -1, 1, 1) for v in (config.latents_mean, config.latents_std)
        )
        return (latents[:, :, 0] - mean * shift) / std
    norm = vae.bn
    deviation = (norm.running_var + config.batch_norm_eps).sqrt().view(1, -1, 1, 1)
    squares: Tensor = Flux2KleinPipeline._patchify_latents(latents)
    return (squares - norm.running_mean.view(1, -1, 1, 1) * shift) / deviation


@pytest.mark.parametrize("name", ["sdxl", "flux", "flux2", "qwen"])
def test_latents_are_normalised_as_the_pipeline_undoes_it(name: str) -> None:
    """By shift and scale; by channel, of squares; by channel, of the one frame of a video."""
    facts = facts_of(name)
    family, vae = families.family(name), image_encoder_of(facts).vae
    pixels = draw(2, 3, 32, 48).clamp(-1, 1)
    latents = image_encoder_of(facts).encode_images(pixels)
    with torch.no_grad():
        posterior = vae.encode(pixels.unsqueeze(2) if name == "qwen" else pixels).latent_dist
    mean, std = (torch.stack([getattr(one, key) for one in latents]) for key in ("mean", "std"))
    torch.testing.assert_close(mean, normalised(name, vae, posterior.mean, is_mean=True))
    torch.testing.assert_close(std, normalised(name, vae, posterior.std, is_mean=False))
    if name == "qwen":
        packed = pipeline_of(facts)._pack_latents(mean[:1], 1, 16, 16, 24)
        with torch.no_grad():
            back = family.latents.decode(vae, packed, (48, 32))
            torch.testing.assert_close(back, vae.decode(posterior.mean[:1]).sample[:, :, 0])


def test_latents_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(InputError, match="not finite"):
        image_encoder_of(facts_of("flux")).encode_images(torch.full((1, 3, 16, 16), torch.inf))


# ---- which release a base is


def test_schnell_is_told_from_dev_by_its_guidance(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In folders, and in a file of one beside a folder of the other."""
    split_at(monkeypatch, inner=32)
    folder = write_base(
        "flux",
        tmp_path / "schnell",
        seed=1,
        transformer={"guidance_embeds": False},
        scheduler={"shift": 1.0, "use_dynamic_shifting": False},
    )
    dev, schnell = facts_of("flux"), facts_at(folder)
    fast_state = original_names("flux", network_of(schnell).state_dict())
    save_file(fast_state, tmp_path / "fast.safetensors")
    dev_file = facts_at(folder, denoiser=file_of("flux", tmp_path / "dev.safetensors"))
    fast_file = facts_at(base_of("flux"), denoiser=tmp_path / "fast.safetensors")
    for facts in (dev, dev_file):
        assert (facts.release.variant, facts.release.distilled, facts.release.max_tokens) == (
            "dev",
            False,
            512,
        )
        assert facts.release.scheduler["use_dynamic_shifting"] is True
        told = facts.guidance.conditioning(3.5)["guidance"]
        assert told.dtype == torch.float32 and told.tolist() == [3.5]
    for facts in (schnell, fast_file):
        assert (facts.release.variant, facts.release.distilled, facts.release.max_tokens) == (
            "schnell",
            True,
            256,
        )
        assert facts.release.scheduler["use_dynamic_shifting"] is False
        assert facts.guidance.conditioning(3.5) == {}
    loaded = network_of(dev_file).state_dict()
    assert loaded.keys() == denoiser_of("flux").state_dict().keys()
    sampler: Any = build_sampler(
        families.family("flux"), fast_file, denoiser=network_of(schnell), device=CPU
    )
    assert sampler.pipeline.scheduler.config.shift == 1.0


def test_the_index_or_the_name_of_a_file_says_which_klein_is_distilled(tmp_path: Path) -> None:
    facts = facts_at(write_base("flux2", tmp_path / "base", is_distilled=True))
    assert (facts.release.distilled, facts.release.variant) == (True, "klein")
    family, other = families.family("flux2"), tmp_path / "base"
    for name, distilled in (
        ("flux-2-klein-4b", True),
        ("flux-2-klein-base-4b", False),
        ("other", False),
    ):
        file = file_of("flux2", tmp_path / f"{name}.safetensors")
        for companion in (base_of("flux2"), other):
            facts = facts_at(companion, denoiser=file)
            assert facts.release.distilled is distilled
            # The pipeline switches guidance off by itself where it is told that the base is distilled.
            sampler: Any = build_sampler(family, facts, denoiser=network_of(facts), device=CPU)
            assert sampler.pipeline.config.is_distilled is distilled


@pytest.mark.parametrize(
    ("name", "shift", "release", "own_shift"),
    [
        # folders: by their name, or by the shift of their scheduler
        ("Tongyi-MAI/Z-Image", 6.0, "base", 6.0),
        ("a/folder", 3.0, "turbo", 3.0),
        ("me/My_Turbo_Mix", 6.0, "turbo", 6.0),
        ("ostris/Z-Image-De-Turbo", 3.0, "base", 3.0),
        ("turbo/z-image", 6.0, "base", 6.0),
        # files beside a folder: R3: a Turbo's took shift 6 from the base release's folder, instead of 3
        ("z_image_turbo_bf16.safetensors", 6.0, "turbo", 3.0),
        ("z_image_de_turbo_v1_bf16.safetensors", 6.0, "base", 3.0),
        ("z_image_bf16.safetensors", 3.0, "base", 6.0),
        ("my_mix.safetensors", 6.0, "base", 6.0),
        # ... and without a release in its name it counts as the base whatever the folder is, and a remark says so
        ("my_mix.safetensors", 3.0, "base", 6.0),
        ("jibMixZIT_v10.safetensors", 6.0, "turbo", 3.0),
    ],
)
def test_name_and_shift_tell_a_turbo_and_a_file_has_the_scheduler_of_its_release(
    tmp_path: Path, name: str, shift: float, release: str, own_shift: float
) -> None:
    base, files = (
        write_base("zimage", tmp_path / "base", scheduler={"shift": shift}),
        dict[str, Path](),
    )
    if name.endswith("safetensors"):
        files["denoiser"] = file_of("zimage", tmp_path / name)
    facts = facts_at(base, source=name, **files)
    assert (facts.release.variant, facts.release.distilled) == (release, release == "turbo")
    assert facts.flow_shift(width_px=64, height_px=64) == own_shift
    assert facts.release.sampling_scheduler().config.shift == own_shift
    asked = ["base.distilled"] if name.startswith("my_mix") else []
    assert [each.key for each in facts.release.assumed] == asked
    assert facts.release.drawing.guidance_scale == (1.0 if release == "turbo" else 5.0)


@pytest.mark.parametrize(("release", "variant"), [(1, "large"), (2, "3-medium")])
def test_a_file_of_stable_diffusion_3_may_lie_beside_another_release(
    release: int, variant: str, tmp_path: Path
) -> None:
    """The default companion serves all of them."""
    family, folder = families.family("sd3"), copy_of("sd3", tmp_path / "base")
    edit_json(folder / "transformer/config.json", **family.published[0].architecture)
    file = write(Case("sd3", layouts.network("sd3", release)), tmp_path)
    facts = facts_at(folder, denoiser=file)
    own = next(each for each in family.published if each.variant == variant).architecture
    assert facts.release.variant == variant
    assert {key: facts.release.architecture[key] for key in own} == own
    assert facts.release.architecture["qk_norm"] == own.get("qk_norm")


# ---- text


def test_a_base_without_t5_has_zeros_in_its_place(tmp_path: Path) -> None:
    facts = facts_at(write_base("sd3", tmp_path / "base", text_encoder_3=None, tokenizer_3=None))
    assert facts.release.max_tokens == 77 and facts.release.variant == "medium without T5"
    family, pipeline = families.family("sd3"), pipeline_of(facts)
    assert family.adapter_names(facts).kohya == "3-5-medium"
    assert pipeline.text_encoder_3 is None
    with torch.no_grad():
        text, *_ = pipeline.encode_prompt(PROMPTS[0], None, None, do_classifier_free_guidance=False)
    prompt, negative = (encoder_of(facts).encode_prompts([p]) for p in (PROMPTS[0], ""))
    assert prompt["text"][:, :77].any() and not prompt["text"][:, 77:].any()
    torch.testing.assert_close(prompt["text"], text)
    sampler = build_sampler(family, facts, denoiser=network_of(facts), device=CPU)
    drawn = sampler.image(prompt, negative, seed=5, size_px=(48, 32), steps=2, guidance_scale=2.0)
    assert drawn.size == (48, 32)


# ---- what is refused


UNET, SCHEDULER = "unet/config.json", "scheduler/scheduler_config.json"
REFUSED = {
    "sd15, broken width": ("sd15", UNET, {"cross_attention_dim": []}, "of a supported family"),
    "sdxl, no width of sizes": (
        "sdxl", UNET, {"projection_class_embeddings_input_dim": None}, "of a supported family"
    ),
    "sdxl, blocks without names in files": ("sdxl", UNET, {"layers_per_block": 1}, r"resnets \[1, 1, 1\]"),
    "sdxl, classes": ("sdxl", UNET, {"class_embed_type": "timestep"}, "class_embed_type='timestep'"),
    "sdxl, text added": ("sdxl", UNET, {"addition_embed_type": "text"}, "addition_embed_type='text'"),
    "sdxl, another block": ("sdxl", UNET, {"down_block_types": ["AttnDownBlock2D"] * 3}, "AttnDownBlock2D"),
    "sdxl, EDM": ("sdxl", SCHEDULER, {"_class_name": "EDMEulerScheduler"}, "EDM's noise levels"),
    "flux2, text of another width": (
        "flux2", "text_encoder/config.json", {"hidden_size": 24}, "72 channels"
    ),
    "flux2, another text encoder": (
        "flux2", "text_encoder/config.json", {"model_type": "mistral3"}, "mistral3"
    ),
    "qwen, another text encoder": (
        "qwen", "text_encoder/config.json", {"model_type": "qwen3"}, "'qwen3', allowed is 'qwen2_5_vl'"
    ),
    "qwen, layered": (
        "qwen", "transformer/config.json", {"use_layer3d_rope": True}, "use_layer3d_rope: a layered model"
    ),
    "qwen, inpainting": (
        "qwen", "model_index.json", {"_class_name": "QwenImageEditInpaintPipeline"},
        "is for QwenImageEditInpaintPipeline, allowed are QwenImagePip",
    ),
    "sd3, inpainting": (
        "sd3", "transformer/config.json", {"in_channels": 33}, "takes 33 channels: .* have 16"
    ),
    "flux, fill": ("flux", "transformer/config.json", {"in_channels": 384}, "384 channels: .* have 64"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_parts_of_relatives_are_refused(case: str, tmp_path: Path) -> None:
    name, file, values, said = REFUSED[case]
    folder = copy_of(name, tmp_path / "base")
    edit_json(folder / file, **values)
    with pytest.raises(InputError, match=said):
        facts_at(folder)


# ---- AuraFlow's table of positions, and Pony V7, which has its tensors


def test_images_beyond_the_table_of_positions_are_refused() -> None:
    """diffusers gives a row that is too long the positions of the next one."""
    family, network = families.family("auraflow"), denoiser_of("auraflow")
    told = {"text": draw(1, 8, 16)}
    sigma = torch.tensor([500.0])
    assert family.predict(network, draw(1, 4, 2, 140), sigma, told).shape == (1, 4, 2, 140)
    with pytest.raises(
        RequestError, match="142 latents a side, but the base has positions for 140"
    ):
        family.predict(network, draw(1, 4, 2, 142), sigma, told)


def test_a_table_for_native_squares_alone_is_refused(tmp_path: Path) -> None:
    """AuraFlow 0.1 and 0.2: as a folder, and as a single file under the releases' own prefix."""
    old = write_base("auraflow", tmp_path / "old", transformer={"pos_embed_max_size": 4096})
    with pytest.raises(InputError, match="positions for images of at most 1024 px a side"):
        facts_at(old)
    tensors = original_names("auraflow", load_file(old / WEIGHTS))
    file = tmp_path / "aura_flow_0.2.safetensors"
    save_file({f"model.{name}": tensor for name, tensor in tensors.items()}, file)
    with pytest.raises(InputError, match="positions for images of at most 1024 px a side"):
        facts_at(base_of("auraflow"), family="auraflow", denoiser=file)


def test_pony_is_told_by_its_name_and_reads_longer_texts() -> None:
    for source, tokens in (("fal/AuraFlow-v0.3", 256), ("somebody/Pony-V7-tuned", 768)):
        release = facts_at(base_of("auraflow"), source=source).release
        assert release.max_tokens == tokens
        assert release.variant == ("v0.3" if tokens == 256 else "pony-v7")


# ---- Krea 2


def test_norms_of_krea_2_stay_in_float32(tmp_path: Path) -> None:
    """As diffusers loads them: bf16 has no number between 1 and 1.0078, and the network adds 1 to their weights."""
    folder = base_of("krea2")
    tensors = original_names("krea2", load_file(folder / WEIGHTS))
    file = tmp_path / "raw.safetensors"
    save_file(tensors, file)
    theirs = diffusers.Krea2Transformer2DModel.from_pretrained(
        folder / "transformer", torch_dtype=torch.bfloat16
    ).state_dict()
    for facts in (facts_of("krea2"), facts_at(folder, family="krea2", denoiser=file)):
        ours = network_of(facts, torch.bfloat16).state_dict()
        assert {name: tensor.dtype for name, tensor in ours.items()} == {
            name: tensor.dtype for name, tensor in theirs.items()
        }
        assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    assert theirs["transformer_blocks.0.norm1.weight"].dtype == torch.float32


def test_a_folder_of_krea_2_says_whether_it_is_distilled(tmp_path: Path) -> None:
    folder = copy_of("krea2", tmp_path / "base")
    assert facts_at(folder).release.variant == "raw"
    edit_json(folder / "model_index.json", is_distilled=True)
    facts = facts_at(folder)
    assert (facts.release.variant, facts.release.drawing.steps) == ("turbo", 8)
    edit_json(folder / "model_index.json", text_encoder_select_layers=[1, 2, 3])
    with pytest.raises(InputError, match=r"reads the states \[1, 2, 3\] of its text encoder"):
        facts_at(folder)


# ---- ERNIE-Image


def test_the_prompt_enhancer_of_ernie_image_is_neither_there_nor_used(tmp_path: Path) -> None:
    """The release's index names two parts that are not downloaded: its folder is loaded without them."""
    folder = copy_of("ernie", tmp_path / "base")
    enhancer = {"pe": ["transformers", "Ministral3ForCausalLM"]}
    enhancer["pe_tokenizer"] = ["transformers", "TokenizersBackend"]
    edit_json(folder / "model_index.json", **enhancer)
    facts = facts_at(folder)
    family = families.family("ernie")
    whole: Any = plain_pipeline(family, facts, dtype=torch.float32, device=CPU)
    assert whole.pe is None and whole.pe_tokenizer is None
    alone = build_sampler(family, facts, denoiser=network_of(facts), device=CPU)
    assert alone.pipeline.pe is None and alone.pipeline.pe_tokenizer is None


def test_ernie_images_latents_have_the_pipelines_number_under_the_root() -> None:
    """1e-5; the configuration of its VAE states another, here 0.1."""
    facts = facts_of("ernie")
    encoder = image_encoder_of(facts)
    pixels = draw(1, 3, 32, 48)
    (ours,) = encoder.encode_images(pixels)
    with torch.no_grad():
        latents = encoder.vae.encode(pixels).latent_dist.mean
    squares = diffusers.ErnieImagePipeline._patchify_latents(latents)
    norm = encoder.vae.bn
    deviation = (norm.running_var + 1e-5).sqrt().view(1, -1, 1, 1)
    theirs = (squares - norm.running_mean.view(1, -1, 1, 1)) / deviation
    torch.testing.assert_close(ours.mean, theirs[0], rtol=1e-5, atol=1e-5)


def test_comfyuis_file_of_ernie_images_text_encoder_gives_the_same_text(tmp_path: Path) -> None:
    """The language model has names of its own there, beside the tower and the tokenizer as bytes."""
    folder, file = copy_of("ernie", tmp_path / "base"), tmp_path / "ministral-3-3b.safetensors"
    tensors = load_file(folder / "text_encoder" / "model.safetensors")
    renamed = {
        name.replace("language_model.model.", "model."): each for name, each in tensors.items()
    }
    assert renamed.keys() != tensors.keys()
    save_file({**renamed, "tekken_model": torch.zeros(8, dtype=torch.uint8)}, file)
    plain, given = facts_of("ernie"), facts_at(folder, text_encoder=file)
    assert given.parts["text_encoder"] == plain.parts["text_encoder"]
    texts = [encoder_of(facts).encode_prompts(PROMPTS) for facts in (plain, given)]
    for name, tensor in texts[0].items():
        torch.testing.assert_close(texts[1][name], tensor, rtol=0, atol=0)
    edit_json(folder / "transformer" / "config.json", text_in_dim=32)
    with pytest.raises(InputError, match="gives 24 channels, its denoiser reads 32"):
        facts_at(folder)


def test_ideogram_4_is_read_from_a_folder_in_its_own_names_and_fp8(tmp_path: Path) -> None:
    """As Ideogram publishes it: q, k and v joined, a scale for each row, in all three networks."""
    own = copy_of("ideogram4", tmp_path / "own")
    for part in ("transformer", "unconditional_transformer", "text_encoder"):
        (file,) = (own / part).glob("*.safetensors")
        state = load_file(file)
        named = state if part == "text_encoder" else original_names("ideogram4", state)
        stored = {}
        for name, tensor in named.items():
            if tensor.dim() < 2 or "embed" in name or "visual" in name:
                stored[name] = tensor
                continue
            scale = tensor.abs().amax(dim=1, keepdim=True) / 448
            stored[name] = (tensor / scale).to(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scale[:, 0]
        save_file(stored, file)
    family, facts, plain = families.family("ideogram4"), facts_at(own), facts_of("ideogram4")
    assert facts.parts["denoiser"] == plain.parts["denoiser"]
    unguided = family.load_unguided(facts, dtype=torch.float32, device=CPU)
    assert unguided is not None
    for ours, theirs in (
        (network_of(facts), denoiser_of("ideogram4")),
        (encoder_of(facts).networks["text_encoder"], encoder_of(plain).networks["text_encoder"]),
    ):
        expected = dict(theirs.named_parameters())
        for name, parameter in ours.named_parameters():
            # Three bits of mantissa: a sixteenth.
            torch.testing.assert_close(parameter, expected[name], rtol=0.07, atol=0.01)
    whole = settled(dict(unguided.named_parameters())["layers.1.attention.to_v.weight"])
    (file,) = (base_of("ideogram4") / "unconditional_transformer").glob("*.safetensors")
    right = load_file(file)["layers.1.attention.to_v.weight"]
    torch.testing.assert_close(whole, right, rtol=0.07, atol=0.01)


def test_ideogram_4_is_drawn_as_its_pipeline_draws_with_both_networks() -> None:
    """Beside the pipeline as diffusers loads it, which has the whole second network in memory."""
    family, facts = families.family("ideogram4"), facts_of("ideogram4")
    pipeline = diffusers.Ideogram4Pipeline.from_pretrained(base_of("ideogram4"))
    pipeline.set_progress_bar_config(disable=True)
    sampler = build_sampler(family, facts, denoiser=denoiser_of("ideogram4"), device=CPU)
    told = encoder_of(facts).encode_prompts(["a toy"])
    for steps in (3, 17, 21):
        ours = sampler.image(told, told, seed=3, size_px=(16, 32), steps=steps, guidance_scale=7.0)
        plain = pipeline(
            "a toy",
            **family.pipeline.scales(7.0, steps),  # type: ignore[misc]  # it has some
            generator=torch.Generator().manual_seed(3),
            num_inference_steps=steps,
            width=16,
            height=32,
        ).images[0]
        difference = np.asarray(ours, dtype=int) - np.asarray(plain, dtype=int)
        assert np.abs(difference).max() <= 1, steps


def test_the_reading_of_a_second_network_is_in_the_time_of_sample_images(tmp_path: Path) -> None:
    """From memory where there is room, else from the disk; not where a base has no such network."""
    base = "CalamitousFelicitousness/Ideogram-4-bf16-Diffusers"
    family = families.family("ideogram4")
    known = families.known_base(base)
    assert known is not None
    parameters = known.parts["denoiser"].parameters
    assert family.unguided_bytes(known) == 2 * parameters
    fixed = {
        "data.resolution": 512,
        "sampling.every_steps": 100,
        "sampling.prompts_from_captions": 4,
        "train.steps": 100,
    }

    def drawing_s(ram_gib: float, **more: Any) -> float:
        plan = planned(base, machine(24, ram_gib=ram_gib), overrides={**fixed, **more})
        return middle(plan.run_time.parts["sample images"])

    plain = drawing_s(96, **{"sampling.guidance_scale": 1})
    from_memory, from_disk = drawing_s(96), drawing_s(24)
    # Beside its pass. 2 x 4 images of 20 steps: 18.6 GB each at some 5 GB/s, and at some 1 GB/s more.
    memory_s, disk_s = from_memory - 2 * plain, from_disk - 2 * plain
    assert 400 < memory_s < 1200 and 1500 < disk_s - memory_s < 5000
    own = copy_of("ideogram4", tmp_path / "own")
    files = [*(own / "unconditional_transformer").glob("*.safetensors")]
    assert family.unguided_bytes(facts_at(own)) == sum(file.stat().st_size for file in files) > 0
    for file in files:
        file.unlink()
    assert family.unguided_bytes(facts_at(own)) == 0
    sdxl = families.known_base("stabilityai/stable-diffusion-xl-base-1.0")
    assert sdxl is not None and families.family("sdxl").unguided_bytes(sdxl) == 0


def test_a_base_without_the_second_network_is_told(tmp_path: Path) -> None:
    """Once, and only where sample images would be guided by it."""
    own = copy_of("ideogram4", tmp_path / "own")
    dataset = toy(tmp_path, images=2, sizes=((32, 32),)).dataset

    def kinds(**more: Any) -> list[str]:
        asked = {"base.model": str(own), "data.resolution": 32, **more}
        made = prepare(Request(dataset=dataset, overrides=asked))
        return [each.kind for each in run_warnings(made)]

    assert "guided-alone" not in kinds()
    for file in (own / "unconditional_transformer").glob("*.safetensors"):
        file.unlink()
    assert kinds().count("guided-alone") == 1
    assert "guided-alone" not in kinds(**{"sampling.guidance_scale": 1})
    assert "guided-alone" not in kinds(**{"sampling.every_steps": 0})

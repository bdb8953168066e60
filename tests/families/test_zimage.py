"""Z-Image against diffusers: facts, text, loss of the training script, padded batches, images, files."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, ZImagePipeline
from peft import LoraConfig
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3Model

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.zimage import FAMILY
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.zimage import write_base

CPU = torch.device("cpu")
PROMPT = "a red square"
LONG = "a photo of a red square and of a blue square beside it, on the table"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("zimage"))


@pytest.fixture(scope="module")
def pipeline(base: Path) -> Any:
    return ZImagePipeline.from_pretrained(base)


def facts_of(folder: Path, *, source: str = "tiny", **files: Path) -> BaseFacts:
    return FAMILY.facts(Layout(folder=folder, files=files), source=source, identities={})  # type: ignore[arg-type]  # names of parts


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
    assert facts.vae_factor == pipeline.vae_scale_factor
    assert facts.flow_shift(width_px=32, height_px=32) == pipeline.scheduler.config.shift
    assert FAMILY.adapter_names(facts).kohya == "zimage"
    assert FAMILY.adapter_names(facts).modelspec == "Z-Image/lora"


@pytest.mark.parametrize(
    ("source", "variant", "shift"), [("Z-Image", "base", 6.0), ("Z-Image-Turbo", "turbo", 3.0)]
)
def test_public_releases_have_the_sizes_of_their_configurations(
    source: str, variant: str, shift: float
) -> None:
    facts = FAMILY.releases.get(f"Tongyi-MAI/{source}")
    assert facts is not None and (facts.variant, facts.distilled) == (variant, variant == "turbo")
    assert (facts.resolution_px, facts.bucket_step_px, facts.vae_factor) == (1024, 64, 8)
    assert facts.flow_shift(width_px=1024, height_px=1024) == shift
    text = Qwen3Config(
        vocab_size=151_936,
        hidden_size=2560,
        intermediate_size=9728,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
    )
    with torch.device("meta"):
        built = {
            "denoiser": FAMILY.empty_denoiser(facts.architecture),
            "vae": _flux_vae(),
            "text_encoder": Qwen3Model(text),
        }
    assert {part: found.parameters for part, found in facts.parts.items()} == {
        part: sum(weights.numel() for weights in network.parameters())
        for part, network in built.items()
    }


def _flux_vae() -> nn.Module:
    network: nn.Module = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(128, 256, 512, 512),
        layers_per_block=2,
        latent_channels=16,
        use_quant_conv=False,
        use_post_quant_conv=False,
    )
    return network


@pytest.mark.parametrize(
    ("shift", "source", "distilled"),
    [
        (6.0, "Tongyi-MAI/Z-Image", False),
        (3.0, "a/folder", True),
        (6.0, "me/My_Turbo_Mix", True),
        (3.0, "ostris/Z-Image-De-Turbo", False),
        (6.0, "turbo/z-image", False),
    ],
)
def test_shift_and_name_tell_a_turbo(
    tmp_path: Path, shift: float, source: str, distilled: bool
) -> None:
    facts = facts_of(write_base(tmp_path, shift=shift), source=source)
    assert (facts.variant, facts.distilled) == ("turbo" if distilled else "base", distilled)


# ---- encoding


@pytest.mark.parametrize("prompt", [PROMPT, "", "a " * 600])
def test_a_text_is_encoded_as_the_pipeline_does(base: Path, pipeline: Any, prompt: str) -> None:
    encoder = FAMILY.load_text_encoder(facts_of(base), dtype=torch.float32, device=CPU)
    ours = encoder.encode_prompts([prompt])
    with torch.no_grad():
        theirs = pipeline.encode_prompt([prompt], do_classifier_free_guidance=False)[0][0]
    torch.testing.assert_close(ours["text"][0], theirs, atol=1e-5, rtol=1e-5)
    length = len(theirs)
    assert ours["text_mask"].tolist() == [[1] * length]
    shapes = FAMILY.prompt_shapes(facts_of(base).architecture, text_tokens=length)
    assert {name: tuple(tensor.shape) for name, tensor in ours.items()} == shapes


def test_texts_of_a_batch_are_padded_with_zeros_and_a_mask(base: Path) -> None:
    encoder = FAMILY.load_text_encoder(facts_of(base), dtype=torch.float32, device=CPU)
    together = encoder.encode_prompts([PROMPT, LONG])
    for index, prompt in enumerate([PROMPT, LONG]):
        alone, length = encoder.encode_prompts([prompt]), int(together["text_mask"][index].sum())
        assert alone["text"].shape[1] == length
        torch.testing.assert_close(together["text"][index, :length], alone["text"][0])
        assert not together["text"][index, length:].any()
        assert not together["text_mask"][index, length:].any()


# ---- training


def test_loss_is_that_of_the_training_script(base: Path, pipeline: Any) -> None:
    """The formula: time (1000 - t) / 1000, the network's answer negated, against noise - x."""
    x, noise = draw(2, 4, 8, 6), draw(2, 4, 8, 6, seed=1)
    texts = [draw(5, 16, seed=2), draw(9, 16, seed=3)]
    sigma = torch.tensor([0.31, 0.87])
    padded = torch.zeros(2, 9, 16)
    mask = torch.zeros(2, 9, dtype=torch.int64)
    for index, text in enumerate(texts):
        padded[index, : len(text)], mask[index, : len(text)] = text, 1
    with torch.no_grad():
        predicted = FAMILY.predict(
            pipeline.transformer,
            add_noise(x, noise, 1 - sigma, sigma),
            1000 * sigma,
            {"text": padded, "text_mask": mask},
        )
    ours = sample_losses(predicted, target(x, noise, 1 - sigma, sigma, "flow"))

    for index, text in enumerate(texts):  # one by one: neither batch nor padding changes a sample
        level = sigma[index]
        noisy = (1 - level) * x[index] + level * noise[index]
        time = (1000 - 1000 * level[None]) / 1000
        with torch.no_grad():
            answer = pipeline.transformer([noisy[:, None]], time, [text], return_dict=False)[0][0]
        theirs = ((-answer[:, 0] - (noise[index] - x[index])) ** 2).mean()
        torch.testing.assert_close(ours[index], theirs, atol=1e-5, rtol=1e-5)
    assert ours[0] != pytest.approx(float(ours[1]), rel=1e-3)


def test_targets_are_layers_of_blocks(pipeline: Any) -> None:
    found = {
        kind: FAMILY.lora_targets(pipeline.transformer, kind)
        for kind in ("attention", "transformer", "all")
    }
    assert [len(names) for names in found.values()] == [4 * 4, 4 * 7, 4 * 7 + 3]
    blocks = ("layers.", "noise_refiner.", "context_refiner.")
    linear = {
        name
        for name, module in pipeline.transformer.named_modules()
        if isinstance(module, nn.Linear) and name.startswith(blocks)
    }
    assert set(found["all"]) == linear
    assert not any("adaLN" in name for name in found["transformer"])


# ---- images and files


@pytest.mark.parametrize("guidance_scale", [1.0, 5.0])
def test_images_are_the_plain_pipelines(base: Path, guidance_scale: float) -> None:
    facts = facts_of(base)
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    ours = FAMILY.build_sampler(facts, denoiser=denoiser, device=CPU).image(
        encoder.encode_prompts([PROMPT]),
        encoder.encode_prompts(["blue"]),
        seed=3,
        size_px=(32, 48),
        steps=3,
        guidance_scale=guidance_scale,
    )
    plain = FAMILY.plain_pipeline(facts, dtype=torch.float32, device=CPU)
    plain.set_progress_bar_config(disable=True)
    theirs = plain(
        prompt=PROMPT,
        negative_prompt="blue",
        width=32,
        height=48,
        num_inference_steps=3,
        guidance_scale=guidance_scale - 1,
        generator=torch.Generator().manual_seed(3),
    ).images[0]
    assert ours.size == (32, 48) and np.asarray(theirs).std() > 5
    assert np.abs(np.asarray(ours, dtype=int) - np.asarray(theirs, dtype=int)).max() <= 1


@pytest.mark.parametrize("format", FAMILY.formats.written)
def test_written_names_are_read_by_the_pipeline(base: Path, tmp_path: Path, format: Any) -> None:
    facts, alpha, rank = facts_of(base), 8, 2
    denoiser: Any = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    names = FAMILY.lora_targets(denoiser, "all")
    mask = torch.ones(1, 7, dtype=torch.int64)
    conditioning = {"text": draw(1, 7, 16, seed=2), "text_mask": mask}
    inputs = (draw(1, 4, 8, 8), torch.tensor([400.0]), conditioning)
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
    """Return what Z-Image's own code calls diffusers' tensors: q, k and v are one matrix."""
    renamed = {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        "attention.to_out.0": "attention.out",
        "attention.norm_q": "attention.q_norm",
        "attention.norm_k": "attention.k_norm",
    }
    found: dict[str, Tensor] = {}
    for name, tensor in state.items():
        for theirs, own in renamed.items():
            name = name.replace(theirs, own)
        found[name] = tensor
    for name in [name for name in found if name.endswith(".to_q.weight")]:
        block = name.removesuffix(".to_q.weight")
        parts = [found.pop(f"{block}.to_{part}.weight") for part in "qkv"]
        found[f"{block}.qkv.weight"] = torch.cat(parts)
    return found


def denoiser_state(base: Path) -> dict[str, Tensor]:
    return load_file(base / "transformer" / "diffusion_pytorch_model.safetensors")


@pytest.mark.parametrize("layout", ["bare", "all in one", "diffusers"])
def test_a_single_file_holds_the_same_denoiser(base: Path, tmp_path: Path, layout: str) -> None:
    wanted = denoiser_state(base)
    own = as_comfyui(wanted)
    file = tmp_path / "denoiser.safetensors"
    if layout == "all in one":
        others = {"vae.decoder.conv_in.bias": torch.ones(8), "text_encoders.qwen3.x": torch.ones(1)}
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
    ("name", "beside", "variant", "shift", "told"),
    [
        ("z_image_turbo_bf16", 6.0, "turbo", 3.0, True),
        ("zImageTurbo_v2", 6.0, "turbo", 3.0, True),
        ("z_image_de_turbo_v1_bf16", 6.0, "base", 3.0, True),
        ("z_image_bf16", 6.0, "base", 6.0, True),
        ("z_image_bf16", 3.0, "base", 6.0, True),
        ("my_mix", 6.0, "base", 6.0, False),
        ("my_mix", 3.0, "turbo", 3.0, False),
    ],
)
def test_a_single_file_has_the_scheduler_of_its_release(
    tmp_path: Path, name: str, beside: float, variant: str, shift: float, told: bool
) -> None:
    """R3: a Turbo's file took shift 6 from the base release's folder beside it, instead of 3."""
    base, file = write_base(tmp_path / "base", shift=beside), tmp_path / f"{name}.safetensors"
    save_file(as_comfyui(denoiser_state(base)), file)
    facts = facts_of(base, source=str(file), denoiser=file)
    assert (facts.variant, facts.distilled) == (variant, variant == "turbo")
    assert facts.flow_shift(width_px=64, height_px=64) == shift
    sampler = FAMILY.build_sampler(
        facts,
        denoiser=FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU),
        device=CPU,
    )
    assert sampler.pipeline.scheduler.config.shift == shift  # type: ignore[attr-defined]  # a flow sampler's
    assert (facts.assumed is None) is told
    if facts.assumed is not None:
        other = "Z-Image" if variant == "turbo" else "Z-Image-Turbo"
        assert facts.assumed.setting.endswith(f"--set base.companion=Tongyi-MAI/{other}")


def test_a_file_that_does_not_fit_names_the_companion(base: Path, tmp_path: Path) -> None:
    state = as_comfyui(denoiser_state(base))
    file = tmp_path / "denoiser.safetensors"
    save_file({**state, "cap_embedder.1.weight": torch.zeros(16, 32)}, file)
    with pytest.raises(InputError, match="cap_embedder") as caught:
        facts_of(base, denoiser=file)
    assert "base.companion" in str(caught.value.fix)
    save_file({n: t for n, t in state.items() if not n.startswith("layers.1.")}, file)
    with pytest.raises(InputError, match="layers"):
        facts_of(base, denoiser=file)
    save_file({n: t for n, t in state.items() if n != "layers.1.attention.out.weight"}, file)
    with pytest.raises(InputError, match="companion"):
        FAMILY.load_denoiser(facts_of(base, denoiser=file), dtype=torch.float32, device=CPU)


def test_lumina_2_is_not_of_the_family(base: Path, tmp_path: Path) -> None:
    state = as_comfyui(denoiser_state(base))
    del state["cap_pad_token"]
    save_file(state, tmp_path / "lumina.safetensors")
    assert not FAMILY.detect_file(read_header(tmp_path / "lumina.safetensors"))


def test_a_missing_part_is_named(base: Path, tmp_path: Path) -> None:
    folder = tmp_path / "base"
    shutil.copytree(base, folder)
    (folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    with pytest.raises(InputError, match="vae"):
        facts_of(folder)
    (folder / "text_encoder" / "config.json").unlink()
    with pytest.raises(InputError, match="text_encoder"):
        facts_of(folder)

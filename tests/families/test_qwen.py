"""Qwen-Image beside diffusers' own pipeline and training formula, on a tiny base and its single files."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from diffusers.training_utils import compute_loss_weighting_for_sd3
from safetensors.torch import save_file
from torch import Tensor

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header
from lora_trainer.families.qwen import FAMILY
from lora_trainer.families.text.language_models import QWEN_VL_TEMPLATE, QWEN_VL_TEMPLATE_TOKENS
from lora_trainer.training.loss import add_noise, sample_losses, target
from tests.fakes.bases.qwen import write_base

CPU = torch.device("cpu")
PROMPTS = ["a red square", "many words in a row", ""]
SIZE_PX = (48, 32)


@dataclass(frozen=True, kw_only=True)
class Base:
    folder: Path
    facts: BaseFacts
    pipeline: Any
    denoiser: Any


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    folder = write_base(tmp_path_factory.mktemp("qwen") / "base")
    facts = facts_of(Layout(folder=folder))
    pipeline = QwenImagePipeline.from_pretrained(folder)
    pipeline.set_progress_bar_config(disable=True)
    denoiser = FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU)
    return Base(folder=folder, facts=facts, pipeline=pipeline, denoiser=denoiser)


def facts_of(layout: Layout) -> BaseFacts:
    return FAMILY.facts(layout, source="base")


def encoded(facts: BaseFacts, prompts: list[str]) -> dict[str, Tensor]:
    encoder = FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU)
    return dict(encoder.encode_prompts(prompts))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def batch(base: Base) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Return latents, noise and conditioning of two samples whose texts differ in length."""
    return draw(1, 2, 16, 12, 8), draw(2, 2, 16, 12, 8), encoded(base.facts, PROMPTS[:2])


# ---- encoding


def test_the_template_is_the_pipelines(base: Base) -> None:
    assert base.pipeline.prompt_template_encode == QWEN_VL_TEMPLATE
    assert base.pipeline.prompt_template_encode_start_idx == QWEN_VL_TEMPLATE_TOKENS
    before = QWEN_VL_TEMPLATE.partition("{}")[
        0
    ]  # the tiny tokenizer keeps the meaning of the number
    assert len(base.pipeline.tokenizer(before).input_ids) == QWEN_VL_TEMPLATE_TOKENS


def test_images_are_encoded_and_decoded_as_the_pipeline_does(base: Base) -> None:
    vae, pixels = base.pipeline.vae, draw(3, 2, 3, 32, 48).clamp(-1, 1)
    latents = FAMILY.load_image_encoder(base.facts, device=CPU).encode_images(pixels)
    with torch.no_grad():
        posterior = vae.encode(pixels.unsqueeze(2)).latent_dist
    shift, scale = (
        torch.tensor(values).view(1, -1, 1, 1)
        for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    mean = torch.stack([one.mean for one in latents])
    assert mean.shape == (2, 16, 16, 24)
    torch.testing.assert_close(mean, (posterior.mean[:, :, 0] - shift) / scale)
    std = torch.stack([one.std for one in latents])
    torch.testing.assert_close(std, posterior.std[:, :, 0] / scale)
    packed = base.pipeline._pack_latents(mean[:1], 1, 16, 16, 24)
    back = FAMILY.latents_to_decode(vae, packed, SIZE_PX)
    torch.testing.assert_close(back, posterior.mean[:1])


# ---- training


def test_loss_is_that_of_the_training_script(base: Base) -> None:
    """diffusers/examples/dreambooth/train_dreambooth_lora_qwen_image.py."""
    latents, noise, conditioning = batch(base)
    sigma = torch.tensor([0.25, 0.9])
    with torch.no_grad():
        noisy = add_noise(latents, noise, 1 - sigma, sigma)
        prediction = FAMILY.predict(base.denoiser, noisy, 1000 * sigma, conditioning)
        ours = sample_losses(prediction, target(latents, noise, 1 - sigma, sigma, "flow"))
        sigmas = sigma.view(2, 1, 1, 1, 1)
        model_input, wide_noise = latents.unsqueeze(2), noise.unsqueeze(2)  # one frame
        mixed = (1.0 - sigmas) * model_input + sigmas * wide_noise
        height, width = 12, 8
        packed = QwenImagePipeline._pack_latents(mixed.transpose(1, 2), 2, 16, height, width)
        raw = base.pipeline.transformer(
            hidden_states=packed,
            encoder_hidden_states=conditioning["text"],
            encoder_hidden_states_mask=conditioning["text_mask"],
            timestep=sigma * 1000 / 1000,
            img_shapes=[[(1, height // 2, width // 2)]] * 2,
            return_dict=False,
        )[0]
        raw = QwenImagePipeline._unpack_latents(raw, height * 2, width * 2, 2)
        weight = compute_loss_weighting_for_sd3("none", sigmas)
        error = weight * (raw - (wide_noise - model_input)) ** 2
        theirs = error.reshape(2, -1).mean(1)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_padding_changes_no_prediction(base: Base) -> None:
    latents, _, conditioning = batch(base)
    lengths = conditioning["text_mask"].sum(1).tolist()
    assert lengths[0] < lengths[1]
    times = torch.tensor([300.0, 700.0])
    with torch.no_grad():
        together = FAMILY.predict(base.denoiser, latents, times, conditioning)
        for i, length in enumerate(lengths):
            own = {name: value[i : i + 1, :length] for name, value in conditioning.items()}
            alone = FAMILY.predict(base.denoiser, latents[i : i + 1], times[i : i + 1], own)
            assert (together[i] - alone[0]).abs().max() < 1e-5
        unmasked = conditioning | {"text_mask": torch.ones_like(conditioning["text_mask"])}
        wrong = FAMILY.predict(base.denoiser, latents, times, unmasked)
    assert (wrong[0] - together[0]).abs().max() > 1e-3


# ---- single files


def test_fp8_weights_are_cast_and_a_pruned_file_is_as_deep_as_it_is(
    base: Base, tmp_path: Path
) -> None:
    file = tmp_path / "file.safetensors"
    state = {
        name: tensor.to(torch.float8_e4m3fn)
        for name, tensor in base.denoiser.state_dict().items()
        if not name.startswith("transformer_blocks.1.")
    }
    save_file(state, file)
    facts = facts_of(Layout(folder=base.folder, files={"denoiser": file}))
    assert facts.architecture["num_layers"] == 1
    found = FAMILY.load_denoiser(facts, dtype=torch.bfloat16, device=CPU)
    assert {weight.dtype for weight in found.parameters()} == {torch.bfloat16}
    name = "transformer_blocks.0.attn.to_q"
    difference = found.get_submodule(name).weight - base.denoiser.get_submodule(name).weight
    assert difference.abs().max() < 0.1


_RESIDUAL = {"norm1.": "0.", "conv1.": "2.", "norm2.": "3.", "conv2.": "6."}
_VIDEO_NAMES = {
    "encoder.conv_in.": "encoder.conv1.",
    "decoder.conv_in.": "decoder.conv1.",
    "norm_out.": "head.0.",
    "conv_out.": "head.2.",
    "mid_block.resnets.0.": "middle.0.",
    "mid_block.attentions.0.": "middle.1.",
    "mid_block.resnets.1.": "middle.2.",
    "encoder.down_blocks.": "encoder.downsamples.",
    "conv_shortcut.": "shortcut.",
}


def video_name(name: str) -> str:
    """Return the name that the video model the VAE comes from has for a tensor; levels have four layers."""
    if "quant_conv." in name:
        return name.replace("post_quant_conv.", "conv2.").replace("quant_conv.", "conv1.")
    if "resnets." in name or "down_blocks." in name:
        for before, after in _RESIDUAL.items():
            name = name.replace(f".{before}", f".residual.{after}")
    for before, after in _VIDEO_NAMES.items():
        name = name.replace(before, after)
    if found := re.match(r"decoder\.up_blocks\.(\d)\.(resnets|upsamplers)\.(\d)\.(.*)", name):
        level, kind, index, rest = found.groups()
        layer = 4 * int(level) + (3 if kind == "upsamplers" else int(index))
        return f"decoder.upsamples.{layer}.{rest}"
    return name


@pytest.mark.parametrize("named_as_video", [False, True])
def test_a_vae_file_gives_what_its_folder_gives(
    base: Base, named_as_video: bool, tmp_path: Path
) -> None:
    """The VAE has the release's depth: the other names depend on it."""
    folder, file = tmp_path / "base", tmp_path / "vae.safetensors"
    shutil.copytree(base.folder, folder)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        vae = AutoencoderKLQwenImage(base_dim=4)
    vae.save_pretrained(folder / "vae")
    renamed = video_name if named_as_video else str
    save_file({renamed(name): tensor for name, tensor in vae.state_dict().items()}, file)
    assert FAMILY.detect_file(read_header(file)) == {"vae"}
    whole = facts_of(Layout(folder=folder))
    facts = facts_of(Layout(folder=folder, files={"vae": file}))
    assert facts.parts["vae"] == whole.parts["vae"] and facts.vae_factor == 8
    pixels = draw(3, 1, 3, 32, 32)
    found, wanted = (
        FAMILY.load_image_encoder(one, device=CPU).encode_images(pixels)[0].mean
        for one in (facts, whole)
    )
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    loaded: Any = FAMILY.load_vae(facts.located)
    with torch.no_grad():
        decoded = [one.decode(wanted[None, :, None]).sample for one in (loaded, vae)]
    torch.testing.assert_close(decoded[0], decoded[1], rtol=0, atol=0)


# ---- what is refused


def changed(base: Base, folder: Path, part: str, **settings: object) -> Path:
    shutil.copytree(base.folder, folder)
    file = folder / part
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))
    return folder


def test_editing_models_are_refused(base: Base, tmp_path: Path) -> None:
    edit = changed(base, tmp_path / "a", "model_index.json", _class_name="QwenImageEditPipeline")
    with pytest.raises(InputError, match="is for QwenImageEditPipeline, allowed is QwenImagePip"):
        FAMILY.detect(edit)
    layered = changed(base, tmp_path / "b", "transformer/config.json", use_layer3d_rope=True)
    with pytest.raises(InputError, match="has use_layer3d_rope: an editing or layered model"):
        facts_of(Layout(folder=layered))
    (tmp_path / "c").mkdir()
    assert not FAMILY.detect(tmp_path / "c")


def test_wrong_and_missing_parts_are_named(base: Base, tmp_path: Path) -> None:
    text = changed(base, tmp_path / "a", "text_encoder/config.json", model_type="qwen3")
    with pytest.raises(InputError, match="'qwen3', allowed is 'qwen2_5_vl'"):
        facts_of(Layout(folder=text))
    folder = tmp_path / "b"
    shutil.copytree(base.folder, folder)
    (folder / "text_encoder" / "model.safetensors").unlink()
    with pytest.raises(InputError, match="text_encoder has no weights"):
        facts_of(Layout(folder=folder))

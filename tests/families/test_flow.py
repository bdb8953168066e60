"""What flow-matching families share: the shift of timesteps, packing, latents, files of one part."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.flux.pipeline_flux import calculate_shift
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from lora_trainer.common.errors import InputError
from lora_trainer.families.base import BaseFacts, Layout
from lora_trainer.families.base_files.base_folder import read_header, weights
from lora_trainer.families.flux import FAMILY
from lora_trainer.families.latent_images import pack, position_ids, unpack
from tests.fakes.bases.flux import write_base
from tests.fakes.low_rank import draw

CPU = torch.device("cpu")
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


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> BaseFacts:
    folder = write_base(tmp_path_factory.mktemp("flow") / "base")
    return FAMILY.facts(Layout(folder=folder), source="tiny")


# ---- the base's own shift


@pytest.mark.parametrize("size_px", [(512, 512), (1024, 1024), (1344, 768), (256, 2048)])
@pytest.mark.parametrize("name", SHIFTS)
def test_the_shift_is_that_of_the_pipelines_scheduler(name: str, size_px: tuple[int, int]) -> None:
    known = FAMILY.releases.get(FAMILY.published[0].ids[0])
    assert known is not None
    facts = replace(known, scheduler=SHIFTS[name])
    width, height = size_px
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


# ---- packing


@given(
    batch=st.integers(1, 3), channels=st.integers(1, 4), rows=st.integers(1, 4), columns=st.integers(1, 4)
)  # fmt: skip
def test_packing_is_a_pixel_unshuffle_and_comes_back(
    batch: int, channels: int, rows: int, columns: int
) -> None:
    latents = draw(batch, channels, 2 * rows, 2 * columns)
    tokens = pack(latents)
    assert torch.equal(tokens, F.pixel_unshuffle(latents, 2).flatten(2).transpose(1, 2))
    assert torch.equal(unpack(tokens, height=2 * rows, width=2 * columns), latents)
    places = [[0.0, row, column] for row in range(rows) for column in range(columns)]
    assert position_ids(latents).tolist() == places


# ---- latents


def test_latents_are_shifted_and_scaled_as_the_pipeline_undoes(facts: BaseFacts) -> None:
    vae: Any = FAMILY.load_vae(facts.located)
    pixels = draw(2, 3, 16, 24).clamp(-1, 1)
    found = FAMILY.load_image_encoder(facts, device=CPU).encode_images(pixels)
    with torch.no_grad():
        posterior = vae.encode(pixels).latent_dist
    for row, latents in enumerate(found):
        assert latents.mean.shape == (16, 8, 12)
        expected = (posterior.mean[row] - 0.1159) * 0.3611
        torch.testing.assert_close(latents.mean, expected, atol=1e-6, rtol=0)
        torch.testing.assert_close(latents.std, posterior.std[row] * 0.3611, atol=1e-6, rtol=0)


def test_latents_that_are_no_numbers_are_refused(facts: BaseFacts) -> None:
    encoder = FAMILY.load_image_encoder(facts, device=CPU)
    with pytest.raises(InputError, match="not finite"):
        encoder.encode_images(torch.full((1, 3, 16, 16), torch.inf))


@pytest.mark.parametrize("part", ["vae", "denoiser"])
def test_a_part_in_a_folder_of_its_own_is_used(facts: BaseFacts, tmp_path: Path, part: str) -> None:
    other = write_base(tmp_path / "other", seed=7)
    own = other / {"vae": "vae", "denoiser": "transformer"}[part]
    layout = Layout(folder=facts.located.folder, files={part: own})  # type: ignore[dict-item]  # a part
    mixed = FAMILY.facts(layout, source="mixed")
    assert own / "config.json" in FAMILY.parts(layout)[part]
    loaders: Mapping[str, Callable[[BaseFacts], nn.Module]] = {
        "vae": lambda found: FAMILY.load_vae(found.located),
        "denoiser": lambda found: FAMILY.load_denoiser(found, dtype=torch.float32, device=CPU),
    }
    whole = FAMILY.facts(Layout(folder=other), source="other")
    used, theirs, ours = (loaders[part](found).state_dict() for found in (mixed, whole, facts))
    assert all(torch.equal(used[name], theirs[name]) for name in used)
    assert not all(torch.equal(used[name], ours[name]) for name in used)


@pytest.mark.parametrize(
    ("file", "tensor"),
    [
        ("transformer/diffusion_pytorch_model.safetensors", "x_embedder.bias"),
        ("vae/diffusion_pytorch_model.safetensors", "decoder.conv_in.bias"),
        ("text_encoder_2/model.safetensors", "encoder.final_layer_norm.weight"),
    ],
)
def test_a_tensor_that_is_missing_is_never_made_up(tmp_path: Path, file: str, tensor: str) -> None:
    folder = write_base(tmp_path / "base")
    state = load_file(folder / file)
    del state[tensor]
    save_file(state, folder / file, metadata={"format": "pt"})
    facts = FAMILY.facts(Layout(folder=folder), source="cut")
    load: Mapping[str, Callable[[], object]] = {
        "transformer": lambda: FAMILY.load_denoiser(facts, dtype=torch.float32, device=CPU),
        "vae": lambda: FAMILY.load_image_encoder(facts, device=CPU),
        "text_encoder_2": lambda: FAMILY.load_text_encoder(facts, dtype=torch.float32, device=CPU),
    }
    with pytest.raises(InputError, match=f"lacks 1 tensors, first {tensor}"):
        load[file.split("/")[0]]()


# ---- files of one part or all


@pytest.mark.parametrize("vae", ["vae.", "first_stage_model.", None])
@pytest.mark.parametrize("prefix", ["model.diffusion_model.", "diffusion_model.", ""])
def test_a_file_is_taken_apart(facts: BaseFacts, tmp_path: Path, prefix: str, vae: str) -> None:
    """The parts of an all-in-one file, and a file of the denoiser alone."""
    (source,) = weights(facts.located.folder / "transformer")
    (image,) = weights(facts.located.folder / "vae")
    tensors = {prefix + name: value for name, value in load_file(source).items()}
    tensors["text_encoders.t5xxl.shared.weight"] = torch.zeros(9, 9)
    if vae:
        tensors |= {vae + name: value for name, value in load_file(image).items()}
    save_file(tensors, tmp_path / "all.safetensors")
    parts = {"denoiser", "vae"} if vae else {"denoiser"}
    assert FAMILY.detect_file(read_header(tmp_path / "all.safetensors")) == parts
    located = Layout(
        folder=facts.located.folder, files=dict.fromkeys(parts, tmp_path / "all.safetensors")
    )
    assert FAMILY.facts(located, source="all").parts == facts.parts

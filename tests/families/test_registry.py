"""Every registered family against the libraries that load it: facts, refusals, names, predictions."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.errors import InputError
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.families.costs import TARGET_GROUPS, Targets, Workload
from lora_trainer.families.unet_costs import adapter_layers
from lora_trainer.model.adapters import inject
from lora_trainer.model.load import EMBEDDED_FOLDER
from tests.fakes.tiny_base import copy_base, write_tiny_base
from tests.fakes.training import CPU, tiny_base

BASES: Mapping[str, Callable[[], Path]] = {"sd15": tiny_base}
"""A tiny base of each family; a new family adds a line."""
FAMILIES = pytest.mark.parametrize("name", families.MODULES)
KINDS = pytest.mark.parametrize("targets", list(TARGET_GROUPS))


def of(name: str) -> tuple[Family, BaseFacts]:
    family = families.family(name)
    return family, family.facts(BASES[name](), source="tiny", identities={})


def denoiser_of(name: str) -> nn.Module:
    family, facts = of(name)
    return family.load_denoiser(facts, dtype=torch.float32, device=CPU)


# ---- the registry


@FAMILIES
def test_every_family_has_a_tiny_base_and_names_itself(name: str) -> None:
    family = families.family(name)
    assert family.name == name
    assert families.detect(BASES[name]()) is family
    known = families.known_base(family.default_source)
    assert known is not None and known.family == name
    assert set(known.parts) == {"denoiser", "vae", "text_encoder"}


def test_a_default_is_registered_and_others_are_not() -> None:
    assert families.DEFAULT_FAMILY in families.MODULES
    assert families.known_base("nobody/nothing") is None
    with pytest.raises(KeyError):
        families.family("sd99")


def test_the_embedded_base_is_of_a_registered_family() -> None:
    facts = families.detect(EMBEDDED_FOLDER).facts(EMBEDDED_FOLDER, source="x", identities={})
    assert facts.resolution_px == 64


# ---- facts


@FAMILIES
def test_facts_are_what_the_pipeline_says(name: str) -> None:
    family, facts = of(name)
    pipeline = family.plain_pipeline(facts, device=CPU)
    networks = {
        "denoiser": pipeline.unet,
        "vae": pipeline.vae,
        "text_encoder": pipeline.text_encoder,
    }
    assert {part: found.parameters for part, found in facts.parts.items()} == {
        part: sum(p.numel() for p in network.parameters()) for part, network in networks.items()
    }
    assert facts.vae_factor == pipeline.vae_scale_factor
    assert facts.resolution_px == pipeline.unet.config.sample_size * pipeline.vae_scale_factor
    assert facts.latent_channels == pipeline.unet.config.in_channels
    assert facts.max_tokens == pipeline.tokenizer.model_max_length
    assert facts.prediction == pipeline.scheduler.config.prediction_type
    signal = family.alphas_cumprod(facts)
    assert signal.dtype == torch.float64
    torch.testing.assert_close(signal, pipeline.scheduler.alphas_cumprod.double())


@FAMILIES
def test_identities_are_put_beside_the_counts(name: str) -> None:
    family, facts = of(name)
    named = family.facts(BASES[name](), source="tiny", identities={"vae": "abc"})
    assert named.parts["vae"] == replace(facts.parts["vae"], identity="abc")
    assert named.parts["denoiser"].identity == ""


@pytest.mark.parametrize("prediction", ["v_prediction", "sample"])
def test_the_prediction_is_that_of_the_scheduler(tmp_path: Path, prediction: str) -> None:
    base = write_tiny_base(tmp_path / "base", prediction=prediction)
    family = families.detect(base)
    if prediction == "v_prediction":
        assert family.facts(base, source="x", identities={}).prediction == prediction
    else:
        with pytest.raises(InputError, match="prediction_type='sample'"):
            family.facts(base, source="x", identities={})


# ---- loading


@FAMILIES
def test_encoders_give_latents_of_the_promised_shape(name: str) -> None:
    family, facts = of(name)
    encoders = family.load_encoders(facts, device=CPU)
    step = facts.bucket_step_px
    pixels = torch.rand(2, 3, 3 * step, 4 * step) * 2 - 1
    for latent in encoders.encode_images(pixels):
        shape = (facts.latent_channels, 3 * step // facts.vae_factor, 4 * step // facts.vae_factor)
        assert latent.mean.shape == latent.std.shape == shape
        assert latent.mean.dtype == latent.std.dtype == torch.float32
        assert float(latent.std.min()) > 0
    for tensor in encoders.encode_prompts(["one", "two words"]).values():
        assert tensor.dtype == torch.float32 and len(tensor) == 2
        assert not torch.equal(tensor[0], tensor[1])
    assert encoders.count_tokens("") == 0
    assert encoders.count_tokens("word " * 300) >= 300, "counted before truncation"


@FAMILIES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_denoiser_is_frozen_and_predicts(name: str, dtype: torch.dtype) -> None:
    family, facts = of(name)
    denoiser = family.load_denoiser(facts, dtype=dtype, device=CPU)
    assert {parameter.dtype for parameter in denoiser.parameters()} == {dtype}
    assert not any(parameter.requires_grad for parameter in denoiser.parameters())
    side = facts.bucket_step_px // facts.vae_factor
    noisy = torch.randn(2, facts.latent_channels, 2 * side, side, dtype=dtype)
    texts = family.load_encoders(facts, device=CPU).encode_prompts(["one", "two"])
    conditioning = {key: tensor.to(dtype) for key, tensor in texts.items()}
    with torch.no_grad():
        found = family.predict(denoiser, noisy, torch.tensor([10, 900]), conditioning)
    assert found.shape == noisy.shape and found.dtype == dtype and found.isfinite().all()


@FAMILIES
def test_a_sample_is_the_image_of_the_plain_pipeline(name: str) -> None:
    family, facts = of(name)
    encoders = family.load_encoders(facts, device=CPU)
    side = facts.resolution_px
    options: dict[str, Any] = {"guidance_scale": 4.0}
    mine = family.build_sampler(facts, denoiser=denoiser_of(name), device=CPU).image(
        encoders.encode_prompts(["a cat"]),
        encoders.encode_prompts([""]),
        seed=7,
        size_px=(side, side),
        steps=3,
        **options,
    )
    pipeline = family.plain_pipeline(facts, device=CPU)
    pipeline.set_progress_bar_config(disable=True)
    plain = pipeline(
        "a cat",
        generator=torch.Generator().manual_seed(7),
        width=side,
        height=side,
        num_inference_steps=3,
        **options,
    ).images[0]
    difference = np.abs(np.asarray(mine, dtype=int) - np.asarray(plain, dtype=int))
    assert mine.size == (side, side) and difference.max() <= 1


# ---- adapters


@FAMILIES
@KINDS
def test_targets_and_their_count_are_those_of_the_plan(name: str, targets: Targets) -> None:
    family, facts = of(name)
    denoiser = denoiser_of(name)
    modules = family.lora_targets(denoiser, targets)
    order = {module: place for place, (module, _) in enumerate(denoiser.named_modules())}
    assert modules == sorted(set(modules), key=lambda module: order[module])
    adapter = inject(denoiser, modules=modules, rank=3, alpha=3.0, seed=0)
    counted = sum(parameter.numel() for parameter in adapter.parameters())
    assert counted == family.adapter_parameters(facts, rank=3, targets=targets)
    trainable = sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
    assert trainable == counted, "peft adapted more than was asked"


@KINDS
def test_sd15_targets_are_the_layers_of_the_cost_model(targets: Targets) -> None:
    family, facts = of("sd15")
    wanted = {layer.name for layer in adapter_layers(facts.architecture, targets=targets)}
    assert set(family.lora_targets(denoiser_of("sd15"), targets)) == wanted


@FAMILIES
def test_wider_targets_contain_the_narrower(name: str) -> None:
    family, denoiser = families.family(name), denoiser_of(name)
    attention, transformer, everything = (
        set(family.lora_targets(denoiser, kind)) for kind in ("attention", "transformer", "all")
    )
    assert attention < transformer < everything


@FAMILIES
def test_names_in_files_are_distinct(name: str) -> None:
    family = families.family(name)
    modules = family.lora_targets(denoiser_of(name), "all")
    assert len({family.kohya_module(module) for module in modules}) == len(modules)
    assert len({family.diffusers_module(module) for module in modules}) == len(modules)


def test_sd15_names_are_those_of_kohya_and_diffusers() -> None:
    family = families.family("sd15")
    module = "down_blocks.0.attentions.1.transformer_blocks.0.attn2.to_out.0"
    kohya = "lora_unet_down_blocks_0_attentions_1_transformer_blocks_0_attn2_to_out_0"
    assert family.kohya_module(module) == kohya
    assert family.diffusers_module(module) == f"unet.{module}"


@FAMILIES
def test_a_sample_costs_something(name: str) -> None:
    family, facts = of(name)
    cost = family.sample_cost(
        facts,
        Workload(
            height_px=facts.resolution_px,
            width_px=facts.resolution_px,
            element_bytes=4,
            rank=4,
            targets="all",
            checkpointing=False,
        ),
    )
    assert cost.saved_bytes > 0 and cost.step_flops > cost.forward_flops > 0


# ---- refusals


def test_folders_of_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="it holds nothing"):
        families.detect(tmp_path)
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(InputError, match=r"it holds \['notes.txt'\]"):
        families.detect(tmp_path)


@pytest.mark.parametrize("extra", ["text_encoder_2", "transformer"])
def test_pipelines_of_other_families_are_refused(tmp_path: Path, extra: str) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    edit(base / "model_index.json", **{extra: ["transformers", "Something"]})
    with pytest.raises(InputError, match="not a base model of a supported family"):
        families.detect(base)


def test_an_inpainting_base_is_refused(tmp_path: Path) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    edit(base / "unet" / "config.json", in_channels=9)
    with pytest.raises(InputError, match="not a base model of a supported family"):
        families.detect(base)


def edit(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


WEIGHTS = (
    "unet/diffusion_pytorch_model.safetensors",
    "vae/diffusion_pytorch_model.safetensors",
    "text_encoder/model.safetensors",
)


@pytest.mark.parametrize(
    "missing",
    [
        *WEIGHTS,
        "unet/config.json",
        "vae/config.json",
        "text_encoder/config.json",
        "scheduler/scheduler_config.json",
        "tokenizer/tokenizer.json",
    ],
)
def test_a_missing_file_is_named_with_its_part(tmp_path: Path, missing: str) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    (base / missing).unlink()
    (base / "tokenizer" / "vocab.json").unlink(missing_ok=True)
    with pytest.raises(InputError, match=missing.split("/")[0]) as caught:
        families.detect(base).facts(base, source="x", identities={})
    assert "again" in caught.value.fix or "safetensors" in caught.value.fix


@pytest.mark.parametrize("file", WEIGHTS)
def test_a_pickle_is_never_loaded(tmp_path: Path, file: str) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    (base / file).rename((base / file).with_suffix(".bin"))
    with pytest.raises(InputError, match="a pickle that can run code"):
        families.detect(base).facts(base, source="x", identities={})


@pytest.mark.parametrize("kept", [0, 5, 100, -1])
def test_truncated_weights_are_named(tmp_path: Path, kept: int) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    file = base / WEIGHTS[0]
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(InputError, match="unet.*diffusion_pytorch_model.safetensors"):
        families.detect(base).facts(base, source="x", identities={})


@pytest.mark.parametrize("header", [b"[]", b'{"a": {}}', b'{"a": 1}'])
def test_headers_that_are_no_safetensors_are_named(tmp_path: Path, header: bytes) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    (base / WEIGHTS[0]).write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(InputError, match="diffusion_pytorch_model.safetensors"):
        families.detect(base).facts(base, source="x", identities={})


def test_a_config_that_is_not_json_is_named(tmp_path: Path) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    (base / "vae" / "config.json").write_text("{")
    with pytest.raises(InputError, match="vae.*config.json"):
        families.detect(base).facts(base, source="x", identities={})


def test_half_precision_files_are_found(tmp_path: Path) -> None:
    base = copy_base(tiny_base(), tmp_path / "base")
    for file in WEIGHTS:
        path = base / file
        path.rename(path.with_name(path.name.replace(".safetensors", ".fp16.safetensors")))
    family = families.detect(base)
    facts = family.facts(base, source="x", identities={})
    assert facts.parts == of("sd15")[1].parts
    loaded = family.load_denoiser(facts, dtype=torch.float32, device=CPU)
    wanted = denoiser_of("sd15")
    pairs = zip(loaded.parameters(), wanted.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)
    family.load_encoders(facts, device=CPU)

"""Bases that diffusers knows as modular pipelines: Anima, with a network behind its text encoder, and FLUX.3."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.families.base.sampling import build_sampler, pipeline_arguments
from lora_trainer.families.files.locate import describe
from lora_trainer.families.files.weight_files import read_header
from lora_trainer.lora.adapter import layer_shapes
from lora_trainer.lora.lora_hooks import attach_assistant
from lora_trainer.lora.tensors import update
from lora_trainer.lora_file.key_formats import format_for, planned_contents
from lora_trainer.run import build
from tests.fakes.adapters import adapter_for, adapter_of, export, tool
from tests.fakes.family_bases import (
    CPU,
    base_of,
    conditioning_of,
    copy_of,
    denoiser_of,
    draw,
    edit_json,
    encoder_of,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
)
from tests.fakes.original_names import original_names
from tests.fakes.tiny_base import write_base

FAMILY = families.family("anima")
INDEX = "modular_model_index.json"
CONDITIONER = "text_conditioner/diffusion_pytorch_model.safetensors"


def release_file(file: Path, prefix: str = "net.") -> Path:
    """Write transformer and text conditioner as the release has them, with tables that no network here has."""
    tensors = original_names("anima", denoiser_of("anima").state_dict())
    tables = {"pos_embedder.seq": torch.arange(9.0), "accum_iteration": torch.zeros(1)}
    save_file({prefix + key: tensor for key, tensor in {**tensors, **tables}.items()}, file)
    return file


# ---- folders


def test_the_index_may_name_classes_in_its_hints_alone_and_other_repositories(
    tmp_path: Path,
) -> None:
    """As of folders whose index was written before the parts; a local copy keeps the places on the Hub."""
    folder = copy_of("anima", tmp_path / "base")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    for value in index.values():
        if isinstance(value, list):
            value[0] = value[1] = None
            value[2]["pretrained_model_name_or_path"] = "circlestone-labs/Anima-Base-v1.0-Diffusers"
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert families.detect(folder) is FAMILY
    facts = describe(BaseSettings(model=str(folder)))
    assert facts.parts == facts_of("anima").parts
    sampler = build_sampler(FAMILY, facts, denoiser=network_of(facts), device=CPU)
    (told,) = (encoder_of(facts).encode_prompts([text]) for text in ("a toy",))
    image = sampler.image(told, told, seed=1, size_px=(32, 16), steps=1, guidance_scale=1.0)
    assert image.size == (32, 16)


def test_a_part_that_lies_in_another_repository_is_named(tmp_path: Path) -> None:
    folder = copy_of("anima", tmp_path / "base")
    (folder / "vae").rename(tmp_path / "vae")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    index["vae"][2]["pretrained_model_name_or_path"] = "Qwen/Qwen-Image"
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    with pytest.raises(InputError, match="has no folder vae: .* loaded from Qwen/Qwen-Image"):
        describe(BaseSettings(model=str(folder)))


def test_a_folder_may_lack_what_its_blocks_make_and_what_is_not_used(tmp_path: Path) -> None:
    """As FLUX.3's: its blocks make the scheduler, and what rewrites prompts is elsewhere."""
    folder = copy_of("anima", tmp_path / "base")
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    del index["scheduler"]
    hint = ["transformers", "Qwen3_5ForConditionalGeneration"]
    place = {"pretrained_model_name_or_path": "somebody/upsampler", "type_hint": hint}
    index["prompt_upsampler"] = [None, None, place]
    (folder / INDEX).write_text(json.dumps(index), encoding="utf-8")
    shutil.rmtree(folder / "scheduler")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "text_encoder" / file.name)
    (folder / "tokenizer").rmdir()
    facts = describe(BaseSettings(model=str(folder)))
    assert facts.release.scheduler == FAMILY.published[0].scheduler
    texts, wanted = (
        encoder_of(each).encode_prompts(["a cat"]) for each in (facts, facts_of("anima"))
    )
    assert torch.equal(texts["text"], wanted["text"])


def test_cosmos_predict_2_is_another_base(tmp_path: Path) -> None:
    """It has the same transformer on T5's text, and no text conditioner."""
    folder = copy_of("anima", tmp_path / "base")
    (folder / INDEX).rename(folder / "model_index.json")
    kinds = {"transformer": ["diffusers", "CosmosTransformer3DModel"], INDEX: None}
    edit_json(folder / "model_index.json", _class_name="Cosmos2TextToImagePipeline", **kinds)
    edit_json(folder / "model_index.json", text_conditioner=None)
    with pytest.raises(InputError, match="is not a base model of a supported family"):
        families.detect(folder)
    file = release_file(tmp_path / "cosmos.safetensors")
    tensors = load_file(file)
    save_file({key: each for key, each in tensors.items() if "llm_adapter" not in key}, file)
    with pytest.raises(InputError, match="is Cosmos Predict 2, not a base model"):
        describe(BaseSettings(model=str(file)))


# ---- files


@pytest.mark.parametrize("prefix", ["net.", "model.diffusion_model."])
def test_the_text_conditioner_comes_from_the_file_of_the_transformer(
    prefix: str, tmp_path: Path
) -> None:
    file = release_file(tmp_path / "anima-base-v1.0.safetensors", prefix)
    assert families.detect_file(read_header(file)) == (FAMILY, {"denoiser"})
    folder = copy_of("anima", tmp_path / "companion")
    other = {key: tensor + 1 for key, tensor in load_file(folder / CONDITIONER).items()}
    save_file(other, folder / CONDITIONER)
    facts = describe(BaseSettings(model=str(file), companion=str(folder)))
    own = facts_of("anima")
    assert facts.parts["text_encoder"] == own.parts["text_encoder"]
    texts, wanted = (encoder_of(each).encode_prompts(["a cat"]) for each in (facts, own))
    assert torch.equal(texts["text"], wanted["text"])
    denoisers = (network_of(each).state_dict() for each in (facts, own))
    one, two = (dict(sorted(each.items())) for each in denoisers)
    assert one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)
    # One that lacks it takes the companion's.
    tensors = denoiser_of("anima").state_dict()
    save_file({f"diffusion_model.{key}": each for key, each in tensors.items()}, file)
    facts = describe(BaseSettings(model=str(file), companion=str(folder)))
    assert not torch.equal(encoder_of(facts).encode_prompts(["a cat"])["text"], wanted["text"])


def test_a_file_of_all_parts_needs_configurations_and_tokenizers_alone(tmp_path: Path) -> None:
    """As ComfyUI saves a checkpoint."""
    folder, file = (
        copy_of("anima", tmp_path / "companion"),
        tmp_path / "anima-base-v1.0.safetensors",
    )
    tensors = load_file(release_file(file, "model.diffusion_model."))
    parts = {"vae": "vae.", "text_encoder": "text_encoders.qwen3_06b.transformer.model."}
    for part, start in parts.items():
        (weights,) = (folder / part).glob("*.safetensors")
        tensors |= {start + key: tensor for key, tensor in load_file(weights).items()}
    save_file(tensors, file)
    for weights in folder.rglob("*.safetensors"):
        weights.unlink()
    facts, own = describe(BaseSettings(model=str(file), companion=str(folder))), facts_of("anima")
    for part in parts:
        assert facts.parts[part] == own.parts[part]  # type: ignore[index]  # names of parts
    texts, wanted = (encoder_of(each).encode_prompts(["a cat"]) for each in (facts, own))
    assert torch.equal(texts["text"], wanted["text"])
    vaes = [image_encoder_of(each).vae.state_dict() for each in (facts, own)]
    assert all(torch.equal(vaes[0][key], tensor) for key, tensor in vaes[1].items())
    assert len(network_of(facts).state_dict()) == len(denoiser_of("anima").state_dict())


def test_a_file_is_as_deep_as_it_is(tmp_path: Path) -> None:
    """Anima-2.9B has 36 blocks."""
    tensors = load_file(release_file(tmp_path / "anima-deep.safetensors"))
    more = {
        name.replace("blocks.1.", "blocks.2."): tensor.clone()
        for name, tensor in tensors.items()
        if name.startswith("net.blocks.1.")
    }
    save_file({**tensors, **more}, tmp_path / "anima-deep.safetensors")
    source = str(tmp_path / "anima-deep.safetensors")
    facts = describe(BaseSettings(model=source, companion=str(base_of("anima"))))
    assert facts.release.architecture["num_layers"] == 3
    assert len(list(network_of(facts).get_submodule("transformer_blocks").children())) == 3


# ---- texts


def test_an_empty_prompt_beside_others_is_what_it_is_alone() -> None:
    """Qwen3 has no token for it: attention to nothing would not be a number in some kernels."""
    encoder = encoder_of(facts_of("anima"))
    alone, together = encoder.encode_prompts([""]), encoder.encode_prompts(["", "a red cat"])
    assert alone["text_mask"].tolist() == [[1]] and alone["text"].isfinite().all()
    torch.testing.assert_close(together["text"][:1, :1], alone["text"], atol=1e-5, rtol=1e-5)
    assert not together["text"][0, 1:].any()


def test_an_image_beyond_the_positions_is_refused() -> None:
    facts = facts_of("anima")
    told = conditioning_of(FAMILY, facts, ["a toy"])
    noisy, times = torch.zeros(1, 16, 2, 258), torch.tensor([500.0])
    with pytest.raises(RequestError, match="258 latents a side, .* positions for 256"):
        FAMILY.predict(denoiser_of("anima"), noisy, times, told)


# ---- adapters


def test_diffusers_reads_the_names_that_comfyui_reads(tmp_path: Path) -> None:
    """The strength is in the factors: diffusers renames these keys and would lose an alpha."""
    facts, tensors = facts_of("anima"), adapter_of("anima")
    export(tmp_path / "a.safetensors", tensors, name="anima", format="comfyui")
    names = load_file(tmp_path / "a.safetensors")
    starts = ("diffusion_model.blocks.0.", "diffusion_model.blocks.1.")
    assert all(name.startswith(starts) and name.endswith(".weight") for name in names)
    pipeline = pipeline_of(facts)
    pipeline.load_lora_weights(str(tmp_path), weight_name="a.safetensors")
    network: Any = denoiser_of("anima")
    with torch.no_grad():
        for key, module in tensors.items():
            weight = network.get_parameter(f"{key.partition('.')[2]}.weight")
            weight += update(module, weight).reshape(weight.shape)
        told = conditioning_of(FAMILY, facts, ["one toy"])
        noisy, times = draw(1, 16, 8, 4), torch.tensor([300.0])
        loaded = FAMILY.predict(pipeline.transformer, noisy, times, told)
        wanted = FAMILY.predict(network, noisy, times, told)
    torch.testing.assert_close(loaded, wanted, rtol=1e-4, atol=1e-4)


def test_every_kind_of_adapter_has_a_file_where_no_layers_are_joined() -> None:
    for kind in ("lora", "loha", "lokr", "oft"):
        assert format_for(FAMILY, "auto", planned_contents(AdapterSettings(kind=kind))) == "comfyui"


def test_layers_of_the_text_conditioner_in_files_of_others_are_kept(tmp_path: Path) -> None:
    """ai-toolkit's and sd-scripts' files have them where they were asked for."""
    conditioner = encoder_of(facts_of("anima")).networks["text_conditioner"]
    names = ["blocks.0.self_attn.q_proj", "blocks.0.mlp.2"]
    tensors = adapter_for("text_conditioner", conditioner, names)
    for format, start in (
        ("comfyui", "diffusion_model.llm_adapter."),
        ("diffusers", "text_conditioner."),
    ):
        file = tmp_path / f"{format}.safetensors"
        export(file, tensors, name="anima", format=format)
        assert all(name.startswith(start) for name in load_file(file))
    tool(
        "convert",
        file,
        format="comfyui",
        base=base_of("anima"),
        output=tmp_path / "b.safetensors",
        precision="fp32",
    )
    first, second = (load_file(tmp_path / f"{name}.safetensors") for name in ("comfyui", "b"))
    assert first.keys() == second.keys()
    for name in first:
        if "lora_A" in name:
            other = name.replace("lora_A", "lora_B")
            torch.testing.assert_close(second[other] @ second[name], first[other] @ first[name])
    # `merge --into` bakes them in where the base keeps the network: in its folder, or in the transformer's file.
    single = release_file(tmp_path / "anima-base-v1.0.safetensors")
    for base, output in ((base_of("anima"), "folder"), (single, "merged.safetensors")):
        tool("merge", tmp_path / "b.safetensors", into=base, output=tmp_path / output)
    tool("merge", file, into=base_of("anima"), output=tmp_path / "folder", force=True)
    baked = load_file(tmp_path / "folder" / CONDITIONER)
    whole = load_file(tmp_path / "merged.safetensors")
    for name in names:
        before = conditioner.get_parameter(f"{name}.weight")
        wanted = before + update(tensors[f"text_conditioner.{name}"], before)
        torch.testing.assert_close(baked[f"{name}.weight"], wanted)
        torch.testing.assert_close(whole[f"net.llm_adapter.{name}.weight"], wanted)


# ---- FLUX.3: a distilled release with blocks of its own, and layers that no image from text goes through


FLUX3 = families.family("flux3")


@pytest.fixture(scope="module")
def flow_map(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny base like the distilled release."""
    folder = tmp_path_factory.mktemp("flow") / "base"
    return write_base("flux3", folder, transformer={"flow_map": True})


def test_a_flow_map_is_drawn_by_its_own_blocks_without_guidance(flow_map: Path) -> None:
    facts = describe(BaseSettings(model=str(flow_map)))
    release = facts.release
    assert (release.distilled, release.variant) == (True, "klein")
    assert (release.drawing.steps, release.drawing.guidance_scale) == (16, 1.0)
    assert release.assistant is None, "the published one is of another size"
    assert not facts.guidance.two_passes
    told, negative = (encoder_of(facts).encode_prompts([text]) for text in ("a toy", "a blur"))
    sampler, pipeline = (
        build_sampler(FLUX3, facts, denoiser=network_of(facts), device=CPU),
        pipeline_of(facts),
    )
    size: Any = {"width": 32, "height": 16}
    for scale in (1.0, 4.0):  # it has no guidance that a scale could change
        image = sampler.image(
            told, negative, seed=3, size_px=(32, 16), steps=3, guidance_scale=scale
        )
        arguments, _ = pipeline_arguments(
            FLUX3, pipeline, facts, "a toy", "a blur", guidance_scale=scale, steps=3
        )
        noise = torch.Generator().manual_seed(3)
        plain = pipeline(**arguments, **size, generator=noise, num_inference_steps=3).images[0]
        difference = np.asarray(image, dtype=int) - np.asarray(plain, dtype=int)
        assert np.abs(difference).max() <= 1


@pytest.mark.parametrize("is_flow_map", [True, False])
def test_tensors_say_whether_a_file_is_a_flow_map(
    is_flow_map: bool, flow_map: Path, tmp_path: Path
) -> None:
    """Whatever its companion is, and whatever the file is called."""
    folders = {True: flow_map, False: base_of("flux3")}
    state = load_file(folders[is_flow_map] / "transformer" / "diffusion_pytorch_model.safetensors")
    state["repa_projectors.0.weight"] = torch.ones(2, 2)  # as its training left them
    file = tmp_path / ("flux3_base.safetensors" if is_flow_map else "flux3_klein.safetensors")
    save_file(original_names("flux3", state), file)
    companion = folders[not is_flow_map]
    facts = describe(BaseSettings(model=str(file), companion=str(companion)))
    own = describe(BaseSettings(model=str(folders[is_flow_map])))
    assert facts.release.distilled == is_flow_map
    counts = [each.parts["denoiser"].parameters for each in (facts, own)]
    assert counts[0] == counts[1]
    loaded, wanted = (network_of(each).state_dict() for each in (facts, own))
    assert loaded.keys() == wanted.keys()
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    assert not any("image_cond" in key for key in wanted), "reference images have layers of theirs"
    loaded, wanted = (network_of(each.for_references()).state_dict() for each in (facts, own))
    assert (
        loaded.keys()
        == wanted.keys()
        == FLUX3.empty_denoiser(facts.release.architecture).state_dict().keys()
    )
    assert all(torch.equal(loaded[key], wanted[key]) for key in wanted)
    counts = [each.for_references().parts["denoiser"].parameters for each in (facts, own)]
    assert counts == [sum(each.numel() for each in wanted.values())] * 2


def test_layers_for_reference_images_in_files_of_others_are_kept(tmp_path: Path) -> None:
    """As a trainer of edits writes them; a training without references has none."""
    whole = FLUX3.empty_denoiser(facts_of("flux3").release.architecture)
    names = ["mode_blocks.image_cond.0.attn.to_q", "mode_blocks.image.0.ff.linear_in"]
    assert names[0] not in FLUX3.lora_targets(denoiser_of("flux3"), "all")
    file, back = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    export(file, adapter_for("denoiser", whole, names), name="flux3", format="comfyui")
    assert {key.partition(".lora")[0] for key in load_file(file)} == {
        "diffusion_model.content_mode_blocks.image_cond.0.q_proj",
        "diffusion_model.content_mode_blocks.image.0.mlp_in",
    }
    tool("convert", file, format="diffusers", output=back, base=base_of("flux3"))
    assert {key.partition(".lora")[0] for key in load_file(back)} == {
        f"transformer.{name}" for name in names
    }


def test_an_assistant_of_a_trainer_that_edits_images_runs_beside_the_base(tmp_path: Path) -> None:
    """SimpleTuner's has the attention of every block, that of reference images too."""
    facts = facts_of("flux3")
    whole = FLUX3.empty_denoiser(facts.release.architecture)
    names, file = FLUX3.lora_targets(whole, "attention"), tmp_path / "a.safetensors"
    export(
        file,
        adapter_for("denoiser", whole, names),
        name="flux3",
        format="diffusers",
        layers=layer_shapes(whole),
    )
    prepared: Any = SimpleNamespace(family=FLUX3, facts=facts)
    tensors = build.adapter_in(file, prepared, None)
    assert {key.partition(".")[2] for key in tensors} == {
        name for name in names if "image_cond" not in name
    }
    plain, network = denoiser_of("flux3"), denoiser_of("flux3")
    attach_assistant(network, tensors)
    told = conditioning_of(FLUX3, facts, ["one toy"])
    noisy, times = draw(1, facts.latent_channels, 4, 6), torch.tensor([300.0])
    with torch.no_grad():
        predicted, before = (FLUX3.predict(each, noisy, times, told) for each in (network, plain))
    assert not torch.allclose(predicted, before, atol=1e-3)

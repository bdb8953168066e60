"""Every registered family against its seam: detection, facts, loading, targets, names, refusals."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import adaptive_avg_pool2d

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.config.declare import TARGETS
from lora_trainer.config.layers import preset_families
from lora_trainer.config.learning import AdapterSettings
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.families.base.facts import BaseFacts, Conditioning
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.latents import DECODING, VaeLatents
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.base.sampling import build_sampler, pipeline_arguments
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.families.files.weight_files import read_header
from lora_trainer.lora.adapter import inject
from lora_trainer.lora.adapter_size import adapter_tensors, total_elements
from lora_trainer.run.previews import Colours
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
    network_of,
    pipeline_of,
    side_of,
    told_of,
)

FAMILIES = pytest.mark.parametrize("name", families.NAMES)


# ---- the registry


@FAMILIES
def test_every_family_has_a_tiny_base_presets_and_a_known_release(name: str) -> None:
    family = families.family(name)
    assert family.name == name and name in preset_families()
    assert families.detect(base_of(name)) is family, "and no other takes it for its own"
    known = families.known_base(next(iter(family.releases)))
    assert known is not None and known.family == name and known.layout is None
    assert set(known.parts) == {"denoiser", "vae", "text_encoder"} and known.download_bytes > 1e8
    refused = set(family.formats.refused)
    assert set(family.formats.written) | refused == {"kohya", "diffusers", "comfyui"}
    assert not refused & set(family.formats.written) and all(family.formats.refused.values())
    assert bool(family.text_adapter_shapes(facts_of(name))) == family.text.trainable


# ---- facts


@FAMILIES
def test_parameter_counts_are_those_of_the_loaded_parts(name: str) -> None:
    """Buffers that are saved count like parameters: SD3's table of positions is as large as a block."""
    facts = facts_of(name)
    text, pipeline = encoder_of(facts), pipeline_of(facts)
    vae, scheduler = pipeline.vae, pipeline.scheduler.config
    reads_vae = families.family(name).pipeline.reads_vae
    assert facts.vae_factor == pipeline.vae_scale_factor * (2 if reads_vae else 1)
    # A U-Net's scheduler gets prediction and terminal noise from the facts.
    same = [
        key
        for key in facts.release.scheduler
        if key in scheduler and facts.release.prediction == "flow"
    ]
    assert all(scheduler[key] == facts.release.scheduler[key] for key in same)
    loaded: Mapping[str, Sequence[nn.Module]] = {
        "denoiser": [denoiser_of(name)],
        "vae": [vae],
        "text_encoder": list(text.networks.values()),
    }
    counted = {part: sum(map(saved_numbers, networks)) for part, networks in loaded.items()}
    assert counted == {part: facts.parts[part].parameters for part in loaded}


def saved_numbers(network: nn.Module) -> int:
    """Count parameters, shared ones once, and persistent buffers but batch statistics."""
    saved = network.state_dict().keys()
    buffers = [b for name, b in network.named_buffers() if name in saved and "running_" not in name]
    counted = [buffer for buffer in buffers if buffer.is_floating_point()]
    return sum(tensor.numel() for tensor in (*network.parameters(), *counted))


# ---- loading


ROOMS = {
    "sd15": 77 - 2,  # CLIP: begin and end
    "sd3": 256 - 1,  # T5: end
    "flux": 512 - 1,
    "zimage": 512 - 19,  # <|im_start|>user\n and <|im_end|>\n<|im_start|>assistant\n, in letters
    "flux2": 512 - 25,  # and an empty thought
    "lumina2": 256 - 141,  # <bos> and the system prompt, in letters
    "qwen": 512 - 13,  # what comes before the prompt has room of its own
}
"""Tokens of a prompt that each kind of encoder has room for."""


def test_families_whose_vae_has_one_reading_make_latents_alike() -> None:
    """What differs between them changes no entry of the cache, which is for all of them."""
    first: dict[str, VaeLatents] = {}
    for name in families.NAMES:
        latents, reading = families.family(name).latents, facts_of(name).readings["vae"]
        assert not vars(latents), "a reading is a class's: values of one object would be in no key"
        kind, other = type(latents), type(first.setdefault(reading, latents))
        for each in {*dir(kind), *dir(other)} - DECODING:
            if not each.startswith("__"):
                assert getattr(kind, each, None) is getattr(other, each, None), (name, each)
    assert {"", "base.VideoLatents", "flux2.SquareLatents"} < first.keys()
    texts = {facts_of(name).readings["text_encoder"] for name in families.NAMES}
    classes = {families.family(name).text.encoder for name in families.NAMES}
    plain = {kind for kind in classes if vars(kind).get("reading") == ""}
    assert len(texts) == len(classes) - len(plain) + 1


@FAMILIES
def test_a_prompt_has_the_room_that_its_encoder_leaves(name: str) -> None:
    """One token more than there is room for and something is cut: nothing more comes in."""
    encoder = encoder_of(facts_of(name))
    room = encoder.prompt_room()
    assert room == ROOMS.get(name, room)
    counts = [encoder.count_tokens(" ".join(["a"] * count)) for count in (0, room, room + 1)]
    assert counts == [0, room, room + 1], "counted before truncation"
    shorter, whole, cut = (reach(encoder, count) for count in (room - 1, room, room + 1))
    assert shorter < whole == cut


def reach(encoder: TextEncoder, words: int) -> int:
    """Return how many places a prompt fills: by the mask, else those that the empty prompt leaves."""
    tokens, empty = encoder.tokenize([" ".join(["a"] * words)]), encoder.tokenize([""])
    if "mask" in tokens:
        return int(tokens["mask"].sum())
    return max(int((ids != empty[name]).sum()) for name, ids in tokens.items())


# ---- images


@FAMILIES
def test_a_guidance_scale_means_the_same_to_sampler_and_pipeline(name: str) -> None:
    """Also where the pipeline has another name for it; and it changes the image, or nothing is shown."""
    family, facts = families.family(name), facts_of(name)
    texts = encoder_of(facts)
    words = "a blur" if family.pipeline.takes_negative else ""
    prompt, negative = (texts.encode_prompts([text]) for text in ("a toy", words))
    sampler = build_sampler(family, facts, denoiser=denoiser_of(name), device=CPU)
    pipeline = pipeline_of(facts)
    side, drawn, seen = side_of(facts), [], []
    for scale in (1.0, 9.0):
        image = sampler.image(
            prompt,
            negative,
            seed=3,
            size_px=(side, side),
            steps=3,
            guidance_scale=scale,
            seen=lambda latents, pixels: seen.append((latents, pixels)),
        )
        plain: Any = pipeline(
            **pipeline_arguments(
                family, pipeline, facts, "a toy", words, guidance_scale=scale, steps=3
            )[0],
            generator=torch.Generator().manual_seed(3),
            num_inference_steps=3,
            width=side,
            height=side,
        )
        drawn.append(np.asarray(image, dtype=int))
        assert np.abs(drawn[-1] - np.asarray(plain.images[0], dtype=int)).max() <= 1, scale
    assert np.abs(drawn[0] - drawn[1]).max() > 5
    colours = Colours()  # of previews, from whatever form the latents have
    colours.learn(*seen[0])
    approximate = colours.decoded(seen[0][0], size_px=(side, side))
    assert approximate.shape[-2:] <= (side, side)
    grey = seen[0][1].mean((2, 3), keepdim=True)
    small = adaptive_avg_pool2d(seen[0][1], approximate.shape[-2:])
    assert (small - approximate).square().mean() <= (small - grey).square().mean()


# ---- adapters


@FAMILIES
def test_targets_and_their_count_are_those_of_the_plan(name: str) -> None:
    family, facts = families.family(name), facts_of(name)
    denoiser, settings = denoiser_of(name), AdapterSettings(rank=3, targets="all")
    by_kind = {kind: family.lora_targets(denoiser, kind) for kind in TARGETS}
    costs = BaseCosts(family=family, facts=facts)
    for kind, modules in by_kind.items():
        assert list(costs.adapter_shapes(kind)) == modules
        assert modules == [name for name, _ in denoiser.named_modules() if name in modules]
    assert set(by_kind["attention"]) < set(by_kind["transformer"]) <= set(by_kind["all"])
    shapes = costs.adapter_shapes("all")
    for module, (fan_in, out, *kernel) in shapes.items():
        weight: Any = denoiser.get_submodule(module).weight
        assert (weight[0].numel(), len(weight)) == (fan_in, out), module
        assert (kernel or [1]) == [weight[0, 0].numel()], module
    adapter = inject(
        {DENOISER: denoiser},
        modules={DENOISER: by_kind["all"]},
        settings=settings,
        alpha=3.0,
        seed=0,
    )
    counted = sum(parameter.numel() for parameter in adapter.parameters())
    assert counted == total_elements(adapter_tensors(shapes, settings))
    trainable = sum(p.numel() for p in denoiser.parameters() if p.requires_grad)
    assert trainable == counted, "peft adapted more than was asked"


FORMATS = [
    (name, format)
    for name in families.NAMES
    for format in families.family(name).formats.written
    # Of joined layers, which diffusers parts by the widths of the releases: tests/output/test_joined_layers.py.
    if format not in families.family(name).formats.original
]


@pytest.mark.parametrize(("name", "format"), FORMATS)
def test_names_of_every_format_are_read_by_the_pipeline(
    name: str, format: Any, tmp_path: Path
) -> None:
    """Of all layers that can be trained, convolutions and text encoders too, in every written format."""
    family, facts = families.family(name), facts_of(name)
    merged, loaded = pipeline_of(facts), pipeline_of(facts)
    networks = {DENOISER: getattr(merged, family.traits.folder)}
    if family.text.trainable:
        networks |= {component: getattr(merged, component) for component in family.text.roles}
    tensors: dict[str, Tensor] = {}
    for component, network in networks.items():
        for module in family.lora_targets(
            network, "all" if component == DENOISER else "text_encoder"
        ):
            down, up = factors(network.get_submodule(module), seed=len(tensors))
            tensors |= written(family.lora_key_name(format, component, module), format, down, up)
    told = told_of(name, ("one", "two words"))
    before = outputs(loaded, family, facts, told)
    save_file(tensors, tmp_path / "adapter.safetensors")
    loaded.load_lora_weights(tmp_path, weight_name="adapter.safetensors")
    after, expected = (outputs(each, family, facts, told) for each in (loaded, merged))
    for own, their, plain in zip(after, expected, before, strict=True):
        torch.testing.assert_close(own, their, rtol=1e-3, atol=1e-3)
        assert float((their - plain).abs().max()) > 0.01, "or a file that does nothing would pass"


def factors(layer: Any, *, seed: int) -> tuple[Tensor, Tensor]:
    """Add a random update of rank 2 to a layer and return its factors."""
    shape = layer.weight.shape
    down = 0.2 * draw(2, *shape[1:], seed=seed)
    up = 0.2 * draw(shape[0], 2, *[1] * (len(shape) - 2), seed=1000 + seed)
    with torch.no_grad():
        layer.weight += (up.flatten(1) @ down.flatten(1)).view(shape)
    return down, up


def written(name: str, format: Any, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    if format != "kohya":
        return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    alpha = {f"{name}.alpha": torch.tensor(1.0)}  # of rank 2: half the scale
    return {f"{name}.lora_down.weight": 2 * down, f"{name}.lora_up.weight": up, **alpha}


def outputs(pipeline: Any, family: Family, facts: BaseFacts, told: Conditioning) -> list[Tensor]:
    """Return the denoiser's prediction and what each text encoder that is trained gives."""
    states: list[Tensor] = []
    with torch.no_grad():
        for component in family.text.roles if family.text.trainable else ():
            output = getattr(pipeline, component)(torch.arange(77)[None], output_hidden_states=True)
            # SDXL reads the layer before the last, the others the last.
            states += [output[0], *output.hidden_states[-2:-1][: len(output.hidden_states) - 2]]
        denoiser = getattr(pipeline, family.traits.folder)
        return [*states, family.predict(denoiser, *noisy_of(facts), told)]


def noisy_of(facts: BaseFacts) -> tuple[Tensor, Tensor]:
    """Return a batch of two in latents, and its timesteps."""
    step, times = facts.bucket_step_px // facts.vae_factor, torch.tensor([300, 700])
    noisy = draw(2, facts.latent_channels, 2 * step, step)
    return noisy, times.float() if facts.release.prediction == "flow" else times


@FAMILIES
def test_every_target_learns_and_lies_in_a_block(name: str) -> None:
    family, facts, denoiser = families.family(name), facts_of(name), denoiser_of(name)
    modules = family.lora_targets(denoiser, "all")
    for module in modules:
        denoiser.get_submodule(module).requires_grad_(True)
    told = told_of(name, ("one", "two words"))
    family.predict(denoiser, *noisy_of(facts), told).square().mean().backward()
    grads = {module: denoiser.get_submodule(module).weight.grad for module in modules}
    assert not [module for module, grad in grads.items() if grad is None or not grad.any()]
    if family.traits.folder == "transformer":
        refiners = family.traits.refiners  # Krea 2's are not among the blocks that can be streamed
        assert all(
            re.match(family.traits.block_pattern, module) or module.startswith(refiners)
            for module in modules
        )


# ---- single files


@FAMILIES
def test_a_file_in_diffusers_names_is_of_one_family_and_holds_the_denoiser(
    name: str, tmp_path: Path
) -> None:
    """Checkpoints of U-Nets have the original names behind a prefix, and diffusers' names without."""
    family, facts, network = families.family(name), facts_of(name), denoiser_of(name)
    prefix = "" if family.traits.folder == "unet" else "diffusion_model."
    file = tmp_path / f"{name}-base.safetensors"
    save_file({f"{prefix}{key}": value for key, value in network.state_dict().items()}, file)
    found = families.detect_file(read_header(file))
    assert found == (family, {"denoiser"})
    read = facts_at(base_of(name), source=str(file), family=name, denoiser=file)
    assert read.parts["denoiser"] == facts.parts["denoiser"]
    loaded = network_of(read).state_dict()
    assert all(torch.equal(loaded[key], value) for key, value in network.state_dict().items())
    others = [each for each in families.NAMES if each != name]
    assert not [each for each in others if families.family(each).detect(base_of(name))]


# ---- refusals


@pytest.mark.parametrize("name", ["sdxl", "sd3"])
def test_a_missing_or_broken_part_is_named(name: str, tmp_path: Path) -> None:
    """Each weight file in turn: cut short, no safetensors, a pickle only, missing, a shard of two."""
    for file in base_of(name).glob("*/*.safetensors"):
        base = copy_of(name, tmp_path / file.parent.name)
        part, path = file.parent.name, base / file.parent.name / file.name
        whole, names = path.read_bytes(), sorted(read_header(path))
        for content in (whole[:-1], whole[:100], b"", (2).to_bytes(8, "little") + b"[]"):
            path.write_bytes(content)
            with pytest.raises(InputError, match=part):
                facts_at(base)
        path.rename(path.with_suffix(".bin"))
        with pytest.raises(InputError, match=f"{part}.*a pickle that can run code"):
            facts_at(base)
        path.with_suffix(".bin").unlink()
        with pytest.raises(InputError, match=f"{part}.*no weights"):
            facts_at(base)
        shards = [f"{path.stem}-0000{k}-of-00002.safetensors" for k in (1, 2)]
        weight_map = {name: shards[k % 2] for k, name in enumerate(names)}
        path.with_name(f"{path.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
        path.with_name(shards[0]).write_bytes(whole)
        with pytest.raises(InputError, match=f"lacks 1 of 2 shards, first {shards[1]}"):
            facts_at(base)
    base = copy_of(name, tmp_path / "without configuration")
    (base / "text_encoder/config.json").unlink()
    with pytest.raises(InputError, match=r"text_encoder.config\.json is missing"):
        facts_at(base)


@pytest.mark.parametrize(
    ("name", "file", "keys"),
    [
        ("sd15", "unet/config.json", ("sample_size", "block_out_channels")),
        ("sd15", "text_encoder/config.json", ("max_position_embeddings",)),
        ("flux", "vae/config.json", ("latent_channels", "block_out_channels")),
        ("flux", "scheduler/scheduler_config.json", ()),
    ],
)
def test_a_config_that_is_missing_not_json_or_hostile_is_named(
    name: str, file: str, keys: Sequence[str], tmp_path: Path
) -> None:
    base = copy_of(name, tmp_path / "base")
    whole = (base / file).read_text()
    for key in keys:
        for value in (None, "8", {}, []):
            edit_json(base / file, **{key: value})
            with pytest.raises(InputError, match=f"{key}="):
                facts_at(base)
        (base / file).write_text(whole)
    (base / file).write_text("{")
    with pytest.raises(InputError, match=file):
        facts_at(base)
    (base / file).unlink()
    with pytest.raises(InputError, match=file.split("/")[0]):
        facts_at(base)


DRAWN = ("sd15", "sd2", "sdxl", "sd3", "flux", "chroma", "lumina2")
MEANS = ("flux2", "qwen", "zimage", "anima", "flux3")


def test_latents_are_means_in_the_families_whose_references_take_them() -> None:
    """klein and Qwen-Image were drawn from the posterior, Z-Image too; see `VaeLatents.are_drawn` for the sources."""
    for name, are_drawn in {**dict.fromkeys(DRAWN, True), **dict.fromkeys(MEANS, False)}.items():
        assert families.family(name).latents.are_drawn == are_drawn, name


# Components of pipelines: networks and what goes with them.
COMPONENTS = (
    *("vae", "scheduler", "unet", "transformer"),
    *("text_encoder", "tokenizer", "processor"),
)


@pytest.mark.parametrize("name", families.NAMES)
def test_no_companion_decides_what_a_pipeline_is_told(name: str) -> None:
    """A distilled klein in one file was drawn with guidance: `is_distilled` came from its companion's index."""
    family = families.family(name)
    if (blocks := family.pipeline.blocks) is not None:
        # Components are given and values are in no argument: the blocks would read them from the folder's index.
        assert not getattr(diffusers, blocks.class_name)().expected_configs
        return
    taken = inspect.signature(getattr(diffusers, family.pipeline.class_name).__init__).parameters
    left = [key for key in taken if key != "self" and not key.startswith(COMPONENTS)]
    told = {**family.pipeline.absent, **family.pipeline.states(facts_of(name))}
    # An image encoder is a component that the pipelines of text to image do without.
    assert set(left) - {"image_encoder", "feature_extractor"} <= told.keys()


DRAWN = {"sd15", "sd2", "sdxl", "sd3", "auraflow", "flux", "chroma", "lumina2", "qwen21"}
"""Families whose references draw an image's latents anew in each epoch (sources: families/base/latents.py)."""


@pytest.mark.parametrize("name", families.NAMES)
def test_latents_are_drawn_or_the_mean_as_the_references_of_the_family_have_it(name: str) -> None:
    """klein's and Qwen-Image's were drawn, though its own code and its trainers take the mean."""
    assert families.family(name).latents.are_drawn == (name in DRAWN)

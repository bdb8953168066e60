"""The public releases: parameters counted in networks built from their configurations, sizes, names."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache, lru_cache
from typing import Any

import pytest
import torch
from torch import nn

from lora_trainer import families
from lora_trainer.config.declare import TARGETS
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.trace import LiveStorages
from lora_trainer.families.base import releases
from lora_trainer.families.base.releases import part_row, part_rows, released_layers, text_network
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.qwen21.family import decoded_frame
from lora_trainer.lora.adapter import denoiser_layers
from tests.fakes.networks_of_releases import VAES, texts, vae
from tests.fakes.tiny_base import tiny_table

SOURCES = [
    (name, release.ids[0]) for name in families.NAMES for release in families.family(name).published
]
BF16 = ("flux2", "qwen", "sd3", "lumina2")
"""Families whose download is counted: every parameter in two bytes, those that are not loaded too."""
SIZES = {name: tiny_table(name)["tests"].get("sizes_px", [1024, 64, 8]) for name in families.NAMES}
"""Family -> native side, step of bucket sides and pixels of a latent."""


def numbers(network: nn.Module) -> int:
    """Count parameters, and buffers that are saved: SD3's table of positions, which AuraFlow's learns."""
    counted = dict(network.named_parameters())
    tables = {n: b for n, b in network.state_dict().items() if n.endswith("pos_embed.pos_embed")}
    return sum(tensor.numel() for tensor in {**tables, **counted}.values())


@lru_cache(maxsize=1)
def network_of(name: str, architecture: str) -> tuple[nn.Module, dict[str, tuple[int, ...]]]:
    """Return the denoiser of an architecture in JSON, by which the planner's table of costs knows it, and its layers.

    Releases of one architecture stand next to each other: it is built once for them.
    """
    family, known = families.family(name), json.loads(architecture)
    with torch.device("meta"):
        denoiser = family.training_denoiser(known)
    return denoiser, denoiser_layers(family, known)


@pytest.mark.parametrize(("name", "source"), SOURCES, ids=lambda value: value)
def test_a_release_has_the_sizes_of_its_configuration(name: str, source: str) -> None:
    family = families.family(name)
    facts = family.releases[source]
    for alias in next(each.ids for each in family.published if source in each.ids):
        assert families.known_base(alias) == replace(facts, source=alias)
    denoiser, layers = network_of(name, json.dumps(dict(facts.release.architecture)))
    with torch.device("meta"):
        image, encoders = vae(VAES[name]), list(texts(name, facts))
    loaded = {
        "denoiser": numbers(denoiser),
        "vae": numbers(image),
        "text_encoder": sum(numbers(network) for _, network in encoders),
    }
    assert {part: each.parameters for part, each in facts.parts.items()} == loaded
    assert facts.release.sampling_scheduler() is not None  # of what is stated, without a folder
    size = (facts.resolution_px, facts.bucket_step_px, facts.vae_factor)
    epsilon = name == "sd2" and facts.release.prediction == "epsilon"
    assert list(size) == SIZES["sd15" if epsilon else name]
    if name in BF16:
        published = sum(numbers(network) for network, _ in encoders)
        assert facts.download_bytes == 2 * (loaded["denoiser"] + loaded["vae"] + published)
    # The scripts that write the tables of costs and layers were run after the last change of diffusers.
    assert layers in released_layers(name)
    costs = BaseCosts(family=family, facts=facts)
    for targets in TARGETS:
        shapes = costs.adapter_shapes(targets)
        assert list(shapes) == family.lora_targets(denoiser, targets)
        for module, (fan_in, out, *_) in shapes.items():
            weight: Any = denoiser.get_submodule(module).weight
            assert (weight[0].numel(), len(weight)) == (fan_in, out), module
    linear = map(denoiser.get_submodule, costs.linear_shapes)
    assert costs.linear_shapes and all(isinstance(layer, nn.Linear) for layer in linear)


SD = "stabilityai/stable-diffusion"
FACTS = {
    "stable-diffusion-v1-5/stable-diffusion-v1-5": ("sd_v1", "stable-diffusion-v1", "", False, None),
    f"{SD}-2-1-base": ("sd_v2", "stable-diffusion-v2-512", "", False, None),
    f"{SD}-2-1": ("sd_v2_v", "stable-diffusion-v2-768-v", "", False, None),
    f"{SD}-xl-base-1.0": ("sdxl_base_v1-0", "stable-diffusion-xl-v1-base", "", False, None),
    "black-forest-labs/FLUX.1-dev": ("flux1", "flux-1-dev", "dev", False, 3.158193),  # exp(1.15)
    "black-forest-labs/FLUX.1-schnell": ("flux1", "flux-1-schnell", "schnell", True, 1.0),
    "black-forest-labs/FLUX.2-klein-4B": ("flux2_klein_4b", "Flux.2-klein-4b", "klein-4b", True, 3.158193),
    "black-forest-labs/FLUX.2-klein-base-9B": ("flux2_klein_9b", "Flux.2-klein-9b", "klein-base-9b", False, 3.158193),
    "lodestones/Chroma1-HD": ("chroma", "chroma", "", False, 1.0),
    f"{SD}-3-medium-diffusers": ("3-medium", "stable-diffusion-3-medium", "3-medium", False, 3.0),
    f"{SD}-3.5-medium": ("3-5-medium", "stable-diffusion-3-5-medium", "medium", False, 3.0),
    f"{SD}-3.5-large-turbo": ("3-5-large", "stable-diffusion-3-5-large", "large-turbo", True, 3.0),
    "Tongyi-MAI/Z-Image-Turbo": ("zimage", "Z-Image", "turbo", True, 3.0),
    "Qwen/Qwen-Image": ("qwen_image", "Qwen-Image", "", False, None),
    "circlestone-labs/Anima-Base-v1.0-Diffusers": ("anima", "anima", "", False, 3.0),
    "krea/Krea-2-Raw": ("krea2", "Krea-2", "raw", False, 2.475024),
    "krea/Krea-2-Turbo": ("krea2", "Krea-2", "turbo", True, 2.475024),
    "black-forest-labs/flux-3-image-klein-base": ("flux3_klein", "Flux.3-klein", "klein-base", False, 6.93),
    "black-forest-labs/flux-3-image-klein": ("flux3_klein", "Flux.3-klein", "klein", True, 6.93),
    "Alpha-VLLM/Lumina-Image-2.0": ("lumina2", "lumina-2", "", False, 3.158193),
}  # fmt: skip
"""Release -> its names in metadata, variant, whether it is distilled, the published shift at 1024 px."""


@pytest.mark.parametrize("source", FACTS)
def test_facts_of_a_release(source: str) -> None:
    kohya, modelspec, variant, distilled, shift = FACTS[source]
    facts = families.known_base(source)
    assert facts is not None and (facts.release.variant, facts.release.distilled) == (
        variant,
        distilled,
    )
    names = families.family(facts.family).adapter_names(facts)
    assert (names.kohya, names.modelspec) == (kohya, f"{modelspec}/lora")
    if shift is not None:
        assert facts.flow_shift(width_px=1024, height_px=1024) == pytest.approx(shift)


# ---- what a family brings


@pytest.mark.parametrize("table", ["text_encoders", "vaes", "licences", "text_layers"])
def test_no_name_of_a_part_is_stated_twice(table: str) -> None:
    names = [name for name, _ in part_rows(table)]
    assert len(names) == len(set(names))


def test_a_family_states_the_text_encoder_that_it_brings(monkeypatch: pytest.MonkeyPatch) -> None:
    brought = {
        "text_encoders": {
            "byt5": {
                "kind": "byt5",
                "network": "T5EncoderModel",
                "width": 8,
                "parameters": 100,
                "sizes": {"layers": 2, "inner": 16},
            }
        },
        "text_layers": {"byt5": {"block.#.q": ["inner", "width"]}},
        "vaes": {"own": {"parameters": 5}},
    }
    tables = {name: family_table(name) for name in families.NAMES}
    last = families.NAMES[-1]
    tables[last] = {**tables[last], **brought}
    monkeypatch.setattr(releases, "family_table", tables.__getitem__)
    monkeypatch.setattr(releases, "text_network", text_network.__wrapped__)
    found = releases.text_network("byt5")
    assert (found.role, found.network, found.width) == ("byt5", "T5EncoderModel", 8)
    assert found.layers == {"block.0.q": (16, 8), "block.1.q": (16, 8)}
    assert part_row("vaes", "own") == {"parameters": 5}


# ---- what VAEs are planned with


class BlockedStorages(LiveStorages):
    """Also counts what oneDNN's convolutions make for a while: input and result in blocks of 16 channels.

    `blocked_bytes` is the peak with these, as measured on a processor (docs/experiments): both, then both results.
    """

    blocked_bytes = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        if function.overloadpacket is torch.ops.aten.convolution:
            channels = args[0].shape[1], result.shape[1]
            image, output = (
                each.nbytes // n * (-(-n // 16) * 16)
                for each, n in zip((args[0], result), channels, strict=True)
            )
            # An input of 3 channels is taken as it is.
            before = self.now_bytes - result.nbytes + (image if channels[0] >= 16 else 0)
            peak = max(before, self.now_bytes) + output
            self.blocked_bytes = max(self.blocked_bytes, peak)
        self.blocked_bytes = max(self.blocked_bytes, self.peak_bytes)
        return result


@cache
def peaks(kind: str, side_px: int = 256) -> list[float]:
    """Return the peaks of encoding and decoding in elements a pixel, then those with blocks of channels.

    At this size attention is small.
    """
    frame, channels = {
        "qwen": ((1,), 16),
        "qwen21": ((1,), 64),
        "flux2": ((), 32),
        "sd": ((), 4),
    }.get(kind, ((), 16))
    colours, factor = (4, 16) if kind == "qwen21" else (3, 8)
    with torch.device("meta"), torch.no_grad():
        network = vae(kind).eval().requires_grad_(False)
        pixels = torch.empty(1, colours, *frame, side_px, side_px)
        latents = torch.empty(1, channels, *frame, side_px // factor, side_px // factor)
        weights = [*network.parameters(), *network.buffers()]
        with BlockedStorages(ignored=[*weights, pixels]) as encoding:
            network.encode(pixels)
        with BlockedStorages(ignored=[*weights, latents]) as decoding:
            if kind == "qwen21":  # as its family decodes
                decoded_frame(network, latents)
            else:
                network.decode(latents)
    both = (encoding, decoding)
    counted = [*(each.peak_bytes for each in both), *(each.blocked_bytes for each in both)]
    return [each / 4 / side_px**2 for each in counted]


@pytest.mark.parametrize("name", families.NAMES)
def test_a_vae_takes_what_is_planned(name: str) -> None:
    """Qwen-Image's was planned at 640 and 768 elements a pixel: 3.0 GiB for decoding 1024 px instead of 6.8."""
    counted = peaks(VAES[name])
    planned = families.family(name).traits.vae_peak
    assert counted == pytest.approx(
        [planned.encoding, planned.decoding, *planned.blocked], rel=0.01
    )

"""The parts of a LoRA's score: formulas, norms of updates beside their weights, images as vectors."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageFilter, ImageOps
from torch import nn

from lora_trainer.common.errors import InputError
from lora_trainer.evaluate import validate as features
from lora_trainer.lora.tensors import update
from lora_trainer.reporting import score as s
from lora_trainer.run.saving import weight_figures
from tests.fakes.adapters import draw_module, with_magnitude

CPU = torch.device("cpu")


def test_one_broken_part_sinks_the_score() -> None:
    good = dict.fromkeys(s.WEIGHTS, 0.9)
    assert s.score(good) == pytest.approx(0.9)
    assert s.score(good | {"gain": 0.0}) == pytest.approx(0.9**0.75 * 0.05**0.25)
    assert s.score(good | {"weights": 0.0}) == 0
    assert s.score({"gain": 0.25, "weights": 1.0}) == pytest.approx(0.25 ** (0.25 / 0.4))


def test_each_part_is_its_formula() -> None:
    assert s.weights_part([0.1, 0.5]) == 1
    assert s.weights_part([0.1, 0.0]) == 0.5
    assert s.weights_part([5.0]) == pytest.approx(0.1)
    assert s.weights_part([0.1, math.inf]) == s.weights_part([math.nan]) == s.weights_part([]) == 0
    assert s.effective_rank([2.0, 2.0, 2.0, 0.0]) == pytest.approx(3)
    assert s.effective_rank([0.0, 0.0]) == 0
    assert s.rank_part([0.125, 1.0]) == 0.75
    assert s.mean_gain([1.0, 0.01], [0.5, 0.005]) == pytest.approx(0.5), "relative to each timestep"
    assert s.mean_gain([1.0, 1.0], [1e9, math.nan]) == -1
    assert s.mean_gain([0.0, 0.0], [0.0, 0.1]) == pytest.approx(-0.5), "a base without a loss"
    assert (
        s.relative_gain(0.0, 0.0),
        s.relative_gain(0.0, 0.1),
        s.relative_gain(0.1, math.nan),
    ) == (0, -1, -1)
    assert s.relative_gain(0.1, 0.4) == pytest.approx(-3)
    assert (s.drift_part(change=0.0, base_loss=0.0), s.drift_part(change=0.1, base_loss=0.0)) == (
        1,
        0,
    )
    assert s.gain_part(0.05) == 0.5
    assert s.gain_part(0.0) == s.gain_part(-1.0) == 0
    assert s.strength_part({0.0: 1.0, 0.5: 0.8, 1.0: 0.6, 1.5: 0.7}) == 1
    assert s.strength_part({0.0: 1.0, 0.5: 0.6, 1.0: 0.8, 1.5: 1.2}) == pytest.approx(0.5)
    assert s.strength_part({0.0: 1.0, 0.5: 1.1, 1.0: 1.2}) == 0
    assert s.strength_part({0.0: 1.0, 0.5: 0.9, 1.0: math.nan}) == 0
    for trained, held_out, part in (
        (0.4, 0.3, 0.75),
        (0.4, -0.1, 0),
        (0.1, 0.2, 1),
        (-0.1, 0.2, 0),
    ):
        gains = {"trained_gain": trained, "held_out_gain": held_out}
        assert s.generalisation_part(**gains) == pytest.approx(part)
    for adapted, part in ((0.5, 0.75), (-0.1, 1), (3.0, 0)):
        assert s.similarity_part(base_distance=2.0, adapted_distance=adapted) == part
    for ratio, part in ((0.95, 1), (0.7, 0.5), (0.1, 0)):
        assert s.memorisation_part(base_ratio=1.0, adapted_ratio=ratio) == pytest.approx(part)
    for change, part in ((0.0, 1), (0.1, 0.5), (math.inf, 0)):
        assert s.drift_part(change=change, base_loss=0.1) == part


@given(st.lists(st.floats(0, 10), min_size=1, max_size=6), st.integers(1, 6))
def test_the_nearest_of_a_few_is_the_mean_over_all_choices(found: list[float], count: int) -> None:
    count = min(count, len(found))
    expected = fmean(min(chosen) for chosen in itertools.combinations(found, count))
    assert s.expected_nearest(found, count=count) == pytest.approx(expected)


def test_energy_distance_of_two_points_and_two_others() -> None:
    # 0, 2 against 10, 14 on a line: 2 x mean(10, 14, 8, 12) - 2 - 4.
    assert s.energy_distance([10, 14, 8, 12], [2], [4]) == 16


def layer(shape: tuple[int, ...]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        out, inputs, *kernel = shape
        one = nn.Conv2d(inputs, out, kernel[0]) if kernel else nn.Linear(inputs, out)
        return nn.Sequential(one).requires_grad_(False)


@pytest.mark.parametrize(
    ("kind", "shape"),
    [("lora", (6, 4, 3, 3)), ("loha", (8, 6)), ("lokr", (6, 4, 3, 3)), ("oft", (8, 6))],
)
def test_norms_are_those_of_the_whole_matrices(kind: str, shape: tuple[int, ...]) -> None:
    base, module = layer(shape), draw_module(shape, kind=kind)
    weight = base[0].weight  # type: ignore[index]  # a Sequential
    found = weight_figures({"denoiser": base}, {"denoiser.0": module}, device=CPU)
    expected = float(update(module, weight).norm() / weight.norm())
    assert found.relative_norms == {"denoiser.0": pytest.approx(expected, rel=1e-5)}
    assert found.finite


def test_a_weight_is_measured_on_the_device_that_is_named() -> None:
    """Of a streamed base it lies in the machine's memory, and is a few million codes of four bits."""
    base, module = layer((8, 6)), draw_module((8, 6))
    with pytest.raises(RuntimeError, match="meta"):  # which has no values to measure
        weight_figures({"denoiser": base}, {"denoiser.0": module}, device=torch.device("meta"))


def test_the_rank_used_is_that_of_the_update_or_why_it_has_none() -> None:
    module, base = draw_module((16, 12), rank=4), layer((16, 12))
    one = {**module.tensors, "up": module.tensors["up"].clone()}
    one["up"][:, 1:] = 0
    for each, low, high in ((replace(module, tensors=one), 0.2499, 0.2501), (module, 0.5, 1)):
        figures = weight_figures({"denoiser": base}, {"denoiser.0": each}, device=CPU)
        assert low < figures.ranks_used["denoiser.0"] <= high
    weight = base[0].weight  # type: ignore[index]  # a Sequential
    dora = with_magnitude(module, weight)
    figures = weight_figures({"denoiser": base}, {"denoiser.0": dora}, device=CPU)
    assert figures.ranks_used == {} and "DoRA" in figures.why_not


def test_what_is_dead_exploded_or_no_number_is_named() -> None:
    base, module = layer((8, 6)), draw_module((8, 6))

    def figures(factor: float) -> list[list[str]]:
        tensors = {**module.tensors, "up": module.tensors["up"] * factor}
        found = weight_figures(
            {"denoiser": base}, {"denoiser.0": replace(module, tensors=tensors)}, device=CPU
        )
        return [found.dead, found.exploded, [] if found.finite else ["not finite"]]

    assert figures(0.0) == [["denoiser.0"], [], []]
    assert figures(1.0) == [[], [], []]
    assert figures(1e3) == [[], ["denoiser.0"], []]
    assert figures(math.nan) == [[], ["denoiser.0"], ["not finite"]]


def test_alike_pictures_are_near_and_their_layout_counts() -> None:
    left = Image.new("RGB", (64, 64), "white")
    left.paste("red", (0, 0, 32, 64))
    red = Image.new("RGB", (64, 64), "red")
    soft = red.resize((96, 128)).filter(ImageFilter.GaussianBlur(1))
    images = [red, soft, Image.new("RGB", (64, 64), "blue"), left, left, ImageOps.mirror(left)]
    encoded = features.find_features().encode(images)
    near, far = features.distances(encoded[:1], encoded[1:3])[0].tolist()
    assert near < 0.5 * far
    assert encoded.shape == (6, 168)
    assert torch.equal(encoded[3], encoded[4])
    assert (encoded[3] - encoded[5]).norm() > 0.3
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.randn(30, 8, generator=generator) for _ in range(2))
    assert abs(features.set_distance(first, second)) < 0.2
    assert features.set_distance(first, second + 1) > 1


def test_a_clip_model_in_a_folder_is_used_by_name_and_another_is_refused(tmp_path: Path) -> None:
    from transformers import CLIPVisionConfig, CLIPVisionModelWithProjection

    with pytest.raises(InputError, match="nor in the local Hub cache"):
        features.find_features("nobody/nothing")
    with pytest.raises(InputError, match="cannot be loaded"):
        features.find_features(str(tmp_path))
    sizes = {"hidden_size": 16, "intermediate_size": 16, "image_size": 32, "patch_size": 16}
    layers = {"num_hidden_layers": 1, "num_attention_heads": 2, "projection_dim": 8}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = CLIPVisionConfig(**sizes, **layers)
        CLIPVisionModelWithProjection(config).save_pretrained(tmp_path)
    clip = features.find_features(str(tmp_path))
    images = [Image.new("RGB", (64, 48), colour) for colour in ("red", "green", "blue")]
    encoded = clip.encode(images)
    assert "CLIP" in clip.name and encoded.shape == (3, 8)
    assert torch.allclose(encoded.norm(dim=1), torch.ones(3))


def test_copies_of_trained_pictures_are_told_from_new_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(12, 16, generator=generator)
    album = [(f"image {index}", index < 8) for index in range(12)]
    prompts = [f"image {index}" for index in range(8, 12)]
    new = torch.randn(4, 16, generator=generator)
    copies = pictures[:4] + 0.1 * new
    told_new, told_copied, own = (
        features.copy_ratio(samples, prompts, pictures, album) or 9.0
        for samples in (new, copies, pictures[8:] + 0.1 * new)
    )
    assert 0.8 < told_new < 1.25
    assert told_copied < 0.85
    assert own < 1.25, "the image whose caption is the prompt is left out"
    alone = [(caption, True) for caption, _ in album]
    assert features.copy_ratio(new, prompts, pictures, alone) is None

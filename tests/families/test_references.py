"""Bases that edit: the prediction with references is that of diffusers' own pipeline, and sizes are never distorted."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from lora_trainer import families
from lora_trainer.costs.base_costs import BaseCosts
from lora_trainer.costs.sample_cost import Workload
from lora_trainer.families.base.facts import IMAGE_PLACES, BaseFacts, Conditioning
from lora_trainer.families.base.latents import unpack
from lora_trainer.families.base.noise_levels import Level
from lora_trainer.families.base.references import References, references_in, with_references
from lora_trainer.families.base.sampling import build_sampler, editing_pipeline
from lora_trainer.families.qwen.family import picture_processor
from lora_trainer.training.dataloader import Sample
from lora_trainer.training.loss import collate
from scripts.write_cost_tables import cost
from tests.fakes.family_bases import (
    CPU,
    copy_of,
    edit_json,
    encoder_of,
    facts_at,
    facts_of,
    image_encoder_of,
    network_of,
    pipeline_of,
)
from tests.fakes.studio import draw

PROMPT = "make the left one blue"
# Other shapes than the image's, and than each other's: rows, columns and places cannot be taken for one another.
TARGET_PX, REFERENCES_PX = (64, 32), ((96, 64), (64, 128))


# U-Nets read a reference as channels; tests/families/test_unets_that_edit.py tries them.
UNETS = ("sd15", "sd2", "sdxl")
# Case -> family, what its base's folder says beside that of the tiny base: the pipeline, the network.
CASES: Mapping[str, tuple[str, str, Mapping[str, Any]]] = {
    "flux": ("flux", "FluxKontextPipeline", {}),
    "flux2": ("flux2", "", {}),
    "flux2dev": ("flux2dev", "", {}),
    "flux3": ("flux3", "", {}),
    "qwen-edit": ("qwen", "QwenImageEditPipeline", {}),
    "qwen-edit-2509": ("qwen", "QwenImageEditPlusPipeline", {}),
    "qwen-edit-2511": ("qwen", "QwenImageEditPlusPipeline", {"zero_cond_t": True}),
    "qwen21": ("qwen21", "QwenImage21Pipeline", {}),
}


def test_every_family_that_edits_is_tried() -> None:
    tried = {name for name, *_ in CASES.values()}
    assert tried | set(UNETS) == set(families.editing())


def base_that_edits(case: str, folder: Path) -> BaseFacts:
    """Return the facts of a family's tiny base as the release that edits."""
    name, pipeline, network = CASES[case]
    if not pipeline:
        return facts_of(name).for_references()
    base = copy_of(name, folder / "base")
    edit_json(base / "model_index.json", _class_name=pipeline)
    edit_json(base / "transformer/config.json", **network)
    return facts_at(base, family=name).for_references()


def editor_of(case: str, facts: BaseFacts, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return diffusers' own pipeline that edits, which reads references as large as they are given."""
    family, plain = families.family(facts.family), pipeline_of(facts)
    assert facts.references is not None
    if facts.references.appended is None:
        return editing_pipeline(family, facts, plain)
    kind = getattr(diffusers, CASES[case][1])
    sees = plain.text_encoder
    is_third = hasattr(plain, "processor")
    processor = (
        processor_of(plain.processor.tokenizer, sees.config.vision_config)
        if is_third
        else picture_processor(plain.tokenizer, sees.config.vision_config)
    )
    # It would scale them to 1 megapixel, far above what a tiny network can read.
    module = sys.modules[kind.__module__]
    computed: Any = vars(module)["calculate_dimensions"]

    def as_given(area: int, ratio: float) -> tuple[Any, ...]:
        width, height, *rest = computed(area, ratio)
        if area == 1024 * 1024:
            width, height = next(size for size in REFERENCES_PX if size[0] / size[1] == ratio)
        return (width, height, *rest)

    monkeypatch.setattr(module, "calculate_dimensions", as_given)
    if not is_third:
        sees.register_forward_pre_hook(with_positions, with_kwargs=True)
    return kind(**{**plain.components, "processor": processor})


def processor_of(tokenizer: Any, sight: Any) -> Any:
    """Return Qwen3-VL's own processor with the release's numbers, without its part for videos (torchvision).

    At these sizes it would enlarge an image to the fewest pixels that the release shows.
    """

    class Processor(transformers.Qwen3VLProcessor):  # type: ignore[misc]  # its methods have no annotations
        @classmethod
        def get_attributes(cls) -> list[str]:
            return ["image_processor", "tokenizer"]

    images = Qwen2VLImageProcessorPil(
        patch_size=sight.patch_size,
        merge_size=sight.spatial_merge_size,
        image_mean=[0.5, 0.5, 0.5],
        image_std=[0.5, 0.5, 0.5],
        min_pixels=32 * 32,
        max_pixels=4096 * 4096,
    )
    return Processor(
        image_processor=images, tokenizer=tokenizer, chat_template=tokenizer.chat_template
    )


def with_positions(network: Any, args: Any, named: dict[str, Any]) -> Any:
    """Tell Qwen2.5-VL which tokens are an image's, without which transformers 5 takes them for words in a row.

    transformers 4, with which the release was trained and its pipeline written, found that by itself.
    """
    if named.get("pixel_values") is None:
        return None
    kinds = (named["input_ids"] == network.config.image_token_id).int()
    return args, {"mm_token_type_ids": kinds, **named}


def pictures(folder: Any, *, seed: int = 0) -> list[Image.Image]:
    files = [folder / f"{index}.png" for index in range(len(REFERENCES_PX))]
    for index, (file, size) in enumerate(zip(files, REFERENCES_PX, strict=True)):
        draw(file, seed=seed + index, size=size)
    return [Image.open(file).convert("RGB") for file in files]


def values(image: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(image, dtype=np.float32))


def latents_of(facts: BaseFacts, images: list[Image.Image]) -> list[Tensor]:
    encoder = image_encoder_of(facts)
    rows = [values(each).permute(2, 0, 1)[None] / 127.5 - 1 for each in images]
    return [encoder.encode_images(each)[0].mean for each in rows]


def texts_of(facts: BaseFacts, prompt: str, images: list[Image.Image]) -> Conditioning:
    return encoder_of(facts).encode_seeing(prompt, images if facts.sees_references else [])


class Recorded:
    """A network's first call by a pipeline: its named arguments and its output."""

    def __init__(self, network: Any) -> None:
        self.calls: list[tuple[dict[str, Any], Tensor]] = []
        network.register_forward_hook(self._keep, with_kwargs=True)

    def _keep(self, _: Any, args: Any, named: dict[str, Any], output: Any) -> None:
        self.calls.append((named, output[0]))


@pytest.mark.parametrize("case", CASES)
def test_the_prediction_with_references_is_the_pipelines(
    case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = base_that_edits(case, tmp_path)
    family = families.family(facts.family)
    assert facts.references is not None
    images = pictures(tmp_path)[: facts.references.most]
    pipeline: Any = editor_of(case, facts, monkeypatch)
    recorded = Recorded(pipeline.transformer)
    width, height = (side // facts.vae_factor for side in TARGET_PX)
    count = width * height // facts.patch**2
    pipeline(
        **facts.references.drawing(images, TARGET_PX),
        prompt=PROMPT,
        width=TARGET_PX[0],
        height=TARGET_PX[1],
        num_inference_steps=2,
        **{family.pipeline.scale_argument: 1.0},
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
    )
    named, output = recorded.calls[0]

    def image_of(tokens: Tensor) -> Tensor:
        assert facts.references is not None
        # Behind all else where references stand in the text, else before it.
        own = (tokens[:, -count:] if facts.references.in_text else tokens[:, :count]).float()
        if facts.patch == 1:
            return own.transpose(1, 2).unflatten(2, (height, width))
        return unpack(own, height=height, width=width)

    conditioning = {
        **texts_of(facts, PROMPT, images),
        **facts.guidance.conditioning(1.0),
        **with_references(latents_of(facts, images)),
    }
    with torch.no_grad():
        prediction = family.predict(
            network_of(facts),
            image_of(named["hidden_states"]),
            named["timestep"] * 1000,
            conditioning,
        )
        alone = family.predict(
            network_of(facts),
            image_of(named["hidden_states"]),
            named["timestep"] * 1000,
            {
                key: each
                for key, each in conditioning.items()
                if not key.startswith("reference") and key != IMAGE_PLACES
            },
        )
    expected = image_of(output)
    assert prediction.shape == expected.shape
    torch.testing.assert_close(prediction, expected, rtol=0, atol=1e-4)
    assert (alone - expected).abs().max() > 1e-2, "the references change nothing"


@pytest.mark.parametrize("case", ["qwen-edit-2511", "qwen21"])
def test_a_pass_of_unlike_texts_and_references_predicts_each_as_if_alone(
    case: str, tmp_path: Any
) -> None:
    """Of texts that see their references: of three lengths, one of them empty, beside images of their own."""
    facts = base_that_edits(case, tmp_path)
    latents = torch.randn(
        3, facts.latent_channels, 4, 2, generator=torch.Generator().manual_seed(0)
    )
    samples = []
    for row, prompt in enumerate((PROMPT, "", "a hat")):
        (tmp_path / str(row)).mkdir()
        images = pictures(tmp_path / str(row), seed=10 * row)
        samples.append(
            Sample(
                sample=str(row),
                latents=latents[row],
                noise=latents[row],
                level=Level(timestep=100 + 300 * row, alpha=0.5, sigma=0.5, signal=None),
                weight=1.0,
                conditioning={
                    **texts_of(facts, prompt, images),
                    **with_references(latents_of(facts, images)),
                },
            )
        )

    def predicted(some: list[Sample]) -> Tensor:
        batch = collate(some, device=CPU, precision=torch.float32)
        inputs = batch.latents, batch.timesteps.float(), batch.conditioning
        with torch.no_grad():
            return families.family(facts.family).predict(network_of(facts), *inputs)

    together, alone = predicted(samples), torch.cat([predicted([each]) for each in samples])
    torch.testing.assert_close(together, alone, rtol=0, atol=1e-5)
    swapped = [
        replace(one, conditioning={**one.conditioning, **references_of(other)})
        for one, other in zip(samples, (*samples[1:], samples[0]), strict=True)
    ]
    differences = (predicted(swapped) - together).abs().amax(dim=(1, 2, 3))
    assert (differences > 1e-3).all(), "each row has its own references"


def references_of(sample: Sample) -> Conditioning:
    return with_references([each[0] for each in references_in(sample.conditioning)])


@pytest.mark.parametrize("case", CASES)
def test_a_sample_image_with_references_is_the_plain_pipelines(
    case: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = base_that_edits(case, tmp_path)
    family = families.family(facts.family)
    assert facts.references is not None
    images = pictures(tmp_path)[: facts.references.most]
    sampler = build_sampler(family, facts, denoiser=network_of(facts), device=CPU)
    drawn = sampler.image(
        texts_of(facts, PROMPT, images),
        texts_of(facts, "", images),
        seed=5,
        size_px=TARGET_PX,
        steps=2,
        guidance_scale=1.0,
        references=images,
    )
    pipeline: Any = editor_of(case, facts, monkeypatch)
    whole = pipeline(
        **facts.references.drawing(images, TARGET_PX),
        prompt=PROMPT,
        width=TARGET_PX[0],
        height=TARGET_PX[1],
        num_inference_steps=2,
        **{family.pipeline.scale_argument: 1.0 - family.pipeline.scale_offset},
        generator=torch.Generator().manual_seed(5),
    ).images[0]
    assert drawn.size == TARGET_PX
    assert (values(drawn) - values(whole)).abs().max() <= 1


def test_references_keep_their_shape_and_are_never_larger_than_allowed() -> None:
    rule = References(most=4)
    sized = {
        size: rule.size_px(*size, side_px=1024, token_px=16)
        for size in ((1024, 1024), (2048, 1024), (1024, 2048), (640, 480), (100, 100), (8, 900))
    }
    assert sized == {
        (1024, 1024): (1024, 1024),
        (2048, 1024): (1440, 720),  # 1448 x 724, and at most 15 px of each side cut off
        (1024, 2048): (720, 1440),
        (640, 480): (640, 480),  # not enlarged
        (100, 100): (96, 96),
        (8, 900): (16, 896),
    }
    # At half the resolution of the base as large as the images, whatever the base could read.
    assert rule.size_px(2048, 1024, side_px=512, token_px=16) == (720, 352)
    grown = References(most=1, grows=True, tokens=2)
    assert grown.size_px(300, 200, side_px=1024, token_px=16) == (1248, 832)
    listed = References(most=1, sizes_px=((672, 1568), (1024, 1024), (1568, 672)))
    assert listed.size_px(3000, 1200, side_px=1024, token_px=16) == (1568, 672)
    assert listed.size_px(1200, 3000, side_px=2048, token_px=16) == (672, 1568)
    assert listed.size_px(1200, 3000, side_px=512, token_px=16) == (320, 800)


def test_references_are_named_in_their_order() -> None:
    latents = [torch.full((1, 2, 2), float(index)) for index in range(11)]
    found = references_in({"text": torch.zeros(1), **with_references(latents)})
    assert [float(each[0, 0, 0, 0]) for each in found] == list(range(11))


def editing_releases() -> list[str]:
    """Return one release of each network that is traced with references, and of each way in which texts see them."""
    alike: dict[tuple[Any, ...], str] = {}
    for name in families.editing():
        for source, facts in families.family(name).releases.items():
            if facts.references is not None:
                numbers = str(sorted(facts.release.network_numbers().items()))
                alike.setdefault((name, numbers, id(facts.references.seen_tokens)), source)
    return list(alike.values())


@pytest.mark.parametrize("source", editing_releases())
def test_a_step_with_references_takes_what_the_table_says(source: str) -> None:
    """The table knows no references: their pixels, and what texts see of them, count as the image's own.

    Few blocks of a kind are traced and one more, as for the table: to the byte what all of them are.
    """
    facts = families.known_base(source)
    assert facts is not None and facts.references is not None
    family = families.family(facts.family)
    costs = BaseCosts(family=family, facts=facts.for_references())
    alone = Workload(
        height_px=512,
        width_px=512,
        element_bytes=2,
        rank=16,
        targets="attention",
        checkpointing="full",
    )
    bases: dict[str, BaseCosts] = {}
    # Where references have layers of their own, image and references do not attend to each other in these.
    work = 0.04 if family.traits.reference_layers else 0.01
    for sizes in (((512, 512),), ((640, 384), (256, 768)), ((512, 512),) * 4):
        load = replace(alone, references_px=sizes)
        text_tokens = facts.release.max_tokens
        traced = cost(family, costs.facts, load, text_tokens=text_tokens, bases=bases)
        planned = costs.sample_cost(load)
        assert planned.step_flops == pytest.approx(traced.step_flops, rel=work)
        peaks = [each.saved_bytes + each.temporary_bytes for each in (planned, traced)]
        assert peaks[0] == pytest.approx(peaks[1], rel=0.03)

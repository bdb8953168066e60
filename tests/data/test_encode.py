"""Filling the caches with real encoders: each thing once, again only if what it depends on changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CLIPTextModel, CLIPTokenizer

from lora_trainer import families
from lora_trainer.config import DataSettings, Precision
from lora_trainer.data.buckets import buckets_for, cut, place
from lora_trainer.data.cache import Cache
from lora_trainer.data.encode import Encoded, Needs, TextEntries, fill, needs
from lora_trainer.data.scan import scan
from lora_trainer.errors import InputError
from lora_trainer.events import Event, EventStream
from lora_trainer.families.base import (
    BaseFacts,
    Conditioning,
    Geometry,
    ImageEncoder,
    Latents,
    Layout,
    TextEncoder,
)
from lora_trainer.files import CappedFolder, HashMemo
from lora_trainer.model.load import identified
from tests.fakes.tiny_base import copy_base
from tests.fakes.training import CPU, tiny_base

SIZES = ((20, 20), (40, 20), (20, 34))
PROMPT = "a prompt for the samples"


@dataclass(frozen=True, kw_only=True)
class CountingImages(ImageEncoder):
    """A real VAE that remembers what it was given."""

    real: ImageEncoder
    seen: list[Tensor] = field(default_factory=list)

    def encode_images(self, pixels: Tensor) -> list[Latents]:
        self.seen.extend(pixels)
        return self.real.encode_images(pixels)


@dataclass(kw_only=True)
class CountingTexts(TextEncoder):
    """Real text encoders that remember which texts were tokenized and how many ran the networks."""

    real: TextEncoder
    seen: list[str] = field(default_factory=list)
    embedded: int = 0

    def tokenize(self, prompts: Sequence[str]) -> Mapping[str, Tensor]:
        self.seen.extend(prompts)
        return self.real.tokenize(prompts)

    def embed(self, tokens: Mapping[str, Tensor]) -> Conditioning:
        self.embedded += 1
        return self.real.embed(tokens)

    def count_tokens(self, prompt: str) -> int:
        return self.real.count_tokens(prompt)

    def prompt_room(self) -> int:
        return self.real.prompt_room()


@dataclass(kw_only=True)
class Studio:
    """A dataset folder, a base and a cache; `encode` is what a run does with them."""

    folder: Path
    cache: Cache
    base: Path
    settings: DataSettings = field(default_factory=DataSettings)
    resolution_px: int = 16
    precision: Precision = "fp32"
    tokens_only: bool = False
    events: list[Event] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    def facts(self) -> BaseFacts:
        layout = Layout(folder=self.base)
        found = families.detect(self.base).facts(layout, source="tiny", identities={})
        return identified(found, HashMemo(file=self.folder / "memo.json", entries={}))

    def needs(self) -> Needs:
        memo = HashMemo(file=Path("unused.json"), entries={})
        records = scan(self.folder, settings=self.settings, memo=memo).records
        facts = self.facts()
        buckets = buckets_for(
            resolution_px=self.resolution_px, step_px=facts.bucket_step_px, max_aspect=2.0
        )
        return needs(
            records,
            {r.name: place(r.width_px, r.height_px, buckets=buckets) for r in records},
            prompts=[PROMPT],
            facts=facts,
            texts_as=self.texts_as(),
            geometry=self.told,
            settings=self.settings,
            seed=1,
        )

    def told(self, geometry: Geometry) -> Conditioning:
        return {"corner": torch.tensor([geometry.corner_px])}

    def texts_as(self) -> TextEntries:
        facts = self.facts()
        return TextEntries(
            encoder_identity=facts.parts["text_encoder"].identity,
            max_tokens=facts.max_tokens,
            precision=self.precision,
            tokens_only=self.tokens_only,
        )

    def encode(
        self, wanted: Needs | None = None
    ) -> tuple[Encoded, CountingImages | None, CountingTexts | None]:
        """Fill the cache; return what it says it did and the encoders that were loaded."""
        facts, family = self.facts(), families.detect(self.base)
        images: list[CountingImages] = []
        texts: list[CountingTexts] = []

        def load_images(_device: torch.device) -> ImageEncoder:
            images.append(CountingImages(real=family.load_image_encoder(facts, device=CPU)))
            return images[0]

        def load_texts(_device: torch.device) -> TextEncoder:
            real = family.load_text_encoder(facts, dtype=torch.float32, device=CPU)
            texts.append(CountingTexts(real=real))
            return texts[0]

        stream = EventStream()
        stream.subscribe(self.events.append)
        done = fill(
            wanted or self.needs(),
            self.cache,
            settings=self.settings,
            load_image_encoder=load_images,
            load_text_encoder=load_texts,
            devices=[CPU],
            texts_as=self.texts_as(),
            events=stream,
        )
        assert len(images) <= 1 and len(texts) <= 1
        return done, images[0] if images else None, texts[0] if texts else None

    def work(self) -> tuple[int, list[str]]:
        """Fill the cache; return how many images and which texts the encoders really saw."""
        done, image_encoder, text_encoder = self.encode()
        images = len(image_encoder.seen) if image_encoder else 0
        texts = text_encoder.seen if text_encoder else []
        assert (done.latents, done.texts) == (images, len(texts))
        return images, sorted(texts)

    def problems(self) -> list[Mapping[str, Any]]:
        return [event.fields for event in self.events if event.kind == "problem"]


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    """Three pictures of three shapes with captions, nothing cached."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    for index, size in enumerate(SIZES):
        draw(folder / f"p{index}.png", seed=index, size=size)
        (folder / f"p{index}.txt").write_text(f"picture number {index}")
    cache_folder = CappedFolder(root=tmp_path / "cache", limit_bytes=1 << 30)
    cache_folder.create()
    damage: list[str] = []
    return Studio(
        folder=folder,
        base=tiny_base(),
        cache=Cache(folder=cache_folder, on_problem=lambda what, **_: damage.append(what)),
        damage=damage,
    )


def draw(path: Path, *, seed: int, size: tuple[int, int] = (20, 20)) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)


TEXTS = ["", PROMPT, *(f"picture number {index}" for index in range(3))]


def test_a_cold_run_encodes_each_once_and_a_warm_one_nothing(studio: Studio) -> None:
    assert studio.work() == (3, sorted(TEXTS))
    done, *encoders = studio.encode()
    assert encoders == [None, None], "a warm run loads no encoder"
    assert done == Encoded(latents=0, texts=0, found=8)


def test_equal_pictures_and_equal_captions_are_encoded_once(studio: Studio) -> None:
    (studio.folder / "copy.png").write_bytes((studio.folder / "p0.png").read_bytes())
    (studio.folder / "copy.txt").write_text("picture number 2")
    assert studio.work() == (3, sorted(TEXTS))


def test_an_edited_caption_encodes_one_text(studio: Studio) -> None:
    studio.encode()
    (studio.folder / "p1.txt").write_text("something else")
    assert studio.work() == (0, ["something else"])


def test_a_replaced_picture_encodes_one_latent(studio: Studio) -> None:
    studio.encode()
    draw(studio.folder / "p0.png", seed=77)
    assert studio.work() == (1, [])


def test_a_renamed_picture_encodes_nothing(studio: Studio) -> None:
    studio.encode()
    for suffix in (".png", ".txt"):
        (studio.folder / f"p0{suffix}").rename(studio.folder / f"new{suffix}")
    assert studio.work() == (0, [])


def test_another_resolution_encodes_all_latents_and_no_text(studio: Studio) -> None:
    studio.encode()
    studio.resolution_px = 24
    assert studio.work() == (3, [])


@pytest.mark.parametrize(
    ("part", "file", "images", "texts"),
    [
        ("vae", "diffusion_pytorch_model.safetensors", 3, []),
        ("text_encoder", "model.safetensors", 0, TEXTS),
        ("unet", "diffusion_pytorch_model.safetensors", 0, []),
    ],
)
def test_other_weights_encode_what_they_made(
    studio: Studio, tmp_path: Path, part: str, file: str, images: int, texts: list[str]
) -> None:
    studio.encode()
    studio.base = copy_base(studio.base, tmp_path / "other base")
    weights = load_file(studio.base / part / file)
    next(iter(weights.values())).view(-1)[0] += 0.5
    save_file(weights, studio.base / part / file, metadata={"format": "pt"})
    assert studio.work() == (images, sorted(texts))


def test_a_damaged_entry_is_encoded_again_and_no_other(studio: Studio) -> None:
    studio.encode()
    wanted = studio.needs()
    key = next(iter(wanted.latents.values())).key
    before = studio.cache.read(key)
    data = bytearray(studio.cache.path(key).read_bytes())
    data[-3] ^= 1
    studio.cache.path(key).write_bytes(data)
    assert studio.work() == (1, [])
    after = studio.cache.read(key)
    assert before is not None and after is not None
    assert all(np.array_equal(before[name], after[name]) for name in before)
    (problem,) = studio.damage
    assert "damaged" in problem


def test_an_entry_holds_what_the_vae_of_diffusers_gives(studio: Studio) -> None:
    """Plain, mirrored and cut; scaled for the denoiser."""
    studio.settings = DataSettings(flip=True)
    wanted = studio.needs()
    assert studio.encode(wanted)[0].latents == 6
    vae = AutoencoderKL.from_pretrained(studio.base, subfolder="vae")
    for job in wanted.latents.values():
        picture = Image.open(job.record.path).convert("RGB")
        pixels = np.asarray(cut(picture, job.placement, flip=False), dtype=np.float32)
        pixels = pixels[:, ::-1] if job.flip else pixels
        tensor = torch.tensor(pixels.copy()).permute(2, 0, 1)[None] / 255 * 2 - 1
        with torch.no_grad():
            posterior = vae.encode(tensor).latent_dist
        entry = studio.cache.read(job.key)
        assert entry is not None
        for name, value in (("mean", posterior.mean), ("std", posterior.std)):
            expected = (value[0] * 0.5).numpy()
            np.testing.assert_allclose(entry[name], expected, rtol=1e-4, atol=1e-5)


def test_an_entry_holds_what_the_text_encoder_gives(studio: Studio) -> None:
    studio.encode()
    tokenizer = CLIPTokenizer.from_pretrained(studio.base, subfolder="tokenizer")
    encoder = CLIPTextModel.from_pretrained(studio.base, subfolder="text_encoder")
    ids = tokenizer(PROMPT, padding="max_length", max_length=77, return_tensors="pt").input_ids
    with torch.no_grad():
        expected = encoder(ids)[0].numpy()
    entry = studio.cache.read(studio.texts_as().key(PROMPT))
    assert entry is not None and entry["text"].shape == (1, 77, 16)
    np.testing.assert_allclose(entry["text"], expected, rtol=1e-5, atol=1e-6)


def test_another_precision_of_the_text_encoder_encodes_the_texts_again(studio: Studio) -> None:
    studio.encode()
    studio.precision = "bf16"
    assert studio.work() == (0, sorted(TEXTS))


def test_texts_of_a_trained_encoder_are_kept_as_tokens(studio: Studio) -> None:
    studio.encode()
    studio.tokens_only = True
    done, _, encoder = studio.encode()
    assert encoder is not None and (done.texts, encoder.embedded) == (5, 0)
    entry = studio.cache.read(studio.texts_as().key(PROMPT))
    assert entry is not None
    tokens = {name: torch.from_numpy(array) for name, array in entry.items()}
    assert {tensor.dtype for tensor in tokens.values()} == {torch.int64}
    with torch.no_grad():
        run = encoder.embed(tokens)
    for name, tensor in encoder.encode_prompts([PROMPT]).items():
        torch.testing.assert_close(run[name], tensor)


def test_sources_name_what_a_sample_needs(studio: Studio) -> None:
    studio.settings = DataSettings(flip=True, repeats=2, shuffle_tags=True, caption_variants=3)
    (studio.folder / "p0.txt").write_text("a, b, c, d")
    wanted = studio.needs()
    assert len(wanted.sources) == 3 * 2
    used = wanted.keys()
    keys = {key.digest for key in used}
    for source in wanted.sources.values():
        assert source.mirrored is not None and source.mirrored != source.plain
        assert len(source.texts) == 3
        digests = {source.plain.digest, source.mirrored.digest, *(k.digest for k in source.texts)}
        assert digests <= keys
        assert wanted.latents[source.plain.digest].flip is False
        assert wanted.latents[source.mirrored.digest].flip is True
        bucket = wanted.latents[source.plain.digest].placement.bucket
        assert source.size_px == (bucket.width_px, bucket.height_px)
        assert source.geometry["corner"].shape == (1, 2)


def test_the_corner_told_is_that_of_the_picture_as_it_is_seen(studio: Studio) -> None:
    """What is left over on the left is on the right in the mirror, which differs where it is odd."""
    studio.settings = DataSettings(flip=True)
    draw(studio.folder / "p1.png", seed=1, size=(41, 20))
    wanted = studio.needs()
    placements = {
        source.plain.digest: wanted.latents[source.plain.digest].placement
        for source in wanted.sources.values()
    }
    odd = 0
    for source in wanted.sources.values():
        placement = placements[source.plain.digest]
        left_px, top_px = placement.left_px, placement.top_px
        over_px = placement.scaled_width_px - placement.bucket.width_px
        odd += over_px % 2
        assert source.geometry["corner"].tolist() == [[left_px, top_px]]
        assert source.mirrored_geometry["corner"].tolist() == [[over_px - left_px, top_px]]
    assert odd, "or both corners are the same"


def test_a_long_caption_is_a_note(studio: Studio, caplog: pytest.LogCaptureFixture) -> None:
    (studio.folder / "p1.txt").write_text("word " * 200)
    studio.encode()
    (problem,) = studio.problems()
    assert (problem["severity"], problem["code"]) == ("note", "CAP-03")
    assert "has 600 tokens, there is room for 75" in problem["what"]
    assert "longer than the specified maximum" not in caplog.text, "transformers' own words"
    assert studio.work() == (0, [])


def test_progress_is_told_item_by_item(studio: Studio) -> None:
    studio.encode()
    phases = [event.fields for event in studio.events if event.kind == "phase"]
    assert [phase["done"] for phase in phases] == list(range(9))
    assert {phase["total"] for phase in phases} == {8}


def test_a_picture_that_changed_after_the_scan_is_refused(studio: Studio) -> None:
    wanted = studio.needs()
    draw(studio.folder / "p2.png", seed=5)
    with pytest.raises(InputError, match="p2.png.*changed while in use"):
        studio.encode(wanted)


def test_latents_that_are_not_finite_name_the_picture(studio: Studio, tmp_path: Path) -> None:
    studio.base = copy_base(studio.base, tmp_path / "broken base")
    file = studio.base / "vae" / "diffusion_pytorch_model.safetensors"
    weights = {name: torch.full_like(value, torch.nan) for name, value in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"p\d.png: .*not finite"):
        studio.encode()

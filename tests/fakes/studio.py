"""A dataset folder, a base and a cache, filled as a run does it by real encoders that count their work."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from lora_trainer import families
from lora_trainer.cache.cache_plan import TextEntries, needs
from lora_trainer.cache.encode import fill
from lora_trainer.cache.store import Cache
from lora_trainer.common import caption_markup
from lora_trainer.common.event_kinds import Event
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import CappedFolder
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import placing
from lora_trainer.dataset.scan import scan
from lora_trainer.families.base.facts import BaseFacts, Conditioning, Geometry
from lora_trainer.families.base.layout import Layout
from lora_trainer.families.base.texts import TextEncoder
from lora_trainer.families.files.locate import identified
from tests.fakes.training import CPU, tiny_base

SIZES = ((20, 20), (40, 20), (20, 34))
PROMPT = "a prompt for the samples"
ENTRIES = 8
"""Three latents, three captions, the empty text and the prompt."""


class Counting:
    """A real encoder that remembers what its methods were given, and so the images and texts that it saw."""

    def __init__(self, real: Any) -> None:
        self.real, self.calls = real, defaultdict[str, list[Any]](list)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.real, name)

        def call(*given: Any) -> Any:
            self.calls[name] += given
            return value(*given)

        return call if callable(value) else value

    @property
    def seen(self) -> list[Any]:
        weighted = map(caption_markup.words_of, self.calls["tokenize_weighted"])
        return [*chain(*self.calls["encode_images"], *self.calls["tokenize"]), *weighted]


def facts_of(base: Path) -> BaseFacts:
    return families.detect(base).facts(Layout(folder=base), source="tiny")


@cache
def image_encoder(base: Path) -> Any:
    """Return the image encoder of a base, loaded once for all tests of the process."""
    return families.detect(base).latents.encoder(facts_of(base), device=CPU)


@cache
def text_encoder(base: Path) -> TextEncoder:
    """Return the text encoder of a base, loaded once for all tests of the process."""
    family = families.detect(base)
    return family.load_text_encoder(facts_of(base), dtype=torch.float32, device=CPU)


@dataclass(kw_only=True)
class Studio:
    """A dataset folder, a base and a cache; `encode` is what a run does with them."""

    folder: Path
    cache: Cache
    base: Path
    settings: DataSettings = field(default_factory=DataSettings)
    resolution_px: int = 16
    more_px: tuple[int, ...] = ()
    max_aspect: float = 2.0
    prompt: str = PROMPT
    precision: Any = "fp32"
    tokens_only: bool = False
    max_tokens: int | None = None
    """Instead of what the base has."""
    events: list[Event] = field(default_factory=list)
    damage: list[str] = field(default_factory=list)

    def facts(self) -> BaseFacts:
        memo = HashMemo()
        found = identified(facts_of(self.base), memo)
        if self.max_tokens is None:
            return found
        return replace(found, release=replace(found.release, max_tokens=self.max_tokens))

    def needs(self) -> Any:
        facts = self.facts()
        data = self.settings.model_copy(
            update={
                "resolution": self.resolution_px,
                "more_resolutions": self.more_px,
                "max_aspect": self.max_aspect,
            }
        )
        place = placing(data, resolution_px=16, step_px=facts.bucket_step_px)
        records = scan(self.folder, settings=self.settings, place_image=place).records
        return needs(
            records,
            prompts=[self.prompt],
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
            reading=facts.readings["text_encoder"],
            text_tokens=facts.text_tokens,
            precision=self.precision,
            tokens_only=self.tokens_only,
            emphasis=self.settings.emphasis,
            system_prompt=facts.system_prompt,
        )

    def encode(
        self,
        wanted: Any = None,
        *,
        texts_as: TextEntries | None = None,
        stop: Callable[[], int | None] = lambda: None,
    ) -> tuple[dict[str, int], Counting | None, Counting | None]:
        """Fill the cache; return what it says it did and the encoders that were loaded."""
        loaded: dict[Any, Counting] = {}

        def loads(load: Callable[[Path], Any]) -> Any:
            def once(_: torch.device) -> Any:
                assert load not in loaded
                loaded[load] = Counting(load(self.base))
                return loaded[load]

            return once

        stream = EventStream()
        stream.subscribe(self.events.append)
        done = fill(
            wanted or self.needs(),
            self.cache,
            settings=self.settings,
            load_image_encoder=loads(image_encoder),
            load_text_encoder=loads(text_encoder),
            devices=[CPU],
            texts_as=texts_as or self.texts_as(),
            events=stream,
            stop=stop,
        )
        return done, loaded.get(image_encoder), loaded.get(text_encoder)

    def work(self) -> tuple[int, list[str]]:
        """Fill the cache; return how many images and which texts the encoders really saw."""
        done, image_encoder, text_encoder = self.encode()
        images = len(image_encoder.seen) if image_encoder else 0
        texts = text_encoder.seen if text_encoder else []
        assert (done["latents"], done["texts"]) == (images, len(texts))
        return images, sorted(texts)

    def problems(self) -> list[Mapping[str, Any]]:
        return [event.fields for event in self.events if event.kind == "problem"]


def studio_in(folder: Path) -> Studio:
    """Return three images of three shapes with captions, nothing cached."""
    pictures = folder / "pictures"
    pictures.mkdir()
    for index, size in enumerate(SIZES):
        draw(pictures / f"p{index}.png", seed=index, size=size)
        (pictures / f"p{index}.txt").write_text(f"image number {index}")
    cache_folder = CappedFolder(root=folder / "cache", limit_bytes=1 << 30)
    cache_folder.create()
    damage: list[str] = []
    return Studio(
        folder=pictures,
        base=tiny_base(),
        cache=Cache(folder=cache_folder, on_problem=lambda what, **_: damage.append(what)),
        damage=damage,
    )


def files_of(root: Path) -> dict[str, bytes]:
    """Return the entries of a cache, by name; those moved aside and the unfinished are none."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.glob("*/??/*.safetensors")
        if not path.name.startswith(".")
    }


def elsewhere(studio: Studio, root: Path) -> Studio:
    """Return the same studio with another cache, empty unless there is one."""
    folder = CappedFolder(root=root, limit_bytes=1 << 30)
    folder.create()
    damage: list[str] = []
    cache = Cache(folder=folder, on_problem=lambda what, **_: damage.append(what))
    return replace(studio, cache=cache, damage=damage, events=[])


def draw(path: Path, *, seed: int, size: tuple[int, int] = (20, 20)) -> None:
    noise = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(noise).save(path)

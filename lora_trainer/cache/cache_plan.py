"""The cache entries of a run: their keys, the job that computes each entry, and the entries of each sample.

Inputs: records with their placement in buckets, texts, the facts of the base. Outputs: jobs by digest, and the
sources of the samples. Planning reads and encodes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from PIL.Image import Image
from torch import Tensor

from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.caption_markup import NewWord, plainly, weighted_parts, words_of
from lora_trainer.common.errors import MachineError
from lora_trainer.common.processes import gc_disabled
from lora_trainer.config.declare import Precision
from lora_trainer.config.inputs import OWN_FOLDER, DataSettings
from lora_trainer.dataset.buckets import Placement
from lora_trainer.dataset.caption_rules import class_texts, variants
from lora_trainer.dataset.records import ImageRecord, Reference
from lora_trainer.dataset.slider_file import Direction
from lora_trainer.families.base.facts import BaseFacts, Conditioning, Geometry
from lora_trainer.families.base.texts import TextEncoder

RESIDENT_LIMIT_BYTES = 1 << 30  # entries kept in RAM; a small dataset is read from disk once


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleView:
    """An image as it is or mirrored."""

    latents: CacheKey
    """Key of its latents."""
    geometry: Conditioning
    """The crop as the denoiser's conditioning takes it."""
    mask: CacheKey | None = None
    """Key of its mask; None: the whole image counts."""
    references: tuple[CacheKey, ...] = ()
    """Keys of the latents of its reference images."""
    seeing: SeeingTexts | None = None
    """Its texts where the text encoders see its reference images; None: they see none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SeeingTexts:
    """The keys of `SampleSource.texts`, of `of_class` and of the empty text, read with the references of a view."""

    texts: tuple[CacheKey, ...]
    of_class: tuple[CacheKey | None, ...]
    empty: CacheKey


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleSource:
    """The cache keys of a sample's tensors."""

    views: tuple[SampleView, ...]
    """The image, and the mirrored image if it may be mirrored."""
    texts: tuple[CacheKey, ...]
    """The first is the plain text for validation; training uses the other texts if there are any."""
    size_px: tuple[int, int]
    """(width, height) of the bucket."""
    others: tuple[SampleSource, ...] = ()
    """The same image at other resolutions; their own `others` are empty."""
    folder: str = OWN_FOLDER
    """Key of `data.folders`."""
    of_class: tuple[CacheKey | None, ...] = ()
    """The same texts with the class word in place of the trigger, None for a text without the trigger; empty without
    class preservation."""
    regularisation: bool = False
    references_px: tuple[tuple[int, int], ...] = ()
    """(width, height) of each reference image."""
    strength: float = 1.0
    """Strength of the adapter that it is trained at."""
    opposite: SampleSource | None = None
    """The other image of its pair of a slider, which is trained with it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DirectionSource:
    """The cache keys of a slider's prompts."""

    target: CacheKey
    more: CacheKey
    less: CacheKey
    keep: tuple[CacheKey, ...]
    sizes: tuple[tuple[tuple[int, int], Conditioning], ...]
    """(width, height) in pixels of the latents to denoise, and what the denoiser gets of an image of that size."""
    weight: float
    """Factor on the loss."""


@dataclass(kw_only=True)
class Entries:
    """Cache entries as tensors."""

    cache: Cache
    limit_bytes: int = RESIDENT_LIMIT_BYTES
    """As many bytes of the first entries stay in RAM."""
    used_bytes: int = 0
    resident: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def read(self, key: CacheKey) -> Mapping[str, Tensor]:
        """Return an entry; raises MachineError when it vanished or was damaged after caching."""
        resident_entry = self.resident.get(key.digest)
        if resident_entry is not None:
            return resident_entry
        arrays = self.cache.read(key)
        if arrays is None:
            raise MachineError(
                f"cache entry {key.digest[:12]} vanished or was damaged during training",
                fix="run the same command with --resume: it is encoded again",
            )
        entry = {name: torch.from_numpy(array) for name, array in arrays.items()}
        if self.used_bytes < self.limit_bytes:
            self.resident[key.digest] = entry
            self.used_bytes += sum(tensor.nbytes for tensor in entry.values())
        return entry


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageJob:
    """One latent or one mask to make, as its key says."""

    record: ImageRecord | Reference
    """The image, or one of its reference images."""
    placement: Placement
    flip: bool
    """Whether the image is mirrored."""
    factor: int
    """Pixels per side of each latent."""
    key: CacheKey


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenReference:
    """A reference image that text encoders see, cut as for its latents."""

    record: Reference
    placement: Placement
    flip: bool = False

    def key(self, settings: DataSettings) -> str:
        """Return what the pixels depend on: the file's bytes, the crop, the background of a transparent image."""
        background = settings.alpha_background if self.record.transparent else ""
        colours = "sRGB" if self.record.recoloured else ""
        place = _place(self.placement, self.flip).values()
        return " ".join([self.record.content_hash, *map(str, place), background, colours])


@dataclass(frozen=True, kw_only=True, slots=True)
class TextJob:
    """A text to encode, with the reference images that the text encoders see beside it."""

    text: str
    key: CacheKey
    seen: tuple[SeenReference, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Everything a run reads from the caches: jobs and texts by digest, and the sources of its samples.

    `directions` are those of a slider, by name, which has no images.
    """

    images: Mapping[str, ImageJob]
    texts: Mapping[str, TextJob]
    sources: Mapping[str, SampleSource]
    directions: Mapping[str, DirectionSource] = field(default_factory=dict)

    def share(self, rank: int, count: int) -> Needs:
        """Return the share of process `rank` of `count`; each entry is in exactly one share."""

        def own(digest: str) -> bool:
            return int(digest[:8], 16) % count == rank

        return replace(
            self,
            images={digest: job for digest, job in self.images.items() if own(digest)},
            texts={digest: text for digest, text in self.texts.items() if own(digest)},
        )

    def keys(self) -> list[CacheKey]:
        """Return all keys in use."""
        return [job.key for job in self.images.values()] + [job.key for job in self.texts.values()]


@dataclass(frozen=True, kw_only=True)
class TextEntries:
    """The content of a text's cache entry."""

    encoder_identity: str
    reading: str
    """That of the text encoders, of `BaseFacts.readings`."""
    text_tokens: int
    """Tokens that the base reads."""
    precision: Precision
    """Dtype of the embeddings."""
    tokens_only: bool
    """Whether the entry holds tokens instead of embeddings, because text encoders are trained."""
    word: NewWord | None = None
    """The new word whose token numbers the entry holds."""
    emphasis: bool = False
    """Whether brackets in a text are prompt weights instead of words."""
    clip_skip: int = 1
    """Clip skip of the base."""
    system_prompt: str | None = None
    """System prompt of the base."""
    sees: bool = False
    """Whether the text encoders see reference images."""

    def job(self, text: str, seen: Sequence[SeenReference], *, settings: DataSettings) -> TextJob:
        """Return how a text is encoded beside reference images, which count where the text encoders see them."""
        seen = tuple(seen) if self.sees else ()
        return TextJob(
            text=text, key=self.key(text, [one.key(settings) for one in seen]), seen=seen
        )

    def key(self, text: str, seen: Sequence[str] = ()) -> CacheKey:
        """Return the name of a text's entry; `seen` are the keys of the references that are read with it."""
        return CacheKey.of(
            "text",
            text=text,
            encoder=self.encoder_identity,
            max_tokens=self.text_tokens,
            content=self._content(text),
            # Only where it matters, so that other bases keep their entries; below too.
            **({"reading": self.reading} if self.reading else {}),
            **({"references": "; ".join(seen)} if seen else {}),
        )

    def words(self, text: str) -> str:
        """Return the words of a text, without prompt weights."""
        return words_of(weighted_parts(text)) if self.emphasis else text

    def _content(self, text: str) -> str:
        content: str = "tokens" if self.tokens_only else self.precision
        if self.tokens_only and self.word:
            content = f"tokens, {self.word.tokens} for {self.word.text}"
        if not self.tokens_only and self.clip_skip > 1:
            content = f"{content}, clip skip {self.clip_skip}"
        if self.system_prompt is not None:
            content = f"{content}, after {self.system_prompt!r}"
        return f"{content}, weighted" if self._is_weighted(text) else content

    def _is_weighted(self, text: str) -> bool:
        # All entries of tokens have weights then, as those of a batch must be alike.
        return self.emphasis and (self.tokens_only or weighted_parts(text) != plainly(text))

    def encode(
        self, text: str, encoder: TextEncoder, *, images: Sequence[Image] = ()
    ) -> dict[str, np.ndarray[Any, Any]]:
        """Return the entry of a text, read with `images`."""
        if images:
            return {
                name: tensor.numpy()
                for name, tensor in encoder.encode_seeing(self.words(text), images).items()
            }
        weighted = self._is_weighted(text)
        tokens = (
            encoder.tokenize_weighted(weighted_parts(text))
            if weighted
            else encoder.tokenize([text])
        )
        tensors = tokens if self.tokens_only else encoder.encode_tokens(tokens)
        return {name: tensor.numpy() for name, tensor in tensors.items()}


@gc_disabled()
def needs(
    records: Iterable[ImageRecord],
    *,
    prompts: Iterable[str],
    facts: BaseFacts,
    texts_as: TextEntries,
    geometry: Callable[[Geometry], Conditioning],
    settings: DataSettings,
    seed: int,
    directions: Sequence[Direction] = (),
    sizes_px: Sequence[tuple[int, int]] = (),
    more_texts: Iterable[TextJob] = (),
) -> Needs:
    """List the entries for these records and for `prompts` (sampling; the empty text is always in).

    `more_texts` are read with references: those of sample images.

    `geometry` returns the denoiser's conditioning for an image's crop. `directions` are those of a slider, `sizes_px`
    the (width, height) that it is trained at.
    """
    images: dict[str, ImageJob] = {}
    texts = {job.key.digest: job for job in more_texts}
    sources: dict[str, SampleSource] = {}
    opposites: dict[str | None, SampleSource] = {}
    leading: dict[str, list[str]] = {}

    def key_of(text: str, seen: Sequence[SeenReference] = ()) -> CacheKey:
        job = texts_as.job(text, seen, settings=settings)
        texts[job.key.digest] = job
        return job.key

    # Images of one size and crop share one tuple, and images of a folder its settings.
    shared_geometry = cache(geometry)
    folders: dict[tuple[str, bool], DataSettings] = {}
    for record in records:
        folder_key = (record.folder, record.regularisation)
        if folder_key not in folders:
            folders[folder_key] = record.settings(settings)
        data = folders[folder_key]
        drawn = variants(record.written, settings=data, seed=seed)
        of_class = class_texts(drawn, settings=data)
        # Where the text encoders see the references, a text alone is read by what is trained without them.
        sees = texts_as.sees and bool(record.references)
        add = texts_as.key if sees and not data.reference_dropout else key_of
        keys = tuple(map(add, drawn))
        class_keys = tuple(None if text is None else add(text) for text in of_class)
        sizes: list[SampleSource] = []
        for number, placement in enumerate(record.placements):
            references = [(one, one.placements[number]) for one in record.references]
            views: list[SampleView] = []
            size_px = (placement.bucket.width_px, placement.bucket.height_px)
            for flip in (False, True) if data.flip else (False,):
                job = partial(ImageJob, record=record, placement=placement, flip=flip)
                image_keys = list(_image_keys(record, placement, flip, facts, data))
                images |= {k.digest: job(factor=facts.vae_factor, key=k) for k in image_keys}
                # A mirrored image shows what its mirrored references do.
                reference_keys = tuple(
                    _latents_key(one, placed, flip, facts, data) for one, placed in references
                )
                for (one, placed), key in zip(references, reference_keys, strict=True):
                    images[key.digest] = ImageJob(
                        record=one, placement=placed, flip=flip, factor=facts.vae_factor, key=key
                    )
                seeing = None
                if sees:
                    seen = [
                        SeenReference(record=one, placement=placed, flip=flip)
                        for one, placed in references
                    ]
                    seeing = SeeingTexts(
                        texts=tuple(key_of(text, seen) for text in drawn),
                        of_class=tuple(
                            None if text is None else key_of(text, seen) for text in of_class
                        ),
                        empty=key_of("", seen),
                    )
                # The crop within the image as it is seen: diffusers' SDXL script mirrors, then crops.
                right_px = placement.scaled_width_px - size_px[0] - placement.left_px
                corner_px = (right_px if flip else placement.left_px, placement.top_px)
                image_px = (record.width_px, record.height_px)
                crop = shared_geometry(
                    Geometry(original_px=image_px, corner_px=corner_px, target_px=size_px)
                )
                mask = image_keys[1] if len(image_keys) > 1 else None
                views.append(
                    SampleView(
                        latents=image_keys[0],
                        geometry=crop,
                        mask=mask,
                        references=reference_keys,
                        seeing=seeing,
                    )
                )
            at_size = SampleSource(
                views=tuple(views),
                texts=keys,
                of_class=class_keys,
                regularisation=record.regularisation,
                size_px=size_px,
                folder=record.folder,
                references_px=tuple(placed.bucket.size_px for _, placed in references),
                strength=record.strength,
            )
            sizes.append(at_size)
        first = replace(sizes[0], others=tuple(sizes[1:])) if len(sizes) > 1 else sizes[0]
        sources |= dict.fromkeys(record.sample_ids(), first)
        if record.goes_along:
            opposites[record.pair] = first
        elif record.pair is not None:
            leading[record.pair] = record.sample_ids()
    for pair, names in leading.items():
        sources |= {name: replace(sources[name], opposite=opposites[pair]) for name in names}
    for text in ("", *prompts):
        key_of(text)
    whole = [
        (size, shared_geometry(Geometry(original_px=size, corner_px=(0, 0), target_px=size)))
        for size in sizes_px
    ]
    of_slider = {
        each.name: DirectionSource(
            target=key_of(each.target),
            more=key_of(each.more),
            less=key_of(each.less),
            keep=tuple(map(key_of, each.keep)),
            sizes=tuple(whole),
            weight=each.weight,
        )
        for each in directions
    }
    return Needs(images=images, texts=texts, sources=sources, directions=of_slider)


def _image_keys(
    record: ImageRecord, placement: Placement, flip: bool, facts: BaseFacts, settings: DataSettings
) -> Iterator[CacheKey]:
    """Yield the key of an image's latents and, if it has a mask, that of the mask at their size.

    The mask's hash is of its file, or of the image whose transparency it is.
    """
    yield _latents_key(record, placement, flip, facts, settings)
    if record.mask is not None:
        yield CacheKey.of(
            "masks",
            mask=record.mask.content_hash,
            channel=record.mask.channel,
            factor=facts.vae_factor,
            **_part(record),
            **_place(placement, flip),
        )


def _latents_key(
    image: ImageRecord | Reference,
    placement: Placement,
    flip: bool,
    facts: BaseFacts,
    settings: DataSettings,
) -> CacheKey:
    """Return the key of the latents of an image or a reference; the background is "" for an opaque image."""
    return CacheKey.of(
        "latents",
        image=image.content_hash,
        encoder=facts.parts["vae"].identity,
        background=settings.alpha_background if image.transparent else "",
        **({"reading": reading} if (reading := facts.readings["vae"]) else {}),
        **({"colours": "sRGB"} if image.recoloured else {}),
        **_part(image),
        **_place(placement, flip),
    )


def _part(image: ImageRecord | Reference) -> dict[str, str]:
    """Return what names the part of an image that is trained; nothing for a whole one, which keeps its entries."""
    return {} if image.crop is None else {"part": image.crop.name}


def _place(placement: Placement, flip: bool) -> dict[str, str | int]:
    return {
        "bucket": str(placement.bucket),
        "scaled": f"{placement.scaled_width_px}x{placement.scaled_height_px}",
        "crop": f"{placement.left_px},{placement.top_px}",
        "flip": int(flip),
    }

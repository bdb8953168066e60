"""Fill the caches: every latent, text embedding and mask a run needs, each encoded at most once ever.

Entries are named by content, so this finds what is missing, loads an encoder only if something of
its kind is, encodes one item at a time (the batch an item shares would change its last bits, and with
them what a restarted caching gives) and drops it before the next network is loaded. Where the text
encoders are trained along, a text's entry is its tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from lora_trainer.caption_markup import plainly, weighted_parts, words_of
from lora_trainer.config import DataSettings, Precision
from lora_trainer.data.buckets import Placement, cut
from lora_trainer.data.cache import Cache, CacheKey, latent_key, mask_key, text_key
from lora_trainer.data.caption_rules import variants
from lora_trainer.data.captions import of_class
from lora_trainer.data.images import decode
from lora_trainer.data.masks import Mask, decode_mask, mask_values
from lora_trainer.data.scan import ImageRecord
from lora_trainer.data.sources import Source
from lora_trainer.errors import (
    RESUME,
    InputError,
    MachineError,
    StoppedBySignal,
    first_line,
)
from lora_trainer.events import EventStream
from lora_trainer.families.base import (
    BaseFacts,
    Conditioning,
    Geometry,
    ImageEncoder,
    NewWord,
    TextEncoder,
)
from lora_trainer.model.out_of_memory import free_memory, is_out_of_memory


@dataclass(frozen=True, kw_only=True)
class LatentJob:
    """One latent to have: the record, where it goes, mirrored or not, and its name in the cache."""

    record: ImageRecord
    placement: Placement
    flip: bool
    key: CacheKey


@dataclass(frozen=True, kw_only=True)
class MaskJob:
    """One mask to have at the size of latents of `factor` pixels a side; of the picture `name`."""

    mask: Mask
    name: str
    placement: Placement
    flip: bool
    factor: int
    key: CacheKey


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Everything a run reads from the caches: jobs and texts by digest, and the sources of its samples."""

    latents: Mapping[str, LatentJob]
    texts: Mapping[str, tuple[str, CacheKey]]
    sources: Mapping[str, Source]
    masks: Mapping[str, MaskJob] = field(default_factory=dict)

    def share(self, rank: int, count: int) -> Needs:
        """Return what process `rank` of `count` encodes; every entry is in one share."""

        def own(digest: str) -> bool:
            return int(digest[:8], 16) % count == rank

        return replace(
            self,
            latents={digest: job for digest, job in self.latents.items() if own(digest)},
            texts={digest: text for digest, text in self.texts.items() if own(digest)},
            masks={digest: job for digest, job in self.masks.items() if own(digest)},
        )

    def keys(self) -> list[CacheKey]:
        """Return all keys in use."""
        return [
            *(job.key for job in self.latents.values()),
            *(key for _, key in self.texts.values()),
            *(job.key for job in self.masks.values()),
        ]


@dataclass(frozen=True, kw_only=True)
class TextEntries:
    """What an entry of a text holds: embeddings made in a dtype, or tokens where encoders are trained.

    `word` is what these tokens have numbers of its own for. With `emphasis` brackets in a text are weights
    of words, and no words.
    """

    encoder_identity: str
    max_tokens: int
    precision: Precision
    tokens_only: bool
    word: NewWord | None = None
    emphasis: bool = False

    def key(self, text: str) -> CacheKey:
        """Return the name of a text's entry."""
        return text_key(
            text=text,
            encoder_identity=self.encoder_identity,
            max_tokens=self.max_tokens,
            content=self._content(text),
        )

    def words(self, text: str) -> str:
        """Return what of a text is read as words."""
        return words_of(weighted_parts(text)) if self.emphasis else text

    def _content(self, text: str) -> str:
        made: str = "tokens" if self.tokens_only else self.precision
        if self.tokens_only and self.word:
            made = f"tokens, {self.word.tokens} for {self.word.text}"
        return f"{made}, weighted" if self._is_weighted(text) else made

    def _is_weighted(self, text: str) -> bool:
        # All entries of tokens have weights then, as those of a batch must be alike.
        return self.emphasis and (self.tokens_only or weighted_parts(text) != plainly(text))

    def encode(self, text: str, encoder: TextEncoder) -> dict[str, np.ndarray[Any, Any]]:
        """Return the entry of a text."""
        weighted = self._is_weighted(text)
        tokens = (
            encoder.tokenize_weighted(weighted_parts(text))
            if weighted
            else encoder.tokenize([text])
        )
        found = tokens if self.tokens_only else encoder.encode_tokens(tokens)
        return {name: tensor.numpy() for name, tensor in found.items()}


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """What filling the caches cost: entries encoded now, and entries found."""

    latents: int
    texts: int
    found: int
    masks: int = 0


def needs(
    records: Iterable[ImageRecord],
    placements: Mapping[str, Placement],
    *,
    prompts: Iterable[str],
    facts: BaseFacts,
    texts_as: TextEntries,
    geometry: Callable[[Geometry], Conditioning],
    settings: DataSettings,
    seed: int,
    more: Sequence[Mapping[str, Placement]] = (),
) -> Needs:
    """List the entries for these records and for `prompts` (sampling; the empty text is always in).

    `geometry` gives what the denoiser is told about an image's crop; `more` are the placements at other
    resolutions, of the records that are trained at these too.
    """
    latents: dict[str, LatentJob] = {}
    texts: dict[str, tuple[str, CacheKey]] = {}
    masks: dict[str, MaskJob] = {}
    sources: dict[str, Source] = {}
    for record in records:
        own = record.settings(settings)
        drawn = variants(record.written, settings=own, seed=seed)
        keys = [(text, texts_as.key(text)) for text in drawn]
        classes = _of_class(drawn, texts_as, own)
        texts |= {key.digest: (text, key) for text, key in (*keys, *filter(None, classes))}
        at_all: list[Source] = []
        for placed in (placements, *(placed for placed in more if record.name in placed)):
            placement = placed[record.name]
            jobs = [_latent_job(record, placement, flip, facts, own) for flip in _flips(own)]
            latents |= {job.key.digest: job for job in jobs}
            masking = [
                _mask_job(record, record.mask, placement, flip, facts)
                for flip in _flips(own)
                if record.mask is not None
            ]
            masks |= {job.key.digest: job for job in masking}
            source = Source(
                plain=jobs[0].key,
                mirrored=jobs[1].key if len(jobs) > 1 else None,
                mask=masking[0].key if masking else None,
                mirrored_mask=masking[1].key if len(masking) > 1 else None,
                texts=tuple(key for _, key in keys),
                of_class=tuple(None if named is None else named[1] for named in classes),
                regularisation=record.regularisation,
                size_px=(placement.bucket.width_px, placement.bucket.height_px),
                geometry=geometry(_geometry(record, placement, flip=False)),
                mirrored_geometry=geometry(_geometry(record, placement, flip=True)),
                folder=record.folder,
            )
            at_all.append(source)
        first = replace(at_all[0], others=tuple(at_all[1:]))
        sources |= dict.fromkeys(record.sample_ids(), first)
    extra = [(text, texts_as.key(text)) for text in ("", *prompts)]
    return Needs(
        latents=latents,
        texts=texts | {key.digest: (text, key) for text, key in extra},
        sources=sources,
        masks=masks,
    )


def _of_class(
    texts: Sequence[str], texts_as: TextEntries, settings: DataSettings
) -> list[tuple[str, CacheKey] | None]:
    """Return each text with the class in place of the trigger, and its key; empty if not asked for."""
    word = settings.class_word
    if word is None or settings.trigger is None:
        return []
    found = [of_class(text, trigger=settings.trigger, class_word=word) for text in texts]
    return [None if text is None else (text, texts_as.key(text)) for text in found]


def fill(
    wanted: Needs,
    cache: Cache,
    *,
    settings: DataSettings,
    load_image_encoder: Callable[[torch.device], ImageEncoder],
    load_text_encoder: Callable[[torch.device], TextEncoder],
    devices: Sequence[torch.device],
    texts_as: TextEntries,
    events: EventStream,
    stop: Callable[[], int | None] = lambda: None,
) -> Encoded:
    """Encode what is missing or damaged; raises InputError for an image that changed or will not encode.

    Where the first of `devices` runs out of memory the next one goes on. `stop` is asked before each
    entry and returns a signal number; raises StoppedBySignal then, and MachineError when the last
    device is full.
    """
    latents = [job for job in wanted.latents.values() if cache.read(job.key) is None]
    texts = [(text, key) for text, key in wanted.texts.values() if cache.read(key) is None]
    masks = [job for job in wanted.masks.values() if cache.read(job.key) is None]
    total = len(latents) + len(texts) + len(masks)
    found = len(wanted.keys()) - total
    events.emit(
        "phase", phase="cache", message=f"{found} cached, {total} to encode", done=0, total=total
    )
    for done, mask in enumerate(masks, start=1):
        _obey(stop, done=done - 1, total=total)
        cache.write(mask.key, _encode_mask(mask, settings=settings))
        events.emit("phase", phase="cache", message=f"mask of {mask.name}", done=done, total=total)
    if latents:
        images = _Encoding(load=load_image_encoder, devices=devices, events=events)
        for done, job in enumerate(latents, start=len(masks) + 1):
            _obey(stop, done=done - 1, total=total)
            cache.write(job.key, images.do(partial(_encode_image, job, settings=settings)))
            events.emit("phase", phase="cache", message=job.record.name, done=done, total=total)
        images.close()
    if texts:
        captions = _Encoding(load=load_text_encoder, devices=devices, events=events)
        for done, (text, key) in enumerate(texts, start=total - len(texts) + 1):
            _obey(stop, done=done - 1, total=total)
            captions.do(partial(_say_if_cut, texts_as.words(text), events=events))
            cache.write(key, captions.do(partial(texts_as.encode, text)))
            events.emit("phase", phase="cache", message="captions", done=done, total=total)
        captions.close()
    return Encoded(latents=len(latents), texts=len(texts), found=found, masks=len(masks))


Encoder = TypeVar("Encoder")
Done = TypeVar("Done")


@dataclass(kw_only=True)
class _Encoding(Generic[Encoder]):
    """An encoder on the first device that holds it: one that runs out of memory hands over to the next."""

    load: Callable[[torch.device], Encoder]
    devices: Sequence[torch.device]
    events: EventStream
    _place: int = 0
    _encoder: Encoder | None = None

    def do(self, work: Callable[[Encoder], Done]) -> Done:
        """Return what `work` makes with the encoder; raises MachineError when no device holds it."""
        while True:
            try:
                if self._encoder is None:
                    self._encoder = self.load(self.devices[self._place])
                return work(self._encoder)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Outside the except block: its traceback would keep the tensors alive that must go.
            self.close()
            self._move_on(reason)

    def close(self) -> None:
        """Let go of the encoder."""
        self._encoder = None
        free_memory()

    def _move_on(self, reason: str) -> None:
        full = self.devices[self._place]
        self._place += 1
        if self._place == len(self.devices):
            raise MachineError(
                f"{full} ran out of memory while caching: {reason}",
                fix="use a lower data.resolution, or free memory",
            )
        self.events.problem(
            f"caching goes on on {self.devices[self._place]}, slower: {reason}",
            fix="nothing to do, or free memory on the device",
            code="TRN-02",
        )


def _obey(stop: Callable[[], int | None], *, done: int, total: int) -> None:
    signal_number = stop()
    if signal_number is not None:
        raise StoppedBySignal(
            signal_number,
            found=f"stopped while caching, {done} of {total} done; they stay cached",
            fix=RESUME,
        )


def _flips(settings: DataSettings) -> tuple[bool, ...]:
    return (False, True) if settings.flip else (False,)


def _geometry(record: ImageRecord, placement: Placement, *, flip: bool) -> Geometry:
    """Return the crop within the picture as it is seen: diffusers' SDXL script mirrors, then crops."""
    bucket = placement.bucket
    right_px = placement.scaled_width_px - bucket.width_px - placement.left_px
    return Geometry(
        original_px=(record.width_px, record.height_px),
        corner_px=(right_px if flip else placement.left_px, placement.top_px),
        target_px=(bucket.width_px, bucket.height_px),
    )


def _latent_job(
    record: ImageRecord, placement: Placement, flip: bool, facts: BaseFacts, settings: DataSettings
) -> LatentJob:
    key = latent_key(
        content_hash=record.content_hash,
        encoder_identity=facts.parts["vae"].identity,
        placement=placement,
        flip=flip,
        alpha_background=settings.alpha_background if record.transparent else None,
    )
    return LatentJob(record=record, placement=placement, flip=flip, key=key)


def _encode_image(
    job: LatentJob, encoder: ImageEncoder, *, settings: DataSettings
) -> dict[str, np.ndarray[Any, Any]]:
    image = cut(
        decode(job.record.path, settings=settings, content_hash=job.record.content_hash).image,
        job.placement,
        flip=job.flip,
    )
    pixels = (
        torch.from_numpy(np.array(image, dtype=np.float32)).permute(2, 0, 1)[None] / 127.5 - 1.0
    )
    try:
        (latent,) = encoder.encode_images(pixels)
    except InputError as error:
        raise InputError(f"{job.record.name}: {error.found}", fix=error.fix) from None
    return {"mean": latent.mean.numpy(), "std": latent.std.numpy()}


def _mask_job(
    record: ImageRecord, mask: Mask, placement: Placement, flip: bool, facts: BaseFacts
) -> MaskJob:
    key = mask_key(
        content_hash=mask.content_hash,
        of_alpha=mask.of_alpha,
        placement=placement,
        flip=flip,
        factor=facts.vae_factor,
    )
    return MaskJob(
        mask=mask,
        name=record.name,
        placement=placement,
        flip=flip,
        factor=facts.vae_factor,
        key=key,
    )


def _encode_mask(job: MaskJob, *, settings: DataSettings) -> dict[str, np.ndarray[Any, Any]]:
    pixels = decode_mask(job.mask, settings=settings)
    values = mask_values(pixels, job.placement, flip=job.flip, factor=job.factor)
    if not values.any():
        raise InputError(
            f"the mask of {job.name} is black in all that its crop to {job.placement.bucket} leaves",
            fix="crop the picture and its mask around the subject, or raise data.max_aspect",
        )
    return {"mask": values}


def _say_if_cut(text: str, encoder: TextEncoder, *, events: EventStream) -> None:
    room, tokens = encoder.prompt_room(), encoder.count_tokens(text)
    if tokens > room:
        events.problem(
            f"a caption has {tokens} tokens, there is room for {room}: {text[:60]!r}...",
            fix="shorten the caption, most important words first",
            severity="note",
            code="CAP-03",
        )

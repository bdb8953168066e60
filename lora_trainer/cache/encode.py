"""Fill the caches: the latents, text embeddings and masks of a run, each encoded at most once.

Lists the missing entries, loads an encoder only for entries of its kind, encodes one item at a time and frees the
encoder before the next network is loaded. One at a time, because the last bits of an item depend on its batch: a
restarted caching would give other entries. Other threads decode images ahead and write entries behind. Where text
encoders are trained, the entry of a text is its tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import chain, groupby
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lora_trainer.cache.background import MOST_AHEAD, Later, prefetch_map, write_behind
from lora_trainer.cache.cache_plan import ImageJob, Needs, TextEntries, TextJob
from lora_trainer.cache.store import Cache, CacheKey, missing
from lora_trainer.common.errors import RESUME, InputError, MachineError, StoppedBySignal, first_line
from lora_trainer.common.event_kinds import Phase
from lora_trainer.common.events import EventStream
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.buckets import cut, mask_values
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.masks import decode_mask
from lora_trainer.families.base.latents import ImageEncoder
from lora_trainer.families.base.texts import WEIGHTS, TextEncoder
from lora_trainer.network.offload import MOST_TOGETHER
from lora_trainer.network.out_of_memory import free_memory, is_out_of_memory

# Of images that are decoded ahead together: 200 MB as they are decoded, twice that while turned.
MAX_PIXELS_AHEAD = 64_000_000

Entry = Mapping[str, NDArray[Any]]


def fill(
    needs: Needs,
    cache: Cache,
    *,
    settings: DataSettings,
    load_image_encoder: Callable[[torch.device], ImageEncoder],
    load_text_encoder: Callable[[torch.device], TextEncoder],
    devices: Sequence[torch.device],
    texts_as: TextEntries,
    events: EventStream,
    stop: Callable[[], int | None] = lambda: None,
) -> dict[str, int]:
    """Encode the missing and damaged entries; raises InputError for an image that changed or cannot be encoded.

    When one of `devices` runs out of memory, the next one goes on. `stop` returns a signal number or None and is
    called before each entry. Returns how many latents, texts and masks were encoded, and how many entries were found
    in the cache. Raises StoppedBySignal after a signal, and MachineError when the last device is full.
    """
    lacking = missing(needs.keys(), cache)
    images = [job for digest, job in needs.images.items() if digest in lacking]
    masks = [job for job in images if job.key.kind == "masks"]
    latents = [job for job in images if job.key.kind == "latents"]
    texts = [text for digest, text in needs.texts.items() if digest in lacking]
    texts.sort(key=lambda job: bool(job.seen))  # those that go the same way through the networks
    total = len(images) + len(texts)
    cached_count = len(needs.keys()) - total
    with write_behind() as later:
        work = _Pass(cache=cache, events=events, stop=stop, total=total, later=later)
        work.say(f"{cached_count} cached, {total} to encode")
        _add_images(masks, work, lambda _, values: {"mask": values}, settings=settings)
        if latents:
            # Loading an encoder can take minutes without a finished entry.
            work.say("loading the image encoder")
            with _encoding(load_image_encoder, devices, events) as do:
                _add_images(
                    latents,
                    work,
                    lambda job, pixels: do(partial(_encode_image, job, pixels)),
                    settings=settings,
                )
        if texts:
            work.say("loading the text encoders")
            fix = "shorten it, most important words first"
            if settings.caption_tokens in (75, 150):
                fix += ", or raise data.caption_tokens"
            with _encoding(load_text_encoder, devices, events) as do:
                done = 0
                while done < len(texts):
                    work.obey()
                    # No encoder takes more at once; of a list of all a part would be made for each text.
                    waiting = texts[done : done + MOST_TOGETHER]
                    entries = do(partial(_encode_texts, waiting, texts_as, settings))
                    for job, entry in zip(waiting, entries, strict=False):
                        words = texts_as.words(job.text)
                        do(partial(_say_if_cut, words, events=events, fix=fix))
                        work.add(job.key, entry, message="captions")
                    done += len(entries)
    counts = {"latents": len(latents), "texts": len(texts), "masks": len(masks)}
    return {**counts, "found": cached_count}


@dataclass(kw_only=True)
class _Pass:
    """The entries of one filling: where they go, how many there are, and whether to go on."""

    cache: Cache
    events: EventStream
    stop: Callable[[], int | None]
    total: int
    later: Later
    done: int = 0

    def obey(self) -> None:
        """Raise StoppedBySignal after a signal; entries encoded before it are written."""
        signal_number = self.stop()
        if signal_number is not None:
            raise StoppedBySignal(
                signal_number,
                found=f"stopped while caching, {self.done} of {self.total} done; they stay cached",
                fix=RESUME,
            )

    def say(self, message: str) -> None:
        """Emit what is done or begun, and how many entries are done."""
        self.events.emit(Phase(phase="cache", message=message, done=self.done, total=self.total))

    def add(self, key: CacheKey, entry: Entry, *, message: str) -> None:
        """Have an entry written, and say so."""
        self.later(partial(self.cache.write, key, entry))
        self.done += 1
        self.say(message)


def _add_images(
    jobs: Sequence[ImageJob],
    work: _Pass,
    encode: Callable[[ImageJob, NDArray[np.float32]], Entry],
    *,
    settings: DataSettings,
) -> None:
    # The jobs of one image are neighbours (mirrored, other resolutions), so that it is decoded once.
    files = [tuple(group) for _, group in groupby(jobs, key=lambda job: job.record.name)]
    with prefetch_map(
        partial(_pixels, settings=settings),
        files,
        threads=min(MOST_AHEAD, os.cpu_count() or 1),
        cost=lambda group: group[0].record.width_px * group[0].record.height_px,
        most_cost=MAX_PIXELS_AHEAD,
    ) as pixels_by_file:
        cuts = chain.from_iterable(pixels_by_file)
        for job in jobs:
            work.obey()
            pixels = next(cuts)
            what = "mask of " if job.key.kind == "masks" else ""
            work.add(job.key, encode(job, pixels), message=f"{what}{job.record.name}")


@contextmanager
def _encoding(
    load: Callable[[torch.device], Any], devices: Sequence[torch.device], events: EventStream
) -> Iterator[Callable[[Callable[[Any], Any]], Any]]:
    """Yield a function that returns the result of some work with an encoder, on the first device that holds both.

    An encoder that runs out of memory hands over to the next device; the function raises MachineError after the last.
    """
    encoder: Any = None
    device, *others = devices

    def do(work: Callable[[Any], Any]) -> Any:
        nonlocal encoder, device
        while True:
            try:
                if encoder is None:
                    encoder = load(device)
                return work(encoder)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                reason = first_line(error)
            # Outside the except block: its traceback would keep the tensors alive that must go.
            encoder = None
            free_memory()
            if not others:
                raise MachineError(
                    f"{device} ran out of memory while caching: {reason}",
                    fix="use a lower data.resolution, or free memory",
                )
            device = others.pop(0)
            events.problem(
                f"caching continues on {device}, slower: {reason}",
                fix="nothing to do, or free memory on the device",
                code="TRN-02",
            )

    yield do
    encoder = None
    free_memory()


def _pixels(jobs: Sequence[ImageJob], *, settings: DataSettings) -> tuple[NDArray[np.float32], ...]:
    """Decode one file and cut it as its jobs want: images [H, W, 3] in [-1, 1], masks [1, h, w] in [0, 1]."""
    record = jobs[0].record
    if jobs[0].key.kind == "masks":
        assert record.mask is not None, "only masks are planned here"
        mask = decode_mask(record.mask, settings=settings)
        masks = []
        for job in jobs:
            masks.append(mask_values(mask, job.placement, flip=job.flip, factor=job.factor))
            if not masks[-1].any():
                raise InputError(
                    f"the mask of {record.name} is black everywhere in its crop to {job.placement.bucket}",
                    fix="crop the image and its mask around the subject, or raise data.max_aspect",
                )
        return tuple(masks)
    image = decode(
        record.path, settings=settings, content_hash=record.content_hash, crop=record.crop
    ).image
    cuts = (cut(image, job.placement, flip=job.flip) for job in jobs)
    return tuple(np.asarray(part, dtype=np.float32) / 127.5 - 1.0 for part in cuts)


def _encode_image(job: ImageJob, pixels: NDArray[np.float32], encoder: ImageEncoder) -> Entry:
    try:
        (latent,) = encoder.encode_images(torch.from_numpy(pixels).permute(2, 0, 1)[None])
    except InputError as error:
        raise InputError(f"{job.record.name}: {error.found}", fix=error.fix) from None
    mean = latent.mean.numpy()
    # An image of one colour may well have constant latents.
    if not np.isfinite(mean).all() or (np.ptp(mean) == 0 and np.ptp(pixels) > 0):
        raise _damaged("VAE", job.record.name)
    return {"mean": mean, "std": latent.std.numpy()}


def _damaged(part: str, name: str) -> InputError:
    return InputError(
        f"the {part} of the base gives no usable values for {name}: its weights are damaged (zeros, or not numbers)",
        fix="download the base again and compare its hash, or name another file in base.vae or base.text_encoders",
    )


def _encode_texts(
    jobs: Sequence[TextJob], texts_as: TextEntries, settings: DataSettings, encoder: TextEncoder
) -> Sequence[Entry]:
    """Return the entries of the first texts, of as many as the encoder takes at once."""

    def encoded(job: TextJob) -> Entry:
        images = [
            cut(
                decode(
                    one.record.path, settings=settings, content_hash=one.record.content_hash
                ).image,
                one.placement,
                flip=one.flip,
            )
            for one in job.seen
        ]
        return texts_as.encode(job.text, encoder, images=images)

    alike = [job for job in jobs if bool(job.seen) == bool(jobs[0].seen)]
    entries = encoder.together([partial(encoded, job) for job in alike])
    for job, entry in zip(jobs, entries, strict=False):
        for name, values in entry.items():
            if name.endswith(WEIGHTS):  # prompt weights may well be all 1
                continue
            if values.dtype.kind == "f" and not (np.isfinite(values).all() and np.ptp(values) > 0):
                raise _damaged("text encoder", f"the caption {job.text[:40]!r}")
    return entries


def _say_if_cut(text: str, encoder: TextEncoder, *, events: EventStream, fix: str) -> None:
    room, tokens = encoder.prompt_room(), encoder.count_tokens(text)
    if tokens > room:
        events.problem(
            f"a caption has {tokens} tokens, but only {room} are read: {text[:60]!r}...",
            fix=fix,
            severity="note",
            code="CAP-03",
        )

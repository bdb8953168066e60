"""What each optimizer step sees: a pure function of its number, prepared ahead by one thread.

Step k takes samples [kB, (k+1)B) of the endless concatenation of shuffled epochs, whatever their
bucket. Order, flip, caption, dropout, latent draw, timestep and noise of a sample come from (seed,
stream, epoch, sample), so the split into micro-batches, a resume or another prefetch depth cannot
change them.
"""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch
from torch import Tensor

from lora_trainer.config import OWN_FOLDER, DataSettings, ObjectiveSettings
from lora_trainer.data.cache import Cache, CacheKey
from lora_trainer.data.caption_rules import is_dropped, variant_of
from lora_trainer.data.epochs import epoch_order, sample_id
from lora_trainer.errors import MachineError
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.launch import Place, share
from lora_trainer.randomness import Stream, draw_choice, draw_seed, draw_uniform, shuffled
from lora_trainer.train.levels import TIMESTEPS, Level, Levels
from lora_trainer.train.objective import draw_noise
from lora_trainer.train.weighting import huber_delta, loss_weight

RESIDENT_LIMIT_BYTES = 1 << 30  # entries kept in RAM; a small dataset is read from disk once
LEAVING_S = (
    10.0  # a read that hangs in the kernel cannot be stopped; its thread dies with the process
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a sample's tensors are: its latent as is and mirrored (or None), one text entry per variant.

    The first of `texts` is the plain one to validate with; where there are others, these are trained
    with; `of_class` are the same with the class in place of the trigger, None for those without it, and
    empty where that is not asked for. `folder` is the key of `data.folders` that may say more. `size_px`
    is (width, height) of its bucket, `geometry` what the denoiser is told about its crop; what is cut
    away on the left is on the right of the mirrored one. Without a `mask` all of the picture counts.
    `others` are the same picture at other resolutions; they have none themselves.
    """

    plain: CacheKey
    mirrored: CacheKey | None
    texts: tuple[CacheKey, ...]
    size_px: tuple[int, int]
    geometry: Conditioning
    mirrored_geometry: Conditioning
    others: tuple[Source, ...] = ()
    folder: str = OWN_FOLDER
    mask: CacheKey | None = None
    mirrored_mask: CacheKey | None = None
    of_class: tuple[CacheKey | None, ...] = ()
    regularisation: bool = False


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """One sample ready for the device: latents and noise float32 [C, H, W], conditioning of batch 1.

    `input_noise` is the noise of the input where that is not the one to predict; `huber_delta` is
    infinite for squared errors; `dropout_seed` names the masks of the adapter's dropout. `counts` are
    weights of the error [1, H, W] with a mean of 1, None where all of the picture counts alike.
    `as_base`: what is wanted is what the base says without the adapter.
    """

    sample: str
    latents: Tensor
    noise: Tensor
    level: Level
    weight: float
    conditioning: Conditioning
    input_noise: Tensor | None = None
    huber_delta: float = math.inf
    dropout_seed: int = 0
    counts: Tensor | None = None
    as_base: bool = False


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """This process's samples of one optimizer step (0-based `step`) and the epochs finished after it.

    A sample whose class is to stay as it is comes twice, the second time as that.
    """

    step: int
    samples: tuple[Prepared, ...]
    epoch: float


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Samples of one shape, stacked on the device: [B, C, H, W] and [B]; `counts` [B, 1, H, W] or None."""

    latents: Tensor
    noise: Tensor
    input_noise: Tensor
    timesteps: Tensor
    alpha: Tensor
    sigma: Tensor
    huber_delta: Tensor | None
    counts: Tensor | None
    conditioning: Conditioning


@dataclass(kw_only=True)
class Entries:
    """Cache entries as tensors; the first `limit_bytes` of them stay in RAM."""

    cache: Cache
    limit_bytes: int = RESIDENT_LIMIT_BYTES
    used_bytes: int = 0
    resident: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)

    def read(self, key: CacheKey) -> Mapping[str, Tensor]:
        """Return an entry; raises MachineError when it vanished or was damaged after caching."""
        known = self.resident.get(key.digest)
        if known is not None:
            return known
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


@dataclass(frozen=True, kw_only=True)
class Feeder:
    """Prepares steps. `sources` maps sample ids to cache entries; `told` is conditioning all samples share.

    Of several processes each prepares its share of a step, `place` says which. `regularisation` are the
    samples of which an epoch takes only so many.
    """

    sources: Mapping[str, Source]
    empty_text: CacheKey
    entries: Entries
    levels: Levels
    prediction: Prediction
    told: Conditioning
    data: DataSettings
    objective: ObjectiveSettings
    batch_size: int
    seed: int
    regularisation: Sequence[str] = ()
    regularisation_per_epoch: int = 0
    place: Place = field(default_factory=Place)
    _orders: dict[int, list[str]] = field(default_factory=dict)

    def sample_at(self, position: int) -> tuple[int, str]:
        """Return (epoch, sample id) at a position of the endless stream of shuffled epochs."""
        epoch, index = divmod(position, self.epoch_length)
        return epoch, self._order(epoch)[index]

    @property
    def epoch_length(self) -> int:
        """How many samples an epoch has."""
        return len(self.sources) - len(self.regularisation) + self.regularisation_per_epoch

    def source(self, sample: str) -> Source:
        """Return where the tensors are of the sample that stands under a name in an epoch."""
        return self.sources[sample_id(sample)]

    def prepare(self, step: int) -> StepBatch:
        """Return everything step `step` (0-based) needs, on the CPU."""
        first = step * self.batch_size
        samples: list[Prepared] = []
        for epoch, sample in self.share(step):
            made = self.prepare_sample(epoch, sample)
            samples += [made, *self._preserved(made, epoch, sample)]
        return StepBatch(
            step=step, samples=tuple(samples), epoch=(first + self.batch_size) / self.epoch_length
        )

    def share(self, step: int) -> list[tuple[int, str]]:
        """Return (epoch, sample id) of what this process does of a step.

        Samples of one shape stay together, so that they can be done at once.
        """
        first, place = step * self.batch_size, self.place
        found = [self.sample_at(first + k) for k in range(self.batch_size)]
        if place.count == 1:
            return found
        found.sort(key=lambda at: self.drawn(*at).size_px)
        return [found[index] for index in share(len(found), rank=place.rank, count=place.count)]

    def drawn(self, epoch: int, sample: str) -> Source:
        """Return the sample at the resolution it is trained at in an epoch."""
        first = self.source(sample)
        if not first.others:
            return first
        all_of_it = (first, *first.others)
        return all_of_it[draw_choice(len(all_of_it), self.seed, Stream.RESOLUTION, epoch, sample)]

    def prepare_sample(self, epoch: int, sample: str) -> Prepared:
        """Draw all of one sample's randomness for one epoch."""
        source, here = self.drawn(epoch, sample), (epoch, sample)
        flipped = source.mirrored is not None and draw_uniform(self.seed, Stream.FLIP, *here) < 0.5
        entry = self.entries.read(source.mirrored if flipped and source.mirrored else source.plain)
        geometry = source.mirrored_geometry if flipped else source.geometry
        mean, std = entry["mean"], entry["std"]
        latents = mean + std * torch.randn(
            mean.shape, generator=self._generator(Stream.LATENT, *here)
        )
        noise = draw_noise(
            (mean.shape[0], mean.shape[1], mean.shape[2]),
            self._generator(Stream.NOISE, *here),
            offset=self.objective.noise_offset,
            octaves=self.objective.multires_noise_iterations,
            discount=self.objective.multires_noise_discount,
        )
        level = self.levels.draw(self._uniform(*here), size_px=source.size_px)
        delta = huber_delta(
            self.objective, time=level.timestep / TIMESTEPS, alpha=level.alpha, sigma=level.sigma
        )
        told = {**self._text(source, *here), **geometry}
        made = self._assemble(sample, latents, noise, level, told)
        # smooth_l1 is huber over its delta: with falling deltas it weighs the noisier levels more.
        weight = made.weight / delta if self.objective.loss == "smooth_l1" else made.weight
        weight *= self.data.weight_of(source.folder)
        if source.regularisation:
            weight *= self.objective.prior_weight
        return replace(
            made,
            weight=weight,
            huber_delta=delta,
            input_noise=self._perturbed(noise, *here),
            dropout_seed=draw_seed(self.seed, Stream.ADAPTER_DROPOUT, *here),
            counts=self._counts(source.mirrored_mask if flipped else source.mask),
            as_base=source.regularisation and self.objective.prior == "base",
        )

    def _preserved(self, made: Prepared, epoch: int, sample: str) -> Iterator[Prepared]:
        """Yield the sample again as its class, with the same draws; none where the trigger is not said."""
        source = self.source(sample)
        variant = self._variant(source, epoch, sample) if source.of_class else None
        text = None if variant is None else source.of_class[variant]
        if text is not None:
            yield replace(
                made,
                weight=made.weight * self.objective.preservation_weight,
                conditioning={**made.conditioning, **self.entries.read(text)},
                counts=None,
                as_base=True,
            )

    def validation(self, keys: Sequence[tuple[str, Source]], *, quantiles: int) -> list[StepBatch]:
        """Return the held-out samples at each quantile of the timesteps, with fixed noise and captions."""
        batches = []
        for quantile in range(quantiles):
            fraction = (quantile + 0.5) / quantiles
            samples = []
            for sample, source in keys:
                mean = self.entries.read(source.plain)["mean"]
                level = self.levels.at(fraction, size_px=source.size_px)
                name = (sample, int(level.timestep))
                noise = torch.randn(
                    mean.shape, generator=self._generator(Stream.VALIDATION_NOISE, *name)
                )
                told = {**self.entries.read(source.texts[0]), **source.geometry}
                made = self._assemble(sample, mean, noise, level, told)
                samples.append(replace(made, counts=self._counts(source.mask)))
            batches.append(
                StepBatch(step=int(samples[0].level.timestep), samples=tuple(samples), epoch=0.0)
            )
        return batches

    @contextmanager
    def stream(self, first: int, last: int, *, ahead: int) -> Iterator[Iterator[StepBatch]]:
        """Yield an iterator over steps first..last-1, prepared by a thread at most `ahead` steps early.

        The iterator raises what the thread raised. Leaving waits for the thread, but not for a disk that
        does not answer it.
        """
        ready: queue.Queue[StepBatch | BaseException] = queue.Queue(maxsize=ahead)
        stopping = threading.Event()

        def put(item: StepBatch | BaseException) -> bool:
            while not stopping.is_set():
                try:
                    ready.put(item, timeout=0.1)
                except queue.Full:
                    continue
                return True
            return False

        def work() -> None:
            try:
                for step in range(first, last):
                    if not put(self.prepare(step)):
                        return
            except BaseException as error:  # noqa: BLE001 - handed to the consumer, which raises it
                put(error)

        thread = threading.Thread(target=work, name="lora-train-feeder", daemon=True)
        thread.start()
        try:
            yield self._consume(ready, last - first)
        finally:
            stopping.set()
            thread.join(timeout=LEAVING_S)

    @staticmethod
    def _consume(ready: queue.Queue[StepBatch | BaseException], count: int) -> Iterator[StepBatch]:
        for _ in range(count):
            item = ready.get()
            if isinstance(item, BaseException):
                raise item
            yield item

    def _assemble(
        self,
        sample: str,
        latents: Tensor,
        noise: Tensor,
        level: Level,
        told: Conditioning,
    ) -> Prepared:
        return Prepared(
            sample=sample,
            latents=latents,
            noise=noise,
            level=level,
            weight=loss_weight(
                self.objective,
                signal=level.signal,
                sigma=level.sigma,
                prediction=self.prediction,
            ),
            conditioning={**told, **self.told},
        )

    def _uniform(self, epoch: int, sample: str) -> float:
        """Return the number that becomes the timestep, one in each stratum of samples in a row.

        Which stratum follows from the place in the stream, so no split and no batch size changes it.
        """
        uniform, strata = (
            draw_uniform(self.seed, Stream.TIMESTEP, epoch, sample),
            self.objective.timestep_strata,
        )
        if strata == 1:
            return uniform
        position = epoch * self.epoch_length + self._order(epoch).index(sample)
        window, place = divmod(position, strata)
        order = shuffled(map(str, range(strata)), self.seed, Stream.TIMESTEP_STRATUM, window)
        return (int(order[place]) + uniform) / strata

    def _perturbed(self, noise: Tensor, epoch: int, sample: str) -> Tensor | None:
        """Return the noise of the input, with more of it than is to be predicted; None: the same."""
        strength = self.objective.input_perturbation
        if strength == 0:
            return None
        generator = self._generator(Stream.INPUT_PERTURBATION, epoch, sample)
        return noise + strength * torch.randn(noise.shape, generator=generator)

    def _counts(self, mask: CacheKey | None) -> Tensor | None:
        """Return how much each latent's error counts, by the mask and what it leaves the rest."""
        if mask is None:
            return None
        rest = self.data.mask_background
        weights = rest + (1.0 - rest) * self.entries.read(mask)["mask"]
        return weights / weights.mean()

    def _text(self, source: Source, epoch: int, sample: str) -> Conditioning:
        variant = self._variant(source, epoch, sample)
        return self.entries.read(self.empty_text if variant is None else source.texts[variant])

    def _variant(self, source: Source, epoch: int, sample: str) -> int | None:
        """Return which of its texts a sample is trained with; None: the empty one."""
        settings = self.data.of_folder(source.folder)
        if is_dropped(sample, settings=settings, seed=self.seed, epoch=epoch):
            return None
        drawn = range(len(source.texts))[1:] or range(1)
        return drawn[variant_of(sample, count=len(drawn), seed=self.seed, epoch=epoch)]

    def _order(self, epoch: int) -> list[str]:
        order = self._orders.get(epoch)
        if order is None:
            order = epoch_order(
                self.sources.keys() - set(self.regularisation),
                self.regularisation,
                count=self.regularisation_per_epoch,
                seed=self.seed,
                epoch=epoch,
            )
            if len(self._orders) > 2:  # old epochs are never asked for again
                self._orders.clear()
            self._orders[epoch] = order
        return order

    def _generator(self, stream: Stream, *counters: int | str) -> torch.Generator:
        return torch.Generator().manual_seed(draw_seed(self.seed, stream, *counters))


def micro_batches(
    batch: StepBatch,
    *,
    cap: int,
    at_once: Mapping[tuple[int, int], int] = MappingProxyType({}),
    alike: Callable[[Conditioning], int] = lambda _: 0,
) -> list[tuple[Prepared, ...]]:
    """Split a step's samples by shape, then into groups of at most `cap`; order within a shape is kept.

    `at_once` are lower caps by (height, width) of the latents: those of large buckets. Samples whose
    conditioning is not `alike` are split too.
    """
    by_shape: dict[tuple[torch.Size, int], list[Prepared]] = {}
    for sample in batch.samples:
        key = (sample.latents.shape, alike(sample.conditioning))
        by_shape.setdefault(key, []).append(sample)
    found = []
    for (shape, _), group in by_shape.items():
        size = min(cap, at_once.get((shape[-2], shape[-1]), cap))
        found += [tuple(group[first : first + size]) for first in range(0, len(group), size)]
    return found


def to_device(
    samples: Sequence[Prepared], *, device: torch.device, dtype: torch.dtype
) -> MicroBatch:
    """Stack samples of one shape on the device; floating conditioning in `dtype`, the rest as it is."""

    def move(stacked: Tensor) -> Tensor:
        if device.type == "cuda":
            stacked = stacked.pin_memory()
        return stacked.to(device, non_blocking=True)

    def scalars(values: Sequence[float]) -> Tensor:
        return torch.tensor(values, device=device)

    levels = [sample.level for sample in samples]
    noise = move(torch.stack([sample.noise for sample in samples]))
    perturbed = [sample.input_noise for sample in samples if sample.input_noise is not None]
    deltas = [sample.huber_delta for sample in samples]
    stacked = {
        name: move(_padded([sample.conditioning[name] for sample in samples]))
        for name in samples[0].conditioning
    }
    return MicroBatch(
        latents=move(torch.stack([sample.latents for sample in samples])),
        noise=noise,
        input_noise=move(torch.stack(perturbed)) if perturbed else noise,
        timesteps=scalars([level.timestep for level in levels]),
        alpha=scalars([level.alpha for level in levels]),
        sigma=scalars([level.sigma for level in levels]),
        huber_delta=None if math.inf in deltas else scalars(deltas),
        counts=None if (counts := _stacked_counts(samples)) is None else move(counts),
        conditioning={
            name: tensor.to(dtype) if tensor.is_floating_point() else tensor
            for name, tensor in stacked.items()
        },
    )


def _stacked_counts(samples: Sequence[Prepared]) -> Tensor | None:
    """Return [B, 1, H, W], ones for samples without a mask; None where no sample has one."""
    if all(sample.counts is None for sample in samples):
        return None
    ones = samples[0].latents.new_ones(1, *samples[0].latents.shape[1:])
    return torch.stack([ones if sample.counts is None else sample.counts for sample in samples])


def _padded(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors of batch 1; texts of several lengths get zeros on dimension 1, as their masks do."""
    longest = max(tensor.shape[1] for tensor in tensors) if tensors[0].dim() > 1 else 0
    return torch.cat([_lengthened(tensor, longest) for tensor in tensors])


def _lengthened(tensor: Tensor, length: int) -> Tensor:
    if tensor.dim() < 2 or tensor.shape[1] == length:
        return tensor
    padding = tensor.new_zeros(1, length - tensor.shape[1], *tensor.shape[2:])
    return torch.cat([tensor, padding], dim=1)

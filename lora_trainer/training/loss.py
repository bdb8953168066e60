"""The loss of a diffusion model as the papers write it: noise, target, error; and the batches it is computed on.

`Model.losses_of` is the formula without its weight w(t), and every loss of training and validation is computed
there; `forward_backward` (step.py) multiplies by the weights of the batch, which validation leaves out:

    L = w(t) mean_i E(F(alpha x + sigma eps, t, c) - target)_i

The target is noise, v or velocity; with `objective.contrast_scale` it is moved away from the prediction for the
empty prompt (`contrasted`); and it is the base's own prediction for samples that are to stay as they are.

A slider has no images. `Model.drawn` denoises its noisy latents from noise, and its target is the base's prediction
moved along the difference of two prompts (`Slide`; Gandikota et al. 2023, arXiv 2311.12092, equation 8).

Where an image has a mask, the mean over its positions i is weighted by it; with noise perturbation the input has
another eps than the target. x are the latents, eps the noise, c the conditioning, F the denoiser (Ho et al. 2020,
arXiv 2006.11239, eq. 4 and 14; for flow matching alpha = 1 - sigma, Lipman et al. 2022, arXiv 2210.02747).

The error functions E are the rows of config/losses.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_trainer.config.losses import LOSSES
from lora_trainer.families.base.facts import (
    ON_HOST,
    Conditioning,
    Prediction,
    with_text_lengths,
)
from lora_trainer.hardware.device_calls import may_copy_ahead
from lora_trainer.lora.dropout import SampleMasks, halves
from lora_trainer.network.pinned_memory import pinned, pinned_copy
from lora_trainer.training.dataloader import Sample


def add_noise(latents: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor) -> Tensor:
    """Return alpha latents + sigma noise (Ho et al. 2020, equation 4; alpha = 1 - sigma in flow matching)."""
    return _per_sample(alpha, latents) * latents + _per_sample(sigma, latents) * noise


def target(
    latents: Tensor, noise: Tensor, alpha: Tensor, sigma: Tensor, prediction: Prediction
) -> Tensor:
    """Return the target of the denoiser's prediction, [B, C, H, W].

    epsilon: the noise; v: alpha noise - sigma latents (Salimans & Ho 2022, arXiv 2202.00512); flow: the
    velocity noise - latents (Lipman et al. 2022, arXiv 2210.02747, from data to noise).
    """
    if prediction == "epsilon":
        return noise
    if prediction == "flow":
        return noise - latents
    return _per_sample(alpha, latents) * noise - _per_sample(sigma, latents) * latents


def parts_of(
    noisy: Tensor, predicted: Tensor, alpha: Tensor, sigma: Tensor, prediction: Prediction
) -> tuple[Tensor, Tensor]:
    """Return what a prediction says of noisy = alpha image + sigma noise: image and noise, [B, C, H, W] each.

    The inverse of `target`. With predicted noise alpha must not be 0.
    """
    alpha, sigma = _per_sample(alpha, noisy), _per_sample(sigma, noisy)
    if prediction == "epsilon":
        return (noisy - sigma * predicted) / alpha, predicted
    if prediction == "flow":
        return noisy - sigma * predicted, noisy + alpha * predicted
    return alpha * noisy - sigma * predicted, sigma * noisy + alpha * predicted


def contrasted(targets: Tensor, unguided: Tensor, scale: Tensor) -> Tensor:
    """Return u + g (t - u), the target t moved away from the prediction u for the empty prompt, [B, C, H, W].

    A base whose guidance was distilled into it predicts what guidance of some scale would make of two passes
    (Meng et al. 2022, arXiv 2210.03142); the plain target would teach it to draw without.
    """
    unguided = unguided.to(targets.dtype)
    return unguided + _per_sample(scale, targets) * (targets - unguided)


def sample_losses(
    predicted: Tensor,
    targets: Tensor,
    *,
    loss: str = "mse",
    delta: Tensor | None = None,
    mask_weights: Tensor | None = None,
) -> Tensor:
    """Return the float32 mean error of each sample over its own elements, [B].

    `delta` [B] is where an error function turns from quadratic to linear, for those that do. `mask_weights`
    [B, 1, H, W] have a mean of 1 over each sample: masked positions count less, while each sample counts as much as
    without a mask.
    """
    # bf16 has 8 bits of mantissa: squares and their mean over 10^5 elements are computed in float32.
    difference = predicted.float() - targets.float()
    # Error functions without a delta take any and ignore it.
    given = difference.new_ones(1) if delta is None else delta
    errors = LOSSES[loss].formula(difference, _per_sample(given, difference))
    if mask_weights is not None:
        errors = errors * mask_weights
    return errors.mean(dim=tuple(range(1, errors.dim())))


def _per_sample(value: Tensor, like: Tensor) -> Tensor:
    return value.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Samples of one shape as few tensors, on the host (`collate`) or on the device (`on`).

    Latents and noises are float32 [B, C, H, W], `mask_weights` [B, 1, H, W] or None. `input_noise` is None
    where it is the noise to predict. The numbers of the samples (alpha, sigma, weight, delta) are one float32
    tensor [4, B], so that they are one copy to the device; timesteps [B] are apart, because some bases count
    them in whole numbers. `as_base` int64 [N] are the rows whose target is the base's prediction,
    `base_conditioning` is stacked of these rows alone: a text by itself has no padding, and some families
    compute something else where there is padding. `contrast` float32 [B] are the scales of the contrastive
    target, `empty_conditioning` is the empty prompt of each row; None and empty where no target is contrasted.
    `dropout_seeds` int64 [B, 2] are the halves of the samples' seeds. `strength` is the adapter's. `slides` is of a
    slider, whose `noisy` latents [B, C, H, W] are None until they are drawn.
    """

    latents: Tensor
    noise: Tensor
    input_noise: Tensor | None
    timesteps: Tensor
    numbers: Tensor
    dropout_seeds: Tensor
    mask_weights: Tensor | None
    as_base: Tensor | None
    contrast: Tensor | None
    conditioning: Conditioning
    base_conditioning: Conditioning
    empty_conditioning: Conditioning
    loss: str
    precision: torch.dtype
    strength: float = 1.0
    slides: Slides | None = None
    noisy: Tensor | None = None

    def on(self, device: torch.device) -> Batch:
        """Copy to a device, floating conditioning in `precision`; the host does not wait for pinned tensors."""
        ahead = may_copy_ahead(device)

        def moved(value: Any) -> Any:
            if isinstance(value, Mapping):  # cast on the device: host and bus stay out of it
                values = {
                    name: tensor if name in ON_HOST else moved(tensor)
                    for name, tensor in value.items()
                }
                return {
                    name: t.to(self.precision) if t.is_floating_point() else t
                    for name, t in values.items()
                }
            if isinstance(value, Slides):
                return replace(value, **{name: moved(each) for name, each in vars(value).items()})
            return value.to(device, non_blocking=ahead) if isinstance(value, Tensor) else value

        return replace(self, **{name: moved(value) for name, value in vars(self).items()})


@dataclass(frozen=True, kw_only=True)
class Slides:
    """The `Slide`s of a batch: `path` float32 [steps, 2, B] are alpha and sigma, `path_timesteps` [steps, B].

    `pushed` int64 [N] are the rows whose target is moved, by `push` [N]; `more` and `less` are stacked of these rows
    alone, as a text by itself has no padding.
    """

    path: Tensor
    path_timesteps: Tensor
    guidance_scale: float
    empty: Conditioning
    pushed: Tensor
    push: Tensor
    more: Conditioning
    less: Conditioning


def collate(samples: Sequence[Sample], *, device: torch.device, precision: torch.dtype) -> Batch:
    """Stack samples of one shape in host memory, from where `Batch.on` copies them to `device`.

    For a device with memory of its own the host memory is pinned, because only then the copy runs beside
    the computation.
    """

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        # Joined straight into pinned memory: torch.cat and a pinned copy after it would copy twice.
        shape = (sum(map(len, tensors)), *tensors[0].shape[1:])
        out = pinned().empty(shape, dtype=tensors[0].dtype, device=device)
        return torch.cat(list(tensors), out=out)

    def stacked(tensors: Iterable[Tensor]) -> Tensor:
        return joined([tensor.unsqueeze(0) for tensor in tensors])

    def listed(values: Sequence[Any], dtype: torch.dtype | None = None) -> Tensor:
        return pinned_copy(torch.tensor(values, dtype=dtype), device=device)

    def conditioning_of(some: Sequence[Conditioning]) -> Conditioning:
        return with_text_lengths(
            {
                name: joined(padded_alike([conditioning[name] for conditioning in some]))
                for name in (some[0] if some else ())
            }
        )

    numbers = [(s.level.alpha, s.level.sigma, s.weight, s.delta) for s in samples]
    # Noise is perturbed by a setting of the run: in all of its samples or in none.
    perturbed = [s.input_noise for s in samples if s.input_noise is not None]
    mask_weights = None
    if any(s.mask_weights is not None for s in samples):
        # Images without a mask count everywhere alike.
        ones = samples[0].latents.new_ones(1, *samples[0].latents.shape[1:])
        masks = (ones if s.mask_weights is None else s.mask_weights for s in samples)
        mask_weights = stacked(masks)
    rows = [row for row, sample in enumerate(samples) if sample.as_base]
    # The setting of a run: all of its samples have it or none.
    empty = [s.empty_conditioning for s in samples if s.empty_conditioning is not None]
    slides = None
    if each := [s.slide for s in samples if s.slide is not None]:
        pushed = [(row, slide) for row, slide in enumerate(each) if slide.push]
        paths = list(zip(*(slide.path for slide in each), strict=True))
        levels = [[[one.alpha for one in step], [one.sigma for one in step]] for step in paths]
        slides = Slides(
            path=listed(levels, torch.float32),
            path_timesteps=listed([[one.timestep for one in step] for step in paths]),
            guidance_scale=each[0].guidance_scale,
            empty=conditioning_of([slide.empty for slide in each]),
            pushed=listed([row for row, _ in pushed], torch.int64),
            push=listed([slide.push for _, slide in pushed], torch.float32),
            more=conditioning_of([slide.more for _, slide in pushed if slide.more is not None]),
            less=conditioning_of([slide.less for _, slide in pushed if slide.less is not None]),
        )
    return Batch(
        latents=stacked(s.latents for s in samples),
        noise=stacked(s.noise for s in samples),
        input_noise=stacked(perturbed) if perturbed else None,
        timesteps=listed([s.level.timestep for s in samples]),
        numbers=listed([*zip(*numbers, strict=True)], torch.float32),
        dropout_seeds=listed([halves(s.dropout_seed) for s in samples], torch.int64),
        mask_weights=mask_weights,
        as_base=listed(rows, torch.int64) if rows else None,
        contrast=listed([s.contrast for s in samples], torch.float32) if empty else None,
        conditioning=conditioning_of([sample.conditioning for sample in samples]),
        base_conditioning=conditioning_of([samples[row].conditioning for row in rows]),
        empty_conditioning=conditioning_of(empty),
        loss=samples[0].loss,
        precision=precision,
        strength=samples[0].strength,
        slides=slides,
    )


def padded_alike(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors of batch 1 alike in length: texts get zeros on dimension 1, as their masks do."""
    if tensors[0].dim() < 2:
        return list(tensors)
    longest = max(tensor.shape[1] for tensor in tensors)
    return [
        F.pad(t, (0, 0) * (t.dim() - 2) + (0, longest - t.shape[1])) if t.shape[1] < longest else t
        for t in tensors
    ]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The frozen denoiser with its adapter, the function that predicts with it, its dtype and its device.

    `predict(denoiser, noisy [B, C, H, W], timesteps [B], conditioning)` returns the prediction
    [B, C, H, W] of kind `prediction`. `embed` turns cached prompts into conditioning; it does nothing
    unless the text encoders are trained and therefore run in every step. `masks` hold the adapter's
    masks, one per sample, so the denoiser must see the whole batch in each of its forward calls:
    only samples with the same `batch_group_key(conditioning)` share a micro-batch then.
    `without_adapter` switches the adapter off while a block runs, `at_strength(s)` multiplies it by s.
    """

    denoiser: nn.Module
    predict: Callable[[nn.Module, Tensor, Tensor, Conditioning], Tensor]
    embed: Callable[[Conditioning], Conditioning]
    prediction: Prediction
    precision: torch.dtype
    device: torch.device
    masks: SampleMasks | None = None
    batch_group_key: Callable[[Conditioning], int] = lambda _: 0
    without_adapter: Callable[[], AbstractContextManager[None]] = nullcontext
    at_strength: Callable[[float], AbstractContextManager[None]] = lambda _: nullcontext()

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack samples of one shape in host memory (pinned where it helps), ready for the device."""
        return collate(samples, device=self.device, precision=self.precision)

    def masking(self, batch: Batch) -> AbstractContextManager[None]:
        """Use the adapter's masks of these samples in forward and backward passes, while a block runs."""
        if self.masks is None:
            return nullcontext()
        return self.masks.of(batch.dropout_seeds, batch.timesteps)

    def strengthened(self, batch: Batch) -> AbstractContextManager[None]:
        """Have the adapter at the strength of these samples in forward and backward passes, while a block runs."""
        return nullcontext() if batch.strength == 1 else self.at_strength(batch.strength)

    def losses(self, samples: Sequence[Sample]) -> Tensor:
        """Return the unweighted loss of each sample (all of one shape), float32 [B], with its graph."""
        batch = self.collate(samples).on(self.device)
        with self.strengthened(batch):
            return self.losses_of(self.drawn(batch))

    @torch.no_grad()
    def drawn(self, batch: Batch) -> Batch:
        """Return a batch on the device with the noisy latents of a slider, denoised along the samples' paths.

        Each step keeps what it predicts of the image and of the noise, and puts them together anew at the next level:
        DDIM without noise (Song et al. 2020, arXiv 2010.02502, eq. 12), which in flow matching is Euler's method. The
        adapter is as it is now; of its masks none is set.
        """
        slides = batch.slides
        if slides is None:
            return batch
        alpha, sigma, _, _ = batch.numbers
        levels = [*((step[0], step[1]) for step in slides.path.unbind()), (alpha, sigma)]
        x, prompt = batch.noise, self.embed(batch.conditioning)
        empty = self.embed(slides.empty) if slides.guidance_scale != 1 else {}
        for step, timesteps in enumerate(slides.path_timesteps.unbind()):
            noisy = x.to(self.precision)
            predicted = self.predict(self.denoiser, noisy, timesteps, prompt).float()
            if empty:
                unguided = self.predict(self.denoiser, noisy, timesteps, empty).float()
                predicted = unguided + slides.guidance_scale * (predicted - unguided)
            image, noise = parts_of(x, predicted, *levels[step], self.prediction)
            x = add_noise(image, noise, *levels[step + 1])
        return replace(batch, noisy=x)

    def losses_of(self, batch: Batch) -> Tensor:
        """Return the unweighted losses, float32 [B], of a batch on the device; the host never waits."""
        # The noise in the input may be another than the noise in the target (Ning et al. 2023, arXiv
        # 2301.11706). Both are float32: only what the network sees is rounded to its dtype.
        input_noise = batch.noise if batch.input_noise is None else batch.input_noise
        alpha, sigma, _, delta = batch.numbers
        noisy = add_noise(batch.latents, input_noise, alpha, sigma).to(self.precision)
        if batch.noisy is not None:
            noisy = batch.noisy.to(self.precision)
        targets = target(batch.latents, batch.noise, alpha, sigma, self.prediction)
        if batch.contrast is not None:
            # Every row, also one with the base's target: the adapter's masks are those of the whole batch.
            with torch.no_grad():
                empty_prompt = self.embed(batch.empty_conditioning)
                unguided = self.predict(self.denoiser, noisy, batch.timesteps, empty_prompt)
            targets = contrasted(targets, unguided, batch.contrast)
        if batch.as_base is not None:
            # The base model's own prediction in these rows. With class preservation each sample appears twice: once
            # with its caption, once with the class word and the base's prediction as target. With
            # `objective.prior=base` regularisation images have it.
            rows = batch.as_base
            with torch.no_grad(), self.without_adapter():
                as_base = self.embed(batch.base_conditioning)
                base_prediction = self.predict(
                    self.denoiser, noisy[rows], batch.timesteps[rows], as_base
                )
            # Out of place: in epsilon prediction `targets` is the batch's noise, which the input may share.
            targets = targets.index_copy(0, rows, base_prediction.to(targets.dtype))
        if batch.slides is not None and len(batch.slides.pushed):
            targets = self._pushed(targets, noisy, batch.timesteps, batch.slides)
        conditioning = self.embed(batch.conditioning)
        predicted = self.predict(self.denoiser, noisy, batch.timesteps, conditioning)
        return sample_losses(
            predicted,
            targets,
            loss=batch.loss,
            delta=delta,
            mask_weights=batch.mask_weights,
        )

    @torch.no_grad()
    def reach(self, samples: Sequence[Sample]) -> tuple[float, float]:
        """Return how far samples of a slider with one strength are moved along their goals, and how far they should be.

        Both are sums over all elements: of the adapter's change of the prediction times the goal's change, and of the
        latter's square. Their quotient is 1 where every goal is reached, 0 for the base. The latents are the base's,
        so that strengths are compared on the same ones.
        """
        batch = self.collate(samples).on(self.device)
        assert batch.slides is not None and len(batch.slides.pushed) == len(samples)
        with self.without_adapter():
            noisy = self.drawn(batch).noisy
            assert noisy is not None
            noisy = noisy.to(self.precision)
            prompt = self.embed(batch.conditioning)
            base = self.predict(self.denoiser, noisy, batch.timesteps, prompt).float()
        goal = self._pushed(base, noisy, batch.timesteps, batch.slides) - base
        with self.strengthened(batch):
            prompt = self.embed(batch.conditioning)
            moved = self.predict(self.denoiser, noisy, batch.timesteps, prompt).float() - base
        return float((moved * goal).sum()), float(goal.square().sum())

    @torch.no_grad()
    def _pushed(self, targets: Tensor, noisy: Tensor, timesteps: Tensor, slides: Slides) -> Tensor:
        """Return the targets of a slider, moved by the base's predictions for its two prompts."""
        rows = slides.pushed
        with self.without_adapter():
            more, less = (
                self.predict(self.denoiser, noisy[rows], timesteps[rows], self.embed(prompt))
                for prompt in (slides.more, slides.less)
            )
        difference = more.to(targets.dtype) - less.to(targets.dtype)
        return targets.index_add(0, rows, _per_sample(slides.push, difference) * difference)

"""The loss of a diffusion model as the papers write it: noise, target, error, and their weights.

`Model.losses_of` is the formula without its weight w(t), and every loss of training and validation is computed
there; `forward_backward` (step.py) multiplies by the weights of the batch, which validation leaves out:

    L = w(t) mean_i E(F(alpha x + sigma eps, t, c) - target)_i

Where an image has a mask, the mean over its positions i is weighted by it; with noise perturbation the input has
another eps than the target. x are the latents, eps the noise, c the conditioning, F the denoiser (Ho et al. 2020,
arXiv 2006.11239, eq. 4 and 14; for flow matching alpha = 1 - sigma, Lipman et al. 2022, arXiv 2210.02747).

To add an error function E, write it below, name it in `ERRORS`, and add its name to `LossName`, and to
`WITH_DELTA` if it has a delta (both in config/declare.py); then run scripts/write_schema.py. `smooth_l1` is
Huber's error over its delta.

SNR is alpha^2 / sigma^2 = signal / (1 - signal), with alpha-bar of Ho et al. as `signal`. The papers define SNR
weights for the loss of predicted noise. The loss of v is (SNR + 1) / SNR times as large, so a weight for v
is SNR / (SNR + 1) = signal times the weight for noise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lora_trainer.config.declare import LossName
from lora_trainer.config.learning import ObjectiveSettings
from lora_trainer.families.base import Conditioning, Prediction
from lora_trainer.lora.dropout import SampleMasks
from lora_trainer.training.batch import Batch, Sample, collate

# ---- the error of one element: (difference d, delta) -> error, all of the same shape or broadcast to it


def _squared(difference: Tensor, delta: Tensor) -> Tensor:
    return difference.square()


def _pseudo_huber(difference: Tensor, delta: Tensor) -> Tensor:
    """Return 2 delta (sqrt(d^2 + delta^2) - delta): d^2 near 0, 2 delta |d| far from it.

    Song & Dhariwal 2023, arXiv 2310.14189, at the scale of sd-scripts.
    """
    squares = difference.square()
    # The formula multiplied by its conjugate: for d << delta the difference sqrt(d^2 + delta^2) - delta
    # of two almost equal numbers would lose the digits of d.
    return 2 * delta * squares / ((squares + delta.square()).sqrt() + delta)


def _smooth_l1(difference: Tensor, delta: Tensor) -> Tensor:
    """Return 2 (sqrt(d^2 + delta^2) - delta), the smooth L1 error of sd-scripts: 2 |d| far from 0.

    Where delta falls with the noise level (`loss_delta`), it weighs noisier levels more than Huber's does.
    """
    return _pseudo_huber(difference, delta) / delta


def _log_cosh(difference: Tensor, delta: Tensor) -> Tensor:
    """Return log(cosh(d)): d^2 / 2 near 0, |d| - log 2 far from it.

    OneTrainer's formula, with |d| for d: the error is even, and in float32 d + softplus(-2 d) has lost its
    digits at large negative d.
    """
    distance = difference.abs()
    return distance + F.softplus(-2.0 * distance) - math.log(2.0)


ERRORS: Mapping[LossName, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": _squared,
    "huber": _pseudo_huber,
    "smooth_l1": _smooth_l1,
    "log_cosh": _log_cosh,
}
"""The error functions by the names of `objective.loss`."""


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


def sample_losses(
    predicted: Tensor,
    targets: Tensor,
    *,
    loss: LossName = "mse",
    delta: Tensor | None = None,
    mask_weights: Tensor | None = None,
) -> Tensor:
    """Return the float32 mean error of each sample over its own elements, [B].

    `delta` [B] is the scale of the error function where it has one. `mask_weights` [B, 1, H, W] have a mean of
    1 over each sample: masked positions count less, while each sample counts as much as without a mask.
    """
    # bf16 has 8 bits of mantissa: squares and their mean over 10^5 elements are computed in float32.
    difference = predicted.float() - targets.float()
    # Error functions without a scale take any and ignore it.
    scale = difference.new_ones(1) if delta is None else delta
    errors = ERRORS[loss](difference, _per_sample(scale, difference))
    if mask_weights is not None:
        errors = errors * mask_weights
    return errors.mean(dim=tuple(range(1, errors.dim())))


def _per_sample(value: Tensor, like: Tensor) -> Tensor:
    return value.view(-1, *[1] * (like.dim() - 1))


@dataclass(frozen=True, kw_only=True)
class Model:
    """The frozen denoiser with its adapter, the function that predicts with it, its dtype and its device.

    `predict(denoiser, noisy [B, C, H, W], timesteps [B], conditioning)` returns the prediction
    [B, C, H, W] of kind `prediction`. `embed` turns cached prompts into conditioning; it does nothing
    unless the text encoders are trained and therefore run in every step. `masks` hold the adapter's
    dropout masks, one per sample, so the denoiser must see the whole batch in each of its forward calls:
    only samples with the same `batch_group_key(conditioning)` share a micro-batch then.
    `without_adapter` switches the adapter off while a block runs.
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

    def collate(self, samples: Sequence[Sample]) -> Batch:
        """Stack samples of one shape in host memory (pinned where it helps), ready for the device."""
        return collate(samples, device=self.device, precision=self.precision)

    def dropping(self, batch: Batch) -> AbstractContextManager[None]:
        """Use the dropout masks of these samples in forward and backward passes, while a block runs."""
        return nullcontext() if self.masks is None else self.masks.of(batch.dropout_seeds)

    def losses(self, samples: Sequence[Sample]) -> Tensor:
        """Return the unweighted loss of each sample (all of one shape), float32 [B], with its graph."""
        return self.losses_of(self.collate(samples).on(self.device))

    def losses_of(self, batch: Batch) -> Tensor:
        """Return the unweighted losses, float32 [B], of a batch on the device; the host never waits."""
        # The noise in the input may be another than the noise in the target (Ning et al. 2023, arXiv
        # 2301.11706). Both are float32: only what the network sees is rounded to its dtype.
        input_noise = batch.noise if batch.input_noise is None else batch.input_noise
        alpha, sigma, _, delta = batch.numbers
        noisy = add_noise(batch.latents, input_noise, alpha, sigma).to(self.precision)
        targets = target(batch.latents, batch.noise, alpha, sigma, self.prediction)
        if batch.as_base is not None:
            targets = self._with_base_targets(targets, batch, noisy, rows=batch.as_base)
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
    def _with_base_targets(
        self, targets: Tensor, batch: Batch, noisy: Tensor, *, rows: Tensor
    ) -> Tensor:
        """Return `targets` with the base model's own prediction in `rows`, int64 [N].

        With class preservation each sample appears twice: once with its caption, once with the class word
        and the base model's prediction as target. With `objective.prior=base` regularisation images have it.
        """
        with self.without_adapter():
            conditioning = self.embed(batch.base_conditioning)
            base_prediction = self.predict(
                self.denoiser, noisy[rows], batch.timesteps[rows], conditioning
            )
        # Out of place: in epsilon prediction `targets` is the batch's noise, which the input may share.
        return targets.index_copy(0, rows, base_prediction.to(targets.dtype))


# ---- what the dataloader draws and weighs; torch is needed for the noise only


def draw_noise(
    shape: tuple[int, int, int],
    generator: torch.Generator,
    *,
    offset: float,
    octaves: int,
    discount: float,
) -> Tensor:
    """Draw one sample's float32 noise [C, H, W].

    `offset` adds a constant per channel (Guttenberg 2023, "Diffusion with offset noise"); `octaves`
    adds coarser noise, each `discount` times weaker, rescaled to unit variance (Whitaker 2023,
    "Multi-resolution noise"). With both 0 the base noise is the same draw, so runs with and without
    them can be compared.
    """
    channels, height, width = shape
    noise = torch.randn(shape, generator=generator)
    for octave in range(1, octaves + 1):
        size = (math.ceil(height / 2**octave), math.ceil(width / 2**octave))
        coarse = torch.randn((1, channels, *size), generator=generator)
        noise += discount**octave * F.interpolate(coarse, size=(height, width), mode="bilinear")[0]
        if size == (1, 1):  # a constant: coarser octaves would add the same again
            break
    if octaves:
        # Before the offset: dividing by the deviation after it would shrink the offset too.
        noise /= noise.std()
    if offset:
        noise += offset * torch.randn((channels, 1, 1), generator=generator)
    return noise


MAX_DEBIASED_SNR = 1000.0
"""Debiased weights, 1 / sqrt(SNR), use an SNR clamped to [1 / this, this]. sd-scripts clamps at the top
only; at zero-terminal SNR the weight would then be infinite."""
MIN_WEIGHED_SIGMA = 1e-3
"""Lowest sigma of the weight sigma^-2 (`sigma_sqrt`): that of a sampler's table of 1000 steps."""


def loss_weight(
    settings: ObjectiveSettings, *, signal: float | None, sigma: float, prediction: Prediction
) -> float:
    """Return the weight of a sample's loss; `signal` is None for flow matching. Finite at SNR 0 too.

    min_snr: Hang et al. 2023, arXiv 2303.09556; soft_min_snr: Crowson et al. 2024, arXiv 2401.11605;
    debiased: Yu et al. 2023, arXiv 2310.08442; p2: Choi et al. 2022, arXiv 2204.00227, with k = 1;
    sigma_sqrt and cosmap, for flow matching: Esser et al. 2024, arXiv 2403.03206.
    """
    kind, gamma = settings.chosen_weighting, settings.min_snr_gamma
    if kind == "none":
        return 1.0
    if signal is None and kind == "sigma_sqrt":
        return max(sigma, MIN_WEIGHED_SIGMA) ** -2
    if signal is None and kind == "cosmap":
        return 2.0 / (math.pi * (1.0 - 2.0 * sigma + 2.0 * sigma * sigma))
    assert signal is not None, f"{kind} is a weighting by SNR"
    snr = signal / (1.0 - signal) if signal < 1.0 else math.inf
    match kind:
        case "min_snr" if gamma is not None:
            # The usual form, min(SNR, gamma) / SNR, is 0 / 0 at zero-terminal SNR.
            weight = gamma / snr if snr > gamma else 1.0
        case "soft_min_snr" if gamma is not None:
            weight = gamma / (snr + gamma)
        case "debiased":
            weight = 1.0 / math.sqrt(min(max(snr, 1.0 / MAX_DEBIASED_SNR), MAX_DEBIASED_SNR))
        case "p2":
            weight = math.pow(1.0 + snr, -settings.p2_gamma)
        case _:
            raise AssertionError(f"{kind} is no weighting by SNR")
    # At a fixed noisy input an error of v is the error of the noise divided by alpha (Salimans & Ho 2022,
    # arXiv 2202.00512, appendix D), so its square weighs alpha-bar as much.
    return weight * signal if prediction == "v_prediction" else weight


def loss_delta(settings: ObjectiveSettings, *, time: float, alpha: float, sigma: float) -> float:
    """Return the delta of a sample's error function at a noise level; `time` is in [0, 1].

    The schedules are those of sd-scripts (Khrapov et al. 2024, arXiv 2403.16728): exponential and snr fall
    from 1 without noise to `huber_delta` at pure noise. Error functions without a delta ignore it.
    """
    lowest = settings.huber_delta
    match settings.huber_schedule:
        case "constant":
            return lowest
        case "exponential":
            return float(lowest**time)
        case "snr":
            # The paper's 1 / (1 + sigma / alpha), rearranged because alpha is 0 at pure noise.
            return (1.0 - lowest) * (alpha / (alpha + sigma)) ** 2 + lowest

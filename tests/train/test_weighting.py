"""Loss weights and Huber deltas against the papers' formulas, written out in float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler
from diffusers.training_utils import compute_loss_weighting_for_sd3
from hypothesis import given
from hypothesis import strategies as st

from lora_trainer.config.config import FLOW_WEIGHTINGS, SNR_WEIGHTINGS, ObjectiveSettings
from lora_trainer.families.base import Prediction
from lora_trainer.training.loss import MAX_DEBIASED_SNR, loss_delta, loss_weight

SIGNAL = DDPMScheduler(
    beta_schedule="scaled_linear", beta_start=0.00085, beta_end=0.012
).alphas_cumprod.double()
SIGNALS = st.floats(0.0, 1.0, exclude_max=True)


def settings_of(**values: Any) -> ObjectiveSettings:
    return ObjectiveSettings.model_validate(values)


def weight(signal: float, prediction: Prediction = "epsilon", **values: Any) -> float:
    return loss_weight(
        settings_of(**values), signal=signal, sigma=math.sqrt(1 - signal), prediction=prediction
    )


def flow_weights(sigmas: np.ndarray[Any, Any], kind: str) -> list[float]:
    settings = settings_of(weighting=kind)
    return [
        loss_weight(settings, signal=None, sigma=float(sigma), prediction="flow")
        for sigma in sigmas
    ]


@given(signal=st.floats(1e-4, 0.9999), gamma=st.floats(0.1, 100.0))
def test_snr_weights_are_those_of_the_papers(signal: float, gamma: float) -> None:
    """Of the loss of predicted noise, and of v, whose loss is (SNR + 1) / SNR times that."""
    snr = np.float64(signal) / (1 - np.float64(signal))
    clipped = np.clip(snr, 1 / MAX_DEBIASED_SNR, MAX_DEBIASED_SNR)
    wanted = {
        "min_snr": np.minimum(snr, gamma) / snr,
        "soft_min_snr": gamma / (snr + gamma),
        "debiased": 1 / np.sqrt(clipped),
        "p2": 1 / (1 + snr) ** np.float64(0.7),
        "none": np.float64(1.0),
    }
    for kind, epsilon in wanted.items():
        values = {"weighting": kind, "min_snr_gamma": gamma, "p2_gamma": 0.7}
        assert weight(signal, **values) == pytest.approx(float(epsilon), rel=1e-9), kind
        velocity = epsilon if kind == "none" else epsilon * snr / (snr + 1)
        found = weight(signal, "v_prediction", **values)
        assert found == pytest.approx(float(velocity), rel=1e-9), kind


@pytest.mark.parametrize("kind", SNR_WEIGHTINGS)
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
@given(signal=SIGNALS)
def test_weights_by_snr_are_finite_everywhere(
    kind: str, prediction: Prediction, signal: float
) -> None:
    assert 0 <= weight(signal, prediction, weighting=kind) < 32


@pytest.mark.parametrize("kind", SNR_WEIGHTINGS)
def test_at_zero_terminal_snr_weights_are_their_limits(kind: str) -> None:
    """0/0 for epsilon; v has weight 0 where there is no signal."""
    limit = math.sqrt(MAX_DEBIASED_SNR) if kind == "debiased" else 1.0
    assert weight(0.0, weighting=kind) == pytest.approx(limit)
    assert weight(0.0, "v_prediction", weighting=kind) == 0.0
    assert weight(1.0, weighting=kind) >= 0.0, "no noise at all is no division by zero"


@pytest.mark.parametrize("kind", SNR_WEIGHTINGS)
def test_less_noise_weighs_less(kind: str) -> None:
    found = [weight(signal, weighting=kind) for signal in SIGNAL.tolist()]
    assert found == sorted(found)
    assert found[0] < 0.2 * found[-1]


def test_a_soft_minimum_touches_the_hard_one_far_from_gamma() -> None:
    for signal, wanted in ((1e-6, 1.0), (1 - 1e-6, 5e-6)):
        for kind in ("min_snr", "soft_min_snr"):
            assert weight(signal, weighting=kind) == pytest.approx(wanted, rel=1e-4)
    middle = 5 / 6  # SNR 5
    assert weight(middle, weighting="min_snr") == pytest.approx(1.0)
    assert weight(middle, weighting="soft_min_snr") == pytest.approx(0.5)


@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_auto_is_min_snr_where_there_is_a_gamma(prediction: Prediction) -> None:
    for signal in (0.01, 0.5, 0.99):
        auto = weight(signal, prediction, min_snr_gamma=3.0)
        assert auto == weight(signal, prediction, weighting="min_snr", min_snr_gamma=3.0)
        assert weight(signal, prediction, min_snr_gamma=None) == 1.0
        assert weight(signal, prediction, weighting="none", min_snr_gamma=3.0) == 1.0


@pytest.mark.parametrize("kind", FLOW_WEIGHTINGS)
def test_flow_weights_are_those_of_diffusers(kind: str) -> None:
    sigmas = np.linspace(0.001, 0.999, 37)
    wanted = compute_loss_weighting_for_sd3(kind, torch.from_numpy(sigmas))
    assert flow_weights(sigmas, kind) == pytest.approx(wanted.tolist(), rel=1e-6)


@pytest.mark.parametrize("kind", FLOW_WEIGHTINGS)
@given(sigma=st.floats(0.0, 1.0))
def test_flow_weights_are_finite(kind: str, sigma: float) -> None:
    (found,) = flow_weights(np.array([sigma]), kind)
    assert 0 < found <= 1e6


# ---- Huber


def delta(signal: float, time: float, **values: Any) -> float:
    return loss_delta(
        settings_of(**values), time=time, alpha=math.sqrt(signal), sigma=math.sqrt(1 - signal)
    )


@pytest.mark.parametrize("loss", ["huber", "smooth_l1"])
@given(lowest=st.floats(0.01, 1.0), index=st.integers(0, 999))
def test_deltas_are_those_of_sd_scripts(loss: str, lowest: float, index: int) -> None:
    signal, time = float(SIGNAL[index]), index / 1000
    sigma = np.sqrt((1 - np.float64(signal)) / np.float64(signal))
    wanted = {
        "constant": lowest,
        "exponential": np.exp(np.log(lowest) * time),
        "snr": (1 - lowest) / (1 + sigma) ** 2 + lowest,
    }
    for schedule, value in wanted.items():
        found = delta(signal, time, loss=loss, huber_delta=lowest, huber_schedule=schedule)
        assert found == pytest.approx(float(value), rel=1e-9), schedule


@pytest.mark.parametrize("schedule", ["snr", "exponential"])
def test_scheduled_deltas_fall_to_the_lowest_and_survive_pure_noise(schedule: str) -> None:
    values = {"loss": "huber", "huber_schedule": schedule, "huber_delta": 0.1}
    found = [delta(float(SIGNAL[index]), index / 1000, **values) for index in range(1000)]
    assert found == sorted(found, reverse=True) and found[0] > 0.9
    assert delta(0.0, 1.0, **values) == pytest.approx(0.1)

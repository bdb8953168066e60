"""sd-scripts' options about noise and loss: weights, losses, and which timesteps are drawn.

Its FLUX and SD3 trainers draw sigmas in different ways; both are put into one distribution and one shift.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from lora_trainer.importing import shared
from lora_trainer.importing.rules import THERE, Foreign, carry

_DRAWN: Mapping[str, shared.Distribution] = {"logit_normal": "logit_normal", "mode": "mode"}


def read_objective(foreign: Foreign) -> None:
    """Set weights, loss and timesteps."""
    findings = foreign.findings
    shared.set_snr_weights(foreign, foreign.number("min_snr_gamma"), "min_snr_gamma")
    if foreign.on("debiased_estimation_loss") and not foreign.is_flow:
        findings.set("objective.weighting", "debiased", "debiased_estimation_loss")
        if foreign.on("min_snr_gamma"):
            how = "these weights alone, there times those of min_snr_gamma"
            findings.is_nearest("debiased_estimation_loss", how)
    foreign.stay("is off there, or flow matching has no such weights", "debiased_estimation_loss")
    _loss(foreign)
    if foreign.is_flow and not _is_sd3(foreign):
        foreign.stay("does nothing there with FLUX and Chroma", "min_timestep", "max_timestep")
    else:
        shared.set_timestep_range(foreign, "min_timestep", "max_timestep")
    if foreign.is_flow:
        _flow(foreign)
    else:
        shared.set_timesteps(foreign, "uniform", THERE)
        names = ("weighting_scheme", "timestep_sampling", "logit_mean", "logit_std", "mode_scale")
        foreign.stay("is for flow matching", *names)


def _is_sd3(foreign: Foreign) -> bool:
    module = str(foreign.values.get("network_module"))
    return "training_shift" in foreign.values or module.endswith("sd3")


def _loss(foreign: Foreign) -> None:
    findings, kind = foreign.findings, str(foreign.get("loss_type", "l2"))
    ours = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}.get(kind)
    if ours is None:
        findings.is_nearest(
            "loss_type", f"{kind}: smooth_l1 with objective.huber_delta=0.01, which is close"
        )
        findings.set("objective.loss", "smooth_l1", "loss_type")
        findings.set("objective.huber_delta", 0.01, "loss_type")
        findings.set("objective.huber_schedule", "constant", "loss_type")
    else:
        findings.set("objective.loss", ours, *foreign.there("loss_type"))
    if ours in ("huber", "smooth_l1"):
        delta, scale = foreign.number("huber_c", 0.1) or 0.1, foreign.number("huber_scale", 1.0)
        schedule = str(foreign.get("huber_schedule", "snr"))
        if schedule == "constant":
            delta *= scale or 1.0
        elif schedule == "exponential" and scale not in (None, 1):
            findings.lacks("huber_scale", scale, "the threshold without noise is 1")
        foreign.stay("does nothing there with this huber_schedule", "huber_scale")
        names = [name for name in ("huber_c", "huber_scale") if name in foreign.values]
        findings.set("objective.huber_delta", min(1.0, delta), *names, note="" if names else THERE)
        carry(findings, "objective.huber_schedule", "huber_schedule", schedule)
    foreign.stay("is of loss_type huber and smooth_l1", "huber_c", "huber_scale", "huber_schedule")


def _flow(foreign: Foreign) -> None:
    """There, sigmas are drawn at descending indices: a mean above 0 is less noise, here it is more."""
    findings = foreign.findings
    is_sd3 = _is_sd3(foreign)
    scheme = str(foreign.get("weighting_scheme", "uniform"))
    sampling = "density" if is_sd3 else str(foreign.get("timestep_sampling", "sigma"))
    shift_name = "training_shift" if is_sd3 else "discrete_flow_shift"
    shift = foreign.number(shift_name, 1.0 if is_sd3 else 3.0) or 1.0
    std, mean = foreign.number("logit_std", 1.0) or 1.0, foreign.number("logit_mean", 0.0) or 0.0
    scale = foreign.number("sigmoid_scale", 1.0) or 1.0
    if scheme in ("sigma_sqrt", "cosmap"):
        findings.set("objective.weighting", scheme, "weighting_scheme")
    if sampling in ("sigma", "density"):
        drawn = _DRAWN.get(scheme, "uniform")
        mean = mean if is_sd3 else -mean
        if drawn == "mode" and not is_sd3:
            findings.is_nearest(
                "weighting_scheme", "mode: its ends are swapped there, which matters little"
            )
        shared.set_timesteps(
            foreign, drawn, "weighting_scheme", mean=mean, mean_source="logit_mean",
            std=std, std_source="logit_std", shift=shift, shift_source=shift_name,
        )  # fmt: skip
        if drawn == "mode":
            carry(findings, "objective.mode_scale", "mode_scale", foreign.get("mode_scale", 1.29))
        foreign.stay("weighting_scheme says how timesteps are drawn", "timestep_sampling")
    else:
        distribution: shared.Distribution = "uniform" if sampling == "uniform" else "sigmoid"
        by_size = sampling.endswith("_shift")
        if sampling not in ("uniform", "sigmoid", "shift") and not by_size:
            findings.is_nearest("timestep_sampling", f"{sampling}: sigmoid without a shift")
        own: float | Literal["resolution"] = "resolution"
        if by_size and foreign.values.get("model_type") == "chroma":
            own = shared.shift_by_tokens(foreign)
            findings.is_nearest(
                "timestep_sampling", f"{sampling}: {own:g}, that of this resolution"
            )
        shared.set_timesteps(
            foreign, distribution, "timestep_sampling", std=scale, std_source="sigmoid_scale",
            shift=own if by_size else shift if sampling == "shift" else 1.0,
            shift_source="timestep_sampling" if by_size or sampling != "shift" else shift_name,
        )  # fmt: skip
    if not is_sd3:
        guidance = foreign.number("guidance_scale", 3.5)
        if "guidance_scale" in foreign.values:
            carry(findings, "objective.guidance_scale", "guidance_scale", guidance)
        else:
            findings.set("objective.guidance_scale", guidance, note=THERE)
        kind = str(foreign.get("model_prediction_type", "sigma_scaled"))
        if kind == "raw":
            findings.stays("model_prediction_type", "the velocity is predicted as it is")
        else:
            how = f"{kind}: raw, the velocity as it is"
            findings.is_nearest("model_prediction_type", how)
    else:
        foreign.stay(
            "is of bases with a guidance embedding", "guidance_scale", "model_prediction_type"
        )
    unused = (
        "weighting_scheme",
        "logit_mean",
        "logit_std",
        "mode_scale",
        "sigmoid_scale",
        shift_name,
    )
    foreign.stay(f"does nothing there with timestep_sampling={sampling}", *unused)

"""sd-scripts' options about noise and loss: weights, losses, and which timesteps are drawn.

Its FLUX and SD3 trainers draw sigmas in different ways; both are put into one distribution and one shift.
"""

from __future__ import annotations

from lora_trainer.importing import shared
from lora_trainer.importing.foreign import THERE, Foreign


def read_objective(foreign: Foreign) -> None:
    """Set weights, loss and timesteps."""
    shared.set_snr_weights(foreign, "min_snr_gamma")
    if foreign.on("debiased_estimation_loss") and not foreign.is_flow:
        foreign.set("objective.weighting", "debiased", "debiased_estimation_loss")
        if foreign.on("min_snr_gamma"):
            how = "these weights alone, there times those of min_snr_gamma"
            foreign.is_nearest("debiased_estimation_loss", how)
    _loss(foreign)
    module = str(foreign.values.get("network_module"))
    is_sd3 = "training_shift" in foreign.values or module.endswith("sd3")
    if is_sd3 or not foreign.is_flow:
        shared.set_timestep_range(foreign, "min_timestep", "max_timestep")
    if not foreign.is_flow:
        shared.set_timesteps(foreign, "uniform", THERE)
        return
    set_flow_weights(foreign)
    if is_sd3:
        shift = foreign.nonzero("training_shift", 1.0)
        set_density(foreign, sign=1, shift=(shift, "training_shift"))
    else:
        _flux(foreign)
    if foreign.settings["objective.timestep_sampling"] == "mode":
        mode_scale = foreign.get("mode_scale", 1.29)
        foreign.carry("objective.mode_scale", "mode_scale", mode_scale)


def _loss(foreign: Foreign) -> None:
    kind = foreign.word("loss_type", "l2")
    ours = {"l2": "mse", "huber": "huber", "smooth_l1": "smooth_l1"}.get(kind)
    foreign.set("objective.loss", ours or "smooth_l1", "loss_type")
    if ours is None:
        how = f"{kind}: smooth_l1 with objective.huber_delta=0.01, which is close"
        foreign.is_nearest("loss_type", how)
        shared.set_huber(foreign, 0.01, "loss_type")
    elif ours != "mse":
        delta, scale = foreign.nonzero("huber_c", 0.1), foreign.number("huber_scale", 1.0)
        schedule = foreign.word("huber_schedule", "snr")
        if schedule == "constant":
            delta *= scale or 1.0
        elif schedule == "exponential" and scale not in (None, 1):
            foreign.lacks("huber_scale", scale, "the threshold without noise is 1")
        foreign.set("objective.huber_delta", min(1.0, delta), "huber_c", "huber_scale")
        foreign.carry("objective.huber_schedule", "huber_schedule", schedule)


def set_flow_weights(foreign: Foreign) -> None:
    """Set the weights of a flow-matching loss, which `weighting_scheme` names beside ways to draw timesteps."""
    scheme = foreign.values.get("weighting_scheme")
    if scheme in ("sigma_sqrt", "cosmap"):
        foreign.set("objective.weighting", scheme, "weighting_scheme")


def set_density(foreign: Foreign, *, sign: float, shift: tuple[float, str] = (1.0, THERE)) -> None:
    """Set the timesteps that `weighting_scheme` draws.

    FLUX's sigmas are drawn at descending indices (`sign` -1): a mean above 0 is less noise there.
    """
    scheme = foreign.word("weighting_scheme", "none")
    drawn: shared.Distribution = "uniform"
    if scheme == "mode":
        drawn = "mode"
        if sign < 0:
            how = "mode: its ends are swapped there, which matters little"
            foreign.is_nearest("weighting_scheme", how)
    elif scheme == "logit_normal":
        drawn = "logit_normal"
    mean = (sign * foreign.nonzero("logit_mean", 0.0), "logit_mean")
    std = (foreign.nonzero("logit_std", 1.0), "logit_std")
    shared.set_timesteps(foreign, drawn, "weighting_scheme", mean=mean, std=std, shift=shift)


def _flux(foreign: Foreign) -> None:
    sampling = foreign.word("timestep_sampling", "sigma")
    shift = (foreign.nonzero("discrete_flow_shift", 3.0), "discrete_flow_shift")
    by_size = sampling.endswith("_shift")
    if sampling == "sigma":
        set_density(foreign, sign=-1, shift=shift)
    else:
        if sampling not in ("uniform", "sigmoid", "shift") and not by_size:
            foreign.is_nearest("timestep_sampling", f"{sampling}: sigmoid without a shift")
        sampler_shift: shared.Shift = "resolution" if by_size else 1.0
        if by_size and foreign.values.get("model_type") == "chroma":
            sampler_shift = shared.shift_by_tokens(foreign)
            foreign.is_nearest(
                "timestep_sampling", f"{sampling}: {sampler_shift:g}, that of this resolution"
            )
        shared.set_timesteps(
            foreign,
            "uniform" if sampling == "uniform" else "sigmoid",
            "timestep_sampling",
            std=(foreign.nonzero("sigmoid_scale", 1.0), "sigmoid_scale"),
            shift=shift if sampling == "shift" else (sampler_shift, "timestep_sampling"),
        )
    guidance = foreign.number("guidance_scale", 3.5)
    foreign.carry("objective.guidance_scale", "guidance_scale", guidance)
    kind = foreign.word("model_prediction_type", "sigma_scaled")
    if kind != "raw":
        foreign.is_nearest("model_prediction_type", f"{kind}: raw, the velocity as it is")

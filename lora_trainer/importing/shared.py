"""What trainers say in different words about the same things: adapters, timesteps, loss, text encoders.

Input: foreign keys, and where it takes more than reading them their values. Output: settings, and one line
for each thing that is only approximated or missing here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lora_trainer.common.errors import RequestError
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, shown
from lora_trainer.importing.rules import table_of, words

Distribution = Literal["uniform", "sigmoid", "logit_normal", "mode", "cosmap"]
Shift = float | Literal["resolution"]
FULL_RANK = 1024
WHOLE = 1e6
"""A rank that stands for whole matrices."""


def set_model(foreign: Foreign, name: str, key: str, models: Mapping[str, Any]) -> None:
    """Set how the base is trained, from the names of the trainer's table; raises RequestError for others."""
    if name not in (*models["flow"], *models["noise"]):
        raise RequestError(
            f"{key}={shown(name)} is a model that is not trained here; docs/models.md lists those that are",
            fix=f"use a file for {', '.join((*models['noise'], *models['flow']))}",
        )
    foreign.is_flow = name in models["flow"]
    foreign.trains_text = not foreign.is_flow


def set_kind(foreign: Foreign, algorithm: str, key: str) -> str:
    """Set the kind of adapter from its name there; return ours."""
    kind: str
    another = ("lora", "adapters here are lora, loha, lokr and oft")
    kind, why = table_of("words")["kinds"].get(algorithm.lower(), another)
    foreign.set("adapter.kind", kind, key)
    if why:
        foreign.is_nearest(key, f"{algorithm}: adapter.kind={kind}, {why}")
    return kind


def set_rank(
    foreign: Foreign,
    key: str,
    alpha_key: str,
    *,
    rank: float | None = None,
    default_rank: int,
    default_alpha: float | None,
) -> None:
    """Set rank and alpha, or what they are there by default; `default_alpha` None: the rank.

    `rank` is the rank if it is not the key's value.
    """
    rank = foreign.number(key) if rank is None else rank
    alpha = foreign.number(alpha_key)
    chosen = default_rank if rank is None else int(rank)
    if rank is not None and chosen > FULL_RANK:
        how = "whole matrices there, the highest rank here"
        foreign.is_nearest(key, f"{rank:g}: adapter.rank={FULL_RANK}, {how}")
        alpha, default_alpha, chosen = None, None, FULL_RANK
    if chosen < 1:
        foreign.lacks(key, rank, "is no rank: what it is there by default is used")
        chosen = default_rank
    foreign.set("adapter.rank", chosen, key)
    if foreign.settings["adapter.kind"] == "oft":
        if alpha_key in foreign.values:
            foreign.stays(alpha_key, "a rotation has no alpha")
        return
    value = alpha or (chosen if default_alpha is None or alpha == 0 else default_alpha)
    if value > chosen * 100:
        how = f"{value:g}: adapter.alpha={chosen * 100}, the most of this rank"
        foreign.is_nearest(alpha_key, how)
        value = chosen * 100
    foreign.set("adapter.alpha", value, alpha_key)


def set_dropout(foreign: Foreign, setting: str, key: str) -> None:
    """Set one of the adapter's dropouts where it is on, and this kind of adapter has it."""
    kind, value = foreign.settings["adapter.kind"], foreign.on(key)
    if not value:
        return
    if kind == "oft" or (setting == "adapter.rank_dropout" and kind != "lora"):
        foreign.lacks(key, value, f"{kind} has no such dropout here")
    else:
        foreign.carry(setting, key)


def set_text_encoder(
    foreign: Foreign, *, trained: bool, key: str, rates: Sequence[tuple[str, float]] = ()
) -> None:
    """Set whether text encoders are trained, and at which rate; `rates` are by foreign key."""
    if trained and foreign.trains_text is False:
        why = "the text encoders of this base are not trained here"
        if key in foreign.values:
            foreign.lacks(key, foreign.values[key], why)
        else:
            how = f"are trained {THERE}, those of this base are not here"
            foreign.is_nearest("text encoders", how)
        note = "those of this base are not trained"
        trained, rates = False, ()
        foreign.set("adapter.text_encoder", False, note=note)
    else:
        foreign.set("adapter.text_encoder", trained, key)
    if not trained:
        return
    for number, (name, rate) in enumerate(rates):
        if foreign.settings.get("optimizer.name") == "prodigy":
            if name in foreign.values and name not in foreign.named:
                foreign.stays(name, "Prodigy finds one rate for everything")
        elif number == 0:
            foreign.carry("optimizer.text_encoder_learning_rate", name, rate)
        elif rate != rates[0][1]:
            foreign.lacks(name, rate, f"all text encoders have one rate, {rates[0][1]:g}")
        elif name in foreign.values and name not in foreign.named:
            foreign.stays(name, "is the rate of all text encoders")


def set_timesteps(
    foreign: Foreign,
    distribution: Distribution,
    key: str,
    *,
    mean: Sourced = (0.0, THERE),
    std: Sourced = (1.0, THERE),
    shift: Sourced = (1.0, THERE),
) -> None:
    """Set which timesteps are drawn, and for flow matching how they are shifted towards noise."""
    if distribution in ("sigmoid", "logit_normal"):
        distribution = "sigmoid" if (mean[0], std[0]) == (0.0, 1.0) else "logit_normal"
    foreign.set("objective.timestep_sampling", distribution, key)
    if distribution == "logit_normal":
        for setting, (value, name) in (("logit_mean", mean), ("logit_std", std)):
            foreign.carry(f"objective.{setting}", name, value)
    value, name = shift
    if foreign.is_flow is False:
        return
    if value == "resolution":
        foreign.set("objective.flow_shift", value, name)
    elif value > 0:
        foreign.carry("objective.flow_shift", name, value)
    else:
        foreign.lacks(name, value, "is no shift: 1 is none")


def shift_by_tokens(
    foreign: Foreign, *, low: float = 0.5, high: float = 1.15, most: int = 4096, token_px: int = 16
) -> float:
    """Return the shift at the imported resolution, exp of a line in tokens: `low` at 256, `high` at `most`.

    For bases whose own sampler, objective.flow_shift=resolution, shifts in another way.
    """
    side = foreign.settings.get("data.resolution", 1024)
    tokens = (side // token_px) ** 2
    return float(f"{math.exp(low + (high - low) * (tokens - 256) / (most - 256)):.5g}")


def set_timestep_range(foreign: Foreign, low: str, high: str) -> None:
    """Set the trained timesteps from keys of the first one and of the one after the last."""
    first, end = foreign.number(low), foreign.number(high)
    if first:
        foreign.carry("objective.min_timestep", low, int(first))
    if end:
        foreign.carry("objective.max_timestep", high, int(min(1000, end)) - 1)


def set_snr_weights(foreign: Foreign, key: str, *, gamma: float | None = None) -> None:
    """Set min-SNR weights where there is a gamma and the base is not trained by flow matching."""
    gamma = foreign.number(key) if gamma is None else gamma
    if gamma and foreign.is_flow:
        why = "flow matching has no signal-to-noise weights: it does nothing there"
        foreign.stays(key, why)
    elif gamma:
        foreign.set("objective.weighting", "min_snr", key)
        foreign.carry("objective.min_snr_gamma", key, gamma)
    if "objective.weighting" not in foreign.settings:
        foreign.set("objective.weighting", "none")


def set_huber(foreign: Foreign, delta: float, *keys: str) -> None:
    """Set the threshold of a Huber loss that is the same at all timesteps."""
    foreign.set("objective.huber_delta", min(1.0, delta), *keys)
    foreign.set("objective.huber_schedule", "constant")


def set_batch(
    foreign: Foreign, key: str, times_key: str, *, images: float | None = None, default: int = 1
) -> None:
    """Set the images per optimizer step: batch, `images` if it is not the key's value, times accumulation."""
    size = int((foreign.number(key, default) if images is None else images) or 1)
    rounds = int(foreign.number(times_key) or 1)
    names = [name for name in (key, times_key) if name in foreign.values]
    if size < 1 or rounds < 1:
        for name in names:
            foreign.lacks(name, foreign.values[name], "is no number of images")
        size, rounds, names = 1, 1, []
    foreign.set("train.batch_size", size * rounds, *names)
    if rounds > 1:
        foreign.set("memory.micro_batch", size, *names)


def set_precision(foreign: Foreign, key: str, *, missing: str) -> None:
    """Set the dtype of base and activations."""
    value = foreign.get(key, missing)
    try:
        precision = words(table_of("words")["dtypes"])(value)
    except ValueError as error:
        foreign.lacks(key, value, str(error))
        return
    if not (precision == "fp16" and foreign.is_flow):
        foreign.set("train.precision", precision, key)
    elif key in foreign.values:
        why = "what the plan chooses: bases of flow matching are not trained in fp16"
        foreign.is_nearest(key, f"{value}: train.precision is {why}")


def set_saves(foreign: Foreign, key: str | None, unit: Literal["steps", "epochs"]) -> None:
    """Set how often the LoRA is saved on the way."""
    every = foreign.number(key) if key else None
    if key and every and every > 0:
        foreign.carry(f"output.save_every_{unit}", key, every)


def settle(foreign: Foreign) -> None:
    """Settle what presets here do and other trainers do not unless it is asked for."""
    for key, value in (
        ("data.caption_dropout", 0.0),
        ("train.lower_on_plateau", False),
    ):
        if key not in foreign.settings:
            foreign.set(key, value, note="it is not there")


def expand(foreign: Foreign, key: str) -> dict[str, Any]:
    """Put the options of an option among the keys of the file, as `key.option`; return them.

    They are a table, or `name=value` words in a list or a text.
    """
    value = foreign.values.get(key)
    if isinstance(value, Mapping):
        pairs = dict(value)
    else:
        parts = value if isinstance(value, list) else split_words(str(value or ""))
        halves = (str(part).strip("\"' ").partition("=") for part in parts)
        pairs = {name.strip(): text.strip() for name, _, text in halves if name.strip()}
    if pairs:
        del foreign.values[key]
        foreign.values |= {f"{key}.{name}": option for name, option in pairs.items()}
    return pairs


def split_words(text: str) -> list[str]:
    """Return the words of a command line."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()

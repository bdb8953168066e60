"""How trainers say in different words what is trained and how: adapters, text encoders, optimizers, timesteps, loss.

Input: foreign keys, and where it takes more than reading them their values. Output: settings, or the nearest
with one line that says so. `trainers/optimizers.toml` is the table of the names of optimizers and schedules.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from lora_trainer.common.errors import RequestError
from lora_trainer.config.optimizers import SCHEDULE_FREE
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, meaning_of, shown, table_of

FULL_RANK = 1024
# A rank that stands for whole matrices.
WHOLE = 1e6


def set_model(foreign: Foreign, name: str, key: str) -> None:
    """Set how the base is trained, from the names of the trainer's table; raises RequestError for others."""
    models = foreign.table["models"]
    if name not in (*models["flow"], *models["noise"]):
        raise RequestError(
            f"{key}={shown(name)} is a model that is not trained here; docs/models.md lists those that are",
            fix=f"use a file for {', '.join((*models['noise'], *models['flow']))}",
        )
    foreign.is_flow = name in models["flow"]
    foreign.trains_text = not foreign.is_flow
    foreign.edits = name in models.get("edits", ())
    prompts = foreign.table.get("system_prompts", {})
    if name in prompts:
        foreign.set("base.system_prompt", prompts[name])


def set_precision(foreign: Foreign, key: str, *, missing: str) -> None:
    """Set the dtype of base and activations."""
    value = foreign.get(key, missing)
    try:
        precision = meaning_of(value, table_of("words")["dtypes"])
    except ValueError as error:
        foreign.lacks(key, value, str(error))
        return
    if not (precision == "fp16" and foreign.is_flow):
        foreign.set("train.precision", precision, key)
    elif key in foreign.values:
        why = "what the plan chooses: bases of flow matching are not trained in fp16"
        foreign.is_nearest(key, f"{value}: train.precision is {why}")


def set_batch(
    foreign: Foreign, key: str, times_key: str, *, images: float | None = None, default: int = 1
) -> None:
    """Set the images per optimizer step: batch, `images` if it is not the key's value, times accumulation."""
    size = int((foreign.number(key, default) if images is None else images) or 1)
    rounds = int(foreign.number(times_key) or 1)
    names = [name for name in (key, times_key) if name in foreign.values]
    if size < 1 or rounds < 1:
        for name in names:
            foreign.lacks(name, foreign.values[name], "is not a number of images")
        size, rounds, names = 1, 1, []
    foreign.set("train.batch_size", size * rounds, *names)
    if rounds > 1:
        foreign.set("memory.micro_batch", size, *names)


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


# ---- the adapter


def read_adapter(
    foreign: Foreign,
    *,
    spec: Mapping[str, Any] | None = None,
    kind: Sourced | None = None,
    rank: Sourced | None = None,
    alpha_key: str = "",
) -> None:
    """Set kind, rank and alpha from the keys that `[adapter]` of the trainer's table names, or `spec`.

    It has the keys of `kind`, `rank` and `alpha` with what they are there by default; without
    `default_alpha` it is the rank. The other arguments come in place of the table's.
    """
    spec = spec or foreign.table["adapter"]
    word, key = kind or (foreign.word(spec["kind"], "lora"), spec["kind"])
    another = ("lora", "adapters here are lora, loha, lokr and oft")
    ours, why = table_of("words")["kinds"].get(str(word).lower(), another)
    foreign.set("adapter.kind", ours, key)
    if why:
        foreign.is_nearest(key, f"{word}: adapter.kind={ours}, {why}")
    number, key = rank or (foreign.number(spec["rank"]), spec["rank"])
    alpha_key = alpha_key or spec.get("alpha", THERE)
    alpha, default_alpha = foreign.number(alpha_key), spec.get("default_alpha")
    chosen = spec["default_rank"] if number is None else int(number)
    if chosen > FULL_RANK:
        how = "whole matrices there, the highest rank here"
        foreign.is_nearest(key, f"{number:g}: adapter.rank={FULL_RANK}, {how}")
        alpha, default_alpha, chosen = None, None, FULL_RANK
    if chosen < 1:
        foreign.lacks(key, number, "is not a rank: the default of that trainer is used")
        chosen = spec["default_rank"]
    foreign.set("adapter.rank", chosen, key)
    if str(word).lower() == "tlora":
        _set_noise_rank(foreign, spec, rank=chosen)
    if ours == "oft":
        if alpha_key in foreign.values:
            foreign.stays(alpha_key, "a rotation has no alpha")
        return
    value = alpha or (chosen if default_alpha is None or alpha == 0 else default_alpha)
    if value > chosen * 100:
        how = f"{value:g}: adapter.alpha={chosen * 100}, the most of this rank"
        foreign.is_nearest(alpha_key, how)
        value = chosen * 100
    foreign.set("adapter.alpha", value, alpha_key)


def _set_noise_rank(foreign: Foreign, spec: Mapping[str, Any], *, rank: int) -> None:
    """Set the ranks of a T-LoRA at pure noise and how they rise, both 1 where the file does not say it."""
    least_key, power_key = spec.get("noise_rank", THERE), spec.get("noise_rank_power", THERE)
    least = int(foreign.number(least_key) or 1)
    foreign.set("adapter.noise_rank", min(least, rank), least_key)
    foreign.set("adapter.noise_rank_power", foreign.number(power_key) or 1.0, power_key)


def set_convolutions(foreign: Foreign, rank: Any, key: str, alpha: Any, alpha_key: str) -> None:
    """Set that convolutions larger than 1x1 are trained too, and their rank and alpha."""
    foreign.set("adapter.targets", "all", key)
    foreign.carry("adapter.conv_rank", key, rank)
    if foreign.settings["adapter.kind"] != "oft":
        foreign.carry("adapter.conv_alpha", alpha_key, alpha)


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
        foreign.set("adapter.text_encoder", False, note=note)
        return
    foreign.set("adapter.text_encoder", trained, key)
    for number, (name, rate) in enumerate(rates if trained else ()):
        is_settled = name not in foreign.values or name in foreign.named
        if foreign.settings.get("optimizer.name") == "prodigy":
            if not is_settled:
                foreign.stays(name, "Prodigy finds one rate for everything")
        elif number == 0:
            foreign.carry("optimizer.text_encoder_learning_rate", name, rate)
        elif rate != rates[0][1]:
            foreign.lacks(name, rate, f"all text encoders have one rate, {rates[0][1]:g}")
        elif not is_settled:
            foreign.stays(name, "is the rate of all text encoders")


# ---- timesteps and loss


def set_timesteps(
    foreign: Foreign,
    distribution: str,
    key: str,
    *,
    mean: Sourced = (0.0, THERE),
    std: Sourced = (1.0, THERE),
    shift: Sourced = (1.0, THERE),
) -> None:
    """Set which timesteps are drawn, and for flow matching how they are shifted towards noise.

    `distribution` is one of objective.timestep_sampling; sigmoid is logit_normal of mean 0 and deviation 1.
    """
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
        foreign.lacks(name, value, "shifts nothing: 1 is the neutral value")


def shift_by_tokens(
    foreign: Foreign,
    key: str,
    word: str = "",
    *,
    high: float = 1.15,
    most: int = 4096,
    token_px: int = 16,
) -> Sourced:
    """Return the shift at the imported resolution, exp of a line in tokens: 0.5 at 256, `high` at `most`.

    For bases whose own sampler, objective.flow_shift=resolution, shifts in another way; that is said of the
    key, and the `word` in it.
    """
    side = foreign.settings.get("data.resolution", 1024)
    tokens = (side // token_px) ** 2
    shift = float(f"{math.exp(0.5 + (high - 0.5) * (tokens - 256) / (most - 256)):.5g}")
    says = f"{word}: " if word else ""
    foreign.is_nearest(key, f"{says}{shift:g}, that of this resolution")
    return shift, key


def shift_by_size(foreign: Foreign, model: str, key: str) -> Sourced:
    """Return the shift by an image's size: that of the base's own sampler, or what that trainer has for the model.

    `[shifts_by_size]` of its table has the models of which it takes another: by the tokens of a side in pixels, with
    the numbers of FLUX.1, or the same at each size.
    """
    others = foreign.table["shifts_by_size"]
    if model in others.get("fixed", {}):
        return others["fixed"][model], key
    if model in others.get("token_px", {}):
        return shift_by_tokens(foreign, key, token_px=others["token_px"][model])
    return "resolution", key


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


# ---- optimizers and schedules

RATE = "optimizer.learning_rate"
WARMUP = "optimizer.warmup_fraction"
_TABLE = table_of("optimizers")
# Ours by name in lower case, letters and digits only; `why` it is only the nearest.
#
# `rate`: the same number, 1 (it finds the rate itself), or what the base's preset says. `decay` is the weight
# decay that the library has by default.
_OPTIMIZERS = {name: row for row in _TABLE["optimizers"] for name in row["names"].split()}


def _plain(name: str) -> str:
    """Return an optimizer's name without its library, letter case and marks."""
    word = re.sub(r"[^a-z0-9.]", "", name.lower().replace("bitsandbytes", "bnb"))
    return word if word in _OPTIMIZERS else re.sub(r"\.", "", word.rpartition(".")[2])


def read_optimizer(
    foreign: Foreign,
    *,
    name: Sourced | None = None,
    rate_keys: Sequence[str] = (),
    factor: float = 1,
) -> float | None:
    """Set optimizer, rate and options from the keys that the trainer's table names; return the rate.

    `[optimizer]` has the keys of its `name` and `rate` (the first that is on), which are `default` and
    `default_rate` where they are missing; `options` is what stands before the optimizer's own options, all or
    those in `option_names`, without those in `not_options`, `relative_step` that of Adafactor, which
    `is_relative` by default. `name` and `rate_keys` come in place of the table's; the rate is `factor` times
    what the file says, 1.0 where ours finds it itself, and the preset's where another is of no use, which is said.
    """
    spec = foreign.table["optimizer"]
    rate_key = foreign.first_on(*(rate_keys or spec["rate"])) or THERE
    rate = spec.get("default_rate") if rate_key == THERE else foreign.number(rate_key)
    if factor != 1 and rate:
        rate = float(f"{rate * factor:.6g}")
    word, key = name or (foreign.word(spec["name"], spec["default"]), spec["name"])
    source = key if key in foreign.values else THERE
    nearest = _OPTIMIZERS.get(_plain(word), _TABLE["unknown"])
    is_relative = foreign.flag(
        spec.get("relative_step", ""), default=spec.get("is_relative", False)
    )
    if nearest["ours"] == "adafactor" and is_relative:
        nearest = _TABLE["relative"]
    ours, why, kind = nearest["ours"], nearest.get("why", ""), nearest.get("rate", "same")
    how = f"optimizer.name={ours}, {why}"
    foreign.set("optimizer.name", ours, source)
    foreign.is_schedule_free = "schedulefree" in _plain(word)
    if kind == "preset" and rate_key != THERE:
        foreign.lacks(rate_key, rate, f"is for {word}; the preset's is used, or give {RATE}")
    elif kind == "one":
        factor = rate if rate is not None and rate >= 0.1 else 1.0
        foreign.set(RATE, factor, rate_key)
        how = f"optimizer.name={ours} at {RATE}={factor:g}, which {why}"
        if not why and rate is not None and rate != factor:
            as_ours = f"{rate:g}: {factor:g}, as {ours} finds the rate itself"
            foreign.is_nearest(rate_key, as_ours)
    elif kind == "same" and rate is not None:
        foreign.carry(RATE, rate_key, rate)
    if why:
        foreign.is_nearest(source, f"{shown(word)}: {how}")
    foreign.set("optimizer.weight_decay", nearest.get("decay", 0.0), source, note="(its default)")
    if "options" in spec:
        read_arguments(foreign, spec["options"], spec)
    return rate


def read_arguments(foreign: Foreign, prefix: str, spec: Mapping[str, Any] | None = None) -> None:
    """Set what an optimizer's own options say: the keys that begin with `prefix`, of `spec` those it names."""
    ours = str(foreign.settings.get("optimizer.name"))
    switches = {kind: set(text.split()) for kind, text in _TABLE["switches"].items()}
    options, fields_of = _TABLE["options"], _TABLE["options_of"]
    names, others = ((spec or {}).get(name, "") for name in ("option_names", "not_options"))
    for source, value in foreign.values.items():
        name = source.removeprefix(prefix)
        word, text = name.lower(), str(value).lower()
        is_meant = (not names or name in names.split()) and name not in others.split()
        if not source.startswith(prefix) or source in foreign.named or not is_meant:
            continue
        if value is None or value == "":
            foreign.stays(source, "is not given")
        elif word == "betas":
            parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
            if len(parts) < 2:
                foreign.lacks(source, value, "are not two numbers")
                continue
            for key, part in zip(("beta1", "beta2"), parts, strict=False):
                if ours in fields_of.get(key, (ours,)):
                    foreign.carry(f"optimizer.{key}", source, str(part).strip())
            foreign.named.add(source)
        elif word == "growth_rate" and text in ("inf", "infinity"):
            foreign.stays(source, "sets no limit, as here")
        elif word in options and ours in fields_of.get(word, (ours,)):
            foreign.carry(options[word], source, value)
        elif word in options:
            foreign.stays(source, f"{ours} has no such number")
        elif word in switches["computed"]:
            foreign.stays(source, "says how it is computed, not what")
        elif word in switches["always"] and text == "true":
            foreign.stays(source, "is always so")
        elif word in switches["never"] and text == "false":
            foreign.stays(source, "is never so")
        else:
            foreign.lacks(source, value, f"{ours} here has no such option")


def read_schedule(
    foreign: Foreign, *, steps: float | None = None, warmup: float | None = None
) -> None:
    """Set shape and warm-up of the learning rate from the keys that the trainer's table names.

    `[schedule]` has the `key` of its name (or several, of which the first that is on counts) and what that is
    by `default`, the keys of `warmup`, `cycles` and `power`. The `warmup`, in place of the table's, is in
    steps, below 1 a share of them.
    """
    spec = foreign.table["schedule"]
    warmup_key = spec.get("warmup", THERE)
    warmup = foreign.nonzero(warmup_key, 0) if warmup is None else warmup
    key = foreign.first_on(*spec["keys"]) or spec["keys"][-1]
    cycles = foreign.nonzero(spec.get("cycles", ""), 1)
    power = foreign.nonzero(spec.get("power", ""), spec.get("default_power", 1))
    name = foreign.word(key, spec["default"])
    word = name.lower().rpartition(".")[2].replace("-", "_")
    another = ("constant", "optimizer.schedule lists the schedules here, and takes module:Class")
    shape, why = _TABLE["schedules"].get(word, another)
    if foreign.is_schedule_free:  # there it takes the place of any schedule
        shape, why = "constant", ""
    if shape == "cosine_with_restarts" and cycles <= 1:
        shape = "cosine"
    foreign.set("optimizer.schedule", shape, key)
    if shape == "cosine_with_restarts":
        foreign.set("optimizer.schedule_cycles", round(cycles), spec["cycles"])
    if shape == "polynomial":
        foreign.set("optimizer.schedule_power", power, spec.get("power", key))
    if why:
        text = f"{name}: {shape}, {why.format(name=name)}"
        foreign.is_nearest(key if key in foreign.values else THERE, text)
    if foreign.is_schedule_free and foreign.settings["optimizer.name"] != SCHEDULE_FREE:
        warmup = 0
    if word == "constant" and not spec.get("constant_warms", True):
        warmup = 0
    set_warmup(foreign, warmup, warmup_key, steps)


def set_warmup(foreign: Foreign, warmup: float, key: str, steps: float | None) -> None:
    """Set the warm-up, in steps, below 1 a share of them; where `steps` is not known it is named."""
    if warmup < 1:
        foreign.set(WARMUP, min(0.9, max(0.0, warmup)), key)
    elif steps:
        foreign.set(WARMUP, float(f"{min(0.9, warmup / steps):.6g}"), key)
    else:
        foreign.set(WARMUP, 0.0, key)
        why = f"give {WARMUP}, a share of the steps"
        if foreign.beside is None:  # a page, to which the images come later
            why = "becomes a share of the steps as soon as these are known"
        foreign.lacks(key, warmup, why)

"""What trainers say in different words about the same things: adapters, timesteps, loss, text encoders.

Input: what a trainer's reader has made out, and the foreign keys it stands in. Output: settings, and one
line for each thing that is only approximated or missing here.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from lora_trainer.importing.foreign_settings import shown
from lora_trainer.importing.rules import PRECISIONS, THERE, Foreign, carry

Distribution = Literal["uniform", "sigmoid", "logit_normal", "mode", "cosmap"]
_KINDS: Mapping[str, tuple[str, str]] = {
    "lora": ("lora", ""),
    "locon": ("lora", ""),
    "standard": ("lora", ""),
    "dora": ("lora", ""),
    "loha": ("loha", ""),
    "lokr": ("lokr", ""),
    "oft": ("oft", ""),
    "oft_2": ("oft", ""),
    "diag-oft": ("oft", ""),
    "boft": ("oft", "one rotation in place of several, one after the other"),
    "dylora": ("lora", "all of its ranks are trained at once"),
    "lora_fa": ("lora", "both of its factors are trained"),
    "fa": ("lora", "both of its factors are trained"),
    "lorm": ("lora", "a LoRA of the base as it is"),
    "glora": ("lora", "the update has no part that goes with the base's weights"),
    "ia3": ("lora", "factors on the outputs have no equivalent"),
    "tlora": ("lora", "its rank is the same at all timesteps"),
    "abba": ("loha", "its two products are not started from the base's weights"),
    "full": ("lora", "whole matrices are not trained: choose a high adapter.rank"),
    "norm": ("lora", "norms are not trained"),
}
FULL_RANK = 1024


def set_kind(foreign: Foreign, algorithm: str, source: str) -> str:
    """Set the kind of adapter from its name there; return ours."""
    word = algorithm.lower()
    kind, why = _KINDS.get(word, ("lora", "adapters here are lora, loha, lokr and oft"))
    foreign.findings.set("adapter.kind", kind, source)
    if why:
        foreign.findings.is_nearest(source, f"{algorithm}: adapter.kind={kind}, {why}")
    return kind


def set_rank(
    foreign: Foreign,
    *,
    rank: float | None,
    source: str,
    alpha: float | None,
    alpha_source: str,
    default_rank: int,
    default_alpha: float | None,
) -> None:
    """Set rank and alpha, or what they are there by default; `default_alpha` None: the rank."""
    findings, kind = foreign.findings, foreign.findings.values.get("adapter.kind", "lora")
    rank_names = (source,) if source in foreign.values else ()
    chosen = default_rank if rank is None else int(rank)
    if chosen > FULL_RANK:
        how = "whole matrices there, the highest rank here"
        findings.is_nearest(source, f"{rank:g}: adapter.rank={FULL_RANK}, {how}")
        alpha, chosen = None, FULL_RANK
        default_alpha = None
    if chosen < 1:
        findings.lacks(source, rank, "is no rank: what it is there by default is used", off=())
        chosen = default_rank
    findings.set("adapter.rank", chosen, *rank_names, note="" if rank_names else THERE)
    alpha_names = (alpha_source,) if alpha_source in foreign.values else ()
    if kind == "oft":
        for name in alpha_names:
            findings.stays(name, "a rotation has no alpha")
        return
    value = alpha if alpha else (chosen if default_alpha is None or alpha == 0 else default_alpha)
    if value > chosen * 100:
        findings.is_nearest(
            alpha_source, f"{value:g}: adapter.alpha={chosen * 100}, the most of this rank"
        )
        value = chosen * 100
    findings.set("adapter.alpha", value, *alpha_names, note="" if alpha_names else THERE)


def set_dropout(foreign: Foreign, key: str, source: str, value: Any) -> None:
    """Set one of the adapter's dropouts where this kind of adapter has it."""
    findings, kind = foreign.findings, foreign.findings.values.get("adapter.kind", "lora")
    refused = kind == "oft" or (key == "adapter.rank_dropout" and kind != "lora")
    if refused:
        findings.lacks(source, value, f"{kind} has no such dropout here")
    elif value is None or value == "":
        findings.stays(source, "is not given")
    else:
        carry(findings, key, source, value)


def set_text_encoder(
    foreign: Foreign, *, trained: bool, source: str, rates: Sequence[tuple[str, float]] = ()
) -> None:
    """Set whether text encoders are trained, and at which rate; `rates` are by foreign key."""
    findings = foreign.findings
    names = (source,) if source in foreign.values else ()
    note = "" if names else THERE
    if trained and foreign.trains_text is False:
        if names:
            why = "the text encoders of this base are not trained here"
            findings.lacks(source, foreign.values[source], why)
        else:
            findings.is_nearest(
                "text encoders", f"are trained {THERE}, those of this base are not here"
            )
        trained, names, note = False, (), "those of this base are not trained"
    findings.set("adapter.text_encoder", trained, *names, note=note)
    for number, (name, rate) in enumerate(rates):
        if not trained:
            foreign.stay("text encoders are not trained", name)
        elif findings.values.get("optimizer.name") == "prodigy":
            foreign.stay("Prodigy finds one rate for everything", name)
        elif number == 0:
            carry(findings, "optimizer.text_encoder_learning_rate", name, rate)
        elif rate != rates[0][1]:
            findings.lacks(name, rate, f"all text encoders have one rate, {rates[0][1]:g}")
        else:
            foreign.stay("is the rate of all text encoders", name)


def set_timesteps(
    foreign: Foreign,
    distribution: Distribution,
    source: str,
    *,
    mean: float = 0.0,
    mean_source: str = THERE,
    std: float = 1.0,
    std_source: str = THERE,
    shift: float | Literal["resolution"] = 1.0,
    shift_source: str = THERE,
) -> None:
    """Set which timesteps are drawn, and for flow matching how they are shifted towards noise."""
    findings = foreign.findings
    if distribution in ("sigmoid", "logit_normal"):
        distribution = "sigmoid" if (mean, std) == (0.0, 1.0) else "logit_normal"
    _set(foreign, "objective.timestep_sampling", distribution, source)
    if distribution == "logit_normal":
        _carry(foreign, "objective.logit_mean", mean_source, mean)
        _carry(foreign, "objective.logit_std", std_source, std)
    if foreign.is_flow is False:
        foreign.stay("is for flow matching", shift_source)
    elif shift == "resolution":
        _set(foreign, "objective.flow_shift", shift, shift_source)
    elif shift > 0:
        _carry(foreign, "objective.flow_shift", shift_source, shift)
    else:
        findings.lacks(shift_source, shift, "is no shift: 1 is none")


def shift_by_tokens(
    foreign: Foreign, *, low: float = 0.5, high: float = 1.15, most: int = 4096, token_px: int = 16
) -> float:
    """Return the shift at the imported resolution, exp of a line in tokens: `low` at 256, `high` at `most`.

    For bases whose own sampler, objective.flow_shift=resolution, shifts in another way.
    """
    side = foreign.findings.values.get("data.resolution", 1024)
    tokens = (side // token_px) ** 2
    return float(f"{math.exp(low + (high - low) * (tokens - 256) / (most - 256)):.5g}")


def set_timestep_range(foreign: Foreign, low: str, high: str) -> None:
    """Set the trained timesteps from keys of the first one and of the one after the last."""
    first, end = foreign.number(low), foreign.number(high)
    if first:
        carry(foreign.findings, "objective.min_timestep", low, int(first))
    if end:
        carry(foreign.findings, "objective.max_timestep", high, int(min(1000, end)) - 1)
    foreign.stay("is not given", low, high)


def set_snr_weights(foreign: Foreign, gamma: float | None, source: str) -> None:
    """Set min-SNR weights where there is a gamma and the base is not trained by flow matching."""
    findings = foreign.findings
    if gamma and foreign.is_flow:
        findings.stays(
            source, "flow matching has no signal-to-noise weights: it does nothing there"
        )
        gamma = None
    if gamma:
        findings.set("objective.weighting", "min_snr", source)
        carry(findings, "objective.min_snr_gamma", source, gamma)
        return
    foreign.stay("is off there", source)
    if "objective.weighting" not in findings.values:
        findings.set("objective.weighting", "none", note=THERE)


def set_batch(
    foreign: Foreign, *, size: float | None, source: str, times: float | None, times_source: str
) -> None:
    """Set the images per optimizer step: batch times accumulation."""
    findings = foreign.findings
    images, rounds = int(size or 1), int(times or 1)
    names = [name for name in (source, times_source) if name in foreign.values]
    if images < 1 or rounds < 1:
        for name in names:
            findings.lacks(name, foreign.values[name], "is no number of images")
        images = rounds = 1
        names = []
    findings.set("train.batch_size", images * rounds, *names, note="" if names else THERE)
    if rounds > 1:
        findings.set("memory.micro_batch", images, *names)


def set_precision(foreign: Foreign, source: str, *, missing: str) -> None:
    """Set the dtype of base and activations."""
    value = foreign.get(source, missing)
    try:
        precision = PRECISIONS(value)
    except ValueError as error:
        foreign.findings.lacks(source, value, str(error))
        return
    if precision == "fp16" and foreign.is_flow:
        why = "what the plan chooses: bases of flow matching are not trained in fp16"
        if source in foreign.values:
            foreign.findings.is_nearest(source, f"{value}: train.precision is {why}")
        return
    foreign.findings.set("train.precision", precision, *foreign.there(source))


def set_saves(
    foreign: Foreign, *, every: float | None, source: str, unit: Literal["steps", "epochs"]
) -> None:
    """Set how often the LoRA is saved on the way."""
    if not every or every < 0:
        foreign.stay("is not given", source)
        return
    carry(foreign.findings, f"output.save_every_{unit}", source, every)


def settle(foreign: Foreign) -> None:
    """Settle what presets here do and other trainers do not unless it is asked for."""
    for key, value in (
        ("data.caption_dropout", 0.0),
        ("train.lower_on_plateau", False),
        ("train.tighten_on_spike", False),
    ):
        if key not in foreign.findings.values:
            foreign.findings.set(key, value, note="it is not there")


def as_pairs(value: Any) -> dict[str, Any]:
    """Return the options of an option: a table, `name=value` words in a list or a text."""
    if isinstance(value, Mapping):
        return dict(value)
    parts = value if isinstance(value, list) else _words(str(value or ""))
    pairs = (str(part).strip("\"' ").partition("=") for part in parts)
    return {name.strip(): text.strip() for name, _, text in pairs if name.strip()}


def _words(text: str) -> list[str]:
    """Return the words of a command line."""
    try:
        return shlex.split(text)
    except ValueError:
        return text.split()


def refused_model(model_name: str, source: str) -> str:
    """Return why a file is refused that trains a model of another kind."""
    return f"{source}={shown(model_name)} is a model that is not trained here; docs/models.md lists those that are"


def _set(foreign: Foreign, key: str, value: Any, source: str) -> None:
    in_file = source in foreign.values
    foreign.findings.set(key, value, *((source,) if in_file else ()), note="" if in_file else THERE)


def _carry(foreign: Foreign, key: str, source: str, value: float) -> None:
    if source in foreign.values:
        carry(foreign.findings, key, source, value)
    else:
        foreign.findings.set(key, value, note=THERE)

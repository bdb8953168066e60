"""Other trainers' optimizers and learning-rate schedules, by the many names they have.

Input: a name with its rate and its own options. Output: ours, or the nearest with a rate that suits it and
one line that says so. Facts of the libraries: torch, bitsandbytes, dadaptation, prodigyopt, schedulefree,
lion-pytorch, optimi, torchao, quanto, pytorch-optimizer, adv_optm.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.config.config import SCHEDULE_FREE, OptimizerName
from lora_trainer.importing.foreign_settings import shown
from lora_trainer.importing.rules import THERE, Foreign, as_number, carry

RATE = "optimizer.learning_rate"
Rate = Literal["same", "one", "preset"]


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Our optimizer for another; `why` is empty for the same one.

    `rate`: the same number, 1 (it finds the rate itself), or what the base's preset says. `decay` is the
    weight decay that the library has by default.
    """

    ours: OptimizerName
    why: str = ""
    rate: Rate = "same"
    decay: float = 0.0


_FINDS = "also finds its rate itself"
_SIGNS = "also steps by the sign"
_ADAMW = Nearest(ours="adamw", decay=0.01)
_ADAMW8 = Nearest(ours="adamw8bit", decay=0.01)
_PAGED8 = Nearest(ours="paged_adamw8bit", decay=0.01)
_LION = Nearest(ours="lion")
_PRODIGY = Nearest(ours="prodigy", rate="one")
_FREE = Nearest(ours="schedulefree_adamw", decay=0.0)


def _like(base: Nearest, why: str, *, rate: Rate | None = None) -> Nearest:
    return Nearest(ours=base.ours, why=why, rate=rate or base.rate, decay=base.decay)


_DECAY = "AdamW with its weight decay apart from the gradient"
_STEPS = "steps of another size: the rate is the preset's for AdamW"
_GROUPS: Mapping[str, Nearest] = {
    "adamw torchadamw adamwtorch adamwfused adamwbf16 adamwoptimi optimiadamw torchaoadamw pagedadamw "
    "pagedadamw32bit bnbadamw bnbadamwpaged adamw32bit": _ADAMW,
    "adamw8bit bnbadamw8bit aoadamw8bit adamw8bitkahan torchaoadamw8bit adamw8bitao adamwfp8 aoadamwfp8 "
    "torchaoadamwfp8": _ADAMW8,
    "pagedadamw8bit bnbadamw8bitpaged": _PAGED8,
    "aoadamw4bit adamw4bit torchaoadamw4bit cpuoffloadadamw4bit": _like(
        _ADAMW8, "its state in 8 bits, not 4"
    ),
    "adam optimiadam bnbadam": _like(_ADAMW, _DECAY),
    "adam8bit bnbadam8bit": _like(_ADAMW8, _DECAY),
    "stableadamw stableadamwunfused optimistableadamw adamwadv adamwkahan cadamw cautiousadamw cpuadamw "
    "adamwscaled adamc": _like(_ADAMW, "AdamW without what that variant adds"),
    "ranger optimiranger radam optimiradam nadam adamax adabelief adopt adoptadv yogi aida adan optimiadan "
    "lamb lamb8bit bnblamb lars lars8bit amos fromage gmlion simplifiedademamix grokadamw sophia sophiah "
    "soap shampoo kron psgd adamuon adamuonadv compass farmscrop farmscropv2 lapao aliceadam": _like(
        _ADAMW, _STEPS, rate="preset"
    ),
    "ademamix bnbademamix ademamix32bit": _like(
        _ADAMW, "AdamW without the second, slower momentum"
    ),
    "ademamix8bit bnbademamix8bit bnbademamixpaged bnbademamix8bitpaged pagedademamix8bit "
    "pagedademamix": _like(_ADAMW8, "AdamW without the second, slower momentum"),
    "lion lionpytorch bnblion optimilion": _LION,
    "pagedlion bnblionpaged": _LION,
    "lion8bit bnblion8bit pagedlion8bit bnblion8bitpaged": Nearest(ours="lion8bit"),
    "lionadv clion cautiouslion": _like(_LION, "Lion without what that variant adds"),
    "tiger signsgd signsgdadv signum": _like(_LION, f"{_SIGNS}", rate="preset"),
    "prodigy prodigyopt": _PRODIGY,
    "prodigy8bit": _like(_PRODIGY, "its state in 32 bits"),
    "prodigyplus prodigyplusschedulefree prodigyschedulefree prodigyadv": _like(
        _PRODIGY, f"{_FINDS}"
    ),
    "dadaptation dadaptadam dadaptadampreprint dadaptadan dadaptadanip dadaptlion dadaptsgd dadaptadagrad "
    "dadaptadampaged dadaptadamw dadam dadaptsgd dadaptmomo dog ldog dowg momo mechanic automagic "
    "automagicsinkhorn dadaptation2": _like(_PRODIGY, f"{_FINDS}"),
    "adafactor transformersadafactor adafactorrms": Nearest(ours="adafactor"),
    "came came8bit": Nearest(ours="came"),
    "muon torchmuon muonadv optimimuon muonclip": Nearest(ours="muon"),
    "adamwschedulefree schedulefreeadamw adamwschedulefreepaper adamwschedulefreekahan "
    "adamwschedulefreelegacy": _FREE,
    "radamschedulefree schedulefreeradam": _like(
        _FREE, "AdamW in place of RAdam, give it a warm-up"
    ),
    "sgdschedulefree schedulefreesgd": _like(_FREE, _STEPS, rate="preset"),
    "sgd sgd8bit bnbsgd optimisgd sgdnesterov sgdnesterov8bit rmsprop rmsprop8bit adagrad adagrad8bit asgd "
    "rprop adadelta sparseadam lbfgs": _like(_ADAMW, _STEPS, rate="preset"),
}
OPTIMIZERS: Mapping[str, Nearest] = {
    name: nearest for names, nearest in _GROUPS.items() for name in names.split()
}
"""By name in lower case, letters and digits only."""


def plain(name: str) -> str:
    """Return an optimizer's name without its library, letter case and marks."""
    word = re.sub(r"[^a-z0-9.]", "", name.lower().replace("bitsandbytes", "bnb"))
    return word if word in OPTIMIZERS else re.sub(r"\.", "", word.rpartition(".")[2])


def set_optimizer(
    foreign: Foreign,
    name: str,
    source: str,
    *,
    rate: float | None,
    rate_source: str,
    relative_step: bool = False,
) -> OptimizerName:
    """Set the optimizer and its rate from a foreign name; return ours.

    `relative_step`: of Adafactor, which then makes its rate itself. The rate is set unless the nearest
    optimizer needs another: 1.0 where it finds it itself, else the preset's, which is said.
    """
    findings = foreign.findings
    nearest = OPTIMIZERS.get(plain(name))
    if nearest is None:
        nearest = _like(_ADAMW, f"is not known: AdamW, and {_STEPS}", rate="preset")
    if nearest.ours == "adafactor" and relative_step:
        why = "makes its rate of the step there (relative_step), here it has one: the preset's"
        nearest = _like(nearest, why, rate="preset")
    chosen = f"optimizer.name={nearest.ours}"
    findings.set("optimizer.name", nearest.ours, source)
    foreign.is_schedule_free = "schedulefree" in plain(name)
    if nearest.rate == "preset":
        findings.is_nearest(source, f"{shown(name)}: {chosen}, {nearest.why}")
        if rate_source != THERE:
            why = f"is for {name}; the preset's is used, or give {RATE}"
            findings.lacks(rate_source, rate, why)
    elif nearest.rate == "one":
        factor = rate if rate is not None and rate >= 0.1 else 1.0
        findings.set(RATE, factor, rate_source)
        if nearest.why:
            how = f"{chosen} at {RATE}={factor:g}, which {nearest.why}"
            findings.is_nearest(source, f"{shown(name)}: {how}")
        elif rate is not None and rate != factor:
            findings.is_nearest(
                rate_source, f"{rate:g}: {factor:g}, as {nearest.ours} finds the rate itself"
            )
    else:
        if rate is not None and carry(findings, RATE, rate_source, rate):
            pass
        if nearest.why:
            findings.is_nearest(source, f"{shown(name)}: {chosen}, {nearest.why}")
    findings.set("optimizer.weight_decay", nearest.decay, source, note="(its default)")
    return nearest.ours


_NUMBERS = {
    "weight_decay": "optimizer.weight_decay",
    "eps": "optimizer.epsilon",
    "epsilon": "optimizer.epsilon",
    "d_coef": "optimizer.prodigy_d_coef",
    "growth_rate": "optimizer.prodigy_growth_rate",
    "momentum": "optimizer.muon_momentum",
    "beta1": "optimizer.beta1",
    "beta2": "optimizer.beta2",
}
_OWN = {
    "eps": ("adamw", "adamw8bit", "paged_adamw8bit", "prodigy", "schedulefree_adamw", "muon"),
    "d_coef": ("prodigy",),
    "growth_rate": ("prodigy",),
    "momentum": ("muon",),
    "beta1": ("adamw", "adamw8bit", "paged_adamw8bit", "lion", "lion8bit", "came", "prodigy", "muon",
              "schedulefree_adamw"),
}  # fmt: skip
_ALWAYS = {
    "decouple",
    "decoupled",
    "use_bias_correction",
    "safeguard_warmup",
    "kahan_sum",
    "adam_w_mode",
}
_NEVER = {
    "relative_step",
    "scale_parameter",
    "warmup_init",
    "amsgrad",
    "maximize",
    "nesterov",
    "centered",
}
_MACHINE = {"fused", "foreach", "capturable", "stochastic_rounding", "is_paged", "min_8bit_size", "block_wise",
            "percentile_clipping", "optim_bits", "fused_back_pass", "differentiable", "log_every",
            "gradient_release", "quantization_group_size", "quantization_dtype", "slice_p", "use_triton",
            "fsdp_in_use", "split_groups", "split_groups_mean", "factored_fp32"}  # fmt: skip
_SAME_RESULT = "says how it is computed, not what"


def set_arguments(foreign: Foreign, prefix: str, arguments: Mapping[str, Any]) -> None:
    """Set what an optimizer's own options say; `prefix` stands before their names in the file."""
    findings, ours = foreign.findings, str(foreign.findings.values.get("optimizer.name"))
    for name, value in arguments.items():
        source = f"{prefix}{name}"
        word = name.lower()
        if value is None or value == "":
            findings.stays(source, "is not given")
        elif word == "betas":
            _set_betas(foreign, source, value, ours)
        elif word in _NUMBERS and ours in _OWN.get("eps" if word == "epsilon" else word, (ours,)):
            if word == "growth_rate" and str(value).lower() in ("inf", "infinity"):
                findings.stays(source, "is no limit, as here")
            else:
                carry(findings, _NUMBERS[word], source, value)
        elif word in _NUMBERS:
            findings.stays(source, f"{ours} has no such number")
        elif word in _MACHINE:
            findings.stays(source, _SAME_RESULT)
        elif word in _ALWAYS and str(value).lower() == "true":
            findings.stays(source, "is always so")
        elif word in _NEVER and str(value).lower() == "false":
            findings.stays(source, "is never so")
        else:
            findings.lacks(source, value, f"{ours} here has no such option")


def _set_betas(foreign: Foreign, source: str, value: Any, ours: str) -> None:
    parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    if len(parts) < 2:
        foreign.findings.lacks(source, value, "are no two numbers")
        return
    for key, part in zip(("beta1", "beta2"), parts, strict=False):
        if ours in _OWN.get(key, (ours,)):
            try:
                carry(foreign.findings, f"optimizer.{key}", source, as_number(str(part).strip()))
            except ValueError as error:
                foreign.findings.lacks(source, value, str(error))
    foreign.findings.named.add(source)


_SCHEDULES: Mapping[str, tuple[str, str]] = {
    "constant": ("constant", ""),
    "constant_with_warmup": ("constant", ""),
    "linear": ("linear", ""),
    "linear_with_warmup": ("linear", ""),
    "cosine": ("cosine", ""),
    "cosine_with_warmup": ("cosine", ""),
    "cosine_annealing": ("cosine", ""),
    "cosineannealinglr": ("cosine", ""),
    "cosine_with_restarts": ("cosine", "one fall in place of {cycles}: there are no restarts"),
    "cosine_with_hard_restarts": ("cosine", "one fall in place of {cycles}: there are no restarts"),
    "cosineannealingwarmrestarts": ("cosine", "one fall: there are no restarts"),
    "cosineannealingwarmuprestarts": ("cosine", "one fall: there are no restarts"),
    "cosine_with_min_lr": ("cosine", "it falls to nothing, not to a smallest rate"),
    "polynomial": ("linear", "a straight fall is a polynomial of power 1"),
    "rex": ("linear", "it falls later there: {name} keeps the rate higher than a straight line"),
    "rexannealingwarmrestarts": ("linear", "it falls later there, and there are no restarts"),
    "rawr": ("linear", "it falls later there, and there are no restarts"),
    "warmup_stable_decay": ("constant", "the fall at the end is left out"),
    "inverse_sqrt": ("linear", "it falls as 1 / sqrt(step) there"),
    "sine": ("cosine", "one fall in place of waves"),
    "piecewise_constant": ("constant", "the rate does not change in steps"),
    "step": ("constant", "the rate does not change in steps"),
    "reducelronplateau": ("constant", "see train.lower_on_plateau"),
    "adafactor": ("constant", "Adafactor's own schedule is left out"),
}


def set_schedule(
    foreign: Foreign,
    name: str,
    source: str,
    *,
    warmup: float,
    warmup_source: str,
    steps: float | None,
    cycles: float = 1,
    power: float = 1,
    always_warms: bool = True,
) -> None:
    """Set shape and warm-up of the learning rate; `warmup` is in steps, below 1 a share of them.

    `always_warms`: a schedule called constant has a warm-up there too.
    """
    findings = foreign.findings
    word = name.lower().rpartition(".")[2].replace("-", "_")
    if foreign.is_schedule_free:
        shape, why = "constant", ""  # there it takes the place of any schedule
        if findings.values["optimizer.name"] != SCHEDULE_FREE:
            warmup = 0
    else:
        shape, why = _SCHEDULES.get(
            word, ("constant", "schedules here are constant, linear and cosine")
        )
    if word.startswith("cosine_with") and "restarts" in word and cycles <= 1:
        why = ""
    if word == "polynomial":
        why = "" if power == 1 else f"a straight fall in place of power {power:g}"
    findings.set("optimizer.schedule", shape, source)
    if why:
        findings.is_nearest(
            source, f"{name}: {shape}, {why.format(cycles=f'{cycles:g}', name=name)}"
        )
    fraction = "optimizer.warmup_fraction"
    if not warmup or (word == "constant" and not always_warms):
        findings.set(fraction, 0.0, warmup_source)
    elif warmup < 1:
        findings.set(fraction, min(0.9, warmup), warmup_source)
    elif steps:
        findings.set(fraction, float(f"{min(0.9, warmup / steps):.6g}"), warmup_source)
    else:
        findings.lacks(warmup_source, warmup, f"give {fraction}, a share of the steps")
        findings.set(fraction, 0.0, warmup_source)

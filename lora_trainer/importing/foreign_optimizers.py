"""Other trainers' optimizers and learning-rate schedules, by the many names they have.

Input: the keys of a name, its rate and its own options. Output: ours, or the nearest with a rate that suits
it and one line that says so. `trainers/optimizers.toml` is the table of names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lora_trainer.config.declare import SCHEDULE_FREE, OptimizerName
from lora_trainer.importing.foreign import THERE, Foreign, Sourced, shown
from lora_trainer.importing.rules import table_of

RATE = "optimizer.learning_rate"
WARMUP = "optimizer.warmup_fraction"


@dataclass(frozen=True, kw_only=True)
class Nearest:
    """Our optimizer for another; `why` is empty for the same one.

    `rate`: the same number, 1 (it finds the rate itself), or what the base's preset says. `decay` is the
    weight decay that the library has by default.
    """

    ours: OptimizerName
    why: str = ""
    rate: Literal["same", "one", "preset"] = "same"
    decay: float = 0.0


_TABLE = table_of("optimizers")
OPTIMIZERS: Mapping[str, Nearest] = {
    name: Nearest(**{field: value for field, value in entry.items() if field != "names"})
    for entry in _TABLE["optimizers"]
    for name in entry["names"].split()
}
"""By name in lower case, letters and digits only."""
_OTHERS = {name: Nearest(**_TABLE[name]) for name in ("unknown", "relative")}


def plain(name: str) -> str:
    """Return an optimizer's name without its library, letter case and marks."""
    word = re.sub(r"[^a-z0-9.]", "", name.lower().replace("bitsandbytes", "bnb"))
    return word if word in OPTIMIZERS else re.sub(r"\.", "", word.rpartition(".")[2])


def read_optimizer(
    foreign: Foreign,
    table: Mapping[str, Any],
    *,
    name: Sourced | None = None,
    rate_keys: Sequence[str] = (),
    factor: float = 1,
) -> float | None:
    """Set optimizer, rate and options from the keys that a trainer's table names; return the rate.

    `[optimizer]` has the keys of its `name` and `rate` (the first that is on), which are `default` and
    `default_rate` where they are missing; `options` is what stands before the optimizer's own options, all or
    those in `option_names`, `relative_step` that of Adafactor, which `is_relative` by default. `name` and
    `rate_keys` come in place of the table's; the rate is `factor` times what the file says.
    """
    spec = table["optimizer"]
    rate_key = foreign.first_on(*(rate_keys or spec["rate"])) or THERE
    rate = spec.get("default_rate") if rate_key == THERE else foreign.number(rate_key)
    if factor != 1 and rate:
        rate = float(f"{rate * factor:.6g}")
    word, key = name or (foreign.word(spec["name"], spec["default"]), spec["name"])
    relative = foreign.flag(spec.get("relative_step", ""), default=spec.get("is_relative", False))
    _set_optimizer(foreign, str(word), key, rate, rate_key, relative_step=relative)
    if "options" in spec:
        read_arguments(foreign, spec["options"], spec.get("option_names", "").split())
    return rate


def _set_optimizer(
    foreign: Foreign, name: str, key: str, rate: float | None, rate_key: str, *, relative_step: bool
) -> None:
    """Set the optimizer and its rate, unless the nearest optimizer needs another.

    That is 1.0 where it finds it itself, else the preset's, which is said.
    """
    source = key if key in foreign.values else THERE
    nearest = OPTIMIZERS.get(plain(name), _OTHERS["unknown"])
    if nearest.ours == "adafactor" and relative_step:
        nearest = _OTHERS["relative"]
    how = f"optimizer.name={nearest.ours}, {nearest.why}"
    foreign.set("optimizer.name", nearest.ours, source)
    foreign.is_schedule_free = "schedulefree" in plain(name)
    if nearest.rate == "preset" and rate_key != THERE:
        why = f"is for {name}; the preset's is used, or give {RATE}"
        foreign.lacks(rate_key, rate, why)
    elif nearest.rate == "one":
        factor = rate if rate is not None and rate >= 0.1 else 1.0
        foreign.set(RATE, factor, rate_key)
        how = f"optimizer.name={nearest.ours} at {RATE}={factor:g}, which {nearest.why}"
        if not nearest.why and rate is not None and rate != factor:
            as_ours = f"{rate:g}: {factor:g}, as {nearest.ours} finds the rate itself"
            foreign.is_nearest(rate_key, as_ours)
    elif nearest.rate == "same" and rate is not None:
        foreign.carry(RATE, rate_key, rate)
    if nearest.why:
        foreign.is_nearest(source, f"{shown(name)}: {how}")
    foreign.set("optimizer.weight_decay", nearest.decay, source, note="(its default)")


def read_arguments(foreign: Foreign, prefix: str, names: Sequence[str] = ()) -> None:
    """Set what an optimizer's own options say: all keys that begin with `prefix`, or some of their names."""
    ours = str(foreign.settings.get("optimizer.name"))
    switches = {kind: set(text.split()) for kind, text in _TABLE["switches"].items()}
    options, fields_of = _TABLE["options"], _TABLE["options_of"]
    for name, value in foreign.under(prefix).items():
        source, word, text = f"{prefix}{name}", name.lower(), str(value).lower()
        if source in foreign.named or (names and name not in names):
            continue
        if value is None or value == "":
            foreign.stays(source, "is not given")
        elif word == "betas":
            _set_betas(foreign, source, value, ours)
        elif word == "growth_rate" and text in ("inf", "infinity"):
            foreign.stays(source, "is no limit, as here")
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


def _set_betas(foreign: Foreign, source: str, value: Any, ours: str) -> None:
    parts = value if isinstance(value, list) else str(value).strip("()[] ").split(",")
    if len(parts) < 2:
        foreign.lacks(source, value, "are no two numbers")
        return
    for key, part in zip(("beta1", "beta2"), parts, strict=False):
        if ours in _TABLE["options_of"].get(key, (ours,)):
            foreign.carry(f"optimizer.{key}", source, str(part).strip())
    foreign.named.add(source)


def read_schedule(
    foreign: Foreign, table: Mapping[str, Any], *, warmup: float = 0, steps: float | None = None
) -> None:
    """Set shape and warm-up of the learning rate from the keys that a trainer's table names.

    `[schedule]` has the `key` of its name (or several, of which the first that is on counts) and what that is
    by `default`, the keys of `cycles` and `power`. `warmup` is in steps, below 1 a share of them.
    """
    spec = table["schedule"]
    key = foreign.first_on(*spec["keys"]) or spec["keys"][-1]
    cycles = foreign.nonzero(spec.get("cycles", ""), 1)
    power = foreign.nonzero(spec.get("power", ""), spec.get("default_power", 1))
    name = foreign.word(key, spec["default"])
    word = name.lower().rpartition(".")[2].replace("-", "_")
    another = ("constant", "schedules here are constant, linear and cosine")
    shape, why = _TABLE["schedules"].get(word, another)
    if foreign.is_schedule_free:  # there it takes the place of any schedule
        shape, why = "constant", ""
    if word.startswith("cosine_with") and "restarts" in word and cycles <= 1:
        why = ""
    if word == "polynomial":
        why = "" if power == 1 else f"a straight fall in place of power {power:g}"
    foreign.set("optimizer.schedule", shape, key)
    if why:
        text = f"{name}: {shape}, {why.format(cycles=f'{cycles:g}', name=name)}"
        foreign.is_nearest(key if key in foreign.values else THERE, text)
    if foreign.is_schedule_free and foreign.settings["optimizer.name"] != SCHEDULE_FREE:
        warmup = 0
    if word == "constant" and not spec.get("constant_warms", True):
        warmup = 0
    set_warmup(foreign, warmup, spec.get("warmup", THERE), steps)


def set_warmup(foreign: Foreign, warmup: float, key: str, steps: float | None) -> None:
    """Set the warm-up, in steps, below 1 a share of them; where `steps` is not known it is named."""
    if warmup < 1:
        foreign.set(WARMUP, min(0.9, max(0.0, warmup)), key)
    elif steps:
        foreign.set(WARMUP, float(f"{min(0.9, warmup / steps):.6g}"), key)
    else:
        foreign.set(WARMUP, 0.0, key)
        foreign.lacks(key, warmup, f"give {WARMUP}, a share of the steps")

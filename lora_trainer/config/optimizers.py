"""Every optimizer as one row, and the settings of the optimizer and of the learning rate.

A row says where the class is and what it is given, how its learning rate compares with AdamW's, and what state it
keeps. Everything else about an optimizer follows from its row: the allowed names, the packages they need, the
learning rate that a plan makes of a preset's, the predicted memory, the table of docs/optimizers.md. Another
optimizer is one more row, then `python -m scripts.make`; any importable torch optimizer works without a row as
`module:Class`. No torch is imported here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, Field, WithJsonSchema

from lora_trainer.common.errors import did_you_mean
from lora_trainer.config.declare import (
    IMPORT_PATH,
    LORA,
    NOT_OFT,
    WITHOUT_NEW_TOKENS,
    BelowAll,
    BelowOne,
    Factor,
    Pattern,
    Portion,
    Schedule,
    Section,
    Share,
    enforced_setting,
    is_import_path,
    setting,
)

Shape = tuple[int, ...]
# The arguments of a class for these settings.
Arguments = Callable[["OptimizerSettings"], Mapping[str, Any]]
# Decay of CAME's average of how unsteady updates are (Luo et al. 2023, arXiv 2307.02047).
CAME_BETA3 = 0.9999


@dataclass(frozen=True, kw_only=True)
class OptimizerRow:
    """One optimizer: a class, its arguments, its learning rates and the size of its states."""

    path: str
    """Its class as `module:Class`."""
    arguments: Arguments
    """Arguments of the class besides the groups."""
    published: str = ""
    """Where its rule was published, for readers."""
    package: str = ""
    """Its library as pip names it; "": torch."""
    group_arguments: Arguments = lambda _: {}
    """Arguments that are put into each group instead."""
    has_beta1: bool = True
    """Whether `optimizer.beta1` reaches it."""
    has_epsilon: bool = True
    """Whether `optimizer.epsilon` reaches it."""
    made_anew: bool = False
    """Whether it is made again after its states were allocated.

    A step without gradients allocates them. Some optimizers keep traces of that step which no other does."""
    matrices_apart: bool = False
    """Whether its groups say if they hold matrices (`use_muon`)."""
    shared_memory_path: str = ""
    """The class for devices without memory of their own, where nothing can be paged."""
    rate_factor: float = 1.0
    """Its learning rate as a multiple of AdamW's."""
    rate: float | None = None
    """Its fixed rate, if the optimizer finds the learning rate itself."""
    why: str = ""
    """The reason for the rate, in words."""
    beta2: float | None = None
    """The second decay, if it differs from AdamW's."""
    # Of optimizers whose steps are as long as AdamW's, as in use for adapters.
    usual_rates: tuple[float, float] = (1e-6, 2e-2)
    """A rate outside this range gets a warning."""
    states: int = 0
    """fp32 states for each trained tensor, of the tensor's size."""
    states_8bit: int = 0
    """8-bit states for each trained tensor, of the tensor's size."""
    is_paged: bool = False
    """Whether the driver moves its states to host memory while the GPU is full."""
    state_elements: Callable[[Shape], Sequence[int]] | None = None
    """Elements of each fp32 state by the tensor's shape, if the states do not have the tensor's size."""


def _rated(settings: OptimizerSettings) -> dict[str, Any]:
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "weight_decay": settings.weight_decay,
    }


def _like_adam(settings: OptimizerSettings) -> dict[str, Any]:
    return {**_rated(settings), "eps": settings.epsilon}


def _came(settings: OptimizerSettings) -> dict[str, Any]:
    return {**_rated(settings), "betas": (settings.beta1, settings.beta2, CAME_BETA3)}


def _adafactor(settings: OptimizerSettings) -> dict[str, Any]:
    """At the learning rate of the settings and without momentum.

    torch's own Adafactor scales each step by the norm of the tensor, which is zero for a LoRA's `up`.
    """
    return {
        **_rated(settings),
        "betas": (None, settings.beta2),
        "scale_parameter": False,
        "relative_step": False,
    }


def _muon(settings: OptimizerSettings) -> dict[str, Any]:
    """AdamW is for tensors that are not matrices; torch's own Muon refuses them."""
    return {
        "momentum": settings.muon_momentum,
        "weight_decay": settings.weight_decay,
        "use_adjusted_lr": True,
        "adamw_betas": (settings.beta1, settings.beta2),
        "adamw_eps": settings.epsilon,
        "adamw_wd": settings.weight_decay,
    }


def _prodigy(settings: OptimizerSettings) -> dict[str, Any]:
    """As its authors advise for diffusion models."""
    return {
        "lr": settings.learning_rate,
        "betas": (settings.beta1, settings.beta2),
        "eps": settings.epsilon,
        "d_coef": settings.prodigy_d_coef,
        "growth_rate": settings.prodigy_growth_rate or float("inf"),
        "use_bias_correction": True,
        "safeguard_warmup": settings.warmup_fraction > 0,
    }


def _rows_and_columns(shape: Shape) -> tuple[int, ...]:
    """Return the elements of a factored second moment: rows and columns; a vector's is not factored."""
    if len(shape) < 2:
        return shape
    # As in Adafactor's code: the last two dimensions are factored, a convolution's others are kept.
    *others, rows, columns = shape
    return (math.prod(others) * rows, math.prod(others) * columns)


def _came_states(shape: Shape) -> tuple[int, ...]:
    """Second moments of the updates and, for matrices only, of their unsteadiness."""
    return (math.prod(shape), *_rows_and_columns(shape) * (1 if len(shape) < 2 else 2))


_BY_SIGN = "steps by the sign alone, so its rate is a fifth of AdamW's"
OPTIMIZERS: Mapping[str, OptimizerRow] = {
    "adamw": OptimizerRow(
        path="torch.optim:AdamW",
        published="Loshchilov and Hutter 2017, arXiv 1711.05101",
        arguments=_like_adam,
        states=2,
    ),
    "adamw8bit": OptimizerRow(
        path="lora_trainer.training.queued_adamw8bit:QueuedAdamW8bit",
        published="Dettmers et al. 2021, arXiv 2110.02861",
        package="bitsandbytes",
        arguments=_like_adam,
        states_8bit=2,
    ),
    "paged_adamw8bit": OptimizerRow(
        path="bitsandbytes.optim:PagedAdamW8bit",
        published="Dettmers et al. 2021, arXiv 2110.02861",
        # A device that shares the host's memory keeps all state there anyway, and the same numbers are computed.
        shared_memory_path="lora_trainer.training.queued_adamw8bit:QueuedAdamW8bit",
        package="bitsandbytes",
        arguments=_like_adam,
        states_8bit=2,
        is_paged=True,
    ),
    "lion": OptimizerRow(
        path="bitsandbytes.optim:Lion",
        published="Chen et al. 2023, arXiv 2302.06675",
        package="bitsandbytes",
        arguments=_rated,
        has_epsilon=False,
        states=1,
        rate_factor=0.2,
        why=_BY_SIGN,
        beta2=0.99,
        usual_rates=(1e-7, 4e-3),
    ),
    "lion8bit": OptimizerRow(
        path="bitsandbytes.optim:Lion8bit",
        published="Chen et al. 2023, arXiv 2302.06675",
        package="bitsandbytes",
        arguments=_rated,
        has_epsilon=False,
        states_8bit=1,
        rate_factor=0.2,
        why=_BY_SIGN,
        beta2=0.99,
        usual_rates=(1e-7, 4e-3),
    ),
    "adafactor": OptimizerRow(
        path="pytorch_optimizer:AdaFactor",
        published="Shazeer and Stern 2018, arXiv 1804.04235",
        package="pytorch-optimizer",
        arguments=_adafactor,
        has_beta1=False,
        has_epsilon=False,
        state_elements=_rows_and_columns,
    ),
    "came": OptimizerRow(
        path="pytorch_optimizer:CAME",
        published="Luo et al. 2023, arXiv 2307.02047",
        package="pytorch-optimizer",
        arguments=_came,
        has_epsilon=False,
        rate_factor=0.1,
        why="steps ten times as far as AdamW at first, so its rate is a tenth",
        usual_rates=(1e-7, 2e-3),
        state_elements=_came_states,
    ),
    # With the rates of Liu et al.
    "muon": OptimizerRow(
        path="pytorch_optimizer:Muon",
        published="Jordan 2024; Liu et al. 2025, arXiv 2502.16982",
        package="pytorch-optimizer",
        arguments=_muon,
        matrices_apart=True,
        rate_factor=2.0,
        why="steps a fifth of its rate, AdamW about twice that, so its rate is doubled",
        usual_rates=(1e-6, 4e-2),
        state_elements=lambda shape: (math.prod(shape),) * (1 if len(shape) == 2 else 2),
    ),
    # One of its states is the initial weights; it takes no memory where they are zero, as `up` of a new LoRA is, but is
    # counted all the same.
    "prodigy": OptimizerRow(
        path="prodigyopt:Prodigy",
        published="Mishchenko and Defazio 2023, arXiv 2306.06101",
        package="prodigyopt",
        arguments=_prodigy,
        # Set per group, because Prodigy prints it when it is an argument.
        group_arguments=lambda settings: {"weight_decay": settings.weight_decay},
        states=4,
        rate=1.0,
        why="finds the learning rate itself, and this setting multiplies it",
        usual_rates=(0.1, 10.0),
    ),
    "schedulefree_adamw": OptimizerRow(
        path="schedulefree:AdamWScheduleFree",
        published="Defazio et al. 2024, arXiv 2405.15682",
        package="schedulefree",
        arguments=_like_adam,
        states=2,
        usual_rates=(1e-6, 1e-1),
    ),
}
SCHEDULE_FREE = "schedulefree_adamw"


def row_of(name: str) -> OptimizerRow:
    """Return the row of an optimizer; one that is given as `module:Class` gets its learning rate and its options."""
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    return OptimizerRow(
        path=name,
        arguments=lambda settings: {"lr": settings.learning_rate, **settings.options},
        made_anew=True,
        usual_rates=(0.0, math.inf),
    )


def _known(name: str) -> str:
    if name not in OPTIMIZERS and not is_import_path(name):
        near = did_you_mean(name, tuple(OPTIMIZERS))
        names = ", ".join(OPTIMIZERS)
        raise ValueError(f"not an optimizer: use {names} or module:Class.{near}")
    return name


OptimizerName = Annotated[
    str,
    AfterValidator(_known),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": list(OPTIMIZERS), "type": "string"},
                {"pattern": IMPORT_PATH, "type": "string"},
            ]
        }
    ),
]
LearningRate = Annotated[float, Field(gt=0.0, le=10.0)]
OF = "optimizer.name"
SCHEDULE = "optimizer.schedule"


def _names(fits: Callable[[OptimizerRow], bool]) -> tuple[str, ...]:
    return tuple(name for name, row in OPTIMIZERS.items() if fits(row))


FINDS_RATE = {OF: _names(lambda row: row.rate is not None)}
NOT_SCHEDULE_FREE = {OF: (SCHEDULE_FREE,)}


class OptimizerSettings(Section):
    name: OptimizerName = setting(
        "adamw",
        "how it learns: adamw is usual, prodigy finds its own rate, 8bit needs less memory",
        label="Optimizer",
        detail="paged: in RAM when it must; `module:Class` is one of a package of yours",
        headline=True,
        resume="forbidden",
        works_anywhere="adamw",
        packages={name: row.package for name, row in OPTIMIZERS.items() if row.package},
    )
    options: dict[str, bool | int | float | str | list[float] | None] = setting(
        {},
        "arguments of an optimizer of your own",
        detail="One given as `module:Class`, which gets no others but the learning rate",
    )
    learning_rate: LearningRate = setting(
        1e-4,
        "how fast it learns: too low learns too little, too high ruins the images",
        detail="The highest rate; presets are for AdamW and converted for other optimizers",
        headline=True,
        kohya=("ss_learning_rate", "ss_unet_lr"),
    )
    text_encoder_learning_rate: LearningRate | None = enforced_setting(
        None,
        "learning rate of the text encoders; none: half of the other one, with prodigy the same",
        only_for={"adapter.text_encoder": (True,)},
        not_for=FINDS_RATE,
        resume="forbidden",
    )
    new_tokens_learning_rate: LearningRate | None = enforced_setting(
        None,
        "learning rate of the new tokens; none: ten times the other one, with prodigy the same",
        not_for={**WITHOUT_NEW_TOKENS, **FINDS_RATE},
        resume="forbidden",
    )
    learning_rate_pattern: dict[Pattern, Annotated[float, Field(ge=0, le=1000)]] = setting(
        {},
        "factor on the rate of single layers, by regular expressions on their names; 0: frozen",
        detail="The first that fits counts",
        resume="forbidden",
    )
    lora_plus_ratio: Annotated[float, Field(ge=1.0, le=1000.0)] = enforced_setting(
        1.0,
        "how much faster the second half of each LoRA layer learns (LoRA+); 1: both alike",
        detail="Learning rate of `up` over that of `down`",
        source="Hayou et al. 2024, arXiv 2402.12354",
        only_for=LORA,
        not_for=FINDS_RATE,
        resume="forbidden",
    )
    beta1: BelowOne = setting(
        0.9,
        "how much earlier steps steer the next one",
        detail="Decay of the first moment",
        not_for={OF: _names(lambda row: not row.has_beta1)},
    )
    beta2: BelowOne = setting(
        0.999,
        "how long the size of earlier steps is remembered",
        detail="Decay of the second moment; presets set 0.99 for lion",
    )
    epsilon: Portion = setting(
        1e-8,
        "a tiny number against dividing by zero",
        detail="Added to the denominator",
        not_for={OF: _names(lambda row: not row.has_epsilon)},
    )
    weight_decay: Share = setting(
        0.01,
        "pulls the LoRA back a little in each step, against learning images by heart",
        detail="Decoupled, as AdamW has it",
    )
    muon_momentum: BelowOne = setting(
        0.95,
        "how much earlier steps steer the next one with muon",
        detail="Nesterov momentum, for matrices",
        only_for={OF: ("muon",)},
    )
    prodigy_d_coef: Factor = setting(
        1.0,
        "factor on the rate that prodigy finds by itself; 0.5 and 2 are usual",
        only_for={OF: ("prodigy",)},
    )
    prodigy_growth_rate: Annotated[float, Field(gt=1.0, le=1000.0)] | None = setting(
        None,
        "how fast prodigy's rate may grow in each step, such as 1.02; none: no limit",
        only_for={OF: ("prodigy",)},
    )
    max_weight_norm: Annotated[float, Field(gt=0.0, le=1000.0)] | None = enforced_setting(
        None,
        "how strong each layer may get; 1 is usual; none: no limit",
        detail="Its update is scaled back to this norm after every step (scale_weight_norms)",
        not_for={**NOT_OFT, **NOT_SCHEDULE_FREE, "adapter.dora": (True,)},
        kohya=("ss_scale_weight_norms",),
    )
    schedule: Schedule = setting(
        "cosine",
        "how the learning rate changes after the warm-up",
        detail="`module:Class` is one of a package of yours",
        not_for=NOT_SCHEDULE_FREE,
        kohya=("ss_lr_scheduler",),
    )
    schedule_options: dict[str, bool | int | float | str | list[float] | None] = setting(
        {},
        "arguments of a schedule of your own",
        detail="One given as `module:Class`; the number of steps is filled in where it needs it",
    )
    warmup_fraction: BelowAll = setting(
        0.05,
        "share of the steps at the start in which the learning rate rises; with one_cycle 0.3 is usual",
    )
    schedule_cycles: Annotated[int, Field(ge=1, le=1000)] = setting(
        1,
        "how often the learning rate falls with cosine_with_restarts",
        only_for={SCHEDULE: ("cosine_with_restarts",)},
    )
    schedule_power: Annotated[float, Field(gt=0.0, le=10.0)] = setting(
        1.0,
        "shape of polynomial: 1 falls straight, 2 fast at first, 0.5 fast at the end",
        only_for={SCHEDULE: ("polynomial",)},
    )
    decay_fraction: Portion = setting(
        0.2,
        "share of the steps at the end in which the rate falls with warmup_stable_decay",
        only_for={SCHEDULE: ("warmup_stable_decay",)},
    )

    @property
    def text_encoder_scale(self) -> float:
        """The factor on the learning rate of the text encoders."""
        if self.text_encoder_learning_rate is not None:
            return self.text_encoder_learning_rate / self.learning_rate
        return 1.0 if row_of(self.name).rate is not None else 0.5

    @property
    def new_tokens_scale(self) -> float:
        """The factor on the learning rate of the new tokens."""
        if self.new_tokens_learning_rate is not None:
            return self.new_tokens_learning_rate / self.learning_rate
        return 1.0 if row_of(self.name).rate is not None else 10.0

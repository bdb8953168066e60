"""The settings of the optimizer: its name, learning rate, schedule and own parameters.

`only_for` and `not_for` mark the settings that an optimizer does not have. `planning/optimizer_facts.py` knows
the optimizers' libraries and converts a preset's learning rate to each of them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.config.declare import (
    LORA,
    NOT_OFT,
    NOT_SCHEDULE_FREE,
    WITHOUT_NEW_TOKENS,
    OptimizerName,
    Pattern,
    Section,
    setting,
)

OF = "optimizer.name"


class OptimizerSettings(Section):
    name: OptimizerName = setting(
        "adamw",
        "update rule; 8bit: optimizer state in 8 bits; paged: state moves to host memory when the GPU is full",
        headline=True,
    )
    learning_rate: float = setting(
        1e-4,
        "peak learning rate; presets are for AdamW and converted for other optimizers",
        gt=0.0,
        le=10.0,
        headline=True,
    )
    text_encoder_learning_rate: float | None = setting(
        None,
        "peak learning rate of the text encoders; none: half of learning_rate, with prodigy equal to it",
        gt=0.0,
        le=10.0,
        only_for={"adapter.text_encoder": (True,)},
        not_for={OF: ("prodigy",)},
        enforced=True,
    )
    new_tokens_learning_rate: float | None = setting(
        None,
        "peak learning rate of the new tokens; none: ten times learning_rate, with prodigy equal to it",
        gt=0.0,
        le=10.0,
        not_for={**WITHOUT_NEW_TOKENS, OF: ("prodigy",)},
        enforced=True,
    )
    learning_rate_pattern: dict[Pattern, Annotated[float, Field(ge=0, le=1000)]] = setting(
        {},
        "factor on the learning rate by regular expression on the module name, first match wins; 0: frozen",
    )
    lora_plus_ratio: float = setting(
        1.0,
        "learning rate of `up` over that of `down` (Hayou et al. 2024, arXiv 2402.12354)",
        ge=1.0,
        le=1000.0,
        only_for=LORA,
        not_for={OF: ("prodigy",)},
        enforced=True,
    )
    beta1: float = setting(
        0.9, "decay of the first moment", ge=0.0, lt=1.0, not_for={OF: ("adafactor",)}
    )
    beta2: float = setting(
        0.999, "decay of the second moment; presets set 0.99 for lion", ge=0.0, lt=1.0
    )
    epsilon: float = setting(
        1e-8,
        "added to the denominator",
        gt=0.0,
        le=1.0,
        not_for={OF: ("lion", "lion8bit", "adafactor", "came")},
    )
    weight_decay: float = setting(0.01, "decoupled weight decay", ge=0.0, le=1.0)
    muon_momentum: float = setting(
        0.95, "Nesterov momentum for muon's matrices", ge=0.0, lt=1.0, only_for={OF: ("muon",)}
    )
    prodigy_d_coef: float = setting(
        1.0,
        "factor on prodigy's estimated learning rate; 0.5 and 2 are usual",
        gt=0.0,
        le=100.0,
        only_for={OF: ("prodigy",)},
    )
    prodigy_growth_rate: float | None = setting(
        None,
        "largest growth of prodigy's rate per step, such as 1.02; none: no limit",
        gt=1.0,
        le=1000.0,
        only_for={OF: ("prodigy",)},
    )
    max_weight_norm: float | None = setting(
        None,
        "scale each layer's update back to this norm after every step (scale_weight_norms); 1 is usual",
        gt=0.0,
        le=1000.0,
        not_for={
            **NOT_OFT,
            **NOT_SCHEDULE_FREE,
            "adapter.dora": (True,),
            "adapter.init": ("pissa",),
        },
        enforced=True,
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "cosine", "shape of the learning rate after warm-up", not_for=NOT_SCHEDULE_FREE
    )
    warmup_fraction: float = setting(
        0.05, "fraction of the steps in which the learning rate rises", ge=0.0, le=0.9
    )

    @property
    def text_encoder_scale(self) -> float:
        """The factor on the learning rate of the text encoders."""
        if self.text_encoder_learning_rate is not None:
            return self.text_encoder_learning_rate / self.learning_rate
        return 1.0 if self.name == "prodigy" else 0.5

    @property
    def new_tokens_scale(self) -> float:
        """The factor on the learning rate of the new tokens."""
        if self.new_tokens_learning_rate is not None:
            return self.new_tokens_learning_rate / self.learning_rate
        return 1.0 if self.name == "prodigy" else 10.0

"""The settings of what is learned and how: the adapter, the length, noise and loss, the optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from lora_trainer.concepts import Concept
from lora_trainer.settings.declare import (
    CARD,
    CONVOLUTIONS,
    FLOW,
    LORA,
    NO_REGULARISATION,
    NOISE_OR_V,
    NOT_OFT,
    NOT_SCHEDULE_FREE,
    SQUARED,
    WITHOUT_NEW_TOKENS,
    WITHOUT_VALIDATION,
    Auto,
    AutoCount,
    AutoInterval,
    AutoScale,
    Precision,
    Section,
    Weighting,
    setting,
)


class AdapterSettings(Section):
    kind: Literal["lora", "loha", "lokr", "oft"] = setting(
        "lora",
        "LoRA; LoHa, LoKr (Yeh et al. 2023, arXiv 2309.14859); OFT (Qiu et al. 2023, arXiv 2306.07280)",
    )
    rank: int = setting(
        16,
        "width of the update; file size grows with it; of OFT: the size of a block",
        ge=1,
        le=1024,
        headline=True,
    )
    alpha: AutoScale = setting(
        "auto", "the update is scaled by alpha / rank; auto: alpha = rank", not_for=NOT_OFT
    )
    conv_rank: int | None = setting(
        None,
        "rank of convolutions larger than 1x1 (LoCon); none: as the others",
        ge=1,
        le=1024,
        only_for=CONVOLUTIONS,
    )
    conv_alpha: float | None = setting(
        None,
        "alpha of these convolutions; none: as the others",
        gt=0,
        le=4096,
        only_for=CONVOLUTIONS,
        not_for=NOT_OFT,
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1024)]] = setting(
        {}, "rank by regular expression on the module name, first match wins"
    )
    dora: bool = setting(
        False,
        "learn the norm of each output apart (Liu et al. 2024, arXiv 2402.09353); LoRA only",
        only_for=LORA,
    )
    rslora: bool = setting(
        False,
        "scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732); LoRA only",
        only_for=LORA,
    )
    init: Literal["default", "pissa"] = setting(
        "default",
        "start at zero, or at the main singular vectors (Meng et al. 2024, arXiv 2404.02948); LoRA only",
        only_for=LORA,
    )
    dropout: float = setting(
        0.0,
        "share of each layer's input channels that the adapter does not see, another for every sample",
        ge=0.0,
        le=0.9,
        not_for=NOT_OFT,
    )
    rank_dropout: float = setting(
        0.0,
        "share of each update's ranks left out, others for every sample; LoRA",
        ge=0.0,
        le=0.9,
        only_for=LORA,
    )
    module_dropout: float = setting(
        0.0,
        "share of layers whose adapter is off, others for every sample",
        ge=0.0,
        le=0.9,
        not_for={**NOT_OFT, "adapter.dora": (True,)},
    )
    lokr_factor: int = setting(
        -1,
        "size of LoKr's left factor; -1: the most even split",
        ge=-1,
        le=1024,
        only_for={"adapter.kind": ("lokr",)},
    )
    text_encoder: bool = setting(
        False, "train the text encoders too; their outputs are then not cached"
    )
    new_tokens: int = setting(
        0,
        "pivotal tuning: new vectors per text encoder that data.trigger is read as, learned too; 0: none",
        unit="tokens",
        ge=0,
        le=32,
    )
    new_tokens_from: str | None = setting(
        None,
        "word whose vectors the new ones start at; none: random ones as large as the others",
        min_length=1,
        max_length=100,
        not_for=WITHOUT_NEW_TOKENS,
    )
    targets: Literal["attention", "transformer", "all"] = setting(
        "transformer",
        "layers that get an adapter: attention; + feed-forward and projections; + convolutions",
    )


class TrainSettings(Section):
    concept: Concept = setting(
        "any", "what the pictures are to teach; settles some presets, see docs/concepts.md"
    )
    steps: AutoCount = setting(
        "auto", "optimizer steps; auto: by train.views of the images", headline=True
    )
    views: int = setting(
        120,
        "how often each image is seen where train.steps is auto; fewer than 20 images count as 20",
        ge=1,
        le=100_000,
    )
    batch_size: int = setting(
        1,
        "images per optimizer step over all devices and micro-batches",
        unit="images",
        ge=1,
        le=4096,
        headline=True,
    )
    seed: int = setting(42, "every random draw is a function of it", ge=0, le=2**53 - 1)
    init_from: str | None = setting(
        None,
        "adapter file to go on from instead of zero; kind and rank must be the same",
        path=True,
    )
    precision: Precision | Auto = setting(
        "auto",
        "dtype of base weights and activations (the adapter keeps fp32 masters)",
        headline=True,
    )
    max_grad_norm: float = setting(
        1.0, "gradients are clipped to this norm; 0: never", ge=0.0, le=1e6
    )
    tighten_on_spike: bool = setting(
        False,
        "halve max_grad_norm when the losses jump, three times at most",
        not_for={"train.max_grad_norm": (0.0,)},
    )
    lower_on_plateau: bool = setting(
        False,
        "halve the learning rate after three validations without a better loss, three times at most",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
    )
    ema_decay: float | None = setting(
        None,
        "keep a running average of the adapter with this decay, faster at first; 0.99-0.999 is usual",
        gt=0.0,
        lt=1.0,
        not_for=NOT_SCHEDULE_FREE,
    )
    text_encoder_until: float = setting(
        1.0,
        "share of the steps after which the text encoders' adapters stay as they are; 1: never",
        gt=0.0,
        le=1.0,
        only_for={"adapter.text_encoder": (True,)},
    )
    new_tokens_until: float = setting(
        1.0,
        "share of the steps after which the new tokens stay as they are; 1: never",
        gt=0.0,
        le=1.0,
        not_for=WITHOUT_NEW_TOKENS,
    )
    validate_every_steps: AutoInterval = setting(
        "auto", "steps between validations; 0: never", not_for=WITHOUT_VALIDATION
    )
    stop_after_validations: int | None = setting(
        None,
        "end once so many validations in a row brought no lower loss; none: train all steps",
        ge=1,
        le=1000,
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
    )
    deterministic: bool = setting(
        False,
        "ask CUDA for deterministic kernels (slower; CPUs are deterministic anyway)",
        only_for=CARD,
    )


class ObjectiveSettings(Section):
    weighting: Weighting | Auto = setting(
        "auto",
        "how much noise levels count; flow matching: sigma_sqrt, cosmap; auto: min_snr if it has a gamma",
    )
    min_snr_gamma: float | None = setting(
        5.0,
        "gamma of min_snr (Hang et al. 2023, arXiv 2303.09556) and soft_min_snr; null: no such weights",
        gt=0,
        le=100,
        only_for=NOISE_OR_V,
        not_for={"objective.weighting": ("debiased", "p2")},
    )
    p2_gamma: float = setting(
        1.0,
        "gamma of p2, (1 + SNR)^-gamma (Choi et al. 2022, arXiv 2204.00227)",
        gt=0,
        le=10,
        only_for={"objective.weighting": ("p2",)},
    )
    loss: Literal["mse", "huber", "smooth_l1"] = setting(
        "mse",
        "squared error, or one that grows linearly beyond huber_delta: less swayed by odd pictures",
    )
    huber_delta: float = setting(
        0.1,
        "error from which huber and smooth_l1 are linear; with a schedule, at pure noise",
        gt=0.0,
        le=1.0,
        not_for=SQUARED,
    )
    huber_schedule: Literal["snr", "exponential", "constant"] = setting(
        "snr",
        "how the delta falls from 1 without noise (Khrapov et al. 2024, arXiv 2403.16728)",
        not_for=SQUARED,
    )
    noise_offset: float = setting(
        0.0, "strength of per-channel constant noise (0.03-0.1 is usual)", ge=0.0, le=1.0
    )
    multires_noise_iterations: int = setting(
        0, "coarser noise octaves added to the noise; 0: none", ge=0, le=16
    )
    multires_noise_discount: float = setting(
        0.3,
        "strength of each octave relative to the finer one",
        ge=0.0,
        le=1.0,
        not_for={"objective.multires_noise_iterations": (0,)},
    )
    prior: Literal["images", "base"] = setting(
        "images",
        "regularisation images teach what they show, or what the base without the adapter says of them",
        idle_with=NO_REGULARISATION,
    )
    prior_weight: float = setting(
        1.0,
        "factor on the loss of regularisation images",
        gt=0.0,
        le=100.0,
        idle_with=NO_REGULARISATION,
    )
    preservation_weight: float = setting(
        0.0,
        "weight of staying as the base for data.class_word in place of the trigger; 1 is usual, 0: off",
        ge=0.0,
        le=100.0,
    )
    input_perturbation: float = setting(
        0.0,
        "share of more noise in the input only (Ning et al. 2023, arXiv 2301.11706); 0.1 is usual",
        ge=0.0,
        le=1.0,
    )
    timestep_sampling: Literal["uniform", "logit_normal", "sigmoid", "mode", "cosmap"] = setting(
        "uniform",
        "density of the timesteps (Esser et al. 2024, arXiv 2403.03206); sigmoid: logit_normal(0, 1)",
    )
    logit_mean: float = setting(
        0.0,
        "mean of logit_normal; above 0: noisier",
        ge=-10.0,
        le=10.0,
        only_for={"objective.timestep_sampling": ("logit_normal",)},
    )
    logit_std: float = setting(
        1.0,
        "deviation of logit_normal",
        gt=0.0,
        le=10.0,
        only_for={"objective.timestep_sampling": ("logit_normal",)},
    )
    mode_scale: float = setting(
        1.29,
        "weight that mode puts on the middle; below 0: on the ends",
        ge=-1.0,
        le=1.75,
        only_for={"objective.timestep_sampling": ("mode",)},
    )
    timestep_strata: int = setting(
        1,
        "samples in a row whose timesteps are from each of as many equal parts; 1: drawn independently",
        unit="samples",
        ge=1,
        le=256,
    )
    flow_shift: Annotated[float, Field(gt=0, le=100)] | Literal["resolution"] = setting(
        1.0,
        "flow timesteps become s t / (1 + (s - 1) t); resolution: the s of the base's own sampler",
        only_for=FLOW,
    )
    guidance_scale: float = setting(
        1.0,
        "guidance that bases with a guidance embedding are told in training",
        ge=0.0,
        le=50.0,
        only_for=FLOW,
    )
    zero_terminal_snr: Literal["auto"] | bool = setting(
        "auto",
        "make the last timestep pure noise (Lin et al. 2023, arXiv 2305.08891); auto: as the base",
        only_for=NOISE_OR_V,
    )
    min_timestep: int = setting(0, "smallest timestep trained", ge=0, le=999)
    max_timestep: int = setting(999, "largest timestep trained", ge=0, le=999)

    @property
    def chosen_weighting(self) -> Weighting:
        """The weighting, with `auto` settled."""
        if self.weighting != "auto":
            return self.weighting
        return "none" if self.min_snr_gamma is None else "min_snr"

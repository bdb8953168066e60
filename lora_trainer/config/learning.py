"""The settings of learning: the adapter, the length of training, noise and loss."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Generic, Literal

from pydantic import Field

from lora_trainer.config import Concept
from lora_trainer.config.declare import (
    CARD,
    LORA,
    NOT_OFT,
    WITHOUT_NEW_TOKENS,
    WITHOUT_VALIDATION,
    A_co,
    Auto,
    BelowAll,
    Count,
    Factor,
    Interval,
    Pattern,
    Portion,
    Precision,
    Section,
    Seed,
    Share,
    Targets,
    Weighting,
    Word,
    enforced_setting,
    setting,
)
from lora_trainer.config.inputs import NO_REGULARISATION
from lora_trainer.config.losses import WITH_DELTA, LossName
from lora_trainer.config.optimizers import NOT_SCHEDULE_FREE

Scale = Annotated[float, Field(gt=0, le=4096)]
Rank = Annotated[int, Field(ge=1, le=1024)]
Timestep = Annotated[int, Field(ge=0, le=999)]
FLOW = {"base.prediction": ("flow",)}
NOISE_OR_V = {"base.prediction": ("epsilon", "v_prediction")}
CONVOLUTIONS = {"adapter.targets": ("all",)}


lora_setting = partial(enforced_setting, only_for=LORA)


class AdapterSettings(Section):
    kind: Literal["lora", "loha", "lokr", "oft"] = setting(
        "lora",
        "LoRA; LoHa, LoKr (Yeh et al. 2023, arXiv 2309.14859); OFT (Qiu et al. 2023, arXiv 2306.07280)",
        resume="forbidden",
        replans=True,
    )
    rank: Rank = setting(
        16,
        "rank of the update, to which file size is proportional; with OFT the size of a block",
        headline=True,
        resume="forbidden",
        replans=True,
    )
    alpha: Scale | Auto = enforced_setting(
        "auto",
        "scale the update by alpha / rank; auto: alpha = rank",
        not_for=NOT_OFT,
        resume="forbidden",
        replans=True,
    )
    conv_rank: Rank | None = enforced_setting(
        None,
        "rank of convolutions larger than 1x1 (LoCon); none: adapter.rank",
        only_for=CONVOLUTIONS,
        resume="forbidden",
        replans=True,
    )
    conv_alpha: Scale | None = enforced_setting(
        None,
        "alpha of convolutions larger than 1x1; none: adapter.alpha",
        only_for=CONVOLUTIONS,
        not_for=NOT_OFT,
        resume="forbidden",
        replans=True,
    )
    rank_pattern: dict[Pattern, Rank] = setting(
        {},
        "rank by regular expression on the module name, first match wins",
        resume="forbidden",
        replans=True,
    )
    dora: bool = lora_setting(
        False,
        "learn each output's norm separately (Liu et al. 2024, arXiv 2402.09353); LoRA only",
        resume="forbidden",
        replans=True,
    )
    rslora: bool = lora_setting(
        False,
        "scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732); LoRA only",
        resume="forbidden",
        replans=True,
    )
    dropout: BelowAll = enforced_setting(
        0.0,
        "fraction of input channels hidden from each layer's adapter, drawn for each sample",
        not_for=NOT_OFT,
        replans=True,
    )
    noise_rank: Rank | None = lora_setting(
        None,
        "rank at pure noise, rising to adapter.rank (T-LoRA, arXiv 2507.05964); none: all at any noise",
        not_for={"adapter.dora": (True,)},
        replans=True,
    )
    noise_rank_power: Factor = setting(
        1.0,
        "p in (1 - t / 1000)^p, the share of the ranks above adapter.noise_rank at timestep t",
        not_for={"adapter.noise_rank": (None,)},
    )
    rank_dropout: BelowAll = lora_setting(
        0.0,
        "fraction of each update's ranks left out, drawn for each sample; LoRA only",
        replans=True,
    )
    module_dropout: BelowAll = enforced_setting(
        0.0,
        "fraction of layers whose adapter is switched off, drawn for each sample",
        not_for={**NOT_OFT, "adapter.dora": (True,)},
        replans=True,
    )
    lokr_factor: Annotated[int, Field(ge=-1, le=1024)] = enforced_setting(
        -1,
        "size of LoKr's left factor; -1: the most even split",
        only_for={"adapter.kind": ("lokr",)},
        resume="forbidden",
        replans=True,
    )
    text_encoder: bool = setting(
        False,
        "train the text encoders too; their outputs cannot be cached then",
        resume="forbidden",
        replans=True,
    )
    new_tokens: Annotated[int, Field(ge=0, le=32)] = setting(
        0,
        "pivotal tuning: number of new token vectors per text encoder for data.trigger; 0: none",
        unit="tokens",
        resume="forbidden",
        replans=True,
    )
    new_tokens_from: Word | None = enforced_setting(
        None,
        "word whose token vectors the new tokens start from; none: random vectors of usual size",
        not_for=WITHOUT_NEW_TOKENS,
        resume="forbidden",
        replans=True,
    )
    targets: Targets = setting(
        "transformer",
        "layers with an adapter; transformer adds feed-forward and projections, all adds convolutions",
        resume="forbidden",
        replans=True,
    )
    refiners: bool = setting(
        True,
        "also adapt the refiners, the blocks before the main ones of Z-Image and Lumina 2",
        resume="forbidden",
        replans=True,
    )


class TrainSettings(Section, Generic[A_co]):
    concept: Concept = setting(
        "any",
        "kind of subject to learn; changes some presets, see docs/concepts.md",
        resume="forbidden",
    )
    steps: Count | A_co = setting(
        "auto",
        "optimizer steps; auto: train.views times the images, over the batch",
        headline=True,
        kohya=("ss_max_train_steps",),
    )
    views: Annotated[int, Field(ge=1, le=100_000)] = setting(
        120,
        "times each image is trained on if train.steps is auto; fewer than 20 images count as 20",
    )
    batch_size: Annotated[int, Field(ge=1, le=4096)] = setting(
        1,
        "images per optimizer step over all devices and micro-batches",
        unit="images",
        headline=True,
        replans=True,
        kohya=("ss_batch_size_per_device", "ss_total_batch_size"),
    )
    seed: Seed = setting(42, "seed of all random draws", kohya=("ss_seed",))
    init_from: str | None = setting(
        None,
        "adapter file to continue from; its kind and rank must equal the run's",
        path=True,
        resume="forbidden",
    )
    precision: Precision | A_co = setting(
        "auto",
        "dtype of base weights and activations (the adapter keeps fp32 masters)",
        headline=True,
    )
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e6)] = setting(
        1.0, "clip gradients to this norm; 0: never", kohya=("ss_max_grad_norm",)
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = enforced_setting(
        None,
        "keep a running average of the adapter with this decay, faster at first; 0.99-0.999 is usual",
        not_for=NOT_SCHEDULE_FREE,
        resume="forbidden",
    )
    text_encoder_until: Portion = enforced_setting(
        1.0,
        "fraction of the steps after which the text encoders' adapters are frozen; 1: never",
        only_for={"adapter.text_encoder": (True,)},
    )
    new_tokens_until: Portion = enforced_setting(
        1.0,
        "fraction of the steps after which the new tokens are frozen; 1: never",
        not_for=WITHOUT_NEW_TOKENS,
    )
    validate_every_steps: Interval | A_co = setting(
        "auto",
        "steps between validations; 0: never",
        not_for=WITHOUT_VALIDATION,
        resume="free",
        follows_validation=True,
    )
    stop_after_validations: Annotated[int, Field(ge=1, le=1000)] | None = enforced_setting(
        None,
        "stop after this many validations in a row without a lower loss; none: train all steps",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        resume="free",
        uses_validation=True,
    )
    lower_after_validations: Annotated[int, Field(ge=1, le=1000)] | None = enforced_setting(
        None,
        "lower the rate after this many validations in a row without a clearly lower loss; none: never",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        uses_validation=True,
    )
    lower_to: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.5,
        "factor on the learning rate each time it is lowered",
        not_for={"train.lower_after_validations": (None,)},
    )
    deterministic: bool = setting(
        False,
        "ask CUDA for deterministic kernels (slower; CPUs are deterministic anyway)",
        only_for=CARD,
    )


class SliderSettings(Section):
    guidance: Factor = setting(
        0.5,
        "g of the goal at strength 1 and -1: base(target) + or - g (base(more) - base(less))",
    )
    keep_weight: Annotated[float, Field(ge=0.0, le=100.0)] = setting(
        1.0, "loss weight that keeps the base's prediction for the prompts to keep; 0: off"
    )
    denoising_steps: Annotated[int, Field(ge=1, le=100)] = setting(
        10,
        "denoising steps from noise to the noise level of a sample, which has no image",
        unit="steps",
    )
    denoising_guidance: Annotated[float, Field(ge=1.0, le=50.0)] = setting(
        3.0, "guidance of these steps, for bases that predict twice for guidance; 1: none"
    )


class ObjectiveSettings(Section, Generic[A_co]):
    weighting: Weighting | A_co = setting(
        "auto",
        "loss weight by noise level; flow: sigma_sqrt, cosmap; auto: min_snr if min_snr_gamma is set",
    )
    min_snr_gamma: Factor | None = setting(
        5.0,
        "gamma of min_snr (Hang et al. 2023, arXiv 2303.09556) and soft_min_snr; null: no weighting",
        only_for=NOISE_OR_V,
        not_for={"objective.weighting": ("debiased", "p2")},
    )
    p2_gamma: Annotated[float, Field(gt=0, le=10)] = setting(
        1.0,
        "gamma of p2, (1 + SNR)^-gamma (Choi et al. 2022, arXiv 2204.00227)",
        only_for={"objective.weighting": ("p2",)},
    )
    loss: LossName = setting(
        "mse",
        "squared error, or an error that grows linearly far from 0 and so is less sensitive to outliers",
    )
    huber_delta: Portion = setting(
        0.1,
        "error above which huber and smooth_l1 are linear; with a schedule, its value at pure noise",
        only_for={"objective.loss": WITH_DELTA},
        kohya=("ss_huber_c",),
    )
    huber_schedule: Literal["snr", "exponential", "constant"] = setting(
        "snr",
        "decrease of the delta with noise, from 1 at no noise (Khrapov et al. 2024, arXiv 2403.16728)",
        only_for={"objective.loss": WITH_DELTA},
        kohya=("ss_huber_schedule",),
    )
    noise_offset: Share = setting(
        0.0,
        "strength of per-channel constant noise (0.03-0.1 is usual)",
        kohya=("ss_noise_offset",),
    )
    multires_noise_iterations: Annotated[int, Field(ge=0, le=16)] = setting(
        0,
        "coarser noise octaves added to the noise; 0: none",
        kohya=("ss_multires_noise_iterations",),
    )
    multires_noise_discount: Share = setting(
        0.3,
        "strength of each octave relative to the finer one",
        not_for={"objective.multires_noise_iterations": (0,)},
        kohya=("ss_multires_noise_discount",),
    )
    prior: Literal["images", "base"] = setting(
        "images",
        "target for regularisation images: the images, or the prediction of the base without adapter",
        idle_with=NO_REGULARISATION,
    )
    prior_weight: Factor = setting(
        1.0, "factor on the loss of regularisation images", idle_with=NO_REGULARISATION
    )
    preservation_weight: Annotated[float, Field(ge=0.0, le=100.0)] = setting(
        0.0, "loss weight that keeps the base's prediction for data.class_word; 1 is usual, 0: off"
    )
    contrast_scale: Annotated[float, Field(ge=1.0, le=50.0)] = setting(
        1.0,
        "g of the target u + g (t - u), u the prediction for the empty prompt; 1: off, 3 to 4 is usual",
    )
    contrast_schedule: Literal["constant", "sigma"] = setting(
        "constant",
        "g at every noise level, or 1 + (g - 1) sigma: less contrast with less noise",
        not_for={"objective.contrast_scale": (1.0,)},
    )
    input_perturbation: Share = setting(
        0.0,
        "strength of extra noise in the input only (Ning et al. 2023, arXiv 2301.11706); 0.1 is usual",
    )
    timestep_sampling: Literal["uniform", "logit_normal", "sigmoid", "mode", "cosmap"] = setting(
        "uniform",
        "density of the timesteps (Esser et al. 2024, arXiv 2403.03206); sigmoid: logit_normal(0, 1)",
        kohya_flow=("ss_timestep_sampling",),
    )
    logit_mean: Annotated[float, Field(ge=-10.0, le=10.0)] = setting(
        0.0,
        "mean of logit_normal; above 0: noisier",
        only_for={"objective.timestep_sampling": ("logit_normal",)},
        kohya_flow=("ss_logit_mean",),
    )
    logit_std: Annotated[float, Field(gt=0.0, le=10.0)] = setting(
        1.0,
        "deviation of logit_normal",
        only_for={"objective.timestep_sampling": ("logit_normal",)},
        kohya_flow=("ss_logit_std",),
    )
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = setting(
        1.29,
        "weight of the middle timesteps for mode; below 0: of the first and last",
        only_for={"objective.timestep_sampling": ("mode",)},
        kohya_flow=("ss_mode_scale",),
    )
    timestep_strata: Annotated[int, Field(ge=1, le=256)] = setting(
        1,
        "of this many samples in a row, one timestep from each of as many equal ranges; 1: independent",
        unit="samples",
    )
    flow_shift: Factor | Literal["resolution"] = setting(
        1.0,
        "shift s: flow timestep t becomes s t / (1 + (s - 1) t); resolution: s by the image's size",
        only_for=FLOW,
        kohya_flow=("ss_discrete_flow_shift",),
    )
    guidance_scale: Annotated[float, Field(ge=0.0, le=50.0)] = setting(
        1.0,
        "guidance scale during training, for bases with a guidance embedding",
        only_for=FLOW,
        kohya_flow=("ss_guidance_scale",),
    )
    zero_terminal_snr: A_co | bool = setting(
        "auto",
        "make the last timestep pure noise (Lin et al. 2023, arXiv 2305.08891); auto: like the base",
        only_for=NOISE_OR_V,
    )
    min_timestep: Timestep = setting(0, "smallest timestep trained")
    max_timestep: Timestep = setting(999, "largest timestep trained")

    @property
    def chosen_weighting(self) -> Weighting:
        """The weighting, with `auto` replaced."""
        if self.weighting != "auto":
            return self.weighting
        return "none" if self.min_snr_gamma is None else "min_snr"

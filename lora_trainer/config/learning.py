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
        "LoRA is read by every program; LoHa, LoKr and OFT are relatives that fewer programs read",
        source="Yeh et al. 2023, arXiv 2309.14859; Qiu et al. 2023, arXiv 2306.07280",
        resume="forbidden",
        replans=True,
    )
    rank: Rank = setting(
        16,
        "how much the LoRA can hold; more is finer, makes a larger file and wants more images",
        detail="The rank of the update; with OFT the size of a block",
        headline=True,
        resume="forbidden",
        replans=True,
    )
    alpha: Scale | Auto = enforced_setting(
        "auto",
        "strength at which the LoRA learns and works, beside its rank; auto: the same as the rank",
        detail="The update is scaled by alpha / rank",
        not_for=NOT_OFT,
        resume="forbidden",
        replans=True,
    )
    conv_rank: Rank | None = enforced_setting(
        None,
        "rank in convolutions larger than 1x1 (LoCon); none: as everywhere",
        only_for=CONVOLUTIONS,
        resume="forbidden",
        replans=True,
    )
    conv_alpha: Scale | None = enforced_setting(
        None,
        "alpha in convolutions larger than 1x1; none: as everywhere",
        only_for=CONVOLUTIONS,
        not_for=NOT_OFT,
        resume="forbidden",
        replans=True,
    )
    rank_pattern: dict[Pattern, Rank] = setting(
        {},
        "rank of single layers: regular expressions on their names; the first that fits counts",
        resume="forbidden",
        replans=True,
    )
    dora: bool = lora_setting(
        False,
        "learn size and direction of a change apart, nearer to full training but slower; LoRA only",
        detail="The norm of each output is learned by itself",
        source="Liu et al. 2024, arXiv 2402.09353",
        resume="forbidden",
        replans=True,
    )
    rslora: bool = lora_setting(
        False,
        "keeps high ranks from learning too weakly; LoRA only",
        detail="The update is scaled by alpha / sqrt(rank)",
        source="Kalajdzievski 2023, arXiv 2312.03732",
        resume="forbidden",
        replans=True,
    )
    dropout: BelowAll = enforced_setting(
        0.0,
        "share of each layer's inputs hidden at random, against learning images by heart",
        not_for=NOT_OFT,
        replans=True,
    )
    noise_rank: Rank | None = lora_setting(
        None,
        "smaller rank at much noise, against learning few images by heart; none: the same rank",
        detail="The rank at pure noise, rising to adapter.rank (T-LoRA)",
        source="Soboleva et al. 2025, arXiv 2507.05964",
        not_for={"adapter.dora": (True,)},
        replans=True,
    )
    noise_rank_power: Factor = setting(
        1.0,
        "how the rank rises from that smaller one as the noise gets less",
        detail="p in (1 - t / 1000)^p, the share of the further ranks at timestep t",
        not_for={"adapter.noise_rank": (None,)},
    )
    rank_dropout: BelowAll = lora_setting(
        0.0,
        "share of the ranks left out at random, against learning images by heart; LoRA only",
        replans=True,
    )
    module_dropout: BelowAll = enforced_setting(
        0.0,
        "share of the layers left out at random, against learning images by heart",
        not_for={**NOT_OFT, "adapter.dora": (True,)},
        replans=True,
    )
    lokr_factor: Annotated[int, Field(ge=-1, le=1024)] = enforced_setting(
        -1,
        "how LoKr splits its layers: size of the left part; -1: as evenly as possible",
        only_for={"adapter.kind": ("lokr",)},
        resume="forbidden",
        replans=True,
    )
    text_encoder: bool = setting(
        False,
        "train the text encoders too, which read the prompt; takes more time and memory",
        resume="forbidden",
        replans=True,
    )
    new_tokens: Annotated[int, Field(ge=0, le=32)] = setting(
        0,
        "new words that the text encoders learn for your trigger word (pivotal tuning); 0: none",
        label="New tokens",
        detail="Token vectors per text encoder",
        unit="tokens",
        resume="forbidden",
        replans=True,
    )
    new_tokens_from: Word | None = enforced_setting(
        None,
        "word whose meaning the new tokens start from, such as `cat`; none: from chance",
        not_for=WITHOUT_NEW_TOKENS,
        resume="forbidden",
        replans=True,
    )
    targets: Targets = setting(
        "transformer",
        "which layers learn: attention alone, the transformer, which is usual, or all",
        detail="transformer adds feed-forward and projections, all adds convolutions",
        resume="forbidden",
        replans=True,
    )
    refiners: bool = setting(
        True,
        "train the refiners too, the first blocks of Z-Image and Lumina 2",
        resume="forbidden",
        replans=True,
    )


class TrainSettings(Section, Generic[A_co]):
    concept: Concept = setting(
        "any",
        "what you train: a person, a style or an object; changes some of the usual values",
        resume="forbidden",
    )
    steps: Count | A_co = setting(
        "auto",
        "how many steps to train; auto: so that each image is seen as often as train.views says",
        detail="train.views times the images, over the batch size",
        headline=True,
        kohya=("ss_max_train_steps",),
    )
    views: Annotated[int, Field(ge=1, le=100_000)] = setting(
        120,
        "how often each image is seen, if train.steps is auto; fewer than 20 images count as 20",
    )
    batch_size: Annotated[int, Field(ge=1, le=4096)] = setting(
        1,
        "images that a step learns from; more is steadier and takes longer for each step",
        detail="Over all devices and micro-batches",
        unit="images",
        headline=True,
        replans=True,
        kohya=("ss_batch_size_per_device", "ss_total_batch_size"),
    )
    seed: Seed = setting(
        42,
        "where chance begins: the same seed draws the same order, noise and crops again",
        kohya=("ss_seed",),
    )
    init_from: str | None = setting(
        None,
        "LoRA file to train on from; its kind and rank must be those chosen here",
        path=True,
        resume="forbidden",
    )
    precision: Precision | A_co = setting(
        "auto",
        "number format that the model computes in; the LoRA itself keeps full fp32",
        headline=True,
    )
    max_grad_norm: Annotated[float, Field(ge=0.0, le=1e6)] = setting(
        1.0,
        "keeps a single bad step small: gradients are cut to this norm; 0: never",
        kohya=("ss_max_grad_norm",),
    )
    ema_decay: Annotated[float, Field(gt=0.0, lt=1.0)] | None = enforced_setting(
        None,
        "averages the LoRA over its last steps, which calms it; 0.99 to 0.999 is usual; none: off",
        detail="At first it forgets faster",
        not_for=NOT_SCHEDULE_FREE,
        resume="forbidden",
    )
    text_encoder_until: Portion = enforced_setting(
        1.0,
        "share of the steps after which the text encoders learn no more; 1: to the end",
        only_for={"adapter.text_encoder": (True,)},
    )
    new_tokens_until: Portion = enforced_setting(
        1.0,
        "share of the steps after which the new tokens learn no more; 1: to the end",
        not_for=WITHOUT_NEW_TOKENS,
    )
    validate_every_steps: Interval | A_co = setting(
        "auto",
        "steps between tests on the images kept aside; 0: never",
        not_for=WITHOUT_VALIDATION,
        resume="free",
        follows_validation=True,
    )
    stop_after_validations: Annotated[int, Field(ge=1, le=1000)] | None = enforced_setting(
        None,
        "stop after so many tests in a row that got no better; none: train all steps",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        resume="free",
        uses_validation=True,
    )
    lower_after_validations: Annotated[int, Field(ge=1, le=1000)] | None = enforced_setting(
        None,
        "lower the learning rate after so many tests in a row that got hardly better; none: never",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        uses_validation=True,
    )
    lower_to: Annotated[float, Field(gt=0.0, lt=1.0)] = setting(
        0.5,
        "the learning rate is multiplied with this each time it is lowered",
        not_for={"train.lower_after_validations": (None,)},
    )
    deterministic: bool = setting(
        False,
        "exactly the same numbers in each run on an NVIDIA GPU, but slower; processors have it anyway",
        only_for=CARD,
    )


class SliderSettings(Section):
    guidance: Factor = setting(
        0.5,
        "how far the slider pulls at strength 1 and -1",
        detail="g of the goal base(target) + or - g (base(more) - base(less))",
    )
    keep_weight: Annotated[float, Field(ge=0.0, le=100.0)] = setting(
        1.0, "how strongly the prompts to keep stay as they are; 0: off"
    )
    denoising_steps: Annotated[int, Field(ge=1, le=100)] = setting(
        10,
        "steps in which the slider draws what it learns from, as it has no images",
        label="Denoising steps",
        detail="From noise to the noise level of a sample",
        unit="steps",
    )
    denoising_guidance: Annotated[float, Field(ge=1.0, le=50.0)] = setting(
        3.0,
        "guidance of that drawing; 1: none",
        detail="For models that predict twice for guidance",
    )


class ObjectiveSettings(Section, Generic[A_co]):
    weighting: Weighting | A_co = setting(
        "auto",
        "which noise levels count more; auto: min_snr, if it has a gamma",
        detail="For flow models: sigma_sqrt, cosmap",
    )
    min_snr_gamma: Factor | None = setting(
        5.0,
        "lets little noise count less; 5 is usual, a smaller number takes more from it; none: off",
        detail="Gamma of min_snr and soft_min_snr",
        source="Hang et al. 2023, arXiv 2303.09556",
        only_for=NOISE_OR_V,
        not_for={"objective.weighting": ("debiased", "p2")},
    )
    p2_gamma: Annotated[float, Field(gt=0, le=10)] = setting(
        1.0,
        "how much p2 takes from little noise; a larger number takes more",
        detail="The weight is (1 + SNR)^-gamma",
        source="Choi et al. 2022, arXiv 2204.00227",
        only_for={"objective.weighting": ("p2",)},
    )
    loss: LossName = setting(
        "mse",
        "how errors count: mse is usual; the others let a few odd images count less",
        detail="Squared, or linear far from 0",
    )
    huber_delta: Portion = setting(
        0.1,
        "error above which huber and smooth_l1 count less; with a schedule, its value at pure noise",
        only_for={"objective.loss": WITH_DELTA},
        kohya=("ss_huber_c",),
    )
    huber_schedule: Literal["snr", "exponential", "constant"] = setting(
        "snr",
        "how that limit falls with noise, from 1 without any",
        source="Khrapov et al. 2024, arXiv 2403.16728",
        only_for={"objective.loss": WITH_DELTA},
        kohya=("ss_huber_schedule",),
    )
    noise_offset: Share = setting(
        0.0,
        "helps it to learn very dark and very bright images; 0.03 to 0.1 is usual",
        detail="Strength of noise that is constant in each channel",
        kohya=("ss_noise_offset",),
    )
    multires_noise_iterations: Annotated[int, Field(ge=0, le=16)] = setting(
        0,
        "coarser layers added to the noise, which help with brightness and contrast; 0: none",
        kohya=("ss_multires_noise_iterations",),
    )
    multires_noise_discount: Share = setting(
        0.3,
        "strength of each coarser layer beside the finer one",
        not_for={"objective.multires_noise_iterations": (0,)},
        kohya=("ss_multires_noise_discount",),
    )
    prior: Literal["images", "base"] = setting(
        "images",
        "what regularisation images teach: themselves, or what the model predicts without the LoRA",
        idle_with=NO_REGULARISATION,
    )
    prior_weight: Factor = setting(
        1.0, "how much regularisation images count beside yours", idle_with=NO_REGULARISATION
    )
    preservation_weight: Annotated[float, Field(ge=0.0, le=100.0)] = setting(
        0.0, "how strongly the general word data.class_word keeps its meaning; 1 is usual, 0: off"
    )
    contrast_scale: Annotated[float, Field(ge=1.0, le=50.0)] = setting(
        1.0,
        "lets what is learned stand out more; 3 to 4 is usual, 1: off",
        detail="g of the target u + g (t - u), u the prediction for the empty prompt",
    )
    contrast_schedule: Literal["constant", "sigma"] = setting(
        "constant",
        "the same contrast at all noise levels, or less with less noise",
        detail="g, or 1 + (g - 1) sigma",
        not_for={"objective.contrast_scale": (1.0,)},
    )
    input_perturbation: Share = setting(
        0.0,
        "a little noise more than the model is told of, so that it errs less; 0.1 is usual",
        detail="Strength of extra noise in the input only",
        source="Ning et al. 2023, arXiv 2301.11706",
    )
    timestep_sampling: Literal["uniform", "logit_normal", "sigmoid", "mode", "cosmap"] = setting(
        "uniform",
        "which noise levels are trained most often; uniform: all alike",
        detail="sigmoid: logit_normal(0, 1)",
        source="Esser et al. 2024, arXiv 2403.03206",
        kohya_flow=("ss_timestep_sampling",),
    )
    logit_mean: Annotated[float, Field(ge=-10.0, le=10.0)] = setting(
        0.0,
        "middle of logit_normal; above 0: more noise",
        only_for={"objective.timestep_sampling": ("logit_normal",)},
        kohya_flow=("ss_logit_mean",),
    )
    logit_std: Annotated[float, Field(gt=0.0, le=10.0)] = setting(
        1.0,
        "width of logit_normal; larger: more of little and of much noise",
        only_for={"objective.timestep_sampling": ("logit_normal",)},
        kohya_flow=("ss_logit_std",),
    )
    mode_scale: Annotated[float, Field(ge=-1.0, le=1.75)] = setting(
        1.29,
        "how much mode prefers middling noise; below 0: little and much noise",
        only_for={"objective.timestep_sampling": ("mode",)},
        kohya_flow=("ss_mode_scale",),
    )
    timestep_strata: Annotated[int, Field(ge=1, le=256)] = setting(
        1,
        "spread the noise levels evenly over so many samples in a row; 1: each by chance",
        detail="One timestep from each of as many equal ranges",
        unit="samples",
    )
    flow_shift: Factor | Literal["resolution"] = setting(
        1.0,
        "above 1: more training at much noise; resolution: by the image's size",
        detail="Shift s: the flow timestep t becomes s t / (1 + (s - 1) t)",
        only_for=FLOW,
        kohya_flow=("ss_discrete_flow_shift",),
    )
    guidance_scale: Annotated[float, Field(ge=0.0, le=50.0)] = setting(
        1.0,
        "guidance while training, for models that have it built in, such as FLUX.1 dev",
        only_for=FLOW,
        kohya_flow=("ss_guidance_scale",),
    )
    zero_terminal_snr: A_co | bool = setting(
        "auto",
        "train the last step at pure noise, for truly dark images; auto: like the model",
        source="Lin et al. 2023, arXiv 2305.08891",
        only_for=NOISE_OR_V,
    )
    min_timestep: Timestep = setting(0, "the least noise that is trained, from 0 to 999")
    max_timestep: Timestep = setting(999, "the most noise that is trained, from 0 to 999")

    @property
    def chosen_weighting(self) -> Weighting:
        """The weighting, with `auto` replaced."""
        if self.weighting != "auto":
            return self.weighting
        return "none" if self.min_snr_gamma is None else "min_snr"

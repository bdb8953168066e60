"""Every setting, declared once: type, default, unit and one line of documentation.

The command line (`--set section.key=value`), config files, presets, the JSON Schema, the GUI form, the
docs table, run.json and the metadata of exported files all derive from this model. `auto` is a value:
the planner replaces it and says why. Unknown keys are errors that name the nearest one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Annotated, Any, Literal, TypeVar, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from pydantic.fields import FieldInfo

from lora_trainer.errors import RequestError, did_you_mean
from lora_trainer.quantization import QUANTIZATIONS, BasePrecision
from lora_trainer.redaction import secret_keys
from lora_trainer.setting_forms import Form, form_of, label_of

Auto = Literal["auto"]
Precision = Literal["fp32", "bf16", "fp16"]
AutoPixels = Annotated[int, Field(ge=16, le=4096)] | Auto
AutoCount = Annotated[int, Field(ge=1, le=10_000_000)] | Auto
AutoInterval = Annotated[int, Field(ge=0, le=10_000_000)] | Auto
AutoScale = Annotated[float, Field(gt=0, le=4096)] | Auto
Checkpointing = Literal["none", "selective", "full", "offloaded"]
"""Which blocks are recomputed in the backward pass, their inputs alone kept for it: none of them,
every second one of each list of blocks, all of them, or all with the kept inputs in host memory."""
CHECKPOINTING: tuple[Checkpointing, ...] = get_args(Checkpointing)
"""What the backward pass makes again: nothing, every second block, all, or all from host memory."""
Weighting = Literal["none", "min_snr", "soft_min_snr", "debiased", "p2", "sigma_sqrt", "cosmap"]
FLOW_WEIGHTINGS: tuple[Weighting, ...] = ("sigma_sqrt", "cosmap")
SNR_WEIGHTINGS: tuple[Weighting, ...] = ("min_snr", "soft_min_snr", "debiased", "p2")
T = TypeVar("T")


Needs = Mapping[str, Sequence[Any]]
"""Needs of other settings, by `section.name`."""


def setting(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    only_for: Needs = MappingProxyType({}),
    not_for: Needs = MappingProxyType({}),
    path: bool = False,
    **constraints: Any,
) -> Any:
    """Declare one setting; `unit` is shown beside the value wherever it is printed.

    The setting matters only while each setting in `only_for` has one of those values and none in
    `not_for` has; otherwise it changes nothing, or is refused (tests/test_unused_settings.py). `path`:
    it may name a file or folder of this machine.
    """
    extra: dict[str, Any] = {"unit": unit}
    for name, needs in (("only_for", only_for), ("not_for", not_for)):
        if needs:
            extra[name] = {key: list(values) for key, values in needs.items()}
    if path:
        extra["path"] = True
    return Field(default, description=doc, json_schema_extra=extra, **constraints)


# What several settings need, or do not go with: see `setting`.
_LORA = {"adapter.kind": ("lora",)}
_CARD = {"hardware.device": ("cuda",)}
_FLOW = {"base.prediction": ("flow",)}
_NOISE_OR_V = {"base.prediction": ("epsilon", "v_prediction")}
_CONVOLUTIONS = {"adapter.targets": ("all",)}
_SHUFFLING = {"data.shuffle_tags": (True,)}
_NOT_EMBEDDED = {"base.model": ("embedded",)}
_NOT_OFT = {"adapter.kind": ("oft",)}
_SQUARED = {"objective.loss": ("mse",)}
_WITHOUT_VALIDATION = {"data.validation_fraction": (0.0,)}


class Section(BaseModel):
    """Base of all sections: immutable, no unknown keys, defaults are validated too."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        allow_inf_nan=False,
        coerce_numbers_to_str=True,  # `--set data.trigger=123` is a word, not a number
    )


class BaseSettings(Section):
    model: str = setting(
        "auto",
        "base model: `embedded`, a diffusers folder or a Hub id; auto: by hardware",
        path=True,
    )
    revision: str | None = setting(
        None, "Hub branch, tag or commit of the base model", not_for=_NOT_EMBEDDED
    )
    vae: str | None = setting(
        None, "another VAE: a .safetensors file or a folder with config.json", path=True
    )
    companion: str = setting(
        "auto",
        "diffusers folder or Hub id for what a single-file checkpoint lacks; auto: the family's release",
        not_for=_NOT_EMBEDDED,
        path=True,
    )
    prediction: Literal["auto", "epsilon", "v_prediction", "flow"] = setting(
        "auto", "what the base predicts; auto: what its files say"
    )
    assistant: str | None = setting(
        None,
        "LoRA file that undoes a base's distillation while training; neither sampled nor exported",
        path=True,
    )


class DataSettings(Section):
    resolution: AutoPixels = setting(
        "auto", "side of the square whose area every bucket has; auto: the base's own", unit="px"
    )
    buckets: bool = setting(
        True, "keep aspect ratios by training in buckets; off: crop everything square"
    )
    max_aspect: float = setting(
        2.0,
        "longest bucket side over the shortest",
        ge=1.0,
        le=8.0,
        only_for={"data.buckets": (True,)},
    )
    repeats: int = setting(
        1, "times each image is seen per epoch; `10_name` folders set their own", ge=1, le=1000
    )
    flip: bool = setting(
        False, "also train mirrored images (bad for text, logos, asymmetric people)"
    )
    trigger: str | None = setting(
        None, "word put in front of captions that lack it", min_length=1, max_length=100
    )
    caption_extensions: tuple[str, ...] = setting(
        (".txt", ".caption"), "caption files beside the image, first wins"
    )
    caption_dropout: float = setting(
        0.0, "share of samples trained with an empty caption", ge=0.0, le=1.0
    )
    shuffle_tags: bool = setting(False, "shuffle the comma-separated tags of a caption")
    keep_tokens: int = setting(
        1, "leading tags that shuffling leaves in place", ge=0, le=50, only_for=_SHUFFLING
    )
    caption_variants: int = setting(
        4, "shuffled variants encoded per caption when shuffling", ge=1, le=64, only_for=_SHUFFLING
    )
    validation_fraction: float = setting(
        0.1,
        "share of images held out for the validation loss, rounded down; 0: none",
        ge=0.0,
        le=0.5,
    )
    alpha_background: str = setting(
        "white", "colour put behind transparent images: a CSS name or #rrggbb"
    )
    max_bad_fraction: float = setting(
        0.1, "share of unusable images above which the run refuses", ge=0.0, le=1.0
    )
    max_megapixels: float = setting(
        100.0, "larger images are refused from their header", unit="MP", gt=0, le=1000
    )
    cache_dir: str = setting(
        "auto", "cache of latents and text embeddings; auto: the user's cache folder", path=True
    )
    cache_max_gib: float = setting(20.0, "size cap of the cache", unit="GiB", gt=0, le=100_000)
    prefetch_steps: int = setting(4, "optimizer steps prepared ahead of the device", ge=1, le=64)


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
    )
    alpha: AutoScale = setting(
        "auto", "the update is scaled by alpha / rank; auto: alpha = rank", not_for=_NOT_OFT
    )
    conv_rank: int | None = setting(
        None,
        "rank of convolutions larger than 1x1 (LoCon); none: as the others",
        ge=1,
        le=1024,
        only_for=_CONVOLUTIONS,
    )
    conv_alpha: float | None = setting(
        None,
        "alpha of these convolutions; none: as the others",
        gt=0,
        le=4096,
        only_for=_CONVOLUTIONS,
        not_for=_NOT_OFT,
    )
    rank_pattern: dict[str, Annotated[int, Field(ge=1, le=1024)]] = setting(
        {}, "rank by regular expression on the module name, first match wins"
    )
    dora: bool = setting(
        False,
        "learn the norm of each output apart (Liu et al. 2024, arXiv 2402.09353); LoRA only",
        only_for=_LORA,
    )
    rslora: bool = setting(
        False,
        "scale by alpha / sqrt(rank) (Kalajdzievski 2023, arXiv 2312.03732); LoRA only",
        only_for=_LORA,
    )
    init: Literal["default", "pissa"] = setting(
        "default",
        "start at zero, or at the main singular vectors (Meng et al. 2024, arXiv 2404.02948); LoRA only",
        only_for=_LORA,
    )
    dropout: float = setting(
        0.0,
        "share of each layer's input channels that the adapter does not see, another for every sample",
        ge=0.0,
        le=0.9,
        not_for=_NOT_OFT,
    )
    rank_dropout: float = setting(
        0.0,
        "share of each update's ranks left out, others for every sample; LoRA",
        ge=0.0,
        le=0.9,
        only_for=_LORA,
    )
    module_dropout: float = setting(
        0.0,
        "share of layers whose adapter is off, others for every sample",
        ge=0.0,
        le=0.9,
        not_for={**_NOT_OFT, "adapter.dora": (True,)},
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
    targets: Literal["attention", "transformer", "all"] = setting(
        "transformer",
        "layers that get an adapter: attention; + feed-forward and projections; + convolutions",
    )


class TrainSettings(Section):
    steps: AutoCount = setting("auto", "optimizer steps; auto: by number of images")
    batch_size: int = setting(
        1,
        "images per optimizer step over all devices and micro-batches",
        unit="images",
        ge=1,
        le=4096,
    )
    seed: int = setting(42, "every random draw is a function of it", ge=0, le=2**53 - 1)
    init_from: str | None = setting(
        None,
        "adapter file to go on from instead of zero; kind and rank must be the same",
        path=True,
    )
    precision: Precision | Auto = setting(
        "auto", "dtype of base weights and activations (the adapter keeps fp32 masters)"
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
        not_for={**_WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
    )
    ema_decay: float | None = setting(
        None,
        "keep a running average of the adapter with this decay, faster at first; 0.99-0.999 is usual",
        gt=0.0,
        lt=1.0,
    )
    validate_every_steps: AutoInterval = setting(
        "auto", "steps between validations; 0: never", not_for=_WITHOUT_VALIDATION
    )
    deterministic: bool = setting(
        False,
        "ask CUDA for deterministic kernels (slower; CPUs are deterministic anyway)",
        only_for=_CARD,
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
        only_for=_NOISE_OR_V,
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
        not_for=_SQUARED,
    )
    huber_schedule: Literal["snr", "exponential", "constant"] = setting(
        "snr",
        "how the delta falls from 1 without noise (Khrapov et al. 2024, arXiv 2403.16728)",
        not_for=_SQUARED,
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
        only_for=_FLOW,
    )
    guidance_scale: float = setting(
        1.0,
        "guidance that bases with a guidance embedding are told in training",
        ge=0.0,
        le=50.0,
        only_for=_FLOW,
    )
    zero_terminal_snr: Literal["auto"] | bool = setting(
        "auto",
        "make the last timestep pure noise (Lin et al. 2023, arXiv 2305.08891); auto: as the base",
        only_for=_NOISE_OR_V,
    )
    min_timestep: int = setting(0, "smallest timestep trained", ge=0, le=999)
    max_timestep: int = setting(999, "largest timestep trained", ge=0, le=999)

    @property
    def chosen_weighting(self) -> Weighting:
        """The weighting, with `auto` settled."""
        if self.weighting != "auto":
            return self.weighting
        return "none" if self.min_snr_gamma is None else "min_snr"


class OptimizerSettings(Section):
    name: Literal["adamw", "adamw8bit", "paged_adamw8bit"] = setting(
        "adamw",
        "AdamW; bitsandbytes' with 8-bit state; paged: its large tensors go to host memory on a full card",
    )
    learning_rate: float = setting(1e-4, "peak learning rate", gt=0.0, le=10.0)
    text_encoder_learning_rate: float | None = setting(
        None,
        "peak learning rate of the text encoders; none: half of learning_rate",
        gt=0.0,
        le=10.0,
        only_for={"adapter.text_encoder": (True,)},
    )
    learning_rate_pattern: dict[str, Annotated[float, Field(ge=0, le=1000)]] = setting(
        {},
        "factor on the learning rate by regular expression on the module name, first match wins; 0: frozen",
    )
    lora_plus_ratio: float = setting(
        1.0,
        "learning rate of `up` over that of `down` (Hayou et al. 2024, arXiv 2402.12354)",
        ge=1.0,
        le=1000.0,
        only_for=_LORA,
    )
    beta1: float = setting(0.9, "decay of the first moment", ge=0.0, lt=1.0)
    beta2: float = setting(0.999, "decay of the second moment", ge=0.0, lt=1.0)
    epsilon: float = setting(1e-8, "added to the denominator", gt=0.0, le=1.0)
    weight_decay: float = setting(0.01, "decoupled weight decay", ge=0.0, le=1.0)
    max_weight_norm: float | None = setting(
        None,
        "updates of layers are scaled back to this norm after every step (scale_weight_norms); 1 is usual",
        gt=0.0,
        le=1000.0,
        not_for={**_NOT_OFT, "adapter.dora": (True,), "adapter.init": ("pissa",)},
    )
    schedule: Literal["constant", "linear", "cosine"] = setting(
        "cosine", "shape of the learning rate after warm-up"
    )
    warmup_fraction: float = setting(
        0.05, "share of the steps in which the learning rate rises", ge=0.0, le=0.9
    )


def _checkpointing(value: Any) -> Any:
    """Read a yes or no, which older settings files have."""
    if isinstance(value, bool):
        return "full" if value else "none"
    return value


class MemorySettings(Section):
    micro_batch: AutoCount = setting(
        "auto",
        "images per forward pass; never changes the result, only memory and speed",
        unit="images",
    )
    gradient_checkpointing: Annotated[Checkpointing | Auto, BeforeValidator(_checkpointing)] = (
        setting(
            "auto",
            "blocks recomputed backwards: none, every second, all, all with inputs in host memory",
        )
    )
    base_precision: BasePrecision | Auto = setting(
        "auto",
        "how the frozen base is kept: like train.precision, or its blocks in 8 or 4 bits",
    )
    streamed_blocks: AutoInterval = setting(
        "auto",
        "blocks of the base kept in host memory and copied to the card when they are due",
        unit="blocks",
        only_for=_CARD,
    )
    attention: Literal["auto", "sdpa", "xformers"] = setting(
        "auto", "attention kernels; auto: SDPA", only_for=_CARD
    )
    text_encoder_precision: Precision | Auto = setting(
        "auto",
        "dtype of the text encoders while caching; auto: fp32, above 2 billion parameters bf16",
    )
    text_encoder_offload: bool | Auto = setting(
        "auto",
        "text encoders stay in host memory while caching, a layer at a time on the card",
        only_for={**_CARD, "adapter.text_encoder": (False,)},
    )


class HardwareSettings(Section):
    device: Literal["auto", "cpu", "cuda"] = setting("auto", "where to train")
    threads: AutoCount = setting("auto", "CPU threads; part of what makes a resume bit-exact")
    vram_limit_gib: float | None = setting(
        None,
        "use at most this much of the card: planned for, and a cap on PyTorch's allocator",
        unit="GiB",
        gt=0,
        le=1024,
        only_for=_CARD,
    )
    process_timeout_s: float = setting(
        120.0,
        "with several processes: how long one may be silent before all are ended",
        unit="s",
        ge=5,
        le=86_400,
    )


class OutputSettings(Section):
    folder: str = setting("runs", "where run folders are made", path=True)
    name: str = setting("auto", "name of the run and its files; auto: the dataset folder's name")
    precision: Precision = setting("fp16", "dtype of exported files")
    weights: Literal["auto", "trained", "ema"] = setting(
        "auto",
        "what is exported, sampled and validated: as trained, or averaged; auto: ema with train.ema_decay",
        not_for={"train.ema_decay": (None,)},
    )
    format: Literal["auto", "kohya", "diffusers", "comfyui"] = setting(
        "auto", "key names of exported files; auto: what most programs read for this family"
    )
    description: str = setting("", "a sentence about the adapter, written into exported files")
    author: str = setting("", "who made it, written into exported files")
    license: str = setting("", "its licence, written into exported files")
    hub_repo: str | None = setting(
        None, "Hub repository (owner/name) that the result is uploaded to, with a model card"
    )
    hub_private: bool = setting(
        True,
        "make that repository private when it is created",
        not_for={"output.hub_repo": (None,)},
    )
    save_every_steps: AutoInterval = setting(
        "auto", "steps between rolling exports and states; 0: only at the end"
    )
    save_every_epochs: int | None = setting(
        None, "epochs between rolling exports and states", ge=1, le=100_000
    )
    keep_last: int = setting(3, "rolling exports kept", ge=1, le=10_000)
    keep_states: int = setting(2, "resume states kept", ge=2, le=10_000)


class SamplingSettings(Section):
    prompts: tuple[str, ...] = setting(
        (), "prompts of the sample images; none: taken from the captions"
    )
    negative_prompt: str = setting("", "what samples should not show")
    every_steps: AutoInterval = setting("auto", "steps between sample images; 0: never")
    steps: int = setting(25, "denoising steps per sample", ge=1, le=1000)
    guidance_scale: float = setting(5.0, "classifier-free guidance; 1: none", ge=1.0, le=50.0)
    seed: int = setting(
        1234, "seed of the first prompt's image; the next prompt adds 1", ge=0, le=2**53 - 1
    )


class LoggingSettings(Section):
    trackers: tuple[str, ...] = setting(
        ("tensorboard",), "accelerate trackers; those not installed are reported"
    )


class Config(Section):
    """All settings of one run, grouped in sections as they are written in config files."""

    base: BaseSettings = Field(default_factory=BaseSettings, description="the model to adapt")
    data: DataSettings = Field(default_factory=DataSettings, description="images, captions, caches")
    adapter: AdapterSettings = Field(default_factory=AdapterSettings, description="the LoRA itself")
    train: TrainSettings = Field(
        default_factory=TrainSettings, description="length, batch, precision"
    )
    objective: ObjectiveSettings = Field(
        default_factory=ObjectiveSettings, description="noise and loss"
    )
    optimizer: OptimizerSettings = Field(
        default_factory=OptimizerSettings, description="how weights move"
    )
    memory: MemorySettings = Field(default_factory=MemorySettings, description="fitting the device")
    hardware: HardwareSettings = Field(default_factory=HardwareSettings, description="which device")
    output: OutputSettings = Field(default_factory=OutputSettings, description="files written")
    sampling: SamplingSettings = Field(
        default_factory=SamplingSettings, description="images on the way"
    )
    logging: LoggingSettings = Field(default_factory=LoggingSettings, description="dashboards")

    @model_validator(mode="after")
    def _no_contradictions(self) -> Config:
        found = list(_contradictions(self))
        if found:
            raise ValueError(" ".join(found))
        return self


def _contradictions(config: Config) -> Iterator[str]:
    low, high = config.objective.min_timestep, config.objective.max_timestep
    if low > high:
        yield f"objective.min_timestep={low} is above objective.max_timestep={high}: lower one of them."
    weighting = config.objective.weighting
    if weighting in ("min_snr", "soft_min_snr") and config.objective.min_snr_gamma is None:
        yield f"objective.weighting={weighting} needs a number as objective.min_snr_gamma: 5 is usual."
    alpha, rank = config.adapter.alpha, config.adapter.rank
    if alpha != "auto" and alpha > rank * 100:
        yield f"adapter.alpha={alpha:g} is over 100 times adapter.rank={rank}: use at most {rank * 100}."
    for pattern in config.optimizer.learning_rate_pattern:
        yield from _pattern_problem("optimizer.learning_rate_pattern", pattern)
    steps, every = config.train.steps, config.output.save_every_steps
    if steps != "auto" and every != "auto" and every > steps:
        yield f"output.save_every_steps={every} is above train.steps={steps}: lower it, or 0 for only at the end."
    yield from _adapter_contradictions(config.adapter)
    if config.adapter.init == "pissa" and config.train.init_from is not None:
        yield "adapter.init=pissa and train.init_from both say where to begin: choose one."
    if config.optimizer.lora_plus_ratio != 1.0 and config.adapter.kind != "lora":
        yield f"optimizer.lora_plus_ratio is for adapter.kind=lora, not {config.adapter.kind}."
    for pattern in config.optimizer.learning_rate_pattern:
        yield from _pattern_problem("optimizer.learning_rate_pattern", pattern)
    if config.optimizer.text_encoder_learning_rate is not None and not config.adapter.text_encoder:
        yield "optimizer.text_encoder_learning_rate needs adapter.text_encoder=true."
    if config.output.weights == "ema" and config.train.ema_decay is None:
        yield "output.weights=ema needs train.ema_decay: 0.995 is usual."
    if config.optimizer.max_weight_norm is not None:
        yield from _plain_product("optimizer.max_weight_norm", config.adapter)
    if config.train.tighten_on_spike and config.train.max_grad_norm == 0:
        yield "train.tighten_on_spike lowers train.max_grad_norm, which is 0: never; choose a norm."
    micro, batch = config.memory.micro_batch, config.train.batch_size
    if micro != "auto" and micro > batch:
        yield f"memory.micro_batch={micro} is above train.batch_size={batch}: at most {batch}."
    yield from _memory_contradictions(config)


def _memory_contradictions(config: Config) -> Iterator[str]:
    memory, precision = config.memory, config.train.precision
    kept = memory.base_precision
    if "auto" not in (kept, precision) and kept not in (precision, *QUANTIZATIONS):
        yield (
            f"memory.base_precision={kept} and train.precision={precision} differ: "
            "the base is computed in the dtype it is kept in, unless that is int8, fp8 or nf4."
        )
    how = memory.gradient_checkpointing
    if memory.streamed_blocks not in ("auto", 0) and how in ("none", "selective"):
        yield (
            f"memory.streamed_blocks={memory.streamed_blocks} needs every block recomputed, not "
            f"memory.gradient_checkpointing={how}: use full or offloaded."
        )
    if memory.text_encoder_offload is True and config.adapter.text_encoder:
        yield "memory.text_encoder_offload is for caching, adapter.text_encoder=true trains them: choose one."


def _adapter_contradictions(adapter: AdapterSettings) -> Iterator[str]:
    only_lora = {
        "dora": adapter.dora,
        "rslora": adapter.rslora,
        "init=pissa": adapter.init == "pissa",
    }
    for name, asked in only_lora.items():
        if asked and adapter.kind != "lora":
            yield f"adapter.{name} is for adapter.kind=lora, not {adapter.kind}: choose one."
    if adapter.rank_dropout and adapter.kind != "lora":
        yield f"adapter.rank_dropout is for adapter.kind=lora, not {adapter.kind}: use dropout."
    for name in ("dropout", "module_dropout"):
        if getattr(adapter, name) and adapter.kind == "oft":
            yield f"adapter.{name} is for lora, loha and lokr, not adapter.kind=oft: choose one."
    if adapter.module_dropout and adapter.dora:
        yield "adapter.module_dropout would leave DoRA's norms on: use dropout, or adapter.dora=false."
    if adapter.dora and adapter.init == "pissa":
        yield "adapter.dora and adapter.init=pissa cannot be combined: choose one."
    if adapter.kind == "oft" and (adapter.alpha != "auto" or adapter.conv_alpha is not None):
        yield "adapter.kind=oft is a rotation, which has no alpha: leave adapter.alpha and conv_alpha out."
    if adapter.lokr_factor == 0 or (adapter.lokr_factor != -1 and adapter.kind != "lokr"):
        yield "adapter.lokr_factor is -1 or at least 1, and for adapter.kind=lokr only."
    convolutions = adapter.conv_rank is not None or adapter.conv_alpha is not None
    if convolutions and adapter.targets != "all":
        yield "adapter.conv_rank and conv_alpha are for convolutions: set adapter.targets=all."
    for pattern in adapter.rank_pattern:
        yield from _pattern_problem("adapter.rank_pattern", pattern)


def _plain_product(key: str, adapter: AdapterSettings) -> Iterator[str]:
    """Refuse `key` where an update is more than the product of its factors."""
    others = {"kind=oft": adapter.kind == "oft", "dora": adapter.dora}
    others["init=pissa"] = adapter.init == "pissa"
    for name, chosen in others.items():
        if chosen:
            yield f"{key} and adapter.{name} cannot be combined: choose one."


def _pattern_problem(key: str, pattern: str) -> Iterator[str]:
    try:
        re.compile(pattern)
    except re.error as error:
        yield f"{key} has {pattern!r}, which is no regular expression ({error})."


@dataclass(frozen=True, kw_only=True)
class SettingInfo:
    """One setting as the tables, the form and the docs show it."""

    key: str
    default: Any
    unit: str
    doc: str
    form: Form
    only_for: Needs
    not_for: Needs
    path: bool

    @property
    def section(self) -> str:
        return self.key.partition(".")[0]

    @property
    def label(self) -> str:
        """The name as people read it, without section and unit."""
        return label_of(self.key.partition(".")[2], unit=self.unit)

    def unused(self, values: Mapping[str, Any]) -> str:
        """Return why it does not matter with these values of other settings; empty where it may.

        `values` are by `section.name`; one that is missing or `auto` is not known yet.
        """
        known = {key: value for key, value in values.items() if value != "auto"}
        for key, wanted in self.only_for.items():
            if key in known and known[key] not in wanted:
                needed = " or ".join(map(_typed, wanted))
                return f"needs {key}={needed}, which is {_typed(known[key])}"
        for key, refused in self.not_for.items():
            if key in known and known[key] in refused:
                return f"without effect while {key} is {_typed(known[key])}"
        return ""


def _typed(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def all_settings() -> list[SettingInfo]:
    """Return every setting in declaration order, keyed `section.name`."""
    return list(_settings())


@cache
def _settings() -> tuple[SettingInfo, ...]:
    schemas = setting_schemas()
    return tuple(
        SettingInfo(
            key=f"{section}.{name}",
            default=info.default,
            unit=schemas[f"{section}.{name}"]["unit"],
            doc=info.description or "",
            form=form_of(schemas[f"{section}.{name}"]),
            only_for=schemas[f"{section}.{name}"].get("only_for", {}),
            not_for=schemas[f"{section}.{name}"].get("not_for", {}),
            path=schemas[f"{section}.{name}"].get("path", False),
        )
        for section, fields in sections().items()
        for name, info in fields.items()
    )


def sections() -> dict[str, dict[str, FieldInfo]]:
    """Return the fields of each section, both in declaration order."""
    found = {}
    for name, field in Config.model_fields.items():
        section = field.annotation
        assert isinstance(section, type) and issubclass(section, Section)
        found[name] = section.model_fields
    return found


def setting_schemas() -> dict[str, dict[str, Any]]:
    """Return the JSON Schema of every setting, by `section.name`."""
    schema = Config.model_json_schema()
    found: dict[str, dict[str, Any]] = {}
    for section, reference in schema["properties"].items():
        name = reference["$ref"].rpartition("/")[2]
        for key, value in schema["$defs"][name]["properties"].items():
            found[f"{section}.{key}"] = {part: v for part, v in value.items() if part != "title"}
    return found


def setting_keys() -> tuple[str, ...]:
    """Return all `section.name` keys."""
    return tuple(info.key for info in _settings())


def flatten(config: Config) -> dict[str, Any]:
    """Return {"section.name": JSON value} for every setting."""
    sections = config.model_dump(mode="json")
    return {
        f"{section}.{name}": value
        for section, values in sections.items()
        for name, value in values.items()
    }


def build_config(values: Mapping[str, Any]) -> Config:
    """Build a Config from {"section.name": value}; raises RequestError naming all that is wrong at once."""
    check_keys(values)
    refuse_secrets(values)
    nested: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        nested.setdefault(section, {})[name] = value
    try:
        return Config.model_validate(nested)
    except ValidationError as error:
        raise RequestError(_explain(error), fix="change the values named") from None


def check_keys(values: Mapping[str, Any]) -> None:
    """Raise RequestError for the keys that are no setting, with the nearest name of each."""
    keys = setting_keys()
    unknown = [
        f"unknown setting {key!r}.{did_you_mean(key, keys)}" for key in values if key not in keys
    ]
    if unknown:
        raise RequestError(" ".join(unknown), fix="see `lora-train plan DATASET` for all settings")


def refuse_secrets(values: Mapping[str, Any]) -> None:
    """Raise RequestError for settings that hold a token: they are written into files."""
    if found := secret_keys(values):
        raise RequestError(
            f"{', '.join(found)} holds what looks like a token or a password",
            fix="take it out; tokens belong in the environment (HF_TOKEN) or `hf auth login`",
        )


def parse_assignment(text: str) -> tuple[str, Any]:
    """Parse `section.key=value`; the value is JSON where it can be, else text. Raises RequestError."""
    key, equals, value = text.partition("=")
    if not equals:
        raise RequestError(f"--set {text!r} has no '='", fix="write --set section.key=value")
    try:
        return key.strip(), json.loads(value)
    except (ValueError, RecursionError):
        return key.strip(), value


def concrete(value: T | Auto) -> T:
    """Return a setting that planning has resolved; meeting `auto` here is a bug, not a user error."""
    if value == "auto":
        raise AssertionError("the planner left a setting at auto")
    return value


def _explain(error: ValidationError) -> str:
    found: dict[str, list[str]] = {}
    for problem in error.errors(include_url=False):
        key = ".".join(str(part) for part in problem["loc"][:2])
        where = f"{key}={problem['input']!r}: " if key else ""
        message = problem["msg"].removeprefix("Value error, ")
        found.setdefault(where, []).append(message[:1].lower() + message[1:])
    return "; ".join(where + " or ".join(messages) for where, messages in found.items())

"""The settings of memory, hardware, output files, sample images and dashboards; all settings as one value.

`Config` may hold `auto`, `RunConfig` does not. `build_config` and `build_run_config` (config.py) also check the
rules among settings (constraints.py).
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any, Generic, Literal

from pydantic import Field

from lora_trainer.config.declare import (
    CARD,
    WITHOUT_VALIDATION,
    A_co,
    BasePrecision,
    Checkpointing,
    CompileMode,
    ConvolutionWay,
    Count,
    Decided,
    Interval,
    Precision,
    Section,
    Seed,
    enforced_setting,
    setting,
)
from lora_trainer.config.inputs import BaseSettings, DataSettings, Pixels
from lora_trainer.config.learning import (
    AdapterSettings,
    ObjectiveSettings,
    SliderSettings,
    TrainSettings,
)
from lora_trainer.config.optimizers import OptimizerSettings
from lora_trainer.hardware.dashboards import PACKAGE_OF

CUDA = {"hardware.device": ("cuda",)}
# How a preview is decoded: by the base's VAE, or by a linear map to colours.
PreviewKind = Literal["real", "approximate"]
# Declare a setting of what a run writes, which no number of the training depends on.
free_setting = partial(setting, resume="free")


class MemorySettings(Section, Generic[A_co]):
    micro_batch: Count | A_co = setting(
        "auto",
        "images per forward pass; never changes the result, only memory and speed",
        unit="images",
        headline=True,
        resume="rounding",
        replans=True,
    )
    gradient_checkpointing: Checkpointing | A_co = setting(
        "auto",
        "activations to keep or recompute, from none (most memory) to offloaded: docs/memory.md",
        headline=True,
        resume="rounding",
        replans=True,
    )
    base_precision: BasePrecision | A_co = setting(
        "auto",
        "precision of the frozen base: train.precision, or its blocks in 8 or 4 bits",
        headline=True,
        replans=True,
        works_anywhere="auto",
        packages={"nf4": "bitsandbytes"},
    )
    streamed_blocks: Interval | A_co = setting(
        "auto",
        "blocks of the base kept in host memory and copied to the GPU when they run",
        unit="blocks",
        only_for=CARD,
        headline=True,
        resume="rounding",
        replans=True,
        works_anywhere=0,
        own_memory=True,
    )
    attention: A_co | Literal["sdpa", "xformers"] = setting(
        "auto",
        "attention kernels; auto: SDPA",
        only_for=CARD,
        resume="rounding",
        replans=True,
        works_anywhere="sdpa",
        packages={"xformers": "xformers"},
        is_wish=True,
    )
    text_encoder_precision: Precision | A_co = setting(
        "auto",
        "dtype of the text encoders while caching; auto: fp32, above 2 billion parameters bf16",
        replans=True,
    )
    text_encoder_offload: bool | A_co = setting(
        "auto",
        "while caching, keep text encoders in host memory and copy a block at a time to the GPU",
        only_for={**CARD, "adapter.text_encoder": (False,)},
        resume="rounding",
        replans=True,
        works_anywhere=False,
        own_memory=True,
    )


class HardwareSettings(Section, Generic[A_co]):
    device: A_co | Literal["cpu", "cuda", "mps", "xpu"] = setting(
        "auto", "where to train: cuda is NVIDIA and AMD (ROCm), mps Apple, xpu Intel", replans=True
    )
    threads: Count | A_co = setting(
        "auto", "CPU threads; part of what makes a resume bit-exact", replans=True
    )
    vram_limit_gib: Annotated[float, Field(gt=0, le=1024)] | None = setting(
        None,
        "use at most this much GPU memory: limits the plan and PyTorch's allocator",
        unit="GiB",
        only_for=CARD,
        resume="free",
        replans=True,
    )
    compile: A_co | Literal["none", "blocks"] = setting(
        "auto",
        "blocks: fuse the kernels of the base's blocks (torch.compile); auto: where the run gets faster",
        resume="rounding",
        replans=True,
        works_anywhere="none",
    )
    compile_mode: CompileMode = setting(
        "default",
        "torch.compile's: reduce-overhead replays CUDA graphs, max-autotune times more kernels",
        not_for={"hardware.compile": ("none",)},
        resume="rounding",
        replans=True,
        works_anywhere="default",
    )
    convolutions: ConvolutionWay | A_co | Literal["fastest"] = setting(
        "auto",
        "channels_last, cuDNN's benchmark, both, or the fastest by the first steps: docs/machines.md",
        only_for=CUDA,
        resume="rounding",
        replans=True,
        works_anywhere="plain",
    )
    process_timeout_s: Annotated[float, Field(ge=5, le=86_400)] = setting(
        120.0,
        "with several processes: longest silence of one process before all are stopped",
        unit="s",
        resume="free",
        replans=True,
    )
    reduced_as: Precision = setting(
        "fp32",
        "with several processes: dtype in which gradients travel; 16 bits are half of the bytes",
        resume="rounding",
    )


class OutputSettings(Section, Generic[A_co]):
    folder: str = free_setting("runs", "folder in which run folders are created", path=True)
    name: str = free_setting(
        "auto", "name of the run and its files; auto: the dataset folder's name"
    )
    precision: Precision = free_setting("fp16", "dtype of exported files")
    weights: A_co | Literal["trained", "ema"] = free_setting(
        "auto",
        "weights to export, sample and validate: trained or averaged; auto: ema with train.ema_decay",
        not_for={"train.ema_decay": (None,)},
        follows_validation=True,
    )
    format: A_co | Literal["kohya", "diffusers", "comfyui"] = free_setting(
        "auto", "key names of exported files; auto: the format most programs read for this family"
    )
    description: str = free_setting("", "a sentence about the adapter, written into exported files")
    author: str = free_setting("", "the adapter's author, written into exported files")
    license: str = free_setting("", "the adapter's licence, written into exported files")
    dataset_in_header: bool = free_setting(
        True,
        "write folder names, tag counts and prompts into exported files and model cards",
    )
    hub_repo: str | None = free_setting(
        None, "Hub repository (owner/name) to upload the result to, with a model card"
    )
    hub_private: bool = free_setting(
        True, "make a newly created Hub repository private", not_for={"output.hub_repo": (None,)}
    )
    save_every_steps: Interval | A_co = free_setting(
        "auto", "steps between rolling exports and states; 0: only at the end", headline=True
    )
    save_every_epochs: Annotated[int, Field(ge=1, le=100_000)] | None = free_setting(
        None, "epochs between rolling exports and states"
    )
    keep_best: bool = enforced_setting(
        False,
        "also export the weights with the lowest validation loss, as NAME-best.safetensors",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        resume="forbidden",
        uses_validation=True,
    )
    measure: bool = free_setting(
        True, "measure the finished adapter's weights, ranks and gain for report.html"
    )
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = free_setting(
        3, "number of rolling exports to keep"
    )
    keep_states: Annotated[int, Field(ge=2, le=10_000)] = free_setting(
        2, "number of resume states to keep"
    )


class SamplingSettings(Section, Generic[A_co]):
    prompts: tuple[str, ...] = free_setting(
        (),
        "prompts of the sample images, with --n, --w, --h, --d, --l, --s, --m behind them; none: captions",
    )
    prompts_from_captions: Annotated[int, Field(ge=1, le=64)] = free_setting(
        4,
        "number of captions used as prompts where sampling.prompts is empty, held-out images first",
        unit="images",
    )
    negative_prompt: str = free_setting("", "negative prompt of the sample images")
    every_steps: Interval | A_co = free_setting("auto", "steps between sample images; 0: never")
    steps: Annotated[int, Field(ge=1, le=1000)] | A_co = free_setting(
        "auto", "denoising steps per sample; auto: those that the base is published with"
    )
    guidance_scale: Annotated[float, Field(ge=1.0, le=50.0)] | A_co = free_setting(
        "auto", "classifier-free guidance; 1: none; auto: the one that the base is published with"
    )
    seed: Seed = free_setting(1234, "seed of the first prompt's image; the next prompt adds 1")
    preview: PreviewKind | A_co | Literal["off"] = free_setting(
        "auto",
        "small quick image of the first prompt every 2 % of the steps; auto: off above 1 % of the run's time",
        not_for={"sampling.every_steps": (0,)},
    )
    preview_steps: Annotated[int, Field(ge=1, le=1000)] | A_co = free_setting(
        "auto",
        "denoising steps per preview; auto: as many as take 1 % of the run's time",
        not_for={"sampling.preview": ("off",), "sampling.every_steps": (0,)},
    )
    preview_resolution: Pixels | A_co = free_setting(
        "auto",
        "side of a square preview; auto: data.resolution, or half of it where that takes too long",
        unit="px",
        not_for={"sampling.preview": ("off",), "sampling.every_steps": (0,)},
    )


class LoggingSettings(Section):
    trackers: tuple[str, ...] = free_setting(
        ("tensorboard",),
        "accelerate trackers; those not installed are reported",
        works_anywhere=(),
        packages=PACKAGE_OF,
    )


def _section(default: type[Section], doc: str) -> Any:
    return Field(default_factory=default, description=doc)


class Config(Section, Generic[A_co]):
    """All settings of one run, in the sections of config files; `Config` alone is a request, with `auto`."""

    base: BaseSettings = _section(BaseSettings, "the model to adapt")
    data: DataSettings[A_co] = _section(DataSettings, "images, captions, caches")
    adapter: AdapterSettings = _section(AdapterSettings, "the LoRA itself")
    train: TrainSettings[A_co] = _section(TrainSettings, "length, batch, precision")
    objective: ObjectiveSettings[A_co] = _section(ObjectiveSettings, "noise and loss")
    slider: SliderSettings = _section(SliderSettings, "sliders from words, without images")
    optimizer: OptimizerSettings = _section(OptimizerSettings, "optimizer and learning rates")
    memory: MemorySettings[A_co] = _section(MemorySettings, "fitting into memory")
    hardware: HardwareSettings[A_co] = _section(HardwareSettings, "which device")
    output: OutputSettings[A_co] = _section(OutputSettings, "files written")
    sampling: SamplingSettings[A_co] = _section(SamplingSettings, "sample images during training")
    logging: LoggingSettings = _section(LoggingSettings, "dashboards")


class RunConfig(Config[Decided]):
    """All settings of a planned run: `auto` are names, folders and settings without a meaning for the base alone."""

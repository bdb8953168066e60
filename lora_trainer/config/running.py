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
        "images computed at a time: changes only memory and speed, never the result",
        unit="images",
        headline=True,
        resume="rounding",
        replans=True,
    )
    gradient_checkpointing: Checkpointing | A_co = setting(
        "auto",
        "saves memory and costs time: none is the fastest, offloaded needs the least memory",
        detail="How much is kept of each layer rather than computed again",
        headline=True,
        resume="rounding",
        replans=True,
    )
    base_precision: BasePrecision | A_co = setting(
        "auto",
        "number format of the model: int8 and fp8 take half the memory, nf4 a quarter",
        detail="Of its blocks; the rest is as train.precision says",
        headline=True,
        replans=True,
        works_anywhere="auto",
        packages={"nf4": "bitsandbytes"},
    )
    streamed_blocks: Interval | A_co = setting(
        "auto",
        "parts of the model that stay in RAM and go to the GPU when they are needed; slower",
        label="Streamed blocks",
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
        "how attention is computed; auto: sdpa, which comes with PyTorch",
        only_for=CARD,
        resume="rounding",
        replans=True,
        works_anywhere="sdpa",
        packages={"xformers": "xformers"},
        is_wish=True,
    )
    text_encoder_precision: Precision | A_co = setting(
        "auto",
        "number format of the text encoders while captions are prepared; auto: fp32, large ones bf16",
        detail="Large: above 2 billion parameters",
        replans=True,
    )
    text_encoder_offload: bool | A_co = setting(
        "auto",
        "keep text encoders in RAM while captions are prepared, for GPUs of little memory",
        detail="A block at a time is copied to the GPU",
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
        "auto",
        "processor threads that are used; another number may change the last digits of a result",
        replans=True,
    )
    vram_limit_gib: Annotated[float, Field(gt=0, le=1024)] | None = setting(
        None,
        "use at most this much of the GPU's memory; none: what is free",
        unit="GiB",
        only_for=CARD,
        resume="free",
        replans=True,
    )
    compile: A_co | Literal["none", "blocks"] = setting(
        "auto",
        "faster steps after a slower start (torch.compile); auto: where it pays",
        detail="blocks: the kernels of the model's blocks are fused",
        resume="rounding",
        replans=True,
        works_anywhere="none",
    )
    compile_mode: CompileMode = setting(
        "default",
        "how torch.compile works: default starts soonest, the others may be faster later",
        detail="reduce-overhead replays CUDA graphs, max-autotune times more kernels",
        not_for={"hardware.compile": ("none",)},
        resume="rounding",
        replans=True,
        works_anywhere="default",
    )
    convolutions: ConvolutionWay | A_co | Literal["fastest"] = setting(
        "auto",
        "how convolutions are computed; fastest: found out in the first steps",
        detail="channels_last is another order in memory, benchmark lets cuDNN try its ways",
        only_for=CUDA,
        resume="rounding",
        replans=True,
        works_anywhere="plain",
    )
    process_timeout_s: Annotated[float, Field(ge=5, le=86_400)] = setting(
        120.0,
        "with several GPUs: how long one may be silent before all are stopped",
        unit="s",
        resume="free",
        replans=True,
    )
    reduced_as: Precision = setting(
        "fp32",
        "with several GPUs: number format in which they share what they learned; 16 bits are half",
        resume="rounding",
    )


class OutputSettings(Section, Generic[A_co]):
    folder: str = free_setting(
        "runs", "folder in which each training gets a folder of its own", path=True
    )
    name: str = free_setting(
        "auto", "name of the training and of its files; auto: that of the folder of images"
    )
    precision: Precision = free_setting(
        "fp16", "number format of the LoRA file; fp16 is small and read everywhere"
    )
    weights: A_co | Literal["trained", "ema"] = free_setting(
        "auto",
        "what becomes the file: trained or averaged weights; auto: averaged if train.ema_decay is set",
        not_for={"train.ema_decay": (None,)},
        follows_validation=True,
    )
    format: A_co | Literal["kohya", "diffusers", "comfyui"] = free_setting(
        "auto",
        "for which programs the file is; auto: what most programs read for this model",
        detail="How the weights in it are called",
    )
    description: str = free_setting("", "a sentence about the LoRA, written into its file")
    author: str = free_setting("", "who made the LoRA, written into its file")
    license: str = free_setting("", "the licence of the LoRA, written into its file")
    dataset_in_header: bool = free_setting(
        True,
        "write names of folders, counts of tags and prompts into the file and its model card",
    )
    hub_repo: str | None = free_setting(
        None, "where on Hugging Face the LoRA goes (owner/name), with a model card; none: nowhere"
    )
    hub_private: bool = free_setting(
        True,
        "a place that is new on Hugging Face is only for you",
        not_for={"output.hub_repo": (None,)},
    )
    save_every_steps: Interval | A_co = free_setting(
        "auto",
        "steps between LoRAs that are saved, with what a resume needs; 0: only at the end",
        headline=True,
    )
    save_every_epochs: Annotated[int, Field(ge=1, le=100_000)] | None = free_setting(
        None, "epochs between LoRAs that are saved, with what a resume needs"
    )
    keep_best: bool = enforced_setting(
        False,
        "also keep the LoRA that did best on the images kept aside, as NAME-best.safetensors",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
        resume="forbidden",
        uses_validation=True,
    )
    measure: bool = free_setting(
        True, "measure the finished LoRA for its report: weights, ranks and gain"
    )
    keep_last: Annotated[int, Field(ge=1, le=10_000)] = free_setting(
        3, "how many of the LoRAs saved on the way are kept"
    )
    keep_states: Annotated[int, Field(ge=2, le=10_000)] = free_setting(
        2, "how many states are kept that a resume can begin from"
    )


class SamplingSettings(Section, Generic[A_co]):
    prompts: tuple[str, ...] = free_setting(
        (),
        "prompts of the sample images, one a line; none: your captions",
        detail="Behind a prompt: --n not this, --w and --h size, --d seed, --l guidance, --s steps, --m strength",
    )
    prompts_from_captions: Annotated[int, Field(ge=1, le=64)] = free_setting(
        4,
        "how many captions become prompts, where sampling.prompts is empty",
        detail="Those of images kept aside come first",
        unit="images",
    )
    negative_prompt: str = free_setting("", "what the sample images should not show")
    every_steps: Interval | A_co = free_setting(
        "auto", "steps between sample images; 0: never", label="Samples every N steps"
    )
    steps: Annotated[int, Field(ge=1, le=1000)] | A_co = free_setting(
        "auto", "steps in which a sample is drawn; auto: as the makers of the model advise"
    )
    guidance_scale: Annotated[float, Field(ge=1.0, le=50.0)] | A_co = free_setting(
        "auto",
        "how closely samples follow their prompt; 1: no guidance; auto: as the makers advise",
    )
    seed: Seed = free_setting(
        1234, "where chance begins for the first sample; each further prompt adds 1"
    )
    preview: PreviewKind | A_co | Literal["off"] = free_setting(
        "auto",
        "small quick image of the first prompt, 50 in a training; auto: if they take under 1 % of its time",
        not_for={"sampling.every_steps": (0,)},
    )
    preview_steps: Annotated[int, Field(ge=1, le=1000)] | A_co = free_setting(
        "auto",
        "steps in which a preview is drawn; auto: as many as take 1 % of the time",
        not_for={"sampling.preview": ("off",), "sampling.every_steps": (0,)},
    )
    preview_resolution: Pixels | A_co = free_setting(
        "auto",
        "size of a preview; auto: as the training, or half where that takes too long",
        unit="px",
        not_for={"sampling.preview": ("off",), "sampling.every_steps": (0,)},
    )


class LoggingSettings(Section):
    trackers: tuple[str, ...] = free_setting(
        ("tensorboard",),
        "where the curves go besides these pages, such as tensorboard or wandb",
        detail="Those that are not installed are named",
        works_anywhere=(),
        packages=PACKAGE_OF,
    )


def _section(default: type[Section], doc: str) -> Any:
    return Field(default_factory=default, description=doc)


class Config(Section, Generic[A_co]):
    """All settings of one run, in the sections of config files; `Config` alone is a request, with `auto`."""

    base: BaseSettings = _section(BaseSettings, "the model to train on")
    data: DataSettings[A_co] = _section(DataSettings, "images, captions and masks")
    adapter: AdapterSettings = _section(AdapterSettings, "kind, size and layers of the LoRA")
    train: TrainSettings[A_co] = _section(TrainSettings, "how long, how many at once, when to stop")
    objective: ObjectiveSettings[A_co] = _section(
        ObjectiveSettings, "which noise is learned, and how errors count"
    )
    slider: SliderSettings = _section(SliderSettings, "sliders from words, without images")
    optimizer: OptimizerSettings = _section(
        OptimizerSettings, "how fast it learns, and by which rule"
    )
    memory: MemorySettings[A_co] = _section(MemorySettings, "what saves memory")
    hardware: HardwareSettings[A_co] = _section(HardwareSettings, "GPU and processor")
    output: OutputSettings[A_co] = _section(OutputSettings, "the files: name, saving, upload")
    sampling: SamplingSettings[A_co] = _section(SamplingSettings, "images drawn while it trains")
    logging: LoggingSettings = _section(LoggingSettings, "curves for other programs")


class RunConfig(Config[Decided]):
    """All settings of a planned run: `auto` are names, folders and settings without a meaning for the base alone."""

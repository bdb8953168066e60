"""The settings of where it runs and what comes out: memory, hardware, files, samples, dashboards."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator

from lora_trainer.quantization import BaseMatmul, BasePrecision
from lora_trainer.settings.declare import (
    CARD,
    CUDA,
    MIXABLE,
    WITHOUT_VALIDATION,
    Auto,
    AutoCount,
    AutoInterval,
    AutoShare,
    Checkpointing,
    Precision,
    Section,
    setting,
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
        headline=True,
    )
    gradient_checkpointing: Annotated[Checkpointing | Auto, BeforeValidator(_checkpointing)] = (
        setting(
            "auto",
            "from what keeps most of the forward pass to what keeps least: docs/memory.md",
            headline=True,
        )
    )
    kept_share: AutoShare = setting(
        "auto",
        "share of the blocks, evenly spread, that keep as much as the next kind before that",
        only_for={"memory.gradient_checkpointing": MIXABLE},
    )
    base_precision: BasePrecision | Auto = setting(
        "auto",
        "how the frozen base is kept: like train.precision, or its blocks in 8 or 4 bits",
        headline=True,
    )
    base_matmul: BaseMatmul | Auto = setting(
        "auto",
        "products with an int8 base: its weights dequantized, or int8 by int8; auto: what is faster",
        only_for={"memory.base_precision": ("int8",)},
    )
    streamed_blocks: AutoInterval = setting(
        "auto",
        "blocks of the base kept in host memory and copied to the card when they are due",
        unit="blocks",
        only_for=CARD,
        headline=True,
    )
    modulation_cache: bool | Auto = setting(
        "auto",
        "modulation layers kept in host memory, what they give made ahead; the same result",
    )
    attention: Literal["auto", "sdpa", "xformers"] = setting(
        "auto", "attention kernels; auto: SDPA", only_for=CARD
    )
    text_encoder_precision: Precision | Auto = setting(
        "auto",
        "dtype of the text encoders while caching; auto: fp32, above 2 billion parameters bf16",
    )
    text_encoder_offload: bool | Auto = setting(
        "auto",
        "text encoders stay in host memory while caching, a layer at a time on the card",
        only_for={**CARD, "adapter.text_encoder": (False,)},
    )


class HardwareSettings(Section):
    device: Literal["auto", "cpu", "cuda", "mps", "xpu"] = setting(
        "auto", "where to train: cuda is NVIDIA and AMD (ROCm), mps Apple, xpu Intel"
    )
    threads: AutoCount = setting("auto", "CPU threads; part of what makes a resume bit-exact")
    vram_limit_gib: float | None = setting(
        None,
        "use at most this much of the card: planned for, and a cap on PyTorch's allocator",
        unit="GiB",
        gt=0,
        le=1024,
        only_for=CARD,
    )
    compile: Literal["auto", "none", "blocks"] = setting(
        "auto",
        "blocks as fused kernels (torch.compile); auto: with priority speed, where that pays in this run",
    )
    cuda_graphs: bool | Auto = setting(
        "auto",
        "steps recorded and replayed as one launch; auto: with priority speed, where that pays in this run",
        only_for=CUDA,
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
        "auto", "steps between rolling exports and states; 0: only at the end", headline=True
    )
    save_every_epochs: int | None = setting(
        None, "epochs between rolling exports and states", ge=1, le=100_000
    )
    keep_best: bool = setting(
        False,
        "also export the weights with the lowest validation loss, as NAME-best.safetensors",
        not_for={**WITHOUT_VALIDATION, "train.validate_every_steps": (0,)},
    )
    measure: bool = setting(
        True, "measure the finished adapter: its weights, ranks and gain, into report.html"
    )
    keep_last: int = setting(3, "rolling exports kept", ge=1, le=10_000)
    keep_states: int = setting(2, "resume states kept", ge=2, le=10_000)


class SamplingSettings(Section):
    prompts: tuple[str, ...] = setting(
        (), "prompts of the sample images; none: taken from the captions"
    )
    prompts_from_captions: int = setting(
        4,
        "sample images drawn at a time where sampling.prompts is empty: captions, held-out ones first",
        unit="images",
        ge=1,
        le=64,
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

"""Sample images on the way: the same prompts and seeds at every stage, step 0 being the untouched base.

Images are made with the adapter rounded to the export's precision, so that what is seen is what the
file does: a plain diffusers pipeline with the file of that step gives the same image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from PIL.PngImagePlugin import PngInfo

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.cache.keys import CacheKey
from lora_trainer.common.errors import StoppedBySignal, first_line
from lora_trainer.common.events import EventStream
from lora_trainer.common.gc_control import give_back_heap
from lora_trainer.config.config import SamplingSettings
from lora_trainer.families.base import Conditioning, Sampler
from lora_trainer.lora.adapter import Adapter
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.training.progress import Progress


@dataclass(frozen=True, kw_only=True)
class SampleAction:
    """Writes samples/step-XXXXXXXX/NN.png every `every_steps`, at step 0, at the end, and when `asked()`.

    `sampler` is asked when images are made, and gives the same one each time. `chosen()` puts the
    weights to be shown in force, `without()` takes away the memory that only training needs; `embed` is the
    model's: text encoders that are trained along run on the prompts' tokens with the adapter of the
    moment.
    """

    what: ClassVar = "the sample images"
    sampler: Callable[[], Sampler]
    adapter: Adapter
    without: Callable[[], AbstractContextManager[None]]
    embed: Callable[[Conditioning], Conditioning]
    precision: torch.dtype
    entries: Entries
    prompts: Sequence[tuple[str, CacheKey]]
    negative: CacheKey
    settings: SamplingSettings
    every_steps: int
    size_px: tuple[int, int]
    folder: Path
    events: EventStream
    asked: Callable[[], bool]
    stop: Callable[[], int | None] = lambda: None
    chosen: Callable[[], AbstractContextManager[None]] = nullcontext

    def due(self, progress: Progress) -> bool:
        regular = self.every_steps > 0 and (
            progress.step % self.every_steps == 0 or progress.ending
        )
        return (regular or self.asked()) and not progress.stopping

    def __call__(self, progress: Progress) -> None:
        """Make the images; a failure is a problem of the samples, never of the training (TRN-03).

        Raises RuntimeError when the device is out of memory: with less in its caches they may fit.
        """
        target, began_s = self.folder / f"step-{progress.step:08d}", time.monotonic()
        give_back_heap()  # decoding makes tensors larger than what a step on a processor has left
        try:
            target.mkdir(parents=True, exist_ok=True)
            with (
                self.chosen(),
                self.adapter.rounded(self.precision),
                self.without(),
                torch.no_grad(),
            ):
                images = self._images(target, step=progress.step)
        except StoppedBySignal:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, none of it the training's
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            self.events.problem(
                f"no sample images at step {progress.step}: {first_line(error)}",
                fix="free memory or disk, or use --set sampling.every_steps=0",
                code="TRN-03",
            )
        else:
            seconds = time.monotonic() - began_s
            self.events.emit("sample", step=progress.step, images=images, seconds=seconds)

    def _images(self, target: Path, *, step: int) -> list[Mapping[str, str | int]]:
        """Make the images; those left when somebody asks to stop are not made, as saving is waiting."""
        images: list[Mapping[str, str | int]] = []
        for index in range(len(self.prompts)):
            if self.stop() is not None:
                self.events.problem(
                    f"{len(images)} of {len(self.prompts)} sample images at step {step}: asked to stop",
                    fix="nothing to do: the next samples are whole",
                    severity="note",
                    code="CKP-07",
                )
                break
            self.events.emit(
                "phase",
                phase="sample",
                message="sample images",
                done=index,
                total=len(self.prompts),
            )
            images.append(self._write(target, index))
        return images

    def _write(self, target: Path, index: int) -> Mapping[str, str | int]:
        prompt, key = self.prompts[index]
        seed, file = self.settings.seed + index, target / f"{index:02d}.png"
        image = self.sampler().image(
            self._text(key),
            self._text(self.negative),
            seed=seed,
            size_px=self.size_px,
            steps=self.settings.steps,
            guidance_scale=self.settings.guidance_scale,
        )
        info = PngInfo()
        width, height = image.size
        info.add_text(
            "parameters",
            f"{prompt}\nNegative prompt: {self.settings.negative_prompt}\nSteps: {self.settings.steps}, "
            f"CFG scale: {self.settings.guidance_scale:g}, Seed: {seed}, Size: {width}x{height}",
        )
        image.save(file, pnginfo=info)
        return {"prompt": prompt, "seed": seed, "file": f"samples/{target.name}/{file.name}"}

    def _text(self, key: CacheKey) -> Conditioning:
        return self.embed(self.entries.read(key))

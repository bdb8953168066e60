"""Sample images on the way: the same prompts and seeds at every stage, step 0 being the untouched base.

Somebody may ask for a prompt of their own while the training goes on (control/sample). It is encoded and drawn
between two steps with seeds of its own, so that it changes nothing of the training.

Images are made with the adapter rounded to the export's precision, so that what is seen is what the
file does: a plain diffusers pipeline with the file of that step gives the same image.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from PIL.PngImagePlugin import PngInfo

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.cache.keys import CacheKey
from lora_trainer.common.errors import LoraTrainError, StoppedBySignal, first_line
from lora_trainer.common.events import EventStream
from lora_trainer.common.gc_control import give_back_heap
from lora_trainer.config.config import SamplingSettings
from lora_trainer.families.base import Conditioning, Sampler
from lora_trainer.lora.adapter import Adapter
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.reporting.control import SampleRequest
from lora_trainer.training.progress import Progress


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """One image to draw: its prompt's entry in the cache, its seed, the name of its file."""

    prompt: str
    key: CacheKey
    seed: int
    file: str


@dataclass(kw_only=True)
class _Due:
    """The images due at this step: of the run's `own` prompts, of the `asked` prompt unless it is empty."""

    own: bool = True
    asked: str = ""


@dataclass(frozen=True, kw_only=True)
class SampleAction:
    """Writes samples/step-XXXXXXXX/NN.png every `every_steps`, at step 0, at the end, and when `asked()`.

    `asked()` returns each request once, None when there is none. The prompt that a request brings becomes
    asked-00.png with the seed of the first prompt; `encode` puts its text into the cache.

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
    asked: Callable[[], SampleRequest | None]
    encode: Callable[[str], CacheKey]
    stop: Callable[[], int | None] = lambda: None
    chosen: Callable[[], AbstractContextManager[None]] = nullcontext
    # Kept from `due` to the call, which is repeated when the device is out of memory.
    _due: _Due = field(default_factory=_Due)

    def due(self, progress: Progress) -> bool:
        if progress.stopping:
            return False
        regular = self.every_steps > 0 and (
            progress.step % self.every_steps == 0 or progress.ending
        )
        request = self._request(progress.step)
        self._due.asked = request.prompt if request is not None else ""
        self._due.own = regular or request == SampleRequest()
        return self._due.own or bool(self._due.asked)

    def __call__(self, progress: Progress) -> None:
        """Make the images; a failure is a problem of the samples, never of the training (TRN-03).

        Raises RuntimeError when the device is out of memory: with less in its caches they may fit.
        """
        target, began_s = self.folder / f"step-{progress.step:08d}", time.monotonic()
        give_back_heap()  # decoding makes tensors larger than what a step on a processor has left
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Text encoders are loaded before memory is needed for images, and let go.
            drawings = [*self._own(), *self._asked(target, step=progress.step)]
            with (
                self.chosen(),
                self.adapter.rounded(self.precision),
                self.without(),
                torch.no_grad(),
            ):
                images = self._images(target, drawings, step=progress.step)
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
            asked = {} if self._due.own else {"asked": True}
            self.events.emit("sample", step=progress.step, images=images, seconds=seconds, **asked)

    def _request(self, step: int) -> SampleRequest | None:
        try:
            return self.asked()
        except LoraTrainError as error:
            self.events.problem(
                f"no sample images were asked for at step {step}: {error.found}",
                fix=error.fix,
                code="TRN-03",
            )
            return None

    def _own(self) -> list[_Drawing]:
        if not self._due.own:
            return []
        return [
            _Drawing(
                prompt=prompt, key=key, seed=self.settings.seed + index, file=f"{index:02d}.png"
            )
            for index, (prompt, key) in enumerate(self.prompts)
        ]

    def _asked(self, target: Path, *, step: int) -> list[_Drawing]:
        """Return the drawing of the prompt that somebody asked for; one that cannot be encoded is a problem."""
        prompt = self._due.asked
        if not prompt or self.stop() is not None:
            return []
        message = "reading the prompt"
        self.events.emit("phase", phase="sample", message=message, done=0, total=0)
        try:
            key = self.encode(prompt)
        except LoraTrainError as error:
            self.events.problem(
                f"no sample image of {prompt[:60]!r} at step {step}: {error.found}",
                fix=error.fix,
                code="TRN-03",
            )
            return []
        # A resumed run may come to a step again, with another prompt asked for.
        number = len(list(target.glob("asked-*.png")))
        file = f"asked-{number:02d}.png"
        return [_Drawing(prompt=prompt, key=key, seed=self.settings.seed, file=file)]

    def _images(
        self, target: Path, drawings: Sequence[_Drawing], *, step: int
    ) -> list[Mapping[str, str | int]]:
        """Make the images; those left when somebody asks to stop are not made, as saving is waiting."""
        images: list[Mapping[str, str | int]] = []
        for index, drawing in enumerate(drawings):
            if self.stop() is not None:
                self.events.problem(
                    f"{len(images)} of {len(drawings)} sample images at step {step}: asked to stop",
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
                total=len(drawings),
            )
            images.append(self._write(target, drawing))
        return images

    def _write(self, target: Path, drawing: _Drawing) -> Mapping[str, str | int]:
        prompt, seed, file = drawing.prompt, drawing.seed, target / drawing.file
        image = self.sampler().image(
            self._text(drawing.key),
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

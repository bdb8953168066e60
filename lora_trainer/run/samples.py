"""Sample images on the way: the same prompts and seeds at every stage, step 0 being the untouched base.

Somebody may ask for a prompt of their own while the training goes on (control/sample). It is encoded and drawn
between two steps with seeds of its own, so that it changes nothing of the training.

Images are made with the adapter rounded to the export's precision, so that what is seen is what the
file does: a plain diffusers pipeline with the file of that step gives the same image.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import ClassVar

import torch
from PIL.PngImagePlugin import PngInfo

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.cache.keys import CacheKey
from lora_trainer.common.errors import LoraTrainError, StoppedBySignal, first_line
from lora_trainer.common.processes import give_back_heap
from lora_trainer.families.base import Conditioning, Sampler
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.reporting.control import Control
from lora_trainer.run.build import TrainComponents
from lora_trainer.run.caching import encode_prompt, texts_as
from lora_trainer.run.device import DTYPES
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.training.training import Progress


@dataclass(frozen=True, kw_only=True)
class _Drawing:
    """One image to draw: its prompt's entry in the cache, its seed, the name of its file."""

    prompt: str
    key: CacheKey
    seed: int
    file: str


@dataclass(kw_only=True)
class SampleAction:
    """Writes samples/step-XXXXXXXX/NN.png every so many steps, at step 0, at the end, and when somebody asks.

    The prompt that a request brings becomes asked-00.png with the seed of the first prompt.
    """

    what: ClassVar = "the sample images"
    job: TrainingJob
    parts: TrainComponents
    entries: Entries
    # The images due at this step: of the run's own prompts, of the prompt that somebody asked for. They are kept
    # from `due` to the call, which is repeated when the device is out of memory.
    _own_due: bool = field(default=True, init=False)
    _asked_due: str = field(default="", init=False)

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler on the networks in training, built when the first images are made."""
        return self.job.prepared.family.build_sampler(
            self.job.prepared.facts,
            denoiser=self.parts.model.denoiser,
            device=self.parts.model.device,
        )

    def due(self, progress: Progress) -> bool:
        if progress.stopping:
            return False
        every = self.job.prepared.config.sampling.every_steps
        regular = every > 0 and (progress.step % every == 0 or progress.ending)
        request = self._request(progress.step)
        self._asked_due = request or ""
        self._own_due = regular or request == ""
        return self._own_due or bool(self._asked_due)

    def __call__(self, progress: Progress) -> None:
        """Make the images; a failure is a problem of the samples, never of the training (TRN-03).

        Raises RuntimeError when the device is out of memory: with less in its caches they may fit.
        """
        target = self.job.folder.path / "samples" / f"step-{progress.step:08d}"
        began_s = time.monotonic()
        give_back_heap()  # decoding makes tensors larger than what a step on a processor has left
        assistant = self.parts.networks.assistant
        precision = DTYPES[self.job.prepared.config.output.precision]
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Text encoders are loaded before memory is needed for images, and let go.
            drawings = [*self._own(), *self._asked(target, step=progress.step)]
            with (
                self.parts.chosen(),
                self.parts.adapter.rounded(precision),
                assistant.at(0.0) if assistant else nullcontext(),
                torch.no_grad(),
            ):
                images = self._images(target, drawings, step=progress.step)
        except StoppedBySignal:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, none of it the training's
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                raise
            what = f"no sample images at step {progress.step}: {first_line(error)}"
            self._problem(what, fix="free memory or disk, or use --set sampling.every_steps=0")
        else:
            seconds = time.monotonic() - began_s
            asked = {} if self._own_due else {"asked": True}
            self.job.events.emit(
                "sample", step=progress.step, images=images, seconds=seconds, **asked
            )

    def _problem(self, what: str, *, fix: str) -> None:
        self.job.events.problem(what, fix=fix, code="TRN-03")

    def _request(self, step: int) -> str | None:
        try:
            return Control(self.job.folder.path).take_samples()
        except LoraTrainError as error:
            what = f"no sample images were asked for at step {step}: {error.found}"
            self._problem(what, fix=error.fix)
            return None

    def _own(self) -> list[_Drawing]:
        if not self._own_due:
            return []
        seed, key = self.job.prepared.config.sampling.seed, texts_as(self.job.prepared).key
        return [
            _Drawing(prompt=prompt, key=key(prompt), seed=seed + index, file=f"{index:02d}.png")
            for index, prompt in enumerate(self.job.prompts)
        ]

    def _asked(self, target: Path, *, step: int) -> list[_Drawing]:
        """Return the drawing of the prompt that somebody asked for; one that cannot be encoded is a problem."""
        prompt = self._asked_due
        if not prompt or self.job.stop() is not None:
            return []
        self.job.events.emit("phase", phase="sample", message="reading the prompt", done=0, total=0)
        try:
            key = encode_prompt(self.job, self.entries.cache, prompt)
        except LoraTrainError as error:
            what = f"no sample image of {prompt[:60]!r} at step {step}: {error.found}"
            self._problem(what, fix=error.fix)
            return []
        # A resumed run may come to a step again, with another prompt asked for.
        number = len(list(target.glob("asked-*.png")))
        seed = self.job.prepared.config.sampling.seed
        return [_Drawing(prompt=prompt, key=key, seed=seed, file=f"asked-{number:02d}.png")]

    def _images(
        self, target: Path, drawings: list[_Drawing], *, step: int
    ) -> list[Mapping[str, str | int]]:
        """Make the images; those left when somebody asks to stop are not made, as saving is waiting."""
        images: list[Mapping[str, str | int]] = []
        for index, drawing in enumerate(drawings):
            if self.job.stop() is not None:
                self.job.events.problem(
                    f"{len(images)} of {len(drawings)} sample images at step {step}: asked to stop",
                    fix="nothing to do: the next samples are whole",
                    severity="note",
                    code="CKP-07",
                )
                break
            self.job.events.emit(
                "phase", phase="sample", message="sample images", done=index, total=len(drawings)
            )
            images.append(self._write(target, drawing))
        return images

    def _write(self, target: Path, drawing: _Drawing) -> Mapping[str, str | int]:
        prepared = self.job.prepared
        settings, side_px = prepared.config.sampling, prepared.config.data.resolution
        prompt, seed, file = drawing.prompt, drawing.seed, target / drawing.file
        image = self.sampler.image(
            self._text(drawing.key),
            self._text(texts_as(prepared).key(settings.negative_prompt)),
            seed=seed,
            size_px=(side_px, side_px),
            steps=settings.steps,
            guidance_scale=settings.guidance_scale,
        )
        info = PngInfo()
        width, height = image.size
        info.add_text(
            "parameters",
            f"{prompt}\nNegative prompt: {settings.negative_prompt}\nSteps: {settings.steps}, "
            f"CFG scale: {settings.guidance_scale:g}, Seed: {seed}, Size: {width}x{height}",
        )
        image.save(file, pnginfo=info)
        return {"prompt": prompt, "seed": seed, "file": f"samples/{target.name}/{file.name}"}

    def _text(self, key: CacheKey) -> Conditioning:
        """Return a prompt's texts; text encoders that are trained along run on its tokens as they are now."""
        return self.parts.model.embed(self.entries.read(key))

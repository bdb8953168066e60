"""Previews: the first prompt drawn small and quickly every few steps, so that one sees a training learn.

They are drawn by the base's own sampler with fewer steps, and decoded by its VAE (`real`) or by a linear map from
latents to colours (`approximate`), which is fitted to the latents and pixels of the run's own sample images: no family
has constants of its own. A preview looks and does nothing else: it draws with a generator of its own, and where it
fails, out of memory included, the run goes on without previews. All of them together take a hundredth of the time so
far at most; on a machine that is slower than planned there are fewer.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from lora_trainer.common.errors import LoraTrainError, StoppedBySignal, first_line
from lora_trainer.common.event_kinds import Preview
from lora_trainer.common.files import write_atomic
from lora_trainer.config.prompt_line import seeds
from lora_trainer.families.base.sampling import as_image
from lora_trainer.hardware.device_calls import synchronize
from lora_trainer.network.out_of_memory import free_memory
from lora_trainer.planning.run_time import PREVIEW_EVERY_S, PREVIEW_SHARE, PREVIEWS
from lora_trainer.run.build import negative_of, sample_text
from lora_trainer.run.run_folder import TrainingJob
from lora_trainer.run.samples import SampleAction, reference_pictures
from lora_trainer.training.actions import Progress

FOLDER = "previews"
COLOURS = "colours.json"
# Pixels of a preview for each token, along a side: a token is a square of four latents. A latent is one pixel.
_TOKEN_PX = 2
# Keeps the colours of few or plain images finite; nothing beside the sums over thousands of cells.
_RIDGE = 1e-3


@dataclass(kw_only=True)
class Colours:
    """A linear map from each cell of latents to its pixels, fitted by least squares as images are seen.

    A cell is a latent, or a token where the family's pipeline has tokens. Its values and a 1 give its RGB pixels.
    """

    weights: Tensor | None = None
    _products: Tensor | None = None
    _targets: Tensor | None = None

    def learn(self, latents: Tensor, pixels: Tensor) -> None:
        """Take one image: latents as the pipeline returns them, pixels [1, 3, H, W] in [-1, 1]."""
        height, width = pixels.shape[-2:]
        known = _cells(latents, aspect=width / height)
        rows, columns = known.shape[:2]
        cell_px = _TOKEN_PX if latents.ndim == 3 else 1
        small = adaptive_avg_pool2d(pixels.float(), (rows * cell_px, columns * cell_px))[0].cpu()
        wanted = small.reshape(3, rows, cell_px, columns, cell_px).permute(1, 3, 0, 2, 4)
        inputs = _with_one(known).flatten(0, 1)
        products = inputs.T @ inputs
        targets = inputs.T @ wanted.reshape(rows * columns, -1).double()
        if self._products is None or self._targets is None:
            self._products, self._targets = torch.zeros_like(products), torch.zeros_like(targets)
        self._products += products
        self._targets += targets
        ridge = _RIDGE * torch.eye(len(products), dtype=torch.float64)
        self.weights = torch.linalg.solve(self._products + ridge, self._targets)

    def decoded(self, latents: Tensor, *, size_px: tuple[int, int]) -> Tensor:
        """Return the pixels [1, 3, h, w] in [-1, 1] of latents of an image of (width, height)."""
        assert self.weights is not None, "nothing was learned"
        known = _cells(latents, aspect=size_px[0] / size_px[1])
        rows, columns = known.shape[:2]
        cell_px = math.isqrt(self.weights.shape[1] // 3)
        drawn = (_with_one(known) @ self.weights).reshape(rows, columns, 3, cell_px, cell_px)
        pixels = drawn.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * cell_px, columns * cell_px)
        return pixels.clamp(-1, 1).float()

    def to_json(self) -> str:
        assert self.weights is not None, "nothing was learned"
        return json.dumps({"weights": self.weights.tolist()})

    @classmethod
    def from_json(cls, text: str) -> Colours:
        """Return those that `to_json` wrote; raises ValueError, KeyError or TypeError for anything else."""
        weights = torch.tensor(json.loads(text)["weights"], dtype=torch.float64)
        if weights.ndim != 2 or weights.shape[1] not in (3, 3 * _TOKEN_PX**2):
            raise ValueError(f"colours of the shape {tuple(weights.shape)}")
        return cls(weights=weights)


def _cells(latents: Tensor, *, aspect: float) -> Tensor:
    """Return latents [1, C, h, w], [1, C, 1, h, w] or tokens [1, n, C] as [rows, columns, C] on the processor."""
    values = latents.detach().double().cpu()[0]
    if values.ndim == 2:
        rows = max(1, round(math.sqrt(len(values) / aspect)))
        tokens: Tensor = values.unflatten(0, (rows, -1))
        return tokens
    if values.ndim == 4:  # one frame
        values = values[:, 0]
    return values.permute(1, 2, 0)


def _with_one(cells: Tensor) -> Tensor:
    return torch.cat([cells, torch.ones_like(cells[..., :1])], dim=-1)


@dataclass(kw_only=True)
class Previews:
    """Writes previews/step-XXXXXXXX.jpg; `samples` has the sampler and the weights to draw with.

    `clock` returns seconds.
    """

    job: TrainingJob
    samples: SampleAction
    clock: Callable[[], float] = time.monotonic
    colours: Colours = field(default_factory=Colours)
    _began_s: float = field(init=False)
    _spent_s: float = field(default=0.0, init=False)
    _cost_s: float = field(default=0.0, init=False)
    _drawn: int = field(default=0, init=False)
    _last_step: int | None = field(default=None, init=False)
    _is_on: bool = field(init=False)

    def __post_init__(self) -> None:
        sampling = self.job.prepared.config.sampling
        self._is_on = bool(
            sampling.preview != "off" and sampling.every_steps and self.job.prepared.drawn_prompts
        )
        self._began_s = self.clock()
        # A resumed run draws in the colours that it learned before.
        with suppress(OSError, ValueError, KeyError, TypeError):
            self.colours = Colours.from_json(self._folder.joinpath(COLOURS).read_text("utf-8"))

    @property
    def _folder(self) -> Path:
        return self.job.folder / FOLDER

    def seen(self, latents: Tensor, pixels: Tensor) -> None:
        """Take a sample image that the VAE has decoded."""
        if not self._is_on or self.job.prepared.config.sampling.preview != "approximate":
            return
        try:
            self.colours.learn(latents, pixels)
            self._folder.mkdir(exist_ok=True)
            write_atomic(self._folder / COLOURS, self.colours.to_json().encode(), durable=False)
        except Exception as error:  # noqa: BLE001 - an image is drawn, whatever its colours teach
            self._give_up(error, step=None)

    def __call__(self, progress: Progress) -> None:
        """Draw a preview where one is due."""
        if not self._is_due(progress):
            return
        step = progress.step
        synchronize(
            self.samples.parts.model.device
        )  # what waits on a GPU is not the preview's time
        began_s = self.clock()
        try:
            self._draw(step, began_s=began_s)
        except StoppedBySignal:
            raise
        except Exception as error:  # noqa: BLE001 - a pipeline may raise anything, none of it the training's
            self._give_up(error, step=step)
        self._cost_s = self.clock() - began_s
        self._spent_s += self._cost_s
        self._last_step = step
        self._drawn += 1

    def _is_due(self, progress: Progress) -> bool:
        if not self._is_on or progress.stopping:
            return False
        is_real = self.job.prepared.config.sampling.preview == "real"
        if not is_real and self.colours.weights is None:
            return False  # the next sample images teach the colours
        if progress.step == 0:
            return self._last_step is None
        every = max(1, math.ceil(self.job.prepared.config.train.steps / PREVIEWS))
        if self._last_step is not None and progress.step - self._last_step < every:
            return False
        return self._is_cheap(progress.step) and self.job.stop() is None

    def _is_cheap(self, step: int) -> bool:
        """Return whether another preview stays within the share of the time.

        The first of the LoRA comes as soon as it stays within that of the whole run, by the steps so far.
        """
        so_far_s = self.clock() - self._began_s
        if self._drawn == 1:
            if so_far_s < PREVIEW_EVERY_S:
                return False
            so_far_s *= self.job.prepared.config.train.steps / step
        return self._spent_s + self._cost_s <= so_far_s * PREVIEW_SHARE

    def _draw(self, step: int, *, began_s: float) -> None:
        prepared, sampler = self.job.prepared, self.samples.sampler
        settings, prompt = prepared.config.sampling, prepared.drawn_prompts[prepared.preview_index]
        references = prepared.sample_references[prepared.preview_index]
        (seed,) = seeds((prompt,), settings.seed)
        size_px = self._size_px()
        negative = negative_of(prompt, prepared)
        with self.samples.drawing(), self.samples.at_strength_of(prompt):
            latents = sampler.latents(
                self.samples.text(sample_text(prepared, prompt.text, references).key),
                self.samples.text(sample_text(prepared, negative, references).key),
                seed=seed,
                size_px=size_px,
                steps=settings.preview_steps,
                guidance_scale=prompt.guidance_scale or settings.guidance_scale,
                references=reference_pictures(prepared, references),
            )
            if settings.preview == "real":
                pixels = sampler.decoded(latents, size_px)
            else:
                pixels = self.colours.decoded(latents, size_px=size_px)
        self._folder.mkdir(exist_ok=True)
        name = f"step-{step:08d}.jpg"
        write_atomic(self._folder / name, _jpeg(as_image(pixels)), durable=False)
        self.job.events.emit(
            Preview(
                step=step,
                file=f"{FOLDER}/{name}",
                prompt=prompt.line,
                seed=seed,
                drawn=settings.preview,
                denoising_steps=settings.preview_steps,
                seconds=self.clock() - began_s,
            )
        )

    def _size_px(self) -> tuple[int, int]:
        """Return width and height: those of the prompt's sample image, as much smaller as previews are."""
        prepared = self.job.prepared
        side_px, step_px = prepared.config.data.resolution, prepared.facts.bucket_step_px
        smaller = prepared.config.sampling.preview_resolution / side_px
        width_px, height_px = (
            max(step_px, round(side * smaller / step_px) * step_px)
            for side in prepared.drawn_prompts[prepared.preview_index].size_px(side_px)
        )
        return width_px, height_px

    def _give_up(self, error: Exception, *, step: int | None) -> None:
        self._is_on = False
        free_memory()
        reason = error.found if isinstance(error, LoraTrainError) else first_line(error)
        where = "" if step is None else f" from step {step} on"
        self.job.events.problem(
            f"no previews{where}: {reason}",
            fix="nothing: training goes on as it would with them; sampling.preview=off leaves them out",
            severity="note",
            code="TRN-03",
        )


def _jpeg(image: Image.Image) -> bytes:
    written = BytesIO()
    image.save(written, format="JPEG", quality=92, subsampling=0)
    return written.getvalue()

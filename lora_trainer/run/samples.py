"""Sample images: of a training on the way, and of a finished LoRA.

On the way they have the same prompts and seeds at every stage, step 0 being the untouched base. Somebody may ask for a
prompt of their own while the training goes on (control/sample). It is encoded and drawn between two steps with seeds
of its own, so that it changes nothing of the training. The adapter is rounded to the precision of the export, so that
a plain diffusers pipeline with the file of that step gives the same image.

A finished LoRA is drawn with as any other program would: plain pipeline, load, generate. Pipeline class, scheduler and
prompt encoding are diffusers' own; networks, tokenizers and the float32 VAE come from the loaders of the family.
"""

from __future__ import annotations

import gc
import glob
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

import torch
from PIL.Image import Image
from PIL.PngImagePlugin import PngInfo

from lora_trainer import families
from lora_trainer.cache.cache_plan import Entries, Needs
from lora_trainer.cache.encode import fill
from lora_trainer.cache.store import Cache, CacheKey
from lora_trainer.common.caption_markup import NewWord
from lora_trainer.common.errors import (
    InputError,
    LoraTrainError,
    MachineError,
    RequestError,
    StoppedBySignal,
    first_line,
)
from lora_trainer.common.event_kinds import Event, Phase, Problem, SampleFile, Samples
from lora_trainer.common.events import EventStream
from lora_trainer.common.files import disk_error, write_atomic
from lora_trainer.common.processes import give_back_heap
from lora_trainer.config.config import build_config, flatten
from lora_trainer.config.declare import Precision
from lora_trainer.config.inputs import DataSettings
from lora_trainer.config.prompt_line import SamplePrompt, check_sizes, read_prompt, seeds
from lora_trainer.config.running import Config, SamplingSettings
from lora_trainer.dataset.buckets import Bucket, cut, place
from lora_trainer.dataset.images import decode
from lora_trainer.dataset.records import Reference
from lora_trainer.families.base.facts import BaseFacts, Conditioning, SamplingRecipe
from lora_trainer.families.base.family import Family
from lora_trainer.families.base.sampling import (
    Sampler,
    appended,
    build_sampler,
    editing_pipeline,
    pipeline_arguments,
    plain_pipeline,
)
from lora_trainer.families.files.locate import locate, with_caption_tokens, with_choices
from lora_trainer.hardware.machine import GIB, free_ram_bytes
from lora_trainer.lora.tensors import DTYPES
from lora_trainer.lora_file.embedding import trained_vectors, trained_words
from lora_trainer.lora_file.metadata import header_settings
from lora_trainer.lora_file.read import read_contents
from lora_trainer.lora_file.tensor_file import file_of, holds_adapter
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.run_record import RUN_FILE
from lora_trainer.reporting.sample_files import try_names
from lora_trainer.run.build import (
    TrainComponents,
    encoder_arguments,
    negative_of,
    sample_text,
)
from lora_trainer.run.device import CPU, best_device
from lora_trainer.run.prepare import Prepared, refuse_strengths
from lora_trainer.run.run_folder import TrainingJob, read_run
from lora_trainer.training.actions import Progress

ONE_COLOUR = "TRN-07"
"""The code of a problem: all sample images of a step have one colour."""
# Replaces a trigger that was trained as new tokens in prompts; no tokenizer has this word.
WORD_IN_PROMPTS = "<new-word>"
# What a base takes of the machine's memory to draw without a GPU: its weights, and some room for what is computed.
_FP32_BYTES, _DRAWING_BYTES = 4, 1 << 30


@dataclass(frozen=True)
class Drawing:
    """An image to draw: what its prompt says, its seed, the name of its file, the images it begins with."""

    prompt: SamplePrompt
    seed: int
    name: str
    references: tuple[Reference, ...] = ()


@dataclass(kw_only=True)
class SampleAction:
    """Writes samples/step-XXXXXXXX/NN.png every so many steps, at step 0, at the end, and when somebody asks.

    The prompt that a request brings becomes asked-00.png with the seed of the first prompt.
    """

    what: ClassVar = "the sample images"
    job: TrainingJob
    parts: TrainComponents
    entries: Entries
    # Gets the latents and the pixels of each image, from which the colours of previews are learned.
    seen: Callable[[torch.Tensor, torch.Tensor], None] = lambda latents, pixels: None
    # The images due at this step: of the run's own prompts, of the prompt that somebody asked for. They are kept
    # from `due` to the call, which is repeated when the device is out of memory.
    _own_due: bool = field(default=True, init=False)
    _asked_due: str = field(default="", init=False)

    @cached_property
    def sampler(self) -> Sampler:
        """The family's sampler on the networks in training, built when the first images are made."""
        return build_sampler(
            self.job.prepared.family,
            self.job.prepared.facts,
            denoiser=self.parts.model.denoiser,
            device=self.parts.model.device,
        )

    def due(self, progress: Progress) -> bool:
        if progress.stopping:
            return False
        every = self.job.prepared.config.sampling.every_steps
        regular = every > 0 and (progress.step % every == 0 or progress.ending)
        request = None
        try:
            request = Control(self.job.folder).take_samples()
        except LoraTrainError as error:
            what = f"no sample images were asked for at step {progress.step}: {error.found}"
            self._problem(what, fix=error.fix)
        self._asked_due = request or ""
        self._own_due = regular or request == ""
        return self._own_due or bool(self._asked_due)

    def __call__(self, progress: Progress) -> None:
        """Make the images; a failure is a problem of the samples, never of the training (TRN-03).

        Raises RuntimeError when the device is out of memory: with less in its caches they may fit.
        """
        target = self.job.folder / "samples" / f"step-{progress.step:08d}"
        began_s = time.monotonic()
        give_back_heap()  # decoding makes tensors larger than what a step on a processor has left
        try:
            target.mkdir(parents=True, exist_ok=True)
            # Text encoders are loaded before memory is needed for images, and let go.
            prompts = self.job.prepared.drawn_prompts if self._own_due else ()
            own_seeds = seeds(prompts, self.job.prepared.config.sampling.seed)
            references = self.job.prepared.sample_references if self._own_due else ()
            rows = zip(prompts, own_seeds, references, strict=True)
            drawings = [
                Drawing(prompt, seed, f"{index:02d}.png", own)
                for index, (prompt, seed, own) in enumerate(rows)
            ]
            drawings += self._asked(target, step=progress.step)
            with self.drawing():
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
            asked = not self._own_due
            self.job.events.emit(
                Samples(step=progress.step, images=images, seconds=seconds, asked=asked)
            )

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Have the weights that an export would have now, while the block runs."""
        assistant = self.parts.networks.assistant
        with (
            self.parts.chosen(),
            self.parts.adapter.rounded(DTYPES[self.job.prepared.config.output.precision]),
            assistant.at(0.0) if assistant else nullcontext(),
            torch.no_grad(),
        ):
            yield

    def at_strength_of(self, prompt: SamplePrompt) -> AbstractContextManager[None]:
        """Have the adapter at the strength that a prompt asks for, while the block runs."""
        return nullcontext() if prompt.strength is None else self.parts.adapter.at(prompt.strength)

    def _problem(self, what: str, *, fix: str, code: str = "TRN-03") -> None:
        self.job.events.problem(what, fix=fix, code=code)

    def _asked(self, target: Path, *, step: int) -> list[Drawing]:
        """Return the drawing of the prompt that somebody asked for; one that cannot be encoded is a problem."""
        line, prepared = self._asked_due, self.job.prepared
        if not line or self.job.stop() is not None:
            return []
        self.job.events.emit(Phase(phase="sample", message="reading the prompt", done=0, total=0))
        try:
            prompt = read_prompt(line)
            refuse_strengths((prompt,), prepared.config.adapter)
            check_sizes(
                (prompt,),
                step_px=prepared.facts.bucket_step_px,
                planned_side_px=prepared.config.data.resolution,
            )
            references = prepared.sample_references[0]
            for text in (prompt.text, negative_of(prompt, prepared)):
                encode_prompt(self.job, self.entries.cache, text, references)
        except LoraTrainError as error:
            what = f"no sample image of {line[:60]!r} at step {step}: {error.found}"
            self._problem(what, fix=error.fix)
            return []
        # A resumed run may come to a step again, with another prompt asked for.
        number = len(list(target.glob("asked-*.png")))
        (seed,) = seeds((prompt,), prepared.config.sampling.seed)
        return [Drawing(prompt, seed, f"asked-{number:02d}.png", references)]

    def _images(self, target: Path, drawings: list[Drawing], *, step: int) -> list[SampleFile]:
        """Make the images; those left when somebody asks to stop are not made, as saving is waiting."""
        images: list[SampleFile] = []
        empty: list[str] = []
        prepared = self.job.prepared
        settings, side_px = prepared.config.sampling, prepared.config.data.resolution
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
                Phase(phase="sample", message="sample images", done=index, total=len(drawings))
            )
            prompt, seed = drawing.prompt, drawing.seed
            negative = negative_of(prompt, prepared)
            steps = prompt.steps or settings.steps
            scale = prompt.guidance_scale or settings.guidance_scale
            with self.at_strength_of(prompt):
                image = self.sampler.image(
                    self.text(sample_text(prepared, prompt.text, drawing.references).key),
                    self.text(sample_text(prepared, negative, drawing.references).key),
                    seed=seed,
                    size_px=prompt.size_px(side_px),
                    steps=steps,
                    guidance_scale=scale,
                    references=reference_pictures(prepared, drawing.references),
                    seen=self.seen,
                )
            info = PngInfo()
            width, height = image.size
            info.add_text(
                "parameters",
                f"{prompt.text}\nNegative prompt: {negative}\nSteps: {steps}, "
                f"CFG scale: {scale:g}, Seed: {seed}, Size: {width}x{height}",
            )
            image.save(target / drawing.name, pnginfo=info)
            if image.getcolors(1) is not None:
                empty.append(drawing.name)
            file = f"samples/{target.name}/{drawing.name}"
            # The whole line: rows of the same words are told apart by their options.
            images.append(SampleFile(prompt=prompt.line, seed=seed, file=file))
        if empty and len(empty) == len(images):
            self._problem(
                f"all sample images at step {step} have one colour, which is not a picture",
                fix="if those of step 0 have too, the base's VAE is damaged: download it again or name another file in "
                "base.vae; else the LoRA has: lower optimizer.learning_rate",
                code=ONE_COLOUR,
            )
        return images

    def text(self, key: CacheKey) -> Conditioning:
        """Return a prompt's texts; text encoders that are trained along run on its tokens as they are now."""
        return self.parts.model.embed(self.entries.read(key))


def reference_pictures(prepared: Prepared, references: Sequence[Reference]) -> list[Image]:
    """Return reference images as they are trained: decoded, scaled and cropped."""
    data = prepared.config.data
    return [
        cut(
            decode(one.path, settings=data, content_hash=one.content_hash).image,
            one.placements[0],
            flip=False,
        )
        for one in references
    ]


def encode_prompt(
    job: TrainingJob, cache: Cache, prompt: str, references: Sequence[Reference] = ()
) -> None:
    """Encode a prompt, read with its references, in the middle of a training, unless the cache has it.

    The text encoders are loaded into host memory and run on the processor, because the GPU's memory is planned
    for the training. Raises MachineError where the host's free memory is too small for them.
    """
    prepared = job.prepared
    text = sample_text(prepared, prompt, references)
    if cache.has(text.key):
        return
    dtype = DTYPES[prepared.config.memory.text_encoder_precision]
    needed_bytes = prepared.facts.parts["text_encoder"].parameters * dtype.itemsize
    free_bytes = free_ram_bytes()
    if needed_bytes + GIB > free_bytes:
        raise MachineError(
            f"the text encoders need {needed_bytes / GIB:.1f} GiB beside the training, "
            f"{free_bytes / GIB:.1f} GiB of memory are free",
            fix="ask for one of the run's own prompts, or try the prompt when the training has ended",
        )

    # The phases of caching stay unsaid: the run is between two steps of its training.
    def pass_on_problem(event: Event) -> None:
        if isinstance(event, Problem):
            job.events.emit(event)

    events = EventStream(listeners=[pass_on_problem])
    only = Needs(images={}, texts={text.key.digest: text}, sources={})
    fill(only, cache, devices=(CPU,), events=events, **encoder_arguments(prepared))


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """A LoRA in a plain diffusers pipeline on this machine's best device, as any other program would use it.

    `side_px` is the resolution that it was trained at, else the base's; `drawing` are the steps and the guidance of
    its own sample images, on another base than its own those of that base.
    """

    file: Path
    pipeline: Any  # a diffusers pipeline; its class depends on the family
    side_px: int
    negative_prompt: str
    drawing: SamplingRecipe
    family: Family
    facts: BaseFacts
    word: NewWord | None
    references_px: int
    """Side of the square with the most pixels that a reference image is read with."""

    @cached_property
    def editing(self) -> Any:
        """The pipeline that draws with references, with the networks of the other."""
        return editing_pipeline(self.family, self.facts, self.pipeline)

    def refuse_references(self, references: Sequence[Image]) -> None:
        """Raise RequestError for reference images that are not read, and for none where the base needs one."""
        reads = self.facts.references
        if len(references) > (0 if reads is None else reads.most):
            most = "none" if reads is None else f"at most {reads.most}"
            raise RequestError(
                f"{len(references)} reference images are given, and {self.facts.source} reads {most}",
                fix="give fewer, or a LoRA of a base that edits",
            )
        if reads is not None and len(references) < reads.least:
            raise RequestError(
                f"{self.facts.source} draws nothing without a reference image",
                fix="give the image to edit with --reference",
            )

    def fitted(self, references: Sequence[Image], size_px: tuple[int, int]) -> list[Image]:
        """Return reference images of an image of (width, height), as large as they are trained with."""
        reads, token_px = self.facts.references, self.facts.vae_factor * self.facts.patch
        images = []
        for image in references:
            assert reads is not None
            size = size_px
            if not reads.as_channels:
                size = reads.size_px(*image.size, side_px=self.references_px, token_px=token_px)
            images.append(cut(image, place(*image.size, buckets=[Bucket(*size)]), flip=False))
        return images

    def image(
        self, prompt: str, *, seed: int, strength: float = 1.0, references: Sequence[Image] = ()
    ) -> Image:
        """Draw one image; the same prompt, seed and strength give the same image on the same machine.

        A base that edits reads `references` (RGB), the first one first.

        Options behind the prompt (`a cat --n blurry --w 512`) stand above what is said otherwise, the seed too.
        Raises RequestError for a strength that is not finite, for options that cannot be drawn, and for references
        that are not read.
        """
        _refuse_not_finite(strength)
        wanted = read_prompt(prompt)
        check_sizes((wanted,), step_px=self.facts.bucket_step_px)
        width_px, height_px = wanted.size_px(self.side_px)
        (seed,) = seeds((wanted,), seed)
        pipeline = self.pipeline
        if wanted.strength is not None:
            strength = wanted.strength
        pipeline.set_adapters(pipeline.get_active_adapters(), adapter_weights=strength)
        steps = wanted.steps or self.drawing.steps
        self.refuse_references(references)
        images = self.fitted(references, (width_px, height_px))
        arguments, text = pipeline_arguments(
            self.family,
            pipeline,
            self.facts,
            wanted.text
            if self.word is None
            else WORD_IN_PROMPTS.join(self.word.split(wanted.text)),
            self.negative_prompt if wanted.negative is None else wanted.negative,
            guidance_scale=wanted.guidance_scale or self.drawing.guidance_scale,
            steps=steps,
            references=images,
        )
        denoiser = getattr(pipeline, self.family.traits.folder)
        with appended(
            self.family, self.facts, denoiser, images, text=text, vae=pipeline.vae
        ) as is_appended:
            if images and not is_appended:
                assert self.facts.references is not None
                size_px = (width_px, height_px)
                arguments = {**arguments, **self.facts.references.drawing(images, size_px)}
                pipeline = self.editing
            image: Image = pipeline(
                **arguments,
                generator=torch.Generator().manual_seed(seed),
                num_inference_steps=steps,
                width=width_px,
                height=height_px,
            ).images[0]
        return image


@dataclass(kw_only=True)
class Bench:
    """Keeps the base of the last LoRA loaded, for the next LoRA of the same base and the same LoRA at other strengths.

    What is drawn is equal to what `load_adapter` alone draws. `before_pass` is called before each pass of the denoiser
    with its timestep, which the passes of a step have in common; what it raises ends the drawing, and the base stays
    loaded.
    """

    before_pass: Callable[[float], None] = lambda _: None
    _base: tuple[object, ...] = ()
    _pipeline: Any = None
    _adapter: LoadedAdapter | None = None
    _version: tuple[object, ...] = ()

    @property
    def pipeline(self) -> Any:
        """The pipeline that is loaded, None before the first."""
        return self._pipeline

    @property
    def base(self) -> str:
        """The name of the base that is loaded, "" for none."""
        facts = self._base[0] if self._pipeline is not None else None
        return facts.source if isinstance(facts, BaseFacts) else ""

    @property
    def steps(self) -> int:
        """The denoising steps of an image of the LoRA that is loaded, if its prompt asks for no others; 0 for none."""
        return 0 if self._adapter is None else self._adapter.drawing.steps

    def load(self, run: Path, *, base: str | None = None) -> LoadedAdapter:
        """Return the LoRA of a run folder or an adapter file on its base; raises as `load_adapter` does."""
        chosen = _chosen(run, base=base)
        changed = chosen.file.stat()
        version = (chosen.file, changed.st_mtime_ns, changed.st_size, base)
        if self._adapter is not None and self._version == version:
            return self._adapter
        device, precision = _device_and_precision(chosen.family, chosen.facts)
        loaded = (chosen.facts, precision, device)
        keeps_words = self._adapter is not None and self._adapter.word is not None
        if self._pipeline is None or self._base != loaded or keeps_words:
            self.empty()  # before another base is loaded beside it
            self._pipeline = _plain(chosen, precision=precision, device=device)
            denoiser = getattr(self._pipeline, chosen.family.traits.folder)
            denoiser.register_forward_pre_hook(
                lambda _, words, named: self.before_pass(_timestep(words, named)), with_kwargs=True
            )
            self._base = loaded
        else:
            self._pipeline.unload_lora_weights()
        # A load that fails may leave half of a LoRA in the networks.
        pipeline, self._pipeline, self._adapter = self._pipeline, None, None
        self._adapter = _with_adapter(chosen, pipeline)
        self._pipeline, self._version = pipeline, version
        return self._adapter

    def gpu_bytes(self) -> int:
        """Return what the allocator holds of the GPU, 0 without one."""
        return torch.accelerator.memory_reserved() if torch.accelerator.is_available() else 0

    def empty(self) -> None:
        """Let go of what is loaded."""
        had = self._pipeline is not None
        self._pipeline = self._adapter = None
        self._base = self._version = ()
        if had:
            gc.collect()  # networks and hooks refer to each other
            if torch.accelerator.is_available():
                torch.accelerator.empty_cache()
            give_back_heap()


def _timestep(words: Sequence[Any], named: Mapping[str, Any]) -> float:
    """Return the timestep of a pass, which a denoiser of diffusers gets by its name or as its second argument."""
    names = ("timestep", "timesteps", "t")
    timestep = next((named[name] for name in names if name in named), None)
    if timestep is None:
        timestep = words[1]
    return float(torch.as_tensor(timestep).flatten()[0])


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """An adapter file, its settings, and the base that it is drawn with."""

    file: Path
    config: Config
    facts: BaseFacts
    family: Family


def load_adapter(run: Path, *, base: str | None = None) -> LoadedAdapter:
    """Load a LoRA onto its base; `run` is a run folder or an adapter file.

    Raises InputError without an adapter, RequestError if the base is unknown.
    """
    return Bench().load(run, base=base)


def _chosen(run: Path, *, base: str | None) -> _Chosen:
    file, source, config = file_and_base(run, base=base)
    config = config or Config()
    # Those of the adapter, without paths of other files.
    is_own = is_own_base(config.base.model, source)
    if not is_own:
        values = flatten(config)
        config = build_config({key: values[key] for key in values if key not in OF_THE_BASE})
    settings = config.base.model_copy(update={"model": source, "vae": None, "companion": "auto"})
    try:
        facts = locate(settings)
    except InputError as error:
        if base is not None:
            raise
        # An adapter file names its base without the folder, which might reveal private names.
        raise InputError(error.found, fix="give the base's folder with --base") from None
    facts = with_choices(facts, settings, zero_terminal_snr=config.objective.zero_terminal_snr)
    facts = with_caption_tokens(facts, config.data.caption_tokens).for_references()
    return _Chosen(file=file, config=config, facts=facts, family=families.family(facts.family))


def _device_and_precision(family: Family, facts: BaseFacts) -> tuple[torch.device, Precision]:
    weights = sum(facts.release.parameters.values())
    device, has_bf16 = best_device(needed_ram_bytes=_FP32_BYTES * weights + _DRAWING_BYTES)
    if device.type == "cpu":
        return device, "fp32"
    return device, next(each for each in family.traits.precisions if each != "bf16" or has_bf16)


def _plain(chosen: _Chosen, *, precision: Precision, device: torch.device) -> Any:
    """Return diffusers' pipeline of the base, without a LoRA."""
    return plain_pipeline(chosen.family, chosen.facts, dtype=DTYPES[precision], device=device)


def _with_adapter(chosen: _Chosen, pipeline: Any) -> LoadedAdapter:
    """Load the LoRA and its new words into a pipeline."""
    file, family, facts, config = chosen.file, chosen.family, chosen.facts, chosen.config
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    word = trained_words(read_contents(file).metadata)
    vectors = {} if word is None else trained_vectors(file, word)
    for component, key in family.text.new_token_keys.items() if word is not None else ():
        network = getattr(pipeline, component)
        tokenizer = getattr(pipeline, component.replace("text_encoder", "tokenizer"))
        pipeline.load_textual_inversion(
            torch.from_numpy(vectors[key]),
            token=WORD_IN_PROMPTS,
            text_encoder=network,
            tokenizer=tokenizer,
        )
        # An old CLIP config has eos_token_id 2, and transformers then pools at the largest token id of
        # the prompt. With new tokens that would be theirs instead of the end's.
        for module in network.modules():
            if getattr(module, "eos_token_id", None) == 2:
                module.eos_token_id = tokenizer.eos_token_id
    trained_px = config.data.resolution
    side_px = facts.resolution_px if trained_px == "auto" else trained_px
    return LoadedAdapter(
        file=file,
        pipeline=pipeline,
        side_px=side_px,
        references_px=config.data.reference_resolution or side_px,
        negative_prompt=config.sampling.negative_prompt,
        drawing=recipe(config.sampling, facts),
        family=family,
        facts=facts,
        word=word,
    )


# Settings that a plan decides by the base: what they say of one says nothing of another.
OF_THE_BASE = (
    "base.prediction",
    "base.distilled",
    "base.assistant",
    "base.system_prompt",
    "objective.zero_terminal_snr",
    "sampling.steps",
    "sampling.guidance_scale",
)


def is_own_base(trained_on: str, source: str) -> bool:
    """Return whether a source is the base of a training, which may lie in another folder now."""
    return Path(trained_on).name == Path(source).name


def recipe(sampling: SamplingSettings, facts: BaseFacts) -> SamplingRecipe:
    """Return how an adapter's images are drawn: as its own samples were, else as the base is published."""
    published = facts.release.drawing
    steps, scale = sampling.steps, sampling.guidance_scale
    return replace(
        published,
        steps=published.steps if steps == "auto" else steps,
        guidance_scale=published.guidance_scale if scale == "auto" else scale,
    )


def file_and_base(path: Path, *, base: str | None) -> tuple[Path, str, Config | None]:
    """Return the adapter file of a run folder or path, its base, and its settings where the file states them.

    `base` replaces the base that is stated. Raises InputError without an adapter, RequestError if no base is known.
    """
    run = None
    if path.is_dir() and not holds_adapter(path):
        if not (path / RUN_FILE).is_file():
            fix = "give runs/NAME or a .safetensors file"
            raise InputError(f"{path} is not a run folder", fix=fix)
        run = read_run(path)
        name = run.name
        rolling = path.glob(f"{glob.escape(name)}-step*.safetensors")
        file = path / final_export_name(name)
        if not file.is_file():
            file = max(rolling, default=file)
        if not file.is_file():  # neither the final export nor a rolling one
            fix = "wait for its first save"
            raise InputError(f"the run {name} has no exported file yet", fix=fix)
    else:
        file = file_of(path)
    config, settings = None, header_settings(read_contents(file).metadata)
    with suppress(KeyError, ValueError, TypeError, AttributeError, RecursionError):
        config = build_config(settings) if settings else None
    own_source = run.base.source if run is not None else config and config.base.model
    source = base or own_source
    if not source or source == "auto":
        raise RequestError(
            f"{file.name} does not say which base it was trained on",
            fix="name the base with --base",
        )
    return file, source, config


def make_images(
    run: Path,
    *,
    prompts: Sequence[str],
    base: str | None,
    output: Path,
    seed: int,
    strengths: Sequence[float],
    references: Sequence[Path] = (),
    bench: Bench | None = None,
    go_on: bool = False,
) -> Iterator[Path]:
    """Write and yield an image for each prompt and strength; `run` is a run folder or an adapter file.

    A `bench` keeps the base loaded for the next call; with `go_on` images that are there are not drawn again. All
    images begin with the same `references`, and all strengths of a prompt have the same seed. Raises InputError without
    an adapter, RequestError if the base is unknown or options behind a prompt cannot be drawn, MachineError if the disk
    refuses.
    """
    for strength in strengths:
        _refuse_not_finite(strength)
    wanted = [read_prompt(prompt) for prompt in prompts]
    images = [decode(path, settings=DataSettings()).image for path in references]
    adapter = (bench or Bench()).load(run, base=base)
    adapter.refuse_references(images)  # refused before a folder is made
    check_sizes(wanted, step_px=adapter.facts.bucket_step_px)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(output, error) from error
    names = try_names(adapter.file.stem, wanted, seed=seed, strengths=strengths)
    for (index, prompt), strength in product(enumerate(prompts), strengths):
        if go_on and (output / names[index, strength]).is_file():
            yield output / names[index, strength]
            continue
        try:
            image = adapter.image(prompt, seed=seed + index, strength=strength, references=images)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise MachineError(
                f"there is too little memory to draw {prompt[:60]!r}: {first_line(error)}",
                fix="end other programs on the device, or draw smaller: --w 512 --h 512 behind the prompt",
            ) from error
        name = names[index, strength]
        png = BytesIO()
        image.save(png, format="PNG")
        write_atomic(output / name, png.getvalue(), durable=False)
        yield output / name


def _refuse_not_finite(strength: float) -> None:
    if not math.isfinite(strength):
        raise RequestError(
            "a strength is not a finite number", fix="give numbers such as --strength 0.8"
        )

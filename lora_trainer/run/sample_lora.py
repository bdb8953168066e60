"""Draws images with a finished LoRA as any other program would: plain pipeline, load, generate.

Pipeline class, scheduler and prompt encoding are diffusers' own; networks, tokenizers and the float32 VAE
come from the family's loaders.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import product
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image

from lora_trainer import families
from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.files import disk_error, write_atomic
from lora_trainer.config.config import build_config
from lora_trainer.config.declare import Precision
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.config.running import Config, SamplingSettings
from lora_trainer.families.base import BaseFacts, Family
from lora_trainer.families.locate import locate, with_caption_tokens, with_choices
from lora_trainer.lora_file.embedding import embedding_path, read_embedding, trained_words
from lora_trainer.lora_file.header import file_of, holds_adapter
from lora_trainer.lora_file.read import read_contents
from lora_trainer.lora_file.write import final_export_name
from lora_trainer.reporting.sample_files import try_name
from lora_trainer.run.device import DTYPES, best_device
from lora_trainer.run.run_folder import RUN_FILE, read_run

WORD_IN_PROMPTS = "<new-word>"
"""Replaces a trigger that was trained as new tokens in prompts; no tokenizer has this word."""


@dataclass(frozen=True, kw_only=True)
class LoadedAdapter:
    """A LoRA in a plain diffusers pipeline on this machine's best device, as any other program would use it.

    `side_px` is the resolution that it was trained at, else the base's.
    """

    file: Path
    pipeline: Any  # a diffusers pipeline; its class depends on the family
    side_px: int
    sampling: SamplingSettings
    family: Family
    facts: BaseFacts
    with_word: Callable[[str], str]

    def image(self, prompt: str, *, seed: int, strength: float = 1.0) -> Image:
        """Draw one image; the same prompt, seed and strength give the same image on the same machine.

        Raises RequestError for a strength that is not finite.
        """
        _refuse_not_finite([strength])
        pipeline = self.pipeline
        pipeline.set_adapters(pipeline.get_active_adapters(), adapter_weights=strength)
        arguments = self.family.pipeline_arguments(
            pipeline,
            self.facts,
            self.with_word(prompt),
            self.sampling.negative_prompt,
            guidance_scale=self.sampling.guidance_scale,
        )
        image: Image = pipeline(
            **arguments,
            generator=torch.Generator().manual_seed(seed),
            num_inference_steps=self.sampling.steps,
            width=self.side_px,
            height=self.side_px,
        ).images[0]
        return image


def load_adapter(run: Path, *, base: str | None = None) -> LoadedAdapter:
    """Load a LoRA onto its base; `run` is a run folder or an adapter file.

    Raises InputError without an adapter, RequestError if the base is unknown.
    """
    file, source, config = file_and_base(run, base=base)
    settings = _base_settings(config, source)
    try:
        facts = locate(settings)
    except InputError as error:
        if base is not None:
            raise
        # An adapter file names its base without the folder, which might reveal private names.
        raise InputError(error.found, fix="give the base's folder with --base") from None
    if config is not None:
        zero = config.objective.zero_terminal_snr
        facts = with_choices(facts, settings, zero_terminal_snr=None if zero == "auto" else zero)
        facts = with_caption_tokens(facts, config.data.caption_tokens)
    device, has_bf16 = best_device()
    family = families.family(facts.family)
    dtype = DTYPES[_precision(family, device, has_bf16=has_bf16)]
    pipeline = family.plain_pipeline(facts, dtype=dtype, device=device)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    trained_px = config.data.resolution if config else "auto"
    return LoadedAdapter(
        file=file,
        pipeline=pipeline,
        side_px=facts.resolution_px if trained_px == "auto" else trained_px,
        sampling=config.sampling if config else SamplingSettings(),
        family=family,
        facts=facts,
        with_word=_taught(pipeline, family, file),
    )


def file_and_base(path: Path, *, base: str | None) -> tuple[Path, str, Config | None]:
    """Return the adapter file of a run folder or path, its base, and its settings where the file states them.

    `base` replaces the base that is stated. Raises InputError without an adapter, RequestError if no base is known.
    """
    is_run = path.is_dir() and not holds_adapter(path)
    file = adapter_of(path) if is_run else file_of(path)
    config = stated_settings(read_contents(file).metadata)
    stated = str(read_run(path)["base"]["source"]) if is_run else config and config.base.model
    source = base or stated
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
) -> Iterator[Path]:
    """Write and yield an image for each prompt and strength; `run` is a run folder or an adapter file.

    All strengths of a prompt have the same seed. Raises InputError without an adapter, RequestError if the
    base is unknown, MachineError if the disk refuses.
    """
    _refuse_not_finite(strengths)
    adapter = load_adapter(run, base=base)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(output, error) from error
    several = len(strengths) > 1
    for (index, prompt), strength in product(enumerate(prompts), strengths):
        image = adapter.image(prompt, seed=seed + index, strength=strength)
        name = try_name(
            adapter.file.stem, seed=seed + index, strength=strength if several else None
        )
        png = BytesIO()
        image.save(png, format="PNG")
        write_atomic(output / name, png.getvalue(), durable=False)
        yield output / name


def _refuse_not_finite(strengths: Sequence[float]) -> None:
    if not all(map(math.isfinite, strengths)):
        raise RequestError(
            "a strength is not a finite number", fix="give numbers such as --strength 0.8"
        )


def _precision(family: Family, device: torch.device, *, has_bf16: bool) -> Precision:
    if device.type == "cpu":
        return "fp32"
    return next(each for each in family.traits.precisions if each != "bf16" or has_bf16)


def _taught(pipeline: Any, family: Family, file: Path) -> Callable[[str], str]:
    """Load the new tokens of an adapter; return a function that puts their word into a prompt.

    Raises InputError if their file is missing.
    """
    word = trained_words(read_contents(file).metadata)
    if word is None:
        return lambda prompt: prompt
    expected_file = embedding_path(file)
    beside = expected_file if expected_file.is_file() else file.with_name(expected_file.name)
    if not beside.is_file():
        raise InputError(
            f"{file.name} was trained with new tokens for {word.text!r}, but their file is missing",
            fix=f"put {expected_file.name} beside it",
        )
    vectors = read_embedding(beside).vectors
    for component, key in family.text.new_token_keys.items():
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
    return lambda prompt: WORD_IN_PROMPTS.join(word.split(prompt))


def _base_settings(config: Config | None, source: str) -> BaseSettings:
    """Return the adapter's base settings with `source` as the model, without paths of other files."""
    base = config.base if config is not None else BaseSettings()
    return base.model_copy(update={"model": source, "vae": None, "companion": "auto"})


def stated_settings(metadata: Mapping[str, str]) -> Config | None:
    """Return the settings in the header of a file from this trainer, None without readable ones."""
    try:
        settings = json.loads(metadata["lora_train.settings"])
        return build_config(settings) if isinstance(settings, dict) else None
    except (KeyError, ValueError, TypeError, AttributeError, RecursionError):
        return None


def adapter_of(run: Path) -> Path:
    """Return a run's final export, or the newest rolling one of a run that has not finished."""
    if not (run / RUN_FILE).is_file():
        raise InputError(f"{run} is not a run folder", fix="give runs/NAME or a .safetensors file")
    name = str(read_run(run)["name"])
    final = run / final_export_name(name)
    if final.is_file():
        return final
    rolling = sorted(run.glob(f"{name}-step*.safetensors"))
    if not rolling:
        raise InputError(f"the run {name} has no exported file yet", fix="wait for its first save")
    return rolling[-1]

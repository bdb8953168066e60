"""Make images with a finished LoRA the way any other program would: plain pipeline, load, generate."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch

from lora_trainer import families
from lora_trainer.config import build_config
from lora_trainer.errors import InputError, RequestError
from lora_trainer.model.load import describe, locate
from lora_trainer.output.adapter_file import read_adapter
from lora_trainer.output.export import final_export_name
from lora_trainer.run_folder import RUN_FILE, read_run


def make_images(
    run: Path, *, prompts: Sequence[str], base: str | None, output: Path, seed: int, strength: float
) -> list[Path]:
    """Write one image per prompt and return the files; `run` is a run folder or an adapter file.

    Raises InputError when there is no adapter, RequestError when the base is not known.
    """
    file = _adapter_of(run) if run.is_dir() else run
    metadata = read_adapter(file).metadata
    config = (
        build_config(json.loads(metadata["lora_train.settings"]))
        if "lora_train.settings" in metadata
        else None
    )
    source = base or (config.base.model if config else None)
    if run.is_dir():
        source = base or str(read_run(run)["base"]["source"])
    if source in (None, "auto"):
        raise RequestError(
            f"{file.name} does not say which base it was trained on", fix="name it with --base"
        )
    try:
        locate(source, revision=config.base.revision if config else None)
    except InputError as error:
        if base is not None:
            raise
        # The file names its base without the folder, which is nobody else's business.
        raise InputError(error.found, fix="say where it is with --base") from None
    facts = describe(source)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    pipeline = families.family(facts.family).plain_pipeline(facts, device=device)
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    trained_px = config.data.resolution if config else "auto"
    side_px = facts.resolution_px if trained_px == "auto" else trained_px
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for index, prompt in enumerate(prompts):
        image = pipeline(
            prompt,
            generator=torch.Generator().manual_seed(seed + index),
            num_inference_steps=config.sampling.steps if config else 25,
            guidance_scale=config.sampling.guidance_scale if config else 7.0,
            cross_attention_kwargs={"scale": strength},
            width=side_px,
            height=side_px,
        ).images[0]
        target = output / f"{file.stem}-{seed + index}.png"
        image.save(target)
        written.append(target)
    return written


def _adapter_of(run: Path) -> Path:
    """Return a run's final export, or the newest rolling one of a run that has not finished."""
    if not (run / RUN_FILE).is_file():
        raise InputError(f"{run} is not a run folder", fix="give runs/NAME or a .safetensors file")
    name = str(read_run(run)["name"])
    final = run / final_export_name(name)
    if final.is_file():
        return final
    rolling = sorted(run.glob(f"{name}-step*.safetensors"))
    if not rolling:
        raise InputError(f"the run {name} has exported nothing yet", fix="wait for its first save")
    return rolling[-1]

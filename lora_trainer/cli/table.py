"""The commands by name: where each is, and the line `--help` has for it.

A command's module is imported when the command is asked for and not before: `--help` would otherwise
load what only the queue or a captioner needs. tests/test_cli.py holds each line against the first
line of the command's own docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """Where a command is ("module:name"), and what it does in one line."""

    where: str
    does: str


def _of(module: str, name: str, does: str) -> Command:
    return Command(where=f"lora_trainer.cli.{module}:{name}", does=does)


COMMANDS: Mapping[str, Command] = {
    "plan": _of(
        "planning",
        "plan",
        "Predict memory, time and disk of a training, and say who decided its settings. Needs no GPU.",
    ),
    "check": _of(
        "look_around",
        "check",
        "Report on a dataset: score, buckets, unusable files, captions, duplicates; each with advice.",
    ),
    "inspect": _of(
        "look_around",
        "inspect",
        "Say what a LoRA file is: family, key format, rank, alpha, metadata, problems.",
    ),
    "convert": _of(
        "tools",
        "convert",
        "Write an adapter in the key names of kohya, diffusers or ComfyUI; its updates stay the same.",
    ),
    "merge": _of(
        "tools",
        "merge",
        "Add adapters up, each FILE or FILE:WEIGHT, to one adapter, or into a base model with --into.",
    ),
    "resize": _of(
        "tools",
        "resize",
        "Cut a LoRA, LoHa or LoKr to a lower rank by its singular values; the result is a LoRA.",
    ),
    "extract": _of(
        "tools",
        "extract",
        "Write what TUNED has beyond BASE, two base models of one family, as a LoRA.",
    ),
    "describe": _of(
        "tools",
        "describe",
        "Write what people are told about an adapter into its header; an empty text removes an entry.",
    ),
    "caption": _of(
        "caption",
        "caption",
        "Write a caption by a model for each picture of DATASET that has none, as NAME.txt beside it.",
    ),
    "import": _of(
        "import_settings",
        "import_settings",
        "Turn a dataset or training TOML of kohya's trainers into settings; names every key it cannot.",
    ),
    "sample": _of(
        "make_images",
        "sample",
        "Make images with the LoRA of a run folder or file, through a plain diffusers pipeline.",
    ),
    "validate": _of(
        "make_images",
        "validate",
        "Score a LoRA against the dataset it was trained on, part by part; into the run's report.",
    ),
    "profile": _of(
        "measure",
        "profile",
        "Train a few steps under torch's profiler and say what sets the pace, and which setting changes it.",
    ),
    "bench": _of(
        "measure",
        "bench",
        "Measure short trainings that differ in one setting each: batch sizes, kernels, resolutions.",
    ),
    "presets": _of(
        "look_around",
        "presets",
        "List every preset cell: what each hardware tier and priority sets.",
    ),
    "doctor": _of(
        "look_around",
        "doctor",
        "Say what this machine is, what trains on it and why, and what is missing with how to mend it.",
    ),
    "gui": _of(
        "look_around",
        "gui",
        "Open the graphical interface; its options are those of `lora-train-gui --help`.",
    ),
    "queue": _of(
        "queueing", "app", "Let trainings wait for each other: one after another on each GPU."
    ),
}

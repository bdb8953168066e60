"""The table of commands: the function of each, and its line in `--help`.

A command's module is imported only when the command runs, because `--help` would otherwise import
libraries of the queue and the captioners. tests/test_cli.py compares each line with the first line of the
command's docstring.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Command:
    """The function of a command ("module:name") and its line in the help."""

    where: str
    does: str


def _of(module: str, name: str, does: str) -> Command:
    return Command(where=f"lora_trainer.cli.{module}:{name}", does=does)


COMMANDS: Mapping[str, Command] = {
    "plan": _of(
        "planning",
        "plan",
        "Predict memory, time and disk of a training, and show why each setting has its value. Needs no GPU.",
    ),
    "check": _of(
        "look_around",
        "check",
        "Report on a dataset: score, buckets, unusable files, captions, duplicates; each with advice.",
    ),
    "inspect": _of(
        "look_around",
        "inspect",
        "Describe a LoRA file: family, key format, rank, alpha, metadata, problems.",
    ),
    "convert": _of(
        "tools",
        "convert",
        "Write an adapter in the key names of kohya, diffusers or ComfyUI; its updates stay the same.",
    ),
    "merge": _of(
        "tools",
        "merge",
        "Add up adapters, each FILE or FILE:WEIGHT, to one adapter, or into a base model with --into.",
    ),
    "resize": _of(
        "tools",
        "resize",
        "Cut a LoRA, LoHa or LoKr to a lower rank by its singular values; the result is a LoRA.",
    ),
    "extract": _of(
        "tools",
        "extract",
        "Write the difference of TUNED and BASE, two base models of one family, as a LoRA.",
    ),
    "describe": _of(
        "tools",
        "describe",
        "Write title, author, tags and other texts into an adapter's header; an empty text removes one.",
    ),
    "publish": _of(
        "tools",
        "publish",
        "Upload a LoRA to the Hugging Face Hub, with its last samples and a model card; private by default.",
    ),
    "caption": _of(
        "caption",
        "caption",
        "Let a model caption each image of DATASET that has no caption, as NAME.txt beside the image.",
    ),
    "import": _of(
        "import_settings",
        "import_settings",
        "Turn another trainer's settings file into a lora-train settings file; reports every key.",
    ),
    "sample": _of(
        "make_images",
        "sample",
        "Make images with the LoRA of a run folder or file, through a plain diffusers pipeline.",
    ),
    "validate": _of(
        "make_images",
        "validate",
        "Score a LoRA against the dataset it was trained on, part by part; adds it to the run's report.",
    ),
    "profile": _of(
        "measure",
        "profile",
        "Profile a few training steps: where their time goes, and which setting would change that.",
    ),
    "bench": _of(
        "measure",
        "bench",
        "Measure short trainings that differ in one setting each: batch sizes, kernels, resolutions.",
    ),
    "presets": _of(
        "look_around",
        "presets",
        "List the presets: the settings of each hardware tier and priority.",
    ),
    "doctor": _of(
        "look_around",
        "doctor",
        "Check this machine: its hardware, the device trainings use and why, and how to fix problems.",
    ),
    "gui": _of(
        "look_around",
        "gui",
        "Open the graphical interface; its options are those of `lora-train-gui --help`.",
    ),
    "queue": _of(
        "queueing", "app", "Queue trainings, which then run one after another on each GPU."
    ),
}

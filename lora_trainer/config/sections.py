"""All settings of a run as one value: `Config`, in which a setting may be `auto`, and `RunConfig`, without.

`build_config` and `build_run_config` (config.py) also check the rules among settings (constraints.py).
"""

from __future__ import annotations

from typing import Any, Generic

from pydantic import Field

from lora_trainer.config.declare import A_co, Decided, Section
from lora_trainer.config.inputs import BaseSettings, DataSettings
from lora_trainer.config.learning import AdapterSettings, ObjectiveSettings, TrainSettings
from lora_trainer.config.optimizer import OptimizerSettings
from lora_trainer.config.running import (
    HardwareSettings,
    LoggingSettings,
    MemorySettings,
    OutputSettings,
    SamplingSettings,
)


def _section(default: type[Section], doc: str) -> Any:
    return Field(default_factory=default, description=doc)


class Config(Section, Generic[A_co]):
    """All settings of one run, in the sections of config files; `Config` alone is a request, with `auto`."""

    base: BaseSettings = _section(BaseSettings, "the model to adapt")
    data: DataSettings[A_co] = _section(DataSettings, "images, captions, caches")
    adapter: AdapterSettings = _section(AdapterSettings, "the LoRA itself")
    train: TrainSettings[A_co] = _section(TrainSettings, "length, batch, precision")
    objective: ObjectiveSettings[A_co] = _section(ObjectiveSettings, "noise and loss")
    optimizer: OptimizerSettings = _section(OptimizerSettings, "optimizer and learning rates")
    memory: MemorySettings[A_co] = _section(MemorySettings, "fitting into memory")
    hardware: HardwareSettings[A_co] = _section(HardwareSettings, "which device")
    output: OutputSettings[A_co] = _section(OutputSettings, "files written")
    sampling: SamplingSettings[A_co] = _section(SamplingSettings, "sample images during training")
    logging: LoggingSettings = _section(LoggingSettings, "dashboards")


class RunConfig(Config[Decided]):
    """All settings of a planned run: `auto` are names, folders and settings without a meaning for the base alone."""

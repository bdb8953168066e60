"""The export of the step with the lowest validation loss, as NAME-best.safetensors.

Input: the adapter, which keeps those weights in its state, and where the run is; output: the file, and
best.json, which says of which step it is. Both follow from the resume state alone: a run that was
killed writes what it would have written.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from lora_trainer.checkpoint.codec import Copy
from lora_trainer.common.files import json_bytes, write_atomic
from lora_trainer.lora.adapter import Adapter
from lora_trainer.lora_file.write import best_export_name
from lora_trainer.run.job import TrainingJob, copied, copied_words, exporter
from lora_trainer.run.run_folder import BEST_RECORD
from lora_trainer.training.progress import Progress


@dataclass(kw_only=True)
class BestExport:
    """Writes the best step's file once for each new best step."""

    job: TrainingJob
    adapter: Adapter
    written_step: int = 0

    @property
    def file(self) -> Path:
        return self.job.folder.path / best_export_name(self.job.folder.name)

    def prepared(self, progress: Progress, copy: Copy) -> Callable[[], None]:
        """Copy the best weights; return the function that writes them, in any thread, or one that does nothing."""
        best = progress.guard.best
        if not self.adapter.best or best.step in (0, self.written_step):
            return lambda: None
        batch_size = self.job.prepared.config.train.batch_size
        then = replace(progress, step=best.step, images=best.step * batch_size)

        def take(name: str, value: Tensor) -> Tensor:
            return copy(f"best.{name}", value)

        with self.adapter.at_best():
            tensors = copied(self.adapter.tensors(), take)
            words = copied_words(self.adapter.words(), take)
        write_file = exporter(self.job, tensors, self.file, then, words=words)

        def write() -> None:
            write_file()
            record = {
                "step": best.step,
                "from": "the lowest validation loss",
                "file": self.file.name,
                "marked_at_s": time.time(),
            }
            write_atomic(self.job.folder.path / BEST_RECORD, json_bytes(record))
            self.written_step = best.step

        return write

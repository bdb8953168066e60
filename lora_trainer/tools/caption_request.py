"""What `lora-train caption` was asked for, and which of it goes together. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from lora_trainer.errors import RequestError
from lora_trainer.tools.captioners.catalogue import Writes


@dataclass(frozen=True, kw_only=True)
class CaptionRequest:
    """What `lora-train caption` was asked for; None where the kind of model decides."""

    dataset: Path
    model: str
    overwrite: bool = False
    images: tuple[str, ...] = ()
    output: Path | None = None
    prefix: str = ""
    suffix: str = ""
    trigger: str | None = None
    prompt: str | None = None
    max_tokens: int | None = None
    threshold: float | None = None
    character_threshold: float | None = None
    device: Literal["auto", "cuda", "cpu"] = "auto"

    @property
    def root(self) -> Path:
        """The folder that captions are written to."""
        return self.output or self.dataset

    def refuse_unfit(self, writes: Writes) -> None:
        """Raise RequestError for options that this kind of model has no use for, and for bad numbers."""
        unfit: dict[str, object]
        if writes == "tags":
            unfit = {"--prompt": self.prompt, "--max-tokens": self.max_tokens}
        else:
            unfit = {
                "--threshold": self.threshold,
                "--character-threshold": self.character_threshold,
            }
        for name, value in unfit.items():
            if value is not None:
                raise RequestError(
                    f"{name} is not for {self.model}, which writes {writes}",
                    fix=f"leave {name} out",
                )
        for name, share in (
            ("--threshold", self.threshold),
            ("--character-threshold", self.character_threshold),
        ):
            if share is not None and not 0 < share <= 1:
                raise RequestError(f"{name} {share:g} is no probability", fix="give 0.05 to 0.95")
        if self.max_tokens is not None and not 1 <= self.max_tokens <= 4096:
            raise RequestError(
                f"--max-tokens {self.max_tokens}", fix="give a number from 1 to 4096"
            )

    def decisive(self, source: str) -> dict[str, object]:
        """Return what decides the text of captions: a call that differs in it is another one."""
        return {
            "model": source,
            "overwrite": self.overwrite,
            "prefix": self.prefix,
            "suffix": self.suffix,
            "trigger": self.trigger,
            "prompt": self.prompt,
            "max_tokens": self.max_tokens,
            "threshold": self.threshold,
            "character_threshold": self.character_threshold,
        }

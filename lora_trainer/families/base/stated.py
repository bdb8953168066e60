"""What a file or folder states of its release beside its tensors: prediction type, noise levels, distillation.

A file states it by markers (empty tensors), in its metadata, or in its name; stated.toml has the words, and
`stated` of a family.toml those of one family. Nothing here
decides: a family takes what is stated, and says what it had to assume. Torch-free.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from lora_trainer.families.base.facts import Prediction
from lora_trainer.families.base.tables import family_table
from lora_trainer.families.files.weight_files import read_header, read_metadata

# Markers that NoobAI's releases and ComfyUI write.
V_MARKER, ZERO_SNR_MARKER = "v_pred", "ztsnr"


@dataclass(frozen=True, kw_only=True)
class Stated:
    """The words of one base: its name, and of a single file its markers and metadata."""

    name: str
    file: Path | None = None
    markers: frozenset[str] = frozenset()
    metadata: Mapping[str, str] = field(default_factory=dict)

    @property
    def texts(self) -> tuple[str, ...]:
        """The name and the titles in the metadata."""
        titles = (self.metadata.get(key, "") for key in _table()["titles"]["metadata"])
        return (self.name, *filter(None, titles))

    def predictions(self) -> tuple[Prediction, ...]:
        """Return what is said of the prediction type, the strongest word first; several where they contradict."""
        table, found = _table()["prediction"], list[Prediction]()
        if V_MARKER in self.markers:
            found.append("v_prediction")
        for key, values in table["metadata"].items():
            found += filter(None, [values.get(self.metadata.get(key, "").strip().lower())])
        kinds: tuple[Prediction, ...] = ("v_prediction", "epsilon")
        found += [kind for kind in kinds if self._says(table[kind])]
        # Pure noise says nothing about the image, so a base with zero terminal SNR predicts velocity.
        if not found and self._says_zero_snr():
            found.append("v_prediction")
        return tuple(dict.fromkeys(found))

    def zero_terminal_snr(self) -> bool:
        """Whether a base that predicts velocity says that its last timestep is pure noise.

        A file with the marker of velocity has that of the noise too, where it applies.
        """
        if V_MARKER in self.markers:
            return ZERO_SNR_MARKER in self.markers
        return self._says_zero_snr() or self._says(
            _table()["zero_terminal_snr"]["with_v_prediction"]
        )

    def _says_zero_snr(self) -> bool:
        table = _table()["zero_terminal_snr"]
        return (
            ZERO_SNR_MARKER in self.markers
            or any(self.metadata.get(key, "").lower() == "true" for key in table["metadata"])
            or self._says(table["name"])
        )

    def clip_skip(self) -> int:
        """Return the layer of the text encoder from the last that the metadata state, 1 where they state none."""
        values = (self.metadata.get(key, "").strip() for key in _table()["clip_skip"]["metadata"])
        return next((int(value) for value in values if re.fullmatch(r"[1-9]|1[0-2]", value)), 1)

    def distillation(self, family: str) -> str | None:
        """Return how the base was distilled to few steps, "" where it is said not to be, None where nothing is said."""
        own = family_table(family)["stated"].get("few_steps", ())
        for kind, pattern in (*own, *_table()["few_steps"]["rows"]):
            if self._says(pattern):
                return str(kind)
        return "" if self.is_known(family) else None

    def system_prompt(self, family: str) -> str | None:
        """Return the system prompt of the fine-tune that is named, None where none is."""
        rows = family_table(family)["stated"].get("system_prompts", ())
        return next((prompt for pattern, prompt in rows if self._says(pattern)), None)

    def steps(self) -> int:
        """Return the number of steps in the name, 0 without one."""
        match = re.search(_table()["few_steps"]["steps"], self.name)
        return int(match[1]) if match else 0

    def is_known(self, family: str) -> bool:
        """Return whether the name is that of an undistilled release whose prediction type is published."""
        return self._says(family_table(family)["stated"]["known"])

    def _says(self, pattern: str) -> bool:
        return any(re.search(pattern, text) for text in self.texts)


def stated_in(file: Path) -> Stated:
    """Return what a single file states."""
    markers = {V_MARKER, ZERO_SNR_MARKER} & read_header(file).keys()
    return Stated(
        name=file.stem, file=file, markers=frozenset(markers), metadata=read_metadata(file)
    )


def stated_by_name(source: str) -> Stated:
    """Return what the name of a folder or a Hub id states; a folder's own files state the rest."""
    return Stated(name=Path(source).name)


@cache
def _table() -> Mapping[str, Any]:
    table: Mapping[str, Any] = tomllib.loads(
        Path(__file__).with_name("stated.toml").read_text(encoding="utf-8")
    )
    return table

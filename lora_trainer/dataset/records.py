"""A checked dataset: its usable images with their captions and masks.

`scan` makes it from a folder; planning, encoding, training and reports read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lora_trainer.common.findings import Finding
from lora_trainer.config.config import OWN_FOLDER, DataSettings
from lora_trainer.dataset.listing import MAX_REPEATS
from lora_trainer.dataset.masks import Mask
from lora_trainer.dataset.measures import Measures


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRecord:
    """One usable image: its captions as they are written, and the one it is shown and validated with.

    `folder` is the subfolder it lies in, `.` for none: `data.folders` may say more of it. `copy_index`
    numbers files with identical bytes by name, so that (content_hash, copy_index, repeat) names a
    sample. `transparent`: its pixels depend on `data.alpha_background`.
    """

    file: str
    name: str
    content_hash: str
    width_px: int
    height_px: int
    written: tuple[str, ...]
    caption: str
    caption_source: str | None
    repeats: int
    copy_index: int
    folder: str = OWN_FOLDER
    transparent: bool = False
    measures: Measures | None = None
    mask: Mask | None = None
    regularisation: bool = False

    @property
    def path(self) -> Path:
        """Where the image is; kept as text, as `Path` objects are large."""
        return Path(self.file)

    def settings(self, data: DataSettings) -> DataSettings:
        """Return the settings of its folder; an image for regularisation has no trigger."""
        folder_settings = data.of_folder(self.folder)
        return (
            folder_settings.model_copy(update={"trigger": None})
            if self.regularisation
            else folder_settings
        )

    def sample_ids(self) -> list[str]:
        """Return one id per repeat, unique in the dataset and independent of file order."""
        first, kind = self.copy_index * MAX_REPEATS, "r" if self.regularisation else ""
        name = self.content_hash[:32]
        return [f"{name}-{kind}{first + repeat}" for repeat in range(self.repeats)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """The usable images of a folder by name, findings, and a hash of everything that training reads of it.

    `regularisation`: images of the class, trained along so that training does not change it.
    """

    folder: Path
    records: tuple[ImageRecord, ...]
    findings: tuple[Finding, ...]
    fingerprint: str
    regularisation: tuple[ImageRecord, ...] = ()

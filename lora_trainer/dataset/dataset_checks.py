"""Findings about all usable images of a dataset: duplicates, missing captions and masks, marks that are not read.

Inputs: the records. Outputs: findings; none of them changes a run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from lora_trainer.common.caption_markup import has_choice
from lora_trainer.common.events import Finding
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import FILE_NAME, FOLDER_NAME, caption_of_name
from lora_trainer.dataset.finding_texts import finding, finding_of_all
from lora_trainer.dataset.image_text import IMAGE_TEXT, read_image_text
from lora_trainer.dataset.images import ImageDecodeError
from lora_trainer.dataset.records import ImageRecord

_STAND_INS = {
    FOLDER_NAME: "their folder's name",
    FILE_NAME: "their file's name",
    IMAGE_TEXT: "the text inside the image",
}
_MARKS: Mapping[str, tuple[Callable[[str], bool], Callable[[DataSettings], bool], str]] = {
    "{a|b}": (has_choice, lambda data: data.wildcards, "data.wildcards=true"),
    "|||": (
        lambda text: "|||" in text,
        lambda data: data.keep_tokens_separator is not None,
        "'data.keep_tokens_separator=|||'",
    ),
}
"""Marks that other trainers read: whether a text has one, whether the settings read it, the setting."""
_MAX_IMAGES_READ = 5
_EXAMPLE_CHARACTERS = 60


def findings_of(records: Sequence[ImageRecord], settings: DataSettings) -> Iterator[Finding]:
    """Yield what is odd about the images together."""
    first: dict[str, str] = {}
    for record in records:
        original = first.setdefault(record.content_hash, record.name)
        if original != record.name:
            yield finding("duplicate", record.name, original=original)
    names = [record.name for record in records if record.caption_source is None]
    others = _other_captions(records, settings) if len(names) == len(records) else ""
    yield from finding_of_all("no-caption", names, all=len(records), others=others)
    for source, words in _STAND_INS.items():
        names = [record.name for record in records if record.caption_source == source]
        yield from finding_of_all("no-caption.stand-in", names, all=len(records), source=words)
    # Marks that are trained as words, because no setting reads them.
    for mark, (is_in, is_read, setting) in _MARKS.items():
        names = [
            record.name
            for record in records
            if any(map(is_in, record.written)) and not is_read(settings.of_folder(record.folder))
        ]
        yield from finding_of_all("unread-marks", names, mark=mark, setting=setting)
    if settings.masks != "none":
        learned = [one for one in records if not settings.is_regularisation(one.folder)]
        names = [record.name for record in learned if record.mask is None]
        lack = "no mask" if settings.masks == "files" else "no transparent part"
        yield from finding_of_all("no-mask", names, all=len(learned), lack=lack)


def _other_captions(records: Sequence[ImageRecord], settings: DataSettings) -> str:
    """Return the setting that finds captions where nobody wrote any, with an example; "" if none does."""
    if settings.caption_fallback != "none":
        return ""
    for record in records[:_MAX_IMAGES_READ]:
        try:
            text = read_image_text(record.path, settings=settings, content_hash=record.content_hash)
        except ImageDecodeError:  # it has changed since it was checked; training will name it
            continue
        if text.text:
            example = f'(in {record.name}: "{text.text[:_EXAMPLE_CHARACTERS]}")'
            return f", or --set data.caption_fallback=metadata for the text inside them {example}"
    words = next((caption_of_name(one.name) for one in records), "")
    if " " in words and not any(character.isdigit() for character in words):
        example = f'("{words[:_EXAMPLE_CHARACTERS]}")'
        return f", or --set data.caption_fallback=file_name for their names {example}"
    return ""

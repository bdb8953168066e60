"""Captions without a model and without a network: an image's own description, else words of names that somebody gave.

Input: a picture of a dataset. Output: the description inside its file, as phones and photo programs write it; else
what its file and folder are called; "" where these are only what a camera writes, such as IMG_1234 or SONY DSC.
"""

from __future__ import annotations

import re
from pathlib import Path

from lora_trainer.dataset.images import head_text
from lora_trainer.dataset.listing import ImageFile

# What cameras, phones, messengers and screens put in front of their numbers, and what only says that it is a picture.
_COUNTED = re.compile(
    r"img|images?|dscf?|dscn|pxl|photos?|pics?|pictures?|frame|clip|video|vid|mvimg|signal|whatsapp|whats|app|screenshot|screen"
    r"|shot|export|edit(ed)?|copy|final|new|untitled|downloads?|uploads?|datasets?|train(ing)?|at|pano|burst|portrait"
    r"|wa|gopr|scan|files?|heic|jpe?g|png|raw|set|thumb(nail)?s?|previews?|original|unnamed|cropped|resized|te?mp"
    r"|cam(era)?|kamera|bild(er)?|fotos?|kopie|unbenannt",
    re.IGNORECASE,
)
# What cameras and screens write as the description of each image.
_OF_CAMERAS = re.compile(
    r"(olympus|(konica )?minolta|samsung|sony|kodak|nikon|canon)? ?(digital )?(cameras?|dsc)|exif_jpeg_picture|default"
    r"|screenshot|dcim\W.*|charset=.*|\W*",
    re.IGNORECASE,
)
_WORD = re.compile(r"[^\W\d_]{2,}")
_CODE = re.compile(r"\b(?=[a-f]*\d)[0-9a-f]{8,}\b|\b\w*[^\W\d]\d+[^\W\d]\w*\b|\d+", re.IGNORECASE)
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")


def own_description(picture: ImageFile) -> str:
    """Return what an image says of itself, "" where that is only what a camera writes."""
    description = " ".join(head_text(picture.path).split())
    return "" if _OF_CAMERAS.fullmatch(description) else description


def caption_from_names(name: str, *, root: Path) -> str:
    """Return the words of a picture's name, and of its folder where that says something else."""
    *folders, _ = Path(name).parts
    folder = folders[-1] if folders else root.name
    said = [_words(folder), _words(Path(name).stem)]
    return ", ".join(dict.fromkeys(part for part in said if part))


def _words(name: str) -> str:
    """Return what a name says in words, without numbers, codes and what cameras write."""
    spaced = _CODE.sub(" ", _CAMEL.sub(" ", name).replace("_", " ").replace("-", " "))
    words = [word for word in _WORD.findall(spaced) if not _COUNTED.fullmatch(word)]
    return " ".join(words).casefold()

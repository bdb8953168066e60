"""Captions that lie inside image files: PNG text, EXIF, XMP.

Input: an image file. Output: the first text that describes the image. Text of generators is cut to its prompt,
and a workflow in JSON is no caption. Sources: PNG specification 11.3.3 (keywords), EXIF 2.32 (UserComment), XMP
specification part 1 (dc:description), and the "parameters" text of AUTOMATIC1111's web UI.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from PIL import ExifTags, Image

from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.captions import CaptionText, caption_of, clean, decoded
from lora_trainer.dataset.images import loaded

IMAGE_TEXT = "image metadata"
"""Source of a caption that lies inside the image."""
_PNG_KEYS = ("caption", "description", "prompt", "parameters", "comment", "title")
_DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
_LIST_ITEM = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}li"
_MAX_XMP_BYTES = 1 << 20
# What AUTOMATIC1111 and its forks write after the prompt.
_GENERATOR_TAIL = re.compile(r"\n(Negative prompt: |Steps: \d).*", re.DOTALL)
_COMMENT_ENCODINGS = {b"ASCII\0\0\0": "ascii", b"JIS\0\0\0\0\0": "shift_jis", b"\0" * 8: "utf-8"}
_XP_TAGS = (0x9C9C, 0x9C9B)
"""Comment and title as Windows' Explorer writes them, in UTF-16."""


def read_image_text(path: Path, *, settings: DataSettings, content_hash: str) -> CaptionText:
    """Return the caption inside an image file, an empty one where there is none.

    Raises ImageDecodeError for a damaged image and for a file that no longer has this SHA-256.
    """
    # PNG may have its text behind the pixels, so the image is loaded first.
    with loaded(path, settings, content_hash, []) as (image, _):
        texts = (_prompt_of(text) for text in _texts(image))
        return caption_of([next(filter(None, texts), "")])


def _texts(image: Image.Image) -> Iterator[str]:
    """Yield the texts of an image that may describe it, the most explicit first."""
    fields = {key.casefold(): value for key, value in image.info.items() if isinstance(key, str)}
    for key in _PNG_KEYS:
        value = fields.get(key)
        yield decoded(value)[0] if isinstance(value, bytes) else str(value or "")
    try:
        exif = image.getexif()
        yield _exif_text(exif.get(ExifTags.Base.ImageDescription))
        details = exif.get_ifd(ExifTags.IFD.Exif)
        yield _user_comment(details.get(ExifTags.Base.UserComment))
        for tag in _XP_TAGS:
            value = exif.get(tag)
            yield bytes(value).decode("utf-16-le", "replace") if value else ""
    except Exception:  # noqa: BLE001 - damaged EXIF is named by the check of the image itself
        pass
    packet = fields.get("xmp") or fields.get("xml:com.adobe.xmp") or b""
    yield from _xmp_texts(packet if isinstance(packet, bytes) else str(packet).encode())


def _exif_text(value: object) -> str:
    return decoded(value)[0] if isinstance(value, bytes) else str(value or "")


def _user_comment(value: object) -> str:
    """Return the text of a UserComment, whose first eight bytes name its encoding."""
    if not isinstance(value, bytes):
        return str(value or "")
    head, body = value[:8], value[8:]
    if head == b"UNICODE\0":
        # EXIF leaves the byte order open: of the two, Latin text has its zero bytes on one side.
        is_big = body[:2] == b"\xfe\xff" or body[0:200:2].count(0) > body[1:200:2].count(0)
        return body.decode("utf-16-be" if is_big else "utf-16-le", "replace")
    encoding = _COMMENT_ENCODINGS.get(head)
    return body.decode(encoding, "replace") if encoding else decoded(value)[0]


def _xmp_texts(packet: bytes) -> Iterator[str]:
    # A packet has no use for a document type, with which small files expand to large ones.
    if not packet or len(packet) > _MAX_XMP_BYTES or b"<!" in packet:
        return
    try:
        root = ElementTree.fromstring(packet.strip(b"\0 \r\n"))
    except (ElementTree.ParseError, ValueError, LookupError):
        return
    for description in root.iter(_DESCRIPTION):
        yield (
            "".join(description.itertext())
            if description.find(f".//{_LIST_ITEM}") is None
            else ("".join(next(description.iter(_LIST_ITEM)).itertext()))
        )


def _prompt_of(text: str) -> str:
    """Return the prompt in the text of a generator, other text as it is, and nothing for JSON."""
    prompt = clean(_GENERATOR_TAIL.sub("", text))
    return "" if prompt.startswith(("{", "[{")) else prompt

"""What phones make, turned into images that every program shows: HEIC into JPEG, videos into some of their frames.

Input: a folder of an upload, whose files are copies. Outputs: the folder without such files and with what became of
them, and how many of which kind there were; "name: reason; cure" of each that could not be read. HEIC needs pillow-heif
and videos need PyAV, the extra `phone`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import ExifTags, Image

from lora_trainer.common.errors import InputError, first_line
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset.images import ImageDecodeError, decode, head_text, measure

from .upload_names import VIDEO_EXTENSIONS, numbered

HEIC_EXTENSIONS = frozenset({".heic", ".heif"})
FRAMES = 12
"""At most so many frames become images of one video: the crispest of as many equal parts."""
# Frames are looked at this far apart; of a longer video only those that are stored whole.
_LOOKED_EVERY_S = 0.25
_WHOLE_UP_TO_S = 120.0
# No reference to another file or address in a video is followed.
_VIDEO_OPTIONS = {"enable_drefs": "0", "protocol_whitelist": "file"}


@dataclass(frozen=True, kw_only=True)
class Converted:
    """What became of the files of a phone."""

    heic: int = 0
    videos: int = 0
    frames: int = 0
    left_out: tuple[str, ...] = ()

    @property
    def images(self) -> int:
        """How many images the videos have added to those that were counted as they came."""
        return self.frames - self.videos


def convert(folder: Path) -> Converted:
    """Convert the files of a folder that only phones make; raises OSError when the disk refuses."""
    counts = {"heic": 0, "videos": 0, "frames": 0}
    left_out: list[str] = []
    for path in sorted(folder.rglob("*")):
        kind = path.suffix.lower()
        act = {**dict.fromkeys(HEIC_EXTENSIONS, _heic), **dict.fromkeys(VIDEO_EXTENSIONS, _video)}
        if kind not in act or not path.is_file():
            continue
        try:
            made = act[kind](path)
        except InputError as error:
            found = error.reason if isinstance(error, ImageDecodeError) else error.found
            left_out.append(
                f"{path.name}: {found}; {error.fix}" if error.fix else f"{path.name}: {found}"
            )
            made = 0
        path.unlink()
        if made and kind in HEIC_EXTENSIONS:
            counts["heic"] += 1
        elif made:
            counts["videos"] += 1
            counts["frames"] += made
    return Converted(**counts, left_out=tuple(left_out))


def _heic(path: Path) -> int:
    """Write a photograph as it is displayed: turned, in sRGB; raises InputError."""
    if importlib.util.find_spec("pillow_heif") is None:
        what = 'is HEIC, which needs a package: pip install "lora-train[phone]" where it trains'
        raise InputError(what, fix="")
    _save(decode(path, settings=DataSettings()).image, path.with_suffix(".jpg"), head_text(path))
    return 1


def _video(path: Path) -> int:
    """Write frames of a video; returns how many, raises InputError."""
    if importlib.util.find_spec("av") is None:
        what = 'is a video, which needs a package: pip install "lora-train[phone]" where it trains'
        raise InputError(what, fix="")
    import av

    best: dict[int, tuple[float, Image.Image]] = {}
    try:
        options = _VIDEO_OPTIONS
        with av.open(str(path), format="mov", options=options) as content:
            for part, image in _frames(content):
                crispness = measure(image).crispness[0][1]
                if part not in best or crispness > best[part][0]:
                    best[part] = crispness, image
    except (av.FFmpegError, OSError, ValueError, IndexError, MemoryError) as error:
        what = first_line(error)
        raise InputError(
            f"is a video that cannot be read ({what}): save it as MP4 or send single images", fix=""
        ) from None
    if not best:
        raise InputError("is a video without images: send single images", fix="")
    for number, part in enumerate(sorted(best), 1):
        _save(best[part][1], path.with_name(f"{path.stem}-{number:02d}.jpg"))
    return len(best)


def _frames(content: Any) -> Iterator[tuple[int, Image.Image]]:
    """Yield frames as they are displayed, each with the part of the video that it lies in."""
    stream = content.streams.video[0]
    duration_s = (content.duration or 0) / 1_000_000
    if duration_s > _WHOLE_UP_TO_S:
        stream.codec_context.skip_frame = "NONKEY"
    next_s = 0.0
    for frame in content.decode(stream):
        at_s = float(frame.time or 0.0)
        if at_s < next_s:
            continue
        next_s = at_s + _LOOKED_EVERY_S
        part = min(FRAMES - 1, int(FRAMES * at_s / duration_s)) if duration_s else 0
        yield part, frame.to_image().rotate(frame.rotation, expand=True)


def _save(image: Image.Image, target: Path, description: str = "") -> None:
    """Write a JPEG of all its colours under a name that nothing has; the description is in its EXIF data."""
    free = next(name for name in numbered(target.stem) if not target.with_stem(name).exists())
    exif = Image.Exif()
    if description:
        exif[ExifTags.Base.ImageDescription] = description.encode()
    data = exif.tobytes() if description else b""
    image.convert("RGB").save(target.with_stem(free), quality=97, subsampling=0, exif=data)


def sentence(found: Converted, images: int) -> str:
    """Say what was converted of so many images, "" where nothing was."""
    said = []
    if found.heic:
        said.append(f"{found.heic} of {images} were HEIC: converted.")
    if found.videos:
        videos = "1 video" if found.videos == 1 else f"{found.videos} videos"
        said.append(f"{found.frames} images were taken from {videos}.")
    return "\n".join(said)

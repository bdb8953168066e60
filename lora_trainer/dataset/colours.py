"""Colour profiles, and spaces stated without one: the change of an image's colours to sRGB, as bases were trained.

Without it a photograph from a phone (Display P3) or in Adobe RGB is learned with dull colours. A profile that says
nearly the same as sRGB changes nothing, so that its pixels stay as they are, bit for bit.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from lora_trainer.common.events import shown
from lora_trainer.dataset.colour_tags import CODE_POINTS, profile_of, stated_space

# From an image in RGB to one in sRGB.
Recolour = Callable[[Image.Image], Image.Image]
# Below this no channel of any colour differs: profiles of sRGB differ by rounding.
_SAME_BELOW = 3
_PROBE_STEPS = 9


def recolouring(image: Image.Image, notes: list[str]) -> Recolour | None:
    """Return what turns an image's colours into sRGB; None where it states no other space, or one that is nearly sRGB.

    Appends "kind: sentence" to `notes`. Images in CMYK are not meant: they have no colours without their profile.
    """
    if image.mode == "CMYK":
        return None
    profile = image.info.get("icc_profile")
    # The order of the PNG specification; in other files a profile counts before numbers.
    if profile and not (image.format == "PNG" and CODE_POINTS in image.info):
        words, what = "its profile ({name})", "its colour profile"
    else:
        words, what = "{name}, which it states", "what it states of its colours"
        try:
            space = stated_space(image)
            profile = None if space is None else profile_of(space)
        except ValueError as error:
            notes.append(f"icc-profile: its colours are read as sRGB: {shown(str(error))}")
            return None
    if not profile:
        return None
    try:
        recolour, name = _recolouring(profile)
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError) as error:
        notes.append(f"icc-profile: {what} is broken and ignored ({shown(str(error))})")
        return None
    if recolour is not None:
        notes.append(f"icc: colours are converted to sRGB from {words.format(name=shown(name))}")
    return recolour


@lru_cache(maxsize=64)
def _recolouring(profile: bytes) -> tuple[Recolour | None, str]:
    """Return the change of a profile, None if it is hardly any, and the profile's name."""
    source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
    space = source.profile.xcolor_space.strip()
    mode = {"RGB": "RGB", "GRAY": "L"}.get(space)
    if mode is None:
        raise ValueError(f"it is of {space} colours, the image is not")
    transform: Any = ImageCms.buildTransform(
        source,
        ImageCms.createProfile("sRGB"),
        mode,
        "RGB",
        renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
        flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
    )

    def recolour(image: Image.Image) -> Image.Image:
        changed = ImageCms.applyTransform(image.convert(mode), transform)
        assert changed is not None, "None is for inPlace=True"
        return changed

    probe = _probe(is_grey=mode == "L")
    distance = np.abs(np.asarray(recolour(probe), np.int16) - np.asarray(probe, np.int16)).max()
    name = (source.profile.profile_description or "without a name").strip()
    return (None if distance < _SAME_BELOW else recolour), name


def _probe(*, is_grey: bool) -> Image.Image:
    """Return an image of colours from all of RGB, or of all greys."""
    if is_grey:
        greys = np.arange(256, dtype=np.uint8)
        return Image.fromarray(np.stack([greys] * 3, axis=-1)[None])
    steps = np.linspace(0, 255, _PROBE_STEPS).astype(np.uint8)
    cube = np.stack(np.meshgrid(steps, steps, steps, indexing="ij"), axis=-1)
    return Image.fromarray(cube.reshape(_PROBE_STEPS, -1, 3))

"""Where the subject of an image is, as a mask: found by the program rembg, where it is installed.

Input: an image as training sees it. Output: a PNG of its size, white where the subject is. rembg brings and keeps its
own models; the first time it downloads one.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.common.wording import one_line

_PROGRAM = "rembg"
_WITHIN_S = 600


def is_here() -> bool:
    """Whether rembg is installed."""
    return shutil.which(_PROGRAM) is not None


def subject_png(image: Image.Image) -> bytes:
    """Return the mask of the subject as a PNG; raises RequestError without rembg, InputError where it finds none."""
    program = shutil.which(_PROGRAM)
    if program is None:
        raise RequestError(
            "rembg, which finds the subject of an image, is not installed",
            fix="install it by: pip install rembg[cpu,cli]",
        )
    with tempfile.TemporaryDirectory(prefix="lora-train-subject-") as folder:
        seen, mask = Path(folder) / "image.png", Path(folder) / "mask.png"
        image.convert("RGB").save(seen)
        try:
            done = subprocess.run(
                [program, "i", "-om", str(seen), str(mask)],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_WITHIN_S,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise _failed(str(error)) from error
        if done.returncode or not mask.is_file():
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise _failed(lines[-1] if lines else f"exit code {done.returncode}")
        return mask.read_bytes()


def _failed(why: str) -> InputError:
    return InputError(
        f"rembg found no subject: {one_line(why)[:300]}",
        fix="paint the mask by hand, or try rembg in a terminal",
    )

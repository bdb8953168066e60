"""A run as its page shows it: its parts, each with a key, so that only those that changed are sent again.

Inputs: the folder of a run, the language of the reader, what the page shows already. Outputs: what page.html shows,
and parts by name. Nothing is remembered here but what was read of the run's files.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.errors import LoraTrainError
from lora_trainer.reporting.status import read_status

from ..run_state import Look, look
from ..runs import Followed
from ..server.translation import Words
from ..trash.store import Thrown
from .parts import Part, damaged_parts, parts, stamp

# The buttons of a run in their order, each with its label, its kind and its icon.
BUTTONS = (
    ("sample", "Draw samples now", "", "images"),
    ("save", "Save a LoRA file now", "", "download"),
    ("stop", "Stop", "danger", "square"),
    ("force", "Force stop", "danger", "square"),
    ("end", "End the process", "danger", "square"),
    ("resume", "Resume", "primary", "rotate-ccw"),
)


def missing(run: str, _: Words, *, thrown: Thrown | None = None) -> Mapping[str, Any]:
    """Return what the page shows for a name that belongs to no run; `thrown` is the one of that name in the trash."""
    said = _("No run is named {}.", repr(run)) if run else _("The address names no run.")
    return {"run": None, "said": said, "thrown": thrown}


def shown(folder: Path, followed: Followed, _: Words) -> Mapping[str, Any]:
    """Return what page.html shows of a run."""
    seen = look(folder, read_status(folder), now_s=time.time())
    found = _parts(seen, followed)
    return {
        "run": folder.name,
        "compared": "/compare?" + urlencode({"a": folder.name}),
        "buttons": BUTTONS,
        "stamp": _digest(stamp(seen)),
        "goes": _goes(seen),
        "keys": {name: _digest(part.key) for name, part in found.items()},
        "parts": {name: part.draw(_) for name, part in found.items()},
    }


def changed(
    folder: Path, followed: Followed, _: Words, *, before: str, keys: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return whether to go on asking, and the parts that are not those that the page shows.

    The page shows the run as it was at the stamp `before`, and its parts by `keys`.
    """
    seen = look(folder, read_status(folder), now_s=time.time())
    now = {"goes": _goes(seen), "stamp": _digest(stamp(seen))}
    if now["stamp"] == before:
        return now
    found = {name: (_digest(part.key), part) for name, part in _parts(seen, followed).items()}
    fresh = {
        name: {"key": key, "drawn": part.draw(_)}
        for name, (key, part) in found.items()
        if key != keys.get(name)
    }
    return {**now, "parts": fresh}


def _goes(seen: Look) -> bool:
    """Whether a run changes by itself."""
    return seen.status.state == "running" or seen.goes_on_soon


def _parts(seen: Look, followed: Followed) -> Mapping[str, Part]:
    try:
        return parts(seen, followed.read(seen.folder))
    except (LoraTrainError, OSError) as error:
        return damaged_parts(seen, str(error))


def _digest(key: object) -> str:
    """Return a text that is the same for equal keys, also after the server has started again."""
    return hashlib.blake2b(repr(key).encode(errors="replace"), digest_size=8).hexdigest()

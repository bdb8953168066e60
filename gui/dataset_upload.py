"""What a browser sent, as a new dataset folder under `<runs>/.gui/uploads/`.

Input: names of files in gradio's incoming folder, as the page's script got them. Output: the folder,
and a sentence that says where it is and what was left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lora_trainer.common.errors import InputError, RequestError

from .archives import Received, unpack
from .posted import Posted
from .uploads import INCOMING, Upload, save_files, upload_folder
from .workplace import Workplace

MAX_FILES = 20_000
MAX_LEFT_OUT_NAMED = 5


def receive(work: Workplace, posted: Posted) -> dict[str, Any]:
    """Make a folder of uploaded files or of one zip; raises RequestError, InputError, MachineError."""
    uploads = _uploads(posted.values.get("files"))
    archives = [upload for upload in uploads if upload.name.lower().endswith(".zip")]
    if archives and len(uploads) > 1:
        raise InputError("a zip came with other files", fix="upload the zip alone")
    if archives:
        received = _unpacked(work, archives[0])
    else:
        into = upload_folder(work, posted.text("name", at_most=200))
        received = save_files(work, uploads, into=into)
    return {"received": str(received.folder), "said": sentence(received)}


def _unpacked(work: Workplace, archive: Upload) -> Received:
    path = archive.path.resolve()
    if not path.is_relative_to((work.own / INCOMING).resolve()) or not path.is_file():
        raise InputError(f"{archive.name!r} was not uploaded", fix="choose the file once more")
    return unpack(path, into=upload_folder(work, Path(archive.name).stem))


def _uploads(rows: object) -> list[Upload]:
    if not isinstance(rows, list) or not 0 < len(rows) <= MAX_FILES:
        raise RequestError(
            f"files is no list of 1 to {MAX_FILES:,} files", fix="upload them in parts"
        )
    parts = [Posted.of(row) for row in rows]
    return [Upload(path=Path(part.text("path")), name=part.text("name")) for part in parts]


def sentence(received: Received) -> str:
    """Say where an upload is, and what of it was left out, the first by name."""
    said = f"{received.images} images and {received.captions} captions are in {received.folder}."
    if not received.left_out:
        return said
    named = "; ".join(received.left_out[:MAX_LEFT_OUT_NAMED])
    rest = len(received.left_out) - MAX_LEFT_OUT_NAMED
    return f"{said} Left out: {named}" + (f" and {rest} more." if rest > 0 else ".")

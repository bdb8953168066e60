"""What a browser sends, as a new dataset folder under `<runs>/.gui/uploads/`.

    PUT  /upload/BATCH/NUMBER   one file, as its bytes; sent again, it replaces what was there
    POST /upload/BATCH          {name, files: [name of file 0, of file 1, ...]}: make the folder

A batch is 16 hex digits of the page's choice, its files wait in `<runs>/.gui/incoming/BATCH/`. Output:
where the folder is, and a sentence that says what was left out; a refusal is its sentence, status 400.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import disk_error

from .archives import Received, unpack
from .posted import Posted
from .uploads import INCOMING, Upload, save_files, upload_folder
from .workplace import Workplace

MAX_FILES = 20_000
MAX_LEFT_OUT_NAMED = 5
_BATCH = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(r"[0-9]{1,5}")


def routes(work: Workplace) -> list[BaseRoute]:
    """Return the routes that take files."""

    async def take(request: Request) -> Response:
        try:
            folder = batch_folder(work, request.path_params["batch"])
            number = request.path_params["number"]
            if not _NUMBER.fullmatch(number) or int(number) >= MAX_FILES:
                raise RequestError(
                    f"{number[:20]!r} is no number below {MAX_FILES:,}", fix="send fewer files"
                )
            await _write(request, folder / number)
        except LoraTrainError as error:
            return PlainTextResponse(str(error), status_code=400)
        return Response(status_code=204)

    async def make(request: Request) -> Response:
        try:
            posted = Posted.of(await _body(request))
            answer = await asyncio.to_thread(receive, work, request.path_params["batch"], posted)
        except LoraTrainError as error:
            return PlainTextResponse(str(error), status_code=400)
        return JSONResponse(answer)

    return [
        Route("/upload/{batch}/{number}", take, methods=["PUT"]),
        Route("/upload/{batch}", make, methods=["POST"]),
    ]


async def _body(request: Request) -> object:
    try:
        return json.loads(await request.body())
    except (ValueError, RecursionError):
        return None


async def _write(request: Request, file: Path) -> None:
    """Write a body to a file; one that breaks off leaves nothing. Raises MachineError."""
    partial = file.with_name(f"{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            async for chunk in request.stream():
                out.write(chunk)
        partial.replace(file)
    except ClientDisconnect:
        partial.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error


def batch_folder(work: Workplace, batch: str) -> Path:
    """Return where the files of a batch wait; raises RequestError for what names none."""
    if not _BATCH.fullmatch(batch):
        raise RequestError(f"{batch[:40]!r} names no upload", fix="choose the files once more")
    return work.own / INCOMING / batch


def receive(work: Workplace, batch: str, posted: Posted) -> dict[str, Any]:
    """Make a folder of the files of a batch, or of its one zip.

    Raises RequestError, InputError, MachineError.
    """
    folder = batch_folder(work, batch)
    names = posted.values.get("files")
    if not isinstance(names, list) or not 0 < len(names) <= MAX_FILES:
        raise RequestError(
            f"files is no list of 1 to {MAX_FILES:,} names", fix="upload them in parts"
        )
    files = [
        Upload(path=folder / str(number), name=Posted({"name": name}).text("name"))
        for number, name in enumerate(names)
    ]
    if missing := [file.name for file in files if not file.path.is_file()]:
        raise InputError(f"{missing[0]!r} did not arrive", fix="choose the files once more")
    archives = [file for file in files if file.name.lower().endswith(".zip")]
    if archives and len(files) > 1:
        raise InputError("a zip came with other files", fix="upload the zip alone")
    if archives:
        stem = Path(archives[0].name).stem
        received = unpack(archives[0].path, into=upload_folder(work, stem))
    else:
        name = posted.text("name", at_most=200)
        received = save_files(work, files, into=upload_folder(work, name))
    shutil.rmtree(folder, ignore_errors=True)
    return {"received": str(received.folder), "said": sentence(received)}


def sentence(received: Received) -> str:
    """Say where an upload is, and what of it was left out, the first by name."""
    images = f"{received.images:,} {'image' if received.images == 1 else 'images'}"
    captions = f"{received.captions:,} {'caption' if received.captions == 1 else 'captions'}"
    said = f"{images} and {captions} are in {received.folder}."
    if not received.left_out:
        return said
    named = "; ".join(received.left_out[:MAX_LEFT_OUT_NAMED])
    rest = len(received.left_out) - MAX_LEFT_OUT_NAMED
    return f"{said} Left out: {named}" + (f" and {rest} more." if rest > 0 else ".")

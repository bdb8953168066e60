"""Takes what a browser sends as a new dataset folder, `<runs>/.gui/uploads/NAME/`; `archives` unpacks a zip.

    PUT  /upload/BATCH/NUMBER   one file, as its bytes; sent again, it replaces what was there
    POST /upload/BATCH/web      {addresses}: fetch images from the web as the files of a batch (web_images.py)
    POST /upload/BATCH          {name, files: [name of file 0, of file 1, ...]}: make the folder

A batch is 16 hex digits of the page's choice, its files wait in `<runs>/.gui/incoming/BATCH/`, where the answer is
kept for a day, for who asks again. Output: where the folder is with the pictures and captions, each whole, and a
sentence that says what was left out; a refusal is its sentence, status 400.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import shutil
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.common.files import (
    TEMPORARY_PREFIX,
    disk_error,
    json_bytes,
    read_json_object,
    retry_while_open,
    write_atomic,
)

from . import photos, web_images
from .archives import Received, unpack
from .markup import plain
from .server.asset_files import EXAMPLE, EXAMPLE_NAME
from .server.pages import Body, words_of
from .upload_names import (
    Names,
    is_image,
    numbered,
    reason_against,
    safe_name,
    safe_path,
    without_common_folder,
)
from .workplace import Workplace

FOLDER, INCOMING = "uploads", "incoming"
EXAMPLE_TRIGGER = "zibbo"
MAX_FILES = 20_000
MAX_LEFT_OUT_NAMED = 5
_NAME_MAX_BYTES = 150
_BATCH = re.compile(r"[0-9a-f]{16}")
_NUMBER = re.compile(r"[0-9]{1,5}")
_UNNAMED = "dataset"
_RECEIVING: dict[str, threading.Lock] = {}


class Files(Body):
    """What the files of a batch are called, and the folder that they came from; "" where they came from none."""

    name: str
    files: list[str]


class Addresses(Body):
    """Addresses of images that somebody pasted."""

    addresses: list[Annotated[str, StringConstraints(max_length=4096)]] = Field(
        min_length=1, max_length=web_images.MAX_ADDRESSES
    )


def routes(work: Workplace) -> list[BaseRoute]:
    """Return the routes that take files."""

    async def web(request: Request) -> Response:
        said = words_of(request)
        try:
            folder = batch_folder(work, request.path_params["batch"])
            asked = Addresses.model_validate_json(await request.body())
            found = await asyncio.to_thread(fetched, folder, asked.addresses)
        except ValueError:
            return PlainTextResponse("load the page again", status_code=400)
        except LoraTrainError as error:
            return PlainTextResponse(said.message(plain(str(error))), status_code=400)
        missed = [said.message(plain(line)) for line in found["missed"]]
        return JSONResponse({**found, "missed": missed})

    async def take(request: Request) -> Response:
        try:
            folder = batch_folder(work, request.path_params["batch"])
            number = request.path_params["number"]
            if not _NUMBER.fullmatch(number) or int(number) >= MAX_FILES:
                raise RequestError(
                    f"{number[:20]!r} is not a number below {MAX_FILES:,}", fix="send fewer files"
                )
            await _write(request, folder / number)
        except LoraTrainError as error:
            return PlainTextResponse(words_of(request).message(plain(str(error))), status_code=400)
        return Response(status_code=204)

    async def make(request: Request) -> Response:
        try:
            files = Files.model_validate_json(await request.body())
            answer = await asyncio.to_thread(receive, work, request.path_params["batch"], files)
        except ValueError:
            return PlainTextResponse("load the page again", status_code=400)
        except LoraTrainError as error:
            return PlainTextResponse(words_of(request).message(plain(str(error))), status_code=400)
        lines = map(words_of(request).message, answer["said"].splitlines())
        return JSONResponse({**answer, "said": " ".join(lines)})

    return [
        Route("/upload/{batch}/web", web, methods=["POST"]),
        Route("/upload/{batch}/{number}", take, methods=["PUT"]),
        Route("/upload/{batch}", make, methods=["POST"]),
    ]


def fetched(folder: Path, addresses: list[str]) -> dict[str, list[str]]:
    """Fetch images into the folder of a batch; return their names, and the addresses that gave none, each with why.

    Raises RequestError where none gave one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    files: list[str] = []
    missed: list[str] = []
    for address in dict.fromkeys(each.strip() for each in addresses):
        try:
            image = web_images.fetch(address)
            (folder / str(len(files))).write_bytes(image.data)
            files.append(image.name)
        except RequestError as error:
            missed.append(f"Not fetched: {address[:80]}: {error.found}.")
        except OSError as error:
            raise disk_error(folder, error) from error
    if not files:
        raise RequestError(missed[0].rstrip("."), fix="paste the address of an image itself")
    return {"files": files, "missed": missed}


async def _write(request: Request, file: Path) -> None:
    """Write a body to a file; one that breaks off leaves nothing. Raises MachineError.

    A browser whose connection broke sends a file again while the first request is still read: each
    writes a file of its own, and the whole ones replace each other.
    """
    partial = file.with_name(f"{file.name}.{secrets.token_hex(8)}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as out:
            async for chunk in request.stream():
                out.write(chunk)
        partial.replace(file)
    except ClientDisconnect:
        pass  # nobody is there for an answer
    except OSError as error:
        raise disk_error(file, error) from error
    finally:
        with suppress(OSError):
            partial.unlink(missing_ok=True)


def batch_folder(work: Workplace, batch: str) -> Path:
    """Return where the files of a batch wait; raises RequestError for what names none."""
    if not _BATCH.fullmatch(batch):
        raise RequestError(f"{batch[:40]!r} names no upload", fix="choose the files once more")
    return work.own / INCOMING / batch


def receive(work: Workplace, batch: str, asked: Files) -> dict[str, Any]:
    """Make a folder of the files of a batch, or of its one zip; asked again, return the answer of before.

    Raises RequestError, InputError, MachineError.
    """
    folder = batch_folder(work, batch)
    answer = folder / "answer.json"
    # A browser whose connection broke asks again, maybe while the first is under way.
    with _RECEIVING.setdefault(batch, threading.Lock()):
        if answer.is_file():
            return read_json_object(answer)
        received = _received(work, folder, asked)
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError, LoraTrainError):  # else only a second question finds nothing
            folder.mkdir(parents=True, exist_ok=True)
            write_atomic(answer, json_bytes(received), durable=False)
        return received


def _received(work: Workplace, folder: Path, asked: Files) -> dict[str, Any]:
    if not 0 < len(asked.files) <= MAX_FILES:
        raise RequestError(
            f"{len(asked.files):,} files were sent, 1 to {MAX_FILES:,} are taken at once",
            fix="upload them in parts",
        )
    files = [
        Upload(path=folder / str(number), name=name) for number, name in enumerate(asked.files)
    ]
    if missing := [file.name for file in files if not file.path.is_file()]:
        raise InputError(f"{missing[0]!r} did not arrive", fix="choose the files once more")
    archives = [file for file in files if file.name.lower().endswith(".zip")]
    if archives and len(files) > 1:
        raise InputError("a zip came with other files", fix="upload the zip alone")
    if archives:
        stem = Path(archives[0].name).stem
        with _new_folder(work, stem) as into:
            received = unpack(archives[0].path, into=into, name=archives[0].name)
    else:
        with _new_folder(work, asked.name[:200]) as into:
            received = save_files(work, files, into=into)
    return {"received": str(received.folder), **_converted(received)}


def _converted(received: Received) -> dict[str, Any]:
    """Turn what only phones make into images; return what to say of the upload, what is left out one by one."""
    try:
        found = photos.convert(received.folder)
    except OSError as error:
        raise disk_error(received.folder, error) from error
    images = received.images + found.images - len(found.left_out)
    left_out = (*received.left_out, *found.left_out)
    whole = replace(received, images=images, left_out=left_out)
    if found.left_out and not images and not received.captions:
        shutil.rmtree(received.folder, ignore_errors=True)
        raise InputError(f"no image could be read: {found.left_out[0]}", fix="choose other files")
    said = [sentence(whole), photos.sentence(found, images)]
    return {"said": "\n".join(filter(None, said))}


def sentence(received: Received) -> str:
    """Say in lines what an upload has brought, and what of it was left out, the first by name."""
    # Which of them can be read is not known yet.
    images = "1 image file" if received.images == 1 else f"{received.images:,} image files"
    captions = "1 caption" if received.captions == 1 else f"{received.captions:,} captions"
    said = [f"Added: {images} and {captions}." if received.captions else f"Added: {images}."]
    for each in received.left_out[:MAX_LEFT_OUT_NAMED]:
        name, _, reason = each.partition(": ")
        said.append(f"Left out: {name}: {reason}.")
    rest = len(received.left_out) - MAX_LEFT_OUT_NAMED
    return "\n".join([*said, *([f"Left out: {rest:,} more."] if rest > 0 else [])])


@dataclass(frozen=True, kw_only=True)
class Upload:
    """A file that a browser sent: where it lies, and its name there, with the folders if it came in one."""

    path: Path
    name: str


def upload_folder(work: Workplace, name: str) -> Path:
    """Make an empty folder for a new dataset of that name, with a number where the name is taken.

    Making it decides whose it is: two uploads at once never share one. Raises MachineError.
    """
    parent = work.own / FOLDER
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for free in numbered(safe_name(name) or _UNNAMED):
            with suppress(FileExistsError):
                (parent / free).mkdir()
                return parent / free
    except OSError as error:
        raise disk_error(parent, error) from error
    raise AssertionError("numbers do not end")


def is_uploaded(work: Workplace, folder: Path) -> bool:
    """Return whether a dataset is one that a browser sent: others are the user's own folders."""
    return folder.parent == (work.own / FOLDER).resolve() and not folder.name.startswith(".")


def is_unnamed(folder: str) -> bool:
    """Whether a folder of uploads has the name that is given where images come without one."""
    return re.fullmatch(rf"{_UNNAMED}(-\d+)?", folder) is not None


@contextmanager
def _new_folder(work: Workplace, name: str) -> Iterator[Path]:
    """Yield a folder as `upload_folder` does; one that nothing came into is removed with the error."""
    into = upload_folder(work, name)
    try:
        yield into
    except BaseException:
        with suppress(OSError):
            into.rmdir()
        raise


def save_files(work: Workplace, files: Iterable[Upload], *, into: Path) -> Received:
    """Put uploaded pictures and captions into a folder of `work.own` that nobody else writes to, with their folders.

    Names are made safe and unique, picture and caption of one name alike. Raises InputError for
    files that were not uploaded here, MachineError when the disk refuses.
    """
    incoming = (work.own / INCOMING).resolve()
    uploaded = list(files)
    for upload in uploaded:
        if not upload.path.resolve().is_relative_to(incoming):
            raise InputError(f"{upload.name!r} was not uploaded", fix="choose the files once more")
    images = captions = 0
    left_out: list[str] = []
    try:
        into.mkdir(parents=True, exist_ok=True)
        names = {into: Names([path.name for path in into.iterdir()])}
        paths = without_common_folder([_parts(upload.name) for upload in uploaded])
        for upload, parts in zip(uploaded, paths, strict=True):
            (*folders, name), reason = safe_path(parts)
            if reason:
                left_out.append(f"{upload.name}: {reason}")
                continue
            place = into.joinpath(*folders)
            place.mkdir(parents=True, exist_ok=True)
            copy_whole(upload.path, place / names.setdefault(place, Names()).free(name))
            images += is_image(name)
            captions += not is_image(name)
    except OSError as error:
        raise disk_error(into, error) from error
    return Received(folder=into, images=images, captions=captions, left_out=tuple(left_out))


def _parts(name: str) -> tuple[str, ...]:
    """Return the folders and the name of a file of a dropped folder, of which no part leads elsewhere.

    The folders of an absolute path say where the file was on another machine, and not in which dataset folder.
    """
    parts = name.replace("\\", "/").split("/")
    if not parts[0] or ":" in parts[0]:
        parts = parts[-1:]
    return tuple(part for part in parts if part not in ("", ".", "..")) or ("",)


def copy_whole(source: Path, target: Path) -> None:
    """Copy first: a reader sees the whole file or none, also across filesystems."""
    temporary = target.with_name(f"{TEMPORARY_PREFIX}{target.name}"[:_NAME_MAX_BYTES])
    try:
        shutil.copyfile(source, temporary)
        retry_while_open(lambda: temporary.rename(target))
    finally:
        temporary.unlink(missing_ok=True)


def is_example(work: Workplace, folder: str) -> bool:
    """Return whether a folder is the copy of the example's images."""
    return Path(folder).resolve() == (work.own / FOLDER / EXAMPLE_NAME).resolve()


def example(work: Workplace) -> Path:
    """Return a copy of the example's images among the uploads, made at the first time.

    A copy, because what is installed is not to be changed by captions that somebody edits.
    Raises MachineError when the disk refuses.
    """
    folder = work.own / FOLDER / EXAMPLE_NAME
    if folder.is_dir():
        return folder
    temporary = folder.with_name(f"{TEMPORARY_PREFIX}{EXAMPLE_NAME}-{time.monotonic_ns()}")
    try:
        temporary.mkdir(parents=True)
        for file in EXAMPLE.iterdir():
            if not reason_against(file.name):
                shutil.copyfile(file, temporary / file.name)
        temporary.rename(folder)
    except OSError as error:
        if not folder.is_dir():  # else another tab was faster
            raise disk_error(folder, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def forget_old(folder: Path, *, kept_s: float) -> None:
    """Remove what an interface that was killed has left of uploads, after some time."""
    with suppress(OSError):
        for path in folder.iterdir():
            with suppress(OSError):
                if path.is_dir() and time.time() - path.stat().st_mtime > kept_s:
                    shutil.rmtree(path, ignore_errors=True)

"""The files that pages show: those of a run folder, and small copies of pictures of a dataset.

    /media/run/NAME/samples/step-00000250/00.png    a picture, the report, an exported LoRA, a record
    /media/run/.loras/NAME.safetensors              a LoRA that somebody brought, its pictures
    /media/samples/NAME.zip                         all sample images of a run
    /media/own/tries/ID/NAME.png                    a picture that was drawn to try a LoRA
    /media/thumb?folder=FOLDER&file=NAME&size=384   a picture of a dataset, as training sees it

Inputs: addresses from a browser. A run is one of the listed names, a path has no hidden part, and
what it leads to is inside of its folder; saved states are not served, nor is anything of the
interface's own but the pictures of tries. Output: the file, a 304 for a
browser that has it, or 404 with the reason.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

import anyio
from starlette.requests import Request
from starlette.responses import (
    FileResponse,
    HTMLResponse,
    PlainTextResponse,
    Response,
    StreamingResponse,
)
from starlette.routing import BaseRoute, Route

from lora_trainer.common.errors import InputError, LoraTrainError, RequestError
from lora_trainer.dataset.images import IMAGE_EXTENSIONS, ImageDecodeError

from .lora_files import folder_of
from .markup import tag
from .runs import page_url, run_folder
from .sample_zip import sample_files, zipped
from .server.pages import words_of
from .server.translation import Words
from .thumbs import SIZES_PX, Thumbnails
from .workplace import Workplace

_THREADS = 4  # a picture of the allowed size takes some hundred MB while it is read
# What leads elsewhere in a name on Windows; on other systems names of images may have both.
_SEPARATORS = frozenset("\\:") if os.name == "nt" else frozenset()
_NOT_SERVED = frozenset({"states", "control"})
_SHOWN_IMAGES = {
    ".png": "image/png",
    ".jpg": "image/jpeg",
    ".jpeg": "image/jpeg",
    ".webp": "image/webp",
}
_RECORDS = frozenset({".json", ".jsonl", ".log", ".txt"})
REPORT = "report.html"
# The folder in a run's folder with files for other programs: a LoRA, its preview, its card.
EXPORTS = "export"
TRIES = "tries"
_NO_PAGE = "default-src 'none'; frame-ancestors 'none'; sandbox"
_REPORT_POLICY = (
    "default-src 'none'; img-src data:; style-src 'unsafe-inline'; frame-ancestors 'self'; sandbox"
)


def run_url(name: str, *parts: str) -> str:
    """Return the address of a file in the folder of the run `name`."""
    return "/media/run/" + "/".join(quote(part, safe="") for part in (name, *parts))


def samples_url(name: str) -> str:
    """Return the address of a zip of all sample images of a run."""
    return f"/media/samples/{quote(name, safe='')}.zip"


def thumb_url(folder: Path, file: str, *, size_px: int = 384) -> str:
    """Return the address of a small copy of a picture; `file` is relative to the dataset folder."""
    return "/media/thumb?" + urlencode({"folder": folder, "file": file, "size": size_px})


def try_url(folder: str, name: str) -> str:
    """Return the address of a picture that was drawn to try a LoRA."""
    return f"/media/own/{TRIES}/{quote(folder, safe='')}/{quote(name, safe='')}"


def routes(work: Workplace) -> list[BaseRoute]:
    """Return the routes for the runs and the datasets of `work`."""
    media = _Media(work=work, thumbs=Thumbnails.under(work.own))
    return [
        Route("/media/run/{name}/{file:path}", media.run_file),
        Route("/media/samples/{name}.zip", media.samples),
        Route(f"/media/own/{TRIES}/{{folder}}/{{name}}", media.try_image),
        Route("/media/thumb", media.thumb),
    ]


@dataclass(frozen=True, kw_only=True)
class _Served:
    """A file, what a browser is to take it for, and whether to save instead of to show it."""

    path: Path
    kind: str
    policy: str = _NO_PAGE
    download: bool = False


class _Media:
    def __init__(self, *, work: Workplace, thumbs: Thumbnails) -> None:
        self.work = work
        self.thumbs = thumbs
        self._limiter = anyio.CapacityLimiter(_THREADS)

    async def run_file(self, request: Request) -> Response:
        name, file = request.path_params["name"], request.path_params["file"]
        try:
            served = await anyio.to_thread.run_sync(served_file, self.work, name, file)
            found = served.path.stat()
        except LoraTrainError as error:
            return _missing(error)
        except OSError:  # pruned since it was looked for
            return _missing(_nothing(file))
        if served.path.name == REPORT:
            return await self._report(request, served, found, name)
        version = f'"{found.st_mtime_ns:x}-{found.st_size:x}"'
        return _file(
            request, served, tag=version, headers={"content-security-policy": served.policy}
        )

    async def _report(
        self, request: Request, served: _Served, found: os.stat_result, run: str
    ) -> Response:
        said = words_of(request)
        fields = {
            "content-security-policy": served.policy,
            "x-frame-options": "SAMEORIGIN",
            "etag": f'"{found.st_mtime_ns:x}-{found.st_size:x}-{said.code}"',
            "cache-control": "private, no-cache",
        }
        if request.headers.get("if-none-match") == fields["etag"]:
            return Response(status_code=304, headers=fields)
        shown = await anyio.to_thread.run_sync(_with_way_back, served.path, run, said)
        return HTMLResponse(shown, headers=fields)

    async def samples(self, request: Request) -> Response:
        name = request.path_params["name"]
        try:
            folder = await anyio.to_thread.run_sync(run_folder, self.work.runs, name)
        except LoraTrainError as error:
            return _missing(error)
        files = await anyio.to_thread.run_sync(sample_files, folder)
        if not files:
            return _missing(RequestError(f"{name} has no sample images yet", fix="wait for them"))
        return StreamingResponse(
            zipped(files, below=folder / "samples"),
            media_type="application/zip",
            headers={
                "content-disposition": f"attachment; filename*=UTF-8''{quote(name, safe='')}.zip",
                "content-security-policy": _NO_PAGE,
                "cache-control": "private, no-store",
            },
        )

    async def try_image(self, request: Request) -> Response:
        asked = request.path_params
        try:
            served = await anyio.to_thread.run_sync(
                try_file, self.work, asked["folder"], asked["name"]
            )
            tag = f'"{served.path.stat().st_mtime_ns:x}"'
        except LoraTrainError as error:
            return _missing(error)
        except OSError:
            return _missing(_nothing(asked["name"]))
        return _file(request, served, tag=tag, headers={"content-security-policy": _NO_PAGE})

    async def thumb(self, request: Request) -> Response:
        asked = request.query_params
        try:
            path = await anyio.to_thread.run_sync(
                dataset_file, self.work, asked.get("folder", ""), asked.get("file", "")
            )
            size_px = _size_px(asked.get("size", ""))
            thumb = await anyio.to_thread.run_sync(
                self.thumbs.of, path, size_px, limiter=self._limiter
            )
        except ImageDecodeError as fault:
            # Its card says why; in an element a 404 would be an error in the console at each visit.
            if request.headers.get("sec-fetch-dest") == "image":
                return Response(status_code=204)
            return PlainTextResponse(f"{path.name} {fault.reason}", status_code=404)
        except LoraTrainError as error:
            return _missing(error)
        served = _Served(path=thumb, kind="image/jpeg")
        return _file(
            request, served, tag=f'"{thumb.stem}"', headers={"content-security-policy": _NO_PAGE}
        )


def _with_way_back(report: Path, run: str, _: Words) -> str:
    """Return a report with the link to the page of its run, which the file itself cannot have: it is sent around."""
    back = tag("a", _("← The page of {}", run), href=page_url(run))
    try:
        text = report.read_text(encoding="utf-8")
    except OSError:  # pruned since it was looked for
        return back
    return text.replace("<main>", f"<main>{tag('nav', back)}", 1)


def served_file(work: Workplace, name: str, file: str) -> _Served:
    """Return what is served for a file of a run or a brought LoRA; raises RequestError for everything else."""
    folder = folder_of(work, name).resolve()
    path = _inside(folder, file)
    if not path.is_relative_to(folder):
        raise _nothing(file)
    served = _as_served(path, parts=path.relative_to(folder).parts)
    if served is None or not stat.S_ISREG(path.stat().st_mode):
        raise _nothing(file)
    return served


def _as_served(path: Path, *, parts: Sequence[str]) -> _Served | None:
    """Return how a file is served, by where it lies in the folder of its run."""
    extension = path.suffix.lower()
    if not parts or parts[0] in _NOT_SERVED or any(part.startswith(".") for part in parts):
        return None
    if extension in _SHOWN_IMAGES:
        return _Served(path=path, kind=_SHOWN_IMAGES[extension])
    if parts[0] == EXPORTS and len(parts) == 2 and extension in (".safetensors", ".json", ".zip"):
        return _Served(path=path, kind="application/octet-stream", download=True)
    if len(parts) > 1:
        return None
    if parts[0] == REPORT:
        return _Served(path=path, kind="text/html", policy=_REPORT_POLICY)
    if extension == ".safetensors":
        return _Served(path=path, kind="application/octet-stream", download=True)
    return _Served(path=path, kind="text/plain") if extension in _RECORDS else None


def try_file(work: Workplace, folder: str, name: str) -> _Served:
    """Return what is served for a picture of a try; raises RequestError for everything else."""
    tries = (work.own / TRIES).resolve()
    path = _inside(tries, f"{folder}/{name}")
    kind = _SHOWN_IMAGES.get(path.suffix.lower())
    if kind is None or not path.is_relative_to(tries) or not path.is_file():
        raise _nothing(name)
    return _Served(path=path, kind=kind)


def dataset_file(work: Workplace, folder: str, file: str) -> Path:
    """Return a picture of a dataset folder, links followed; raises InputError, RequestError."""
    path = _inside(work.path(folder, what="a folder with images"), file)
    if not work.allows(path):
        raise _nothing(file)
    if path.suffix.lower() not in IMAGE_EXTENSIONS:
        raise InputError(f"{path.name!r} is not a picture by its name", fix="choose a picture")
    return path


def _inside(folder: Path, file: str) -> Path:
    """Return the file that a relative name without tricks leads to; raises RequestError."""
    parts = file.split("/")
    plain = all(
        part and not part.startswith(".") and part.isprintable() and not set(part) & _SEPARATORS
        for part in parts
    )
    if not plain:
        raise _nothing(file)
    try:
        return folder.joinpath(*parts).resolve(strict=True)
    except (OSError, RuntimeError, ValueError):  # none there, a circle of links, no such name
        raise _nothing(file) from None


def _size_px(text: str) -> int:
    sizes = {str(size): size for size in SIZES_PX}
    if text not in sizes:
        raise RequestError(
            f"{text[:20]!r} is not a size of a small copy", fix=f"ask for {', '.join(sizes)}"
        )
    return sizes[text]


def _nothing(file: str) -> RequestError:
    return RequestError(
        f"the file {file[:200]!r} does not exist", fix="choose one that the page shows"
    )


def _missing(error: LoraTrainError) -> Response:
    return PlainTextResponse(str(error), status_code=404)


def _file(request: Request, served: _Served, *, tag: str, headers: Mapping[str, str]) -> Response:
    # Asked again each time: a run that is resumed writes its samples anew.
    fields = {**headers, "etag": tag, "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=fields)
    return FileResponse(
        served.path,
        media_type=served.kind,
        headers=fields,
        filename=served.path.name if served.download else None,
    )

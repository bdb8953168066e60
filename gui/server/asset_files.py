"""The scripts, style sheets, typeface and icons of the pages, which lie beside this module, and the example.

Inputs: names. Outputs: texts, paths, and the routes below `/ui` that serve them and
the texts of languages; nothing else is there.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

import lora_trainer
from lora_trainer.reporting.charts import CHARTS_CSS

from . import language

_GUI = Path(__file__).parents[1]
_FOLDER = _GUI / "assets"
_PACKAGE = Path(lora_trainer.__file__).parent
# In a wheel the example lies inside of the package; see pyproject.toml.
EXAMPLE = next(
    (
        path
        for path in (_PACKAGE / "example", _PACKAGE.parent / "datasets" / "example")
        if path.is_dir()
    ),
    _PACKAGE / "example",
)
EXAMPLE_NAME = "example"
# What is shown of the example where nothing is there yet.
EXAMPLE_IMAGES = ("zibbo_01.png", "zibbo_05.jpg", "zibbo_12.webp", "zibbo_14.png")
_KINDS = {
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}


def example_url(name: str) -> str:
    """Return the address of an image of the example."""
    return f"/ui/example/{name}"


def routes() -> list[BaseRoute]:
    """Return the routes of the assets and of what is shown of the example."""
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _KINDS}
    files[CHARTS_CSS.name] = CHARTS_CSS  # which the report has too
    # Of each room of the pages, such as `trash/script.js`.
    rooms = {
        path.relative_to(_GUI).as_posix(): path
        for path in _GUI.glob("*/*")
        if path.suffix in _KINDS and path.parent != _FOLDER
    }
    shown = {name: EXAMPLE / name for name in EXAMPLE_IMAGES}

    async def serve(name: str, known: dict[str, Path]) -> Response:
        path = known.get(name)
        if path is None or not path.is_file():
            return PlainTextResponse("This file does not exist.", status_code=404)
        # Asked again each time: an update of lora-train brings others under the same names.
        headers = {"cache-control": "private, no-cache"}
        return FileResponse(path, media_type=_KINDS.get(path.suffix), headers=headers)

    async def ui(request: Request) -> Response:
        return await serve(request.path_params["name"], files)

    async def room(request: Request) -> Response:
        return await serve(f"{request.path_params['room']}/{request.path_params['name']}", rooms)

    async def example(request: Request) -> Response:
        return await serve(request.path_params["name"], shown)

    async def texts(request: Request) -> Response:
        code = request.path_params["code"]
        if code == language.ENGLISH or code not in language.languages():
            return PlainTextResponse("The interface does not have this language.", status_code=404)
        headers = {"cache-control": "private, no-cache"}
        return JSONResponse(language.words(code), headers=headers)

    async def favicon(request: Request) -> Response:
        return await serve("mark.svg", files)

    return [
        Route("/favicon.ico", favicon),  # asked for by browsers where a page names no icon
        Route("/ui/{name}", ui),
        Route("/ui/example/{name}", example),
        Route("/ui/language/{code}.json", texts),
        Route("/ui/{room}/{name}", room),
    ]

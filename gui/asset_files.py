"""The scripts, style sheets and icons of the pages, which lie beside this module, and the example.

Inputs: names. Outputs: texts, paths, and the routes below `/ui` that serve them and
the scripts of languages; nothing else is there.
"""

from __future__ import annotations

from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

import lora_trainer

from . import language

_FOLDER = Path(__file__).with_name("assets")
FAVICON = _FOLDER / "mark.svg"
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
_KINDS = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml"}


def asset(name: str) -> str:
    """Return the text of a script or style sheet."""
    return (_FOLDER / name).read_text(encoding="utf-8")


def style_sheets() -> list[Path]:
    """Return the style sheets, which every page gets."""
    return sorted(_FOLDER.glob("*.css"))


def example_url(name: str) -> str:
    """Return the address of an image of the example."""
    return f"/ui/example/{name}"


def routes() -> list[BaseRoute]:
    """Return the routes of the assets and of what is shown of the example."""
    files = {path.name: path for path in _FOLDER.iterdir() if path.suffix in _KINDS}
    shown = {name: EXAMPLE / name for name in EXAMPLE_IMAGES}

    async def serve(request: Request, known: dict[str, Path]) -> Response:
        path = known.get(request.path_params["name"])
        if path is None or not path.is_file():
            return PlainTextResponse("There is no such file.", status_code=404)
        # Asked again each time: an update of lora-train brings others under the same names.
        headers = {"cache-control": "private, no-cache"}
        return FileResponse(path, media_type=_KINDS.get(path.suffix), headers=headers)

    async def ui(request: Request) -> Response:
        return await serve(request, files)

    async def example(request: Request) -> Response:
        return await serve(request, shown)

    async def language_script(request: Request) -> Response:
        code = request.path_params["code"]
        if code == language.ENGLISH or code not in language.languages():
            return PlainTextResponse("There is no such language.", status_code=404)
        headers = {"cache-control": "private, no-cache"}
        return Response(language.script(code), media_type=_KINDS[".js"], headers=headers)

    return [
        Route("/ui/{name}", ui),
        Route("/ui/example/{name}", example),
        Route("/ui/language/{code}.js", language_script),
    ]

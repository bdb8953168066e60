"""Serves the pages: one socket, the guard around everything, our own file routes before gradio's.

Inputs: the workplace, who may come in, an address and a port. Output: a server that runs until it is
interrupted. It asks nobody: no analytics, no tunnel, no check whether it can be reached.
"""

from __future__ import annotations

import errno
import os
import socket
import warnings
from collections.abc import Sequence
from typing import Any

from lora_trainer.common.errors import MachineError
from lora_trainer.reporting.charts import CHARTS_CSS

from ..uploads import INCOMING, forget_old
from ..workplace import Workplace
from .asset_files import FAVICON, asset, style_sheets
from .guard import UPLOAD_MAX_BYTES, Access, Application, Guard
from .startup import Front

FIRST_PORT, LAST_PORT = 7860, 7959
# Fonts of the machine: those that come with gradio lack the bold face, letter by letter.
TEXT_FONTS = ("system-ui", "sans-serif")
CODE_FONTS = ("ui-monospace", "monospace")
_KEPT_S = 24 * 3600
_END_WITHIN_S = 2
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def quiet_gradio(work: Workplace) -> None:
    """Turn off what gradio sends out and keep its files in ours; it reads this when imported.

    Its own place is a folder in /tmp that all users of the machine share.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(work.own / INCOMING)


def application(work: Workplace, *, access: Access) -> Application:
    """Return everything that is served, behind the guard; Gradio is imported once it is asked."""
    return Guard(Front(work, lambda: pages(work)), access=access)


def pages(work: Workplace) -> Any:
    """Return the pages of `work` as Gradio serves them; this takes some seconds."""
    import gradio as gr
    from fastapi import FastAPI
    from gradio.themes import Default

    from ..site import build_site

    site = build_site(work)
    site.delete_cache = (3600, _KEPT_S)
    # Only `launch` sets this; without it gradio copies any file that a request names to where it
    # serves files from.
    site.has_launched = True
    forget_old(work.own / INCOMING, kept_s=_KEPT_S)
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SSR mode is not supported")  # nor wanted
        return gr.mount_gradio_app(
            outer,
            site,
            path="/",
            theme=Default(font=TEXT_FONTS, font_mono=CODE_FONTS).set(**_theme()),
            css=CHARTS_CSS.read_text(encoding="utf-8"),
            css_paths=style_sheets(),
            # Gradio adds this once its script runs, and begins without a wait: hence a script in the page.
            head='<link rel="icon" href="/ui/mark.svg" type="image/svg+xml">'
            '<script src="/ui/shared/first.js"></script>'
            f"<script>{asset('answers.js')}</script>",
            favicon_path=str(FAVICON),
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            show_error=True,
            ssr_mode=False,
            mcp_server=False,
            # Spoken after each change; Gradio lacks the text of its own key.
            i18n=gr.I18n(en={"common.complete": "Done"}, de={"common.complete": "Fertig"}),
            pwa=False,
            allowed_paths=[],
            max_file_size=UPLOAD_MAX_BYTES,
        )


def _theme() -> dict[str, Any]:
    """Return Gradio's colours and sizes as those of assets/site.css, in both schemes."""
    values = {
        "body_background_fill": "var(--page)",
        "body_text_color": "var(--ink)",
        "body_text_color_subdued": "var(--quiet)",
        "background_fill_primary": "var(--surface)",
        "background_fill_secondary": "var(--sunken)",
        "block_background_fill": "var(--surface)",
        "block_border_color": "var(--rule)",
        "block_info_text_color": "var(--quiet)",
        "block_label_text_color": "var(--quiet)",
        "block_title_text_color": "var(--ink)",
        "border_color_primary": "var(--rule)",
        "border_color_accent": "var(--accent)",
        "color_accent_soft": "var(--accent-soft)",
        "link_text_color": "var(--accent)",
        "link_text_color_hover": "var(--accent-hover)",
        "link_text_color_visited": "var(--accent)",
        "link_text_color_active": "var(--accent-hover)",
        "input_background_fill": "var(--surface)",
        "input_border_color": "var(--edge)",
        "input_placeholder_color": "var(--quiet)",
        "button_primary_background_fill": "var(--accent)",
        "button_primary_background_fill_hover": "var(--accent-hover)",
        "button_primary_border_color": "var(--accent)",
        "button_primary_border_color_hover": "var(--accent-hover)",
        "button_primary_text_color": "var(--on-accent)",
        "button_secondary_background_fill": "var(--surface)",
        "button_secondary_background_fill_hover": "var(--sunken)",
        "button_secondary_border_color": "var(--edge)",
        "button_secondary_text_color": "var(--ink)",
        "button_cancel_background_fill": "var(--surface)",
        "button_cancel_background_fill_hover": "var(--bad-soft)",
        "button_cancel_border_color": "var(--bad)",
        "button_cancel_text_color": "var(--bad)",
        "button_cancel_text_color_hover": "var(--bad)",
        "checkbox_background_color": "var(--surface)",
        "checkbox_background_color_selected": "var(--accent)",
        "checkbox_border_color": "var(--edge)",
        "checkbox_border_color_selected": "var(--accent)",
        "checkbox_label_background_fill": "var(--surface)",
        "checkbox_label_background_fill_selected": "var(--accent-soft)",
        "checkbox_label_border_color": "var(--rule)",
        "checkbox_label_text_color": "var(--ink)",
        "checkbox_label_text_color_selected": "var(--ink)",
        "error_text_color": "var(--bad)",
        "slider_color": "var(--accent)",
        "table_border_color": "var(--rule)",
    }
    sizes = {
        "button_border_width": "1px",
        "button_large_radius": "var(--round)",
        "button_medium_radius": "var(--round)",
        "button_small_radius": "var(--round)",
        "color_accent": "var(--accent)",
    }
    return {**values, **{f"{name}_dark": value for name, value in values.items()}, **sizes}


def listen(addresses: Sequence[str], port: int | None) -> list[socket.socket]:
    """Return sockets that listen on all the addresses, on the first port that is free on each of them.

    An address that this machine does not have is left out, but not the first. Raises MachineError.
    """
    ports = range(FIRST_PORT, LAST_PORT + 1) if port is None else (port,)
    problem: OSError | None = None
    for candidate in ports:
        try:
            return _listening(addresses, candidate)
        except OSError as error:
            problem = error
    raise MachineError(
        f"cannot serve on {addresses[0]}: {problem}",
        fix="give a free port with --port, and with --listen an address of this machine",
    )


def _listening(addresses: Sequence[str], port: int) -> list[socket.socket]:
    """Return a socket for each address; raises OSError where the port is taken on one."""
    sockets: list[socket.socket] = []
    seen: set[str] = set()
    try:
        for address in addresses:
            found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            place = found[4][:2]
            if str(place[0]) in seen:
                continue
            seen.add(str(place[0]))
            try:
                sockets.append(socket.create_server(place, family=found[0]))
            except OSError as error:
                if not sockets or error.errno not in _NO_SUCH_ADDRESS:
                    raise
            port = sockets[0].getsockname()[1]  # where 0 was asked for
    except OSError:
        for opened in sockets:
            opened.close()
        raise
    return sockets


def run(app: Application, listening: list[socket.socket]) -> None:
    """Serve until Ctrl-C or SIGTERM."""
    import uvicorn

    from .heads import BoundedHeads

    config = uvicorn.Config(
        app,
        http=BoundedHeads,  # made of h11, the stricter of its two parsers
        ws="none",
        log_level="warning",
        access_log=False,  # it would hold the key
        server_header=False,
        proxy_headers=False,  # else a client says itself which address it comes from
        timeout_graceful_shutdown=_END_WITHIN_S,
    )
    uvicorn.Server(config).run(sockets=listening)

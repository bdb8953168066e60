"""How programs reach the operations: Gradio's API at /gradio_api, and tools of the Model Context Protocol at /mcp.

    gradio_client.Client(ADDRESS, headers={"Authorization": "Bearer KEY"}).predict(..., api_name="/plan")

Both are imported when somebody asks for the first time, which takes seconds that no page has to wait for. The sign-in
and the guard stand before them, as before the pages. Inputs: ASGI requests. Outputs: JSON and streams of it.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any

from lora_trainer.common.errors import LoraTrainError

from .operations import Operations

GRADIO_PATHS = ("/config", "/gradio_api/{rest:path}")
MCP_PATH = "/mcp"
_AT_ONCE = 8
"""Calls of one operation that may run at the same time: `watch` lasts as long as a training."""


def gradio_application(operations: Operations) -> Any:
    """Return the operations as Gradio serves them to gradio_client; this takes some seconds."""
    import gradio as gr
    from fastapi import FastAPI
    from gradio.events import api

    def refused(error: LoraTrainError) -> Exception:
        return gr.Error(str(error), print_exception=False)

    with gr.Blocks(mode="server", analytics_enabled=False) as blocks:
        for operation in (*operations.reading(), *operations.writing()):
            api(
                raising(operation, refused),
                api_name=operation.__name__,
                concurrency_limit=_AT_ONCE,
            )
    # Only `launch` sets this; without it gradio copies any file that a request names to where it
    # serves files from.
    blocks.has_launched = True
    outer = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="SSR mode is not supported")  # nor wanted
        return gr.mount_gradio_app(
            outer,
            blocks,
            path="/",
            footer_links=[],
            run_history=False,
            enable_monitoring=False,
            show_error=True,
            ssr_mode=False,
            mcp_server=False,
            pwa=False,
            allowed_paths=[],
        )


def mcp_server(operations: Operations, *, may_write: bool) -> Any:
    """Return the operations as tools for an assistant; those that change something only where it may write."""
    from mcp.server import MCPServer
    from mcp.server.mcpserver.exceptions import ToolError

    def refused(error: LoraTrainError) -> Exception:
        return ToolError(str(error))

    server: Any = MCPServer(
        "lora-train",
        instructions="Plans, starts and watches trainings of diffusion LoRAs on this machine.",
        log_level="WARNING",
    )
    # A tool has one answer: an assistant asks for the status again, and follows no stream.
    chosen = [each for each in operations.reading() if not inspect.isgeneratorfunction(each)]
    chosen += operations.writing() if may_write else ()
    for operation in chosen:
        server.add_tool(raising(operation, refused), description=inspect.getdoc(operation))
    return server


def mcp_application(operations: Operations, *, may_write: bool) -> Any:
    """Return the tools for assistants behind one address."""
    from mcp.server.transport_security import TransportSecuritySettings

    return mcp_server(operations, may_write=may_write).streamable_http_app(
        streamable_http_path=MCP_PATH,
        stateless_http=True,
        # The guard has looked at the host and the origin, with the names that this server has.
        transport_security=TransportSecuritySettings(enable_dns_rebinding_protection=False),
    )


def raising(
    operation: Callable[..., Any], refused: Callable[[LoraTrainError], Exception]
) -> Callable[..., Any]:
    """Return an operation of the same name and signature whose refusals are raised as their reader knows them."""
    if inspect.isgeneratorfunction(operation):

        @functools.wraps(operation)
        def streamed(*args: Any, **kwargs: Any) -> Any:
            try:
                yield from operation(*args, **kwargs)
            except LoraTrainError as error:
                raise refused(error) from error

        return streamed

    @functools.wraps(operation)
    def called(*args: Any, **kwargs: Any) -> Any:
        try:
            return operation(*args, **kwargs)
        except LoraTrainError as error:
            raise refused(error) from error

    return called

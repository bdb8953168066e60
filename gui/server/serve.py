"""Serves the pages: one socket, the guard around everything.

Inputs: the workplace, who may come in, an address and a port. Output: a server that runs until it is
interrupted. It asks nobody: no analytics, no tunnel, no check whether it can be reached.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Sequence

from lora_trainer.common.errors import MachineError

from ..programs import Tools
from ..uploads import INCOMING
from ..workplace import Workplace
from .guard import Access, Application, Guard
from .startup import AllRoutes

FIRST_PORT, LAST_PORT = 7860, 7959
_END_WITHIN_S = 2
_NO_SUCH_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)


def quiet_gradio(work: Workplace) -> None:
    """Turn off what gradio sends out and keep its files in ours; it reads this when imported.

    Its own place is a folder in /tmp that all users of the machine share.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["GRADIO_TEMP_DIR"] = str(work.own / INCOMING)


def application(work: Workplace, *, access: Access, tools: Tools = "off") -> Application:
    """Return everything that is served, behind the guard."""
    return Guard(AllRoutes(work, tools=tools), access=access)


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

"""The interface with late answers: each is held back up to 0.7 s, as over a bad connection.

    python -m tests.fakes.late_answers gui --runs=FOLDER ...      the words of `python -m lora_trainer`
    LATE_ANSWERS=3 python -m pytest tests/gui/test_e2e_run_page.py

With the variable LATE_ANSWERS, a seed, `start_gui` starts this program in place of the other. What the server found
out is found out at once; only its answer waits, so that answers arrive in another order than they were asked for.
"""

from __future__ import annotations

import asyncio
import os
from random import Random

from lora_trainer.gui.server import serve
from lora_trainer.gui.server.guard import Application, Message, Receive, Send

from lora_trainer.cli.main import main

SEED = "LATE_ANSWERS"
LATEST_S = 0.7


def late(application: Application, draw: Random) -> Application:
    """Return the application with each of its answers held back."""

    async def served(scope: Message, receive: Receive, send: Send) -> None:
        held_s = draw.uniform(0.0, LATEST_S)

        async def send_late(message: Message) -> None:
            if message["type"] == "http.response.start":
                await asyncio.sleep(held_s)
            await send(message)

        await application(scope, receive, send_late if scope["type"] == "http" else send)

    return served


def _start() -> None:
    draw, run = Random(int(os.environ[SEED])), serve.run
    serve.run = lambda app, listening: run(late(app, draw), listening)
    main()


if __name__ == "__main__":
    _start()

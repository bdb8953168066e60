"""Notices that a training of the queue has ended: by ntfy, a webhook, or e-mail.

Input: notices.json in the user's configuration folder, readable by the user alone, as it may hold a password; runs and
queues hold none of it. Output: one message for each way that is set. Nothing of a training waits for it, and a way that
does not answer is only said.
"""

from __future__ import annotations

import http.client
import json
import os
import smtplib
import ssl
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from email.message import EmailMessage
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import Field, TypeAdapter, ValidationError

from lora_trainer import __version__
from lora_trainer.common.errors import RequestError, first_line
from lora_trainer.common.files import (
    disk_error,
    json_bytes,
    open_binary,
    read_regular,
    retry_while_open,
    temporary_beside,
)
from lora_trainer.common.wording import without_secrets

_FILE = "notices.json"
_WITHIN_S = 15.0
# Of SMTP over TLS; on every other port a connection turns to TLS before the password is sent.
_TLS_PORT = 465


@dataclass(frozen=True, kw_only=True)
class Notices:
    """Where notices go; an empty text leaves a way out. E-mail needs an address and a server."""

    ntfy: str = ""
    """Address of a topic, such as https://ntfy.sh/my-trainings."""
    webhook: str = ""
    """Address that gets each notice as JSON: title, message, item, state, run."""
    email_to: str = ""
    smtp_server: str = ""
    smtp_port: Annotated[int, Field(gt=0, lt=65_536)] = _TLS_PORT
    smtp_user: str = ""
    smtp_password: str = ""

    @property
    def is_any(self) -> bool:
        """Whether there is a way at all."""
        return bool(self.ntfy or self.webhook or self.email_to)


_NOTICES = TypeAdapter(Notices)


@dataclass(frozen=True, kw_only=True)
class Notice:
    """What is told: a title, a sentence, and for programs the item, its state and its run."""

    title: str
    message: str
    item: str = ""
    state: str = ""
    run: str = ""


def config_folder() -> Path:
    """Return the folder for our configuration where the platform keeps that of programs."""
    if sys.platform == "win32":
        return (
            Path(os.environ.get("APPDATA", str(Path.home() / "AppData" / "Roaming"))) / "lora-train"
        )
    return Path(os.environ.get("XDG_CONFIG_HOME", str(Path.home() / ".config"))) / "lora-train"


def read_notices() -> Notices:
    """Return where notices go, nowhere if nothing was set or the file is damaged."""
    try:
        return _NOTICES.validate_json(read_regular(config_folder() / _FILE))
    except (OSError, ValidationError):
        return Notices()


def keep_notices(values: Mapping[str, Any]) -> Notices:
    """Check and keep where notices go; raises RequestError, MachineError."""
    try:
        notices = _NOTICES.validate_python(dict(values))
    except ValidationError as error:
        raise RequestError(
            f"these notices cannot be kept: {error.errors()[0]['msg']}", fix="correct the field"
        ) from None
    for name, address in (("ntfy", notices.ntfy), ("webhook", notices.webhook)):
        parts = urlsplit(address)
        if address and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise RequestError(
                f"{address[:100]!r} is not an address for {name}",
                fix="give one that begins with https://",
            )
    if notices.ntfy and not urlsplit(notices.ntfy).path.strip("/"):
        raise RequestError(
            f"{notices.ntfy[:100]!r} names no topic",
            fix="give one such as https://ntfy.sh/my-topic",
        )
    if notices.email_to and ("@" not in notices.email_to or not notices.smtp_server):
        raise RequestError(
            "e-mail needs an address to send to and a server to send with",
            fix="fill in both, such as you@example.org and smtp.example.org",
        )
    _write_private(config_folder() / _FILE, json_bytes(asdict(notices)))
    return notices


def _write_private(file: Path, content: bytes) -> None:
    """Write a file that only the user can read, whole or not at all; raises MachineError."""
    temporary = temporary_beside(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        descriptor = open_binary(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
        try:
            with os.fdopen(descriptor, "wb") as opened:
                opened.write(content)
            retry_while_open(lambda: temporary.replace(file))
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise disk_error(file, error) from error


def send(notices: Notices, notice: Notice) -> list[str]:
    """Send a notice each way; return why a way did not work, a line for each that did not."""
    ways: list[tuple[str, str, Callable[[Notices, Notice], None]]] = [
        ("ntfy", notices.ntfy, _by_ntfy),
        ("the webhook", notices.webhook, _by_webhook),
        ("e-mail", notices.email_to, _by_email),
    ]
    failed = []
    for name, address, way in ways:
        if not address:
            continue
        try:
            way(notices, notice)
        except (OSError, ValueError, smtplib.SMTPException, http.client.HTTPException) as error:
            failed.append(without_secrets(f"no notice by {name}: {first_line(error)}"))
    return failed


def _by_ntfy(notices: Notices, notice: Notice) -> None:
    # As JSON to the server itself: a header, which the topic's address would need, holds no other letters than ASCII.
    parts = urlsplit(notices.ntfy)
    path, _, topic = parts.path.strip("/").rpartition("/")
    server = parts._replace(path=f"/{path}", query="", fragment="").geturl()
    _post(server, {"topic": topic, "title": notice.title, "message": notice.message})


def _by_webhook(notices: Notices, notice: Notice) -> None:
    _post(notices.webhook, asdict(notice))


def _post(address: str, values: Mapping[str, Any]) -> None:
    headers = {"content-type": "application/json", "user-agent": f"lora-train/{__version__}"}
    body = json.dumps(values).encode()
    request = urllib.request.Request(address, data=body, headers=headers, method="POST")
    with urllib.request.urlopen(request, timeout=_WITHIN_S) as answer:
        answer.read(1)


def _by_email(notices: Notices, notice: Notice) -> None:
    message = EmailMessage()
    message["Subject"] = notice.title
    message["From"] = notices.smtp_user if "@" in notices.smtp_user else notices.email_to
    message["To"] = notices.email_to
    message.set_content(notice.message)
    secure = ssl.create_default_context()
    server: smtplib.SMTP
    if notices.smtp_port == _TLS_PORT:
        server = smtplib.SMTP_SSL(
            notices.smtp_server, notices.smtp_port, timeout=_WITHIN_S, context=secure
        )
    else:
        server = smtplib.SMTP(notices.smtp_server, notices.smtp_port, timeout=_WITHIN_S)
    with server:
        if notices.smtp_password:
            if notices.smtp_port != _TLS_PORT:
                server.starttls(context=secure)
            server.login(notices.smtp_user, notices.smtp_password)
        server.send_message(message)

"""Who may use the interface: the user of this machine by a key, others by a password.

The key is a file that only its user can read, `<runs>/.gui/key`; the link that is printed carries it
into a cookie of a host name that nobody else knows (door.py), so that another user of the machine, his
server on another port, or a page that guesses the port, has nothing to show. A program that can read the file
sends the key in a header. Outputs: for each request None, or what to answer instead; see `guard.Access`.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import hmac
import os
import secrets
import socket
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

import psutil

from lora_trainer.common.errors import RequestError
from lora_trainer.common.files import TEMPORARY_PREFIX, disk_error, open_binary, retry_while_open

from .cookies import cookies
from .door import NO_KEY, asks_for_a_page, door, key_page, own_host, password_page
from .guard import Asked, GuardResponse, Headers, hostname
from .guesses import GuessLimit

LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
PASSWORD_VARIABLE = "LORA_TRAIN_GUI_PASSWORD"
PASSWORD_MIN_LENGTH = 8
KEY_FILE = "key"
KEY_PARAMETER = "key"
COOKIE = "lora_train_key"
_KEY_BYTES = 32
_COOKIE_MAX_AGE_S = 30 * 24 * 3600
_NO_PASSWORD = f"This server asks for the password in {PASSWORD_VARIABLE}; any user name will do."


@dataclass(frozen=True, kw_only=True)
class KeyAccess:
    """For the user of this machine: the key, or once a ticket, in the link; then a cookie.

    The link that a browser is started with stands in the list of processes, which all users of the
    machine can read; so it carries a ticket that is worth nothing once it was used. The cookie is one
    of `own_host` alone, see door.py, and its value opens this port alone.
    """

    key: str
    tickets: set[str] = field(default_factory=set)
    hosts: frozenset[str]

    @classmethod
    def of(cls, key: str, *, hosts: frozenset[str] = LOOPBACK) -> KeyAccess:
        """Return who may come in with a key, under its own host name beside those of the loopback."""
        return cls(key=key, hosts=hosts | {own_host(key)})

    def ticket(self) -> str:
        """Return a key that opens the page once."""
        ticket = secrets.token_urlsafe(_KEY_BYTES)
        self.tickets.add(ticket)
        return ticket

    def cookie(self, port: int) -> tuple[str, str]:
        """Return name and value of the cookie for a port: two servers need two, each worth nothing elsewhere."""
        value = hmac.new(self.key.encode(), f"port {port}".encode(), hashlib.sha256).hexdigest()
        return f"{COOKIE}_{port}", value

    async def answer(self, asked: Asked) -> GuardResponse | None:
        """Ask for the key; take it out of the address where it stands in there."""
        host = asked.headers.get("host", "")
        is_own = hostname(host) == own_host(self.key)
        # A program sends the key itself, which no browser does by itself.
        by_program = same(_bearer(asked.headers.get("authorization", "")), self.key)
        known = by_program or (is_own and self._is_known(asked))
        query = parse_qsl(asked.query, keep_blank_values=True)
        shown = [value for name, value in query if name == KEY_PARAMETER]
        rest = [pair for pair in query if pair[0] != KEY_PARAMETER]
        if asked.path != "/" or asked.method != "GET" or not shown:
            return None if known else _without_key(asked, is_own=is_own)
        if not known and not self._opens(_key_in(shown[0])):
            return _without_key(asked, is_own=is_own)
        if not is_own:
            return door(asked.headers, target=self._own_address(host, rest))
        return _enter(
            f"/?{urlencode(rest)}" if rest else "/", asked, cookie=self.cookie(asked.port)
        )

    def _is_known(self, asked: Asked) -> bool:
        name, wanted = self.cookie(asked.port)
        return any(same(value, wanted) for value in cookies(asked.headers.get("cookie", ""), name))

    def _own_address(self, host: str, query: list[tuple[str, str]]) -> str:
        """Return where the page is, at the port that this browser asks: a tunnel may have its own."""
        port = host.rpartition(":")[2]
        place = own_host(self.key) + (f":{port}" if port.isdecimal() else "")
        return f"http://{place}/?{urlencode([(KEY_PARAMETER, self.ticket()), *query])}"

    def _opens(self, shown: str) -> bool:
        for ticket in self.tickets:
            if same(shown, ticket):
                self.tickets.discard(ticket)
                return True
        return same(shown, self.key)


def _key_in(typed: str) -> str:
    """Return the key of a link that somebody pasted whole, any other text as it is."""
    try:
        query = parse_qsl(urlsplit(typed.strip()).query)
    except ValueError:  # not an address at all
        return typed
    return next((value for name, value in query if name == KEY_PARAMETER), typed.strip())


def _bearer(header: str) -> str:
    """Return the key of an Authorization header, an empty text where there is none."""
    scheme, _, given = header.partition(" ")
    return given.strip() if scheme.lower() == "bearer" else ""


def _without_key(asked: Asked, *, is_own: bool) -> GuardResponse:
    """Return what somebody gets who has no key here: a browser may know the own name from before."""
    if asked.method == "GET" and asks_for_a_page(asked.headers):
        if is_own and not _has_cookies_of_its_own(asked):
            # The door leads here, or a link: a browser that has the cookie sends it with the page's own request.
            path = "/" + quote(asked.path.lstrip("/"))  # two slashes would be another host
            return _loaded_anew(f"{path}?{asked.query}" if asked.query else path)
        return key_page(asked.headers) if is_own else door(asked.headers)
    return GuardResponse(status=403, sentence=NO_KEY)


def _enter(target: str, asked: Asked, *, cookie: tuple[str, str]) -> GuardResponse:
    name, value = cookie
    setting = f"{name}={value}; Path=/; Max-Age={_COOKIE_MAX_AGE_S}; HttpOnly; SameSite=Strict"
    headers = {"set-cookie": setting}
    if _has_cookies_of_its_own(asked):
        return GuardResponse(status=303, sentence="", headers={**headers, "location": target})
    return _loaded_anew(target, headers=headers)


def _has_cookies_of_its_own(asked: Asked) -> bool:
    """Whether a browser sends strict cookies with a request: not where a page of another site led to it."""
    return asked.headers.get("sec-fetch-site", "none") in ("none", "same-origin")


def _loaded_anew(target: str, *, headers: Headers | None = None) -> GuardResponse:
    """Return a page that asks for `target` itself; a redirection would still come without the cookie."""
    refresh = {"refresh": f"0;url={target}", "content-type": "text/html; charset=utf-8"}
    return GuardResponse(
        status=200,
        sentence="<!doctype html><title>lora-train</title>",
        headers={**(headers or {}), **refresh},
    )


def same(given: str, wanted: str) -> bool:
    """Compare in a time that does not tell how much of it is right."""
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode(errors="replace"))


def read_key(folder: Path) -> str:
    """Return the key kept in `folder`, made at the first time; raises MachineError."""
    path = folder / KEY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            key = path.read_text(encoding="ascii", errors="replace").strip()
            if len(key) >= _KEY_BYTES and key.isascii() and key.isprintable():
                return key
            path.unlink()  # cut off in the middle of a write, or emptied
        return _new_key(path)
    except OSError as error:
        raise disk_error(path, error) from error


def _new_key(path: Path) -> str:
    temporary = path.with_name(f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}")
    key = secrets.token_urlsafe(_KEY_BYTES)
    descriptor = open_binary(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode=0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(key.encode("ascii"))
        try:
            os.link(
                temporary, path
            )  # unlike a rename it keeps the key of a server started meanwhile
        except FileExistsError:
            return path.read_text(encoding="ascii")
        except OSError:  # a filesystem without links
            retry_while_open(lambda: temporary.replace(path))
    finally:
        temporary.unlink(missing_ok=True)
    return key


@dataclass(frozen=True, kw_only=True)
class PasswordAccess:
    """For a server that others reach: HTTP Basic authentication, any user name."""

    password: str
    hosts: frozenset[str]
    held_back: GuessLimit = field(default_factory=GuessLimit)

    async def answer(self, asked: Asked) -> GuardResponse | None:
        """Ask for the password; who got it wrong may try again a second later."""
        given = _basic_password(asked.headers.get("authorization", ""))
        if given is None:
            return _ask_for_password(asked)
        wait_s = self.held_back.wait_s(asked.client, now_s=time.monotonic())
        if wait_s is None:
            return GuardResponse(
                status=429,
                sentence="Too many wrong passwords: wait a minute.",
                headers={"retry-after": "60"},
            )
        if wait_s:
            await asyncio.sleep(wait_s)
        if same(given, self.password):
            self.held_back.right(asked.client)
            return None
        self.held_back.wrong(asked.client, now_s=time.monotonic())
        return _ask_for_password(asked)


def _ask_for_password(asked: Asked) -> GuardResponse:
    """Return what makes a browser ask; the page of it is seen where somebody closes that question.

    A page with a form of its own would have to keep a cookie, which a browser sends to every port of the machine.
    """
    if asks_for_a_page(asked.headers):
        return password_page(asked.headers, variable=PASSWORD_VARIABLE, challenge=_CHALLENGE)
    return GuardResponse(
        status=401, sentence=_NO_PASSWORD, headers={"www-authenticate": _CHALLENGE}
    )


_CHALLENGE = 'Basic realm="lora-train", charset="UTF-8"'


def _basic_password(header: str) -> str | None:
    """Return the password of an Authorization header, None where there is none."""
    scheme, _, encoded = header.partition(" ")
    if scheme.lower() != "basic":
        return None
    try:
        user_and_password = base64.b64decode(encoded.strip(), validate=True).decode("utf-8")
    except (binascii.Error, ValueError):
        return None
    return user_and_password.partition(":")[2]


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach a server at this address."""
    if address == "localhost":
        return True
    try:
        return ip_address(address).is_loopback
    except ValueError:
        return False


def listening_password() -> str:
    """Return the password for a server that others reach; raises RequestError without a good one.

    It comes from the environment alone: the words of a command line are visible to all users.
    """
    password = os.environ.get(PASSWORD_VARIABLE, "")
    if len(password) < PASSWORD_MIN_LENGTH:
        found = "is too short" if password else "is not set"
        raise RequestError(
            f"--listen lets others reach this machine, and {PASSWORD_VARIABLE} {found}",
            fix=f"set it to a password of at least {PASSWORD_MIN_LENGTH} characters",
        )
    return password


def hosts_of_this_machine(address: str, named: Iterable[str]) -> frozenset[str]:
    """Return the names and addresses under which a browser may ask for this server."""
    name = socket.gethostname().lower()
    addresses = [entry.address for entries in psutil.net_if_addrs().values() for entry in entries]
    numbers = {text.partition("%")[0] for text in addresses if _is_ip(text)}
    given = {found for text in named if (found := hostname(text))}
    return frozenset({*LOOPBACK, address.lower(), name, f"{name}.local", *numbers, *given})


def _is_ip(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True

"""One image from a public address of the web, and from nowhere else.

Input: an address that somebody pasted. Output: the bytes of an image with a name; RequestError for anything else. A
server that fetches addresses for others must not be a way into its own network: only http and https to hosts all of
whose addresses are public are asked, and the connection goes to the very address that was checked, also after each
redirection. No cookie, no key, no proxy of this machine goes along.
"""

from __future__ import annotations

import http.client
import ipaddress
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

from lora_trainer import __version__
from lora_trainer.common.errors import RequestError, first_line

MAX_ADDRESSES = 100
MAX_BYTES = 100_000_000
_REDIRECTIONS = 4
_WITHIN_S = 20.0
_PORTS = {"http": 80, "https": 443}
# The ending of each kind that is taken; what the bytes are is found by whoever opens the file.
_ENDINGS = {
    "image/jpeg": ".jpg",
    "image/png": ".png",
    "image/webp": ".webp",
    "image/gif": ".gif",
    "image/avif": ".avif",
    "image/heic": ".heic",
    "image/bmp": ".bmp",
    "image/tiff": ".tiff",
}
Resolve = Callable[[str, int], list[str]]


@dataclass(frozen=True, kw_only=True)
class WebImage:
    """The bytes of an image and what to call it."""

    name: str
    data: bytes


def resolved(host: str, port: int) -> list[str]:
    """Return the addresses of a host."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in found]


def fetch(
    address: str,
    *,
    resolve: Resolve = resolved,
    connect: Callable[..., socket.socket] | None = None,
) -> WebImage:
    """Return the image at an address; raises RequestError that says why there is none to be had."""
    for _ in range(_REDIRECTIONS + 1):
        parts = _checked(address)
        port = parts.port or _PORTS[parts.scheme]
        number = _public_address(str(parts.hostname), port, resolve)
        try:
            answer = _asked(parts, number, port, connect or socket.create_connection)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise _no(f"cannot be reached ({first_line(error)[:100]})") from None
        if not isinstance(answer, str):
            return answer
        address = urljoin(address, answer)
    raise _no("leads on and on")


def _checked(address: str) -> SplitResult:
    """Return the parts of an address; raises RequestError for one that is not of the web."""
    try:
        parts = urlsplit(address)
        usable = parts.scheme in _PORTS and parts.hostname and not parts.username
        usable = usable and (parts.port or _PORTS[parts.scheme]) > 0
    except ValueError:
        usable = False
    if not usable or not address.isprintable() or " " in address:
        raise _no("is not an address of the web (http, https)")
    return parts


def _public_address(host: str, port: int, resolve: Resolve) -> str:
    """Return an address of a host; raises RequestError where any of them is not public."""
    try:
        found = [ipaddress.ip_address(each.partition("%")[0]) for each in resolve(host, port)]
    except (OSError, ValueError, UnicodeError):
        raise _no("names a host that is not known") from None
    for each in found:
        inner = getattr(each, "ipv4_mapped", None) or getattr(each, "sixtofour", None) or each
        if not (each.is_global and inner.is_global) or each.is_multicast:
            raise _no("leads into this machine's own network, where nothing is fetched")
    if not found:
        raise _no("names a host that is not known")
    return str(found[0])


def _asked(
    parts: SplitResult, number: str, port: int, connect: Callable[..., socket.socket]
) -> WebImage | str:
    """Ask the checked address; return the image, or where it leads on to. Raises OSError, RequestError."""
    connection = http.client.HTTPConnection(str(parts.hostname), port, timeout=_WITHIN_S)
    plain = connect((number, port), timeout=_WITHIN_S)
    connection.sock = plain
    try:
        if parts.scheme == "https":
            context = ssl.create_default_context()
            connection.sock = context.wrap_socket(plain, server_hostname=parts.hostname)
        target = f"{parts.path or '/'}{f'?{parts.query}' if parts.query else ''}"
        headers = {"Accept": "image/*", "User-Agent": f"lora-train/{__version__}"}
        connection.request("GET", target, headers=headers)
        answer = connection.getresponse()
        if answer.status in (301, 302, 303, 307, 308):
            return answer.headers.get("location", "")
        if answer.status != 200:
            raise _no(f"answers with {answer.status}")
        kind = answer.headers.get_content_type()
        if kind not in _ENDINGS:
            raise _no(f"is not an image ({kind[:40]})")
        data = answer.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _no(f"is larger than {MAX_BYTES // 1_000_000} MB")
        stem = PurePosixPath(unquote(parts.path)).stem or "image"
        return WebImage(name=f"{stem}{_ENDINGS[kind]}", data=data)
    finally:
        connection.close()


def _no(why: str) -> RequestError:
    return RequestError(why, fix="paste the address of an image itself")

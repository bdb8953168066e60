"""What is said under 127.0.0.1: the way to the host name under which the pages are.

A browser sends a cookie of 127.0.0.1 to every port of it, also to a server that another user of this machine
runs there. So the key is never a cookie of 127.0.0.1: the pages are under a name that only this program and
its user know, `lora-<24 hex digits>.localhost`, which browsers resolve to this machine by themselves. The door
asks whether this browser does; it remembers the name, bound to the port as all of a page's storage is.
Inputs: where to go, with a ticket in it, or nothing for who has shown no key. Output: an answer, with door.html as its
page. Whom a password lets in gets the same page.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from dataclasses import replace

from lora_trainer.reporting.charts import Html

from .guard import KNOCK_PATH, GuardResponse, Headers
from .language import wanted
from .templates import render
from .translation import Words, words

_NAME_DIGITS = 24
NO_KEY = "Open the link that lora-train-gui printed: it carries the key to this page."
_UNKNOWN_NAME = (
    "This browser does not find NAME, the name under which these pages are kept from other users of the"
    " machine. Open the link in Chrome, Edge or Firefox, or add the line 127.0.0.1 NAME to the hosts file."
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src http://*.localhost:*; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
)
_OWN_ORIGIN = r"^http://lora-[0-9a-f]{24}\.localhost(:\d+)?$"
_SCRIPT = """
const given = GIVEN, kept = "lora-train-origin", said = document.querySelector("p[role=status]");
let origin = given && new URL(given).origin;
try {
  if (origin) localStorage.setItem(kept, origin);
  else origin = localStorage.getItem(kept);
} catch { /* a browser that keeps nothing: the link does */ }
if (origin && new RegExp(OWN_ORIGIN).test(origin)) {
  fetch(origin + KNOCK_PATH, { mode: "no-cors", cache: "no-store" }).then(
    () => location.replace(given || origin + location.pathname + location.search),
    () => { said.textContent = UNKNOWN_NAME.replaceAll("NAME", new URL(origin).hostname); },
  );
}
"""


def own_host(key: str) -> str:
    """Return the host name that belongs to a key; it tells nothing of the key."""
    digest = hmac.new(key.encode(), b"host", hashlib.sha256).hexdigest()
    return f"lora-{digest[:_NAME_DIGITS]}.localhost"


def asks_for_a_page(headers: Headers) -> bool:
    """Whether somebody looks at the answer, and not a program."""
    return "text/html" in headers.get("accept", "")


def door(headers: Headers, *, target: str = "") -> GuardResponse:
    """Return the page that leads to `target`; without one, to the name that this browser remembers."""
    said = words(wanted(headers))
    values = {
        "GIVEN": target,
        "OWN_ORIGIN": _OWN_ORIGIN,
        "KNOCK_PATH": KNOCK_PATH,
        "UNKNOWN_NAME": said(_UNKNOWN_NAME),
    }
    script = re.sub("|".join(values), lambda found: _literal(values[found[0]]), _SCRIPT)
    return _page(200 if target else 403, said, going=bool(target), script=Html(script))


def key_page(headers: Headers) -> GuardResponse:
    """Return the page that asks for the key, under the name that no other page leads to."""
    return _page(403, words(wanted(headers)))


def password_page(headers: Headers, *, variable: str, challenge: str) -> GuardResponse:
    """Return what stands behind the browser's own question for a password, and is seen when that is closed.

    `variable` is where the password was set, `challenge` the value of WWW-Authenticate.
    """
    page = _page(401, words(wanted(headers)), asks_password=True, variable=variable)
    return replace(page, headers={**page.headers, "www-authenticate": challenge})


def _page(
    status: int,
    said: Words,
    *,
    going: bool = False,
    asks_password: bool = False,
    variable: str = "",
    script: Html | str = "",
) -> GuardResponse:
    shown = {"going": going, "asks_password": asks_password, "variable": variable, "script": script}
    return GuardResponse(
        status=status,
        sentence=render("server/door.html", said, **shown),
        headers={
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": _POLICY,
        },
    )


def _literal(text: str) -> str:
    return json.dumps(text).replace("<", "\\u003c")

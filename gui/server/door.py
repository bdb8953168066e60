"""What is said under 127.0.0.1: the way to the host name under which the pages are.

A browser sends a cookie of 127.0.0.1 to every port of it, also to a server that another user of this machine
runs there. So the key is never a cookie of 127.0.0.1: the pages are under a name that only this program and
its user know, `lora-<24 hex digits>.localhost`, which browsers resolve to this machine by themselves. The door
asks whether this browser does; it remembers the name, bound to the port as all of a page's storage is.
Inputs: where to go, with a ticket in it, or nothing for who has shown no key. Output: an answer.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from html import escape

from .guard import KNOCK_PATH, GuardResponse

_NAME_DIGITS = 24
NO_KEY = "Open the link that lora-train-gui printed: it carries the key to this page."
_GOING = "Opening\u2026"
_UNKNOWN_NAME = (
    "This browser does not find NAME, the name under which these pages are kept from other users of the"
    " machine. Open the link in Chrome, Edge or Firefox, or add the line 127.0.0.1 NAME to the hosts file."
)
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; connect-src http://*.localhost:*; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_OWN_ORIGIN = r"^http://lora-[0-9a-f]{24}\.localhost(:\d+)?$"
_SCRIPT = """
const given = GIVEN, kept = "lora-train-origin", said = document.querySelector("p");
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


def door(*, target: str = "") -> GuardResponse:
    """Return the page that leads to `target`; without one, to the name that this browser remembers."""
    values = {
        "GIVEN": target,
        "OWN_ORIGIN": _OWN_ORIGIN,
        "KNOCK_PATH": KNOCK_PATH,
        "UNKNOWN_NAME": _UNKNOWN_NAME,
    }
    script = re.sub("|".join(values), lambda found: _literal(values[found[0]]), _SCRIPT)
    said = escape(_GOING if target else NO_KEY)
    return GuardResponse(
        status=200 if target else 403,
        sentence='<!doctype html><html lang="en"><meta charset="utf-8"><title>lora-train</title>'
        f"<p>{said}</p><script>{script}</script></html>",
        headers={
            "content-type": "text/html; charset=utf-8",
            "content-security-policy": _POLICY,
        },
    )


def _literal(text: str) -> str:
    return json.dumps(text).replace("<", "\\u003c")

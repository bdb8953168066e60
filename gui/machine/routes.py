"""The page Machine and the clearing of its cache.

The page looks at the machine when it is opened; only the cache can be changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.wording import bytes_text
from lora_trainer.hardware.machine import detect

from ..cockpit import keep_power_price, power_price
from ..server.pages import Body, Nothing, Text, answer, page
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace
from . import report


class Price(Body):
    """Keep the price of a kilowatt-hour."""

    typed: Text


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its buttons."""

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        price = power_price(work)
        return {**look(work), "price": "" if price is None else f"{price:g}"}

    def keep_price(asked: Price, _: Words) -> Mapping[str, Any]:
        price = keep_power_price(work, asked.typed)
        return {"done": _("The price is kept.") if price else _("The price is forgotten.")}

    def question(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        cache = report.cache_state()
        return {"isEmpty": cache.files == 0, "question": question_text(cache, _)}

    def clear(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        count, size_bytes = report.clear_cache(work)
        size = bytes_text(size_bytes)
        done = _("Removed {} entries: {} are free again.", f"{count:,}", size)
        return {"done": done, "report": render("machine/report.html", _, **look(work))}

    return [
        page("/doctor", "machine/page.html", title="Machine", look=show),
        answer("/doctor/cache", Nothing, question),
        answer("/doctor/clear", Nothing, clear),
        answer("/doctor/price", Price, keep_price),
    ]


def look(work: Workplace) -> Mapping[str, Any]:
    """Return the whole report as it is now."""
    return report.shown(work, detect(), report.cache_state(), report.hub())


def question_text(cache: report.CacheState, _: Words) -> str:
    """Return what is asked before the cache is cleared."""
    if not cache.files:
        return _("The cache is empty already.")
    return _(
        "Remove {#} entries, {#}? Nothing of yours is in it; the next training encodes its pictures"
        " and captions again, which takes a while.",
        f"{cache.files:,}",
        bytes_text(cache.bytes),
    )

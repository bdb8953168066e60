"""The page Machine and the clearing of its cache.

The page looks at the machine when it is opened, and plans trainings of the example when it is asked which base
models fit; the cache, the price of power and whether anything may be downloaded can be changed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.routing import Route

from lora_trainer.common.wording import bytes_text
from lora_trainer.config.inputs import EMBEDDED
from lora_trainer.hardware.machine import detect
from lora_trainer.reporting import base_names

from .. import command_lines, offline, uploads
from ..cockpit import keep_power_price, power_price
from ..drafts import Draft
from ..server.pages import Body, Nothing, Text, answer, page
from ..server.templates import render
from ..server.translation import Words
from ..train.base_cards import emblem_url, verdict
from ..workplace import Workplace
from . import report

Source = Annotated[str, StringConstraints(max_length=300)]
_BASES_SHOWN = 8
_MINIATURE_PICTURE = "/ui/miniature.png"
_NO_DRAFT = "0" * 12


class Fits(Body):
    """Whether a training fits on a base model: on this machine, or on a GPU of that memory somewhere else."""

    source: Source
    vram_gib: Annotated[float, Field(ge=1, le=1000)] | None = None


class Offline(Body):
    """Forbid downloads, or allow them."""

    offline: bool


class Price(Body):
    """Keep the price of a kilowatt-hour."""

    typed: Text


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its buttons."""
    plans = command_lines.Plans(work)

    def show(_request: Request, _: Words) -> Mapping[str, Any]:
        price = power_price(work)
        return {**look(work), "price": "" if price is None else f"{price:g}"}

    def offered(_asked: Nothing, _: Words) -> Mapping[str, Any]:
        rows = sorted(plans.releases(), key=lambda row: row["offered"])[:_BASES_SHOWN]
        rows.sort(
            key=lambda row: row["download_bytes"]
        )  # so that what they need rises down the page
        pictures = {EMBEDDED: _MINIATURE_PICTURE} | {
            str(row["source"]): emblem_url(row["family"], row["subjects"]) for row in rows
        }
        return {
            "bases": [
                {"source": source, "name": _.message(base_names.title(source)), "picture": picture}
                for source, picture in pictures.items()
            ]
        }

    def fits(asked: Fits, _: Words) -> Mapping[str, Any]:
        draft = Draft(id=_NO_DRAFT, dataset=str(uploads.example(work)), base=asked.source)
        return verdict(plans, draft, _, vram_gib=asked.vram_gib)

    def keep_price(asked: Price, _: Words) -> Mapping[str, Any]:
        price = keep_power_price(work, asked.typed)
        return {"done": _("The price is kept.") if price else _("The price is forgotten.")}

    def switch(asked: Offline, _: Words) -> Mapping[str, Any]:
        offline.switch(work, offline=asked.offline)
        done = (
            "Nothing is downloaded any more." if asked.offline else "Downloads are allowed again."
        )
        return {"done": _(done), "report": render("machine/report.html", _, **look(work))}

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
        answer("/doctor/bases", Nothing, offered),
        answer("/doctor/fits", Fits, fits),
        answer("/doctor/cache", Nothing, question),
        answer("/doctor/clear", Nothing, clear),
        answer("/doctor/price", Price, keep_price),
        answer("/doctor/offline", Offline, switch),
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

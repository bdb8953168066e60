"""What the page LoRAs shows: the cards of the finished adapters, and what one file says of itself.

Inputs: entries and headers of lora_files.py, inspections. Outputs: what its templates show, in which every text is
escaped: a header was written by anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from lora_trainer.common.wording import bytes_text, one_line
from lora_trainer.config.inputs import MINIATURES
from lora_trainer.families.base.tables import family_names
from lora_trainer.families.base.tables import head as head_of
from lora_trainer.lora_file.inspect import Inspection
from lora_trainer.reporting.base_names import title
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.sample_files import step_drawn_at

from .. import lora_files, runs
from ..lora_files import Entry, Header, LoraFile
from ..markup import capital, inline
from ..media import REPORT, run_url
from ..server.templates import render
from ..server.translation import Words
from ..workplace import Workplace
from .preview import preview_of, small_url

PAGE = "/library"
_MAX_SHOWN = 400
_MAX_VALUE_CHARACTERS = 2_000
_BLOCKS_SHOWN = 8
ORDERS = {"": "newest first", "oldest": "oldest first", "name": "by name"}


@dataclass(frozen=True, kw_only=True)
class Fact:
    """A line of what is known of a LoRA; `is_name` says that its value stays as it is in each language."""

    name: str
    value: str
    is_name: bool = True


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link to another file: of the same training, or to download."""

    label: str
    url: str
    kind: str = ""


def page_url(file: LoraFile) -> str:
    """Return the address of the page of one file."""
    return f"{PAGE}?{urlencode({'file': file.ref})}"


def shelf(work: Workplace, text: str, base: str, order: str, _: Words) -> Mapping[str, Any]:
    """Return what shelf.html shows: the LoRAs that fit a search, and the bases and orders to choose from."""
    found = lora_files.entries(work)
    chosen = ordered(lora_files.matching(found, text, base), order)
    names = sorted({entry.header.base for entry in found} - {""})
    return {
        "text": text,
        "base": base,
        "order": order,
        "orders": [(name, _(said)) for name, said in ORDERS.items()],
        "bases": [("", _("all bases")), *((name, _.message(title(name))) for name in names)],
        **cards(chosen, of=len(found), said=_),
    }


def ordered(found: Sequence[Entry], order: str) -> Sequence[Entry]:
    """Return LoRAs, which come the newest first, in one of the ORDERS."""
    match order:
        case "oldest":
            return found[::-1]
        case "name":
            return sorted(found, key=lambda entry: _name(entry).casefold())
    return found


def grid(found: Sequence[Entry], *, of: int, said: Words) -> Html:
    """Return the cards of the LoRAs that are shown, of that many there are, as markup."""
    return render("library/cards.html", said, **cards(found, of=of, said=said))


def cards(found: Sequence[Entry], *, of: int, said: Words) -> Mapping[str, Any]:
    """Return what cards.html shows."""
    return {
        "of": of,
        "count": len(found),
        "more": max(0, len(found) - _MAX_SHOWN),
        "cards": [_card(entry, said) for entry in found[:_MAX_SHOWN]],
    }


def _card(entry: Entry, _: Words) -> Mapping[str, Any]:
    file = entry.file
    more = len(entry.saves)
    others = _("1 other step of it") if more == 1 else _("{#} other steps of it", more)
    return {
        **_told(entry, _),
        "trains": entry.training,
        "others": others,
        "saves": [Link(label=step(save, _), url=page_url(save)) for save in entry.saves],
        "downloads": list(_downloads(file, entry, _)),
    }


def head(file: LoraFile, header: Header, _: Words) -> Mapping[str, Any]:
    """Return what head.html shows: the top of the page of one file."""
    result = lora_files.result_of(file.path.parent) if file.trained else None
    is_result = result is not None and result.file.path == file.path
    entry = result if result is not None and is_result else Entry(file=file, header=header)
    return {
        **_told(entry, _),
        # Of a file from elsewhere nobody knows the images.
        "again": "" if file.is_brought else "/train?" + urlencode({"again": file.run}),
        "downloads": list(_downloads(file, result, _)),
    }


def head_html(file: LoraFile, said: Words) -> Html:
    """Return the top of the page of one file as it is now, as markup."""
    shown = head(file, lora_files.read_header(file), said)
    return render("library/head.html", said, lora=shown)


def _told(entry: Entry, _: Words) -> Mapping[str, Any]:
    """Return what a card and the page of a file say alike."""
    file, header = entry.file, entry.header
    image, name = preview_of(file), _name(entry)
    has_report = (file.path.parent / REPORT).is_file()
    return {
        "name": name,
        "ref": file.ref,
        "stem": file.path.stem,
        "url": page_url(file),
        "image": small_url(image) if image else header.thumbnail,
        "drawn_at": _drawn_at(image, file),
        "title": header.title if header.title not in ("", file.path.stem, name) else "",
        "note": file.note,
        "problem": inline(_.message(header.problem)),
        "good": entry.validation,
        "held_out": entry.held_out,
        "is_sure": entry.is_sure,
        "about": _about(entry, _),
        "base": _.message(title(header.base)) if header.base else "",
        "trigger": header.trigger,
        "rank": header.rank,
        "is_try_out": header.is_try_out,
        "best_picture": _best_picture(file, _),
        "size": _.message(bytes_text(file.size_bytes)),
        "written": _.message(lora_files.minute_of(file)),
        "is_brought": file.is_brought,
        "run": "" if file.is_brought else file.run,
        "run_url": "" if file.is_brought else runs.page_url(file.run),
        "report_url": run_url(file.run, REPORT) if has_report else "",
    }


def _drawn_at(image: Path | None, file: LoraFile) -> str:
    """Return after which step the picture of a file was drawn, empty for its own step and for other pictures."""
    drawn_at = None if image is None else step_drawn_at(image)
    return "" if drawn_at in (None, lora_files.step_of(file)) else f"{drawn_at:,}"


def _about(entry: Entry, _: Words) -> str:
    """Return in a sentence what a file is: on which base it was trained, for how long, or that it was brought."""
    file, base = entry.file, _.message(title(entry.header.base)) if entry.header.base else ""
    steps = file.step or entry.header.steps
    if file.is_brought:
        return (
            _("Added from a file, for {}.", base)
            if base
            else _("Added from a file, which does not say for which base model.")
        )
    if not base:
        return _("Trained for {#} steps.", f"{steps:,}") if steps else ""
    if not file.trained:
        return _("Made from other files, for {}.", base)
    if steps and entry.is_best:
        return _("Trained on {}; step {#} is the best.", base, f"{steps:,}")
    return (
        _("Trained on {} for {#} steps.", base, f"{steps:,}")
        if steps
        else _("Trained on {}.", base)
    )


def _best_picture(file: LoraFile, _: Words) -> str:
    """Return how the picture was drawn that somebody marked as the best, an empty text for none."""
    best = file.picture
    return "" if best is None else _("{} at strength {#}", best.prompt, f"{best.strength:g}")


def _name(entry: Entry) -> str:
    """Return the name of a LoRA: a save that is the one to take has that of its training."""
    file = entry.file
    return file.run if file.trained and file.step and not file.earlier else file.path.stem


def _downloads(file: LoraFile, entry: Entry | None, _: Words) -> Iterator[Link]:
    """Yield the downloads beside a file: the file itself, the best one, the last one.

    `entry` is what its training wrote; None for the file of a tool.
    """
    if entry is None or not file.trained:
        url = run_url(file.run, file.path.name)
        yield Link(label=_("Download"), url=url, kind="primary")
        return
    last = next((save for save in entry.saves if save.last), entry.file)
    for each in dict.fromkeys((file, entry.file, last)):
        is_best = each == entry.file and entry.is_best
        is_last = each != entry.file and each == last
        yield Link(
            label=_download(each, _, is_best=is_best, is_last=is_last),
            url=run_url(each.run, each.path.name),
            kind="primary" if each == file else "",
        )


def _download(file: LoraFile, _: Words, *, is_best: bool, is_last: bool) -> str:
    if file.step is None:
        text = "Download the last step"
        text = "Download the last step (best)" if is_best else text
        return _("Download the last step (last)" if is_last else text)
    text = "Download step {}"
    text = "Download step {} (best)" if is_best else text
    return _("Download step {} (last)" if is_last else text, f"{file.step:,}")


def step(file: LoraFile, _: Words) -> str:
    """Return after how many steps a training wrote a file."""
    return _("the last step") if file.step is None else _("step {#}", f"{file.step:,}")


def inside(inspection: Inspection, said: Words) -> Html:
    """Return what a file holds: problems first, then facts, its strongest blocks, raw entries folded."""
    return render(
        "library/inside.html",
        said,
        problems=problems(inspection.problems, said),
        facts=list(_inspected(inspection)),
        norms=list(_norms(inspection.norms)),
        entries=list(_raw(inspection.metadata)),
    )


def problems(found: Sequence[Any], _: Words) -> Sequence[Mapping[str, str]]:
    """Return problems of a file, or remarks on it, as problems.html shows them, the gravest first."""
    order = ("error", "warning", "note")
    return [
        {
            "severity": problem.severity,
            "what": inline(f"{capital(_.message(problem.what))}."),
            "advice": inline(f"{capital(_.message(problem.advice))}."),
        }
        for problem in sorted(found, key=lambda problem: order.index(problem.severity))
    ]


def _inspected(inspection: Inspection) -> Iterator[Fact]:
    yield Fact(name="made for", value=_made_for(inspection), is_name=False)
    yield Fact(name="key names", value=inspection.format)
    yield Fact(name="kind", value=", ".join(inspection.kinds))
    for name, spread in (("rank", inspection.rank), ("alpha", inspection.alpha)):
        if spread is not None:
            ends = dict.fromkeys(f"{end:g}" for end in spread)
            yield Fact(name=name, value=" \u2013 ".join(ends))
    yield Fact(name="modules", value=f"{inspection.modules:,}")
    for key, (tokens, width) in inspection.embeddings.items():
        yield Fact(name=key, value=f"{tokens} new tokens of {width:,} numbers", is_name=False)


def _made_for(inspection: Inspection) -> str:
    """Return the model that a file is for, as it is written in texts: a miniature, else its family."""
    model = inspection.metadata.get("ss_sd_model_name", "")
    if model in MINIATURES:
        return title(model)
    family = inspection.family
    return str(head_of(family)["name"]) if family in family_names() else family


def _norms(norms: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """Yield the blocks that a file changes most, and the share of the change that is theirs."""
    total = sum(norm**2 for norm in norms.values())
    largest = sorted(norms.items(), key=lambda item: -item[1])[:_BLOCKS_SHOWN]
    for block, norm in largest if total else ():
        yield block, f"{norm**2 / total:.0%}"


def _raw(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in sorted(metadata.items()):
        cut = len(value) - _MAX_VALUE_CHARACTERS
        shown = one_line(value[:_MAX_VALUE_CHARACTERS])
        yield key, f"{shown} … and {cut:,} characters" if cut > 0 else shown

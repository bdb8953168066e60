"""The page LoRAs as markup: the grid of finished adapters, and what one file says of itself.

Inputs: entries and headers of lora_files.py, inspections. Outputs: escaped markup. What a header
holds was written by anybody.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlencode

from lora_trainer.common.wording import bytes_text, one_line
from lora_trainer.lora_file.inspect import Inspection
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.sample_files import last_samples

from . import lora_files, state
from .bases import title
from .lora_files import PREVIEW_SUFFIX, Entry, Header, LoraFile
from .markup import (
    copy_button,
    delete_button,
    inline,
    join,
    link_button,
    share_buttons,
    table,
    tag,
    try_out_notice,
    use_in_comfyui,
)
from .media import REPORT, run_url, thumb_url

PAGE = "/library"
_MAX_SHOWN = 400
_MAX_VALUE_CHARACTERS = 2_000
_THUMB_PX = 384


def page_url(file: LoraFile) -> str:
    """Return the address of the page of one file."""
    return f"{PAGE}?{urlencode({'file': file.ref})}"


def small_url(image: Path, *, size_px: int = _THUMB_PX) -> str:
    """Return the address of a small copy; a picture that was replaced has another one."""
    return f"{thumb_url(image.parent, image.name, size_px=size_px)}&v={_changed_ns(image)}"


def preview_of(file: LoraFile) -> Path | None:
    """Return the picture beside a file or, of the result or a save of a run, its last sample."""
    for name in (f"{file.path.stem}{PREVIEW_SUFFIX}", f"{file.path.stem}.png"):
        image = file.path.with_name(name)
        if image.is_file() and not image.is_symlink():
            return image
    if not file.trained:
        return None
    samples = file.path.parent / "samples"
    drawn = sorted((samples / f"step-{file.step:08d}").glob("*.png")) if file.step else []
    return next(iter(drawn or last_samples(samples)), None)


def grid(found: tuple[Entry, ...], *, of: int) -> Html:
    """Return the cards of the LoRAs that are shown, of that many there are."""
    if not of:
        return tag(
            "p",
            "There is no finished LoRA yet. ",
            tag("a", "Train one", href="/train"),
            " and it appears here with its first save.",
            class_="empty quiet",
        )
    if not found:
        return tag("p", f"None of the {of} LoRAs fits the search.", class_="quiet")
    more = len(found) - _MAX_SHOWN
    said = "1 LoRA" if of == 1 else f"{of} LoRAs"
    said = f"{len(found)} of {of}" if len(found) < of else said
    return join(
        [
            tag("p", said, class_="quiet", role="status"),
            tag("div", *(_card(entry) for entry in found[:_MAX_SHOWN]), class_="loras"),
            tag("p", f"{more} more: narrow the search.") if more > 0 else None,
        ]
    )


def _card(entry: Entry) -> Html:
    file, header = entry.file, entry.header
    url = page_url(file)
    return tag(
        "article",
        tag("a", _picture(file, header), href=url, tabindex="-1"),
        tag("h2", tag("a", _name(entry), href=url, translate="no")),
        tag("p", header.title, class_="quiet", translate="no")
        if header.title not in ("", file.path.stem, _name(entry))
        else None,
        tag("p", file.note, class_="note", translate="no") if file.note else None,
        tag("p", inline(header.problem), class_="error") if header.problem else None,
        tag("p", "It still trains.") if entry.training else None,
        tag("dl", *_facts(entry)),
        _saves(entry),
        tag("p", *_run_links(file), class_="links"),
        tag(
            "p",
            *(
                link_button(label, url, icon_name="download", kind=kind)
                for label, url, kind in _downloads(file, entry)
            ),
            class_="actions",
        ),
        class_="lora",
    )


def _picture(file: LoraFile, header: Header) -> Html:
    image = preview_of(file)
    source = small_url(image) if image else header.thumbnail
    if not source:
        return tag("span", "no preview", class_="placeholder")
    return tag("img", src=source, alt=f"Preview of {file.path.stem}", loading="lazy")


def _facts(entry: Entry, *, whole: bool = False) -> Iterator[Html]:
    """Yield the facts of a card; `whole`: of the page of the file, where the trigger word can be copied."""
    header = entry.header
    steps = entry.file.step or header.steps
    if entry.is_best:
        yield tag("div", tag("dt", "best"), tag("dd", f"step {steps:,}" if steps else ""))
    facts = {
        "base": title(header.base),
        "trigger word": _trigger(header) if whole else header.trigger,
        "rank": header.rank,
        "steps": f"{steps:,}" if steps and not entry.is_best else None,
        "error": entry.validation,
        "size": bytes_text(entry.file.size_bytes),
        "written": day(entry.file),
    }
    for name, value in facts.items():
        if value not in ("", None):
            has_words_of_ours = name == "error" or isinstance(value, Html)
            kept = None if has_words_of_ours else "no"
            shown = value if isinstance(value, Html) else str(value)
            yield tag("div", tag("dt", name), tag("dd", shown, translate=kept))


def _trigger(header: Header) -> Html:
    """Return the trigger word with a button that copies it (share/script.js)."""
    if not header.trigger:
        return tag("span", "none; write words of its captions", class_="quiet")
    return join([tag("code", header.trigger), " ", copy_button()])


def _run_links(file: LoraFile) -> Iterator[Html]:
    yield tag("a", f"Training {file.run}", href=state.page_url(file.run))
    if (file.path.parent / REPORT).is_file():
        yield tag("a", "Report", href=run_url(file.run, REPORT), target="_blank")


def _name(entry: Entry) -> str:
    """Return the name of a LoRA: a save that is the one to take has that of its training."""
    file = entry.file
    return file.run if file.trained and file.step and not file.earlier else file.path.stem


def _downloads(file: LoraFile, entry: Entry | None) -> Iterator[tuple[str, str, str]]:
    """Yield label, address and kind of the downloads beside a file: the best one, the file, the last one.

    `entry` is what its training wrote; None for the file of a tool.
    """
    if entry is None:
        yield "Download", run_url(file.run, file.path.name), "primary"
        return
    last = next((save for save in entry.saves if save.last), entry.file)
    for each in dict.fromkeys((entry.file, file, last)):
        label = f"Download {_step(each)}"
        if each is entry.file:
            label = f"Download {_step(each)} (best)" if entry.is_best else label
        elif each == last:
            label = f"Download {_step(each)} (last)"
        yield label, run_url(each.run, each.path.name), "primary" if each is entry.file else ""


def _saves(entry: Entry) -> Html | None:
    if not entry.saves:
        return None
    links = (tag("li", tag("a", _step(save), href=page_url(save))) for save in entry.saves)
    return tag("details", tag("summary", _earlier(len(entry.saves))), tag("ul", *links))


def _earlier(count: int) -> str:
    return "1 other step of it" if count == 1 else f"{count} other steps of it"


def _step(file: LoraFile) -> str:
    return "the last step" if file.step is None else f"step {file.step:,}"


def day(file: LoraFile) -> str:
    """Return the day a file was written, in this machine's time zone."""
    written = datetime.fromtimestamp(file.changed_ns / 1e9, UTC).astimezone()
    return written.strftime("%Y-%m-%d")


def head(file: LoraFile, header: Header) -> Html:
    """Return the top of the page of one file."""
    result = lora_files.result_of(file.path.parent) if file.trained else None
    entry = Entry(file=file, header=header)
    if result is not None and result.file.path == file.path:
        entry = result
    return tag(
        "div",
        tag("p", tag("a", "\u2190 All LoRAs", href=PAGE)),
        tag(
            "div",
            _picture(file, header),
            tag(
                "div",
                tag("h1", _name(entry), translate="no"),
                tag("p", header.title, translate="no")
                if header.title not in ("", file.path.stem, file.run)
                else None,
                tag("p", file.note, class_="note", translate="no") if file.note else None,
                tag("p", inline(header.problem), class_="error") if header.problem else None,
                tag("dl", *_facts(entry, whole=True)),
                tag("p", *_run_links(file), class_="links"),
                try_out_notice(file.run) if header.is_try_out else None,
                tag(
                    "p",
                    *(
                        link_button(label, url, icon_name="download", kind=f"big {kind}".strip())
                        for label, url, kind in _downloads(file, result)
                    ),
                    *(
                        share_buttons(file.ref, for_others=not header.is_try_out)
                        if not header.problem
                        else ()
                    ),
                    delete_button("lora", file.ref, name=file.path.stem, then=PAGE),
                    class_="actions",
                ),
                None if header.is_try_out or header.problem else use_in_comfyui(header.trigger),
            ),
            class_="lora-head",
        ),
    )


def missing(said: str) -> Html:
    """Return what is shown in place of a file that is not there."""
    return join(
        [
            tag("p", tag("a", "\u2190 All LoRAs", href=PAGE)),
            tag("h1", "No such LoRA"),
            tag("p", said, class_="error notice"),
        ]
    )


def inside(inspection: Inspection) -> Html:
    """Return what a file holds: problems first, then facts, its strongest blocks, raw entries folded."""
    return tag(
        "div",
        _problems(inspection),
        tag(
            "dl",
            *(
                tag("div", tag("dt", name), tag("dd", text))
                for name, text in _inspected(inspection)
            ),
        ),
        _norms(inspection.norms),
        tag(
            "details",
            tag("summary", f"All {len(inspection.metadata)} entries of the header"),
            tag(
                "div",
                table(("entry", "value"), _raw(inspection.metadata), class_="raw"),
                translate="no",
            ),
        ),
        class_="inside",
    )


def _problems(inspection: Inspection) -> Html:
    order = ("error", "warning", "note")
    found = sorted(inspection.problems, key=lambda problem: order.index(problem.severity))
    if not found:
        return tag("p", "Nothing is wrong with this file.")
    items = (
        tag(
            "li",
            tag("b", inline(f"{problem.what}. ")),
            tag("span", inline(problem.advice), class_="quiet"),
            class_=problem.severity,
        )
        for problem in found
    )
    return tag("ul", *items, class_="problems")


def _inspected(inspection: Inspection) -> Iterator[tuple[str, str]]:
    yield "made for", inspection.family
    yield "key names", inspection.format
    yield "kind", ", ".join(inspection.kinds)
    for name, spread in (("rank", inspection.rank), ("alpha", inspection.alpha)):
        if spread is not None:
            yield name, " to ".join(dict.fromkeys(f"{end:g}" for end in spread))
    yield "modules", f"{inspection.modules:,}"
    for key, (tokens, width) in inspection.embeddings.items():
        yield key, f"{tokens} new tokens of {width:,} numbers"


def _norms(norms: Mapping[str, float]) -> Html | None:
    total = sum(norm**2 for norm in norms.values())
    if not total:
        return None
    largest = sorted(norms.items(), key=lambda item: -item[1])[:8]
    rows = ((block, f"{norm:.3g}", f"{norm**2 / total:.0%}") for block, norm in largest)
    return tag(
        "details",
        tag("summary", "Which blocks it changes most"),
        table(("block", "size of the change", "share"), rows),
    )


def _raw(metadata: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    for key, value in sorted(metadata.items()):
        cut = len(value) - _MAX_VALUE_CHARACTERS
        shown = one_line(value[:_MAX_VALUE_CHARACTERS])
        yield key, f"{shown} … and {cut:,} characters" if cut > 0 else shown


def _changed_ns(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # gone since it was listed; the address leads nowhere then
        return 0

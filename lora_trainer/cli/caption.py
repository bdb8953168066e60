"""The command `caption`: a model writes the captions that a dataset lacks.

Prints one line per image on stdout as soon as its caption is written, everything else on stderr; with
`--json` every line is a JSON object on stdout. Nothing here computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from signal import SIGINT
from typing import Any, TextIO

from lora_trainer.captioning.caption_dataset import caption_dataset, look
from lora_trainer.captioning.caption_files import undo as take_back
from lora_trainer.captioning.captioners import CaptionRequest
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.event_kinds import (
    Caption,
    Captioned,
    Captioning,
    Downloading,
    Event,
    Problem,
)
from lora_trainer.common.events import EventStream, shown
from lora_trainer.common.processes import quiet_libraries
from lora_trainer.common.wording import escaped, json_text
from lora_trainer.reporting.control import StopFlag

CAPTIONED = CaptionRequest()


def caption(
    dataset: Path,
    /,
    *,
    options: CaptionRequest = CAPTIONED,
    only_missing: bool = False,
    undo: bool = False,
    dry_run: bool = False,
    json: bool = False,
) -> None:
    """Let a model caption each image of DATASET that has no caption, as NAME.txt beside the image.

    :param only_missing: keep existing captions [this is the default]
    :param undo: undo the captions of the last call, and stop
    :param dry_run: list the images that would get a caption, and stop
    :param json: print one JSON object per line
    """
    if options.overwrite and only_missing:
        raise RequestError(
            "--overwrite and --only-missing contradict each other", fix="give one of them"
        )
    if undo:
        taken = take_back(options.output or dataset)
        _say("undone", taken, _undone_lines(taken), as_json=json)
        return
    if dry_run:
        model, chosen = look(dataset, options)
        facts = ("licence", "download_gb", "memory_gib", "memory_8_bit_gib")
        plan = {
            "model": model.source,
            "writes": model.writes,
            "on_this_machine": model.folder is not None,
            **{name: getattr(model, name) for name in facts},
            "pictures": [target.name for target in chosen.targets],
            "captioned": chosen.captioned,
            "refused": [
                {"image": name, "what": problem, "fix": fix}
                for name, problem, fix in chosen.refused
            ],
        }
        _say("plan", plan, _plan_lines(plan), as_json=json)
        return
    quiet_libraries()  # their progress bars and warnings would mix with the lines on stderr
    events = EventStream()
    events.subscribe(lambda event: _tell(event, as_json=json))
    try:
        caption_dataset(dataset, options, events=events, stop=StopFlag())
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT,
            found="stopped at once; the captions written so far stay",
            fix="run the same command again to continue",
        ) from None


def _tell(event: Event, *, as_json: bool) -> None:
    """Print an event: captions and results on stdout, all else on stderr; or everything as JSON on stdout."""
    row = {**event.fields, "time": round(event.time_s, 3)}
    aside = isinstance(event, Problem | Downloading | Captioning)
    stream = sys.stderr if aside and not as_json else sys.stdout
    _say(event.kind, row, _lines(event), as_json=as_json, stream=stream)


def _say(
    kind: str,
    row: Mapping[str, Any],
    words: Iterable[str],
    *,
    as_json: bool,
    stream: TextIO | None = None,
) -> None:
    """Print a row as JSON, or the same in words; on stdout if no `stream` is given.

    Each line is flushed, so that the reader of a pipe sees it at once.
    """
    stream = sys.stdout if stream is None else stream
    lines = [json_text({"event": kind, **row})] if as_json else [escaped(line) for line in words]
    for line in lines:
        stream.write(line + "\n")
        stream.flush()


def _lines(event: Event) -> Iterator[str]:
    """Yield what people are told of an event of `caption_dataset`."""
    match event:
        case Caption():
            cut = " (cut at --max-tokens)" if event.cut else ""
            yield f"{event.index}/{event.count} {shown(event.image)}: {event.caption}{cut}"
        case Problem():
            about = "" if event.file is None else f"{shown(event.file)} "
            yield f"{event.severity}: {about}{event.what}. {event.fix}"
        case Downloading():
            size = "" if event.gigabytes is None else f", about {event.gigabytes:g} GB"
            yield f"downloading {event.model}{size}"
        case Captioning():
            how = f" in {event.precision}" if event.precision else ""
            had = f", had already: {event.had_one}" if event.had_one else ""
            yield f"captions to write: {event.pictures}{had}; {event.model} on {event.device}{how}"
        case Captioned(written=0, failed=0):
            nothing = f"nothing to do, images with a caption: {event.had_one}"
            yield f"{nothing}; --overwrite replaces captions"
        case Captioned():
            parts = [f"captions written: {event.written}"]
            parts += (
                [f"images without a caption: {event.failed}, see above"] if event.failed else []
            )
            parts += [f"had a caption already: {event.had_one}"] if event.had_one else []
            yield "; ".join([*parts, "--undo removes the new captions"])


def _plan_lines(plan: Mapping[str, Any]) -> Iterator[str]:
    size = "" if plan["download_gb"] is None else f", about {plan['download_gb']:g} GB"
    place = "on this machine" if plan["on_this_machine"] else f"to be downloaded{size}"
    if plan["licence"] is not None:
        needs = f"needs about {plan['memory_gib']:g} GiB"
        if plan["memory_8_bit_gib"] is not None:
            needs += f" ({plan['memory_8_bit_gib']:g} in 8 bits)"
        yield f"model: {plan['model']}, {plan['licence']}, {needs}, {place}"
    else:
        yield f"model: {plan['model']}{'' if plan['on_this_machine'] else f', {place}'}"
    yield from (f"would get a caption: {shown(name)}" for name in plan["pictures"])
    for name, source in plan["captioned"].items():
        yield f"has a caption: {shown(name)} ({shown(source)})"
    for row in plan["refused"]:
        yield f"gets no caption: {shown(row['image'])} {row['what']}. {row['fix']}"


def _undone_lines(undone: Mapping[str, Any]) -> Iterator[str]:
    yield f"captions removed: {len(undone['removed'])}, put back: {len(undone['restored'])}"
    for name in undone["edited"]:
        yield f"not touched, because it was edited since: {shown(name)}"

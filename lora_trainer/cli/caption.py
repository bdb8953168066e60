"""The command `caption`: a model writes the captions that a dataset lacks.

One line on stdout for each picture as soon as its caption is written, or with `--json` one JSON
object; everything else is told on stderr, or as JSON objects too. Nothing here computes.
"""

from __future__ import annotations

import json as json_module
import sys
from dataclasses import asdict
from pathlib import Path
from signal import SIGINT
from typing import Annotated, Any, Literal, TextIO

from cyclopts import Parameter

from lora_trainer.captioning.caption_dataset import CaptionRequest, caption_dataset, look
from lora_trainer.captioning.caption_files import Chosen
from lora_trainer.captioning.caption_journal import UndoResult
from lora_trainer.captioning.caption_journal import undo as take_back
from lora_trainer.captioning.catalogue import DEFAULT, KNOWN, Wanted
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.events import Event, EventStream
from lora_trainer.common.findings import shown
from lora_trainer.common.quiet import quiet_libraries
from lora_trainer.run.stop import StopFlag

_NAMES = ", ".join(model.name for model in KNOWN)


def caption(
    dataset: Path,
    /,
    *,
    model: Annotated[
        str, Parameter(help=f"{_NAMES}; or the folder or Hub id of one of their kinds")
    ] = DEFAULT,
    overwrite: Annotated[
        bool, Parameter(negative="", help="replace captions too; the old ones are kept for --undo")
    ] = False,
    only_missing: Annotated[
        bool,
        Parameter(negative="", help="leave captions alone that are there [this is the default]"),
    ] = False,
    images: Annotated[
        list[str],
        Parameter(negative="", consume_multiple=True, help="only these pictures of the dataset"),
    ] = [],  # noqa: B006 - cyclopts reads the default, nobody mutates it
    output: Annotated[
        Path | None, Parameter(help="folder for the captions [default: beside the pictures]")
    ] = None,
    prefix: Annotated[str, Parameter(help="words before each caption, as typed")] = "",
    suffix: Annotated[str, Parameter(help="the same after it; write a comma of your own")] = "",
    trigger: Annotated[
        str | None, Parameter(help="word put first in captions that have it nowhere")
    ] = None,
    prompt: Annotated[
        str | None, Parameter(help="what to ask a model that can be asked [default: two sentences]")
    ] = None,
    max_tokens: Annotated[
        int | None, Parameter(help="how long a caption may be, in tokens [default: 150]")
    ] = None,
    threshold: Annotated[
        float | None, Parameter(help="for taggers: probability a tag needs [default: 0.35]")
    ] = None,
    character_threshold: Annotated[
        float | None, Parameter(help="the same for names of characters [default: 0.85]")
    ] = None,
    device: Annotated[
        Literal["auto", "cuda", "cpu"], Parameter(help="where the model runs")
    ] = "auto",
    undo: Annotated[
        bool, Parameter(negative="", help="take back what the last call wrote, and stop")
    ] = False,
    dry_run: Annotated[
        bool, Parameter(negative="", help="say which pictures would get a caption, and stop")
    ] = False,
    json: Annotated[bool, Parameter(negative="", help="one JSON object a line")] = False,
) -> None:
    """Write a caption by a model for each picture of DATASET that has none, as NAME.txt beside it."""
    if overwrite and only_missing:
        raise RequestError(
            "--overwrite and --only-missing contradict each other", fix="give one of them"
        )
    teller = ProgressPrinter(as_json=json)
    if undo:
        teller.undone(take_back(output or dataset))
        return
    request = CaptionRequest(
        dataset=dataset,
        model=model,
        overwrite=overwrite,
        images=tuple(images),
        output=output,
        prefix=prefix,
        suffix=suffix,
        trigger=trigger,
        prompt=prompt,
        max_tokens=max_tokens,
        threshold=threshold,
        character_threshold=character_threshold,
        device=device,
    )
    if dry_run:
        teller.planned(*look(request))
        return
    quiet_libraries()
    events = EventStream()
    events.subscribe(teller)
    try:
        caption_dataset(request, events=events, stop=StopFlag())
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT,
            found="stopped at once; captions that were written stay",
            fix="run the same command again to go on",
        ) from None


class ProgressPrinter:
    """Says what happens, a line each: captions on stdout, the rest on stderr; or all as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: Event) -> None:
        """Say one event of `caption_dataset`."""
        if self._as_json:
            self._row({"event": event.kind, **event.fields, "time": round(event.time_s, 3)})
            return
        found = event.fields
        match event.kind:
            case "caption":
                cut = " (cut at --max-tokens)" if found["cut"] else ""
                place = f"{found['index']}/{found['count']} {shown(found['image'])}"
                _line(sys.stdout, f"{place}: {found['caption']}{cut}")
            case "problem":
                about = "" if found["file"] is None else f"{shown(found['file'])} "
                _line(sys.stderr, f"{found['severity']}: {about}{found['what']}. {found['fix']}")
            case "downloading":
                size = "" if found["gigabytes"] is None else f", about {found['gigabytes']:g} GB"
                _line(sys.stderr, f"downloading {found['model']}{size}")
            case "captioning":
                had = f", had already: {found['had_one']}" if found["had_one"] else ""
                count = f"captions to write: {found['pictures']}{had}"
                _line(sys.stderr, f"{count}; {found['model']} on {found['device']}")
            case "captioned":
                _line(sys.stdout, _summary(found["written"], found["failed"], found["had_one"]))

    def planned(self, wanted: Wanted, chosen: Chosen) -> None:
        """Say what a call would do."""
        names = [target.name for target in chosen.targets]
        if self._as_json:
            known = wanted.known
            self._row(
                {
                    "event": "plan",
                    "model": wanted.source,
                    "writes": wanted.writes,
                    "on_this_machine": wanted.folder is not None,
                    "licence": None if known is None else known.licence,
                    "download_gb": None if known is None else known.download_gb,
                    "memory_gib": None if known is None else known.memory_gib,
                    "pictures": names,
                    "captioned": chosen.captioned,
                    "refused": [
                        {"image": refusal.name, "what": refusal.what, "fix": refusal.fix}
                        for refusal in chosen.refused
                    ],
                }
            )
            return
        _line(sys.stdout, f"model: {_described(wanted)}")
        for name in names:
            _line(sys.stdout, f"would get a caption: {shown(name)}")
        for name, source in chosen.captioned.items():
            _line(sys.stdout, f"has one: {shown(name)} ({shown(source)})")
        for refusal in chosen.refused:
            _line(sys.stdout, f"gets none: {shown(refusal.name)} {refusal.what}. {refusal.fix}")

    def undone(self, done: UndoResult) -> None:
        """Say what was taken back."""
        if self._as_json:
            self._row({"event": "undone", **asdict(done)})
            return
        counts = f"captions removed: {len(done.removed)}, put back: {len(done.restored)}"
        _line(sys.stdout, counts)
        for name in done.kept:
            _line(sys.stdout, f"left alone, as it was edited since: {shown(name)}")

    def _row(self, row: dict[str, Any]) -> None:
        _line(sys.stdout, json_module.dumps(row, ensure_ascii=False))


def _line(stream: TextIO, text: str) -> None:
    """Write one line at once: whoever reads a pipe sees it when it happens."""
    stream.write(text + "\n")
    stream.flush()


def _summary(written: int, failed: int, had_one: int) -> str:
    if not written and not failed:
        return f"nothing to do, pictures with a caption: {had_one}; --overwrite writes new ones"
    parts = [f"captions written: {written}"]
    parts += [f"pictures without: {failed}, see above"] if failed else []
    parts += [f"had one already: {had_one}"] if had_one else []
    return "; ".join([*parts, "--undo takes them back"])


def _described(wanted: Wanted) -> str:
    known, here = wanted.known, wanted.folder is not None
    if known is None:
        return f"{wanted.source}{'' if here else ', to be downloaded'}"
    size = "on this machine" if here else f"to be downloaded, about {known.download_gb:g} GB"
    return f"{known.source}, {known.licence}, needs about {known.memory_gib:g} GiB, {size}"

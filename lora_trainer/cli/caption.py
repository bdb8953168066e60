"""The command `caption`: a model writes the captions that a dataset lacks.

Prints one line per image on stdout as soon as its caption is written, everything else on stderr; with
`--json` every line is a JSON object on stdout. Nothing here computes.
"""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from signal import SIGINT
from typing import Any, TextIO

from lora_trainer.captioning.caption_dataset import caption_dataset, look
from lora_trainer.captioning.caption_files import Chosen
from lora_trainer.captioning.caption_files import undo as take_back
from lora_trainer.captioning.captioners import CaptionRequest, RequestedModel
from lora_trainer.common.errors import RequestError, StoppedBySignal
from lora_trainer.common.events import Event, EventStream, shown
from lora_trainer.common.processes import quiet_libraries
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
    teller = ProgressPrinter(as_json=json)
    if undo:
        teller.undone(take_back(options.output or dataset))
        return
    if dry_run:
        teller.planned(*look(dataset, options))
        return
    quiet_libraries()  # their progress bars and warnings would mix with the lines on stderr
    events = EventStream()
    events.subscribe(teller)
    try:
        caption_dataset(dataset, options, events=events, stop=StopFlag())
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT,
            found="stopped at once; the captions written so far stay",
            fix="run the same command again to continue",
        ) from None


class ProgressPrinter:
    """Prints one line per event: captions on stdout, everything else on stderr; or all as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def __call__(self, event: Event) -> None:
        """Print one event of `caption_dataset`."""
        if self._as_json:
            self._row({"event": event.kind, **event.fields, "time": round(event.time_s, 3)})
            return
        fields = event.fields
        match event.kind:
            case "caption":
                cut = " (cut at --max-tokens)" if fields["cut"] else ""
                position = f"{fields['index']}/{fields['count']} {shown(fields['image'])}"
                _line(sys.stdout, f"{position}: {fields['caption']}{cut}")
            case "problem":
                about = "" if fields["file"] is None else f"{shown(fields['file'])} "
                _line(sys.stderr, f"{fields['severity']}: {about}{fields['what']}. {fields['fix']}")
            case "downloading":
                size = "" if fields["gigabytes"] is None else f", about {fields['gigabytes']:g} GB"
                _line(sys.stderr, f"downloading {fields['model']}{size}")
            case "captioning":
                had = f", had already: {fields['had_one']}" if fields["had_one"] else ""
                count = f"captions to write: {fields['pictures']}{had}"
                _line(sys.stderr, f"{count}; {fields['model']} on {fields['device']}")
            case "captioned":
                _line(sys.stdout, _summary(fields["written"], fields["failed"], fields["had_one"]))

    def planned(self, captioner: RequestedModel, chosen: Chosen) -> None:
        """Print the plan of a call: the model, and for each image whether it would get a caption."""
        names = [target.name for target in chosen.targets]
        if self._as_json:
            catalogued = captioner.catalogued
            facts = ("licence", "download_gb", "memory_gib")
            self._row(
                {
                    "event": "plan",
                    "model": captioner.source,
                    "writes": captioner.writes,
                    "on_this_machine": captioner.folder is not None,
                    **{name: getattr(catalogued, name, None) for name in facts},
                    "pictures": names,
                    "captioned": chosen.captioned,
                    "refused": [
                        {"image": name, "what": problem, "fix": fix}
                        for name, problem, fix in chosen.refused
                    ],
                }
            )
            return
        _line(sys.stdout, f"model: {_described(captioner)}")
        for name in names:
            _line(sys.stdout, f"would get a caption: {shown(name)}")
        for name, source in chosen.captioned.items():
            _line(sys.stdout, f"has a caption: {shown(name)} ({shown(source)})")
        for name, problem, fix in chosen.refused:
            _line(sys.stdout, f"gets no caption: {shown(name)} {problem}. {fix}")

    def undone(self, result: Mapping[str, Sequence[str]]) -> None:
        """Print the captions that `--undo` removed, restored and left alone."""
        if self._as_json:
            self._row({"event": "undone", **result})
            return
        counts = f"captions removed: {len(result['removed'])}, put back: {len(result['restored'])}"
        _line(sys.stdout, counts)
        for name in result["edited"]:
            _line(sys.stdout, f"not touched, because it was edited since: {shown(name)}")

    def _row(self, row: dict[str, Any]) -> None:
        _line(sys.stdout, json_module.dumps(row, ensure_ascii=False))


def _line(stream: TextIO, text: str) -> None:
    """Write one line and flush it, so that the reader of a pipe sees it at once."""
    stream.write(text + "\n")
    stream.flush()


def _summary(written: int, failed: int, had_one: int) -> str:
    if not written and not failed:
        return f"nothing to do, images with a caption: {had_one}; --overwrite replaces captions"
    parts = [f"captions written: {written}"]
    parts += [f"images without a caption: {failed}, see above"] if failed else []
    parts += [f"had a caption already: {had_one}"] if had_one else []
    return "; ".join([*parts, "--undo removes the new captions"])


def _described(captioner: RequestedModel) -> str:
    catalogued, here = captioner.catalogued, captioner.folder is not None
    if catalogued is None:
        return f"{captioner.source}{'' if here else ', to be downloaded'}"
    size = "on this machine" if here else f"to be downloaded, about {catalogued.download_gb:g} GB"
    return f"{catalogued.source}, {catalogued.licence}, needs about {catalogued.memory_gib:g} GiB, {size}"

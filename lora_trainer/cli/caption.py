"""The command `caption`: a model writes the captions that a dataset lacks.

Prints one line per image on stdout as soon as its caption is written, everything else on stderr; with
`--json` every line is a JSON object on stdout. Nothing here computes.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from signal import SIGINT
from typing import Any

from lora_trainer.captioning.caption_dataset import caption_dataset, look
from lora_trainer.captioning.caption_files import undo as take_back
from lora_trainer.captioning.captioners import CaptionRequest
from lora_trainer.common.errors import RequestError, StoppedBySignal
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
        _tell("undone", take_back(options.output or dataset), as_json=json)
        return
    if dry_run:
        model, chosen = look(dataset, options)
        facts = ("licence", "download_gb", "memory_gib")
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
        _tell("plan", plan, as_json=json)
        return
    quiet_libraries()  # their progress bars and warnings would mix with the lines on stderr
    events = EventStream()
    events.subscribe(lambda event: _tell(event.kind, event.fields, event.time_s, as_json=json))
    try:
        caption_dataset(dataset, options, events=events, stop=StopFlag())
    except KeyboardInterrupt:
        raise StoppedBySignal(
            SIGINT,
            found="stopped at once; the captions written so far stay",
            fix="run the same command again to continue",
        ) from None


def _tell(
    kind: str, fields: Mapping[str, Any], time_s: float | None = None, *, as_json: bool
) -> None:
    """Print what happened: captions and results on stdout, all else on stderr; or everything as JSON.

    Each line is flushed, so that the reader of a pipe sees it at once.
    """
    stream = sys.stdout
    if as_json:
        time = {} if time_s is None else {"time": round(time_s, 3)}
        lines = [json_text({"event": kind, **fields, **time})]
    else:
        lines = [escaped(line) for line in _lines(kind, fields)]
        if kind in ("problem", "downloading", "captioning"):
            stream = sys.stderr
    for line in lines:
        stream.write(line + "\n")
        stream.flush()


def _lines(kind: str, fields: Mapping[str, Any]) -> Iterator[str]:
    """Yield what people are told of an event of `caption_dataset`, of its plan or of what was undone."""
    match kind:
        case "caption":
            cut = " (cut at --max-tokens)" if fields["cut"] else ""
            position = f"{fields['index']}/{fields['count']} {shown(fields['image'])}"
            yield f"{position}: {fields['caption']}{cut}"
        case "problem":
            about = "" if fields["file"] is None else f"{shown(fields['file'])} "
            yield f"{fields['severity']}: {about}{fields['what']}. {fields['fix']}"
        case "downloading":
            size = "" if fields["gigabytes"] is None else f", about {fields['gigabytes']:g} GB"
            yield f"downloading {fields['model']}{size}"
        case "captioning":
            had = f", had already: {fields['had_one']}" if fields["had_one"] else ""
            count = f"captions to write: {fields['pictures']}{had}"
            yield f"{count}; {fields['model']} on {fields['device']}"
        case "captioned":
            written, failed, had_one = (fields[key] for key in ("written", "failed", "had_one"))
            if not written and not failed:
                nothing = f"nothing to do, images with a caption: {had_one}"
                yield f"{nothing}; --overwrite replaces captions"
                return
            parts = [f"captions written: {written}"]
            parts += [f"images without a caption: {failed}, see above"] if failed else []
            parts += [f"had a caption already: {had_one}"] if had_one else []
            yield "; ".join([*parts, "--undo removes the new captions"])
        case "plan":
            size = "" if fields["download_gb"] is None else f", about {fields['download_gb']:g} GB"
            place = "on this machine" if fields["on_this_machine"] else f"to be downloaded{size}"
            if fields["licence"] is not None:
                needs = f"needs about {fields['memory_gib']:g} GiB"
                yield f"model: {fields['model']}, {fields['licence']}, {needs}, {place}"
            else:
                yield f"model: {fields['model']}{'' if fields['on_this_machine'] else f', {place}'}"
            yield from (f"would get a caption: {shown(name)}" for name in fields["pictures"])
            for name, source in fields["captioned"].items():
                yield f"has a caption: {shown(name)} ({shown(source)})"
            for row in fields["refused"]:
                yield f"gets no caption: {shown(row['image'])} {row['what']}. {row['fix']}"
        case "undone":
            yield f"captions removed: {len(fields['removed'])}, put back: {len(fields['restored'])}"
            for name in fields["edited"]:
                yield f"not touched, because it was edited since: {shown(name)}"

"""The queue as the page shows it: what trains, what waits in its order, what has ended and why.

Inputs: the items of the runs folder's queue, the status of their runs. Output: escaped markup; a
button names the item and what is asked, and `asked` checks both. Nothing is remembered here.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from lora_trainer.common.errors import LoraTrainError, RequestError
from lora_trainer.common.files import disk_error
from lora_trainer.common.wording import bytes_text, duration_text, one_line, without_secrets
from lora_trainer.queue import commands, worker
from lora_trainer.queue.commands import Item
from lora_trainer.reporting.charts import Html
from lora_trainer.reporting.control import Control
from lora_trainer.reporting.status import RunStatus, read_status

from .launch import command_line
from .markup import error_html, inline, note_html, tag
from .state import Stamp, page_url
from .workplace import Workplace

MAX_ENDED = 30
# So long Undo is offered for what was removed, of the last few.
_UNDO_WITHIN_S = 600.0
_UNDO_MAX = 3
_LOG_LINES = 20
# As much of a card's UUID as tells the cards of a machine apart.
_DEVICE_LENGTH = 12
_LOG_END_BYTES = 16_384
_LABELS = {
    "Stop": "Stop {name}",
    "Stopping": "Stopping {name}",
    "Earlier": "Earlier {name}",
    "Later": "Later {name}",
    "Remove": "Remove {name}",
    "Undo": "Put {name} back",
    "Resume": "Resume {name}",
    "Train again": "Train again {name}",
}
# What an error ends with that nobody foresaw; the others say what to do.
_FAULT_EXIT_CODE = 1


def stamp(work: Workplace) -> Stamp:
    """Return a value that changes when the view does; raises MachineError."""
    found = commands.items(work.runs)
    runs = [_status(work, item) for item in found if item.state == "running"]
    seen = [(run.step, run.message) for run in runs if run is not None]
    stopping = [item.id for item in found if _is_stopping(work, item)]
    downloads = [commands.download_of(work.runs, item) for item in found]
    return (found, *seen, *stopping, *downloads, worker_line(work, found), _undone(work))


def view(work: Workplace) -> Html:
    """Return the whole queue; raises MachineError for one that cannot be listed."""
    found = commands.items(work.runs)
    if not found:
        hint = tag("p", "Each training you start comes here, and begins by itself.", class_="quiet")
        empty = tag("div", tag("p", "The queue is empty."), hint, class_="empty")
        return tag("div", _removed(work), empty, class_="queue")
    running = [item for item in found if item.state == "running"]
    waiting = [item for item in found if item.state == "waiting"]
    ended = [item for item in found if item.has_ended]
    left_out = len(ended) - MAX_ENDED
    note = f"{left_out} older ones are not shown." if left_out > 0 else None
    return tag(
        "div",
        _removed(work),
        tag("p", worker_line(work, found), class_="quiet", role="status"),
        _section("Training now", (_running(work, item) for item in running)),
        _section("Waiting, the next one first", _waiting(waiting), ordered=True),
        _section("Ended, the newest first", (_ended(work, item) for item in ended[:MAX_ENDED])),
        tag("p", note, class_="quiet") if note else None,
        tag("p", _button("clear", "Clear what has finished", "")) if _finished(found) else None,
        class_="queue",
    )


def _undone(work: Workplace) -> Sequence[Item]:
    return commands.removed(work.runs, within_s=_UNDO_WITHIN_S)[:_UNDO_MAX]


def _removed(work: Workplace) -> Html | None:
    """Return what was removed a moment ago, each with its Undo."""
    rows = [
        tag(
            "li",
            tag("span", tag("b", _name(item), translate="no"), tag("span", " was removed.")),
            _button("back", "Undo", item.id, of=_name(item)),
        )
        for item in _undone(work)
    ]
    return tag("ul", *rows, class_="removed", role="status") if rows else None


def worker_line(work: Workplace, found: Sequence[Item]) -> str:
    """Say who works through the queue, and what it waits for."""
    running = [item for item in found if item.state == "running"]
    waiting = [item for item in found if item.state == "waiting"]
    if not running and not waiting:
        return "Nothing waits. A training that you start begins at once."
    if fault := worker.worker_fault(work.runs):
        return f"The queue cannot work: {without_secrets(fault)}"
    if worker.worker_pid(work.runs) is None:
        return "The queue is starting."
    others = worker.outside(work.runs, running)
    if waiting and not running and others:
        return f"Waiting for {others[0]}, which was started outside of the queue."
    return "The queue works by itself: closing this page or the program stops nothing."


def asked(work: Workplace, *, action: str, id: str) -> str:
    """Do what a button asks for; return the refusal, or what was done, as markup."""
    try:
        if action in ("up", "down"):
            commands.move(work.runs, id, by=-1 if action == "up" else 1)
        elif action == "again":
            commands.again(work.runs, id)
        elif action == "stop":
            return note_html(_stop(work, id))
        elif action == "remove":
            commands.remove(work.runs, id)
        elif action == "back":
            commands.put_back(work.runs, id)
        elif action == "clear":
            for item in _finished(commands.items(work.runs)):
                commands.remove(work.runs, item.id)
        else:
            raise RequestError(f"{action!r} is nothing to ask", fix="reload the page")
        worker.ensure_worker(work.runs)
    except LoraTrainError as error:
        return error_html(str(error))
    except OSError as error:
        return error_html(str(disk_error(work.runs, error)))
    return ""


def _stop(work: Workplace, id: str) -> str:
    for item in commands.items(work.runs):
        if (item.id, item.state) == (id, "running") and item.run is not None:
            Control(work.runs / item.run).request("stop")
            return "Asked to stop: it saves first."
        if item.id == id and commands.download_of(work.runs, item) is not None:
            commands.end_download(item)
            return "The download ends here; the next training goes on with it."
    raise RequestError(f"{id} has no run to stop", fix="wait until it trains")


def _section(title: str, rows: Iterable[Html], *, ordered: bool = False) -> Html | None:
    shown = list(rows)
    if not shown:
        return None
    return tag(
        "section", tag("h2", title), tag("ol" if ordered else "ul", *shown, class_="entries")
    )


def _row(item: Item, *parts: Html | None, buttons: Iterable[Html | None]) -> Html:
    name = _name(item)
    title = tag("a", name, href=page_url(item.run)) if item.run else name
    return tag(
        "li",
        tag("div", tag("h3", title, translate="no"), *parts, _command(item), class_="text"),
        tag("p", *buttons, class_="actions"),
        class_=f"entry {item.state}",
        data_item=item.id,
    )


def _running(work: Workplace, item: Item) -> Html:
    status = _status(work, item)
    fraction = min(1.0, status.step / status.steps) if status and status.steps else 0.0
    stopping = _is_stopping(work, item)
    said = (status.message if status else "") or "starting"
    download = commands.download_of(work.runs, item)
    if download is not None:
        here, whole = bytes_text(download.here_bytes), bytes_text(download.all_bytes)
        fraction = download.here_bytes / download.all_bytes
        said = f"downloading the base model {download.source}: {here} of {whole}"
    device = tag("span", f", on {item.device[:_DEVICE_LENGTH]}") if item.device else None
    bar = tag(
        "div",
        tag("i", style=f"width:{fraction:.1%}"),
        class_="progress running",
        role="progressbar",
        aria_label=f"progress of {_name(item)}",
        aria_valuenow=round(100 * fraction),
    )
    label = "Stopping" if stopping else "Stop"
    buttons = [_button("stop", label, item.id, of=_name(item), disabled=stopping)]
    return _row(
        item,
        tag("p", said, device, class_="state"),
        bar,
        buttons=buttons if item.run or download else (),
    )


def _waiting(waiting: Sequence[Item]) -> Iterable[Html]:
    for place, item in enumerate(waiting):
        last = place == len(waiting) - 1
        name = _name(item)
        yield _row(
            item,
            buttons=(
                _button("up", "Earlier", item.id, of=name, disabled=place == 0),
                _button("down", "Later", item.id, of=name, disabled=last),
                _button("remove", "Remove", item.id, of=name),
            ),
        )


def _ended(work: Workplace, item: Item) -> Html:
    resumes = commands.resumes(work.runs, item)
    label = "Resume" if resumes else "Train again"
    length_s = (item.ended_s or 0.0) - (item.started_s or item.ended_s or 0.0)
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(item.ended_s or 0.0))
    took = tag("span", f", {duration_text(length_s)} after its start") if length_s > 0 else None
    more = tag("span", ", can be resumed") if resumes else None
    return _row(
        item,
        tag("p", tag("span", item.state), f" {when}", took, more, class_=f"state {item.state}"),
        _reason(work, item, resumes=resumes),
        buttons=(
            _button("again", label, item.id, of=_name(item)) if item.argv else None,
            _button("remove", "Remove", item.id, of=_name(item)),
        ),
    )


def _reason(work: Workplace, item: Item, *, resumes: bool) -> Html | None:
    """Return why an item did not finish: what was found, what to do, and the end of its log."""
    if item.state not in ("failed", "interrupted") or not item.error:
        return None
    found, _, fix = without_secrets(item.error).partition(" Fix: ")
    if item.exit_code == _FAULT_EXIT_CODE:
        found = f"A fault of lora-train or of a library it uses: {found}"
        fix = "Read the last lines of its log, below, and report them."
    if item.state == "interrupted" and resumes:
        fix = "Resume goes on from the last saved state."
    lines = (
        _log_end(commands.item_file(work.runs, item.id, "log")) if item.state == "failed" else []
    )
    log = tag("pre", "\n".join(lines))
    return tag(
        "div",
        tag("p", inline(found[:1].upper() + found[1:])),
        tag("p", tag("b", "What to do: "), inline(fix)) if fix else None,
        _details("log", item, "Last lines of its log", log) if lines else None,
        class_="reason",
    )


def _command(item: Item) -> Html | None:
    if not item.argv:
        return None
    return _details(
        "command", item, "The same for a terminal", tag("code", command_line(item.argv))
    )


def _details(kind: str, item: Item, title: str, content: Html) -> Html:
    """Return what is shown on demand; the script keeps it open while the list is drawn again."""
    return tag("details", tag("summary", title), content, data_key=f"{kind}-{item.id}")


def _button(action: str, label: str, id: str, *, of: str = "", disabled: bool = False) -> Html:
    return tag(
        "button",
        label,
        type="button",
        data_action=action,
        data_id=id,
        aria_label=_LABELS[label].format(name=of) if of else label,
        disabled="" if disabled else None,
    )


def _name(item: Item) -> str:
    return item.label or item.id


def _finished(found: Sequence[Item]) -> list[Item]:
    return [item for item in found if item.state == "finished"]


def _run(work: Workplace, item: Item) -> Path:
    return work.runs / (item.run or "")


def _status(work: Workplace, item: Item) -> RunStatus | None:
    return read_status(_run(work, item)) if item.run else None


def _is_stopping(work: Workplace, item: Item) -> bool:
    asked_for_it = item.state == "running" and item.run is not None
    return asked_for_it and "stop" in Control(_run(work, item)).pending()


def _log_end(log: Path) -> list[str]:
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_END_BYTES))
            text = file.read().decode("utf-8", errors="replace")
    except OSError:
        return []
    lines = [one_line(line) for line in without_secrets(text).splitlines()]
    return [line for line in lines if line][-_LOG_LINES:]

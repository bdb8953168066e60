"""The page of one run, /run?run=NAME, and what its script asks: which of its parts have changed, what buttons do.

Until a training that was started has a run, its page is /run?draft=ID.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from lora_trainer.common.errors import RequestError
from lora_trainer.reporting.charts import LossView, loss_curve

from .. import command_lines, drafts, run_actions, runs
from ..runs import Followed
from ..server.pages import Body, Text, answer, attempted, page, stamped
from ..server.templates import render
from ..server.translation import Words
from ..trash import store
from ..workplace import Workplace
from . import film, starting, view
from .parts import shown_best


class Press(Body):
    """A button of the page; `dataset` is where the images are, `step` the one that is marked as the best."""

    action: Literal["save", "stop", "force", "end", "resume", "best"]
    dataset: Text = ""
    step: int = 0


class Look(Body):
    """How a run is, once a button has done what it is for; `stamp` and `keys` are of what the page shows."""

    run: Text
    stamp: Text
    keys: Annotated[dict[Text, Text], Field(max_length=20)]
    press: Press | None = None


class ChartView(Body):
    """The chart of the loss as somebody chose to see it; `first` and `last` are steps."""

    run: Text
    smoothing: Literal["none", "some", "much"]
    log: bool
    outliers: bool
    first: int
    last: int


class Named(Body):
    """A run."""

    run: Text


class Started(Body):
    """A draft that was started, and may be asked to `stop`; `stamp` is of what the page shows of it."""

    draft: Text
    stamp: Text
    stop: bool = False


class Samples(Body):
    """Draw samples of a prompt now, of the run's own prompts where it is empty."""

    run: Text
    prompt: Text


def routes(work: Workplace) -> list[Route]:
    """Return the routes of the page and of its script."""
    followed = Followed()

    def show(request: Request, _: Words) -> Mapping[str, Any] | Response:
        if draft := request.query_params.get("draft"):
            return begun(work, draft, _)
        run = request.query_params.get("run", "")
        folder = folder_of(work, run)
        if folder is None:
            return {**view.missing(run, _, thrown=store.holding(work, run)), "starting": None}
        dataset = command_lines.recorded_dataset(folder)
        learned = starting.learned(work, dataset)
        return {**view.shown(folder, followed, _), **learned, "starting": None}

    def started(asked: Started, _: Words) -> Mapping[str, Any]:
        def act() -> Mapping[str, Any]:
            starting.stop(work, drafts.read(work, asked.draft))
            return {}

        done = attempted(act, _, folder=work.runs) if asked.stop else {}
        now = stamped(starting.look(work, drafts.read(work, asked.draft), _))
        return {**done, **(now if now["stamp"] != asked.stamp else {"goes": now["goes"]})}

    def look(asked: Look, _: Words) -> Mapping[str, Any]:
        done = pressed(work, asked.run, asked.press, _) if asked.press else {}
        folder = folder_of(work, asked.run)
        if folder is None:  # deleted meanwhile
            thrown = store.holding(work, asked.run)
            gone = render("run/missing.html", _, **view.missing(asked.run, _, thrown=thrown))
            return {**done, "goes": False, "gone": gone}
        return {**done, **view.changed(folder, followed, _, before=asked.stamp, keys=asked.keys)}

    def chart(asked: ChartView, _: Words) -> Mapping[str, Any]:
        folder = runs.run_folder(work.runs, asked.run)
        history = followed.read(folder).history
        chosen = LossView(
            smoothing=asked.smoothing,
            log=asked.log,
            outliers=asked.outliers,
            first=asked.first,
            last=asked.last,
            best=shown_best(folder, history),
        )
        return {"drawn": _.markup(loss_curve(history, chosen))}

    def prompt(asked: Named, _: Words) -> Mapping[str, Any]:
        history = followed.read(runs.run_folder(work.runs, asked.run)).history
        return {"prompt": next((image.prompt for image in history.samples), "")}

    def sample(asked: Samples, _: Words) -> Mapping[str, Any]:
        run_actions.ask_for_samples(work, asked.run, asked.prompt)
        return {}

    return [
        page("/run", "run/page.html", title="Run", look=show),
        answer("/run/look", Look, look),
        answer("/run/starting", Started, started),
        answer("/run/chart", ChartView, chart),
        answer("/run/prompt", Named, prompt),
        answer("/run/sample", Samples, sample),
        film.route(work),
    ]


def begun(work: Workplace, draft_id: str, _: Words) -> Mapping[str, Any] | Response:
    """Return what the page shows of a training that has no run yet, or where its page is."""
    draft = drafts.read(work, draft_id)
    now = starting.look(work, draft, _)
    if now.url:
        return RedirectResponse(now.url, status_code=303)
    return {
        "run": None,
        "starting": now,
        "draft": draft.id,
        "stamp": stamped(now)["stamp"],
        **starting.learned(work, command_lines.dataset_of(draft, work)),
        **starting.chosen(draft, _),
        "seconds": starting.seconds_ago(work, draft),
    }


def folder_of(work: Workplace, run: str) -> Path | None:
    """Return the folder of a run, None where there is none."""
    try:
        return runs.run_folder(work.runs, run)
    except RequestError:
        return None


def pressed(work: Workplace, run: str, button: Press, _: Words) -> Mapping[str, Any]:
    """Do what a button is for; return what was done where the page does not show it, or why not."""

    def act() -> Mapping[str, Any]:
        return {"done": _done(work, run, button, _)}

    return attempted(act, _, folder=work.runs / run)


def _done(work: Workplace, run: str, button: Press, _: Words) -> str:
    match button.action:
        case "save":
            run_actions.ask(work, run, "save")
        case "stop":
            run_actions.ask(work, run, "stop")
        case "force":
            run_actions.ask(work, run, "stop_now")
        case "end":
            run_actions.end(work, run)
        case "resume":
            run_actions.resume(work, run, dataset=button.dataset)
        case "best":
            best = run_actions.use_as_best(work, run, button.step)
            return _("Step {} is kept as {}.", f"{best.step:,}", best.file)
    return ""

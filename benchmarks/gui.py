"""What the page of a run costs: the server's time for a tick, and how long a browser takes to paint it.

    python benchmarks/gui.py [--steps 2000 20000] [--rounds 30] [--samples 200] [--images 200]
                             [--browser] [--json FILE]

A tick is what the page's handler does: find the run, look at its files, read what is new, draw what
has changed, encode it. Measured in turns, in time of the processor: nothing is new; one step is new;
the chart is due too; a tab's first tick, which is everything; and, to compare, only reading the run
from its beginning. `--browser` adds the time on the clock from the address to the curve and the first
of `--samples` pictures in headless Chromium, and to the cards of a dataset of `--images` pictures and
the first of them; from the command to its first page (Home);
how many requests a finished run's page sends in ten seconds; and how long a plan takes from a warm
process, to compare also from a new one. Output: medians, as text and, with --json, as a file.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from PIL import Image

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.gui.run.parts import parts, stamp  # noqa: E402 - after sys.path
from lora_trainer.gui.run_state import look  # noqa: E402 - after sys.path
from lora_trainer.gui.runs import Followed, Stamp, run_folder  # noqa: E402 - after sys.path
from lora_trainer.gui.server.translation import words  # noqa: E402 - after sys.path

from lora_trainer.reporting.history import read_history  # noqa: E402 - after sys.path
from lora_trainer.reporting.status import read_status  # noqa: E402 - after sys.path
from tests.fakes.live_runs import until, write_status  # noqa: E402 - after sys.path
from tests.fakes.run_folder import FakeRun, fake_run  # noqa: E402 - after sys.path

if TYPE_CHECKING:
    from playwright.sync_api import Request

NAME = "live"
CARDS = """() => {
  const pictures = [...document.querySelectorAll(".ds-cards img")];
  const ready = (picture) => picture.complete && picture.naturalWidth > 0;
  return document.querySelectorAll(".ds-cards > li").length >= 24 && pictures.some(ready);
}"""
BROWSER_FLAGS = ("--no-sandbox", "--disable-gpu", "--disable-background-networking")
PAINTED = """() => {
  const pictures = [...document.querySelectorAll(".sheet img")];
  const ready = (picture) => picture.complete && picture.naturalWidth > 0;
  return document.querySelector(".run-chart svg") && pictures.some(ready);
}"""

ENGLISH = words("en")


class Tab:
    """One tab of the page as the server sees it."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.followed = Followed()
        self.stamp: Stamp = ()
        self.keys: Mapping[str, object] = {}

    def tick(self) -> int:
        """Do what a tick does; return the bytes that are sent."""
        folder = run_folder(self.runs, NAME)
        seen = look(folder, read_status(folder), now_s=time.time())
        now = stamp(seen)
        if now == self.stamp:
            return 0
        found = parts(seen, self.followed.read(folder))
        drawn = {
            name: part.draw(ENGLISH)
            for name, part in found.items()
            if name not in self.keys or self.keys[name] != part.key
        }
        self.stamp, self.keys = now, {name: part.key for name, part in found.items()}
        drawn.pop("buttons", None)
        return len(json.dumps(drawn))


def run_of(runs: Path, *, steps: int, samples: int) -> FakeRun:
    """Make the folder of a run that is at its last step but one, with at least `samples` images."""
    run = fake_run(runs / NAME, steps=steps)
    sampled = max(1, round(samples / 3))
    by_step = {round((index + 1) * (steps - 1) / sampled) for index in range(sampled)}
    events: list[dict[str, Any]] = []
    for row in run.events:
        events.append(row)
        if row["event"] == "step" and row["step"] in by_step:
            images = [
                {"prompt": f"prompt {n}", "seed": n, "file": _sample(row["step"], n)}
                for n in range(3)
            ]
            events.append({"event": "sample", "step": row["step"], "images": images, "time": 0})
    run.events = events
    until(run, steps - 1)
    write_status(run.folder, step=steps - 1, steps=steps)
    return run


def _sample(step: int, number: int) -> str:
    return f"samples/step-{step:08d}/{number:02d}.png"


def server_ms(*, steps: int, samples: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each kind of tick, and the bytes it sends."""
    with tempfile.TemporaryDirectory() as name:
        runs = Path(name) / "runs"
        run = run_of(runs, steps=steps, samples=samples)
        times: dict[str, list[float]] = {}
        sent: dict[str, list[int]] = {}

        def measure(kind: str, deed: Callable[[], int]) -> None:
            began_s = time.thread_time()
            size = deed()
            times.setdefault(kind, []).append(1000 * (time.thread_time() - began_s))
            sent.setdefault(kind, []).append(size)

        tab = Tab(runs)
        tab.tick()
        for number in range(rounds):
            measure("first", Tab(runs).tick)
            measure("idle", tab.tick)
            _add_step(run, steps + number)
            measure("step", tab.tick)
            _add_step(run, steps + number)
            tab.keys = {key: value for key, value in tab.keys.items() if key != "chart"}
            measure("step and chart", tab.tick)
            measure("reading anew", lambda: len(read_history(run.folder).steps) * 0)
        medians = {f"{kind}, ms": statistics.median(found) for kind, found in times.items()}
        slowest = {f"{kind}, slowest ms": max(found) for kind, found in times.items()}
        sizes = {f"{kind}, bytes": statistics.median(found) for kind, found in sent.items()}
        return medians | slowest | sizes


def _add_step(run: FakeRun, step: int) -> None:
    row = {"event": "step", "step": step, "loss": 0.05, "lr": 1e-4, "seconds": 0.2}
    with (run.folder / "events.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")
    write_status(run.folder, step=step, steps=step + 1)


def dataset_of(folder: Path, *, images: int) -> Path:
    """Make a folder of pictures of 512 px, each with its caption."""
    folder.mkdir()
    for number in range(images):
        colour = (number * 37 % 256, number * 91 % 256, number * 13 % 256)
        Image.new("RGB", (512, 512), colour).save(folder / f"picture-{number:04}.jpg")
        (folder / f"picture-{number:04}.txt").write_text(f"picture {number}, one colour")
    return folder


def browser_ms(*, steps: int, samples: int, images: int, rounds: int) -> dict[str, float]:
    """Return the median milliseconds from an address to what matters on its page."""
    from playwright.sync_api import sync_playwright

    from tests.fakes.gui_server import start_gui

    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        runs = Path(name) / "runs"
        run_of(runs, steps=steps, samples=samples)
        dataset = dataset_of(Path(name) / "dataset", images=images)
        pages = {
            "run": (f"/run?run={NAME}", PAINTED),
            "dataset": (f"/datasets?folder={quote(str(dataset))}", CARDS),
        }
        server = start_gui(runs)
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=BROWSER_FLAGS
        )
        try:
            page = browser.new_page(viewport={"width": 1280, "height": 800})
            server.open(page, "/")
            found: dict[str, list[float]] = {}
            for _ in range(rounds):
                for kind, (address, painted) in pages.items():
                    began = time.perf_counter()
                    page.goto(server.url(address), wait_until="commit")
                    page.wait_for_function(painted, polling=20)
                    found.setdefault(kind, []).append(1000 * (time.perf_counter() - began))
            medians = {f"{kind}, ms": statistics.median(times) for kind, times in found.items()}
            return medians | {f"{kind}, slowest ms": max(times) for kind, times in found.items()}
        finally:
            browser.close()
            server.stop()


def _note_address(sent: list[str], request: Request) -> None:
    sent.append(request.url)


def start_ms(*, rounds: int) -> dict[str, float]:
    """Return the median milliseconds from the command to Home, and of plans."""
    from lora_trainer.gui import command_lines
    from playwright.sync_api import sync_playwright

    from tests.fakes.gui_server import start_gui

    found: dict[str, list[float]] = {}

    def measure(kind: str, began: float) -> None:
        found.setdefault(kind, []).append(1000 * (time.perf_counter() - began))

    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        runs = Path(name) / "runs"
        fake_run(runs / NAME, steps=60).write()
        program = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=program, args=BROWSER_FLAGS)
        requests = 0.0
        for _ in range(rounds):
            context = browser.new_context()
            page = context.new_page()
            began = time.perf_counter()
            server = start_gui(runs, until_opened=False)
            page.goto(server.link, wait_until="commit")
            page.get_by_role("heading", name="Your trainings").wait_for()
            measure("command to first page", began)
            page = context.new_page()
            page.goto(server.url(f"/run?run={NAME}"))
            page.wait_for_function(PAINTED)
            page.wait_for_timeout(2_000)  # what the page is made of comes
            sent: list[str] = []
            page.on("request", partial(_note_address, sent))
            page.wait_for_timeout(10_000)
            requests = max(requests, len(sent))
            context.close()
            server.stop()
        browser.close()
    words = ("plan", str(ROOT / "datasets" / "example"), "--json")
    command_lines.start_plan_processes()
    for _ in range(rounds):
        began = time.perf_counter()
        command_lines.ask(words)
        measure("plan, running process", began)
        began = time.perf_counter()
        another = tuple([*command_lines.TRAINER])  # not the object that the running process answers
        command_lines.ask(words, program=another)
        measure("plan, new process", began)
    medians = {f"{kind}, ms": statistics.median(times) for kind, times in found.items()}
    return medians | {"requests of a finished run in 10 s": requests}


def main() -> None:
    options = _parsed()
    found: dict[str, Any] = {"samples": options.samples, "server": {}}
    for steps in options.steps:
        figures = server_ms(steps=steps, samples=options.samples, rounds=options.rounds)
        found["server"][str(steps)] = figures
        _show(f"{steps:,} steps, {options.samples} samples", figures)
    if options.browser:
        steps = options.steps[0]
        figures = browser_ms(
            steps=steps, samples=options.samples, images=options.images, rounds=options.rounds
        )
        found["browser"] = figures
        _show(f"first paint: {steps:,} steps, {options.images} images", figures)
        figures = start_ms(rounds=min(options.rounds, 5))
        found["start"] = figures
        _show("start, idle page, plans", figures)
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


def _show(title: str, figures: Mapping[str, float]) -> None:
    print(title)
    for name, value in figures.items():
        print(
            f"  {name:32} {value:12,.2f}" if name.endswith("ms") else f"  {name:32} {value:12,.0f}"
        )


def _parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, nargs="+", default=[2000, 20_000])
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--browser", action="store_true", help="also in headless Chromium")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()

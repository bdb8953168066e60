"""How soon the interface is there, and each of its pages: the first paint in headless Chromium.

    python benchmarks/gui_pages.py [--rounds 5] [--runs 12] [--images 40] [--json FILE]

A start: a new server and a new tab of a browser that is open already. Printed are the milliseconds from the command to
the first answer to a knock at the port ("listens"), from there to the first paint of Home, and from the command to it.
A page: opened by its address in a tab of its own, on a folder with `--runs` runs, finished and failed ones, each
finished one with its LoRA, and a dataset of `--images` pictures. Printed are the milliseconds from the navigation to
its first paint (`first-contentful-paint`), and until its scripts have run and its parts can be pressed (`load`).
The smallest and the median of the rounds: on a busy machine the smallest says more.
"""

from __future__ import annotations

import argparse
import json
import shutil
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.gui import BROWSER_FLAGS, dataset_of  # noqa: E402 - after sys.path
from tests.fakes.gui_server import GuiServer, start_gui  # noqa: E402 - after sys.path
from tests.fakes.live_runs import until, write_status  # noqa: E402 - after sys.path
from tests.fakes.lora_library import finished_run  # noqa: E402 - after sys.path
from tests.fakes.run_folder import fake_run  # noqa: E402 - after sys.path

# The paint is reported a frame after it was made.
PAINT = """() => new Promise((done) => {
  const times = ({ startTime }) => {
    const { loadEventEnd } = performance.getEntriesByType("navigation")[0];
    done({ paint: startTime, load: loadEventEnd, origin: performance.timeOrigin });
  };
  const observer = new PerformanceObserver((seen) => {
    const first = seen.getEntriesByName("first-contentful-paint")[0];
    if (first) { observer.disconnect(); times(first); }
  });
  observer.observe({ type: "paint", buffered: true });
})"""

Times = Mapping[str, float]


def runs_of(folder: Path, *, count: int) -> None:
    """Make runs of 60 steps: every fourth failed, the others with samples and their LoRA."""
    for number in range(count):
        if number % 4 == 3:
            failed = fake_run(folder / f"failed-{number}", steps=60).write()
            write_status(failed, state="failed", step=60, steps=60)
        else:
            finished_run(folder / f"done-{number}")
    until(fake_run(folder / "live", steps=60), 30)


def pages_of(dataset: Path) -> Mapping[str, str]:
    """Return the addresses that are opened, by their names."""
    folder = quote(str(dataset))
    return {
        "Home": "/",
        "Train, new": "/train?draft=new",
        "Train, with images": f"/train?draft=new&folder={folder}",
        "All settings": "/settings",
        "Run": "/run?run=done-0",
        "Run that trains": "/run?run=live",
        "Queue": "/queue",
        "Compare": "/compare?a=done-0&b=done-1",
        "Datasets": "/datasets",
        "Dataset": f"/datasets?folder={folder}",
        "LoRAs": "/library",
        "LoRA": "/library?file=done-0/zorble.safetensors",
        "Trash": "/trash",
        "Machine": "/doctor",
    }


def start_ms(runs: Path, browser: Any) -> Times:
    """Start a server and open its Home; return the milliseconds of it."""
    context = browser.new_context()
    page = context.new_page()
    began_s = time.time()
    server = start_gui(runs, until_opened=False)
    try:
        while not _listens(server):
            time.sleep(0.002)
        listens_s = time.time()
        page.goto(server.link, wait_until="commit")
        page.locator(
            "main:not([inert])"
        ).wait_for()  # the link leads on to the address of the pages
        seen = page.evaluate(PAINT)
        painted_s = (seen["origin"] + seen["paint"]) / 1000
        return {
            "command to listens": 1000 * (listens_s - began_s),
            "listens to first paint": 1000 * (painted_s - listens_s),
            "command to first paint": 1000 * (painted_s - began_s),
        }
    finally:
        server.stop()
        context.close()


def _listens(server: GuiServer) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", server.port), timeout=1):
            return True
    except OSError:
        return False


def page_ms(server: GuiServer, browser: Any, path: str) -> Times:
    """Open a page by its address in a new profile that was on Home before; return the milliseconds of it."""
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    try:
        page = context.new_page()
        server.open(page, "/trash" if path == "/" else "/")
        page.goto(server.url(path), wait_until="load")
        seen = page.evaluate(PAINT)
        return {"first paint": seen["paint"], "load": seen["load"]}
    finally:
        context.close()


def measured(*, runs: int, images: int, rounds: int) -> dict[str, dict[str, list[float]]]:
    """Return the milliseconds of each round, by the start or page and by what of it."""
    from playwright.sync_api import sync_playwright

    found: dict[str, dict[str, list[float]]] = {}

    def add(name: str, times: Times) -> None:
        for what, value in times.items():
            found.setdefault(name, {}).setdefault(what, []).append(value)

    with tempfile.TemporaryDirectory() as name, sync_playwright() as driver:
        folder = Path(name) / "runs"
        runs_of(folder, count=runs)
        pages = pages_of(dataset_of(Path(name) / "dataset", images=images))
        program = shutil.which("chromium")
        browser = driver.chromium.launch(executable_path=program, args=BROWSER_FLAGS)
        for _ in range(rounds):
            add("start", start_ms(folder, browser))
        server = start_gui(folder)
        try:
            for _ in range(rounds):
                for title, path in pages.items():
                    add(title, page_ms(server, browser, path))
        finally:
            server.stop()
            browser.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--images", type=int, default=40)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = measured(runs=options.runs, images=options.images, rounds=options.rounds)
    print(f"{'':20} {'':24} {'smallest ms':>12} {'median ms':>12}")
    for name, kinds in found.items():
        for what, times in kinds.items():
            print(f"{name:20} {what:24} {min(times):12,.0f} {statistics.median(times):12,.0f}")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

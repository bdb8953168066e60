"""Draw docs/gui/: every page of the interface, empty, busy, after an error and finished.

    python scripts/gui_pictures.py [--only WORD ...] [--work FOLDER]

A real server shows real trainings of datasets/example on the embedded base: one has finished, one has stopped
because it learned nothing, one trains while the pictures are taken. Each page is drawn as on a laptop (1366 x 768)
and on a phone (390 x 844), light and dark. Takes about six minutes on two cores; needs chromium and the extra
`dev`. Trainings that FOLDER has from before are shown again.
"""

from __future__ import annotations

import argparse
import io
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from lora_trainer.gui.trash import store as trash  # noqa: E402 - after sys.path
from lora_trainer.gui.workplace import Workplace  # noqa: E402 - after sys.path

from lora_trainer.common.events import read_events  # noqa: E402 - after sys.path
from lora_trainer.queue import commands, worker  # noqa: E402 - after sys.path
from lora_trainer.reporting import run_record  # noqa: E402 - after sys.path
from lora_trainer.reporting.control import Control  # noqa: E402 - after sys.path
from tests.fakes.gui_server import GuiServer, start_gui  # noqa: E402 - after sys.path

TARGET = ROOT / "docs" / "gui"
EXAMPLE = ROOT / "datasets" / "example"
SCREENS = {"laptop": {"width": 1366, "height": 768}, "phone": {"width": 390, "height": 844}}
SCHEMES = ("light", "dark")
WEBP_QUALITY = 82
WITHIN_MS = 120_000
# Icons lie in a file of their own: a <use> of one has a size only when the file is there.
SHOWN = """() => [...document.querySelectorAll("use")].every((use) =>
    !use.parentElement.checkVisibility() || use.getBBox().width > 0) &&
  [...document.images].every((image) => {
  const box = image.getBoundingClientRect();
  const place = (image.closest(".sheet-scroll") ?? document.body).getBoundingClientRect();
  const isOut = box.top > innerHeight || box.bottom < 0 || box.left > place.right || box.right < place.left;
  return image.complete || !image.offsetParent || isOut;
})"""


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A page in a state: its address, and a selector that matches once the page is complete.

    `{images}` in the address is the folder of the example, `{mixed}` one beside it with findings; `click` is
    pressed, `after` waited for and `scroll_to` brought to the top of the window first.
    """

    name: str
    path: str
    ready: str
    scroll_to: str = ""
    click: str = ""
    after: str = ""


EMPTY = (
    Picture(name="home-empty", path="/", ready=".drop"),
    Picture(name="train-empty", path="/train?draft=new", ready=".drop button"),
    Picture(name="datasets-empty", path="/datasets", ready=".ds-open"),
    Picture(name="queue-empty", path="/queue", ready="#queue .nothing-here"),
    Picture(name="trash-empty", path="/trash", ready="text=The trash is empty"),
    Picture(name="library-empty", path="/library", ready=".nothing-here"),
    Picture(name="doctor", path="/doctor", ready=".fits:has(li):not(:has(.awaited))"),
)
STARTING = (Picture(name="run-starting", path="/run?run=zibbo-again", ready=".run-head .said"),)
BUSY = (
    Picture(name="home-busy", path="/", ready="h2:has-text('Training now')"),
    Picture(
        name="train-images",
        path="/train?draft=new&folder={images}",
        ready="body:has(#next:visible:enabled) .ds-card img",
    ),
    Picture(
        name="train-findings",
        path="/train?draft=new&folder={mixed}",
        ready="body:has(#next:visible:enabled) .ds-card img",
    ),
    Picture(
        name="train-plan",
        path="/train?draft=new&example=1",
        ready="body:has(#train:enabled) .base-card .fits:is(.good, .slow, .bad)",
    ),
    Picture(
        name="train-bases",
        path="/train?draft=new&example=1",
        ready=".base-card",
        click=".all-bases",
        scroll_to="h2:has-text('base model')",
    ),
    Picture(
        name="train-length",
        path="/train?draft=new&example=1",
        ready=".plan-line .fit",
        scroll_to=".length",
    ),
    Picture(
        name="settings",
        path="/train?draft=new&example=1",
        ready=".plan-line .fit",
        click="main a[href^='/settings?draft']:visible",
        after=".come-to .fit",
    ),
    Picture(name="datasets", path="/datasets?folder={images}", ready="img[src*='/media/thumb']"),
    Picture(
        name="datasets-write",
        path="/datasets?folder={mixed}",
        ready="img[src*='/media/thumb']",
        click="button:has-text('Write captions …')",
    ),
    Picture(name="trash", path="/trash", ready="text=Put back"),
    Picture(name="queue-busy", path="/queue", ready="#queue ol"),
    Picture(name="run-busy", path="/run?run=zibbo-again", ready=".run-chart svg:visible"),
    Picture(
        name="run-samples",
        path="/run?run=zibbo",
        ready="table.sheet img",
        scroll_to="h2:has-text('Samples')",
    ),
    Picture(
        name="run-steps",
        path="/run?run=zibbo",
        ready="table.sheet img",
        scroll_to="#samples",
    ),
    Picture(
        name="run-loss", path="/run?run=zibbo", ready=".run-chart svg:visible", scroll_to="#loss"
    ),
    Picture(name="run-finished", path="/run?run=zibbo", ready=".run-chart svg:visible"),
    Picture(name="run-error", path="/run?run=no-effect", ready=".run-head .failed"),
    Picture(name="compare", path="/compare?a=zibbo&b=zibbo-again", ready="img"),
    Picture(name="library", path="/library", ready=".lora"),
    Picture(
        name="library-file",
        path="/library?file=zibbo/zibbo-step00000240.safetensors",
        ready=".lora-head",
    ),
)
FOR_OTHERS = (
    Picture(name="run-comfyui", path="/run?run=zibbo-large", ready=".run-chart svg:visible"),
)


def main() -> None:
    """Take all pictures, or those whose name holds a word of `--only`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="parts of the names of the pictures to take"
    )
    parser.add_argument("--work", type=Path, help="a folder that keeps the trainings")
    asked = parser.parse_args()

    def wanted(pictures: Sequence[Picture]) -> list[Picture]:
        return [one for one in pictures if any(word in one.name for word in asked.only)]

    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-gpu"]
        )
        work = asked.work or Path(temporary)
        runs, images = work / "runs", work / "zibbo"
        shutil.copytree(EXAMPLE, images, dirs_exist_ok=True)  # the pictures show its path
        with_findings(images.with_name("mixed"))
        with served(Path(temporary) / "no-runs") as server:
            take(browser, server, wanted(EMPTY), images)
        train(runs, images, "zibbo", "--set=data.trigger=zibbo")
        train(runs, images, "no-effect", "--set=optimizer.learning_rate=1e-12")
        throw_away(runs)
        with served(runs) as server:
            queued(runs, images, "zibbo-again", "--steps=2000", "--set=sampling.every_steps=20")
            waiting = queued(runs, images, "zibbo-larger", "--set=adapter.rank=32")
            try:
                reached(runs / "zibbo-again", "run_started")
                take(
                    browser,
                    server,
                    wanted(STARTING),
                    images,
                )
                for_other_programs(runs)
                take(
                    browser,
                    server,
                    wanted(FOR_OTHERS),
                    images,
                )
                shutil.rmtree(runs / "zibbo-large")
                reached(runs / "zibbo-again", "sample", step=60)
                take(browser, server, wanted(BUSY), images)
            finally:
                commands.remove(runs, waiting)
                Control(runs / "zibbo-again").request("stop_now")


def with_findings(folder: Path) -> None:
    """Copy the example without some captions, and with an image that is there twice."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(EXAMPLE, folder)
    captions = sorted(folder.glob("*.txt"))
    for caption in captions[:3]:
        caption.unlink()
    image = min(folder.glob("*.png"))
    shutil.copyfile(image, image.with_name("again.png"))


def for_other_programs(runs: Path) -> None:
    """Copy the finished run as one of a base that ComfyUI has; only its record names that base."""
    folder = shutil.copytree(runs / "zibbo", runs / "zibbo-large", dirs_exist_ok=True)
    record = run_record.read(folder)
    base = replace(record.base, source="stabilityai/stable-diffusion-xl-base-1.0")
    settings = {**record.settings, "data.trigger": "zibbo"}
    run_record.write(folder, replace(record, base=base, settings=settings))


def throw_away(runs: Path) -> None:
    """Put a run into the trash, which is never empty then."""
    shutil.copytree(runs / "no-effect", runs / "zibbo-first", dirs_exist_ok=True)
    trash.throw_away(Workplace(runs=runs), kind="run", ref="zibbo-first")


@contextmanager
def served(runs: Path) -> Iterator[GuiServer]:
    """Serve a runs folder until the block ends."""
    server = start_gui(runs)
    try:
        yield server
    finally:
        server.stop()
        server.log.unlink(missing_ok=True)


def train(runs: Path, images: Path, name: str, *options: str) -> None:
    """Train the example as a user does, unless it was; it may end early."""
    if (runs / name / "status.json").is_file():
        return
    command = [sys.executable, "-m", "lora_trainer", str(images), f"--name={name}"]
    subprocess.run(
        [*command, f"--output={runs}", *options], stdout=subprocess.DEVNULL, cwd=ROOT, check=False
    )


def queued(runs: Path, images: Path, name: str, *options: str) -> str:
    """Put a training of the example into the queue; return the id of its item."""
    words = [str(images), f"--name={name}", f"--output={runs}", *options]
    item = commands.add(runs, words, label=name)
    worker.ensure_worker(runs)
    return item.id


def reached(run: Path, kind: str, *, step: int = 0) -> None:
    """Wait for an event of a run; raises TimeoutError after five minutes."""
    deadline_s = time.monotonic() + 300
    while time.monotonic() < deadline_s:
        events = read_events(run / "events.jsonl")
        if any(event.kind == kind and getattr(event, "step", 0) >= step for event in events):
            return
        time.sleep(0.5)
    raise TimeoutError(f"{run.name} has no event {kind} at step {step} after five minutes")


def take(browser: Any, server: GuiServer, pictures: Sequence[Picture], images: Path) -> None:
    """Save each picture in both sizes and schemes as WebP."""
    for screen, size in SCREENS.items():
        for scheme in SCHEMES:
            context = browser.new_context(
                viewport=size, color_scheme=scheme, reduced_motion="reduce"
            )
            context.set_default_timeout(WITHIN_MS)
            page = context.new_page()
            server.open(page, "/")
            for picture in pictures:
                mixed = images.with_name("mixed")
                page.goto(server.url(picture.path.format(images=images, mixed=mixed)))
                page.locator(picture.ready).first.wait_for()
                page.wait_for_function("() => !document.querySelector('p.loading')")
                page.wait_for_function(SHOWN)
                if picture.click:
                    page.locator(picture.click).click()
                    page.mouse.move(0, 0)
                if picture.after:
                    page.locator(picture.after).first.wait_for()
                    page.wait_for_function(SHOWN)
                if picture.scroll_to:
                    place = page.locator(picture.scroll_to).first
                    place.evaluate(
                        "(element) => scrollTo(0, element.getBoundingClientRect().top + scrollY - 72)"
                    )
                    page.wait_for_function(SHOWN)
                image = drawn(page.screenshot(), name=picture.name)
                file = TARGET / f"{picture.name}-{screen}-{scheme}.webp"
                image.save(file, quality=WEBP_QUALITY, method=6)
                print(file.relative_to(ROOT), f"{file.stat().st_size:,} bytes")
            context.close()


def drawn(content: bytes, *, name: str) -> Image.Image:
    """Return a picture of the browser; raises RuntimeError for one flat colour, which shows no page."""
    image = Image.open(io.BytesIO(content)).convert("RGB")
    if all(low == high for low, high in image.getextrema()):
        raise RuntimeError(f"the picture of {name} is one flat colour: take it again")
    return image


if __name__ == "__main__":
    main()

"""A run folder as a real run leaves it: steps, validations, drawn samples, problems, hostile texts.

`FakeRun` holds the events in order, so that a test can cut, repeat or change them before `write`.
Everything is a function of the arguments; nothing random, no clock.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from lora_trainer.common.event_kinds import event_of_row
from lora_trainer.common.events import EventStream
from lora_trainer.config.config import flatten
from lora_trainer.config.running import Config

HOSTILE_CAPTION = (
    '<script>alert("caption")</script> zorble & "friends" <img src=x onerror=alert(1)>'
)
PROMPTS = (
    "zorble, a small blue creature on a green field",
    "zorble at night, stars",
    HOSTILE_CAPTION,
)
RECORD = Path(__file__).with_name("run_folder.json")
FIELDS: dict[str, Any] = json.loads(
    Path(__file__).with_name("run_events.json").read_text(encoding="utf-8")
)
"""Fields of events that are the same in every run."""
EXPORT = "zorble.safetensors"
START_S = 1_795_000_000.0
TIMESTEPS = (62, 187, 312, 437, 562, 687, 812, 937)


@dataclass
class FakeRun:
    """Events of one run; `write` makes the folder."""

    folder: Path
    steps: int = 300
    sample_px: int = 64
    events: list[dict[str, Any]] = field(default_factory=list)
    now_s: float = START_S

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields, "time": round(self.now_s, 3)})

    def write(self) -> Path:
        """Write run.json, the events, the problems, samples and the export; return the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        # run_folder.json has the settings that are not at their default.
        record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
        record["command"][3] = str(self.steps)
        own = {"train.steps": self.steps, "sampling.prompts": list(PROMPTS)}
        record["settings"] = flatten(Config()) | record["settings"] | own
        defaults = {key: {"layer": "default", "reason": ""} for key in record["settings"]}
        record["origins"] = defaults | record["origins"]
        (self.folder / "run.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
        (self.folder / EXPORT).write_bytes(b"\0" * 3_288_000)
        rows: dict[str, list[dict[str, Any]]] = {"events": [], "problems": []}
        for row in self.events:
            if row["event"] != "phase":
                rows["problems" if row["event"] == "problem" else "events"].append(row)
            if row["event"] == "sample":
                for index, sample in enumerate(row["images"]):
                    self._draw(self.folder / sample["file"], index, row["step"])
        for name, each in rows.items():
            text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in each)
            (self.folder / f"{name}.jsonl").write_text(text, encoding="utf-8")
        return self.folder

    def _draw(self, path: Path, index: int, step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        px, colours = self.sample_px, ((120, 170, 90), (24, 26, 60), (220, 205, 180))
        image = Image.new("RGB", (px, px), colours[index % 3])
        red = round(255 * step / self.steps)
        image.paste((red, 90, 40), (px // 4, px // 4, px // 2, px // 2))
        image.save(path)


def fake_run(
    folder: Path, *, steps: int = 300, sample_px: int = 64, validation: bool = True
) -> FakeRun:
    """Return a finished run of `steps` steps with regular saves, samples and validations."""
    run = FakeRun(folder=folder, steps=steps, sample_px=sample_px)
    every_sample, every_validation = max(1, steps // 3), max(1, steps // 10)

    def phase(name: str, seconds: float, message: str = "", done: int = 0, total: int = 0) -> None:
        run.emit("phase", phase=name, message=message, done=done, total=total)
        run.now_s += seconds

    def loss_at(step: int) -> float:
        return 0.055 + 0.0787 * math.exp(-5 * (step / steps))

    def validate(step: int) -> None:
        run.now_s += 0.8
        share = loss_at(step) / 0.1337
        by_timestep = [[timestep, round(40 * share / timestep, 5)] for timestep in TIMESTEPS]
        loss = loss_at(step) if step else 0.1337
        run.emit("validation", step=step, loss=loss, by_timestep=by_timestep, images=2, seconds=0.8)

    def sample(step: int) -> None:
        phase("sample", 1.2)
        folder = f"samples/step-{step:08d}"
        images = [
            {"prompt": prompt, "seed": 1234 + index, "file": f"{folder}/{index:02d}.png"}
            for index, prompt in enumerate(PROMPTS)
        ]
        run.emit("sample", step=step, images=images, seconds=1.2)

    every_steps = {"sample": every_sample, "validation": every_validation if validation else 0}
    more = {"validation_images": 2 if validation else 0, "every_steps": every_steps}
    run.emit("run_started", **FIELDS["run_started"], steps=steps, **more)
    phase("scan", 0.6, "16 images")
    run.emit("problem", **FIELDS["bad image"])
    phase("plan", 0.2, "fits in 3.1 GiB")
    for done in (0, 8, 16):
        phase("cache", 1.9, "latents", done=done, total=16)
    phase("load", 1.4, "embedded")
    sample(0)
    if validation:
        validate(0)
    phase("train", 0.1)
    for step in range(1, steps + 1):
        run.now_s += 0.19
        loss = loss_at(step) * (1.3 if step % 3 else 0.5)
        figures = {"loss": loss, "lr": 2e-3 * (step / steps), "epoch": step * 8 / 14}
        run.emit("step", step=step, **figures, **FIELDS["step"])
        if step in (40, 41, 90):
            run.emit("problem", **FIELDS["clipped"])
        if validation and step % every_validation == 0:
            validate(step)
        if step % every_sample == 0:
            sample(step)
            export = f"zorble-step{step:08d}.safetensors" if step < steps else EXPORT
            run.now_s += 0.15
            saved = {"export": export, "state": f"step-{step:08d}", "bytes": 3_288_000}
            run.emit("saved", step=step, seconds=0.14, **saved)
        if step == steps // 2:
            run.emit("change", **FIELDS["change"])
    phase("export", 0.3, EXPORT)
    losses = (loss_at(steps), 0.1337) if validation else (None, None)
    end = dict(zip(("validation_loss", "base_validation_loss"), losses, strict=True))
    run.emit("finished", step=steps, seconds=run.now_s - START_S, export=EXPORT, **end)
    return run


def relay(run: FakeRun, stream: EventStream) -> None:
    """Hand all events of a fake run to a stream's listeners."""
    for row in run.events:
        event = event_of_row(row)
        assert event is not None
        for listener in stream.listeners:
            listener(event)

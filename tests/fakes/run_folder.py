"""A run folder as a real run leaves it: steps, validations, drawn samples, problems, hostile texts.

`FakeRun` holds the events in order, so that a test can cut, repeat or change them before `write`.
Everything is a function of the arguments; nothing random, no clock.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from PIL import Image

from lora_trainer.common.events import Event, EventStream
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
START_S = 1_795_000_000.0
TIMESTEPS = (62, 187, 312, 437, 562, 687, 812, 937)


@dataclass
class FakeRun:
    """Events of one run; `write` makes the folder."""

    folder: Path
    steps: int = 300
    sample_px: int = 64
    validation: bool = True
    events: list[dict[str, Any]] = field(default_factory=list)
    now_s: float = START_S

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append({"event": kind, **fields, "time": round(self.now_s, 3)})

    def write(self) -> Path:
        """Write run.json, the events, the problems, samples and the export; return the folder."""
        self.folder.mkdir(parents=True, exist_ok=True)
        run = _run_json(self)
        (self.folder / "run.json").write_text(json.dumps(run, indent=2), encoding="utf-8")
        kept = [event for event in self.events if event["event"] not in ("phase", "problem")]
        _write_lines(self.folder / "events.jsonl", kept)
        problems = [event for event in self.events if event["event"] == "problem"]
        _write_lines(self.folder / "problems.jsonl", problems)
        (self.folder / "zorble.safetensors").write_bytes(b"\0" * 3_288_000)
        for event in self.events:
            for index, image in enumerate(
                event.get("images", ()) if event["event"] == "sample" else ()
            ):
                _draw_sample(
                    self.folder / image["file"],
                    row=index,
                    progress=event["step"] / self.steps,
                    px=self.sample_px,
                )
        return self.folder

    def as_events(self) -> Iterator[Event]:
        """Yield the events as listeners get them."""
        for row in self.events:
            fields = {key: value for key, value in row.items() if key not in ("event", "time")}
            yield Event(kind=row["event"], fields=fields, time_s=row["time"])


def fake_run(
    folder: Path, *, steps: int = 300, sample_px: int = 64, validation: bool = True
) -> FakeRun:
    """Return a finished run of `steps` steps with regular saves, samples and validations."""
    run = FakeRun(folder=folder, steps=steps, sample_px=sample_px, validation=validation)
    _begin(run)
    _base(run)
    for step in range(1, steps + 1):
        _train(run, step)
        if validation and step % max(1, steps // 10) == 0:
            run.now_s += 0.8
            run.emit(
                "validation",
                step=step,
                loss=_validation_loss(step / steps),
                by_timestep=_by_timestep(step / steps),
                images=2,
                seconds=0.8,
            )
        if step % max(1, steps // 3) == 0:
            _sample(run, step)
            _save(run, step)
        if step == steps // 2:
            run.emit(
                "change",
                key="memory.micro_batch",
                old=8,
                new=4,
                reason="out of memory in backward; same batch, smaller parts",
            )
    _end(run)
    return run


def relay(run: FakeRun, stream: EventStream) -> None:
    """Hand all events of a fake run to a stream's listeners."""
    for event in run.as_events():
        for listener in stream.listeners:
            listener(event)


def _begin(run: FakeRun) -> None:
    run.emit(
        "run_started",
        name="zorble",
        family="sd15",
        base="embedded",
        steps=run.steps,
        batch_size=8,
        device="cpu",
        tier="cpu",
        priority="balanced",
        preset="sd15/cpu",
        images=16,
        validation_images=2 if run.validation else 0,
        resumed_from=None,
        every_steps={
            "sample": max(1, run.steps // 3),
            "validation": max(1, run.steps // 10) if run.validation else 0,
        },
    )
    _phase(run, "scan", 0.6, "16 images")
    run.emit(
        "problem",
        what="image is cut off after 81,220 bytes and was left out",
        fix="export it again",
        severity="warning",
        file="broken/owl <b>17</b>.jpg",
        code="IMG-01",
    )
    _phase(run, "plan", 0.2, "fits in 3.1 GiB")
    for done in (0, 8, 16):
        _phase(run, "cache", 1.9, "latents", done=done, total=16)
    _phase(run, "load", 1.4, "embedded")


def _phase(
    run: FakeRun, phase: str, seconds: float, message: str, *, done: int = 0, total: int = 0
) -> None:
    run.emit("phase", phase=phase, message=message, done=done, total=total)
    run.now_s += seconds


def _base(run: FakeRun) -> None:
    _sample(run, 0)
    if run.validation:
        run.now_s += 0.8
        run.emit(
            "validation", step=0, loss=0.1337, by_timestep=_by_timestep(0.0), images=2, seconds=0.8
        )
    _phase(run, "train", 0.1, "")


def _train(run: FakeRun, step: int) -> None:
    progress = step / run.steps
    seconds = 0.19 + 0.02 * _wobble(step * 3)
    run.now_s += seconds
    run.emit(
        "step",
        step=step,
        images=8,
        loss=max(0.012, _validation_loss(progress) * 0.96 + 0.045 * _wobble(step) ** 3),
        lr=2e-3 * progress,
        grad_norm=0.4 + 0.1 * _wobble(step),
        seconds=seconds,
        data_wait_s=0.0011,
        vram_bytes=0,
        vram_reserved_bytes=0,
        vram_used_bytes=0,
        host_bytes=1 << 30,
        epoch=step * 8 / 14,
    )
    if step in (40, 41, 90):
        run.emit(
            "problem",
            what="gradient norm 41.2 was clipped to 1",
            fix="lower optimizer.learning_rate if it goes on",
            severity="note",
            file=None,
            code="TRN-01",
        )


def _sample(run: FakeRun, step: int) -> None:
    _phase(run, "sample", 1.2, "")
    images = [
        {"prompt": prompt, "seed": 1234 + index, "file": f"samples/step-{step:08d}/{index:02d}.png"}
        for index, prompt in enumerate(PROMPTS)
    ]
    run.emit("sample", step=step, images=images, seconds=1.2)


def _save(run: FakeRun, step: int) -> None:
    last = step == run.steps
    export = "zorble.safetensors" if last else f"zorble-step{step:08d}.safetensors"
    run.now_s += 0.15
    run.emit(
        "saved", step=step, export=export, state=f"step-{step:08d}", bytes=3_288_000, seconds=0.14
    )


def _end(run: FakeRun) -> None:
    _phase(run, "export", 0.3, "zorble.safetensors")
    loss, base_loss = (_validation_loss(1.0), 0.1337) if run.validation else (None, None)
    run.emit(
        "finished",
        step=run.steps,
        seconds=run.now_s - START_S,
        export="zorble.safetensors",
        validation_loss=loss,
        base_validation_loss=base_loss,
    )


def _validation_loss(progress: float) -> float:
    return 0.055 + 0.0787 * math.exp(-5 * progress)


def _by_timestep(progress: float) -> list[list[float]]:
    share = _validation_loss(progress) / 0.1337
    return [
        [timestep, round(share * (0.03 + 0.32 * math.exp(-timestep / 240)), 5)]
        for timestep in TIMESTEPS
    ]


def _wobble(step: int) -> float:
    return math.sin(12.9898 * step) * math.cos(4.1414 * step + 1)


def _draw_sample(path: Path, *, row: int, progress: float, px: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.new("RGB", (px, px), ((120, 170, 90), (24, 26, 60), (220, 205, 180))[row % 3])
    image.paste((round(255 * progress), 90, 40), (px // 4, px // 4, px // 2, px // 2))
    image.save(path)


def _run_json(run: FakeRun) -> dict[str, Any]:
    """Return run.json: that of run_folder.json, which has the settings that are not at their default."""
    record: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8"))
    record["command"][3] = str(run.steps)
    own = {"train.steps": run.steps, "sampling.prompts": list(PROMPTS)}
    record["settings"] = flatten(Config()) | record["settings"] | own
    defaults = {key: {"layer": "default", "reason": ""} for key in record["settings"]}
    record["origins"] = defaults | record["origins"]
    return record


def _write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text(
        "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8"
    )

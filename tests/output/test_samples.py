"""Sample images: what goes wrong with them is theirs alone, but for a full device and a wish to stop."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lora_trainer.cache.keys import CacheKey
from lora_trainer.common.errors import MachineError, StoppedBySignal
from lora_trainer.common.events import Event, EventStream
from lora_trainer.config.config import SamplingSettings
from lora_trainer.run.samples import SampleAction
from lora_trainer.training.guards import GuardState
from lora_trainer.training.progress import Progress

KEY = CacheKey(kind="text", fields={})
START = Progress(step=0, images=0, guard=GuardState(micro_batch=1))


def failing(error: BaseException, folder: Path) -> tuple[SampleAction, list[Event]]:
    """Return an action whose sampler raises `error`, and the events it tells."""

    def image(*_: object, **__: object) -> Any:
        raise error

    @contextmanager
    def rounded(_: torch.dtype) -> Any:
        yield

    def read(_: CacheKey) -> Mapping[str, Any]:
        return {}

    seen: list[Event] = []
    parts: dict[str, Any] = {
        "sampler": lambda: SimpleNamespace(image=image),
        "adapter": SimpleNamespace(rounded=rounded),
        "entries": SimpleNamespace(read=read),
    }
    action = SampleAction(
        **parts,
        without=nullcontext,
        embed=lambda conditioning: conditioning,
        precision=torch.float16,
        prompts=[("a hat", KEY)],
        negative=KEY,
        settings=SamplingSettings(),
        every_steps=1,
        size_px=(8, 8),
        folder=folder,
        events=EventStream(listeners=[seen.append]),
        asked=lambda: None,
        encode=lambda _: KEY,
    )
    return action, seen


@pytest.mark.parametrize(
    "error",
    [
        ValueError("height must be a multiple of 16"),
        KeyError("timesteps"),
        TypeError("unexpected argument"),
        RuntimeError("shapes do not match"),
        OSError(28, "No space left on device"),
        MachineError("an entry of the cache is gone", fix="fill it again"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_what_a_pipeline_raises_is_a_problem_of_the_samples(
    error: Exception, tmp_path: Path
) -> None:
    action, seen = failing(error, tmp_path)
    action(START)
    (problem,) = [event.fields for event in seen if event.kind == "problem"]
    assert problem["code"] == "TRN-03"
    assert problem["what"].startswith("no sample images at step 0: ")
    assert not [event for event in seen if event.kind == "sample"]


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("CUDA driver error: out of memory"),
        StoppedBySignal(15, found="stopped", fix="go on"),
        KeyboardInterrupt(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_full_device_and_a_wish_to_stop_are_for_others(
    error: BaseException, tmp_path: Path
) -> None:
    action, seen = failing(error, tmp_path)
    with pytest.raises(type(error)):
        action(START)
    assert not [event for event in seen if event.kind == "problem"]

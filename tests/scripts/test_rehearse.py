"""Rehearsals on a pretended card: what is judged, the bases of true size, and a cell where torch has CUDA."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from lora_trainer import families
from lora_trainer.families.base.layout import Layout
from lora_trainer.run.samples import ONE_COLOUR
from scripts.rehearse.base import longest_caption, write_true_size
from scripts.rehearse.card import COUNTED
from scripts.rehearse.cell import QUIET_STEP, ROOT, judged
from tests.fakes.family_bases import base_of, encoder_of, facts_of

GIB = 1 << 30
PLAN: Mapping[str, Any] = {"memory": {"phases": {"images": 2 * GIB, "training": 4 * GIB}}}


def rows(peak_bytes: int = int(3.9 * GIB), **grown: int) -> list[dict[str, Any]]:
    """Return the lines of a run whose quiet step has these counts."""
    steps = []
    for step in range(1, QUIET_STEP + 1):
        counts = {name: grown.get(name, 0) if step == QUIET_STEP else 0 for name in COUNTED}
        steps.append({"event": "step", "step": step, "counts": {**counts, "peak_used": peak_bytes}})
    return steps


def problem(code: str) -> dict[str, Any]:
    """Return the line of a problem in step 2."""
    return {"event": "problem", "code": code, "step": 2, "counts": rows()[0]["counts"]}


def test_a_run_within_its_plan_holds() -> None:
    """Sample images have one colour there, as no kernel computes."""
    seen = [*rows(launches=900, event_sync=1), problem(ONE_COLOUR), problem("")]
    outcome = judged("a", seen, plan=PLAN, chosen={})
    assert outcome.faults == [] and outcome.share == pytest.approx(0.975)
    assert outcome.quiet_step["launches"] == 900


def growing(*sizes_mib: int, peak_bytes: int = GIB) -> list[dict[str, Any]]:
    """Return the lines of a run whose tensors have these sizes after its steps, and this peak in each."""
    return [
        {**row, "tensors": {"bytes": size << 20, "peak_bytes": peak_bytes}}
        for row, size in zip(rows(), sizes_mib, strict=True)
    ]


def test_tensors_that_grow_once_are_the_state_of_the_optimizer() -> None:
    assert judged("a", growing(1, 9, 9, 9), plan=PLAN, chosen={}).faults == []


def test_steps_may_take_what_is_planned_for_them_where_another_phase_takes_more() -> None:
    plan = {"memory": {"phases": {"images": int(4.1 * GIB), "training": 3 * GIB}}}
    seen = growing(9, 9, 9, 9, peak_bytes=int(2.9 * GIB))
    assert judged("a", seen, plan=plan, chosen={}).faults == []
    seen = growing(9, 9, 9, 9, peak_bytes=int(3.1 * GIB))
    said = judged("a", seen, plan=plan, chosen={}).faults
    assert said == ["the peak of the steps is above what is planned for them"]


@pytest.mark.parametrize(
    ("seen", "fault"),
    [
        (growing(1, 2, 3, 4), "tensors on the card grow from step to step"),
        (rows(mallocs=1), "a step takes memory from the driver or gives it back"),
        (rows(peak_bytes=5 * GIB), "the peak is above the plan"),
        (rows(peak_bytes=3 * GIB), "the peak is below 90% of the plan"),
        (rows(h2d_pageable=1), "a step copies memory that is not pinned"),
        (rows(d2h_pageable=1), "a step copies memory that is not pinned"),
        (rows(stream_sync=1), "the host waits within a step"),
        (rows(sync_copies=1), "the host waits within a step"),
        (rows()[:-1], f"step {QUIET_STEP} was not reported"),
        (
            [*rows(), {"event": "out_of_memory", "step": 2, "counts": rows()[0]["counts"]}],
            '{"event": "out_of_memory", "step": 2}',
        ),
        ([*rows(), problem("TRN-03")], '{"event": "problem", "code": "TRN-03", "step": 2}'),
    ],
)
def test_each_fault_is_named(seen: list[dict[str, Any]], fault: str) -> None:
    assert judged("a", seen, plan=PLAN, chosen={}).faults == [fault]


@pytest.mark.parametrize("family", ["zimage", "lumina2", "qwen", "ideogram4"])
def test_a_caption_has_about_as_many_tokens_as_a_plan_has_memory_for(family: str) -> None:
    encoder = encoder_of(facts_of(family))
    tokens = encoder.count_tokens(longest_caption(base_of(family)))
    assert 0.9 * encoder.prompt_room() < tokens <= encoder.prompt_room()
    if form := families.family(family).text.json_captions:
        assert [*form.faults(json.loads(longest_caption(base_of(family))))] == []
    assert longest_caption(base_of("sdxl")) == "", "its texts have one length"


@pytest.mark.parametrize("family", ["sdxl", "flux", "qwen"])
def test_a_base_has_its_true_size_and_takes_no_room(family: str, tmp_path: Path) -> None:
    source = families.family(family).published[0].ids[0]
    base = write_true_size(source, tmp_path / "base")
    found = families.detect(base)
    facts, known = found.facts(Layout(folder=base), source="here"), families.known_base(source)
    assert known is not None
    sizes = {part: each.parameters for part, each in facts.parts.items()}
    assert sizes == {part: each.parameters for part, each in known.parts.items()}
    assert known.release.architecture.items() <= facts.release.architecture.items()
    assert sum(file.stat().st_blocks * 512 for file in base.rglob("*")) < 4e6
    assert max(file.stat().st_size for file in base.rglob("*")) < 6e9, "in shards, as the release"


@pytest.mark.skipif(
    torch.version.cuda is None or shutil.which("gcc") is None,
    reason="needs the CUDA build of torch, and gcc to build the pretended driver",
)
def test_a_cell_holds_on_a_card_of_its_size(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.rehearse", "--work", str(tmp_path), "--gpu", "8"]
    command += ["--base", "stable-diffusion-v1-5/stable-diffusion-v1-5"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert "8 balanced: holds" in done.stdout

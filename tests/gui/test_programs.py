"""What programs may do: the operations, through gradio_client with the same sign-in, and as an assistant's tools."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lora_trainer.gui import command_lines, jobs
from lora_trainer.gui.programs.operations import Operations
from lora_trainer.gui.server.asset_files import EXAMPLE
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import InputError, RequestError
from lora_trainer.queue import worker
from lora_trainer.reporting.control import Control
from tests.fakes.live_runs import write_status
from tests.fakes.queues import Place
from tests.fakes.run_folder import fake_run
from tests.gui.conftest import StartGui

PLAN = {"settings": {"train.steps": 7}, "memory": {"peak_bytes": 5}}


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A queue whose trainings never start."""
    monkeypatch.setattr(worker, "ensure_worker", lambda runs: None)
    place = Place(folder=tmp_path)
    yield place
    place.clean_up()


@pytest.fixture
def operations(place: Place) -> Operations:
    return Operations(work=Workplace(runs=place.runs), again_s=0.0)


@pytest.fixture
def images(tmp_path: Path) -> Path:
    folder = tmp_path / "cats"
    folder.mkdir()
    return folder


def running(operations: Operations, name: str) -> Path:
    """Make a run that trains."""
    folder = operations.work.runs / name
    folder.mkdir(parents=True)
    write_status(folder)
    return folder


def test_a_plan_and_a_check_are_the_answers_of_the_commands(
    operations: Operations, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def ask(words: tuple[str, ...]) -> command_lines.Answer:
        asked.append(words)
        return command_lines.Answer(values=PLAN)

    monkeypatch.setattr(command_lines, "ask", ask)
    planned = operations.plan(str(images), priority="speed", settings={"train.steps": 7})
    assert planned == PLAN
    assert operations.check(str(images)) == PLAN
    assert asked[0] == (
        "plan",
        str(images),
        "--priority=speed",
        "--set=train.steps=7",
        "--json",
    )
    assert asked[1][:2] == ("check", str(images))
    monkeypatch.setattr(
        command_lines, "ask", lambda _: command_lines.Answer(values=None, error="no images")
    )
    with pytest.raises(InputError, match="no images"):
        operations.plan(str(images))


def test_a_training_waits_in_the_queue_with_what_was_asked(
    operations: Operations, images: Path
) -> None:
    item = operations.train(str(images), name="mine", settings={"train.steps": 7})
    other = operations.train(str(images))
    assert (item["state"], item["label"], other["label"]) == ("waiting", "mine", "cats")
    assert "--name=mine" in item["command"] and "train.steps=7" in item["command"]
    assert [each["item"] for each in operations.queue()] == [item["item"], other["item"]]
    assert [each["item"] for each in operations.queue_move(other["item"], -1)][0] == other["item"]
    assert [each["item"] for each in operations.queue_remove(other["item"])] == [item["item"]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"dataset": "/nowhere"}, "the folder .*nowhere does not exist"),
        ({"priority": "slow"}, "priority='slow'"),
        ({"settings": {"train.stepz": 1}}, "train.stepz"),
        ({"name": "../out"}, "cannot be the name of a run"),
    ],
)
def test_what_cannot_be_trained_is_refused_and_nothing_waits(
    operations: Operations, images: Path, wrong: dict[str, Any], said: str
) -> None:
    with pytest.raises((RequestError, InputError), match=said):
        operations.train(**{"dataset": str(images), **wrong})
    assert operations.queue() == []


def test_a_run_is_watched_until_it_has_ended_and_asked_to_draw_and_to_stop(
    operations: Operations,
) -> None:
    folder = running(operations, "cats")
    (listed,) = operations.runs()
    assert listed == operations.status("cats")
    assert (listed["name"], listed["state"], listed["step"]) == ("cats", "running", 12)
    operations.sample("cats", "a cat in the snow")
    assert Control(folder).take_samples() == "a cat in the snow"
    operations.stop("cats")
    assert "stop" in Control(folder).pending()
    watched = operations.watch("cats")
    assert next(watched)["state"] == "running"
    write_status(folder, state="finished", step=30, exit_code=0)
    assert [now["state"] for now in watched] == ["finished"]
    json.dumps(operations.status("cats"), allow_nan=False)
    for wrong in ("nobody", "../cats", ""):
        with pytest.raises(RequestError, match="no run is named"):
            operations.status(wrong)


def test_a_measurement_is_a_job_whose_result_is_what_the_command_printed(
    operations: Operations, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = running(operations, "cats")
    begun: list[Any] = []

    def start(work: Workplace, *, kind: str, argv: Any, about: Any = None) -> jobs.Job:
        begun.append(argv)
        return made(work, kind)

    def made(work: Workplace, kind: str) -> jobs.Job:
        own = work.own / jobs.FOLDER / "0123456789abcd"
        own.mkdir(parents=True, exist_ok=True)
        record = {"kind": kind, "argv": [], "about": {}, "at_s": 0.0}
        (own / jobs.JOB_FILE).write_text(json.dumps(record))
        (own / jobs.LOG_FILE).write_text('looking at {things}\n{\n  "score": 0.5\n}\n')
        (own / jobs.RESULT_FILE).write_text('{"exit_code": 0}')
        return jobs.read(work, own.name)

    monkeypatch.setattr(jobs, "start", start)
    told = operations.validate("cats", str(images))
    assert begun[0][-4:] == ["validate", str(folder), str(images), "--json"]
    assert (told["state"], told["result"]) == ("finished", {"score": 0.5})
    assert operations.job(told["job"]) == told
    with pytest.raises(RequestError, match="the job .* does not exist"):
        operations.job("0000000000000000")


def test_an_unknown_captioner_is_refused_with_those_that_are_known(
    operations: Operations, images: Path
) -> None:
    with pytest.raises(RequestError, match="no model is named") as refused:
        operations.caption(str(images), model="/etc/passwd")
    assert "use one of" in str(refused.value)


# ---- assistants


def tools_of(operations: Operations, *, may_write: bool) -> dict[str, Any]:
    """Return the tools as an assistant lists them, by name."""
    mcp = pytest.importorskip("mcp", reason="mcp is not installed (extra `mcp`)")
    from lora_trainer.gui.programs.served import mcp_server

    async def listed() -> dict[str, Any]:
        async with mcp.Client(mcp_server(operations, may_write=may_write)) as client:
            return {tool.name: tool for tool in (await client.list_tools()).tools}

    return asyncio.run(listed())


def test_an_assistant_reads_only_unless_it_may_write(operations: Operations) -> None:
    reading = tools_of(operations, may_write=False)
    writing = tools_of(operations, may_write=True)
    names = {each.__name__ for each in operations.reading()} - {"watch"}
    assert reading.keys() == names
    assert writing.keys() == names | {each.__name__ for each in operations.writing()}
    plan = reading["plan"]
    assert "Predict the memory" in plan.description
    assert plan.input_schema["required"] == ["dataset"]


def test_an_assistant_is_told_what_is_wrong(operations: Operations) -> None:
    mcp = pytest.importorskip("mcp", reason="mcp is not installed (extra `mcp`)")
    from lora_trainer.gui.programs.served import mcp_server

    async def called() -> tuple[Any, Any]:
        async with mcp.Client(mcp_server(operations, may_write=False)) as client:
            right = await client.call_tool("runs", {})
            return right, await client.call_tool("status", {"run": "nobody"})

    running(operations, "cats")
    right, wrong = asyncio.run(called())
    assert right.structured_content["result"][0]["name"] == "cats"
    assert wrong.is_error and "no run is named 'nobody'" in wrong.content[0].text


# ---- through the server


def test_a_program_with_the_key_is_answered_and_one_without_is_not(
    gui_server: StartGui, tmp_path: Path
) -> None:
    """What docs/api.md shows, and the same operations over streamable HTTP."""
    client = pytest.importorskip("gradio_client", reason="gradio_client comes with gradio")
    mcp = pytest.importorskip("mcp", reason="mcp is not installed (extra `mcp`)")
    from httpx2 import AsyncClient
    from mcp.client.streamable_http import streamable_http_client

    runs = tmp_path / "runs"
    server = gui_server(runs, "--mcp")
    key = (runs / ".gui" / "key").read_text(encoding="ascii")
    signed = {"Authorization": f"Bearer {key}"}
    address = f"http://127.0.0.1:{server.port}"
    with pytest.raises(Exception, match="Could not fetch config"):
        client.Client(address, verbose=False)
    program = client.Client(address, headers=signed, verbose=False, httpx_kwargs={"timeout": 80})
    write_status(fake_run(runs / "owl", steps=3).write(), state="finished", step=3, exit_code=0)
    assert [run["name"] for run in program.predict(api_name="/runs")] == ["owl"]
    planned = program.predict(str(EXAMPLE), settings={"train.steps": 7}, api_name="/plan")
    assert planned["settings"]["train.steps"]["value"] == 7
    assert [now["state"] for now in program.submit("owl", api_name="/watch")] == ["finished"]
    with pytest.raises(Exception, match="no run is named 'nobody'"):
        program.predict("nobody", api_name="/stop")

    async def tools() -> list[str]:
        async with AsyncClient(headers=signed) as http:
            transport = streamable_http_client(f"{address}/mcp", http_client=http)
            async with mcp.Client(transport) as assistant:
                return [tool.name for tool in (await assistant.list_tools()).tools]

    names = asyncio.run(tools())
    assert "plan" in names and "train" not in names

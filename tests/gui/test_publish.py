"""Publishing from the pages: a job that sends a LoRA to a Hub on this machine, over HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lora_trainer.gui import jobs, lora_files, sharing
from lora_trainer.gui.workplace import Workplace

from lora_trainer.common.errors import RequestError
from tests.fakes.hub_server import TOKEN, HubServer, hub_server
from tests.fakes.lora_library import finished_run
from tests.fakes.queues import until


def published(work: Workplace, *, repository: str, private: bool) -> jobs.Job:
    file = lora_files.find(work, "zorble/zorble.safetensors")
    job = sharing.publish(work, file, repository=repository, private=private)
    until(lambda: jobs.read(work, job.id).state != "running")
    return jobs.read(work, job.id)


def test_a_lora_is_published_privately_with_its_card_and_the_token_is_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = Workplace(runs=tmp_path / "runs")
    finished_run(work.runs / "zorble", modelspec__title="Zorble", modelspec__trigger_phrase="zorb")
    with hub_server() as hub:
        login(monkeypatch, hub)
        done = published(work, repository="zorble", private=True)
        assert done.state == "finished", done.log_tail()
        assert hub.private == {"jane/zorble": True}
        files = hub.files["jane/zorble"]
        lora = (work.runs / "zorble" / "zorble.safetensors").read_bytes()
        assert files["zorble.safetensors"] == lora
        assert {"README.md", "samples/00.png"} <= files.keys()
        card = files["README.md"].decode()
        assert "# Zorble" in card and "instance_prompt: zorb" in card
        assert done.log_tail(1) == [f"published at {hub.address}/jane/zorble"]
        assert TOKEN in hub.tokens
        assert published(work, repository="club/zorble", private=False).state == "finished"
        assert hub.private["club/zorble"] is False
        hub.refuses = True
        refused = published(work, repository="club/zorble", private=False)
        assert "the Hub answers 403" in refused.error() and "hf auth login" in refused.error()
        assert sharing.may_only_read(refused) and not sharing.may_only_read(done)
        told = [path for path in work.own.rglob("*") if path.is_file()]
        assert told and not any(TOKEN.encode() in path.read_bytes() for path in told)
    with pytest.raises(RequestError, match="no name"):
        sharing.publish(
            work, lora_files.find(work, "zorble/zorble.safetensors"), repository=" ", private=True
        )


def login(monkeypatch: pytest.MonkeyPatch, hub: HubServer) -> None:
    """Let commands that are started talk to this Hub."""
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_ENDPOINT", hub.address)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")

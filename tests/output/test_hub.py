"""What is uploaded, what is not, and what happens when the Hub does not answer. No network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from lora_trainer.common.errors import MachineError, RequestError
from lora_trainer.common.events import Event, EventStream
from lora_trainer.config.config import OutputSettings
from lora_trainer.families import family
from lora_trainer.families.base import Layout
from lora_trainer.lora_file.embedding import embedding_path
from lora_trainer.lora_file.formats import AdapterContents
from lora_trainer.run import hub_upload
from lora_trainer.run.hub_upload import (
    HubUpload,
    check_upload,
    hub_id,
    model_card,
    push,
    push_finished,
    release_of,
)
from tests.fakes.sample_image import sample
from tests.fakes.stable_diffusion import sd15_facts

LORA = AdapterContents(kinds=frozenset({"lora"}), dora=False, text=False)


class FakeHub:
    """Records what it is asked for, and what lies in the folder at that moment."""

    def __init__(self, *, has_card: bool = False, fails: Exception | None = None) -> None:
        self.has_card, self.fails = has_card, fails
        self.created: dict[str, Any] = {}
        self.uploaded: dict[str, bytes] = {}

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        if self.fails:
            raise self.fails
        self.created = {"repo_id": repo_id, "private": private, "exist_ok": exist_ok}

    def file_exists(self, repo_id: str, filename: str) -> bool:
        return self.has_card and filename == "README.md"

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> None:
        root = Path(folder_path)
        files = (path for path in root.rglob("*") if path.is_file())
        self.uploaded = {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Return a run folder with all that must stay at home beside what is uploaded."""
    folder = tmp_path / "runs" / "zibbo"
    sample(folder / "samples" / "step-00000100" / "00.png", "old")
    sample(folder / "samples" / "step-00000200" / "00.png", "zibbo in a hat")
    sample(folder / "samples" / "step-00000200" / "01.png", "from /home/jane/secret")
    (folder / "states").mkdir()
    (folder / "states" / "state.safetensors").write_bytes(b"state")
    (folder / "run.json").write_text('{"token": "hf_abcdefghijklmnopqrst"}', encoding="utf-8")
    (folder / "zibbo.safetensors").write_bytes(b"adapter")
    return folder


def release(run: Path, **changes: Any) -> HubUpload:
    made = release_of(
        run,
        file=run / "zibbo.safetensors",
        title="zibbo",
        settings=OutputSettings(hub_repo="jane/zibbo", license="mit", description="A creature."),
        trigger="zibbo",
        family=family("sd15"),
        facts=replace(sd15_facts(), source="stable-diffusion-v1-5/stable-diffusion-v1-5"),
        format="kohya",
        contents=LORA,
    )
    return replace(made, **changes)


def card_of(text: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load(text.split("---\n")[1])
    return found


def test_file_images_and_card_are_uploaded_and_nothing_else(run: Path) -> None:
    api = FakeHub()
    address = push(release(run), api=api)
    assert address == "https://huggingface.co/jane/zibbo"
    assert api.created == {"repo_id": "jane/zibbo", "private": True, "exist_ok": True}
    assert api.uploaded.keys() == {
        *("README.md", "zibbo.safetensors", "samples/00.png", "samples/01.png"),
    }
    assert api.uploaded["zibbo.safetensors"] == b"adapter"
    newest = run / "samples" / "step-00000200" / "00.png"
    assert api.uploaded["samples/00.png"] == newest.read_bytes()


def test_new_tokens_are_uploaded_with_their_adapter(run: Path) -> None:
    words = embedding_path(run / "zibbo.safetensors")
    words.parent.mkdir()
    words.write_bytes(b"vectors")
    api = FakeHub()
    push(release(run), api=api)
    assert api.uploaded["embeddings/zibbo_emb.safetensors"] == b"vectors"
    assert b"`embedding:zibbo_emb`" in api.uploaded["README.md"]


def test_a_repository_is_public_only_when_asked(run: Path) -> None:
    api = FakeHub()
    push(release(run, private=False), api=api)
    assert api.created["private"] is False


def test_a_card_that_somebody_wrote_is_left_alone(run: Path) -> None:
    api = FakeHub(has_card=True)
    push(release(run), api=api)
    assert "README.md" not in api.uploaded and "zibbo.safetensors" in api.uploaded


def test_the_card_is_what_the_hub_reads(run: Path) -> None:
    text = model_card(release(run))
    card = card_of(text)
    assert card["tags"] == ["text-to-image", "diffusers", "lora", "template:sd-lora"]
    assert card["base_model"] == "stable-diffusion-v1-5/stable-diffusion-v1-5"
    assert (card["instance_prompt"], card["license"]) == ("zibbo", "mit")
    assert card["library_name"] == "diffusers"
    assert card["widget"] == [
        {"text": "zibbo in a hat", "output": {"url": "samples/00.png"}},
        {"text": "from [path]", "output": {"url": "samples/01.png"}},
    ]
    assert "<Gallery />" in text and "A creature." in text and "Put `zibbo`" in text
    assert 'load_lora_weights("jane/zibbo", weight_name="zibbo.safetensors")' in text
    assert '"zibbo in a hat"' in text and "jane/secret" not in text


def test_the_snippet_is_python(run: Path) -> None:
    text = model_card(release(run, trigger='a "quoted" \\ trigger', samples=()))
    (code,) = (block.removeprefix("python\n") for block in text.split("```") if "import" in block)
    compile(code, "snippet", "exec")


def test_no_snippet_for_what_diffusers_cannot_load_or_find(run: Path) -> None:
    assert "```" not in model_card(release(run, in_diffusers=False))
    local = model_card(release(run, base=None, base_name="my-base.safetensors"))
    assert "```" not in local and "my-base.safetensors" in local
    assert "base_model" not in card_of(local)


@pytest.mark.parametrize(
    ("kinds", "dora", "format", "expected"),
    [
        ({"lora"}, False, "kohya", (True, True)),
        ({"lora"}, True, "kohya", (False, True)),
        ({"lora"}, True, "diffusers", (True, False)),
        ({"loha"}, False, "kohya", (False, True)),
    ],
)
def test_the_card_knows_who_can_read_the_file(
    run: Path, kinds: set[str], dora: bool, format: Any, expected: tuple[bool, bool]
) -> None:
    made = release_of(
        run,
        file=run / "zibbo.safetensors",
        title="zibbo",
        settings=OutputSettings(hub_repo="jane/zibbo"),
        trigger=None,
        family=family("sd15"),
        facts=sd15_facts(),
        format=format,
        contents=AdapterContents(kinds=frozenset(kinds), dora=dora, text=False),
    )
    assert (made.in_diffusers, made.in_programs) == expected


def test_bases_that_are_not_on_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = replace(sd15_facts(), source="owner/base")
    assert hub_id(facts) == "owner/base"
    assert hub_id(replace(facts, source="/models/base")) is None
    assert hub_id(replace(facts, source="base")) is None
    single = Layout(folder=tmp_path, files={"denoiser": tmp_path / "a.safetensors"})
    assert hub_id(replace(facts, layout=single)) is None
    (tmp_path / "owner" / "base").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert hub_id(facts) is None, "a folder of that name is what the user meant"


# ---- what can go wrong


def test_without_a_login_nothing_is_trained_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    with pytest.raises(MachineError, match="needs a login") as raised:
        check_upload("jane/zibbo")
    assert "hf auth login" in raised.value.fix


@pytest.mark.parametrize("name", ["zibbo", "a/b/c", "jane/", "/zibbo", "jane zibbo/x", "../x"])
def test_names_that_are_no_repository(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hf_x")
    with pytest.raises(RequestError, match="owner/name"):
        check_upload(name)
    check_upload("jane/zibbo-1.0_x")


class _Response:
    def __init__(self, status_code: int) -> None:
        self.status_code = status_code
        self.headers: dict[str, str] = {}
        self.request = None


def http_error(status: int) -> HfHubHTTPError:
    return HfHubHTTPError("no", response=_Response(status))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (http_error(403), "hf auth login"),
        (http_error(500), "hf upload jane/zibbo"),
        (OfflineModeIsEnabled("offline"), "hf upload jane/zibbo"),
        (OSError("no route"), "hf upload jane/zibbo"),
    ],
)
def test_a_failed_upload_is_a_problem_of_a_finished_run(
    error: Exception, fix: str, run: Path
) -> None:
    seen: list[Event] = []
    events = EventStream([seen.append])
    push_finished(release(run), events, api=FakeHub(fails=error))
    (event,) = seen
    assert event.kind == "problem" and "was not uploaded" in event.fields["what"]
    assert fix in event.fields["fix"]
    with pytest.raises(MachineError):
        push(release(run), api=FakeHub(fails=error))


def test_a_finished_upload_is_told(run: Path) -> None:
    seen: list[Event] = []
    push_finished(release(run), EventStream([seen.append]), api=FakeHub())
    assert [event.kind for event in seen] == ["uploaded"]
    assert seen[0].fields == {"address": "https://huggingface.co/jane/zibbo", "private": True}


def test_the_real_client_is_what_the_protocol_says() -> None:
    from huggingface_hub import HfApi

    api: hub_upload.HubApi = HfApi()
    assert callable(api.upload_folder)

"""First runs from the Hub: what is fetched of each real release's files, and that it is enough."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from lora_trainer import families
from lora_trainer.common.errors import InputError
from lora_trainer.common.memo import HashMemo
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base import BaseFacts
from lora_trainer.families.hub_files import wanted
from lora_trainer.families.locate import identified, locate
from tests.fakes.bases.parts import t5_tokenizer
from tests.fakes.family_bases import CPU, base_of, facts_of, side_of
from tests.fakes.hub import LISTS, FakeHub, fake_hub, spiece
from tests.fakes.runs import run_cli, toy

KLEIN, CHROMA = "black-forest-labs/FLUX.2-klein-base-4B", "lodestones/Chroma1-HD"
PROMPT = "a photo of a red square"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeHub:
    return fake_hub(tmp_path / "hub", monkeypatch)


@pytest.mark.parametrize("source", LISTS)
def test_what_loading_needs_is_fetched_and_nothing_else(source: str) -> None:
    """R1: chat_template.jinja of klein and Qwen-Image was left; SDXL's spare VAE (335 MB) was fetched."""
    files = LISTS[source]
    assert wanted([*files["read"], *files["left"]], without=frozenset()) == files["read"]


@pytest.mark.parametrize("name", families.MODULES)
def test_a_release_is_read_from_the_files_it_has(name: str, hub: FakeHub) -> None:
    family = families.family(name)
    source = next(iter(family.releases))
    hub.publish(source, base_of(name))
    settings = BaseSettings(model=source, revision="v2")
    facts = locate(settings)
    assert facts.layout is not None and facts.layout.folder == hub.snapshot(source)
    assert (hub.fetched, hub.revisions) == ([LISTS[source]["read"]], ["v2"])
    assert locate(settings) == facts and len(hub.fetched) == 1
    assert facts.parts == facts_of(name).parts
    ours, tiny = (
        family.load_text_encoder(found, dtype=torch.float32, device=CPU).encode_prompts([PROMPT])
        for found in (facts, facts_of(name))
    )
    assert ours.keys() == tiny.keys()
    assert all(torch.equal(ours[key], tiny[key]) for key in tiny)
    one, other = (
        family.load_denoiser(found, dtype=torch.float32, device=CPU).state_dict()
        for found in (facts, facts_of(name))
    )
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    family.load_image_encoder(facts, device=CPU)
    family.plain_pipeline(facts, dtype=torch.float32, device=CPU)


@pytest.mark.parametrize(("name", "source"), [("flux2", KLEIN), ("chroma", CHROMA)])
def test_a_first_run_from_the_hub_trains(
    tmp_path: Path, hub: FakeHub, name: str, source: str
) -> None:
    """R1: both ended in a traceback after their download.

    Under a name of its own: what is known of a release by its name is not the size of a tiny base.
    """
    own_name = f"somebody/{name}-tuned"
    hub.publish(source, base_of(name), name=own_name)
    place = toy(tmp_path / "place", images=3)
    side_px = side_of(facts_of(name))
    line = place.arguments(steps=2, data__resolution=side_px, data__validation_fraction=0.34)
    line[line.index("--base") + 1] = own_name
    assert run_cli(line) == 0
    assert (place.run / "toy.safetensors").is_file()
    part = "chat_template.jinja" if name == "flux2" else "spiece.model"
    missing = hub.snapshot(own_name) / "tokenizer" / part
    missing.unlink()  # as an earlier version left it, or a download that was cut
    assert run_cli([*line, "--name", "again"]) == 0
    assert missing.is_file() and len(hub.fetched) == 2


def identity(facts: BaseFacts, folder: Path) -> str:
    return identified(facts, HashMemo.load(folder)).parts["text_encoder"].identity


def test_another_chat_template_is_another_text_encoder(hub: FakeHub, tmp_path: Path) -> None:
    """R1: captions cached with one template were taken for those of another."""
    hub.publish(KLEIN, base_of("flux2"))
    facts = locate(BaseSettings(model=KLEIN))
    before = identity(facts, tmp_path / "memo")
    template = hub.snapshot(KLEIN) / "tokenizer" / "chat_template.jinja"
    template.write_text(template.read_text(encoding="utf-8").replace("user", "human") + "\n")
    assert identity(facts, tmp_path / "other") != before


# ---- SentencePiece's own file


def spiece_folder(folder: Path) -> Path:
    tokenizer = t5_tokenizer()
    tokenizer.save_pretrained(folder)
    pieces = [(text, score) for text, score in tokenizer._vocab_scores]
    (folder / "tokenizer.json").unlink()
    (folder / "spiece.model").write_bytes(spiece(pieces))
    return folder


@pytest.mark.parametrize("text", [PROMPT, "", "  two  spaces ", "blue</s> on é 日本", "x" * 900])
def test_a_vocabulary_in_sentencepieces_file_gives_the_same_tokens(
    tmp_path: Path, text: str
) -> None:
    from lora_trainer.families.text.transformers_encoder import load_tokenizer

    t5_tokenizer().save_pretrained(tmp_path / "plain")
    plain = AutoTokenizer.from_pretrained(tmp_path / "plain")
    found = load_tokenizer(spiece_folder(tmp_path / "spiece"))
    settings = {"padding": "max_length", "max_length": 64, "truncation": True}
    assert type(found) is type(plain)
    assert found([text], **settings) == plain([text], **settings)  # type: ignore[arg-type]  # settings are of several types
    assert found.model_max_length == plain.model_max_length


@pytest.mark.parametrize("damage", ["cut", "empty", "other kind"])
def test_a_file_that_is_no_vocabulary_is_refused_in_a_line(tmp_path: Path, damage: str) -> None:
    from lora_trainer.families.text.transformers_encoder import load_tokenizer

    file = spiece_folder(tmp_path) / "spiece.model"
    whole = file.read_bytes()
    kinds = {
        "cut": whole[: len(whole) // 2],
        "empty": b"",
        "other kind": whole + b"\x12\x02\x18\x02",
    }
    file.write_bytes(kinds[damage])
    with pytest.raises(InputError, match=r"spiece\.model") as caught:
        load_tokenizer(file.parent)
    assert "\n" not in str(caught.value)

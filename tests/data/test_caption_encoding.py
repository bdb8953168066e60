"""All rules for captions with the cache of text-encoder outputs: what is encoded, and what is trained with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lora_trainer.cache.cache_plan import Entries
from lora_trainer.config.inputs import DataSettings
from lora_trainer.dataset import caption_rules
from lora_trainer.dataset.records import ImageRecord
from lora_trainer.dataset.scan import scan
from lora_trainer.training.dataloader import TrainingDataLoader
from tests.data.test_caption_rules import EVERYTHING
from tests.fakes.studio import Studio, draw, studio_in, text_encoder
from tests.fakes.training import build_feeder

SETTINGS = DataSettings.model_validate(
    {
        **EVERYTHING,
        "tag_dropout": 0.2,
        "caption_lines": "one",
        "caption_dropout": 0.2,
        "caption_dropout_every_epochs": 4,
        "caption_variants": 5,
        "flip": False,
        "folders": {
            "3_hats": {"trigger": "hatto", "flip": True, "tag_dropout": 0.9, "weight": 2.5},
            "plain": {
                "shuffle_tags": False,
                "wildcards": False,
                "tag_dropout": 0,
                "caption_suffix": "",
                "caption_dropout": 0.0,
                "caption_dropout_every_epochs": 0,
                "repeats": 2,
                "trigger": "",
            },
        },
    }
)
CAPTION = "one, (two:1.3) ||| {red|blue} hat, a;;;b, x, (y, z:0.7), w, v ||| last"


@pytest.fixture
def studio(tmp_path: Path) -> Studio:
    found = studio_in(tmp_path)
    (found.folder / "p0.txt").write_text(f"{CAPTION}\n{CAPTION.replace('hat', 'cap')}\n")
    (found.folder / "p1.txt").write_text(CAPTION.replace("hat", "boat"))
    for number, folder in enumerate(("3_hats", "plain")):
        (found.folder / folder).mkdir()
        draw(found.folder / folder / "p.png", seed=10 + number)
        (found.folder / folder / "p.txt").write_text(CAPTION)
    found.settings = SETTINGS
    return found


def records_of(studio: Studio) -> dict[str, ImageRecord]:
    found = scan(studio.folder, settings=studio.settings).records
    return {record.name: record for record in found}


def texts_of(record: ImageRecord, settings: DataSettings = SETTINGS) -> tuple[str, ...]:
    return caption_rules.variants(
        record.written, settings=settings.of_folder(record.folder), seed=1
    )


def feeder_of(studio: Studio, seed: int = 1) -> TrainingDataLoader:
    wanted = studio.needs()
    studio.encode(wanted)
    changed = {
        "sources": wanted.sources,
        "entries": Entries(cache=studio.cache),
        "empty_text": studio.texts_as().key(""),
        "data": studio.settings,
        "seed": seed,
        "_orders": {},
    }
    return TrainingDataLoader(**{**vars(build_feeder()), **changed})


def test_samples_are_trained_with_what_encoding_a_text_of_theirs_gives(studio: Studio) -> None:
    feeder = feeder_of(studio)
    encoder, entries = text_encoder(studio.base), studio.texts_as()
    used: set[str] = set()
    for record in records_of(studio).values():
        dropped = [] if record.folder == "plain" else [""]
        texts = (*dropped, *(texts_of(record)[1:] or texts_of(record)))
        encoded = {text: entries.encode(text, encoder)["text"] for text in texts}
        for sample in record.sample_ids():
            for epoch in range(8):
                found = feeder.prepare_sample(epoch, sample).conditioning["text"].numpy()
                same = [one for one in texts if np.allclose(found, encoded[one], 1e-5, 1e-5)]
                assert same and ("" in same) == (len(same[0]) == 0)
                used.add(same[0])
    assert "" in used and len(used) > 12


def test_folders_have_settings_of_their_own(studio: Studio) -> None:
    feeder, records = feeder_of(studio), records_of(studio)
    hats, plain = records["3_hats/p.png"], records["plain/p.png"]
    assert len(feeder.sources[hats.sample_ids()[0]].views) == 2
    assert len(feeder.sources[plain.sample_ids()[0]].views) == 1
    assert len(feeder.sources[plain.sample_ids()[0]].texts) == 1
    lengths = [sum(map(len, texts_of(record)[1:])) for record in (hats, records["p1.png"])]
    assert lengths[0] < lengths[1], "more tags are left out"
    none = SETTINGS.model_copy(update={"folders": {}})
    unweighted = TrainingDataLoader(**{**vars(feeder), "data": none, "_orders": {}})
    for record, factor in ((hats, 2.5), (plain, 1.0), (records["p1.png"], 1.0)):
        sample = record.sample_ids()[0]
        one, other = (found.prepare_sample(3, sample) for found in (feeder, unweighted))
        assert one.weight == pytest.approx(factor * other.weight)


def test_weights_of_words_are_part_of_what_an_entry_is(studio: Studio) -> None:
    on = studio.texts_as()
    off = replace(on, emphasis=False)
    assert on.key("a (cat)") != off.key("a (cat)")
    assert on.key("a cat") == off.key("a cat"), "without weights it is the same entry"
    tokens = replace(on, tokens_only=True)
    entries = [tokens.encode(text, text_encoder(studio.base)) for text in ("a (cat)", "")]
    assert [sorted(entry) for entry in entries] == [["text_encoder", "text_encoder.weights"]] * 2
    assert tokens.key("") != replace(off, tokens_only=True).key(""), "a batch must be alike"

"""Settings are found by the words that other trainers have for them."""

from __future__ import annotations

import pytest

from lora_trainer.config.config import setting_keys
from lora_trainer.importing.foreign import table_of
from lora_trainer.importing.words import settings_called, words_of_settings


@pytest.mark.parametrize(
    ("words", "first"),
    [
        ("lr", "optimizer.learning_rate"),
        ("--unet-lr", "optimizer.learning_rate"),
        ("dim", "adapter.rank"),
        ("network_dim", "adapter.rank"),
        ("Network Dim", "adapter.rank"),
        ("linear_alpha", "adapter.alpha"),
        ("fp8", "memory.base_precision"),
        ("blocks_to_swap", "memory.streamed_blocks"),
        ("max_train_epochs", "train.steps"),
        ("--huber_c", "objective.huber_delta"),
        ("snr_gamma", "objective.min_snr_gamma"),
        ("dadaptation", "optimizer.name"),
        ("cosine_with_restarts", "optimizer.schedule"),
        ("locon", "adapter.kind"),
        ("flip_aug", "data.flip"),
        ("min_snr_gamma", "objective.min_snr_gamma"),
        ("seed", "train.seed"),
    ],
)
def test_a_word_of_another_trainer_finds_the_setting(words: str, first: str) -> None:
    assert settings_called(words)[0] == first


def test_a_word_of_nobody_finds_nothing() -> None:
    assert settings_called("walrus") == settings_called("--") == settings_called("") == ()


def test_every_setting_that_has_words_is_one() -> None:
    keys = set(setting_keys())
    assert words_of_settings().keys() | table_of("words")["words"].keys() <= keys

"""Words for numbers: how a loss compares with the base's."""

from __future__ import annotations

import math

import pytest

from lora_trainer.common.wording import against_base, better_than_base


@pytest.mark.parametrize(
    ("loss", "base_loss", "of_the_loss", "of_the_lora"),
    [
        (0.059, 0.1, "41 % below the base's", "41 % better than the base"),
        (0.1034, 0.1, "3.4 % above the base's", "3.4 % worse than the base"),
        (0.10001, 0.1, "the same as the base's", "as good as the base"),
        (0.1, 0.0, "not comparable with the base's", "not comparable with the base"),
        (math.nan, 0.1, "not comparable with the base's", "not comparable with the base"),
    ],
)
def test_both_words_for_a_loss_beside_the_base_s_say_the_same(
    loss: float, base_loss: float, of_the_loss: str, of_the_lora: str
) -> None:
    assert against_base(loss, base_loss) == of_the_loss
    assert better_than_base(loss, base_loss) == of_the_lora

"""Which samples an epoch holds and in which order: pure functions of the seed and the epoch's number.

Every sample of the dataset is in every epoch once. Of the regularisation samples each epoch takes the
next few of an endless stream: all of them shuffled, then all shuffled anew, so that none comes a
second time before every other has come.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lora_trainer.common.randomness import Stream, shuffled

_ROUND = "#"


def regularisation_count(sample_count: int, *, pool: int, ratio: float) -> int:
    """Return how many regularisation samples go with an epoch of `sample_count` samples, from a pool of them."""
    return max(1, round(sample_count * ratio)) if pool else 0


def epoch_order(
    learned_ids: Iterable[str], regularisation: Sequence[str], *, count: int, seed: int, epoch: int
) -> list[str]:
    """Return the samples of an epoch, `count` of them regularisation samples, shuffled together.

    One of these is named by its id and the round of the stream it comes in, as it may come twice in an
    epoch with other draws; `sample_id` takes the name apart.
    """
    names = [*learned_ids, *_turns(regularisation, range(epoch * count, (epoch + 1) * count), seed)]
    return shuffled(names, seed, Stream.ORDER, epoch)


def sample_id(name: str) -> str:
    """Return the id of the sample that stands under a name in an epoch."""
    return name.partition(_ROUND)[0]


def _turns(samples: Sequence[str], positions: range, seed: int) -> list[str]:
    """Return the names at these positions of the endless stream."""
    rounds = sorted({position // len(samples) for position in positions}) if samples else []
    orders = {turn: shuffled(samples, seed, Stream.REGULARISATION, turn) for turn in rounds}
    places = (divmod(position, len(samples)) for position in positions)
    return [f"{orders[turn][index]}{_ROUND}{turn}" for turn, index in places]

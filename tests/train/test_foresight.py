"""What is made of samples ahead of their pass: of the right ones, in their groups, as many as there is room for."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lora_trainer.common.dist_env import DistEnv
from lora_trainer.config.config import DataSettings, ObjectiveSettings
from lora_trainer.families.base import Conditioning
from lora_trainer.network.modulation import ModulatedNetwork
from lora_trainer.training.batch import StepBatch, UpcomingSample, groups
from lora_trainer.training.dataloader import UpcomingWindow
from lora_trainer.training.modulation_prefetch import ModulationPrefetch
from tests.fakes.training import CPU, build_feeder

WINDOW = UpcomingWindow(
    steps=3, names=("text",), latent_shape=lambda size: (4, size[1] // 2, size[0] // 2)
)
SHAPE = (4, 8, 8)


class Counting(ModulatedNetwork):
    """Notes how many samples it is given, pass by pass."""

    def __init__(self, network: nn.Module, names: Sequence[str]) -> None:
        super().__init__(network, names, device=CPU)
        self.made: list[list[int]] = []

    def outputs(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        self.made.append([len(each) for each in inputs])
        return super().outputs(inputs)


def foresight(*, most_samples: int) -> tuple[ModulationPrefetch, Counting, nn.Sequential]:
    torch.manual_seed(0)
    network = nn.Sequential(*(nn.Linear(3, width) for width in (5, 2, 4))).requires_grad_(False)
    layers = deepcopy(network)
    held = Counting(network, ["0", "1", "2"])

    def inputs(timesteps: Tensor, told: Conditioning) -> Tensor:
        return told["pooled"] * timesteps[:, None] / 1000

    found = ModulationPrefetch(
        network=held,
        names=("pooled",),
        inputs=inputs,
        dtype=torch.float32,
        device=CPU,
        most_samples=most_samples,
    )
    return found, held, layers


def sample(number: int, *, as_base: bool = False) -> UpcomingSample:
    pooled = torch.full((1, 3), float(number))
    return UpcomingSample(
        shape=SHAPE,
        timestep=100.0 * number,
        conditioning={"pooled": pooled},
        as_base=as_base,
    )


def step(number: int, *windows: Sequence[UpcomingSample]) -> StepBatch:
    return StepBatch(step=number, samples=(), epoch=0.0, window=tuple(map(tuple, windows)))


def split_by(cap: int) -> Any:
    return lambda samples: groups(samples, cap=cap)


def test_a_weight_comes_once_for_as_many_samples_as_there_is_room_for() -> None:
    found, held, layers = foresight(most_samples=5)
    steps = [[sample(2 * index), sample(2 * index + 1)] for index in range(4)]
    for number, samples in enumerate(steps):
        batch = step(number, *(steps if number == 0 else ()))
        found.expect(batch, cap=2, split=split_by(2))
        with found.of(samples):
            given = torch.cat([each.conditioning["pooled"] for each in samples])
            given = given * torch.tensor([each.timestep for each in samples])[:, None] / 1000
            assert held.rows is not None
            expected = torch.cat([layer(given) for layer in layers], dim=1)
            assert torch.equal(held.rows, expected)
        assert held.rows is None
    assert held.made == [[2, 2], [2, 2]]
    assert held.loads == 2 * len(held.names)


def test_another_split_is_made_anew_and_a_step_done_again_is_not() -> None:
    found, held, _ = foresight(most_samples=10)
    steps = [[sample(2 * index), sample(2 * index + 1)] for index in range(3)]
    first = step(0, *steps)
    for cap in (2, 2, 1, 1, 2):
        found.expect(first, cap=cap, split=split_by(cap))
        for samples in groups(steps[0], cap=cap):
            with found.of(samples):
                pass
    assert held.made == [[2, 2, 2], [1] * 6, [2, 2, 2]]
    found.expect(step(2), cap=1, split=split_by(1))
    for samples in groups(steps[2], cap=1):
        with found.of(samples):
            pass
    assert held.made[3:] == [[1, 1]], "of the rest of the window"


def test_what_stays_as_the_base_has_rows_of_its_own() -> None:
    found, held, _ = foresight(most_samples=10)
    steps = [[sample(1), sample(2, as_base=True)], [sample(3), sample(4)]]
    found.expect(step(0, *steps), cap=2, split=split_by(2))
    with found.of(steps[0]), found.of(steps[0][1:]):
        assert held.rows is not None and len(held.rows) == 1
    with found.of(steps[1]):
        assert held.made == [[2, 1, 2]]


def test_passes_of_something_else_in_between_are_forgotten_by_the_next_step() -> None:
    found, held, _ = foresight(most_samples=4)
    steps = [[sample(1)], [sample(2)]]
    found.expect(step(0, *steps), cap=1, split=split_by(1))
    with found.of(steps[0]):
        pass
    others = [[sample(7)], [sample(8)]]
    found.expect_passes(others)
    for samples in others:
        with found.of(samples):
            pass
    found.expect(step(1), cap=1, split=split_by(1))
    with found.of(steps[1]):
        pass
    assert held.made == [[1, 1], [1, 1], [1]]


def test_a_sample_with_other_text_or_level_has_other_rows() -> None:
    found, held, _ = foresight(most_samples=4)
    one = sample(3)
    for other in (
        one,
        replace(one, timestep=301.0),
        replace(one, conditioning={"pooled": torch.ones(1, 3)}),
    ):
        with found.of([other]):
            pass
    assert len(held.made) == 3
    with found.of([replace(one, conditioning={"pooled": torch.ones(1, 3)})]):
        assert len(held.made) == 3


# ---- what the feeder tells


@pytest.mark.parametrize("rank", [0, 1])
def test_glimpses_are_of_the_samples_that_are_prepared(rank: int) -> None:
    data = DataSettings(caption_dropout=0.3, flip=True)
    objective = ObjectiveSettings(timestep_strata=3)
    feeder = build_feeder(data=data, objective=objective, texts=3)
    if rank:  # of two processes
        feeder = replace(feeder, place=DistEnv(rank=rank, count=2))
    for number in range(6):
        seen, made = feeder.glimpses(number, WINDOW), feeder.prepare(number).samples
        for one, other in zip(seen, made, strict=True):
            assert (one.shape, one.timestep, one.as_base) == (
                other.shape,
                other.timestep,
                other.as_base,
            )
            assert one.conditioning.keys() == {"text"}
            assert torch.equal(one.conditioning["text"], other.conditioning["text"])


def test_windows_begin_where_a_run_does_and_at_multiples_of_their_length() -> None:
    feeder = replace(build_feeder(), window=WINDOW)
    with feeder.stream(4, 11, ahead=2) as batches:
        lengths = {batch.step: len(batch.window) for batch in batches}
    assert lengths == {4: 2, 5: 0, 6: 3, 7: 0, 8: 0, 9: 2, 10: 0}


def test_without_a_window_nothing_is_told() -> None:
    with build_feeder().stream(0, 2, ahead=1) as batches:
        assert [batch.window for batch in batches] == [(), ()]


@pytest.mark.parametrize("cap", [1, 3])
def test_glimpses_are_grouped_as_the_samples_are(cap: int) -> None:
    feeder = build_feeder(batch_size=7)
    seen, made = feeder.glimpses(0, WINDOW), feeder.prepare(0).samples
    levels = [
        [[each.timestep for each in group] for group in groups(samples, cap=cap)]
        for samples in (seen, made)
    ]
    assert levels[0] == levels[1]

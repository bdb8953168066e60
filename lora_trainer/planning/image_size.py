"""The size of the images where nobody has set it: the largest that fits and ends within the priority's hours.

Input is a plan's input and what gives the hours of such a run; output the side in pixels with its reason. The sizes
to choose from are the base's own and the smaller ones that its family trains well at (`NetworkTraits.sides`).
Compared are runs of as many images as the hours are meant for, on an idle machine, so the size depends on the GPU,
the base and the settings and not on the dataset or on what else is running.
"""

from __future__ import annotations

from collections.abc import Callable

from lora_trainer.common.errors import MachineError
from lora_trainer.families.base.facts import BaseFacts
from lora_trainer.families.base.family import Family
from lora_trainer.planning.plan_input import PlanInput
from lora_trainer.planning.run_time import MOST_HOURS

SIDE = "data.resolution"
# The images that `MOST_HOURS` are meant for.
IMAGES = 20
HELD_OUT = 2


def with_image_size(inputs: PlanInput, hours_of: Callable[[PlanInput], float]) -> PlanInput:
    """Return the input with the size that suits it, unchanged where the size is set or the base has only its own.

    `hours_of` gives the hours of a run on an idle machine; raises as it does where no size fits.
    """
    sides = _sides_px(inputs)
    if len(sides) < 2:
        return inputs
    priority = inputs.resolved.priority
    most_hours, passed_over = MOST_HOURS[priority], list[str]()
    fastest: tuple[float, int] | None = None
    for side_px in sides:
        try:
            hours = hours_of(_typical(_at(inputs, side_px)))
        except MachineError:
            if side_px == sides[-1] and fastest is None:
                raise
            passed_over.append(f"{side_px} px does not fit")
            continue
        if fastest is None or hours < fastest[0]:
            fastest = (hours, side_px)
        if hours <= most_hours:
            if not passed_over:
                return inputs  # the base's own size
            within = f"{hours:.1f} of {priority}'s {most_hours:g} hours with {IMAGES} images"
            return _at(inputs, side_px, f"{within}; {', '.join(passed_over)}")
        passed_over.append(f"{side_px} px would take {hours:.1f}")
    assert fastest is not None
    hours, side_px = fastest
    over = f"{hours:.1f} hours with {IMAGES} images, {priority} is meant for {most_hours:g}"
    others = (each for each in passed_over if not each.startswith(f"{side_px} px"))
    return _at(inputs, side_px, "; ".join((over, *others)))


def _sides_px(inputs: PlanInput) -> tuple[int, ...]:
    """Return the sizes to choose from, the largest first; one where there is nothing to choose."""
    facts, config = inputs.facts, inputs.resolved.config
    is_open = config.data.resolution == "auto" and SIDE not in inputs.decided
    has_gpu = inputs.hardware.accelerator(sharing=inputs.sharing)[0] is not None
    if not is_open or not has_gpu or config.hardware.device == "cpu" or inputs.kept_at_once:
        return (facts.resolution_px,)
    return (facts.resolution_px, *smaller_sides(facts, inputs.family))


def smaller_sides(facts: BaseFacts, family: Family) -> tuple[int, ...]:
    """Return the sizes below the base's own at which it may be trained, the largest first."""
    sides = (int(facts.resolution_px * share) for share in family.traits.sides)
    return tuple(side_px for side_px in sides if side_px and side_px % facts.bucket_step_px == 0)


def _at(inputs: PlanInput, side_px: int, reason: str = "") -> PlanInput:
    return inputs.changed(
        decided={**inputs.decided, SIDE: (side_px, reason)},
        buckets=inputs.buckets_by_side.get(side_px, inputs.buckets),
    )


def _typical(inputs: PlanInput) -> PlanInput:
    """Return the input of a run of `IMAGES` plain images on this machine."""
    return inputs.changed(
        images=IMAGES,
        samples_per_epoch=IMAGES,
        fewest_repeats=1,
        regularisation_per_epoch=0,
        latents=IMAGES,
        texts=IMAGES,
        held_out_count=HELD_OUT,
        past_runs=(),
    )

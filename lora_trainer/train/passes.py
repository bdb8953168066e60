"""One pass of a step: the forward and backward pass over the images that are done at once.

As it is, with compiled blocks, or replayed from a recording: the gradients and the loss are the same but
for rounding. What fails on the way is given up, said once, and done without.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from lora_trainer.data.batches import Prepared, Stacked
from lora_trainer.train.graphed import NotRecorded
from lora_trainer.train.speedups import COMPILE, GRAPHS
from lora_trainer.train.training import Training


def add_pass(training: Training, samples: Sequence[Prepared]) -> Tensor:
    """Add the gradients of samples of one shape; return their share of the step's loss, detached.

    The host waits for nothing. Raises CompilationFailed, before which some gradients may have been added.
    """
    given, graphs = training.model.stacked(samples), training.speedups.graphs
    run = partial(_pass, training)
    _tell_unplanned(training, given)
    if graphs is None:
        return run(given.on(training.model.device))
    try:
        return graphs.run(given, run)
    except NotRecorded as error:
        reason = str(error)
    give_up_graphs(training, reason=reason)
    return run(given.on(training.model.device))


def _pass(training: Training, given: Stacked) -> Tensor:
    model = training.model
    with training.speedups.compilation(given):
        batch = given.micro_batch(dtype=model.precision)
        with model.passing(batch):
            loss = (model.losses_of(batch) * batch.weights).sum() / training.batch_size
            training.scaler.scale(loss).backward()
    return loss.detach()


def _tell_unplanned(training: Training, given: Stacked) -> None:
    """Say once that there are shapes without a compiled graph or a recording of their own."""
    speedups, (height, width, images) = training.speedups, given.latents_shape
    for key in speedups.newly_unplanned(given):
        training.events.problem(
            f"latents of {width}x{height}, {images} at once, are none of the shapes that {key} is "
            "planned for: they and others like them are computed as without",
            fix="nothing; fewer buckets or a lower memory.micro_batch make fewer shapes",
            severity="note",
        )


def give_up_compiling(training: Training, *, reason: str) -> None:
    """Run the blocks as they are from now on, and say so; recordings of compiled blocks go too."""
    training.speedups.give_up_compiling()
    graphs = training.speedups.graphs
    if graphs is not None:
        graphs.release()
    _tell(training, COMPILE, old="blocks", new="none", what="compiled blocks", reason=reason)


def give_up_graphs(training: Training, *, reason: str) -> None:
    """Start kernels one by one from now on, and say so."""
    training.speedups.give_up_graphs()
    _tell(training, GRAPHS, old=True, new=False, what="CUDA graphs", reason=reason)


def _tell(
    training: Training, key: str, *, old: object, new: object, what: str, reason: str
) -> None:
    training.events.emit("change", key=key, old=old, new=new, reason=reason)
    training.events.problem(
        f"the run goes on without {what}, which change its speed only: {reason}",
        fix=f"nothing; --set {key}={str(new).lower()} does not try them",
        severity="note",
    )

"""One forward and one backward pass over a micro-batch, the images that go through the network together.

The pass runs eagerly, with compiled blocks, or as the replay of a recorded CUDA graph; gradients and loss
differ by rounding only. A speed-up that fails is reported once and switched off for the rest of the run.
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

    The host never waits for the device. Raises CompilationFailed; some gradients may have been added by
    then, so the caller zeroes them and repeats the step.
    """
    stacked, graphs = training.model.stacked(samples), training.speedups.graphs
    run = partial(_pass, training)
    _tell_unplanned(training, stacked)
    if graphs is None:
        return run(stacked.on(training.model.device))
    try:
        return graphs.run(stacked, run)
    except NotRecorded as error:
        reason = str(error)
    # Outside the except block, whose traceback would keep the failed recording's tensors alive.
    give_up_graphs(training, reason=reason)
    return run(stacked.on(training.model.device))


def _pass(training: Training, stacked: Stacked) -> Tensor:
    model = training.model
    with training.speedups.compilation(stacked):
        batch = stacked.micro_batch(dtype=model.precision)
        # The masks and modulation outputs stay set during `backward`: checkpointing runs the forward
        # pass again there and has to meet the same ones.
        with model.passing(batch):
            # Divided by the whole step's images, not by this micro-batch's: the sum over all passes and
            # processes is then the batch mean, and splitting a step differently changes rounding only.
            loss = (model.losses_of(batch) * batch.weights).sum() / training.batch_size
            training.scaler.scale(loss).backward()
    return loss.detach()


def _tell_unplanned(training: Training, stacked: Stacked) -> None:
    """Emit a note, once per setting, when samples of an unplanned shape run without that speed-up."""
    speedups, (height, width, images) = training.speedups, stacked.latents_shape
    for key in speedups.newly_unplanned(stacked):
        training.events.problem(
            f"{key} is not used for {images} latents of {width}x{height} at once and for other shapes "
            "that the plan did not include",
            fix="nothing; with fewer buckets or a lower memory.micro_batch there are fewer shapes",
            severity="note",
        )


def give_up_compiling(training: Training, *, reason: str) -> None:
    """Run the blocks uncompiled from now on, report it, and drop recordings that contain compiled blocks."""
    training.speedups.give_up_compiling()
    graphs = training.speedups.graphs
    if graphs is not None:
        graphs.release()
    _tell(training, COMPILE, old="blocks", new="none", what="compiled blocks", reason=reason)


def give_up_graphs(training: Training, *, reason: str) -> None:
    """Launch kernels one by one instead of by CUDA graph from now on, and report it."""
    training.speedups.give_up_graphs()
    _tell(training, GRAPHS, old=True, new=False, what="CUDA graphs", reason=reason)


def _tell(
    training: Training, key: str, *, old: object, new: object, what: str, reason: str
) -> None:
    training.events.emit("change", key=key, old=old, new=new, reason=reason)
    training.events.problem(
        f"the run continues without {what}, which affect only its speed: {reason}",
        fix=f"nothing; start with --set {key}={str(new).lower()} to skip the attempt",
        severity="note",
    )

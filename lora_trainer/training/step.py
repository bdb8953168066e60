"""The two halves of an optimizer step: accumulate the gradients, then clip them and update the weights.

The first half, `compute_gradients_with_oom_retry`, runs one forward and one backward pass per micro-batch, the
images that go through the network together: eagerly, with compiled blocks, or as the replay of a recorded
CUDA graph. Gradients and loss differ by rounding only. It may be repeated: it changes no weight, and the
samples already hold their random draws. A step that runs out of memory is repeated with the next fallback, a
first step that fails for another reason is repeated on the plain way (plain_retry.py).

The second half may not be repeated: an optimizer that runs out of memory has updated some weights only, so
it raises PartialOptimizerStep and the loop goes back to the last good state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import first_line
from lora_trainer.network.compiling import CompilationFailed
from lora_trainer.network.out_of_memory import free_memory, is_out_of_memory
from lora_trainer.training.batch import Batch, Sample, split
from lora_trainer.training.graphed import COMPILE, GRAPHS, NotRecorded
from lora_trainer.training.guards import GuardState, after_fitting, after_out_of_memory
from lora_trainer.training.plain_retry import go_plainly, why_again
from lora_trainer.training.training import PartialOptimizerStep, Training


def compute_gradients_with_oom_retry(
    training: Training, samples: Sequence[Sample], guard: GuardState
) -> tuple[Tensor, GuardState]:
    """Accumulate the gradients of (1/B) sum of weight_i loss_i, with one fallback after another until it fits.

    Return the loss of this process's samples, detached on the device, and the guard state. The whole
    step is repeated, from zeroed gradients, after out of memory, after compiled code or a recording has
    failed (then without it), and after another error in a first pass (then on the plain way).
    """
    model = training.model
    # Dropout masks are one per sample of the batch, so the denoiser must then see a batch in one piece.
    group_key = model.batch_group_key if model.masks is not None else lambda _: 0
    while True:
        # A step is recorded or not, compiled or not: what has failed before is switched off by now.
        run_pass = training.speedups.recorded(partial(forward_backward, training))
        micro_batches = split(
            samples,
            cap=guard.micro_batch,
            images_at_once=training.images_at_once,
            group_key=group_key,
        )
        # A pass may fail where a pass of another shape, size or fallback has worked.
        training.plain.tried = frozenset(
            (*micro_batch[0].shape, len(micro_batch), guard.remedies, guard.plain)
            for micro_batch in micro_batches
        )
        failed: Literal["compiled", "recorded", "memory", "first pass"]
        try:
            # Summed on the device: reading a loss here would make the host wait for its pass.
            loss = torch.zeros((), device=model.device)
            for micro_batch in micro_batches:
                batch = model.collate(micro_batch)
                _tell_unplanned(training, batch)
                loss += run_pass(batch)
        except CompilationFailed as error:
            reason, failed = str(error), "compiled"
        except NotRecorded as error:
            reason, failed = str(error), "recorded"
        except Exception as error:  # noqa: BLE001 - raised again by `why_again` where no other way is left
            if isinstance(error, RuntimeError) and is_out_of_memory(error):
                reason, failed = first_line(error), "memory"
            else:
                firsts = training.plain.tried
                reason, failed = why_again(training, guard, error, firsts=firsts), "first pass"
        else:
            return loss, _with_given_up(training, _grown(training, guard))
        # Outside the except block, whose traceback would keep alive the tensors that have to be freed.
        match failed:
            case "compiled":
                give_up_compiling(training, reason=reason)
            case "recorded":
                give_up_graphs(training, reason=reason)
            case "first pass":
                guard = go_plainly(training, guard, reason=reason)
            case "memory":
                images = max(map(len, micro_batches))
                guard = apply_next_fallback(training, guard, images=images, reason=reason)
        # Passes before the failed one have added their gradients already.
        training.optimizer.zero_grad(set_to_none=True)


def forward_backward(training: Training, batch: Batch) -> Tensor:
    """Add the gradients of a batch; return its share of the step's loss, detached, on the device.

    The host never waits for the device. Raises CompilationFailed; some gradients may have been added by
    then, so the caller zeroes them and repeats the step.
    """
    model = training.model
    # Nothing to copy inside a recording, whose inputs are on the device already.
    batch = batch.on(model.device)
    # The masks stay set during `backward`: checkpointing runs the forward pass again there and has to
    # meet the same ones.
    with training.speedups.compilation(batch), model.dropping(batch):
        # Divided by the whole step's images, not by this micro-batch's: the sum over all passes and
        # processes is then the batch mean, and splitting a step differently changes rounding only.
        loss = (model.losses_of(batch) * batch.weights).sum() / training.batch_size
        # fp16 gradients would vanish without the scale; for other dtypes the scaler does nothing.
        training.scaler.scale(loss).backward()
    return loss.detach()


def apply_next_fallback(
    training: Training, guard: GuardState, *, images: int, reason: str
) -> GuardState:
    """Apply the next remedy after a pass of `images` did not fit; raises TrainingStopped without one."""
    training.events.emit("out_of_memory", images_at_once=images, reason=reason)
    recorded = training.speedups.keeps_gradients
    # Recordings own memory that the allocator cannot use for anything else. Freeing it costs speed only,
    # so it comes before every remedy, and the step is tried again before one is applied.
    if recorded:
        give_up_graphs(training, reason=reason)
    training.optimizer.zero_grad(set_to_none=True)
    free_memory()
    if recorded:
        return _with_given_up(training, guard)
    remedies = training.remedies_of(guard)
    smaller = after_out_of_memory(guard, images=images, remedies=len(remedies))
    if smaller.remedies > guard.remedies and training.speedups.graphs is not None:
        # A remedy may move weights to host memory, and a copy from there cannot be part of a recording.
        # No pass has been recorded so far, so there is no memory to free first.
        give_up_graphs(training, reason=reason)
        smaller = _with_given_up(training, smaller)
    for remedy in remedies[guard.remedies : smaller.remedies]:
        remedy.apply()
        training.events.emit(
            "change", key=remedy.key, old=remedy.old, new=remedy.new, reason=reason
        )
    _tell_micro_batch(training, guard, smaller, reason=reason)
    return smaller


def _with_given_up(training: Training, guard: GuardState) -> GuardState:
    """Return `guard` with the speed-ups that failed, so that a resumed run does not try them again."""
    uncompiled, ungraphed = training.speedups.uncompiled, training.speedups.ungraphed
    if uncompiled <= guard.uncompiled and ungraphed <= guard.ungraphed:
        return guard
    return replace(
        guard,
        uncompiled=guard.uncompiled or uncompiled,
        ungraphed=guard.ungraphed or ungraphed,
    )


def _grown(training: Training, guard: GuardState) -> GuardState:
    """Count a step that fitted; after enough of them the next step may use a larger micro-batch again."""
    larger = after_fitting(guard, planned=training.micro_batch)
    reason = f"{guard.patience_steps} steps in a row fitted"
    _tell_micro_batch(training, guard, larger, reason=reason)
    return larger


def _tell_micro_batch(training: Training, old: GuardState, new: GuardState, *, reason: str) -> None:
    if new.micro_batch != old.micro_batch:
        training.events.emit(
            "change",
            key="memory.micro_batch",
            old=old.micro_batch,
            new=new.micro_batch,
            reason=reason,
        )


def _tell_unplanned(training: Training, batch: Batch) -> None:
    """Emit a note, once per setting, when samples of an unplanned shape run without that speed-up."""
    speedups, (height, width, images) = training.speedups, batch.latents_shape
    for key in speedups.newly_unplanned(batch):
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


def optimizer_step(training: Training, loss: Tensor, guard: GuardState, *, step: int) -> Tensor:
    """Update the weights and run `afterwards`; `step` counts from 1. Return the norm of the gradients.

    The norm is taken before clipping and stays on the device. Raises PartialOptimizerStep if the device runs out of
    memory.
    """
    try:
        norm = _clip_and_step(training, loss, clip_scale=guard.clip_scale)
        for change in training.afterwards:
            change(step)
        training.plain.proven |= training.plain.tried
        return norm
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PartialOptimizerStep(guard, reason=first_line(error)) from None


def _clip_and_step(training: Training, loss: Tensor, *, clip_scale: float) -> Tensor:
    """Clip and step unless loss or gradients are not finite; return the norm before clipping.

    There are three ways to skip a step: the fp16 scaler does it by itself; a fused optimizer masks its
    update on the device when `found_inf` is 1; for the others the host has to read the norm, and waits.
    """
    optimizer, scaler = training.optimizer, training.scaler
    scaler.unscale_(optimizer)  # clipping and the reported norm are of the true gradients
    limit = training.max_grad_norm * clip_scale or float("inf")
    norm = nn.utils.clip_grad_norm_(training.parameters, limit, foreach=True)
    # One number then says whether the step counts: gradients may be finite although the loss is not.
    norm = torch.where(loss.isfinite(), norm, loss)
    if scaler.is_enabled():
        scaler.step(optimizer)
        scaler.update()
    elif getattr(optimizer, "_step_supports_amp_scaling", False):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        optimizer.step()
    elif bool(norm.isfinite()):
        optimizer.step()
    # A recorded graph adds to gradients at fixed addresses, so they are zeroed; else they are freed.
    optimizer.zero_grad(set_to_none=not training.speedups.keeps_gradients)
    return norm.detach()

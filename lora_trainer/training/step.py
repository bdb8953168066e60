"""The two halves of an optimizer step: accumulate the gradients, then clip them and update the weights.

The first half, `compute_gradients_with_oom_retry`, runs one forward and one backward pass per micro-batch, the
images that go through the network together, with compiled blocks or without, which changes rounding only. It
may be repeated: it changes no weight, and the samples already hold their random draws. A step that fails is
repeated as fallbacks.py says.

The second half may not be repeated: an optimizer that runs out of memory has updated some weights only, so
it raises PartialOptimizerStep and the loop goes back to the last good state.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from lora_trainer.common.errors import first_line
from lora_trainer.network.out_of_memory import is_out_of_memory
from lora_trainer.training.batch import Batch, Sample, split
from lora_trainer.training.fallbacks import count_fitting, fallback_for, tell_unplanned
from lora_trainer.training.guards import GuardState
from lora_trainer.training.training import PartialOptimizerStep, Training


def compute_gradients_with_oom_retry(
    training: Training, samples: Sequence[Sample], guard: GuardState
) -> tuple[Tensor, GuardState]:
    """Accumulate the gradients of (1/B) sum of weight_i loss_i, with one fallback after another until it fits.

    Return the loss of this process's samples, detached on the device, and the guard state. The whole
    step is repeated, from zeroed gradients, after out of memory, after compiled code has failed (then without
    it), and after another error in a first pass (then on the plain way). Raises NoFallbackLeft.
    """
    model = training.model
    # Dropout masks are one per sample of the batch, so the denoiser must then see a batch in one piece.
    group_key = model.batch_group_key if model.masks is not None else lambda _: 0
    while True:
        micro_batches = split(
            samples,
            cap=guard.micro_batch,
            images_at_once=training.images_at_once,
            group_key=group_key,
        )
        # A pass may fail where a pass of another shape, size or fallback has worked.
        passes = training.plain.tried = frozenset(
            (*micro_batch[0].shape, len(micro_batch), guard.remedies, guard.plain)
            for micro_batch in micro_batches
        )
        try:
            # Summed on the device: reading a loss here would make the host wait for its pass.
            loss = torch.zeros((), device=model.device)
            for micro_batch in micro_batches:
                batch = model.collate(micro_batch)
                tell_unplanned(training, batch)
                loss += forward_backward(training, batch)
        except Exception as error:  # noqa: BLE001 - raised again where there is no fallback
            images = max(map(len, micro_batches))
            fall_back = fallback_for(training, guard, error, firsts=passes, images=images)
        else:
            return loss, count_fitting(training, guard)
        # Outside the except block, whose traceback would keep alive the tensors that have to be freed.
        guard = fall_back()
        # Passes before the failed one have added their gradients already.
        training.optimizer.zero_grad(set_to_none=True)


def forward_backward(training: Training, batch: Batch) -> Tensor:
    """Add the gradients of a batch; return its share of the step's loss, detached, on the device.

    The host never waits for the device. Raises CompilationFailed; some gradients may have been added by
    then, so the caller zeroes them and repeats the step.
    """
    model = training.model
    batch = batch.on(model.device)
    # The masks stay set during `backward`: checkpointing runs the forward pass again there and has to
    # meet the same ones.
    with training.compilation(batch), model.dropping(batch):
        # Divided by the whole step's images, not by this micro-batch's: the sum over all passes and
        # processes is then the batch mean, and splitting a step differently changes rounding only.
        _, _, weights, _ = batch.numbers
        loss: Tensor = (model.losses_of(batch) * weights).sum() / training.batch_size
        # fp16 gradients would vanish without the scale; for other dtypes the scaler does nothing.
        training.scaler.scale(loss).backward()
    return loss.detach()


def optimizer_step(training: Training, loss: Tensor, guard: GuardState, *, step: int) -> Tensor:
    """Update the weights and run `afterwards`; `step` counts from 1. Return the norm of the gradients.

    The norm is taken before clipping and stays on the device. Raises PartialOptimizerStep if the device runs out of
    memory.
    """
    try:
        norm = _clip_and_step(training, loss)
        for change in training.afterwards:
            change(step)
        training.plain.proven |= training.plain.tried
        return norm
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        raise PartialOptimizerStep(guard, reason=first_line(error)) from None


def _clip_and_step(training: Training, loss: Tensor) -> Tensor:
    """Clip and step unless loss or gradients are not finite; return the norm before clipping.

    There are three ways to skip a step: the fp16 scaler does it by itself; a fused optimizer masks its
    update on the device when `found_inf` is 1; for the others the host has to read the norm, and waits.
    """
    optimizer, scaler = training.optimizer, training.scaler
    if scaler.is_enabled():
        # It looks at gradients alone, and these may be finite although the loss is not.
        gradient = next((p.grad for p in training.parameters if p.grad is not None), None)
        if gradient is None:  # a scaler refuses a step without gradients; the guards count it
            return torch.where(loss.isfinite(), 0.0, loss)
        gradient.add_(torch.where(loss.isfinite(), 0.0, torch.nan))
    scaler.unscale_(optimizer)  # clipping and the reported norm are of the true gradients
    limit = training.max_grad_norm or float("inf")
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
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()

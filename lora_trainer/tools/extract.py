"""`extract`: the difference of two base models of one family as a LoRA.

Input are two diffusers folders or checkpoints, output the best LoRA of a rank, or of the rank that an
energy needs, of every layer that differs. Two weights are in memory at a time. The part that a
LoRA does not reach (norms, biases, embeddings) is measured and said.
"""

from __future__ import annotations

import math
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from lora_trainer import __version__
from lora_trainer.common.errors import InputError
from lora_trainer.common.wording import public_source, public_text
from lora_trainer.config.declare import Targets
from lora_trainer.config.inputs import BaseSettings
from lora_trainer.families.base.layout import DENOISER
from lora_trainer.families.files.locate import describe
from lora_trainer.lora.low_rank import approximated
from lora_trainer.lora.tensors import split_key
from lora_trainer.lora_file.base_layers import sized
from lora_trainer.lora_file.metadata import SETTINGS_ENTRY, made_for
from lora_trainer.tools.adapters import AdapterTarget, ToolResult
from lora_trainer.tools.base_weights import WEIGHT, BaseWeights, WeightLocation, open_base
from lora_trainer.tools.merge import RankCutter, RankLimits, percent


def extract(
    tuned: str,
    base: str,
    target: AdapterTarget,
    *,
    rank: int | None = None,
    energy: float | None = None,
    targets: Targets = "all",
) -> ToolResult:
    """Write `tuned` minus `base` as a LoRA: of `rank`, or of the rank that `energy` needs, at most `rank` if both.

    Raises RequestError for limits that are none, InputError for models that are equal, quantised, of
    different families or sizes, and MachineError when the disk refuses; nothing is written then.
    """
    limits = RankLimits(rank=rank, energy=energy)
    limits.check("--rank or --energy")
    target.check()
    with ExitStack() as stack:
        first, second = (stack.enter_context(open_base(source)) for source in (tuned, base))
        if first.family is not second.family:
            raise InputError(
                f"{tuned} is of family {first.family.name}, {base} of {second.family.name}",
                fix="give two models of one family",
            )
        layers = _layers(first, second, targets)
        cutter = RankCutter(limits=limits)
        for key in layers:
            _cut(key, _difference(key, first.places[key], second.places[key]), cutter)
        # Beside them, the energy of the difference in all other tensors.
        reached = {f"{key}{WEIGHT}" for key in layers}
        others = (
            _difference(key, first.tensors[key], second.tensors[key])
            for key in first.tensors.keys() & second.tensors.keys() - reached
        )
        unreached = math.fsum(
            float(torch.linalg.vector_norm(each, dtype=torch.float64)) ** 2 for each in others
        )
        if not cutter.cuts:
            raise InputError(
                f"{tuned} and {base} are the same in every layer that a LoRA changes",
                fix="give a model that was fine-tuned, and the one it started from",
            )
        written = target.write(
            cutter.modules,
            family=second.family,
            layers=second.names().layers[DENOISER],
            default="fp16",
            entries=_entries(tuned, base, second, title=public_text(target.path.stem)),
        )
        has_text = ({split_key(key)[0] for key in each.places} for each in (first, second))
    share = unreached / (unreached + cutter.reached)
    return written.with_more(
        f"rank {cutter.ranks()}",
        cutter.text("these layers' energy"),
        f"{percent(share)} of the whole difference is out of reach: other layers, norms, biases, "
        "embeddings",
        notes=[
            f"{component} was not compared: only one of the models has it"
            for component in sorted(set.symmetric_difference(*has_text))
        ],
        cuts=cutter.cuts,
        energy=cutter.energy,
        unreached=share,
    )


def _entries(tuned: str, base: str, opened: BaseWeights, *, title: str) -> dict[str, str]:
    """Return the header entries of the difference between two base models; `opened` is the second."""
    names = opened.family.adapter_names(describe(BaseSettings(model=opened.source)))
    source = public_source(base)
    return {
        "ss_base_model_version": names.kohya,
        "ss_sd_model_name": source,
        "ss_output_name": title,
        "modelspec.sai_model_spec": "1.0.1",
        "modelspec.architecture": names.modelspec,
        "modelspec.implementation": "diffusers",
        "modelspec.title": title,
        "modelspec.description": f"{public_source(tuned)} minus {source}",
        "lora_train.version": __version__,
        SETTINGS_ENTRY: made_for(source),
    }


def _cut(key: str, difference: Tensor, cutter: RankCutter) -> None:
    """Cut the update of one layer; in a function of its own, so that its tensors are gone before the next's."""
    if difference.any():
        limits = cutter.limits
        # The best update of a rank is the first singular values (Eckart and Young 1936); of large layers they
        # are computed by subspace iteration, as many as the limits need.
        decomposed = approximated(difference, enough=limits.rank_of, limit=limits.rank, seed=key)
        cutter.cut(key, decomposed, old_rank=min(difference.flatten(1).shape))


def _layers(tuned: BaseWeights, base: BaseWeights, targets: Targets) -> list[str]:
    """Return the layers that a LoRA of these targets changes, as "component.module".

    Text encoders are compared as far as both bases have them. Raises InputError for denoisers that
    have other layers than each other.
    """
    names, others = (
        {split_key(key)[1] for key in each.places if split_key(key)[0] == DENOISER}
        for each in (base, tuned)
    )
    for has, lacks, only in ((tuned, base, others - names), (base, tuned, names - others)):
        if only:
            raise InputError(
                f"{has.source} has {len(only)} layers that {lacks.source} lacks, first "
                f"{DENOISER}.{min(only)}",
                fix="give two models of one architecture; a pruned or distilled one has fewer layers",
            )
    # A network with layers of these names, and nothing in them but the number of its blocks: a file that was
    # pruned has other layers than any release.
    root = nn.Module()
    for name in sorted(names):
        *path, last = name.split(".")
        parent = root
        for part in path:
            if part not in parent._modules:
                parent.add_module(part, nn.Module())
            parent = parent.get_submodule(part)
        parent.add_module(last, nn.Linear(1, 1, device="meta"))
    blocks = root._modules.get("transformer_blocks") or nn.Module()
    root.config = {"num_layers": len(list(blocks.children()))}  # type: ignore[assignment]
    keys = [f"{DENOISER}.{name}" for name in base.family.lora_targets(root, targets)]
    for component, modules in base.family.text.layers.items():
        keys += [f"{component}.{name}" for name in modules]
    return [key for key in keys if key in base.places and key in tuned.places]


def _difference(key: str, tuned: WeightLocation, base: WeightLocation) -> Tensor:
    """Return tuned minus base, float32 in the shape of `base`.

    Where their dtypes differ, the finer one is rounded to the coarser first, so that layers which were
    never trained are equal and no noise of rounding is taken for a change. Raises InputError for other sizes.
    """
    shape, tuned_shape = base.shape, tuned.shape
    if (tuned_shape[:1], math.prod(tuned_shape)) != (shape[:1], math.prod(shape)):
        raise InputError(
            f"{key} is {sized(tuned_shape) or 'a number'} in one model and {sized(shape) or 'a number'} in the other",
            fix="give two models of one architecture",
        )
    first, second = tuned.weight(), base.weight()
    dtype = max(first.dtype, second.dtype, key=lambda each: torch.finfo(each).eps)
    difference: Tensor = first.to(dtype).float().reshape(shape) - second.to(dtype).float()
    return difference

"""Whether ComfyUI makes the same of others' files and of what `convert` writes for them.

`python -m scripts.readers.converted --checkout DIR --commit SHA [--family NAME]` builds every file of the corpus
in tests/lora_files with two layers of each part in the releases' sizes, converts it into every format and
compares, for a layer of each kind, the update that ComfyUI's own code makes of both files, and the one by
the formula of the kind. Relative differences in Frobenius norm, in float64 of fp32 files.
"""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from lora_trainer import families
from lora_trainer.common.errors import LoraTrainError
from lora_trainer.tools.convert import convert
from scripts.readers.cases import TOLERANCE, arguments
from scripts.readers.comfyui import CLASSES, TEXTS, UNUSED, model_of
from scripts.readers.networks import base_of
from scripts.readers.stand_ins import stand_in
from scripts.readers.trees import Tree, clip_name
from tests.lora_files.files import Expected, build, some
from tests.lora_files.trainers import CASES, Case

SIZES: Mapping[str, Mapping[str, int]] = {
    "flux": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072},
    "chroma": {"depth": 19, "depth_single_blocks": 38, "hidden_size": 3072},
    "flux2": {"depth": 8, "depth_single_blocks": 48, "hidden_size": 3072},
    "sd3": {"depth": 24},
    "zimage": {"n_layers": 30, "n_refiner_layers": 2, "dim": 3840},
}
"""What ComfyUI's tables of names go by, as in the releases."""
LAYERS = 32
"""Of the largest CLIP."""


class Names:
    """ComfyUI's own table of what keys of files mean for one family."""

    def __init__(self, family: str) -> None:
        import comfy.lora

        logging.getLogger().setLevel(logging.WARNING)
        base = base_of(family)
        model = model_of(base)
        model.model_config.unet_config.update(SIZES.get(family, {}))
        self.family = family
        self.table: dict[str, Any] = comfy.lora.model_lora_keys_unet(model, {})
        self.rows: Counter[str] = Counter()
        for target in self.table.values():
            if isinstance(target, tuple):
                name, (_, start, length) = target[:2]
                self.rows[name] = max(self.rows[name], start + length)
        clip = Tree()
        for component, network in base.texts.items():
            prefix = f"{TEXTS[family][component]}.transformer."
            for name, tensor in network.named_parameters():
                for number in range(LAYERS) if ".layers.0." in name else (0,):
                    deeper = clip_name(name.replace(".layers.0.", f".layers.{number}."))
                    clip.hold({prefix + deeper: tensor[:0]})
        if base.texts:
            comfy.lora.model_lora_keys_clip(clip, self.table)

    def target(self, key: str) -> Any:
        """Return ComfyUI's weight of "denoiser.layer", with its rows where it holds joined ones."""
        component, _, layer = key.partition(".")
        if component != "denoiser":
            number = ("2" if component.endswith("_2") else "1") if self.family == "sdxl" else ""
            return self.table.get(f"lora_te{number}_{clip_name(layer).replace('.', '_')}")
        prefix = "lora_unet_" if self.family in TEXTS else "transformer."
        spelling = layer.replace(".", "_") if prefix == "lora_unet_" else layer
        return self.table.get(prefix + spelling)


def changes(file: Path, names: Names, expected: Mapping[str, Expected]) -> dict[str, Tensor] | str:
    """Return by layer the update [out, in, ...] that ComfyUI makes, or what it does not read."""
    import comfy.lora
    import comfy.lora_convert

    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        tensors = {key: tensor.double() for key, tensor in load_file(file).items()}
        loaded = comfy.lora.load_lora(comfy.lora_convert.convert_lora(tensors), names.table)
        result = {}
        for key, each in expected.items():
            target = names.target(key)
            if target is None:
                return "no such layer in its table"
            name, rows = target if isinstance(target, str) else target[0], None
            if not isinstance(target, str):
                rows = slice(target[1][1], target[1][1] + target[1][2])
            result[key] = _change(loaded, name, rows, each, names.rows[name])
    finally:
        logging.getLogger().removeHandler(handler)
    unread = [message for message in messages if "not loaded" in message or "ERROR" in message]
    return unread[0][:110] if unread else result


def _change(
    loaded: Mapping[Any, Any], name: str, rows: slice | None, each: Expected, total: int
) -> Tensor:
    import comfy.lora

    whole = torch.zeros(total if rows is not None else each.layer.out, *each.layer.inputs)
    if each.layer.out == len(whole) or rows is None:
        whole = each.base_weight
    else:
        whole[rows] = each.base_weight[each.rows]
    weight = whole.double()
    for target, adapter in loaded.items():
        if target == name or (isinstance(target, tuple) and target[0] == name):
            offset = target[1] if isinstance(target, tuple) else None
            patch = (1.0, adapter, 1.0, offset, None)
            weight = comfy.lora.calculate_weight([patch], weight.clone(), name, torch.float64)
    change = weight - whole.double()
    if rows is not None:
        return change[rows]
    return change if len(change) == each.rows.stop - each.rows.start else change[each.rows]


def outcome(case: Case, names: Names, folder: Path) -> str:
    """Return what became of one file in all formats, in words."""
    file, output = folder / "a.safetensors", folder / "b.safetensors"
    expected = some(build(case, file, most=2), most=3)
    original = changes(file, names, expected)
    words = [f"original {_compared(original, _formula(expected))}"]
    for format in families.family(case.family).file_formats:
        try:
            convert(file, format=format, output=output, precision="fp32", force=True)
        except LoraTrainError:
            words.append(f"{format} refused")
            continue
        read = changes(output, names, expected)
        against = _formula(expected) if isinstance(original, str) else original
        beside = "formula" if isinstance(original, str) else "original"
        words.append(f"{format} to {beside} {_compared(read, against)}")
    return "; ".join(words)


def _formula(expected: Mapping[str, Expected]) -> dict[str, Tensor]:
    return {key: each.delta for key, each in expected.items()}


def _compared(read: dict[str, Tensor] | str, wanted: Mapping[str, Tensor]) -> str:
    if isinstance(read, str):
        return f"UNREAD ({read})"
    worst = max(
        float((read[key].reshape(each.shape) - each).norm() / each.norm())
        for key, each in wanted.items()
    )
    return f"{'equal' if worst <= TOLERANCE else 'OFF'} {worst:.0e}"


def main() -> None:
    """Print a line for every file."""
    options = arguments(__doc__ or "")
    stand_in(*UNUSED)
    sys.path.insert(0, str(options.checkout))
    sys.argv = [sys.argv[0], "--cpu"]
    import comfy.options

    comfy.options.enable_args_parsing()
    print(f"ComfyUI at {options.commit}")
    for family in options.family or CLASSES:
        names = Names(family)
        for case in CASES:
            if case.family == family and not case.refused:
                with TemporaryDirectory() as folder:
                    print(f"{case.name}: {outcome(case, names, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()
